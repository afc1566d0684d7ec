"""GPUs on the PCI bus, counted from a tree as the kernel lays it out."""

from __future__ import annotations

from agent.clock import Instant
from agent.samplers.pci import ExpectedGpus, count_nvidia_gpus


def device(root, address, vendor, kind, driver=None):
    folder = root / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")
    if driver:
        (root / "bus" / "pci" / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(f"../../drivers/{driver}")


def test_gpus_of_nvidia_count_with_and_without_a_driver(tmp_path):
    device(tmp_path, "0000:1b:00.0", "0x10de", "0x030200", "nvidia")
    device(tmp_path, "0000:3b:00.0", "0x10de", "0x030200")
    device(tmp_path, "0000:41:00.0", "0x10de", "0x030000", "nouveau")
    assert count_nvidia_gpus(tmp_path) == 3


def test_what_is_no_gpu_of_this_host_does_not_count(tmp_path):
    device(tmp_path, "0000:1b:00.0", "0x10de", "0x030200", "vfio-pci")  # given to a virtual machine
    device(tmp_path, "0000:1b:00.1", "0x10de", "0x040300")  # its audio function
    device(tmp_path, "0000:c1:00.0", "0x10de", "0x068000", "nvidia-nvswitch")
    device(tmp_path, "0000:05:00.0", "0x1002", "0x030000", "amdgpu")
    (tmp_path / "bus" / "pci" / "devices" / "0000:99:00.0").mkdir()  # its files are gone
    assert count_nvidia_gpus(tmp_path) == 0


def test_without_a_bus_nothing_is_said(tmp_path):
    assert count_nvidia_gpus(tmp_path) is None


def test_what_is_expected(tmp_path):
    device(tmp_path, "0000:1b:00.0", "0x10de", "0x030200")
    start, later = Instant(0.0, 0.0), Instant(60.0, 60.0)
    expected = ExpectedGpus(tmp_path, None)
    assert expected.count(0, start) == 1  # the driver shows none: what is on the bus
    device(tmp_path, "0000:3b:00.0", "0x10de", "0x030200")
    assert expected.count(0, Instant(59.0, 59.0)) == 1  # the bus is looked at once a minute
    assert expected.count(0, later) == 2
    assert expected.count(1, later) == 1  # a container that may use one of two
    assert ExpectedGpus(tmp_path, 8).count(1, start) == 8
    assert ExpectedGpus(tmp_path / "absent", None).count(0, start) == 0
