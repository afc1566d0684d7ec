"""Groups of waiting GPUs, what was decided of them, and the words for it: the parts of `stalled_collective`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agent.clock import Instant
from agent.history import GpuHistory
from agent.records import GpuKey
from classifier.detectors.host_io import HostIo
from classifier.detectors.wait_watch import GpuWatch, PastWaits
from classifier.results import Assessment, Evidence

#: Why a wait is what it was called, as part of a sentence.
REASONS: Final = {
    "little_work": "it worked too briefly before to tell a stall from a slow start",
    "short": "too short to tell",
    "stopped": "processes of it are stopped, by a signal or a debugger",
    "host_cpu_active": "its processes use far more CPU than before, as compilers do",
    "inference": "labelled inference, where idle servers spin",
    "bursts": "its work before came in bursts, as requests to a server do, and nothing says that it is training",
    "alone": "no other GPU of this host waits with it",
    "others_work": "another GPU of the group still works",
    "host_io_not_seen": "host I/O is not measured in full, so a checkpoint cannot be told from a stall",
    "host_io_active": "the host writes or sends, as in a checkpoint",
    "quiet": "the host neither writes nor sends",
    "quiet_after_io": "the host wrote or sent, and has stopped",
}


@dataclass(slots=True)
class Group:
    """GPUs whose waits began together."""

    members: list[GpuKey]
    since_s: float  # the last of them began here
    odd: list[GpuKey] = field(default_factory=list)
    working: list[GpuKey] = field(default_factory=list)  # others that are armed and still work
    is_armed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Severities of both anomalies for one group, and why."""

    stalled: int
    wait: int
    reason: str
    threshold_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One group at one moment, with all that was weighed."""

    group: Group
    io: HostIo
    verdict: Verdict


def sentence(key: GpuKey, group: Group, waited_s: float, evidence: Evidence) -> str:
    """Return what one GPU of a group does, as the beginning of a sentence."""
    size = len(group.members) + len(group.odd)
    power, busy = evidence["power_watts"], evidence["busy_watts"]
    drawn = f" at {power:.0f} W ({busy:.0f} W at work)" if power is not None and busy is not None else ""
    if key in group.odd:
        return (
            f"GPU {key.gpu} has done nothing for {waited_s:.0f} s{drawn}, while {len(group.members)} of its group "
            f"wait for it in a collective operation"
        )
    odd = ", ".join(str(other.gpu) for other in group.odd)
    suspect = f", GPU {odd} is the odd one out" if odd else ""
    return f"GPU {key.gpu} has waited {waited_s:.0f} s in a collective operation{drawn}, in a group of {size}{suspect}"


def merged(pasts: Sequence[PastWaits]) -> PastWaits:
    """Return what the earlier waits of several GPUs come to: the longest and most of them."""
    return PastWaits(
        count=max(past.count for past in pasts),
        longest_s=max(past.longest_s for past in pasts),
        unexplained=max(past.unexplained for past in pasts),
        longest_unexplained_s=max(past.longest_unexplained_s for past in pasts),
        io_lag_s=max(past.io_lag_s for past in pasts),
    )


def described(
    now: Instant, key: GpuKey, case: Case, watch: GpuWatch, gpu: GpuHistory, *, context_idle_watts: float | None
) -> tuple[Assessment, Assessment]:
    """Return what is said of one GPU of a group: as a stall and as a wait."""
    group, verdict = case.group, case.verdict
    since_s = watch.wait_since_s if watch.wait_since_s is not None else group.since_s
    waited_s = now.monotonic_s - since_s
    is_odd = key in group.odd
    base = Assessment(
        anomaly="stalled_collective",
        scope="gpu",
        severity=verdict.stalled,
        key=key,
        since_monotonic_s=since_s,
        since_wall_s=now.wall_s - waited_s,
        evidence=_evidence(now, case, watch, gpu, context_idle_watts),
    )
    what = sentence(key, group, waited_s, base.evidence)
    stalled = base
    if verdict.stalled:
        summary = f"{what}; {REASONS[verdict.reason]}, and a stall is called after {verdict.threshold_s:.0f} s."
        stalled = replace(base, action="restart_app", summary=summary, suspect=is_odd)
    wait = replace(base, anomaly="collective_wait", severity=verdict.wait)
    if verdict.wait:
        wait = replace(wait, action="look", summary=f"{what}; {REASONS[verdict.reason]}.", suspect=is_odd)
    return stalled, wait


def _evidence(now: Instant, case: Case, watch: GpuWatch, gpu: GpuHistory, context_idle_watts: float | None) -> Evidence:
    group = case.group
    return {
        "wait_seconds": now.monotonic_s - group.since_s,
        "threshold_seconds": case.verdict.threshold_s,
        "reason": case.verdict.reason,
        "group_gpus": float(len(group.members) + len(group.odd)),
        "suspect_gpus": float(len(group.odd)),
        "power_watts": gpu.latest("power_watts", now.monotonic_s, max(15.0, 3 * watch.interval_s)),
        "busy_watts": watch.busy_watts,
        "context_idle_watts": context_idle_watts,
        "longest_ended_wait_seconds": watch.past.longest_s if watch.past.count else None,
        "host_written_bytes_per_second": case.io.written_bytes_per_second,
        "host_filesystem_written_bytes_per_second": case.io.filesystem_written_bytes_per_second,
        "host_transmit_bytes_per_second": case.io.transmit_bytes_per_second,
    }
