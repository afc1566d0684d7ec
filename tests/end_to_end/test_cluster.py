"""Five agents, a real Prometheus, a real Alertmanager, a webhook receiver: what goes wrong is told once, by job.

All nodes are simulated, by an emulated driver each. One run holds all incidents, each on GPUs and of a job of its own,
since the programs take as long to start as an incident takes to show.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.cluster import Node, faster_rules, scrape_of, told
from tests.end_to_end.programs import ROOT, Alertmanager, Prometheus, WebhookReceiver, fetch, wait_for
from tests.machines import unpack_machine
from tests.nvml_emulator.emulator import GPU_IS_LOST

pytestmark = pytest.mark.end_to_end

#: Scrapes that have seen a GPU at work before anything happens: it is armed then.
ARMED = 9
STANDS, LOSES, SAVES, FORGOTTEN = "slurm:1", "slurm:2", "slurm:3", "slurm:4"


class Cluster:
    """The nodes n1 to n5 and those who watch them."""

    def __init__(self, folder: Path, receiver: WebhookReceiver) -> None:
        machine = unpack_machine("gpu_node", folder / "machine")
        self.nodes = [Node(number, folder, machine, idle=[5] if number == 3 else []) for number in range(1, 6)]
        self.receiver = receiver
        n1, n2, _, n4, n5 = self.nodes
        for node in self.nodes[:4]:
            node.job(STANDS, [0, 1], workload="training")
        for node in (n1, n2, n5):
            node.job(LOSES, [2, 3], workload="training")
        # The freshest node is n4; the other one is late soon.
        for node, interval_s, seconds_ago in ((n4, 21, 5), (n5, 5, 60)):
            node.job(SAVES, [4], workload="training", expected_checkpoint_seconds=interval_s)
            node.saved(SAVES, seconds_ago)
        self.nodes[2].job(FORGOTTEN, [5])
        self.alertmanager: Alertmanager
        self.prometheus: Prometheus

    def value(self, query: str) -> float | None:
        found = self.prometheus.query(query)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> dict[tuple[str, str, str], dict]:
        return {_name(alert["labels"]): alert for alert in self.prometheus.alerts() if alert["state"] == "firing"}

    def inhibited(self) -> set[tuple[str, str, str]]:
        """Return the alerts that Alertmanager holds back, by its own word."""
        _, _, body = fetch(f"http://{self.alertmanager.address}/api/v2/alerts?inhibited=true&active=false")
        return {_name(alert["labels"]) for alert in json.loads(body)} if body else set()


def _name(labels: dict[str, str]) -> tuple[str, str, str]:
    return labels["alertname"], labels.get("job_key", ""), labels.get("instance", "")


@pytest.fixture
def cluster(nvml_emulator_library, tmp_path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(WebhookReceiver())
        found = Cluster(tmp_path, receiver)
        routes = ROOT / "exporters/alertmanager/alertmanager.yml"
        found.alertmanager = stack.enter_context(Alertmanager(tmp_path, routes, receiver.url))
        for node in found.nodes:
            stack.enter_context(node.start())
        rules, scrape = faster_rules(tmp_path), scrape_of(found.nodes)
        found.prometheus = stack.enter_context(
            Prometheus(tmp_path, [], rules, found.alertmanager.address, scrape=scrape)
        )
        for node in found.nodes:
            node.agent.wait_until_ready(40)
        yield found


#: What people are told, each once: the alert, its job and its node.
INCIDENTS = [
    ("WarpwatchGpuState", "", "n3"),
    ("WarpwatchJobCheckpointMissed", SAVES, ""),
    ("WarpwatchJobStalled", STANDS, ""),
    ("WarpwatchJobStalled", LOSES, ""),
    ("WarpwatchLowUtilization", FORGOTTEN, "n3"),
]
#: What is known of the same incidents beside, and told to nobody.
BESIDE = {
    ("WarpwatchAgentDown", LOSES, "n5"),
    ("WarpwatchGpusMissing", "", "n3"),
    *(("WarpwatchStalledCollective", STANDS, name) for name in ("n1", "n2", "n3")),
    *(("WarpwatchStalledCollective", LOSES, name) for name in ("n1", "n2")),
}


def test_each_incident_of_a_cluster_is_told_once_and_names_the_culprit(cluster):
    n1, n2, n3, n4, n5 = cluster.nodes
    # The quiet time, in which the agents see the work that is lost later.
    armed = f'count(count_over_time(warpwatch_gpu_power_watts{{instance=~"n[123]",gpu=~"[0-3]"}}[1m]) >= {ARMED}) == 12'
    wait_for("work of GPUs", lambda: cluster.prometheus.query(armed), 60)
    assert [name for name in cluster.firing() if name[0] != "WarpwatchLowUtilization"] == []
    assert cluster.receiver.payloads == []
    deadline = f'warpwatch_checkpoint_deadline_timestamp_seconds{{job_key="{SAVES}",instance="%s"}}'
    freshest, other = cluster.value(deadline % "n4"), cluster.value(deadline % "n5")

    # What goes wrong, all at once.
    n4.emulator.xid(1, 31)
    for node in (n1, n2, n3):
        node.wait([0, 1])
    for node in (n1, n2):
        node.wait([2, 3])
    n3.emulator.fail(GPU_IS_LOST, gpu=6)
    # A node whose network fails is waited for before it is seen to be down.
    waits = f'instance_gpu:warpwatch_gpu_waiting:owned{{job_key="{LOSES}"}} == 1'
    wait_for("first word of the wait", lambda: cluster.prometheus.query(waits), 30)
    n5.agent.process.kill()

    wait_for("incidents", lambda: {_name(one) for one in told(cluster.receiver.payloads)} >= set(INCIDENTS), 60)
    wait_for("alerts beside", lambda: cluster.firing().keys() >= BESIDE, 60)
    wait_for("inhibition", lambda: cluster.inhibited() >= BESIDE, 20)
    texts = {_name(one["labels"]): one["annotations"]["description"] for one in _delivered(cluster)}
    assert Counter(_name(one) for one in told(cluster.receiver.payloads)) == Counter(INCIDENTS), texts
    assert _receivers(cluster)["WarpwatchJobStalled"] == _receivers(cluster)["WarpwatchGpuState"] == {"on-call"}
    assert texts["WarpwatchJobStalled", STANDS, ""] == (
        "6 of 8 GPUs of the job wait in a collective operation. Look at n4 GPU 0 (not_waiting); "
        "n4 GPU 1 (not_waiting); n4 GPU 1 (xid); then restart the job from its last checkpoint."
    )
    assert texts["WarpwatchJobStalled", LOSES, ""] == (
        "4 of 4 GPUs of the job wait in a collective operation. Look at n5 (node_down); then restart the job from its "
        "last checkpoint."
    )
    # Not before the freshest node was late, though the other one was.
    alert = cluster.firing()["WarpwatchJobCheckpointMissed", SAVES, ""]
    assert dt.datetime.fromisoformat(alert["activeAt"]).timestamp() >= freshest > other


def _delivered(cluster: Cluster) -> list[dict]:
    return [one for body in cluster.receiver.payloads for one in body["alerts"] if one["status"] == "firing"]


def _receivers(cluster: Cluster) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for body in cluster.receiver.payloads:
        for one in body["alerts"]:
            found.setdefault(one["labels"]["alertname"], set()).add(body["receiver"])
    return found
