"""stalled_collective where processes are seen: stopped and compiling ranks, stalls of young jobs, and few channels."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.clock import Instant
from agent.records import GpuKey
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.stalled_collective import StalledCollectiveConfig, StalledCollectiveDetector
from classifier.results import Assessment, Decision
from tests.classifier.detector_histories import IDLES, WAITS, WORKS, Node, Script, Shown, severities
from tests.classifier.hosted_node import HostedNode, Rank, ranked
from tests.classifier.test_stalled_collective import first

Deciding = Callable[[float], dict[GpuKey, Decision]]
Played = list[tuple[Instant, tuple[Assessment, ...]]]


def stall_at(stall_s: float, odd: int | None = None) -> Script:
    def script(gpu: int, t: float) -> Shown:
        shown = IDLES if t <= 30 else WORKS if t <= stall_s else IDLES if gpu == odd else WAITS
        return ranked(shown, gpu)

    return script


def played(script: Script, until_s: float, **options) -> Played:
    baselines = PowerBaselines()
    detector = StalledCollectiveDetector(StalledCollectiveConfig(), baselines)
    node = HostedNode((detector,), baselines, script, **({"gpus": 2} | options))
    return list(node.play(until_s))


def reasons(said: Played, since_s: float = 0.0) -> set[object]:
    return {a.evidence["reason"] for now, found in said for a in found if a.severity and now.monotonic_s > since_s}


def rank_from(start_s: float, then: Rank, gpu: int = 0) -> Callable[[int, float], Rank]:
    return lambda one, t: then if one == gpu and t > start_s else Rank(1.0)


def test_spinning_processes_change_nothing() -> None:
    assert first(played(stall_at(300), 400, ranks=lambda _, __: Rank(1.0)), "stalled_collective", 3) == 340


@pytest.mark.parametrize("odd", [None, 0], ids=["all_spin", "one_is_missing"])
@pytest.mark.parametrize(
    "compiling", [Rank(1.0, loader_cores=4, loaders=16), Rank(6.0)], ids=["in_children", "in_threads"]
)
def test_a_rank_that_compiles_while_the_others_wait_is_a_wait(odd: int | None, compiling: Rank) -> None:
    said = played(stall_at(300, odd), 880, ranks=rank_from(300, compiling))
    assert first(said, "collective_wait", 1) == 320
    assert first(said, "stalled_collective", 1) is None
    assert "host_cpu_active" in reasons(said, 330)
    # Not for ever: what lasts longer than ten minutes and twice any earlier wait is a stall all the same.
    later = played(stall_at(200, odd), 850, ranks=rank_from(200, compiling), interval_s=5.0)
    assert first(later, "stalled_collective", 3) is not None


def test_loaders_that_were_there_before_are_no_compilers() -> None:
    said = played(stall_at(300), 400, ranks=lambda _, __: Rank(1.0, loader_cores=6, loaders=8))
    assert first(said, "stalled_collective", 3) == 340


@pytest.mark.parametrize(("cores", "called"), [(1.0, 340), (2.5, 425)])
def test_an_odd_one_whose_process_computes_is_given_two_minutes(cores: float, called: float) -> None:
    # As rank 0 that computes a metric on the CPU; with one core it may as well spin.
    said = played(stall_at(300, 0), 480, gpus=4, ranks=rank_from(300, Rank(cores)))
    assert first(said, "stalled_collective", 3) == called


@pytest.mark.parametrize(
    ("jobs", "called"),
    [
        (("slurm:1",) * 4, 905),  # half of its GPUs generate, the others wait for them
        (("slurm:1", "slurm:1", "slurm:2", "slurm:2"), 340),
        (("process:1000",) * 4, 340),  # a user may run two jobs
    ],
)
def test_gpus_of_the_same_job_that_work_explain_a_wait(jobs: tuple[str, ...], called: float) -> None:
    def script(gpu: int, t: float) -> Shown:
        return stall_at(300)(gpu, t) if gpu < 2 else ranked(IDLES if t <= 30 else WORKS, gpu)

    said = played(script, 920, gpus=4, jobs=jobs)
    assert first(said, "stalled_collective", 3) == called
    assert ("others_work" in reasons(said)) == (called == 905)


def test_a_wait_with_host_io_is_no_stall_before_it_is_longer_than_those_that_ended() -> None:
    """Uploads of 100 s, too slow to be seen all the time: the first one now and then, the later ones at the start."""

    def script(gpu: int, t: float) -> Shown:
        is_waiting = 400 < t <= 500 or 900 < t <= 1000 or t > 1400
        return ranked(IDLES if t <= 30 else WAITS if is_waiting else WORKS, gpu)

    active = [(402, 410), (440, 450), (480, 490), (902, 906), (1402, 1406)]

    def host(t: float) -> tuple[float, float]:
        return 1e6, 200e6 if any(start < t <= end for start, end in active) else 1e6

    said = played(script, 1600, host=host)
    # The third wait lasts on: 10 s more than the longest before.
    assert first(said, "stalled_collective", 1) == first(said, "stalled_collective", 3) == 1515


@pytest.mark.parametrize(("cores", "called"), [(0.02, 340), (1.0, 425), (None, 425)])
def test_an_odd_one_that_reads_a_little_may_save_unless_its_process_is_seen_to_take_no_cpu(
    cores: float | None, called: float
) -> None:
    def script(gpu: int, t: float) -> Shown:
        shown = stall_at(300, 0)(gpu, t)
        return replace(shown, utilization=0.04) if gpu == 0 and t > 300 else shown

    ranks = rank_from(300, Rank(cores)) if cores is not None else lambda _, __: Rank(None)
    said = played(script, 480, gpus=4, ranks=ranks)
    assert first(said, "stalled_collective", 3) == called


@pytest.mark.parametrize("state", ["T", "t"])
def test_stopped_processes_make_it_information(state: str) -> None:
    said = played(stall_at(300), 1200, ranks=rank_from(299, Rank(0.0, state=state)), interval_s=5.0)
    assert first(said, "collective_wait", 1) is not None
    assert first(said, "collective_wait", 2) is None
    assert first(said, "stalled_collective", 1) is None
    assert reasons(said, 330) == {"stopped"}


def test_a_debugger_that_looks_at_a_stall_does_not_end_it() -> None:
    said = dict(played(stall_at(300), 420, ranks=rank_from(370, Rank(0.0, state="t"))))
    last = next(found for now, found in said.items() if now.monotonic_s == 420)
    assert severities(last, "stalled_collective") == {0: 3, 1: 3}


def test_a_stall_of_a_young_job_is_called_after_three_minutes_where_all_is_seen_to_be_quiet() -> None:
    said = played(stall_at(100), 400)  # work from 31 to 100, waiting samples from 101
    assert first(said, "collective_wait", 1) == 165
    assert first(said, "stalled_collective", 3) == 285
    assert severities(said[-1][1], "stalled_collective") == {0: 3, 1: 3}
    assert severities(said[-1][1], "collective_wait") == {0: 0, 1: 0}
    ended = dict(played(lambda gpu, t: ranked(WORKS, gpu) if t > 300 else stall_at(100)(gpu, t), 320))
    last = next(found for now, found in ended.items() if now.monotonic_s == 320)
    assert severities(last, "stalled_collective") == {0: 0, 1: 0}


EXPLAINED = {
    "cpu_is_not_seen": {"ranks": lambda _, __: Rank(cores=None)},
    "a_rank_compiles": {"ranks": lambda gpu, _: Rank(1.0, loader_cores=3.0 * (gpu == 0))},
    "host_io_is_not_seen": {"host": lambda _: None},
    "data_are_read": {"traffic": {"filesystem_read": lambda t: 400e6 if t > 100 else 1e6}},
    "the_missing_rank_computes": {"script": stall_at(100, 0)},
    "one_gpu": {"gpus": 1},
}


@pytest.mark.parametrize("options", EXPLAINED.values(), ids=EXPLAINED)
def test_a_wait_of_a_young_job_that_may_be_explained_stays_information(options: dict[str, object]) -> None:
    options = {"script": stall_at(100), "interval_s": 2.5} | options
    said = played(options.pop("script"), 700, **options)
    assert first(said, "collective_wait", 2) is None
    assert first(said, "stalled_collective", 1) is None


def test_nvidia_smi_columns_every_five_seconds_find_it_in_a_minute() -> None:
    missing = {"tensor": None, "dram": None, "sm": None, "nvlink": None, "pcie_transmit": None, "pids": None}
    script: Script = lambda gpu, t: replace(stall_at(400)(gpu, t), **missing)  # noqa: E731
    found = first(played(script, 600, interval_s=5.0, ranks=lambda _, __: Rank(cores=None)), "stalled_collective", 3)
    assert found is not None
    assert found <= 460


@pytest.mark.parametrize("share", [24 / 132, 8 / 132, 1 / 132, 32 / 148])
def test_a_kernel_that_holds_some_multiprocessors_waits(share: float) -> None:
    script: Script = lambda gpu, t: replace(stall_at(300)(gpu, t), sm=share if t > 300 else 0.7)  # noqa: E731
    assert first(played(script, 360, interval_s=2.5), "stalled_collective", 3) is not None


def test_one_gpu_of_a_node_is_told_by_the_silence_of_its_fabric() -> None:
    def alone(silent: bool) -> Node:
        script: Script = lambda gpu, t: ranked(IDLES, gpu) if gpu else stall_at(400)(gpu, t)  # noqa: E731
        fabric = {"infiniband": lambda t: 0.0 if silent and t > 400 else 5e9}
        return played(script, 500, traffic=fabric, ranks=lambda _, __: Rank(cores=None))

    assert first(alone(silent=True), "stalled_collective", 3) is not None
    assert first(alone(silent=False), "stalled_collective", 3) is None


def served_until(idle_s: float, load: float = 0.7, rest: tuple[float, float] = (0.0, 0.0)) -> Script:
    """Return a tensor-parallel server (SIGNALS.md 3.2): requests, and from `idle_s` on workers that spin.

    Utilisation follows the requests of each second; rank 0, which waits for requests, is at rest. `rest` is a span of
    waiting before.
    """

    def script(gpu: int, t: float) -> Shown:
        if t > idle_s or rest[0] < t <= rest[1]:
            return ranked(WAITS if gpu else IDLES, gpu)
        busy = min(1.0, load * random.Random(f"{gpu} {t}").lognormvariate(0.0, 0.3)) if t > 30 else 0.0
        return ranked(replace(WORKS, utilization=busy, watts=150 + 350 * busy, tensor=0.1 * busy), gpu)

    return script


@pytest.mark.parametrize("load", [0.6, 0.7, 0.8])
def test_a_server_between_requests_is_never_critical_without_a_label(load: float) -> None:
    """GLM-130B issue 32: hours at 100 %. No label says what it is."""
    said = played(
        served_until(400, load), 2800, gpus=4, interval_s=2.0, ranks=lambda gpu, _: Rank(1.0 if gpu else 0.05)
    )
    assert first(said, "stalled_collective", 1) is None
    assert first(said, "collective_wait", 2) == pytest.approx(465, abs=5)
    assert reasons(said, 465) == {"bursts"}


def test_a_server_that_was_idle_before_is_a_warning_after_twice_that_long() -> None:
    said = played(served_until(1000, rest=(400, 550)), 1400, gpus=4)
    assert first([one for one in said if one[0].monotonic_s > 900], "collective_wait", 2) == pytest.approx(1305, abs=10)
    assert first(said, "stalled_collective", 1) is None


def test_a_server_that_is_young_is_not_critical_either() -> None:
    said = played(served_until(100), 600, ranks=lambda gpu, _: Rank(1.0 if gpu else 0.05))
    assert first(said, "collective_wait", 1) is not None
    assert first(said, "stalled_collective", 1) is None


def declared(workload: str, probability: float, declared_class: str | None = None) -> Deciding:
    def decide(t: float) -> dict[GpuKey, Decision]:
        probabilities = dict.fromkeys(("training", "inference", "idle", "other"), (1 - probability) / 3)
        probabilities[workload if workload in probabilities else "training"] = probability
        return {
            (key := GpuKey(gpu, f"GPU-{gpu:08d}")): Decision(
                key=key, monotonic_s=t, wall_s=t, workload=workload, probabilities=probabilities, reason=None,
                telemetry_probabilities=probabilities, window_s=60, since_monotonic_s=0, since_wall_s=0,
                declared_class=declared_class,
            )
            for gpu in range(4)
        }  # fmt: skip

    return decide


@pytest.mark.parametrize(
    ("decisions", "is_called"),
    [
        (declared("training", 0.9), True),
        (declared("unknown", 0.5, "training"), True),
        (declared("training", 0.9, "inference"), False),
        (declared("training", 0.6), False),
        (declared("other", 0.9), False),
    ],
    ids=["label", "declared_training", "declared_inference", "weak_label", "other"],
)
def test_work_in_bursts_is_called_where_something_says_training(decisions: Deciding, is_called: bool) -> None:
    said = played(served_until(400), 1100, gpus=4, decisions=decisions, ranks=lambda gpu, _: Rank(1.0 if gpu else 0.0))
    assert first(said, "stalled_collective", 3) == (440 if is_called else None)


@pytest.mark.parametrize("slow", [False, True], ids=["every_second", "every_five"])
@pytest.mark.parametrize("step_s", [3.0, 12.0])
def test_steps_with_pauses_are_steady(step_s: float, slow: bool) -> None:
    """A fifth of each step loads or saves: samples jump, and means over ten of them do not."""

    def script(gpu: int, t: float) -> Shown:
        shown = stall_at(400)(gpu, t)
        return replace(shown, utilization=0.3) if 30 < t <= 400 and t % step_s < 0.2 * step_s else shown

    said = played(script, 480, interval_s=5.0 if slow else 1.0)
    assert first(said, "stalled_collective", 3) == pytest.approx(445, abs=10)
