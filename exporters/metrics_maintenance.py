"""Rows of the metric table that say what is in maintenance: when no shipped rule is to fire.

Their series are there only while it lasts: a node has many of others (tests/exporters/test_series_budget.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from agent.records import GpuKey
from agent.vocabulary import ANOMALIES
from exporters.metric_def import CARD_LABELS, MetricDef, Series, card_labels, card_views, in_order, node_metric
from exporters.snapshot import NodeSnapshot


def is_in_maintenance(snapshot: NodeSnapshot, key: GpuKey | None) -> bool:
    """Return whether a card, or with None the node, is in maintenance as a whole: with all its anomalies."""
    return any(
        not one.anomalies and (one.keys is None or (key is not None and key in one.keys))
        for one in snapshot.maintenance
    )


def silenced(snapshot: NodeSnapshot, key: GpuKey | None) -> Collection[str]:
    """Return the anomalies that maintenance is confined to, for a card or with None for the node."""
    return {
        anomaly
        for one in snapshot.maintenance
        if one.keys is None or (key is not None and key in one.keys)
        for anomaly in one.anomalies
    }


def _gpus(snapshot: NodeSnapshot) -> Series:
    return [(card_labels(view.key), 1) for view in card_views(snapshot) if is_in_maintenance(snapshot, view.key)]


def _gpu_anomalies(snapshot: NodeSnapshot) -> Series:
    return [
        ((*card_labels(view.key), anomaly), 1)
        for view in card_views(snapshot)
        for anomaly, _ in in_order(ANOMALIES, dict.fromkeys(silenced(snapshot, view.key), 1))
    ]


def _node_anomalies(snapshot: NodeSnapshot) -> Series:
    return [((anomaly,), 1) for anomaly, _ in in_order(ANOMALIES, dict.fromkeys(silenced(snapshot, None), 1))]


MAINTENANCE_METRICS: Final[tuple[MetricDef, ...]] = (
    MetricDef(
        name="gpu_maintenance",
        kind="gauge",
        unit="",
        help="1 while the GPU or its whole node is in maintenance (`warpwatch maintenance`), else absent. "
        "No shipped rule fires for it then; findings are made and shown nevertheless.",
        labels=CARD_LABELS,
        values=_gpus,
    ),
    MetricDef(
        name="gpu_anomaly_maintenance",
        kind="gauge",
        unit="",
        help="An anomaly of the GPU or its node to which a maintenance is confined: 1 while it lasts, else absent.",
        labels=(*CARD_LABELS, "anomaly"),
        values=_gpu_anomalies,
    ),
    node_metric(
        "node_maintenance",
        "gauge",
        "",
        "1 while the whole node is in maintenance, else absent. No shipped rule fires for it then.",
        lambda snapshot: 1 if is_in_maintenance(snapshot, None) else None,
    ),
    MetricDef(
        name="node_anomaly_maintenance",
        kind="gauge",
        unit="",
        help="An anomaly to which a maintenance of the node is confined: 1 while it lasts, else absent.",
        labels=("anomaly",),
        values=_node_anomalies,
    ),
)

#: Beside them: what tries the way to the pager.
TEST_ALERT_METRIC: Final = MetricDef(
    name="test_alert",
    kind="gauge",
    unit="",
    help="A marked alert that `warpwatch test-alert` sends: 1 while it lasts, else absent. Nothing is wrong.",
    labels=("anomaly", "severity"),
    values=lambda snapshot: [(pair, 1) for pair in snapshot.test_alerts],
)
