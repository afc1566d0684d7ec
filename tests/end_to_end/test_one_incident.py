"""The shipped Alertmanager configuration in a real Alertmanager: a stall of a job over four nodes is one alert."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.end_to_end.programs import ROOT, Alertmanager, WebhookReceiver, fetch, wait_for

pytestmark = pytest.mark.end_to_end


def alert(name: str, severity: str = "critical", **labels: str) -> dict:
    return {"labels": {"alertname": name, "job": "warpwatch", "severity": severity, **labels}}


def send(address: str, alerts: list[dict]) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{address}/api/v2/alerts", json.dumps(alerts).encode(), headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.status == 200


def test_a_job_that_stands_still_is_one_alert_and_gpus_of_nobody_keep_theirs(tmp_path):
    stalled = {"anomaly": "stalled_collective"}
    gpus = [
        alert("WarpwatchStalledCollective", instance=f"n{node}", gpu=str(gpu), job_key="slurm:7", **stalled)
        for node in range(4)
        for gpu in range(8)
    ]
    idle = {"anomaly": "low_utilization"}  # the culprit, by now
    gpus.append(alert("WarpwatchLowUtilization", "warning", instance="n4", job_key="slurm:7", **idle))
    alone = alert("WarpwatchStalledCollective", instance="n9", gpu="0", **stalled)
    routes = ROOT / "exporters/alertmanager/alertmanager.yml"
    with WebhookReceiver() as receiver, Alertmanager(tmp_path, routes, receiver.url) as alertmanager:
        wait_for("Alertmanager", lambda: fetch(f"http://{alertmanager.address}/-/ready")[0] == 200)
        send(alertmanager.address, [alert("WarpwatchJobStalled", job_key="slurm:7"), *gpus, alone])
        wait_for("two messages", lambda: len(receiver.payloads) >= 2)
        # What is inhibited is known by Alertmanager itself, not by waiting for what does not come.
        _, _, body = fetch(f"http://{alertmanager.address}/api/v2/alerts?inhibited=true&active=false")
    told = [one["labels"] for payload in receiver.payloads for one in payload["alerts"]]
    assert sorted((one["alertname"], one.get("job_key", ""), one.get("instance", "")) for one in told) == [
        ("WarpwatchJobStalled", "slurm:7", ""),
        ("WarpwatchStalledCollective", "", "n9"),
    ]
    assert {payload["receiver"] for payload in receiver.payloads} == {"on-call"}
    assert len(json.loads(body)) == len(gpus)


def test_a_job_or_an_outage_over_many_nodes_is_one_message_and_faults_of_two_nodes_are_two(tmp_path):
    nodes = [f"n{number}" for number in range(32)]
    alerts = [
        *(alert("WarpwatchFailSlow", "warning", instance=node, uuid="GPU-a", job_key="slurm:7") for node in nodes),
        *(alert("WarpwatchThrottled", instance=node, uuid="GPU-b", job_key="slurm:8") for node in nodes),
        *(alert("WarpwatchLowUtilization", "info", instance=node, gpu="0", job_key="slurm:9") for node in nodes),
        *(alert("WarpwatchPortErrors", instance=node, device="mlx5_0") for node in nodes),
        *(alert("WarpwatchStorageStall", "warning", instance=node) for node in nodes),
        *(alert("WarpwatchAgentDown", "warning", instance=f"down{number}") for number in range(32)),
        *(alert("WarpwatchGpuState", instance=node, gpu="0", state="lost") for node in nodes[:2]),
        *(alert("WarpwatchEccRemap", "warning", instance=node, gpu="0") for node in nodes[:2]),
    ]
    routes = ROOT / "exporters/alertmanager/alertmanager.yml"
    with WebhookReceiver() as receiver, Alertmanager(tmp_path, routes, receiver.url) as alertmanager:
        wait_for("Alertmanager", lambda: fetch(f"http://{alertmanager.address}/-/ready")[0] == 200)
        send(alertmanager.address, alerts)
        wait_for("all", lambda: sum(len(payload["alerts"]) for payload in receiver.payloads) >= len(alerts))
    messages = [(one["receiver"], one["groupLabels"]["alertname"], len(one["alerts"])) for one in receiver.payloads]
    assert sorted(messages) == [
        ("on-call", "WarpwatchGpuState", 1),
        ("on-call", "WarpwatchGpuState", 1),
        ("on-call", "WarpwatchPortErrors", 32),
        ("on-call", "WarpwatchThrottled", 32),
        ("people", "WarpwatchAgentDown", 32),
        ("people", "WarpwatchEccRemap", 1),
        ("people", "WarpwatchEccRemap", 1),
        ("people", "WarpwatchFailSlow", 32),
        ("people", "WarpwatchLowUtilization", 32),
        ("people", "WarpwatchStorageStall", 32),
    ]
