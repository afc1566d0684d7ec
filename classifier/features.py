"""The feature table: what the model sees of one GPU, the same code live, in replay and in training.

Every row names its window, unit, least number of samples and signals (`classifier.signals`), and the pure function over
the windows of these signals (`classifier.statistics`, `classifier.cadence`). A feature is NaN where one of its signals
is missing or has too few samples in the window. None says how or how often it was recorded: samples count in steps of
the signal, whatever the log's interval. All rows of one function and window are computed in one call for all GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array, GpuHistory, HostHistory
from classifier import cadence as cd
from classifier import statistics as st
from classifier.grids import Grids, kind_of, position
from classifier.signals import SIGNALS, Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One column of the model's input; `function` is given the windows of `channels`, in their order."""

    name: str  # <signal>__<statistic>__<window in seconds>
    window_s: float
    unit: str  # ratio, decades, seconds, count, per_300_s
    minimum_samples: int
    channels: tuple[str, ...]  # names of classifier.signals.SIGNALS
    function: Callable[..., Array]


#: Least samples of quantiles: a window of 60 s holds as many at one sample every 10 s.
_QUANTILE_SAMPLES: Final = 5
#: Least samples in the 15 s window, of single levels, and of signals of 5 s in the 60 s window.
_LEVEL_SAMPLES: Final = 3
#: Least samples of correlations: of 12, two GPUs that have nothing to do with each other show 0.3 by chance.
_PAIRED_SAMPLES: Final = 20
#: Least samples of the slow context: 300 s at one sample every 10 s.
_CONTEXT_SAMPLES: Final = 30


def _row(
    name: str, function: Callable[..., Array], window_s: float, unit: str, minimum: int, *channels: str
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
    functions: tuple[Callable[..., Array], ...],
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
        _row("memory", st.slope, 900.0, "per_300_s", _CONTEXT_SAMPLES, "memory_10s"),
        _row("memory", st.rising_steps, 900.0, "per_300_s", _CONTEXT_SAMPLES, "memory_10s"),
    ]


def _processes() -> list[Feature]:
    """Return the rows of the processes on the GPU: how many, the cores they keep busy, what they read and write."""
    rows = [
        *_rows("processes", 60.0, (st.p50,), "count", _LEVEL_SAMPLES),
        *_rows("process_cpu", 60.0, (st.p50,), "count", _LEVEL_SAMPLES),
        *_rows("process_cpu", 300.0, (st.p95, st.relative_swing), "count"),
    ]
    for name in ("process_read", "process_written"):
        rows += _rows(name, 300.0, (st.p50, st.p95), "decades")
        rows += _bursts(name)
    return rows


def _profiling() -> list[Feature]:
    """Return the rows of the GPM metrics (Hopper and newer)."""
    rows = [
        *_rows("sm", 15.0, (st.mean,), minimum=_LEVEL_SAMPLES),
        *_rows("sm", 60.0, (st.p05, st.p50, st.p95, st.mad), minimum=_LEVEL_SAMPLES),
        *_rows("sm", 300.0, (st.p05, st.p50, st.p95)),
        *_rows("occupancy", 60.0, (st.p50,), minimum=_LEVEL_SAMPLES),
        *_rows("tensor", 60.0, (st.p50, st.p95), minimum=_LEVEL_SAMPLES),
        *_rows("tensor", 300.0, (st.mean, st.p95)),
        *_rows("dram", 60.0, (st.p50, st.p95), minimum=_LEVEL_SAMPLES),
        *_rows("dram", 300.0, (st.mean, st.swing)),
    ]
    for window_s in (60.0, 300.0):
        for upper, lower in (
            ("tensor", "sm"), ("dram", "sm"), ("dram", "tensor"), ("fp64", "sm"), ("fp32", "sm"), ("sm", "util"),
        ):  # fmt: skip
            rows.append(_row(f"{upper}_{lower}", st.mean_ratio, window_s, "ratio", _LEVEL_SAMPLES, upper, lower))
    for upper, lower in (
        ("hmma", "tensor"), ("imma", "tensor"), ("dfma", "tensor"),
        ("hmma", "sm"), ("imma", "sm"), ("dfma", "sm"), ("fp16", "sm"), ("occupancy", "sm"),
    ):  # fmt: skip
        rows.append(_row(f"{upper}_{lower}", st.mean_ratio, 300.0, "ratio", _LEVEL_SAMPLES, upper, lower))
    return rows


def _links() -> list[Feature]:
    rows: list[Feature] = []
    for link in ("nvlink", "pcie"):
        for way in ("rx", "tx"):
            rows += _rows(f"{link}_{way}", 60.0, (st.p50, st.p95), "decades", _LEVEL_SAMPLES)
            rows += _rows(f"{link}_{way}", 300.0, (st.p50, st.p95), "decades")
        both = (f"{link}_tx_rate", f"{link}_rx_rate")
        rows.append(_row(link, st.symmetry, 60.0, "ratio", _LEVEL_SAMPLES, *both))
        rows.append(_row(link, st.direction, 300.0, "ratio", _QUANTILE_SAMPLES, *both))
    rows += _rows("nvlink_tx", 60.0, (st.silent_share, st.swing), minimum=_LEVEL_SAMPLES)
    rows += _rows("nvlink_tx", 300.0, (st.silent_share,))
    for name in ("pcie_tx", "pcie_rx"):
        rows += _bursts(name)
    return rows


