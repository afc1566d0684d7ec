"""Groups of waiting GPUs, what was decided of them, and the words for it: the parts of `stalled_collective`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.records import GpuKey
from classifier.detectors.host_io import HostIo
from classifier.detectors.wait_watch import PastWaits
from classifier.results import Evidence

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
