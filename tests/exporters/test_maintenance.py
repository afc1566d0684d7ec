"""What is in maintenance, in metrics and on the landing page."""

from __future__ import annotations

import dataclasses

import pytest

from exporters.landing import render_landing
from exporters.metrics_maintenance import MAINTENANCE_METRICS
from exporters.snapshot import MaintenanceView, NodeSnapshot
from tests.exporters.snapshots import NOW, full_snapshot, key_of, mig_snapshot


def series(snapshot: NodeSnapshot) -> dict[str, dict[tuple[str, ...], float]]:
    return {row.name: dict(row.values(snapshot)) for row in MAINTENANCE_METRICS}


def held(*maintenance: MaintenanceView, gpus: int = 2) -> NodeSnapshot:
    return dataclasses.replace(full_snapshot(gpus), maintenance=maintenance)


def view(keys, *anomalies: str, reason: str = "") -> MaintenanceView:
    return MaintenanceView(keys=keys, anomalies=anomalies, until_wall_s=NOW.wall_s + 5400, reason=reason)


A, B = (("0", key_of(0).uuid), ("1", key_of(1).uuid))


def test_nothing_is_in_maintenance():
    assert series(held()) == {
        "gpu_maintenance": {},
        "gpu_anomaly_maintenance": {},
        "node_maintenance": {(): None},
        "node_anomaly_maintenance": {},
    }


def test_a_gpu_is():
    found = series(held(view((key_of(1),))))
    assert (found["gpu_maintenance"], found["node_maintenance"]) == ({B: 1}, {(): None})


def test_the_node_is_with_all_its_gpus():
    found = series(held(view(None)))
    assert (found["gpu_maintenance"], found["node_maintenance"]) == ({A: 1, B: 1}, {(): 1})


def test_one_that_is_confined_to_anomalies_is_of_these_alone():
    found = series(held(view((key_of(0),), "throttled"), view(None, "low_utilization"), view(None, "low_utilization")))
    assert found == {
        "gpu_maintenance": {},
        "gpu_anomaly_maintenance": {(*A, "low_utilization"): 1, (*A, "throttled"): 1, (*B, "low_utilization"): 1},
        "node_maintenance": {(): None},
        "node_anomaly_maintenance": {("low_utilization",): 1},
    }


def test_series_stand_on_the_card_that_is_divided():
    snapshot = mig_snapshot()
    key = next(view.key for view in snapshot.gpus if view.key.gpu_i_id is None)
    found = series(dataclasses.replace(snapshot, maintenance=(view((key,)),)))
    assert found["gpu_maintenance"] == {(str(key.gpu), key.uuid): 1}


@pytest.mark.parametrize(
    ("maintenance", "said"),
    [
        (view(None), "The node is in maintenance"),
        (view((key_of(0),)), "GPU 0 is in maintenance"),
        (view((key_of(0), key_of(1))), "GPU 0, GPU 1 are in maintenance"),
        (view(()), "A GPU that is not here is in maintenance"),
        (view(None, "throttled"), "alerts of throttled are silent"),
        (view(None, reason="<b>why</b>"), "&lt;b&gt;why&lt;/b&gt;"),
        (view(None), "until 2026-01-01 01:30:00"),
        (view(None), "1 h 30 min from now: alerts are silent."),
    ],
)
def test_the_landing_page_says_so(maintenance, said):
    assert said in render_landing(held(maintenance)).decode()
    assert "in maintenance" not in render_landing(held()).decode()
