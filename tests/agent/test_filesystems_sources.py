"""What each source of bytes of a network file system looks like, and what is made of damaged ones."""

from __future__ import annotations

import os
import socket
from collections import Counter

import pytest

from agent.clock import Instant
from agent.samplers.filesystems import FilesystemsSampler
from agent.samplers.fs_ceph import CephReader, cluster_of, parse_ceph_metrics
from agent.samplers.fs_lustre import LustreReader, fsname, parse_llite_stats
from agent.samplers.fs_nfs import NfsCounters, parse_mountstats
from agent.samplers.gpu_direct_storage import GpuDirectStorageReader, parse_nvidia_fs
from agent.samplers.tcp_sockets import tcp_sockets

NOW = Instant(100.0, 1_700_000_000.0)
A = (b"nas:/a", b"/a")
B = (b"nas:/b", rb"/my\040b")
NFS_A = b"""device nas:/a mounted on /a with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2
\tage:\t100
\tevents:\t1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27\x20
\tbytes:\t1 2 3 4 5000 600 7 8\x20
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 0 0 2 0 3 9 9 0 2 0 12 3 9
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: 5 6 1 1 1 1 1 1 0
\t       WRITE: 5 9 4 1 1 1 1 1 0

"""
#: RHEL 6: version 1.0 of both, a UDP transport of 7 fields.
NFS_B = (
    b"device nas:/b mounted on /my\\040b with fstype nfs statvers=1.0\n"
    b"\topts:\trw,vers=3\n"
    b"\tbytes:\t1 2 3 4 70 80 7 8 \n"
    b"\tRPC iostats version: 1.0  p/v: 100003/3 (nfs)\n"
    b"\txprt:\tudp 0 1 2 3 4 5\n"
    b"\tper-op statistics\n"
    b"\t        NULL: 0 0 0 0 0 0 0 0\n"
)
COUNTERS_A = NfsCounters(read_bytes=5000, written_bytes=600, is_rdma=False, major_timeouts=5)
COUNTERS_B = NfsCounters(read_bytes=70, written_bytes=80, is_rdma=False, major_timeouts=0)
OTHER = b"no device mounted on /x with fstype tmpfs\ndevice /dev/sda1 mounted on /y with fstype ext4\n"


class TestNfs:
    def test_both_versions(self):
        found, malformed = parse_mountstats(OTHER + NFS_A + OTHER + NFS_B + OTHER, {A, B})
        assert found == {A: COUNTERS_A, B: COUNTERS_B}
        assert malformed == 0

    def test_only_wanted_mounts(self):
        assert parse_mountstats(NFS_A + NFS_B, {B})[0] == {B: COUNTERS_B}

    def test_one_of_several_transports_is_rdma(self):
        block = NFS_A.replace(b"\txprt:\ttcp", b"\txprt:\trdma 0 0\n\txprt:\trdma")
        assert parse_mountstats(block, {A})[0][A].is_rdma is True

    def test_a_block_without_its_line_takes_nothing_from_the_next(self):
        block = NFS_A[: NFS_A.index(b"\tbytes")]
        assert parse_mountstats(block + NFS_B, {A, B}) == ({B: COUNTERS_B}, 1)

    @pytest.mark.parametrize("line", [b"1 2 3 4 x 600 7 8 ", b"1 2 3 4 ", b"1 2 3 4 999999999999999999999 6 7 8 "])
    def test_garbled_numbers_are_none(self, line):
        assert parse_mountstats(NFS_A.replace(b"1 2 3 4 5000 600 7 8 ", line), {A}) == ({}, 1)

    def test_every_cut_gives_true_bytes_or_none(self):
        for length in range(len(NFS_A)):
            for counters in parse_mountstats(NFS_A[:length], {A})[0].values():
                assert counters[:2] == (5000, 600)

    def test_of_two_at_one_mountpoint_each_has_its_own(self):
        """The source tells them apart; the lower one is still mounted."""
        upper = NFS_A.replace(b"nas:/a", b"nas:/c").replace(b"5000", b"6000")
        found, _ = parse_mountstats(NFS_A + upper, {A, (b"nas:/c", b"/a")})
        assert {key[0]: one.read_bytes for key, one in found.items()} == {b"nas:/a": 5000, b"nas:/c": 6000}


