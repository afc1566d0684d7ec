"""When the next checkpoint is due: a period learned from the bursts so far, or declared, and how late is too late.

Times are those of a clock of the job that stands still while the job does, so that a stall or a pause is no missed
checkpoint. Nothing here knows bytes, channels or jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from classifier.config_checks import require

#: Intervals that are remembered.
_INTERVALS: Final = 12
#: Intervals that agree among themselves and not with the period make a new one.
_NEW_PERIOD: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CadenceConfig:
    """When intervals are a cadence, and when a checkpoint is late."""

    #: Bursts without which there is no cadence (SIGNALS 4.3).
    least_bursts: int = 4
    #: Median absolute deviation of the intervals over their median, at most (SIGNALS 4.3).
    spread_ratio: float = 0.25
    #: Intervals shorter than this are no cadence of checkpoints: bursts so close are merged or belong to steps.
    least_period_seconds: float = 60.0
    #: A checkpoint is late this share of the period after it was due ...
    late_ratio: float = 0.25
    #: ... and not sooner than this, or 0.4 periods where that is less ...
    late_seconds: float = 120.0
    #: ... or, where intervals vary, this many of their median absolute deviations: 4.4 standard deviations, so that
    #: a cadence that varies by 10 % is not late by chance once in 100,000 times.
    late_deviations: float = 6.5
    #: ... but no later than this share of the period.
    late_max_ratio: float = 0.45

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.least_bursts >= 3, "least_bursts", self.least_bursts, "at least 3")
        require(0 < self.spread_ratio < 1, "spread_ratio", self.spread_ratio, "between 0 and 1")
        require(self.least_period_seconds > 0, "least_period_seconds", self.least_period_seconds, "above 0")
        is_ordered = 0 < self.late_ratio <= self.late_max_ratio
        require(
            is_ordered, "late_ratio", self.late_ratio, f"above 0 and at most late_max_ratio ({self.late_max_ratio})"
        )


class Cadence:
    """The period of one row of bursts, and where in it the job is."""

    def __init__(self, config: CadenceConfig, declared_s: float | None = None) -> None:
        self.config = config
        self.declared_s = declared_s
        self.intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._recent: deque[float] = deque(maxlen=_NEW_PERIOD)  # as they were, whatever the period
        self._learned_s: float | None = None
        self._was_learned = False
        self._spread_s = 0.0
        self._anchor_s: float | None = None  # the last one on schedule
        self._base_s: float | None = None  # where the phase was lost: nothing is due before a whole period from here
        self._last_s: float | None = None
        self._stretch_s = 0.0  # the last interval, where it was late and did end

    @property
    def period_s(self) -> float | None:
        """Seconds between two checkpoints; None where they are neither declared nor learned."""
        return self._learned_s if self.declared_s is None else self.declared_s

    @property
    def confidence(self) -> float:
        """How sure the period is, 0..1: by the number of its intervals and by how little they vary."""
        if self.declared_s is not None:
            return 1.0
        if self._learned_s is None:
            return 0.0
        spread_ratio = self._spread_s / self._learned_s / self.config.spread_ratio
        return max(0.0, 1.0 - spread_ratio) * min(1.0, len(self.intervals) / 6)

    @property
    def tolerance_s(self) -> float:
        """How long after its time a checkpoint is late."""
        config, period_s = self.config, self.period_s or 0.0
        tolerance_s = max(config.late_ratio * period_s, min(config.late_seconds, 0.4 * period_s))
        if len(self.intervals) >= _NEW_PERIOD:
            widest_s = max(abs(one - period_s) for one in self.intervals) if self.declared_s is None else 0.0
            tolerance_s = max(tolerance_s, config.late_deviations * self._spread_s, 1.25 * widest_s)
        # Intervals that vary more than this have no upper bound: such a cadence is weak, and must not be wrong.
        if self._spread_s > 0.1 * period_s:
            return tolerance_s
        return min(tolerance_s, config.late_max_ratio * period_s)

    @property
    def is_armed(self) -> bool:
        """Whether a checkpoint is due at all: there is a period, and a burst to count from."""
        return self.period_s is not None and (self._anchor_s is not None or self._base_s is not None)

    @property
    def expected_s(self) -> float | None:
        """When the next one is due, on the clock of the job."""
        start_s = self._base_s if self._anchor_s is None else self._anchor_s
        if self.period_s is None or start_s is None:
            return None
        expected_s = start_s + max(self.period_s, self._stretch_s)
        # One out of turn may be the first of a shorter period: it is waited for then.
        return expected_s if self._last_s is None else max(expected_s, self._last_s + 0.75 * self.period_s)

    @property
    def deadline_s(self) -> float | None:
        """When the next one is late, on the clock of the job."""
        expected_s = self.expected_s
        return None if expected_s is None else expected_s + self.tolerance_s

    def is_due(self, clock_s: float) -> bool:
        """Return whether a burst at this time is on schedule, or late."""
        return self.expected_s is not None and clock_s >= self.expected_s - self.tolerance_s

    def add(self, clock_s: float) -> None:
        """Take a burst that began at this time."""
        last_s = self._last_s
        if last_s is not None and clock_s - last_s < self.config.least_period_seconds:
            return
        self._last_s = clock_s
        if last_s is not None:
            self._recent.append(clock_s - last_s)
        if self._anchor_s is None or last_s is None or self.period_s is None:
            if self._anchor_s is not None and last_s is not None:
                self.intervals.append(clock_s - last_s)
            self._anchor_s, self._base_s = clock_s, None
        elif self.declared_s is not None:
            self.intervals.append(clock_s - last_s)
            self._anchor_s = clock_s
        else:
            self._place(clock_s - self._anchor_s, clock_s)
        self._learn()

    def lose_phase(self, clock_s: float) -> None:
        """Forget where in the period the job is: a burst may have gone unseen until now. The period stays."""
        self._anchor_s = self._last_s = None
        self._stretch_s = 0.0
        self._base_s = clock_s if self.period_s is not None else None
        self._recent.clear()

    def obscure(self, from_s: float, until_s: float) -> None:
        """Take what was due between the two for written: nobody could see it behind what others wrote."""
        period_s, expected_s = self.period_s, self.expected_s
        if period_s is None or expected_s is None or expected_s < from_s - self.tolerance_s or expected_s > until_s:
            return
        skipped_s = (1 + int((until_s - expected_s) / period_s)) * period_s
        if self._anchor_s is not None:
            self._anchor_s += skipped_s
        elif self._base_s is not None:
            self._base_s += skipped_s

    def restore(self, intervals: Iterable[float], clock_s: float) -> None:
        """Take intervals that were learned before a restart."""
        self.intervals.extend(intervals)
        self._learn()
        self.lose_phase(clock_s)

    def forgive(self, clock_s: float) -> None:
        """Count from a burst at this time as if it had been a checkpoint."""
        self._anchor_s, self._last_s, self._base_s = clock_s, clock_s, None

    def _place(self, interval_s: float, clock_s: float) -> None:
        """Take an interval since the last burst on schedule."""
        period_s, tolerance_s = self._learned_s or interval_s, self.tolerance_s
        if interval_s < period_s - tolerance_s:
            return  # out of turn
        self._anchor_s = clock_s
        periods = max(1, round(interval_s / period_s))
        is_multiple = abs(interval_s - periods * period_s) <= tolerance_s
        if is_multiple:
            self.intervals.append(interval_s / periods)
        self._stretch_s = 0.0 if is_multiple and periods == 1 else interval_s

    def _learn(self) -> None:
        recent = sorted(self._recent)
        if len(recent) == _NEW_PERIOD and self._learned_s is not None:
            middle_s = recent[1]
            agree = recent[-1] - recent[0] <= self.config.spread_ratio * middle_s
            if agree and abs(middle_s - self._learned_s) > max(self.tolerance_s, 0.2 * self._learned_s):
                self.intervals.clear()
                self.intervals.extend(self._recent)
                self._anchor_s, self._stretch_s, self._learned_s = self._last_s, 0.0, None
        least = _NEW_PERIOD if self._was_learned else self.config.least_bursts - 1
        if len(self.intervals) < least:
            return
        middle_s = median(self.intervals)
        single = [_single(one, middle_s) for one in self.intervals]
        period_s = median(single)
        spread_s = median([abs(one - period_s) for one in single])
        # Some may be odd, most may not: half of them in the middle would be enough for the deviation alone.
        agreeing = sum(abs(one - period_s) <= self.config.spread_ratio * period_s for one in single)
        whole = sum(abs(one - period_s) <= self.config.spread_ratio * period_s for one in self.intervals)
        is_regular = spread_s < self.config.spread_ratio * period_s and agreeing >= 0.75 * len(single)
        is_regular = is_regular and whole >= least
        if is_regular and period_s >= self.config.least_period_seconds:
            self._learned_s, self._spread_s, self._was_learned = period_s, spread_s, True
        else:
            self._learned_s = None


def _single(interval_s: float, period_s: float) -> float:
    """Return the period behind an interval of two or three of them, between which a checkpoint failed."""
    for periods in (2, 3):
        if abs(interval_s - periods * period_s) <= 0.15 * period_s:
            return interval_s / periods
    return interval_s


def median(values: Iterable[float]) -> float:
    """Return the median of some numbers, of which there is at least one."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
