"""The time of a step from signals with known steps: hand-made, and simulated ones with all their noise."""

from __future__ import annotations

import pytest

from agent.clock import Instant
from agent.history import History
from classifier.detectors.step_pace import StepPaceConfig, StepPaces
from classifier.simulator import Scenario, simulate
from tests.classifier.paced_node import PacedNode, Pacing


def found(node: PacedNode, until_s: float = 240.0) -> StepPaces:
    paces = StepPaces()
    for now in node.play(until_s):
        paces.update(now, node.history)
    return paces


@pytest.mark.parametrize("step_s", [0.4, 0.73, 1.0, 5.8, 14.0])
def test_a_step_of_third_of_a_second_to_twenty_is_found_in_power_of_the_moment(step_s: float) -> None:
    node = PacedNode(lambda _: Pacing(step_s), gpus=2)
    paces = found(node)
    for gpu in range(2):
        pace = paces.pace(node.key(gpu), node.now_s)
        assert pace is not None
        assert pace.period_s == pytest.approx(step_s, rel=0.02)
        assert pace.confidence_ratio > 0.6
        assert pace.channel == "power_fast_watts"


@pytest.mark.parametrize("step_s", [5.8, 9.0])
def test_without_it_steps_of_more_than_four_samples_are_found_in_readings_of_a_second(step_s: float) -> None:
    node = PacedNode(lambda _: Pacing(step_s), fast=False)
    assert found(node).step_seconds(node.key(0), node.now_s) == pytest.approx(step_s, rel=0.02)


@pytest.mark.parametrize("step_s", [0.37, 0.42, 0.9, 1.3, 2.1])
def test_faster_steps_are_not_seen_in_readings_of_a_second_rather_than_at_a_wrong_period(step_s: float) -> None:
    node = PacedNode(lambda _: Pacing(step_s), fast=False)
    assert found(node).step_seconds(node.key(0), node.now_s) is None


def test_steady_power_has_no_steps() -> None:
    node = PacedNode(lambda _: Pacing(None), gpus=1)
    assert found(node).step_seconds(node.key(0), node.now_s) is None


def test_a_pace_is_not_known_any_more_once_the_steps_are_gone() -> None:
    node = PacedNode(lambda t: Pacing(1.0 if t <= 200 else None))
    paces = StepPaces()
    for now in node.play(330):
        paces.update(now, node.history)
        if now.monotonic_s == 200:
            assert paces.step_seconds(node.key(0), 200) == pytest.approx(1.0, rel=0.02)
    # The last window with steps enough in it ends before 260, and 70 s later nothing holds any more.
    assert paces.step_seconds(node.key(0), 330) is None


def test_other_processes_begin_anew() -> None:
    node = PacedNode(lambda t: Pacing(1.0, pids=(101,) if t <= 200 else (202,)))
    paces = StepPaces(StepPaceConfig(judge_seconds=5))
    known = {}
    for now in node.play(260):
        paces.update(now, node.history)
        known[now.monotonic_s] = paces.pace(node.key(0), now.monotonic_s)
    assert known[200] is not None
    assert known[260] is not None


def test_it_looks_every_twenty_seconds_however_often_it_is_asked() -> None:
    node = PacedNode(lambda _: Pacing(1.0))
    paces = StepPaces()
    looks = set()
    for now in node.play(100, judge_s=1.0):
        paces.update(now, node.history)
        looks.add(paces.judged_s)
    assert sorted(looks) == [1, 21, 41, 61, 81]


def test_samples_five_seconds_apart_show_steps_of_minutes_at_most_and_never_wrong_ones() -> None:
    node = PacedNode(lambda _: Pacing(1.0), fast=False, interval_s=5.0)
    assert found(node, 900).step_seconds(node.key(0), node.now_s) is None


@pytest.mark.parametrize(("kind", "step_s"), [("data_parallel_training", 2.3), ("offload_training", 3.5)])
def test_simulated_steps_are_found_with_the_noise_of_sensors(kind: str, step_s: float) -> None:
    _, ticks = simulate(
        Scenario(kind=kind, gpu_count=2, duration_s=200, begin_s=3600, parameters={"step_s": step_s}), seed=3
    )
    history, paces = History(), StepPaces()
    for tick in ticks:
        history.ingest(tick)
        paces.update(Instant(tick.monotonic_s, tick.wall_s), history)
    assert [paces.step_seconds(key, tick.monotonic_s) for key in history.gpus] == pytest.approx([step_s] * 2, rel=0.05)
