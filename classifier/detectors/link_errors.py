"""link_errors: NVLink, PCIe and network ports that fail, run below their speed, or make more errors than usual.

Sees the error counters of each card (GpuHealth) and of each InfiniBand, RoCE or EFA port, the XIDs about links, what
the driver asks for, and the PCIe link against its own maximum. Any-increment rules would page for what links repair by
themselves, so counters are compared with the link's own past by `error_rate`. Without a baseline (ten minutes) these
say nothing; only a rise is seen, and a link that was always bad looks normal. What needs no baseline: a port that went
down, a recovery that failed (NVLink 5), XIDs, and a PCIe link that is narrower or slower than it could be in three
readings in a row while the GPU works; an idle GPU lowers its link to save power.

Severity: 3 for a port that goes down while a GPU of the host is held, a failed recovery, a critical XID; 2 for the
rest; 1 for XIDs from before the start. Scope is the GPU (each instance of a divided card), and for ports the node with
the device's name, or "" for all ports without a finding. Ports that were never active are not in use and not judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuHealth, GpuKey, GpuLimits
from agent.xids import XIDS, XidCatalogue
from classifier.config_checks import require
from classifier.detectors.card_watch import (
    RECOVERY_ACTIONS,
    Answers,
    Cards,
    CardWatch,
    Claim,
    Freshness,
    Verdicts,
    xid_claims,
)
from classifier.detectors.error_rate import Baseline, ErrorRateConfig, ErrorRates, baselines
from classifier.detectors.link_ports import PortWatch
from classifier.results import Assessment, Decision

_HEALTH_STALE_S: Final = 60.0
_LIMITS_STALE_S: Final = 180.0
#: Counters whose rate is compared with its past, by what a person calls them.
_RATES: Final = {
    "nvlink_crc_errors_total": "NVLink CRC errors",
    "nvlink_replay_errors_total": "NVLink replays",
    "nvlink_recovery_errors_total": "NVLink recoveries",
    "nvlink_integrity_errors_total": "NVLink integrity errors",
    "nvlink_effective_errors_total": "NVLink errors after correction",
    "pcie_replays_total": "PCIe replays",
}
_DRAIN_P2P: Final = 3
#: Length of the time before a reading of the PCIe link in which the GPU has to work.
_LOAD_S: Final = 30.0
#: Readings of the link in a row that have to be below its maximum: they come every minute.
_DEGRADED_READINGS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkErrorsConfig:
    """When errors of links are worth a word, a warning, a page."""

    enabled: bool = True
    #: How often it is looked: nothing here is told by a few seconds.
    judge_seconds: float = 15.0
    #: A failed recovery, and an XID about a link, count this long after the last one, unless the card was reset.
    hold_seconds: float = 3600.0
    #: A port that went down and is up again counts this long.
    port_hold_seconds: float = 600.0
    #: Utilisation above which a GPU works and its PCIe link has to be at its maximum.
    load_utilization_ratio: float = 0.5
    rate: ErrorRateConfig = field(default_factory=ErrorRateConfig)

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.judge_seconds >= 0, "judge_seconds", self.judge_seconds, "at least 0")
        require(self.hold_seconds > 0, "hold_seconds", self.hold_seconds, "above 0")
        require(self.port_hold_seconds > 0, "port_hold_seconds", self.port_hold_seconds, "above 0")
        is_share = 0 < self.load_utilization_ratio <= 1
        require(is_share, "load_utilization_ratio", self.load_utilization_ratio, "above 0 and at most 1")


@dataclass(slots=True)
class _Card:
    watch: CardWatch
    rates: ErrorRates
    health: Freshness = field(default_factory=lambda: Freshness(_HEALTH_STALE_S))
    limits: Freshness = field(default_factory=lambda: Freshness(_LIMITS_STALE_S))
    failed: int | None = None  # recoveries that failed, as last read
    failed_since: Instant | None = None
    seen_limits: GpuLimits | None = None
    degraded: int = 0
    degraded_since: Instant | None = None
    asked_since: Instant | None = None


class LinkErrorsDetector:
    """Says for every GPU whether its links are as they should be, and for every port of the host."""

    anomalies: tuple[str, ...] = ("link_errors",)
    learner = "link_errors"

    def __init__(self, config: LinkErrorsConfig, xids: XidCatalogue = XIDS) -> None:
        self._config = config
        self._xids = xids
        self._answers = Answers(config.judge_seconds)
        self._places = Cards()
        self._cards: dict[GpuKey, _Card] = {}
        self._ports = PortWatch(config.rate, config.port_hold_seconds)
        self._verdicts = Verdicts("link_errors")
        self._restored: dict[str, dict[str, Baseline]] = {}

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:  # noqa: ARG002
        """Return one assessment for each GPU with counters, XIDs or limits, and those of ports ever active."""
        return self._answers.of(now, history, lambda: self._look(now, history))

    def _look(self, now: Instant, history: History) -> Sequence[Assessment]:
        assessments: list[Assessment] = []
        for card, keys in self._places.of(history):
            if card.health is None and card.xids is None and card.limits is None:
                continue
            known = self._cards.get(card.key)
            if known is None:
                known = self._cards[card.key] = self._card(card.key)
            claims = self._xid_claims(known, card, now)
            if known.watch.was_reset:
                known.failed_since = None
            health_s = None if card.health is None else card.health.monotonic_s
            is_seen = known.health.is_fresh(health_s, now.monotonic_s)
            if card.health is not None and is_seen:
                self._take(known, card.health, now)
                claims += self._counter_claims(known, now)
            claims += self._limit_claims(known, card, [history.gpus[key] for key in keys], now)
            if claims or (is_seen and (known.rates or known.failed is not None)):
                assessments += self._verdicts.of(keys, claims, self._evidence(known, card) if claims else {})
        has_work = any(gpu.processes is None or bool(gpu.processes) for gpu in history.gpus.values())
        assessments += self._ports.assess(now, history.host.infiniband_ports, has_work=has_work)
        return assessments

    def learned(self, now: Instant) -> Mapping[str, object]:  # noqa: ARG002
        """Return the baselines by card and counter, and by port and counter."""
        found: dict[str, dict[str, list[float]]] = {}
        for key, card in self._cards.items():
            if key.uuid is not None:
                found[key.uuid] = card.rates.learned()
        return {"cards": {uuid: rates for uuid, rates in found.items() if rates}, "ports": self._ports.learned()}

    def restore(self, state: Mapping[str, object], now: Instant) -> None:  # noqa: ARG002
        """Take baselines back; ValueError for anything that is none."""
        of_cards, of_ports = baselines(state.get("cards"), "cards"), baselines(state.get("ports"), "ports")
        self._restored = of_cards
        self._ports.restore(of_ports)

    def _card(self, key: GpuKey) -> _Card:
        rate = self._config.rate
        rates = ErrorRates(
            rate, _RATES, self._restored.get(key.uuid or "", {}), {"pcie_replays_total": rate.least_replays}
        )
        return _Card(CardWatch(self._xids, self._config.hold_seconds, link=True), rates)

    def _take(self, known: _Card, health: GpuHealth, now: Instant) -> None:
        failed = health.nvlink_failed_recoveries_total
        if failed is not None:
            if known.failed is not None and failed > known.failed:
                known.failed_since = now
            known.failed = failed
        if known.rates.is_due(health.monotonic_s):
            known.rates.take(health.monotonic_s, {name: getattr(health, name) for name in _RATES}, now)

    def _xid_claims(self, known: _Card, card: GpuHistory, now: Instant) -> list[Claim]:
        """Return a claim for each XID, with what the driver asks for where the catalogue says to look."""
        claims = xid_claims(known.watch.update(card, now))
        asked = card.limits.recovery_action if claims and card.limits is not None else None
        if not asked:
            return claims
        action = RECOVERY_ACTIONS.get(asked, "look")
        return [one._replace(action=action) if one.severity >= 2 and one.action == "look" else one for one in claims]

    def _counter_claims(self, known: _Card, now: Instant) -> list[Claim]:
        claims: list[Claim] = []
        if known.failed_since is not None:
            if now.monotonic_s - known.failed_since.monotonic_s > self._config.hold_seconds:
                known.failed_since = None
            else:
                claims.append(Claim(3, "reset_gpu", "an NVLink link could not be recovered", known.failed_since))
        claims += [Claim(2, "look", text, since) for text, since in known.rates.texts()]
        return claims

    def _limit_claims(self, known: _Card, card: GpuHistory, places: Sequence[GpuHistory], now: Instant) -> list[Claim]:
        limits = card.limits
        if limits is None or not known.limits.is_fresh(limits.monotonic_s, now.monotonic_s):
            known.degraded, known.degraded_since, known.asked_since = 0, None, None
            return []
        if limits is not known.seen_limits:
            known.seen_limits = limits
            self._take_link(known, limits, (card, *places), now)
        claims: list[Claim] = []
        if known.degraded >= _DEGRADED_READINGS and known.degraded_since is not None:
            text = f"its PCIe link runs at {_link(limits.pcie_generation, limits.pcie_width)} under load"
            text += f", of {_link(limits.pcie_generation_max, limits.pcie_width_max)}"
            claims.append(Claim(2, "look", text, known.degraded_since))
        known.asked_since = (known.asked_since or now) if limits.recovery_action == _DRAIN_P2P else None
        if known.asked_since is not None:
            text = "the driver asks to end peer-to-peer work, since a link failed"
            claims.append(Claim(2, RECOVERY_ACTIONS[_DRAIN_P2P], text, known.asked_since))
        return claims

    def _take_link(self, known: _Card, limits: GpuLimits, gpus: Sequence[GpuHistory], now: Instant) -> None:
        """Count readings below the maximum under load; one at the maximum ends it, one without load says nothing."""
        if not _is_below(limits):
            known.degraded, known.degraded_since = 0, None
        elif any(self._is_loaded(gpu, limits.monotonic_s) for gpu in gpus):
            known.degraded += 1
            known.degraded_since = known.degraded_since or now

    def _is_loaded(self, gpu: GpuHistory, time_s: float) -> bool:
        for channel in ("utilization_ratio", "sm_active_ratio"):
            series = gpu.series(channel, time_s, _LOAD_S)
            if series.size:
                return bool(np.mean(series.values) >= self._config.load_utilization_ratio)
        return False

    def _evidence(self, known: _Card, card: GpuHistory) -> dict[str, float | str | None]:
        evidence = known.rates.evidence()
        evidence["nvlink_failed_recoveries"] = known.failed
        evidence["xids"] = " ".join(str(one.code) for one in known.watch.news) or None
        limits = card.limits
        if limits is not None:
            evidence["pcie_width"], evidence["pcie_width_max"] = limits.pcie_width, limits.pcie_width_max
            evidence["pcie_generation"] = limits.pcie_generation
            evidence["pcie_generation_max"] = limits.pcie_generation_max
            evidence["recovery_action"] = limits.recovery_action
        return evidence


def _is_below(limits: GpuLimits) -> bool:
    pairs = (limits.pcie_generation, limits.pcie_generation_max), (limits.pcie_width, limits.pcie_width_max)
    return any(value is not None and most is not None and value < most for value, most in pairs)


def _link(generation: int | None, width: int | None) -> str:
    words = [] if generation is None else [f"generation {generation}"]
    words += [] if width is None else [f"{width} lanes"]
    return " and ".join(words) or "an unknown speed"
