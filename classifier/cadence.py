"""Cadence: periods in signals, from autocorrelation (any signal) and from the spectrum (power read ten times a second).

The step of training shows at 0.2 to 3 Hz in the power of the moment and hardly in its average over a second; what is
slower (accumulation, evaluation, saving) shows in any signal of the same cadence (SIGNALS: swings of 0.2 to 3 Hz).
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array
from classifier.windows import Windows

#: Least columns of the grid that a cadence needs, and how many of them have to be measured.
CADENCE_SAMPLES: Final = 30
_DENSE_RATIO: Final = 0.75
#: Least lag in columns: below 2.5 sample periods a peak may be an alias.
_LEAST_LAG: Final = 3
#: A peak this close to the highest one counts as equal to it.
_MULTIPLE_SHARE: Final = 0.9
#: Peaks below this height have no lag worth a name.
_LEAST_HEIGHT: Final = 0.2
#: The band of training steps in Hz, and where the spectrum begins: below is drift.
_BAND_HZ: Final = (0.2, 3.0)
_LOWEST_HZ: Final = 0.05
#: Deviation over mean of power whose spectrum is noise of the sensor.
_FLAT_RATIO: Final = 0.002


def cadence_height(window: Windows) -> Array:
    """Return the height (0..1) of the highest peak of the autocorrelation; 0 where there is none."""
    return cadence(window)[0]


def cadence_lag(window: Windows) -> Array:
    """Return the lag in seconds of the highest peak of the autocorrelation; NaN where none reaches 0.2."""
    height, lag = cadence(window)
    return np.where(height >= _LEAST_HEIGHT, lag, np.nan)


def cadence_agreement(first: Windows, second: Windows) -> Array:
    """Return how well two signals share a cadence: the lower height where their lags agree to 10 %, else 0.

    Lags may also differ by the step of the coarser signal.
    """
    height, lag = cadence(first)
    other_height, other_lag = cadence(second)
    tolerance = np.maximum(0.1 * np.maximum(lag, other_lag), max(first.step_s, second.step_s) + 1e-9)
    agree = np.abs(lag - other_lag) <= tolerance  # False where one has no lag
    both = np.isfinite(height) & np.isfinite(other_height)
    return np.where(both, np.where(agree, np.minimum(height, other_height), 0.0), np.nan)


def cadence(window: Windows) -> tuple[Array, Array]:
    """Return height and lag in seconds of the first of the highest local maxima of the autocorrelation.

    Lags run from 3 columns of the grid to a third of the data. Height 0 and lag NaN where the signal is flat or has no
    peak; NaN and NaN below 30 columns of data or where a quarter of them is missing: such a log is too slow.
    """
    height, lag = window.single("cadence", _cadence)
    return height, lag


def _cadence(window: Windows) -> tuple[Array, Array]:
    columns = window.values.shape[-1]
    span = window.span
    dense = (span >= CADENCE_SAMPLES) & (window.count >= _DENSE_RATIO * span)
    signals, rows = np.nonzero(dense)
    height, lag = np.full(span.shape, np.nan), np.full(span.shape, np.nan)
    if not signals.size:
        return height, lag
    values, size = window.held[signals, rows], span[signals, rows]
    centred = values - window.mean[signals, rows][:, np.newaxis]
    if size.min() < columns:
        centred[np.isnan(centred)] = 0.0
    longest = columns // 3 + 2
    curve, flat = autocorrelation(centred, size, longest)
    lags = np.arange(longest)
    inner = curve[:, _LEAST_LAG:-1]
    peaks = (inner > curve[:, _LEAST_LAG - 1 : -2]) & (inner >= curve[:, _LEAST_LAG + 1 :])
    peaks &= (lags[_LEAST_LAG:-1] <= size[:, np.newaxis] / 3.0) & ~flat[:, np.newaxis]
    heights = np.where(peaks, inner, np.float32(-np.inf))
    highest = heights.max(axis=-1)
    # Multiples of a period are about as high as the period itself: the first of them is the cadence.
    best = (heights >= np.where(highest > 0, _MULTIPLE_SHARE * highest, np.inf)[:, np.newaxis]).argmax(axis=-1)
    found = highest > 0
    height[signals, rows] = np.where(found, np.minimum(1.0, highest_at(heights, best)), 0.0)
    lag[signals, rows] = np.where(found, (best + _LEAST_LAG) * window.step_s, np.nan)
    return height, lag


def autocorrelation(centred: Array, size: Array, longest: int) -> tuple[Array, NDArray[np.bool_]]:
    """Return the autocorrelation (1 at lag 0) of rows for lags below `longest`, and which rows are flat.

    `centred` has no mean and 0 where nothing was measured; `size` is how many columns of each row were.
    """
    # Single precision is more than enough for heights, and the transforms are half of what all features cost.
    length = _fast_length(centred.shape[-1] + longest)
    spectrum = np.fft.rfft(centred.astype(np.float32), length, axis=-1)
    sums = np.fft.irfft(spectrum.real**2 + spectrum.imag**2, length, axis=-1)[:, :longest]
    flat = sums[:, 0] <= 1e-12 * size
    # The sum at lag k has size - k terms: without this factor long lags would look weak.
    terms = np.maximum(size[:, np.newaxis] - np.arange(longest), 1.0).astype(np.float32)
    scale = (size / np.where(flat, 1.0, sums[:, 0])).astype(np.float32)
    curve: Array = sums * scale[:, np.newaxis] / terms
    return curve, flat


def highest_at(heights: Array, best: Array) -> Array:
    """Return the height at position `best` of each row."""
    result: Array = heights[np.arange(heights.shape[0]), best.astype(np.intp)]
    return result


def band_share(window: Windows) -> Array:
    """Return the share of the variance from 0.05 to 5 Hz that lies in 0.2 to 3 Hz; NaN where power is flat."""
    return _spectrum(window)[0]


def band_depth(window: Windows) -> Array:
    """Return the deviation of power within 0.2 to 3 Hz over its mean."""
    return _spectrum(window)[1]


def peak_share(window: Windows) -> Array:
    """Return the share of the band's variance in its highest line: near 1 for a clockwork, near 0 for noise."""
    return _spectrum(window)[2]


