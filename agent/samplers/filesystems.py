"""File systems that bypass the block layer, every 5 s: NFS, Lustre, Ceph, FUSE and others, and GPUDirect Storage.

One record for each file system (super block; the file system of that name for Lustre, the cluster for Ceph), wherever
and however often it is mounted in our mount namespace and in those of the jobs' processes. Where its bytes cannot be
read it has a record without them, so that the mount is known; that is always so for GPFS (its numbers come from
mmpmon, a program for root), BeeGFS, WekaFS, CIFS, 9p and virtiofs, whose traffic shows on the network and InfiniBand.

Totals only grow, per name and type, whatever is mounted there one after another: see `agent.samplers.fs_totals`.

Only files of /proc and /sys are read. No statfs, stat or open below a mountpoint: a dead server blocks nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.clock import Instant
from agent.records import FilesystemSample, GpuDirectStorageSample
from agent.samplers.fs_ceph import CephReader, cluster_of
from agent.samplers.fs_fuse import FuseReader
from agent.samplers.fs_lustre import LustreReader, fsname
from agent.samplers.fs_nfs import NfsCounters, parse_mountstats
from agent.samplers.fs_totals import GrowingTotals, Readings, Values
from agent.samplers.gpu_direct_storage import GpuDirectStorageReader
from agent.samplers.kernel_file import printable
from agent.samplers.mounts import (
    MAX_FILESYSTEMS,
    JobMounts,
    Mount,
    Namespace,
    OwnMounts,
    is_fuse,
    read_file,
    unescape,
)
from agent.samplers.tcp_sockets import TcpSocket, tcp_sockets

_NFS: Final = frozenset({"nfs", "nfs4"})


class _Source(NamedTuple):
    """What one source says of a file system: bytes read and written, of NFS major timeouts as well, by instance."""

    readings: Readings | None
    name: str
    is_rdma: bool | None = None


class FilesystemsSampler:
    """Samples the file systems that this host, and the jobs on it, have mounted.

    `pids` returns the jobs' processes, whose mount namespaces are looked at too. Their list of mounts is open to all;
    their NFS counters are open to the same user and to CAP_DAC_READ_SEARCH.
    """

    name = "filesystems"
    period_s = 5.0

    def __init__(
        self,
        proc_root: Path = Path("/proc"),
        sys_root: Path = Path("/sys"),
        *,
        pids: Callable[[], Sequence[int]] = tuple,
        sockets: Callable[[Collection[int]], Sequence[TcpSocket]] = tcp_sockets,
    ) -> None:
        self._proc_root = proc_root
        self._pids = pids
        self._errors: Counter[str] = Counter()
        self._own = OwnMounts(proc_root, self._errors)
        self._jobs = JobMounts(proc_root, self._errors)
        self._lustre = LustreReader(proc_root, sys_root, self._errors)
        self._ceph = CephReader(sys_root, self._errors)
        self._fuse = FuseReader(proc_root, self._errors, sockets)
        self._gpu_direct = GpuDirectStorageReader(proc_root)
        self._known: frozenset[str] = frozenset()
        self._refused: frozenset[str] = frozenset()
        self._denied: frozenset[frozenset[str]] = frozenset()
        self._names: dict[Hashable, str] = {}  # by identity
        self._totals = GrowingTotals()

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings.

        `malformed` lines or blocks, `truncated` files, `too_many_filesystems` and `too_many_namespaces` left out, once,
        `no_permission` for each source or namespace that is closed to us, once, `no_sockets` where the kernel did not
        list the connections of FUSE daemons.
        """
        return self._errors

    def probe(self) -> bool:
        """Return whether there is a file system of the network, or GPUDirect Storage."""
        now = Instant(0.0, 0.0)
        mounts = OwnMounts(self._proc_root, Counter())  # errors are counted when a sample meets them
        try:
            own = mounts.read(now)
        finally:
            mounts.close()
        jobs = JobMounts(self._proc_root, Counter()).read(now, self._pids(), own)
        return bool(own.mounts or any(job.mounts for job in jobs) or self._gpu_direct.read(now))

    def sample(self, now: Instant) -> tuple[FilesystemSample | GpuDirectStorageSample, ...]:
        """Return one record for each file system; raises SourceUnavailableError where mountinfo cannot be read."""
        own = self._own.read(now)
        namespaces = (own, *self._jobs.read(now, self._pids(), own))
        found = self._filesystems(namespaces)
        sources = self._nfs(found) | self._other(now, tuple(found))
        shown = _shown(found)
        self._names = _names(shown, self._names)
        labels = {mount: (self._names[_identity(mount)], mount.fstype) for mount in shown}
        totals = self._totals.update(
            {label: sources[mount].readings if mount in sources else {} for mount, label in labels.items()}
        )
        records = [
            _record(now, mount, label[0], totals.get(label), sources.get(mount)) for mount, label in labels.items()
        ]
        return *records, *self._gpu_direct.read(now)

    def close(self) -> None:
        """Close the files that are kept open."""
        self._own.close()
        self._gpu_direct.close()

    def _filesystems(self, namespaces: Sequence[Namespace]) -> dict[Mount, Namespace]:
        """Return each file system once, as the first namespace shows it, with that namespace.

        FUSE has what places the others leave, since any user may mount that. Of either, those that had a place keep it
        while they are mounted.
        """
        found: dict[str, tuple[Mount, Namespace]] = {}
        for namespace in namespaces:
            for mount in namespace.mounts:
                found.setdefault(mount.device, (mount, namespace))
        ranked = sorted(found, key=lambda device: (is_fuse(found[device][0].fstype), device not in self._known))
        chosen = frozenset(ranked[:MAX_FILESYSTEMS])
        refused = frozenset(found).union(*(namespace.left_out for namespace in namespaces)) - chosen
        new = len(refused - self._refused)
        if new:
            self._errors["too_many_filesystems"] += new
        self._known, self._refused = chosen, refused
        return {mount: namespace for device, (mount, namespace) in found.items() if device in chosen}

    def _nfs(self, found: Mapping[Mount, Namespace]) -> dict[Mount, _Source]:
        """Read the mountstats of each namespace that shows an NFS file system that none before it shows."""
        wanted: dict[Namespace, dict[tuple[bytes, bytes], Mount]] = {}
        for mount, namespace in found.items():
            if mount.fstype in _NFS:
                wanted.setdefault(namespace, {})[mount.source, mount.mountpoint] = mount
        sources: dict[Mount, _Source] = {}
        denied: set[frozenset[str]] = set()
        for namespace, mounts in wanted.items():
            counters = self._mountstats(namespace, mounts, denied)
            for key, mount in mounts.items():
                nfs = counters.get(key)
                values = (nfs.read_bytes, nfs.written_bytes, nfs.major_timeouts) if nfs else None
                # The number of a super block is given again, mostly to another export.
                instance = mount.device, mount.source
                sources[mount] = _Source({instance: values}, "mountstats", nfs.is_rdma if nfs else None)
        new = len(denied - self._denied)
        if new:  # counted when it begins: it lasts, and says the same every 5 s
            self._errors["no_permission"] += new
        self._denied = frozenset(denied)
        return sources

    def _mountstats(
        self, namespace: Namespace, wanted: Mapping[tuple[bytes, bytes], Mount], denied: set[frozenset[str]]
    ) -> dict[tuple[bytes, bytes], NfsCounters]:
        try:
            data, is_cut = read_file(self._proc_root / namespace.process / "mountstats")
        except PermissionError:
            denied.add(namespace.keys)
            return {}
        except OSError:  # the process ended; another of its namespace is looked up when the list of processes changes
            return {}
        counters, malformed = parse_mountstats(data, wanted)
        if malformed:
            self._errors["malformed"] += malformed
        if is_cut:
            self._errors["truncated"] += 1
        return counters

    def _other(self, now: Instant, mounts: tuple[Mount, ...]) -> dict[Mount, _Source]:
        fuse = tuple(mount for mount in mounts if is_fuse(mount.fstype))
        sources = {mount: _Source(found, "fuse_daemon") for mount, found in self._fuse.read(now, fuse).items()}
        if any(mount.fstype == "lustre" for mount in mounts):
            lustre = self._lustre.read()
            for mount in mounts:
                if mount.fstype == "lustre":
                    name = fsname(unescape(mount.source))
                    sources[mount] = _Source(None if lustre is None else lustre.get(name or "", {}), "llite")
        if any(mount.fstype == "ceph" for mount in mounts):
            clusters = self._ceph.read()
            for mount in mounts:
                if mount.fstype == "ceph":
                    clients = None if clusters is None else _clients_of(mount, clusters)
                    sources[mount] = _Source(clients, "ceph_debugfs")
        return sources


