"""What the holders of a GPU declare to run there, as evidence beside telemetry, and whether telemetry contradicts it.

A declaration comes from a job file or from the family of a known program (agent.programs). It is an observation of its
own with an error rate of its own, `error_ratio`: where the work is training, training is declared with probability
1 - error_ratio, and inference and other with half the error each. These likelihoods multiply what telemetry says of the
three. There is one rate for both sources, since a holder does not say which of them its class comes from; users forget
to change a job file at least as often as a program's family is wrong. A declaration says nothing about idleness, since
a declared job may do nothing, and it never enters the model: telemetry alone stays visible beside it, and a declaration
that telemetry denies for long is a mismatch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from agent.history import Array, GpuHistory
from agent.vocabulary import CLASSES
from classifier.config_checks import require

#: What can be declared and can disagree: all classes but idle.
BUSY_CLASSES: Final = tuple(name for name in CLASSES if name != "idle")
#: Two decisions further apart than this do not show what was between them.
_LONGEST_STEP_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredConfig:
    """How declarations are weighed."""

    #: Share of declarations that are wrong; 2/3 is what a guess among three gets, and ignores declarations.
    error_ratio: float = 0.05
    #: A declaration not heard of for this long counts no more.
    stale_seconds: float = 120.0
    #: A mismatch is said after this much disagreement of the telemetry-only label ...
    mismatch_seconds: float = 600.0
    #: ... within this time ...
    mismatch_window_seconds: float = 900.0
    #: ... and until there is less than this of it left.
    mismatch_clear_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        ratio = self.error_ratio
        must = (
            "between 0.001, since programs and people are sometimes wrong, and 0.667, where a declaration says nothing"
        )
        require(0.001 <= ratio <= 0.667, "error_ratio", ratio, must)
        require(self.stale_seconds > 0, "stale_seconds", self.stale_seconds, "above 0")
        least, window, clear = self.mismatch_seconds, self.mismatch_window_seconds, self.mismatch_clear_seconds
        require(least > 0, "mismatch_seconds", least, "above 0")
        is_within = least <= window <= 86_400
        require(is_within, "mismatch_window_seconds", window, f"between mismatch_seconds ({least}) and a day (86400)")
        require(0 < clear <= least, "mismatch_clear_seconds", clear, f"above 0 and at most mismatch_seconds ({least})")


class Declared(NamedTuple):
    """What is declared for one GPU, and the jobs that declare it."""

    workload: str | None  # training, inference or other; None where nothing is declared, or not one thing
    job_keys: frozenset[str]


def declared_of(config: DeclaredConfig, gpu: GpuHistory, now_s: float) -> Declared:
    """Return what the holders of `gpu` declare: a class where all of them that declare any declare the same."""
    owners = gpu.owners
    if owners is None or now_s - owners.monotonic_s > config.stale_seconds:
        return Declared(None, frozenset())
    said = [(holder.declared_class, holder.job_key) for holder in owners.holders if holder.declared_class is not None]
    classes = {workload for workload, _ in said}
    workload = classes.pop() if len(classes) == 1 else None
    return Declared(workload if workload in BUSY_CLASSES else None, frozenset(job_key for _, job_key in said))


def combine(config: DeclaredConfig, probabilities: Array, workload: str | None) -> Array:
    """Return `probabilities` (in the order of vocabulary.CLASSES) times the likelihood of `workload` being declared.

    The probability of idle stays; without a declaration the same array comes back.
    """
    if workload is None:
        return probabilities
    # 2/3, however it is rounded, is a guess: equal likelihoods.
    wrong = config.error_ratio / (len(BUSY_CLASSES) - 1)
    weights = np.array([max(wrong, 1.0 - config.error_ratio) if name == workload else wrong for name in CLASSES])
    busy = np.array([name != "idle" for name in CLASSES])
    weighted: Array = np.where(busy, probabilities * weights, probabilities)
    total = float(weighted[busy].sum())
    if total > 0:
        weighted[busy] *= float(probabilities[busy].sum()) / total
    return weighted


class MismatchWatch:
    """For how long the telemetry-only label of one GPU has contradicted what its job declares."""

    def __init__(self, config: DeclaredConfig) -> None:
        self._config = config
        self._job_keys: frozenset[str] = frozenset()
        self._workload: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._spans: deque[tuple[float, float]] = deque()  # start and end of disagreement, merged where they touch
        self._disagreed_s: float | None = None  # time of the decision before, where that disagreed
        self._is_raised = False

    def update(self, now_s: float, declared: Declared, label: str) -> bool | None:
        """Take the telemetry-only label of this moment and return whether there is a mismatch.

        None where nothing is declared; what was seen until then is kept for when the same job is heard of again.
        """
        if declared.workload is None:
            self._disagreed_s = None
            return None
        if declared.workload != self._workload or declared.job_keys.isdisjoint(self._job_keys):
            self._forget()
        self._workload, self._job_keys = declared.workload, declared.job_keys
        disagrees = label in BUSY_CLASSES and label != declared.workload
        before_s = self._disagreed_s
        if disagrees and before_s is not None and now_s - before_s <= _LONGEST_STEP_S:
            start_s = self._spans.pop()[0] if self._spans and self._spans[-1][1] >= before_s else before_s
            self._spans.append((start_s, now_s))
        self._disagreed_s = now_s if disagrees else None
        limit_s = self._config.mismatch_clear_seconds if self._is_raised else self._config.mismatch_seconds
        self._is_raised = self._seconds(now_s) >= limit_s
        return self._is_raised

    def _seconds(self, now_s: float) -> float:
        """Return the disagreement within the window, and forget what lies before it."""
        oldest_s = now_s - self._config.mismatch_window_seconds
        while self._spans and self._spans[0][1] <= oldest_s:
            self._spans.popleft()
        return sum(end_s - max(start_s, oldest_s) for start_s, end_s in self._spans)
