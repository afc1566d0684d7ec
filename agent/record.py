"""Writes what the samplers bring into a trace file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import threading
from collections.abc import Sequence

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


class Recorder:
    """Takes ticks and appends them to a trace, without what names somebody unless `identify` is set.

    UUIDs, job keys and mount points are hashed; PCI addresses and the other words about holders are dropped.

    Traces hold process ids, device names and figures, and never a user, job, pod or host name or a serial number.
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
    if isinstance(record, GpuOwners):
        changes["holders"] = tuple(map(_masked_holder, record.holders))
    return dataclasses.replace(record, **changes) if changes else record  # type: ignore[arg-type]


def _masked_holder(holder: Holder) -> Holder:
    masked = holder._replace(job_key=_stand_in(holder.job_key), job_id="", namespace="", pod="", container="", user="")
    return masked._replace(scheduler=holder.scheduler if holder.scheduler in SCHEDULERS else "")


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
