"""What is normal for each GPU: its power when a program holds it and does nothing, and when it works.

Detectors compare with these and never with absolute watts, since boards differ (a waiting T4 draws 0.57 of its limit,
a waiting H100 0.14 to 0.22). Both are learned from utilisation and power alone, at a cost of two medians per GPU and
ten seconds; what was never seen is not there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.channels import aligned, is_same_work, process_ids
from classifier.results import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineConfig:
    """When power counts as context-idle or busy power."""

    #: Length of one observation.
    observation_seconds: float = 10.0
    #: Idle counts only after this long, since reported power trails by up to two seconds.
    settle_seconds: float = 15.0
    #: Highest utilisation of an idle sample.
    idle_utilization_ratio: float = 0.03
    #: Lowest utilisation of a busy sample.
    busy_utilization_ratio: float = 0.5
    #: Lowest memory utilisation of a busy sample, where it is known: a waiting GPU reads 100 % and 0 to 3 %.
    busy_memory_utilization_ratio: float = 0.03
    #: A context holds at least this much memory, where no process list is known.
    context_memory_bytes: float = 256e6
    #: Observations that are remembered of each kind.
    observations: int = 60
    #: Without memory utilisation, power below this share of the busy power is taken for waiting, not for work ...
    waiting_share_ratio: float = 0.6
    #: ... until it has lasted this long.
    relearn_seconds: float = 1800.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.observation_seconds > 0, "observation_seconds", self.observation_seconds, "above 0")
        require(self.observations >= 1, "observations", self.observations, "at least 1")
        is_ordered = self.busy_utilization_ratio > self.idle_utilization_ratio
        above_idle = f"above idle_utilization_ratio ({self.idle_utilization_ratio})"
        require(is_ordered, "busy_utilization_ratio", self.busy_utilization_ratio, above_idle)


@dataclass(slots=True)
class _Learned:
    """Observations of one GPU: watts, and the memory utilisation of work."""

    idle: deque[float]
    busy: deque[float]
    memory: deque[float]
    last_s: float | None = None
    busy_s: float | None = None
    process_ids: frozenset[int] | None = field(default=None)
    context_idle_watts: float | None = None
    busy_watts: float | None = None
    busy_memory_ratio: float | None = None


class PowerBaselines:
    """Learns context-idle and busy power of every GPU; call `update` before the detectors."""

    def __init__(self, config: BaselineConfig | None = None) -> None:
        self._config = config or BaselineConfig()
        self._gpus: dict[GpuKey, _Learned] = {}

    def update(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> None:  # noqa: ARG002
        """Take what is new in `history`; `decisions` are not needed yet and may be empty."""

        for key, gpu in history.gpus.items():
            learned = self._gpus.get(key)
            if learned is None:
                size = self._config.observations
                learned = self._gpus[key] = _Learned(deque(maxlen=size), deque(maxlen=size), deque(maxlen=size))
            since = now.monotonic_s - learned.last_s if learned.last_s is not None else None
            if since is None or since >= self._config.observation_seconds:
                learned.last_s = now.monotonic_s
                self._observe(gpu, learned, now.monotonic_s)

    def watts(self, key: GpuKey) -> Mapping[str, float]:
        """Return the baselines learned so far by state: any of `context_idle` and `busy`."""
        states = {"context_idle": self.context_idle_watts(key), "busy": self.busy_watts(key)}
        return {state: watts for state, watts in states.items() if watts is not None}

    def context_idle_watts(self, key: GpuKey) -> float | None:
        """Return the power of this GPU held but idle; None where that was never seen."""
        learned = self._gpus.get(key)
        return learned.context_idle_watts if learned else None

    def busy_watts(self, key: GpuKey) -> float | None:
        """Return the usual power of this GPU at work with its present processes; None where that was not seen."""
        learned = self._gpus.get(key)
        return learned.busy_watts if learned else None

    def busy_memory_utilization_ratio(self, key: GpuKey) -> float | None:
        """Return the usual memory utilisation of this GPU at work; None where it is not measured or was not seen."""
        learned = self._gpus.get(key)
        return learned.busy_memory_ratio if learned else None

    def _observe(self, gpu: GpuHistory, learned: _Learned, now_s: float) -> None:
        config = self._config
        present = process_ids(gpu)
        if not is_same_work(learned.process_ids, present):
            learned.busy.clear()
            learned.memory.clear()
            learned.busy_watts = learned.busy_s = learned.busy_memory_ratio = None
        learned.process_ids = present or learned.process_ids
        times = gpu.series("samples", now_s, config.settle_seconds).times
        utilization = aligned(gpu, "utilization_ratio", times, now_s, config.settle_seconds)
        power = aligned(gpu, "power_watts", times, now_s, config.settle_seconds)
        known = np.isfinite(utilization) & np.isfinite(power)
        if not known.any():
            return
        recent = known & (times > now_s - config.observation_seconds)
        if bool(np.all(utilization[known] <= config.idle_utilization_ratio)):
            spans = float(times[known][-1] - times[known][0]) >= 0.6 * config.settle_seconds
            if spans and self._has_context(gpu, now_s) and recent.any():
                learned.idle.append(float(np.median(power[recent])))
                learned.context_idle_watts = float(np.median(learned.idle))
            return
        memory = aligned(gpu, "memory_utilization_ratio", times, now_s, config.settle_seconds)
        works = recent & (utilization >= config.busy_utilization_ratio)
        works &= ~(memory <= config.busy_memory_utilization_ratio)
        if not works.any():
            return
        if bool(np.isfinite(memory[works]).any()):
            learned.memory.append(float(np.nanmedian(memory[works])))
            learned.busy_memory_ratio = float(np.median(learned.memory))
            self._learn_busy(learned, float(np.median(power[works])), now_s)
            return
        watts = float(np.quantile(power[works], 0.75))
        held = learned.busy_watts is not None and watts < config.waiting_share_ratio * learned.busy_watts
        if not held or learned.busy_s is None or now_s - learned.busy_s > config.relearn_seconds:
            self._learn_busy(learned, watts, now_s, quantile=0.75)

    def _learn_busy(self, learned: _Learned, watts: float, now_s: float, quantile: float = 0.5) -> None:
        learned.busy.append(watts)
        learned.busy_s = now_s
        learned.busy_watts = float(np.quantile(learned.busy, quantile))

    def _has_context(self, gpu: GpuHistory, now_s: float) -> bool:
        if gpu.processes is not None:
            return bool(gpu.processes)
        used = gpu.latest("memory_used_bytes", now_s, self._config.settle_seconds)
        return used is not None and used >= self._config.context_memory_bytes
