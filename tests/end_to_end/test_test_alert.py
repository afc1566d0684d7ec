"""`warpwatch test-alert` reaches the pager through a real Prometheus and a real Alertmanager, marked, and ends."""

from __future__ import annotations

import subprocess

import pytest

from tests.end_to_end.programs import ROOT, Agent, Alertmanager, Prometheus, WebhookReceiver, wait_for, warpwatch

pytestmark = pytest.mark.end_to_end


def test_a_marked_alert_takes_the_way_of_a_page_and_ends(tmp_path):
    rules = sorted((ROOT / "exporters" / "rules").glob("*.rules.yml"))
    routes = ROOT / "exporters" / "alertmanager" / "alertmanager.yml"
    state = tmp_path / "state"
    state.mkdir()
    config = f'[agent]\nstate_directory = "{state}"\nruntime_folder = "{tmp_path}"\n[samplers]\nnvml = false\n'
    with (
        WebhookReceiver() as receiver,
        Alertmanager(tmp_path, routes, receiver.url) as alertmanager,
        Agent(tmp_path, config=config) as agent,
        Prometheus(tmp_path, [agent.url.removeprefix("http://")], rules, alertmanager.address) as prometheus,
    ):
        agent.wait_until_ready()
        wait_for("scrape", lambda: prometheus.query("warpwatch_build_info"))
        command = [warpwatch(), "test-alert", "stalled_collective", "--for", "12s"]
        done = subprocess.run(
            [*command, "--config", tmp_path / "warpwatch.toml"], capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 0, done.stderr
        wait_for("page", lambda: receiver.payloads, 40, every=0.2)
        assert "a test alert of stalled_collective (critical) lasts now" in agent.log()
        wait_for("end", lambda: not prometheus.alerts(), 30, every=0.2)
        assert not any("warpwatch_test_alert" in name for name in agent.metrics())
        body = receiver.payloads[0]
    assert body["receiver"] == "on-call"
    (alert,) = body["alerts"]
    assert alert["labels"]["alertname"] == "WarpwatchTestAlert"
    assert (alert["labels"]["severity"], alert["labels"]["action"]) == ("critical", "none")
    assert "nothing is wrong" in alert["annotations"]["summary"]
