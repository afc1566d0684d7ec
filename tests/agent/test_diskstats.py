"""The block device sampler on trees of /proc and /sys made after the kernel's documentation."""

import pytest

from agent.clock import Instant
from agent.records import DiskSample
from agent.samplers import SourceUnavailableError
from agent.samplers.diskstats import DiskCounters, DiskstatsSampler, choose_disks, nvme_transport, parse_diskstats
from tests.machines import unpack_machine

NOW = Instant(100.0, 1_700_000_000.0)


def sampler_of(root):
    sampler = DiskstatsSampler(root / "proc", root / "sys")
    assert sampler.probe()
    return sampler


def test_node_counts_each_byte_once(machine):
    """Whole disks with a size count: no partition, RAM, loop, RAID, mapper, cache, path, optical or unconnected one.

    `fancy` is left out for its entry in slaves alone; cciss/c0d0 has its slash as an exclamation mark in sysfs.
    """
    sampler = sampler_of(machine("gpu_node"))
    found = {record.device: record for record in sampler.sample(NOW)}
    sampler.close()
    assert set(found) == {"nvme0n1", "nvme1n1", "sda", "nbd1", "cciss/c0d0"}
    # 1 000 000 and 3 000 000 sectors of 512 bytes: 512 000 000 and 1 536 000 000 bytes.
    assert found["nvme0n1"] == DiskSample(
        monotonic_s=100.0,
        wall_s=1_700_000_000.0,
        device="nvme0n1",
        read_bytes_total=512_000_000,
        written_bytes_total=1_536_000_000,
        reads_total=100,
        writes_total=200,
        busy_seconds_total=0.05,  # 50 ms
    )
    # 10 and 20 sectors: 5120 and 10240 bytes.
    assert (found["nbd1"].read_bytes_total, found["nbd1"].written_bytes_total) == (5120, 10240)
    assert found["sda"].written_bytes_total == 0  # a measurement, not a gap
    assert dict(sampler.errors) == {}


def test_without_sysfs_names_tell_partitions(machine):
    """nvme0n11 is the eleventh namespace, not a partition of nvme0n1; vda1 and nvme0n1p1 are partitions."""
    sampler = sampler_of(machine("container"))
    found = {record.device: record.read_bytes_total for record in sampler.sample(NOW)}
    sampler.close()
    # 100, 1 and 5 sectors.
    assert found == {"vda": 51_200, "nvme0n1": 512, "nvme0n11": 2560}


def test_old_kernel_has_14_columns(machine):
    sampler = sampler_of(machine("old_kernel"))
    (record,) = sampler.sample(NOW)
    sampler.close()
    # 4 294 967 295 sectors: 2 199 023 255 040 bytes.
    assert (record.device, record.read_bytes_total, record.written_bytes_total) == ("sda", 2_199_023_255_040, 4096)


@pytest.mark.parametrize("columns", [14, 18, 20, 24])
def test_columns_of_all_kernels(columns):
    """Columns 6 and 10 hold the sectors in every format; what follows the known ones is left alone."""
    line = " ".join(["8 0 sda", *(str(number) for number in range(4, columns + 1))])
    assert parse_diskstats(line) == ((DiskCounters("sda", 6, 10, 4, 8, 13),), 0)


def test_damaged_lines_cost_themselves_only(machine):
    """sdb holds a word for a number, one name has a blank, sde is cut: three lines; the empty one is no line."""
    sampler = sampler_of(machine("damaged"))
    found = [(r.device, r.read_bytes_total, r.written_bytes_total) for r in sampler.sample(NOW)]
    sampler.close()
    # 10 and 20, 11 and 21 sectors.
    assert found == [("sda", 5120, 10_240), ("sdd", 5632, 10_752)]
    assert dict(sampler.errors) == {"malformed": 3}


def test_every_cut_of_the_file_gives_true_values_or_none(machine):
    """A file cut at any byte never yields a number that the whole file does not hold."""
    text = (machine("gpu_node") / "proc" / "diskstats").read_text()
    whole = set(parse_diskstats(text)[0])
    assert len(whole) == 18
    for length in range(len(text)):
        assert set(parse_diskstats(text[:length])[0]) <= whole


