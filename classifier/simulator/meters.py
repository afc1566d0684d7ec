"""How boards meter: integrals that are read at any time, and a power sensor that looks ten times a second.

A board does not measure power all the time. On A100 and H100 the sensor sees 25 ms of every 100 ms ("Part-time power
measurements", arXiv:2312.02741); all that a driver reports is made of these looks: instant power is the last one, the
one-second average of Ampere and later the mean of the last ten, and the energy counter their sum, which therefore moves
every 0.1 s only (measured on H100).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from classifier.simulator.boards import Board
from classifier.simulator.physics import CELL_S, Grid
from classifier.simulator.signals import Array

#: Seconds between two looks of the power sensor.
LOOK_S: Final = 0.1
#: Spread of one look, of the power limit: ten of them give the 0.14 W that a loaded and idle H100 showed over 1 s.
LOOK_NOISE: Final = 0.14 * 10**0.5 / 700


class Integral:
    """Running integral of a quantity over the grid, read at any time."""

    def __init__(self, grid: Grid, cells: Array) -> None:
        self._start = float(grid.edges[0])
        self._cells = cells
        self._sums = np.concatenate(([0.0], np.cumsum(cells) * CELL_S))

    def at(self, times: Array) -> Array:
        """Return the integral from the start of the grid to `times`."""
        position = (times - self._start) / CELL_S
        index = np.clip(position.astype(np.intp), 0, self._cells.size - 1)
        value: Array = self._sums[index] + (position - index) * CELL_S * self._cells[index]
        return value

    def mean(self, times: Array, window_s: float) -> Array:
        """Return the mean over the `window_s` before each of `times`."""
        return (self.at(times) - self.at(times - window_s)) / window_s

    def between(self, times: Array) -> Array:
        """Return the mean since the time before; NaN for the first."""
        rates: Array = np.diff(self.at(times)) / np.diff(times)
        return np.concatenate(([np.nan], rates))


class PowerMeter:
    """The power sensor of one board over a run: its looks, and what a driver makes of them."""

    def __init__(self, rng: np.random.Generator, board: Board, grid: Grid, watts: Array) -> None:
        """Look at `watts` (per cell of the grid); the board's own phase and noise come from `rng`."""
        self._first_s = float(grid.edges[0]) + LOOK_S * (1 + float(rng.random()))
        count = int((grid.end_s - self._first_s) / LOOK_S) + 1
        times: Array = self._first_s + LOOK_S * np.arange(count, dtype=np.float64)
        seen = Integral(grid, watts).mean(times, LOOK_S * board.power_seen_share)
        self._looks = seen + LOOK_NOISE * board.power_limit_watts * rng.standard_normal(count)
        self._sums = np.concatenate(([0.0], np.cumsum(self._looks)))
        self._window_s = board.power_window_s

    def _last_look(self, times: Array) -> NDArray[np.intp]:
        position = (times - self._first_s) / LOOK_S + 1e-9
        return np.clip(position.astype(np.intp), 0, self._looks.size - 1)

    def instant(self, times: Array) -> Array:
        """Return the last look before each of `times`: field 186 on every board."""
        return self._looks[self._last_look(times)]

    def reported(self, times: Array) -> Array:
        """Return what nvmlDeviceGetPowerUsage says: the mean of the looks in the board's window."""
        looks = max(1, round(self._window_s / LOOK_S))
        if looks == 1:
            return self.instant(times)
        last = self._last_look(times) + 1
        first = np.maximum(last - looks, 0)
        mean: Array = (self._sums[last] - self._sums[first]) / (last - first)
        return mean

    def energy(self, times: Array) -> Array:
        """Return the joules since the start of the grid, as of the last look."""
        joules: Array = self._sums[self._last_look(times) + 1] * LOOK_S
        return joules


def last_window(rng: np.random.Generator, integral: Integral, times: Array, window_s: float) -> Array:
    """Return the mean over the last whole window before each of `times`: a driver that counts window after window."""
    phase = float(rng.random()) * window_s
    ends = phase + np.floor((times - phase) / window_s) * window_s
    return integral.mean(ends, window_s)
