"""Jobs of a host as their GPUs show them: which GPUs a job has, when it makes progress, and when it pauses.

A job is what holds GPUs under one job_key. GPUs whose holder is not known or cannot be named (a foreign log, a host
with hidepid) are one job without a name, job_key "". A GPU with several holders at work belongs to none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.history import GpuHistory, History
from agent.records import Holder
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.channels import interval_seconds

#: The key of the holder that stands for those beyond the bound.
_OTHERS: Final = "other"
#: Holders that were not heard of for this long, while the GPU was, are not known.
_STALE_S: Final = 60.0
#: GPUs of a job that are looked at for progress: ranks go together, and each look costs microseconds.
_LOOKED_AT: Final = 4
#: At most this utilisation, or memory utilisation where work has more, is no progress.
_STILL_RATIO: Final = 0.03
#: Power that is above context-idle power by less than this share of the way to busy power is waiting (SIGNALS 3.1).
_WAITING_SHARE: Final = 0.15
#: The same where context-idle power was never seen: waiting draws 0.14 to 0.25 of the limit (SIGNALS 3.3).
_WAITING_OF_BUSY: Final = 0.45
#: Without a sample for this long, or three intervals of a slow log, nobody knows what the job did.
_GAP_S: Final = 30.0
#: Looks that tell what is usual, and the fewest of them.
_LEVELS: Final = 60
_LEAST_LEVELS: Final = 12
#: A level below the median by this many median absolute deviations, and by this share, is a dip.
_DIP_DEVIATIONS: Final = 5.0
_DIP_RATIO: Final = 0.04
#: So many cores more than usual are a sign as well: a rank that saves takes 0.9 to 1.6 (simulator.checkpoints).
_LEAST_CORES: Final = 0.3
#: An hour of looks.
_DIPS: Final = 720
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobGpus:
    """A job and where it runs now."""

    job_key: str
    gpus: Sequence[GpuHistory]
    declared_class: str | None = None
    declared_interval_s: float | None = None
    #: Whether its key is of this one job: not of a user, whose next job has the same, nor of nobody.
    is_named: bool = False


def jobs_of(history: History, most: int) -> dict[str, JobGpus]:
    """Return the jobs by key, in the order of their first GPUs; `most` of them."""
    gpus: dict[str, list[GpuHistory]] = {}
    holders: dict[str, Holder] = {}
    for gpu in history.gpus.values():
        holder = _holder(gpu)
        if holder is not None and (holder.job_key in gpus or len(gpus) < most):
            gpus.setdefault(holder.job_key, []).append(gpu)
            holders.setdefault(holder.job_key, holder)
    return {
        key: JobGpus(
            job_key=key,
            gpus=gpus[key],
            declared_class=holder.declared_class,
            declared_interval_s=holder.checkpoint_interval_seconds,
            is_named=bool(holder.job_id) or holder.checkpoint_interval_seconds is not None,
        )
        for key, holder in holders.items()
    }


def _holder(gpu: GpuHistory) -> Holder | None:
    """Return whose work runs on a GPU; None where nobody's does, or that of several."""
    owners = gpu.owners
    if owners is None or (gpu.last_s or 0.0) - owners.monotonic_s > _STALE_S:
        return Holder("")
    found = [holder for holder in owners.holders if holder.processes != 0]
    return found[0] if len(found) == 1 and found[0].job_key != _OTHERS else None


