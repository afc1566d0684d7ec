"""Boosting: both levels fitted by scikit-learn, and their trees as arrays.

scikit-learn is imported in `classifier.training*` only, inside the functions that need it (`warpwatch[train]`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import UsageError
from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.hierarchy import (
    ACTIVITY_CLASSES,
    IDLE,
    STRANGE,
    WORKLOAD_CLASSES,
    Hierarchy,
    Level,
    both_scores,
)
from classifier.model import ESTIMATOR
from classifier.training_config import TrainingConfig
from classifier.training_data import Dataset
from classifier.training_windows import augmented, strange_rows, weights_of
from classifier.trees import MAX_DEPTH, Trees, softmax

Progress = Callable[[str], None]

#: A leaf needs no more windows than a hundredth of all, and never fewer than these.
_LEAVES: Final = 100
_LEAST_LEAF: Final = 5
_IDLE: Final = CLASSES.index(IDLE)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Two levels of fitted classifiers before calibration; each level is a mean of members."""

    activity: tuple[Any, ...]
    workload: tuple[Any, ...]
    classes: tuple[str, ...]  # of the second level

    def hierarchy(self, temperatures: tuple[float, float]) -> Hierarchy:
        """Return what the agent evaluates."""
        return Hierarchy(
            activity=Level(classes=ACTIVITY_CLASSES, trees=trees_from(*self.activity), temperature=temperatures[0]),
            workload=Level(classes=self.classes, trees=trees_from(*self.workload), temperature=temperatures[1]),
        )

    def scores(self, rows: Array) -> tuple[Array, Array]:
        """Return the scores of both levels, shapes (rows, 2) and (rows, classes of the second).

        scikit-learn gives them: the exported trees equal it, and take much longer for a hundred thousand rows.
        """
        first, second = (
            np.mean([member.decision_function(rows).reshape(len(rows), -1) for member in members], axis=0)
            for members in (self.activity, self.workload)
        )
        return both_scores(first), both_scores(second)

    def probabilities(self, rows: Array, temperatures: tuple[float, float]) -> Array:
        """Return the probability of every class, as `hierarchy` with these temperatures does."""
        hierarchy = self.hierarchy(temperatures)
        return hierarchy.combine(
            *(softmax(part / one) for part, one in zip(self.scores(rows), temperatures, strict=True))
        )


def fit_hierarchy(config: TrainingConfig, data: Dataset, *, seed: int) -> Fitted:
    """Fit both levels on `data`, channels left out at random; all four classes must be present.

    `other` may be absent where kinds are excluded. Raises UsageError where a class is absent.
    """
    optional = {"other"} if config.exclude_kinds else set()
    missing = [n for k, n in enumerate(CLASSES) if n not in optional and not (data.labels == k).any()]
    if missing:
        raise UsageError(f"the training data holds no window of {', '.join(missing)}; add scenarios of that class")
    classes = tuple(name for name in WORKLOAD_CLASSES if (data.labels == CLASSES.index(name)).any())
    places = np.array([classes.index(name) if name in classes else -1 for name in CLASSES])
    first, second = replace(config, max_iter=config.activity_iter), config
    activity: list[Any] = []
    workload: list[Any] = []
    for number in range(config.members):
        own = 1000 * seed + number  # channels, made-up work and features of splits: every member draws its own
        seen = augmented(config, data, own)
        busy = seen.labels != _IDLE
        activity.append(_member(first, seen, busy.astype(np.int64), own))
        strange = strange_rows(config, data.take(data.labels != _IDLE), own)
        working = seen.take(busy)
        workload.append(_member(second, working, places[working.labels], own, strange=strange, label=len(classes)))
    return Fitted(
        activity=tuple(activity),
        workload=tuple(workload),
        classes=(*classes, STRANGE) if len(strange) else classes,
    )


def _member(
    config: TrainingConfig,
    data: Dataset,
    labels: NDArray[np.int64],
    seed: int,
    *,
    strange: Array | None = None,
    label: int = 0,
) -> Any:  # noqa: ANN401 - untyped
    """Return one fit; rows of `strange` have the class `label`."""
    rows, weights = data.rows, weights_of(config, data, labels)
    if strange is not None and len(strange):
        rows = np.concatenate((rows, strange))
        labels = np.concatenate((labels, np.full(len(strange), label)))
        weights = np.concatenate((weights, np.full(len(strange), config.strange_weight)))
    return fit(config, rows, labels, weights, seed=seed)