@pytest.mark.parametrize("name", ["..", ".", "../../etc", "/etc", "a\u2028b", "x" * 300, "a\0b"])
def test_hostile_names_reach_no_other_directory(name, tmp_path):
    """A name is one component below /sys/block, whatever it holds; one that is none there is no disk."""
    (tmp_path / "block" / "sda").mkdir(parents=True)
    (tmp_path / "etc" / "size").parent.mkdir()
    found, _ = parse_diskstats(f"8 0 {name} 1 2 3 4 5 6 7 8 9 10 11\n8 1 sda 1 2 3 4 5 6 7 8 9 10 11\n")
    assert choose_disks([disk.name for disk in found], tmp_path) == {"sda"}


def test_disk_connected_later_is_seen_within_a_minute(machine, tmp_path):
    """All nbd devices are listed from the start; only their size tells that one is in use."""
    root = tmp_path / "node"
    unpack_machine("gpu_node", root)
    sampler = DiskstatsSampler(root / "proc", root / "sys")
    assert "nbd0" not in {record.device for record in sampler.sample(NOW)}
    (root / "sys" / "block" / "nbd0" / "size").write_text("2048\n")
    assert "nbd0" not in {record.device for record in sampler.sample(NOW.later(59.0))}
    assert "nbd0" in {record.device for record in sampler.sample(NOW.later(60.0))}
    sampler.close()


def test_dgx_counts_ten_nvme_devices(machine):
    """No md0, partition or loop beside them; 3 600 001 ms of work on the second."""
    sampler = sampler_of(machine("dgx_slurm"))
    found = {record.device: record for record in sampler.sample(NOW)}
    sampler.close()
    assert set(found) == {f"nvme{index}n1" for index in range(10)}
    second = found["nvme1n1"]
    assert (second.reads_total, second.writes_total) == (1_000_001, 200_001)
    assert second.busy_seconds_total == pytest.approx(3600.001)
    # 8 000 001 000 and 1 600 001 000 sectors.
    assert (second.read_bytes_total, second.written_bytes_total) == (4_096_000_512_000, 819_200_512_000)
    assert {record.transport for record in found.values()} == {"pcie"}


def test_nvme_over_fabrics_is_named_by_its_paths(machine):
    """nvme1n1 is a multipath device whose two controllers use RDMA; sda is no NVMe device and has no transport."""
    sampler = sampler_of(machine("roce_kubernetes"))
    found = {record.device: record.transport for record in sampler.sample(NOW)}
    sampler.close()
    assert found == {"nvme0n1": "pcie", "nvme1n1": "rdma", "sda": None}


@pytest.mark.parametrize(
    ("transports", "expected"),
    [(["tcp", "tcp"], "tcp"), (["tcp", "rdma"], None), ([], None), (["x" * 50], None), (['t"\n'], None)],
)
def test_paths_that_differ_have_no_common_transport(transports, expected, tmp_path):
    for index, transport in enumerate(transports):
        controller = tmp_path / "block" / "nvme0n1" / "device" / f"nvme{index}"
        controller.mkdir(parents=True)
        (controller / "transport").write_text(f"{transport}\n")
    assert nvme_transport("nvme0n1", tmp_path) == expected


@pytest.mark.parametrize(
    ("name", "disks"), [("cloud_efa_fuse", {"nvme0n1", "nvme1n1"}), ("desktop", {"sda", "nvme0n1"})]
)
def test_disks_of_smaller_machines(machine, name, disks):
    sampler = sampler_of(machine(name))
    assert {record.device for record in sampler.sample(NOW)} == disks
    sampler.close()


def test_missing_file_is_absent(tmp_path):
    sampler = DiskstatsSampler(tmp_path, tmp_path)
    assert not sampler.probe()
    with pytest.raises(SourceUnavailableError, match="diskstats is not there") as caught:
        sampler.sample(NOW)
    assert caught.value.reason == "absent"


def test_this_machine():
    """The real /proc/diskstats parses without a malformed line."""
    sampler = DiskstatsSampler()
    if not sampler.probe():
        pytest.skip("no /proc/diskstats here")
    devices = [record.device for record in sampler.sample(NOW)]
    sampler.close()
    assert dict(sampler.errors) == {}
    assert not any(device.startswith(("loop", "zram", "dm-")) for device in devices)
