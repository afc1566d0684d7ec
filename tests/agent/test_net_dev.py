"""The network interface sampler on trees of /proc and /sys made after the kernel's documentation."""

import os
import time

import pytest

from agent.clock import Instant
from agent.records import NetworkLink, NetworkSample
from agent.samplers import SourceUnavailableError
from agent.samplers.net_dev import (
    MAX_INTERFACES,
    MAX_LINES,
    InterfaceCounters,
    NetDevSampler,
    choose_interfaces,
    parse_net_dev,
)
from agent.samplers.net_link import default_route_interfaces
from tests.machines import unpack_machine

NOW = Instant(100.0, 1_700_000_000.0)


def sampler_of(root):
    sampler = NetDevSampler(root / "proc", root / "sys")
    assert sampler.probe()
    return sampler


def counters(sampler, now=NOW):
    return [record for record in sampler.sample(now) if isinstance(record, NetworkSample)]


def links(sampler, now=NOW):
    return {record.device: record for record in sampler.sample(now) if isinstance(record, NetworkLink)}


def test_node_counts_each_byte_once(machine):
    """Hardware counts; the bond, its VLAN, the bridge, veth, ifb, a virtual function and its representor do not."""
    sampler = sampler_of(machine("gpu_node"))
    found = {record.device: record for record in counters(sampler)}
    sampler.close()
    assert set(found) == {"eno1", "ens1f0np0", "ens1f1np1", "ib0"}
    # Columns 1 to 4 and 9 to 12 behind the name, as they stand in the file.
    assert found["eno1"] == NetworkSample(
        monotonic_s=100.0,
        wall_s=1_700_000_000.0,
        device="eno1",
        receive_bytes_total=123456789,
        transmit_bytes_total=987654321,
        receive_packets_total=90000,
        transmit_packets_total=80000,
        receive_errors_total=0,
        transmit_errors_total=0,
        receive_drops_total=0,
        transmit_drops_total=0,
    )
    assert found["ens1f1np1"].receive_bytes_total == 2**64 - 1  # the largest value of a 64-bit counter
    assert dict(sampler.errors) == {}


def test_container_without_hardware_counts_its_veth_alone(machine):
    """Here eth0 is one end of a veth pair; tunnels, taps and bridges repeat it."""
    sampler = sampler_of(machine("container"))
    (record,) = counters(sampler)
    sampler.close()
    assert (record.device, record.receive_bytes_total, record.transmit_bytes_total) == ("eth0", 4096, 8192)


def test_old_kernel_has_no_blank_after_the_colon(machine):
    sampler = sampler_of(machine("old_kernel"))
    (record,) = counters(sampler)
    sampler.close()
    assert (record.device, record.receive_bytes_total, record.transmit_bytes_total) == ("eth0", 4294967295, 17)


def test_damaged_lines_cost_themselves_only(machine):
    """eth1 and eth5 are cut, eth2 holds letters, eth3 a sign, ../x would leave /sys: five lines."""
    sampler = sampler_of(machine("damaged"))
    found = [(r.device, r.receive_bytes_total, r.transmit_bytes_total) for r in counters(sampler)]
    sampler.close()
    assert found == [("eth0", 1000, 2000), ("eth4", 6, 7)]
    assert dict(sampler.errors) == {"malformed": 5}


def test_every_cut_of_the_file_gives_true_values_or_none(machine):
    """A file cut at any byte never yields a number that the whole file does not hold."""
    text = (machine("gpu_node") / "proc" / "net" / "dev").read_text()
    whole = set(parse_net_dev(text)[0])
    assert len(whole) == 12
    for length in range(len(text)):
        assert set(parse_net_dev(text[:length])[0]) <= whole


def test_numbers_the_kernel_cannot_write_are_refused():
    line = "eth0: {} 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n"
    for number in ("1_000", "+1", "0x10", "1.5", "9" * 21, "²", "١"):
        assert parse_net_dev(line.format(number)) == ((), 1)
    assert parse_net_dev(line.format(0)) == ((InterfaceCounters("eth0", 0, 1, 0, 0, 2, 1, 0, 0),), 0)


