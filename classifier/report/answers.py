"""What a model answers to windows of one profile, at one moment and without the smoothing of the labeller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.labeller_config import LabellerConfig
from classifier.model import Prediction
from classifier.profiles import PROFILE_NAMES, mask, profile_of
from classifier.report.metrics import ABSTAINED, Flags, Labels
from classifier.report.windows import Windows

_IDLE: Final = CLASSES.index("idle")
_CONFIG: Final = LabellerConfig()
#: Position of the last profile without profiling or links.
_BASIC: Final = PROFILE_NAMES.index("P")


class Predictor(Protocol):
    """What is asked of a model."""

    def thresholds_of(self, rows: Array) -> Array:
        """Return the least probability of an answer to each row, shape (rows,)."""
        ...

    def predict(self, rows: Array) -> Prediction:
        """Return probabilities and out-of-domain ratios of feature rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers to windows: at full coverage, and where the program would say a word."""

    probabilities: Array  # (windows, classes)
    decided: Flags  # (windows,)

    @property
    def forced(self) -> Labels:
        """The likeliest class of every window."""
        return np.asarray(self.probabilities.argmax(axis=1), dtype=np.int64)

    @property
    def said(self) -> Labels:
        """The likeliest class where it would be said, ABSTAINED elsewhere."""
        return np.where(self.decided, self.forced, ABSTAINED)

    @property
    def confidence(self) -> Array:
        """Probability of the likeliest class."""
        return np.asarray(self.probabilities.max(axis=1), dtype=np.float64)

    def where(self, chosen: Flags) -> Answers:
        """Return the answers to the chosen windows."""
        return Answers(probabilities=self.probabilities[chosen], decided=self.decided[chosen])


def answer(model: Predictor, windows: Windows, profile: str) -> Answers:
    """Return what `model` and the idle rule say of `windows` when only the channels of `profile` are measured.

    The rules are the labeller's: idle is its rule's to say. Where kernels only wait (a window has no word of before),
    far from the training data, below the threshold, and with nothing but nvidia-smi's columns also below 300 s or its
    own higher threshold, nothing is said.
    """
    position = PROFILE_NAMES.index(profile)
    if not windows.size:
        return Answers(probabilities=np.empty((0, len(CLASSES))), decided=np.empty(0, dtype=bool))
    rows = mask(windows.rows, profile)
    prediction = model.predict(rows)
    probabilities = np.array(prediction.probabilities, dtype=np.float64)
    top = probabilities.max(axis=1)
    basic = profile_of(rows) <= _BASIC
    needed = model.thresholds_of(rows)
    needed = np.where(basic, np.maximum(needed, _CONFIG.basic_threshold), needed)
    known = np.nan_to_num(prediction.out_of_domain_ratio, nan=np.inf) <= 1.0
    long_enough = ~basic | (windows.spans_s >= _CONFIG.basic_minimum_s)
    decided = known & long_enough & (top >= needed) & (probabilities.argmax(axis=1) != _IDLE)
    decided &= ~windows.waiting[:, position]
    idle = windows.idle[:, position]
    rest = (1.0 - _CONFIG.idle_probability) / (len(CLASSES) - 1)
    probabilities[idle] = rest
    probabilities[idle, _IDLE] = _CONFIG.idle_probability
    return Answers(probabilities=probabilities, decided=decided | idle)
