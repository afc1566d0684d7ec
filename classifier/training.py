"""Training: fit on simulated windows, calibrate and test on groups of their own, write the bundle.

scikit-learn is imported here only, inside the functions that need it (`warpwatch[train]`). The same configuration gives
the same bundle, byte for byte, with the same versions of NumPy and scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import UsageError
from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.features import CORE_FEATURES, FEATURE_NAMES
from classifier.model import ESTIMATOR, Domain, load
from classifier.own_traces import OwnTraces, join
from classifier.scores import score
from classifier.training_bundle import (
    TrainingConfig,
    TrainingReport,
    card_of,
    domain_arrays,
    metadata_of,
    write_bundle,
)
from classifier.training_data import Dataset, simulate_dataset
from classifier.trees import MAX_DEPTH, Trees, softmax

__all__ = ["TrainingConfig", "TrainingReport", "train", "train_on"]

Progress = Callable[[str], None]

#: Parts of the scenarios (not of the windows) for calibration and for the test; the rest is fitted.
_CALIBRATION_SHARE: Final = 0.2
_TEST_SHARE: Final = 0.2
#: Least deviation of a core feature: a constant one must not refuse everything else.
_LEAST_DEVIATION: Final = 0.05


def train(
    config: TrainingConfig, out_dir: Path, progress: Progress = lambda _: None, *, own: OwnTraces | None = None
) -> TrainingReport:
    """Simulate, fit, calibrate, test and write a bundle to `out_dir`; `own` traces join the simulated ones.

    Raises UsageError where another estimator is asked for or scikit-learn is missing, FaultError where `out_dir` cannot
    be written.
    """
    _require_estimator(config.estimator)
    _import_sklearn()
    progress(f"simulating {config.data.scenarios} scenarios")
    data = simulate_dataset(config.data, config.seed, progress)
    return train_on(config, data if own is None else join(data, own.data), out_dir, progress, own=own)


def train_on(
    config: TrainingConfig,
    data: Dataset,
    out_dir: Path,
    progress: Progress = lambda _: None,
    *,
    own: OwnTraces | None = None,
) -> TrainingReport:
    """Fit, calibrate, test and write a bundle from `data`, which holds those of `own`; see `train`."""
    _require_estimator(config.estimator)
    fitted, calibration, test = split(data, config.seed)
    progress(f"fitting on {fitted.size} windows, calibrating on {calibration.size}, testing on {test.size}")
    classifiers = fit_members(config, data, fitted)
    trees = trees_from(*classifiers)
    raw = trees.raw(data.rows[calibration])
    temperature = fit_temperature(raw, data.labels[calibration])
    probabilities = softmax(raw / temperature)
    busy = data.labels[calibration] != CLASSES.index("idle")
    threshold = abstention_threshold(probabilities[busy], data.labels[calibration][busy], config.target_precision)
    domain = fit_domain(data.rows[fitted], data.labels[fitted], data.rows[calibration], config.domain_quantile)
    tested = softmax(trees.raw(data.rows[test]) / temperature)
    basic = data.basic[test]
    report = TrainingReport(
        directory=out_dir,
        windows=len(data.labels),
        scenarios=len(np.unique(data.groups)),
        temperature=temperature,
        threshold=threshold,
        test=score(tested, data.labels[test], threshold),
        basic_test=score(tested[basic], data.labels[test][basic], threshold),
    )
    metadata = metadata_of(config, data, report, domain, _strongest(classifiers, 8), own=own)
    write_bundle(out_dir, metadata, {**trees.arrays(), **domain_arrays(domain)}, card_of(metadata, report))
    load(out_dir)  # what was written must be what the agent accepts
    return report


def split(data: Dataset, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Return the indices to fit, calibrate and test on, whole scenarios each, with every kind in every part."""
    rng = np.random.default_rng([seed, 2])
    part = np.zeros(len(data.labels), dtype=np.int64)
    for kind in np.unique(data.kinds):
        groups = rng.permutation(np.unique(data.groups[data.kinds == kind]))
        first = round(groups.size * _CALIBRATION_SHARE)
        second = first + round(groups.size * _TEST_SHARE)
        part[np.isin(data.groups, groups[:first])] = 1
        part[np.isin(data.groups, groups[first:second])] = 2
    return np.flatnonzero(part == 0), np.flatnonzero(part == 1), np.flatnonzero(part == 2)


def fit_members(config: TrainingConfig, data: Dataset, chosen: NDArray[np.intp]) -> list[Any]:
    """Return the members of the ensemble, each with a seed and a share of the scenarios of `chosen` of its own."""
    rng = np.random.default_rng([config.seed, 3])
    members: list[Any] = []
    for number in range(config.members):
        kept: list[NDArray[np.int64]] = []
        for kind in np.unique(data.kinds[chosen]):
            groups = np.unique(data.groups[chosen][data.kinds[chosen] == kind])
            kept.append(rng.permutation(groups)[: max(1, round(groups.size * config.member_share))])
        mine = chosen[np.isin(data.groups[chosen], np.concatenate(kept))]
        members.append(fit(config, data.rows[mine], data.labels[mine], seed=config.seed + number))
    return members


