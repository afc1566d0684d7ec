"""File systems that come, go and change hands under one name: the exported totals neither fall nor jump."""

from __future__ import annotations

import os
import shutil

import pytest

from agent.clock import Instant
from agent.history import History
from agent.records import FilesystemSample, Tick
from agent.samplers import fs_fuse
from agent.samplers.filesystems import FilesystemsSampler
from agent.samplers.mounts import MAX_FILESYSTEMS
from agent.samplers.tcp_sockets import TcpSocket

CLUSTER = "3f7cd5a2-5f0e-4a3b-9d7e-0123456789ab"
SIZE = "item total avg min max total_sz(bytes)\n---\nread 1 1 1 1 {}\nwrite 1 1 1 1 {}\n"


def mount(number, mountpoint, fstype, source):
    return f"{100 + number} 1 0:{number} / {mountpoint} rw - {fstype} {source} rw\n"


class Node:
    """Files of a host, and a sampler that looks at them every 5 s unless a time is given."""

    def __init__(self, root, *mounts, **options):
        self.root = root
        self.proc = root / "proc"
        self.pids = []
        self.now = -5.0
        self.sampler = FilesystemsSampler(self.proc, root / "sys", pids=lambda: self.pids, **options)
        self.history = History()
        (self.proc / "self" / "ns").mkdir(parents=True)
        (self.proc / "self" / "ns" / "mnt").symlink_to("mnt:[1]")
        (self.proc / "self" / "ns" / "net").symlink_to("net:[1]")
        self.mounts(*mounts)

    def mounts(self, *lines, pid="self"):
        (self.proc / str(pid) / "mountinfo").write_text("".join(lines))

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def look(self, after_s=5.0):
        self.now += after_s
        at = {"monotonic_s": self.now, "wall_s": 1000.0 + self.now}
        records = self.sampler.sample(Instant(**at))
        self.history.ingest(Tick(**at, records=records))
        return {one.mountpoint: one for one in records if isinstance(one, FilesystemSample)}

    def reads(self, after_s=5.0):
        return {name: one.read_bytes_total for name, one in self.look(after_s).items()}


class TestLustre:
    def stats(self, node, directory, read):
        text = f"snapshot_time 1.5\nread_bytes 1 samples [bytes] 1 9 {read}\n"
        node.write(f"sys/kernel/debug/lustre/llite/{directory}/stats", text)

    def test_the_sum_does_not_fall_with_a_mount(self, tmp_path):
        """The name stays as well, though the mount that gave it is gone."""
        one, two = (mount(n, f"/mnt{n}", "lustre", "10.0.0.1@o2ib:/scratch") for n in (1, 2))
        node = Node(tmp_path, one, two)
        self.stats(node, "scratch-ffff8801", 1000)
        self.stats(node, "scratch-ffff8802", 500)
        assert node.reads() == {"/mnt1": 1500}
        node.mounts(two)
        shutil.rmtree(tmp_path / "sys/kernel/debug/lustre/llite/scratch-ffff8801")
        self.stats(node, "scratch-ffff8802", 520)
        assert node.reads(60.0) == {"/mnt1": 1520}
        # Mounted again; nobody knows since when its 70 count.
        node.mounts(two, one)
        self.stats(node, "scratch-ffff8803", 70)
        assert node.reads(60.0) == {"/mnt1": 1520}
        self.stats(node, "scratch-ffff8803", 75)
        assert node.reads() == {"/mnt1": 1525}

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
    def test_a_closed_file_is_counted_once(self, open_path):
        node = Node(open_path, mount(1, "/s", "lustre", "10.0.0.1@o2ib:/s"))
        self.stats(node, "s-ffff8801", 1)
        (open_path / "sys/kernel/debug/lustre/llite/s-ffff8801/stats").chmod(0o400)
        os.seteuid(65534)
        try:
            assert [node.reads()["/s"] for _ in range(3)] == [None] * 3
        finally:
            os.seteuid(0)
        assert dict(node.sampler.errors) == {"no_permission": 1}


def test_the_sum_of_a_ceph_cluster_does_not_fall_with_a_client(tmp_path):
    node = Node(tmp_path, *(mount(n, f"/mnt{n}", "ceph", f"a@{CLUSTER}.fs=/{n}") for n in (1, 2)))
    folder = f"sys/kernel/debug/ceph/{CLUSTER}.client"
    node.write(f"{folder}1/metrics/size", SIZE.format(1000, 1))
    node.write(f"{folder}2/metrics/size", SIZE.format(500, 1))
    assert node.reads() == {"/mnt1": 1500}
    shutil.rmtree(tmp_path / f"{folder}1")
    node.write(f"{folder}2/metrics/size", SIZE.format(501, 1))
    assert node.reads() == {"/mnt1": 1501}