class JobActivity:
    """The progress of one job: a clock that runs only while it works, and its dips."""

    def __init__(self) -> None:
        self.clock_s = 0.0
        #: The clock before the last advance: about when what is new began.
        self.before_s = 0.0
        self.gaps = 0  # how often nobody knew what it did
        self.is_still = False
        self._seen_s: float | None = None
        self._first_s: float | None = None
        self._levels, self._cores = _Usual(), _Usual()
        self._dips: deque[float] = deque(maxlen=_DIPS)

    def advance(
        self, gpus: Sequence[GpuHistory], baselines: PowerBaselines, now_s: float, *, is_writing: bool = False
    ) -> None:
        """Take what came since the last call; a job that waits while something is written goes on."""
        lookback_s = 5.0 if self._seen_s is None else now_s - self._seen_s
        level, looked_at, works = 0.0, 0, False
        cores: float | None = None
        for gpu in gpus[:_LOOKED_AT]:
            used = gpu.latest("process_cpu_ratio", now_s, lookback_s)
            if used is not None:
                cores = used if cores is None else cores + used
            utilization = _mean(gpu, "utilization_ratio", now_s, lookback_s)
            watts = _mean(gpu, "power_watts", now_s, lookback_s)
            if utilization is None and watts is None:
                continue
            looked_at += 1
            level += watts if watts is not None else utilization or 0.0
            works = works or self._is_work(gpu, baselines, utilization, watts, now_s)
        if not looked_at:
            return
        span_s, self._seen_s = (0.0 if self._seen_s is None else lookback_s), now_s
        self._first_s = now_s if self._first_s is None else self._first_s
        self.before_s = self.clock_s
        if span_s > _GAP_S and span_s > 3 * interval_seconds(gpus[0], now_s):
            self.gaps += 1
            return
        self.is_still = not works
        if works or is_writing:
            self.clock_s += span_s
        self._look(level / looked_at, cores, now_s)

    def is_out_of_sight(self, gpus: Sequence[GpuHistory], now_s: float) -> bool:
        """Return whether nothing came of its GPUs for so long that it may be gone: they are lost, or hang."""
        if self._seen_s is None:
            return True
        age_s = now_s - self._seen_s
        return age_s > _STALE_S and age_s > 3 * interval_seconds(gpus[0], now_s)

    def dipped(self, from_s: float, until_s: float) -> bool:
        """Return whether the job paused, did less than usual or took more of the CPU, at any time between the two."""
        return self.first_dip(from_s, until_s) is not None

    def first_dip(self, from_s: float, until_s: float) -> float | None:
        """Return the first such time."""
        place = bisect_left(self._dips, from_s)
        return self._dips[place] if place < len(self._dips) and self._dips[place] <= until_s else None

    def dip_chance(self, before_s: float, after_s: float, now_s: float) -> float:
        """Return the share of the last hour at which `dipped` from `before_s` before to `after_s` after says yes."""
        start_s = max(now_s - _HOUR_S, now_s if self._first_s is None else self._first_s)
        covered_s, end_s = 0.0, start_s
        for dip_s in list(self._dips)[bisect_right(self._dips, start_s) :]:
            covered_s += dip_s + before_s - max(end_s, dip_s - after_s)
            end_s = dip_s + before_s
        return min(1.0, covered_s / max(now_s - start_s, before_s + after_s))

    @staticmethod
    def _is_work(
        gpu: GpuHistory, baselines: PowerBaselines, utilization: float | None, watts: float | None, now_s: float
    ) -> bool:
        if utilization is not None and utilization <= _STILL_RATIO:
            return False
        idle_watts, busy_watts = baselines.context_idle_watts(gpu.key), baselines.busy_watts(gpu.key)
        if watts is not None and busy_watts is not None:
            waiting_watts = _WAITING_OF_BUSY * busy_watts
            if idle_watts is not None and idle_watts < busy_watts:
                waiting_watts = idle_watts + _WAITING_SHARE * (busy_watts - idle_watts)
            if watts < waiting_watts:
                return False
        busy_memory = baselines.busy_memory_utilization_ratio(gpu.key)
        if busy_memory is not None and busy_memory > 2 * _STILL_RATIO:
            memory = gpu.latest("memory_utilization_ratio", now_s, _GAP_S)
            return memory is None or memory > _STILL_RATIO
        return True

    def _look(self, level: float, cores: float | None, now_s: float) -> None:
        is_low = self._levels.is_low(level)
        # Serialising a checkpoint takes cores that nothing else in training does.
        is_busy = cores is not None and self._cores.is_low(-cores, _LEAST_CORES)
        if self.is_still or is_low or is_busy:
            self._dips.append(now_s)


class _Usual:
    """What is usual in a row of levels."""

    def __init__(self) -> None:
        self._levels: deque[float] = deque(maxlen=_LEVELS)
        self._until_next = 0
        self._low = float("-inf")

    def is_low(self, level: float, least: float = 0.0) -> bool:
        """Take a level and return whether it is below what is usual, by `least` and by a share of it."""
        self._levels.append(level)
        self._until_next -= 1
        if self._until_next <= 0 and len(self._levels) >= _LEAST_LEVELS:
            self._until_next = _LEAST_LEVELS // 2
            ordered = sorted(self._levels)
            usual = ordered[len(ordered) // 2]
            spread = sorted(abs(one - usual) for one in ordered)[len(ordered) // 2]
            self._low = usual - max(_DIP_DEVIATIONS * spread, _DIP_RATIO * abs(usual), least)
        return level < self._low


def process_ids_of(gpus: Sequence[GpuHistory]) -> frozenset[int] | None:
    """Return the ids of a job's processes as last listed; None where they cannot be listed on any of its GPUs."""
    lists = [gpu.processes for gpu in gpus if gpu.processes is not None]
    return frozenset(process.pid for one in lists for process in one) if lists else None


def _mean(gpu: GpuHistory, channel: str, now_s: float, seconds: float) -> float | None:
    values = gpu.series(channel, now_s, seconds).values
    return sum(values.tolist()) / values.size if values.size else None
