"""The only module that imports `time`: everything else is handed a clock.

Two readings are taken together. The monotonic one measures intervals and ages; it is CLOCK_BOOTTIME, which
goes on while the machine sleeps, so that a suspend shows as a gap and not as one long second. The wall
one stamps what people and Prometheus read; it may be stepped in either direction at any time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment on both clocks.

    `monotonic_s` counts seconds since boot live, and from the first sample of a trace in replay; `wall_s`
    is seconds since 1970 (UTC).
    """

    monotonic_s: float
    wall_s: float

    def later(self, seconds: float) -> Instant:
        """Return the moment `seconds` later on both clocks (earlier where negative)."""
        return Instant(self.monotonic_s + seconds, self.wall_s + seconds)


class Clock(Protocol):
    """Source of the current moment."""

    def now(self) -> Instant:
        """Return the current moment; `monotonic_s` never decreases between calls."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> Instant:
        """Return CLOCK_BOOTTIME and CLOCK_REALTIME."""
        return Instant(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class ManualClock:
    """A clock that stands still until it is set: for replay, where the trace is the clock, and for tests."""

    def __init__(self, monotonic_s: float = 0.0, wall_s: float = 0.0) -> None:
        self._now = Instant(monotonic_s, wall_s)

    def now(self) -> Instant:
        """Return the moment last set."""
        return self._now

    def set(self, now: Instant) -> None:
        """Move to `now`; raises ValueError where the monotonic reading would go back."""
        if now.monotonic_s < self._now.monotonic_s:
            raise ValueError(f"monotonic time goes back from {self._now.monotonic_s} to {now.monotonic_s}")
        self._now = now

    def advance(self, seconds: float) -> Instant:
        """Move both readings forward and return the new moment."""
        self.set(self._now.later(seconds))
        return self._now

    def step_wall(self, seconds: float) -> None:
        """Step the wall reading alone, as a time daemon or an administrator does."""
        self._now = Instant(self._now.monotonic_s, self._now.wall_s + seconds)


def process_cpu_seconds() -> float:
    """Return the CPU time of this process, user and system, all threads, in seconds."""
    return time.process_time()


def stopwatch() -> float:
    """Return a reading in seconds for durations within this process; only differences mean anything."""
    return time.perf_counter()


def awake_seconds() -> float:
    """Return CLOCK_MONOTONIC: seconds since boot without suspends, which is what the kernel log's stamps count."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
