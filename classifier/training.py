"""Training: fit on simulated and recorded windows, calibrate on families of their own, test, write the bundle.

The same configuration and data give the same bundle, byte for byte, with the same versions of NumPy and scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import UsageError
from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.features import FEATURE_NAMES
from classifier.hierarchy import IDLE
from classifier.model import load
from classifier.own_traces import OwnTraces
from classifier.profiles import PROFILE_NAMES, mask, profile_of
from classifier.scores import Scores, score
from classifier.training_bundle import (
    TrainingReport,
    card_of,
    domain_arrays,
    metadata_of,
    write_bundle,
)
from classifier.training_calibration import abstention_threshold, cross_scores, fit_domain, fit_temperatures
from classifier.training_compare import Comparison, compare
from classifier.training_config import TrainingConfig
from classifier.training_data import Dataset, simulate_dataset
from classifier.training_fit import (
    Fitted,
    Progress,
    fit_hierarchy,
    gains,
    import_sklearn,
    require_estimator,
    trees_from,
)
from classifier.training_windows import Indices, family_folds, split, views
from classifier.trees import softmax

__all__ = [
    "Comparison",
    "TrainingConfig",
    "TrainingReport",
    "compare",
    "split",
    "thresholds_on",
    "train",
    "train_on",
    "trees_from",
]

#: How many features a bundle names as its strongest.
_STRONGEST: Final = 8


def train(
    config: TrainingConfig, out_dir: Path, progress: Progress = lambda _: None, *, own: OwnTraces | None = None
) -> TrainingReport:
    """Simulate, fit, calibrate, test and write a bundle to `out_dir`; `own` traces join the simulated ones.

    Raises UsageError where another estimator is asked for or scikit-learn is missing, FaultError where `out_dir` cannot
    be written.
    """
    require_estimator(config.estimator)
    import_sklearn()
    progress(f"simulating {config.data.scenarios} scenarios")
    data = simulate_dataset(config.data, config.seed, progress, exclude_kinds=config.exclude_kinds)
    return train_on(config, data if own is None else data.joined([own.data]), out_dir, progress, own=own)


def train_on(
    config: TrainingConfig,
    data: Dataset,
    out_dir: Path,
    progress: Progress = lambda _: None,
    *,
    own: OwnTraces | None = None,
) -> TrainingReport:
    """Fit, calibrate, test and write a bundle from `data`, which holds those of `own`; see `train`."""
    require_estimator(config.estimator)
    data = data.without_kinds(config.exclude_kinds)
    fitting, calibration, test = split(data, config.seed)
    progress(f"fitting on {fitting.size} windows, calibrating on {calibration.size}, testing on {test.size}")
    fitted = fit_hierarchy(config, data.take(fitting), seed=config.seed)
    held = _calibration(config, data, fitted, (fitting, calibration), progress)
    hierarchy = fitted.hierarchy(fit_temperatures(held.scores, held.data.labels, fitted.classes, held.weights))
    probabilities = hierarchy.combine(
        *(softmax(part / one) for part, one in zip(held.scores, hierarchy.temperatures, strict=True))
    )
    thresholds = thresholds_on(config.target_precision, held.data, probabilities, held.weights)
    progress(f"temperatures and thresholds set on {held.data.labels.size} views of windows held out")
    report = TrainingReport(
        directory=out_dir,
        windows=data.labels.size,
        scenarios=np.unique(data.groups).size,
        recorded=int(data.recorded.sum()),
        temperatures=hierarchy.temperatures,
        thresholds=thresholds,
        test=_scores(lambda rows: fitted.probabilities(rows, hierarchy.temperatures), data.take(test), thresholds),
        held_out=_held_scores(held, probabilities, thresholds),
    )
    domain = fit_domain(data.rows[fitting], data.families[fitting], data.rows[calibration], config.domain_quantile)
    metadata = metadata_of(
        config, data, report, classes=fitted.classes, domain=domain, deciding=_strongest(fitted), own=own
    )
    write_bundle(out_dir, metadata, {**hierarchy.arrays(), **domain_arrays(domain)}, card_of(metadata, report))
    load(out_dir)  # what was written must be what the agent accepts
    return report


@dataclass(frozen=True, slots=True)
class _Held:
    """Windows that were not fitted, with the scores of both levels."""

    data: Dataset
    scores: tuple[Array, Array]
    weights: Array
    unseen: NDArray[np.bool_]  # whether the family was never seen, rather than the scenario


def _calibration(
    config: TrainingConfig,
    data: Dataset,
    fitted: Fitted,
    parts: tuple[Indices, Indices],
    progress: Progress,
) -> _Held:
    """Return scenarios that were not fitted, and families held out where there are some to hold out.

    Raises UsageError where there are no such scenarios.
    """
    fitting, calibration = parts
    if not calibration.size:
        raise UsageError("there are too few scenarios or traces to hold some out; add some, or recalibrate instead")
    held = views(data.take(calibration), config.seed)
    scores = fitted.scores(held.rows)
    known = held.labels.size
    if not config.family_folds or next(family_folds(data, config.family_folds, config.seed), None) is None:
        return _Held(held, scores, np.ones(known), np.zeros(known, dtype=bool))
    progress(f"holding out families in {config.family_folds} parts to set temperatures and thresholds")
    once = replace(config, members=1)  # a mean of members is a little less sure: what errs here errs to caution
    fitted_on = data.take(np.sort(np.concatenate((fitting, calibration))))
    others, more = cross_scores(config, fitted_on, lambda part, seed: fit_hierarchy(once, part, seed=seed).scores)
    unseen = np.arange(known + others.labels.size) >= known
    share = config.unseen_share
    weights: Array = np.where(unseen, share / others.labels.size, (1.0 - share) / known)
    first, second = (np.concatenate(pair) for pair in zip(scores, more, strict=True))
    return _Held(held.joined([others]), (first, second), weights, unseen)


def thresholds_on(
    precision: float, held: Dataset, probabilities: Array, weights: Array | None = None
) -> dict[str, float]:
    """Return for each profile the least probability at which busy windows of it are right often enough."""
    profiles = profile_of(held.rows)
    busy = held.labels != CLASSES.index(IDLE)
    weights = np.ones(held.labels.size) if weights is None else weights
    return {
        name: abstention_threshold(probabilities[mine], held.labels[mine], precision, weights[mine])
        for position, name in enumerate(PROFILE_NAMES)
        for mine in (busy & (profiles == position),)
    }


def _scores(predict: Callable[[Array], Array], data: Dataset, thresholds: Mapping[str, float]) -> dict[str, Scores]:
    """Return the scores of `data` as each profile shows it; windows of boards that lack a profile count with less."""
    return {name: score(predict(mask(data.rows, name)), data.labels, thresholds[name]) for name in PROFILE_NAMES}


def _held_scores(held: _Held, probabilities: Array, thresholds: Mapping[str, float]) -> dict[str, Scores]:
    if not held.unseen.any():
        return {}
    profiles = np.where(held.unseen, profile_of(held.data.rows), -1)
    return {
        name: score(probabilities[profiles == position], held.data.labels[profiles == position], thresholds[name])
        for position, name in enumerate(PROFILE_NAMES)
    }


def _strongest(fitted: Fitted) -> list[str]:
    """Return the features with the highest share of the gain; what is worked on counts, not whether."""
    order = np.argsort(-gains(fitted.workload, len(FEATURE_NAMES)), kind="stable")
    return [FEATURE_NAMES[position] for position in order[:_STRONGEST]]
