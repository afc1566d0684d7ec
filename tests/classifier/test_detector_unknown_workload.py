"""unknown_workload: the share of time in which the model abstained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from agent.records import GpuSample
from classifier.detectors.unknown_workload import UnknownWorkloadConfig, UnknownWorkloadDetector
from classifier.results import Assessment, Decision
from tests.classifier.card_histories import KEY, Card, severity


def decision(watched: Card, reason: str | None) -> Decision:
    """Return `training`, or where there is a reason `unknown`."""
    return Decision(
        key=KEY, monotonic_s=watched.now.monotonic_s, wall_s=watched.now.wall_s, probabilities=None,
        workload="training" if reason is None else "unknown", telemetry_probabilities=None, window_s=60.0,
        reason=reason, since_monotonic_s=0.0, since_wall_s=0.0,
    )  # fmt: skip


def played(label: Callable[[float], str | None], seconds: float = 1800, step_s: float = 5.0) -> list[Assessment | None]:
    watched = Card(UnknownWorkloadDetector(UnknownWorkloadConfig()))
    watched.feed(GpuSample, utilization_ratio=0.9)
    found = []
    while watched.at < seconds:
        watched.at += step_s
        said = watched.assess({KEY: decision(watched, label(watched.at))})
        found.append(said[0] if said else None)
    return found


def test_a_quarter_of_an_hour_without_a_label_is_information():
    said = played(lambda t: None if t <= 900 else "out_of_domain" if t % 2 else "ambiguous")
    severities = [severity(one) for one in said]
    # Half of the window has to be judged: nothing is said before 455 s, the first 5 s have no length.
    assert severities.index(0) == 455 / 5 - 1
    # More than 80 % of 900 s: 725 s after the labels ended.
    assert severities.index(1) == 1625 / 5 - 1
    assert set(severities[325:]) == {1}
    assert said[-1].action == "look"
    assert said[-1].evidence["unknown_ratio"] == pytest.approx(1.0, abs=0.01)
    assert said[-1].evidence["out_of_domain_ratio"] == pytest.approx(0.5, abs=0.01)
    assert said[-1].evidence["reason"] == "ambiguous"


def test_a_short_time_without_a_label_is_none():
    severities = [severity(one) for one in played(lambda _: "ambiguous", 920)]
    # The first judgement has no length; the second one's began at 5 s.
    assert severities.index(1) == 905 / 5 - 1
    assert set(severities[:180]) == {None, 0}


def test_it_ends_once_labels_are_back():
    said = played(lambda t: "ambiguous" if t <= 1200 else None, 2400)
    severities = [severity(one) for one in said]
    assert severities[1200 // 5 - 1] == 1
    # 60 % of 900 s: ends once 360 s have a label.
    assert severities.index(0, 240) == 1560 / 5 - 1


@pytest.mark.parametrize("reason", ["gap", "too_few_samples", "too_few_channels", "gpu_lost", "no_model"])
def test_time_in_which_nobody_could_know_is_not_counted(reason):
    assert set(played(lambda _: reason)) == {None}
    # Two thirds of the time unseen, the rest with a label.
    said = played(lambda t: None if t % 30 < 10 else reason, 3600)
    assert {severity(one) for one in said} <= {None, 0}


def test_most_of_the_time_labelled_is_fine():
    assert {severity(one) for one in played(lambda t: "ambiguous" if t % 100 < 70 else None)} == {None, 0}


def test_judgements_far_apart_leave_gaps():
    assert {severity(one) for one in played(lambda _: "ambiguous", 36_000, step_s=300)} == {None}
    assert severity(played(lambda _: "ambiguous", 3600, step_s=60)[-1]) == 1


def test_a_gpu_without_labels_is_left_out():
    watched = Card(UnknownWorkloadDetector(UnknownWorkloadConfig()))
    watched.feed(GpuSample, utilization_ratio=0.9)
    assert watched.play(1200, lambda _: None) == [None] * 240


@pytest.mark.parametrize(("key", "value"), [("window_seconds", 0.0), ("abstention_ratio", 1.0), ("judged_ratio", 0.0)])
def test_refuses_what_makes_no_sense(key, value):
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(UnknownWorkloadConfig(), **{key: value})
