"""The bound on devices that are exported: which ones, that they stay, and the sign of those left out."""

from __future__ import annotations

from agent.devices import DeviceLimit
from agent.records import FilesystemSample, InfinibandPort, InfinibandSample, NetworkLink, NetworkSample


def networks(*names):
    return [
        NetworkSample(monotonic_s=0.0, wall_s=0.0, device=name, receive_bytes_total=0, transmit_bytes_total=0)
        for name in names
    ]


def chosen(limit, *names):
    return [sample.device for sample in limit.choose(NetworkSample, networks(*names))]


def test_the_first_by_name_have_a_place_with_numbers_by_value():
    limit = DeviceLimit()
    names = [f"eth{n}" for n in range(300)]
    assert chosen(limit, *reversed(names)) == names[:10]
    assert limit.errors("net_dev") == {"too_many_devices": 290}  # 300 - 10
    assert limit.errors("diskstats") == {}


def test_a_device_keeps_its_place_and_a_free_one_goes_to_the_next():
    limit = DeviceLimit()
    names = [f"eth{n}" for n in range(1, 12)]  # 11: eth11 has no place
    assert chosen(limit, *names) == names[:10]
    # One that comes first by name pushes nobody out; it is the second that is left out.
    assert chosen(limit, "eth0", *names) == names[:10]
    assert limit.errors("net_dev") == {"too_many_devices": 2}
    assert chosen(limit, "eth0", *names) == names[:10]
    assert limit.errors("net_dev") == {"too_many_devices": 2}
    # eth5 is gone: its place goes to eth0, and eth5 has none when it comes back.
    without = [name for name in names if name != "eth5"]
    expected = ["eth0", *(name for name in without if name != "eth11")]
    assert chosen(limit, "eth0", *without) == expected
    assert chosen(limit, "eth0", *names) == expected


def test_ports_of_one_device_count_each():
    limit = DeviceLimit()
    samples = [
        InfinibandSample(monotonic_s=0.0, wall_s=0.0, device=f"mlx5_{n // 2}", port=n % 2 + 1) for n in range(20)
    ]
    kept = limit.choose(InfinibandSample, samples)
    assert [(sample.device, sample.port) for sample in kept][-1] == ("mlx5_5", 2)  # 12 ports
    assert limit.errors("infiniband") == {"too_many_devices": 8}


def test_what_says_more_of_a_device_goes_by_its_place():
    limit = DeviceLimit()
    chosen(limit, *(f"eth{n}" for n in range(20)))
    links = [NetworkLink(monotonic_s=0.0, wall_s=0.0, device=f"eth{n}") for n in (10, 3, 2)]
    assert [link.device for link in limit.more_of_chosen(NetworkLink, links)] == ["eth2", "eth3"]
    limit.choose(InfinibandSample, [InfinibandSample(monotonic_s=0.0, wall_s=0.0, device="mlx5_0", port=2)])
    ports = [InfinibandPort(monotonic_s=0.0, wall_s=0.0, device="mlx5_0", port=number) for number in (1, 2)]
    assert [port.port for port in limit.more_of_chosen(InfinibandPort, ports)] == [2]


def test_file_systems_have_places_by_mountpoint_however_it_is_called():
    limit = DeviceLimit()
    names = ["/mnt/9" + "9" * 5000, *(f"/mnt/{n}" for n in range(11))]
    mounts = [FilesystemSample(monotonic_s=0.0, wall_s=0.0, mountpoint=name, fstype="nfs4") for name in names]
    assert [mount.mountpoint for mount in limit.choose(FilesystemSample, mounts)] == [f"/mnt/{n}" for n in range(8)]
    assert limit.errors("filesystems") == {"too_many_devices": 4}  # 12 - 8
