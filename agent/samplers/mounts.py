"""Mounts of file systems that bypass the block layer, from mountinfo; of this process, and of the jobs' processes.

A line of mountinfo is `id parent major:minor root mountpoint options [fields] - type source options` (proc(5)); blanks,
tabs, newlines and backslashes in it are octal escapes. major:minor names the super block: one file system, however
often it is mounted, in however many mount namespaces.

Nothing below a mountpoint is ever touched: a server that is gone would block that for ever.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.clock import Instant
from agent.samplers import SourceUnavailableError

#: Bytes of one mountinfo or mountstats that are read: some 40,000 mounts, or 1,500 of NFS with their counters.
MAX_FILE_BYTES: Final = 8 << 20
#: Processes whose namespace is looked up, and namespaces beside our own whose mounts are read.
MAX_PROCESSES: Final = 256
MAX_NAMESPACES: Final = 16
#: File systems of one namespace that are kept, of those that users mount themselves (FUSE) and of the others each.
MAX_FILESYSTEMS: Final = 64
#: Seconds after which mounts are read again although nothing said that they changed.
_AGE_S: Final = 60.0
_READ_BYTES: Final = 1 << 16

#: Through the kernel's client; and FUSE, of which fuseblk lies over a block device.
_WANTED: Final = re.compile(
    rb" - (nfs4?|lustre|ceph|gpfs|beegfs|wekafs|panfs|cifs|smb3|9p|virtiofs|fuse(?:\.[^ \n]*)?) ([^ \n]*) [^ \n]*\n"
)
#: FUSE file systems that show what the kernel knows, or lie over local files whose device has the bytes already.
_LOCAL_FUSE: Final = re.compile(
    rb"fuse\.(?:lxcfs|gvfsd-fuse|portal|xdg-document-portal|snapfuse|squashfuse(?:_ll)?|fuse-overlayfs|bindfs|mergerfs|"
    rb"unionfs|vmware-vmblock|encfs|gocryptfs|archivemount|.*\.AppImage)"
)
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
_DEVICE: Final = re.compile(rb"[0-9]{1,10}:[0-9]{1,10}")


class Mount(NamedTuple):
    """One file system as its first mount in a namespace shows it; bytes are as the kernel wrote them, escapes too."""

    device: str  # major:minor of the super block
    mountpoint: bytes
    fstype: str
    source: bytes


class Namespace(NamedTuple):
    """A mount namespace, seen through one of its processes."""

    process: str  # a process id, or self
    keys: frozenset[str]  # two that share one are the same namespace
    mounts: tuple[Mount, ...]
    left_out: frozenset[str] = frozenset()  # devices beyond MAX_FILESYSTEMS


def is_fuse(fstype: str) -> bool:
    """Return whether a file system is of FUSE, which any user may mount."""
    return fstype.startswith("fuse")


def parse_mountinfo(data: bytes) -> tuple[tuple[Mount, ...], int, frozenset[str]]:
    """Return the wanted file systems by their first mount, how many lines made no sense, and devices beyond the limit.

    FUSE comes last and has a limit of its own: a user's mounts take nothing from those of the cluster.
    """
    kernel: dict[str, Mount] = {}
    fuse: dict[str, Mount] = {}
    malformed = 0
    beyond: set[str] = set()
    for match in _WANTED.finditer(data):
        if _LOCAL_FUSE.fullmatch(match[1]):
            continue
        start = data.rfind(b"\n", 0, match.start()) + 1
        fields = data[start : match.start()].split(b" ")
        if len(fields) < 6 or not _DEVICE.fullmatch(fields[2]) or not fields[4].startswith(b"/"):
            malformed += 1
            continue
        mount = Mount(fields[2].decode("ascii"), fields[4], match[1].decode("ascii", "backslashreplace"), match[2])
        found = fuse if is_fuse(mount.fstype) else kernel
        if mount.device in found or len(found) < MAX_FILESYSTEMS:
            found.setdefault(mount.device, mount)
        else:
            beyond.add(mount.device)
    return (*kernel.values(), *fuse.values()), malformed, frozenset(beyond)


def unescape(text: bytes) -> str:
    r"""Return a field with its octal escapes (\040) resolved; bytes that are not UTF-8 become surrogates."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), text).decode("utf-8", "surrogateescape")


def read_bounded(descriptor: int, limit: int = MAX_FILE_BYTES) -> tuple[bytes, bool]:
    """Return what a file holds, at most `limit` bytes up to the last whole line, and whether it was cut."""
    parts: list[bytes] = []
    size = 0
    while size < limit:
        part = os.read(descriptor, _READ_BYTES)
        if not part:
            return b"".join(parts), False
        parts.append(part)
        size += len(part)
    data = b"".join(parts)
    return data[: data.rfind(b"\n") + 1], True


