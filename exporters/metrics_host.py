"""Rows of the metric table that come from the host, as far as a summary needs them, and from the agent itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from agent.records import DiskSample, FilesystemSample, InfinibandSample, NetworkSample
from agent.samplers import SamplerStatus
from exporters.metric_def import MetricDef, Number, Series, node_metric
from exporters.snapshot import NodeSnapshot

#: Series of sampler errors on a node; more only where more samplers than that have any.
ERROR_SERIES: Final = 11
#: Reason of the errors for which there is no place.
OTHER_REASON: Final = "other"


def _network(name: str, text: str, read: Callable[[NetworkSample], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.networks, key=lambda sample: sample.device)
        return [((sample.device,), read(sample)) for sample in ordered]

    return MetricDef(
        name=name, kind="counter", unit="bytes", help=text, labels=("device",), values=values, host="summary"
    )


def _infiniband(name: str, text: str, read: Callable[[InfinibandSample], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.infiniband, key=lambda sample: (sample.device, sample.port))
        return [((sample.device, str(sample.port)), read(sample)) for sample in ordered]

    return MetricDef(
        name=name, kind="counter", unit="bytes", help=text, labels=("device", "port"), values=values, host="summary"
    )


def _disk(name: str, text: str, read: Callable[[DiskSample], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.disks, key=lambda sample: sample.device)
        return [((sample.device,), read(sample)) for sample in ordered]

    return MetricDef(
        name=name, kind="counter", unit="bytes", help=text, labels=("device",), values=values, host="summary"
    )


def _filesystem(name: str, text: str, read: Callable[[FilesystemSample], Number]) -> MetricDef:
    labels = ("mountpoint", "fstype")

    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.filesystems, key=lambda sample: (sample.mountpoint, sample.fstype))
        return [((sample.mountpoint, sample.fstype), read(sample)) for sample in ordered]

    return MetricDef(name=name, kind="counter", unit="bytes", help=text, labels=labels, values=values, host="summary")


def _sampler(name: str, unit: Literal["", "seconds"], text: str, read: Callable[[SamplerStatus], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        ordered = sorted(snapshot.samplers, key=lambda status: status.name)
        return [((status.name,), read(status)) for status in ordered]

    return MetricDef(name=name, kind="gauge", unit=unit, help=text, labels=("sampler",), values=values)


def _sampler_errors(snapshot: NodeSnapshot) -> Series:
    statuses = sorted((status for status in snapshot.samplers if status.errors), key=lambda status: status.name)
    places = max((len(status.errors) for status in statuses), default=0)
    while places > 1 and sum(min(len(status.errors), places) for status in statuses) > ERROR_SERIES:
        places -= 1
    for status in statuses:
        for reason, count in sorted(_bounded_errors(status.errors, places).items()):
            yield (status.name, reason), count


def _bounded_errors(errors: Mapping[str, int], places: int) -> Mapping[str, int]:
    """Return at most `places` reasons, the first to come; what is beyond is OTHER_REASON, which so never falls."""
    if len(errors) <= places:
        return errors
    kept = dict(list(errors.items())[: places - 1])
    kept[OTHER_REASON] = kept.get(OTHER_REASON, 0) + sum(list(errors.values())[places - 1 :])
    return kept


HOST_METRICS: Final[tuple[MetricDef, ...]] = (
    _network(
        "network_receive_bytes_total",
        "Bytes received by a network interface (/proc/net/dev).",
        lambda sample: sample.receive_bytes_total,
    ),
    _network(
        "network_transmit_bytes_total",
        "Bytes sent by a network interface (/proc/net/dev).",
        lambda sample: sample.transmit_bytes_total,
    ),
    _infiniband(
        "infiniband_receive_bytes_total",
        "Bytes received by an InfiniBand or RoCE port (port_rcv_data of sysfs, in bytes).",
        lambda sample: sample.receive_bytes_total,
    ),
    _infiniband(
        "infiniband_transmit_bytes_total",
        "Bytes sent by an InfiniBand or RoCE port (port_xmit_data of sysfs, in bytes).",
        lambda sample: sample.transmit_bytes_total,
    ),
    _disk(
        "disk_read_bytes_total",
        "Bytes read from a whole block device (/proc/diskstats).",
        lambda sample: sample.read_bytes_total,
    ),
    _disk(
        "disk_written_bytes_total",
        "Bytes written to a whole block device (/proc/diskstats).",
        lambda sample: sample.written_bytes_total,
    ),
    _filesystem(
        "filesystem_read_bytes_total",
        "Bytes read from a file system that bypasses the block layer (NFS, Lustre, Ceph, FUSE): what came from the "
        "server where the kernel counts that, else what programs read; absent where its source cannot be read.",
        lambda sample: sample.read_bytes_total,
    ),
    _filesystem(
        "filesystem_written_bytes_total",
        "Bytes written to a file system that bypasses the block layer, likewise.",
        lambda sample: sample.written_bytes_total,
    ),
)

AGENT_METRICS: Final[tuple[MetricDef, ...]] = (
    _sampler(
        "sampler_success",
        "",
        "Whether the last run of the sampler read its source: 0 or 1.",
        lambda status: int(status.success),
    ),
    _sampler(
        "sampler_duration_seconds",
        "seconds",
        "How long the last run of the sampler took.",
        lambda status: status.duration_s,
    ),
    _sampler(
        "sampler_last_success_timestamp_seconds",
        "seconds",
        "Wall time of the last run of the sampler that read its source; absent before the first.",
        lambda status: status.last_success_wall_s,
    ),
    MetricDef(
        name="sampler_errors_total",
        kind="counter",
        unit="",
        help="Readings of the sampler that failed since the agent started. Beyond "
        f"{ERROR_SERIES} series on a node, the reasons that came last are one, `other`.",
        labels=("sampler", "reason"),
        values=_sampler_errors,
    ),
    node_metric(
        "gpus_expected",
        "gauge",
        "",
        "GPUs that the configuration or the driver says there should be; absent where neither does.",
        lambda snapshot: snapshot.gpus_expected,
    ),
    node_metric(
        "gpus_visible",
        "gauge",
        "",
        "GPUs that answer now; absent where the NVML sampler does not run or the driver is released.",
        lambda snapshot: snapshot.gpus_visible,
    ),
    MetricDef(
        name="build_info",
        kind="gauge",
        unit="",
        help="Version of the agent; always 1.",
        labels=("version",),
        values=lambda snapshot: [((snapshot.version,), 1)],
    ),
    node_metric(
        "config_last_reload_successful",
        "gauge",
        "",
        "Whether the last reading of the configuration, or of the web configuration, succeeded: 0 or 1.",
        lambda snapshot: int(snapshot.config_reload_successful),
    ),
    node_metric(
        "replay",
        "gauge",
        "",
        "Whether the GPUs are played from a trace and not read from this machine: 0 or 1. No shipped rule fires at 1.",
        lambda snapshot: int(snapshot.replay),
    ),
)
