"""What is set on windows that were not fitted: temperatures, abstention thresholds, and the domain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.hierarchy import IDLE, shared
from classifier.model import Domain, core_columns
from classifier.profiles import PROFILE_NAMES, mask
from classifier.training_config import TrainingConfig
from classifier.training_data import Dataset
from classifier.training_windows import family_folds, views
from classifier.trees import softmax

#: Least deviation of a core feature: a constant one must not refuse everything else.
_LEAST_DEVIATION: Final = 0.05
#: Least windows of a family that make a prototype of the domain.
_LEAST_PROTOTYPE: Final = 5
_IDLE: Final = CLASSES.index(IDLE)

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
