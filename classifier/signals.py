"""Signals: one GPU's channels over a window, made comparable between boards and between recorders.

Power is divided by the limit, memory by the size of the card, byte rates become decades above 1 MB/s, host rates are
per GPU. Logs faster than 1 Hz are averaged to whole seconds, so that a 10 Hz recording and a live 1 Hz sampler show the
same signal; slower ones stay as they are. Cost: one pass per channel and decision, results kept for all features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.history import Array, GpuHistory, HostHistory, Series

#: Longest window of any feature, in seconds.
LONGEST_WINDOW_S: Final = 300.0
#: Spacing in seconds below which a log is averaged to whole seconds.
_FAST_SPACING_S: Final = 0.7
#: Byte rates count in decades above this, in bytes per second: below it links carry keep-alives only.
_RATE_FLOOR: Final = 1e6
#: A profiling sample of exactly 0 between two above this ratio is a glitch of the counter, not a pause (measured on
#: H100: 22 of 21k samples read 0 at 692 W and 100 % utilisation).
_GLITCH_RATIO: Final = 0.05


class Window:
    """A signal in one window: `times` (monotonic seconds) and `values`, same length (`size`), finite."""

    __slots__ = ("_mean", "_sorted", "_spacing", "cadence", "size", "times", "values")

    def __init__(self, times: Array, values: Array) -> None:
        self.times = times
        self.values = values
        self.size = int(values.size)
        self._sorted: Array | None = None
        self._mean: float | None = None
        self._spacing: float | None = None
        #: Result of `statistics.cadence`, which three features read; None before the first.
        self.cadence: tuple[float, float] | None = None

    @property
    def mean(self) -> float:
        """Arithmetic mean; NaN without samples."""
        if self._mean is None:
            self._mean = float(self.values.sum()) / self.size if self.size else math.nan
        return self._mean

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
    drop_glitches: bool = False


def _power_limit(gpu: GpuHistory) -> float | None:
    return gpu.power_limit_watts


def _memory_total(gpu: GpuHistory) -> float | None:
    return gpu.memory_total_bytes


#: All signals by name. The `*_rate` ones are byte rates as they are, for ratios between two of them.
SIGNALS: Final[Mapping[str, Signal]] = {
    "util": Signal(channel="utilization_ratio"),
    "memutil": Signal(channel="memory_utilization_ratio"),
    "power": Signal(channel="power_watts", scale=_power_limit),
    "watts": Signal(channel="power_watts"),
    "memory": Signal(channel="memory_used_bytes", scale=_memory_total),
    "sm": Signal(channel="sm_active_ratio", drop_glitches=True),
    "occupancy": Signal(channel="sm_occupancy_ratio", drop_glitches=True),
    "tensor": Signal(channel="tensor_active_ratio", drop_glitches=True),
    "dram": Signal(channel="dram_active_ratio", drop_glitches=True),
    "nvlink_rx": Signal(channel="nvlink_receive_bytes_per_second", decades=True),
    "nvlink_tx": Signal(channel="nvlink_transmit_bytes_per_second", decades=True),
    "nvlink_rx_rate": Signal(channel="nvlink_receive_bytes_per_second"),
    "nvlink_tx_rate": Signal(channel="nvlink_transmit_bytes_per_second"),
    "pcie_rx": Signal(channel="pcie_receive_bytes_per_second", decades=True),
    "pcie_tx": Signal(channel="pcie_transmit_bytes_per_second", decades=True),
    "pcie_rx_rate": Signal(channel="pcie_receive_bytes_per_second"),
    "pcie_tx_rate": Signal(channel="pcie_transmit_bytes_per_second"),
    "processes": Signal(channel="process_count"),
    "network_rx": Signal(channel="network_receive_bytes_per_second", decades=True, of_host=True),
    "network_tx": Signal(channel="network_transmit_bytes_per_second", decades=True, of_host=True),
    "infiniband_tx": Signal(channel="infiniband_transmit_bytes_per_second", decades=True, of_host=True),
    "disk_read": Signal(channel="disk_read_bytes_per_second", decades=True, of_host=True),
    "disk_written": Signal(channel="disk_written_bytes_per_second", decades=True, of_host=True),
}


class Signals:
    """The signals of one GPU at one moment; every window is made once and kept."""

    def __init__(
        self, gpu: GpuHistory, host: HostHistory, now_s: float, *, since_s: float = -math.inf, gpu_count: int = 1
    ) -> None:
        """Look at `gpu` at `now_s`; samples before `since_s` (a gap, another job) are left out of every window.

        `gpu_count` is the number of GPUs that share the host.
        """
        self._gpu = gpu
        self._host = host
        self._now_s = now_s
        self._since_s = since_s
        self._gpu_count = max(1, gpu_count)
        self._full: dict[str, Window] = {}
        self._windows: dict[tuple[str, float], Window] = {}

    @property
    def now_s(self) -> float:
        """Moment that is looked at, in monotonic seconds."""
        return self._now_s

    def window(self, name: str, seconds: float) -> Window:
        """Return signal `name` of the last `seconds`; empty where the channel or its scale is missing."""
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
        source = self._host if signal.of_host else self._gpu
        if not source.has(signal.channel):
            return _EMPTY
        # Windows are open at their start; the sample at `since_s` itself belongs to the evidence.
        seconds = min(LONGEST_WINDOW_S, self._now_s - self._since_s + 1e-6)
        series = source.series(signal.channel, self._now_s, seconds)
        scale = float(self._gpu_count) if signal.of_host else 1.0
        if signal.scale is not None:
            divisor = signal.scale(self._gpu)
            if divisor is None or not divisor > 0:
                return _EMPTY
            scale = divisor
        times, values = whole_seconds(series)
        if signal.drop_glitches:
            times, values = without_glitches(times, values)
        if scale != 1.0:
            values = values / scale
        if signal.decades:
            values = np.log10(1.0 + np.maximum(values, 0.0) / _RATE_FLOOR)
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
    busy = values > _GLITCH_RATIO
    glitch = np.zeros(values.size, dtype=bool)
    glitch[1:-1] = (values[1:-1] == 0.0) & busy[:-2] & busy[2:]
    if not glitch.any():
        return times, values
    return times[~glitch], values[~glitch]


_EMPTY: Final = Window(np.empty(0), np.empty(0))
