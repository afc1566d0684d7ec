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
from classifier.simulator.sensors import GpuReadings, SampleTimes, fast_times, read_gpu, read_host
from classifier.simulator.signals import Array, Job
from classifier.simulator.styles import style_named
from classifier.simulator.training import Span

#: Version of what the simulator writes for one seed; counted up whenever equal seeds give other bytes.
SIMULATOR_VERSION: Final = 2
_CORE_COUNTERS: Final = ("nvlink_receive", "nvlink_transmit")
_SLOW_RATES: Final = {
    "pcie_receive_bytes_total": "pcie_receive_bytes_per_second",
    "pcie_transmit_bytes_total": "pcie_transmit_bytes_per_second",
    "energy_joules_total": "energy_power_watts",
}
_PROCESS_RATES: Final = {
    "cpu_seconds_total": "process_cpu_ratio",
    "read_bytes_total": "process_read_bytes_per_second",
    "written_bytes_total": "process_written_bytes_per_second",
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
    host_counters: dict[str, Array]  # by channel of HOST_ACTIVITY; `filesystem` at the slow times, others at core
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
    style = style_named(scenario.recorder)
    rng = np.random.Generator(np.random.PCG64(seed))
    # What the recorder does never disturbs what is recorded.
    recorder_rng = np.random.Generator(np.random.PCG64([seed, 1]))
    pipes_rng = np.random.Generator(np.random.PCG64([seed, 2]))
    grid = Grid.over(scenario.duration_s)
    times = _sample_times(recorder_rng, scenario)
    resets_s = tuple(np.sort(recorder_rng.uniform(0, scenario.duration_s, scenario.counter_resets)).tolist())
    span = Span(start_s=-PRE_ROLL_S, end_s=grid.end_s, begin_s=min(-PRE_ROLL_S, -scenario.begin_s))
    if scenario.begin_s == 0:
        span = Span(start_s=-PRE_ROLL_S, end_s=grid.end_s, begin_s=0.0)
    jobs = jobs_of(scenario, board, span, rng)
    gpus: dict[int, SimulatedGpu] = {}
    for job in jobs:
        singles = float(np.exp(pipes_rng.uniform(*np.log(job.singles))))
        drift = job.drift * smooth_noise(rng, grid.edges, float(rng.uniform(3, 40)))
        for rank, gpu in enumerate(job.gpus):
            state = board_state(rng, board, grid, job=job, rank=rank, drift=drift)
            if not state.activity["fp32"].any():
                state.activity["fp32"] = singles * state.activity["sm"]
            if not (job.listed and scenario.processes_listed):
                state.processes = [(-np.inf, ())]
            key = GpuKey(gpu, f"GPU-{uuid.UUID(bytes=rng.bytes(16), version=4)}")
            readings = read_gpu(recorder_rng, board, grid, state, times=times, style=style, resets_s=resets_s)
            _lose(recorder_rng, readings.core, scenario.unread_share)
            channels = _channels(readings, times)
            gpus[gpu] = SimulatedGpu(key=key, board=board, readings=readings, channels=channels)
    host: dict[str, Array] = {}
    if style.host:
        loads = tuple(load for job in jobs for load in job.host)
        host = read_host(recorder_rng, grid, host_activity(rng, grid, loads), times)
        absent = tuple(
            n for n, there in (("infiniband", scenario.infiniband), ("filesystem", scenario.filesystem)) if not there
        )
        host = {name: totals for name, totals in host.items() if not name.startswith(absent)}
    return SimulatedRun(
        scenario=scenario,
        seed=seed,
        header=_header(scenario, seed, jobs, float(times.core_s[-1])),
        core_s=times.core_s,
        slow_s=times.slow_s,
        gpus=tuple(gpus[gpu] for gpu in sorted(gpus)),
        host_counters=host,
        host_channels=_host_channels(host, times),
    )


def _sample_times(rng: np.random.Generator, scenario: Scenario) -> SampleTimes:
    count = int(scenario.duration_s / scenario.interval_s + 1e-9) + 1
    noise = rng.normal(0, scenario.jitter_s, count)
    noise[0] = 0.0
    times = np.arange(count) * scenario.interval_s + np.clip(
        noise, -0.3 * scenario.interval_s, 0.3 * scenario.interval_s
    )
    came = rng.random(count) >= scenario.missed_share
    came[[0, -1]] = True
    every = max(1, round(scenario.slow_interval_s / scenario.interval_s))
    core: Array = np.maximum.accumulate(np.round(times, 3))[came]
    return SampleTimes(core_s=core, slow_s=core[::every], fast_s=fast_times(rng, float(core[-1])))


def _lose(rng: np.random.Generator, core: dict[str, Array], share: float) -> None:
    """Put NaN where a value could not be read."""
    if share > 0:
        for values in core.values():
            values[rng.random(values.size) < share] = np.nan


def _finite(times: Array, values: Array) -> Series:
    keep = np.isfinite(values)
    return Series(times[keep], values[keep].astype(np.float64))


def _rate(times: Array, totals: Array) -> Series:
    """Return the rate of a counter as `agent.rings.CounterRate` makes it: nothing over a reset."""
    keep = np.isfinite(totals)
    times, totals = times[keep], totals[keep]
    grown = np.diff(totals)
    up = grown >= 0
    return Series(times[1:][up], (grown / np.diff(times))[up])


def _channels(readings: GpuReadings, times: SampleTimes) -> dict[str, Series]:
    core_s, slow_s = times.core_s, times.slow_s
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
    if readings.fast_s.size:
        found["power_fast_watts"] = Series(readings.fast_s, readings.fast_watts)
    if readings.reasons:
        found["throttled"] = Series(core_s, np.zeros(core_s.size))
    found["samples"] = Series(core_s, np.ones(core_s.size))
    if readings.processes:
        starts = np.array([start for start, _ in readings.processes])
        counts = np.array([len(pids) for _, pids in readings.processes])
        since = np.searchsorted(starts, slow_s, side="right") - 1
        found["process_count"] = Series(slow_s, counts[since].astype(np.float64))
        # A rate takes two readings of the same process.
        same = (since[1:] == since[:-1]) & (counts[since[1:]] > 0)
        for name, totals in readings.process_totals.items():
            rates = np.diff(totals) / np.diff(slow_s)
            found[_PROCESS_RATES[name]] = Series(slow_s[1:][same], rates[same])
    return {name: found[name] for name in GPU_CHANNELS if name in found and found[name].size}


def _host_channels(counters: dict[str, Array], times: SampleTimes) -> dict[str, Series]:
    rates = {
        f"{name}_bytes_per_second": _rate(times.slow_s if name.startswith("filesystem") else times.core_s, totals)
        for name, totals in counters.items()
    }
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
