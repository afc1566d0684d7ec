"""GPUs on the PCI bus, counted from a tree as the kernel lays it out."""

from __future__ import annotations

from agent.clock import Instant
from agent.samplers.pci import ExpectedGpus, count_nvidia_gpus, device_path, nearest_gpus, sysfs_address


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


def test_gpus_of_whole_machines_count(machine):
    """Not the NVSwitches of the first, nor the audio function of the last."""
    for name, count in (("dgx_slurm", 8), ("roce_kubernetes", 8), ("cloud_efa_fuse", 4), ("desktop", 1)):
        assert count_nvidia_gpus(machine(name) / "sys") == count


def test_addresses_as_the_kernel_writes_them():
    assert sysfs_address("00000000:1B:00.0") == "0000:1b:00.0"
    assert sysfs_address("0000:df:1F.7") == "0000:df:1f.7"
    assert sysfs_address("00010000:E1:00.0") == "10000:e1:00.0"  # domains of virtual machines need five digits
    for text in ("", "1b:00.0", "0000:1b:00.8", "0000:1b:00", "../../x:1b:00.0", "00000000:1B:00.0\n", "0000:1b:0٣.0"):
        assert sysfs_address(text) is None


def tree(root, *paths):
    """Make devices at paths below /sys/devices and their links on the bus; return where each hangs."""
    found = []
    for path in paths:
        folder = root / "devices" / path
        folder.mkdir(parents=True)
        link = root / "bus" / "pci" / "devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../devices/{path}")
        found.append(device_path(link))
    return found


def test_nearest_is_by_the_deepest_common_bridge(tmp_path):
    """Two GPUs and a card under one switch; another card under the same root port; a third on another root."""
    gpu_1, gpu_2, gpu_3 = "0000:04:00.0", "0000:05:00.0", "0000:83:00.0"
    _, _, _, switch, port, other = tree(
        tmp_path,
        f"pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/{gpu_1}",
        f"pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/{gpu_2}",
        f"pci0000:80/0000:80:01.0/{gpu_3}",
        "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:06:00.0",
        "pci0000:00/0000:00:01.0/0000:01:00.1/0000:07:00.0",
        "pci0000:80/0000:80:02.0/0000:84:00.0",
    )
    places = {"switch": switch, "port": port, "other": other}
    gpus = (gpu_1, gpu_2, gpu_3)
    assert nearest_gpus(places, gpus, tmp_path) == {"switch": (gpu_1, gpu_2), "port": (), "other": (gpu_3,)}
    # Without the card under the switch the one under the root port is the nearest.
    del places["switch"]
    assert nearest_gpus(places, gpus, tmp_path) == {"port": (gpu_1, gpu_2), "other": (gpu_3,)}


def test_equally_near_places_share_a_gpu(tmp_path):
    """Two ports of one card; and a virtual machine that puts each device on a root of its own."""
    gpu = "0000:04:00.0"
    _, card, far = tree(
        tmp_path, f"pci0000:00/0000:00:01.0/{gpu}", "pci0000:00/0000:00:02.0/0000:05:00.0", "pci0001:00/0001:00:00.0"
    )
    assert nearest_gpus({1: card, 2: card, 3: far}, (gpu,), tmp_path) == {1: (gpu,), 2: (gpu,), 3: ()}
    assert nearest_gpus({3: far}, (gpu,), tmp_path) == {3: (gpu,)}


def test_what_is_not_on_the_bus_is_near_nothing(tmp_path):
    gpu = "0000:04:00.0"
    (path,) = tree(tmp_path, f"pci0000:00/0000:00:01.0/{gpu}")
    assert device_path(tmp_path / "absent") is None
    assert nearest_gpus({"a": None, "b": path}, (gpu, gpu, "0000:05:00.0", "no address"), tmp_path) == {
        "a": (),
        "b": (gpu,),  # once, though both instances of a divided card have its address
    }
    assert nearest_gpus({}, (gpu,), tmp_path) == {}
