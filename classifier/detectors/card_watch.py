"""What detectors of hardware faults share: XIDs that are news, and whether a card was reset since.

Faults belong to the card. Where a card is divided its instances have the anomalies, each the card's (DESIGN.md, Names).

What was there before the agent started is no news: an XID whose time is earlier, an error counter that was above zero
at first sight. News lasts until the card was reset, which shows in a counter that the driver starts anew, or in a card
that was lost and answers again; and at most for as long as the detector says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey, GpuXids
from agent.xids import XidCatalogue
from classifier.results import Assessment

#: XIDs about the card's memory, as docs/xids.md explains them: 48 with its details 171 and 172, remapping, containment.
MEMORY_XIDS: Final = frozenset({48, 63, 64, 92, 94, 95, 140, 168, 171, 172})
#: XIDs about NVLink (74, 136, 155; 144 to 150 are NVLink 5) and the link between CPU and GPU (121).
LINK_XIDS: Final = frozenset({74, 121, 136, *range(144, 151), 155})
#: XIDs of kind hardware that say nothing about whether the card can be used: wear of power smoothing.
WEAR_XIDS: Final = frozenset({164, 165})
#: Codes without kind hardware that count all the same: a row was remapped.
_INFO_XIDS: Final = frozenset({63})

#: An XID that is this much older than the first look is from before the start: sources are opened one after another.
_START_SLACK_S: Final = 60.0
#: A record that came this many times its usual distance ago says nothing about now.
_STALE_INTERVALS: Final = 3.0

#: What the driver asks for (NVML field 230) as words of the vocabulary.
RECOVERY_ACTIONS: Final[Mapping[int, str]] = {1: "reset_gpu", 2: "reboot_node", 3: "reset_gpu", 4: "reset_gpu"}
#: From the mildest to the most drastic one.
_ACTION_ORDER: Final = ("none", "look", "restart_app", "contact_user", "reset_gpu", "reboot_node", "replace_hardware")


class XidNews(NamedTuple):
    """One XID of a card that has not been settled."""

    code: int
    events: int  # since the agent started; 0 for one from before
    since: Instant  # of the first event that was seen
    action: str
    severity: int  # 3 where the catalogue calls it critical, 2 for other hardware errors, 1 for the rest
    name: str
    before_start: bool


class Claim(NamedTuple):
    """One reason for a finding: the claims of one card become one assessment, that of the most severe first."""

    severity: int
    action: str
    text: str  # goes into the summary after "GPU 3: "
    since: Instant
    before_start: bool = False


class Freshness:
    """Says whether the newest record of a source is young enough to be judged, by their usual distance."""

    __slots__ = ("_gap_s", "_least_s", "_time_s")

    def __init__(self, least_seconds: float) -> None:
        """Take what came less than `least_seconds` ago in any case."""
        self._least_s = least_seconds
        self._time_s: float | None = None
        self._gap_s = 0.0

    def is_fresh(self, time_s: float | None, now_s: float) -> bool:
        """Take the time of the newest record and return whether it still says something about `now_s`."""
        if time_s is None:
            return False
        if self._time_s is not None and time_s > self._time_s:
            # After a long silence the next one must not look usual.
            self._gap_s = min(time_s - self._time_s, 600.0)
        self._time_s = time_s
        return now_s - time_s <= max(self._least_s, _STALE_INTERVALS * self._gap_s)


class CardWatch:
    """Follows one card: which XIDs among `codes` are news, and when it was last reset."""

    def __init__(self, xids: XidCatalogue, hold_seconds: float, *, memory: bool = False, link: bool = False) -> None:
        """Watch the codes about memory, about links, or with neither those about the rest of the card."""
        self._xids = xids
        self._hold_s = hold_seconds
        self._memory, self._link = memory, link
        self._totals: dict[int, int] | None = None
        self._news: dict[int, XidNews] = {}
        self._last_s: dict[int, float] = {}  # of the newest event, monotonic
        self._first: Instant | None = None
        self._seen: GpuXids | None = None
        self._joules: float | None = None
        self._volatile: int | None = None
        self._state = "ok"
        #: What the last call of `update` returned.
        self.news: tuple[XidNews, ...] = ()
        self.was_reset = False  # between the last call of `update` and the one before

    def update(self, card: GpuHistory, now: Instant) -> tuple[XidNews, ...]:
        """Take what is new on the card and return the XIDs that are not settled, the most severe first."""
        if self._first is None:
            self._first = now
        self.was_reset = self._notice_reset(card)
        is_changed = self.was_reset and bool(self._news)
        if self.was_reset:
            self._news.clear()
        xids = card.xids
        if xids is not None and xids is not self._seen:
            # The same counts come every five seconds.
            if self._seen is None or xids.totals != self._seen.totals or xids.last_wall_s != self._seen.last_wall_s:
                self._take(xids.totals, xids.last_wall_s, now)
                is_changed = True
            self._seen = xids
        if self._last_s:
            for code in [code for code, last_s in self._last_s.items() if now.monotonic_s - last_s > self._hold_s]:
                is_changed |= self._news.pop(code, None) is not None
                del self._last_s[code]
        if is_changed:
            self.news = tuple(
                sorted(self._news.values(), key=lambda one: (-one.severity, one.since.monotonic_s, one.code))
            )
        return self.news

    def _notice_reset(self, card: GpuHistory) -> bool:
        """Return whether the driver began to count anew, or a card that was away answers."""
        found = False
        if card.slow is not None and card.slow.energy_joules_total is not None:
            joules = card.slow.energy_joules_total
            found = self._joules is not None and joules < self._joules
            self._joules = joules
        if card.health is not None and card.health.ecc_uncorrected_volatile_total is not None:
            volatile = card.health.ecc_uncorrected_volatile_total
            found = found or (self._volatile is not None and volatile < self._volatile)
            self._volatile = volatile
        if card.state != self._state:
            found = found or (self._state in ("lost", "reset_required") and card.state == "ok")
            self._state = card.state
        return found

    def _take(self, totals: Mapping[int, int], last_wall_s: Mapping[int, float], now: Instant) -> None:
        before = self._totals
        self._totals = dict(before or {})
        start_wall_s = now.wall_s if self._first is None else self._first.wall_s
        for code in totals.keys() | last_wall_s.keys():
            count, wall_s = totals.get(code, 0), last_wall_s.get(code)
            seen = self._totals.get(code, 0)
            self._totals[code] = max(count, seen)
            if not self._counts(code):
                continue
            is_new = count > seen
            if before is None and wall_s is not None and wall_s < start_wall_s - _START_SLACK_S:
                is_new = False  # counted by an agent whose record this is, long before the first look at it
            if is_new:
                self._note(code, count, wall_s, now, before_start=False)
            elif before is None and (count or wall_s is not None):
                self._note(code, count, wall_s, now, before_start=True)

    def _note(self, code: int, count: int, wall_s: float | None, now: Instant, *, before_start: bool) -> None:
        age_s = 0.0 if wall_s is None else max(0.0, now.wall_s - wall_s)
        if not before_start:
            # An event that was counted since the last look is not older than the watch, whatever the clock says.
            first_s = now.monotonic_s if self._first is None else self._first.monotonic_s
            age_s = min(age_s, now.monotonic_s - first_s + _START_SLACK_S)
        if age_s > self._hold_s:
            return
        meaning = self._xids[code]
        self._last_s[code] = now.monotonic_s - age_s
        known = self._news.get(code)
        severity = 3 if meaning.is_critical else 2 if meaning.kind == "hardware" else 1
        since = now.later(-age_s) if known is None or known.before_start else known.since
        self._news[code] = XidNews(
            code,
            count,
            since,
            meaning.action,
            min(severity, 1) if before_start else severity,
            meaning.name,
            before_start,
        )

    def _counts(self, code: int) -> bool:
        kind = self._xids[code].kind
        if kind == "application" or (kind != "hardware" and code not in _INFO_XIDS):
            return False
        if self._memory:
            return code in MEMORY_XIDS
        if self._link:
            return code in LINK_XIDS
        return code not in MEMORY_XIDS and code not in LINK_XIDS and code not in WEAR_XIDS


def xid_claims(news: Iterable[XidNews]) -> list[Claim]:
    """Return one claim for each XID."""
    claims = []
    for one in news:
        times = "" if one.events <= 1 else f" {one.events} times"
        when = " before the agent started" if one.before_start else ""
        text = f"XID {one.code}{times}{when} ({one.name})"
        claims.append(Claim(one.severity, one.action, text, one.since, one.before_start))
    return claims


def more_drastic(one: str, other: str) -> str:
    """Return the action of the two that takes more from its work."""
    return max(one, other, key=_ACTION_ORDER.index)


class Cards:
    """Where the anomalies of each card go: to itself, or to its instances where it is divided."""

    def __init__(self) -> None:
        self._gpus: Mapping[GpuKey, GpuHistory] | None = None
        self._count = 0
        self._found: tuple[tuple[GpuHistory, tuple[GpuKey, ...]], ...] = ()

    def of(self, history: History) -> tuple[tuple[GpuHistory, tuple[GpuKey, ...]], ...]:
        """Return every card with its places; made anew only when they change."""
        gpus = history.gpus
        if gpus is not self._gpus or len(gpus) != self._count:
            places: dict[GpuKey, list[GpuKey]] = {}
            for key in gpus:
                places.setdefault(card_key(key), []).append(key)
            found = ((history.card(key), tuple(keys)) for key, keys in places.items())
            self._found = tuple((card, keys) for card, keys in found if card is not None)
            self._gpus, self._count = gpus, len(gpus)
        return self._found


def card_key(key: GpuKey) -> GpuKey:
    """Return the key of the whole card."""
    return key if key.gpu_i_id is None else key._replace(gpu_i_id=None)


class Answers:
    """Lets a detector of slow anomalies look every so often, and gives what it said in between."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last_s: float | None = None
        self._gpus: Mapping[GpuKey, GpuHistory] | None = None
        self._said: Sequence[Assessment] = ()

    def of(self, now: Instant, history: History, look: Callable[[], Sequence[Assessment]]) -> Sequence[Assessment]:
        """Return what `look` says, asked again when it is time (half a second early counts), or the GPUs are others."""
        last_s = self._last_s
        if last_s is None or now.monotonic_s - last_s >= self._seconds - 0.5 or history.gpus is not self._gpus:
            self._last_s, self._gpus = now.monotonic_s, history.gpus
            self._said = look()
        return self._said