def peak_period(window: Windows) -> Array:
    """Return the period in seconds of the highest line in the band; NaN where no line holds 10 % of the band."""
    share, period = _spectrum(window)[2:]
    return np.where(share >= 0.1, period, np.nan)


def _spectrum(window: Windows) -> tuple[Array, Array, Array, Array]:
    share, depth, peak, period = window.single("spectrum", _make_spectrum)
    return share, depth, peak, period


def _make_spectrum(window: Windows) -> tuple[Array, ...]:
    columns = window.values.shape[-1]
    span = window.span
    results = tuple(np.full(span.shape, np.nan) for _ in range(4))
    signals, rows = np.nonzero((span >= columns // 2) & (window.count >= _DENSE_RATIO * span))
    if not signals.size:
        return results
    values, size = window.held[signals, rows], span[signals, rows]
    mean = window.mean[signals, rows]
    sizes = set(size.tolist())
    taper = (
        _taper(columns, columns) if sizes == {columns} else np.stack([_taper(columns, int(known)) for known in size])
    )
    centred = np.where(np.isnan(values), 0.0, values - mean[:, np.newaxis]) * taper
    spectrum = np.fft.rfft(centred, columns, axis=-1)
    energy = spectrum.real**2 + spectrum.imag**2
    lowest, inside, frequencies = _lines(columns, window.step_s)
    seen = energy[:, lowest:].sum(axis=-1)
    band = energy[:, inside]
    total = band.sum(axis=-1)
    # Parseval: the variance of the tapered signal, made up for what the taper took.
    weight = 2.0 / (columns * size / 2.0)
    moves = seen * weight > (_FLAT_RATIO * mean) ** 2
    best = band.argmax(axis=-1)
    near = np.abs(np.arange(frequencies.size) - best[:, np.newaxis]) <= 2
    results[0][signals, rows] = np.where(moves, total / np.where(moves, seen, 1.0), np.nan)
    results[1][signals, rows] = np.sqrt(total * weight) / np.where(mean > 0, mean, np.nan)
    results[2][signals, rows] = np.where(
        moves & (total > 0), np.where(near, band, 0.0).sum(axis=-1) / np.where(total > 0, total, 1.0), np.nan
    )
    results[3][signals, rows] = np.where(moves, 1.0 / frequencies[best], np.nan)
    return results


@lru_cache(maxsize=8)
def _lines(columns: int, step_s: float) -> tuple[int, slice, Array]:
    """Return the first line of the spectrum that is no drift, the lines of the band, and their frequencies in Hz."""
    hertz = np.fft.rfftfreq(columns, step_s)
    inside = slice(int(np.searchsorted(hertz, _BAND_HZ[0])), int(np.searchsorted(hertz, _BAND_HZ[1], side="right")))
    frequencies: Array = hertz[inside].astype(np.float64)
    return int(np.searchsorted(hertz, _LOWEST_HZ)), inside, frequencies


@lru_cache(maxsize=64)
def _taper(columns: int, size: int) -> Array:
    """Return half a sine over the newest `size` columns, the data, and zeros before: squares sum to half of it."""
    place = np.arange(columns) - (columns - size)
    return np.where(place >= 0, np.sin(np.pi * (place + 0.5) / size), 0.0)


@cache
def _fast_length(least: int) -> int:
    """Return the next length that the FFT is fast for: a small product of 3 and 5 times a power of 2."""
    lengths = (factor << power for factor in (1, 3, 5, 9, 15, 25, 27) for power in range(16))
    return min(length for length in lengths if length >= least)
