"""Scores of labels against the truth, with abstention: recall, precision, coverage, calibration error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array
from agent.vocabulary import CLASSES

_BINS: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScore:
    """Scores of the windows of one class; None where there are none to divide by."""

    windows: int
    coverage: float | None  # share that got a label
    recall: float | None  # right over all windows: an abstention counts as wrong
    recall_decided: float | None  # right over the decided ones
    precision: float | None  # right over all that were given this label


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores by class, and over all."""

    classes: Mapping[str, ClassScore]
    balanced_accuracy: float | None  # mean of recall_decided over classes
    coverage: float | None
    calibration_error: float | None  # expected calibration error over 15 bins of equal size
    balanced_accuracy_forced: float | None = None  # mean recall over classes when nothing abstains
    macro_f1_forced: float | None = None  # mean F1 over the classes that occur when nothing abstains

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, rounded to four digits."""

        def rounded(value: float | None) -> float | None:
            return None if value is None else round(value, 4)

        return {
            "balanced_accuracy": rounded(self.balanced_accuracy),
            "coverage": rounded(self.coverage),
            "calibration_error": rounded(self.calibration_error),
            "balanced_accuracy_forced": rounded(self.balanced_accuracy_forced),
            "macro_f1_forced": rounded(self.macro_f1_forced),
            "classes": {
                name: {
                    "windows": one.windows,
                    "coverage": rounded(one.coverage),
                    "recall": rounded(one.recall),
                    "recall_decided": rounded(one.recall_decided),
                    "precision": rounded(one.precision),
                }
                for name, one in self.classes.items()
            },
        }

    def format(self) -> str:
        """Return a table in Markdown."""
        lines = [
            "| class | windows | coverage | recall | recall of decided | precision |",
            "|---|---|---|---|---|---|",
        ]
        for name, one in self.classes.items():
            figures = (one.coverage, one.recall, one.recall_decided, one.precision)
            lines.append(f"| {name} | {one.windows} | " + " | ".join(map(show, figures)) + " |")
        lines.append(
            f"\nBalanced accuracy of decided windows {show(self.balanced_accuracy)}, coverage {show(self.coverage)}, "
            f"calibration error {show(self.calibration_error)}."
        )
        return "\n".join(lines)


def score(probabilities: Array, labels: NDArray[np.int64], threshold: float | Array) -> Scores:
    """Return the scores of probabilities, shape (rows, classes); a row whose highest is below `threshold` abstains.

    `threshold` is one for all rows, or one for each.
    """
    top = probabilities.max(axis=1) if labels.size else np.empty(0)
    guess = probabilities.argmax(axis=1) if labels.size else np.empty(0, dtype=np.int64)
    decided = top >= threshold
    classes: dict[str, ClassScore] = {}
    for position, name in enumerate(CLASSES):
        mine = labels == position
        said = decided & (guess == position)
        right = int((mine & said).sum())
        classes[name] = ClassScore(
            windows=int(mine.sum()),
            coverage=_share(int((mine & decided).sum()), int(mine.sum())),
            recall=_share(right, int(mine.sum())),
            recall_decided=_share(right, int((mine & decided).sum())),
            precision=_share(right, int(said.sum())),
        )
    recalls = [one.recall_decided for one in classes.values() if one.recall_decided is not None]
    return Scores(
        classes=classes,
        balanced_accuracy=sum(recalls) / len(recalls) if recalls else None,
        coverage=_share(int(decided.sum()), labels.size),
        calibration_error=calibration_error(top, guess == labels) if labels.size else None,
        balanced_accuracy_forced=balanced_accuracy(guess, labels),
        macro_f1_forced=macro_f1(guess, labels),
    )


def balanced_accuracy(
    guess: NDArray[np.int64], labels: NDArray[np.int64], weights: Array | None = None
) -> float | None:
    """Return the mean recall over the classes that occur; None without windows."""
    weights = np.ones(labels.size) if weights is None else weights
    recalls = [
        float(weights[(labels == one) & (guess == one)].sum() / weights[labels == one].sum())
        for one in np.unique(labels)
    ]
    return sum(recalls) / len(recalls) if recalls else None


def macro_f1(guess: NDArray[np.int64], labels: NDArray[np.int64], weights: Array | None = None) -> float | None:
    """Return the mean over the classes that occur of the harmonic mean of precision and recall; None without any."""
    weights = np.ones(labels.size) if weights is None else weights
    found = [
        float(
            2
            * weights[(guess == one) & (labels == one)].sum()
            / (weights[guess == one].sum() + weights[labels == one].sum())
        )
        for one in np.unique(labels)
    ]
    return sum(found) / len(found) if found else None


def calibration_error(top: Array, right: NDArray[np.bool_], weights: Array | None = None) -> float:
    """Return the expected calibration error of highest probabilities over 15 bins of equal size."""
    weights = np.ones(top.size) if weights is None else weights
    order = np.argsort(top, kind="stable")
    error = 0.0
    for part in np.array_split(order, _BINS):
        mass = float(weights[part].sum())
        if mass > 0:
            error += abs(float((weights[part] * (top[part] - right[part])).sum()))
    return error / float(weights.sum())


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def show(value: float | None) -> str:
    """Return a figure to three digits, or a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"
