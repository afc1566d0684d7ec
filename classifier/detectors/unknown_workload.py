"""unknown_workload: the model has not known for a quarter of an hour what a GPU does.

Sees the labels. After SIGNALS 6d: more than 80 % of the last 15 minutes `unknown` because the model abstained (work out
of its domain, or evidence for two classes alike) is information: a workload of a kind it was not trained on. Time in
which nobody could know (a gap in telemetry, a GPU that is lost, too few samples or channels, no model) is not counted,
and with less than half the time left nothing is said. It is never more than information.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.clock import Instant
from agent.history import History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.card_watch import Claim, Verdicts
from classifier.labeller import OUT_OF_DOMAIN
from classifier.results import Assessment, Decision
from classifier.smoothing import AMBIGUOUS

#: Reasons that say something about the work, and not about what is measured.
_ABSTAINED: Final = frozenset({AMBIGUOUS, OUT_OF_DOMAIN})
#: A judgement stands for no more than this: what lies between two that are further apart is a gap.
_LONGEST_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownWorkloadConfig:
    """When abstaining is worth a word."""

    enabled: bool = True
    #: Time over which the share is taken.
    window_seconds: float = 900.0
    #: Share of it without a label.
    abstention_ratio: float = 0.8
    #: Least share of the window in which a label could be given.
    judged_ratio: float = 0.5

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.window_seconds > 0, "window_seconds", self.window_seconds, "above 0")
        require(0 < self.abstention_ratio < 1, "abstention_ratio", self.abstention_ratio, "between 0 and 1")
        require(0 < self.judged_ratio <= 1, "judged_ratio", self.judged_ratio, "above 0 and at most 1")


@dataclass(slots=True)
class _Share:
    """Judged and unknown time of the window, kept as sums."""

    parts: deque[tuple[float, float, bool, bool]] = field(default_factory=deque)  # until, seconds, unknown, by domain
    first_s: float | None = None  # of the first judgement that counts
    last_s: float | None = None
    judged_s: float = 0.0
    unknown_s: float = 0.0
    out_of_domain_s: float = 0.0
    since: Instant | None = None


class UnknownWorkloadDetector:
    """Says for every GPU whether the model is at a loss."""

    anomalies: tuple[str, ...] = ("unknown_workload",)

    def __init__(self, config: UnknownWorkloadConfig) -> None:
        self._config = config
        self._shares: dict[GpuKey, _Share] = {}
        self._verdicts = Verdicts("unknown_workload")

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return one assessment for each GPU that had labels, or could have had them, for long enough."""
        for gone in self._shares.keys() - history.gpus.keys():
            del self._shares[gone]
        assessments: list[Assessment] = []
        for key in history.gpus:
            decision = decisions.get(key)
            share = self._shares.setdefault(key, _Share())
            is_judged = self._take(share, decision, now)
            if not is_judged or share.judged_s < self._config.judged_ratio * self._config.window_seconds:
                continue
            assessments += self._verdicts.of([key], self._claims(share, now), self._evidence(share, decision))
        return tuple(assessments)

    def _take(self, share: _Share, decision: Decision | None, now: Instant) -> bool:
        """Book the time since the last call and return whether the model judges now."""
        last_s, share.last_s = share.last_s, now.monotonic_s
        elapsed_s = 0.0 if last_s is None else now.monotonic_s - last_s
        is_unknown = decision is not None and decision.workload == "unknown"
        is_judged = decision is not None and (not is_unknown or decision.reason in _ABSTAINED)
        if is_judged and 0 < elapsed_s <= _LONGEST_S:
            is_outside = is_unknown and decision is not None and decision.reason == OUT_OF_DOMAIN
            share.first_s = share.first_s or last_s
            share.parts.append((now.monotonic_s, elapsed_s, is_unknown, is_outside))
            self._add(share, share.parts[-1], 1)
        while share.parts and share.parts[0][0] <= now.monotonic_s - self._config.window_seconds:
            self._add(share, share.parts.popleft(), -1)
        return is_judged

    def _add(self, share: _Share, part: tuple[float, float, bool, bool], sign: int) -> None:
        _, seconds, is_unknown, is_outside = part
        share.judged_s += sign * seconds
        share.unknown_s += sign * seconds * is_unknown
        share.out_of_domain_s += sign * seconds * is_outside

    def _claims(self, share: _Share, now: Instant) -> list[Claim]:
        ratio = share.unknown_s / share.judged_s
        # Once said, it holds until the labels are back for good.
        is_short = share.first_s is None or now.monotonic_s - share.first_s < self._config.window_seconds
        if is_short or ratio <= self._config.abstention_ratio * (1.0 if share.since is None else 0.75):
            share.since = None
            return []
        share.since = share.since or now.later(share.parts[0][0] - now.monotonic_s)
        text = (
            f"what it does was unknown for {100 * ratio:.0f} % of the last {self._config.window_seconds / 60:.0f} min"
        )
        return [Claim(1, "look", text, share.since)]

    def _evidence(self, share: _Share, decision: Decision | None) -> dict[str, float | str | None]:
        if share.since is None:
            return {}
        return {
            "unknown_ratio": share.unknown_s / share.judged_s,
            "out_of_domain_ratio": share.out_of_domain_s / share.judged_s,
            "judged_seconds": share.judged_s,
            "reason": None if decision is None else decision.reason,
        }
