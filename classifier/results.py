"""What the judgement produces: decisions, assessments, findings. Exporters and replay read these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from agent.records import GpuKey

#: Numbers and short words against the GPU's own baseline, by name with the unit in it.
Evidence = Mapping[str, float | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one GPU is doing, by the evidence of one moment and the ones before.

    `probabilities` (telemetry and declared evidence combined) and `telemetry_probabilities` are running means over
    about 30 s; they hold exactly the four words of vocabulary.CLASSES and sum to 1, or are None with a `reason`.
    `workload` is the smoothed label. A word other than `unknown` has probabilities, of which its own is the highest,
    and no reason; `unknown` always has a reason.
    """

    key: GpuKey
    monotonic_s: float
    wall_s: float
    workload: str
    probabilities: Mapping[str, float] | None
    telemetry_probabilities: Mapping[str, float] | None
    window_s: float
    reason: str | None  # short fixed word: one of classifier.labeller.REASONS
    since_monotonic_s: float  # since when `workload` holds
    since_wall_s: float
    features: Mapping[str, float] = field(default_factory=dict)  # the ones that decided first; NaN is left out
    explanation: tuple[str, ...] = ()  # what decided, in words: three features at most, after a declaration that did
    out_of_domain_ratio: float | None = None  # distance over the refusal threshold; above 1 is refused
    declared_class: str | None = None  # what the holders of the GPU declare: training, inference or other
    mismatch: bool | None = None  # whether telemetry has disagreed with that for long; None: nothing is declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What one detector says about one scope at one moment; none at all where it cannot see the scope.

    `severity` is 0 nothing, 1 info, 2 warning, 3 critical. Exactly one of `key` (scope gpu), `device` (scope node,
    "" for the node itself) and `job_key` (scope job) is set.
    """

    anomaly: str
    scope: str
    severity: int
    key: GpuKey | None = None
    device: str | None = None
    job_key: str | None = None
    since_monotonic_s: float | None = None  # when the condition began, not when it was confirmed
    since_wall_s: float | None = None
    evidence: Evidence = field(default_factory=dict)
    action: str = "none"  # a word of vocabulary.ACTIONS
    summary: str = ""  # one sentence for a person, with the numbers
    suspect: bool = False  # this GPU is the odd one out of its group

    @property
    def identity(self) -> tuple[str, GpuKey | str | None]:
        """Anomaly and subject: what stays the same while the anomaly lasts."""
        subject = self.key if self.scope == "gpu" else self.device if self.scope == "node" else self.job_key
        return self.anomaly, subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One anomaly from its confirmation to its end: what `replay --json` prints and the counters count.

    `start_monotonic_s` is when the condition began; `end_monotonic_s` is None while it lasts; `severity` is the
    highest one reached so far.
    """

    anomaly: str
    scope: str
    severity: int
    key: GpuKey | None
    device: str | None
    job_key: str | None
    start_monotonic_s: float
    start_wall_s: float
    end_monotonic_s: float | None
    evidence: Evidence
    action: str
    summary: str
    suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    """What is known of the checkpoints of one job whose cadence is known."""

    job_key: str
    last_wall_s: float | None  # end of the last one; None where none was seen since the agent started
    deadline_wall_s: float | None  # when the next one is late; moves on while the job stands still
    interval_s: float | None
    last_size_bytes: float | None
    total: int  # since the job was first seen


@runtime_checkable
class KnowsCheckpoints(Protocol):
    """A detector that knows about checkpoints, for those who show them."""

    @property
    def checkpoints(self) -> tuple[CheckpointStatus, ...]:
        """What is known of the checkpoints of each job whose cadence is known."""
        ...
