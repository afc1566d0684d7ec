"""Write docs/metrics.md from the metric table: `python -m exporters.metrics_doc > docs/metrics.md`."""

from __future__ import annotations

import sys
from typing import Final

from exporters.metric_def import MIG_LABEL, MetricDef
from exporters.metrics import SECTIONS

_INTRODUCTION: Final = """\
# Metrics

This page is written from the metric table by `python -m exporters.metrics_doc > docs/metrics.md`; a test fails when
the two differ.

- A series that is absent was not offered by this machine, or is stale: older than three periods of its source. Zero
  is a measurement.
- Every GPU series has `gpu` (the index when this UUID was first seen, kept until the agent restarts) and `uuid` (of
  the physical GPU, empty where the source holds none). Join on `uuid`. `GPU_I_ID` stands on the series of a MIG
  instance only. Power, energy, temperature, clocks, ECC and links are measured on the card; memory, activity,
  workload and anomalies on its instances where it is divided. Energy by workload needs a whole card. The series of a
  card that is divided, and of an instance that is gone, are absent, and their counters go on where it is back.
- Counters are exported as the source gives them. They fall only when the driver or the agent restarts. A foreign log
  that holds rates gives no counter.
- Where a host has very many devices, the first 16 network interfaces, 12 InfiniBand ports and 12 disks by name have
  series; a device keeps its place while it is there. What was left out is counted in `warpwatch_sampler_errors_total`
  with `reason="too_many_devices"`. Judgements see all devices.
- `/-/ready` answers 200 while at least one source brings records and none that ever did has stopped for 15 s (three
  distances of the samples where that is longer). It answers 503 and names the source otherwise: also while
  `warpwatch driver release` holds, and where no GPU brings samples any more. A source that was never there is no fault.
- No series has a host, job or instance label of our own: Prometheus adds those.
- `process_*` (CPU time, memory, open files, start time) are of the agent itself.
- Owners are not yet looked up: every GPU has one `warpwatch_gpu_owner_info` with `owners="0"` and one
  `warpwatch_gpu_owner_share_ratio` of 1 with empty labels, so that joins and sums written for owners work from now on.
"""


def render_doc() -> str:
    """Return the text of docs/metrics.md."""
    parts = [_INTRODUCTION]
    for heading, rows in SECTIONS:
        parts.append(f"\n## {heading}\n\n| Name | Type | Unit | Labels | What it is |\n|---|---|---|---|---|\n")
        parts.extend(_line(row) for row in rows)
    return "".join(parts)


def _line(row: MetricDef) -> str:
    labels = ", ".join(f"[`{name}`]" if name == MIG_LABEL else f"`{name}`" for name in row.labels)
    return f"| `{row.full_name}` | {row.kind} | {row.unit} | {labels} | {row.help.replace('|', '&#124;')} |\n"


if __name__ == "__main__":
    sys.stdout.write(render_doc())
