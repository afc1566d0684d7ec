"""The PCI bus as /sys shows it to any user, with or without a driver: how many NVIDIA GPUs, and what is near them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final, TypeVar

from agent.clock import Instant

_NVIDIA: Final = "0x10de"
#: Display controllers with and without a screen; NVSwitches, audio and USB functions of boards have other classes.
_GPU_CLASSES: Final = ("0x0300", "0x0302")
#: Seconds between two looks at the bus, which takes milliseconds on a large host.
_COUNT_PERIOD_S: Final = 60.0
#: Drivers that hand a device to a virtual machine: this host has no use of it.
_PASSED_ON: Final = frozenset({"vfio-pci", "pci-stub", "pciback"})
#: domain:bus:device.function; NVML writes 8 digits of domain in capitals, the kernel at least 4 in small letters.
_ADDRESS: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE | re.ASCII)

#: Where a device hangs: the components of its path in /sys/devices, from the root of the tree to the device.
PciPath = tuple[str, ...]
Place = TypeVar("Place")


def sysfs_address(address: str) -> str | None:
    """Return a PCI address as the kernel writes it (00000000:1B:00.0 is 0000:1b:00.0), None where it is none."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()


def device_path(link: Path) -> PciPath | None:
    """Return where the device behind a link of /sys hangs, None where there is none."""
    path = link.resolve()
    return path.parts if path.is_dir() else None


def nearest_gpus(
    places: Mapping[Place, PciPath | None], addresses: Sequence[str], sys_root: Path
) -> dict[Place, tuple[str, ...]]:
    """Return for each place the GPUs that no other place is nearer to, in the order and spelling of `addresses`.

    The nearer of two is the one whose common bridge with the GPU lies deeper in the tree. Equally near ones both get
    the GPU, so where the tree tells nothing, as in many virtual machines, each place gets each GPU. A place without
    a path and a GPU that is not on the bus of this host are near nothing.
    """
    near: dict[Place, list[str]] = {place: [] for place in places}
    for address in dict.fromkeys(addresses):
        known = sysfs_address(address)
        gpu = device_path(sys_root / "bus" / "pci" / "devices" / known) if known else None
        if gpu is None:
            continue
        depths = {place: _common_depth(gpu, path) for place, path in places.items() if path is not None}
        for place, depth in depths.items():
            if depth == max(depths.values()):
                near[place].append(address)
    return {place: tuple(gpus) for place, gpus in near.items()}


def _common_depth(one: PciPath, other: PciPath) -> int:
    return sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], zip(one, other, strict=False)))


def count_nvidia_gpus(sys_root: Path) -> int | None:
    """Return how many NVIDIA GPUs the kernel shows, without those that are passed on to virtual machines.

    None where /sys cannot be read. In a container this counts the host's GPUs, whichever the container may use.
    Source: https://docs.kernel.org/PCI/sysfs-pci.html
    """
    devices = sys_root / "bus" / "pci" / "devices"
    try:
        return sum(_is_gpu(device) for device in devices.iterdir())
    except OSError:
        return None


class ExpectedGpus:
    """How many GPUs this host should have, so that one that never showed is missed too."""

    def __init__(self, sys_root: Path, configured: int | None) -> None:
        self._sys_root = sys_root
        self._configured = configured
        self._on_bus: int | None = None
        self._counted_s = -math.inf

    def count(self, seen: int, now: Instant) -> int:
        """Return what the configuration says; without it the most that the driver has shown, `seen`.

        Where it has shown none, it is what is on the PCI bus: a node whose driver did not come up expects its GPUs.
        Once some were seen the bus no longer counts, for a container may be meant to use a part of the host's GPUs.
        """
        if self._configured is not None:
            return self._configured
        if seen:
            return seen
        if now.monotonic_s - self._counted_s >= _COUNT_PERIOD_S:
            self._on_bus, self._counted_s = count_nvidia_gpus(self._sys_root), now.monotonic_s
        return self._on_bus or 0


def _is_gpu(device: Path) -> bool:
    try:
        vendor = (device / "vendor").read_text(encoding="ascii", errors="replace").strip()
        kind = (device / "class").read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # unplugged in between
        return False
    if vendor != _NVIDIA or not kind.startswith(_GPU_CLASSES):
        return False
    driver = device / "driver"
    return not (driver.is_symlink() and driver.readlink().name in _PASSED_ON)
