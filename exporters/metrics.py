"""The metric table: every family that warpwatch exports itself, in the order of export.

Names and labels are a public contract. docs/metrics.md is written from these rows by `python -m exporters.metrics_doc`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from exporters.metric_def import HostLevel, MetricDef
from exporters.metrics_gpu import GPU_METRICS
from exporters.metrics_host import AGENT_METRICS, HOST_METRICS
from exporters.metrics_host_full import HOST_FULL_METRICS
from exporters.metrics_infiniband import INFINIBAND_FULL_METRICS
from exporters.metrics_judgement import JUDGEMENT_METRICS
from exporters.metrics_owners import owner_metrics

#: Rows by the heading they have in the documentation.
SECTIONS: Final[tuple[tuple[str, tuple[MetricDef, ...]], ...]] = (
    ("GPUs", GPU_METRICS),
    ("Workload, anomalies and model", JUDGEMENT_METRICS),
    ("Network and storage", HOST_METRICS),
    ("Network and storage in full", (*HOST_FULL_METRICS, *INFINIBAND_FULL_METRICS)),
    ("The agent", AGENT_METRICS),
)

HostExport = Literal["summary", "full", "off"]
_LEVELS: Final[Mapping[HostExport, frozenset[HostLevel | None]]] = {
    "off": frozenset((None,)),
    "summary": frozenset((None, "summary")),
    "full": frozenset((None, "summary", "full")),
}


def metric_table(
    host: HostExport = "summary", *, owner_user: bool = False, dcgm: Sequence[MetricDef] = ()
) -> tuple[MetricDef, ...]:
    """Return the rows to export.

    `host` is `[export] host`: which families of the host there are. `owner_user` adds the label of that name to the
    owner series: a user name is personal data, and without it the label is not there at all. `dcgm` is what
    exporters.metrics_dcgm.dcgm_metrics returns, where that is wanted.
    """
    owners = {row.name: row for row in owner_metrics(owner_user=owner_user)}
    own = tuple(owners.get(row.name, row) for _, rows in SECTIONS for row in rows if row.host in _LEVELS[host])
    return (*own, *dcgm)


#: What is exported unless the configuration says otherwise.
METRICS: Final[tuple[MetricDef, ...]] = metric_table()
