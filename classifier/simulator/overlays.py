"""Signals made of other signals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from classifier.simulator.signals import Array, Signal


@dataclass(frozen=True, slots=True)
class Extra:
    """Levels that come on top from `start_s` to `end_s`: what a loader reads, what a thread writes meanwhile."""

    start_s: float
    end_s: float
    levels: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Overlaid:
    """`base` with extras on top."""

    base: Signal
    extras: tuple[Extra, ...]

    def cells(self, edges: Array) -> Mapping[str, Array | float]:
        """Return the cell means of the base plus those of the extras."""
        cells: dict[str, Array | float] = dict(self.base.cells(edges))
        for extra in self.extras:
            covered = np.clip(np.minimum(edges[1:], extra.end_s) - np.maximum(edges[:-1], extra.start_s), 0.0, None)
            if not covered.any():
                continue
            share = covered / np.diff(edges)
            for name, level in extra.levels.items():
                cells[name] = cells.get(name, 0.0) + share * level
        return cells
