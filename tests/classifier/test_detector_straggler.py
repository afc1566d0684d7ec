"""straggler on simulated histories: one GPU that is slower than its peers, and differences that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from agent.clock import Instant
from agent.history import History
from agent.records import GpuHealth, Record
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.step_pace import StepPaces
from classifier.detectors.straggler import StragglerConfig, StragglerDetector
from classifier.results import Assessment
from classifier.simulator import Scenario, simulate
from tests.classifier.detector_histories import IDLES, WORKS, Node, Script, severities
from tests.classifier.hosted_node import HostedNode, ranked

FAST, SLOW = 1.9e9, 1.6e9  # 0.84 of it


def in_step(period_s: float = 20.0) -> Script:
    """Return ranks that move together."""
    works = [replace(WORKS, watts=watts) for watts in (400, 600)]
    return lambda gpu, t: ranked(works[t % period_s < 0.6 * period_s], gpu)


def waiting(gpu: int, t: float) -> Any:
    """Return ranks that move together, of which GPU 1 computes for longer and the others wait for it."""
    return replace(in_step()(gpu, t), sm=0.78 if gpu == 1 else 0.7)


def clocks(slow: int = 1, hertz: float = SLOW, since_s: float = 300) -> Callable[[int, float], Mapping[str, object]]:
    return lambda gpu, t: {"sm_clock_hertz": hertz if gpu == slow and t > since_s else FAST}


def played(script: Script | None = None, until_s: float = 600, **options) -> dict[float, tuple[Assessment, ...]]:
    options = {"gpus": 4, "interval_s": 2.5, "sample": clocks()} | options
    detector = StragglerDetector(StragglerConfig(), StepPaces())
    node = HostedNode((detector,), PowerBaselines(), script or waiting, **options)
    return {now.monotonic_s: found for now, found in node.play(until_s)}


def first(said: dict[float, tuple[Assessment, ...]]) -> float | None:
    return next((t for t, found in said.items() if any(severities(found, "straggler").values())), None)


def test_a_low_clock_is_a_warning_after_two_minutes_and_names_the_gpu() -> None:
    said = played()
    found = first(said)
    assert found is not None
    # At 0.93 the mean of a minute holds about half a minute of it; a look comes every 30 s.
    assert 360 <= found <= 450
    last = said[max(said)]
    assert severities(last, "straggler") == {0: 0, 1: 2, 2: 0, 3: 0}
    one = next(a for a in last if a.severity)
    assert (one.suspect, one.action, one.evidence["cause"]) == (True, "look", "clock")
    assert one.evidence["clock_hertz"] == pytest.approx(SLOW)
    assert one.evidence["peers_clock_hertz"] == pytest.approx(FAST)
    assert "1600 MHz" in one.summary


def test_it_ends_with_its_reason_and_with_the_work() -> None:
    back = lambda gpu, t: clocks()(gpu, t if t <= 500 else 0)  # noqa: E731
    assert severities(played(until_s=660, sample=back)[655], "straggler") == {0: 0, 1: 0, 2: 0, 3: 0}
    ends: Script = lambda gpu, t: ranked(IDLES, gpu) if t > 500 else in_step()(gpu, t)  # noqa: E731
    assert severities(played(ends, until_s=660)[655], "straggler").get(1, 0) == 0


def test_a_clock_that_was_always_low_counts_where_the_driver_says_why() -> None:
    always = clocks(since_s=0)
    assert first(played(sample=always)) is None
    hot = lambda gpu, t: always(gpu, t) | {"clock_event_reasons": ("hw_thermal",) * (gpu == 1)}  # noqa: E731
    assert first(played(sample=hot)) is not None


def test_a_clock_that_falls_and_keeps_nobody_waiting_is_none() -> None:
    assert first(played(in_step())) is None


def test_peers_whose_clock_rises_make_nobody_slow() -> None:
    def rising(gpu: int, t: float) -> Mapping[str, object]:
        return {"sm_clock_hertz": FAST if gpu != 1 and t > 300 else SLOW}

    assert first(played(sample=rising)) is None


def test_without_power_only_a_clock_below_what_power_limits_explain_counts() -> None:
    def guest(ratio: float) -> float | None:
        sample = clocks(hertz=ratio * FAST)
        hidden = ("power_watts", "sm_active_ratio", "nvlink_transmit_bytes_per_second")
        blind = lambda gpu, t: sample(gpu, t) | dict.fromkeys(hidden)  # noqa: E731
        return first(played(sample=blind, jobs=("a",) * 4))

    assert guest(0.75) is not None
    assert guest(0.88) is None


def test_a_few_per_cent_of_power_capping_are_none() -> None:
    assert first(played(sample=clocks(hertz=0.95 * FAST))) is None


def test_a_clock_that_falls_while_the_board_is_at_its_power_limit_is_none() -> None:
    sample, limit = clocks(hertz=0.9 * FAST), lambda watts: lambda *_: {"power_limit_watts": watts}
    assert first(played(sample=sample, limits=limit(700.0))) is not None  # it draws 400 to 600 W
    assert first(played(sample=sample, limits=limit(610.0))) is None


def test_a_board_whose_clock_differs_all_the_time_is_none() -> None:
    def spread(gpu: int, t: float) -> Mapping[str, object]:
        # The full clock for a moment, then now above and now below the bound.
        return {"sm_clock_hertz": FAST * (1.0 if gpu != 1 or t < 60 else 0.95 if t % 400 < 200 else 0.915)}

    assert first(played(sample=spread, until_s=1300)) is None


def test_more_activity_with_the_same_work_is_a_straggler_and_with_more_work_is_none() -> None:
    def busy(factor: float) -> Script:
        def script(gpu: int, t: float):
            shown = in_step()(gpu, t)
            return replace(shown, sm=0.9, tensor=0.4 * factor, dram=0.35 * factor) if gpu == 2 and t > 300 else shown

        return script

    same = played(busy(1.0), sample=lambda _, __: {})
    assert severities(same[max(same)], "straggler") == {0: 0, 1: 0, 2: 2, 3: 0}
    one = next(a for a in same[max(same)] if a.severity)
    assert one.evidence["cause"] == "unknown"
    assert one.evidence["sm_active_ratio"] == pytest.approx(0.9)
    assert first(played(busy(1.3), sample=lambda _, __: {})) is None


def test_half_of_a_group_is_nobodys_straggler() -> None:
    assert first(played(sample=lambda gpu, _: {"sm_clock_hertz": SLOW if gpu < 2 else FAST})) is None


def test_independent_gpus_are_no_peers() -> None:
    def script(gpu: int, t: float):
        return ranked(replace(WORKS, watts=400 if t % (14 + 5 * gpu) < 7 else 600), gpu)

    assert first(played(script)) is None
    assert first(played(jobs=("a", "b", "c", "d"))) is None


def test_two_jobs_side_by_side_are_two_groups() -> None:
    script: Script = lambda gpu, t: in_step(20 if gpu < 2 else 26)(gpu, t)  # noqa: E731
    sample = lambda gpu, _: {"sm_clock_hertz": FAST if gpu < 2 else 1.7e9}  # noqa: E731
    assert first(played(script, jobs=("a", "a", "b", "b"), sample=sample)) is None


def health(**slow: int) -> Callable[[Node, Instant], Iterator[Record]]:
    def more(node: Node, now: Instant) -> Iterator[Record]:
        for gpu in range(node.gpus):
            values = slow if gpu == 1 and node.now_s > 300 else dict.fromkeys(slow, 0)
            yield GpuHealth(monotonic_s=now.monotonic_s, wall_s=now.wall_s, key=node.key(gpu), **values)

    return more


CAUSES = {
    "thermal": {"sample": lambda gpu, t: clocks()(gpu, t) | {"clock_event_reasons": ("hw_thermal",) * (gpu == 1)}},
    "power_limit": {"limits": lambda gpu, _: {"power_limit_watts": 500.0 if gpu == 1 else 700.0}},
    "pcie_width": {"limits": lambda gpu, _: {"pcie_width": 4 if gpu == 1 else 16}},
    "pcie_generation": {"limits": lambda gpu, _: {"pcie_generation": 1 if gpu == 1 else 5}},
    "hbm": {"more": health(ecc_corrected_volatile_total=9)},
    "link_errors": {"more": health(nvlink_replay_errors_total=9)},
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named_where_it_shows(cause: str) -> None:
    said = played(until_s=500, **CAUSES[cause])
    assert {a.evidence["cause"] for a in said[max(said)] if a.severity} == {cause}


def test_without_clock_and_activity_there_is_no_assessment() -> None:
    script: Script = lambda gpu, t: replace(in_step()(gpu, t), sm=None)  # noqa: E731
    assert not any(played(script, sample=lambda _, __: {}).values())


def test_nvidia_smi_columns_every_five_seconds_are_enough() -> None:
    missing = {"sm": None, "tensor": None, "dram": None, "nvlink": None, "pcie_transmit": None}
    script: Script = lambda gpu, t: replace(in_step(40)(gpu, t), **missing)  # noqa: E731
    found = first(played(script, interval_s=5.0, until_s=700))
    assert found is not None
    assert found <= 480


@pytest.mark.parametrize("kind", ["tensor_pipeline_training", "expert_training", "rank0_checkpoint", "vision_training"])
def test_simulated_ranks_of_healthy_jobs_are_no_stragglers(kind: str) -> None:
    # Seed 2 locks the clock of one of them.
    _, ticks = simulate(Scenario(kind=kind, gpu_count=4, duration_s=400, begin_s=3600), seed=2)
    history, detector = History(), StragglerDetector(StragglerConfig(), StepPaces())
    for tick in ticks:
        history.ingest(tick)
        found = detector.assess(Instant(tick.monotonic_s, tick.wall_s), history, {})
        assert not any(a.severity for a in found), found
