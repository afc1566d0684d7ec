"""Variants of the promtool cases of every alert: owners 0, 1 and 2, MIG, labels of a Kubernetes target, and silence.

The first written case (exporters/rules/tests/) in which an alert fires, by name and severity, is what all are made of.
The text of an alert stands there; here is said what an owner, an instance of a card or a target changes of it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).resolve().parents[2] / "exporters/rules"
STEP_S = 15
OWNER = {"job_key": "slurm:42", "job_id": "42", "owner_pod": "train-0"}
#: Holds the second instance of each divided card.
OTHER = {"job_key": "slurm:43", "job_id": "43"}
TARGET = {"namespace": "monitoring", "pod": "warpwatch-x7k2p", "container": "agent"}
#: How each text names the job of a GPU; all others say " (job 42)" at the end of the summary.
NAMED = {"WarpwatchStraggler": " 42"}
HELD = "; held in the last 10 min by "
#: Told of a node or its GPUs: goes on when a pod of the agent is replaced; what is told of the agent need not.
WITHOUT_POD = {"WarpwatchGpusMissing", "WarpwatchGpuState"}
#: Told of a job, not of a GPU; those of WHOLE need that it holds a GPU alone.
OF_JOBS = {"WarpwatchJobStalled", "WarpwatchJobCheckpointMissed", "WarpwatchJobCheckpointUnusual"}
WHOLE = OF_JOBS - {"WarpwatchJobCheckpointUnusual"}
#: Series that an instance of a card has of its own.
OF_INSTANCES = (
    "warpwatch_gpu_anomaly_severity",
    "warpwatch_gpu_owner_info",
    "warpwatch_gpu_utilization_ratio",
    "warpwatch_gpu_memory_used_bytes",
    "warpwatch_gpu_memory_total_bytes",
    "warpwatch_gpu_workload",
    "warpwatch_gpu_workload_since_timestamp_seconds",
    "warpwatch_training_step_seconds",
)
VARIANTS = ("0 owners", "1 owner", "2 owners", "MIG", "Kubernetes", "silent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """A written case, with the check in which the alert fires."""

    rule: dict[str, Any]
    case: dict[str, Any]
    check: dict[str, Any]


@dataclasses.dataclass(kw_only=True)
class Series:
    """One line of input_series, apart."""

    name: str
    labels: dict[str, str]
    values: str

    def line(self) -> dict[str, str]:
        labels = ",".join(f'{key}="{value}"' for key, value in self.labels.items())
        return {"series": f"{self.name}{{{labels}}}", "values": self.values}


def loaded(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def groups() -> list[dict[str, Any]]:
    """Return the groups of the shipped rules that hold alerts, or what those read."""
    paths = (RULES / "warpwatch.rules.yml", RULES / "warpwatch.jobs.rules.yml")
    return [group for path in paths for group in loaded(path)["groups"]]


@functools.cache
def alerts() -> list[dict[str, Any]]:
    files = [loaded(path) for path in sorted(RULES.glob("*.rules.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"] if "alert" in rule]


def alone(name: str) -> dict[str, Any]:
    """Return the shipped rules with no alert but this one, so that promtool need not evaluate the others."""
    kept = []
    for group in groups():
        if name not in OF_JOBS and group["name"] == "warpwatch_jobs":
            continue
        rules = [rule for rule in group["rules"] if rule.get("alert", name) == name]
        kept += [{**group, "rules": rules}] if rules else []
    return {"groups": kept}


@functools.cache
def bases() -> tuple[list[Base], list[str]]:
    """Return what variants are made of, and the alerts for which nothing is."""
    cases = [case for path in sorted((RULES / "tests").glob("*.test.yml")) for case in loaded(path)["tests"]]
    found, without = [], []
    for rule in alerts():
        severity = rule["labels"]["severity"]
        of_rule = (
            Base(rule=rule, case=case, check=check)
            for case in cases
            for check in case.get("alert_rule_test", ())
            if check["alertname"] == rule["alert"]
            and check["exp_alerts"]
            and "GPU_I_ID" not in check["exp_alerts"][0]["exp_labels"]
            and severity in ("{{ $labels.severity }}", check["exp_alerts"][0]["exp_labels"]["severity"])
        )
        base = next(of_rule, None)
        if base is None:
            without.append(f"{rule['alert']} ({severity})")
        else:
            found.append(base)
    return found, without


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each variant of each alert as a promtool case, with the name of the alert."""
    for base in bases()[0]:
        for variant in VARIANTS:
            series = [_apart(line) for line in base.case["input_series"]]
            expected = copy.deepcopy(base.check["exp_alerts"])
            series, expected = _varied(variant, base, series, expected)
            check = {**base.check, "exp_alerts": expected}
            yield (
                base.rule["alert"],
                {
                    "name": f"{base.rule['alert']} ({base.rule['labels']['severity']}), {variant}",
                    "interval": f"{STEP_S}s",
                    "input_series": [one.line() for one in series],
                    "alert_rule_test": [check],
                },
            )


