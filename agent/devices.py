"""Which network interfaces, ports, disks and file systems are exported: a bound on series, whatever a host has.

The rule: the first ones by name (numbers in it by their value) get a place each, up to the limit of their kind. A
device keeps its place while it is fresh, so series do not come and go with what else is plugged in; a free place goes
to the next one by name. Nothing else depends on it: rates of the host and detectors see every device. What was left out
is counted as `too_many_devices` in the errors of its sampler.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from agent.records import (
    DiskSample,
    FilesystemSample,
    InfinibandPort,
    InfinibandSample,
    NetworkLink,
    NetworkSample,
)

#: Reason in `warpwatch_sampler_errors_total` of a device that has no series.
TOO_MANY_DEVICES: Final = "too_many_devices"
#: By kind: the sampler's name, and how many devices (ports of InfiniBand) have series. Two series each: 80 of the 150
#: that a node may have beside its GPUs.
_KINDS: Final[Mapping[type, tuple[str, int]]] = {
    NetworkSample: ("net_dev", 10),
    InfinibandSample: ("infiniband", 12),
    DiskSample: ("diskstats", 10),
    FilesystemSample: ("filesystems", 8),
}
#: Records that say more of a device of a kind.
_MORE: Final[Mapping[type, type]] = {NetworkLink: NetworkSample, InfinibandPort: InfinibandSample}
#: Characters of a name that are sorted by the numbers in them; a mountpoint may be very long.
_SORTED_LENGTH: Final = 256

D = TypeVar("D", NetworkSample, InfinibandSample, DiskSample, FilesystemSample)
M = TypeVar("M", NetworkLink, InfinibandPort)
_Device = NetworkSample | NetworkLink | InfinibandSample | InfinibandPort | DiskSample | FilesystemSample


@dataclass(slots=True)
class _Kind:
    """The devices of one kind: those with a place, those without one now, and how often one was left out."""

    placed: frozenset[Hashable] = frozenset()
    left_out: frozenset[Hashable] = frozenset()
    refused: int = 0


class DeviceLimit:
    """Chooses the devices that have series; call `choose` for each snapshot, and `more_of_chosen` after it."""

    def __init__(self) -> None:
        self._kinds: dict[type, _Kind] = {kind: _Kind() for kind in _KINDS}

    def choose(self, kind: type[D], samples: Sequence[D]) -> tuple[D, ...]:
        """Return those of the fresh `samples` of one kind that have a place, by name."""
        _, limit = _KINDS[kind]
        state = self._kinds[kind]
        ordered = sorted(samples, key=_order)
        kept = {_identity(sample) for sample in ordered} & state.placed
        for sample in ordered:
            if len(kept) >= limit:
                break
            kept.add(_identity(sample))
        left_out = frozenset(_identity(sample) for sample in ordered) - kept
        state.refused += len(left_out - state.left_out)
        state.placed, state.left_out = frozenset(kept), left_out
        return tuple(sample for sample in ordered if _identity(sample) in kept)

    def more_of_chosen(self, kind: type[M], records: Iterable[M]) -> tuple[M, ...]:
        """Return those of the fresh `records` that are of a device chosen last, by name."""
        placed = self._kinds[_MORE[kind]].placed
        return tuple(sorted((record for record in records if _identity(record) in placed), key=_order))

    def errors(self, sampler: str) -> Mapping[str, int]:
        """Return what to add to the errors of a sampler: how often a device came that got no place."""
        refused = sum(self._kinds[kind].refused for kind, (name, _) in _KINDS.items() if name == sampler)
        return {TOO_MANY_DEVICES: refused} if refused else {}


def _identity(record: _Device) -> tuple[str, int]:
    if isinstance(record, FilesystemSample):
        return record.mountpoint, 0
    return record.device, record.port if isinstance(record, InfinibandSample | InfinibandPort) else 0


def _order(record: _Device) -> tuple[list[tuple[int, str]], str, int]:
    """Return the sort key of a device: eth2 before eth10."""
    name, port = _identity(record)
    # Numbers in pieces of 18 digits: a directory may be named with thousands, which int() refuses.
    parts = re.findall(r"([0-9]{1,18})|([^0-9]+)", name[:_SORTED_LENGTH])
    return [(int(number), "") if number else (-1, text) for number, text in parts], name, port
