"""A card under observation for the tests of hardware faults: records as the samplers bring them, asked every 5 s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent.clock import Instant
from agent.history import History
from agent.records import GpuHealth, GpuKey, GpuLimits, GpuSample, GpuSlowSample, GpuState, GpuXids, Record, Tick
from classifier.detectors import Detector
from classifier.results import Assessment, Decision

WALL_S = 1_700_000_000.0
KEY = GpuKey(0, "GPU-0")
#: What the XID sampler has from the start: the critical codes at 0.
QUIET_XIDS = dict.fromkeys((46, 48, 62, 64, 74, 79, 95, 109, 119, 120, 140), 0)


@dataclass
class Card:
    """One GPU, and the detector that watches it; `at` is the present second since the start."""

    detector: Detector
    key: GpuKey = KEY
    history: History = field(default_factory=History)
    at: float = 0.0
    #: Offset of both clocks: a second agent that starts later sees the same wall clock.
    start_s: float = 100.0

    @property
    def now(self) -> Instant:
        return Instant(self.start_s + self.at, WALL_S + self.start_s + self.at)

    def feed(self, kind: type[Record], **fields: object) -> None:
        """Ingest a record of this card, or with `key=None` one of the host."""
        now = self.now
        identity = {"key": self.key} if "key" not in fields else {}
        if fields.get("key", self) is None:
            del fields["key"]
        record = kind(monotonic_s=now.monotonic_s, wall_s=now.wall_s, **identity, **fields)
        self.history.ingest(Tick(monotonic_s=now.monotonic_s, wall_s=now.wall_s, records=(record,)))

    def state(self, word: str = "ok") -> None:
        self.feed(GpuState, state=word)
        if word == "ok":
            self.feed(GpuSample, utilization_ratio=0.9)

    def health(self, **fields: object) -> None:
        self.feed(GpuHealth, **fields)

    def limits(self, **fields: object) -> None:
        self.feed(GpuLimits, **fields)

    def slow(self, **fields: object) -> None:
        self.feed(GpuSlowSample, **fields)

    def divide(self) -> list[GpuKey]:
        """Have the card show two MIG instances, and return their keys."""
        instances = [self.key._replace(gpu_i_id=1), self.key._replace(gpu_i_id=2)]
        for instance in instances:
            self.feed(GpuSample, key=instance, memory_used_bytes=1)
        return instances

    def xids(self, totals: Mapping[int, int], at: Mapping[int, float] | None = None) -> None:
        """Tell the counts of XIDs, and of some the second of the newest event."""
        last = {code: WALL_S + self.start_s + second for code, second in (at or {}).items()}
        self.feed(GpuXids, totals={**QUIET_XIDS, **totals}, last_wall_s=last)

    def assess(self, decisions: Mapping[GpuKey, Decision] | None = None) -> tuple[Assessment, ...]:
        return tuple(self.detector.assess(self.now, self.history, decisions or {}))

    def only(self) -> Assessment | None:
        """Return the one assessment of this moment; None where there is none."""
        found = self.assess()
        assert len(found) <= 1, found
        return found[0] if found else None

    def play(self, seconds: float, tell: Callable[[float], None], step_s: float = 5.0) -> list[Assessment | None]:
        """Tell and ask every `step_s`, `seconds` long; return what was said, by step."""
        found = []
        end = self.at + seconds
        while self.at < end - 1e-9:
            self.at += step_s
            tell(self.at)
            found.append(self.only())
        return found


def severity(assessment: Assessment | None) -> int | None:
    return None if assessment is None else assessment.severity
