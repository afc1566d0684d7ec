"""throttled: a GPU that is too hot, or whose power supply tells it to slow down.

Sees the driver's counters of the time that each reason was active (GpuSlowSample, every 5 s), which miss nothing; where
a driver has none, the share of samples in which a reason was active, which misses short ones. Severity after SIGNALS
6d: 2 where a thermal reason, of software or hardware, takes more than 5 % of a minute; 3 where the power brake does, or
a hardware slowdown that is not thermal, for more than 1 %; each in several readings of the minute, for a blip slows
nobody down. The software power cap is normal work at the power limit and never counts, nor do idle clocks.

Cannot see: a board that offers neither counters nor reasons, and a log without them. Of an older driver with a counter
for thermal time alone, the power brake shows in the samples.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey, GpuSlowSample
from classifier.config_checks import require
from classifier.detectors.card_watch import Answers, Cards, Claim, Freshness, Verdicts
from classifier.results import Assessment, Decision

_THERMAL: Final = ("sw_thermal", "hw_thermal")
_BRAKES: Final = ("hw_power_brake", "hw_slowdown")
_TEXT: Final = {
    "sw_thermal": "slowed down by software because it is hot",
    "hw_thermal": "slowed down by hardware because it is hot",
    "hw_power_brake": "slowed down by the power brake, a signal of its power supply",
    "hw_slowdown": "slowed down by hardware",
}
_STALE_S: Final = 20.0
#: Samples of a window in which a reason was active: one alone is no share.
_LEAST_SAMPLES: Final = 2
#: Samples that show a reason have to lie in several parts of this length.
_SPREAD_S: Final = 10.0
#: So many of them for heat, and more at first: a minute holds up to three blips that are half a minute apart. Where a
#: part has fewer than four samples, which miss most of a little heat, the lower number holds.
_LEAST_PARTS: Final = 3
_FIRST_PARTS: Final = 4
_DENSE: Final = 4
#: Readings of a window with which a counter has to grow, where there are at least twice as many: a blip is no share.
_LEAST_STEPS: Final = {"sw_thermal": 5, "hw_thermal": 5, "hw_power_brake": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottledConfig:
    """When slowed clocks are worth a warning, a page."""

    enabled: bool = True
    #: How often it is looked: a quarter of the window.
    judge_seconds: float = 15.0
    #: Time over which shares are taken.
    window_seconds: float = 60.0
    #: Share of time with a thermal reason above which it is a warning.
    thermal_ratio: float = 0.05
    #: Share of time with the power brake, or another hardware slowdown, above which it is critical.
    brake_ratio: float = 0.01

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.judge_seconds >= 0, "judge_seconds", self.judge_seconds, "at least 0")
        require(self.window_seconds >= 10, "window_seconds", self.window_seconds, "at least 10")
        for key in ("thermal_ratio", "brake_ratio"):
            require(0 < getattr(self, key) < 1, key, getattr(self, key), "between 0 and 1")


@dataclass(slots=True)
class _Card:
    slow: Freshness = field(default_factory=lambda: Freshness(_STALE_S))
    samples: Freshness = field(default_factory=lambda: Freshness(_STALE_S))
    seen: GpuSlowSample | None = None
    #: Readings of the counters, oldest first, one of them older than the window.
    readings: deque[tuple[float, Mapping[str, float]]] = field(default_factory=deque)
    since: dict[str, Instant] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)


class ThrottledDetector:
    """Says for every GPU whether heat or its power supply slows it down."""

    anomalies: tuple[str, ...] = ("throttled",)

    def __init__(self, config: ThrottledConfig) -> None:
        self._config = config
        self._answers = Answers(config.judge_seconds)
        self._places = Cards()
        self._cards: dict[GpuKey, _Card] = {}
        self._verdicts = Verdicts("throttled")

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:  # noqa: ARG002
        """Return one assessment for each GPU with counters of slowed time, or with reasons in its samples."""
        return self._answers.of(now, history, lambda: self._look(now, history))

    def _look(self, now: Instant, history: History) -> Sequence[Assessment]:
        assessments: list[Assessment] = []
        for card, keys in self._places.of(history):
            if card.state in ("lost", "hung"):
                continue
            known = self._cards.get(card.key)
            if known is None:
                known = self._cards[card.key] = _Card()
            counted = self._counted(known, card, now)
            ratios = self._sampled(known, card, now, counted) | counted
            if not ratios:
                known.since.clear()
                continue
            claims = self._claims(known, ratios, now)
            assessments += self._verdicts.of(keys, claims, self._evidence(ratios, counted, card, now) if claims else {})
        return assessments

    def _counted(self, known: _Card, card: GpuHistory, now: Instant) -> dict[str, float]:
        """Return the share of the window by reason, from the driver's counters; 0 before it is full."""
        slow = card.slow
        if slow is None or not known.slow.is_fresh(slow.monotonic_s, now.monotonic_s):
            known.readings.clear()
            return {}
        if slow is not known.seen:
            known.seen = slow
            self._take(known, slow.monotonic_s, slow.clock_event_seconds_total)
        if not known.readings:
            return {}
        first_s, first = known.readings[0]
        last_s, last = known.readings[-1]
        elapsed_s = last_s - first_s
        is_full = elapsed_s >= 0.8 * self._config.window_seconds
        return {
            reason: min(1.0, (last[reason] - first[reason]) / elapsed_s) if is_full and reason in first else 0.0
            for reason in last
        }

    def _take(self, known: _Card, time_s: float, totals: Mapping[str, float]) -> None:
        readings = known.readings
        if readings:
            last_s, last = readings[-1]
            if time_s <= last_s:
                return
            # A counter that fell was begun anew, one that came or went is read by another call now.
            if totals.keys() != last.keys() or any(totals[reason] < last[reason] for reason in totals):
                readings.clear()
        if not totals:
            return
        readings.append((time_s, totals))
        while len(readings) > 2 and readings[1][0] <= time_s - self._config.window_seconds:
            readings.popleft()
        if time_s - readings[0][0] > 3 * self._config.window_seconds:
            readings.popleft()  # before a gap: the share of what was not seen says nothing about now

    def _sampled(self, known: _Card, card: GpuHistory, now: Instant, counted: Mapping[str, float]) -> dict[str, float]:
        """Return the share of samples by reason that has no counter."""
        if not known.samples.is_fresh(card.last_s, now.monotonic_s):
            return {}
        found: dict[str, float] = {}
        # The channel holds every reason that slows; where heat has counters it adds the brake alone.
        if "hw_power_brake" not in counted:
            ratio = _share(card, "hw_slowed", now.monotonic_s, self._config.window_seconds, 2)
            if ratio is not None:
                found["hw_slowdown"] = ratio
        if not any(reason in counted for reason in _THERMAL):
            # One that is known may waver, as with counters.
            least_parts = _LEAST_PARTS if "sw_thermal" in known.since else _FIRST_PARTS
            ratio = _share(card, "throttled", now.monotonic_s, self._config.window_seconds, least_parts)
            if ratio is not None:
                found["sw_thermal"] = max(0.0, ratio - found.get("hw_slowdown", 0.0))
        return found

    def _claims(self, known: _Card, ratios: Mapping[str, float], now: Instant) -> list[Claim]:
        claims: list[Claim] = []
        known.ratios = dict(ratios)
        for reasons, limit, severity in (
            (_BRAKES, self._config.brake_ratio, 3),
            (_THERMAL, self._config.thermal_ratio, 2),
        ):
            for reason in reasons:
                ratio, is_known = ratios.get(reason, 0.0), reason in known.since
                is_above = ratio > (0.5 * limit if is_known else limit)
                if not is_above or not (is_known or _is_steady(known.readings, reason)):
                    known.since.pop(reason, None)
                    continue
                since = known.since.setdefault(reason, now.later(-self._config.window_seconds))
                text = f"{_TEXT[reason]} for {100 * ratio:.1f} % of the last {self._config.window_seconds:.0f} s"
                claims.append(Claim(severity, "look", text, since))
        return claims

    def _evidence(
        self, ratios: Mapping[str, float], counted: Mapping[str, float], card: GpuHistory, now: Instant
    ) -> dict[str, float | str | None]:
        slow = card.slow
        evidence: dict[str, float | str | None] = {f"{reason}_ratio": ratio for reason, ratio in ratios.items()}
        evidence["source"] = "counters" if counted else "samples"
        evidence["temperature_celsius"] = None if slow is None else slow.temperature_celsius
        evidence["memory_temperature_celsius"] = None if slow is None else slow.memory_temperature_celsius
        evidence["sm_clock_hertz"] = card.latest("sm_clock_hertz", now.monotonic_s, _STALE_S)
        evidence["sm_clock_max_hertz"] = None if card.limits is None else card.limits.sm_clock_max_hertz
        return evidence


