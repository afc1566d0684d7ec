"""gpu_lost: a GPU that the driver cannot reach, that does not answer, or that has to be reset before it can be used.

Sees the state of each card (NVML), what the driver asks for (field 230, recovery action), and XIDs of the kind hardware
that are about neither memory (`ecc_remap`) nor links (`link_errors`); what a program did to itself never counts. A
state counts at once, but a card that hangs may be a driver that is busy: it is a warning until `hung_seconds`. An XID
counts with the action of the catalogue until the card was reset, at most for `xid_hold_seconds`; one from before the
agent started is information. Severity: 3 by state, by XIDs the catalogue calls critical, by a recovery action of reset
or reboot; 2 by other hardware XIDs and by a recovery action that lets work end first.

Cannot see: a card that was away before the agent started (`warpwatch_gpus_visible` tells that), and anything in a log
that holds neither states nor XIDs: there is no assessment then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey
from agent.xids import XIDS, XidCatalogue
from classifier.config_checks import require
from classifier.detectors.card_watch import (
    RECOVERY_ACTIONS,
    Cards,
    CardWatch,
    Claim,
    Freshness,
    Verdicts,
    xid_claims,
)
from classifier.results import Assessment, Decision

#: States are told every second and limits every minute: older ones are none.
_STATE_STALE_S: Final = 15.0
_LIMITS_STALE_S: Final = 180.0
#: Recovery actions that do not wait for work to end: reset, reboot. 3 (drain P2P) is about links, 4 waits.
_AT_ONCE: Final = frozenset({1, 2})
_STATE_TEXT: Final = {
    "lost": "the driver does not reach it any more",
    "hung": "it does not answer",
    "reset_required": "the driver says that it has to be reset",
}
_STATE_ACTION: Final = {"lost": "reboot_node", "hung": "look", "reset_required": "reset_gpu"}
_RECOVERY_TEXT: Final = {
    1: "the driver asks for a reset",
    2: "the driver asks for a reboot",
    4: "the driver asks to drain and reset it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLostConfig:
    """When a GPU counts as lost."""

    enabled: bool = True
    #: A card that does not answer is a warning until it has not answered this long.
    hung_seconds: float = 15.0
    #: An XID counts this long after its last event, unless the card was reset before.
    xid_hold_seconds: float = 86400.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.hung_seconds >= 0, "hung_seconds", self.hung_seconds, "at least 0")
        require(self.xid_hold_seconds > 0, "xid_hold_seconds", self.xid_hold_seconds, "above 0")


@dataclass(slots=True)
class _Card:
    watch: CardWatch
    states: Freshness = field(default_factory=lambda: Freshness(_STATE_STALE_S))
    limits: Freshness = field(default_factory=lambda: Freshness(_LIMITS_STALE_S))
    state: str = "ok"
    state_since: Instant | None = None
    recovery: int = 0
    recovery_since: Instant | None = None


class GpuLostDetector:
    """Says for every GPU whether it is there and can be used."""

    anomalies: tuple[str, ...] = ("gpu_lost",)

    def __init__(self, config: GpuLostConfig, xids: XidCatalogue = XIDS) -> None:
        self._config = config
        self._xids = xids
        self._places = Cards()
        self._cards: dict[GpuKey, _Card] = {}
        self._verdicts = Verdicts("gpu_lost")

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:  # noqa: ARG002
        """Return one assessment for each GPU of which a state or XIDs are told."""
        assessments: list[Assessment] = []
        for card, keys in self._places.of(history):
            if card.state_s is None and card.xids is None:
                continue
            known = self._cards.get(card.key)
            if known is None:
                watch = CardWatch(self._xids, self._config.xid_hold_seconds)
                known = self._cards[card.key] = _Card(watch)
            news = known.watch.update(card, now)
            is_told = known.states.is_fresh(card.state_s, now.monotonic_s)
            if not news and is_told and card.state == known.state == "ok" and _asks_nothing(card):
                assessments += [self._verdicts.nothing(key) for key in keys]
                known.recovery = 0
                continue
            claims = xid_claims(news)
            claims += self._state_claims(known, card, now) if is_told else []
            if not claims and card.state_s is not None and not is_told:
                continue  # nobody tells how it is
            recovery_claims = self._recovery_claims(known, card, now)
            if any(claim.severity >= 2 for claim in recovery_claims):
                action = recovery_claims[0].action
                claims = [claim._replace(action=action) if claim.severity == 3 else claim for claim in claims]
            claims += recovery_claims
            assessments += self._verdicts.of(keys, claims, self._evidence(known, card, now) if claims else {})
        return tuple(assessments)

    def _state_claims(self, known: _Card, card: GpuHistory, now: Instant) -> list[Claim]:
        if card.state != known.state or known.state_since is None:
            known.state, known.state_since = card.state, now
        if card.state == "ok":
            return []
        lasted_s = now.monotonic_s - known.state_since.monotonic_s
        severity = 2 if card.state == "hung" and lasted_s < self._config.hung_seconds else 3
        action = _STATE_ACTION.get(card.state, "look")
        if card.state == "hung" and severity == 3:
            action = "reboot_node"
        text = _STATE_TEXT.get(card.state, f"its state is {card.state}")
        return [Claim(severity, action, text, known.state_since)]

    def _recovery_claims(self, known: _Card, card: GpuHistory, now: Instant) -> list[Claim]:
        limits = card.limits
        recovery = limits.recovery_action if limits is not None else None
        if limits is None or not recovery or not known.limits.is_fresh(limits.monotonic_s, now.monotonic_s):
            known.recovery, known.recovery_since = 0, None
            return []
        if recovery != known.recovery or known.recovery_since is None:
            known.recovery, known.recovery_since = recovery, now
        text = _RECOVERY_TEXT.get(recovery)
        is_memory = recovery == 4 and card.health is not None and bool(card.health.is_row_remap_pending)
        if text is None or is_memory:
            return []  # link_errors and ecc_remap tell of these
        severity = 3 if recovery in _AT_ONCE else 2
        return [Claim(severity, RECOVERY_ACTIONS[recovery], text, known.recovery_since)]

    def _evidence(self, known: _Card, card: GpuHistory, now: Instant) -> dict[str, float | str | None]:
        codes = [str(one.code) for one in known.watch.news]
        since = known.state_since
        return {
            "state": card.state if card.state_s is not None else None,
            "state_seconds": None if since is None else now.monotonic_s - since.monotonic_s,
            "xids": " ".join(codes) or None,
            "recovery_action": None if card.limits is None else card.limits.recovery_action,
            "last_sample_age_seconds": None if card.last_s is None else now.monotonic_s - card.last_s,
        }


def _asks_nothing(card: GpuHistory) -> bool:
    return card.limits is None or not card.limits.recovery_action
