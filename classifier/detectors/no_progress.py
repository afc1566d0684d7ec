"""no_progress: GPUs that trained do nothing at all, their processes live, and nothing on the host works for them.

A stall in which no kernel spins: a rank that waits in a lock or a socket, collectives polled from the CPU, a scheduler
that never hands out the next batch. It looks like a pause, so it is a warning and never more. What arms is the GPU's
own past: two minutes of work in the last fifteen, without rests (training goes on until it ends; cells and requests
come and go), and that it trained: by its label of then, or, where that was not known, by steps that were seen for most
of that time or by others that worked in step and fell quiet with it. A label or a declaration of inference, and
notebooks, never arm: they wait for people.

Quiet is utilisation near 0 without NVLink or PCIe traffic, host I/O that is measured and quiet, and processes that use
no CPU, for five minutes. A process that keeps one core busy (it may poll, it may compute) makes it information, after
ten minutes. Processes that are stopped (state T: SIGSTOP, a debugger, a suspended job) are information of their own.
Where the CPU time of the processes or the host's I/O is not measured, the GPU is left out. So it is while another GPU
of the same job still works: that is stalled_collective's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.card_watch import Answers
from classifier.detectors.channels import interval_seconds, is_fresh, is_in_step, is_same_work, process_ids
from classifier.detectors.host_io import HostIo, HostIoConfig, observe_host_io
from classifier.detectors.step_pace import StepPaces
from classifier.detectors.work_groups import job_keys
from classifier.results import Assessment, Decision

_BIN_S: Final = 10.0
_LINKS: Final = (
    "nvlink_receive_bytes_per_second",
    "nvlink_transmit_bytes_per_second",
    "pcie_receive_bytes_per_second",
    "pcie_transmit_bytes_per_second",
)
#: Families of agent.programs that wait for a person.
_INTERACTIVE: Final = frozenset({"notebook"})
#: States of stat: stopped by a signal, or by a tracer.
_STOPPED: Final = frozenset({"T", "t"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NoProgressConfig:
    """When a quiet training job is worth a word."""

    enabled: bool = True
    #: Time between two looks.
    judge_seconds: float = 10.0
    #: Quiet time until the warning; also of stopped processes, until the information.
    warning_seconds: float = 300.0
    #: Quiet time until the information about a job that keeps a core busy.
    polling_seconds: float = 600.0
    #: Highest utilisation of a quiet sample, and lowest of a working one.
    quiet_utilization_ratio: float = 0.03
    work_utilization_ratio: float = 0.3
    #: Traffic of NVLink or PCIe above this is work.
    link_bytes_per_second: float = 5e6
    #: CPU time of the processes of a GPU below this many cores is none: heartbeats and loggers.
    idle_cores: float = 0.2
    #: Up to this many cores is a thread that polls.
    polling_cores: float = 1.2
    #: Work that arms ...
    arm_seconds: float = 120.0
    #: ... within this long before the quiet, ...
    arm_window_seconds: float = 900.0
    #: ... and in this share of the time since the first of it: what rests for longer is a notebook, or serves.
    arm_share_ratio: float = 0.6
    #: Steps tell of training where they were seen in this share of the work.
    arm_steps_ratio: float = 0.5
    #: GPUs that fall quiet within this time of each other worked together.
    together_seconds: float = 60.0
    host_io: HostIoConfig = field(default_factory=HostIoConfig)

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        work, quiet = self.work_utilization_ratio, self.quiet_utilization_ratio
        require(work > quiet, "work_utilization_ratio", work, f"above quiet_utilization_ratio ({quiet})")
        cores = self.polling_cores
        require(cores > self.idle_cores, "polling_cores", cores, f"above idle_cores ({self.idle_cores})")
        for name in ("arm_share_ratio", "arm_steps_ratio"):
            require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0 and at most 1")
        is_within = self.arm_window_seconds >= self.arm_seconds
        require(is_within, "arm_window_seconds", self.arm_window_seconds, f"at least arm_seconds ({self.arm_seconds})")


@dataclass(slots=True)
class _Watch:
    """What one GPU did so far."""

    seen_s: float | None = None
    process_ids: frozenset[int] | None = None
    work_bins: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    worked_s: float | None = None  # last sample of work
    trained_s: float | None = None  # last label of training, and of inference, while it worked
    served_s: float | None = None
    step_bins: deque[float] = field(default_factory=lambda: deque(maxlen=256))  # those of work in which steps were seen
    quiet_s: float | None = None  # since when every sample is quiet
    cpu_s: float | None = None  # last time the processes used more than `idle_cores`
    computed_s: float | None = None  # and more than `polling_cores`

    def forget(self) -> None:
        """Begin anew: other processes are other work."""
        self.work_bins.clear()
        self.step_bins.clear()
        self.worked_s = self.trained_s = self.served_s = self.quiet_s = None
        self.cpu_s = self.computed_s = None


class NoProgressDetector:
    """Says for every GPU whether its training has gone quiet."""

    anomalies: tuple[str, ...] = ("no_progress",)

    def __init__(self, config: NoProgressConfig, paces: StepPaces) -> None:
        self._config = config
        self._paces = paces
        self._watches: dict[GpuKey, _Watch] = {}
        self._answers = Answers(config.judge_seconds)

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return one assessment for each GPU with utilisation and processes whose CPU time is measured."""
        return self._answers.of(now, history, lambda: self._look(now, history, decisions))

    def _look(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> tuple[Assessment, ...]:
        self._paces.update(now, history)
        for gone in self._watches.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._watches[gone]
        seen: list[GpuHistory] = []
        for key, gpu in history.gpus.items():
            watch = self._watches.setdefault(key, _Watch())
            if self._advance(now.monotonic_s, gpu, watch, decisions.get(key)):
                seen.append(gpu)
        quiet = [gpu for gpu in seen if self._is_long_quiet(now.monotonic_s, self._watches[gpu.key])]
        quiet = [gpu for gpu in quiet if self._is_armed(gpu, history) and not self._others_work(gpu, history, now)]
        io = self._observe(now.monotonic_s, quiet, history) if quiet else None
        found: dict[GpuKey, Assessment | None] = {}
        if io is not None:
            # What cannot be told from a job that reads or writes is left out.
            found = {gpu.key: self._judge(now, gpu, io) if io.seen else None for gpu in quiet}
        assessments = []
        for gpu in seen:
            nothing = Assessment(anomaly="no_progress", scope="gpu", severity=0, key=gpu.key)
            assessment = found.get(gpu.key, nothing)
            if assessment is not None:
                assessments.append(assessment)
        return tuple(assessments)

    def _advance(self, now_s: float, gpu: GpuHistory, watch: _Watch, decision: Decision | None) -> bool:
        """Take what is new; return whether this GPU can be judged."""
        config = self._config
        present = process_ids(gpu)
        if not is_same_work(watch.process_ids, present) or (watch.process_ids and present == frozenset()):
            watch.forget()
        watch.process_ids = present or watch.process_ids
        lookback_s = 60.0 if watch.seen_s is None else now_s - watch.seen_s
        series = gpu.series("utilization_ratio", now_s, lookback_s)
        if watch.seen_s is not None and lookback_s > 60.0:
            watch.quiet_s = None
        watch.seen_s = now_s
        if series.size:
            self._take(now_s, gpu, watch, series.times.tolist(), series.values.tolist())
        is_at_work = watch.worked_s is not None and now_s - watch.worked_s < 2 * _BIN_S
        if is_at_work and decision is not None:
            if decision.workload == "training":
                watch.trained_s = now_s
            elif decision.workload in ("inference", "other"):
                watch.served_s = now_s
        is_new = bool(watch.work_bins) and watch.work_bins[-1] not in watch.step_bins
        if is_at_work and is_new and self._paces.pace(gpu.key, now_s) is not None:
            watch.step_bins.append(watch.work_bins[-1])
        cores = gpu.series("process_cpu_ratio", now_s, lookback_s)
        if cores.size:
            most = float(cores.values.max())
            watch.cpu_s = now_s if most > config.idle_cores else watch.cpu_s
            watch.computed_s = now_s if most > config.polling_cores else watch.computed_s
        is_measured = gpu.latest("process_cpu_ratio", now_s, 30.0) is not None or bool(present == frozenset())
        return series.size > 0 and is_measured and is_fresh(gpu, now_s, 5.0) and gpu.state == "ok"

    def _take(self, now_s: float, gpu: GpuHistory, watch: _Watch, times: list[float], values: list[float]) -> None:
        config = self._config
        for time_s, value in zip(times, values, strict=True):
            if value > config.quiet_utilization_ratio:
                watch.quiet_s = None
            elif watch.quiet_s is None:
                watch.quiet_s = time_s
            if value >= config.work_utilization_ratio:
                watch.worked_s = time_s
                start_s = time_s - time_s % _BIN_S
                if not watch.work_bins or start_s > watch.work_bins[-1]:
                    watch.work_bins.append(start_s)
        for channel in _LINKS if watch.quiet_s is not None else ():
            rate = gpu.latest(channel, now_s, 15.0)
            # A reading at the start is a mean that holds work.
            if rate is not None and rate > config.link_bytes_per_second and now_s - (watch.quiet_s or now_s) > _BIN_S:
                watch.quiet_s = None

    def _is_long_quiet(self, now_s: float, watch: _Watch) -> bool:
        return watch.quiet_s is not None and now_s - watch.quiet_s >= self._config.warning_seconds

    def _is_armed(self, gpu: GpuHistory, history: History) -> bool:
        """Return whether this GPU trained before it fell quiet."""
        config, watch = self._config, self._watches[gpu.key]
        if watch.quiet_s is None or watch.worked_s is None or not self._worked_long(gpu, watch):
            return False
        is_waiting = any(
            one.program in _INTERACTIVE or one.declared_class == "inference" for one in gpu.process_samples
        )
        if is_waiting or (watch.served_s or 0.0) > (watch.trained_s or 0.0):
            return False
        if watch.trained_s is not None or self._stepped_long(watch, watch.quiet_s):
            return True
        return any(
            other is not gpu
            and other_watch.quiet_s is not None
            and abs(other_watch.quiet_s - watch.quiet_s) <= config.together_seconds
            and other_watch.worked_s is not None
            and _moved(gpu, watch.quiet_s)
            and is_in_step(gpu, other, watch.quiet_s, 300.0)
            for other, other_watch in ((history.gpus[key], self._watches[key]) for key in self._watches)
        )

    def _worked_long(self, gpu: GpuHistory, watch: _Watch) -> bool:
        """Return whether there was enough work with these processes until shortly before the quiet, and few rests."""
        config, quiet_s, worked_s = self._config, watch.quiet_s or 0.0, watch.worked_s or 0.0
        if not watch.process_ids or quiet_s - worked_s > config.arm_seconds:
            return False
        bins = [start_s for start_s in watch.work_bins if start_s >= quiet_s - config.arm_window_seconds]
        work_s = len(bins) * max(_BIN_S, interval_seconds(gpu, worked_s))
        return work_s >= config.arm_seconds and work_s >= config.arm_share_ratio * (quiet_s - bins[0])

    def _stepped_long(self, watch: _Watch, quiet_s: float) -> bool:
        """Return whether steps were seen for most of the work: here and there, the cells of a notebook show some."""
        since_s = quiet_s - self._config.arm_window_seconds
        stepped, worked = (sum(bin_s >= since_s for bin_s in bins) for bins in (watch.step_bins, watch.work_bins))
        return stepped >= self._config.arm_steps_ratio * worked

    def _others_work(self, gpu: GpuHistory, history: History, now: Instant) -> bool:
        """Return whether another GPU of the same job still works or spins."""
        quiet_s = self._watches[gpu.key].quiet_s or now.monotonic_s
        for key, watch in self._watches.items():
            if key == gpu.key or watch.quiet_s is not None or watch.worked_s is None:
                continue
            if now.monotonic_s - watch.worked_s > 2 * _BIN_S:
                continue
            mine, theirs = job_keys(gpu), job_keys(history.gpus[key])
            if mine and theirs:
                if not mine.isdisjoint(theirs):
                    return True
            elif is_in_step(gpu, history.gpus[key], quiet_s, 300.0):
                return True
        return False

    def _observe(self, now_s: float, quiet: Sequence[GpuHistory], history: History) -> HostIo:
        since_s = max(self._watches[gpu.key].quiet_s or now_s for gpu in quiet)
        keys = [gpu.key for gpu in quiet]
        others_work = any(
            watch.worked_s is not None and now_s - watch.worked_s < 30.0
            for key, watch in self._watches.items()
            if key not in keys
        )
        return observe_host_io(self._config.host_io, history, keys, since_s, now_s, others_work=others_work)

    def _judge(self, now: Instant, gpu: GpuHistory, io: HostIo) -> Assessment:
        config, watch, now_s = self._config, self._watches[gpu.key], now.monotonic_s
        since_s = watch.quiet_s or now_s
        calm_s = now_s - max(since_s, io.last_active_s or 0.0)
        states = {sample.state for sample in gpu.process_samples}
        idle_s = min(calm_s, now_s - (watch.cpu_s or 0.0))
        polling_s = min(calm_s, now_s - (watch.computed_s or 0.0))
        if states & _STOPPED:
            severity, reason, quiet_s = 1, "stopped", now_s - since_s
        elif idle_s >= config.warning_seconds:
            severity, reason, quiet_s = 2, "idle", idle_s
        elif polling_s >= config.polling_seconds:
            severity, reason, quiet_s = 1, "polling", polling_s
        else:
            return Assessment(anomaly="no_progress", scope="gpu", severity=0, key=gpu.key)
        cores = gpu.latest("process_cpu_ratio", now_s, 30.0)
        count = len(watch.process_ids or ())
        return Assessment(
            anomaly="no_progress",
            scope="gpu",
            severity=severity,
            key=gpu.key,
            since_monotonic_s=since_s,
            since_wall_s=now.wall_s - (now_s - since_s),
            evidence={
                "quiet_seconds": now_s - since_s,
                "reason": reason,
                "process_cores": cores,
                "processes": float(count),
                "power_watts": gpu.latest("power_watts", now_s, 60.0),
                "host_written_bytes_per_second": io.written_bytes_per_second,
                "host_transmit_bytes_per_second": io.transmit_bytes_per_second,
            },
            action="contact_user" if reason == "stopped" else "look",
            summary=f"GPU {gpu.key.gpu} trained and has done nothing for {quiet_s:.0f} s: {_REASONS[reason]}.",
        )


_REASONS: Final = {
    "stopped": "its processes are stopped, by a signal, a debugger or a suspended job",
    "idle": "its processes live and use no CPU, and the host neither reads nor writes for them",
    "polling": "its processes keep one core busy and move nothing",
}


def _moved(gpu: GpuHistory, until_s: float) -> bool:
    """Return whether the GPU exchanged data over NVLink or PCIe before, as far as that is measured."""
    rates = [gpu.series(channel, until_s, 300.0) for channel in _LINKS]
    measured = [float(rate.values.mean()) for rate in rates if rate.size]
    return not measured or max(measured) > 1e6
