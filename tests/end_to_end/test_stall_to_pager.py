"""A stalled all-reduce on the emulator, through a real Prometheus and a real Alertmanager, to a webhook receiver."""

from __future__ import annotations

import time

import pytest

from tests.end_to_end.programs import ROOT, Agent, Alertmanager, Prometheus, WebhookReceiver, wait_for
from tests.nvml_emulator.emulator import Emulator

pytestmark = pytest.mark.end_to_end

#: The stall begins this long after the agent first asks the driver.
STALL_S = 45
#: The same detector as on a node with its delays cut, so that the test takes one minute and not six.
CONFIG = """
[detectors.stalled_collective]
suspect_seconds = 5
confirm_seconds = 15
[detectors.stalled_collective.arm]
arm_seconds = 20
"""


def script():
    """GPUs 0 to 3 train together and hang in an all-reduce; GPUs 4 to 7 are empty.

    At work 600 W at 98 % and 30 GiB/s over NVLink; then 120 W at 100 % (SIGNALS: 122 to 186 W of 700 W on H100), memory
    utilisation 0 and not one byte over NVLink.
    """
    lines = ["driver 580.95.05", "end hold"]
    for gpu in range(8):
        lines += [
            f"gpu {gpu} uuid GPU-0000000{gpu}-1111-2222-3333-444444444444",
            f"gpu {gpu} name NVIDIA H100 80GB HBM3",
        ]
    base = "memory_total_bytes=85899345920 power_limit_milliwatts=700000 sm_clock_megahertz=1980"
    moved = STALL_S * 30 * 1024 * 1024
    for second, work in ((0, True), (STALL_S, False), (3600, False)):
        lines.append(f"@ {second}")
        for gpu in range(8):
            if gpu > 3:
                lines.append(
                    f"{gpu} {base} utilization_gpu_percent=0 utilization_memory_percent=0 power_milliwatts=70000 "
                    f"memory_used_bytes=4000000 nvlink_transmit_kibibytes=0 nvlink_receive_kibibytes=0"
                )
                continue
            busy = "utilization_gpu_percent=98 utilization_memory_percent=45 power_milliwatts=600000"
            wait = "utilization_gpu_percent=100 utilization_memory_percent=0 power_milliwatts=120000"
            total = 0 if second == 0 else moved
            lines.append(
                f"{gpu} {base} {busy if work else wait} "
                f"memory_used_bytes=70000000000 processes={1000 + gpu}:70000000000 "
                f"nvlink_transmit_kibibytes={total} nvlink_receive_kibibytes={total}"
            )
    return "\n".join([*lines, ""])


def test_a_stalled_all_reduce_reaches_the_pager_and_nothing_else_does(nvml_emulator_library, tmp_path):
    emulator = Emulator(tmp_path, script())
    rules = sorted((ROOT / "exporters" / "rules").glob("*.yml"))
    routes = ROOT / "exporters" / "alertmanager" / "alertmanager.yml"
    with (
        WebhookReceiver() as receiver,
        Alertmanager(tmp_path, routes, receiver.url) as alertmanager,
        Agent(tmp_path, config=CONFIG, environment=emulator.environment()) as agent,
        Prometheus(tmp_path, [agent.url.removeprefix("http://")], rules, alertmanager.address) as prometheus,
    ):
        agent.wait_until_ready()
        wait_for("scrape", lambda: prometheus.query("warpwatch_gpu_power_watts"))
        started = time.monotonic()
        wait_for("page", lambda: receiver.payloads, STALL_S + 60, every=0.5)
        assert time.monotonic() - started > STALL_S - 10, "the page came before the stall"
        # Whatever else would fire has ten more seconds to do so.
        time.sleep(10)
        payloads = list(receiver.payloads)
        firing = {alert["labels"]["alertname"] for alert in prometheus.alerts() if alert["state"] == "firing"}
        log = agent.log()

    alerts = {
        (alert["labels"]["alertname"], alert["labels"].get("gpu")): alert
        for body in payloads
        for alert in body["alerts"]
    }
    assert set(alerts) == {("WarpwatchStalledCollective", str(gpu)) for gpu in range(4)}, log
    assert firing == {"WarpwatchStalledCollective"}
    assert {body["receiver"] for body in payloads} == {"on-call"}
    # One message with the four GPUs, not four messages.
    assert len(payloads[0]["alerts"]) == 4
    for (_, gpu), alert in alerts.items():
        labels, annotations = alert["labels"], alert["annotations"]
        assert alert["status"] == "firing"
        assert labels["uuid"] == f"GPU-0000000{gpu}-1111-2222-3333-444444444444"
        assert (labels["severity"], labels["action"]) == ("critical", "restart_app")
        assert labels["instance"] == agent.url.removeprefix("http://")
        assert annotations["summary"] == f"GPU {gpu} of {labels['instance']} hangs in a collective operation"
        assert "it draws 120 W, 600 W at work, at 100% utilisation" in annotations["description"]
        assert annotations["runbook_url"].endswith("/runbooks/stalled_collective.md")
