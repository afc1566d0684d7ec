"""The network interface sampler on trees of /proc and /sys made after the kernel's documentation."""

import pytest

from agent.clock import Instant
from agent.records import NetworkSample
from agent.samplers import SourceUnavailableError
from agent.samplers.net_dev import InterfaceCounters, NetDevSampler, choose_interfaces, parse_net_dev
from tests.machines import unpack_machine

NOW = Instant(100.0, 1_700_000_000.0)


def sampler_of(root):
    sampler = NetDevSampler(root / "proc", root / "sys")
    assert sampler.probe()
    return sampler


def test_node_counts_each_byte_once(machine):
    """Hardware counts; the bond, its VLAN, the bridge, veth, ifb, a virtual function and its representor do not."""
    sampler = sampler_of(machine("gpu_node"))
    found = {record.device: record for record in sampler.sample(NOW)}
    sampler.close()
    assert set(found) == {"eno1", "ens1f0np0", "ens1f1np1", "ib0"}
    # Columns 1 and 9 behind the name, as they stand in the file.
    assert found["eno1"] == NetworkSample(
        monotonic_s=100.0,
        wall_s=1_700_000_000.0,
        device="eno1",
        receive_bytes_total=123456789,
        transmit_bytes_total=987654321,
    )
    assert found["ens1f1np1"].receive_bytes_total == 2**64 - 1  # the largest value of a 64-bit counter
    assert dict(sampler.errors) == {}


def test_container_without_hardware_counts_its_veth_alone(machine):
    """Here eth0 is one end of a veth pair; tunnels, taps and bridges repeat it."""
    sampler = sampler_of(machine("container"))
    (record,) = sampler.sample(NOW)
    sampler.close()
    assert (record.device, record.receive_bytes_total, record.transmit_bytes_total) == ("eth0", 4096, 8192)


def test_old_kernel_has_no_blank_after_the_colon(machine):
    sampler = sampler_of(machine("old_kernel"))
    (record,) = sampler.sample(NOW)
    sampler.close()
    assert (record.device, record.receive_bytes_total, record.transmit_bytes_total) == ("eth0", 4294967295, 17)


def test_damaged_lines_cost_themselves_only(machine):
    """eth1 and eth5 are cut, eth2 holds letters, eth3 a sign, ../x would leave /sys: five lines."""
    sampler = sampler_of(machine("damaged"))
    found = [(r.device, r.receive_bytes_total, r.transmit_bytes_total) for r in sampler.sample(NOW)]
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
    assert parse_net_dev(line.format(0)) == ((InterfaceCounters("eth0", 0, 2),), 0)


def test_name_that_is_not_utf8_is_escaped(tmp_path):
    """The kernel takes any byte in a name; a label has to be valid Unicode."""
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_bytes(b"et\xff0: 1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n")
    sampler = NetDevSampler(tmp_path, tmp_path)
    (record,) = sampler.sample(NOW)
    sampler.close()
    assert record.device == "et\\xff0"


def test_upper_device_with_hardware_of_its_own_counts_through_its_lower(tmp_path):
    """A paravirtual card over a virtual function has a device entry too, and counts the same bytes."""
    for name in ("eth0", "enP1s1"):
        (tmp_path / "class" / "net" / name / "device").mkdir(parents=True)
    (tmp_path / "class" / "net" / "eth0" / "lower_enP1s1").symlink_to("../enP1s1")
    assert choose_interfaces(["lo", "eth0", "enP1s1"], tmp_path) == {"enP1s1"}


def test_bond_without_visible_ports_counts_itself(tmp_path):
    (tmp_path / "class" / "net" / "bond0").mkdir(parents=True)
    assert choose_interfaces(["bond0"], tmp_path) == {"bond0"}


def test_new_interface_is_seen_at_the_next_tick(machine, tmp_path):
    """The choice is kept while the names stay, and made again when one comes or goes."""
    root = unpack_machine("old_kernel", tmp_path / "root")
    sampler = NetDevSampler(root / "proc", root / "sys")
    assert [record.device for record in sampler.sample(NOW)] == ["eth0"]
    (root / "sys" / "class" / "net" / "eth1" / "device").mkdir(parents=True)
    with (root / "proc" / "net" / "dev").open("a") as file:
        file.write("  eth1:7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0\n")
    assert [record.device for record in sampler.sample(NOW.later(1.0))] == ["eth0", "eth1"]
    sampler.close()


def test_bond_formed_later_is_seen_within_a_minute(machine, tmp_path):
    root = unpack_machine("container", tmp_path / "root")
    sampler = NetDevSampler(root / "proc", root / "sys")
    assert [record.device for record in sampler.sample(NOW)] == ["eth0"]
    (root / "sys" / "class" / "net" / "tap7" / "device").mkdir()
    assert [record.device for record in sampler.sample(NOW.later(59.0))] == ["eth0"]
    assert [record.device for record in sampler.sample(NOW.later(60.0))] == ["tap7"]
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
    assert len(sampler.sample(NOW)) == 1
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


def test_this_machine():
    """The real /proc/net/dev parses without a malformed line, and its counters never fall."""
    sampler = NetDevSampler()
    if not sampler.probe():
        pytest.skip("no /proc/net/dev here")
    first = {record.device: record for record in sampler.sample(NOW)}
    for record in sampler.sample(NOW.later(1.0)):
        assert record.receive_bytes_total >= first[record.device].receive_bytes_total
    sampler.close()
    assert dict(sampler.errors) == {}
    assert "lo" not in first
