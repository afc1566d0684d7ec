"""Pure functions over windows of signals: what the feature table is made of.

Each takes one or two windows with at least the feature's minimum of samples and returns a number; NaN where the number
has no meaning (a ratio to nothing, a cadence the sampling cannot show).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from classifier.signals import Window, median

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
#: Spacing in seconds above which neighbouring samples say nothing about fast changes.
_FAST_CHANGE_SPACING_S: Final = 2.0
#: A cadence needs this many samples, and a lag of at least 2.5 sample periods (below that a peak may be an alias).
CADENCE_SAMPLES: Final = 30
_CADENCE_PERIODS: Final = 2.5
#: A peak this close to the highest one counts as equal to it.
_MULTIPLE_SHARE: Final = 0.9


def mean(window: Window) -> float:
    """Return the mean."""
    return window.mean


def p05(window: Window) -> float:
    """Return the 5 % quantile."""
    return window.quantile(0.05)


def p50(window: Window) -> float:
    """Return the median."""
    return window.quantile(0.5)


def p95(window: Window) -> float:
    """Return the 95 % quantile."""
    return window.quantile(0.95)


def swing(window: Window) -> float:
    """Return the distance of the 5 % and the 95 % quantile."""
    return window.quantile(0.95) - window.quantile(0.05)


def mad(window: Window) -> float:
    """Return the median absolute deviation from the median, not scaled to a normal distribution."""
    return median(np.abs(window.values - window.quantile(0.5)))


def relative_swing(window: Window) -> float:
    """Return the swing over the median: needs no limit or size of the board. NaN where the median is not positive."""
    middle = window.quantile(0.5)
    return swing(window) / middle if middle > 0 else math.nan


def step_change(window: Window) -> float:
    """Return the mean absolute change between neighbouring samples; NaN where they lie more than 2 s apart."""
    if not window.spacing_s <= _FAST_CHANGE_SPACING_S:
        return math.nan
    return float(np.abs(window.values[1:] - window.values[:-1]).mean())


def idle_share(window: Window) -> float:
    """Return the share of samples at or below 2 %."""
    return float(np.count_nonzero(window.values <= IDLE_RATIO)) / window.size


def saturated_share(window: Window) -> float:
    """Return the share of samples at or above 95 %."""
    return float(np.count_nonzero(window.values >= SATURATED_RATIO)) / window.size


def silent_share(window: Window) -> float:
    """Return the share of samples of a rate in decades below 0.3, that is under 1 MB/s."""
    return float(np.count_nonzero(window.values < math.log10(2.0))) / window.size


def mean_ratio(upper: Window, lower: Window) -> float:
    """Return the mean of `upper` over the mean of `lower`; NaN where `lower` shows no activity (below 1 %)."""
    return upper.mean / lower.mean if lower.mean >= _ACTIVE_RATIO else math.nan


def symmetry(transmitted: Window, received: Window) -> float:
    """Return |tx - rx| / (tx + rx) of the mean rates: 0 for an all-reduce, 1 for one-way; NaN without traffic."""
    total = transmitted.mean + received.mean
    return abs(transmitted.mean - received.mean) / total if total >= _TRAFFIC_FLOOR else math.nan


def direction(transmitted: Window, received: Window) -> float:
    """Return (tx - rx) / (tx + rx) of the mean rates, -1 to 1; NaN without traffic."""
    total = transmitted.mean + received.mean
    return (transmitted.mean - received.mean) / total if total >= _TRAFFIC_FLOOR else math.nan


def pinned_without_memory(util: Window, memutil: Window) -> float:
    """Return the share of samples with utilisation at or above 95 % and memory utilisation at or below 3 %.

    This is a kernel that waits: a rank in a collective, a worker that polls. NaN where the two have other times.
    """
    if util.size != memutil.size:
        return math.nan
    pinned = (util.values >= SATURATED_RATIO) & (memutil.values <= 0.03)
    return float(np.count_nonzero(pinned)) / util.size


def slope(window: Window) -> float:
    """Return the change per 300 s between the medians of the first and the last third; NaN below 10 s of data."""
    span = float(window.times[-1] - window.times[0])
    third = window.size // 3
    if span < 10.0 or third == 0:
        return math.nan
    rise = median(window.values[-third:]) - median(window.values[:third])
    return rise / (span * 2.0 / 3.0) * 300.0


def rising_steps(window: Window) -> float:
    """Return how often the used share of memory rises by more than 0.5 % between two samples, per 300 s."""
    return _steps(window, np.diff(window.values) > _MEMORY_STEP_RATIO)


def falling_steps(window: Window) -> float:
    """Return how often the used share of memory falls by more than 0.5 % between two samples, per 300 s."""
    return _steps(window, np.diff(window.values) < -_MEMORY_STEP_RATIO)


def _steps(window: Window, steps: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> float:
    span = float(window.times[-1] - window.times[0])
    return float(np.count_nonzero(steps)) / span * 300.0 if span > 0 else math.nan


def cadence_height(window: Window) -> float:
    """Return the height (0..1) of the highest peak of the autocorrelation; 0 where there is none."""
    return cadence(window)[0]


def cadence_lag(window: Window) -> float:
    """Return the lag in seconds of the highest peak of the autocorrelation; NaN where none reaches 0.2."""
    height, lag = cadence(window)
    return lag if height >= 0.2 else math.nan


def cadence(window: Window) -> tuple[float, float]:
    """Return height and lag in seconds of the first of the highest local maxima of the autocorrelation.

    Lags run from 2.5 sample periods to a third of the data. Height 0 and NaN where the signal is flat or has no peak;
    NaN and NaN below 30 samples.
    """
    if window.cadence is None:
        window.cadence = _cadence(window)
    return window.cadence


def _cadence(window: Window) -> tuple[float, float]:
    if window.size < CADENCE_SAMPLES:
        return math.nan, math.nan
    step = window.spacing_s
    count = int((window.times[-1] - window.times[0]) / step) + 1
    if not CADENCE_SAMPLES <= count <= 4 * window.size:
        return math.nan, math.nan
    grid = window.times[0] + step * np.arange(count)
    values = np.interp(grid, window.times, window.values)
    values -= values.mean()
    spectrum = np.fft.rfft(values, 1 << (2 * count - 1).bit_length())
    correlation = np.fft.irfft(spectrum.real**2 + spectrum.imag**2)[: count // 3 + 2]
    if correlation[0] <= 1e-12 * count:
        return 0.0, math.nan
    # The sum at lag k has n - k terms: without this factor long lags would look weak.
    correlation = correlation / correlation[0] * (count / (count - np.arange(correlation.size)))
    first = math.ceil(_CADENCE_PERIODS)
    inner = correlation[first:-1]
    peaks = np.flatnonzero((inner > correlation[first - 1 : -2]) & (inner >= correlation[first + 1 :])) + first
    if peaks.size == 0:
        return 0.0, math.nan
    heights = correlation[peaks]
    # Multiples of a period are about as high as the period itself: the first of them is the cadence.
    best = peaks[int(np.argmax(heights >= _MULTIPLE_SHARE * heights.max()))] if heights.max() > 0 else peaks[0]
    height = min(1.0, max(0.0, float(correlation[best])))
    return height, float(best) * step


def cadence_agreement(first: Window, second: Window) -> float:
    """Return how well two signals share a cadence: the lower height where their lags agree to 10 %, else 0."""
    height, lag = cadence(first)
    other_height, other_lag = cadence(second)
    if math.isnan(height) or math.isnan(other_height):
        return math.nan
    if math.isnan(lag) or math.isnan(other_lag) or abs(lag - other_lag) > 0.1 * max(lag, other_lag):
        return 0.0
    return min(height, other_height)