def _varied(
    variant: str, base: Base, series: list[Series], expected: list[dict[str, Any]]
) -> tuple[list[Series], list[dict[str, Any]]]:
    name = base.rule["alert"]
    if variant == "silent":
        return _silenced(base, series), []
    if variant == "Kubernetes":
        for one in series:
            one.labels |= TARGET
        for alert in expected:
            alert["exp_labels"] |= _target_labels(base.rule)
        return series, expected
    if variant in ("0 owners", "2 owners"):
        owned = [] if name in WHOLE else [_without_owner(alert) for alert in expected]
        return _held(series, {"owners": variant[0]}), owned
    if name in OF_JOBS:
        return (_on_instances(series) if variant == "MIG" else series), expected
    expected = [_without_owner(alert) for alert in expected]
    gpus = {
        (one["exp_labels"]["instance"], one["exp_labels"]["uuid"]) for one in expected if "uuid" in one["exp_labels"]
    }
    series = _held(series, {"owners": "0"}) if gpus else series
    for instance, uuid in sorted(gpus):
        gpu = next(one["exp_labels"]["gpu"] for one in expected if one["exp_labels"].get("uuid") == uuid)
        series = [one for one in series if not (one.name == "warpwatch_gpu_owner_info" and one.labels["uuid"] == uuid)]
        key = {"job": "warpwatch", "instance": instance, "gpu": gpu, "uuid": uuid}
        series.append(Series(name="warpwatch_gpu_owner_info", labels={**key, "owners": "1", **OWNER}, values="1x80"))
    expected = [_with_owner(name, alert) for alert in expected]
    if variant == "1 owner":
        return series, expected
    for alert in expected:
        if "anomaly" in alert["exp_labels"] and "uuid" in alert["exp_labels"]:
            alert["exp_labels"]["GPU_I_ID"] = "1"
        elif name == "WarpwatchGpuState":
            texts = alert["exp_annotations"]
            texts["description"] = f"{texts['description'].rstrip('.')} {OTHER['job_key']}."
    return _on_instances(series), expected


def _apart(line: dict[str, Any]) -> Series:
    name, _, labels = line["series"].partition("{")
    return Series(name=name, labels=dict(re.findall(r'(\w+)="([^"]*)"', labels)), values=str(line["values"]))


def _held(series: Sequence[Series], labels: dict[str, str]) -> list[Series]:
    """Return the series with owners of every GPU that no job has alone."""
    kept = [one for one in series if one.name != "warpwatch_gpu_owner_info"]
    gpus = {
        tuple(one.labels[key] for key in ("job", "instance", "gpu", "uuid")) for one in kept if "uuid" in one.labels
    }
    for gpu in sorted(gpus):
        key = dict(zip(("job", "instance", "gpu", "uuid"), gpu, strict=True))
        kept.append(Series(name="warpwatch_gpu_owner_info", labels={**key, **labels}, values="1x80"))
    return kept


