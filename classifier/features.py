"""The feature table: what the model sees of one GPU, the same code live, in replay and in training.

Every row names its window, unit, least number of samples and signals (`classifier.signals`); a feature is NaN where one
of its signals is missing or has too few samples in the window, and never says how or how often it was recorded. All
features of 8 GPUs cost a few milliseconds per decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.history import Array, GpuHistory, HostHistory
from classifier import statistics as st
from classifier.signals import Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One column of the model's input; `function` is given one window per name in `channels`."""

    name: str  # <signal>__<statistic>__<window in seconds>
    window_s: float
    unit: str  # ratio, decades, seconds, count, per_300_s
    minimum_samples: int
    channels: tuple[str, ...]  # names of classifier.signals.SIGNALS
    function: Callable[..., float]

    def value(self, signals: Signals) -> float:
        """Return the feature; NaN where a signal is missing or too short."""
        windows = []
        for channel in self.channels:
            window = signals.window(channel, self.window_s)
            if window.size < self.minimum_samples:
                return math.nan
            windows.append(window)
        return self.function(*windows)


#: Least samples of quantiles: a window of 60 s holds as many at one sample every 10 s.
_QUANTILE_SAMPLES: Final = 5
#: Least samples in the 15 s window, and of single levels.
_LEVEL_SAMPLES: Final = 3


def _row(
    name: str, function: Callable[..., float], window_s: float, unit: str, minimum: int, *channels: str
) -> Feature:
    return Feature(
        name=f"{name}__{function.__name__}__{window_s:g}",
        window_s=window_s,
        unit=unit,
        minimum_samples=minimum,
        channels=channels or (name,),
        function=function,
    )


def _rows(
    name: str,
    window_s: float,
    functions: tuple[Callable[..., float], ...],
    unit: str = "ratio",
    minimum: int = _QUANTILE_SAMPLES,
) -> list[Feature]:
    return [_row(name, function, window_s, unit, minimum) for function in functions]


def _activity() -> list[Feature]:
    """Return the rows of utilisation, memory utilisation and power: what every driver and log has."""
    spread = (st.p05, st.p50, st.p95, st.mad)
    rows = [
        *_rows("util", 15.0, (st.mean,), minimum=_LEVEL_SAMPLES),
        *_rows("util", 60.0, (*spread, st.step_change, st.idle_share, st.saturated_share)),
        *_rows("util", 300.0, (*spread, st.idle_share, st.saturated_share)),
        *_rows("memutil", 15.0, (st.mean,), minimum=_LEVEL_SAMPLES),
        *_rows("memutil", 60.0, (*spread, st.step_change, st.relative_swing)),
        *_rows("memutil", 300.0, (*spread, st.relative_swing)),
        *_rows("power", 15.0, (st.mean,), minimum=_LEVEL_SAMPLES),
        *_rows("power", 60.0, (*spread, st.step_change)),
        *_rows("power", 300.0, spread),
        *_rows("watts", 60.0, (st.relative_swing,)),
        *_rows("watts", 300.0, (st.relative_swing,)),
    ]
    for window_s in (60.0, 300.0):
        rows.append(_row("memutil_util", st.mean_ratio, window_s, "ratio", _QUANTILE_SAMPLES, "memutil", "util"))
        rows.append(
            _row("util_memutil", st.pinned_without_memory, window_s, "ratio", _QUANTILE_SAMPLES, "util", "memutil")
        )
    return rows


def _memory() -> list[Feature]:
    return [
        *_rows("memory", 60.0, (st.p50,), minimum=_LEVEL_SAMPLES),
        *_rows("memory", 300.0, (st.swing,)),
        *_rows("memory", 300.0, (st.slope, st.rising_steps, st.falling_steps), "per_300_s"),
        *_rows("processes", 60.0, (st.p50,), "count", _LEVEL_SAMPLES),
    ]


