"""input_starved on simulated histories: GPUs that wait for data, and GPUs that wait for something else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from agent.clock import Instant
from agent.history import History
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.input_starved import InputStarvedConfig, InputStarvedDetector
from classifier.detectors.step_pace import StepPaces
from classifier.results import Assessment
from classifier.simulator import Scenario, simulate
from tests.classifier.detector_histories import IDLES, WORKS, Script, Shown, severities
from tests.classifier.hosted_node import HostedNode, Rank, ranked
from tests.classifier.test_stalled_collective import decided


def saw(work_s: float = 4, period_s: float = 10, nothing: Shown = IDLES, until_s: float = 1e9) -> Script:
    """Return GPUs that work for `work_s` of every `period_s`."""
    return lambda gpu, t: ranked(WORKS if t > until_s or t % period_s < work_s else nothing, gpu)


def played(script: Script, until_s: float = 480, **options) -> dict[float, tuple[Assessment, ...]]:
    options = {"gpus": 1, "cpu_pressure": lambda _: 0.6, "decisions": decided("training", 0.9)} | options
    detector = InputStarvedDetector(InputStarvedConfig(), StepPaces())
    node = HostedNode((detector,), PowerBaselines(), script, **options)
    return {now.monotonic_s: found for now, found in node.play(until_s)}


def first(said: dict[float, tuple[Assessment, ...]]) -> float | None:
    return next((t for t, found in said.items() if any(severities(found, "input_starved").values())), None)


def reason(said: dict[float, tuple[Assessment, ...]]) -> object:
    return said[max(said)][0].evidence.get("reason")


def test_a_saw_under_cpu_pressure_is_a_warning_after_five_minutes() -> None:
    said = played(saw())
    found = first(said)
    assert found is not None
    assert 240 <= found <= 305  # four fifths of the window have to be seen
    (last,) = said[480]
    assert (last.severity, last.action, reason(said)) == (2, "contact_user", "cpu")
    assert last.evidence["zero_share_ratio"] == pytest.approx(0.6, abs=0.02)
    assert last.evidence["cpu_pressure_ratio"] == pytest.approx(0.6, abs=0.02)
    assert "60 % of the time" in last.summary


def test_it_ends_once_the_data_come() -> None:
    said = played(saw(until_s=400), until_s=800)
    assert severities(said[400], "input_starved") == {0: 2}
    assert severities(said[800], "input_starved") == {0: 0}


def test_busy_loaders_are_a_reason_without_a_label_as_well() -> None:
    ranks = lambda _, __: Rank(1.0, loader_cores=7.6, loaders=8)  # noqa: E731
    said = played(saw(), cpu_pressure=None, ranks=ranks, decisions=lambda _: {})
    assert reason(said) == "loaders"
    assert first(played(saw(), cpu_pressure=None, ranks=lambda _, __: Rank(1.0, loader_cores=3.0, loaders=8))) is None


def test_reading_at_the_limit_is_a_reason() -> None:
    reads = {"filesystem_read": lambda _: 900e6}
    assert reason(played(saw(), cpu_pressure=None, traffic=reads)) == "storage"
    faster_once = {"filesystem_read": lambda t: 3000e6 if t < 60 else 900e6}
    assert first(played(saw(), cpu_pressure=None, traffic=faster_once, until_s=600)) is None


def test_without_a_reason_it_is_nothing_and_without_any_measured_it_is_left_out() -> None:
    said = played(saw(), cpu_pressure=lambda _: 0.1)
    assert severities(said[480], "input_starved") == {0: 0}
    blind = played(saw(), cpu_pressure=None, host=lambda _: None, ranks=lambda _, __: Rank(cores=None))
    assert not any(blind.values())


@pytest.mark.parametrize("label", ["inference", "idle", "other"])
def test_what_is_no_training_waits_for_requests(label: str) -> None:
    assert first(played(saw(), decisions=decided(label, 0.9))) is None


def test_pressure_alone_is_a_reason_without_a_label_only_where_steps_are_seen() -> None:
    assert first(played(saw(), decisions=lambda _: {})) is not None
    rng = random.Random(1)
    bursts = [rng.random() < 0.4 for _ in range(300)]
    requests: Script = lambda gpu, t: ranked(WORKS if bursts[int(t // 3)] else IDLES, gpu)  # noqa: E731
    assert first(played(requests, decisions=lambda _: {})) is None
    assert first(played(requests)) is not None


LOOK_ALIKES: dict[str, Script] = {
    "optimizer_on_the_cpu": saw(nothing=replace(IDLES, pcie_transmit=3e9)),
    "checkpoints_of_half_a_minute": saw(90, 120),
    "evaluation_and_nothing_before": saw(1e9),
    "mostly_idle": saw(0.5, 20),
    "little_waiting": saw(8.5, 10),
}


@pytest.mark.parametrize("script", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes(script: Script) -> None:
    assert first(played(script, until_s=600)) is None


def test_samples_every_five_seconds_are_enough() -> None:
    assert first(played(saw(10, 25), interval_s=5.0, until_s=600)) is not None


@pytest.mark.parametrize("kind", ["offload_training", "rank0_checkpoint", "reinforcement_tuning", "llm_serving"])
def test_simulated_work_that_does_not_starve(kind: str) -> None:
    _, ticks = simulate(Scenario(kind=kind, gpu_count=2, duration_s=600, begin_s=3600), seed=3)
    history, detector = History(), InputStarvedDetector(InputStarvedConfig(), StepPaces())
    for tick in ticks:
        history.ingest(tick)
        found = detector.assess(Instant(tick.monotonic_s, tick.wall_s), history, decided("training", 0.9)(0.0))
        assert not any(a.severity for a in found), found
