"""Samplers of storage on real devices and mounts: what they count is what was written and read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.clock import Instant
from agent.records import DiskSample, FilesystemSample
from agent.samplers.diskstats import DiskstatsSampler
from agent.samplers.filesystems import FilesystemsSampler
from tests.end_to_end.programs import ROOT, wait_for
from tests.end_to_end.storage_support import MIB, Sshfs, call, direct_io, loop_device, mounted, needs_root

pytestmark = pytest.mark.end_to_end

NOW = Instant(100.0, 1_700_000_000.0)


def disk(sampler: DiskstatsSampler, name: str) -> DiskSample:
    return next(record for record in sampler.sample(NOW) if record.device == name)


def filesystems(sampler: FilesystemsSampler, now: Instant = NOW) -> dict[str, FilesystemSample]:
    return {record.mountpoint: record for record in sampler.sample(now) if isinstance(record, FilesystemSample)}


class OneDisk(DiskstatsSampler):
    """Counts a device that the rule leaves out."""

    def __init__(self, device: str) -> None:
        self._device = device
        super().__init__()

    def _choose(self, names: tuple[str, ...]) -> frozenset[str]:
        return frozenset({self._device})


@needs_root
class TestLoop:
    def test_direct_io_to_the_device_is_counted_to_the_byte(self, tmp_path):
        with loop_device(tmp_path, 32 * MIB) as device:
            sampler = OneDisk(device.name)
            before = disk(sampler, device.name)
            direct_io(device, 24 * MIB, write=True)
            written = disk(sampler, device.name)
            direct_io(device, 8 * MIB, write=False)
            read = disk(sampler, device.name)
            sampler.close()
            left_out = DiskstatsSampler()
            assert device.name not in {record.device for record in left_out.sample(NOW)}
            left_out.close()
        assert written.written_bytes_total - before.written_bytes_total == 24 * MIB
        assert written.read_bytes_total == before.read_bytes_total
        assert read.read_bytes_total - written.read_bytes_total == 8 * MIB
        # One request for each MiB, or several where the device takes smaller ones; a flush may count as one.
        assert written.writes_total - before.writes_total >= 24
        assert read.reads_total - written.reads_total >= 8
        assert read.busy_seconds_total >= before.busy_seconds_total

    def test_a_file_on_ext4(self, tmp_path):
        """The file, and a little of the file system's own."""
        if shutil.which("mkfs.ext4") is None or "ext4" not in Path("/proc/filesystems").read_text():
            pytest.skip("no ext4 here")
        with loop_device(tmp_path, 64 * MIB) as device:
            call("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
            with mounted(device, tmp_path / "mnt"):
                sampler = OneDisk(device.name)
                before = disk(sampler, device.name)
                with (tmp_path / "mnt" / "file").open("wb") as file:
                    file.write(b"x" * (16 * MIB))
                    file.flush()
                    os.fsync(file.fileno())
                after = disk(sampler, device.name)
                sampler.close()
        assert 16 * MIB <= after.written_bytes_total - before.written_bytes_total <= 18 * MIB


def test_direct_io_of_a_process_shows_on_its_disk(tmp_path):
    """Others write to the disk as well, so it is at least what this process wrote."""
    number = tmp_path.stat().st_dev
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        pytest.skip("the temporary folder is on no block device")
    device = link.resolve()
    name = device.parent.name if (device / "partition").exists() else device.name
    sampler = DiskstatsSampler()
    if name not in {record.device for record in sampler.sample(NOW)}:
        pytest.skip(f"{name} lies over other devices")
    before = disk(sampler, name)
    direct_io(tmp_path / "file", 32 * MIB, write=True)
    after = disk(sampler, name)
    sampler.close()
    assert after.written_bytes_total - before.written_bytes_total >= 32 * MIB
    assert after.writes_total > before.writes_total


@needs_root
class TestFuse:
    def test_bytes_to_and_from_the_store(self, tmp_path):
        """Both directions to within 3 percent, which is the protocol's; the mount is seen at once, by its poll."""
        sampler = FilesystemsSampler()
        name = str(tmp_path / "my data")
        assert name not in filesystems(sampler)
        with Sshfs(tmp_path) as sshfs:
            sshfs.wait()
            before = filesystems(sampler, NOW.later(5.0))[name]
            assert (before.fstype, before.source) == ("fuse.sshfs", "fuse_daemon")
            (sshfs.mountpoint / "file").write_bytes(b"w" * (16 * MIB))
            written = filesystems(sampler, NOW.later(10.0))[name]
            assert (sshfs.store / "file").stat().st_size == 16 * MIB
            assert len((sshfs.mountpoint / "file").read_bytes()) == 16 * MIB
            read = filesystems(sampler, NOW.later(15.0))[name]
        assert name not in filesystems(sampler, NOW.later(20.0))
        sampler.close()
        sent = written.written_bytes_total - before.written_bytes_total
        assert 16 * MIB <= sent <= 16.5 * MIB
        assert written.read_bytes_total - before.read_bytes_total <= 0.5 * MIB
        received = read.read_bytes_total - written.read_bytes_total
        assert 16 * MIB <= received <= 16.5 * MIB
        assert read.written_bytes_total - written.written_bytes_total <= 0.5 * MIB
        assert dict(sampler.errors) == {}

    def test_another_process_of_that_name_with_the_mountpoint_changes_nothing(self, tmp_path):
        """It holds no /dev/fuse, as `juicefs stats` holds none; the daemon's bytes stay, and go on."""
        sampler = FilesystemsSampler()
        with Sshfs(tmp_path) as sshfs:
            sshfs.wait()
            name = str(sshfs.mountpoint)
            before = filesystems(sampler)[name]
            code = "import sys; open('/proc/self/comm', 'w').write('sshfs'); print(flush=True); sys.stdin.read()"
            with subprocess.Popen(
                [sys.executable, "-c", code, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as other:
                other.stdout.readline()
                (sshfs.mountpoint / "file").write_bytes(b"w" * (2 * MIB))
                beside = filesystems(sampler, NOW.later(60.0))[name]
                other.stdin.close()
            after = filesystems(sampler, NOW.later(65.0))[name]
        sampler.close()
        assert 2 * MIB <= beside.written_bytes_total - before.written_bytes_total <= 2.1 * MIB
        assert after.written_bytes_total is not None
        assert beside.written_bytes_total <= after.written_bytes_total <= beside.written_bytes_total + 4096

    def test_a_mount_in_the_namespace_of_a_job(self, tmp_path):
        """Our own namespace has no such mount; through a process of the job it is there, with its bytes."""
        if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
            pytest.skip("no mount namespaces here")
        with Sshfs(tmp_path, "unshare", "--mount", "--propagation", "private") as sshfs:
            sshfs.wait()
            alone = FilesystemsSampler()
            assert str(sshfs.mountpoint) not in filesystems(alone)
            alone.close()
            sampler = FilesystemsSampler(pids=lambda: (sshfs.daemon.pid,))
            before = filesystems(sampler)[str(sshfs.mountpoint)]
            inside = f"/proc/{sshfs.daemon.pid}/root{sshfs.mountpoint}/file"
            Path(inside).write_bytes(b"w" * (4 * MIB))
            after = filesystems(sampler, NOW.later(5.0))[str(sshfs.mountpoint)]
            sampler.close()
        assert 4 * MIB <= after.written_bytes_total - before.written_bytes_total <= 4.2 * MIB

    def test_a_dead_mount_blocks_nothing(self, tmp_path):
        """The daemon is stopped: whoever looks at the mount hangs, the sampler does not look."""
        with Sshfs(tmp_path) as sshfs:
            sshfs.wait()
            sshfs.daemon.send_signal(signal.SIGSTOP)
            victim = subprocess.Popen(["stat", "--file-system", str(sshfs.mountpoint)], stdout=subprocess.DEVNULL)
            try:
                state = Path(f"/proc/{victim.pid}/stat")
                wait_for("hanging stat", lambda: state.read_text().rsplit(")", 1)[1].split()[0] in "SD", 10.0)
                found: list[dict[str, FilesystemSample]] = []

                def look() -> None:
                    sampler = FilesystemsSampler()
                    sampler.probe()
                    found.append(filesystems(sampler))
                    sampler.close()

                thread = threading.Thread(target=look, daemon=True)
                thread.start()
                thread.join(timeout=10.0)
                assert found, "the sampler hangs on a dead mount"
                assert found[0][str(sshfs.mountpoint)].source == "fuse_daemon"
                assert victim.poll() is None  # it still hangs, so the mount was dead all the time
            finally:
                sshfs.daemon.send_signal(signal.SIGCONT)
                victim.wait(timeout=30)

    def test_another_user_knows_the_mount_without_its_bytes(self, tmp_path):
        """Descriptors of another user's daemon are closed to us: None, counted once."""
        with Sshfs(tmp_path) as sshfs:
            sshfs.wait()
            sampler = FilesystemsSampler()
            os.seteuid(65534)
            try:
                found = filesystems(sampler)
                filesystems(sampler, NOW.later(5.0))
            finally:
                os.seteuid(0)
            sampler.close()
        record = found[str(sshfs.mountpoint)]
        assert (record.read_bytes_total, record.written_bytes_total, record.source) == (None, None, None)
        assert sampler.errors["no_permission"] == 1


@needs_root
def test_nfs_over_loopback(tmp_path):
    """The kernel's own server and client: what was written reached the server, what was read came from it."""
    if "\tnfs4\n" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel has no NFS client")
    if "nfsd" not in Path("/proc/filesystems").read_text() or shutil.which("rpc.nfsd") is None:
        pytest.skip("this host has no NFS server (kernel nfsd and nfs-kernel-server)")
    store = tmp_path / "store"
    target = tmp_path / "my data"
    store.mkdir()
    target.mkdir()
    call("exportfs", "-o", "rw,fsid=0,no_root_squash,insecure,no_subtree_check", f"127.0.0.1:{store}")
    try:
        call("rpc.nfsd", "--no-nfs-version", "3", "1")
        # No client of an earlier server comes back here: the minute and a half kept for such need not be waited for.
        Path("/proc/fs/nfsd/v4_end_grace").write_text("Y")
        call("mount", "-t", "nfs4", "-o", "vers=4.2", "127.0.0.1:/", target)
        try:
            sampler = FilesystemsSampler()
            before = filesystems(sampler)[str(target)]
            (target / "file").write_bytes(b"w" * (4 * MIB))  # written back when it is closed
            written = filesystems(sampler, NOW.later(5.0))[str(target)]
            Path("/proc/sys/vm/drop_caches").write_text("3")
            assert len((target / "file").read_bytes()) == 4 * MIB
            read = filesystems(sampler, NOW.later(10.0))[str(target)]
            sampler.close()
        finally:
            call("umount", target)
    finally:
        call("exportfs", "-u", f"127.0.0.1:{store}")
        call("rpc.nfsd", "0")
    assert (before.fstype, before.source, before.is_rdma) == ("nfs4", "mountstats", False)
    assert written.written_bytes_total - before.written_bytes_total == 4 * MIB
    assert read.read_bytes_total - written.read_bytes_total == 4 * MIB
    assert read.major_timeouts_total == 0


MANY_MOUNTS = """
import json, sys, time
from pathlib import Path
from agent.clock import Instant
from agent.samplers.filesystems import FilesystemsSampler
from tests.end_to_end.storage_support import mount

folder = Path(sys.argv[1])
for number in range(int(sys.argv[2])):
    target = folder / str(number)
    target.mkdir()
    mount("none", target, "ramfs")
sampler = FilesystemsSampler()
times = []
for tick in range(8):
    if tick == 7:
        (folder / "new").mkdir()
        mount("none", folder / "new", "ramfs")
    started = time.process_time()
    sampler.sample(Instant(5.0 * tick, 0.0))
    times.append(time.process_time() - started)
result = {"first": times[0], "changed": times[7], "unchanged": min(times[1:7]), "errors": dict(sampler.errors)}
print(json.dumps(result))
"""


@needs_root
def test_thousands_of_mounts_cost_little(tmp_path):
    """5000 mounts: read in less than half a second of CPU, and not read again while nothing changes."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", MANY_MOUNTS, str(tmp_path), "5000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["errors"] == {}
    assert result["first"] < 0.5, result
    assert result["changed"] < 0.5, result
    assert result["unchanged"] < 0.01, result
