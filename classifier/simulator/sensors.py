"""From what a board does to what its driver reports: windows, integers, counters, and readings that go wrong.

Kept apart from the physics because the same second of work looks different through different sensors: the power
reading of Ampere and later averages over a second (GA100 does not), utilisation counts kernels over 1/6 to 1 s and
is an integer, GPM ratios are means between two readings and exist on Hopper and later, NVLink counts KiB, and PCIe is
a mean, a counter or a slice of 20 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from classifier.simulator.boards import Board
from classifier.simulator.meters import LOOK_S, Integral, PowerMeter, last_window
from classifier.simulator.physics import BoardState, Grid
from classifier.simulator.signals import HOST_ACTIVITY, Array
from classifier.simulator.styles import RecorderStyle

Flags = NDArray[np.bool_]

#: Share of GPM readings that are all zero although the GPU works: 22 of 21,000 in one recording.
GLITCH_SHARE: Final = 0.001
#: NVML's memory utilisation over the DRAM activity of profiling: 1.27 to 1.31 in every recorded condition.
MEMORY_UTILIZATION_FACTOR: Final = (1.27, 1.31)
#: Window of nvmlDeviceGetPcieThroughput.
_SLICE_S: Final = 0.02
_PROFILED: Final = {
    "tensor_active_ratio": "tensor",
    "dram_active_ratio": "dram",
    "tensor_hmma_active_ratio": "hmma",
    "tensor_imma_active_ratio": "imma",
    "tensor_dfma_active_ratio": "dfma",
    "fp64_active_ratio": "fp64",
    "fp16_active_ratio": "fp16",
    "fp32_active_ratio": "fp32",
}
_WAYS: Final = ("receive", "transmit")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTimes:
    """When a recorder reads: every tick, the ticks with slow values, and the fast readings between them."""

    core_s: Array
    slow_s: Array
    fast_s: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReadings:
    """What one GPU reports: `core` by GpuSample field at the core times, `slow` by GpuSlowSample field at slow ones.

    NaN means that this reading has no value; a field that the board or the recorder does not offer is left out.
    """

    core: dict[str, Array]
    reasons: bool  # whether clock event reasons are read
    gpu_idle: Flags  # whether the event reason gpu_idle is set, at the core times
    power_capped: Flags  # whether sw_power_cap is set
    slow: dict[str, Array]
    capped_seconds: Array  # cumulative, at the slow times
    fast_s: Array  # times of the fast readings; empty where there are none
    fast_watts: Array
    processes: list[tuple[float, tuple[int, ...]]]
    #: Counters by ProcessSample field at the slow times, of all processes that the GPU had.
    process_totals: dict[str, Array]


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters that start somewhere, and begin anew at `resets_s`."""

    rng: np.random.Generator
    resets_s: tuple[float, ...]

    def read(self, integral: Integral, times: Array, *, most: float, unit: float) -> Array:
        """Return what has been counted by each of `times`, in whole `unit`s; it starts below `most`."""
        return self.counted(integral.at(times), integral.at(np.array(self.resets_s)), times, most=most, unit=unit)

    def counted(self, totals: Array, at_resets: Array, times: Array, *, most: float, unit: float) -> Array:
        """Return `totals` as a counter shows them, given the totals at the resets."""
        start = float(self.rng.integers(int(most)))
        bases = np.concatenate(([-start], at_resets))
        shown = totals - bases[np.searchsorted(np.array(self.resets_s), times, side="right")]
        return np.floor(shown / unit) * unit


