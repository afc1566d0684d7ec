"""Instant power of all GPUs some ten times a second: one thread with monotonic deadlines, field 186.

A call that hangs is left behind with its thread, one for each GPU at most, and the others go on in a new thread. The
readings wait here until the core tick takes them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

from agent.clock import stopwatch
from agent.samplers import nvml_binding as nvml
from agent.samplers.nvml_calls import NOT_OFFERED
from agent.samplers.nvml_fields import POWER_INSTANT
from agent.samplers.nvml_health import MAX_MILLIWATTS

_FIELDS: Final = (POWER_INSTANT,)
#: Readings kept for a GPU that nobody takes.
_MOST_READINGS: Final = 1000
_GIVE_UP: Final = NOT_OFFERED | {nvml.NO_PERMISSION, nvml.GPU_IS_LOST, nvml.UNINITIALIZED, nvml.INVALID_ARGUMENT}


def is_cheap(handle: nvml.DeviceHandle, most_s: float) -> bool:
    """Return whether the driver offers the field and the quickest of three readings takes no longer than `most_s`."""
    durations = []
    for _ in range(3):
        begin = stopwatch()
        try:
            (reading,) = nvml.field_values(handle, _FIELDS)
        except nvml.NvmlError:
            return False
        if reading.code != 0:
            return False
        durations.append(stopwatch() - begin)
    return min(durations) <= most_s


class FastPower:
    """The fast channel; the methods are the owner's, the thread is its own."""

    def __init__(self, hertz: float) -> None:
        self._period_s = 1.0 / hertz if hertz > 0 else 0.0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_out = threading.Event()  # the running thread is in no call
        self._is_out.set()
        # Under the lock.
        self._targets: dict[str, nvml.DeviceHandle] = {}
        self._readings: dict[str, deque[tuple[float, float]]] = {}
        self._parked: dict[str, threading.Thread] = {}
        self._given_up: dict[str, nvml.DeviceHandle] = {}  # does not offer it under this handle
        self._run_number = 0
        self._thread: threading.Thread | None = None
        self._is_released = False
        self._call: tuple[str, float] | None = None  # GPU and beginning of the call under way
        self._driver_seconds = 0.0

    @property
    def parked_threads(self) -> int:
        """Number of threads that a hung call holds."""
        with self._lock:
            self._parked = {uuid: thread for uuid, thread in self._parked.items() if thread.is_alive()}
            return len(self._parked)

    def take_driver_seconds(self) -> float:
        """Return the time inside driver calls since this was last asked."""
        with self._lock:
            seconds, self._driver_seconds = self._driver_seconds, 0.0
            return seconds

    def watch(self, targets: Mapping[str, nvml.DeviceHandle]) -> None:
        """Read these GPUs, by UUID; one whose call hangs is left out until that returns."""
        if self._period_s <= 0:
            return
        parked = self.parked_threads
        with self._lock:
            wanted = {
                uuid: handle
                for uuid, handle in targets.items()
                if (not parked or uuid not in self._parked) and self._given_up.get(uuid) is not handle
            }
            if wanted == self._targets:
                return
            self._targets = wanted
            self._readings = {uuid: self._readings.get(uuid) or deque(maxlen=_MOST_READINGS) for uuid in wanted}
            if self._targets and self._thread is None:
                self._begin()
        self._wake.set()

    def park_hung(self, deadline_s: float) -> str | None:
        """Leave a call behind that lasts longer than this, and go on without its GPU; return its UUID."""
        with self._lock:
            if self._call is None or self._thread is None or stopwatch() - self._call[1] < deadline_s:
                return None
            uuid = self._call[0]
            self._parked[uuid] = self._thread
            self._targets.pop(uuid, None)
            self._readings.pop(uuid, None)
            self._begin()
            return uuid

    def take(self, uuid: str) -> list[tuple[float, float]]:
        """Return the readings of a GPU since this was last asked: stopwatch seconds and watts, oldest first."""
        with self._lock:
            readings = self._readings.get(uuid)
            taken = list(readings or ())
            if readings:
                readings.clear()
            return taken

    def release(self, wait_s: float) -> bool:
        """Make no more calls; return whether none is under way after `wait_s`."""
        with self._lock:
            self._is_released = True
            self._targets, self._readings = {}, {}
        self._wake.set()
        return self._is_out.wait(wait_s) and self.parked_threads == 0

    def resume(self) -> None:
        """Make calls again, once GPUs are to be watched."""
        with self._lock:
            self._is_released = False
        self._wake.set()

    def close(self) -> None:
        """End the thread; one that hangs is left behind."""
        with self._lock:
            self._run_number += 1
            self._thread = None
            self._targets, self._readings = {}, {}
        self._wake.set()

    def _begin(self) -> None:
        """Start a thread in place of the one before; with the lock held."""
        self._run_number += 1
        self._call = None
        self._is_out.set()
        name = "nvml-fast"
        self._thread = threading.Thread(target=self._run, args=(self._run_number,), name=name, daemon=True)
        self._thread.start()

    def _run(self, number: int) -> None:
        due_s = stopwatch()
        while self._run_number == number:
            with self._lock:
                targets = () if self._is_released else tuple(self._targets.items())
            if not targets:
                self._wake.clear()
                if (self._is_released or not self._targets) and self._run_number == number:
                    self._wake.wait()
                due_s = stopwatch()
                continue
            for uuid, handle in targets:
                self._read(number, uuid, handle)
            due_s = max(due_s + self._period_s, stopwatch())  # what was missed is not made up for
            self._wake.clear()
            if self._run_number == number and not self._is_released:
                self._wake.wait(max(0.0, due_s - stopwatch()))

    def _read(self, number: int, uuid: str, handle: nvml.DeviceHandle) -> None:
        begin = stopwatch()
        with self._lock:
            if number != self._run_number or self._is_released or self._targets.get(uuid) is not handle:
                return
            self._is_out.clear()
            self._call = (uuid, begin)
        watts, is_over = None, False
        try:
            (reading,) = nvml.field_values(handle, _FIELDS)
            code = reading.code
            if code == 0 and reading.value is not None and 0 <= reading.value < MAX_MILLIWATTS:
                watts = reading.value / 1000
        except nvml.NvmlError as error:
            code = error.code
        is_over = code in _GIVE_UP
        end = stopwatch()
        with self._lock:
            if number != self._run_number:
                return  # parked: another thread has taken over
            self._call = None
            self._is_out.set()
            self._driver_seconds += end - begin
            if is_over:
                self._targets.pop(uuid, None)  # the core tick says what became of it
                self._given_up[uuid] = handle
            elif watts is not None and uuid in self._readings:
                self._readings[uuid].append((end, watts))
