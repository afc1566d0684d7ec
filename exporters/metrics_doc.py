"""Write docs/metrics.md from the metric table: `python -m exporters.metrics_doc > docs/metrics.md`."""

from __future__ import annotations

import sys
from typing import Final

from exporters.metric_def import MIG_LABEL, MetricDef
from exporters.metrics import SECTIONS
from exporters.metrics_dcgm import dcgm_metrics

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
- Families of the host come in levels, by `[export] host`: with `summary`, the default, those of level summary; with
  `full` also those of level full; with `off` none. Families without a level are always there. What node_exporter has
  too is called as there at level full, but for `node_`, which is `warpwatch_`: same suffix, same unit.
- Where a host has very many devices, the first 10 network interfaces, 12 InfiniBand ports, 10 disks and 8 file systems
  by name have series; a device keeps its place while it is there. What was left out is counted in
  `warpwatch_sampler_errors_total` with `reason="too_many_devices"`. Judgements see all devices.
- At the level summary a node has at most 120 series for each GPU (or MIG instance) and 150 beside them. At the level
  full it has up to 1,200 beside them: 10 more for each network interface, 75 at most for each InfiniBand port, 3 for
  each disk, 1 for each file system and 11 of the node.
- A label value has at most 256 characters; a longer one is cut and ends in a digest of the whole. Bytes that are no
  UTF-8 are written as escapes.
- `/-/ready` answers 200 while at least one source is read and none that ever was has stopped for 15 s (three
  distances of the samples where that is longer). It answers 503 and names the source otherwise: also while
  `warpwatch driver release` holds, and where no GPU brings samples any more. A source that was never there is no fault.
- No series has a host, job or instance label of our own: Prometheus adds those. DCGM's names, at the end, have DCGM's.
- `process_*` (CPU time, memory, open files, start time) are of the agent itself.
- Every GPU has one `warpwatch_gpu_owner_info`, whoever holds it, and a MIG instance one more. Join it with
  `X * on(job, instance, uuid, GPU_I_ID) group_left(job_key, job_id, owner_pod) warpwatch_gpu_owner_info`. `owners` is
  "0" where nobody holds the GPU, and empty where that cannot be seen. With `[export] owner_user = true`, both owner
  series have the label `owner_user` as well; else no page names a user.

## What may change, and when

Names, types, units, labels and the words in labels are a contract: rules and dashboards build on them. Each change of
one stands in the changelog under "Metrics".

- Any version: another help text, another order of the page, more or fewer series within the bounds above.
- A minor version: a new family, a new word in a label, a new label that is left out or empty by default.
- A major version, and until 1.0 a minor one: a family, label or word that goes, is renamed or means something else. The
  old and the new stand side by side for one minor version before, where that is possible.
- DCGM's names follow DCGM.

Write rules that bear new words: match what you mean (`workload="training"`), not what you do not (`workload!="idle"`).
"""

_DCGM: Final = """\

## DCGM's names

With `[export] dcgm = true` only, on the card or where work runs, as above. Labels, each left out where it is empty:
"""


def render_doc() -> str:
    """Return the text of docs/metrics.md."""
    parts = [_INTRODUCTION]
    for heading, rows in SECTIONS:
        has_levels = any(row.host for row in rows)
        names = ("Name", "Type", "Unit", *(("Level",) if has_levels else ()), "Labels", "What it is")
        parts.append(f"\n## {heading}\n\n| {' | '.join(names)} |\n|{'---|' * len(names)}\n")
        parts.extend(_line(row, has_levels=has_levels) for row in rows)
    rows = dcgm_metrics()
    parts.append(
        f"{_DCGM}{', '.join(f'`{name}`' for name in rows[0].labels)}.\n\n| Name | Type | What it is |\n|---|---|---|\n"
    )
    parts.extend(f"| `{row.full_name}` | {row.kind} | {row.help} |\n" for row in rows)
    return "".join(parts)


def _line(row: MetricDef, *, has_levels: bool) -> str:
    level = f" {row.host or ''} |" if has_levels else ""
    labels = ", ".join(f"[`{name}`]" if name == MIG_LABEL else f"`{name}`" for name in row.labels)
    return f"| `{row.full_name}` | {row.kind} | {row.unit} |{level} {labels} | {row.help.replace('|', '&#124;')} |\n"


if __name__ == "__main__":
    sys.stdout.write(render_doc())