STATS = "snapshot_time 1.5 secs.nsecs\nread_bytes {} samples [bytes] 1 9 {}{}\nwrite_bytes 3 samples [bytes] 1 2 5\n"


class TestLustre:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (STATS.format(2, 77, " 4000"), (77, 5)),
            (STATS.format(2, 77, ""), (77, 5)),  # without the sum of squares
            ("snapshot_time 1.5\nopen 3 samples [reqs]\n", (0, 0)),  # mounted and not used: a measurement
            ("", None),
            ("snapshot_time 1.5\nread_bytes 2 samples [bytes] 1\n", None),
            ("snapshot_time 1.5\nread_bytes 2 samples [pages] 1 2 3\n", None),
        ],
    )
    def test_stats(self, text, expected):
        assert parse_llite_stats(text) == expected

    @pytest.mark.parametrize(
        ("source", "name"),
        [
            ("10.0.0.1@o2ib:/scratch", "scratch"),
            ("10.0.0.1@o2ib,10.0.1.1@tcp:10.0.0.2@o2ib:/scratch/projects/x", "scratch"),
            ("scratch", None),
            ("mgs:/", None),
        ],
    )
    def test_file_system_of_a_source(self, source, name):
        assert fsname(source) == name

    def test_mounts_of_one_file_system_belong_together(self, tmp_path):
        """Old clients have the files in /proc; a name may hold a hyphen."""
        for name, read in (("a-b-ffff8801", 10), ("a-b-ffff8802", 20), ("c-ffff8803", 40), ("odd", 80)):
            folder = tmp_path / "proc" / "fs" / "lustre" / "llite" / name
            folder.mkdir(parents=True)
            (folder / "stats").write_text(STATS.format(1, read, ""))
        errors = Counter()
        reader = LustreReader(tmp_path / "proc", tmp_path / "sys", errors)
        c = {"c-ffff8803": (40, 5)}
        assert reader.read() == {"a-b": {"a-b-ffff8801": (10, 5), "a-b-ffff8802": (20, 5)}, "c": c}
        (tmp_path / "proc" / "fs" / "lustre" / "llite" / "a-b-ffff8801" / "stats").write_text("x")
        assert reader.read() == {"a-b": {"a-b-ffff8801": None, "a-b-ffff8802": (20, 5)}, "c": c}
        assert errors == {"malformed": 1}


CEPH_SIZE = """item          total       avg_sz(bytes)   min_sz(bytes)   max_sz(bytes)  total_sz(bytes)
----------------------------------------------------------------------------------------
read          3           100             10              200             300
write         5           4194304         4194304         4194304         20971520
copyfrom      0           0               0               0               0
"""
#: Linux 5.11 to 5.15: all tables in one file; the one of latencies has the same names and columns.
CEPH_ONE_FILE = f"""item                               total
------------------------------------------
opened files  / total inodes       0 / 4

item          total       avg_lat(us)     min_lat(us)     max_lat(us)     stdev(us)
-----------------------------------------------------------------------------------
read          7           7               7               7               7
write         5           914013          824797          1092343         103476
metadata      79          12856           1572            114572          13262

{CEPH_SIZE}
item          total           miss            hit
-------------------------------------------------
d_lease       11              0               29
"""
CLUSTER = "3f7cd5a2-5f0e-4a3b-9d7e-0123456789ab"
OTHER_CLUSTER = "4f7cd5a2-5f0e-4a3b-9d7e-0123456789ab"


