"""Windows of many GPUs at once, cut from their grids (`classifier.grids`), and what statistics share of them.

Sorting, means and fills are made once per window for all signals and GPUs: the features of 16 GPUs cost a few
milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from agent.history import Array

Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]

#: Quantiles that statistics may ask for.
SHARES: Final = (0.05, 0.5, 0.95)


class Windows:
    """Signals in one window: `values` of shape (signals, rows, columns), NaN where nothing was measured."""

    def __init__(self, values: Array, step_s: float, pairs: Flags | None = None) -> None:
        """`pairs` says which peers (rows of a peer signal) belong to which row, shape (rows, peers)."""
        self.step_s = step_s
        self.pairs = pairs
        self._values: Array | None = values
        # Of a choice, the windows it was taken from. Windows that named themselves would live until the collector of
        # cycles comes by, and those of a decision are 10 MB.
        self._of: Self | None = None
        self._chosen: Indices | slice = slice(None)
        self._shared: dict[Hashable, Array] = {}
        self._single: dict[Hashable, tuple[Flags, tuple[Array, ...]]] = {}

    @property
    def _root(self) -> Self:
        return self if self._of is None else self._of

    @property
    def values(self) -> Array:
        """Values of shape (signals, rows, columns)."""
        if self._values is None:
            self._values = self._root.values[self._chosen]
        return self._values

    def take(self, chosen: Indices) -> Self:
        """Return the signals at the positions `chosen`; what is computed for all of them is shared."""
        if self._root is not self:
            chosen = np.arange(self._root.values.shape[0])[self._chosen][chosen]
        taken = object.__new__(type(self))
        taken.step_s, taken.pairs = self.step_s, self.pairs
        taken._values, taken._of = None, self._root
        # Neighbours are looked at where they are; a choice of others is a copy.
        first, last = int(chosen[0]), int(chosen[-1])
        is_run = last - first == chosen.size - 1 and (chosen.size < 3 or bool((chosen[1:] > chosen[:-1]).all()))
        taken._chosen = slice(first, last + 1) if is_run else chosen
        taken._shared, taken._single = {}, {}
        return taken

    def shared(self, key: Hashable, function: Callable[[Windows], Array]) -> Array:
        """Return `function` of these signals, computed once for all signals of the window."""
        found = self._shared.get(key)
        if found is None:
            root = self._root
            found = function(self) if root is self else root.shared(key, function)[self._chosen]
            self._shared[key] = found
        return found

    def single(self, key: Hashable, function: Callable[[Windows], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Return `function` of these signals, computed once for each that is asked for: for what costs much."""
        root = self._root
        signals = np.arange(root.values.shape[0])[self._chosen]
        is_known, wholes = root._single.get(key) or (np.zeros(root.values.shape[0], dtype=bool), ())
        new = np.unique(signals[~is_known[signals]])
        if new.size:
            results = function(root.take(new))
            wholes = wholes or tuple(np.empty((is_known.size, *part.shape[1:])) for part in results)
            root._single[key] = is_known, wholes
            is_known[new] = True
            for whole, part in zip(wholes, results, strict=True):
                whole[new] = part
        return tuple(whole[self._chosen] for whole in wholes)

    @property
    def valid(self) -> Flags:
        """Where something was measured, shape (signals, rows, columns)."""
        return self.shared("valid", lambda w: w.values == w.values)  # type: ignore[return-value]

    @property
    def count(self) -> Array:
        """Number of measured columns, shape (signals, rows)."""
        return self.shared("count", lambda w: np.count_nonzero(w.valid, axis=-1).astype(np.float64))

    @property
    def filled(self) -> Array:
        """Values with 0 where nothing was measured."""
        return self.shared("filled", lambda w: np.where(w.valid, w.values, 0.0))

    @property
    def mean(self) -> Array:
        """Arithmetic mean, shape (signals, rows); NaN without samples."""
        return self.shared("mean", lambda w: w.filled.sum(axis=-1) / np.where(w.count > 0, w.count, np.nan))

    @property
    def held(self) -> Array:
        """Values with the last one before where nothing was measured; NaN before the first."""
        return self.shared("held", _held)

    @property
    def span(self) -> Array:
        """Number of columns from the first measured one to the newest, shape (signals, rows)."""
        return self.shared("span", _span)

    def quantile(self, share: float) -> Array:
        """Return the quantile at `share`, one of SHARES, shape (signals, rows); NaN without samples.

        The median-unbiased estimate (Hyndman and Fan, type 8): means the same for 12 samples and for 60.
        """
        return self.shared("quantiles", _quantiles)[..., SHARES.index(share)]


def _quantiles(windows: Windows) -> Array:
    """Return the quantiles at SHARES, shape (signals, rows, SHARES): sorted once, and looked up once for all."""
    ordered = np.sort(windows.values, axis=-1)  # NaN comes last
    return quantile(ordered, windows.count, np.array(SHARES))


def quantile(ordered: Array, count: Array, share: Array | float) -> Array:
    """Return the median-unbiased quantile of sorted values, the first `count` of the last axis being measured.

    Several shares give one more axis, the last.
    """
    flat, columns = ordered.reshape(-1), ordered.shape[-1]
    starts = np.arange(0, flat.size, columns).reshape(count.shape)
    if isinstance(share, np.ndarray):
        count, starts = count[..., np.newaxis], starts[..., np.newaxis]
    last = np.maximum(count - 1.0, 0.0)
    position = np.minimum(np.maximum(share * (count + 1.0 / 3.0) - 2.0 / 3.0, 0.0), last)
    low = position.astype(np.intp)
    high = np.minimum(low + 1, last.astype(np.intp))
    below = flat[starts + low]
    result: Array = below + (flat[starts + high] - below) * (position - low)
    return result


def _held(windows: Windows) -> Array:
    values, count = windows.values, windows.count
    partial = (count > 0) & (count < values.shape[-1])
    if not partial.any():
        return values
    rows = values[partial]
    last = np.maximum.accumulate(np.where(np.isnan(rows), 0, np.arange(rows.shape[-1])), axis=-1)
    held = values.copy()
    held[partial] = rows[np.arange(rows.shape[0])[:, np.newaxis], last]
    return held


def _span(windows: Windows) -> Array:
    columns = windows.values.shape[-1]
    return np.where(windows.count > 0, columns - windows.valid.argmax(axis=-1), 0.0)
