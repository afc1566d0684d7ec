"""Rows of the metric table that say what a GPU is doing and what is going wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from agent.records import GpuKey
from agent.vocabulary import ANOMALIES, CLASSES, WORKLOADS
from classifier.results import Assessment
from exporters.metric_def import (
    WORK,
    WORK_LABELS,
    MetricDef,
    Number,
    Series,
    flag,
    in_order,
    node_metric,
    one_hot,
    standing,
    work_labels,
    work_views,
)
from exporters.metrics_checkpoints import CHECKPOINT_METRICS
from exporters.metrics_maintenance import MAINTENANCE_METRICS, TEST_ALERT_METRIC
from exporters.snapshot import GpuView, NodeSnapshot


def _rank(anomaly: str) -> tuple[int, str]:
    """Return the place of an anomaly in the vocabulary; an unknown word comes last."""
    return (ANOMALIES.index(anomaly) if anomaly in ANOMALIES else len(ANOMALIES)), anomaly


def _of_gpus(snapshot: NodeSnapshot) -> list[tuple[GpuKey, Assessment]]:
    found = [(item.key, item) for item in standing(snapshot) if item.scope == "gpu" and item.key is not None]
    return sorted(found, key=lambda pair: (pair[0].order, _rank(pair[1].anomaly)))


def _of_subjects(snapshot: NodeSnapshot, scope: str) -> list[tuple[str, Assessment]]:
    """Return the assessments of the node or of jobs with their device or job key, in order."""
    found: list[tuple[str, Assessment]] = []
    for item in snapshot.assessments:
        subject = item.device if scope == "node" else item.job_key
        if item.scope == scope and subject is not None:
            found.append((subject, item))
    return sorted(found, key=lambda pair: (_rank(pair[1].anomaly), pair[0]))


def _gpu_severity(snapshot: NodeSnapshot) -> Series:
    return [((*work_labels(key), item.anomaly), item.severity) for key, item in _of_gpus(snapshot)]


def _gpu_suspect(snapshot: NodeSnapshot) -> Series:
    return [((*work_labels(key), item.anomaly), int(item.suspect)) for key, item in _of_gpus(snapshot) if item.severity]


def _node_severity(snapshot: NodeSnapshot) -> Series:
    return [((item.anomaly, device), item.severity) for device, item in _of_subjects(snapshot, "node")]


def _job_severity(snapshot: NodeSnapshot) -> Series:
    return [((item.anomaly, job_key), item.severity) for job_key, item in _of_subjects(snapshot, "job")]


def _gpu_totals(snapshot: NodeSnapshot) -> Series:
    # What is watched starts at 0, so that increase() sees the first finding as well.
    places = {view.key for view in work_views(snapshot)}
    totals: dict[tuple[GpuKey, str], int] = {(key, item.anomaly): 0 for key, item in _of_gpus(snapshot)}
    for (anomaly, scope, subject), count in snapshot.finding_totals.items():
        # Not those of a card that is divided by now, or of an instance that is gone; they go on where it is back.
        if scope == "gpu" and isinstance(subject, GpuKey) and subject in places:
            totals[subject, anomaly] = count
    ordered = sorted(totals, key=lambda pair: (pair[0].order, _rank(pair[1])))
    return [((*work_labels(key), anomaly), totals[key, anomaly]) for key, anomaly in ordered]


def _totals(snapshot: NodeSnapshot, scope: str) -> Series:
    totals: Counter[str] = Counter({item.anomaly: 0 for item in snapshot.assessments if item.scope == scope})
    for (anomaly, total_scope, _), count in snapshot.finding_totals.items():
        if total_scope == scope:
            totals[anomaly] += count
    return [((anomaly,), totals[anomaly]) for anomaly in sorted(totals, key=_rank)]


def _probabilities(snapshot: NodeSnapshot) -> Series:
    for view in work_views(snapshot):
        if view.decision is not None and view.decision.probabilities is not None:
            for word, probability in in_order(CLASSES, view.decision.probabilities):
                yield (*work_labels(view.key), word, "combined"), probability


def _mismatch(view: GpuView) -> Number:
    return None if view.decision is None else flag(view.decision.mismatch)


def _workload_energy(view: GpuView) -> Iterable[tuple[str, Number]]:
    return () if view.workload_energy_joules is None else in_order(WORKLOADS, view.workload_energy_joules)


def _out_of_domain(snapshot: NodeSnapshot) -> Number:
    ratios = [
        view.decision.out_of_domain_ratio
        for view in snapshot.gpus
        if view.decision is not None and view.decision.out_of_domain_ratio is not None
    ]
    return sum(ratio > 1 for ratio in ratios) / len(ratios) if ratios else None


WORKLOAD_METRICS: Final = (
    WORK.words(
        "gpu_workload",
        "gauge",
        "",
        "What the GPU is doing: 1 for one workload, 0 for the others. `unknown` is too little evidence, never idle.",
        label="workload",
        read=lambda view: one_hot(WORKLOADS, None if view.decision is None else view.decision.workload),
    ),
    MetricDef(
        name="gpu_workload_probability",
        kind="gauge",
        unit="",
        help="Probability of each workload by telemetry and declared evidence together; sums to 1, "
        "absent where the evidence does not carry a decision.",
        labels=(*WORK_LABELS, "workload", "evidence"),
        values=_probabilities,
    ),
    WORK.metric(
        "gpu_workload_since_timestamp_seconds",
        "gauge",
        "seconds",
        "Wall time since which the workload holds.",
        lambda view: None if view.decision is None else view.decision.since_wall_s,
    ),
    WORK.metric(
        "gpu_workload_mismatch",
        "gauge",
        "",
        "Whether the telemetry alone has disagreed for long with the class that the owner or the program declares: "
        "0 or 1; absent where nothing is declared.",
        _mismatch,
    ),
    WORK.words(
        "gpu_workload_seconds_total",
        "counter",
        "seconds",
        "Time spent in each workload since the agent started; gaps count as unknown.",
        label="workload",
        read=lambda view: in_order(WORKLOADS, view.workload_seconds),
    ),
    WORK.words(
        "gpu_workload_energy_joules_total",
        "counter",
        "joules",
        "Energy used in each workload since the agent started.",
        label="workload",
        read=_workload_energy,
    ),
    WORK.metric(
        "training_step_seconds",
        "gauge",
        "seconds",
        "Time of a training step, by the period of power, NVLink traffic or SM activity; "
        "absent where the GPU does not train or its steps are too fast, too slow or too uneven to be seen.",
        lambda view: view.training_step_seconds,
    ),
)

ANOMALY_METRICS: Final = (
    MetricDef(
        name="gpu_anomaly_severity",
        kind="gauge",
        unit="",
        help="How bad an anomaly of the GPU is: 0 nothing, 1 info, 2 warning, 3 critical; "
        "absent where it cannot be seen here.",
        labels=(*WORK_LABELS, "anomaly"),
        values=_gpu_severity,
    ),
    MetricDef(
        name="gpu_anomalies_total",
        kind="counter",
        unit="",
        help="Confirmed findings on the GPU since the agent started.",
        labels=(*WORK_LABELS, "anomaly"),
        values=_gpu_totals,
    ),
    MetricDef(
        name="gpu_suspect",
        kind="gauge",
        unit="",
        help="Whether the GPU is the odd one out of its group, for each anomaly it has now: 0 or 1; "
        "absent while the severity is 0.",
        labels=(*WORK_LABELS, "anomaly"),
        values=_gpu_suspect,
    ),
    MetricDef(
        name="node_anomaly_severity",
        kind="gauge",
        unit="",
        help="How bad an anomaly of the node or of one of its devices is, as gpu_anomaly_severity; "
        "`device` is empty for the node itself.",
        labels=("anomaly", "device"),
        values=_node_severity,
    ),
    MetricDef(
        name="node_anomalies_total",
        kind="counter",
        unit="",
        help="Confirmed findings on the node and its devices since the agent started.",
        labels=("anomaly",),
        values=lambda snapshot: _totals(snapshot, "node"),
    ),
    MetricDef(
        name="job_anomaly_severity",
        kind="gauge",
        unit="",
        help="How bad an anomaly of a job is, as gpu_anomaly_severity.",
        labels=("anomaly", "job_key"),
        values=_job_severity,
    ),
    MetricDef(
        name="job_anomalies_total",
        kind="counter",
        unit="",
        help="Confirmed findings on jobs of this node since the agent started.",
        labels=("anomaly",),
        values=lambda snapshot: _totals(snapshot, "job"),
    ),
)

MODEL_METRICS: Final = (
    MetricDef(
        name="model_info",
        kind="gauge",
        unit="",
        help="The model bundle that is loaded; always 1, absent where none is.",
        labels=("version", "sha256"),
        values=lambda snapshot: (
            [] if snapshot.model is None else [((snapshot.model.version, snapshot.model.sha256), 1)]
        ),
    ),
    node_metric(
        "model_out_of_domain_ratio",
        "gauge",
        "ratio",
        "Share of the GPUs with a decision whose telemetry is unlike anything the model was trained on.",
        _out_of_domain,
    ),
)

JUDGEMENT_METRICS: Final[tuple[MetricDef, ...]] = (
    *WORKLOAD_METRICS,
    *ANOMALY_METRICS,
    *CHECKPOINT_METRICS,
    *MAINTENANCE_METRICS,
    TEST_ALERT_METRIC,
    *MODEL_METRICS,
)
