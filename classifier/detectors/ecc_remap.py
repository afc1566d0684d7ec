"""ecc_remap: memory errors that ECC could not correct, rows that wait for a spare one, storms of corrected errors.

Sees the error counters and marks of each card (GpuHealth, every 5 s) and the XIDs about memory. Severity after
SIGNALS 6d and the XID catalogue: 3 for uncorrectable errors that are new and for a row that has no spare one; 2 for a
row that waits for the next reset (drain the card, then reset it), for a contained error (XID 94) and for a storm of
corrected errors; 1 for a row that was replaced (XID 63) and for what happened before the agent started. New errors
count until the card was reset, at most for `hold_seconds`; the marks count as long as they are set, whoever saw
them come.

Cannot see: boards without ECC, or with ECC switched off. Corrected errors are judged by their rate over an hour, never
by their number, for a healthy board has some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuHealth, GpuKey
from agent.xids import XIDS, XidCatalogue
from classifier.config_checks import require
from classifier.detectors.card_watch import RECOVERY_ACTIONS, Cards, CardWatch, Claim, Freshness, Verdicts, xid_claims
from classifier.results import Assessment, Decision

_HEALTH_STALE_S: Final = 60.0
#: Corrected errors are summed over parts of this length of `storm_seconds`.
_STORM_PARTS: Final = 60
#: XIDs of an error that took more than one program's data with it.
_ESCAPED: Final = frozenset({48, 95, 140})
_CONTAINED: Final = 94


@dataclass(frozen=True, slots=True, kw_only=True)
class EccRemapConfig:
    """When memory errors are worth a word, a warning, a page."""

    enabled: bool = True
    #: New uncorrectable errors and XIDs count this long, unless the card was reset before.
    hold_seconds: float = 86400.0
    #: Corrected errors in `storm_seconds` that are a storm: a start value of ours, no vendor names one.
    storm_errors: int = 100
    #: Time over which corrected errors are summed.
    storm_seconds: float = 3600.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.hold_seconds > 0, "hold_seconds", self.hold_seconds, "above 0")
        require(self.storm_errors >= 1, "storm_errors", self.storm_errors, "at least 1")
        require(self.storm_seconds >= 60, "storm_seconds", self.storm_seconds, "at least 60")


@dataclass(slots=True)
class _Counter:
    """A counter of errors: what came since first sight, and since when."""

    last: int | None = None
    new: int = 0
    since: Instant | None = None
    newest_s: float = 0.0

    def take(self, value: int | None, now: Instant) -> int:
        """Take a reading and return what is new in it; a counter that fell has begun anew, at 0."""
        if value is None:
            return 0
        added = 0 if self.last is None else value if value < self.last else value - self.last
        self.last = value
        if added:
            self.new += added
            self.since = self.since or now
            self.newest_s = now.monotonic_s
        return added

    def settle(self) -> None:
        self.new, self.since = 0, None


@dataclass(slots=True)
class _Card:
    watch: CardWatch
    health: Freshness = field(default_factory=lambda: Freshness(_HEALTH_STALE_S))
    seen: GpuHealth | None = None
    volatile: _Counter = field(default_factory=_Counter)
    aggregate: _Counter = field(default_factory=_Counter)
    corrected: _Counter = field(default_factory=_Counter)
    #: Corrected errors by part of the storm's time: when the part began, and how many.
    parts: deque[tuple[float, int]] = field(default_factory=deque)
    volatile_before: int | None = None  # at first sight
    first: Instant | None = None
    tells: bool = False  # whether the board tells anything about its memory
    is_fresh: bool = False
    is_marked: bool = False  # whether anything but zeros was told, so that it has to be weighed
    pending_since: Instant | None = None
    failed_since: Instant | None = None
    storm_since: Instant | None = None


class EccRemapDetector:
    """Says for every GPU whether its memory can be trusted."""

    anomalies: tuple[str, ...] = ("ecc_remap",)

    def __init__(self, config: EccRemapConfig, xids: XidCatalogue = XIDS) -> None:
        self._config = config
        self._xids = xids
        self._places = Cards()
        self._cards: dict[GpuKey, _Card] = {}
        self._verdicts = Verdicts("ecc_remap")

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:  # noqa: ARG002
        """Return one assessment for each GPU with error counters, marks of rows, or XIDs about its memory."""
        assessments: list[Assessment] = []
        for card, keys in self._places.of(history):
            if card.health is None and card.xids is None:
                continue
            known = self._cards.get(card.key)
            if known is None:
                watch = CardWatch(self._xids, self._config.hold_seconds, memory=True)
                known = self._cards[card.key] = _Card(watch)
            claims = self._claims(known, card, now)
            if claims:
                assessments += self._verdicts.of(keys, claims, self._evidence(known, card))
            elif known.tells and known.is_fresh:
                assessments += [self._verdicts.nothing(key) for key in keys]
        return tuple(assessments)

    def _claims(self, known: _Card, card: GpuHistory, now: Instant) -> list[Claim]:
        news = known.watch.update(card, now)
        health = card.health
        if health is not None and health is not known.seen:
            self._take(known, health, now)
        if known.watch.was_reset:
            known.aggregate.settle()
            if not known.volatile.last:
                known.volatile.settle()
        known.is_fresh = health is not None and known.health.is_fresh(health.monotonic_s, now.monotonic_s)
        if not news and not known.is_marked:
            return []
        claims = xid_claims(news)
        if known.seen is None or not known.is_fresh:
            return claims
        for counter in (known.volatile, known.aggregate):
            if counter.since is not None and now.monotonic_s - counter.newest_s > self._config.hold_seconds:
                counter.settle()
        claims += self._counter_claims(known)
        claims += self._mark_claims(known, known.seen, now)
        asked = card.limits.recovery_action if card.limits is not None else None
        if asked:
            action = RECOVERY_ACTIONS.get(asked, "look")
            claims = [claim._replace(action=action) if _is_open(claim) else claim for claim in claims]
        return claims

    def _take(self, known: _Card, health: GpuHealth, now: Instant) -> None:
        if known.first is None:
            known.first, known.volatile_before = now, health.ecc_uncorrected_volatile_total
        known.seen = health
        volatile = health.ecc_uncorrected_volatile_total
        if volatile is not None and known.volatile.last is not None and volatile < known.volatile.last:
            known.volatile.settle()  # what came before was of before the reset
            known.volatile_before = 0
        known.volatile.take(volatile, now)
        aggregate = health.ecc_uncorrected_aggregate_total
        known.aggregate.take(aggregate, now)
        self._take_corrected(known, known.corrected.take(_corrected(health), now), now.monotonic_s)
        known.tells = _tells(health)
        known.is_marked = bool(
            known.volatile.since
            or known.aggregate.since
            or known.volatile_before
            or known.parts
            or health.is_row_remap_pending
            or health.is_row_remap_failed
        )

    def _take_corrected(self, known: _Card, added: int, now_s: float) -> None:
        parts = known.parts
        if added:
            if parts and now_s - parts[-1][0] < self._config.storm_seconds / _STORM_PARTS:
                parts[-1] = parts[-1][0], parts[-1][1] + added
            else:
                parts.append((now_s, added))
        while parts and parts[0][0] <= now_s - self._config.storm_seconds:
            parts.popleft()

    def _counter_claims(self, known: _Card) -> list[Claim]:
        counter = known.volatile if known.volatile.last is not None else known.aggregate
        if counter.new and counter.since is not None:
            codes = {one.code for one in known.watch.news if not one.before_start}
            is_contained = _CONTAINED in codes and not codes & _ESCAPED
            action = "restart_app" if is_contained else "reset_gpu"
            text = f"{counter.new} new uncorrectable memory error{'s' if counter.new > 1 else ''}"
            return [Claim(3, action, text, counter.since)]
        if known.volatile_before and known.volatile.last and known.first is not None:
            text = f"{known.volatile.last} uncorrectable memory errors since the driver was loaded, none of them new"
            return [Claim(1, "look", text, known.first, before_start=True)]
        return []

    def _mark_claims(self, known: _Card, health: GpuHealth, now: Instant) -> list[Claim]:
        claims: list[Claim] = []
        known.failed_since = (known.failed_since or now) if health.is_row_remap_failed else None
        known.pending_since = (known.pending_since or now) if health.is_row_remap_pending else None
        if known.failed_since is not None:
            text = "a row of memory could not be replaced, for want of spare ones"
            claims.append(Claim(3, "replace_hardware", text, known.failed_since))
        if known.pending_since is not None:
            text = "a row of memory waits for the next reset to be replaced: drain the GPU, then reset it"
            claims.append(Claim(2, "reset_gpu", text, known.pending_since))
        errors = sum(count for _, count in known.parts)
        limit = self._config.storm_errors
        if errors >= limit or (known.storm_since is not None and errors > limit / 2):
            known.storm_since = known.storm_since or now
            minutes = self._config.storm_seconds / 60
            claims.append(Claim(2, "look", f"{errors} corrected memory errors in {minutes:.0f} min", known.storm_since))
        else:
            known.storm_since = None
        return claims

    def _evidence(self, known: _Card, card: GpuHistory) -> dict[str, float | str | None]:
        health = known.seen
        counter = known.volatile if known.volatile.last is not None else known.aggregate
        return {
            "uncorrected_new": None if counter.last is None else float(counter.new),
            "uncorrected_volatile": None if health is None else health.ecc_uncorrected_volatile_total,
            "uncorrected_aggregate": None if health is None else health.ecc_uncorrected_aggregate_total,
            "corrected_recent": None if known.corrected.last is None else float(sum(n for _, n in known.parts)),
            "remapped_rows_uncorrectable": None if health is None else health.remapped_rows_uncorrectable_total,
            "row_remap_pending": None if health is None else _number(health.is_row_remap_pending),
            "row_remap_failure": None if health is None else _number(health.is_row_remap_failed),
            "xids": " ".join(str(one.code) for one in known.watch.news) or None,
            "recovery_action": None if card.limits is None else card.limits.recovery_action,
        }


def _is_open(claim: Claim) -> bool:
    """Return whether what the driver asks for may be about this claim; a new board is more than it asks for."""
    return claim.severity >= 2 and not claim.before_start and claim.action in ("reset_gpu", "look")


def _tells(health: GpuHealth) -> bool:
    """Return whether a board tells anything about its memory."""
    return not (
        health.ecc_uncorrected_volatile_total is None
        and health.ecc_uncorrected_aggregate_total is None
        and health.is_row_remap_pending is None
        and health.is_row_remap_failed is None
    )


def _corrected(health: GpuHealth) -> int | None:
    volatile = health.ecc_corrected_volatile_total
    return health.ecc_corrected_aggregate_total if volatile is None else volatile


def _number(mark: bool | None) -> float | None:
    return None if mark is None else float(mark)
