"""The sampler of network file systems on whole machines, and what it does where something is closed or odd."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.clock import Instant
from agent.records import FilesystemSample, GpuDirectStorageSample
from agent.samplers import SourceUnavailableError
from agent.samplers.filesystems import FilesystemsSampler
from agent.samplers.mounts import MAX_FILESYSTEMS
from agent.samplers.tcp_sockets import TcpSocket
from tests.machines import unpack_machine

NOW = Instant(100.0, 1_700_000_000.0)
PODS = (51000, 51001, 51002, 51003, 52000, 52001)


@contextmanager
def as_user(uid):
    """Be another user, without its capabilities, for a while."""
    before = os.geteuid()
    os.seteuid(0)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.seteuid(before)


def sampler_of(root, **options):
    return FilesystemsSampler(root / "proc", root / "sys", **options)


def sample(sampler, now=NOW):
    found = sampler.sample(now)
    return {record.mountpoint: record for record in found if isinstance(record, FilesystemSample)}


def test_dgx_has_lustre_nfs_and_gpudirect(machine):
    """scratch is mounted twice (one super block) and has one record; XFS and ext4 are the block layer's."""
    sampler = sampler_of(machine("dgx_slurm"))
    assert sampler.probe()
    records = sampler.sample(NOW)
    sampler.close()
    assert records == (
        FilesystemSample(
            monotonic_s=100.0,
            wall_s=1_700_000_000.0,
            mountpoint="/lustre/scratch",
            fstype="lustre",
            read_bytes_total=879_609_302_220,
            written_bytes_total=219_902_325_555,
            source="llite",
        ),
        FilesystemSample(
            monotonic_s=100.0,
            wall_s=1_700_000_000.0,
            mountpoint="/home",
            fstype="nfs4",
            read_bytes_total=524_288_000,  # the fifth counter, not the 734 003 200 that programs read
            written_bytes_total=83_886_080,
            source="mountstats",
            is_rdma=False,
            major_timeouts_total=5,  # 2 of WRITE, 3 of GETATTR
        ),
        GpuDirectStorageSample(
            monotonic_s=100.0,
            wall_s=1_700_000_000.0,
            read_bytes_total=274_877_906_944,  # 262 144 MiB
            written_bytes_total=8_589_934_592,  # 8192 MiB
        ),
    )
    assert dict(sampler.errors) == {}


class TestPods:
    def test_the_host_alone_shows_nothing(self, machine):
        sampler = sampler_of(machine("roce_kubernetes"))
        assert not sampler.probe()
        assert sampler.sample(NOW) == ()
        sampler.close()

    def test_mounts_of_the_pods_are_found_in_their_namespaces(self, machine):
        """Both pods mount the same data set: one super block, one record. Each has a /checkpoints of its own."""
        sampler = sampler_of(machine("roce_kubernetes"), pids=lambda: PODS)
        assert sampler.probe()
        found = sample(sampler)
        sampler.close()
        assert set(found) == {"/data", "/checkpoints", "/checkpoints#0:212"}
        data = found["/data"]
        assert (data.fstype, data.read_bytes_total, data.written_bytes_total) == ("nfs", 1_073_741_824, 0)
        assert (data.is_rdma, data.major_timeouts_total) == (True, 1)
        assert found["/checkpoints"].written_bytes_total == 2_147_483_648
        assert found["/checkpoints#0:212"].written_bytes_total == 0
        assert dict(sampler.errors) == {}

    def test_a_name_stays_while_the_other_pod_ends(self, machine):
        pids = list(PODS)
        sampler = sampler_of(machine("roce_kubernetes"), pids=lambda: pids)
        sample(sampler)
        pids[:] = [52000, 52001]
        found = sample(sampler, NOW.later(5.0))
        sampler.close()
        assert set(found) == {"/data", "/checkpoints#0:212"}
        assert found["/data"].read_bytes_total == 1_073_741_824  # read through the other pod now

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
    def test_plain_user_knows_the_mounts_and_counts_the_refusal_once(self):
        """mountinfo is open to all, mountstats to the owner: the mounts are known without their bytes."""
        with tempfile.TemporaryDirectory() as folder, as_user(65534):
            root = Path(folder)
            with as_user(0):
                root.chmod(0o755)
                unpack_machine("roce_kubernetes", root)
                for pid in (51000, 52000):
                    (root / "proc" / str(pid) / "mountstats").chmod(0o400)
            sampler = sampler_of(root, pids=lambda: PODS)
            found = sample(sampler)
            sample(sampler, NOW.later(5.0))
            sampler.close()
        assert {name: record.read_bytes_total for name, record in found.items()} == {
            "/data": None,
            "/checkpoints": None,
            "/checkpoints#0:212": None,
        }
        assert dict(sampler.errors) == {"no_permission": 2}


