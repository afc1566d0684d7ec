"""The metric table: every family that warpwatch exports itself, in the order of export.

Names and labels are a public contract. docs/metrics.md is written from these rows by `python -m exporters.metrics_doc`.
"""

from __future__ import annotations

from typing import Final

from exporters.metric_def import MetricDef
from exporters.metrics_gpu import GPU_METRICS
from exporters.metrics_host import AGENT_METRICS, HOST_METRICS
from exporters.metrics_judgement import JUDGEMENT_METRICS

#: Rows by the heading they have in the documentation.
SECTIONS: Final[tuple[tuple[str, tuple[MetricDef, ...]], ...]] = (
    ("GPUs", GPU_METRICS),
    ("Workload, anomalies and model", JUDGEMENT_METRICS),
    ("Network and storage", HOST_METRICS),
    ("The agent", AGENT_METRICS),
)

METRICS: Final[tuple[MetricDef, ...]] = tuple(row for _, rows in SECTIONS for row in rows)
