"""A node whose processes, clocks and pressures are seen too: `detector_histories.Node` and what the host tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from agent.clock import Instant
from agent.records import GpuLimits, GpuOwners, GpuSample, Holder, PressureSample, ProcessSample, Record
from tests.classifier.detector_histories import Node, Shown


def ranked(shown: Shown, gpu: int) -> Shown:
    """Return what a rank with a process of its own shows."""
    return dataclasses.replace(shown, pids=(101 + gpu,))


@dataclass(frozen=True)
class Rank:
    """What the process of one GPU does; None is not measured."""

    cores: float | None = 1.0
    loader_cores: float = 0.0
    loaders: int = 0
    state: str = "S"
    program: str | None = None
    declared_class: str | None = None


@dataclass
class HostedNode(Node):
    """Adds processes (one for each GPU), pressure, owners and further values of samples and limits."""

    ranks: Callable[[int, float], Rank] = lambda _, __: Rank()
    cpu_pressure: Callable[[float], float] | None = None
    #: Further values of GpuSample and GpuLimits by GPU and second.
    sample: Callable[[int, float], Mapping[str, object]] = lambda _, __: {}
    limits: Callable[[int, float], Mapping[str, object]] = lambda _, __: {}
    #: Further records by second.
    more: Callable[[Node, Instant], Iterator[Record]] = lambda _, __: iter(())
    jobs: tuple[str, ...] = ()  # of each GPU
    _cpu: dict[str, float] = field(default_factory=dict)

    def _grow(self, name: str, rate: float) -> float:
        self._cpu[name] = self._cpu.get(name, 0.0) + rate * self.interval_s
        return self._cpu[name]

    def _records(self, now: Instant) -> Iterator[Record]:
        for record in super()._records(now):
            if isinstance(record, GpuSample):
                yield dataclasses.replace(record, **self.sample(record.key.gpu, self.now_s))
            elif isinstance(record, GpuLimits):
                yield dataclasses.replace(record, **self.limits(record.key.gpu, self.now_s))
            else:
                yield record
        at = {"monotonic_s": now.monotonic_s, "wall_s": now.wall_s}
        is_slow = self.now_s % 5.0 < self.interval_s
        for gpu in range(self.gpus):
            rank = self.ranks(gpu, self.now_s)
            own, loaders = self._grow(f"own{gpu}", rank.cores or 0.0), self._grow(f"loaders{gpu}", rank.loader_cores)
            if is_slow and rank.cores is not None:
                yield ProcessSample(
                    **at,
                    pid=101 + gpu,
                    started_monotonic_s=0.0,
                    state=rank.state,
                    cpu_seconds_total=own,
                    descendants_cpu_seconds_total=loaders,
                    descendants=rank.loaders,
                    program=rank.program,
                    declared_class=rank.declared_class,
                )
        if self.cpu_pressure is not None:
            stalled = self._grow("pressure", self.cpu_pressure(self.now_s))
            if is_slow:
                yield PressureSample(**at, cpu_some_seconds_total=stalled, dirty_bytes=0, writeback_bytes=0)
        if self.jobs and is_slow:
            for gpu, job in enumerate(self.jobs):
                yield GpuOwners(**at, key=self.key(gpu), holders=(Holder(job_key=job, scheduler=job.split(":")[0]),))
        yield from self.more(self, now)