def _bursts(name: str) -> list[Feature]:
    """Return the rows of what comes in bursts minutes apart: checkpoints leave a GPU and a host so."""
    units = ((st.burst_rate, "per_300_s"), (st.burst_share, "ratio"), (st.burst_spacing, "seconds"))
    return [_row(name, function, 900.0, unit, _CONTEXT_SAMPLES, f"{name}_10s") for function, unit in units]


def _host() -> list[Feature]:
    rows: list[Feature] = []
    for name in (
        "network_rx", "network_tx", "infiniband_tx", "disk_read", "disk_written", "filesystem_read",
        "filesystem_written",
    ):  # fmt: skip
        rows += _rows(name, 60.0, (st.p50,), "decades", _LEVEL_SAMPLES)
        rows += _rows(name, 300.0, (st.p50, st.p95), "decades")
    rows += _rows("infiniband_tx", 300.0, (st.silent_share,))
    for link in ("network", "infiniband"):
        rows.append(_row(link, st.direction, 300.0, "ratio", _QUANTILE_SAMPLES, f"{link}_tx_rate", f"{link}_rx_rate"))
    for name in ("disk_written", "filesystem_written", "network_tx"):
        rows += _bursts(name)
    return rows


def _cadences() -> list[Feature]:
    rows: list[Feature] = []
    for name, window_s, signal in (
        ("util", 300.0, "util"),
        ("watts", 300.0, "watts"),
        ("sm", 300.0, "sm_1s"),
        ("nvlink_tx", 300.0, "nvlink_tx_1s"),
        ("infiniband_tx", 300.0, "infiniband_tx_1s"),
        ("fast", 60.0, "fast"),
        ("util", 900.0, "util_10s"),
        ("watts", 900.0, "watts_10s"),
        ("pcie_tx", 900.0, "pcie_tx_10s"),
    ):
        rows.append(_row(name, cd.cadence_height, window_s, "ratio", cd.CADENCE_SAMPLES, signal))
        rows.append(_row(name, cd.cadence_lag, window_s, "seconds", cd.CADENCE_SAMPLES, signal))
    for name, window_s, first, second in (
        ("watts_nvlink_tx", 300.0, "watts", "nvlink_tx_1s"),
        ("watts_infiniband_tx", 300.0, "watts", "infiniband_tx_1s"),
        ("nvlink_tx_infiniband_tx", 300.0, "nvlink_tx_1s", "infiniband_tx_1s"),
        ("sm_nvlink_tx", 300.0, "sm_1s", "nvlink_tx_1s"),
        ("fast_nvlink_tx", 60.0, "fast", "nvlink_tx_1s"),
        ("fast_infiniband_tx", 60.0, "fast", "infiniband_tx_1s"),
    ):
        rows.append(_row(name, cd.cadence_agreement, window_s, "ratio", cd.CADENCE_SAMPLES, first, second))
    rows += _rows("fast", 60.0, (cd.band_share, cd.band_depth, cd.peak_share), "ratio", cd.CADENCE_SAMPLES)
    rows += _rows("fast", 60.0, (cd.peak_period,), "seconds", cd.CADENCE_SAMPLES)
    return rows


def _together() -> list[Feature]:
    """Return the rows of what moves together: two signals of one GPU, one signal of all GPUs of the node."""
    rows = [
        _row("sm_nvlink_tx", st.correlation, 300.0, "ratio", _CONTEXT_SAMPLES, "sm", "nvlink_tx"),
        _row("nvlink_tx_infiniband_tx", st.correlation, 300.0, "ratio", _CONTEXT_SAMPLES, "nvlink_tx", "infiniband_tx"),
    ]
    rows += [
        _row("watts", function, window_s, "ratio", _PAIRED_SAMPLES, "watts", "watts_peers")
        for window_s in (60.0, 300.0)
        for function in (st.sync_max, st.sync_median)
    ]
    rows.append(_row("watts", st.sync_share, 300.0, "ratio", _PAIRED_SAMPLES, "watts", "watts_peers"))
    rows += [
        _row("nvlink_tx", function, 300.0, "ratio", _PAIRED_SAMPLES, "nvlink_tx_rate", "nvlink_tx_peers")
        for function in (st.sync_max, st.sync_median)
    ]
    return rows


def _context() -> list[Feature]:
    """Return the rows of the slow context: 900 s is what a history holds."""
    return [
        _row("util", st.mean, 900.0, "ratio", _CONTEXT_SAMPLES, "util_10s"),
        _row("util", st.busy_share, 900.0, "ratio", _CONTEXT_SAMPLES, "util_10s"),
        _row("util", st.saturated_share, 900.0, "ratio", _CONTEXT_SAMPLES, "util_10s"),
        _row("util", st.step_change, 900.0, "ratio", _CONTEXT_SAMPLES, "util_10s"),
        _row("power", st.mean, 900.0, "ratio", _CONTEXT_SAMPLES, "power_10s"),
        _row("power", st.swing, 900.0, "ratio", _CONTEXT_SAMPLES, "power_10s"),
        _row("power", st.slope, 900.0, "per_300_s", _CONTEXT_SAMPLES, "power_10s"),
    ]


