"""From what a board does to what its driver reports: windows, integers, counters, and readings that go wrong.

Kept apart from the physics because the same second of work looks different through different sensors: the power
reading of Ampere and later averages over a second (GA100 does not), utilisation counts kernels over 1/6 to 1 s and
is an integer, GPM ratios are means between two readings, NVLink counts KiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from classifier.simulator.boards import Board
from classifier.simulator.physics import CELL_S, BoardState, Grid
from classifier.simulator.signals import HOST_ACTIVITY, Array

Flags = NDArray[np.bool_]

#: Share of GPM readings that are all zero although the GPU works: 22 of 21,000 in one recording.
GLITCH_SHARE: Final = 0.001
#: NVML's memory utilisation over the DRAM activity of profiling, in every recorded condition.
MEMORY_UTILIZATION_FACTOR: Final = 1.29


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReadings:
    """What one GPU reports: `core` by GpuSample field at the core times, `slow` by GpuSlowSample field at slow ones.

    NaN means that this reading has no value; a field that the board does not offer is left out.
    """

    core: dict[str, Array]
    gpu_idle: Flags  # whether the event reason gpu_idle is set, at the core times
    power_capped: Flags  # whether sw_power_cap is set
    slow: dict[str, Array]
    capped_seconds: Array  # cumulative, at the slow times
    processes: list[tuple[float, tuple[int, ...]]]


class _Integral:
    """Running integral of a quantity over the grid, read at any time."""

    def __init__(self, grid: Grid, cells: Array) -> None:
        self._edges = grid.edges
        self._sums = np.concatenate(([0.0], np.cumsum(cells) * CELL_S))

    def at(self, times: Array) -> Array:
        """Return the integral from the start of the grid to `times`."""
        value: Array = np.interp(times, self._edges, self._sums)
        return value

    def mean(self, times: Array, window_s: float) -> Array:
        """Return the mean over the `window_s` before each of `times`."""
        return (self.at(times) - self.at(times - window_s)) / window_s

    def between(self, times: Array) -> Array:
        """Return the mean since the time before; NaN for the first."""
        rates: Array = np.diff(self.at(times)) / np.diff(times)
        return np.concatenate(([np.nan], rates))


def read_gpu(
    rng: np.random.Generator, board: Board, grid: Grid, state: BoardState, *, core_s: Array, slow_s: Array
) -> GpuReadings:
    """Return the readings of one GPU at the core and the slow times."""
    activity = state.activity
    busy = _Integral(grid, activity["busy"]).mean(core_s, board.utilization_window_s)
    dram = _Integral(grid, activity["dram"])
    # Busy shares come from counting kernels in short slots, which is noisy unless always or never busy.
    noisy = busy + 0.03 * np.sqrt(np.clip(busy * (1 - busy), 0, 1)) * rng.standard_normal(core_s.size)
    memory_share = dram.mean(core_s, board.utilization_window_s) * MEMORY_UTILIZATION_FACTOR
    power = _Integral(grid, state.power_watts).mean(core_s, board.power_window_s)
    cells = np.clip(np.searchsorted(grid.edges, core_s, side="right") - 1, 0, grid.size - 1)
    present = state.present[cells]
    idle = (present == 0) | ((busy <= 0) & (rng.random() < 0.3))  # one habit per driver and board
    capped = _Integral(grid, state.capped)
    used = np.round(board.memory_bytes * state.memory_ratio[cells] / 2**21) * 2**21
    # The driver itself holds a few MiB; a bare context 300 to 550 MiB.
    context = float(rng.integers(150, 275)) * 2**21
    used = np.maximum(used, np.where(present > 0, context, 3 * 2**20))
    clock = board.sm_clock_max_hertz * _clock_ratio(rng, board, state, cells)
    core = {
        "utilization_ratio": np.round(np.clip(noisy, 0, 1) * 100) / 100,
        "memory_utilization_ratio": np.round(np.clip(memory_share, 0, 1) * 100) / 100,
        "memory_used_bytes": used,
        "memory_total_bytes": np.full(core_s.size, float(board.memory_bytes)),
        "power_watts": np.round(power + rng.normal(0, 0.12, core_s.size), 2),
        "sm_clock_hertz": np.round(clock / 15e6) * 15e6,  # clocks move in steps of 15 MHz
        "memory_clock_hertz": np.full(core_s.size, board.memory_clock_max_hertz),
    }
    if board.nvlink_bytes_per_second > 0:
        for name in ("receive", "transmit"):
            total = rng.integers(10**12) + _Integral(grid, activity[f"nvlink_{name}"]).at(core_s)
            core[f"nvlink_{name}_bytes_total"] = np.floor(total / 1024) * 1024
    if board.profiling:
        core |= _profiling(rng, grid, activity, core_s)
    slow = {
        "energy_joules_total": np.round(rng.integers(10**9) + _Integral(grid, state.power_watts).at(slow_s), 3),
        "temperature_celsius": np.floor(np.interp(slow_s, state.knots, state.temperature_celsius)),
        "memory_temperature_celsius": np.floor(
            np.interp(slow_s, state.knots, state.temperature_celsius) + rng.uniform(3, 12)
        ),
    }
    for name in ("receive", "transmit"):
        total = rng.integers(10**12) + _Integral(grid, activity[f"pcie_{name}"]).at(slow_s)
        slow[f"pcie_{name}_bytes_total"] = np.floor(total / 1024) * 1024
    return GpuReadings(
        core=core,
        gpu_idle=idle,
        power_capped=capped.mean(core_s, 0.2) > 0.3,
        slow=slow,
        capped_seconds=np.round(rng.uniform(0, 1e4) + capped.at(slow_s), 3),
        processes=state.processes,
    )


def _clock_ratio(rng: np.random.Generator, board: Board, state: BoardState, cells: NDArray[np.intp]) -> Array:
    """Return the SM clock over its maximum: a context keeps the boost clock even at no load, a bare GPU does not."""
    lowest = board.sm_clock_idle_hertz / board.sm_clock_max_hertz
    sleeps = rng.random() < 0.2  # CUDA_DISABLE_PERF_BOOST and some drivers let a loaded GPU clock down
    held = rng.choice([1.0, 1.0, 1.0, float(rng.uniform(0.8, 0.97))])  # some sites lock the clock lower
    active = state.present[cells] > 0
    if sleeps:
        active &= state.activity["busy"][cells] > 0.01
    ratio: Array = np.where(active, np.minimum(state.sm_clock_ratio[cells], held), lowest)
    return ratio


def _profiling(rng: np.random.Generator, grid: Grid, activity: dict[str, Array], core_s: Array) -> dict[str, Array]:
    sm = _Integral(grid, activity["sm"] + activity["spin"]).between(core_s)
    occupancy = float(rng.uniform(0.2, 0.6))
    ratios = {
        "sm_active_ratio": np.minimum(sm, 1.0),
        "sm_occupancy_ratio": np.minimum(sm * occupancy, 1.0),
        "tensor_active_ratio": _Integral(grid, activity["tensor"]).between(core_s),
        "dram_active_ratio": _Integral(grid, activity["dram"]).between(core_s),
    }
    # Counting cycles is not exact: no ratio is the same twice, unless it is zero.
    noise = rng.uniform(0.002, 0.012)
    glitch = rng.random(core_s.size) < GLITCH_SHARE
    seen: dict[str, Array] = {}
    for name, values in ratios.items():
        noisy = values * (1 + noise * rng.standard_normal(core_s.size))
        read: Array = np.asarray(np.round(np.minimum(noisy, 1.0), 4), dtype=np.float64)
        read[glitch] = 0.0
        seen[name] = read
    return seen


def read_host(rng: np.random.Generator, grid: Grid, activity: dict[str, Array], core_s: Array) -> dict[str, Array]:
    """Return the byte counters of the host by channel of HOST_ACTIVITY, at the core times.

    Disks count sectors of 512 bytes, InfiniBand words of 4 bytes.
    """
    units = {"disk": 512, "infiniband": 4}
    counters: dict[str, Array] = {}
    for channel in HOST_ACTIVITY:
        unit = units.get(channel.partition("_")[0], 1)
        total = rng.integers(10**12) + _Integral(grid, activity[channel]).at(core_s)
        counters[channel] = np.floor(total / unit) * unit
    return counters
