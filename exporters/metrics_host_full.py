"""Rows of the host that node_exporter has as well, with its suffixes and units: exported with `[export] host = "full"`.

InfiniBand has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuDirectStorageSample,
    NetworkLink,
    NetworkSample,
    PressureSample,
)
from exporters.metric_def import Kind, MetricDef, Number, Series, flag
from exporters.snapshot import NodeSnapshot

_FULL: Final = partial(MetricDef, host="full")


def _network(name: str, text: str, read: Callable[[NetworkSample], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.networks, key=lambda sample: sample.device)
        return [((sample.device,), read(sample)) for sample in ordered]

    return _FULL(name=name, kind="counter", unit="", help=text, labels=("device",), values=values)


def _link(name: str, kind: Kind, unit: str, text: str, read: Callable[[NetworkLink], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.network_links, key=lambda link: link.device)
        return [((link.device,), read(link)) for link in ordered]

    return _FULL(name=name, kind=kind, unit=unit, help=text, labels=("device",), values=values)


def _disk(name: str, unit: str, text: str, read: Callable[[DiskSample], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.disks, key=lambda sample: sample.device)
        return [((sample.device,), read(sample)) for sample in ordered]

    return _FULL(name=name, kind="counter", unit=unit, help=text, labels=("device",), values=values)


def _filesystem(name: str, text: str, read: Callable[[FilesystemSample], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.filesystems, key=lambda sample: (sample.mountpoint, sample.fstype))
        return [((sample.mountpoint, sample.fstype), read(sample)) for sample in ordered]

    return _FULL(name=name, kind="counter", unit="", help=text, labels=("mountpoint", "fstype"), values=values)


def _direct_storage(name: str, text: str, read: Callable[[GpuDirectStorageSample], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        return [] if snapshot.gpu_direct_storage is None else [((), read(snapshot.gpu_direct_storage))]

    return _FULL(name=name, kind="counter", unit="bytes", help=text, labels=(), values=values)


def _pressure(name: str, kind: Kind, unit: str, text: str, read: Callable[[PressureSample], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        return [] if snapshot.pressure is None else [((), read(snapshot.pressure))]

    return _FULL(name=name, kind=kind, unit=unit, help=text, labels=(), values=values)


NETWORK_FULL_METRICS: Final = (
    _network(
        "network_receive_packets_total",
        "Packets received by a network interface (/proc/net/dev).",
        lambda sample: sample.receive_packets_total,
    ),
    _network(
        "network_transmit_packets_total",
        "Packets sent by a network interface (/proc/net/dev).",
        lambda sample: sample.transmit_packets_total,
    ),
    _network(
        "network_receive_errs_total",
        "Packets received with an error (/proc/net/dev).",
        lambda sample: sample.receive_errors_total,
    ),
    _network(
        "network_transmit_errs_total",
        "Packets that could not be sent for an error (/proc/net/dev).",
        lambda sample: sample.transmit_errors_total,
    ),
    _network(
        "network_receive_drop_total",
        "Packets received and dropped (/proc/net/dev).",
        lambda sample: sample.receive_drops_total,
    ),
    _network(
        "network_transmit_drop_total",
        "Packets dropped before they were sent (/proc/net/dev).",
        lambda sample: sample.transmit_drops_total,
    ),
    _link(
        "network_speed_bytes",
        "gauge",
        "bytes",
        "Speed of the link in bytes per second (speed of sysfs); absent while it is down.",
        lambda link: link.speed_bytes_per_second,
    ),
    _link(
        "network_up",
        "gauge",
        "",
        "Whether the link is up (operstate of sysfs): 0 or 1.",
        lambda link: flag(link.is_up),
    ),
    _link(
        "network_carrier_changes_total",
        "counter",
        "",
        "Times that the link came or went (carrier_changes of sysfs).",
        lambda link: link.carrier_changes_total,
    ),
    _link(
        "network_default_route",
        "gauge",
        "",
        "Whether the default route leaves by this interface: 0 or 1. node_exporter has no such series.",
        lambda link: flag(link.is_default_route),
    ),
)

STORAGE_FULL_METRICS: Final = (
    _disk(
        "disk_reads_completed_total",
        "",
        "Read requests that a whole block device completed (/proc/diskstats).",
        lambda sample: sample.reads_total,
    ),
    _disk(
        "disk_writes_completed_total",
        "",
        "Write requests that a whole block device completed (/proc/diskstats).",
        lambda sample: sample.writes_total,
    ),
    _disk(
        "disk_io_time_seconds_total",
        "seconds",
        "Time in which a whole block device had at least one request in flight (/proc/diskstats).",
        lambda sample: sample.busy_seconds_total,
    ),
    _filesystem(
        "filesystem_major_timeouts_total",
        "NFS requests that the server did not answer in time (mountstats).",
        lambda sample: sample.major_timeouts_total,
    ),
    _direct_storage(
        "nvidia_fs_read_bytes_total",
        "Bytes that GPUs read from storage by GPUDirect Storage (/proc/driver/nvidia-fs/stats).",
        lambda sample: sample.read_bytes_total,
    ),
    _direct_storage(
        "nvidia_fs_written_bytes_total",
        "Bytes that GPUs wrote to storage by GPUDirect Storage (/proc/driver/nvidia-fs/stats).",
        lambda sample: sample.written_bytes_total,
    ),
)

PRESSURE_FULL_METRICS: Final = (
    _pressure(
        "pressure_cpu_waiting_seconds_total",
        "counter",
        "seconds",
        "Time in which at least one task waited for a CPU (/proc/pressure/cpu, some).",
        lambda sample: sample.cpu_some_seconds_total,
    ),
    _pressure(
        "pressure_io_waiting_seconds_total",
        "counter",
        "seconds",
        "Time in which at least one task waited for I/O (/proc/pressure/io, some).",
        lambda sample: sample.io_some_seconds_total,
    ),
    _pressure(
        "pressure_io_stalled_seconds_total",
        "counter",
        "seconds",
        "Time in which all tasks that were not idle waited for I/O (/proc/pressure/io, full).",
        lambda sample: sample.io_full_seconds_total,
    ),
    _pressure(
        "pressure_memory_waiting_seconds_total",
        "counter",
        "seconds",
        "Time in which at least one task waited for memory (/proc/pressure/memory, some).",
        lambda sample: sample.memory_some_seconds_total,
    ),
    _pressure(
        "pressure_memory_stalled_seconds_total",
        "counter",
        "seconds",
        "Time in which all tasks that were not idle waited for memory (/proc/pressure/memory, full).",
        lambda sample: sample.memory_full_seconds_total,
    ),
    # The spelling is the kernel's and node_exporter's.
    _pressure(
        "memory_Dirty_bytes",
        "gauge",
        "bytes",
        "Pages that wait to be written to storage (/proc/meminfo Dirty).",
        lambda sample: sample.dirty_bytes,
    ),
    _pressure(
        "memory_Writeback_bytes",
        "gauge",
        "bytes",
        "Pages that are being written to storage (/proc/meminfo Writeback).",
        lambda sample: sample.writeback_bytes,
    ),
    _pressure(
        "memory_MemAvailable_bytes",
        "gauge",
        "bytes",
        "Memory that programs can still have without swapping (/proc/meminfo MemAvailable).",
        lambda sample: sample.memory_available_bytes,
    ),
    _pressure(
        "procs_blocked",
        "gauge",
        "",
        "Tasks that sleep until their I/O is done (/proc/stat procs_blocked).",
        lambda sample: sample.blocked_tasks,
    ),
)

HOST_FULL_METRICS: Final[tuple[MetricDef, ...]] = (
    *NETWORK_FULL_METRICS,
    *STORAGE_FULL_METRICS,
    *PRESSURE_FULL_METRICS,
)
