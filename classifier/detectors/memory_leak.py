"""memory_leak: the memory of a GPU fills up steadily, and will be full within hours.

Sees the memory in use, as medians over five minutes, and the process list, which tells one job from the next; without a
list a fall of memory does. After SIGNALS 6d: the Theil-Sen slope over the medians is above 0.5 % of the memory an hour,
nine of ten steps rise (by a quarter of the mean step: a notebook's cells and a caching allocator take memory in stairs,
and rest between) and are alike (a leak takes as much with each request or step, cells take what they need: the standard
deviation of the steps is at most half of their mean), a straight line explains 80 % of the variance, and at this slope
the memory is full within twelve hours. The first ten minutes do not count: that is when programs load. Growth that
slows down will end by itself, as a cache that fills: it has to have gone on for an hour, in the newer half as fast as
in the older, and to be a twentieth of the memory; where the memory is full within an hour and a half, half an hour is
enough, with steps twice as even.

Cannot see: a leak inside memory that was taken whole at the start, as inference servers and JAX do, or in the host's
memory; one that takes memory more rarely than every ten minutes; nor which of several processes leaks. A cache that
fills at one pace for hours looks the same. A gap leaves medians out and ends nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.clock import Instant
from agent.history import Array, GpuHistory, History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.card_watch import Answers, Claim, Freshness, Verdicts
from classifier.detectors.channels import is_same_work, process_ids
from classifier.results import Assessment, Decision

_STALE_S: Final = 60.0
#: Samples that a median needs; medians that are remembered (four hours), and those that are judged (the last hour).
_LEAST_SAMPLES: Final = 3
_MOST_MEDIANS: Final = 48
_JUDGED_MEDIANS: Final = 12
#: Fewer medians tell a line from stairs too rarely: 25 minutes of steps.
_LEAST_MEDIANS: Final = 6
#: A step is one that rises from this share of the mean step.
_RISING_STEP: Final = 0.25
#: Growth in the newer half of the hour against that in the older half, and in the hour against that in all the time.
_LEAST_PERSISTENCE: Final = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLeakConfig:
    """When growing memory counts as a leak."""

    enabled: bool = True
    #: How often it is looked, for another job, and for a median that is full.
    judge_seconds: float = 30.0
    #: Length of the time that one median stands for.
    median_seconds: float = 300.0
    #: The beginning of a job that does not count.
    ignore_seconds: float = 600.0
    #: Least age of a job.
    job_seconds: float = 1800.0
    #: Memory that is full sooner is called after that age; else growth has to go on for an hour ...
    urgent_seconds: float = 5400.0
    #: ... and to be this share of the memory: servers grow by some per cent (simulator.inference: 6 % of it).
    least_growth_ratio: float = 0.05
    #: Least slope, in shares of the memory an hour.
    slope_ratio_per_hour: float = 0.005
    #: Least share of steps that rise.
    rising_share_ratio: float = 0.9
    #: Least share of the variance that a straight line explains.
    determination_ratio: float = 0.8
    #: Standard deviation of the steps, in shares of their mean, at most; half of it before the hour is full.
    uneven_ratio: float = 0.5
    #: Memory that is full later than this is no concern yet.
    full_seconds: float = 43200.0
    #: A fall of this share of the memory is the end of a job, where no process list is known.
    fall_ratio: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.judge_seconds >= 0, "judge_seconds", self.judge_seconds, "at least 0")
        require(self.median_seconds >= 10, "median_seconds", self.median_seconds, "at least 10")
        require(self.slope_ratio_per_hour > 0, "slope_ratio_per_hour", self.slope_ratio_per_hour, "above 0")
        for key in ("rising_share_ratio", "determination_ratio", "fall_ratio"):
            require(0 < getattr(self, key) <= 1, key, getattr(self, key), "above 0 and at most 1")
        require(self.urgent_seconds >= 0, "urgent_seconds", self.urgent_seconds, "at least 0")
        require(self.uneven_ratio > 0, "uneven_ratio", self.uneven_ratio, "above 0")
        is_share = 0 <= self.least_growth_ratio < 1
        require(is_share, "least_growth_ratio", self.least_growth_ratio, "at least 0 and below 1")
        require(self.full_seconds > 0, "full_seconds", self.full_seconds, "above 0")


@dataclass(frozen=True, slots=True)
class _Growth:
    """What the medians of one job say."""

    bytes_per_hour: float
    rising_share: float
    determination: float
    uneven: float  # standard deviation of the steps against their mean
    persistence: float
    full_s: float  # from now
    from_s: float
    grown_bytes: float


@dataclass(slots=True)
class _Job:
    """The present job of one GPU."""

    samples: Freshness = field(default_factory=lambda: Freshness(_STALE_S))
    start_s: float | None = None
    process_ids: frozenset[int] | None = None
    part_s: float = 0.0  # when the part began whose median comes next
    first_bytes: float = 0.0  # the first median
    medians: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_MEDIANS))
    growth: _Growth | None = None
    is_leak: bool = False


class MemoryLeakDetector:
    """Says for every GPU whether its memory fills up."""

    anomalies: tuple[str, ...] = ("memory_leak",)

    def __init__(self, config: MemoryLeakConfig) -> None:
        self._config = config
        self._answers = Answers(config.judge_seconds)
        self._jobs: dict[GpuKey, _Job] = {}
        self._verdicts = Verdicts("memory_leak")

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:  # noqa: ARG002
        """Return one assessment for each GPU whose memory in use is measured."""
        return self._answers.of(now, history, lambda: self._look(now, history))

    def _look(self, now: Instant, history: History) -> Sequence[Assessment]:
        for gone in self._jobs.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._jobs[gone]
        assessments: list[Assessment] = []
        for key, gpu in history.gpus.items():
            job = self._jobs.setdefault(key, _Job())
            total = gpu.memory_total_bytes
            if gpu.state in ("lost", "hung"):
                continue
            if not gpu.has("memory_used_bytes") or not total or not job.samples.is_fresh(gpu.last_s, now.monotonic_s):
                continue
            self._follow(job, gpu, now, total)
            assessments += self._verdicts.of([key], self._claims(job, total, now), self._evidence(job, total))
        return assessments

    def _follow(self, job: _Job, gpu: GpuHistory, now: Instant, total: float) -> None:
        present = process_ids(gpu)
        if job.start_s is None or not is_same_work(job.process_ids, present):
            self._begin(job, now.monotonic_s)
        job.process_ids = present if present is not None else job.process_ids
        if now.monotonic_s - job.part_s < self._config.median_seconds:
            return
        end_s, job.part_s = job.part_s + self._config.median_seconds, now.monotonic_s
        values = gpu.series("memory_used_bytes", now.monotonic_s, self._config.median_seconds).values
        if values.size < _LEAST_SAMPLES or job.start_s is None or end_s - job.start_s <= self._config.ignore_seconds:
            return
        median = float(np.median(values))
        if job.medians and median < job.medians[-1][1] - self._config.fall_ratio * total:
            self._begin(job, now.monotonic_s)
            return
        if not job.medians:
            job.first_bytes = median
        job.medians.append((now.monotonic_s, median))
        self._judge(job, total, now.monotonic_s)

    def _begin(self, job: _Job, now_s: float) -> None:
        job.start_s = job.part_s = now_s
        job.medians.clear()
        job.growth, job.is_leak = None, False

    def _judge(self, job: _Job, total: float, now_s: float) -> None:
        config = self._config
        if len(job.medians) < _LEAST_MEDIANS or job.start_s is None or now_s - job.start_s < config.job_seconds:
            return
        medians = np.array(job.medians)
        growth = job.growth = _growth(medians[-_JUDGED_MEDIANS:], total)
        # A leak that is known may waver: only half the slope, or a fall, ends it.
        least = config.slope_ratio_per_hour * total * (0.5 if job.is_leak else 1.0)
        is_steady = growth.rising_share >= config.rising_share_ratio and growth.bytes_per_hour > least
        if not job.is_leak:
            is_steady = (
                is_steady
                and growth.determination > config.determination_ratio
                and growth.uneven <= config.uneven_ratio * (1.0 if len(job.medians) >= _JUDGED_MEDIANS else 0.5)
                and growth.persistence >= _LEAST_PERSISTENCE
                and growth.full_s < config.full_seconds
                and self._goes_on(job, growth, total)
                and growth.bytes_per_hour >= _LEAST_PERSISTENCE * _growth(medians, total).bytes_per_hour
            )
        job.is_leak = is_steady

    def _goes_on(self, job: _Job, growth: _Growth, total: float) -> bool:
        """Return whether growth has lasted for long enough, for how soon the memory is full."""
        if growth.full_s < self._config.urgent_seconds:
            return True
        grown = job.medians[-1][1] - job.first_bytes
        return len(job.medians) >= _JUDGED_MEDIANS and grown >= self._config.least_growth_ratio * total

    def _claims(self, job: _Job, total: float, now: Instant) -> list[Claim]:
        growth = job.growth
        if not job.is_leak or growth is None:
            return []
        text = f"its memory grows by {growth.bytes_per_hour / 1e9:.2f} GB an hour, and at that "
        text += f"its {total / 1e9:.0f} GB are full in {growth.full_s / 3600:.1f} h"
        return [Claim(2, "contact_user", text, now.later(growth.from_s - now.monotonic_s))]

    def _evidence(self, job: _Job, total: float) -> dict[str, float | str | None]:
        growth = job.growth
        if not job.is_leak or growth is None:
            return {}
        return {
            "slope_bytes_per_hour": growth.bytes_per_hour,
            "slope_ratio_per_hour": growth.bytes_per_hour / total,
            "grown_bytes": growth.grown_bytes,
            "rising_share_ratio": growth.rising_share,
            "determination_ratio": growth.determination,
            "full_in_seconds": growth.full_s,
            "memory_used_bytes": job.medians[-1][1],
            "memory_total_bytes": total,
        }


def _growth(medians: Array, total: float) -> _Growth:
    """Return how the medians (time, bytes) grow; Theil-Sen: the median of the slopes of all pairs."""
    times, used = medians[:, 0], medians[:, 1]
    left, right = np.triu_indices(times.size, 1)
    slope = float(np.median((used[right] - used[left]) / (times[right] - times[left])))
    offset = float(np.median(used - slope * times))
    spread = float(np.sum((used - used.mean()) ** 2))
    rest = float(np.sum((used - offset - slope * times) ** 2))
    steps = np.diff(used)
    grown = float(used[-1] - used[0])
    middle = float(np.interp((times[0] + times[-1]) / 2, times, used))
    older = middle - float(used[0])
    return _Growth(
        bytes_per_hour=3600 * slope,
        rising_share=float(np.mean(steps >= _RISING_STEP * grown / steps.size)) if grown > 0 else 0.0,
        determination=1 - rest / spread if spread else 0.0,
        uneven=float(steps.std(ddof=1)) * steps.size / grown if grown > 0 else float("inf"),
        persistence=(float(used[-1]) - middle) / older if older > 0 else 1.0,
        full_s=(total - float(used[-1])) / slope if slope > 0 else float("inf"),
        from_s=float(times[0]),
        grown_bytes=grown,
    )
