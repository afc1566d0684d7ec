"""Bytes of FUSE file systems of the network, from the TCP connections of their daemons.

/proc/<pid>/io of a daemon is no answer: 64 MiB written by a program raise rchar (from /dev/fuse) and wchar (to the
store) of bindfs by 64 MiB each, and 64 MiB read by a program raise both alike, so they do not tell reading from
writing; splice() and recv() pass by them. The daemon's connections have a direction: what they received was read from
the store, what was acknowledged was written to it. A few percent are protocol and encryption, a connection that ends
between two looks takes the rest of its bytes with it, and what the daemon's own cache served is not in it. A connection
that is missing from a look, and comes back, goes on from where it was.

None, with the traffic in the network's counters alone, where the daemon is not found, its descriptors may not be read
(another user's without CAP_SYS_PTRACE), it lives in another network namespace, or it holds no TCP connection (RDMA,
QUIC, sshfs through an ssh process).

A daemon is known by its program's name and the mountpoint among its arguments, or as the only one of its kind where
there is one mount of that kind, and by /dev/fuse, which it holds open: `juicefs stats /jfs` is none. Where no such
process holds it, or lets us see that, the one that started first is taken. It stays the daemon while it lives.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from agent.clock import Instant
from agent.samplers.mounts import Mount, read_file, unescape
from agent.samplers.tcp_sockets import TcpSocket, tcp_sockets

#: Processes whose name is looked at in one search, and descriptors of one daemon.
MAX_PROCESSES: Final = 16_384
MAX_DESCRIPTORS: Final = 4096
#: Seconds for which a connection that is not seen is remembered, and how many of one daemon are.
CONNECTION_MEMORY_S: Final = 600.0
MAX_CONNECTIONS: Final = 16_384
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
#: The device as its holder's link shows it, also from a container with a /dev of its own.
_FUSE_DEVICES: Final = frozenset({"/dev/fuse", "/fuse"})


class _Process(NamedTuple):
    """One process: ids are given again."""

    pid: int
    started: int | None  # ticks, field 22 of its stat; None where that cannot be read


class _Connection(NamedTuple):
    """What a connection had carried when it was last seen."""

    received_bytes: int
    sent_bytes: int
    seen_s: float


@dataclass(slots=True)
class _Daemon:
    """The processes that serve one mount, and what their connections carried since they were first seen."""

    processes: tuple[_Process, ...]
    identity: _Process  # the first of them
    received_bytes: int = 0
    sent_bytes: int = 0
    has_connected: bool = False
    known: frozenset[_Process] = frozenset()  # whose connections were looked at before
    connections: dict[int, _Connection] = field(default_factory=dict)  # by cookie, those seen last come last

    def update(self, now: Instant, found: Sequence[TcpSocket], *, is_whole: bool) -> None:
        """Add what the connections carried since the last look; a new one counts whole, or not at all."""
        self.has_connected = self.has_connected or bool(found)
        for connection in found:
            last = self.connections.pop(connection.cookie, None)
            self.connections[connection.cookie] = _Connection(
                connection.received_bytes, connection.sent_bytes, now.monotonic_s
            )
            if last is not None:
                self.received_bytes += max(0, connection.received_bytes - last.received_bytes)
                self.sent_bytes += max(0, connection.sent_bytes - last.sent_bytes)
            elif is_whole:
                self.received_bytes += connection.received_bytes
                self.sent_bytes += connection.sent_bytes

    def forget(self, now: Instant) -> None:
        """Forget the connections that were not seen for long."""
        for cookie, connection in list(self.connections.items()):
            is_old = now.monotonic_s - connection.seen_s > CONNECTION_MEMORY_S
            if not is_old and len(self.connections) <= MAX_CONNECTIONS:
                break
            del self.connections[cookie]


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

    def read(self, now: Instant, mounts: tuple[Mount, ...]) -> dict[Mount, dict[Hashable, tuple[int, int] | None]]:
        """Return the bytes read and written of each mount whose daemon is known, by the daemon.

        None where the daemon cannot be followed now, or never had a connection.
        """
        if not mounts:
            self._mounts, self._daemons = (), {}
            return {}
        is_old = self._searched_s is None or now.monotonic_s - self._searched_s >= _SEARCH_S
        if is_old or mounts != self._mounts:
            self._mounts, self._searched_s = mounts, now.monotonic_s
            self._search()
        totals: dict[Mount, dict[Hashable, tuple[int, int] | None]] = {}
        denied: set[Mount] = set()
        failed: set[Mount] = set()
        for mount, daemon in self._daemons.items():
            instance = mount.device, daemon.identity
            totals[mount] = {instance: None}
            try:
                self._look(now, daemon)
            except PermissionError:
                denied.add(mount)
                continue
            except OSError:
                failed.add(mount)
                continue
            if not daemon.processes:  # it ended: search again with the next tick
                self._searched_s = None
                del totals[mount]
            elif daemon.has_connected:
                totals[mount] = {instance: (daemon.received_bytes, daemon.sent_bytes)}
        # Counted when they begin: both last, and say the same every time.
        for reason, new in (("no_permission", denied - self._denied), ("no_sockets", failed - self._failed)):
            if new:
                self._errors[reason] += len(new)
        self._denied, self._failed = frozenset(denied), frozenset(failed)
        return totals

    def _look(self, now: Instant, daemon: _Daemon) -> None:
        """Take what the connections of a daemon's processes carried; those that ended are dropped from it."""
        inodes: dict[_Process, list[int]] = {}
        for process in daemon.processes:
            try:
                if self._started(process.pid) == process.started:
                    inodes[process] = self._inodes(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
        daemon.processes = tuple(inodes)
        # What the connections of a process that came later carried before is not the mount's, as far as we know.
        followed = daemon.known or frozenset(inodes)
        for is_whole in (True, False):
            wanted = frozenset(
                inode for process, found in inodes.items() if (process in followed) == is_whole for inode in found
            )
            if wanted:
                daemon.update(now, self._sockets(wanted), is_whole=is_whole)
        daemon.known = frozenset(inodes)
        daemon.forget(now)

    def _started(self, pid: int) -> int | None:
        """Return when a process began, in ticks; None where that cannot be read."""
        try:
            data, _ = read_file(self._proc_root / str(pid) / "stat", 4096)
        except OSError:
            return None
        fields = data.rpartition(b")")[2].split()
        return int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None

    def _inodes(self, pid: int) -> list[int]:
        """Return the inodes of the sockets that a process of our network namespace holds."""
        directory = self._proc_root / str(pid)
        if (directory / "ns" / "net").readlink() != (self._proc_root / "self" / "ns" / "net").readlink():
            return []
        targets = self._descriptors(pid)
        return [int(target[8:-1]) for target in targets if target.startswith("socket:[") and target[8:-1].isdecimal()]

    def _descriptors(self, pid: int) -> list[str]:
        """Return what a process holds open; raises OSError."""
        folder = self._proc_root / str(pid) / "fd"
        found = []
        for name in os.listdir(folder)[:MAX_DESCRIPTORS]:  # noqa: PTH208 - one link each, without a stat
            try:
                found.append(os.readlink(folder / name))  # noqa: PTH115 - as above
            except OSError:  # closed in between
                continue
        return found

    def _holds_fuse(self, process: _Process) -> bool:
        """Return whether a process is seen to hold the device that file systems are served through."""
        try:
            return not _FUSE_DEVICES.isdisjoint(self._descriptors(process.pid))
        except OSError:
            return False

    def _search(self) -> None:
        """Find the daemons of the mounts, first those that are sure; one that lives stays the daemon of its mount."""
        candidates = self._candidates()
        holders = {process for process in candidates if self._holds_fuse(process)}
        served: dict[Mount, tuple[_Process, ...]] = {}
        for is_sure in (True, False):
            for mount in self._mounts:
                if mount in served:
                    continue
                taken = {process for processes in served.values() for process in processes}
                named, same = self._matching(mount, {p: c for p, c in candidates.items() if p not in taken})
                if is_sure:
                    named, same = ([p for p in found if p in holders] for found in (named, same))
                chosen = named or (same if len(same) == 1 else [])
                if chosen and not is_sure:
                    chosen = self._likely(mount, chosen)
                if chosen:
                    served[mount] = tuple(chosen)
        before, self._daemons = self._daemons, {}
        for mount, processes in served.items():
            daemon = before.get(mount)
            if daemon is None or set(daemon.processes).isdisjoint(processes):
                daemon = _Daemon(processes, processes[0])
            daemon.processes = processes
            self._daemons[mount] = daemon

    def _matching(
        self, mount: Mount, candidates: Mapping[_Process, tuple[bytes, list[bytes]]]
    ) -> tuple[list[_Process], list[_Process]]:
        """Return the processes that name a mountpoint, and those of the mount's kind where it is the only one."""
        path = unescape(mount.mountpoint).encode("utf-8", "surrogateescape").rstrip(b"/")
        kind = mount.fstype.removeprefix("fuse.").encode()[:15]
        is_only = sum(other.fstype == mount.fstype for other in self._mounts) == 1
        named = [
            process
            for process, (_, arguments) in candidates.items()
            if any(argument.rstrip(b"/") == path for argument in arguments[1:])
        ]
        return named, [process for process, (name, _) in candidates.items() if is_only and name == kind]

    def _likely(self, mount: Mount, found: Sequence[_Process]) -> list[_Process]:
        """Return the daemon that is known already, else the process that started first: with the mount."""
        daemon = self._daemons.get(mount)
        living = [process for process in daemon.processes if process in found] if daemon else []
        return living or [min(found, key=lambda process: (process.started or 0, process.pid))]

    def _candidates(self) -> dict[_Process, tuple[bytes, list[bytes]]]:
        """Return the name and the arguments of all processes that bear the name of a daemon."""
        found: dict[_Process, tuple[bytes, list[bytes]]] = {}
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
                found[_Process(int(name), self._started(int(name)))] = comm, arguments.split(b"\0")
        return found