class TestFuse:
    def test_bytes_of_the_daemon_are_those_of_its_connections(self, machine):
        """The first look takes what the connections carried before; a new one counts whole, an old one what is new."""
        seen = {
            0: [TcpSocket(1, 1000, 50), TcpSocket(2, 10, 5)],
            5: [TcpSocket(1, 1500, 60), TcpSocket(3, 7, 8)],  # 2 was closed
            10: [],
        }
        asked = []
        tick = 0

        def sockets(inodes):
            asked.append(set(inodes))
            return seen[tick]

        sampler = sampler_of(machine("cloud_efa_fuse"), sockets=sockets)
        totals = []
        for tick in seen:
            (record,) = sampler.sample(NOW.later(float(tick)))
            totals.append((record.read_bytes_total, record.written_bytes_total))
        sampler.close()
        assert (record.mountpoint, record.fstype, record.source) == ("/mnt/bucket", "fuse.s3fs", "fuse_daemon")
        # 1000 + 10, 50 + 5; then 500 + 7 and 10 + 8 more; then nothing more.
        assert totals == [(1010, 55), (1517, 73), (1517, 73)]
        assert asked == [{70001, 70002}] * 3

    def test_without_a_connection_there_is_no_number(self, machine):
        sampler = sampler_of(machine("cloud_efa_fuse"), sockets=lambda inodes: ())
        (record,) = sampler.sample(NOW)
        sampler.close()
        assert (record.read_bytes_total, record.written_bytes_total, record.source) == (None, None, None)

    def test_a_daemon_in_another_network_namespace_has_no_number(self, tmp_path):
        """Its inodes would be looked up among sockets that are not its own."""
        root = unpack_machine("cloud_efa_fuse", tmp_path / "node")
        link = root / "proc" / "900" / "ns" / "net"
        link.unlink()
        link.symlink_to("net:[4026539999]")
        sampler = sampler_of(root, sockets=lambda inodes: [TcpSocket(1, 1, 1)])
        (record,) = sampler.sample(NOW)
        sampler.close()
        assert record.read_bytes_total is None

    def test_a_daemon_that_comes_later_is_found(self, tmp_path):
        root = unpack_machine("cloud_efa_fuse", tmp_path / "node")
        hidden = tmp_path / "hidden"
        shutil.move(root / "proc" / "900", hidden)
        seen = [TcpSocket(1, 3, 4)]
        sampler = sampler_of(root, sockets=lambda inodes: seen)
        assert sample(sampler)["/mnt/bucket"].read_bytes_total is None
        shutil.move(hidden, root / "proc" / "900")
        assert sample(sampler, NOW.later(55.0))["/mnt/bucket"].read_bytes_total is None
        # What it carried before it was seen is not counted.
        assert sample(sampler, NOW.later(60.0))["/mnt/bucket"].read_bytes_total == 0
        seen[:] = [TcpSocket(1, 8, 4)]
        assert sample(sampler, NOW.later(65.0))["/mnt/bucket"].read_bytes_total == 5
        shutil.rmtree(root / "proc" / "900")
        assert sample(sampler, NOW.later(70.0))["/mnt/bucket"].read_bytes_total is None
        sampler.close()
        assert dict(sampler.errors) == {}

    @pytest.mark.parametrize("cmdline", [b"s3fs\0data\0/mnt/other\0", b"s3fs\0data\0mnt/bucket\0"])
    def test_the_only_daemon_of_a_kind_serves_the_only_mount(self, cmdline, tmp_path):
        root = unpack_machine("cloud_efa_fuse", tmp_path / "node")
        (root / "proc" / "900" / "cmdline").write_bytes(cmdline)
        sampler = sampler_of(root, sockets=lambda inodes: [TcpSocket(1, 3, 4)])
        assert sample(sampler)["/mnt/bucket"].read_bytes_total == 3
        sampler.close()

    def test_failing_diagnosis_is_counted_once(self, machine):
        """A kernel without tcp_diag never answers."""

        def fail(inodes):
            raise OSError("no netlink")

        sampler = sampler_of(machine("cloud_efa_fuse"), sockets=fail)
        (record,) = sampler.sample(NOW)
        (again,) = sampler.sample(NOW.later(5.0))
        sampler.close()
        assert (record.read_bytes_total, again.read_bytes_total) == (None, None)
        assert dict(sampler.errors) == {"no_sockets": 1}


