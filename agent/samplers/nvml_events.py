"""XIDs as NVML tells them: a thread that waits for events of the GPUs.

The thread waits in the driver and comes back to it at once, for of several XIDs between two waits the driver tells the
newest one for each. It holds a reference to the library of its own while it waits, so that no shutdown by another voids
the event set under it; whoever needs a real shutdown (a new start for a lost GPU, a reset by the operator) calls
`release` before and `resume` after.

A GPU is known by the handle with which it was registered: one that falls off the bus still sends its XID 79, but cannot
tell its UUID any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.clock import Clock, stopwatch
from agent.samplers import nvml_binding as nvml
from agent.samplers import nvml_event_binding as event_binding
from agent.samplers.nvml_binding import NvmlError
from agent.threads import NamedThread

_log = logging.getLogger(__name__)

#: Reasons to go without a GPU's events for good: it does not offer them, or not to this user.
_NEVER: Final = frozenset({nvml.NOT_SUPPORTED, nvml.FUNCTION_NOT_FOUND, nvml.NO_PERMISSION})


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlEventsConfig:
    """Waits and bounds of the thread."""

    wait_s: float = 1.0
    """Longest wait in the driver; `release` waits for as long at most while the driver is well."""
    events_per_second: int = 500
    """Events taken in a second; more stay with the driver until the next one."""
    codes: int = 1024
    """Different events, by GPU and code, kept until they are taken."""
    pause_first_s: float = 1.0
    """First pause after a failure of the whole set; doubles while that lasts."""
    pause_most_s: float = 60.0
    """Longest such pause, and the distance of attempts to register a GPU that failed."""
    close_wait_s: float = 0.2
    """Time for the thread to leave the driver when the agent ends."""


class EventBatch(NamedTuple):
    """What came since the last batch."""

    counts: Mapping[tuple[str, int], int]  # by UUID and XID
    watched: frozenset[str]  # UUIDs of the GPUs whose events come
    complete_until_s: float  # monotonic; every event before is in this batch or in one before it
    heard_s: float  # monotonic; when the driver answered last
    is_settled: bool  # whether all GPUs were tried


class NvmlEvents:
    """Waits for XIDs in a thread; the methods are called by one owner and return at once, but for `release`."""

    def __init__(self, clock: Clock, config: NvmlEventsConfig | None = None) -> None:
        self._clock = clock
        self._config = config or NvmlEventsConfig()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_out = threading.Event()  # the thread holds nothing of the library's
        self._is_out.set()
        self._thread: threading.Thread | None = None
        # Under the lock.
        self._errors: Counter[str] = Counter()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._wanted: frozenset[str] = frozenset()
        self._watched: frozenset[str] = frozenset()
        self._complete_until_s = self._heard_s = float("-inf")
        self._is_settled = self._is_released = self._is_closed = False
        # The thread's own.
        self._set: event_binding.EventSet | None = None
        self._uuids: dict[int, str] = {}  # by address of the handle; stays when the GPU is lost
        self._retry_s: dict[str, float] = {}  # when a GPU that failed is tried again; stopwatch
        self._pause_s = 0.0
        self._second_s, self._second_events = 0.0, 0

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failures since the start, by reason."""
        with self._lock:
            return dict(self._errors)

    def watch(self, uuids: AbstractSet[str]) -> None:
        """Wait for events of these GPUs, from when they are registered on."""
        with self._lock:
            if uuids == self._wanted:
                return
            self._wanted = frozenset(uuids)
            self._is_settled = False
            if self._thread is None and not self._is_closed:
                self._thread = NamedThread("nvml-events", self._run)
                self._thread.start()
        self._wake.set()

    def take(self) -> EventBatch:
        """Return what came since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return EventBatch(counts, self._watched, self._complete_until_s, self._heard_s, self._is_settled)

    def release(self, wait_s: float) -> bool:
        """Let go of the library, and return whether that was done within `wait_s`; no event comes until `resume`."""
        with self._lock:
            self._is_released = True
            self._is_settled = False
        self._wake.set()
        return self._is_out.wait(wait_s)

    def resume(self) -> None:
        """Register all GPUs anew; handles from before are void."""
        with self._lock:
            self._is_released = False
            self._is_settled = False
        self._retry_s.clear()
        self._wake.set()

    def close(self) -> None:
        """End the thread; one that hangs in the driver is left behind."""
        with self._lock:
            self._is_closed = True
        self._wake.set()
        self._is_out.wait(self._config.close_wait_s)

    # The thread.

    def _run(self) -> None:
        while True:
            self._wake.clear()
            if self._enter():
                try:
                    self._turn()
                except NvmlError as error:
                    self._fail(error)
                continue
            self._leave()
            if self._is_closed:
                return
            self._wake.wait()

    def _enter(self) -> bool:
        """Return whether to go to the driver; from then on the library is in use."""
        with self._lock:
            if self._is_closed or self._is_released or not self._wanted:
                return False
            self._is_out.clear()
            return True

    def _leave(self) -> None:
        """Free the set and the reference to the library."""
        if self._set is not None:
            with contextlib.suppress(NvmlError):
                event_binding.free_set(self._set)
            self._set = None
            with contextlib.suppress(NvmlError):
                nvml.stop()
        with self._lock:
            self._watched = frozenset()
        self._is_out.set()

    def _turn(self) -> None:
        """Register what is missing and wait for one event."""
        if self._set is None:
            self._open()
        self._register()
        with self._lock:
            watched = self._watched
            self._is_settled = True
        if not watched or self._set is None:
            self._leave()
            self._wake.wait(self._config.pause_most_s)
            return
        started_s, asked_s = stopwatch(), self._clock.now().monotonic_s
        try:
            event = event_binding.wait(self._set, round(self._config.wait_s * 1000))
        except NvmlError as error:
            if error.code != nvml.TIMEOUT:
                raise
            self._pause_s = 0.0
            with self._lock:
                self._complete_until_s, self._heard_s = asked_s, self._clock.now().monotonic_s
            if stopwatch() - started_s < self._config.wait_s / 10:
                self._wake.wait(self._config.wait_s / 10)  # interrupts end waits early, and may come in numbers
            return
        self._pause_s = 0.0
        self._note(event)
        self._pace(started_s)

    def _open(self) -> None:
        nvml.start()
        try:
            self._set = event_binding.create_set()
        except NvmlError:
            with contextlib.suppress(NvmlError):
                nvml.stop()
            raise
        self._uuids.clear()

    def _register(self) -> None:
        """Register the wanted GPUs that are not; one that fails does not concern the others."""
        with self._lock:
            missing = self._wanted - self._watched
        for uuid in sorted(missing):
            if self._set is None or self._retry_s.get(uuid, 0.0) > stopwatch():
                continue
            try:
                address = _register(uuid, self._set)
            except NvmlError as error:
                self._skip(uuid, error)
                continue
            self._uuids[address] = uuid
            with self._lock:
                self._watched |= {uuid}
                self._heard_s = self._clock.now().monotonic_s

    def _skip(self, uuid: str, error: NvmlError) -> None:
        """Go without a GPU's events, for good or for a while."""
        if error.code in _NEVER:
            self._retry_s[uuid] = float("inf")
            _log.info("XID events of %s are not offered by the driver (%s)", uuid, error.reason)
            return
        self._retry_s[uuid] = stopwatch() + self._config.pause_most_s
        with self._lock:
            self._errors[error.reason] += 1

    def _note(self, event: event_binding.EventReading) -> None:
        uuid = self._uuids.get(event.address)
        key = (uuid or "", event.data)
        with self._lock:
            self._heard_s = self._clock.now().monotonic_s
            if not event.types & event_binding.XID_EVENTS:
                return
            if uuid is None:
                self._errors["unknown_gpu"] += 1
            elif key in self._counts or len(self._counts) < self._config.codes:
                self._counts[key] += 1
            else:
                self._errors["too_many_codes"] += 1

    def _pace(self, now_s: float) -> None:
        """Keep a flood from taking a whole core."""
        if now_s - self._second_s >= 1.0:
            self._second_s, self._second_events = now_s, 0
        self._second_events += 1
        if self._second_events >= self._config.events_per_second:
            self._wake.wait(max(0.0, self._second_s + 1.0 - stopwatch()))

    def _fail(self, error: NvmlError) -> None:
        """Give the set up and try again after a pause; a set with a lost GPU may fail for all of its GPUs."""
        with self._lock:
            self._errors[error.reason] += 1
            self._is_settled = True
        self._leave()
        self._pause_s = min(max(2 * self._pause_s, self._config.pause_first_s), self._config.pause_most_s)
        self._wake.wait(self._pause_s)


def _register(uuid: str, events: event_binding.EventSet) -> int:
    """Register one GPU and return the address of its handle; raises NvmlError."""
    handle = event_binding.device_handle_by_uuid(uuid)
    if not event_binding.supported_event_types(handle) & event_binding.XID_EVENTS:
        raise NvmlError(nvml.NOT_SUPPORTED)
    event_binding.register(handle, event_binding.XID_EVENTS, events)
    return event_binding.handle_address(handle)
