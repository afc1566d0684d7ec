"""Writes what the samplers bring into a trace file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import re
import threading
from collections.abc import Sequence
from typing import Final

from agent import __version__
from agent.errors import FaultError
from agent.records import (
    FilesystemSample,
    GpuInfo,
    GpuKey,
    GpuMigInfo,
    GpuOwners,
    GpuSample,
    Holder,
    InfinibandPort,
    Record,
    Tick,
)
from agent.trace import TraceHeader, TraceWriter
from agent.vocabulary import SCHEDULERS

#: Types of file systems that are kept: the kernel's, and the subtypes that programs of the network give their mounts.
#: Whoever mounts with FUSE may choose any other, which may hold a name.
_FILE_SYSTEM: Final = re.compile(
    r"nfs4?|lustre|ceph|gpfs|beegfs|wekafs|panfs|cifs|smb3|9p|virtiofs|fuse|fuse\.(?:"
    r"juicefs|alluxio|alluxio-fuse|s3fs|s3backer|s3ql|gcsfuse|mountpoint-s3|mount-s3|ceph|ceph-fuse|goofys|geesefs|rclone|"
    r"sshfs|glusterfs|blobfuse2?|seaweedfs|weed|dfuse|daos|mfs|moosefs|lizardfs|saunafs|hf3fs|hf3fs_fuse_main|cfs-client|"
    r"cubefs|curve-fuse|curvefs|cunofs|objectivefs|tigrisfs|ossfs2?|oss-fuse|cosfs|obsfs|wekafs|davfs2?|curlftpfs|quobyte|"
    r"cvmfs2|orangefs)"
)
#: Names of devices that the kernel, udev and drivers give, by number or place. One with a MAC address (enx...), or that
#: somebody chose, is none of them.
_PLACE: Final = r"(?:\d+(?:np|[pPsfdnvuc])?)+"
_DEVICE: Final = re.compile(
    r"(?:nvidia|eth|ib|hsn|wlan|usb|bond|team|br|virbr|docker|tun|tap|vlan|hfi1_|qib|efa_|irdma|rxe|siw|cxgb4_|erdma_|mana_|"
    r"mlx[45]_|mlx5_(?:bond_|ib|an)|bnxt_re|bnxt_re_bond|mmcblk|pmem|nbd|rbd|zd|sr)\d+|"
    rf"en[opsP]{_PLACE}|wl[opsP]{_PLACE}|(?:ib|roce|rdma)[opsP]{_PLACE}|"
    r"nvme\d+(?:c\d+)?n\d+|(?:sd|vd|xvd|hd)[a-z]{1,2}"
)
#: Of a VLAN, or a partition of an InfiniBand network.
_NETWORK_NUMBER: Final = re.compile(r"\.(?:\d{1,4}|[0-9a-f]{4})$")


class Recorder:
    """Takes ticks and appends them to a trace, without what names somebody unless `identify` is set.

    UUIDs, job keys, mount points, addresses of NVSwitches and names of devices that the kernel did not give are hashed;
    PCI addresses of GPUs and the other words about holders are dropped; a file system of a type that is not known is
    of the type `fuse` or `other`.

    Traces hold process ids, the kernel's device names and figures, and never a user, job, pod or host name or a serial
    number.
    """

    def __init__(self, writer: TraceWriter, *, identify: bool = False) -> None:
        self._writer = writer
        self._identify = identify
        self.ticks = 0
        self.gpu_ticks = 0
        self.failure: FaultError | None = None
        self._lock = threading.Lock()

    def deliver(self, tick: Tick) -> None:
        """Append one tick and hand it to the system, so that a crash loses at most the line being written.

        May be called by several threads. After a failed write `failure` is set, and nothing more is written.
        """
        records = tick.records if self._identify else tuple(map(_masked, tick.records))
        with self._lock:
            if self.failure is None:
                self._append(dataclasses.replace(tick, records=records))

    def _append(self, tick: Tick) -> None:
        try:
            self._writer.write(tick)
            self._writer.flush()
        except FaultError as error:
            self.failure = error
            return
        self.ticks += 1
        self.gpu_ticks += any(isinstance(record, GpuSample) for record in tick.records)


def recording_header(label: str | None, interval_s: float, samplers: Sequence[str]) -> TraceHeader:
    """Return the header of a live recording."""
    return TraceHeader(
        provenance="recorded",
        interval_s=interval_s,
        label=label,
        source="warpwatch record",
        machine={"kernel": platform.release(), "processors": os.cpu_count() or 0},
        samplers=dict.fromkeys(samplers, __version__),
    )


def _masked(record: Record) -> Record:
    changes: dict[str, object] = {}
    key = getattr(record, "key", None)
    if isinstance(key, GpuKey) and key.uuid is not None:
        changes["key"] = key._replace(uuid=hash_uuid(key.uuid))
    if isinstance(record, GpuInfo):
        changes["pci_bus_id"] = None
    if isinstance(record, GpuMigInfo) and record.mig_uuid is not None:
        changes["mig_uuid"] = hash_uuid(record.mig_uuid)
    if isinstance(record, InfinibandPort):
        changes["near_gpus"] = ()
    if isinstance(record, FilesystemSample):
        changes["mountpoint"] = "/" + _stand_in(record.mountpoint)  # it may hold the name of a user or a project
        changes["fstype"] = _file_system(record.fstype)
    device = getattr(record, "device", None)
    if isinstance(device, str) and not _DEVICE.fullmatch(_NETWORK_NUMBER.sub("", device)):
        changes["device"] = _stand_in(device)  # that of an NVSwitch is an address
    if isinstance(record, GpuOwners):
        changes["holders"] = tuple(map(_masked_holder, record.holders))
    return dataclasses.replace(record, **changes) if changes else record  # type: ignore[arg-type]


def _masked_holder(holder: Holder) -> Holder:
    masked = holder._replace(job_key=_stand_in(holder.job_key), job_id="", namespace="", pod="", container="", user="")
    return masked._replace(scheduler=holder.scheduler if holder.scheduler in SCHEDULERS else "")


def _file_system(fstype: str) -> str:
    if _FILE_SYSTEM.fullmatch(fstype):
        return fstype
    return "fuse" if fstype.startswith("fuse") else "other"


def _stand_in(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def hash_uuid(uuid: str) -> str:
    """Return a stand-in of the same form that is equal for equal UUIDs and says nothing else about the board.

    The form is GPU-..., or MIG-... for an instance; old drivers put the UUID of the GPU into that of the instance, so
    nothing of it stays.
    """
    digest = hashlib.sha256(uuid.encode()).hexdigest()
    kind = "MIG" if uuid.startswith("MIG-") else "GPU"
    return f"{kind}-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
