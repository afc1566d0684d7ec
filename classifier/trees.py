"""Gradient-boosted trees as arrays: check them, and sum their leaves for a batch of rows.

The rules are scikit-learn's for numerical features of HistGradientBoostingClassifier: a row goes left where its value
is at most the threshold, and where its value is NaN as the node says. All trees are walked together, level by level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array

#: Deepest tree that is accepted (`train` makes none deeper).
MAX_DEPTH: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Nodes of all trees in one table. A leaf points to itself, so that walking on stays there."""

    root: NDArray[np.int64]  # (trees,) node of each root; tree i adds to class i % classes
    feature: NDArray[np.int64]  # (nodes,)
    threshold: Array  # (nodes,)
    missing_left: NDArray[np.bool_]  # (nodes,) where NaN goes
    left: NDArray[np.int64]  # (nodes,)
    right: NDArray[np.int64]  # (nodes,)
    value: Array  # (nodes,) what a leaf adds
    baseline: Array  # (classes,)
    depth: int

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, features: int, classes: int) -> Trees:
        """Build from stored arrays; raises KeyError or ValueError where they are not trees over `features` columns."""
        trees = cls(
            root=_integers(arrays["root"]),
            feature=_integers(arrays["feature"]),
            threshold=_floats(arrays["threshold"]),
            missing_left=_flags(arrays["missing_left"]),
            left=_integers(arrays["left"]),
            right=_integers(arrays["right"]),
            value=_floats(arrays["value"]),
            baseline=_floats(arrays["baseline"]),
            depth=0,
        )
        return trees._checked(features, classes)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to store, integers as narrow as they fit."""
        return {
            "root": self.root.astype(np.uint32),
            "feature": self.feature.astype(np.uint16),
            "threshold": self.threshold,
            "missing_left": self.missing_left,
            "left": self.left.astype(np.uint32),
            "right": self.right.astype(np.uint32),
            "value": self.value,
            "baseline": self.baseline,
        }

    def raw(self, rows: Array) -> Array:
        """Return the raw score of every class, shape (rows, classes); `rows` may hold NaN and infinities."""
        count = rows.shape[0]
        classes = self.baseline.size
        node = np.broadcast_to(self.root, (count, self.root.size))
        row = np.arange(count)[:, np.newaxis]
        for _ in range(self.depth):
            value = rows[row, self.feature[node]]
            goes_left = np.where(np.isnan(value), self.missing_left[node], value <= self.threshold[node])
            node = np.where(goes_left, self.left[node], self.right[node])
        sums = self.value[node].reshape(count, -1, classes).sum(axis=1)
        result: Array = sums + self.baseline
        return result

    def _checked(self, features: int, classes: int) -> Trees:
        nodes = self.value.size
        columns = (self.feature, self.threshold, self.missing_left, self.left, self.right)
        if nodes == 0 or any(column.shape != (nodes,) for column in (*columns, self.value)):
            raise ValueError("node arrays differ in length")
        if self.baseline.shape != (classes,) or self.root.ndim != 1 or self.root.size % classes or not self.root.size:
            raise ValueError(f"trees are not for {classes} classes")
        if ((self.feature < 0) | (self.feature >= features)).any():
            raise ValueError("a node asks for a feature that does not exist")
        if ((self.root < 0) | (self.root >= nodes)).any():
            raise ValueError("a root points outside the nodes")
        if not (np.isfinite(self.value).all() and np.isfinite(self.baseline).all()) or np.isnan(self.threshold).any():
            raise ValueError("a leaf value or threshold is not a number")
        own = np.arange(nodes)
        leaf = (self.left == own) & (self.right == own)
        # Children lie behind their parent: no walk can go in circles.
        ahead = (self.left > own) & (self.right > own) & (self.left < nodes) & (self.right < nodes)
        if not (leaf | ahead).all():
            raise ValueError("a node points backwards or outside the nodes")
        return Trees(**{name: getattr(self, name) for name in self.__slots__ if name != "depth"}, depth=self._deepest())

    def _deepest(self) -> int:
        level = np.unique(self.root)
        for depth in range(MAX_DEPTH + 1):
            inner = level[self.left[level] != level]
            if inner.size == 0:
                return depth
            level = np.unique(np.concatenate((self.left[inner], self.right[inner])))
        raise ValueError(f"a tree is deeper than {MAX_DEPTH}")


def softmax(scores: Array) -> Array:
    """Return probabilities from scores, shape (rows, classes); each row sums to 1."""
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=1, keepdims=True)
    return result


def _integers(array: NDArray[Any]) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise ValueError("indices are no integers")
    return array.astype(np.int64)


def _floats(array: NDArray[Any]) -> Array:
    if array.dtype != np.float64:
        raise ValueError("numbers are no 64-bit floats")
    return array


def _flags(array: NDArray[Any]) -> NDArray[np.bool_]:
    if array.dtype != np.bool_:
        raise ValueError("flags are no booleans")
    return array
