"""A simulated run: every reading as arrays, and the same run as a trace of records.

One path makes both: the arrays are what the sensors say, channels are derived from them as `agent.history` derives them
from records, and records are built from the same arrays.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.history import GPU_CHANNELS, HOST_CHANNELS, Series
from agent.records import GpuKey
from agent.trace import Phase, TraceHeader
from classifier.simulator.boards import Board, board_named
from classifier.simulator.catalogue import jobs_of
from classifier.simulator.physics import PRE_ROLL_S, Grid, board_state, host_activity, smooth_noise
from classifier.simulator.scenario import Scenario
from classifier.simulator.sensors import GpuReadings, read_gpu, read_host
from classifier.simulator.signals import Array, Job
from classifier.simulator.training import Span

#: Version of what the simulator writes for one seed; counted up whenever equal seeds give other bytes.
SIMULATOR_VERSION: Final = 2
_CORE_COUNTERS: Final = ("nvlink_receive", "nvlink_transmit")
_SLOW_RATES: Final = {
    "pcie_receive_bytes_total": "pcie_receive_bytes_per_second",
    "pcie_transmit_bytes_total": "pcie_transmit_bytes_per_second",
    "energy_joules_total": "energy_power_watts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """One GPU of a run: `readings` as its driver gives them, `channels` as `agent.history` keeps them."""

    key: GpuKey
    board: Board
    readings: GpuReadings
    channels: dict[str, Series]  # names of GPU_CHANNELS; a channel without any value is left out

    @property
    def power_limit_watts(self) -> float:
        """Enforced power limit."""
        return self.board.power_limit_watts


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A whole run; times are seconds from the first tick."""

    scenario: Scenario
    seed: int
    header: TraceHeader
    core_s: Array  # times of the core ticks
    slow_s: Array  # those among them with slow values
    gpus: tuple[SimulatedGpu, ...]
    host_counters: dict[str, Array]  # by channel of HOST_ACTIVITY, at the core times
    host_channels: dict[str, Series]  # names of HOST_CHANNELS

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What was really going on."""
        return self.header.ground_truth


def simulate_arrays(scenario: Scenario, *, seed: int) -> SimulatedRun:
    """Run `scenario` and return every channel as arrays; the fast way, for training.

    Equal scenario and seed give equal values. Raises UsageError for an unknown kind, board or parameter.
    """
    board = board_named(scenario.board)
    rng = np.random.Generator(np.random.PCG64(seed))
    grid = Grid.over(scenario.duration_s)
    core_s, slow_s = _sample_times(rng, scenario)
    span = Span(start_s=-PRE_ROLL_S, end_s=grid.end_s, begin_s=min(-PRE_ROLL_S, -scenario.begin_s))
    if scenario.begin_s == 0:
        span = Span(start_s=-PRE_ROLL_S, end_s=grid.end_s, begin_s=0.0)
    jobs = jobs_of(scenario, board, span, rng)
    gpus: dict[int, SimulatedGpu] = {}
    for job in jobs:
        drift = job.drift * smooth_noise(rng, grid.edges, float(rng.uniform(3, 40)))
        for rank, gpu in enumerate(job.gpus):
            state = board_state(rng, board, grid, job=job, rank=rank, drift=drift)
            readings = read_gpu(rng, board, grid, state, core_s=core_s, slow_s=slow_s)
            key = GpuKey(gpu, f"GPU-{uuid.UUID(bytes=rng.bytes(16), version=4)}")
            channels = _channels(readings, core_s, slow_s)
            gpus[gpu] = SimulatedGpu(key=key, board=board, readings=readings, channels=channels)
    host = read_host(rng, grid, host_activity(rng, grid, tuple(load for job in jobs for load in job.host)), core_s)
    return SimulatedRun(
        scenario=scenario,
        seed=seed,
        header=_header(scenario, seed, jobs, float(core_s[-1])),
        core_s=core_s,
        slow_s=slow_s,
        gpus=tuple(gpus[gpu] for gpu in sorted(gpus)),
        host_counters=host,
        host_channels=_host_channels(scenario, host, core_s),
    )


def _sample_times(rng: np.random.Generator, scenario: Scenario) -> tuple[Array, Array]:
    count = int(scenario.duration_s / scenario.interval_s + 1e-9) + 1
    noise = rng.normal(0, scenario.jitter_s, count)
    noise[0] = 0.0
    times = np.arange(count) * scenario.interval_s + np.clip(
        noise, -0.3 * scenario.interval_s, 0.3 * scenario.interval_s
    )
    every = max(1, round(scenario.slow_interval_s / scenario.interval_s))
    core: Array = np.maximum.accumulate(np.round(times, 3))
    return core, core[::every]


def _finite(times: Array, values: Array) -> Series:
    keep = np.isfinite(values)
    return Series(times[keep], values[keep].astype(np.float64))


def _rate(times: Array, totals: Array) -> Series:
    return Series(times[1:], np.diff(totals) / np.diff(times))


def _channels(readings: GpuReadings, core_s: Array, slow_s: Array) -> dict[str, Series]:
    found = {name: _finite(core_s, values) for name, values in readings.core.items() if name in GPU_CHANNELS}
    for name in _CORE_COUNTERS:
        totals = readings.core.get(f"{name}_bytes_total")
        if totals is not None:
            found[f"{name}_bytes_per_second"] = _rate(core_s, totals)
    for name, values in readings.slow.items():
        if name in _SLOW_RATES:
            found[_SLOW_RATES[name]] = _rate(slow_s, values)
        else:
            found[name] = _finite(slow_s, values)
    found["throttled"] = Series(core_s, np.zeros(core_s.size))
    found["samples"] = Series(core_s, np.ones(core_s.size))
    starts = np.array([start for start, _ in readings.processes])
    counts = np.array([float(len(pids)) for _, pids in readings.processes])
    found["process_count"] = Series(slow_s, counts[np.searchsorted(starts, slow_s, side="right") - 1])
    return {name: found[name] for name in GPU_CHANNELS if name in found}


def _host_channels(scenario: Scenario, counters: dict[str, Array], core_s: Array) -> dict[str, Series]:
    rates = {f"{name}_bytes_per_second": _rate(core_s, totals) for name, totals in counters.items()}
    rates = {name: rate for name, rate in rates.items() if not name.startswith("filesystem")}
    if not scenario.infiniband:
        rates = {name: rate for name, rate in rates.items() if not name.startswith("infiniband")}
    return {name: rates[name] for name in HOST_CHANNELS if name in rates}


def _header(scenario: Scenario, seed: int, jobs: tuple[Job, ...], end_s: float) -> TraceHeader:
    by_gpu = {gpu: _phases(job, rank, end_s) for job in jobs for rank, gpu in enumerate(job.gpus)}
    alike = len({tuple(phases) for phases in by_gpu.values()}) == 1
    phases: list[Phase] = []
    for gpu in sorted(by_gpu)[: 1 if alike else None]:
        phases += [
            Phase(start_s=start, end_s=end, workload=workload, gpu=None if alike else gpu, anomaly=anomaly, note=note)
            for start, end, workload, anomaly, note in by_gpu[gpu]
        ]
    workloads = {phase.workload for phase in phases}
    return TraceHeader(
        provenance="simulated",
        interval_s=scenario.interval_s,
        label=workloads.pop() if len(workloads) == 1 else None,
        source=f"simulator/{scenario.kind}",
        machine={
            "about": f"simulated: no real machine, {scenario.kind}, seed {seed}; made by warpwatch simulate",
            "gpu_model": board_named(scenario.board).model_name,
            "gpu_count": scenario.gpu_count,
        },
        samplers={"simulator": str(SIMULATOR_VERSION)},
        ground_truth=tuple(phases),
    )


def _phases(job: Job, rank: int, end_s: float) -> list[tuple[float, float, str, str | None, str | None]]:
    """Return the stages of a job within the trace, neighbours that say the same made one."""
    found: list[tuple[float, float, str, str | None, str | None]] = []
    if job.stages and job.stages[0].start_s > 0:
        found.append((0.0, round(job.stages[0].start_s, 3), "idle", None, "no process"))
    for stage in job.stages:
        start, end = round(max(0.0, stage.start_s), 3), round(min(end_s, stage.end_s), 3)
        if end <= start:
            continue
        truth = (stage.workload, stage.anomaly, "missing_rank" if rank == stage.missing else stage.note)
        if found and found[-1][2:] == truth and found[-1][1] >= start - 1e-6:
            start = found.pop()[0]
        found.append((start, end, *truth))
    return found
