"""Mounts from mountinfo: which file systems are found, and in whose namespaces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agent.clock import Instant
from agent.samplers import SourceUnavailableError
from agent.samplers import mounts as mounts_module
from agent.samplers.mounts import (
    MAX_FILESYSTEMS,
    MAX_NAMESPACES,
    JobMounts,
    Mount,
    Namespace,
    OwnMounts,
    parse_mountinfo,
    read_file,
    unescape,
)

NOW = Instant(100.0, 1_700_000_000.0)
HOME = b"81 26 0:53 / /home rw,relatime shared:81 - nfs4 nas:/home rw,addr=10.0.0.2\n"


def process(root, pid, mountinfo, namespace=None):
    directory = root / str(pid)
    directory.mkdir(parents=True)
    (directory / "mountinfo").write_bytes(mountinfo)
    if namespace is not None:
        (directory / "ns").mkdir()
        (directory / "ns" / "mnt").symlink_to(f"mnt:[{namespace}]")


@pytest.mark.parametrize(
    ("fields", "type_and_source", "mount"),
    [
        (b"0:53 / /home rw", b"nfs4 nas:/home rw", Mount("0:53", b"/home", "nfs4", b"nas:/home")),
        (b"0:53 / /home rw shared:1 master:2", b"nfs nas:/ rw", Mount("0:53", b"/home", "nfs", b"nas:/")),
        (b"0:53 / /a rw", b"lustre 10.0.0.1@o2ib:/s rw", Mount("0:53", b"/a", "lustre", b"10.0.0.1@o2ib:/s")),
        (b"0:53 / /a rw", b"fuse.juicefs JuiceFS:x rw", Mount("0:53", b"/a", "fuse.juicefs", b"JuiceFS:x")),
        (b"0:53 / /a rw", b"fuse /dev/fuse rw", Mount("0:53", b"/a", "fuse", b"/dev/fuse")),
        (b"0:53 / /a rw", b"nfs4  rw", Mount("0:53", b"/a", "nfs4", b"")),  # no source
        (b"0:53 / /a rw", b"fuseblk /dev/sda1 rw", None),  # through the block layer
        (b"0:53 / /a rw", b"fusectl fusectl rw", None),
        (b"0:53 / /a rw", b"fuse.lxcfs lxcfs rw", None),
        (b"0:53 / /a rw", b"fuse.fuse-overlayfs fuse-overlayfs rw", None),
        (b"0:53 / /a rw", b"fuse.Editor-1.0.AppImage x rw", None),
        (b"8:1 / /nfs rw", b"ext4 /dev/sda1 rw", None),
        (b"0:53 / /a rw", b"nfsd nfsd rw", None),
    ],
)
def test_lines_of_mountinfo(fields, type_and_source, mount):
    data = b"36 35 " + fields + b" - " + type_and_source + b"\n"
    assert parse_mountinfo(data) == (() if mount is None else (mount,), 0, frozenset())


@pytest.mark.parametrize(
    "line",
    [b"36 35 0:53 - nfs4 nas:/home rw\n", b"a b c / /home rw - nfs4 n rw\n", b"36 35 0:53 / home rw - nfs4 n rw\n"],
)
def test_a_garbled_line_costs_itself_only(line):
    mounts, malformed, beyond = parse_mountinfo(line + HOME)
    assert ([mount.mountpoint for mount in mounts], malformed, beyond) == ([b"/home"], 1, frozenset())


def test_a_file_system_counts_once_by_its_super_block():
    """Bind mounts and other mounts of a super block share its device; the first mount names it."""
    again = b"90 26 0:53 /user /export rw - nfs4 nas:/home/user rw\n"
    other = b"91 26 0:54 / /data rw - nfs4 nas:/data rw\n"
    mounts, _, _ = parse_mountinfo(HOME + again + other)
    assert [(mount.device, mount.mountpoint) for mount in mounts] == [("0:53", b"/home"), ("0:54", b"/data")]


def test_every_cut_gives_true_mounts_or_none():
    whole = {Mount("0:53", b"/home", "nfs4", b"nas:/home")}
    for length in range(len(HOME)):
        assert set(parse_mountinfo(HOME[:length])[0]) <= whole


def test_escapes_and_bytes_that_are_no_text():
    assert unescape(rb"/my\040data\134x\012") == "/my data\\x\n"
    assert unescape(rb"/a\377") == "/a\udcff"
    assert unescape(b"/a\xff\\9") == "/a\udcff\\9"


def test_file_systems_of_one_namespace_are_bounded():
    lines = b"".join(b"%d 26 0:%d / /n%d rw - nfs4 nas:/%d rw\n" % (n, n, n, n) for n in range(1, MAX_FILESYSTEMS + 4))
    mounts, malformed, beyond = parse_mountinfo(lines + lines)
    assert (len(mounts), malformed, beyond) == (MAX_FILESYSTEMS, 0, {"0:65", "0:66", "0:67"})


def test_mounts_of_users_take_no_place_from_those_of_the_cluster():
    fuse = b"".join(b"%d 26 0:%d / /m%d rw - fuse.sshfs u@h: rw\n" % (n, n, n) for n in range(1, MAX_FILESYSTEMS + 3))
    mounts, _, beyond = parse_mountinfo(fuse + HOME.replace(b"0:53", b"0:900"))
    assert [mount.fstype for mount in mounts] == ["nfs4"] + ["fuse.sshfs"] * MAX_FILESYSTEMS
    assert beyond == {"0:65", "0:66"}


def test_a_long_file_is_cut_at_a_line(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_bytes(HOME * 2000)
    data, is_cut = read_file(path, 70_000)
    assert is_cut
    assert data.endswith(b"\n")
    assert set(data.splitlines(keepends=True)) == {HOME}
    assert read_file(path) == (HOME * 2000, False)


class TestOwn:
    def test_changes_are_seen_within_a_minute_without_poll(self, tmp_path):
        """A plain file tells no changes; the real one is tested in tests/end_to_end/test_storage_real.py."""
        process(tmp_path, "self", HOME)
        own = OwnMounts(tmp_path, Counter())
        assert len(own.read(NOW).mounts) == 1
        (tmp_path / "self" / "mountinfo").write_bytes(b"")
        assert len(own.read(NOW.later(59.0)).mounts) == 1
        assert own.read(NOW.later(60.0)).mounts == ()
        own.close()
        own.close()

    def test_absent(self, tmp_path):
        with pytest.raises(SourceUnavailableError) as caught:
            OwnMounts(tmp_path, Counter()).read(NOW)
        assert caught.value.reason == "absent"

    def test_a_cut_file_is_counted(self, tmp_path, monkeypatch):
        process(tmp_path, "self", HOME + b"x" * 100)
        errors = Counter()
        monkeypatch.setattr(mounts_module.read_bounded, "__defaults__", (60,))
        own = OwnMounts(tmp_path, errors)
        own.read(NOW)
        own.close()
        assert errors["truncated"] == 1


class TestJobs:
    OWN = Namespace("self", frozenset({"mnt:[1]"}), ())

    def test_one_look_for_each_namespace(self, tmp_path):
        """11 and 12 share one by its link; 13 is in ours; 14 may not be traced and shows what no other shows."""
        process(tmp_path, 11, HOME, namespace=2)
        process(tmp_path, 12, b"must not be read", namespace=2)
        process(tmp_path, 13, HOME, namespace=1)
        process(tmp_path, 14, b"1 1 0:9 / /n rw - nfs4 nas:/n rw\n")
        found = JobMounts(tmp_path, Counter()).read(NOW, [14, 13, 12, 11, 99], self.OWN)
        assert [(one.process, [mount.device for mount in one.mounts]) for one in found] == [
            ("11", ["0:53"]),
            ("14", ["0:9"]),
        ]

    def test_without_links_equal_lists_are_one_namespace(self, tmp_path):
        """Ids of mounts are given once on a host, so two namespaces never show the same list."""
        process(tmp_path, "self", HOME, namespace=1)
        process(tmp_path, 11, HOME)
        process(tmp_path, 12, b"1 1 0:9 / /n rw - nfs4 nas:/n rw\n")
        process(tmp_path, 13, b"1 1 0:9 / /n rw - nfs4 nas:/n rw\n")
        own = OwnMounts(tmp_path, Counter())
        found = JobMounts(tmp_path, Counter()).read(NOW, [11, 12, 13], own.read(NOW))
        own.close()
        assert [one.process for one in found] == ["12"]

    def test_new_processes_are_looked_at_at_once(self, tmp_path):
        jobs = JobMounts(tmp_path, Counter())
        assert jobs.read(NOW, [11], self.OWN) == ()
        process(tmp_path, 11, HOME, namespace=2)
        assert jobs.read(NOW.later(5.0), [11], self.OWN) == ()  # the same processes: once a minute
        process(tmp_path, 12, HOME, namespace=2)
        assert [one.process for one in jobs.read(NOW.later(10.0), [11, 12], self.OWN)] == ["11"]

    def test_namespaces_are_bounded_and_counted_once(self, tmp_path):
        errors = Counter()
        jobs = JobMounts(tmp_path, errors)
        pids = list(range(100, 100 + MAX_NAMESPACES + 5))
        for pid in pids:
            process(tmp_path, pid, b"%d 1 0:9 / /n rw - nfs4 nas:/n rw\n" % pid, namespace=pid)
        for tick in range(3):
            assert len(jobs.read(NOW.later(60.0 * tick), pids, self.OWN)) == MAX_NAMESPACES
        assert errors == {"too_many_namespaces": 5}

    def test_what_is_wrong_is_counted_when_it_comes(self, tmp_path):
        """The same file, read again each minute, is no new error; another is."""
        errors = Counter()
        process(tmp_path, "self", HOME + HOME.replace(b"/home rw,", b"home rw,"), namespace=1)
        process(tmp_path, 11, HOME.replace(b"/home rw,", b"home rw,"), namespace=2)
        own, jobs = OwnMounts(tmp_path, errors), JobMounts(tmp_path, errors)
        for tick in range(3):
            jobs.read(NOW.later(60.0 * tick), [11], own.read(NOW.later(60.0 * tick)))
        assert errors == {"malformed": 2}
        (tmp_path / "self" / "mountinfo").write_bytes(HOME.replace(b"/home rw,", b"home rw,"))
        own.read(NOW.later(180.0))
        own.close()
        assert errors == {"malformed": 3}

    def test_a_process_that_ended_holds_nothing(self, tmp_path):
        """No descriptor of another process's file stays open: it would keep its mounts from being unmounted."""
        process(tmp_path, 11, HOME, namespace=2)
        before = len(list(Path("/proc/self/fd").iterdir()))
        JobMounts(tmp_path, Counter()).read(NOW, [11], self.OWN)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