def _share(card: GpuHistory, channel: str, now_s: float, seconds: float, least_parts: int) -> float | None:
    """Return the mean of a channel of 0 and 1; 0 where few are above or all at once, None where it is not there."""
    series = card.series(channel, now_s, seconds)
    if not series.size:
        return None
    if series.times[-1] - series.times[0] > series.size * _SPREAD_S / _DENSE:
        least_parts = min(least_parts, _LEAST_PARTS)
    active = series.times[series.values > 0]
    if active.size < _LEAST_SAMPLES or _parts(active.tolist()) < least_parts:
        return 0.0
    return float(active.size) / series.size


def _parts(times: Sequence[float]) -> int:
    """Return how many spans of `_SPREAD_S` hold these times, each from the first that the one before leaves out."""
    count, end_s = 0, float("-inf")
    for time_s in times:
        if time_s >= end_s:
            count, end_s = count + 1, time_s + _SPREAD_S
    return count


def _is_steady(readings: Sequence[tuple[float, Mapping[str, float]]], reason: str) -> bool:
    """Return whether the counter of this reason grew with several of the readings; True where there is none."""
    totals = [totals[reason] for _, totals in readings if reason in totals]
    least = min(_LEAST_STEPS.get(reason, 0), len(totals) // 2)
    return sum(later > earlier for earlier, later in itertools.pairwise(totals)) >= least
