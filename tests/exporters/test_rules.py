"""The shipped rules and the Alertmanager example: checked by promtool and amtool, and against our own words."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent.vocabulary import ACTIONS, ANOMALIES, GPU_STATES, SEVERITIES
from exporters.metrics import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "exporters/rules"
RULE_FILES = sorted(RULES.glob("*.rules.yml"))
TEST_FILES = sorted((RULES / "tests").glob("*.test.yml"))
ALERTMANAGER = ROOT / "exporters/alertmanager/alertmanager.yml"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (package prometheus) is absent")
needs_amtool = pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool (prometheus-alertmanager) is absent")


def loaded(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def rules() -> list[dict]:
    return [rule for path in RULE_FILES for group in loaded(path)["groups"] for rule in group["rules"]]


#: The severity of a test alert is that which was asked for.
TEMPLATE = "{{ $labels.severity }}"
ALERTS = [rule for rule in rules() if "alert" in rule]
NAMES = [f"{rule['alert']}-{rule['labels']['severity']}" for rule in ALERTS]


@needs_promtool
def test_promtool_accepts_every_rule_file_in_silence() -> None:
    done = subprocess.run(["promtool", "check", "rules", *RULE_FILES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@needs_promtool
@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem)
def test_every_promtool_case_holds(path: Path) -> None:
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_says_how_bad_what_and_what_next(rule: dict) -> None:
    assert rule["labels"]["severity"] in {*SEVERITIES[1:], TEMPLATE}
    named = {action for action in ACTIONS if re.search(rf"\b{action}\b", rule["labels"]["action"])}
    assert named, rule["labels"]["action"]
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert "{{" in rule["annotations"]["description"] or "$value" in rule["annotations"]["description"]
    prefix, _, page = rule["annotations"]["runbook_url"].rpartition("/")
    assert prefix == "https://warpwatch.example/runbooks"
    assert (ROOT / "docs/runbooks" / page).is_file()


#: Of targets, not of nodes, or asked for.
OF_TARGETS = {"WarpwatchNoAgents", "WarpwatchNoSeries", "WarpwatchTestAlert"}


@pytest.mark.parametrize(
    "rule", [rule for rule in ALERTS if rule["alert"] not in OF_TARGETS], ids=lambda rule: rule["alert"]
)
def test_an_alert_is_silent_in_maintenance(rule: dict) -> None:
    """Those on findings are so by the recording rule they read."""
    recorded = {one["record"]: one["expr"] for one in rules() if "record" in one}
    expr = rule["expr"]
    for name in (
        "instance_gpu:warpwatch_gpu_anomaly_severity:owned",
        "instance_gpu:warpwatch_gpu_anomaly_severity:live",
        "instance:warpwatch_node_anomaly_severity:live",
        "job_key:warpwatch_job_anomaly_severity:freshest",
        "instance_job_key:warpwatch_checkpoint_last_timestamp_seconds:live",
    ):
        expr = expr.replace(name, recorded[name])
    assert re.search(r"unless on\(job, instance(, uuid)?\)\s+\(.*warpwatch_(gpu|node)_maintenance.* == 1\)", expr)


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_has_a_firing_and_a_silent_promtool_case(rule: dict) -> None:
    firing, silent = set(), set()
    for path in TEST_FILES:
        for case in loaded(path)["tests"]:
            for check in case.get("alert_rule_test", ()):
                severities = {alert["exp_labels"]["severity"] for alert in check["exp_alerts"]}
                firing |= {(check["alertname"], severity) for severity in severities}
                silent |= set() if severities else {check["alertname"]}
    severity = rule["labels"]["severity"]
    assert severity == TEMPLATE or (rule["alert"], severity) in firing
    assert rule["alert"] in {name for name, _ in firing}
    assert rule["alert"] in silent


def test_every_anomaly_has_an_alert_but_the_one_that_is_information_only() -> None:
    text = "".join(rule["expr"] for rule in rules())
    named = set(re.findall(r'anomaly="(\w+)"', text))
    assert set(ANOMALIES) - named == {"unknown_workload"}


def test_the_page_of_alerts_is_that_of_the_rules_and_runbooks() -> None:
    command = [sys.executable, ROOT / "packaging/alerts_doc.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert (ROOT / "docs/alerts.md").read_text() == done.stdout, "run python packaging/alerts_doc.py > docs/alerts.md"


def test_rules_read_only_series_that_are_exported() -> None:
    exported = {row.full_name for _, rows in SECTIONS for row in rows}
    text = "".join(path.read_text() for path in RULE_FILES)
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("#", "- name:")))
    read = set(re.findall(r"(?<![\w:/.-])warpwatch_[a-z_]+", text))
    assert "warpwatch_gpu_owner_info" in read
    assert read <= exported


def test_rules_use_the_words_of_the_vocabulary() -> None:
    text = "".join(path.read_text() for path in RULE_FILES)
    assert set(re.findall(r'anomaly="(\w+)"', text.replace("\\", ""))) <= set(ANOMALIES)
    (states,) = set(re.findall(r'state=~"([\w|]+)"', text))
    assert set(states.split("|")) == set(GPU_STATES) - {"ok"}


@needs_amtool
def test_amtool_accepts_the_alertmanager_example() -> None:
    done = subprocess.run(["amtool", "check-config", ALERTMANAGER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_amtool
@pytest.mark.parametrize(("severity", "receiver"), [("critical", "on-call"), ("warning", "people"), ("info", "people")])
def test_only_critical_alerts_reach_the_on_call_receiver(severity: str, receiver: str) -> None:
    command = ["amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", f"severity={severity}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == receiver


def test_inhibitions_name_alerts_that_exist() -> None:
    names = {rule["alert"] for rule in ALERTS}
    matchers = [
        matcher
        for inhibition in loaded(ALERTMANAGER)["inhibit_rules"]
        for matcher in (*inhibition["source_matchers"], *inhibition["target_matchers"])
    ]
    named = {found for matcher in matchers for found in re.findall(r'alertname!?="(\w+)"', matcher)}
    assert {"WarpwatchAgentDown", "WarpwatchStalledCollective", "WarpwatchCollectiveWait"} <= named <= names