def _clients_of(mount: Mount, clusters: Mapping[str, Readings]) -> Readings:
    """Return the clients of the cluster of a mount: the one that its source names, or the only one there is."""
    cluster = cluster_of(unescape(mount.source))
    if cluster is not None:
        return clusters.get(cluster, {})
    return next(iter(clusters.values())) if len(clusters) == 1 else {}


def _identity(mount: Mount) -> Hashable:
    """Return what one record stands for: a super block, all mounts of a Lustre file system, those of a Ceph cluster."""
    if mount.fstype == "lustre":
        return "lustre", fsname(unescape(mount.source)) or mount.device
    if mount.fstype == "ceph":
        return "ceph", cluster_of(unescape(mount.source))
    return mount.device


def _shown(mounts: Collection[Mount]) -> tuple[Mount, ...]:
    """Return the mounts without those whose bytes another one stands for."""
    shown: dict[Hashable, Mount] = {}
    for mount in mounts:
        shown.setdefault(_identity(mount), mount)
    return tuple(shown.values())


def _names(mounts: Sequence[Mount], before: Mapping[Hashable, str]) -> dict[Hashable, str]:
    """Return a name for each mount by its identity, all different: its mountpoint.

    Another one at the same mountpoint, of another pod or beneath, bears its device as well. A file system keeps its
    name while it is mounted, even where the mount that gave it is gone.
    """
    identities = {_identity(mount): mount for mount in mounts}
    names = {identity: before[identity] for identity in identities if identity in before}
    taken = set(names.values())
    for identity, mount in identities.items():
        if identity not in names:
            name = printable(unescape(mount.mountpoint))
            name = f"{name}#{mount.device}" if name in taken else name
            names[identity] = name
            taken.add(name)
    return names


def _record(now: Instant, mount: Mount, name: str, total: Values | None, source: _Source | None) -> FilesystemSample:
    read, written, timeouts = (*(total or ()), None, None, None)[:3]
    return FilesystemSample(
        monotonic_s=now.monotonic_s,
        wall_s=now.wall_s,
        mountpoint=name,
        fstype=mount.fstype,
        read_bytes_total=read,
        written_bytes_total=written,
        source=source.name if source and total else None,
        is_rdma=source.is_rdma if source else None,
        major_timeouts_total=timeouts,
    )
