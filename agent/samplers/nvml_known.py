"""The GPUs that were seen since the start, by UUID: their numbers, and which of their readings are due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent.clock import Instant
from agent.records import GpuInfo, GpuKey
from agent.samplers.nvml_device import Identity


@dataclass(slots=True)
class Due:
    """When something slower than the core tick is due again; at once until it was taken."""

    at_s: float = float("-inf")

    def take(self, now: Instant, period_s: float, tolerance_s: float) -> bool:
        """Return whether it is due, give or take `tolerance_s`, and if so set the next time."""
        if now.monotonic_s < self.at_s - tolerance_s:
            return False
        self.at_s = now.monotonic_s + period_s
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class KnownGpu:
    """A GPU that was seen since the start; stays when it is gone."""

    key: GpuKey
    identity: Identity
    state: str = "ok"
    absent_state: str = "lost"  # its state while nothing is read of it: the last cause that is known
    answered_tick: int | None = None  # the last tick in which it could be read
    slow: Due = field(default_factory=Due)
    limits: Due = field(default_factory=Due)
    info: Due = field(default_factory=Due)
    fast: Due = field(default_factory=Due)

    @property
    def name(self) -> str:
        """What to call this GPU in a sentence."""
        return f"GPU {self.key.gpu} ({self.key.uuid or 'UUID not readable'})"

    def attached(self, identity: Identity) -> None:
        """Note that the GPU was found, for the first time or anew: everything is due."""
        self.identity = identity
        self.slow, self.limits, self.info = Due(), Due(), Due()

    def is_same(self, identity: Identity) -> bool:
        """Return whether this is the GPU that says so of itself, by UUID or, where that was not read, by address."""
        if identity.uuid is not None and self.key.uuid is not None:
            return identity.uuid == self.key.uuid
        address = _pci_address(identity.pci_bus_id)
        return address is not None and address == _pci_address(self.identity.pci_bus_id)

    def info_record(self, now: Instant, driver_version: str | None) -> GpuInfo:
        """Return the identity as a record of this moment."""
        return GpuInfo(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            key=self.key,
            model_name=self.identity.model_name,
            pci_bus_id=self.identity.pci_bus_id,
            device=self.identity.device,
            driver_version=driver_version,
        )


def free_number(index: int, taken: Iterable[int]) -> int:
    """Return the number for a GPU that is new at this position of the driver: the position, or the lowest free one."""
    numbers = set(taken)
    return index if index not in numbers else min(set(range(len(numbers) + 1)) - numbers)


def find_key(gpus: Mapping[str, KnownGpu], *, uuid: str | None = None, pci_bus_id: str | None = None) -> GpuKey | None:
    """Return the key of a GPU by UUID, or by PCI address with or without function and with any width of the domain."""
    if uuid is not None and uuid in gpus:
        return gpus[uuid].key
    address = _pci_address(pci_bus_id)
    if address is None:
        return None
    return next((gpu.key for gpu in tuple(gpus.values()) if _pci_address(gpu.identity.pci_bus_id) == address), None)


def _pci_address(text: str | None) -> tuple[int, ...] | None:
    """Return domain, bus and device; the function of a GPU is always 0, and the kernel's log leaves it out."""
    parts = (text or "").partition(".")[0].split(":")
    try:
        numbers = tuple(int(part, 16) for part in parts)
    except ValueError:
        return None
    return {2: (0, *numbers), 3: numbers}.get(len(numbers))