def test_name_that_is_not_utf8_is_escaped(tmp_path):
    """The kernel takes any byte in a name; a label has to be valid Unicode."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_bytes(b"et\xff0: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n")
    sampler = NetDevSampler(tmp_path, tmp_path)
    (record,) = counters(sampler)
    sampler.close()
    assert record.device == "et\\xff0"


def test_upper_device_with_hardware_of_its_own_counts_through_its_lower(tmp_path):
    """A paravirtual card over a virtual function has a device entry too, and counts the same bytes."""
    for name in ("eth0", "enP1s1"):
        (tmp_path / "class" / "net" / name / "device").mkdir(parents=True)
    (tmp_path / "class" / "net" / "eth0" / "lower_enP1s1").symlink_to("../enP1s1")
    assert choose_interfaces(["lo", "eth0", "enP1s1"], tmp_path) == ({"enP1s1"}, 0)


def test_bond_without_visible_ports_counts_itself(tmp_path):
    (tmp_path / "class" / "net" / "bond0").mkdir(parents=True)
    assert choose_interfaces(["bond0"], tmp_path) == ({"bond0"}, 0)


def test_new_interface_is_seen_at_the_next_tick(machine, tmp_path):
    """The choice is kept while the names stay, and made again when one comes or goes."""
    root = unpack_machine("old_kernel", tmp_path / "root")
    sampler = NetDevSampler(root / "proc", root / "sys")
    assert [record.device for record in counters(sampler)] == ["eth0"]
    (root / "sys" / "class" / "net" / "eth1" / "device").mkdir(parents=True)
    with (root / "proc" / "net" / "dev").open("a") as file:
        file.write("  eth1:7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0\n")
    assert [record.device for record in counters(sampler, NOW.later(1.0))] == ["eth0", "eth1"]
    sampler.close()


def test_bond_formed_later_is_seen_within_a_minute(machine, tmp_path):
    root = unpack_machine("container", tmp_path / "root")
    sampler = NetDevSampler(root / "proc", root / "sys")
    assert [record.device for record in counters(sampler)] == ["eth0"]
    (root / "sys" / "class" / "net" / "tap7" / "device").mkdir()
    assert [record.device for record in counters(sampler, NOW.later(59.0))] == ["eth0"]
    assert [record.device for record in counters(sampler, NOW.later(60.0))] == ["tap7"]
    sampler.close()


def test_missing_file_is_absent_and_found_when_it_comes(tmp_path):
    sampler = NetDevSampler(tmp_path, tmp_path)
    assert not sampler.probe()
    with pytest.raises(SourceUnavailableError, match="dev is not there") as caught:
        sampler.sample(NOW)
    assert caught.value.reason == "absent"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_text("eth0: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n")
    assert sampler.probe()
    assert len(counters(sampler)) == 1
    sampler.close()
    sampler.close()


def test_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "net" / "dev").mkdir(parents=True)  # a directory: read fails with EISDIR, for root too
    with pytest.raises(SourceUnavailableError, match="cannot be read: Is a directory") as caught:
        NetDevSampler(tmp_path, tmp_path).probe()
    assert caught.value.reason == "unreadable"


def test_empty_file_brings_nothing(tmp_path):
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_text("")
    sampler = NetDevSampler(tmp_path, tmp_path)
    assert sampler.sample(NOW) == ()
    sampler.close()


def test_every_count_is_in_its_field(tmp_path):
    """Sixteen different numbers: receive bytes, packets, errors, drops are 1 to 4, those of transmission 9 to 12."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_text("eth0: " + " ".join(str(number) for number in range(1, 17)) + "\n")
    sampler = NetDevSampler(tmp_path, tmp_path)
    (record,) = counters(sampler)
    sampler.close()
    assert record == NetworkSample(
        monotonic_s=100.0,
        wall_s=1_700_000_000.0,
        device="eth0",
        receive_bytes_total=1,
        receive_packets_total=2,
        receive_errors_total=3,
        receive_drops_total=4,
        transmit_bytes_total=9,
        transmit_packets_total=10,
        transmit_errors_total=11,
        transmit_drops_total=12,
    )


def test_links_of_a_node(machine):
    """1 Gbit/s is 125 MB/s, 100 Gbit/s 12.5 GB/s; the default route leaves by the slow one."""
    sampler = sampler_of(machine("dgx_slurm"))
    found = links(sampler)
    sampler.close()
    assert found == {
        "eno3": NetworkLink(
            monotonic_s=100.0,
            wall_s=1_700_000_000.0,
            device="eno3",
            speed_bytes_per_second=125e6,
            is_up=True,
            carrier_changes_total=2,
            is_default_route=True,
        ),
        "ens6f0np0": NetworkLink(
            monotonic_s=100.0,
            wall_s=1_700_000_000.0,
            device="ens6f0np0",
            speed_bytes_per_second=12.5e9,
            is_up=True,
            carrier_changes_total=4,
            is_default_route=False,
        ),
    }


