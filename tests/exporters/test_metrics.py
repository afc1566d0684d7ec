"""The metric table against a full snapshot, and what absent, stale and MIG do to the series."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from agent.clock import Instant
from agent.pipeline import Pipeline
from agent.records import (
    GpuHealth,
    GpuKey,
    GpuSample,
    GpuXids,
    Tick,
)
from agent.vocabulary import NVLINK_ERROR_KINDS, WORKLOADS
from agent.xids import XIDS
from classifier.detectors.baseline import PowerBaselines
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.results import Assessment
from exporters.exposition import series_of
from exporters.metric_def import MIG_LABEL, MetricDef
from exporters.metrics import METRICS, metric_table
from exporters.metrics_doc import render_doc
from exporters.metrics_health import exported_xids
from exporters.metrics_maintenance import MAINTENANCE_METRICS
from exporters.snapshot import GpuView, NodeSnapshot
from tests.exporters.snapshots import NOW, full_snapshot, full_view, key_of

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = {row.name: row for row in metric_table("full")}


def values(name: str, snapshot: NodeSnapshot) -> dict[tuple[str, ...], float]:
    """Return the series of one family by the values of their labels, in the order of the table."""
    names = ROWS[name].labels
    return {
        tuple(value for label, value in zip(names, labels, strict=True) if value or label != MIG_LABEL): number
        for labels, number in series_of(ROWS[name], snapshot).items()
    }


def node(*views: GpuView, **changes) -> NodeSnapshot:
    return NodeSnapshot(built=NOW, replay=False, gpus=views, **changes)


def test_docs_are_written_from_the_table():
    assert (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8") == render_doc(), (
        "run: python -m exporters.metrics_doc > docs/metrics.md"
    )


def test_names_follow_the_rules():
    names = [row.full_name for row in ROWS.values()]
    assert len(set(names)) == len(names) == len(metric_table("full"))
    for row in ROWS.values():
        assert row.name.endswith("_total") == (row.kind == "counter"), row.name
        assert not row.unit or row.name.removesuffix("_total").endswith("_" + row.unit), row.name
        assert row.help.endswith("."), row.name
        assert (
            ("gpu" in row.labels)
            == ("uuid" in row.labels)
            == (
                # The contract calls this one by what trains.
                row.name.startswith("gpu_") or row.name == "training_step_seconds"
            )
        ), row.name


def test_every_row_has_a_series_on_a_full_node():
    snapshot = full_snapshot()
    # No card of the full node is divided, and nothing is in maintenance.
    without = {row.name for row in ROWS.values() if not series_of(row, snapshot)}
    assert without == {"gpu_mig_info", "test_alert", *(row.name for row in MAINTENANCE_METRICS)}


def test_health_as_the_driver_counts_it():
    uuid = key_of(1).uuid
    snapshot = node(full_view(key_of(1)))
    assert list(values("gpu_ecc_errors_total", snapshot).items()) == [
        (("1", uuid, "corrected", "volatile"), 2),
        (("1", uuid, "corrected", "aggregate"), 40),
        (("1", uuid, "uncorrected", "volatile"), 3),
        (("1", uuid, "uncorrected", "aggregate"), 5),
    ]
    assert values("gpu_remapped_rows_total", snapshot) == {
        ("1", uuid, "correctable"): 6,
        ("1", uuid, "uncorrectable"): 7,
    }
    assert values("gpu_row_remap_pending", snapshot) == {("1", uuid): 1}
    assert values("gpu_row_remap_failure", snapshot) == {("1", uuid): 0}
    assert values("gpu_recovery_action", snapshot) == {("1", uuid): 1}
    assert list(values("gpu_nvlink_errors_total", snapshot).items()) == [
        (("1", uuid, "crc"), 9),
        (("1", uuid, "replay"), 10),
        (("1", uuid, "recovery"), 11),
    ]
    assert tuple(labels[2] for labels in values("gpu_nvlink_errors_total", snapshot)) == NVLINK_ERROR_KINDS


def test_what_a_gpu_has_no_health_of_is_absent():
    view = full_view(key_of(1))
    partial = GpuHealth(monotonic_s=0.0, wall_s=0.0, key=key_of(1), ecc_corrected_volatile_total=0)
    snapshot = node(dataclasses.replace(view, health=partial, xids=None, limits=None))
    assert values("gpu_ecc_errors_total", snapshot) == {("1", view.key.uuid, "corrected", "volatile"): 0}
    for name in ("remapped_rows_total", "row_remap_pending", "row_remap_failure", "recovery_action"):
        assert values(f"gpu_{name}", snapshot) == {}
    for name in ("gpu_nvlink_errors_total", "gpu_xid_errors_total", "gpu_xid_last_timestamp_seconds", "xid_info"):
        assert values(name, snapshot) == {}


def test_critical_xids_start_at_zero_and_others_with_their_first_event():
    snapshot = full_snapshot(gpus=2)
    totals = values("gpu_xid_errors_total", snapshot)
    zero, one = key_of(0).uuid, key_of(1).uuid
    assert {labels[2]: count for labels, count in totals.items() if labels[1] == zero} == {
        str(code): 0 for code in XIDS.critical()
    }
    assert totals["1", one, "48"] == 2
    assert totals["1", one, "13"] == 1
    assert values("gpu_xid_last_timestamp_seconds", snapshot) == {
        ("1", one, "13"): NOW.wall_s - 7200.0,
        ("1", one, "48"): NOW.wall_s - 30.0,
    }
    assert values("xid_info", snapshot) == {("13", "restart_app"): 1, ("48", "reset_gpu"): 1}


def test_codes_at_zero_give_way_to_codes_with_events():
    totals = dict.fromkeys((46, 48, 79, *range(200, 220)), 0)

    def exported(totals: dict[int, int]) -> tuple[int, ...]:
        xids = GpuXids(monotonic_s=0.0, wall_s=0.0, key=key_of(0), totals=totals)
        return exported_xids(GpuView(key=key_of(0), state="ok", xids=xids))

    assert len(exported(totals)) == 17
    assert exported({**totals, 13: 1}) == (13, 46, 48, 79, *range(200, 212))  # 2 + 15
    # Eight codes with count and time fill the places; the critical ones are first in the record and stay.
    every = {**dict.fromkeys((46, 48, 79), 1), **dict.fromkeys(range(1, 30), 1)}
    assert exported(every) == (1, 2, 3, 4, 5, 46, 48, 79)


def test_an_instance_has_its_identity():
    instance = key_of(0)._replace(gpu_i_id=3)
    snapshot = node(full_view(key_of(0)), full_view(instance))
    assert values("gpu_mig_info", snapshot) == {("0", key_of(0).uuid, "3", "1g.10gb", "MIG-3"): 1}
    # Health is of the card, whatever an instance brings.
    assert {labels[:2] for labels in values("gpu_ecc_errors_total", snapshot)} == {("0", key_of(0).uuid)}


def test_findings_of_a_card_that_was_divided_since_have_no_series():
    card, instance = key_of(0), key_of(0)._replace(gpu_i_id=1)
    calm = Assessment(anomaly="low_utilization", scope="gpu", severity=0, key=instance)
    old = Assessment(anomaly="low_utilization", scope="gpu", severity=2, key=card)
    totals = {("low_utilization", "gpu", card): 4, ("low_utilization", "gpu", instance._replace(gpu_i_id=2)): 5}
    snapshot = node(full_view(card), full_view(instance), assessments=(calm, old), finding_totals=totals)
    expected = {("0", card.uuid, "1", "low_utilization"): 0}
    assert values("gpu_anomaly_severity", snapshot) == expected
    assert values("gpu_anomalies_total", snapshot) == expected


class FindsAll:
    """Finds every place of work underused, each time."""

    def assess(self, now, history, decisions):
        return [Assessment(anomaly="low_utilization", scope="gpu", severity=2, key=key) for key in history.gpus]


def test_counters_of_a_card_pause_while_it_is_divided_and_never_fall():
    pipeline = Pipeline(
        labeller=Labeller(None, LabellerConfig()), detectors=[FindsAll()], baselines=PowerBaselines(), replay=True
    )
    card = key_of(0)
    instance = card._replace(gpu_i_id=1)
    place = {("0", card.uuid, "low_utilization"): "card", ("0", card.uuid, "1", "low_utilization"): "instance"}
    seen = []
    # Whole until 20 s, divided until 40 s; 15 s after its last sample the instance is gone. Judged each 5 s.
    for second in range(71):
        at = {"monotonic_s": float(second), "wall_s": 5000.0 + second}
        keys = (card, instance) if 21 <= second <= 40 else (card,)
        pipeline.ingest(Tick(**at, records=tuple(GpuSample(**at, key=key) for key in keys)))
        if second % 5 == 0:
            pipeline.judge(Instant(**at))
        snapshot = pipeline.snapshot(Instant(**at))
        now = tuple(
            {place[labels]: value for labels, value in values(name, snapshot).items()}
            for name in ("gpu_anomaly_severity", "gpu_anomalies_total")
        )
        if not seen or now != seen[-1][1]:
            seen.append((second, now))
    assert seen == [
        (0, ({"card": 2}, {"card": 1})),
        (21, ({}, {})),  # the last judgement was of the card
        (25, ({"instance": 2}, {"instance": 1})),
        (56, ({}, {"card": 1})),
        (60, ({"card": 2}, {"card": 1})),
    ]


def test_a_node_with_nothing_has_only_what_is_always_known():
    emitted = {row.name for row in METRICS if series_of(row, node())}
    assert emitted == {"build_info", "config_last_reload_successful", "replay"}


def test_a_stale_gpu_keeps_its_owner_and_the_time_of_its_last_sample():
    snapshot = node(GpuView(key=key_of(0), state=None, sample_wall_s=5.0))
    emitted = {row.name for row in METRICS if series_of(row, snapshot)}
    assert emitted == {
        "gpu_owner_info",
        "gpu_sample_timestamp_seconds",
        "build_info",
        "config_last_reload_successful",
        "replay",
    }


def test_state_and_workload_are_one_of_their_words():
    snapshot = node(full_view(key_of(0)))
    gpu, uuid = "0", key_of(0).uuid
    assert values("gpu_state", snapshot) == {
        (gpu, uuid, "ok"): 1,
        (gpu, uuid, "lost"): 0,
        (gpu, uuid, "hung"): 0,
        (gpu, uuid, "reset_required"): 0,
    }
    assert values("gpu_workload", snapshot) == {(gpu, uuid, word): int(word == "training") for word in WORKLOADS}
    assert values("gpu_workload_probability", snapshot) == {
        (gpu, uuid, "training", "combined"): 0.85,
        (gpu, uuid, "inference", "combined"): 0.05,
        (gpu, uuid, "idle", "combined"): 0.05,
        (gpu, uuid, "other", "combined"): 0.05,
    }


def test_a_refused_decision_has_no_probability_but_a_workload():
    view = full_view(key_of(0))
    decision = dataclasses.replace(view.decision, workload="unknown", probabilities=None, reason="out_of_domain")
    snapshot = node(dataclasses.replace(view, decision=decision))
    assert values("gpu_workload_probability", snapshot) == {}
    assert values("gpu_workload", snapshot)["0", key_of(0).uuid, "unknown"] == 1


def test_a_gpu_without_uuid_has_an_empty_one():
    snapshot = node(GpuView(key=GpuKey(3), state="ok"))
    assert values("gpu_state", snapshot)["3", "", "ok"] == 1
    assert values("gpu_owner_info", snapshot) == {("3", "", "", "", "", "", "", "", ""): 1}


def test_rates_of_a_foreign_log_give_no_counter():
    sample = GpuSample(
        monotonic_s=0.0,
        wall_s=0.0,
        key=key_of(0),
        pcie_receive_bytes_per_second=1e9,
        pcie_transmit_bytes_per_second=1e9,
        nvlink_receive_bytes_per_second=1e9,
        nvlink_transmit_bytes_per_second=1e9,
    )
    snapshot = node(GpuView(key=key_of(0), state="ok", sample=sample))
    assert [row.name for row in METRICS if row.name.endswith("bytes_total") and series_of(row, snapshot)] == []


def test_zero_is_exported_and_not_a_number_is_not():
    view = full_view(key_of(0))
    zero = dataclasses.replace(view, sample=dataclasses.replace(view.sample, power_watts=0.0))
    odd = dataclasses.replace(view, sample=dataclasses.replace(view.sample, power_watts=math.nan))
    assert list(values("gpu_power_watts", node(zero)).values()) == [0]
    assert values("gpu_power_watts", node(odd)) == {}


def test_a_divided_card_has_power_on_the_card_and_activity_on_its_instances():
    card, first, second = key_of(0), key_of(0)._replace(gpu_i_id=1), key_of(0)._replace(gpu_i_id=2)
    # Out of order and with all values at both levels: the table chooses the level and the order.
    snapshot = node(full_view(second), full_view(card), full_view(first), full_view(key_of(1)))
    uuid, other = card.uuid, key_of(1).uuid
    assert list(values("gpu_power_watts", snapshot)) == [("0", uuid), ("1", other)]
    assert list(values("gpu_utilization_ratio", snapshot)) == [("0", uuid, "1"), ("0", uuid, "2"), ("1", other)]
    # Owners alone stand at both levels.
    assert [labels[:3] for labels in values("gpu_owner_info", snapshot)] == [
        ("0", uuid, "1"),  # one owner
        ("0", uuid, "1"),  # instance 1
        ("0", uuid, "2"),
        ("1", other, "1"),
    ]


def test_series_are_ordered_by_number_not_by_text():
    snapshot = node(*(GpuView(key=GpuKey(gpu), state="ok", sample_wall_s=1.0) for gpu in (10, 2, 0)))
    assert list(values("gpu_sample_timestamp_seconds", snapshot)) == [("0", ""), ("2", ""), ("10", "")]


def test_anomalies_that_cannot_be_seen_are_absent_and_others_start_at_zero():
    calm = Assessment(anomaly="low_utilization", scope="gpu", severity=0, key=key_of(0))
    bad = Assessment(anomaly="stalled_collective", scope="gpu", severity=3, key=key_of(0), suspect=True)
    device = Assessment(anomaly="storage_stall", scope="node", severity=1, device="sda")
    snapshot = node(
        GpuView(key=key_of(0), state="ok"),
        assessments=(calm, device, bad),
        finding_totals={
            ("stalled_collective", "gpu", key_of(0)): 2,
            ("throttled", "gpu", key_of(0)): 1,  # over, and no longer to be seen
            ("storage_stall", "node", "sda"): 3,
            ("storage_stall", "node", "sdb"): 4,
        },
    )
    gpu, uuid = "0", key_of(0).uuid
    assert values("gpu_anomaly_severity", snapshot) == {
        (gpu, uuid, "stalled_collective"): 3,
        (gpu, uuid, "low_utilization"): 0,
    }
    assert list(values("gpu_anomalies_total", snapshot).items()) == [
        ((gpu, uuid, "stalled_collective"), 2),
        ((gpu, uuid, "low_utilization"), 0),
        ((gpu, uuid, "throttled"), 1),
    ]
    assert values("gpu_suspect", snapshot) == {(gpu, uuid, "stalled_collective"): 1}
    assert values("node_anomaly_severity", snapshot) == {("storage_stall", "sda"): 1}
    assert values("node_anomalies_total", snapshot) == {("storage_stall",): 7}  # 3 + 4, over devices
    assert values("job_anomaly_severity", snapshot) == {}


def test_out_of_domain_is_the_share_of_gpus_that_were_refused():
    # GPU 0 is at 1.2 of the threshold, GPUs 1 to 3 at 0.4: one of four.
    assert values("model_out_of_domain_ratio", full_snapshot(gpus=4)) == {(): 0.25}


def test_a_contradiction_between_what_is_declared_and_seen_is_one_and_nothing_declared_is_absent():
    view, uuid = full_view(key_of(0)), key_of(0).uuid
    for mismatch, expected in ((True, {("0", uuid): 1}), (False, {("0", uuid): 0}), (None, {})):
        decision = dataclasses.replace(view.decision, mismatch=mismatch)
        assert values("gpu_workload_mismatch", node(dataclasses.replace(view, decision=decision))) == expected
    assert values("gpu_workload_mismatch", node(dataclasses.replace(view, decision=None))) == {}


def test_a_label_set_comes_once():
    row = MetricDef(
        name="x", kind="gauge", unit="", help="", labels=("device",), values=lambda _: [(("a",), 1), (("a",), 2)]
    )
    assert series_of(row, node()) == {("a",): 1}