def read_gpu(
    rng: np.random.Generator,
    board: Board,
    grid: Grid,
    state: BoardState,
    *,
    times: SampleTimes,
    style: RecorderStyle,
    resets_s: tuple[float, ...] = (),
) -> GpuReadings:
    """Return the readings of one GPU as a recorder of `style` takes them; its counters begin anew at `resets_s`."""
    core_s, slow_s = times.core_s, times.slow_s
    activity = state.activity
    counters = _Counters(rng, resets_s)
    meter = PowerMeter(rng, board, grid, state.power_watts)
    cells = np.clip(np.searchsorted(grid.edges, core_s, side="right") - 1, 0, grid.size - 1)
    core, busy = _basic(rng, board, grid, state, core_s=core_s, cells=cells)
    watts = meter.instant(core_s) if style.power == "instant" else meter.reported(core_s)
    core["power_watts"] = np.round(watts / style.watt_step) * style.watt_step
    idle = (state.present[cells] == 0) | ((busy <= 0) & (rng.random() < 0.3))  # one habit per driver and board
    if board.nvlink_bytes_per_second > 0 and style.nvlink:
        for way in _WAYS:
            integral = Integral(grid, activity[f"nvlink_{way}"])
            core[f"nvlink_{way}_bytes_total"] = counters.read(integral, core_s, most=1e12, unit=1024)
    if style.profiles(board):
        core |= _profiling(rng, grid, activity, core_s, with_pcie=style.pcie == "profiling")
    elif style.pcie == "slice":
        for way in _WAYS:
            rate = Integral(grid, activity[f"pcie_{way}"]).mean(core_s, _SLICE_S)
            # Transfers come in bursts that a slice shorter than a cell of the grid catches or misses.
            caught = rate * np.exp(0.4 * rng.standard_normal(core_s.size) - 0.08)
            core[f"pcie_{way}_bytes_per_second"] = np.floor(caught / 1024) * 1024
    capped = Integral(grid, state.capped)
    slow = _slow(rng, board, grid, state, slow_s=slow_s, style=style, meter=meter, counters=counters)
    fast_s = times.fast_s if style.fast_power else times.fast_s[:0]
    return GpuReadings(
        core={name: values for name, values in core.items() if style.keeps(name)},
        reasons=style.reasons,
        gpu_idle=idle,
        power_capped=capped.mean(core_s, 0.2) > 0.3,
        slow={name: values for name, values in slow.items() if style.keeps(name)},
        capped_seconds=np.round(rng.uniform(0, 1e4) + capped.at(slow_s), 3),
        fast_s=fast_s,
        fast_watts=np.round(meter.instant(fast_s), 3),
        processes=state.processes if style.processes != "none" else [],
        process_totals=_process_totals(rng, grid, state, slow_s, style),
    )


def _slow(
    rng: np.random.Generator,
    board: Board,
    grid: Grid,
    state: BoardState,
    *,
    slow_s: Array,
    style: RecorderStyle,
    meter: PowerMeter,
    counters: _Counters,
) -> dict[str, Array]:
    """Return the fields of GpuSlowSample at the slow times."""
    slow: dict[str, Array] = {}
    if style.energy:
        at_resets = meter.energy(np.array(counters.resets_s))
        joules = counters.counted(meter.energy(slow_s), at_resets, slow_s, most=1e9, unit=0.001)
        slow["energy_joules_total"] = joules.round(3)
    temperature = np.interp(slow_s, state.knots, state.temperature_celsius)
    slow["temperature_celsius"] = np.floor(temperature)
    if board.memory_temperature:
        slow["memory_temperature_celsius"] = np.floor(temperature + rng.uniform(3, 12))
    if style.pcie == "counter" and board.profiling:  # NVML's 64-bit counters exist where GPM does
        for way in _WAYS:
            integral = Integral(grid, state.activity[f"pcie_{way}"])
            slow[f"pcie_{way}_bytes_total"] = counters.read(integral, slow_s, most=1e12, unit=1024)
    return slow


def _basic(
    rng: np.random.Generator,
    board: Board,
    grid: Grid,
    state: BoardState,
    *,
    core_s: Array,
    cells: NDArray[np.intp],
) -> tuple[dict[str, Array], Array]:
    """Return what nvidia-smi shows of every board, power left out, and the busy share behind utilisation."""
    window_s = board.utilization_window_s
    busy = last_window(rng, Integral(grid, state.activity["busy"]), core_s, window_s)
    # Busy shares come from counting kernels in short slots, which is noisy unless always or never busy.
    noisy = busy + 0.03 * np.sqrt(np.clip(busy * (1 - busy), 0, 1)) * rng.standard_normal(core_s.size)
    dram = last_window(rng, Integral(grid, state.activity["dram"]), core_s, window_s)
    memory_share = dram * float(rng.uniform(*MEMORY_UTILIZATION_FACTOR))
    used = np.round(board.memory_bytes * state.memory_ratio[cells] / 2**21) * 2**21
    # The driver itself holds a few MiB; a bare context 300 to 550 MiB.
    context = float(rng.integers(150, 275)) * 2**21
    used = np.maximum(used, np.where(state.present[cells] > 0, context, 3 * 2**20))
    clock = board.sm_clock_max_hertz * _clock_ratio(rng, board, state, cells)
    core: dict[str, Array] = {
        "utilization_ratio": np.round(np.clip(noisy, 0, 1) * 100) / 100,
        "memory_utilization_ratio": np.round(np.clip(memory_share, 0, 1) * 100) / 100,
        "memory_used_bytes": used,
        "memory_total_bytes": np.full(core_s.size, float(board.memory_bytes)),
        "sm_clock_hertz": np.round(clock / 15e6) * 15e6,  # clocks move in steps of 15 MHz
        "memory_clock_hertz": np.full(core_s.size, board.memory_clock_max_hertz),
    }
    return core, busy


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


