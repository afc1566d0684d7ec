"""Gradient-boosted trees as arrays: check them, and sum their leaves for a batch of rows.

The rules are scikit-learn's for numerical features of HistGradientBoostingClassifier: a row goes left where its value
is at most the threshold, and where its value is NaN as the node says. All trees are walked together, level by level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.history import Array

#: Deepest tree that is accepted (`train` makes none deeper).
MAX_DEPTH: Final = 6


class _Walk(NamedTuple):
    """The same trees laid out for walking: the right child lies next to the left one, and a leaf is its own left."""

    root: NDArray[np.intp]  # (trees,)
    column: NDArray[np.intp]  # (nodes,) in a table of the row and, behind it, the row with -inf for NaN
    threshold: Array  # (nodes,)
    right: NDArray[np.intp]  # (nodes,) a leaf has the place after its own
    value: Array  # (nodes,)


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
    cover: Array  # (nodes,) training windows below each leaf; 1 each where the bundle does not say
    baseline: Array  # (classes,)
    depth: int
    expected: Array  # (nodes,) mean of what the leaves below add, by their cover: what is expected on the way there
    walk: _Walk

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
            cover=_cover(arrays.get("cover"), arrays["value"].size),
            baseline=_floats(arrays["baseline"]),
            depth=0,
            expected=np.empty(0),
            walk=_Walk(*(np.empty(0),) * 5),  # type: ignore[arg-type]  # made once they have been checked
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
            "cover": self.cover.astype(np.uint32),
            "baseline": self.baseline,
        }

    def raw(self, rows: Array) -> Array:
        """Return the raw score of every class, shape (rows, classes); `rows` may hold NaN and infinities."""
        count, features = rows.shape
        classes = self.baseline.size
        walk = self.walk
        # Where a node sends NaN to the left it reads the row with -inf in its place, and NaN itself goes right.
        table = np.empty((count, 2 * features))
        table[:, :features] = rows
        table[:, features:] = np.where(np.isnan(rows), -np.inf, rows)
        flat = table.reshape(-1)
        starts = np.arange(0, flat.size, 2 * features)[:, np.newaxis]
        place = np.broadcast_to(walk.root, (count, walk.root.size))
        for _ in range(self.depth):
            goes_left = flat.take(walk.column.take(place) + starts) <= walk.threshold.take(place)
            place = walk.right.take(place) - goes_left
        sums = walk.value.take(place).reshape(count, -1, classes).sum(axis=1)
        result: Array = sums + self.baseline
        return result

    def contributions(self, row: Array, features: int) -> Array:
        """Return what each feature of one row adds to the raw score of every class, shape (features, classes).

        A row that takes a branch changes the score that is to be expected; the change is put to the feature that was
        asked there. The sum over the features is the raw score less the one expected of no row in particular.
        """
        classes = self.baseline.size
        owner = np.arange(self.root.size) % classes
        node = self.root
        sums = np.zeros(features * classes)
        for _ in range(self.depth):
            feature = self.feature[node]
            value = row[feature]
            goes_left = np.where(np.isnan(value), self.missing_left[node], value <= self.threshold[node])
            child = np.where(goes_left, self.left[node], self.right[node])
            change = self.expected[child] - self.expected[node]  # 0 where a leaf stays on itself
            sums += np.bincount(feature * classes + owner, weights=change, minlength=sums.size)
            node = child
        return sums.reshape(features, classes)

    def _checked(self, features: int, classes: int) -> Trees:
        nodes = self.value.size
        columns = (self.feature, self.threshold, self.missing_left, self.left, self.right, self.cover)
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
        if not (np.isfinite(self.cover).all() and (self.cover >= 0).all() and (self.cover[leaf] > 0).all()):
            raise ValueError("a leaf has no cover")
        deepest = self._deepest()
        kept = {name: getattr(self, name) for name in self.__slots__ if name not in ("depth", "expected", "walk")}
        return Trees(**kept, depth=deepest, expected=self._expected(leaf, deepest), walk=self._walk(features))

    def _walk(self, features: int) -> _Walk:
        """Return the nodes that roots reach in the order of walking, level by level."""
        level = self.root
        nodes = [level]
        rights = []
        size = level.size
        while level.size:
            inner = self.left[level] != level
            right = np.where(inner, 0, size - level.size + 1 + np.arange(level.size))
            parents = level[inner]
            right[inner] = size + 1 + 2 * np.arange(parents.size)
            rights.append(right)
            level = np.stack((self.left[parents], self.right[parents]), axis=1).reshape(-1)
            nodes.append(level)
            size += level.size
            if size > self.value.size:
                raise ValueError("a node belongs to two trees")
        order = np.concatenate(nodes)
        leaf = self.left[order] == order
        return _Walk(
            root=np.arange(self.root.size),
            column=np.where(leaf | self.missing_left[order], features, 0) + np.where(leaf, 0, self.feature[order]),
            threshold=np.where(leaf, np.inf, self.threshold[order]),
            right=np.concatenate(rights),
            value=self.value[order],
        )

    def _expected(self, leaf: NDArray[np.bool_], deepest: int) -> Array:
        """Return the mean of the leaves below every node, from the leaves up, level by level."""
        weight = np.where(leaf, self.cover, 0.0)
        total = np.where(leaf, self.cover * self.value, 0.0)
        for _ in range(deepest):
            weight = np.where(leaf, weight, weight[self.left] + weight[self.right])
            total = np.where(leaf, total, total[self.left] + total[self.right])
        # Nodes that no root reaches may be deeper than the trees; nobody asks for what is expected there.
        result: Array = total / np.maximum(weight, 1e-300)
        return result

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


def _cover(array: NDArray[Any] | None, nodes: int) -> Array:
    return np.ones(nodes) if array is None else _integers(array).astype(np.float64)


def _floats(array: NDArray[Any]) -> Array:
    if array.dtype != np.float64:
        raise ValueError("numbers are no 64-bit floats")
    return array


def _flags(array: NDArray[Any]) -> NDArray[np.bool_]:
    if array.dtype != np.bool_:
        raise ValueError("flags are no booleans")
    return array