class Verdicts:
    """Makes assessments out of claims; those that say nothing are made once for each scope."""

    def __init__(self, anomaly: str) -> None:
        self._anomaly = anomaly
        self._nothing: dict[GpuKey, Assessment] = {}

    def nothing(self, key: GpuKey) -> Assessment:
        """Return the assessment that all is well with this GPU."""
        found = self._nothing.get(key)
        if found is None:
            if len(self._nothing) > 1024:  # layouts come and go
                self._nothing.clear()
            found = self._nothing[key] = Assessment(anomaly=self._anomaly, scope="gpu", severity=0, key=key)
        return found

    def of(
        self, keys: Iterable[GpuKey], claims: Sequence[Claim], evidence: Mapping[str, float | str | None]
    ) -> list[Assessment]:
        """Return the same for each of `keys`: severity of the worst claim, the most drastic action of its like."""
        if not claims:
            return [self.nothing(key) for key in keys]
        worst = max(claim.severity for claim in claims)
        ordered = sorted(claims, key=lambda claim: -claim.severity)
        leading = [claim for claim in ordered if claim.severity == worst]
        action = leading[0].action
        for claim in leading[1:]:
            action = more_drastic(action, claim.action)
        since = min((claim.since for claim in leading), key=lambda since: since.monotonic_s)
        told = dict(evidence)
        if "xids" in told:
            told["before_start"] = float(all(claim.before_start for claim in leading))
        text = "; ".join(claim.text for claim in ordered[:4])
        return [
            Assessment(
                anomaly=self._anomaly,
                scope="gpu",
                severity=worst,
                key=key,
                since_monotonic_s=since.monotonic_s,
                since_wall_s=since.wall_s,
                evidence=told,
                action=action,
                summary=f"GPU {key.gpu}: {text}.",
            )
            for key in keys
        ]
