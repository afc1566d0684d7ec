"""Which network interfaces, ports and disks are exported: a bound on series, whatever a host has hundreds of.

The rule: the first ones by name (numbers in it by their value) get a place each, up to the limit of their kind. A
device keeps its place while it is fresh, so series do not come and go with what else is plugged in; a free place goes
to the next one by name. Nothing else depends on it: rates of the host and detectors see every device. What was left out
is counted as `too_many_devices` in the errors of its sampler.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from agent.records import DiskSample, InfinibandSample, NetworkSample

#: Reason in `warpwatch_sampler_errors_total` of a device that has no series.
TOO_MANY_DEVICES: Final = "too_many_devices"
#: By kind: the sampler's name, and how many devices (ports of InfiniBand) have series. Two series each: 80 of the 150
#: that a node may have beside its GPUs.
_KINDS: Final[Mapping[type, tuple[str, int]]] = {
    NetworkSample: ("net_dev", 16),
    InfinibandSample: ("infiniband", 12),
    DiskSample: ("diskstats", 12),
}

D = TypeVar("D", NetworkSample, InfinibandSample, DiskSample)


@dataclass(slots=True)
class _Kind:
    """The devices of one kind: those with a place, those without one now, and how often one was left out."""

    placed: frozenset[Hashable] = frozenset()
    left_out: frozenset[Hashable] = frozenset()
    refused: int = 0


class DeviceLimit:
    """Chooses the devices that have series; call `choose` for each snapshot."""

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

    def errors(self, sampler: str) -> Mapping[str, int]:
        """Return what to add to the errors of a sampler: how often a device came that got no place."""
        refused = sum(self._kinds[kind].refused for kind, (name, _) in _KINDS.items() if name == sampler)
        return {TOO_MANY_DEVICES: refused} if refused else {}


def _identity(sample: NetworkSample | InfinibandSample | DiskSample) -> tuple[str, int]:
    return sample.device, sample.port if isinstance(sample, InfinibandSample) else 0


def _order(sample: NetworkSample | InfinibandSample | DiskSample) -> tuple[list[tuple[int, str]], str, int]:
    """Return the sort key of a device: eth2 before eth10."""
    device, port = _identity(sample)
    parts = re.findall(r"([0-9]+)|([^0-9]+)", device)
    return [(int(number), "") if number else (-1, text) for number, text in parts], device, port
