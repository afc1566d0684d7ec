"""What is normal for each GPU: its power when a program holds it and does nothing, and when it works.

Detectors compare with these and never with absolute watts, since boards differ (a waiting T4 draws 0.57 of its limit,
a waiting H100 0.14 to 0.22). Both are learned from utilisation and power alone, at a cost of two medians per GPU and
ten seconds; what was never seen is not there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors import monotonic_s_of, wall_s_of
from classifier.detectors.channels import aligned, is_same_work, process_ids
from classifier.detectors.restored import (
    Pending,
    gpu_states,
    gpu_text,
    numbers,
    optional,
    process_starts,
    processes_state,
)
from classifier.results import Decision

#: Without memory utilisation some of the samples taken for work are waiting: busy power is above most of them.
_BLIND_QUANTILE: Final = 0.75


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
    starts: Mapping[int, float] = field(default_factory=dict)  # of the processes, as far as they can be looked at
    context_idle_watts: float | None = None
    busy_watts: float | None = None
    busy_memory_ratio: float | None = None


class PowerBaselines:
    """Learns context-idle and busy power of every GPU; call `update` before the detectors."""

    learner: str = "baseline"

    def __init__(self, config: BaselineConfig | None = None) -> None:
        self._config = config or BaselineConfig()
        self._gpus: dict[GpuKey, _Learned] = {}
        self._idle: dict[str, list[float]] = {}  # restored, of GPUs that were not seen yet
        self._pending: Pending[tuple[list[float], list[float], float]] | None = None

    def update(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> None:  # noqa: ARG002
        """Take what is new in `history`; `decisions` are not needed yet and may be empty."""

        for key, gpu in history.gpus.items():
            learned = self._gpus.get(key)
            if learned is None:
                size = self._config.observations
                learned = self._gpus[key] = _Learned(deque(maxlen=size), deque(maxlen=size), deque(maxlen=size))
                self._take_back_idle(key, learned)
            if self._pending is not None:
                self._take_back_busy(gpu, learned, now)
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

    def learned(self, now: Instant) -> Mapping[str, object]:
        """Return the observations of every GPU that has a UUID; those of work with the processes they hold for."""
        gpus: dict[str, dict[str, object]] = {name: {"idle_watts": watts} for name, watts in self._idle.items()}
        for key, learned in self._gpus.items():
            name = gpu_text(key)
            if name is None:
                continue
            section: dict[str, object] = {"idle_watts": _rounded(learned.idle, 2)}
            if learned.busy_s is not None and learned.starts:
                section["busy_watts"] = _rounded(learned.busy, 2)
                section["busy_memory_ratio"] = _rounded(learned.memory, 4)
                section["busy_wall_s"] = wall_s_of(learned.busy_s, now)
                section["seen_wall_s"] = wall_s_of(learned.last_s or now.monotonic_s, now)
                section["processes"] = processes_state(learned.starts, now)
            gpus[name] = section
        if self._pending is not None:
            for name, state in self._pending.states(now).items():
                gpus[name] = {
                    **state,
                    **{key: value for key, value in gpus.get(name, {}).items() if key == "idle_watts"},
                }
        return {"gpus": gpus}

    def restore(self, state: Mapping[str, object], now: Instant) -> None:
        """Take back idle power for the GPU whatever runs there now, and busy power for the same processes."""
        idle: dict[str, list[float]] = {}
        pending: Pending[tuple[list[float], list[float], float]] = Pending(now)
        for name, section in gpu_states(state):
            idle[name] = numbers(section, "idle_watts")
            seen_wall_s = optional(section, "seen_wall_s")
            busy_wall_s = optional(section, "busy_wall_s")
            if seen_wall_s is not None and busy_wall_s is not None:
                busy, memory = numbers(section, "busy_watts"), numbers(section, "busy_memory_ratio")
                pending.put(name, section, (busy, memory, monotonic_s_of(busy_wall_s, now)), seen_wall_s)
        self._idle, self._pending = idle, pending

    def _take_back_idle(self, key: GpuKey, learned: _Learned) -> None:
        watts = self._idle.pop(gpu_text(key) or "", None)
        if watts:
            learned.idle.extend(watts)
            learned.context_idle_watts = float(np.median(learned.idle))

    def _take_back_busy(self, gpu: GpuHistory, learned: _Learned, now: Instant) -> None:
        found = self._pending.take(gpu, now) if self._pending is not None else None
        if found is None:
            return
        watts, memory, learned.busy_s = found
        # What was seen since the restart is newer.
        for ring, earlier in ((learned.busy, watts), (learned.memory, memory)):
            newer = tuple(ring)
            ring.clear()
            ring.extend((*earlier, *newer))
        if learned.memory:
            learned.busy_memory_ratio = float(np.median(learned.memory))
        if learned.busy:
            quantile = 0.5 if learned.memory else _BLIND_QUANTILE
            learned.busy_watts = float(np.quantile(learned.busy, quantile))

    def _observe(self, gpu: GpuHistory, learned: _Learned, now_s: float) -> None:
        config = self._config
        present = process_ids(gpu)
        if not is_same_work(learned.process_ids, present):
            learned.busy.clear()
            learned.memory.clear()
            learned.busy_watts = learned.busy_s = learned.busy_memory_ratio = None
        learned.process_ids = present or learned.process_ids
        learned.starts = process_starts(gpu) or (learned.starts if present else {})
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
        watts = float(np.quantile(power[works], _BLIND_QUANTILE))
        held = learned.busy_watts is not None and watts < config.waiting_share_ratio * learned.busy_watts
        if not held or learned.busy_s is None or now_s - learned.busy_s > config.relearn_seconds:
            self._learn_busy(learned, watts, now_s, quantile=_BLIND_QUANTILE)

    def _learn_busy(self, learned: _Learned, watts: float, now_s: float, quantile: float = 0.5) -> None:
        learned.busy.append(watts)
        learned.busy_s = now_s
        learned.busy_watts = float(np.quantile(learned.busy, quantile))

    def _has_context(self, gpu: GpuHistory, now_s: float) -> bool:
        if gpu.processes is not None:
            return bool(gpu.processes)
        used = gpu.latest("memory_used_bytes", now_s, self._config.settle_seconds)
        return used is not None and used >= self._config.context_memory_bytes


def _rounded(values: Iterable[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]
