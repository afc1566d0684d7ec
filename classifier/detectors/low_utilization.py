"""low_utilization: a GPU that somebody has, and that does nothing. Three variants, told apart in the evidence:

- `held_idle`: a program holds the GPU and its memory, and hardly ever works: 95 % of its samples show less than 5 %
  utilisation (SM activity where there is none, as on MIG instances), at the power of an idle context;
- `memory_held`: memory is in use, and for hours not one sample showed work, whatever is drawn: by a program, or with no
  process listed at all, as a container that is hidden or a crash leaves it;
- `allocated_empty`: a job file, the device list of a job or the kubelet gives the GPU to somebody who has no process on
  it, and neither has anybody else.

Cannot tell a forgotten notebook from a server without requests by itself: where the label was `inference` within the
last day (`serving_memory_seconds`) with the same processes, nothing is said. A gap in telemetry, a restart of the agent
among them, pauses the counts and ends nothing. Where none of the three can be seen the GPU is left out: the first two
need utilisation or SM activity, and a process list or the memory in use; the third needs owners and a process list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import PERIODS_S, GpuKey, GpuOwners
from classifier.config_checks import require
from classifier.detectors import monotonic_s_of, wall_s_of
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.channels import aligned, interval_seconds, is_fresh, is_same_work, process_ids
from classifier.detectors.restored import (
    LONGEST_GAP_S,
    Pending,
    gpu_states,
    gpu_text,
    number,
    optional,
    process_starts,
    processes_state,
    table,
)
from classifier.results import Assessment, Decision

#: Owners older than this many of their periods are not known any more.
_OWNER_PERIODS: Final = 3.0
#: The distance of samples is looked at anew this often, and at every call until so much was seen.
_SETTLED_S: Final = 60.0
#: Most of those a GPU is allocated to that are remembered over a restart.
_JOB_KEYS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LowUtilizationConfig:
    """When a GPU that somebody has counts as not used."""

    enabled: bool = True
    #: A sample at or above this utilisation, or SM activity where no utilisation is measured, is work.
    utilization_ratio: float = 0.05
    #: Share of samples that may be work: 0.05 makes `utilization_ratio` a 95th percentile.
    work_share_ratio: float = 0.05
    #: Time over which that share is allowed to be spent at once.
    share_seconds: float = 300.0
    #: Memory that a program must hold.
    memory_held_bytes: float = 1e9
    #: Power above context-idle power by this share of the range up to the limit is work of some kind.
    power_margin_ratio: float = 0.05
    #: Held but idle: observed time until an info finding ...
    info_seconds: float = 1800.0
    #: ... and until a warning.
    warning_seconds: float = 7200.0
    #: Memory in use without one sample of work: observed time until an info finding ...
    memory_info_seconds: float = 14400.0
    #: ... and until a warning.
    memory_warning_seconds: float = 28800.0
    #: Allocated but empty: observed time until an info finding ...
    empty_info_seconds: float = 1800.0
    #: ... and until a warning.
    empty_warning_seconds: float = 7200.0
    #: A GPU that was labelled `inference` is left alone for this long afterwards.
    serving_memory_seconds: float = 86400.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.utilization_ratio > 0, "utilization_ratio", self.utilization_ratio, "above 0")
        for kind in ("", "memory_", "empty_"):
            info_s, warning_s = getattr(self, f"{kind}info_seconds"), getattr(self, f"{kind}warning_seconds")
            allowed = f"at least {kind}info_seconds ({info_s})"
            require(warning_s >= info_s, f"{kind}warning_seconds", warning_s, allowed)


@dataclass(slots=True)
class _Stretch:
    """For how long something has been so; only observed time counts."""

    since: Instant | None = None
    observed_s: float = 0.0

    def go_on(self, now: Instant, elapsed_s: float, seen_s: float) -> None:
        """Add `elapsed_s`; of a first sample only what was really seen."""
        if self.since is None:
            self.since, self.observed_s = now.later(-min(elapsed_s, seen_s)), 0.0
        self.observed_s += elapsed_s

    def end(self) -> None:
        """Start anew with the next observation."""
        self.since = None

    def severity(self, info_s: float, warning_s: float) -> int:
        """Return 0, 1 or 2 by how long it has lasted."""
        if self.since is None:
            return 0
        return int(self.observed_s >= info_s) + int(self.observed_s >= warning_s)


_NOBODY: Final[tuple[frozenset[str], _Stretch | None]] = (frozenset(), None)


@dataclass(slots=True)
class _Run:
    """What one GPU has been doing."""

    idle: _Stretch = field(default_factory=_Stretch)  # held but idle
    still: _Stretch = field(default_factory=_Stretch)  # memory in use, no work at all
    empty: _Stretch = field(default_factory=_Stretch)  # allocated but empty
    seen_s: float | None = None
    interval_s: float = 1.0  # usual distance of two samples ...
    interval_until_s: float = 0.0  # ... which is looked at anew then
    excess_s: float = 0.0  # work beyond the allowed share, a leaky bucket
    work_s: float = 0.0
    process_ids: frozenset[int] | None = None
    starts: Mapping[int, float] = field(default_factory=dict)
    serving_s: float | None = None
    job_keys: frozenset[str] = frozenset()  # of those it is allocated to

    def forget(self) -> None:
        """Start anew: other processes are other work."""
        self.idle.end()
        self.still.end()
        self.serving_s = None


class LowUtilizationDetector:
    """Says for every GPU whether somebody has it for nothing."""

    anomalies: tuple[str, ...] = ("low_utilization",)
    learner: str = "low_utilization"

    def __init__(self, config: LowUtilizationConfig, baselines: PowerBaselines) -> None:
        self._config = config
        self._baselines = baselines
        self._runs: dict[GpuKey, _Run] = {}
        self._pending: Pending[_Run] | None = None
        #: By GPU: for how long it was empty before a restart, and whose it was.
        self._empty: dict[str, tuple[frozenset[str], _Stretch | None]] = {}

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return one assessment for each GPU where one of the variants can be seen."""
        assessments = []
        for gone in self._runs.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._runs[gone]
        for key, gpu in history.gpus.items():
            restored = self._pending.take(gpu, now) if self._pending is not None else None
            if restored is not None:
                self._runs[key] = restored
            elif self._pending is not None and self._pending.waits_for(gpu):
                continue  # what it did before is not known yet: 0 would end a finding that lasts
            assessment = self._assess_gpu(now, gpu, decisions.get(key))
            if assessment is not None:
                assessments.append(assessment)
        return tuple(assessments)

    def learned(self, now: Instant) -> Mapping[str, object]:
        """Return since when each GPU with processes has been idle, and when it last served."""
        gpus: dict[str, object] = {}
        for key, run in self._runs.items():
            name = gpu_text(key)
            if name is not None and run.starts and run.seen_s is not None:
                gpus[name] = {
                    "processes": processes_state(run.starts, now),
                    "seen_wall_s": wall_s_of(run.seen_s, now),
                    "serving_wall_s": None if run.serving_s is None else wall_s_of(run.serving_s, now),
                    "excess_s": run.excess_s,
                    "work_s": run.work_s,
                    "idle": _stretch_state(run.idle, now),
                    "still": _stretch_state(run.still, now),
                }
            elif name is not None and run.job_keys and run.seen_s is not None:
                gpus[name] = {
                    "seen_wall_s": wall_s_of(run.seen_s, now),
                    "empty": _stretch_state(run.empty, now),
                    "job_keys": sorted(run.job_keys)[:_JOB_KEYS],
                }
        return {"gpus": {**gpus, **(self._pending.states(now) if self._pending is not None else {})}}

    def restore(self, state: Mapping[str, object], now: Instant) -> None:
        """Take the counts back, each once its GPU shows the same processes; the time in between does not count."""
        pending: Pending[_Run] = Pending(now)
        empties: dict[str, tuple[frozenset[str], _Stretch | None]] = {}
        for name, section in gpu_states(state):
            seen_wall_s, serving_wall_s = number(section, "seen_wall_s"), optional(section, "serving_wall_s")
            if "empty" in section:
                if 0 <= now.wall_s - seen_wall_s <= LONGEST_GAP_S:
                    empties[name] = (_job_keys(section), _restored_stretch(section, "empty", now))
                continue
            run = _Run(
                idle=_restored_stretch(section, "idle", now),
                still=_restored_stretch(section, "still", now),
                seen_s=monotonic_s_of(seen_wall_s, now),
                excess_s=number(section, "excess_s"),
                work_s=number(section, "work_s"),
                serving_s=None if serving_wall_s is None else monotonic_s_of(serving_wall_s, now),
            )
            pending.put(name, section, run, seen_wall_s)
        self._pending, self._empty = pending, empties

    def _assess_gpu(self, now: Instant, gpu: GpuHistory, decision: Decision | None) -> Assessment | None:
        run = self._runs.setdefault(gpu.key, _Run())
        now_s = now.monotonic_s
        interval_s = _interval_seconds(run, gpu, now_s)
        if not is_fresh(gpu, now_s, interval_s) or gpu.state == "lost":
            return None
        max_age_s = max(15.0, 3 * interval_s)
        used_bytes = gpu.latest("memory_used_bytes", now_s, max_age_s)
        held_bytes = _held_bytes(gpu, used_bytes)
        is_measured = gpu.has("utilization_ratio") or gpu.has("sm_active_ratio")
        empty_for = _allocated_empty(gpu, now_s)
        if (held_bytes is None or not is_measured) and empty_for is None:
            return None
        lookback_s = interval_s if run.seen_s is None else max(now_s - run.seen_s, 0.001)
        run.seen_s = now_s
        if decision is not None and decision.workload == "inference":
            run.serving_s = now_s
        present = process_ids(gpu)
        if run.process_ids != present and not is_same_work(run.process_ids, present):
            run.forget()
        run.process_ids = present
        run.starts = process_starts(gpu)
        times = gpu.series("samples", now_s, lookback_s).times
        # Observed time only: a gap in telemetry is neither idleness nor work. A lone first sample stands for a whole
        # interval, of which nothing was seen.
        elapsed_s = min(lookback_s, times.size * interval_s)
        seen_s = now_s - (now_s if gpu.first_s is None else gpu.first_s)
        self._follow_owners(run, gpu, empty_for)
        if run.job_keys:
            run.empty.go_on(now, elapsed_s, seen_s)
        is_active, is_work = self._work(gpu, times, now_s, lookback_s)
        if (held_bytes or 0.0) < self._config.memory_held_bytes:
            run.idle.end()
        elif is_work.size:
            self._advance_idle(
                run, now, np.count_nonzero(is_work) / is_work.size, min(lookback_s, is_work.size * interval_s), seen_s
            )
        if max(held_bytes or 0.0, used_bytes or 0.0) < self._config.memory_held_bytes or np.count_nonzero(is_active):
            run.still.end()
        elif is_active.size:
            run.still.go_on(now, min(lookback_s, is_active.size * interval_s), seen_s)
        return self._judge(run, gpu, held_bytes, used_bytes)

    def _work(
        self, gpu: GpuHistory, times: NDArray[np.float64], now_s: float, lookback_s: float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return for each sample since the last call whether it shows work: by activity alone, and by power as well."""
        utilization = aligned(gpu, "utilization_ratio", times, now_s, lookback_s)
        known = np.isfinite(utilization)
        if not np.count_nonzero(known):
            utilization = aligned(gpu, "sm_active_ratio", times, now_s, lookback_s)
            known = np.isfinite(utilization)
        is_active = utilization >= self._config.utilization_ratio
        is_work = is_active
        limit_watts = self._power_limit(gpu)
        if limit_watts is not None:
            is_work = is_active | (aligned(gpu, "power_watts", times, now_s, lookback_s) > limit_watts)
        return is_active[known], is_work[known]

    def _advance_idle(self, run: _Run, now: Instant, share: float, elapsed_s: float, seen_s: float) -> None:
        config = self._config
        if run.idle.since is None:
            run.excess_s, run.work_s = 0.0, 0.0
        run.idle.go_on(now, elapsed_s, seen_s)
        run.work_s += share * elapsed_s
        run.excess_s = max(0.0, run.excess_s + (share - config.work_share_ratio) * elapsed_s)
        if run.excess_s > config.work_share_ratio * config.share_seconds:
            run.idle.end()

    def _follow_owners(self, run: _Run, gpu: GpuHistory, owners: GpuOwners | None) -> None:
        """Note whom the GPU is allocated to while it is empty; others begin anew."""
        job_keys = frozenset(holder.job_key for holder in owners.holders) if owners is not None else frozenset()
        if run.job_keys.isdisjoint(job_keys):
            run.empty.end()
            before, stretch = self._empty.pop(gpu_text(gpu.key) or "", _NOBODY) if job_keys else _NOBODY
            if stretch is not None and not before.isdisjoint(job_keys):
                run.empty = stretch
        run.job_keys = job_keys

    def _judge(self, run: _Run, gpu: GpuHistory, held_bytes: float | None, used_bytes: float | None) -> Assessment:
        config = self._config
        empty = run.empty.severity(config.empty_info_seconds, config.empty_warning_seconds)
        still = run.still.severity(config.memory_info_seconds, config.memory_warning_seconds)
        idle = run.idle.severity(config.info_seconds, config.warning_seconds)
        if run.serving_s is not None and (run.seen_s or 0.0) - run.serving_s <= config.serving_memory_seconds:
            still = idle = 0
        severity = max(empty, still, idle)
        if not severity:
            return Assessment(anomaly="low_utilization", scope="gpu", severity=0, key=gpu.key)
        power_watts = gpu.latest("power_watts", run.seen_s or 0.0, 60.0)
        size_bytes = max(held_bytes or 0.0, used_bytes or 0.0)
        if empty == severity:
            variant, stretch, work_ratio = "allocated_empty", run.empty, None
        elif still == severity:
            variant, stretch, work_ratio = "memory_held", run.still, 0.0
        else:
            variant, stretch = "held_idle", run.idle
            work_ratio, size_bytes = run.work_s / stretch.observed_s, held_bytes or 0.0
        return Assessment(
            anomaly="low_utilization",
            scope="gpu",
            severity=severity,
            key=gpu.key,
            since_monotonic_s=stretch.since.monotonic_s if stretch.since else None,
            since_wall_s=stretch.since.wall_s if stretch.since else None,
            evidence={
                "variant": variant,
                "idle_seconds": stretch.observed_s,
                "work_share_ratio": work_ratio,
                "utilization_threshold_ratio": config.utilization_ratio,
                "memory_held_bytes": size_bytes,
                "power_watts": power_watts,
                "context_idle_watts": self._baselines.context_idle_watts(gpu.key),
                "processes": None if gpu.processes is None else float(len(gpu.processes)),
            },
            # Nobody is known who could be asked about memory that no process holds.
            action="look" if variant == "memory_held" and gpu.processes == () else "contact_user",
            summary=_summary(variant, run, gpu, size_bytes, power_watts),
        )

    def _power_limit(self, gpu: GpuHistory) -> float | None:
        idle = self._baselines.context_idle_watts(gpu.key)
        top = gpu.power_limit_watts or self._baselines.busy_watts(gpu.key)
        if idle is None or top is None:
            return None
        return idle + max(self._config.power_margin_ratio * (top - idle), 0.1 * idle)


def _interval_seconds(run: _Run, gpu: GpuHistory, now_s: float) -> float:
    """Return the usual distance of two samples, which changes rarely once there are some."""
    if now_s >= run.interval_until_s:
        run.interval_s = interval_seconds(gpu, now_s)
        is_settled = gpu.first_s is not None and now_s - gpu.first_s >= _SETTLED_S
        run.interval_until_s = now_s + (_SETTLED_S if is_settled else 0.0)
    return run.interval_s


def _held_bytes(gpu: GpuHistory, used_bytes: float | None) -> float | None:
    """Return the memory that programs hold; 0 where there is none, None where that cannot be seen."""
    if gpu.processes is None:
        return used_bytes
    if not gpu.processes:
        return 0.0
    sizes = [process.memory_used_bytes for process in gpu.processes]
    if any(size is None for size in sizes):
        return used_bytes
    return float(sum(size for size in sizes if size is not None))


def _allocated_empty(gpu: GpuHistory, now_s: float) -> GpuOwners | None:
    """Return who has the GPU and no process on it, where nobody has one.

    None where nobody has it, where somebody works on it, and where that cannot be seen.
    """
    owners = gpu.owners
    if owners is None or not owners.holders or gpu.processes is None or gpu.processes:
        return None
    if now_s - owners.monotonic_s > _OWNER_PERIODS * PERIODS_S[GpuOwners]:
        return None
    return owners if all(holder.processes == 0 for holder in owners.holders) else None


def _summary(variant: str, run: _Run, gpu: GpuHistory, size_bytes: float, power_watts: float | None) -> str:
    """Return what is so, in one sentence with the numbers."""
    name = f"GPU {gpu.key.gpu}"
    drawn = "" if power_watts is None else f" and draws {power_watts:.0f} W"
    if variant == "allocated_empty":
        who = ", ".join(sorted(run.job_keys)[:3])
        minutes = run.empty.observed_s / 60
        return f"{name} has been allocated but empty for {minutes:.0f} min: {who} has it, no process is on it{drawn}."
    if variant == "memory_held":
        by = " by no process that the driver lists" if gpu.processes == () else ""
        hours = run.still.observed_s / 3600
        held = f"{size_bytes / 1e9:.1f} GB of its memory are held{by}"
        return f"{name} has done nothing for {hours:.1f} h{drawn}, while {held}."
    minutes, share = run.idle.observed_s / 60, run.work_s / run.idle.observed_s
    return (
        f"{name} has been held but idle for {minutes:.0f} min: it holds {size_bytes / 1e9:.1f} GB{drawn}, "
        f"and {100 * share:.1f} % of its samples showed work."
    )


def _job_keys(section: Mapping[str, object]) -> frozenset[str]:
    values = section.get("job_keys")
    if isinstance(values, list) and len(values) <= _JOB_KEYS and all(isinstance(value, str) for value in values):
        return frozenset(values)
    raise ValueError("job_keys is no short list of texts")


def _stretch_state(stretch: _Stretch, now: Instant) -> Mapping[str, object]:
    since_wall_s = None if stretch.since is None else wall_s_of(stretch.since.monotonic_s, now)
    return {"since_wall_s": since_wall_s, "observed_s": stretch.observed_s}


def _restored_stretch(section: Mapping[str, object], name: str, now: Instant) -> _Stretch:
    state = table(section, name)
    since_wall_s, observed_s = optional(state, "since_wall_s"), number(state, "observed_s")
    if since_wall_s is None:
        return _Stretch()
    if not 0 <= observed_s <= now.wall_s - since_wall_s + 60.0:
        raise ValueError("observed_s is longer than the time since")
    return _Stretch(Instant(monotonic_s_of(since_wall_s, now), since_wall_s), observed_s)