def _on_instances(series: Sequence[Series]) -> list[Series]:
    """Return the series as those of cards that are divided: another job holds the second instance of each."""
    made = []
    for one in series:
        if one.name not in OF_INSTANCES or "uuid" not in one.labels:
            made.append(one)
            continue
        made.append(dataclasses.replace(one, labels={**one.labels, "GPU_I_ID": "1"}))
        if one.name == "warpwatch_gpu_owner_info":
            key = {label: one.labels[label] for label in ("job", "instance", "gpu", "uuid")}
            made.append(dataclasses.replace(one, labels={**key, "owners": "2"}))
            made.append(dataclasses.replace(one, labels={**key, "GPU_I_ID": "2", "owners": "1", **OTHER}))
    return made


def _without_owner(alert: dict[str, Any]) -> dict[str, Any]:
    labels = alert["exp_labels"]
    texts = dict(alert["exp_annotations"])
    if "uuid" in labels:
        labels = {key: value for key, value in labels.items() if key not in OWNER}
        texts["summary"] = re.sub(r" \(job \w+\)$|(?<=its job) \w+$", "", texts["summary"])
        texts["description"] = re.sub(rf"{HELD}[^.]*", "", texts["description"])
    return {"exp_labels": labels, "exp_annotations": texts}


def _with_owner(name: str, alert: dict[str, Any]) -> dict[str, Any]:
    labels, texts = alert["exp_labels"], dict(alert["exp_annotations"])
    if "uuid" not in labels:
        return alert
    if name == "WarpwatchGpuState":
        texts["description"] = f"{texts['description'].rstrip('.')}{HELD}{OWNER['job_key']}."
    else:
        labels = {**labels, **OWNER}
        texts["summary"] += NAMED.get(name, f" (job {OWNER['job_id']})")
    return {"exp_labels": labels, "exp_annotations": texts}


def _target_labels(rule: dict[str, Any]) -> dict[str, str]:
    """Return the labels of the target that the alert keeps: those of jobs have none."""
    if rule["alert"] in OF_JOBS or "absent(" in rule["expr"]:
        return {}
    if rule["alert"] in WITHOUT_POD or re.search(":live|:owned", rule["expr"]):
        return {label: value for label, value in TARGET.items() if label != "pod"}
    return TARGET


def _silenced(base: Base, series: list[Series]) -> list[Series]:
    """Return the series as they are when what they tell is too new, or not bad enough."""
    if base.rule["alert"] == "WarpwatchNoAgents":
        return [*series, Series(name="up", labels={"job": "warpwatch", "instance": "n2"}, values="1x1 stale")]
    if "for" in base.rule:
        held = _seconds(base.rule["for"])
        begins = (_seconds(base.check["eval_time"]) - held) // STEP_S + 1
        for one in series:
            one.values = " ".join(["_"] * begins + _each(one.values)[begins:])
        return series
    lowest = {"info": 1, "warning": 2, "critical": 3}
    below = min(lowest.get(rule["labels"]["severity"], 1) for rule in alerts() if rule["alert"] == base.rule["alert"])
    if base.rule["alert"] == "WarpwatchJobStalled":
        below = 2
    for one in series:
        if "anomaly_severity" in one.name or one.name == "warpwatch_test_alert":
            one.values = " ".join(
                value if value in ("_", "stale") else _least(value, below - 1) for value in _each(one.values)
            )
    return series


def _least(value: str, most: int) -> str:
    return str(min(int(float(value)), most))


def _seconds(text: str) -> int:
    found = re.fullmatch(r"(\d+)([smh])", text)
    assert found, text
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _each(values: str) -> list[str]:
    """Return promtool's short notation written out."""
    out: list[str] = []
    for word in values.split():
        found = re.fullmatch(r"(_|-?[\d.e]+)(?:([+-])([\d.e]+))?x(\d+)", word)
        if not found:
            out.append(word)
        elif found[1] == "_":
            out += ["_"] * int(found[4])
        else:
            step = float(f"{found[2]}{found[3]}") if found[3] else 0.0
            out += [f"{float(found[1]) + step * number:.15g}" for number in range(int(found[4]) + 1)]
    return out
