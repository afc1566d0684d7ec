"""The model's two levels: idle or busy, then what a busy GPU works on; NumPy only.

Each level has its own trees and its own temperature, since the first is nearly always sure and the second seldom.

The second level may know a class beside those it answers: `strange`, made-up work that takes each part of what is
measured from another window, so that the parts do not belong together. It is never answered. Its probability is shared
by the answers: what resembles nothing known is no more likely one than another, and so falls below any threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.trees import Trees, softmax

IDLE: Final = "idle"
BUSY: Final = "busy"
#: Classes of the two levels. The second may lack `other` where nothing of it was trained on.
ACTIVITY_CLASSES: Final = (IDLE, BUSY)
WORKLOAD_CLASSES: Final = tuple(name for name in CLASSES if name != IDLE)
#: Of the second level, always the last.
STRANGE: Final = "strange"
LEVELS: Final = ("activity", "workload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One classifier: its classes, its trees (one score per class, or one in all for two) and its temperature."""

    classes: tuple[str, ...]
    trees: Trees
    temperature: float

    def probabilities(self, rows: Array) -> Array:
        """Return the calibrated probabilities, shape (rows, classes)."""
        return softmax(both_scores(self.trees.raw(rows)) / self.temperature)

    def contributions(self, row: Array, features: int) -> Array:
        """Return what each feature of one row adds to the score of every class, shape (features, classes)."""
        return both_scores(self.trees.contributions(row, features)) / self.temperature

    @classmethod
    def load(cls, name: str, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], *, features: int) -> Level:
        """Build level `name` of a bundle; raises KeyError, ValueError or TypeError where it is none."""
        classes = tuple(str(one) for one in about["classes"])
        allowed = ACTIVITY_CLASSES if name == "activity" else (*WORKLOAD_CLASSES, STRANGE)
        if len(answered(classes)) < 2 or [one for one in allowed if one in classes] != list(classes):
            raise ValueError(f"level {name} has the classes {classes!r}, of {allowed!r}")
        temperature = float(about["temperature"])
        if not 0.0 < temperature < float("inf"):
            raise ValueError(f"temperature of level {name} is out of range")
        prefix = f"{name}_"
        mine = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        scores = 1 if len(classes) == 2 else len(classes)
        return cls(
            classes=classes,
            trees=Trees.from_arrays(mine, features=features, classes=scores),
            temperature=temperature,
        )

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """Return the arrays to store as level `name`."""
        return {f"{name}_{key}": array for key, array in self.trees.arrays().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Both levels together."""

    activity: Level
    workload: Level

    def probabilities(self, rows: Array) -> Array:
        """Return the probability of every class, shape (rows, 4) in the order of vocabulary.CLASSES.

        A class that the second level does not know has the probability 0; each row sums to 1.
        """
        return self.combine(self.activity.probabilities(rows), self.workload.probabilities(rows))

    def combine(self, activity: Array, workload: Array) -> Array:
        """Return the probability of every class from those of the two levels."""
        result: Array = np.zeros((activity.shape[0], len(CLASSES)))
        result[:, CLASSES.index(IDLE)] = activity[:, 0]
        classes = self.workload.classes
        for name, share in zip(answered(classes), shared(workload, classes).T, strict=True):
            result[:, CLASSES.index(name)] = activity[:, 1] * share
        return result

    def contributions(self, row: Array, features: int) -> Array:
        """Return what each feature of one row adds to the score of every class, shape (features, 4).

        Scores mean something in differences only. `idle` has 0; a class of busy GPUs has what speaks for busy, and what
        speaks for it more than for the mean of its level. A class that the second level does not know has the least of
        its level.
        """
        activity = self.activity.contributions(row, features)
        workload = self.workload.contributions(row, features)
        workload = workload[:, : len(answered(self.workload.classes))]
        workload = workload - workload.mean(axis=1, keepdims=True)
        result: Array = np.zeros((features, len(CLASSES)))
        for name in WORKLOAD_CLASSES:
            known = name in self.workload.classes
            more = workload[:, self.workload.classes.index(name)] if known else workload.min(axis=1)
            result[:, CLASSES.index(name)] = activity[:, 1] - activity[:, 0] + more
        return result

    @property
    def temperatures(self) -> tuple[float, float]:
        """Temperatures of the first and the second level."""
        return self.activity.temperature, self.workload.temperature

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to store."""
        return {**self.activity.arrays("activity"), **self.workload.arrays("workload")}


def answered(classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes of a level that are answers."""
    return tuple(name for name in classes if name != STRANGE)


def shared(probabilities: Array, classes: tuple[str, ...]) -> Array:
    """Return the probabilities of the second level's answers, that of STRANGE shared by them; each row sums to 1."""
    if STRANGE not in classes:
        return probabilities
    known, strange = probabilities[:, :-1], probabilities[:, -1:]
    total = known.sum(axis=1, keepdims=True)
    count = known.shape[1]
    among: Array = np.where(total > 0, known, 1.0) / np.where(total > 0, total, count)
    result: Array = (1.0 - strange) * among + strange / count
    return result


def both_scores(raw: Array) -> Array:
    """Return one score per class: of two classes the trees give the second's lead over the first only."""
    return np.concatenate((np.zeros_like(raw), raw), axis=1) if raw.shape[1] == 1 else raw
