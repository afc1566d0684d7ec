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

#: Readings kept for a GPU that nobody takes.
_MOST_READINGS: Final = 1000
_GIVE_UP: Final = NOT_OFFERED | {nvml.NO_PERMISSION, nvml.GPU_IS_LOST, nvml.UNINITIALIZED, nvml.INVALID_ARGUMENT}


def is_cheap(handle: nvml.DeviceHandle, most_s: float) -> bool:
    """Return whether the driver offers the field and the quickest of three readings takes no longer than `most_s`."""
    field = nvml.OneField(POWER_INSTANT)
    durations = []
    for _ in range(3):
        begin = stopwatch()
        try:
            reading = field.read(handle)
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

    @property
    def parked_threads(self) -> int:
        """Number of threads that a hung call holds."""
        with self._lock:
            self._parked = {uuid: thread for uuid, thread in self._parked.items() if thread.is_alive()}
            return len(self._parked)

    @property
    def parked(self) -> tuple[str, ...]:
        """UUIDs of the GPUs whose call hangs."""
        return tuple(self._parked) if self.parked_threads else ()

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
        field = nvml.OneField(POWER_INSTANT)
        while self._run_number == number:
            self._wake.clear()
            targets = self._enter(number)
            if not targets:
                self._is_out.set()
                self._wake.wait()
                due_s = stopwatch()
                continue
            readings, over = self._read_all(number, targets, field)
            self._leave(number, readings, over)
            due_s = max(due_s + self._period_s, stopwatch())  # what was missed is not made up for
            self._wake.wait(max(0.0, due_s - stopwatch()))

    def _enter(self, number: int) -> Mapping[str, nvml.DeviceHandle]:
        """Return the GPUs to read now; from then on the library is in use where there are any."""
        with self._lock:
            if self._is_released or number != self._run_number:
                return {}
            if self._targets:
                self._is_out.clear()
            return dict(self._targets)

    def _read_all(
        self, number: int, targets: Mapping[str, nvml.DeviceHandle], field: nvml.OneField
    ) -> tuple[list[tuple[str, float, float]], list[str]]:
        """Return UUID, stopwatch and watts of each reading, and the GPUs that are not to be asked again."""
        readings, over = [], []
        for uuid, handle in targets.items():
            if number != self._run_number or self._is_released:
                break
            self._call = (uuid, stopwatch())
            try:
                reading = field.read(handle)
                code, value = reading.code, reading.value
            except nvml.NvmlError as error:
                code, value = error.code, None
            if code in _GIVE_UP:
                over.append(uuid)
            elif code == 0 and value is not None and 0 <= value < MAX_MILLIWATTS:
                readings.append((uuid, stopwatch(), value / 1000))
        return readings, over

    def _leave(self, number: int, readings: list[tuple[str, float, float]], over: list[str]) -> None:
        """Keep what was read; a thread that was left behind has nothing to say."""
        with self._lock:
            if number != self._run_number:
                return
            self._call = None
            self._is_out.set()
            for uuid, seconds, watts in readings:
                if uuid in self._readings:
                    self._readings[uuid].append((seconds, watts))
            for uuid in over:
                handle = self._targets.pop(uuid, None)  # the core tick says what became of it
                if handle is not None:
                    self._given_up[uuid] = handle
