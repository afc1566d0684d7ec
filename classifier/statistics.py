"""Pure functions over windows of signals: what the feature table is made of.

Each takes the windows of one or two signals (or of several, one beside the other) and returns one number per signal and
GPU, shape (signals, rows); NaN where the number has no meaning (a ratio to nothing, a cadence the sampling cannot
show). None depends on how often a log was read, as far as that goes: see `classifier.signals`.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array
from classifier.windows import Windows, quantile

#: A signal below this counts as idle in dwell fractions (ratio).
IDLE_RATIO: Final = 0.02
#: A signal at or above this counts as saturated.
SATURATED_RATIO: Final = 0.95
#: Activity below this gives no ratio to other activities.
_ACTIVE_RATIO: Final = 0.01
#: Traffic below this (bytes per second, mean) has no direction.
_TRAFFIC_FLOOR: Final = 1e6
#: Change of the used share of memory that counts as a step.
_MEMORY_STEP_RATIO: Final = 0.005
#: Distance in seconds of the samples that `step_change` compares: every usual interval divides it.
_CHANGE_S: Final = 10.0
#: Rates this many decades above their median are a burst, and at least twice the floor of the decades.
_BURST_DECADES: Final = 0.7
#: Deviation over mean of a level: not far above it there is little that two GPUs could share.
_FLAT_RATIO: Final = 0.01


def mean(window: Windows) -> Array:
    """Return the mean."""
    return window.mean


def p05(window: Windows) -> Array:
    """Return the 5 % quantile."""
    return window.quantile(0.05)


def p50(window: Windows) -> Array:
    """Return the median."""
    return window.quantile(0.5)


def p95(window: Windows) -> Array:
    """Return the 95 % quantile."""
    return window.quantile(0.95)


def swing(window: Windows) -> Array:
    """Return the distance of the 5 % and the 95 % quantile."""
    return window.quantile(0.95) - window.quantile(0.05)


def mad(window: Windows) -> Array:
    """Return the median absolute deviation from the median, not scaled to a normal distribution."""
    deviations = np.abs(window.values - window.quantile(0.5)[..., np.newaxis])
    return quantile(np.sort(deviations, axis=-1), window.count, 0.5)


def relative_swing(window: Windows) -> Array:
    """Return the swing over the mean: needs no limit or size of the board. NaN where the mean is not positive.

    Not over the median, which jumps from one level to the other where a signal has two.
    """
    return swing(window) / np.where(window.mean > 0, window.mean, np.nan)


def step_change(window: Windows) -> Array:
    """Return the mean absolute change over 10 s; NaN where no two samples lie so far apart."""
    lag = round(_CHANGE_S / window.step_s)
    return _mean_of(np.abs(window.values[..., lag:] - window.held[..., :-lag]))


def idle_share(window: Windows) -> Array:
    """Return the share of samples at or below 2 %."""
    return _share(window, window.values <= IDLE_RATIO)


def busy_share(window: Windows) -> Array:
    """Return the share of samples above 2 %."""
    return _share(window, window.values > IDLE_RATIO)


def saturated_share(window: Windows) -> Array:
    """Return the share of samples at or above 95 %."""
    return _share(window, window.values >= SATURATED_RATIO)


def silent_share(window: Windows) -> Array:
    """Return the share of samples of a rate in decades below 0.3, that is under 1 MB/s."""
    return _share(window, window.values < math.log10(2.0))


def mean_ratio(upper: Windows, lower: Windows) -> Array:
    """Return the mean of `upper` over the mean of `lower`; NaN where `lower` shows no activity (below 1 %)."""
    return upper.mean / np.where(lower.mean >= _ACTIVE_RATIO, lower.mean, np.nan)


def symmetry(transmitted: Windows, received: Windows) -> Array:
    """Return |tx - rx| / (tx + rx) of the mean rates: 0 for an all-reduce, 1 for one-way; NaN without traffic."""
    return np.abs(direction(transmitted, received))


def direction(transmitted: Windows, received: Windows) -> Array:
    """Return (tx - rx) / (tx + rx) of the mean rates, -1 to 1; NaN without traffic."""
    total = transmitted.mean + received.mean
    result: Array = (transmitted.mean - received.mean) / np.where(total >= _TRAFFIC_FLOOR, total, np.nan)
    return result


def pinned_without_memory(util: Windows, memutil: Windows) -> Array:
    """Return the share of samples with utilisation at or above 95 % and memory utilisation at or below 3 %.

    This is a kernel that waits: a rank in a collective, a worker that polls. Only samples that hold both count.
    """
    both = np.count_nonzero(util.valid & memutil.valid, axis=-1)
    pinned = np.count_nonzero((util.values >= SATURATED_RATIO) & (memutil.values <= 0.03), axis=-1)
    result: Array = pinned / np.where(both > 0, both, np.nan)
    return result


def slope(window: Windows) -> Array:
    """Return the change per 300 s of the line through the samples; NaN below 10 s of data."""
    times = np.where(window.valid, np.arange(window.values.shape[-1]) * window.step_s, 0.0)
    count = np.where((window.span - 1.0) * window.step_s >= 10.0, window.count, np.nan)
    middle = times.sum(axis=-1) / count
    apart = np.where(window.valid, times - middle[..., np.newaxis], 0.0)
    spread = (apart**2).sum(axis=-1)
    result: Array = (apart * window.filled).sum(axis=-1) / np.where(spread > 0, spread, np.nan) * 300.0
    return result


def rising_steps(window: Windows) -> Array:
    """Return how often the used share of memory rises by more than 0.5 % from one sample to the next, per 300 s."""
    return _steps(window, _changes(window) > _MEMORY_STEP_RATIO)


def falling_steps(window: Windows) -> Array:
    """Return how often the used share of memory falls by more than 0.5 % from one sample to the next, per 300 s."""
    return _steps(window, _changes(window) < -_MEMORY_STEP_RATIO)


def burst_rate(window: Windows) -> Array:
    """Return how many bursts begin per 300 s: stretches five times above the median and at least 2 MB/s."""
    return _steps(window, _burst_starts(window))


def burst_share(window: Windows) -> Array:
    """Return the share of the time that bursts take."""
    return _share(window, _bursts(window))


def burst_spacing(window: Windows) -> Array:
    """Return the mean distance in seconds of the beginnings of bursts; NaN below two bursts."""
    starts = _burst_starts(window)
    count = np.count_nonzero(starts, axis=-1)
    first = starts.argmax(axis=-1)
    last = starts.shape[-1] - 1 - starts[..., ::-1].argmax(axis=-1)
    result: Array = (last - first) * window.step_s / np.where(count > 1, count - 1.0, np.nan)
    return result


def correlation(first: Windows, second: Windows) -> Array:
    """Return the correlation of two signals over the columns that hold both, -1 to 1; NaN where there are none.

    As between GPUs, deviations count 1 % of the level larger than they are.
    """
    both = first.valid & second.valid
    count = np.count_nonzero(both, axis=-1)[..., np.newaxis]
    count = np.where(count >= 2, count, np.nan)
    one, other = np.where(both, first.filled, 0.0), np.where(both, second.filled, 0.0)
    level, other_level = one.sum(axis=-1, keepdims=True) / count, other.sum(axis=-1, keepdims=True) / count
    one, other = np.where(both, one - level, 0.0), np.where(both, other - other_level, 0.0)
    spread = (one**2).sum(axis=-1) / count[..., 0] + (_FLAT_RATIO * level[..., 0]) ** 2
    other_spread = (other**2).sum(axis=-1) / count[..., 0] + (_FLAT_RATIO * other_level[..., 0]) ** 2
    scale = np.sqrt(spread * other_spread) * count[..., 0]
    result: Array = (one * other).sum(axis=-1) / np.where(scale > 0, scale, np.nan)
    return result


def sync_max(own: Windows, peers: Windows) -> Array:
    """Return the correlation with the peer that moves most alike, -1 to 1; NaN without peers."""
    ordered, count = _together(own, peers)
    return quantile(ordered, count, 1.0)


def sync_median(own: Windows, peers: Windows) -> Array:
    """Return the median correlation with the peers; NaN without peers."""
    ordered, count = _together(own, peers)
    return quantile(ordered, count, 0.5)


def sync_share(own: Windows, peers: Windows) -> Array:
    """Return the share of the peers whose correlation is above 0.5; NaN without peers."""
    ordered, count = _together(own, peers)
    share: Array = (ordered > 0.5).sum(axis=-1) / np.where(count > 0, count, np.nan)
    return share


def _together(own: Windows, peers: Windows) -> tuple[Array, Array]:
    """Return the correlations with all peers in ascending order, NaN last, and how many there are."""
    (found,) = own.single("sync", lambda chosen: (_sync(chosen, peers),))
    return found, (~np.isnan(found)).sum(axis=-1, dtype=np.float64)


def _sync(own: Windows, peers: Windows) -> Array:
    """Return the correlation with every peer, shape (signals, rows, peers), ascending.

    Deviations are counted 1 % of the level larger than they are: noise on a flat signal is shared by chance only.
    NaN, which comes last, for what is no peer, and where fewer than five columns hold both.
    """
    if peers.pairs is None or not peers.pairs.size:
        return np.full((*own.values.shape[:2], 1), np.nan)
    mine, theirs = own.valid.astype(np.float64), np.swapaxes(peers.valid.astype(np.float64), 1, 2)
    one, other = own.filled, np.swapaxes(peers.filled, 1, 2)
    count = mine @ theirs
    count = np.where((count >= 5) & peers.pairs, count, np.nan)
    first, second = one @ theirs / count, mine @ other / count
    spread = np.maximum(one**2 @ theirs / count - first**2, 0.0) + (_FLAT_RATIO * first) ** 2
    spread_of_peer = np.maximum(mine @ other**2 / count - second**2, 0.0) + (_FLAT_RATIO * second) ** 2
    scale = np.sqrt(spread * spread_of_peer)
    together = (one @ other / count - first * second) / np.where(scale > 0, scale, np.nan)
    return np.sort(np.where(scale == 0, 0.0, np.clip(together, -1.0, 1.0)), axis=-1)


def _mean_of(values: Array) -> Array:
    valid = ~np.isnan(values)
    count = valid.sum(axis=-1)
    result: Array = np.where(valid, values, 0.0).sum(axis=-1) / np.where(count > 0, count, np.nan)
    return result


def _share(window: Windows, where: NDArray[np.bool_]) -> Array:
    result: Array = np.count_nonzero(where, axis=-1) / np.where(window.count > 0, window.count, np.nan)
    return result


def _changes(window: Windows) -> Array:
    changes: Array = window.values[..., 1:] - window.held[..., :-1]
    return changes


def _steps(window: Windows, steps: NDArray[np.bool_]) -> Array:
    span_s = (window.span - 1.0) * window.step_s
    result: Array = np.count_nonzero(steps, axis=-1) / np.where(span_s > 0, span_s, np.nan) * 300.0
    return result


def _bursts(window: Windows) -> NDArray[np.bool_]:
    least = np.maximum(window.quantile(0.5) + _BURST_DECADES, math.log10(3.0))
    bursts: NDArray[np.bool_] = window.values >= least[..., np.newaxis]
    return bursts


def _burst_starts(window: Windows) -> NDArray[np.bool_]:
    least = np.maximum(window.quantile(0.5) + _BURST_DECADES, math.log10(3.0))[..., np.newaxis]
    starts: NDArray[np.bool_] = (window.values[..., 1:] >= least) & (window.held[..., :-1] < least)
    return starts
