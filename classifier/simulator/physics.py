"""From activity to what a board physically does: power, temperature, clocks, memory; no sensor is involved yet.

Power of an H100 follows `109 + 601*SM + 95*tensor + 339*NVLink/450 GB/s` watts (linear fit on public recordings, mean
absolute error 6-45 W by run) and is scaled to the range between context idle and limit of the board at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from classifier.simulator.boards import Board
from classifier.simulator.signals import GPU_ACTIVITY, HOST_ACTIVITY, PROCESS_ACTIVITY, Array, HostLoad, Job

#: Width of a cell of the grid.
CELL_S: Final = 0.05
#: The grid starts this long before the trace, so that sensors that average have something to average.
PRE_ROLL_S: Final = 2.0
#: Channels that drift with the work and never exceed 1.
_PIPES: Final = ("sm", "tensor", "dram", "fp64", "fp32", "fp16", "hmma", "imma", "dfma")


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of equal width from PRE_ROLL_S before the trace to its end."""

    edges: Array

    @classmethod
    def over(cls, duration_s: float) -> Grid:
        """Return the grid for a trace of `duration_s`."""
        count = int(np.ceil((duration_s + PRE_ROLL_S + 0.5) / CELL_S))
        edges: Array = np.arange(count + 1, dtype=np.float64) * CELL_S - PRE_ROLL_S
        return cls(edges)

    @property
    def size(self) -> int:
        """Number of cells."""
        return int(self.edges.size - 1)

    @property
    def end_s(self) -> float:
        """Return the end of the last cell."""
        return float(self.edges[-1])

    def cells(self, start_s: float, end_s: float) -> slice:
        """Return the cells between two times, clipped to the grid."""
        first, last = (round((t + PRE_ROLL_S) / CELL_S) for t in (start_s, end_s))
        return slice(min(max(first, 0), self.size), min(max(last, 0), self.size))


@dataclass(slots=True)
class BoardState:
    """One GPU over the grid: activity by channel, and what follows from it."""

    activity: dict[str, Array]
    present: Array  # 1 where a process holds a context
    memory_ratio: Array
    power_watts: Array
    capped: Array  # 1 where the power limit holds the clock down
    sm_clock_ratio: Array  # of the maximum
    knots: Array  # times of the temperatures below
    temperature_celsius: Array
    #: When the set of processes changed, and the process ids from then on.
    processes: list[tuple[float, tuple[int, ...]]]


def smooth_noise(rng: np.random.Generator, edges: Array, scale_s: float) -> Array:
    """Return standard noise per cell that forgets itself over `scale_s`."""
    span = float(edges[-1] - edges[0])
    knots = rng.standard_normal(int(span / scale_s) + 3)
    noise: Array = np.interp((edges[:-1] - edges[0]) / scale_s, np.arange(knots.size), knots)
    return noise


def board_state(rng: np.random.Generator, board: Board, grid: Grid, *, job: Job, rank: int, drift: Array) -> BoardState:
    """Return what the GPU of `rank` does throughout the grid; `drift` is the job's own slow noise."""
    activity = {name: np.zeros(grid.size) for name in (*GPU_ACTIVITY, *PROCESS_ACTIVITY)}
    present = np.zeros(grid.size)
    memory = np.zeros(grid.size)
    processes: list[tuple[float, tuple[int, ...]]] = [(-np.inf, ())]
    pids: tuple[int, ...] = ()
    for stage in job.stages:
        cells = grid.cells(stage.start_s, stage.end_s)
        if stage.present != bool(pids):
            pids = (int(rng.integers(2_000, 4_000_000)),) if stage.present else ()
            processes.append((stage.start_s, pids))
        width = cells.stop - cells.start
        if width <= 0:
            continue
        for name, values in stage.signals[rank].cells(grid.edges[cells.start : cells.stop + 1]).items():
            activity[name][cells] = values
        present[cells] = float(stage.present)
        # A trace may show a part of the stage only: memory goes on from where it is.
        first, last = stage.memory_ratio
        memory[cells] = (
            first if first == last else np.interp(grid.edges[cells], (stage.start_s, stage.end_s), stage.memory_ratio)
        )
    private = 1 + drift + 0.4 * job.drift * smooth_noise(rng, grid.edges, 4.0)
    texture = 1 + 0.02 * rng.standard_normal(grid.size)
    varied = private * texture
    for name in _PIPES:
        if activity[name].any():
            activity[name] = np.minimum(np.maximum(activity[name] * varied, 0.0), 0.995)
    links = np.minimum(np.maximum(private, 0.5), 1.5)
    for name in ("nvlink_receive", "nvlink_transmit", "pcie_receive", "pcie_transmit"):
        if activity[name].any():
            activity[name] *= links
    # The driver talks to every board: about 1 MB/s at rest.
    for name, most in (("pcie_receive", 1.2e6), ("pcie_transmit", 5e5)):
        activity[name] += rng.uniform(0.2 * most, most) * np.exp(0.3 * smooth_noise(rng, grid.edges, 1.0))
    activity["spin"] = activity["spin"] * (1 + 0.01 * (texture - 1))
    wanted = _wanted_power(rng, board, job, activity, present)
    knots, temperature = _temperature(rng, grid, np.minimum(wanted, board.power_limit_watts), board)
    # Leakage grows with temperature: 0.15 to 0.3 W per degree on a 700 W board.
    leakage = (
        rng.uniform(0.15, 0.3) * board.power_limit_watts / 700 * (np.interp(grid.edges[:-1], knots, temperature) - 30)
    )
    wanted = wanted + np.maximum(leakage, 0.0)
    ceiling = board.power_limit_watts * (0.985 + 0.006 * rng.standard_normal(grid.size))
    capped = (wanted > ceiling * 0.99).astype(float)
    over = np.minimum(np.maximum(wanted / ceiling - 0.99, 0.0), 0.6)
    return BoardState(
        activity=activity,
        present=present,
        memory_ratio=memory,
        power_watts=np.minimum(wanted, ceiling),
        capped=capped,
        # Dynamic power goes with about the cube of the clock near the limit.
        sm_clock_ratio=1 - over / 2.5,
        knots=knots,
        temperature_celsius=temperature,
        processes=processes,
    )