def test_interfaces_of_whole_machines(machine):
    """Those of pods and containers repeat the hardware's; a card may say -1 for its speed, a wireless one has none."""
    expected = {
        "roce_kubernetes": {"eth0": (3.125e9, True), **{f"eth{index}": (25e9, False) for index in range(1, 5)}},
        "cloud_efa_fuse": {"ens5": (None, True)},
        "desktop": {"enp4s0": (125e6, True), "wlan0": (None, False)},
    }
    for name, interfaces in expected.items():
        sampler = sampler_of(machine(name))
        found = {link.device: (link.speed_bytes_per_second, link.is_default_route) for link in links(sampler).values()}
        sampler.close()
        assert found == interfaces
        assert dict(sampler.errors) == {}


def test_links_come_every_five_seconds(machine):
    sampler = sampler_of(machine("desktop"))
    ticks = [second for second in range(16) if links(sampler, NOW.later(second - 0.01 * (second % 3)))]
    sampler.close()
    assert ticks == [0, 5, 10, 15]


def link_tree(root, name, **files):
    folder = root / "sys" / "class" / "net" / name
    (folder / "device").mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n")
    (root / "proc" / "net").mkdir(parents=True, exist_ok=True)
    with (root / "proc" / "net" / "dev").open("a") as dev:
        dev.write(f"{name}: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n")


def test_links_that_are_down_or_say_little(tmp_path):
    link_tree(tmp_path, "down", operstate="down", speed="10000", carrier_changes="3")
    link_tree(tmp_path, "unknown_up", operstate="unknown", carrier="1", speed="4294967295")
    link_tree(tmp_path, "unknown_down", operstate="unknown", carrier="0", speed="100")
    link_tree(tmp_path, "silent")
    link_tree(tmp_path, "zero", operstate="up", speed="0", carrier_changes="x")
    sampler = sampler_of(tmp_path)
    found = {
        name: (link.is_up, link.speed_bytes_per_second, link.carrier_changes_total, link.is_default_route)
        for name, link in links(sampler).items()
    }
    sampler.close()
    assert found == {
        "down": (False, None, 3, None),  # some drivers go on telling the last speed
        "unknown_up": (True, None, None, None),  # -1, as old kernels wrote it
        "unknown_down": (False, None, None, None),
        "silent": (None, None, None, None),
        "zero": (True, None, None, None),
    }


def test_speed_is_asked_for_when_the_link_changed_or_a_minute_passed(tmp_path):
    link_tree(tmp_path, "eth0", operstate="up", speed="1000", carrier_changes="2")
    folder = tmp_path / "sys" / "class" / "net" / "eth0"
    sampler = sampler_of(tmp_path)
    assert links(sampler)["eth0"].speed_bytes_per_second == 125e6
    (folder / "speed").write_text("100\n")
    assert links(sampler, NOW.later(5.0))["eth0"].speed_bytes_per_second == 125e6
    (folder / "carrier_changes").write_text("4\n")
    assert links(sampler, NOW.later(10.0))["eth0"].speed_bytes_per_second == 12.5e6
    (folder / "speed").write_text("10\n")
    assert links(sampler, NOW.later(65.0))["eth0"].speed_bytes_per_second == 12.5e6
    assert links(sampler, NOW.later(70.0))["eth0"].speed_bytes_per_second == 1.25e6
    sampler.close()


def test_default_route_over_a_vlan_over_a_bond_names_its_hardware(machine, tmp_path):
    """bond0.100 lies over bond0, which lies over ens1f0np0 and ens1f1np1; eno1 has a default route of higher metric."""
    root = unpack_machine("gpu_node", tmp_path / "root")
    (root / "proc" / "net" / "route").write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "bond0.100\t00000000\t0101A8C0\t0003\t0\t0\t50\t00000000\t0\t0\t0\n"
        "eno1\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    )
    sampler = sampler_of(root)
    found = {name: link.is_default_route for name, link in links(sampler).items()}
    sampler.close()
    assert found == {"eno1": False, "ens1f0np0": True, "ens1f1np1": True, "ib0": False}


def test_default_route_over_a_virtual_function_is_carried_by_its_physical_one(machine, tmp_path):
    root = unpack_machine("gpu_node", tmp_path / "root")
    (root / "proc" / "net" / "ipv6_route").write_text(
        f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 27}1 00000400 00000003 00000000 00450003 ens1f0v0\n"
    )
    sampler = sampler_of(root)
    assert {name for name, link in links(sampler).items() if link.is_default_route} == {"ens1f0np0"}
    sampler.close()