def _profiling() -> list[Feature]:
    """Return the rows of the GPM metrics (Hopper and newer)."""
    rows = [
        *_rows("sm", 15.0, (st.mean,), minimum=_LEVEL_SAMPLES),
        *_rows("sm", 60.0, (st.p05, st.p50, st.p95, st.mad)),
        *_rows("sm", 300.0, (st.p05, st.p50, st.p95)),
        *_rows("occupancy", 60.0, (st.p50,)),
        *_rows("tensor", 60.0, (st.p50, st.p95)),
        *_rows("tensor", 300.0, (st.mean, st.p95)),
        *_rows("dram", 60.0, (st.p50, st.p95)),
        *_rows("dram", 300.0, (st.mean, st.swing)),
    ]
    for window_s in (60.0, 300.0):
        rows += [
            _row("tensor_sm", st.mean_ratio, window_s, "ratio", _QUANTILE_SAMPLES, "tensor", "sm"),
            _row("dram_sm", st.mean_ratio, window_s, "ratio", _QUANTILE_SAMPLES, "dram", "sm"),
            _row("dram_tensor", st.mean_ratio, window_s, "ratio", _QUANTILE_SAMPLES, "dram", "tensor"),
        ]
    return rows


def _links() -> list[Feature]:
    rows: list[Feature] = []
    for link, least in (("nvlink", _QUANTILE_SAMPLES), ("pcie", _LEVEL_SAMPLES)):
        for way in ("rx", "tx"):
            rows += _rows(f"{link}_{way}", 60.0, (st.p50, st.p95), "decades", least)
            rows += _rows(f"{link}_{way}", 300.0, (st.p50, st.p95), "decades")
        both = (f"{link}_tx_rate", f"{link}_rx_rate")
        rows.append(_row(link, st.symmetry, 60.0, "ratio", least, *both))
        rows.append(_row(link, st.direction, 300.0, "ratio", _QUANTILE_SAMPLES, *both))
    rows += _rows("nvlink_tx", 60.0, (st.silent_share, st.swing))
    rows += _rows("nvlink_tx", 300.0, (st.silent_share,))
    return rows


def _host() -> list[Feature]:
    rows: list[Feature] = []
    for name in ("network_rx", "network_tx", "infiniband_tx", "disk_read", "disk_written"):
        rows += _rows(name, 60.0, (st.p50,), "decades")
        rows += _rows(name, 300.0, (st.p50, st.p95), "decades")
    rows += _rows("infiniband_tx", 300.0, (st.silent_share,))
    return rows


def _cadences() -> list[Feature]:
    rows: list[Feature] = []
    for name in ("util", "watts", "sm", "nvlink_tx"):
        rows += _rows(name, 300.0, (st.cadence_height,), "ratio", st.CADENCE_SAMPLES)
        rows += _rows(name, 300.0, (st.cadence_lag,), "seconds", st.CADENCE_SAMPLES)
    rows.append(_row("watts_nvlink_tx", st.cadence_agreement, 300.0, "ratio", st.CADENCE_SAMPLES, "watts", "nvlink_tx"))
    return rows


#: All features in the order of the model's columns. A change here makes every bundle trained before unfit.
FEATURES: Final[tuple[Feature, ...]] = (
    *_activity(),
    *_memory(),
    *_profiling(),
    *_links(),
    *_host(),
    *_cadences(),
)
FEATURE_NAMES: Final[tuple[str, ...]] = tuple(feature.name for feature in FEATURES)
#: Features for the out-of-domain distance: levels with a plain range, one or two per channel group.
CORE_FEATURES: Final[tuple[str, ...]] = (
    "util__p50__60",
    "util__mad__60",
    "memutil__p50__60",
    "memutil__mad__60",
    "power__p50__60",
    "power__mad__60",
    "memory__p50__60",
    "sm__p50__60",
    "tensor__p50__60",
    "dram__p50__60",
    "nvlink_tx__p50__60",
    "pcie_rx__p50__60",
)


def compute(signals: Signals) -> Array:
    """Return all features of one GPU in table order, shape (features,); NaN where one cannot be computed."""
    return np.array([feature.value(signals) for feature in FEATURES])


def compute_gpu(
    gpu: GpuHistory, host: HostHistory, now_s: float, *, since_s: float = -math.inf, gpu_count: int = 1
) -> Array:
    """Return the features of `gpu` at `now_s` from samples later than `since_s`, shape (features,)."""
    return compute(Signals(gpu, host, now_s, since_s=since_s, gpu_count=gpu_count))


def as_mapping(row: Array) -> Mapping[str, float]:
    """Return a feature row by name, without the ones that are NaN."""
    return {name: float(value) for name, value in zip(FEATURE_NAMES, row, strict=True) if not math.isnan(value)}
