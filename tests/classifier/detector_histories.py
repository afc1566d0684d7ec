"""Small builders of simulated histories for detector tests: a node of GPUs played tick by tick."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from agent.clock import Instant
from agent.history import History
from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuKey,
    GpuLimits,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    InfinibandSample,
    NetworkSample,
    PressureSample,
    ProcessSample,
    Record,
    Tick,
)
from classifier.detectors import Detector
from classifier.detectors.baseline import PowerBaselines
from classifier.results import Assessment, Decision

WALL_S = 1_700_000_000.0


@dataclass(frozen=True)
class Shown:
    """What one GPU shows in one second; None is a channel that is not there."""

    utilization: float | None = 1.0
    memory: float | None = 0.4
    watts: float | None = 550.0
    tensor: float | None = 0.4
    dram: float | None = 0.35
    sm: float | None = 0.7
    nvlink: float | None = 10e9
    used_bytes: int = 40_000_000_000
    pids: tuple[int, ...] | None = (101,)
    pcie_transmit: float | None = 5e6


WORKS = Shown()
WAITS = Shown(memory=0.0, watts=155.0, tensor=0.0, dram=0.0, sm=0.18, nvlink=0.0, pcie_transmit=0.5e6)
IDLES = Shown(utilization=0.0, memory=0.0, watts=120.0, tensor=0.0, dram=0.0, sm=0.0, nvlink=0.0, pcie_transmit=0.1e6)
Script = Callable[[int, float], Shown | None]  # GPU index, second -> what it shows; None is a gap


@dataclass
class Node:
    """A node under observation: plays `script`, one second a step, and asks the detectors every five."""

    detectors: tuple[Detector, ...]
    baselines: PowerBaselines
    script: Script
    gpus: int = 8
    interval_s: float = 1.0
    judge_s: float = 5.0
    host: Callable[[float], tuple[float, float] | None] = lambda _: (1e6, 1e6)  # written, transmitted, B/s
    #: File systems whose bytes cannot be read, by type.
    unreadable: tuple[str, ...] = ()
    #: What else is measured by the second: filesystem_written, filesystem_read, infiniband (sent and received),
    #: process_written and process_read (of the process with the id after the dot) in B/s, and dirty_bytes.
    traffic: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    decisions: Callable[[float], Mapping[GpuKey, Decision]] = lambda _: {}
    limit_watts: float = 700.0
    jitter: random.Random | None = None
    history: History = field(default_factory=History)
    now_s: float = 0.0
    _totals: dict[str, float] = field(default_factory=dict)

    def key(self, gpu: int) -> GpuKey:
        return GpuKey(gpu, f"GPU-{gpu:08d}")

    def play(self, until_s: float) -> Iterator[tuple[Instant, tuple[Assessment, ...]]]:
        next_judge_s = self.now_s + self.judge_s
        while self.now_s < until_s:
            self.now_s += self.interval_s
            now = Instant(self.now_s, WALL_S + self.now_s)
            self.history.ingest(Tick(monotonic_s=now.monotonic_s, wall_s=now.wall_s, records=tuple(self._records(now))))
            if self.now_s >= next_judge_s:
                next_judge_s += self.judge_s
                decisions = self.decisions(self.now_s)
                self.baselines.update(now, self.history, decisions)
                yield now, tuple(a for d in self.detectors for a in d.assess(now, self.history, decisions))

    def _count(self, name: str, per_second: float) -> int:
        self._totals[name] = self._totals.get(name, 0.0) + per_second * self.interval_s
        return int(self._totals[name])

    def _noise(self) -> float:
        return self.jitter.gauss(1.0, 0.02) if self.jitter else 1.0

    def _records(self, now: Instant) -> Iterator[Record]:
        at = {"monotonic_s": now.monotonic_s, "wall_s": now.wall_s}
        is_slow = self.now_s % 5.0 < self.interval_s
        for gpu in range(self.gpus):
            shown = self.script(gpu, self.now_s)
            if shown is None:
                continue
            key = self.key(gpu)
            nvlink = None if shown.nvlink is None else self._count(f"nvlink{gpu}", shown.nvlink)
            yield GpuSample(
                **at,
                key=key,
                utilization_ratio=shown.utilization,
                memory_utilization_ratio=shown.memory,
                memory_used_bytes=shown.used_bytes,
                memory_total_bytes=85_000_000_000,
                power_watts=None if shown.watts is None else shown.watts * self._noise(),
                tensor_active_ratio=shown.tensor,
                dram_active_ratio=shown.dram,
                sm_active_ratio=shown.sm,
                nvlink_transmit_bytes_total=nvlink,
                nvlink_receive_bytes_total=nvlink,
            )
            pcie = None if shown.pcie_transmit is None else self._count(f"pcie{gpu}", shown.pcie_transmit)
            if is_slow:
                processes = None if shown.pids is None else tuple(GpuProcess(p, shown.used_bytes) for p in shown.pids)
                yield GpuSlowSample(**at, key=key, processes=processes, pcie_transmit_bytes_total=pcie)
                yield GpuLimits(**at, key=key, power_limit_watts=self.limit_watts)
        rates = self.host(self.now_s)
        if rates is not None:
            written, sent = self._count("written", rates[0]), self._count("sent", rates[1])
            yield DiskSample(**at, device="nvme0n1", read_bytes_total=0, written_bytes_total=written)
            yield NetworkSample(**at, device="eth0", receive_bytes_total=0, transmit_bytes_total=sent)
        counted = {name: self._count(name, rate(self.now_s)) for name, rate in self.traffic.items()}
        if "infiniband" in counted:
            total = counted["infiniband"]
            yield InfinibandSample(**at, device="mlx5_0", port=1, receive_bytes_total=total, transmit_bytes_total=total)
        if is_slow:
            yield from self._slow_host_records(at, counted)

    def _slow_host_records(self, at: Mapping[str, float], counted: Mapping[str, int]) -> Iterator[Record]:
        for fstype in self.unreadable:
            yield FilesystemSample(**at, mountpoint=f"/mnt/{fstype}", fstype=fstype)
        if "filesystem_written" in counted or "filesystem_read" in counted:
            yield FilesystemSample(
                **at, mountpoint="/data", fstype="nfs4", source="mountstats", is_rdma=True,
                read_bytes_total=counted.get("filesystem_read", 0),
                written_bytes_total=counted.get("filesystem_written", 0),
            )  # fmt: skip
        for name in counted:
            kind, _, pid = name.partition(".")
            if pid:
                yield ProcessSample(
                    **at, pid=int(pid), started_monotonic_s=0.0, **{f"{kind[8:]}_bytes_total": counted[name]}
                )
        if "dirty_bytes" in self.traffic:
            yield PressureSample(**at, dirty_bytes=int(self.traffic["dirty_bytes"](self.now_s)), writeback_bytes=0)


def severities(assessments: tuple[Assessment, ...], anomaly: str) -> dict[int, int]:
    """Return the severity of one anomaly by GPU index."""
    return {a.key.gpu: a.severity for a in assessments if a.anomaly == anomaly and a.key is not None}
