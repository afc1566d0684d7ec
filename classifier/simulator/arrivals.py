"""Requests: how many arrive when, and how many are in work.

Arrivals are Poisson around a rate that itself varies (gusts of minutes, hours without, a wave over the day), so that
counts are over-dispersed as in production.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from classifier.simulator.priors import Priors, take
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import Array

#: Step of the arrival process; a divisor of what any sensor averages over.
CELL_S: Final = 0.05


def load_shape(draws: Draws, priors: Priors, cells: int) -> Array:
    """Return the arrival rate over time around 1: a daily wave seen for minutes, and gusts of minutes."""
    rng = draws.rng
    seconds = np.arange(cells) * CELL_S
    day = 1 + take(draws, priors, "day_depth") * np.sin(2 * np.pi * (seconds / 86400 + rng.random()))
    knots = np.arange(int(seconds[-1] / 20) + 3)
    gusts = np.exp(take(draws, priors, "gusts") * rng.standard_normal(knots.size))
    quiet = np.where(rng.random(knots.size) < take(draws, priors, "quiet_share"), 0.02, 1.0)
    shape: Array = day * np.interp(seconds, knots * 20.0, gusts * quiet)
    return shape


def in_work(start: Array, end: Array, cells: int) -> Array:
    """Return how many of the intervals are open in each cell."""
    opened = np.bincount(np.minimum((start / CELL_S).astype(int), cells), minlength=cells + 1)
    closed = np.bincount(np.minimum((end / CELL_S).astype(int), cells), minlength=cells + 1)
    # A stretch within one cell counts for the share of the cell that it fills.
    short = (start / CELL_S).astype(int) == (end / CELL_S).astype(int)
    partial = np.bincount(
        np.minimum((start[short] / CELL_S).astype(int), cells),
        weights=(end[short] - start[short]) / CELL_S,
        minlength=cells + 1,
    )
    total: Array = np.cumsum(opened - closed)[:cells] + partial[:cells]
    return total