class Fuse(Node):
    """One JuiceFS mount, its daemon 900, and the connections that are open by the inodes of their sockets."""

    def __init__(self, root):
        self.open = {}
        super().__init__(
            root,
            mount(1, "/jfs", "fuse.juicefs", "JuiceFS:x"),
            sockets=lambda inodes: [one for inode, one in self.open.items() if inode in inodes],
        )
        self.run(900, 10, "juicefs\0mount\0redis\0/jfs\0", "/dev/fuse", "socket:[1]", "socket:[2]")

    def run(self, pid, started, cmdline, *descriptors):
        folder = f"proc/{pid}"
        self.write(f"{folder}/comm", cmdline.split("\0")[0] + "\n")
        self.write(f"{folder}/cmdline", cmdline)
        self.write(f"{folder}/stat", f"{pid} (a b) S " + "0 " * 18 + f"{started} 0\n")
        for name in ("fd", "ns"):
            (self.root / folder / name).mkdir(exist_ok=True)
        (self.root / folder / "ns" / "net").symlink_to("net:[1]")
        for number, target in enumerate(descriptors):
            (self.root / folder / "fd" / str(number)).symlink_to(target)

    def end(self, pid):
        shutil.rmtree(self.proc / str(pid))

    def read(self, after_s=5.0):
        return self.reads(after_s)["/jfs"]


@pytest.fixture
def fuse(tmp_path):
    return Fuse(tmp_path)


class TestFuseDaemon:
    @pytest.mark.parametrize("pid", [20, 990])
    def test_another_program_of_that_name_changes_nothing(self, fuse, pid):
        """`juicefs stats /jfs` has the mountpoint among its arguments and a connection of its own."""
        fuse.open = {1: TcpSocket(1, 1000, 0), 7: TcpSocket(7, 50_000, 0)}
        assert fuse.read() == 1000
        fuse.run(pid, 500, "juicefs\0stats\0/jfs\0", "socket:[7]")
        fuse.open[1] = TcpSocket(1, 1100, 0)
        assert fuse.read(60.0) == 1100
        fuse.end(pid)
        fuse.open[1] = TcpSocket(1, 1150, 0)
        assert [fuse.read(), fuse.read(60.0)] == [1150, 1150]

    def test_where_no_process_is_seen_to_hold_the_device_the_first_one_is_it(self, fuse):
        (fuse.proc / "900" / "fd" / "0").unlink()
        fuse.run(20, 500, "juicefs\0stats\0/jfs\0", "socket:[7]")
        fuse.open = {1: TcpSocket(1, 1000, 0), 7: TcpSocket(7, 50_000, 0)}
        assert fuse.read() == 1000

    def test_one_without_the_mountpoint_is_the_daemon_and_one_with_it_is_not(self, fuse):
        fuse.end(900)
        fuse.run(900, 10, "juicefs\0mount\0jfs\0", "/dev/fuse", "socket:[1]")
        fuse.run(20, 500, "juicefs\0stats\0/jfs\0", "socket:[7]")
        fuse.run(21, 501, "juicefs\0gateway\0", "socket:[8]")
        fuse.open = {1: TcpSocket(1, 1000, 0), 7: TcpSocket(7, 50_000, 0), 8: TcpSocket(8, 60_000, 0)}
        assert fuse.read() == 1000

    def test_its_successor_adds_only_what_is_seen(self, fuse):
        """A daemon that is replaced in place hands the device over; both hold it for a while."""
        fuse.open = {1: TcpSocket(1, 1000, 0), 7: TcpSocket(7, 300, 0)}
        assert fuse.read() == 1000
        fuse.run(950, 900, "juicefs\0mount\0redis\0/jfs\0", "/dev/fuse", "socket:[7]")
        assert fuse.read(60.0) == 1000
        fuse.open[7] = TcpSocket(7, 340, 0)
        assert fuse.read() == 1040
        fuse.end(900)
        fuse.open[7] = TcpSocket(7, 350, 0)
        assert fuse.read() == 1050

    def test_another_daemon_of_the_same_mount_goes_on_from_there(self, fuse):
        fuse.open = {1: TcpSocket(1, 1000, 0), 7: TcpSocket(7, 300, 0)}
        assert fuse.read() == 1000
        fuse.end(900)
        fuse.run(900, 700, "juicefs\0mount\0redis\0/jfs\0", "/dev/fuse", "socket:[7]")  # its id is given again
        assert fuse.read() is None
        assert fuse.read() == 1000
        fuse.open[7] = TcpSocket(7, 301, 0)
        assert fuse.read() == 1001

    def test_a_connection_that_is_missing_once_is_not_counted_twice(self, fuse):
        fuse.open = {1: TcpSocket(1, 5000, 10), 2: TcpSocket(2, 30, 0)}
        assert fuse.read() == 5030
        del fuse.open[1]
        assert fuse.read() == 5030
        fuse.open[1] = TcpSocket(1, 5001, 10)
        assert fuse.read() == 5031

    def test_connections_are_remembered_for_ten_minutes_and_not_without_bound(self, fuse, monkeypatch):
        fuse.open = {1: TcpSocket(1, 5000, 10)}
        fuse.read()
        fuse.open = {2: TcpSocket(2, 1, 0)}
        fuse.read(600.0)
        (daemon,) = fuse.sampler._fuse._daemons.values()
        assert set(daemon.connections) == {1, 2}
        assert fuse.read() == 5001
        assert set(daemon.connections) == {2}
        monkeypatch.setattr(fs_fuse, "MAX_CONNECTIONS", 3)
        for cookie in range(10, 20):
            fuse.open = {1: TcpSocket(cookie, 1, 0)}
            fuse.read()
        assert set(daemon.connections) == {17, 18, 19}

    def test_an_idle_mount_keeps_its_bytes(self, fuse):
        fuse.open = {1: TcpSocket(1, 5000, 10)}
        fuse.read()
        fuse.open = {}
        assert [fuse.read(700.0), fuse.read()] == [5000, 5000]