def fit(config: TrainingConfig, rows: Array, labels: NDArray[np.int64], *, seed: int) -> Any:  # noqa: ANN401 - untyped
    """Return a fitted HistGradientBoostingClassifier; labels are positions in vocabulary.CLASSES, all four present."""
    ensemble = _import_sklearn()
    if not 1 <= config.max_depth <= MAX_DEPTH:
        raise UsageError(f"max_depth is {config.max_depth}; trees may have a depth of 1 to {MAX_DEPTH}")
    missing = [name for position, name in enumerate(CLASSES) if not (labels == position).any()]
    if missing:
        raise UsageError(f"the training data holds no window of {', '.join(missing)}; add scenarios of that class")
    counts = np.bincount(labels, minlength=len(CLASSES))
    # A feature that no window has cannot be binned; as a constant it is never split on.
    rows = np.where(np.isnan(rows).all(axis=0), 0.0, rows)
    classifier = ensemble.HistGradientBoostingClassifier(
        max_iter=config.max_iter,
        max_depth=config.max_depth,
        max_leaf_nodes=config.max_leaf_nodes,
        min_samples_leaf=config.min_samples_leaf,
        learning_rate=config.learning_rate,
        l2_regularization=config.l2_regularization,
        max_features=0.5,
        early_stopping=False,
        random_state=seed,
    )
    return classifier.fit(rows, labels, sample_weight=(labels.size / len(CLASSES) / counts)[labels])


def trees_from(*classifiers: Any) -> Trees:  # noqa: ANN401 - untyped estimators
    """Return the trees of fitted HistGradientBoostingClassifiers over the same classes, their scores averaged.

    Raises UsageError for other estimators. One classifier gives exactly its own scores.
    """
    for classifier in classifiers:
        _require_estimator(type(classifier).__name__)
    count = len(classifiers)
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in _NODE_COLUMNS}
    roots: list[int] = []
    size = 0
    for iteration in (iteration for classifier in classifiers for iteration in classifier._predictors):
        for tree in iteration:
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


def fit_temperature(raw: Array, labels: NDArray[np.int64]) -> float:
    """Return the divisor of raw scores that minimises the log loss, by golden-section search over its logarithm."""
    rows = np.arange(labels.size)

    def loss(exponent: float) -> float:
        return -float(np.log(np.maximum(softmax(raw / np.exp(exponent))[rows, labels], 1e-300)).mean())

    low, high = -3.0, 3.0
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    while high - low > 1e-4:
        if loss(left) < loss(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
    return float(np.exp((low + high) / 2))


def abstention_threshold(probabilities: Array, labels: NDArray[np.int64], precision: float) -> float:
    """Return the least probability from which on decided windows are right with `precision`, within 0.6 to 0.95."""
    top = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    order = np.argsort(-top, kind="stable")
    share = np.cumsum(right[order]) / np.arange(1, right.size + 1)
    good = np.flatnonzero(share >= precision)
    found = float(top[order[good[-1]]]) if good.size else 1.0
    return min(0.95, max(0.6, found))


def fit_domain(rows: Array, labels: NDArray[np.int64], calibration: Array, quantile: float) -> Domain:
    """Return the out-of-domain statistics of the core features, the threshold set on the calibration rows."""
    columns = np.array([FEATURE_NAMES.index(name) for name in CORE_FEATURES], dtype=np.int64)
    means = np.zeros((len(CLASSES), columns.size))
    deviations = np.ones_like(means)
    for position in range(len(CLASSES)):
        core = rows[labels == position][:, columns]
        for column in range(columns.size):
            known = core[np.isfinite(core[:, column]), column]
            if known.size:
                means[position, column] = known.mean()
                deviations[position, column] = max(_LEAST_DEVIATION, float(known.std()))
    plain = Domain(columns=columns, means=means, deviations=deviations, threshold=1.0)
    distances = plain.ratio(calibration)
    threshold = float(np.quantile(distances[np.isfinite(distances)], quantile))
    return Domain(columns=columns, means=means, deviations=deviations, threshold=threshold)


def _strongest(classifiers: Sequence[Any], count: int) -> list[str]:
    """Return the features with the highest summed gain."""
    gains = np.zeros(len(FEATURE_NAMES))
    for iteration in (iteration for classifier in classifiers for iteration in classifier._predictors):
        for tree in iteration:
            inner = tree.nodes[tree.nodes["is_leaf"] == 0]
            np.add.at(gains, inner["feature_idx"], inner["gain"])
    return [FEATURE_NAMES[position] for position in np.argsort(-gains, kind="stable")[:count]]


def _require_estimator(name: str) -> None:
    if name != ESTIMATOR:
        raise UsageError(f"train cannot export a {name}; the agent evaluates {ESTIMATOR} only")


def _import_sklearn() -> Any:  # noqa: ANN401 - scikit-learn has no types
    try:
        from sklearn import ensemble
    except ImportError as error:
        raise UsageError("training needs scikit-learn; install warpwatch[train]") from error
    return ensemble
