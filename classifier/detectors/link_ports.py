"""The ports of InfiniBand, RoCE and EFA devices for `link_errors`: which go down, and errors against their past."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.clock import Instant
from agent.records import InfinibandPort
from classifier.detectors.card_watch import Claim, Freshness
from classifier.detectors.error_rate import Baseline, ErrorRateConfig, ErrorRates
from classifier.results import Assessment

#: Devices that have an assessment of their own, for a node may have few series: those with a finding, the worst first.
MAX_DEVICES: Final = 4
#: A device keeps it this long after its finding, so that the finding ends.
_SHOWN_S: Final = 3600.0
_PORT_STALE_S: Final = 60.0
#: Files of counters/ whose rate is compared with its past, by what a person calls them (InfiniBand specification).
_RATES: Final = {
    "symbol_error": "symbol errors",
    "link_error_recovery": "link recoveries",
    "port_rcv_errors": "received packets with errors",
    "local_link_integrity_errors": "link integrity errors",
}


@dataclass(slots=True)
class _Port:
    rates: ErrorRates
    ports: Freshness = field(default_factory=lambda: Freshness(_PORT_STALE_S))
    was_active: bool = False
    state: str | None = None  # as last read
    downed: int | None = None  # link_downed as last read
    downs: int = 0  # since the link was last steady
    downed_at: Instant | None = None
    down_since: Instant | None = None  # of the present time without a link


class PortWatch:
    """Follows every port that was ever active."""

    def __init__(self, config: ErrorRateConfig, hold_seconds: float) -> None:
        self._config = config
        self._hold_s = hold_seconds
        self._ports: dict[tuple[str, int], _Port] = {}
        self._shown_s: dict[str, float] = {}  # when a device with an assessment of its own last had a finding
        self._restored: Mapping[str, Mapping[str, Baseline]] = {}

    def assess(
        self, now: Instant, records: Mapping[tuple[str, int], InfinibandPort], *, has_work: bool
    ) -> list[Assessment]:
        """Return one assessment for the node, and one for each device that has a finding or had one within the hour.

        That of the node, whose device is "", stands for all other ports that were ever active; without any there is
        none. `has_work` says that a GPU is held.
        """
        devices: dict[str, tuple[list[Claim], dict[str, float | str | None]]] = {}
        for identity, record in records.items():
            known = self._ports.get(identity)
            if known is None:
                restored = self._restored.get(f"{record.device}/{record.port}", {})
                known = self._ports[identity] = _Port(ErrorRates(self._config, _RATES, restored))
            if not known.ports.is_fresh(record.monotonic_s, now.monotonic_s):
                continue
            self._take(known, record, now)
            if not known.was_active:
                continue
            claims, evidence = devices.setdefault(record.device, ([], {}))
            claims += self._claims(known, record, has_work=has_work)
            evidence.update(self._evidence(known, record))
        for gone in self._ports.keys() - records.keys():
            del self._ports[gone]
        if not devices:
            return []
        shown = self._choose({device: told[0] for device, told in devices.items()}, now)
        others = [
            claim._replace(text=f"{device} {claim.text}")
            for device, (claims, _) in devices.items()
            if device not in shown
            for claim in claims
        ]
        return [_assessment("", others, {}), *(_assessment(device, *devices[device]) for device in shown)]

    def _choose(self, claims: Mapping[str, list[Claim]], now: Instant) -> list[str]:
        """Return the devices that have an assessment of their own."""
        found = {device: _worst(told) for device, told in claims.items() if told}
        for device in sorted(found, key=lambda device: (-found[device], device)):
            if device in self._shown_s or len(self._shown_s) < MAX_DEVICES:
                self._shown_s[device] = now.monotonic_s
        for device in [one for one, time_s in self._shown_s.items() if now.monotonic_s - time_s > _SHOWN_S]:
            del self._shown_s[device]
        return sorted(self._shown_s.keys() & claims.keys())

    def learned(self) -> dict[str, dict[str, list[float]]]:
        """Return the baselines by port and counter."""
        found = {f"{device}/{port}": known.rates.learned() for (device, port), known in self._ports.items()}
        return {subject: rates for subject, rates in found.items() if rates}

    def restore(self, baselines: Mapping[str, Mapping[str, Baseline]]) -> None:
        """Take back what `learned` returned."""
        self._restored = baselines

    def _take(self, known: _Port, record: InfinibandPort, now: Instant) -> None:
        known.state = record.state or known.state
        if record.state == "active":
            known.was_active, known.down_since = True, None
        elif record.state is not None and known.was_active:
            known.down_since = known.down_since or now
        downed = record.counters.get("link_downed")
        if downed is not None:
            if known.downed is not None and downed > known.downed:
                known.downs += downed - known.downed
                known.downed_at = now
            known.downed = downed
        if known.downed_at is not None and now.monotonic_s - known.downed_at.monotonic_s > self._hold_s:
            known.downed_at, known.downs = None, 0
        if known.rates.is_due(record.monotonic_s):
            known.rates.take(record.monotonic_s, record.counters, now)

    def _claims(self, known: _Port, record: InfinibandPort, *, has_work: bool) -> list[Claim]:
        port = f"port {record.port}"
        claims: list[Claim] = []
        severity = 3 if has_work else 2
        if known.down_since is not None:
            claims.append(Claim(severity, "look", f"{port} is {known.state}, and was active", known.down_since))
        elif known.downed_at is not None:
            times = "" if known.downs == 1 else f" {known.downs} times"
            claims.append(Claim(severity, "look", f"{port} lost its link{times}", known.downed_at))
        claims += [Claim(2, "look", f"{port} has {text}", since) for text, since in known.rates.texts()]
        return claims

    def _evidence(self, known: _Port, record: InfinibandPort) -> dict[str, float | str | None]:
        if not (known.down_since or known.downed_at or known.rates.high_since):
            return {}
        prefix = f"port{record.port}"
        return {
            f"{prefix}_state": record.state,
            f"{prefix}_link_downed_recent": float(known.downs),
            **known.rates.evidence(f"{prefix}_"),
        }


def _worst(claims: list[Claim]) -> int:
    return max((claim.severity for claim in claims), default=0)


def _assessment(device: str, claims: list[Claim], evidence: Mapping[str, float | str | None]) -> Assessment:
    """Return what the claims about one device say, or for "" about several."""
    if not claims:
        return Assessment(anomaly="link_errors", scope="node", severity=0, device=device)
    severity = _worst(claims)
    leading = [claim for claim in claims if claim.severity == severity]
    since = min((claim.since for claim in leading), key=lambda since: since.monotonic_s)
    told = [*leading, *(claim for claim in claims if claim.severity < severity)]
    return Assessment(
        anomaly="link_errors",
        scope="node",
        severity=severity,
        device=device,
        since_monotonic_s=since.monotonic_s,
        since_wall_s=since.wall_s,
        evidence=evidence,
        action="look",
        summary=f"{device or 'ports'}: {'; '.join(claim.text for claim in told[:4])}.",
    )