def _profiling(
    rng: np.random.Generator, grid: Grid, activity: dict[str, Array], core_s: Array, *, with_pcie: bool
) -> dict[str, Array]:
    """Return what profiling counts between two ticks; now and then a reading is all zero."""
    sm = Integral(grid, activity["sm"] + activity["spin"]).between(core_s)
    occupancy = float(rng.uniform(0.2, 0.6))
    seen = {"sm_active_ratio": sm, "sm_occupancy_ratio": sm * occupancy}
    truth = dict(activity)
    if not any(activity[name].any() for name in ("hmma", "imma", "dfma")):
        truth["hmma"] = activity["tensor"]
    for name, channel in _PROFILED.items():
        cells = truth[channel]
        if cells.any():
            seen[name] = Integral(grid, cells).between(core_s)
        else:
            seen[name] = np.concatenate(([np.nan], np.zeros(core_s.size - 1)))
    # Counting cycles is not exact: no ratio is the same twice, unless it is zero.
    noise = rng.uniform(0.002, 0.012)
    glitch = rng.random(core_s.size) < GLITCH_SHARE
    for name, values in seen.items():
        noisy: Array = np.minimum(values * (1 + noise * rng.standard_normal(core_s.size)), 1.0)
        seen[name] = noisy.round(4)
    if with_pcie:
        for way in _WAYS:
            rate = Integral(grid, activity[f"pcie_{way}"]).between(core_s)
            seen[f"pcie_{way}_bytes_per_second"] = np.round(rate / 1e3) * 1e3
    for values in seen.values():
        values[glitch] = 0.0
    return seen


def _process_totals(
    rng: np.random.Generator, grid: Grid, state: BoardState, slow_s: Array, style: RecorderStyle
) -> dict[str, Array]:
    """Return the counters of the GPU's processes; CPU time in ticks of 10 ms.

    Where a workload says nothing of CPUs, one thread launches kernels and waits for them, which takes a core while the
    GPU is busy, and little of it otherwise.
    """
    at_rest = float(np.exp(rng.uniform(np.log(0.003), np.log(0.3))))
    if style.processes not in {"cpu", "io"}:
        return {}
    cores = state.activity["cpu_cores"]
    if not cores.any():
        cores = state.present * (at_rest + (1 - at_rest) * state.activity["busy"])
    totals = {"cpu_seconds_total": np.floor(Integral(grid, cores).at(slow_s) * 100) / 100}
    if style.processes == "io":
        for name, channel in (("read_bytes_total", "process_read"), ("written_bytes_total", "process_written")):
            totals[name] = np.floor(Integral(grid, state.activity[channel]).at(slow_s))
    return totals


def fast_times(rng: np.random.Generator, end_s: float) -> Array:
    """Return when the fast channel reads: ten times a second with some jitter, of one thread for all GPUs."""
    times = LOOK_S * np.arange(1, int(end_s / LOOK_S) + 1) + rng.uniform(0, 0.004, int(end_s / LOOK_S))
    return np.round(times[times <= end_s], 4)


def read_host(rng: np.random.Generator, grid: Grid, activity: dict[str, Array], times: SampleTimes) -> dict[str, Array]:
    """Return the byte counters of the host by channel of HOST_ACTIVITY: file systems at the slow times, others at core.

    Disks count sectors of 512 bytes, InfiniBand words of 4 bytes.
    """
    units = {"disk": 512, "infiniband": 4}
    counters: dict[str, Array] = {}
    for channel in HOST_ACTIVITY:
        source = channel.partition("_")[0]
        at = times.slow_s if source == "filesystem" else times.core_s
        unit = units.get(source, 1)
        total = rng.integers(10**12) + Integral(grid, activity[channel]).at(at)
        counters[channel] = np.floor(total / unit) * unit
    return counters
