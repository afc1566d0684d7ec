"""The bound on devices that are exported: which ones, that they stay, and the sign of those left out."""

from __future__ import annotations

from agent.devices import DeviceLimit
from agent.records import InfinibandSample, NetworkSample


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
    assert chosen(limit, *reversed(names)) == names[:16]
    assert limit.errors("net_dev") == {"too_many_devices": 284}  # 300 - 16
    assert limit.errors("diskstats") == {}


def test_a_device_keeps_its_place_and_a_free_one_goes_to_the_next():
    limit = DeviceLimit()
    names = [f"eth{n}" for n in range(1, 18)]  # 17: eth17 has no place
    assert chosen(limit, *names) == names[:16]
    # One that comes first by name pushes nobody out; it is the second that is left out.
    assert chosen(limit, "eth0", *names) == names[:16]
    assert limit.errors("net_dev") == {"too_many_devices": 2}
    assert chosen(limit, "eth0", *names) == names[:16]
    assert limit.errors("net_dev") == {"too_many_devices": 2}
    # eth5 is gone: its place goes to eth0, and eth5 has none when it comes back.
    without = [name for name in names if name != "eth5"]
    expected = ["eth0", *(name for name in without if name != "eth17")]
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
