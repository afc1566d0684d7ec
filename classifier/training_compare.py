"""The model beside a linear model and a forest, all judged on simulated families that none of them has seen.

All three get the same windows with the same channels left out and the same weights, and temperatures from the same
families held out. The linear model sees medians for what is missing, and flags that say so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.profiles import PROFILE_NAMES, mask
from classifier.scores import balanced_accuracy, calibration_error, macro_f1
from classifier.training_calibration import Scorer, cross_scores, fit_temperature, fit_temperatures
from classifier.training_config import TrainingConfig
from classifier.training_data import Dataset
from classifier.training_fit import Progress, fit_hierarchy, import_sklearn
from classifier.training_windows import augmented, family_folds, weights_of
from classifier.trees import softmax

Predict = Callable[[Array], Array]

#: Folds of families in the comparison: each family is held out once.
_FOLDS: Final = 3
#: Standardised values of the linear model stay within this: one wild reading must not decide.
_CLIP: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How one model does on families held out, with the channels of one profile; nothing abstains.

    Every family weighs the same in its class, however many windows it has.
    """

    model: str
    profile: str
    windows: int
    families: int
    balanced_accuracy: float
    macro_f1: float
    calibration_error: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, rounded to four digits."""
        return {
            "model": self.model,
            "profile": self.profile,
            "windows": self.windows,
            "families": self.families,
            "balanced_accuracy": round(self.balanced_accuracy, 4),
            "macro_f1": round(self.macro_f1, 4),
            "calibration_error": round(self.calibration_error, 4),
        }


def compare(config: TrainingConfig, data: Dataset, progress: Progress = lambda _: None) -> list[Comparison]:
    """Return one row for each model and profile, families of `data` held out in turn and pooled.

    Families of a class that has one only are never held out and never counted.
    """
    data = data.without_kinds(config.exclude_kinds)
    models: dict[str, Callable[[TrainingConfig, Dataset, int], Predict]] = {
        "boosting, two levels": fit_boosting,
        "random forest": fit_forest,
        "logistic regression": fit_logistic,
    }
    rows: list[Comparison] = []
    for name, fit_one in models.items():
        held: list[Dataset] = []
        found: dict[str, list[Array]] = {profile: [] for profile in PROFILE_NAMES}
        for number, (inside, outside) in enumerate(family_folds(data, _FOLDS, config.seed + 100)):
            progress(f"{name}: families held out, part {number + 1} of {_FOLDS}")
            predict = fit_one(config, data.take(inside), config.seed + number)
            held.append(data.take(outside))
            for profile in PROFILE_NAMES:
                found[profile].append(predict(mask(held[-1].rows, profile)))
        pooled = held[0].joined(held[1:])
        rows += [judge(name, profile, pooled, np.concatenate(parts)) for profile, parts in found.items()]
    return rows


def judge(model: str, profile: str, data: Dataset, probabilities: Array) -> Comparison:
    """Return the figures of `probabilities` on `data`, families weighing the same in each class."""
    families = data.families
    weights: Array = np.zeros(data.labels.size)
    for label in np.unique(data.labels):
        names, counts = np.unique(families[data.labels == label], return_counts=True)
        for family, count in zip(names, counts, strict=True):
            weights[families == family] = 1.0 / (names.size * count)
    guess = probabilities.argmax(axis=1)
    top = probabilities.max(axis=1)
    return Comparison(
        model=model,
        profile=profile,
        windows=data.labels.size,
        families=np.unique(families).size,
        balanced_accuracy=balanced_accuracy(guess, data.labels, weights) or 0.0,
        macro_f1=macro_f1(guess, data.labels, weights) or 0.0,
        calibration_error=calibration_error(top, guess == data.labels, weights),
    )


def fit_boosting(config: TrainingConfig, data: Dataset, seed: int) -> Predict:
    """Return the model of `classifier.training` fitted and calibrated on `data`."""
    fitted = fit_hierarchy(config, data, seed=seed)
    held, scores = cross_scores(config, data, lambda part, number: fit_hierarchy(config, part, seed=number).scores)
    return fitted.hierarchy(fit_temperatures((scores[0], scores[1]), held.labels, fitted.classes)).probabilities


def fit_forest(config: TrainingConfig, data: Dataset, seed: int) -> Predict:
    """Return a random forest fitted and calibrated on `data`; it splits on what is missing as the boosting does."""

    def scorer(part: Dataset, number: int) -> Scorer:
        part = augmented(config, part, number)
        forest = import_sklearn().RandomForestClassifier(
            n_estimators=200, min_samples_leaf=5, max_features="sqrt", random_state=number, n_jobs=-1
        )
        forest.fit(part.rows, part.labels, sample_weight=weights_of(config, part, part.labels))
        return lambda rows: (_scores_of(forest, rows),)

    return _calibrated(config, data, seed, scorer)


def fit_logistic(config: TrainingConfig, data: Dataset, seed: int) -> Predict:
    """Return a multinomial logistic regression fitted and calibrated on `data`."""

    def scorer(part: Dataset, number: int) -> Scorer:
        from sklearn.linear_model import LogisticRegression

        part = augmented(config, part, number)
        prepare = _preparation(part.rows)
        linear = LogisticRegression(C=0.1, max_iter=300, tol=1e-3)
        linear.fit(prepare(part.rows), part.labels, sample_weight=weights_of(config, part, part.labels))
        return lambda rows: (_scores_of(linear, prepare(rows)),)

    return _calibrated(config, data, seed, scorer)


def _calibrated(config: TrainingConfig, data: Dataset, seed: int, scorer: Callable[[Dataset, int], Scorer]) -> Predict:
    fitted = scorer(data, seed)
    held, scores = cross_scores(config, data, scorer)
    temperature = fit_temperature(scores[0], held.labels)
    return lambda rows: softmax(fitted(rows)[0] / temperature)


def _scores_of(estimator: Any, rows: Array) -> Array:  # noqa: ANN401 - untyped estimators
    """Return log-probabilities over all classes; one that was not fitted is all but excluded."""
    result: Array = np.full((rows.shape[0], len(CLASSES)), 1e-6)
    result[:, estimator.classes_] = np.maximum(estimator.predict_proba(rows), 1e-6)
    return np.log(result)


def _preparation(rows: Array) -> Callable[[Array], Array]:
    """Return what makes rows fit for a linear model: medians for NaN, unit scale, a flag where NaN was."""
    known = np.isfinite(rows)
    used = known.any(axis=0)
    centres = np.zeros(rows.shape[1])
    centres[used] = np.nanmedian(np.where(known, rows, np.nan)[:, used], axis=0)
    filled = np.where(known, rows, centres)
    means, deviations = filled.mean(axis=0), filled.std(axis=0)
    deviations[deviations < 1e-9] = 1.0

    def prepare(some: Array) -> Array:
        there = np.isfinite(some)
        values = (np.where(there, some, centres) - means) / deviations
        return np.concatenate((np.clip(values, -_CLIP, _CLIP), (~there).astype(np.float64)), axis=1)

    return prepare
