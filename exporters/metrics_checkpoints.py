"""Rows of the metric table that say when jobs of this node write checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from classifier.results import CheckpointStatus
from exporters.metric_def import Kind, MetricDef, Number, Series
from exporters.snapshot import NodeSnapshot


def _row(name: str, kind: Kind, unit: str, text: str, read: Callable[[CheckpointStatus], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        return [
            ((status.job_key,), read(status)) for status in sorted(snapshot.checkpoints, key=lambda one: one.job_key)
        ]

    return MetricDef(name=name, kind=kind, unit=unit, help=text, labels=("job_key",), values=values)


CHECKPOINT_METRICS: Final = (
    _row(
        "checkpoint_last_timestamp_seconds",
        "gauge",
        "seconds",
        "Wall time at which the last checkpoint of the job was written from this node; `job_key` is empty where nobody "
        "knows whose it is. Absent, as the next four, while no cadence is known: a job may save on another node.",
        lambda status: status.last_wall_s,
    ),
    _row(
        "checkpoint_deadline_timestamp_seconds",
        "gauge",
        "seconds",
        "Wall time at which the next checkpoint of the job is late; it moves on while the job stands still.",
        lambda status: status.deadline_wall_s,
    ),
    _row(
        "checkpoint_interval_seconds",
        "gauge",
        "seconds",
        "Time between two checkpoints of the job: learned, or as its job file declares.",
        lambda status: status.interval_s,
    ),
    _row(
        "checkpoint_last_size_bytes",
        "gauge",
        "bytes",
        "Bytes that the last checkpoint of the job wrote from this node, in the source where its cadence shows.",
        lambda status: status.last_size_bytes,
    ),
    _row(
        "checkpoints_total",
        "counter",
        "",
        "Checkpoints of the job that were seen on this node.",
        lambda status: status.total,
    ),
)
