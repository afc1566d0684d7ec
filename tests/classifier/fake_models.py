"""What the labeller asks of a model beside its predictions, for models of the tests that have no trees."""

from __future__ import annotations

import numpy as np

from agent.vocabulary import CLASSES
from classifier.features import FEATURE_NAMES


class Domain:
    """A domain in which the first features are the strangest."""

    def farthest(self, row: np.ndarray, count: int) -> list[int]:
        return list(range(count))


class Unexplained:
    """A model whose features add nothing to any score."""

    domain = Domain()
    threshold: float

    def thresholds_of(self, rows: np.ndarray) -> np.ndarray:
        return np.full(len(rows), self.threshold)

    def contributions(self, row: np.ndarray) -> np.ndarray:
        return np.zeros((len(FEATURE_NAMES), len(CLASSES)))
