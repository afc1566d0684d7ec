"""no_progress on simulated histories: what has gone quiet, and all that looks like it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.no_progress import NoProgressConfig, NoProgressDetector
from classifier.detectors.step_pace import StepPaces
from classifier.results import Assessment
from tests.classifier.detector_histories import IDLES, WAITS, WORKS, Script, Shown, severities
from tests.classifier.hosted_node import HostedNode, Rank, ranked
from tests.classifier.test_stalled_collective import decided

QUIET = replace(IDLES, pcie_transmit=0.0)


def trains_until(end_s: float, then: Shown = QUIET) -> Script:
    """Return ranks in step, with a rhythm of 20 s, that fall quiet."""
    works = [replace(WORKS, watts=watts) for watts in (400, 600)]
    return lambda gpu, t: ranked(works[t % 20 < 12] if 30 < t <= end_s else then if t > end_s else QUIET, gpu)


def idle_from(end_s: float, cores: float = 0.02) -> Callable[[int, float], Rank]:
    return lambda _, t: Rank(cores=1.0 if t <= end_s else cores)


def played(script: Script, until_s: float = 1000, **options) -> dict[float, tuple[Assessment, ...]]:
    options = {"gpus": 2, "ranks": idle_from(500), "interval_s": 5.0} | options
    detector = NoProgressDetector(NoProgressConfig(), StepPaces())
    node = HostedNode((detector,), PowerBaselines(), script, **options)
    return {now.monotonic_s: found for now, found in node.play(until_s)}


def first(said: dict[float, tuple[Assessment, ...]], severity: int = 1) -> float | None:
    worst = {t: max(severities(found, "no_progress").values(), default=0) for t, found in said.items()}
    return next((t for t, found in worst.items() if found >= severity), None)


def test_ranks_that_fall_quiet_together_are_a_warning_after_five_minutes() -> None:
    said = played(trains_until(500))
    # Samples come every 5 s: the first quiet one is that of 505.
    assert first(said) == first(said, 2) == 805
    last = said[1000]
    assert severities(last, "no_progress") == {0: 2, 1: 2}
    (one, _) = last
    assert (one.since_monotonic_s, one.action, one.evidence["reason"]) == (505, "look", "idle")
    assert one.evidence["process_cores"] == pytest.approx(0.02)


def test_work_ends_it() -> None:
    script: Script = lambda gpu, t: trains_until(500)(gpu, t if t <= 900 else t - 500)  # noqa: E731
    said = played(script)
    assert first(said) == 805
    assert severities(said[915], "no_progress") == {0: 0, 1: 0}


def test_one_gpu_needs_a_label_of_training_or_steps_that_are_seen() -> None:
    steady: Script = lambda gpu, t: ranked(WORKS if 30 < t <= 500 else QUIET, gpu)  # noqa: E731
    assert first(played(steady, gpus=1)) is None
    decisions = lambda t: decided("training", 0.9)(t) if t <= 500 else {}  # noqa: E731
    assert first(played(steady, gpus=1, decisions=decisions)) == 805
    assert first(played(trains_until(500), gpus=1, interval_s=1.0)) == 805  # steps of 20 s


def test_steps_that_are_seen_now_and_then_are_those_of_cells() -> None:
    steady: Script = lambda gpu, t: ranked(WORKS if t <= 800 else QUIET, gpu)  # noqa: E731
    script: Script = lambda gpu, t: (trains_until(500) if 30 < t <= 250 else steady)(gpu, t)  # noqa: E731
    assert first(played(script, 1300, gpus=1, interval_s=1.0, ranks=idle_from(800))) is None
    mostly: Script = lambda gpu, t: (trains_until(1000) if 30 < t <= 600 else steady)(gpu, t)  # noqa: E731
    assert first(played(mostly, 1300, gpus=1, interval_s=1.0, ranks=idle_from(800))) == 1105


def test_bursts_with_rests_between_them_are_no_training() -> None:
    def cells(gpu: int, t: float) -> Shown:
        # Steps of 20 s are seen in each burst of 100 s, and 100 s of rest follow.
        return trains_until(500)(gpu, t) if t % 200 < 100 or t > 500 else ranked(QUIET, gpu)

    assert first(played(cells, interval_s=1.0)) is None


@pytest.mark.parametrize("label", ["inference", "other"])
def test_what_served_or_was_something_else_waits_for_work(label: str) -> None:
    assert first(played(trains_until(500), decisions=decided(label, 0.9))) is None


@pytest.mark.parametrize(
    "rank", [Rank(0.02, program="notebook"), Rank(0.02, declared_class="inference")], ids=["notebook", "server"]
)
def test_programs_that_wait_for_people_are_idle(rank: Rank) -> None:
    assert first(played(trains_until(500), ranks=lambda _, t: rank if t > 400 else replace(rank, cores=1.0))) is None


def test_stopped_processes_are_information_of_their_own() -> None:
    said = played(trains_until(500), ranks=lambda _, t: Rank(1.0) if t <= 500 else Rank(0.0, state="T"))
    assert first(said) == 805
    assert first(said, 2) is None
    one = said[1000][0]
    assert (one.evidence["reason"], one.action) == ("stopped", "contact_user")
    assert "stopped" in one.summary


def test_a_core_that_is_kept_busy_is_information_after_ten_minutes() -> None:
    said = played(trains_until(500), until_s=1200, ranks=lambda _, __: Rank(1.0))
    assert first(said) == 1105
    assert first(said, 2) is None
    assert said[1200][0].evidence["reason"] == "polling"


def test_compilers_and_loaders_are_progress() -> None:
    assert (
        first(played(trains_until(500), until_s=1500, ranks=lambda _, __: Rank(1.0, loader_cores=3, loaders=4))) is None
    )


@pytest.mark.parametrize("traffic", ["written", "sent", "nvlink"])
def test_a_job_that_saves_or_moves_data_makes_progress(traffic: str) -> None:
    host = {"written": (300e6, 1e6), "sent": (1e6, 300e6)}.get(traffic, (1e6, 1e6))
    then = replace(QUIET, nvlink=1e9) if traffic == "nvlink" else QUIET
    said = played(trains_until(500, then), host=lambda t: host if t > 500 else (1e6, 1e6))
    assert first(said) is None


def test_quiet_counts_from_the_end_of_what_the_host_wrote() -> None:
    said = played(trains_until(500), until_s=1100, host=lambda t: (300e6, 1e6) if 500 < t <= 600 else (1e6, 1e6))
    found = first(said)
    assert found is not None
    assert 900 <= found <= 910  # the last 5 s of activity end at 604


def test_idle_from_the_start_and_a_job_that_ended_are_no_stalls() -> None:
    assert first(played(lambda gpu, _: ranked(QUIET, gpu), ranks=idle_from(0))) is None
    gone: Script = lambda gpu, t: replace(QUIET, pids=()) if t > 500 else trains_until(500)(gpu, t)  # noqa: E731
    assert first(played(gone)) is None


def test_a_rank_that_is_missed_by_others_that_spin_is_a_stalled_collective_and_not_this() -> None:
    script: Script = lambda gpu, t: ranked(WAITS, gpu) if gpu and t > 500 else trains_until(500)(gpu, t)  # noqa: E731
    assert first(played(script, gpus=3)) is None


def test_another_job_beside_it_does_not_hide_it() -> None:
    rng = random.Random(1)

    def script(gpu: int, t: float) -> Shown:
        return trains_until(500)(gpu, t) if gpu < 2 else ranked(replace(WORKS, watts=rng.uniform(300, 600)), gpu)

    ranks = lambda gpu, t: Rank(1.0 if gpu == 2 or t <= 500 else 0.02)  # noqa: E731
    assert first(played(script, gpus=3, jobs=("a", "a", "b"), ranks=ranks)) == 805
    assert first(played(script, gpus=3, ranks=ranks)) == 805


def test_what_cannot_be_seen_is_left_out() -> None:
    assert all(not found for found in played(trains_until(500), ranks=lambda _, __: Rank(cores=None)).values())
    blind = played(trains_until(500), host=lambda _: None)
    assert severities(blind[500], "no_progress") == {0: 0, 1: 0}
    assert blind[1000] == ()


def test_a_gap_in_telemetry_is_not_quiet() -> None:
    script: Script = lambda gpu, t: None if 500 < t <= 900 else trains_until(9999)(gpu, t)  # noqa: E731
    assert first(played(script, until_s=1000, ranks=lambda _, __: Rank(1.0))) is None


def test_samples_of_every_second_say_the_same() -> None:
    # Quiet from 501, and the last reading of CPU time that holds work comes at 505.
    assert first(played(trains_until(500), interval_s=1.0)) == 805
