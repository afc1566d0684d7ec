"""How boards meter: integrals that are read at any time, and a power sensor that reports ten times a second.

A board does not measure power all the time: the instant reading of A100 and H100 sees 25 ms of every 100 ms ("Part-time
power measurements", arXiv:2312.02741). The average of Ampere and later covers its whole second: in tensor parallel
training with 2.54 steps a second, between 220 and 525 W by the energy counter, it read 402 to 452 W, which is what a
second of 2.54 whole cycles gives and ten looks of 25 ms would not. All values move every 0.1 s (measured on the energy
counter of H100).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from classifier.simulator.boards import Board
from classifier.simulator.physics import CELL_S, Grid
from classifier.simulator.signals import Array

#: Seconds between two updates of the power sensor.
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
    """The power sensor of one board over a run: what it last saw, its average, and the energy counter."""

    def __init__(self, rng: np.random.Generator, board: Board, grid: Grid, watts: Array) -> None:
        """Measure `watts` (per cell of the grid); the board's own phase and noise come from `rng`."""
        self._first_s = float(grid.edges[0]) + LOOK_S * (1 + float(rng.random()))
        self._energy = Integral(grid, watts)
        self._seen_s = LOOK_S * board.power_seen_share
        self._window_s = board.power_window_s
        count = int((grid.end_s - self._first_s) / LOOK_S) + 1
        self._noise = LOOK_NOISE * board.power_limit_watts * rng.standard_normal(count)
        self._noise_sums = np.concatenate(([0.0], np.cumsum(self._noise)))

    def _last(self, times: Array) -> tuple[NDArray[np.intp], Array]:
        """Return number and time of the last update before each of `times`."""
        number = np.clip(((times - self._first_s) / LOOK_S + 1e-9).astype(np.intp), 0, self._noise.size - 1)
        return number, self._first_s + LOOK_S * number.astype(np.float64)

    def instant(self, times: Array) -> Array:
        """Return the last look before each of `times`: field 186 on every board."""
        number, updated = self._last(times)
        return self._energy.mean(updated, self._seen_s) + self._noise[number]

    def reported(self, times: Array) -> Array:
        """Return what nvmlDeviceGetPowerUsage says: the mean over the board's window, or the last look."""
        if self._window_s <= LOOK_S:
            return self.instant(times)
        number, updated = self._last(times)
        first = np.maximum(number + 1 - round(self._window_s / LOOK_S), 0)
        noise = (self._noise_sums[number + 1] - self._noise_sums[first]) / (number + 1 - first)
        reported: Array = self._energy.mean(updated, self._window_s) + noise
        return reported

    def energy(self, times: Array) -> Array:
        """Return the joules since the start of the grid, as of the last update."""
        return self._energy.at(self._last(times)[1])


def last_window(rng: np.random.Generator, integral: Integral, times: Array, window_s: float) -> Array:
    """Return the mean over the last whole window before each of `times`: a driver that counts window after window."""
    phase = float(rng.random()) * window_s
    ends = phase + np.floor((times - phase) / window_s) * window_s
    return integral.mean(ends, window_s)
