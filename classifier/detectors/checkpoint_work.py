"""What kind of work a job does, for its checkpoints: whether it goes on between bursts, and whether it trains.

Requests come in bursts as checkpoints do, and a server's may be evenly spaced for an hour. Between them its GPUs are
idle; those of training are not. Nobody is paged by a cadence that was learned unless the job trains by its label, most
of the time it worked, or shows steps most of that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.records import GpuKey
from classifier.detectors.checkpoint_jobs import JobGpus
from classifier.detectors.step_pace import StepPaces
from classifier.results import Decision

#: Looks that are remembered, an hour of them, and the fewest that say anything: five minutes.
_LOOKS: Final = 720
_LEAST_LOOKS: Final = 60
#: Work for less than this share of the time between bursts is bursts of work.
_LEAST_WORK: Final = 0.5
#: A training label, or a step, in this share of the looks at work.
_MOSTLY: Final = 0.5
_NOT_TRAINING: Final = frozenset({"inference", "other"})


@dataclass(slots=True)
class _Share:
    """How often something was so: all of it at first, then of the last hour."""

    looks: int = 0
    value: float = 0.0

    def take(self, *, is_so: bool) -> None:
        self.looks = min(self.looks + 1, _LOOKS)
        self.value += (is_so - self.value) / self.looks

    def is_above(self, share: float) -> bool | None:
        """Return whether it was so for that share; None before enough was seen."""
        return None if self.looks < _LEAST_LOOKS else self.value >= share


@dataclass(slots=True)
class JobWork:
    """What one job was seen to do."""

    worked: _Share = field(default_factory=_Share)
    trained: _Share = field(default_factory=_Share)  # by its labels, of the looks at work that had one
    stepped: _Share = field(default_factory=_Share)  # of the looks at work

    def look(
        self,
        gpus: JobGpus,
        decisions: Mapping[GpuKey, Decision],
        paces: StepPaces | None,
        now_s: float,
        *,
        is_still: bool,
        is_writing: bool,
    ) -> None:
        """Take what is seen now; while something is written the job may wait for that."""
        if not is_writing:
            self.worked.take(is_so=not is_still)
        if is_still:
            return
        if paces is not None:
            self.stepped.take(is_so=any(paces.pace(gpu.key, now_s) is not None for gpu in gpus.gpus))
        labels = [decisions[gpu.key].workload for gpu in gpus.gpus if gpu.key in decisions]
        known = [label for label in labels if label != "unknown"]
        if known:
            self.trained.take(is_so=2 * known.count("training") > len(known))

    @property
    def is_in_bursts(self) -> bool:
        """Whether the GPUs are idle most of the time: no cadence is learned from bursts between."""
        return self.worked.is_above(_LEAST_WORK) is False

    def is_training(self, gpus: JobGpus) -> bool:
        """Return whether it trains for all that is known, so that a checkpoint that is missed is worth a page."""
        if gpus.declared_interval_s is not None or gpus.declared_class == "training":
            return True
        if self.trained.is_above(_MOSTLY) is not None:
            return bool(self.trained.is_above(_MOSTLY))
        return not self.is_in_bursts and bool(self.stepped.is_above(_MOSTLY))


def is_not_training(gpus: JobGpus, decisions: Mapping[GpuKey, Decision], probability: float) -> bool:
    """Return whether the job is declared, or surely labelled, as what saves no checkpoints."""
    if gpus.declared_class is not None:
        return gpus.declared_class in _NOT_TRAINING
    others = 0
    for gpu in gpus.gpus:
        decision = decisions.get(gpu.key)
        if decision is not None and decision.workload in _NOT_TRAINING and decision.probabilities is not None:
            others += decision.probabilities[decision.workload] >= probability
    return others * 2 > len(gpus.gpus)
