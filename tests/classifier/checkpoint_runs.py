"""Simulated jobs that write checkpoints, a reading each 5 s, for the detector of missed ones.

`python -m tests.classifier.checkpoint_runs --days 30` prints how many late ones are found, and how many are false.
Parameters are drawn from the ranges of classifier.simulator (training_styles, checkpoints): one each 90 s to 1 h, 3 to
60 s long, 0.08 to 3 GB/s, to disks (often through a page cache), the network or a file system, by rank 0, by all ranks
or asynchronously.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from agent.clock import Instant
from agent.history import History
from agent.records import (
    GpuKey,
    GpuOwners,
    GpuProcess,
    GpuSlowSample,
    Holder,
    ProcessSample,
    Record,
    Tick,
)
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.missed_checkpoint import MissedCheckpointConfig, MissedCheckpointDetector
from classifier.results import Assessment, Decision

STEP_S = 5.0
WALL_S = 1_700_000_000.0
BUSY_W, WAIT_W, IDLE_W = 560.0, 155.0, 120.0
HOST = ("disk_written", "network_transmit", "filesystem_written")


@dataclass
class Job:
    """What one job does on its two GPUs, in readings of 5 s each."""

    steps: int
    gpus: tuple[int, ...] = (0, 1)
    key: str | None = "slurm:7"  # None: nobody knows who holds the GPUs
    job_id: str = "7"
    declared_s: float | None = None
    pids: tuple[int, ...] = (101, 102)
    new_pids_s: float | None = None  # from here on they are others
    ends_s: float | None = None  # from here on there are none
    lost_s: float | None = None  # from here on its GPUs bring nothing
    busy: np.ndarray = field(init=False)  # share of the reading in which it works
    waits: np.ndarray = field(init=False)  # share in which it waits in a collective
    transmit: np.ndarray = field(init=False)  # over PCIe, B/s of each GPU
    process_written: np.ndarray | None = None
    cores: np.ndarray | None = None  # of each rank; None where nobody may look

    def __post_init__(self) -> None:
        self.busy = np.ones(self.steps)
        self.waits = np.zeros(self.steps)
        self.transmit = np.full(self.steps, 3e6)

    def pause(self, start_s: float, end_s: float, *, spins: bool = True) -> None:
        cover(self.busy, start_s, end_s, -1.0)
        if spins:
            cover(self.waits, start_s, end_s, 1.0)
        np.clip(self.busy, 0.0, 1.0, out=self.busy)
        np.clip(self.waits, 0.0, 1.0, out=self.waits)


@dataclass
class World:
    """A host with its jobs; None among readings is a gap."""

    hours: float
    jobs: list[Job] = field(default_factory=list)
    seed: int = 0
    channels: tuple[str, ...] = HOST
    gaps: list[tuple[float, float]] = field(default_factory=list)
    #: Without these the GPUs have no such reading.
    has_pcie: bool = True
    decisions: dict[GpuKey, Decision] = field(default_factory=dict)
    judge_every: int = 1
    #: When the wall clock was set, and by how much.
    clock_set: tuple[float, float] = (0.0, 0.0)
    #: What the work of each job is labelled.
    label: str = "training"

    def __post_init__(self) -> None:
        self.steps = int(self.hours * 3600 / STEP_S)
        self.rng = np.random.default_rng(self.seed)
        self.host = {name: np.full(self.steps, 2e5) for name in HOST}
        self.host["disk_written"] = self.rng.lognormal(np.log(1e6), 0.8, self.steps)
        self.host["network_transmit"] = self.rng.lognormal(np.log(3e6), 0.4, self.steps)
        self.baselines = PowerBaselines()
        self.detector = MissedCheckpointDetector(MissedCheckpointConfig(), self.baselines)
        self.history = History()
        self._is_new: list[bool] = []

    def job(self, **options) -> Job:
        self.jobs.append(Job(self.steps, **options))
        for gpu in self.jobs[-1].gpus:
            self.decisions[key_of(gpu)] = labelled(gpu, self.label)
        return self.jobs[-1]

    def write(self, channel: str, start_s: float, end_s: float, rate: float) -> None:
        cover(self.host[channel], start_s, end_s, rate)

    def play(self, from_s: float = 0.0) -> Iterator[tuple[Instant, tuple[Assessment, ...]]]:
        noise = self.rng.normal(1.0, 0.02, (self.steps, 2))
        for step in range(int(from_s / STEP_S), self.steps):
            time_s = 1000.0 + (step + 1) * STEP_S
            set_s, by_s = self.clock_set
            now = Instant(time_s, WALL_S + time_s + by_s * (step * STEP_S >= set_s))
            if not any(start_s <= step * STEP_S < end_s for start_s, end_s in self.gaps):
                self._ingest(step, now, noise[step].tolist())
            if step % 36 == 0:
                self.baselines.update(now, self.history, self.decisions)
            if step % self.judge_every == 0:
                yield now, tuple(self.detector.assess(now, self.history, self.decisions))

    def _ingest(self, step: int, now: Instant, noise: list[float]) -> None:
        # Straight into the rings, as records would: days are played in a minute.
        time_s = now.monotonic_s
        is_new = [job.new_pids_s is not None and (step + 1) * STEP_S > job.new_pids_s for job in self.jobs]
        if step % 6 == 0 or is_new != self._is_new or not self.history.gpus:
            self._is_new = is_new
            self._facts(now)
        for job in self.jobs:
            if job.lost_s is not None and step * STEP_S >= job.lost_s:
                continue
            busy, waits, transmit = float(job.busy[step]), float(job.waits[step]), float(job.transmit[step])
            for place, gpu in enumerate(job.gpus):
                one = self.history.gpus[key_of(gpu)]
                spins = waits * min(place, 1)
                watts = (IDLE_W + (BUSY_W - IDLE_W) * busy + (WAIT_W - IDLE_W) * spins) * noise[place % 2]
                one.put("samples", time_s, 1.0)
                one.put("utilization_ratio", time_s, min(1.0, 0.03 + busy + spins))
                one.put("memory_utilization_ratio", time_s, 0.4 * busy)
                one.put("power_watts", time_s, watts)
                one.last_s = time_s
                if self.has_pcie:
                    one.put("pcie_transmit_bytes_per_second", time_s, transmit)
                if job.process_written is not None and place == 0:
                    one.put("process_written_bytes_per_second", time_s, float(job.process_written[step]))
                if job.cores is not None:
                    one.put("process_cpu_ratio", time_s, float(job.cores[step]))
        for name in self.channels:
            self.history.host.put(f"{name}_bytes_per_second", time_s, float(self.host[name][step]))

    def _facts(self, now: Instant) -> None:
        at = {"monotonic_s": now.monotonic_s, "wall_s": now.wall_s}
        records: list[Record] = []
        for job, is_new in zip(self.jobs, self._is_new, strict=True):
            elapsed_s = now.monotonic_s - 1000.0
            if job.lost_s is not None and elapsed_s >= job.lost_s:
                continue
            if job.ends_s is not None and elapsed_s >= job.ends_s:
                records += [GpuSlowSample(**at, key=key_of(gpu), processes=()) for gpu in job.gpus]
                continue
            for gpu, old_pid in zip(job.gpus, job.pids, strict=True):
                key, pid = key_of(gpu), old_pid + 1000 * is_new
                records.append(GpuSlowSample(**at, key=key, processes=(GpuProcess(pid, 40_000_000_000),)))
                records.append(ProcessSample(**at, pid=pid, started_monotonic_s=900.0 + pid / 1000))
                if job.key is not None:
                    holder = Holder(job.key, job_id=job.job_id, processes=1, checkpoint_interval_seconds=job.declared_s)
                    records.append(GpuOwners(**at, key=key, holders=(holder,), holder_count=1))
        self.history.ingest(Tick(**at, records=tuple(records)))


def labelled(gpu: int, label: str, probability: float = 0.9) -> Decision:
    rest = (1.0 - probability) / 3
    names = ("training", "inference", "idle", "other")
    return Decision(
        key=key_of(gpu),
        monotonic_s=0.0,
        wall_s=0.0,
        workload=label,
        probabilities={name: probability if name == label else rest for name in names},
        telemetry_probabilities=None,
        window_s=60.0,
        reason=None,
        since_monotonic_s=0.0,
        since_wall_s=0.0,
    )


def key_of(gpu: int) -> GpuKey:
    return GpuKey(gpu, f"GPU-{gpu:08d}")


def cover(values: np.ndarray, start_s: float, end_s: float, rate: float) -> None:
    """Add `rate` to the readings from `start_s` to `end_s`, in part where they are covered in part."""
    for step in range(max(0, int(start_s // STEP_S)), min(values.size, int(end_s // STEP_S) + 1)):
        overlap_s = min(end_s, (step + 1) * STEP_S) - max(start_s, step * STEP_S)
        values[step] += rate * max(0.0, overlap_s) / STEP_S


@dataclass
class Saves:
    """How a job saves."""

    every_s: float = 600.0
    length_s: float = 20.0
    rate: float = 1e9
    style: str = "rank0"  # rank0, all_ranks, async
    target: str = "disk_written"
    spread: float = 0.02
    cached: bool = False

    def once(self, world: World, job: Job, start_s: float, share: float = 1.0, longer: float = 1.0) -> None:
        """Write one checkpoint, or `share` of its bytes, over `longer` times the usual time."""
        length_s = self.length_s * share * longer
        total = self.rate * self.length_s * share
        if self.style == "async":
            blocking_s = float(np.clip(total / len(job.gpus) / 10e9, 0.1, 20.0))
            job.pause(start_s, start_s + blocking_s, spins=False)
            cover(job.transmit, start_s, start_s + blocking_s, total / len(job.gpus) / blocking_s)
            if job.cores is not None:
                cover(job.cores, start_s, start_s + 3 * length_s, 0.5)
            first_s, length_s = start_s + blocking_s + float(world.rng.uniform(0, 2)), 3 * length_s
        else:
            job.pause(start_s, start_s + length_s)
            first_s = start_s + float(world.rng.uniform(0, 2))
            cover(job.transmit, start_s, start_s + length_s, total / len(job.gpus) / length_s)
        if self.cached:
            first_s += float(world.rng.uniform(0, 5))
            length_s += float(world.rng.uniform(10, 30))
        world.write(self.target, first_s, first_s + length_s, total / length_s)
        if job.process_written is not None and self.style != "async":
            cover(job.process_written, start_s, start_s + self.length_s * share, total / (self.length_s * share))

    def run(self, world: World, job: Job, start_s: float, until_s: float) -> list[float]:
        """Write checkpoints from `start_s` on, and return when."""
        times = []
        while start_s < until_s:
            times.append(start_s)
            self.once(world, job, start_s)
            start_s += self.every_s * max(0.3, float(world.rng.normal(1.0, self.spread))) + self.length_s
        return times


def random_saves(rng: np.random.Generator) -> Saves:
    """Draw as the simulator does."""

    def log(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    target = str(rng.choice(HOST, p=(0.4, 0.25, 0.35)))
    return Saves(
        every_s=log(90, 3600),
        length_s=log(3, 60),
        rate=log(8e7, 3e9),
        style=str(rng.choice(("rank0", "all_ranks", "async"), p=(0.4, 0.35, 0.25))),
        target=target,
        spread=log(0.003, 0.1),
        cached=target == "disk_written" and rng.random() < 0.4,
    )


def random_world(seed: int, *, hours: float | None = None) -> tuple[World, Job, Saves]:
    """Return a host with one job, its evaluations, and in half of all cases somebody else who writes.

    Without `hours` it lasts for eleven checkpoints.
    """
    saves = random_saves(np.random.default_rng([seed, 1]))
    hours = hours or (300 + 11 * (saves.every_s + saves.length_s)) / 3600
    world = World(hours=hours, seed=seed)
    rng = world.rng
    job = world.job()
    world.has_pcie = rng.random() < 0.7
    if rng.random() < 0.85:  # the rest is hidepid
        job.cores = rng.normal(float(rng.uniform(0.5, 6.0)), 0.05, world.steps)
    if rng.random() < 0.6:  # evaluations, without writes
        every_s, length_s = float(rng.uniform(200, 4000)), float(rng.uniform(10, 120))
        for start_s in np.arange(every_s, hours * 3600, every_s + length_s):
            cover(job.busy, start_s, start_s + length_s, -0.5)
    if rng.random() < 0.25:  # a nightly copy, or another tenant without GPUs
        start_s = 0.0
        while start_s < hours * 3600:
            start_s += float(rng.exponential(3000))
            world.write("disk_written", start_s, start_s + float(rng.uniform(5, 200)), float(rng.uniform(1e8, 1e9)))
    if rng.random() < 0.25:  # a backup by the clock
        every_s = float(rng.uniform(300, 3600))
        for start_s in np.arange(every_s, hours * 3600, every_s):
            world.write(str(rng.choice(HOST)), start_s, start_s + 30.0, 5e8)
    if rng.random() < 0.3:
        world.gaps = [(start, start + float(rng.uniform(20, 400))) for start in rng.uniform(0, hours * 3600, 2)]
    return world, job, saves


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def measure(days: float, seed: int) -> None:
    """Print false findings of healthy jobs, and how many stopped checkpoints are found half a period after due."""
    false = critical = seen_s = 0.0
    began = time.process_time()
    number = 0
    while seen_s < days * 86400:
        world, job, saves = random_world(seed + number, hours=12.0)
        saves.run(world, job, 300.0 + float(world.rng.uniform(0.3, 1.0)) * saves.every_s, 12 * 3600)
        number += 1
        seen_s += 12 * 3600
        found = _findings(world)
        false += len(found)
        critical += sum(severity == 3 for *_, severity, _ in found)
        for item in found:
            say(f"  false: seed {seed + number - 1} {saves} {item}")
    say(f"{number} healthy jobs, {seen_s / 86400:.0f} job-days: {false:.0f} false, {critical:.0f} critical")
    hits = late = blind = 0
    delays = []
    for place in range(100):
        world, job, saves = random_world(seed + 50_000 + place)
        times = saves.run(world, job, 300.0 + 0.5 * saves.every_s, 300 + 9 * (saves.every_s + saves.length_s))
        period_s = saves.every_s + saves.length_s
        due_s = times[-1] + period_s
        # Nothing is due before a whole period after a gap.
        world.gaps = [gap for gap in world.gaps if gap[1] < times[-1] - period_s or gap[0] > due_s + period_s]
        played = [(now.monotonic_s - 1000.0, a) for now, some in world.play() for a in some]
        raised = [t for t, a in played if a.severity >= 2 and t > due_s]
        late += 1
        blind += not any(due_s - period_s < t < due_s for t, _ in played)
        if raised and raised[0] <= due_s + 0.5 * period_s:
            hits += 1
            delays.append((raised[0] - due_s) / period_s)
        else:
            kind = "absent" if not any(t > due_s for t, _ in played) else "late" if raised else "never"
            say(f"  missed ({kind}): seed {seed + 50_000 + place} {saves} pcie {world.has_pcie}")
    say(f"{late} stopped: {hits} found by +50 % ({blind} had no cadence), median delay {np.median(delays):.2f} periods")
    say(f"{time.process_time() - began:.0f} s of CPU")


def _findings(world: World) -> list[tuple[float, float, int, str]]:
    """Return begin, end, highest severity and variant of each stretch of severity 2 or more."""
    found: list[tuple[float, float, int, str]] = []
    is_open = False
    for now, assessments in world.play():
        severity = max((a.severity for a in assessments), default=0)
        if severity >= 2:
            variant = next(str(a.evidence["variant"]) for a in assessments if a.severity == severity)
            if is_open:
                begin_s, _, before, _ = found.pop()
                found.append((begin_s, now.monotonic_s - 1000.0, max(before, severity), variant))
            else:
                found.append((now.monotonic_s - 1000.0, now.monotonic_s - 1000.0, severity, variant))
        is_open = severity >= 2
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    measure(arguments.days, arguments.seed)
