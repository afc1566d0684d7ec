"""Counts the NVIDIA GPUs on the PCI bus (/sys/bus/pci/devices), which any user may, with or without a driver."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from agent.clock import Instant

_NVIDIA: Final = "0x10de"
#: Display controllers with and without a screen; NVSwitches, audio and USB functions of boards have other classes.
_GPU_CLASSES: Final = ("0x0300", "0x0302")
#: Seconds between two looks at the bus, which takes milliseconds on a large host.
_COUNT_PERIOD_S: Final = 60.0
#: Drivers that hand a device to a virtual machine: this host has no use of it.
_PASSED_ON: Final = frozenset({"vfio-pci", "pci-stub", "pciback"})


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
