"""fail_slow on hand-made steps, and on simulated training that only looks like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest

from agent.clock import Instant
from agent.history import History
from agent.records import Tick
from classifier.detectors.fail_slow import FailSlowConfig, FailSlowDetector
from classifier.detectors.step_pace import StepPaces
from classifier.results import Assessment
from classifier.simulator import Scenario, simulate
from tests.classifier.paced_node import PacedNode, Pacing

QUICK = FailSlowConfig(relearn_seconds=400)


def timeline(pacing: Callable[[float], Pacing], until_s: float, config=QUICK, **options) -> dict[float, Assessment]:
    """Return what is said of GPU 0 by the second; nothing where it is left out."""
    node = PacedNode(pacing, **options)
    detector = FailSlowDetector(config, StepPaces())
    said = {}
    for now in node.play(until_s):
        for assessment in detector.assess(now, node.history, {}):
            said[now.monotonic_s] = assessment
    return said


def first(said: dict[float, Assessment], severity: int = 1) -> float | None:
    return next((t for t, a in said.items() if a.severity >= severity), None)


def slower(factor: float, from_s: float = 500.0, until_s: float = 1e9) -> Callable[[float], Pacing]:
    return lambda t: Pacing(0.8 * factor if from_s < t <= until_s else 0.8)


def test_a_quarter_more_is_called_after_one_to_three_minutes_with_its_numbers() -> None:
    said = timeline(slower(1.25), 700)
    found = first(said)
    assert found is not None
    # The window of 60 s holds as much of both paces at 530; from then on a minute at least.
    assert 580 <= found <= 680
    last = said[700]
    assert (last.severity, last.action) == (2, "look")
    assert last.evidence["step_seconds"] == pytest.approx(1.0, rel=0.02)
    assert last.evidence["usual_step_seconds"] == pytest.approx(0.8, rel=0.02)
    assert last.evidence["slowdown_ratio"] == pytest.approx(1.25, rel=0.02)
    assert last.evidence["work_of_step_ratio"] == pytest.approx(1.0, rel=0.05)
    assert 500 <= last.since_monotonic_s <= 560
    assert "1.25 times the 0.80 s" in last.summary


def test_twelve_per_cent_takes_longer_and_five_per_cent_is_never_called() -> None:
    found = first(timeline(slower(1.12), 900))
    assert found is not None
    assert 600 <= found <= 760
    assert first(timeline(slower(1.045), 1100)) is None


def test_a_period_that_is_seen_now_and_then_is_no_step() -> None:
    # Requests: alike for some minutes, then others and the same in turn, then slower ones.
    turns = lambda t: 1.0 if t > 1480 else 0.8 if t < 400 or t % 240 < 120 else 0.6  # noqa: E731
    assert first(timeline(lambda t: Pacing(turns(t)), 1800)) is None
    assert first(timeline(slower(1.25, 1480), 1800)) is not None


def test_half_a_minute_of_slow_steps_is_nothing() -> None:
    assert first(timeline(slower(1.5, 500, 530), 800)) is None


def test_it_ends_when_the_steps_are_as_before() -> None:
    said = timeline(slower(1.3, 500, 800), 1000)
    assert said[800].severity == 2
    # A window without slow steps is full at 860; two looks later it is over.
    assert {a.severity for t, a in said.items() if t >= 920} == {0}


def test_a_new_pace_that_stays_becomes_the_usual_one_and_ends_the_finding() -> None:
    said = timeline(slower(1.3), 1500)
    assert said[800].severity == 2
    assert said[1500].severity == 0
    assert said[max(said)].severity == 0
    # What is slower than that again is found again.
    again = timeline(lambda t: Pacing(0.8 if t <= 500 else 1.04 if t <= 1500 else 1.35), 1800)
    assert first({t: a for t, a in again.items() if t > 1500}) is not None


def test_another_job_with_slower_steps_is_no_slow_job() -> None:
    said = timeline(lambda t: Pacing(0.8) if t <= 500 else Pacing(1.2, pids=(202,)), 1100)
    assert first(said) is None


def test_a_job_that_goes_ends_the_finding() -> None:
    said = timeline(lambda t: dataclasses.replace(slower(1.3)(t), pids=(101,) if t <= 800 else (202,)), 820)
    assert said[795].severity == 2
    assert next(a.severity for t, a in said.items() if t > 800) == 0


@pytest.mark.parametrize("work", [1.6, 0.2], ids=["longer_sequences", "evaluation"])
def test_steps_with_other_work_in_them_are_other_steps(work: float) -> None:
    said = timeline(lambda t: Pacing(0.8) if t <= 500 else Pacing(1.1, work=work), 1000)
    assert first(said) is None


def test_steps_that_grow_with_their_work_are_larger_ones() -> None:
    # As much is done in a second as before.
    assert first(timeline(lambda t: Pacing(0.8 * 1.12, work=1.12) if t > 500 else Pacing(0.8), 900)) is None


def test_long_steps_that_become_longer_do_not_vanish() -> None:
    found = first(timeline(lambda t: Pacing(21.0 if t > 700 else 12.0), 1100))
    assert found is not None
    assert found <= 1000


def test_a_step_that_shows_as_two_halves_is_still_the_same_step() -> None:
    said = timeline(lambda t: Pacing(0.8) if t <= 500 else Pacing(0.6, work=0.5), 800)
    assert first(said) is not None
    assert said[800].evidence["step_seconds"] == pytest.approx(1.2, rel=0.02)
    assert said[800].evidence["slowdown_ratio"] == pytest.approx(1.5, rel=0.02)
    # As long as before, and a short step with little work in it.
    assert first(timeline(lambda t: Pacing(0.8) if t <= 500 else Pacing(0.4, work=0.5), 1000)) is None
    assert first(timeline(lambda t: Pacing(0.8) if t <= 500 else Pacing(0.6, work=0.2), 1000)) is None


def test_longer_periods_that_are_not_alike_are_no_steps() -> None:
    assert first(timeline(lambda t: Pacing(0.8) if t <= 500 else Pacing(1.0 if t % 140 < 70 else 1.3), 1100)) is None


def test_accumulation_that_doubles_the_step_is_no_slow_step() -> None:
    assert first(timeline(lambda t: Pacing(0.8) if t <= 500 else Pacing(1.6, work=2.0), 1000)) is None


def test_a_pause_of_two_minutes_for_a_checkpoint_is_nothing() -> None:
    assert first(timeline(lambda t: Pacing(None if t % 400 > 300 else 0.8), 1300)) is None


@pytest.mark.parametrize("kept", ["memory_utilization_ratio", "nvlink_transmit_bytes_per_second"])
def test_one_measure_of_work_is_enough_and_none_is_not(kept: str) -> None:
    every = {"memory_utilization_ratio", "nvlink_transmit_bytes_per_second", "tensor_active_ratio"}
    assert first(timeline(slower(1.25), 700, without=tuple(every - {kept}))) is not None
    assert timeline(slower(1.25), 700, without=tuple(every)) == {}


def test_nvidia_smi_columns_show_steps_of_seconds_later() -> None:
    without = ("nvlink_transmit_bytes_per_second", "tensor_active_ratio", "sm_clock_hertz", "memory_clock_hertz")
    pacing = lambda t: Pacing(6.0 if t <= 700 else 7.8)  # noqa: E731
    said = timeline(pacing, 1100, fast=False, without=without, usual_s=6.0)
    found = first(said)
    assert found is not None
    assert 760 <= found <= 1060  # a window of 180 s has to forget the old pace first


def test_steps_that_are_not_seen_are_left_out() -> None:
    assert timeline(slower(1.25), 700, fast=False) == {}  # 0.8 s in readings of a second
    assert timeline(lambda _: Pacing(None), 700) == {}


def findings(ticks: Iterable[Tick]) -> list[tuple[float, Assessment]]:
    history, detector = History(), FailSlowDetector(FailSlowConfig(), StepPaces())
    found, next_s = [], 5.0
    for tick in ticks:
        history.ingest(tick)
        if tick.monotonic_s >= next_s:
            next_s += 5.0
            now = Instant(tick.monotonic_s, tick.wall_s)
            found += [(tick.monotonic_s, a) for a in detector.assess(now, history, {}) if a.severity]
    return found


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("data_parallel_training", {"step_s": 2.0, "evaluates": 1.0, "eval_every_s": 240.0}),
        ("offload_training", {"step_s": 3.5}),
        ("rank0_checkpoint", {"save_every_s": 120.0}),
        ("reinforcement_tuning", {}),
        ("llm_serving", {}),
    ],
)
def test_simulated_work_without_a_fault_is_never_slow(kind: str, parameters: dict[str, float]) -> None:
    scenario = Scenario(kind=kind, gpu_count=2, duration_s=1500, begin_s=3600, parameters=parameters)
    assert findings(simulate(scenario, seed=4)[1]) == []
