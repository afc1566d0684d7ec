"""Rings of samples, and counters that become rates: the parts of `agent.history` and `agent.host_history`."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Series(NamedTuple):
    """Part of one channel: times (monotonic seconds, increasing) and values, same length, no NaN.

    Both are views into the ring: valid until the next ingest, not to be written to.
    """

    times: Array
    values: Array

    @property
    def size(self) -> int:
        """Number of samples (`len` of the tuple is always 2)."""
        return int(self.times.size)


class Ring:
    """Time series that forgets what is older than its horizon; contiguous, so that windows are views."""

    def __init__(self, horizon_s: float, rows: int = 256) -> None:
        self._horizon_s = horizon_s
        self._data = np.empty((2, rows))
        self._start = 0
        self._end = 0
        self._last_s = -math.inf  # time of the newest sample

    @classmethod
    def of(cls, series: Series, horizon_s: float) -> Self:
        """Return a ring that holds a whole recorded series, of which nothing is forgotten before the next sample."""
        ring = cls(horizon_s, rows=0)
        ring._data = np.array([series.times, series.values], dtype=np.float64)
        ring._end = series.size
        if series.size:
            ring._last_s = float(series.times[-1])
        return ring

    def append(self, time_s: float, value: float) -> None:
        """Add a sample; one that is not later than the last one is dropped."""
        if time_s <= self._last_s:
            return
        if self._end == self._data.shape[1]:
            self._make_room(time_s)
        self._data[0, self._end] = time_s
        self._data[1, self._end] = value
        self._end += 1
        self._last_s = time_s

    def _make_room(self, time_s: float) -> None:
        self._start = int(np.searchsorted(self._data[0, : self._end], time_s - self._horizon_s))
        kept = self._data[:, self._start : self._end]
        size = kept.shape[1]
        capacity = self._data.shape[1]
        # A ring whose samples fit moves them every so often, and holds no room that it will never need.
        if size >= capacity - capacity // 16:
            grown = np.empty((2, capacity * 2 or 256))
            grown[:, :size] = kept
            self._data = grown
        else:
            self._data[:, :size] = kept.copy()
        self._start, self._end = 0, size

    def window(self, now_s: float, seconds: float) -> Series:
        """Return the samples with `now_s - seconds < time <= now_s`."""
        times = self._data[0, self._start : self._end]
        # The methods, not numpy's functions of the same name: those cost thrice as much, hundreds of times a decision.
        low = self._start + int(times.searchsorted(now_s - seconds, "right"))
        high = self._end if now_s >= self._last_s else self._start + int(times.searchsorted(now_s, "right"))
        return Series(self._data[0, low:high], self._data[1, low:high])

    def last(self) -> tuple[float, float] | None:
        """Return time and value of the newest sample."""
        if self._end == self._start:
            return None
        return self._last_s, float(self._data[1, self._end - 1])


class CounterRate:
    """Rate of a counter that may reset: per second between two readings, None for the first and over a reset."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def update(self, time_s: float, total: float) -> float | None:
        """Take a reading and return the mean rate since the one before."""
        last, self._last = self._last, (time_s, total)
        if last is None or total < last[1] or time_s <= last[0]:
            return None
        return (total - last[1]) / (time_s - last[0])


#: Channels that forget sooner than the others: ten readings and more a second.
_SHORT_HORIZONS_S: Final = {"power_fast_watts": 120.0}
_NOTHING: Final = Series(np.empty(0), np.empty(0))


class Channels:
    """Named rings and the counters that feed some of them."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._rings: dict[str, Ring] = {}
        self._counters: dict[tuple[str, ...], CounterRate] = {}

    def put(self, channel: str, time_s: float, value: float | None) -> None:
        """Add a value to `channel`; None is not stored."""
        if value is None:
            return
        ring = self._rings.get(channel)
        if ring is None:
            horizon_s = min(self._horizon_s, _SHORT_HORIZONS_S.get(channel, self._horizon_s))
            ring = self._rings[channel] = Ring(horizon_s)
        ring.append(time_s, value)

    def load(self, channel: str, series: Series) -> None:
        """Take a whole recorded channel at once: times in order, in place of whatever was there."""
        self._rings[channel] = Ring.of(series, self._horizon_s)

    def rate(self, counter: tuple[str, ...], time_s: float, total: float | None) -> float | None:
        """Take a reading of the counter of this name and return its rate; None as in `CounterRate`, and for None."""
        if total is None:
            return None
        return self._counters.setdefault(counter, CounterRate()).update(time_s, total)

    def series(self, channel: str, now_s: float, seconds: float) -> Series:
        """Return the samples of `channel` in the last `seconds`; empty where it was never measured."""
        ring = self._rings.get(channel)
        return ring.window(now_s, seconds) if ring else _NOTHING

    def latest(self, channel: str, now_s: float, max_age_s: float) -> float | None:
        """Return the newest value of `channel`, or None where it is older than `max_age_s` or absent."""
        ring = self._rings.get(channel)
        last = ring.last() if ring else None
        if last is None or now_s - last[0] > max_age_s:
            return None
        return last[1]

    def has(self, channel: str) -> bool:
        """Return whether `channel` was ever measured."""
        return channel in self._rings
