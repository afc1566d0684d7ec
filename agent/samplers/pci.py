"""Counts the NVIDIA GPUs on the PCI bus (/sys/bus/pci/devices), which any user may, with or without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_NVIDIA: Final = "0x10de"
#: Display controllers with and without a screen; NVSwitches, audio and USB functions of boards have other classes.
_GPU_CLASSES: Final = ("0x0300", "0x0302")
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
