"""low_utilization on simulated histories, tick by tick."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.records import GpuKey
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.low_utilization import LowUtilizationConfig, LowUtilizationDetector
from classifier.results import Decision
from tests.classifier.detector_histories import IDLES, WORKS, Node, Script, Shown, severities

#: Sixty times faster than the defaults: info after 30 s would be too coarse for 5 s calls, so 120 s and 480 s.
FAST = LowUtilizationConfig(info_seconds=120, warning_seconds=480, serving_memory_seconds=1000)


def node(script: Script, config: LowUtilizationConfig = FAST, **options) -> Node:
    baselines = PowerBaselines()
    return Node((LowUtilizationDetector(config, baselines),), baselines, script, gpus=1, **options)


def timeline(played) -> dict[float, int | None]:
    return {now.monotonic_s: severities(a, "low_utilization").get(0) for now, a in played}


def first(times: dict[float, int | None], severity: int) -> float | None:
    return next((t for t, s in times.items() if s is not None and s >= severity), None)


def test_held_but_idle_is_information_then_a_warning() -> None:
    played = list(node(lambda _, __: IDLES).play(600))
    times = timeline(played)
    # The first call at 5 s counts one sample, every other call five: 120 s observed at 125, 480 s at 485.
    assert first(times, 1) == 125
    assert first(times, 2) == 485
    (last,) = played[-1][1]
    assert last.action == "contact_user"
    assert last.evidence["memory_held_bytes"] == 40e9
    assert last.evidence["context_idle_watts"] == 120
    assert "held but idle for 10 min" in last.summary


def test_the_defaults_are_30_min_and_2_h() -> None:
    times = timeline(node(lambda _, __: IDLES, LowUtilizationConfig(), interval_s=5).play(7300))
    assert first(times, 1) == pytest.approx(1800, abs=10)
    assert first(times, 2) == pytest.approx(7200, abs=10)


def test_work_ends_it() -> None:
    times = timeline(node(lambda _, t: WORKS if 300 < t <= 330 else IDLES).play(460))
    assert times[300] == 1
    assert times[320] == 0  # 15 s of excess work are allowed, and then it starts anew
    assert first({t: s for t, s in times.items() if t > 320}, 1) == pytest.approx(330 + 120, abs=10)


def test_rare_short_work_is_still_idle_and_frequent_short_work_is_not() -> None:
    rare = timeline(node(lambda _, t: WORKS if t % 50 < 2 else IDLES).play(600))  # 4 % of samples
    often = timeline(node(lambda _, t: WORKS if t % 10 < 2 else IDLES).play(600))  # 20 % of samples
    assert first(rare, 1) is not None
    assert first(often, 1) is None


@pytest.mark.parametrize(
    "shown",
    [
        replace(IDLES, pids=()),  # nobody holds it
        replace(IDLES, used_bytes=600_000_000),  # too little memory
        replace(IDLES, pids=None, used_bytes=3_000_000),  # process list unknown, memory free
    ],
)
def test_a_gpu_that_nobody_holds_is_not_held_idle(shown: Shown) -> None:
    assert set(timeline(node(lambda _, __: shown).play(600)).values()) == {0}


def test_memory_in_use_stands_in_for_an_unknown_process_list() -> None:
    assert first(timeline(node(lambda _, __: replace(IDLES, pids=None)).play(600)), 1) == 125


def test_without_utilization_and_sm_activity_nothing_is_said() -> None:
    shown = replace(IDLES, utilization=None, sm=None)
    assert set(timeline(node(lambda _, __: shown).play(300)).values()) == {None}


def test_sm_activity_stands_in_for_utilization_on_a_mig_instance() -> None:
    held, busy = replace(IDLES, utilization=None, watts=None), replace(WORKS, utilization=None, watts=None)
    assert first(timeline(node(lambda _, __: held).play(600)), 1) == 125
    assert set(timeline(node(lambda _, __: busy).play(600)).values()) == {0}


def test_a_finding_starts_no_earlier_than_the_first_sample() -> None:
    """Asked at the first tick of all, 1 s, when the usual distance of samples is not known yet."""
    player = node(lambda _, __: IDLES, interval_s=1.0, judge_s=1.0)
    assessments = [a for _, found in player.play(200) for a in found if a.severity]
    assert {a.since_monotonic_s for a in assessments} == {1.0}


def test_power_well_above_context_idle_power_is_work_that_utilization_does_not_show() -> None:
    script: Script = lambda _, t: IDLES if t <= 60 else replace(IDLES, watts=200)  # noqa: E731
    # Context-idle power 120 W was learned first; the range to the limit of 700 W is 580 W, 5 % of it 29 W.
    assert first(timeline(node(script).play(130)), 1) is None


def test_a_gap_neither_counts_nor_ends_it() -> None:
    times = timeline(node(lambda _, t: None if 200 < t <= 400 else IDLES).play(800))
    assert times[200] == 1
    assert times[300] is None
    assert times[405] == 1
    assert first(times, 2) == pytest.approx(680, abs=10)  # 200 s of gap later than 480


def test_a_server_at_night_is_left_alone_for_as_long_as_it_is_remembered() -> None:
    def decide(t: float) -> dict[GpuKey, Decision]:
        key = GpuKey(0, "GPU-00000000")
        label = "inference" if t <= 60 else "idle"
        return {
            key: Decision(
                key=key, monotonic_s=t, wall_s=t, workload=label, probabilities=None, telemetry_probabilities=None,
                window_s=60, reason=None, since_monotonic_s=0, since_wall_s=0,
            )
        }  # fmt: skip

    times = timeline(node(lambda _, __: IDLES, decisions=decide).play(1200))
    assert first(times, 1) == 1065  # last seen serving at 60, remembered for 1000 s