class TestNameThatChangesHands:
    def pod(self, node, pid, device, source, written):
        node.write(f"proc/{pid}/mountinfo", mount(device, "/data", "nfs4", source))
        node.write(
            f"proc/{pid}/mountstats",
            f"device {source} mounted on /data with fstype nfs4 statvers=1.1\n\tbytes:\t0 0 0 0 0 {written} 0 0 \n"
            "\txprt:\ttcp 1\n\tper-op statistics\n\tREAD: 1 1 9 1 1 1 1 1 0\n",
        )
        node.pids = [pid]

    def test_neither_the_counter_nor_the_rate_jumps(self, tmp_path):
        """Pod B mounted its volume long ago and wrote 5 TB before its process came to a GPU."""
        node = Node(tmp_path)
        node.look()
        self.pod(node, 10, 50, "a:/x", 1_000_000_000)
        node.look()
        self.pod(node, 10, 50, "a:/x", 1_000_000_500)
        assert node.look()["/data"].written_bytes_total == 500
        shutil.rmtree(node.proc / "10")
        node.pids = []
        assert node.look() == {}
        self.pod(node, 20, 60, "b:/y", 5_000_000_000_000)
        found = node.look()["/data"]
        assert (found.written_bytes_total, found.major_timeouts_total) == (500, 0)
        self.pod(node, 20, 60, "b:/y", 5_000_000_002_000)
        assert node.look()["/data"].written_bytes_total == 2500
        rates = node.history.host.series("filesystem_written_bytes_per_second", node.now, 100.0)
        assert rates.values.tolist() == [100.0, 0.0, 400.0]  # 500 / 5, nothing, 2000 / 5

    def test_at_once_and_under_the_same_number(self, tmp_path):
        """The kernel gives the lowest free device number, so the next mount mostly has the number of the last."""
        node = Node(tmp_path)
        self.pod(node, 10, 50, "a:/x", 1000)
        node.look()
        self.pod(node, 20, 50, "b:/y", 9_000_000)
        assert node.look()["/data"].written_bytes_total == 1000

    def test_of_another_type_is_another_series(self, tmp_path):
        node = Node(tmp_path)
        self.pod(node, 10, 50, "a:/x", 1000)
        assert node.look()["/data"].written_bytes_total == 1000
        node.write("proc/20/mountinfo", mount(60, "/data", "lustre", "10.0.0.1@o2ib:/s"))
        stats = "snapshot_time 1.5\nwrite_bytes 1 samples [bytes] 1 9 {}\n"
        node.write("proc/fs/lustre/llite/s-ffff8801/stats", stats.format(7000))
        node.pids = [20]
        assert node.look()["/data"].written_bytes_total == 0
        node.write("proc/fs/lustre/llite/s-ffff8801/stats", stats.format(7100))
        node.look()
        shutil.rmtree(node.proc / "20")
        self.pod(node, 30, 70, "a:/x", 4000)
        found = node.look()["/data"]
        assert (found.fstype, found.written_bytes_total) == ("nfs4", 1000)
        rates = node.history.host.series("filesystem_written_bytes_per_second", node.now, 100.0)
        assert max(rates.values) == 20.0  # 100 bytes of Lustre in 5 s


class TestPlaces:
    def test_mounts_of_users_cannot_take_all_places(self, tmp_path):
        users = [mount(n, f"/home/eve/m{n}", "fuse.sshfs", "eve@h:") for n in range(1, MAX_FILESYSTEMS + 1)]
        node = Node(tmp_path, *users)
        assert len(node.look()) == MAX_FILESYSTEMS
        node.mounts(*users, mount(900, "/ckpt", "gpfs", "a"))
        found = node.look(60.0)
        assert len(found) == MAX_FILESYSTEMS
        assert found["/ckpt"].fstype == "gpfs"
        assert dict(node.sampler.errors) == {"too_many_filesystems": 1}

    def test_each_one_left_out_is_counted_once(self, tmp_path):
        """By the probe not at all, and again only where it was gone in between."""
        lines = [mount(n, f"/m{n}", "gpfs", "g") for n in range(1, 101)]
        node = Node(tmp_path, *lines)
        assert node.sampler.probe()
        for _ in range(3):
            node.look(60.0)
        assert dict(node.sampler.errors) == {"too_many_filesystems": 36}
        node.mounts(*lines, mount(101, "/m101", "gpfs", "g"))
        node.look(60.0)
        assert dict(node.sampler.errors) == {"too_many_filesystems": 37}
