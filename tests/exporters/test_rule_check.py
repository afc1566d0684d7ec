"""Rules that can never fire: by what is exported, the words of labels, and what is recorded; by the real parser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from agent.cli import main
from exporters.rule_check import Feeds, Rule, silent_rules

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [str(path) for path in sorted((ROOT / "exporters/rules").glob("*.rules.yml"))]


def feeds() -> Feeds:
    words = {
        "warpwatch_a": {"anomaly": frozenset({"stalled_collective", "throttled"})},
        "warpwatch_b": {},
        "warpwatch_c": {"anomaly": frozenset({"throttled"})},
    }
    return Feeds(words=words, missing={"warpwatch_off": "[samplers] nvml is off"})


def why(expr: str, *records: tuple[str, str]) -> str | None:
    """Return why an alert on `expr` is silent beside these recording rules; None where it may fire."""
    rules = [
        *(Rule(file=Path("f"), group="g", name=name, is_alert=False, expr=text) for name, text in records),
        Rule(file=Path("f"), group="g", name="Alert", is_alert=True, expr=expr),
    ]
    found = [one for one in silent_rules(rules, feeds()) if one.rule.is_alert]
    return found[0].why if found else None


@pytest.mark.parametrize(
    "expr",
    [
        "warpwatch_a > 1",
        'warpwatch_a{anomaly="throttled"} == 3',
        'warpwatch_a{anomaly!="throttled"}',
        'warpwatch_a{anomaly=~"stalled.*|none"}',
        'warpwatch_a{cluster="x", gpu="0"}',  # labels of targets may hold anything
        'node_load1{anomaly="nothing"}',  # of another program
        "warpwatch_off or warpwatch_b",
        "warpwatch_b unless warpwatch_off",
        "absent(warpwatch_off)",
        "vector(1)",
        "1 - warpwatch_b",
        "max_over_time(rate(warpwatch_b[5m])[1h:1m]) > 0",
        'topk(1, sum by(anomaly) (warpwatch_a)) > 0 and on() up{job="x"} == 1',
        '{__name__="warpwatch_b"}',
        'label_replace(warpwatch_a, "anomaly", "x", "gpu", ".*") == 1',
    ],
)
def test_what_may_have_a_result_is_not_named(expr):
    assert why(expr) is None


@pytest.mark.parametrize(
    ("expr", "said"),
    [
        ("warpwatch_off == 1", "warpwatch_off is not exported: [samplers] nvml is off"),
        ('warpwatch_a{anomaly="straggler"} == 2', "no series of warpwatch_a has anomaly 'straggler'"),
        ('warpwatch_a{anomaly=~"gpu_.*"}', "has anomaly like 'gpu_.*'"),
        ('warpwatch_c{anomaly!="throttled"}', "has anomaly not 'throttled'"),
        ("warpwatch_bb > 0", "there is no metric warpwatch_bb; did you mean warpwatch_b?"),
        ("warpwatch_b and warpwatch_off", "warpwatch_off is not exported"),
        ("warpwatch_off unless warpwatch_b", "warpwatch_off is not exported"),
        ("sum(rate(warpwatch_off[5m])) > 0", "warpwatch_off is not exported"),
        ("warpwatch_b * on(gpu) group_left() warpwatch_off", "warpwatch_off is not exported"),
        ("warpwatch_b - 1 > warpwatch_off", "warpwatch_off is not exported"),
        ("job:x:y > 0", "no rule of these files records job:x:y"),
        ('{__name__="warpwatch_off"}', "warpwatch_off is not exported"),
    ],
)
def test_what_can_never_have_one_is_named_with_the_reason(expr, said):
    assert said in (why(expr) or "")


def test_the_words_of_labels_go_through_what_is_recorded():
    live = ("gpu:a:live", "warpwatch_a unless on(gpu) (warpwatch_b == 1)")
    owned = ("gpu:a:owned", "gpu:a:live * on(gpu) group_left(job) warpwatch_off or on(gpu) gpu:a:live")
    assert why('gpu:a:owned{anomaly="throttled"} == 3', owned, live) is None
    assert "no series of gpu:a:owned" in why('gpu:a:owned{anomaly="memory_leak"} == 3', owned, live)
    # An aggregation keeps what it names, a join what its many side has.
    assert why('gpu:c{anomaly="x"}', ("gpu:c", "sum by(gpu) (warpwatch_a)")) is None
    assert why('gpu:c{anomaly="x"}', ("gpu:c", "sum by(anomaly) (warpwatch_a)")) is not None
    assert why('gpu:c{anomaly="x"}', ("gpu:c", "sum without(anomaly) (warpwatch_a)")) is None
    assert why('gpu:c{anomaly="x"}', ("gpu:c", "warpwatch_b * on(gpu) group_right() warpwatch_a")) is not None
    assert "recorded by a rule that can never give a result" in why("gpu:c > 0", ("gpu:c", "warpwatch_off"))


def test_a_rule_may_read_its_own_last_value():
    assert why("gpu:d > 0", ("gpu:d", "gpu:d and warpwatch_b or warpwatch_b * time()")) is None
    assert why("gpu:d > 0", ("gpu:d", "gpu:d and warpwatch_b")) is not None


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("its own label", [("r", "warpwatch_a", {"anomaly": "x"})]),
        ("the second of two", [("r", 'warpwatch_a{anomaly="throttled"}', {}), ("r", "node_load1", {"anomaly": "x"})]),
        ("copied by a join", [("r", "warpwatch_a * on(gpu) group_left(anomaly) node_info", {})]),
        ("written by count_values", [("r", 'count_values by(anomaly) ("anomaly", warpwatch_a)', {})]),
    ],
)
def test_what_is_recorded_with_another_word_may_be_read(name, records):
    rules = [
        *(Rule(file=Path("f"), group="g", name=of, is_alert=False, expr=e, labels=labels) for of, e, labels in records),
        Rule(file=Path("f"), group="g", name="Alert", is_alert=True, expr='r{anomaly="x"} > 0'),
    ]
    assert silent_rules(rules, feeds()) == [], name
    if any(labels for *_, labels in records):
        other = Rule(file=Path("f"), group="g", name="Other", is_alert=True, expr='r{anomaly="y"} > 0')
        assert [one.rule for one in silent_rules([*rules, other], feeds())] == [other]


def test_a_regular_expression_of_prometheus_alone_may_match():
    assert why('warpwatch_a{anomaly=~"(?U)thr.*"}') is None


def test_the_labels_of_a_rule_are_read(tmp_path):
    file = tmp_path / "site.yml"
    record = {"record": "gpu:x", "expr": "warpwatch_gpu_anomaly_severity", "labels": {"anomaly": "mine"}}
    alert = {"alert": "Mine", "expr": 'gpu:x{anomaly="mine"} > 0'}
    file.write_text(yaml.safe_dump({"groups": [{"name": "site", "rules": [record, alert]}]}))
    assert check(file) == 0


def check(*arguments: object) -> int:
    return main(["check-rules", *map(str, arguments)])


def test_all_shipped_rules_can_fire_by_default(capsys):
    assert check(*SHIPPED) == 0
    count = sum(len(group["rules"]) for path in SHIPPED for group in yaml.safe_load(Path(path).read_text())["groups"])
    assert capsys.readouterr().out == f"all {count} rules can fire with this configuration\n"


def test_a_detector_and_a_sampler_that_are_off_are_told(tmp_path, capsys):
    config = tmp_path / "site.toml"
    config.write_text("[detectors.throttled]\nenabled = false\n[samplers]\nowners = false\n")
    assert check(*SHIPPED, "--config", config, "--json") == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    alerts = {one["name"] for one in found if one["kind"] == "alert"}
    assert alerts == {"WarpwatchThrottled"}
    assert {one["why"] for one in found if one["name"] == "instance_gpu:warpwatch_gpu_owner_share_ratio:live"} == {
        "warpwatch_gpu_owner_share_ratio is not exported: [samplers] owners is off"
    }


def test_levels_and_dcgms_names_are_told(tmp_path, capsys):
    rules = {
        "groups": [
            {
                "name": "site",
                "rules": [
                    {"alert": "Blocked", "expr": "warpwatch_procs_blocked > 5"},
                    {"alert": "Hot", "expr": "DCGM_FI_DEV_GPU_TEMP > 85"},
                ],
            }
        ]
    }
    file = tmp_path / "site.yml"
    file.write_text(yaml.safe_dump(rules))
    assert check(file) == 1
    said = capsys.readouterr().out
    assert "alert Blocked (site): warpwatch_procs_blocked is not exported: [export] host leaves it out" in said
    assert "alert Hot (site): DCGM_FI_DEV_GPU_TEMP is not exported: [export] dcgm leaves it out" in said
    assert said.endswith("2 of 2 rules can never fire with this configuration\n")
    config = tmp_path / "site.toml"
    config.write_text('[export]\nhost = "full"\ndcgm = true\n')
    assert check(file, "--config", config) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("groups: [", "is no YAML"),
        ("[]", "has no list `groups`"),
        ("groups: [{name: x}]", "a group has no list `rules`"),
        ("groups: [{name: x, rules: [{alert: A}]}]", "no `expr`"),
        ("groups: [{name: x, rules: [{alert: A, expr: 'up{'}]}]", "A: unexpected end of input"),
    ],
)
def test_files_that_are_none_are_one_sentence(tmp_path, capsys, text, said):
    file = tmp_path / "bad.yml"
    file.write_text(text)
    assert check(file) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert check(tmp_path / "absent.yml") == 2


def test_rules_as_kubernetes_has_them_are_read(tmp_path, capsys):
    rules = [{"alert": "Off", "expr": "warpwatch_nothing > 1"}, {"alert": "On", "expr": "up"}]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"kind": "PrometheusRule", "spec": {"groups": [{"name": "g", "rules": rules}]}}))
    assert check(file) == 1
    assert "1 of 2 rules can never fire" in capsys.readouterr().out


@pytest.mark.parametrize("dcgm", ["false", "true"])
def test_a_name_of_dcgm_that_is_never_exported_is_told(dcgm, tmp_path, capsys):
    config, file = tmp_path / "site.toml", tmp_path / "rules.yml"
    config.write_text(f"[export]\ndcgm = {dcgm}\n")
    rules = [{"alert": "Encoder", "expr": "DCGM_FI_DEV_ENC_UTIL > 90"}]
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
    assert check(file, "--config", config) == 1
    assert "there is no metric DCGM_FI_DEV_ENC_UTIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"expr": "up", "labels": ["a"]}, "the labels of A are no mapping"),
        ({"expr": "up", "labels": "a"}, "the labels of A are no mapping"),
        ({"expr": " + ".join(["up"] * 2000)}, "A: its expression is nested too deeply to be checked"),
    ],
)
def test_what_is_no_rule_is_said_in_one_sentence(rule, says, tmp_path, capsys):
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [{"alert": "A", **rule}]}]}))
    assert check(file) == 2
    assert capsys.readouterr().err.strip().endswith(says)