def test_a_desktop_has_none(machine):
    """Not the portal, not NTFS through fuseblk, not a snap."""
    sampler = sampler_of(machine("desktop"))
    assert not sampler.probe()
    assert sampler.sample(NOW) == ()
    sampler.close()


def write_node(root, lines, **files):
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "mountinfo").write_bytes(b"".join(lines))
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def mount(number, mountpoint, fstype, source):
    return f"{number} 1 0:{number} / {mountpoint} rw - {fstype} {source} rw\n".encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("fstype", ["gpfs", "beegfs", "wekafs", "cifs", "9p", "virtiofs", "nfs4", "lustre", "ceph"])
def test_a_file_system_without_a_source_is_known_without_bytes(fstype, tmp_path):
    write_node(tmp_path, [mount(5, "/fs", fstype, "server:/x")])
    sampler = sampler_of(tmp_path)
    assert sampler.probe()
    assert sample(sampler)["/fs"] == FilesystemSample(
        monotonic_s=100.0, wall_s=1_700_000_000.0, mountpoint="/fs", fstype=fstype
    )
    sampler.close()


def test_hostile_mountpoints_are_valid_text(tmp_path):
    write_node(
        tmp_path,
        [
            mount(5, r"/my\040\"data\134\012{x}", "gpfs", "a"),
            mount(6, "/\udcff<b>", "gpfs", "b"),
            mount(7, r"/my\040\"data\134\012{x}", "gpfs", "c"),
        ],
    )
    sampler = sampler_of(tmp_path)
    names = list(sample(sampler))
    sampler.close()
    assert names == ['/my \\"data\\\n{x}', "/\\xff<b>", '/my \\"data\\\n{x}#0:7']
    for name in names:
        name.encode("utf-8")


def test_file_systems_are_bounded_and_keep_their_places(tmp_path):
    """Of 70, 64 have places; a new one that is listed first does not push out an old one."""
    lines = [mount(number, f"/g{number}", "gpfs", "g") for number in range(1, 71)]
    root = tmp_path / "node"
    write_node(root, lines[:MAX_FILESYSTEMS])
    job = root / "proc" / "7" / "mountinfo"
    job.parent.mkdir()
    job.write_bytes(b"".join(lines[MAX_FILESYSTEMS:]))
    sampler = sampler_of(root, pids=lambda: (7,))
    first = sample(sampler)
    assert len(first) == MAX_FILESYSTEMS
    assert dict(sampler.errors) == {"too_many_filesystems": 6}
    (root / "proc" / "self" / "mountinfo").write_bytes(b"".join([mount(99, "/new", "gpfs", "g"), *lines[:63]]))
    job.write_bytes(b"".join(lines[63:]))
    assert set(sample(sampler, NOW.later(60.0))) == set(first)
    assert dict(sampler.errors) == {"too_many_filesystems": 7}
    sampler.close()


def test_no_mountinfo_is_absent(tmp_path):
    (tmp_path / "proc").mkdir()
    with pytest.raises(SourceUnavailableError):
        sampler_of(tmp_path).sample(NOW)


def test_this_machine():
    sampler = FilesystemsSampler(pids=lambda: (1, os.getppid()))
    sampler.probe()
    sampler.sample(NOW)
    sampler.close()
    assert "malformed" not in sampler.errors
