"""stalled_collective and collective_wait on simulated histories, tick by tick, and on real recordings where present."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.clock import Instant
from agent.history import History
from agent.importers import open_trace
from agent.records import GpuKey, Tick
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.registry import DetectorsConfig, build_detectors
from classifier.detectors.stalled_collective import StalledCollectiveConfig, StalledCollectiveDetector
from classifier.findings import FindingEvent, FindingTracker
from classifier.results import Assessment, Decision
from classifier.simulator import Scenario, simulate
from tests.classifier.detector_histories import IDLES, WAITS, WORKS, Node, Script, Shown, severities

RECORDINGS = Path(__file__).resolve().parents[3] / "shared/traces"


def node(script: Script, **options) -> Node:
    baselines = PowerBaselines()
    detector = StalledCollectiveDetector(StalledCollectiveConfig(), baselines)
    return Node((detector,), baselines, script, **({"gpus": 3} | options))


def first(played: list[tuple[Instant, tuple[Assessment, ...]]], anomaly: str, severity: int) -> float | None:
    """Return the first moment at which any GPU has at least this severity."""
    for now, assessments in played:
        if any(s >= severity for s in severities(assessments, anomaly).values()):
            return now.monotonic_s
    return None


def stall_at(stall_s: float, waits: Shown = WAITS, works: Shown = WORKS, idles: Shown = IDLES) -> Script:
    return lambda _, t: idles if t <= 30 else works if t <= stall_s else waits


def test_a_stall_is_critical_within_45_s_and_names_every_gpu() -> None:
    played = list(node(stall_at(400)).play(500))
    # Waiting samples begin at 401; 35 s of them are complete at 436, and the next call comes at 440.
    assert first(played, "stalled_collective", 3) == 440
    now, last = played[-1]
    assert severities(last, "stalled_collective") == dict.fromkeys(range(3), 3)
    assert severities(last, "collective_wait") == dict.fromkeys(range(3), 0)
    finding = next(a for a in last if a.severity == 3)
    assert finding.since_monotonic_s == 401
    assert finding.since_wall_s == pytest.approx(now.wall_s - 99)
    assert finding.action == "restart_app"
    assert finding.evidence["group_gpus"] == 3
    assert finding.evidence["power_watts"] == 155


def test_a_rank_whose_process_died_is_the_suspect_until_another_job_works_there() -> None:
    gone = replace(IDLES, watts=70.0, used_bytes=0, pids=())
    other = replace(WORKS, pids=(900,))

    def script(gpu: int, t: float) -> Shown:
        if gpu == 1 and t > 402:
            return gone if t <= 500 else other
        return stall_at(400)(gpu, t)

    played = list(node(script).play(560))
    at_480 = next(some for now, some in played if now.monotonic_s == 480)
    assert severities(at_480, "stalled_collective") == dict.fromkeys(range(3), 3)
    assert {a.key.gpu for a in at_480 if a.key and a.suspect} == {1}
    assert severities(played[-1][1], "stalled_collective") == {0: 3, 1: 0, 2: 3}


def test_a_job_that_ends_is_no_suspect_of_the_one_beside_it() -> None:
    def script(gpu: int, t: float) -> Shown:
        shown = stall_at(400)(gpu, t)
        if gpu == 1:
            return replace(shown if t <= 400 else IDLES, pids=(201,) if t <= 402 else ())
        return shown

    last = list(node(script, gpus=2).play(480))[-1][1]
    assert not any(a.suspect for a in last)
    assert severities(last, "stalled_collective") == {0: 0, 1: 0}


def test_before_it_is_critical_it_is_a_wait() -> None:
    played = list(node(stall_at(400)).play(430))
    assert first(played, "collective_wait", 1) == 420  # 15 s of waiting samples at 416
    assert first(played, "stalled_collective", 1) is None


def test_the_gpu_that_reads_zero_is_the_suspect() -> None:
    script = lambda gpu, t: IDLES if gpu == 1 and t > 400 else stall_at(400)(gpu, t)  # noqa: E731
    _, last = list(node(script).play(500))[-1]
    assert severities(last, "stalled_collective") == dict.fromkeys(range(3), 3)
    assert [a.key.gpu for a in last if a.key and a.suspect] == [1]


FEWER_CHANNELS = {
    "no_profiling": {"tensor": None, "dram": None, "sm": None},
    "only_nvidia_smi_columns": {"tensor": None, "dram": None, "sm": None, "nvlink": None, "pcie_transmit": None},
    "no_power": {"watts": None},
    "no_memory_utilization": {"memory": None, "tensor": None, "dram": None, "sm": None},
    "no_processes": {"pids": None},
}


@pytest.mark.parametrize("missing", FEWER_CHANNELS.values(), ids=FEWER_CHANNELS)
def test_fewer_channels_find_it_as_fast(missing: dict[str, None]) -> None:
    script = stall_at(400, replace(WAITS, **missing), replace(WORKS, **missing), replace(IDLES, **missing))
    assert first(list(node(script).play(500)), "stalled_collective", 3) == 440


def test_utilization_alone_is_not_enough() -> None:
    missing = {"watts": None, "tensor": None, "dram": None, "sm": None}
    script = stall_at(400, replace(WAITS, **missing), replace(WORKS, **missing), replace(IDLES, **missing))
    assert first(list(node(script).play(700)), "collective_wait", 1) is None


def test_without_utilization_there_is_no_assessment() -> None:
    script: Script = lambda _, __: replace(WORKS, utilization=None)  # noqa: E731
    assert all(not assessments for _, assessments in node(script).play(300))


def test_without_host_io_a_warning_after_60_s_and_critical_after_10_min() -> None:
    played = list(node(stall_at(400), host=lambda _: None).play(1100))
    assert first(played, "collective_wait", 2) == 465  # 60 s of waiting samples at 461
    assert first(played, "stalled_collective", 3) == 1005  # more than 600 s: 1001 is past, asked at 1005


def test_without_host_io_waits_as_long_as_those_that_ended_are_no_warnings() -> None:
    script: Script = lambda _, t: WAITS if t > 390 and t % 300 > 210 else stall_at(9999)(0, t)  # noqa: E731
    played = [(now.monotonic_s, found) for now, found in node(script, host=lambda _: None).play(2000)]
    warned = [t for t, found in played if 2 in severities(found, "collective_wait").values()]
    # Waits of 90 s: the first one is a warning after a minute, the others are as long as that one.
    assert warned
    assert max(warned) < 605


def test_active_host_io_is_a_checkpoint_for_as_long_as_it_lasts() -> None:
    script: Script = lambda _, t: WAITS if 400 < t <= 520 else stall_at(9999)(0, t)  # noqa: E731
    host = lambda t: (800e6, 1e6) if 405 < t <= 518 else (1e6, 1e6)  # noqa: E731
    played = list(node(script, host=host).play(700))
    assert first(played, "stalled_collective", 1) is None
    assert first(played, "collective_wait", 1) == 420
    assert first(played, "collective_wait", 2) is None
    assert set(severities(played[-1][1], "collective_wait").values()) == {0}


def test_brief_waits_before_do_not_make_a_save_a_warning() -> None:
    def script(_: int, t: float) -> Shown:
        is_brief = t > 200 and t % 60 < 7
        return WAITS if 400 < t <= 450 or (t <= 380 and is_brief) else stall_at(9999)(0, t)

    host = lambda t: (800e6, 1e6) if 405 < t <= 448 else (1e6, 1e6)  # noqa: E731
    played = list(node(script, host=host).play(500))
    assert first(played, "collective_wait", 1) == 420
    assert first(played, "collective_wait", 2) is None  # twice a wait of 7 s is no bound


def test_a_stall_after_a_checkpoint_has_begun_is_found_once_its_io_ends() -> None:
    host = lambda t: (800e6, 1e6) if 405 < t <= 430 else (1e6, 1e6)  # noqa: E731
    played = list(node(stall_at(400), host=host).play(600))
    assert first(played, "stalled_collective", 3) == 480  # 45 s after the last 5 s of activity end at 434


def test_steady_traffic_of_another_job_does_not_hide_a_stall() -> None:
    played = list(node(stall_at(400), host=lambda _: (120e6, 300e6)).play(500))
    assert first(played, "stalled_collective", 3) == 440


def test_what_never_worked_is_not_armed_and_left_out() -> None:
    script: Script = lambda _, t: IDLES if t <= 60 else WAITS  # noqa: E731
    played = list(node(script).play(1800))
    assert first(played, "collective_wait", 1) is None
    assert first(played, "stalled_collective", 1) is None


def test_a_wait_after_little_work_is_information_after_a_minute_and_never_more() -> None:
    # Work from 31 to 100: armed would need 120 s of it. Waiting samples begin at 101, 60 s of them are there at 161.
    played = list(node(stall_at(100), host=lambda _: None).play(1500))
    assert first(played, "collective_wait", 1) == 165
    assert first(played, "collective_wait", 2) is None
    # Whether it is a stall cannot be told: no assessment, rather than one that says no.
    assert severities(played[-1][1], "stalled_collective") == {}
    finding = next(a for a in played[-1][1] if a.severity)
    assert (finding.since_monotonic_s, finding.action, finding.evidence["reason"]) == (101, "look", "little_work")


def test_a_wait_after_little_work_ends_with_work_and_names_the_odd_one_out() -> None:
    def script(gpu: int, t: float) -> Shown:
        if not 100 < t <= 300:
            return stall_at(9999)(gpu, t)
        return IDLES if gpu == 2 else WAITS

    played = dict(node(script).play(320))
    last = next(found for now, found in played.items() if now.monotonic_s == 300)
    assert severities(last, "collective_wait") == dict.fromkeys(range(3), 1)
    assert {a.key.gpu for a in last if a.key and a.suspect} == {2}
    after = next(found for now, found in played.items() if now.monotonic_s == 310)
    assert severities(after, "collective_wait") == dict.fromkeys(range(3), 0)


def test_a_wait_after_half_a_minute_of_work_or_less_is_left_out() -> None:
    played = list(node(stall_at(45)).play(900))  # work from 31 to 45: two bins of 10 s
    assert first(played, "collective_wait", 1) is None
    assert severities(played[-1][1], "collective_wait") == {}


def test_a_restart_of_the_agent_in_the_middle_never_alarms() -> None:
    played = list(node(lambda _, __: WAITS).play(1800))
    assert first(played, "stalled_collective", 1) is None


def test_a_gap_in_telemetry_restarts_the_count_and_never_alarms_by_itself() -> None:
    healthy: Script = lambda _, t: None if 400 < t <= 520 else stall_at(9999)(0, t)  # noqa: E731
    assert first(list(node(healthy).play(700)), "collective_wait", 1) is None
    stalled: Script = lambda gpu, t: None if 410 < t <= 470 else stall_at(400)(gpu, t)  # noqa: E731
    # The first sample after the gap is that of 471: 35 s later, asked at the next fifth second.
    assert first(list(node(stalled).play(600)), "stalled_collective", 3) == 510


def test_a_gap_during_a_reported_stall_does_not_end_it() -> None:
    script: Script = lambda gpu, t: None if 460 < t <= 560 else stall_at(400)(gpu, t)  # noqa: E731
    played = list(node(script).play(700))
    after = [a for now, assessments in played if now.monotonic_s > 565 for a in assessments]
    assert {a.severity for a in after if a.anomaly == "stalled_collective"} == {3}
    assert {a.since_monotonic_s for a in after} == {401}


def test_single_zero_profiling_samples_at_full_power_are_not_evidence() -> None:
    zeros = replace(WORKS, tensor=0.0, dram=0.0, sm=0.0, memory=0.0)
    script: Script = lambda _, t: IDLES if t <= 30 else zeros if t % 7 == 0 else WORKS  # noqa: E731
    assert first(list(node(script).play(1200)), "collective_wait", 1) is None


def test_other_processes_are_other_work() -> None:
    late = replace(WAITS, pids=(202,))
    script: Script = lambda _, t: IDLES if t <= 30 else WORKS if t <= 400 else late  # noqa: E731
    played = list(node(script).play(1200))
    assert first(played, "stalled_collective", 1) is None


def test_work_ends_a_wait_at_once() -> None:
    script: Script = lambda _, t: WAITS if 400 < t <= 452 else stall_at(9999)(0, t)  # noqa: E731
    played = {now.monotonic_s: severities(a, "stalled_collective") for now, a in node(script).play(500)}
    assert played[450] == dict.fromkeys(range(3), 3)
    assert played[455] == dict.fromkeys(range(3), 0)


def test_unexplained_waits_that_end_by_themselves_extend_the_confirmation() -> None:
    def script(_: int, t: float) -> Shown:
        return IDLES if t <= 30 else WAITS if t % 200 > 165 and t > 300 else WORKS

    played = list(node(script).play(1500))
    # Waits of 34 s: never long enough. The learned length adds 10 s of margin to the longest one.
    assert first(played, "stalled_collective", 1) is None


def decided(workload: str, probability: float):
    def decide(t: float) -> dict[GpuKey, Decision]:
        rest = (1 - probability) / 3
        probabilities = dict.fromkeys(("training", "inference", "idle", "other"), rest) | {workload: probability}
        decisions = {}
        for gpu in range(3):
            key = GpuKey(gpu, f"GPU-{gpu:08d}")
            decisions[key] = Decision(
                key=key, monotonic_s=t, wall_s=t, workload=workload, probabilities=probabilities, reason=None,
                telemetry_probabilities=probabilities, window_s=60, since_monotonic_s=0, since_wall_s=0,
            )  # fmt: skip
        return decisions

    return decide


def test_an_idle_inference_server_that_spins_is_information_at_most() -> None:
    played = list(node(stall_at(400), decisions=decided("inference", 0.9)).play(1800))
    assert first(played, "collective_wait", 1) == 420
    assert first(played, "collective_wait", 2) is None
    assert first(played, "stalled_collective", 1) is None


def test_one_gpu_that_waits_alone_among_working_ones_is_information_at_most() -> None:
    script: Script = lambda gpu, t: WORKS if gpu else stall_at(400)(gpu, t)  # noqa: E731
    played = list(node(script, gpus=3).play(1200))
    assert first(played, "collective_wait", 2) is None
    assert first(played, "stalled_collective", 1) is None


def test_a_rank_that_still_works_in_step_makes_it_a_wait_for_ten_minutes() -> None:
    def step(t: float) -> Shown:
        return replace(WORKS, watts=400 if t % 20 < 8 else 600)

    def script(gpu: int, t: float) -> Shown:
        return IDLES if t <= 30 else WAITS if gpu and t > 400 else step(t)

    played = list(node(script, gpus=4).play(1050))
    assert first(played, "collective_wait", 1) == 420
    assert first(played, "stalled_collective", 3) == 1005


def test_another_job_that_works_on_does_not_hide_a_stall() -> None:
    rng = random.Random(3)

    def script(gpu: int, t: float) -> Shown:
        """GPUs 0 to 2 are one job with its own rhythm, GPU 3 another, both there since the agent started."""
        if gpu < 3:
            return WAITS if t > 400 else replace(WORKS, watts=400 if t % 20 < 8 else 600)
        return replace(WORKS, watts=rng.uniform(300, 600))

    played = list(node(script, gpus=4).play(500))
    assert first(played, "stalled_collective", 3) == 440
    assert severities(played[-1][1], "stalled_collective") == {0: 3, 1: 3, 2: 3, 3: 0}


def test_a_rank_that_does_a_little_while_the_others_wait_is_given_two_minutes() -> None:
    """As rank 0 reads while it saves: 3 to 6 %, now and then more (measured on 8 H100), to storage nobody sees."""

    def script(gpu: int, t: float) -> Shown:
        if not 400 < t <= 515:
            return stall_at(9999)(gpu, t)
        return WAITS if gpu else replace(IDLES, utilization=0.2 if t % 3 == 0 else 0.04, watts=146)

    played = list(node(script).play(600))
    assert first(played, "stalled_collective", 1) is None
    assert first(played, "collective_wait", 1) == 420
    suspects = {a.key.gpu for _, assessments in played for a in assessments if a.key and a.suspect}
    assert suspects == {0}


def test_work_that_waits_all_the_time_is_a_server_and_no_stall() -> None:
    def script(_: int, t: float) -> Shown:
        """Spin in the collective for 20 s of every minute, and later for 160 s at once."""
        if t <= 30 or 900 < t <= 1060:
            return IDLES if t <= 30 else WAITS
        return WAITS if t % 60 < 20 else WORKS

    played = list(node(script).play(1100))
    assert first(played, "collective_wait", 1) is not None
    assert first(played, "stalled_collective", 1) is None


def test_delays_of_stalls_at_random_moments() -> None:
    rng = random.Random(2)
    delays = []
    for _ in range(20):
        stall_s = 260 + 60 * rng.random()
        waits = replace(WAITS, watts=120 + 60 * rng.random())
        played = node(stall_at(stall_s, waits), gpus=2, jitter=rng).play(stall_s + 60)
        found = first(list(played), "stalled_collective", 3)
        assert found is not None
        delays.append(found - stall_s)
    delays.sort()
    assert delays[int(0.95 * len(delays))] <= 45


def replayed(ticks: Iterable[Tick], seconds: float = 5.0) -> list[FindingEvent]:
    """Return the events of all detectors over a trace, asked every five seconds, without labels."""
    history, baselines, tracker = History(), PowerBaselines(), FindingTracker()
    detectors = build_detectors(DetectorsConfig(), baselines)
    events: list[FindingEvent] = []
    next_s = 0.0
    for tick in ticks:
        history.ingest(tick)
        if tick.monotonic_s >= next_s:
            next_s = tick.monotonic_s + seconds
            now = Instant(tick.monotonic_s, tick.wall_s)
            baselines.update(now, history, {})
            events += tracker.update(now, [a for d in detectors for a in d.assess(now, history, {})])
    return events


def critical(events: list[FindingEvent]) -> list[FindingEvent]:
    return [event for event in events if event.state == "active" and event.finding.severity == 3]


@pytest.mark.parametrize("board", ["H100", "A100", "V100", "L4"])
def test_simulated_stalls_are_found_in_time_and_never_before(board: str) -> None:
    # No checkpoint that is written while the stall begins: that postpones the call, and has tests of its own.
    scenario = Scenario(
        kind="stalled_all_reduce",
        board=board,
        gpu_count=2,
        duration_s=900,
        begin_s=3600,
        parameters={"save_every_s": 36000.0},
    )
    header, ticks = simulate(scenario, seed=11)
    stalls = [phase.start_s for phase in header.ground_truth if phase.anomaly == "stalled_collective"]
    found = critical(replayed(ticks))
    assert found
    assert 30 <= found[0].now.monotonic_s - min(stalls) <= 60


@pytest.mark.parametrize("kind", ["rank0_checkpoint", "data_parallel_training", "llm_serving", "loaded_idle"])
def test_simulated_look_alikes_give_no_critical_finding(kind: str) -> None:
    _, ticks = simulate(Scenario(kind=kind, gpu_count=2, duration_s=900, begin_s=3600), seed=5)
    assert critical(replayed(ticks)) == []


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings in {RECORDINGS}")
@pytest.mark.parametrize("name", ["ckpt50", "run_0726"])
def test_real_rank0_checkpoints_are_waits_and_never_critical(name: str) -> None:
    trace = open_trace(RECORDINGS / f"training/gwtrain__h100_8gpu_{name}.csv.gz", lambda _: None)
    events = replayed(tick for tick in trace if tick.monotonic_s < 700)
    assert critical(events) == []
    assert any(event.finding.anomaly == "collective_wait" for event in events)