def read_file(path: Path, limit: int = MAX_FILE_BYTES) -> tuple[bytes, bool]:
    """Open, read and close a file, so that no namespace of an ended job is held; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_bounded(descriptor, limit)
    finally:
        os.close(descriptor)


class OwnMounts:
    """The mounts of this process; the file is polled, which tells a change without reading it."""

    def __init__(self, proc_root: Path, errors: Counter[str]) -> None:
        self._path = proc_root / "self" / "mountinfo"
        self._link = proc_root / "self" / "ns" / "mnt"
        self._errors = errors
        self._descriptor: int | None = None
        self._poll = select.poll()
        self._read_s = 0.0
        self._namespace = Namespace("self", frozenset(), ())

    def read(self, now: Instant) -> Namespace:
        """Return the namespace of this process; raises SourceUnavailableError where mountinfo cannot be read."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                self._poll.register(self._descriptor, select.POLLPRI | select.POLLERR)
            elif not self._poll.poll(0) and now.monotonic_s - self._read_s < _AGE_S:
                return self._namespace
            else:
                os.lseek(self._descriptor, 0, os.SEEK_SET)
            data, is_cut = read_bounded(self._descriptor)
        except OSError as error:
            self.close()
            reason = "absent" if isinstance(error, FileNotFoundError) else "unreadable"
            raise SourceUnavailableError(reason, f"{self._path} cannot be read: {error.strerror}") from error
        self._read_s = now.monotonic_s
        keys = _keys(self._link, data)
        errors = self._errors if keys != self._namespace.keys else Counter[str]()  # the same says nothing new
        self._namespace = _parse("self", keys, data, errors, is_cut=is_cut)
        return self._namespace

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._descriptor is not None:
            self._poll.unregister(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


class JobMounts:
    """The mounts that the jobs' processes see: a pod's file systems are often mounted in its namespace alone."""

    def __init__(self, proc_root: Path, errors: Counter[str]) -> None:
        self._proc_root = proc_root
        self._errors = errors
        self._pids: tuple[int, ...] = ()
        self._own: frozenset[str] = frozenset()
        self._read_s: float | None = None
        self._namespaces: tuple[Namespace, ...] = ()

    def read(self, now: Instant, pids: Sequence[int], own: Namespace) -> tuple[Namespace, ...]:
        """Return the namespaces of `pids` other than `own`, one each.

        Looked up when the processes change and once a minute. A process that is gone, or that /proc hides, has none.
        """
        pids = tuple(sorted(set(pids)))
        is_old = self._read_s is None or now.monotonic_s - self._read_s >= _AGE_S
        if not is_old and pids == self._pids and own.keys == self._own:
            return self._namespaces
        is_changed = pids != self._pids
        self._pids, self._own, self._read_s = pids, own.keys, now.monotonic_s
        found: list[Namespace] = []
        left_out = len(pids[MAX_PROCESSES:])
        seen = set(own.keys)
        for pid in pids[:MAX_PROCESSES]:
            namespace = self._look(str(pid), seen)
            if namespace is None:
                continue
            seen |= namespace.keys
            if len(found) < MAX_NAMESPACES:
                found.append(namespace)
            else:
                left_out += 1
        if left_out and is_changed:
            self._errors["too_many_namespaces"] += left_out
        self._namespaces = tuple(found)
        return self._namespaces

    def _look(self, process: str, seen: set[str]) -> Namespace | None:
        """Return the namespace of a process, or None where it is among those seen or cannot be looked up."""
        directory = self._proc_root / process
        try:
            if _link_of(directory / "ns" / "mnt") in seen:
                return None
            data, is_cut = read_file(directory / "mountinfo")
        except OSError:
            return None
        keys = _keys(directory / "ns" / "mnt", data)
        if not data or keys & seen:
            return None
        is_known = any(keys == namespace.keys for namespace in self._namespaces)
        return _parse(process, keys, data, Counter() if is_known else self._errors, is_cut=is_cut)


def _parse(process: str, keys: frozenset[str], data: bytes, errors: Counter[str], *, is_cut: bool) -> Namespace:
    """Return what a mountinfo shows, and count what was wrong with it."""
    mounts, malformed, beyond = parse_mountinfo(data)
    if malformed:
        errors["malformed"] += malformed
    if is_cut:
        errors["truncated"] += 1
    return Namespace(process, keys, mounts, beyond)


def _keys(link: Path, data: bytes) -> frozenset[str]:
    """Return what names a namespace: its link where that may be read, and what it shows, since ids of mounts differ."""
    return frozenset({hashlib.sha256(data).hexdigest(), _link_of(link)} - {""})


def _link_of(link: Path) -> str:
    """Return the name of a namespace; empty where it is another user's and we may not trace it."""
    try:
        return str(link.readlink())
    except OSError:
        return ""