class TestCeph:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (CEPH_SIZE, (300, 20_971_520)),
            (CEPH_ONE_FILE, (300, 20_971_520)),
            (CEPH_ONE_FILE.replace("total_sz(bytes)", "?"), None),
            (CEPH_SIZE.replace("20971520", "x"), None),
            ("", None),
        ],
    )
    def test_metrics(self, text, expected):
        assert parse_ceph_metrics(text) == expected

    def test_clusters(self, tmp_path):
        """Two clients of one cluster; the client of a block device has no metrics."""
        folder = tmp_path / "kernel" / "debug" / "ceph"
        (folder / f"{CLUSTER}.client12" / "metrics").mkdir(parents=True)
        (folder / f"{CLUSTER}.client12" / "metrics" / "size").write_text(CEPH_SIZE)
        (folder / f"{CLUSTER}.client13").mkdir()
        (folder / f"{CLUSTER}.client13" / "metrics").write_text(CEPH_ONE_FILE)
        (folder / f"{CLUSTER}.client14").mkdir()
        assert CephReader(tmp_path, Counter()).read() == {
            CLUSTER: {f"{CLUSTER}.client12": (300, 20_971_520), f"{CLUSTER}.client13": (300, 20_971_520)}
        }

    def test_cluster_of_a_source(self):
        assert cluster_of(f"admin@{CLUSTER}.cephfs=/data") == CLUSTER
        assert cluster_of("10.0.0.1:6789,10.0.0.2:6789:/data") is None

    def test_joined_by_the_cluster_or_where_there_is_but_one(self, tmp_path):
        """The old form of a source names monitors only; with two clusters it could be either."""
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "mountinfo").write_text(
            f"1 1 0:5 / /new rw - ceph admin@{OTHER_CLUSTER}.fs=/ rw\n"
            f"2 1 0:6 / /newer rw - ceph admin@{OTHER_CLUSTER}.fs=/sub rw\n"
            "3 1 0:7 / /old rw - ceph 10.0.0.1:6789:/ rw\n"
        )
        folder = tmp_path / "sys" / "kernel" / "debug" / "ceph"

        def read():
            sampler = FilesystemsSampler(tmp_path / "proc", tmp_path / "sys")
            found = {record.mountpoint: record.read_bytes_total for record in sampler.sample(NOW)}
            sampler.close()
            return found

        client = folder / f"{CLUSTER}.client1" / "metrics"
        client.mkdir(parents=True)
        (client / "size").write_text(CEPH_SIZE)
        assert read() == {"/new": None, "/old": 300}
        other = folder / f"{OTHER_CLUSTER}.client2" / "metrics"
        other.mkdir(parents=True)
        (other / "size").write_text(CEPH_SIZE.replace("             300\n", "             333\n"))
        assert read() == {"/new": 333, "/old": None}


class TestGpuDirectStorage:
    def test_counted(self):
        text = "Reads\t\t: n=5 ok=5 err=0 readMiB=3 io_state_err=0\nReads\t\t: Bandwidth(MiB/s)=9 Avg-Latency(usec)=1\n"
        assert parse_nvidia_fs(text) == (3 << 20, None)
        assert parse_nvidia_fs(text + "Writes : n=1 ok=1 err=0 writeMiB=0 io_state_err=0 pg-cache=0\n") == (3 << 20, 0)

    def test_switched_off_is_none_and_not_zero(self, tmp_path):
        """rw_stats_enabled is 0 unless somebody sets it: the lines hold errors only."""
        stats = tmp_path / "driver" / "nvidia-fs" / "stats"
        stats.parent.mkdir(parents=True)
        reader = GpuDirectStorageReader(tmp_path)
        assert reader.read(NOW) == ()
        stats.write_text("IO stats: Disabled, peer IO stats: Disabled\nReads : err=0 io_state_err=0\nWrites : err=0\n")
        (record,) = reader.read(NOW)
        reader.close()
        assert (record.read_bytes_total, record.written_bytes_total) == (None, None)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_counted_bytes_of_real_connections(family):
    """100 000 bytes one way and 3000 the other; the listening socket carries nothing and is not listed."""
    try:
        server = socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
    except OSError:
        pytest.skip("no loopback of this family here")
    with server, socket.create_connection(server.getsockname()[:2]) as client, server.accept()[0] as peer:
        client.sendall(b"x" * 100_000)
        received = 0
        while received < 100_000:
            received += len(peer.recv(1 << 16))
        peer.sendall(b"y" * 3000)
        while len(client.recv(1 << 16, socket.MSG_PEEK)) < 3000:
            pass
        inodes = [os.fstat(one.fileno()).st_ino for one in (client, server)]
        (found,) = tcp_sockets(frozenset(inodes))
        assert (found.sent_bytes, found.received_bytes) == (100_001, 3000)  # what opened the connection counts as one
        (other,) = tcp_sockets([os.fstat(peer.fileno()).st_ino])
        assert other.received_bytes == 100_000
        assert other.cookie != found.cookie
    assert tcp_sockets(inodes) == ()
