"""Signals: one GPU's channels over a window, made comparable between boards and between recorders.

Power is divided by the limit, memory by the size of the card, byte rates become decades above 1 MB/s, host rates are
per GPU. Every signal has a step: features read it on a grid of that step (`classifier.grids`), so that logs of any
interval up to the step show the same. A reading of a moment (utilisation, power, memory) is thinned to it, since the
mean of five readings swings less than each of them; a mean since the reading before (profiling, rates of counters) is
averaged to it, since a mean over 5 s is all that a slow log has. Signals of 1 s made from such means serve what needs
the second, cadences, and exist in logs of 1 s only.

`Signals.window` gives a signal as it was measured, averaged to whole seconds where it is faster: for the idle rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.history import Array, GpuHistory, HostHistory, Series

#: Longest window that the evidence for a label is measured by, in seconds.
LONGEST_WINDOW_S: Final = 300.0
#: Steps of signals in seconds, and the longest window of signals with that step.
FAST_S: Final = 0.1
FINE_S: Final = 1.0
COARSE_S: Final = 5.0
SLOW_S: Final = 10.0
REACH_S: Final[Mapping[float, float]] = {
    FAST_S: 60.0,
    FINE_S: LONGEST_WINDOW_S,
    COARSE_S: LONGEST_WINDOW_S,
    SLOW_S: 900.0,
}
#: Spacing in seconds below which a log is averaged to whole seconds.
_FAST_SPACING_S: Final = 0.7
#: Byte rates count in decades above this, in bytes per second: below it links carry keep-alives only.
RATE_FLOOR: Final = 1e6
#: A profiling sample of exactly 0 between two above this ratio is a glitch of the counter, not a pause (measured on
#: H100: 22 of 21k samples read 0 at 692 W and 100 % utilisation).
GLITCH_RATIO: Final = 0.05


class Window:
    """A signal in one window: `times` (monotonic seconds) and `values`, same length (`size`), finite."""

    __slots__ = ("_sorted", "_spacing", "size", "times", "values")

    def __init__(self, times: Array, values: Array) -> None:
        self.times = times
        self.values = values
        self.size = int(values.size)
        self._sorted: Array | None = None
        self._spacing: float | None = None

    @property
    def spacing_s(self) -> float:
        """Median distance of two samples; NaN below two samples."""
        if self._spacing is None:
            self._spacing = median(self.times[1:] - self.times[:-1]) if self.size > 1 else math.nan
        return self._spacing

    def quantile(self, share: float) -> float:
        """Return the quantile at `share` (0..1) with linear interpolation; NaN without samples."""
        if self._sorted is None:
            self._sorted = np.sort(self.values)
        if not self.size:
            return math.nan
        position = share * (self.size - 1)
        low = int(position)
        high = min(low + 1, self.size - 1)
        below, above = float(self._sorted[low]), float(self._sorted[high])
        return below + (above - below) * (position - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """How one signal is made from a channel: `scale` gives the divisor for this GPU, None where it is unknown."""

    channel: str
    scale: Callable[[GpuHistory], float | None] | None = None
    decades: bool = False
    of_host: bool = False
    #: The channel of every other GPU of the host, one row each.
    of_peers: bool = False
    drop_glitches: bool = False
    #: Whether a reading is the mean since the one before, and not of its moment.
    averaged: bool = False
    step_s: float = FINE_S


def _power_limit(gpu: GpuHistory) -> float | None:
    return gpu.power_limit_watts


def _memory_total(gpu: GpuHistory) -> float | None:
    return gpu.memory_total_bytes


def _profiling(channel: str, step_s: float = COARSE_S) -> Signal:
    return Signal(channel=channel, drop_glitches=True, averaged=True, step_s=step_s)


def _decades(channel: str, *, of_host: bool = False, step_s: float = COARSE_S) -> Signal:
    return Signal(channel=f"{channel}_bytes_per_second", decades=True, of_host=of_host, averaged=True, step_s=step_s)


def _rate(channel: str, *, of_host: bool = False, of_peers: bool = False) -> Signal:
    channel = f"{channel}_bytes_per_second"
    return Signal(channel=channel, of_host=of_host, of_peers=of_peers, averaged=True, step_s=COARSE_S)


#: All signals by name. The `*_rate` ones are byte rates as they are, for ratios between two of them; `*_10s` serve the
#: slow context, `*_1s` what needs the second.
SIGNALS: Final[Mapping[str, Signal]] = {
    "util": Signal(channel="utilization_ratio"),
    "util_10s": Signal(channel="utilization_ratio", step_s=SLOW_S),
    "memutil": Signal(channel="memory_utilization_ratio"),
    "power": Signal(channel="power_watts", scale=_power_limit),
    "power_10s": Signal(channel="power_watts", scale=_power_limit, step_s=SLOW_S),
    "watts": Signal(channel="power_watts"),
    "watts_10s": Signal(channel="power_watts", step_s=SLOW_S),
    "watts_peers": Signal(channel="power_watts", of_peers=True),
    "fast": Signal(channel="power_fast_watts", averaged=True, step_s=FAST_S),
    "memory": Signal(channel="memory_used_bytes", scale=_memory_total, step_s=COARSE_S),
    "memory_10s": Signal(channel="memory_used_bytes", scale=_memory_total, step_s=SLOW_S),
    "sm": _profiling("sm_active_ratio"),
    "sm_1s": _profiling("sm_active_ratio", FINE_S),
    "occupancy": _profiling("sm_occupancy_ratio"),
    "tensor": _profiling("tensor_active_ratio"),
    "dram": _profiling("dram_active_ratio"),
    "hmma": _profiling("tensor_hmma_active_ratio"),
    "imma": _profiling("tensor_imma_active_ratio"),
    "dfma": _profiling("tensor_dfma_active_ratio"),
    "fp64": _profiling("fp64_active_ratio"),
    "fp32": _profiling("fp32_active_ratio"),
    "fp16": _profiling("fp16_active_ratio"),
    "nvlink_rx": _decades("nvlink_receive"),
    "nvlink_tx": _decades("nvlink_transmit"),
    "nvlink_tx_1s": _decades("nvlink_transmit", step_s=FINE_S),
    "nvlink_rx_rate": _rate("nvlink_receive"),
    "nvlink_tx_rate": _rate("nvlink_transmit"),
    "nvlink_tx_peers": _rate("nvlink_transmit", of_peers=True),
    "pcie_rx": _decades("pcie_receive"),
    "pcie_rx_10s": _decades("pcie_receive", step_s=SLOW_S),
    "pcie_tx": _decades("pcie_transmit"),
    "pcie_tx_10s": _decades("pcie_transmit", step_s=SLOW_S),
    "pcie_rx_rate": _rate("pcie_receive"),
    "pcie_tx_rate": _rate("pcie_transmit"),
    "processes": Signal(channel="process_count", step_s=COARSE_S),
    "process_cpu": Signal(channel="process_cpu_ratio", averaged=True, step_s=COARSE_S),
    "process_read": _decades("process_read"),
    "process_read_10s": _decades("process_read", step_s=SLOW_S),
    "process_written": _decades("process_written"),
    "process_written_10s": _decades("process_written", step_s=SLOW_S),
    "network_rx": _decades("network_receive", of_host=True),
    "network_tx": _decades("network_transmit", of_host=True),
    "network_tx_10s": _decades("network_transmit", of_host=True, step_s=SLOW_S),
    "network_rx_rate": _rate("network_receive", of_host=True),
    "network_tx_rate": _rate("network_transmit", of_host=True),
    "infiniband_tx": _decades("infiniband_transmit", of_host=True),
    "infiniband_tx_1s": _decades("infiniband_transmit", of_host=True, step_s=FINE_S),
    "infiniband_rx_rate": _rate("infiniband_receive", of_host=True),
    "infiniband_tx_rate": _rate("infiniband_transmit", of_host=True),
    "disk_read": _decades("disk_read", of_host=True),
    "disk_written": _decades("disk_written", of_host=True),
    "disk_written_10s": _decades("disk_written", of_host=True, step_s=SLOW_S),
    "filesystem_read": _decades("filesystem_read", of_host=True),
    "filesystem_written": _decades("filesystem_written", of_host=True),
    "filesystem_written_10s": _decades("filesystem_written", of_host=True, step_s=SLOW_S),
}


class Signals:
    """The signals of one GPU at one moment; every window is made once and kept."""

    def __init__(
        self,
        gpu: GpuHistory,
        host: HostHistory,
        now_s: float,
        *,
        since_s: float = -math.inf,
        gpu_count: int = 1,
        peers: Collection[GpuHistory] = (),
    ) -> None:
        """Look at `gpu` at `now_s`; samples before `since_s` (a gap, another job) are left out of every window.

        `gpu_count` is the number of GPUs that share the host, `peers` are those GPUs; `gpu` itself may be among them.
        """
        self.gpu = gpu
        self.host = host
        self._now_s = now_s
        self._since_s = since_s
        self._gpu_count = max(1, gpu_count)
        self.peers = tuple(peer for peer in peers if peer is not gpu)
        self._full: dict[str, Window] = {}
        self._windows: dict[tuple[str, float], Window] = {}

    @property
    def now_s(self) -> float:
        """Moment that is looked at, in monotonic seconds."""
        return self._now_s

    def source(self, signal: Signal) -> GpuHistory | HostHistory:
        """Return what holds the channel of `signal`."""
        return self.host if signal.of_host else self.gpu

    def divisor(self, signal: Signal) -> float | None:
        """Return what values of `signal` are divided by; None where that is unknown."""
        if signal.scale is None:
            return float(self._gpu_count) if signal.of_host else 1.0
        divisor = signal.scale(self.gpu)
        return divisor if divisor is not None and divisor > 0 else None

    def reach_s(self, seconds: float) -> float:
        """Return how far back a window of `seconds` may look; the sample at the start of the evidence is part of it."""
        return min(seconds, self._now_s - self._since_s + 1e-6)

    def window(self, name: str, seconds: float) -> Window:
        """Return signal `name` of the last `seconds`, at most 300, as it was measured.

        It is empty where the channel or its scale is missing.
        """
        found = self._windows.get((name, seconds))
        if found is None:
            found = self._windows[name, seconds] = self._make(name, seconds)
        return found

    def _make(self, name: str, seconds: float) -> Window:
        full = self._full.get(name)
        if full is None:
            full = self._full[name] = self._make_full(SIGNALS[name])
        start = self._now_s - seconds
        if not full.size or full.times[0] > start:
            return full
        first = int(np.searchsorted(full.times, start, side="right"))
        return Window(full.times[first:], full.values[first:])

    def _make_full(self, signal: Signal) -> Window:
        source = self.source(signal)
        divisor = self.divisor(signal)
        if divisor is None or not source.has(signal.channel):
            return _EMPTY
        times, values = whole_seconds(source.series(signal.channel, self._now_s, self.reach_s(LONGEST_WINDOW_S)))
        if signal.drop_glitches:
            times, values = without_glitches(times, values)
        if divisor != 1.0:
            values = values / divisor
        if signal.decades:
            values = np.log10(1.0 + np.maximum(values, 0.0) / RATE_FLOOR)
        return Window(times, values)


def median(values: Array) -> float:
    """Return the median of at least one value; a sort costs a fifth of numpy.median for windows this short."""
    ordered = np.sort(values)
    middle = ordered.size // 2
    return float(ordered[middle] if ordered.size % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def whole_seconds(series: Series) -> tuple[Array, Array]:
    """Return times and values of `series`, averaged to whole seconds where it is faster than that."""
    times, values = series.times, series.values
    if times.size < 3 or (times[-1] - times[0]) / (times.size - 1) >= _FAST_SPACING_S:
        return times, values
    seconds = np.floor(times)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(seconds)) + 1))
    counts = np.diff(np.append(starts, times.size))
    return np.add.reduceat(times, starts) / counts, np.add.reduceat(values, starts) / counts


def without_glitches(times: Array, values: Array) -> tuple[Array, Array]:
    """Return the samples without single zeros between two busy ones."""
    if values.size < 3:
        return times, values
    busy = values > GLITCH_RATIO
    glitch = np.zeros(values.size, dtype=bool)
    glitch[1:-1] = (values[1:-1] == 0.0) & busy[:-2] & busy[2:]
    if not glitch.any():
        return times, values
    return times[~glitch], values[~glitch]


_EMPTY: Final = Window(np.empty(0), np.empty(0))
