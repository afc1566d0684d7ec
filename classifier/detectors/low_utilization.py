"""low_utilization: a program holds the GPU and its memory, and does nothing with it.

Sees utilisation (SM activity where there is none, as on MIG instances), power against the learned context-idle power,
the process list or, where there is none, the memory in use. Cannot tell a forgotten notebook from a server without
requests by itself: where the label was `inference` within the last day (`serving_memory_seconds`) with the same
processes, nothing is said. A gap in telemetry pauses the count and ends nothing. With neither utilisation nor SM
activity, or with neither a process list nor memory in use, the GPU is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.channels import aligned, interval_seconds, is_fresh, is_same_work, process_ids
from classifier.results import Assessment, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class LowUtilizationConfig:
    """When a held GPU counts as not used."""

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
    #: Observed idle time until an info finding.
    info_seconds: float = 1800.0
    #: Observed idle time until a warning.
    warning_seconds: float = 7200.0
    #: A GPU that was labelled `inference` is left alone for this long afterwards.
    serving_memory_seconds: float = 86400.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.utilization_ratio > 0, "utilization_ratio", self.utilization_ratio, "above 0")
        is_ordered = self.warning_seconds >= self.info_seconds
        require(is_ordered, "warning_seconds", self.warning_seconds, f"at least info_seconds ({self.info_seconds})")


@dataclass(slots=True)
class _Run:
    """The present stretch of idleness of one GPU."""

    seen_s: float | None = None
    since: Instant | None = None
    observed_s: float = 0.0
    excess_s: float = 0.0  # work beyond the allowed share, a leaky bucket
    work_s: float = 0.0
    process_ids: frozenset[int] | None = None
    serving_s: float | None = None


class LowUtilizationDetector:
    """Says for every GPU whether it is held but idle."""

    anomalies: tuple[str, ...] = ("low_utilization",)

    def __init__(self, config: LowUtilizationConfig, baselines: PowerBaselines) -> None:
        self._config = config
        self._baselines = baselines
        self._runs: dict[GpuKey, _Run] = {}

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return one assessment for each GPU with utilisation or SM activity, and a known holder."""
        assessments = []
        for gone in self._runs.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._runs[gone]
        for key, gpu in history.gpus.items():
            assessment = self._assess_gpu(now, gpu, decisions.get(key))
            if assessment is not None:
                assessments.append(assessment)
        return tuple(assessments)

    def _assess_gpu(self, now: Instant, gpu: GpuHistory, decision: Decision | None) -> Assessment | None:
        run = self._runs.setdefault(gpu.key, _Run())
        now_s = now.monotonic_s
        interval_s = interval_seconds(gpu, now_s)
        if not is_fresh(gpu, now_s, interval_s) or gpu.state == "lost":
            return None
        held_bytes = self._held_bytes(gpu, now_s, max(15.0, 3 * interval_s))
        if held_bytes is None or not (gpu.has("utilization_ratio") or gpu.has("sm_active_ratio")):
            return None
        lookback_s = interval_s if run.seen_s is None else max(now_s - run.seen_s, 0.001)
        run.seen_s = now_s
        if decision is not None and decision.workload == "inference":
            run.serving_s = now_s
        present = process_ids(gpu)
        if not is_same_work(run.process_ids, present):
            run.since, run.serving_s = None, None
        run.process_ids = present
        if held_bytes < self._config.memory_held_bytes:
            run.since = None
            return self._nothing(gpu)
        is_work = self._work(gpu, now_s, lookback_s)
        if is_work.size:
            # Observed time only: a gap in telemetry is neither idleness nor work.
            first_s = now_s if gpu.first_s is None else gpu.first_s
            self._advance(run, now, first_s, float(np.mean(is_work)), min(lookback_s, is_work.size * interval_s))
        return self._judge(run, gpu, held_bytes)

    def _work(self, gpu: GpuHistory, now_s: float, lookback_s: float) -> NDArray[np.bool_]:
        """Return for each sample since the last call whether it shows work, by utilisation or by power."""
        times = gpu.series("samples", now_s, lookback_s).times
        utilization = aligned(gpu, "utilization_ratio", times, now_s, lookback_s)
        if not np.isfinite(utilization).any():
            utilization = aligned(gpu, "sm_active_ratio", times, now_s, lookback_s)
        work = utilization >= self._config.utilization_ratio
        limit_watts = self._power_limit(gpu)
        if limit_watts is not None:
            work |= aligned(gpu, "power_watts", times, now_s, lookback_s) > limit_watts
        return work[np.isfinite(utilization)]

    def _advance(self, run: _Run, now: Instant, first_s: float, share: float, elapsed_s: float) -> None:
        config = self._config
        if run.since is None:
            # A lone first sample stands for a whole interval, of which nothing was seen.
            elapsed_seen_s = min(elapsed_s, now.monotonic_s - first_s)
            run.since, run.observed_s, run.excess_s, run.work_s = now.later(-elapsed_seen_s), 0.0, 0.0, 0.0
        run.observed_s += elapsed_s
        run.work_s += share * elapsed_s
        run.excess_s = max(0.0, run.excess_s + (share - config.work_share_ratio) * elapsed_s)
        if run.excess_s > config.work_share_ratio * config.share_seconds:
            run.since = None

    def _judge(self, run: _Run, gpu: GpuHistory, held_bytes: float) -> Assessment:
        config = self._config
        if run.since is None or run.observed_s < config.info_seconds:
            return self._nothing(gpu)
        if run.serving_s is not None and (run.seen_s or 0.0) - run.serving_s <= config.serving_memory_seconds:
            return self._nothing(gpu)
        power_watts = gpu.latest("power_watts", run.seen_s or 0.0, 60.0)
        severity = 2 if run.observed_s >= config.warning_seconds else 1
        work_ratio = run.work_s / run.observed_s
        context_watts = self._baselines.context_idle_watts(gpu.key)
        drawn = "" if power_watts is None else f" and draws {power_watts:.0f} W"
        return Assessment(
            anomaly="low_utilization",
            scope="gpu",
            severity=severity,
            key=gpu.key,
            since_monotonic_s=run.since.monotonic_s,
            since_wall_s=run.since.wall_s,
            evidence={
                "idle_seconds": run.observed_s,
                "work_share_ratio": work_ratio,
                "utilization_threshold_ratio": config.utilization_ratio,
                "memory_held_bytes": held_bytes,
                "power_watts": power_watts,
                "context_idle_watts": context_watts,
                "processes": None if gpu.processes is None else float(len(gpu.processes)),
            },
            action="contact_user",
            summary=f"GPU {gpu.key.gpu} has been held but idle for {run.observed_s / 60:.0f} min: it holds "
            f"{held_bytes / 1e9:.1f} GB{drawn}, and {100 * work_ratio:.1f} % of its samples showed work.",
        )

    def _held_bytes(self, gpu: GpuHistory, now_s: float, max_age_s: float) -> float | None:
        """Return the memory that programs hold; 0 where there is none, None where that cannot be seen."""
        used = gpu.latest("memory_used_bytes", now_s, max_age_s)
        if gpu.processes is None:
            return used
        if not gpu.processes:
            return 0.0
        sizes = [process.memory_used_bytes for process in gpu.processes]
        if any(size is None for size in sizes):
            return used
        return float(sum(size for size in sizes if size is not None))

    def _power_limit(self, gpu: GpuHistory) -> float | None:
        idle = self._baselines.context_idle_watts(gpu.key)
        top = gpu.power_limit_watts or self._baselines.busy_watts(gpu.key)
        if idle is None or top is None:
            return None
        return idle + max(self._config.power_margin_ratio * (top - idle), 0.1 * idle)

    def _nothing(self, gpu: GpuHistory) -> Assessment:
        return Assessment(anomaly="low_utilization", scope="gpu", severity=0, key=gpu.key)
