"""input_starved: a training GPU waits for data again and again, and what feeds it is at its limit.

Sees the last five minutes of utilisation every half minute: half of the samples below 70 %, more than a fifth at zero
(8 % where the two change every few seconds, since a sample is a mean of both then), and work and nothing in
turn, several times in each minute. That is what starving looks like, and what optimizers on the CPU, slow Python and
bursts of requests look like as well; so it takes a reason, too: tasks of the host wait for a CPU for 40 % of the time,
the data loaders (descendants of the GPU's processes) use their cores to 85 %, or the host reads while tasks wait for
storage for 40 % of the time, or reads at more than 80 % of the most it ever read.

Data moving from the GPU to the host by more than 200 MB/s is an optimizer on the CPU. A label of inference, idle or
other is left at nothing; without a label of training, pressure alone is a reason only where steps are seen
(`step_pace`). Where neither utilisation nor any of the reasons is measured, the GPU is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.clock import Instant
from agent.history import Array, GpuHistory, History, HostHistory
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.card_watch import Answers
from classifier.detectors.channels import is_fresh, is_same_work, process_ids
from classifier.detectors.step_pace import StepPaces
from classifier.results import Assessment, Decision

_READS: Final = (
    "disk_read_bytes_per_second",
    "filesystem_read_bytes_per_second",
    "network_receive_bytes_per_second",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStarvedConfig:
    """When a GPU counts as waiting for data."""

    enabled: bool = True
    #: Time between two looks.
    judge_seconds: float = 30.0
    #: Length of the time that is looked at: the condition has to hold for so long.
    window_seconds: float = 300.0
    #: Median utilisation below this ...
    median_ratio: float = 0.70
    #: ... and this share of samples without use is starving ...
    zero_share_ratio: float = 0.20
    #: (this share where steps of up to `short_step_seconds` are seen, or so many changes a minute) ...
    short_zero_share_ratio: float = 0.08
    short_step_seconds: float = 5.0
    short_changes_per_minute: float = 12.0
    #: ... where this share of samples is work.
    work_share_ratio: float = 0.10
    #: A sample up to this utilisation is zero, and from `work_utilization_ratio` on work.
    zero_utilization_ratio: float = 0.03
    work_utilization_ratio: float = 0.30
    #: Changes between work and zero in each minute (one in a minute where samples come every 5 s or more slowly).
    changes_per_minute: float = 4.0
    #: Tasks wait for a CPU for this share of the time.
    cpu_pressure_ratio: float = 0.40
    #: Data loaders use this share of a core each.
    loader_ratio: float = 0.85
    #: The host reads at this share of the most it ever read, ...
    read_share_ratio: float = 0.80
    #: ... which is more than this, ...
    read_bytes_per_second: float = 50e6
    #: ... while tasks wait for storage for this share of the time, where that is measured.
    io_pressure_ratio: float = 0.05
    #: Where they wait for this share, how fast it reads does not matter.
    io_limit_ratio: float = 0.40
    #: More than this from GPU to host, by GPU, is an optimizer on the CPU.
    offload_bytes_per_second: float = 200e6

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        work, zero = self.work_utilization_ratio, self.zero_utilization_ratio
        require(work > zero, "work_utilization_ratio", work, f"above zero_utilization_ratio ({zero})")
        require(self.window_seconds >= 60, "window_seconds", self.window_seconds, "at least 60")
        require(self.judge_seconds > 0, "judge_seconds", self.judge_seconds, "above 0")


@dataclass(slots=True)
class _Watch:
    process_ids: frozenset[int] | None = None
    loaders: dict[int, tuple[float, float]] = field(default_factory=dict)  # by process id: time, CPU seconds
    loader_ratio: float | None = None  # cores that each loader uses, since the last look
    loader_shares: list[float] = field(default_factory=list)
    misses: int = 0
    active: Assessment | None = None


@dataclass(frozen=True, slots=True)
class _Saw:
    """Utilisation of the window."""

    median_ratio: float
    zero_ratio: float
    changes_per_minute: float
    is_starving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """What the host did in the window; None where it is not measured."""

    cpu_pressure: float | None
    io_pressure: float | None
    reads: float | None


class InputStarvedDetector:
    """Says for every GPU whether it waits for data."""

    anomalies: tuple[str, ...] = ("input_starved",)

    def __init__(self, config: InputStarvedConfig, paces: StepPaces) -> None:
        self._config = config
        self._paces = paces
        self._watches: dict[GpuKey, _Watch] = {}
        self._most_read = 0.0  # bytes per second, mean of a look
        self._answers = Answers(config.judge_seconds)

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return one assessment for each GPU with utilisation, where at least one of the reasons is measured."""
        return self._answers.of(now, history, lambda: self._look(now, history, decisions))

    def _look(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> tuple[Assessment, ...]:
        self._paces.update(now, history)
        for gone in self._watches.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._watches[gone]
        now_s, config = now.monotonic_s, self._config
        host = _Host(
            cpu_pressure=_mean(history.host, "cpu_pressure_ratio", now_s, config.window_seconds),
            io_pressure=_mean(history.host, "io_pressure_ratio", now_s, config.window_seconds),
            reads=self._reads(history.host, now_s),
        )
        found = []
        for key, gpu in history.gpus.items():
            watch = self._watches.setdefault(key, _Watch())
            present = process_ids(gpu)
            if not is_same_work(watch.process_ids, present):
                watch.active, watch.misses = None, 0
                watch.loader_shares.clear()
            watch.process_ids = present or watch.process_ids
            self._take_loaders(gpu, watch)
            saw = self._saw(gpu, now_s)
            is_measured = host.cpu_pressure is not None or host.reads is not None or watch.loader_ratio is not None
            if saw is None or not is_measured or not is_fresh(gpu, now_s, 5.0):
                continue
            reason = self._reason(gpu, watch, decisions.get(key), host, now_s) if saw.is_starving else None
            found.append(self._judge(now, key, saw, reason, host))
        return tuple(found)

    def _saw(self, gpu: GpuHistory, now_s: float) -> _Saw | None:
        """Return how utilisation went; None where too little of the window was seen."""
        config = self._config
        times, values = gpu.series("utilization_ratio", now_s, config.window_seconds)
        if times.size < 20 or times[-1] - times[0] < 0.8 * config.window_seconds:
            return None
        zero, work = values <= config.zero_utilization_ratio, values >= config.work_utilization_ratio
        middle = float(np.median(values))
        minutes = _changes_by_minute(times, zero, work)
        interval_s = float(times[-1] - times[0]) / (times.size - 1)
        least = config.changes_per_minute if interval_s < 4.0 else 1.0
        zeros = float(zero.mean())
        step_s = self._paces.step_seconds(gpu.key, now_s)
        is_short = step_s is not None and step_s <= config.short_step_seconds
        is_short |= float(minutes.mean()) >= config.short_changes_per_minute
        share = config.short_zero_share_ratio if is_short else config.zero_share_ratio
        is_starving = middle < config.median_ratio and zeros > share
        is_starving &= float(work.mean()) >= config.work_share_ratio and bool(minutes.min() >= least)
        return _Saw(middle, zeros, float(minutes.mean()), is_starving)

    def _take_loaders(self, gpu: GpuHistory, watch: _Watch) -> None:
        """Take how busy the descendants of this GPU's processes were since the last look."""
        used, count = 0.0, 0.0
        known: dict[int, tuple[float, float]] = {}
        for sample in gpu.process_samples:
            total = sample.descendants_cpu_seconds_total
            if total is None or not sample.descendants:
                continue
            known[sample.pid] = sample.monotonic_s, total
            before = watch.loaders.get(sample.pid)
            if before is not None and sample.monotonic_s > before[0] and total >= before[1]:
                used += (total - before[1]) / (sample.monotonic_s - before[0])
                count += sample.descendants
        watch.loaders = known
        watch.loader_ratio = used / count if count else None
        if watch.loader_ratio is not None:
            watch.loader_shares.append(watch.loader_ratio)
            looks = max(1, round(self._config.window_seconds / self._config.judge_seconds))
            del watch.loader_shares[:-looks]

    def _reads(self, host: HostHistory, now_s: float) -> float | None:
        """Return the fastest of what the host reads by, mean of the window, and keep the most of a look."""
        means = [_mean(host, channel, now_s, self._config.window_seconds) for channel in _READS]
        newest = [_mean(host, channel, now_s, self._config.judge_seconds) for channel in _READS]
        self._most_read = max([self._most_read, *(rate for rate in newest if rate is not None)])
        return max((rate for rate in means if rate is not None), default=None)

    def _reason(
        self, gpu: GpuHistory, watch: _Watch, decision: Decision | None, host: _Host, now_s: float
    ) -> str | None:
        """Return what is at its limit; None where nothing is, or where this is no training."""
        config = self._config
        workload = "unknown" if decision is None else decision.workload
        back = _mean(gpu, "pcie_transmit_bytes_per_second", now_s, config.window_seconds) or 0.0
        if workload not in ("training", "unknown") or back > config.offload_bytes_per_second:
            return None
        loaders = watch.loader_shares
        if loaders and sum(loaders) / len(loaders) >= config.loader_ratio:
            return "loaders"
        least = config.read_bytes_per_second
        if host.io_pressure is None or host.io_pressure < config.io_limit_ratio:
            least = max(least, config.read_share_ratio * self._most_read)
        is_waiting = host.io_pressure is None or host.io_pressure >= config.io_pressure_ratio
        if host.reads is not None and host.reads > least and is_waiting:
            return "storage"
        is_pressed = host.cpu_pressure is not None and host.cpu_pressure > config.cpu_pressure_ratio
        has_steps = workload == "training" or self._paces.pace(gpu.key, now_s) is not None
        return "cpu" if is_pressed and has_steps else None

    def _judge(self, now: Instant, key: GpuKey, saw: _Saw, reason: str | None, host: _Host) -> Assessment:
        watch = self._watches[key]
        nothing = Assessment(anomaly="input_starved", scope="gpu", severity=0, key=key)
        if reason is None:
            watch.misses += 1
            if watch.misses >= 2:  # one look without it is no end
                watch.active = None
            return watch.active or nothing
        watch.misses = 0
        lasted_s = self._config.window_seconds
        since_s, since_wall_s = now.monotonic_s - lasted_s, now.wall_s - lasted_s
        if watch.active is not None:
            since_s = watch.active.since_monotonic_s or since_s
            since_wall_s = watch.active.since_wall_s or since_wall_s
        loaders = watch.loader_shares
        watch.active = Assessment(
            anomaly="input_starved",
            scope="gpu",
            severity=2,
            key=key,
            since_monotonic_s=since_s,
            since_wall_s=since_wall_s,
            evidence={
                "reason": reason,
                "median_utilization_ratio": saw.median_ratio,
                "zero_share_ratio": saw.zero_ratio,
                "changes_per_minute": saw.changes_per_minute,
                "cpu_pressure_ratio": host.cpu_pressure,
                "io_pressure_ratio": host.io_pressure,
                "read_bytes_per_second": host.reads,
                "most_read_bytes_per_second": self._most_read or None,
                "loader_ratio": sum(loaders) / len(loaders) if loaders else None,
            },
            action="contact_user",
            summary=f"GPU {key.gpu} waits for data: it does nothing {100 * saw.zero_ratio:.0f} % of the time, "
            f"in turn with work, and {_REASONS[reason]}.",
        )
        return watch.active


_REASONS: Final = {
    "loaders": "its data loaders use all of their cores",
    "storage": "the host reads as fast as it ever did while programs wait for storage",
    "cpu": "tasks of the host wait for CPUs",
}


def _mean(source: GpuHistory | HostHistory, channel: str, now_s: float, seconds: float) -> float | None:
    values = source.series(channel, now_s, seconds).values
    return float(values.mean()) if values.size else None


def _changes_by_minute(times: Array, zero: NDArray[np.bool_], work: NDArray[np.bool_]) -> Array:
    """Return how often work and zero followed one another in each minute of the window."""
    clear = zero | work
    kinds, at = work[clear], times[clear]
    changes = at[1:][kinds[1:] != kinds[:-1]]
    edges = np.arange(times[0], times[-1] - 30.0, 60.0)
    return np.histogram(changes, bins=np.append(edges, times[-1] + 1.0))[0].astype(np.float64)
