"""Which GPUs and MIG instances this host has, and which processes hold them: what the host's samplers go by.

The NVML sampler knows this; samplers of processes and owners must not call the driver for it again. The daemon passes
every tick on to the roster, whose picture is swapped in whole, so that other threads may read it at any time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Final

from agent.mig_layout import MigLayout, card_of
from agent.records import PERIODS_S, GpuInfo, GpuKey, GpuMigInfo, GpuProcess, GpuSample, GpuSlowSample, GpuState, Tick

#: A list of processes older than so many of its periods is not known any more.
_HOLD_PERIODS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterGpu:
    """One card that is whole, or one MIG instance: a place where work runs, or a card that is divided."""

    key: GpuKey
    pci_bus_id: str | None = None  # of the card, domain of 8 digits
    device: str | None = None  # of the card: nvidia and its minor number
    mig_uuid: str | None = None  # of an instance: MIG-...
    is_divided: bool = False  # a card whose work runs on instances
    #: As the driver listed them last; None where it could not, or not of late.
    processes: tuple[GpuProcess, ...] | None = None
    processes_s: float | None = None  # monotonic time of that list
    has_failed: bool = False  # the card is lost, hangs or needs a reset: the driver may list none of its processes


class GpuRoster:
    """Follows the records of the NVML sampler."""

    def __init__(self, processes_period_s: float = PERIODS_S[GpuSlowSample]) -> None:
        """Expect a list of processes every `processes_period_s`."""
        self._hold_s = _HOLD_PERIODS * processes_period_s
        self._layout = MigLayout(PERIODS_S[GpuSample])
        self._gpus: dict[GpuKey, RosterGpu] = {}
        self._failed: set[GpuKey] = set()
        self._picture: tuple[RosterGpu, ...] = ()
        self._lock = threading.Lock()

    @property
    def gpus(self) -> tuple[RosterGpu, ...]:
        """All cards and instances, by index; empty before the first tick of a driver."""
        return self._picture

    def observe(self, tick: Tick) -> None:
        """Take the records of one tick."""
        with self._lock:
            self._observe(tick)

    def _observe(self, tick: Tick) -> None:
        gone = self._layout.observe(tick)
        for key in gone:
            self._gpus.pop(key, None)
        is_changed = bool(gone)
        is_changed |= self._observe_states(tick)
        for record in tick.records:
            if isinstance(record, GpuInfo):
                changed = replace(self._gpu(record.key), pci_bus_id=record.pci_bus_id, device=record.device)
            elif isinstance(record, GpuMigInfo):
                changed = replace(self._gpu(record.key), mig_uuid=record.mig_uuid)
            elif isinstance(record, GpuSlowSample):
                changed = replace(self._gpu(record.key), processes=record.processes, processes_s=record.monotonic_s)
            else:
                continue
            self._gpus[record.key] = changed
            is_changed = True
        if is_changed:
            self._swap(tick.monotonic_s)

    def _observe_states(self, tick: Tick) -> bool:
        """Take the states of the cards and return whether one fails now that did not, or the other way round."""
        before = set(self._failed)
        for record in tick.records:
            if isinstance(record, GpuState):
                (self._failed.discard if record.state == "ok" else self._failed.add)(record.key)
        return before != self._failed

    def _gpu(self, key: GpuKey) -> RosterGpu:
        return self._gpus.get(key) or RosterGpu(key=key)

    def _swap(self, now_s: float) -> None:
        found = []
        for key in sorted(self._gpus, key=lambda key: key.order):
            gpu, card = self._gpus[key], self._gpus.get(card_of(key))
            is_old = gpu.processes_s is not None and now_s - gpu.processes_s > self._hold_s
            found.append(
                replace(
                    gpu,
                    pci_bus_id=card.pci_bus_id if card else None,
                    device=card.device if card else None,
                    is_divided=self._layout.is_divided(key),
                    processes=None if is_old else gpu.processes,
                    has_failed=card_of(key) in self._failed,
                )
            )
        self._picture = tuple(found)
