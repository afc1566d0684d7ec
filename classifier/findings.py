"""From assessments, which are made every few seconds, to findings, which have a beginning and an end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.clock import Instant
from agent.records import GpuKey
from classifier.results import Assessment, Finding

Identity = tuple[str, GpuKey | str | None]
TotalKey = tuple[str, str, GpuKey | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingsConfig:
    """How long a finding outlives its last sighting."""

    #: A subject that cannot be seen keeps its finding this long; then the finding ends at its last sighting.
    out_of_sight_seconds: float = 900.0
    #: Identities whose totals are kept; the ones not heard of for longest go first.
    max_identities: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingEvent:
    """A change of one finding: `active` when it begins or grows more severe, `resolved` when it ends."""

    state: str
    now: Instant
    finding: Finding


@dataclass(slots=True)
class _Open:
    finding: Finding
    seen_s: float = field(default=0.0)


class FindingTracker:
    """Keeps the open findings and counts all of them since the start.

    Severity 0 ends a finding at once: detectors confirm and clear by themselves. A missing assessment means that
    nobody can see the subject, which is no reason to call it well: the finding stays open for
    `out_of_sight_seconds` and then ends at its last sighting. A falling severity changes nothing; a rising one is a new
    `active` event of the same finding, with the same start.
    """

    def __init__(self, config: FindingsConfig | None = None) -> None:
        self._config = config or FindingsConfig()
        self._open: dict[Identity, _Open] = {}
        self._totals: OrderedDict[TotalKey, int] = OrderedDict()

    @property
    def active(self) -> tuple[Finding, ...]:
        """Findings that last, in order of their beginning."""
        return tuple(entry.finding for entry in self._open.values())

    @property
    def totals(self) -> Mapping[TotalKey, int]:
        """Findings since the start by (anomaly, scope, subject); 0 for what was looked at and never found."""
        return dict(self._totals)

    def update(self, now: Instant, assessments: Sequence[Assessment]) -> tuple[FindingEvent, ...]:
        """Take all assessments of one moment and return what changed, in their order."""
        events: list[FindingEvent] = []
        for assessment in assessments:
            event = self._take(now, assessment)
            if event is not None:
                events.append(event)
        for identity, entry in tuple(self._open.items()):
            if now.monotonic_s - entry.seen_s > self._config.out_of_sight_seconds:
                events.append(self._resolve(identity, now, entry.seen_s))
        while len(self._totals) > self._config.max_identities:
            self._totals.popitem(last=False)
        return tuple(events)

    def _take(self, now: Instant, assessment: Assessment) -> FindingEvent | None:
        identity = assessment.identity
        total = (assessment.anomaly, assessment.scope, identity[1])
        self._totals.setdefault(total, 0)
        self._totals.move_to_end(total)
        entry = self._open.get(identity)
        if assessment.severity == 0:
            return self._resolve(identity, now, now.monotonic_s) if entry is not None else None
        if entry is None:
            self._totals[total] += 1
            self._open[identity] = _Open(_begin(now, assessment), now.monotonic_s)
            return FindingEvent(state="active", now=now, finding=self._open[identity].finding)
        rises = assessment.severity > entry.finding.severity
        if assessment.severity >= entry.finding.severity:
            entry.finding = replace(
                entry.finding,
                severity=assessment.severity,
                evidence=assessment.evidence,
                action=assessment.action,
                summary=assessment.summary,
                suspect=assessment.suspect,
            )
        entry.seen_s = now.monotonic_s
        return FindingEvent(state="active", now=now, finding=entry.finding) if rises else None

    def _resolve(self, identity: Identity, now: Instant, end_s: float) -> FindingEvent:
        finding = replace(self._open.pop(identity).finding, end_monotonic_s=end_s)
        return FindingEvent(state="resolved", now=now, finding=finding)


def _begin(now: Instant, assessment: Assessment) -> Finding:
    start_s = now.monotonic_s if assessment.since_monotonic_s is None else assessment.since_monotonic_s
    wall_s = now.wall_s - (now.monotonic_s - start_s) if assessment.since_wall_s is None else assessment.since_wall_s
    return Finding(
        anomaly=assessment.anomaly,
        scope=assessment.scope,
        severity=assessment.severity,
        key=assessment.key,
        device=assessment.device,
        job_key=assessment.job_key,
        start_monotonic_s=start_s,
        start_wall_s=wall_s,
        end_monotonic_s=None,
        evidence=assessment.evidence,
        action=assessment.action,
        summary=assessment.summary,
        suspect=assessment.suspect,
    )