def fit(config: TrainingConfig, rows: Array, labels: NDArray[np.int64], weights: Array, *, seed: int) -> Any:  # noqa: ANN401 - untyped
    """Return a fitted HistGradientBoostingClassifier."""
    if not 1 <= config.max_depth <= MAX_DEPTH:
        raise UsageError(f"max_depth is {config.max_depth}; trees may have a depth of 1 to {MAX_DEPTH}")
    # Own traces alone may be a few hundred windows: leaves of the usual size would leave no tree to grow.
    least = min(config.min_samples_leaf, max(_LEAST_LEAF, labels.size // _LEAVES))
    classifier = import_sklearn().HistGradientBoostingClassifier(
        max_iter=config.max_iter,
        max_depth=config.max_depth,
        max_leaf_nodes=config.max_leaf_nodes,
        min_samples_leaf=least,
        learning_rate=config.learning_rate,
        l2_regularization=config.l2_regularization,
        max_bins=config.max_bins,
        max_features=config.max_features,
        early_stopping=False,
        random_state=seed,
    )
    # scikit-learn cannot bin a column of nothing; a constant is never split on.
    empty = np.isnan(rows).all(axis=0)
    return classifier.fit(np.where(empty, 0.0, rows), labels, sample_weight=weights)


def trees_from(*classifiers: Any) -> Trees:  # noqa: ANN401 - untyped estimators
    """Return the trees of fitted HistGradientBoostingClassifiers over the same classes, their scores averaged.

    Raises UsageError for other estimators. One classifier gives exactly its own scores; two classes have one score.
    """
    for classifier in classifiers:
        require_estimator(type(classifier).__name__)
    count = len(classifiers)
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in _NODE_COLUMNS}
    roots: list[int] = []
    size = 0
    for tree in _trees_of(classifiers):
        nodes = tree.nodes
        if nodes["is_categorical"].any():
            raise UsageError("the model splits on categories; only numerical features can be exported")
        own = np.arange(nodes.size)
        leaf = nodes["is_leaf"].astype(bool)
        roots.append(size)
        columns["feature"].append(np.where(leaf, 0, nodes["feature_idx"]))
        columns["threshold"].append(np.where(leaf, np.inf, nodes["num_threshold"]))
        columns["missing_left"].append(leaf | nodes["missing_go_to_left"].astype(bool))
        columns["left"].append(size + np.where(leaf, own, nodes["left"]))
        columns["right"].append(size + np.where(leaf, own, nodes["right"]))
        columns["value"].append(np.where(leaf, nodes["value"], 0.0) / count)
        columns["cover"].append(np.where(leaf, nodes["count"], 0).astype(np.int64))
        size += nodes.size
    arrays: dict[str, NDArray[Any]] = {name: np.concatenate(parts) for name, parts in columns.items()}
    arrays["root"] = np.array(roots, dtype=np.int64)
    baselines = [np.asarray(classifier._baseline_prediction, dtype=np.float64) for classifier in classifiers]
    arrays["baseline"] = np.mean(baselines, axis=0).reshape(-1)
    try:
        return Trees.from_arrays(arrays, features=classifiers[0].n_features_in_, classes=arrays["baseline"].size)
    except ValueError as error:
        raise UsageError(f"the model cannot be exported: {error}") from error


_NODE_COLUMNS: Final = ("feature", "threshold", "missing_left", "left", "right", "value", "cover")


def gains(classifiers: Sequence[Any], features: int) -> Array:
    """Return the summed gain of every feature, as a share of all gain."""
    found: Array = np.zeros(features)
    for tree in _trees_of(classifiers):
        inner = tree.nodes[tree.nodes["is_leaf"] == 0]
        np.add.at(found, inner["feature_idx"], inner["gain"])
    total = found.sum()
    return found / total if total else found


def _trees_of(classifiers: Sequence[Any]) -> Iterator[Any]:
    for classifier in classifiers:
        for iteration in classifier._predictors:
            yield from iteration


def require_estimator(name: str) -> None:
    """Raise UsageError for an estimator that the agent cannot evaluate."""
    if name != ESTIMATOR:
        raise UsageError(f"train cannot export a {name}; the agent evaluates {ESTIMATOR} only")


def import_sklearn() -> Any:  # noqa: ANN401 - scikit-learn has no types
    """Return sklearn.ensemble; raises UsageError where scikit-learn is missing."""
    try:
        from sklearn import ensemble
    except ImportError as error:
        raise UsageError("training needs scikit-learn; install warpwatch[train]") from error
    return ensemble
