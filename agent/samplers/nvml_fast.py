"""Instant power, utilisation and clock events of all GPUs ten times a second: one thread with monotonic deadlines.

A call that hangs is left behind with its thread, one for each GPU at most, and the others go on in a new thread. The
readings wait here until the core tick takes them. Clock events are kept as the union since they were taken, so that the
core tick misses none that is shorter than its period.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from agent.clock import stopwatch
from agent.samplers import nvml_binding as nvml
from agent.samplers.nvml_calls import NOT_OFFERED
from agent.samplers.nvml_fast_binding import FastCalls
from agent.samplers.nvml_fields import POWER_INSTANT
from agent.samplers.nvml_health import MAX_MILLIWATTS
from agent.threads import NamedThread

#: Readings kept for a GPU that nobody takes.
_MOST_READINGS: Final = 1000
_GIVE_UP: Final = NOT_OFFERED | {nvml.NO_PERMISSION, nvml.GPU_IS_LOST, nvml.UNINITIALIZED, nvml.INVALID_ARGUMENT}


class FastTarget(NamedTuple):
    """A GPU of the fast channel, and what is read of it beside its power."""

    handle: nvml.DeviceHandle
    utilization: bool
    reasons: bool


class FastReading(NamedTuple):
    """One reading of one GPU."""

    at_s: float  # stopwatch
    watts: float
    utilization_ratio: float | None


def find_cheap(handle: nvml.DeviceHandle, most_s: float) -> FastTarget | None:
    """Return what can be read in at most `most_s`, the quickest of three; None where power is not offered or dearer."""
    calls = FastCalls(POWER_INSTANT)

    def is_cheap(read: Callable[[nvml.DeviceHandle], object]) -> bool:
        durations = []
        for _ in range(3):
            begin = stopwatch()
            try:
                answer = read(handle)
            except nvml.NvmlError:
                return False
            if answer is None:
                return False
            durations.append(stopwatch() - begin)
        return min(durations) <= most_s

    if not is_cheap(lambda handle: calls.power(handle)[1]):
        return None
    return FastTarget(handle, is_cheap(calls.utilization), is_cheap(calls.event_reasons))


class FastPower:
    """The fast channel; the methods are the owner's, the thread is its own."""

    def __init__(self, hertz: float) -> None:
        self._period_s = 1.0 / hertz if hertz > 0 else 0.0
        self._lock = threading.Lock()
        self._wake = threading.Lock()  # held while there is nothing to wake for: cheaper to wait on than an Event
        self._wake.acquire()
        self._is_out = threading.Event()  # the running thread is in no call
        self._is_out.set()
        # Under the lock.
        self._targets: dict[str, FastTarget] = {}
        self._readings: dict[str, deque[FastReading]] = {}
        self._reasons: dict[str, int] = {}
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

    def watch(self, targets: Mapping[str, FastTarget]) -> None:
        """Read these GPUs, by UUID; one whose call hangs is left out until that returns."""
        if self._period_s <= 0:
            return
        parked = self.parked_threads
        with self._lock:
            wanted = {
                uuid: target
                for uuid, target in targets.items()
                if (not parked or uuid not in self._parked) and self._given_up.get(uuid) is not target.handle
            }
            if wanted == self._targets:
                return
            self._targets = wanted
            self._readings = {uuid: self._readings.get(uuid) or deque(maxlen=_MOST_READINGS) for uuid in wanted}
            if self._targets and self._thread is None:
                self._begin()
        self._ring()

    def park_hung(self, deadline_s: float) -> str | None:
        """Leave a call behind that lasts longer than this, and go on without its GPU; return its UUID."""
        with self._lock:
            if self._call is None or self._thread is None or stopwatch() - self._call[1] < deadline_s:
                return None
            uuid = self._call[0]
            self._parked[uuid] = self._thread
            self._drop(uuid)
            self._readings.pop(uuid, None)
            self._begin()
            return uuid

    def take_reasons(self, uuid: str) -> int:
        """Return the bits of all clock events of a GPU since this was last asked."""
        with self._lock:
            return self._reasons.pop(uuid, 0)

    def take(self, uuid: str) -> list[FastReading]:
        """Return the readings of a GPU since this was last asked, oldest first."""
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
        self._ring()
        return self._is_out.wait(wait_s) and self.parked_threads == 0

    def resume(self) -> None:
        """Make calls again, once GPUs are to be watched."""
        with self._lock:
            self._is_released = False
        self._ring()

    def close(self) -> None:
        """End the thread; one that hangs is left behind."""
        with self._lock:
            self._run_number += 1
            self._thread = None
            self._targets, self._readings = {}, {}
        self._ring()

    def _begin(self) -> None:
        """Start a thread in place of the one before; with the lock held."""
        self._run_number += 1
        self._call = None
        self._is_out.set()
        self._thread = NamedThread("nvml-fast", self._run, (self._run_number,))
        self._thread.start()

    def _ring(self) -> None:
        """End the wait of the thread, or its next one."""
        with suppress(RuntimeError):  # it has been rung already
            self._wake.release()

    def _run(self, number: int) -> None:
        due_s = stopwatch()
        calls = FastCalls(POWER_INSTANT)
        while self._run_number == number:
            targets = self._enter(number)
            if not targets:
                self._is_out.set()
                self._wake.acquire()
                due_s = stopwatch()
                continue
            self._leave(number, *self._read_all(number, targets, calls))
            due_s = max(due_s + self._period_s, stopwatch())  # what was missed is not made up for
            self._wake.acquire(timeout=max(0.0, due_s - stopwatch()))

    def _enter(self, number: int) -> Mapping[str, FastTarget]:
        """Return the GPUs to read now; from then on the library is in use where there are any."""
        with self._lock:
            if self._is_released or number != self._run_number:
                return {}
            if self._targets:
                self._is_out.clear()
            return self._targets

    def _read_all(
        self, number: int, targets: Mapping[str, FastTarget], calls: FastCalls
    ) -> tuple[dict[str, FastReading], dict[str, int], list[str]]:
        """Return readings and clock events by UUID, and the GPUs that are not to be asked again."""
        readings: dict[str, FastReading] = {}
        reasons: dict[str, int] = {}
        over = []
        for uuid, (handle, has_utilization, has_reasons) in targets.items():
            if number != self._run_number or self._is_released:
                break
            self._call = (uuid, stopwatch())
            try:
                code, value = calls.power(handle)
            except nvml.NvmlError as error:
                code, value = error.code, None
            if code in _GIVE_UP:
                over.append(uuid)
                continue
            at_s = stopwatch()
            busy = _percent(calls, handle) if has_utilization else None
            if value is not None and 0 <= value < MAX_MILLIWATTS:
                readings[uuid] = FastReading(at_s, value / 1000, busy)
            if has_reasons and (bits := _bits(calls, handle)):
                reasons[uuid] = bits
        return readings, reasons, over

    def _leave(
        self, number: int, readings: Mapping[str, FastReading], reasons: Mapping[str, int], over: Sequence[str]
    ) -> None:
        """Keep what was read; a thread that was left behind has nothing to say."""
        with self._lock:
            if number != self._run_number:
                return
            self._call = None
            self._is_out.set()
            kept = self._readings
            for uuid, reading in readings.items():
                if uuid in kept:
                    kept[uuid].append(reading)
            for uuid, bits in reasons.items():
                self._reasons[uuid] = self._reasons.get(uuid, 0) | bits
            for uuid in over:
                target = self._drop(uuid)  # the core tick says what became of it
                if target is not None:
                    self._given_up[uuid] = target.handle

    def _drop(self, uuid: str) -> FastTarget | None:
        """Read a GPU no longer and return it; with the lock held. The thread may be looking through the old mapping."""
        targets = dict(self._targets)
        dropped = targets.pop(uuid, None)
        self._targets = targets
        return dropped


def _percent(calls: FastCalls, handle: nvml.DeviceHandle) -> float | None:
    """Return the utilisation; what goes wrong is the core tick's to count."""
    try:
        percent = calls.utilization(handle)
    except nvml.NvmlError:
        return None
    return percent / 100 if percent is not None and 0 <= percent <= 100 else None


def _bits(calls: FastCalls, handle: nvml.DeviceHandle) -> int:
    """Return the clock events that are active; none where they cannot be read or believed."""
    try:
        bits = calls.event_reasons(handle)
    except nvml.NvmlError:
        return 0
    return bits if bits is not None and 0 <= bits < 1 << 32 else 0