#: All features in the order of the model's columns. A change here makes every bundle trained before unfit.
FEATURES: Final[tuple[Feature, ...]] = (
    *_activity(),
    *_memory(),
    *_processes(),
    *_profiling(),
    *_links(),
    *_host(),
    *_cadences(),
    *_together(),
    *_context(),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """All features of one function and window: computed in one call."""

    function: Callable[..., Array]
    window_s: float
    #: Per operand of the function: a signal to find the window by, the positions of the features' signals in it, and
    #: what tells these operands from others.
    operands: tuple[tuple[str, NDArray[np.intp], bytes], ...]
    columns: NDArray[np.intp]  # of the features in the table

    def compute(self, grids: Grids) -> Array:
        """Return the features, shape (features, rows)."""
        operands = [grids.taken(name, self.window_s, chosen, key) for name, chosen, key in self.operands]
        return self.function(*operands)


def _grouped() -> tuple[_Group, ...]:
    groups: dict[object, list[int]] = {}
    for column, feature in enumerate(FEATURES):
        kinds = tuple(kind_of(name) for name in feature.channels)
        groups.setdefault((feature.function, feature.window_s, kinds), []).append(column)
    found: list[_Group] = []
    for columns in groups.values():
        features = [FEATURES[column] for column in columns]
        operands = list(zip(*(feature.channels for feature in features), strict=True))
        found.append(
            _Group(
                function=features[0].function,
                window_s=features[0].window_s,
                operands=tuple(_operand(names) for names in operands),
                columns=np.array(columns),
            )
        )
    return tuple(found)


def _operand(names: Sequence[str]) -> tuple[str, NDArray[np.intp], bytes]:
    positions = np.array([position(name) for name in names])
    first = next(name for name in SIGNALS if kind_of(name) == kind_of(names[0]))
    return first, positions, positions.tobytes()


_GROUPS: Final = _grouped()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Minimum:
    """Signals of one window whose samples have to be counted."""

    name: str
    window_s: float
    positions: NDArray[np.intp]
    columns: NDArray[np.intp]
    least: Array  # shape (features, 1)

    def lacking(self, grids: Grids) -> NDArray[np.bool_]:
        """Return which features have too few samples, shape (features, rows)."""
        lacking: NDArray[np.bool_] = grids.window(self.name, self.window_s).count[self.positions] < self.least
        return lacking


def _minima() -> tuple[_Minimum, ...]:
    found: dict[object, list[tuple[str, int]]] = {}
    for column, feature in enumerate(FEATURES):
        for operand, name in enumerate(feature.channels):
            if not SIGNALS[name].of_peers:  # what peers have is for the function to judge
                found.setdefault((kind_of(name), feature.window_s, operand), []).append((name, column))
    return tuple(
        _Minimum(
            name=pairs[0][0],
            window_s=FEATURES[pairs[0][1]].window_s,
            positions=np.array([position(name) for name, _ in pairs]),
            columns=np.array([column for _, column in pairs]),
            least=np.array([[float(FEATURES[column].minimum_samples)] for _, column in pairs]),
        )
        for pairs in found.values()
    )


_MINIMA: Final = _minima()


def compute_all(batch: Sequence[Signals]) -> Array:
    """Return all features of some GPUs in table order, shape (GPUs, features); NaN where one cannot be computed."""
    rows = np.full((len(FEATURES), len(batch)), np.nan)
    if batch:
        grids = Grids(batch)
        for group in _GROUPS:
            rows[group.columns] = group.compute(grids)
        lacking = np.zeros(rows.shape, dtype=bool)
        for minimum in _MINIMA:
            lacking[minimum.columns] |= minimum.lacking(grids)
        rows[lacking] = np.nan
    return np.ascontiguousarray(rows.T)


def compute(signals: Signals) -> Array:
    """Return all features of one GPU in table order, shape (features,); see `compute_all`, which is much cheaper."""
    row: Array = compute_all([signals])[0]
    return row


def compute_gpu(
    gpu: GpuHistory,
    host: HostHistory,
    now_s: float,
    *,
    since_s: float = -math.inf,
    gpu_count: int = 1,
    peers: Sequence[GpuHistory] = (),
) -> Array:
    """Return the features of `gpu` at `now_s` from samples later than `since_s`, shape (features,)."""
    return compute(Signals(gpu, host, now_s, since_s=since_s, gpu_count=gpu_count, peers=peers))


def as_mapping(row: Array) -> Mapping[str, float]:
    """Return a feature row by name, without the ones that are NaN."""
    return {name: float(value) for name, value in zip(FEATURE_NAMES, row, strict=True) if not math.isnan(value)}
