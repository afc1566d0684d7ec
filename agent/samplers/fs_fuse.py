"""Bytes of FUSE file systems of the network, from the TCP connections of their daemons.

/proc/<pid>/io of a daemon is no answer: 64 MiB written by a program raise rchar (from /dev/fuse) and wchar (to the
store) of bindfs by 64 MiB each, and 64 MiB read by a program raise both alike, so they do not tell reading from
writing; splice() and recv() pass by them. The daemon's connections have a direction: what they received was read from
the store, what was acknowledged was written to it. A few percent are protocol and encryption, a connection that ends
between two looks takes the rest of its bytes with it, and what the daemon's own cache served is not in it.

None, with the traffic in the network's counters alone, where the daemon is not found, its descriptors may not be read
(another user's without CAP_SYS_PTRACE), it lives in another network namespace, or it holds no TCP connection (RDMA,
QUIC, sshfs through an ssh process).

A daemon is known by its program's name and the mountpoint among its arguments; where no argument is the mountpoint,
the only daemon of a kind serves the only mount of that kind.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.clock import Instant
from agent.samplers.mounts import Mount, read_file, unescape
from agent.samplers.tcp_sockets import TcpSocket, tcp_sockets

#: Processes whose name is looked at in one search, and descriptors of one daemon.
MAX_PROCESSES: Final = 16_384
MAX_DESCRIPTORS: Final = 4096
#: Seconds between two searches of /proc where the mounts stay the same.
_SEARCH_S: Final = 60.0
_MAX_ARGUMENT_BYTES: Final = 1 << 16
#: Names of daemons (comm, at most 15 bytes) that serve FUSE from a network.
_DAEMONS: Final = frozenset(
    b"juicefs alluxio-fuse java s3fs gcsfuse mount-s3 ceph-fuse goofys geesefs rclone sshfs glusterfs blobfuse "
    b"blobfuse2 weed dfuse mfsmount mount.mfs hf3fs_fuse_main cfs-client curve-fuse cunofs cuno mount.objective "
    b"tigrisfs ossfs cosfs obsfs wekafs-fuse oss-fuse davfs2 mount.davfs curlftpfs s3ql".split()
)
#: Of a program that serves more than FUSE, what its arguments must hold.
_MARKS: Final[Mapping[bytes, bytes]] = {b"java": b"alluxio", b"rclone": b"mount", b"weed": b"mount"}


@dataclass(slots=True)
class _Daemon:
    """The processes that serve one mount, and what their connections carried since they were first seen."""

    pids: tuple[int, ...]
    received_bytes: int = 0
    sent_bytes: int = 0
    has_connected: bool = False
    connections: dict[int, tuple[int, int]] = field(default_factory=dict)  # received and sent, by cookie

    def update(self, found: Sequence[TcpSocket]) -> None:
        """Add what the connections carried since the last look; a new one counts whole."""
        self.has_connected = self.has_connected or bool(found)
        for connection in found:
            received, sent = self.connections.get(connection.cookie, (0, 0))
            self.received_bytes += max(0, connection.received_bytes - received)
            self.sent_bytes += max(0, connection.sent_bytes - sent)
        self.connections = {one.cookie: (one.received_bytes, one.sent_bytes) for one in found}


class FuseReader:
    """Follows the connections of the daemons of FUSE mounts."""

    def __init__(
        self,
        proc_root: Path,
        errors: Counter[str],
        sockets: Callable[[Collection[int]], Sequence[TcpSocket]] = tcp_sockets,
    ) -> None:
        self._proc_root = proc_root
        self._errors = errors
        self._sockets = sockets
        self._mounts: tuple[Mount, ...] = ()
        self._daemons: dict[Mount, _Daemon] = {}
        self._searched_s: float | None = None
        self._denied: frozenset[Mount] = frozenset()
        self._failed: frozenset[Mount] = frozenset()

    def read(self, now: Instant, mounts: tuple[Mount, ...]) -> dict[Mount, tuple[int, int]]:
        """Return the bytes read and written of those `mounts` whose daemon can be followed."""
        if not mounts:
            self._mounts, self._daemons = (), {}
            return {}
        is_old = self._searched_s is None or now.monotonic_s - self._searched_s >= _SEARCH_S
        if is_old or mounts != self._mounts:
            self._mounts, self._searched_s = mounts, now.monotonic_s
            self._search()
        totals: dict[Mount, tuple[int, int]] = {}
        denied: set[Mount] = set()
        failed: set[Mount] = set()
        for mount, daemon in self._daemons.items():
            try:
                inodes = frozenset(inode for pid in daemon.pids for inode in self._inodes(pid))
                daemon.update(self._sockets(inodes) if inodes else ())
            except PermissionError:
                denied.add(mount)
                continue
            except FileNotFoundError:  # the daemon ended: search again with the next tick
                self._searched_s = None
                continue
            except OSError:
                failed.add(mount)
                continue
            if daemon.has_connected:
                totals[mount] = daemon.received_bytes, daemon.sent_bytes
        # Counted when they begin: both last, and say the same every time.
        for reason, new in (("no_permission", denied - self._denied), ("no_sockets", failed - self._failed)):
            if new:
                self._errors[reason] += len(new)
        self._denied, self._failed = frozenset(denied), frozenset(failed)
        return totals

    def _inodes(self, pid: int) -> list[int]:
        """Return the inodes of the sockets that a process of our network namespace holds."""
        directory = self._proc_root / str(pid)
        if (directory / "ns" / "net").readlink() != (self._proc_root / "self" / "ns" / "net").readlink():
            return []
        found = []
        folder = directory / "fd"
        for name in os.listdir(folder)[:MAX_DESCRIPTORS]:  # noqa: PTH208 - one link each, without a stat
            try:
                target = os.readlink(folder / name)  # noqa: PTH115 - as above
            except OSError:  # closed in between
                continue
            if target.startswith("socket:[") and target[8:-1].isdecimal():
                found.append(int(target[8:-1]))
        return found

    def _search(self) -> None:
        """Find the daemons of the mounts, and keep what is known of those that are the same as before."""
        candidates = self._candidates()
        served: dict[Mount, tuple[int, ...]] = {}
        taken: set[int] = set()
        for mount in self._mounts:
            path = unescape(mount.mountpoint).encode("utf-8", "surrogateescape").rstrip(b"/")
            pids = tuple(
                pid
                for pid, (_, arguments) in candidates.items()
                if pid not in taken and any(argument.rstrip(b"/") == path for argument in arguments[1:])
            )
            if pids:
                served[mount] = pids
                taken.update(pids)
        for mount in self._mounts:
            kind = mount.fstype.removeprefix("fuse.").encode()
            pids = tuple(pid for pid, (name, _) in candidates.items() if pid not in taken and name == kind[:15])
            is_only = sum(other.fstype == mount.fstype for other in self._mounts) == 1
            if mount not in served and is_only and len(pids) == 1:
                served[mount] = pids
                taken.update(pids)
        before = self._daemons
        self._daemons = {
            mount: before[mount] if mount in before and before[mount].pids == pids else _Daemon(pids)
            for mount, pids in served.items()
        }

    def _candidates(self) -> dict[int, tuple[bytes, list[bytes]]]:
        """Return the name and the arguments of all processes that bear the name of a daemon."""
        found: dict[int, tuple[bytes, list[bytes]]] = {}
        names = [name for name in os.listdir(self._proc_root) if name.isdecimal()]  # noqa: PTH208 - names only
        for name in sorted(names, key=int)[:MAX_PROCESSES]:
            directory = self._proc_root / name
            try:
                comm, _ = read_file(directory / "comm", 64)
                comm = comm.strip()
                if comm not in _DAEMONS:
                    continue
                arguments, _ = read_file(directory / "cmdline", _MAX_ARGUMENT_BYTES)
            except OSError:
                continue
            if _MARKS.get(comm, b"") in arguments:
                found[int(name)] = comm, arguments.split(b"\0")
        return found
