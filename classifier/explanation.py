"""Why a label was given: the three features that decided, in words.

What decided is asked of this one decision and not of the model at large: for a label, the score of its class against
the others, each weighed by how likely it is, is taken apart into what every feature of this row adds on its way through
the trees. Features of one signal are summed, and of each signal that spoke for the label its strongest feature is told.
Where two classes are close both sides are told, and where the model does not know such a GPU what is unlike it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.features import CORE_FEATURES, FEATURE_NAMES, FEATURES
from classifier.model import Model
from classifier.signals import LONGEST_WINDOW_S, Signals
from classifier.words import family, noun, say

REASONS_TOLD: Final = 3
#: A signal that moves the odds by less than this (in natural logarithms) decided nothing.
_LEAST_SHARE: Final = 0.05
#: Least core features of a row that the model gives a distance for (classifier.model).
_CORE_FEATURES_NEEDED: Final = 3
_FAMILIES: Final = tuple(map(family, FEATURE_NAMES))
_FAMILY_NAMES: Final = tuple(dict.fromkeys(_FAMILIES))
_FAMILY_OF: Final = np.array([_FAMILY_NAMES.index(name) for name in _FAMILIES])


@dataclass(frozen=True, slots=True)
class Cause:
    """One feature that decided, by its position in the table, and for which class where it is not the label's own."""

    position: int
    workload: str | None = None

    def words(self, row: Array) -> str | None:
        """Return the cause with the value it has now; None where it is not measured now."""
        value = float(row[self.position])
        if not math.isfinite(value):
            return None
        text = say(FEATURE_NAMES[self.position], value)
        return f"for {self.workload}: {text}" if self.workload else text


@dataclass(slots=True)
class Explained:
    """The causes of one GPU's label, kept while it holds: only their values are told anew with every decision."""

    subject: tuple[str, str | None] | None = None  # label and reason that they are the causes of
    at_s: float = -math.inf
    causes: tuple[Cause, ...] = field(default=())

    def take(self, now_s: float, subject: tuple[str, str | None], causes: tuple[Cause, ...]) -> None:
        """Keep the causes of `subject`."""
        self.at_s, self.subject, self.causes = now_s, subject, causes

    def words(self, row: Array) -> tuple[str, ...]:
        """Return the causes in words, with the values of `row`."""
        return tuple(text for cause in self.causes if (text := cause.words(row)) is not None)


def causes_of(model: Model, row: Array, probabilities: Array, label: str | None) -> tuple[Cause, ...]:
    """Return what decided for `label`, strongest first; without a label, what speaks for each of the two likeliest.

    `probabilities` are those beside the label, in the order of vocabulary.CLASSES. One row costs a walk through the
    trees, some 0.2 ms.
    """
    contributions = model.contributions(row)
    if label is not None:
        leader = CLASSES.index(label)
        others = np.delete(np.arange(len(CLASSES)), leader)
        weights = probabilities[others] + 1e-9
        margin = contributions[:, leader] - contributions[:, others] @ (weights / weights.sum())
        return tuple(Cause(position) for position in _strongest(margin, row, REASONS_TOLD))
    busy = [position for position in np.argsort(-probabilities, kind="stable") if CLASSES[position] != "idle"]
    first, second = int(busy[0]), int(busy[1])
    margin = contributions[:, first] - contributions[:, second]
    told = [Cause(position, CLASSES[first]) for position in _strongest(margin, row, REASONS_TOLD - 1)]
    told += [Cause(position, CLASSES[second]) for position in _strongest(-margin, row, REASONS_TOLD - len(told))]
    return tuple(told)


def strange(model: Model, row: Array) -> tuple[Cause, ...]:
    """Return the features of a row that lie farthest from what the model was trained on."""
    return tuple(Cause(position) for position in model.domain.farthest(row, REASONS_TOLD))


def has_core_channels(signals: Signals) -> bool:
    """Return whether enough is measured, however rarely, for the model to know whether it knows such a GPU."""
    measured = sum(
        all(signals.window(name, LONGEST_WINDOW_S).size for name in feature.channels)
        for feature in FEATURES
        if feature.name in CORE_FEATURES
    )
    return measured >= _CORE_FEATURES_NEEDED


def measured_here(signals: Signals) -> tuple[str, ...]:
    """Return what is measured of all that the model's knowledge of a GPU goes by."""
    names = dict.fromkeys(name for feature in FEATURES if feature.name in CORE_FEATURES for name in feature.channels)
    measured = [noun(name) for name in names if signals.window(name, LONGEST_WINDOW_S).size]
    return (f"all that is measured here: {', '.join(measured)}",) if measured else ()


def _strongest(margin: Array, row: Array, count: int) -> list[int]:
    """Return the strongest measured feature of each signal that adds most to `margin`, at most `count`."""
    sums = np.bincount(_FAMILY_OF, weights=margin, minlength=len(_FAMILY_NAMES))
    measured = np.where(np.isfinite(row), margin, -np.inf)
    found: list[int] = []
    for number in np.argsort(-sums, kind="stable"):
        if len(found) == count or sums[number] < _LEAST_SHARE:
            break
        mine = np.flatnonzero(number == _FAMILY_OF)
        best = int(mine[np.argmax(measured[mine])])
        if measured[best] > 0:
            found.append(best)
    return found