def test_default_routes():
    """Lowest metric of each family; a route that is not up, or that refuses, does not count."""
    ipv4 = "{}\t{}\t0101A8C0\t{}\t0\t0\t{}\t{}\t0\t0\t0\n"
    any4 = "00000000"
    table = (
        ipv4.format("eth0", any4, "0003", 100, any4)
        + ipv4.format("eth1", any4, "0003", 20, any4)
        + ipv4.format("eth2", any4, "0002", 10, any4)  # not up
        + ipv4.format("eth3", any4, "0203", 10, any4)  # refuses
        + ipv4.format("eth4", any4, "0003", 10, "00FFFFFF")  # 0.0.0.0/24
        + ipv4.format("eth5", "0001A8C0", "0001", 0, "00FFFFFF")
        + ipv4.format("eth6", any4, "zz", 0, any4)
        + "eth7\t00000000\t01"  # cut
    )
    assert default_route_interfaces(table, None) == {"eth1"}
    ipv6 = "{} {} {} 00 {} {} 00000001 00000000 {} {:>8}\n"
    zero = "0" * 32
    table6 = (
        ipv6.format(zero, "00", zero, zero, "ffffffff", "00200200", "lo")  # the route of last resort, which refuses
        + ipv6.format(zero, "00", zero, zero, "00000400", "00000003", "eth8")
        + ipv6.format(zero, "00", zero, zero, "00000400", "00000003", "eth9")  # two ways of equal cost
        + ipv6.format(zero, "40", zero, zero, "00000001", "00000001", "eth5")
    )
    assert default_route_interfaces(None, table6) == {"eth8", "eth9"}
    assert default_route_interfaces(table, table6) == {"eth1", "eth8", "eth9"}
    assert default_route_interfaces("", "") == frozenset()
    assert default_route_interfaces(None, None) is None


def test_links_that_form_a_ring_end(tmp_path):
    """No kernel makes such; a look-up has to end nevertheless."""
    link_tree(tmp_path, "eth0", operstate="up")
    net = tmp_path / "sys" / "class" / "net"
    for upper, lower in (("a", "b"), ("b", "a"), ("b", "eth0")):
        (net / upper / f"lower_{lower}").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "route").write_text("a\t00000000\t0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
    sampler = sampler_of(tmp_path)
    assert links(sampler)["eth0"].is_default_route is True
    sampler.close()


@pytest.mark.parametrize("has_hardware", [True, False])
def test_thousands_of_interfaces(tmp_path, has_hardware):
    """Records, time and look-ups stay bounded, and a name that is not UTF-8 is escaped among them."""
    net = tmp_path / "sys" / "class" / "net"
    names = [b'bad\xff"\n'[:5], *(f"pod{index}".encode() for index in range(3000))]
    for name in names:
        folder = net / os.fsdecode(name)
        (folder / "device" if has_hardware else folder).mkdir(parents=True)
    (tmp_path / "proc" / "net").mkdir(parents=True)
    row = b"%s: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n"
    (tmp_path / "proc" / "net" / "dev").write_bytes(b"".join(row % name for name in names))
    sampler = sampler_of(tmp_path)
    began = time.process_time()
    first = counters(sampler)
    chosen_s = time.process_time() - began
    assert len(first) == MAX_INTERFACES
    assert first[0].device == 'bad\\xff"'
    assert dict(sampler.errors) == {"too_many_interfaces": 3001 - 64}
    began = time.process_time()
    for second in range(1, 21):
        assert len(sampler.sample(NOW.later(second))) == MAX_INTERFACES * (2 if second % 5 == 0 else 1)
    tick_s = (time.process_time() - began) / 20
    sampler.close()
    assert sampler.errors["too_many_interfaces"] == 3001 - 64  # counted once
    # Some 0.1 s and 0.003 s here; a look at all pairs would take a minute.
    assert chosen_s < 2.0
    assert tick_s < 0.1


def test_more_lines_than_are_looked_at(tmp_path):
    (tmp_path / "net").mkdir()
    rows = [f"veth{index}: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n" for index in range(MAX_LINES - 1)]
    beyond = "eth1: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n"
    (tmp_path / "net" / "dev").write_text("".join([*rows, beyond.replace("eth1", "eth0"), beyond]))
    sampler = NetDevSampler(tmp_path, tmp_path)
    assert [record.device for record in counters(sampler)] == ["eth0"]
    assert dict(sampler.errors) == {"too_many_lines": 1}
    sampler.close()


def test_this_machine():
    """The real /proc/net/dev parses without a malformed line, and its counters never fall."""
    sampler = NetDevSampler()
    if not sampler.probe():
        pytest.skip("no /proc/net/dev here")
    first = {record.device: record for record in counters(sampler)}
    for record in counters(sampler, NOW.later(1.0)):
        assert record.receive_bytes_total >= first[record.device].receive_bytes_total
    sampler.close()
    assert dict(sampler.errors) == {}
    assert "lo" not in first
