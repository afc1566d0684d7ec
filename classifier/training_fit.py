"""The parts of a training: splits by scenario and by family, boosting, temperatures, thresholds, the domain.

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
from classifier.features import FEATURES
from classifier.hierarchy import (
    ACTIVITY_CLASSES,
    IDLE,
    STRANGE,
    WORKLOAD_CLASSES,
    Hierarchy,
    Level,
    both_scores,
    shared,
)
from classifier.model import ESTIMATOR, Domain, core_columns
from classifier.profiles import PROFILE_NAMES, mask
from classifier.signals import SIGNALS
from classifier.training_channels import drop_channels
from classifier.training_config import TrainingConfig
from classifier.training_data import Dataset
from classifier.trees import MAX_DEPTH, Trees, softmax

Progress = Callable[[str], None]
Indices = NDArray[np.intp]

#: Parts of the scenarios (not of the windows) for calibration and for the test; the rest is fitted.
_CALIBRATION_SHARE: Final = 0.2
_TEST_SHARE: Final = 0.2
#: Least deviation of a core feature: a constant one must not refuse everything else.
_LEAST_DEVIATION: Final = 0.05
#: Least windows of a family that make a prototype of the domain.
_LEAST_PROTOTYPE: Final = 5
#: A leaf needs no more windows than a hundredth of all, and never fewer than these.
_LEAVES: Final = 100
_LEAST_LEAF: Final = 5
_IDLE: Final = CLASSES.index(IDLE)
#: Parts of what is measured, by the beginning of a channel's name, that made-up work takes from several windows; what
#: begins otherwise (network, disks, file systems, InfiniBand) is one part more. A feature goes with its first channel.
PARTS: Final = (
    ("sm_", "tensor_", "dram_", "fp64_", "fp32_", "fp16_"),
    ("nvlink_", "infiniband_"),
    ("pcie_",),
    ("power_", "energy_"),
    ("utilization_", "memory_utilization_"),
    ("process_", "memory_used_"),
)


def _part_of(channel: str) -> int:
    return next((number for number, part in enumerate(PARTS) if channel.startswith(part)), len(PARTS))


_PART_OF_COLUMN: Final = np.array([_part_of(SIGNALS[feature.channels[0]].channel) for feature in FEATURES])


def split(data: Dataset, seed: int) -> tuple[Indices, Indices, Indices]:
    """Return the indices to fit, calibrate and test on, whole scenarios or recordings each.

    Every simulated kind is in every part, and of recordings every class; where there are enough of them.
    """
    rng = np.random.default_rng([seed, 2])
    part = np.zeros(len(data.labels), dtype=np.int64)
    strata = _strata(data)
    for stratum in np.unique(strata):
        groups = rng.permutation(np.unique(data.groups[strata == stratum]))
        first = round(groups.size * _CALIBRATION_SHARE)
        second = first + round(groups.size * _TEST_SHARE)
        part[np.isin(data.groups, groups[:first])] = 1
        part[np.isin(data.groups, groups[first:second])] = 2
    return np.flatnonzero(part == 0), np.flatnonzero(part == 1), np.flatnonzero(part == 2)


def _strata(data: Dataset) -> NDArray[np.str_]:
    """Return the kind of every window; of a recorded one the class that its recording mostly holds."""
    strata = data.kinds.astype(object)
    for group in np.unique(data.groups[data.recorded]):
        mine = data.groups == group
        strata[mine] = f"recorded/{CLASSES[int(np.bincount(data.labels[mine]).argmax())]}"
    return strata.astype(np.str_)


def family_folds(data: Dataset, folds: int, seed: int) -> Iterator[tuple[Indices, Indices]]:
    """Yield the indices to fit on and those held out, whole kinds each.

    Every kind is held out once, except that of a class with one kind only: no fold takes all kinds of a class.
    """
    rng = np.random.default_rng([seed, 5])
    fold_of: dict[str, int] = {}
    kinds = [str(kind) for kind in np.unique(data.kinds)]
    main = {kind: int(np.bincount(data.labels[data.kinds == kind]).argmax()) for kind in kinds}
    for position in range(len(CLASSES)):
        mine = [kind for kind in kinds if main[kind] == position]
        if len(mine) > 1:
            for place, kind in enumerate(rng.permutation(mine)):
                fold_of[str(kind)] = place % min(folds, len(mine))
    number = np.array([fold_of.get(str(kind), -1) for kind in data.kinds])
    for fold in range(folds):
        if (number == fold).any():
            yield np.flatnonzero(number != fold), np.flatnonzero(number == fold)


def augmented(config: TrainingConfig, data: Dataset, seed: int) -> Dataset:
    """Return the windows as they are and `config.copies` copies, each scenario with other channels left out in each.

    Machines that show all there is are a third of the draws only, and what combines all of it is learnt from them.
    """
    rng = np.random.default_rng([seed, 6])
    count = config.copies + 1
    dropped = [drop_channels(data.rows, data.groups, rng) for _ in range(config.copies)]
    return Dataset(
        rows=np.concatenate((data.rows, *dropped)),
        labels=np.tile(data.labels, count),
        groups=np.tile(data.groups, count),
        kinds=np.tile(data.kinds, count),
        sources=np.tile(data.sources, count),
    )


def weights_of(config: TrainingConfig, data: Dataset, labels: NDArray[np.int64]) -> Array:
    """Return a weight for each window, mean 1: classes weigh the same, rare families more than their windows.

    Recorded windows together weigh `config.recorded_share` of each class that they are in.
    """
    weights: Array = np.ones(labels.size)
    for kind, count in zip(*np.unique(data.kinds, return_counts=True), strict=True):
        weights[data.kinds == kind] = float(count) ** -config.family_balance
    recorded = data.recorded
    for label in np.unique(labels):
        mine = labels == label
        for part, share in ((mine & recorded, config.recorded_share), (mine & ~recorded, 1 - config.recorded_share)):
            if part.any():
                weights[part] *= share / weights[part].sum()
        weights[mine] /= weights[mine].sum()
    scaled: Array = weights * (labels.size / weights.sum())
    return scaled


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


def strange_rows(config: TrainingConfig, working: Dataset, seed: int) -> Array:
    """Return made-up work: windows of which each part (PARTS) is left or taken from another window, by a coin each.

    Single parts look like known work, together they do not. Channels are left out of every second of them.
    """
    rng = np.random.default_rng([seed, 8])
    count = round(config.strange_share * working.labels.size)
    rows: Array = working.rows[rng.integers(working.labels.size, size=count)] if count else working.rows[:0]
    others = rng.integers(max(1, working.labels.size), size=count)
    for part in np.unique(_PART_OF_COLUMN):
        taken = rng.random(count) < 0.5
        columns = np.flatnonzero(part == _PART_OF_COLUMN)
        rows[np.ix_(taken, columns)] = working.rows[np.ix_(others[taken], columns)]
    rows[::2] = drop_channels(rows[::2], np.arange(len(rows[::2])), rng)
    return rows


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


Scorer = Callable[[Array], tuple[Array, ...]]


def cross_scores(
    config: TrainingConfig, data: Dataset, fit_one: Callable[[Dataset, int], Scorer]
) -> tuple[Dataset, tuple[Array, ...]]:
    """Return views of windows, and their scores by models that were fitted without the families they belong to.

    `fit_one` takes data and a seed and returns a function from rows to scores; some family must be left to hold out.
    """
    held: list[Dataset] = []
    scores: list[tuple[Array, ...]] = []
    for number, (inside, outside) in enumerate(family_folds(data, config.family_folds, config.seed)):
        scorer = fit_one(data.take(inside), config.seed + 1 + number)
        held.append(views(data.take(outside), config.seed))
        scores.append(scorer(held[-1].rows))
    return held[0].joined(held[1:]), tuple(np.concatenate(parts) for parts in zip(*scores, strict=True))


def views(data: Dataset, seed: int) -> Dataset:
    """Return each window as every profile shows it, and once with channels left out at random."""
    dropped = drop_channels(data.rows, data.groups, np.random.default_rng([seed, 7]))
    count = len(PROFILE_NAMES) + 1
    return Dataset(
        rows=np.concatenate([*(mask(data.rows, name) for name in PROFILE_NAMES), dropped]),
        labels=np.tile(data.labels, count),
        groups=np.tile(data.groups, count),
        kinds=np.tile(data.kinds, count),
        sources=np.tile(data.sources, count),
    )


def fit_temperatures(
    scores: tuple[Array, Array], labels: NDArray[np.int64], classes: tuple[str, ...], weights: Array | None = None
) -> tuple[float, float]:
    """Return the temperatures of both levels from scores of windows that were not fitted."""
    weights = np.ones(labels.size) if weights is None else weights
    busy = labels != _IDLE
    places = np.array([classes.index(name) if name in classes else -1 for name in CLASSES])[labels]
    known = busy & (places >= 0)
    first = fit_temperature(scores[0], busy.astype(np.int64), weights)
    return first, fit_temperature(scores[1][known], places[known], weights[known], classes)


def fit_temperature(
    raw: Array, labels: NDArray[np.int64], weights: Array | None = None, classes: tuple[str, ...] = ()
) -> float:
    """Return the divisor of raw scores that minimises the log loss, by golden-section search over its logarithm.

    `classes` are those of the scores where STRANGE may be among them; the loss is that of the answers.
    """
    rows = np.arange(labels.size)

    def loss(exponent: float) -> float:
        likelihoods = np.log(np.maximum(shared(softmax(raw / np.exp(exponent)), classes)[rows, labels], 1e-300))
        return -float(np.average(likelihoods, weights=weights))

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


def abstention_threshold(
    probabilities: Array, labels: NDArray[np.int64], precision: float, weights: Array | None = None
) -> float:
    """Return the least probability from which on decided windows are right with `precision`, within 0.6 to 0.95."""
    top = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    order = np.argsort(-top, kind="stable")
    mass = np.ones(labels.size) if weights is None else weights[order]
    share = np.cumsum(right[order] * mass) / np.cumsum(mass)
    good = np.flatnonzero(share >= precision)
    found = float(top[order[good[-1]]]) if good.size else 1.0
    return min(0.95, max(0.6, found))


def fit_domain(rows: Array, families: NDArray[np.str_], calibration: Array, quantile: float) -> Domain:
    """Return the out-of-domain statistics of the core features, one prototype for each family.

    The threshold of each profile is a quantile of the distances of `calibration` with that profile's channels.
    """
    columns = core_columns()
    core = rows[:, columns]
    names, counts = np.unique(families, return_counts=True)
    kept = [name for name, count in zip(names, counts, strict=True) if count >= _LEAST_PROTOTYPE] or list(names)
    overall_mean, overall_deviation = _moments(core, np.zeros(columns.size), np.ones(columns.size))
    pairs = [_moments(core[families == name], overall_mean, overall_deviation) for name in kept]
    means, deviations = (np.array(part) for part in zip(*pairs, strict=True))
    plain = Domain(columns=columns, means=means, deviations=deviations, thresholds=np.ones(len(PROFILE_NAMES)))
    thresholds = np.ones(len(PROFILE_NAMES))
    for position, profile in enumerate(PROFILE_NAMES):
        distances = plain.distance(mask(calibration, profile))
        distances = distances[np.isfinite(distances)]
        if distances.size:
            thresholds[position] = max(1e-3, float(np.quantile(distances, quantile)))
    return Domain(columns=columns, means=means, deviations=deviations, thresholds=thresholds)


def _moments(core: Array, mean: Array, deviation: Array) -> tuple[Array, Array]:
    """Return mean and deviation of every column; the given ones where nothing is known."""
    mean, deviation = mean.copy(), deviation.copy()
    for column in range(core.shape[1]):
        known = core[np.isfinite(core[:, column]), column]
        if known.size:
            mean[column] = known.mean()
            deviation[column] = max(_LEAST_DEVIATION, float(known.std()))
    return mean, deviation


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
