"""Figures of a classification: accuracies, calibration, risk against coverage, delays, and intervals over clusters.

Labels and answers are positions in vocabulary.CLASSES; an answer of ABSTAINED says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array

Labels = NDArray[np.int64]
Flags = NDArray[np.bool_]

ABSTAINED: Final = -1
_BINS: Final = 15


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval; all None where there was nothing to compute it from."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def format(self) -> str:
        """Return for example `0.93 [0.90, 0.96]`, or `-`."""
        if self.value is None:
            return "-"
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def balanced_accuracy(labels: Labels, answers: Labels, weights: Array | None = None) -> float | None:
    """Return the mean over the classes that occur of the share answered right; abstentions are wrong."""
    shares: list[float] = []
    weighed = np.ones(labels.size) if weights is None else weights
    for position in np.unique(labels):
        mine = labels == position
        total = float(weighed[mine].sum())
        if total > 0:
            shares.append(float(weighed[mine & (answers == position)].sum()) / total)
    return sum(shares) / len(shares) if shares else None


def macro_f1(labels: Labels, answers: Labels, weights: Array | None = None) -> float | None:
    """Return the mean over the classes that occur of the harmonic mean of precision and recall."""
    scores: list[float] = []
    weighed = np.ones(labels.size) if weights is None else weights
    for position in np.unique(labels):
        mine, said = labels == position, answers == position
        both = float(weighed[mine].sum()) + float(weighed[said].sum())
        if float(weighed[mine].sum()) > 0:
            scores.append(2.0 * float(weighed[mine & said].sum()) / both)
    return sum(scores) / len(scores) if scores else None


def calibration_error(confidence: Array, right: Flags, weights: Array | None = None) -> float | None:
    """Return the expected calibration error over 15 bins of equal mass: |mean confidence - share right|, weighed."""
    weighed = np.ones(confidence.size) if weights is None else weights
    total = float(weighed.sum())
    if not total > 0:
        return None
    order = np.argsort(confidence, kind="stable")
    mass = np.cumsum(weighed[order]) - weighed[order] / 2
    bins = np.minimum((mass / total * _BINS).astype(np.int64), _BINS - 1)
    gaps = np.bincount(bins, weighed[order] * (confidence[order] - right[order]), minlength=_BINS)
    return float(np.abs(gaps).sum()) / total


def reliability(confidence: Array, right: Flags) -> list[tuple[float, float, int]]:
    """Return mean confidence, share right and size of each of the 15 bins of equal mass."""
    order = np.argsort(confidence, kind="stable")
    parts = [part for part in np.array_split(order, _BINS) if part.size]
    return [(float(confidence[part].mean()), float(right[part].mean()), int(part.size)) for part in parts]


def risk_coverage(confidence: Array, right: Flags) -> tuple[Array, Array]:
    """Return coverage and risk (share wrong among the answered) when only the surest windows are answered.

    Windows of equal confidence are answered together; both arrays ascend in coverage and end at 1.
    """
    if not confidence.size:
        return np.empty(0), np.empty(0)
    order = np.argsort(-confidence, kind="stable")
    count = np.arange(1, confidence.size + 1)
    last = np.append(np.flatnonzero(np.diff(confidence[order])), confidence.size - 1)
    wrong = np.cumsum(~right[order])
    return count[last] / confidence.size, wrong[last] / count[last]


def area_under_risk(confidence: Array, right: Flags) -> float | None:
    """Return the area under risk against coverage (0 is perfect; a random order gives the error rate)."""
    coverage, risk = risk_coverage(confidence, right)
    if not coverage.size:
        return None
    return float((risk * np.diff(coverage, prepend=0.0)).sum())


def time_to_label(times: Sequence[float], words: Sequence[str], start_s: float, label: str) -> float | None:
    """Return the seconds from `start_s` to the first decision that says `label`; None where none does."""
    for time_s, word in zip(times, words, strict=True):
        if time_s >= start_s and word == label:
            return time_s - start_s
    return None


def count_flips(words: Sequence[str], unknown: str = "unknown") -> int:
    """Return how often the word changes after the first that is not `unknown`; to and from `unknown` counts too."""
    first = next((position for position, word in enumerate(words) if word != unknown), len(words))
    said = words[first:]
    return sum(before != after for before, after in pairwise(said))


def bootstrap(
    clusters: NDArray[np.generic],
    statistic: Callable[[Array], float | None],
    *,
    strata: NDArray[np.generic] | None = None,
    draws: int = 500,
    seed: int = 0,
    level: float = 0.95,
) -> Estimate:
    """Return `statistic` with its percentile interval when whole clusters are drawn with replacement.

    `statistic` is given one weight per row: how often its cluster was drawn (1 for the value itself). With `strata`
    (one per row, the same throughout a cluster) as many clusters of each are drawn as there are. Equal seeds give
    equal intervals; with one cluster in every stratum there is no interval.
    """
    names, member = np.unique(clusters, return_inverse=True)
    value = statistic(np.ones(member.size))
    if value is None:
        return Estimate(None)
    stratum = np.zeros(names.size, dtype=np.int64)
    if strata is not None:
        stratum[member] = np.unique(strata, return_inverse=True)[1]
    groups = [np.flatnonzero(stratum == one) for one in np.unique(stratum)]
    if all(group.size < 2 for group in groups):
        return Estimate(value)
    rng = np.random.default_rng([seed, 11])
    found: list[float] = []
    for _ in range(draws):
        weights = np.zeros(names.size)
        for group in groups:
            np.add.at(weights, group[rng.integers(group.size, size=group.size)], 1.0)
        drawn = statistic(weights[member])
        if drawn is not None:
            found.append(drawn)
    rest = (1.0 - level) / 2
    return Estimate(value, float(np.quantile(found, rest)), float(np.quantile(found, 1.0 - rest)))
