"""Smoothing: from the model's probabilities of single moments to a label that stays.

A forward filter with sticky transitions decides which class leads; a running mean of the model's own probabilities
decides whether that is said at all. The two are apart on purpose: windows overlap, so the filter grows certain of
whatever leads a little for long, and only the mean still tells that the evidence was weak. The mean is what is
published, and a label that is no longer its likeliest class ends at once: a label is slow to come and never outlives
its evidence.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.config_checks import require

UNKNOWN: Final = "unknown"
AMBIGUOUS: Final = "ambiguous"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothingConfig:
    """Tunables of the smoother."""

    #: Probability that the class stays the same over `step_s`.
    stay_ratio: float = 0.98
    #: Time `stay_ratio` refers to, and the weight of one decision's evidence; the interval of live decisions.
    step_s: float = 5.0
    #: Share of a decision's log-evidence that counts: neighbouring windows overlap.
    evidence_ratio: float = 0.5
    #: Time constant of the running mean of probabilities.
    mean_s: float = 30.0
    #: How long another label must lead before it is taken over; until then the old one holds, or `unknown`.
    confirm_s: float = 10.0
    #: How far below its threshold the mean may fall before a label that holds is given up.
    release_ratio: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.step_s > 0, "step_s", self.step_s, "above 0")
        require(self.mean_s > 0, "mean_s", self.mean_s, "above 0")


class Smoother:
    """State of one GPU's label: update it with every decision, reset it when the evidence starts anew."""

    def __init__(self, config: SmoothingConfig) -> None:
        self._config = config
        self.reset()

    def reset(self) -> None:
        """Forget everything: the next label is taken at once."""
        self._log = np.full(len(CLASSES), -math.log(len(CLASSES)))
        self._mean: Array | None = None
        self._last_s: float | None = None
        self.label: str | None = None
        self.reason: str | None = None
        self.since_s = 0.0
        self._next: str | None = None
        self._next_since_s = 0.0

    def branch(self) -> Smoother:
        """Return a smoother of its own that goes on from here."""
        # Arrays are replaced and never written to, so that sharing them is safe.
        return copy.copy(self)

    @property
    def mean(self) -> Array | None:
        """Running mean of the probabilities, in the order of vocabulary.CLASSES; None before the first."""
        return self._mean

    @property
    def posterior(self) -> Array:
        """Filtered probabilities in the order of vocabulary.CLASSES."""
        result: Array = np.exp(self._log)
        return result

    def update(self, now_s: float, probabilities: Array, threshold: Array) -> str:
        """Take the model's probabilities of this moment and return the label: a class, or `unknown` (see `reason`).

        `threshold` holds, per class, the least running mean of its probability at which it is said.
        """
        leader, mean = self._filter(now_s, probabilities)
        name, likeliest = CLASSES[leader], CLASSES[int(np.argmax(mean))]
        needed = threshold[leader] - (self._config.release_ratio if name == self.label else 0.0)
        sure = name == likeliest and mean[leader] >= needed
        self._propose(now_s, name if sure else UNKNOWN, None if sure else AMBIGUOUS)
        if self.label != likeliest:
            self._drop(now_s, AMBIGUOUS)
        return self.label or UNKNOWN

    def settle(self, now_s: float, label: str) -> str:
        """Take a label that needs no smoothing, because a window of its own stands behind it; evidence starts anew."""
        since_s = self.since_s if label == self.label else now_s
        self.reset()
        return self._take(since_s, label, None)

    def release(self, now_s: float) -> None:
        """End a label that `settle` gave and that holds no longer: `unknown` until another has been confirmed."""
        self.reset()
        self._take(now_s, UNKNOWN, AMBIGUOUS)

    def refuse(self, now_s: float, reason: str) -> str:
        """Take a moment whose evidence is refused for `reason`: `unknown` at once."""
        self._next = None
        self._drop(now_s, reason)
        return UNKNOWN

    def hold(self, now_s: float, reason: str) -> str:
        """Take a moment that says nothing: a label holds as it is, and without one it is `unknown` for `reason`.

        Such moments neither confirm another label nor start its confirmation anew.
        """
        if self._last_s is not None:
            self._next_since_s += now_s - self._last_s
        self._last_s = now_s
        if self.label is None:
            return self._take(now_s, UNKNOWN, reason)
        if self.label == UNKNOWN:
            self.reason = reason
        return self.label

    def _filter(self, now_s: float, probabilities: Array) -> tuple[int, Array]:
        """Return the leading class and the running mean of all probabilities."""
        config = self._config
        elapsed_s = config.step_s if self._last_s is None else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        stay = max(1.0 / len(CLASSES), config.stay_ratio ** (elapsed_s / config.step_s))
        before = np.exp(self._log)
        moved = stay * before + (1.0 - stay) * (1.0 - before) / (len(CLASSES) - 1)
        weight = config.evidence_ratio * min(1.0, elapsed_s / config.step_s)
        log = np.log(np.maximum(moved, 1e-12)) + weight * np.log(np.maximum(probabilities, 1e-4))
        log -= log.max()
        self._log = log - math.log(float(np.exp(log).sum()))
        if self._mean is None:
            self._mean = probabilities.copy()
        else:
            share = 1.0 - math.exp(-elapsed_s / config.mean_s)
            self._mean = self._mean + share * (probabilities - self._mean)
        return int(np.argmax(self._log)), self._mean

    def _propose(self, now_s: float, label: str, reason: str | None) -> str:
        if self.label is None:
            return self._take(now_s, label, reason)
        if label == self.label:
            self._next = None
            self.reason = reason
        elif label != self._next:
            self._next, self._next_since_s = label, now_s
        elif now_s - self._next_since_s >= self._config.confirm_s:
            return self._take(self._next_since_s, label, reason)
        return self.label

    def _drop(self, now_s: float, reason: str) -> None:
        """Turn `unknown` at once; a label that is being confirmed goes on being confirmed."""
        if self.label != UNKNOWN:
            self.label, self.since_s = UNKNOWN, now_s
        self.reason = reason

    def _take(self, since_s: float, label: str, reason: str | None) -> str:
        self.label, self.reason, self.since_s, self._next = label, reason, since_s, None
        return label
