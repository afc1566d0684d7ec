"""Reading channels of a history side by side, for detectors."""

from __future__ import annotations

from typing import Final

import numpy as np

from agent.history import Array, GpuHistory

#: A GPU whose newest sample is older than this many of its own sampling intervals cannot be judged.
STALE_INTERVALS: Final = 3.0
_LEAST_STALE_S: Final = 15.0
#: By which GPUs are seen to move in step, the better one first.
MOVING_CHANNELS: Final = ("power_watts", "utilization_ratio")


def aligned(gpu: GpuHistory, channel: str, times: Array, now_s: float, seconds: float) -> Array:
    """Return the values of `channel` at exactly `times`, NaN where it has none then."""
    series = gpu.series(channel, now_s, seconds)
    values = np.full(times.size, np.nan)
    if not series.size:
        return values
    places = np.searchsorted(series.times, times)
    inside = places < series.size
    found = np.zeros(times.size, dtype=bool)
    found[inside] = series.times[places[inside]] == times[inside]
    values[found] = series.values[places[found]]
    return values


def interval_seconds(gpu: GpuHistory, now_s: float) -> float:
    """Return the usual distance of two samples of the last minutes; 1 s where there are fewer than three."""
    times = gpu.series("samples", now_s, 300.0).times[-60:]
    return float(np.median(np.diff(times))) if times.size >= 3 else 1.0


def is_fresh(gpu: GpuHistory, now_s: float, interval_s: float) -> bool:
    """Return whether the newest sample is young enough to be judged."""
    return gpu.last_s is not None and now_s - gpu.last_s <= max(_LEAST_STALE_S, STALE_INTERVALS * interval_s)


def process_ids(gpu: GpuHistory) -> frozenset[int] | None:
    """Return the process ids on the GPU as last listed; None where they cannot be listed."""
    return None if gpu.processes is None else frozenset(process.pid for process in gpu.processes)


def is_same_work(before: frozenset[int] | None, after: frozenset[int] | None) -> bool:
    """Return whether a process of `before` is still there; also True where either list is not known."""
    return before is None or after is None or not before.isdisjoint(after)


def is_in_step(one: GpuHistory, other: GpuHistory, until_s: float, seconds: float) -> bool:
    """Return whether two GPUs moved in step for `seconds` before `until_s`, by power or else by utilisation.

    GPUs that hardly move (below 1 % of their mean) cannot be told apart and count as in step. Measured: ranks of one
    job correlate at 0.56 to 0.99, independent processes at 0.08 to 0.31.
    """
    for channel in MOVING_CHANNELS:
        together = correlation(one, other, channel, until_s, seconds, least_spread=0.01)
        if together is None:
            continue
        if np.isfinite(together):
            return together >= 0.4
        if channel == "power_watts":
            return True
    return True


def correlation(
    one: GpuHistory, other: GpuHistory, channel: str, until_s: float, seconds: float, *, least_spread: float
) -> float | None:
    """Return how alike a channel of two GPUs moves; NaN where one hardly does, None where too little was measured.

    A channel moves where its standard deviation is above `least_spread` of its mean.
    """
    left, right = one.series(channel, until_s, seconds), other.series(channel, until_s, seconds)
    if left.size < 20 or right.size < 20:
        return None
    values = np.stack([left.values, np.interp(left.times, right.times, right.values)])
    if not np.all(values.std(axis=1) > least_spread * np.abs(values.mean(axis=1))):
        return float("nan")
    return float(np.corrcoef(values)[0, 1])