def _wanted_power(
    rng: np.random.Generator, board: Board, job: Job, activity: dict[str, Array], present: Array
) -> Array:
    """Return the power that the work would take without a limit, leakage left out."""
    offset = 1 + float(np.clip(rng.normal(0, 0.02), -0.05, 0.05))  # boards of one model differ by up to 5 %
    # A clock that idles with a context may be at full boost or lower: the context's share of idle power varies.
    context = board.context_idle_watts * float(rng.uniform(0.97, 1.03))
    base = np.where(present > 0, context, board.bare_idle_watts)
    links = 0.0 * present
    if board.nvlink_bytes_per_second > 0:
        links = (activity["nvlink_receive"] + activity["nvlink_transmit"]) / 2 / board.nvlink_bytes_per_second
    work = 601 * activity["sm"] + 95 * activity["tensor"] + 339 * links
    dynamic = board.power_scale * (job.power_gain * work + job.spin_watts * activity["spin"])
    power: Array = offset * (base + dynamic)
    return power


def _temperature(rng: np.random.Generator, grid: Grid, power: Array, board: Board) -> tuple[Array, Array]:
    """Return times and temperatures, once a second: first order towards ambient plus power times resistance."""
    per_knot = round(1.0 / CELL_S)
    count = grid.size // per_knot
    means = power[: count * per_knot].reshape(count, per_knot).mean(axis=1)
    ambient = float(rng.uniform(20, 34))
    # 52-76 C in training at 700 W and 28-35 C at light load were measured.
    resistance = float(rng.uniform(24, 48)) / board.power_limit_watts
    decay = float(np.exp(-1.0 / rng.uniform(20, 60)))
    target = ambient + resistance * means
    temperature = np.empty(count)
    now = float(target[: min(count, 30)].mean())
    for index, aim in enumerate(target.tolist()):
        now = aim + (now - aim) * decay
        temperature[index] = now
    return grid.edges[:-1][per_knot // 2 :: per_knot][:count], temperature


def host_activity(rng: np.random.Generator, grid: Grid, loads: tuple[HostLoad, ...]) -> dict[str, Array]:
    """Return the traffic of the host per cell: the loads of the jobs, and what a host does anyway.

    Background is never zero and now and then as large as a small checkpoint: logs, monitoring, package updates.
    """
    loads = (*loads, *_over_the_wire(rng, loads))
    seconds = np.arange(int(grid.end_s + PRE_ROLL_S) + 2) - PRE_ROLL_S
    activity: dict[str, Array] = {}
    for channel in HOST_ACTIVITY:
        level = float(np.exp(rng.uniform(np.log(500), np.log(2e5))))
        if channel.startswith("infiniband"):
            level = float(rng.uniform(5, 400))  # measured 0.4 kB/s on an unused fabric
        rate = level * np.exp(0.8 * rng.standard_normal(seconds.size))
        # A file server that no job uses is touched more rarely than the host's own disks.
        bursts = rng.random(seconds.size) < (1 / 3000 if channel.startswith("filesystem") else 1 / 300)
        if not channel.startswith("infiniband"):
            rate += bursts * np.exp(rng.uniform(np.log(1e6), np.log(1.5e8), seconds.size))
        if channel == "disk_written":
            # Dirty pages are written back every few seconds.
            rate = np.where(np.arange(seconds.size) % 5 == 0, 4 * rate, 0.1 * rate)
        index = np.clip((grid.edges[:-1] + PRE_ROLL_S).astype(int), 0, seconds.size - 1)
        shaped = np.zeros(grid.size)
        for load in loads:
            if load.channel != channel:
                continue
            first, last = np.searchsorted(seconds, (load.start_s, load.end_s))
            if last <= first:
                continue
            spread = load.roughness
            factors = np.exp(spread * rng.standard_normal(int(last - first)) - spread * spread / 2)
            if load.shape is None:
                rate[first:last] += load.bytes_per_second * factors
                continue
            cells = grid.cells(load.start_s, load.end_s)
            pulse = load.shape.cells(grid.edges[cells.start : cells.stop + 1])["host"]
            shaped[cells] += load.bytes_per_second * pulse * factors[np.clip(index[cells] - first, 0, factors.size - 1)]
        activity[channel] = rate[index] + shaped
    return activity


def _over_the_wire(rng: np.random.Generator, loads: tuple[HostLoad, ...]) -> tuple[HostLoad, ...]:
    """Return what the traffic of network file systems adds to the network that it takes, one for the whole host.

    NFS and FUSE go over an interface that counts them, Lustre over the fabric, and RDMA or a second network by none.
    """
    ways = {"filesystem_read": "receive", "filesystem_written": "transmit"}
    remote = tuple(load for load in loads if load.channel in ways)
    network = str(rng.choice(["network", "infiniband", ""], p=[0.6, 0.25, 0.15])) if remote else ""
    return tuple(replace(load, channel=f"{network}_{ways[load.channel]}") for load in remote) if network else ()
