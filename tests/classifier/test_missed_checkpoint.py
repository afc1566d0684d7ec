"""missed_checkpoint on simulated jobs in compressed time (5 s a reading), and on the pauses of real runs."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from agent.clock import Instant
from agent.history import History
from agent.pipeline import Pipeline
from agent.records import GpuKey
from classifier.detectors.checkpoint_bursts import BurstConfig, BurstTracker
from classifier.detectors.checkpoint_cadence import Cadence, CadenceConfig
from classifier.detectors.missed_checkpoint import MissedCheckpointConfig, MissedCheckpointDetector
from classifier.detectors.step_pace import Pace, StepPaces
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.results import Assessment, Decision
from tests.classifier.checkpoint_runs import Job, Saves, World, cover, key_of

PAUSES = Path(__file__).resolve().parents[3] / "shared/traces/checkpoint_pauses.csv"

#: Time since the start of a world, severity, variant, and the whole.
Played = list[tuple[float, int, str, Assessment]]


def played(world: World, key: str = "slurm:7", from_s: float = 0.0) -> Played:
    return [
        (now.monotonic_s - 1000.0, one.severity, str(one.evidence.get("variant", "")), one)
        for now, some in world.play(from_s)
        for one in some
        if one.job_key == key
    ]


def first(found: Played, severity: int) -> float | None:
    return next((time_s for time_s, level, *_ in found if level >= severity), None)


def variants(found: Played) -> set[str]:
    return {variant for _, severity, variant, _ in found if severity}


def world_of(saves: Saves, hours: float = 2.2, until_s: float = 6600.0, **job) -> tuple[World, Job, list[float]]:
    """Return a host with one job that saves every 600 s and a bit from 400 s on, and stops saving at `until_s`."""
    world = World(hours=hours, seed=3)
    one = world.job(**job)
    return world, one, saves.run(world, one, 400.0, until_s)


@pytest.mark.parametrize("target", ["disk_written", "network_transmit", "filesystem_written"])
@pytest.mark.parametrize("style", ["rank0", "async"])
def test_checkpoints_that_stop_are_late_then_missed(style: str, target: str) -> None:
    world, _, times = world_of(Saves(style=style, target=target, spread=0.005))
    found = played(world)
    # Due 620 s after the last; late 0.25 periods (155 s) after that, missed 620 s later; judged each 5 s, and the
    # start of a burst is known to 5 s.
    late_s, missed_s = first(found, 2), first(found, 3)
    assert late_s == pytest.approx(times[-1] + 1.25 * 620, abs=25)
    assert missed_s == pytest.approx(times[-1] + 2.25 * 620, abs=25)
    last = found[-1][3]
    assert last.severity == 3
    assert last.scope == "job"
    assert last.evidence["variant"] == "missed"
    assert last.evidence["interval_source"] == "learned"
    assert last.evidence["interval_seconds"] == pytest.approx(620, abs=10)
    assert "due" in last.summary
    # The condition began when it was due.
    assert last.since_monotonic_s == pytest.approx(1000 + times[-1] + 620, abs=25)


class Steps(StepPaces):
    """Steps of one second on every GPU, whatever it does."""

    def update(self, now: Instant, history: History) -> None:
        """Look at nothing."""

    def pace(self, key: GpuKey, now_s: float) -> Pace | None:
        return Pace(found_s=now_s, period_s=1.0, confidence_ratio=0.9, channel="power_watts", window_s=60.0)


@pytest.mark.parametrize("label", ["unknown", "idle", "training"])
@pytest.mark.parametrize("has_steps", [False, True])
def test_a_learned_cadence_pages_only_where_the_job_trains(label: str, has_steps: bool) -> None:
    saves = Saves(spread=0.005)
    world = World(hours=2.2, seed=3, label=label)
    saves.run(world, world.job(), 400.0, 6600.0)
    if has_steps:
        world.detector = MissedCheckpointDetector(MissedCheckpointConfig(), world.baselines, Steps())
    found = played(world)
    trains = label == "training" or (label == "unknown" and has_steps)
    assert max(severity for _, severity, *_ in found) == (3 if trains else 2)
    assert variants(found) == {"late", "missed"}


@pytest.mark.parametrize("busy_s", [20.0, 500.0])
def test_bursts_of_a_server_that_is_idle_between_them_are_not_learned(busy_s: float) -> None:
    # Requests every 600 s: data leaves the GPUs and the host, and between them nothing works. They stop after 1.8 h.
    world = World(hours=2.6, seed=3, label="unknown")
    job = world.job()
    job.busy[:] = 0.0
    for at in np.arange(400.0, 6600.0, 600.0):
        cover(job.busy, at - busy_s, at, 1.0)
        cover(job.transmit, at, at + 20.0, 1e9)
        world.write("network_transmit", at, at + 20.0, 1e9)
    found = played(world)
    assert bool(found) == (busy_s > 300)
    assert first(found, 3) is None


def test_a_single_one_left_out_is_late_until_the_next_comes() -> None:
    world = World(hours=2, seed=3)
    job, saves = world.job(), Saves(spread=0.0)
    for number in range(12):
        if number != 9:
            saves.once(world, job, 400.0 + 600.0 * number)
    found = played(world)
    assert first(found, 2) == pytest.approx(400 + 600 * 9 + 150, abs=15)
    assert first(found, 3) is None  # the next one begins before a whole period more has gone
    assert max(time_s for time_s, severity, *_ in found if severity) == pytest.approx(400 + 6000 + 70, abs=30)


def test_healthy_checkpoints_of_every_kind_say_nothing() -> None:
    for place, style in enumerate(("rank0", "all_ranks", "async")):
        world, _, _ = world_of(Saves(style=style, spread=0.08, cached=place == 1), hours=3, until_s=10800)
        found = played(world)
        assert found
        assert first(found, 1) is None


def test_a_truncated_checkpoint_is_a_warning_until_the_next_whole_one() -> None:
    world = World(hours=2, seed=3)
    job, saves = world.job(), Saves(spread=0.0)
    for number in range(12):
        saves.once(world, job, 400.0 + 600.0 * number, share=0.2 if number == 9 else 1.0)
    found = played(world)
    assert variants(found) == {"truncated"}
    assert max(severity for _, severity, *_ in found) == 2
    warned = [one for one in found if one[1] == 2]
    # It takes 4 s; one in full is waited for two minutes.
    assert warned[0][0] == pytest.approx(400 + 600 * 9 + 124, abs=15)
    assert warned[-1][0] == pytest.approx(400 + 600 * 10 + 70, abs=30)
    # 4 of 20 GB.
    assert warned[0][3].evidence["written_bytes"] == pytest.approx(4e9, rel=0.05)
    assert warned[0][3].evidence["usual_bytes"] == pytest.approx(20e9, rel=0.05)


def test_a_checkpoint_that_takes_three_times_as_long_is_a_warning_while_it_lasts() -> None:
    world = World(hours=2, seed=3)
    job, saves = world.job(), Saves(spread=0.0, length_s=40.0)
    for number in range(12):
        saves.once(world, job, 400.0 + 600.0 * number, longer=6.0 if number == 9 else 1.0)
    found = played(world)
    assert variants(found) == {"long"}
    # Usual 40 s: long from 120 s on, known to a reading or two; the burst lasts 240 s and ends 45 s of silence later.
    assert first(found, 2) == pytest.approx(400 + 600 * 9 + 120, abs=20)
    assert max(time_s for time_s, severity, *_ in found if severity) == pytest.approx(400 + 600 * 9 + 285, abs=20)


def test_an_interval_of_two_periods_does_not_make_the_period() -> None:
    world = World(hours=3, seed=3)
    job, saves = world.job(), Saves(spread=0.0)
    for number in (0, 1, 3, 4, 5, 7, 8, 9):
        saves.once(world, job, 400.0 + 600.0 * number)
    list(world.play())
    assert world.detector.checkpoints[0].interval_s == pytest.approx(600, abs=5)


@pytest.mark.parametrize("every_s", [250.0, 420.0, 900.0, 1700.0])
def test_a_period_that_changes_is_learned_anew_with_one_finding_at_most(every_s: float) -> None:
    hours = 3.4 if every_s > 600 else 2.0
    world = World(hours=hours, seed=3)
    job = world.job()
    times = Saves(spread=0.01).run(world, job, 400.0, 4000.0)
    Saves(spread=0.01, every_s=every_s).run(world, job, times[-1] + every_s, hours * 3600)
    found = played(world)
    begins = sum(one[1] >= 2 and not before[1] for before, one in pairwise(found))
    assert begins <= 1
    assert first(found, 3) is None or every_s >= 2 * 600
    assert found[-1][1] == 0
    assert world.detector.checkpoints[0].interval_s == pytest.approx(every_s + 20, abs=10)


def test_other_processes_are_another_job() -> None:
    world, _, _ = world_of(Saves(), until_s=5400.0, new_pids_s=5500.0)
    found = played(world)
    assert max(time_s for time_s, *_ in found) <= 5505
    assert first(found, 1) is None
    assert world.detector.checkpoints == ()


def test_a_stall_stops_the_clock() -> None:
    world = World(hours=4, seed=3)
    job, saves = world.job(), Saves(spread=0.0)
    for number in range(12):
        # An hour's stall between the eighth and the ninth.
        saves.once(world, job, 400.0 + 600.0 * number + (3600.0 if number >= 8 else 0.0))
    job.pause(5000.0, 8600.0)
    found = played(world)
    assert {severity for time_s, severity, *_ in found if time_s < 11000} == {0}
    assert first(found, 2) == pytest.approx(400 + 600 * 11 + 3600 + 750, abs=40)


def test_a_gap_in_telemetry_is_no_missed_checkpoint() -> None:
    world, _, times = world_of(Saves(spread=0.0), hours=2.5, until_s=9000.0)
    # The ninth is written unseen.
    world.gaps = [(times[8] - 100.0, times[8] + 100.0)]
    assert first(played(world), 1) is None


def test_a_node_that_never_writes_has_no_series() -> None:
    world = World(hours=3, seed=3)
    world.job()
    assert played(world) == []
    assert world.detector.checkpoints == ()


def test_what_others_write_is_not_learned() -> None:
    world = World(hours=3, seed=3)
    job = world.job()
    for start_s in np.arange(700.0, 8000.0, 600.0):  # a backup by the clock that stops
        world.write("disk_written", start_s, start_s + 30.0, 1e9)
    cover(job.busy, 5000.0, 5060.0, -0.5)
    assert played(world) == []


def test_of_two_jobs_only_the_one_that_saves_has_a_cadence() -> None:
    world = World(hours=3, seed=3)
    saves, other = world.job(), world.job(gpus=(2, 3), key="slurm:8", job_id="8", pids=(201, 202))
    Saves().run(world, saves, 400.0, 6600.0)
    for start_s in np.arange(500.0, 10000.0, 700.0):  # evaluations
        cover(other.busy, start_s, start_s + 30.0, -0.5)
    list(world.play())
    assert [status.job_key for status in world.detector.checkpoints] == ["slurm:7"]


def test_two_jobs_that_save_in_turn_have_a_cadence_each() -> None:
    world = World(hours=3, seed=3)
    one, two = world.job(), world.job(gpus=(2, 3), key="slurm:8", job_id="8", pids=(201, 202))
    Saves(spread=0.01).run(world, one, 400.0, 10800.0)
    Saves(spread=0.01, every_s=850.0, rate=4e8).run(world, two, 700.0, 7500.0)
    found = [(now.monotonic_s - 1000.0, a.job_key, a.severity, a.evidence) for now, some in world.play() for a in some]
    intervals = {status.job_key: status.interval_s for status in world.detector.checkpoints}
    assert intervals == {"slurm:7": pytest.approx(620, abs=10), "slurm:8": pytest.approx(870, abs=10)}
    assert {key for _, key, severity, _ in found if severity} == {"slurm:8"}


def test_a_declared_interval_needs_one_checkpoint_only() -> None:
    world = World(hours=2, seed=3)
    job = world.job(declared_s=900.0)
    Saves().once(world, job, 1000.0)
    found = played(world)
    # Due at 1900 s; late a quarter of 900 s after that, missed 900 s later.
    assert first(found, 2) == pytest.approx(1900 + 225, abs=15)
    assert first(found, 3) == pytest.approx(1900 + 225 + 900, abs=15)
    assert found[-1][3].evidence["interval_source"] == "declared"
    assert world.detector.checkpoints[0].interval_s == 900.0


def test_what_the_processes_write_shows_small_checkpoints() -> None:
    world = World(hours=3, seed=3)
    job = world.job()
    job.process_written = np.full(world.steps, 1e3)
    # Adapters: 60 MB, below what counts on a disk.
    times = Saves(rate=3e7, length_s=2.0, spread=0.0).run(world, job, 400.0, 6600.0)
    found = played(world)
    assert first(found, 2) == pytest.approx(times[-1] + 1.25 * 602, abs=25)
    assert found[-1][3].evidence["source"] == "process"


def test_cores_that_serialise_are_a_sign_where_pcie_is_not_measured() -> None:
    world = World(hours=2.2, seed=3)
    world.has_pcie = False
    job = world.job()
    job.cores = world.rng.normal(2.0, 0.02, world.steps)
    # 2 GB over two ranks at 10 GB/s: the job stands still for 0.1 s.
    Saves(style="async", rate=1e8, spread=0.005, target="filesystem_written").run(world, job, 400.0, 6600.0)
    assert first(played(world), 2) is not None


def test_what_others_write_over_a_due_date_hides_it_once() -> None:
    world = World(hours=3, seed=3)
    world.has_pcie = False
    job = world.job()
    times = []
    for number in range(18):
        # One in two pauses is too short to be seen.
        times.append(400.0 + 600.0 * number)
        cover(job.busy, times[-1], times[-1] + 5.0, -0.5 * (number % 2))
        world.write("filesystem_written", times[-1], times[-1] + 60.0, 1.2e8)
    # Somebody copies from before one of them until long after it.
    world.write("filesystem_written", times[12] - 100.0, times[12] + 500.0, 6e8)
    found = played(world)
    assert found
    assert first(found, 1) is None


def test_what_is_known_reaches_the_snapshot() -> None:
    world, _, _ = world_of(Saves(), hours=1.5, until_s=5400.0)
    now = list(world.play())[-1][0]
    pipeline = Pipeline(
        labeller=Labeller(None, LabellerConfig()), detectors=(world.detector,), baselines=world.baselines
    )
    assert pipeline.snapshot(now).checkpoints == world.detector.checkpoints
    assert world.detector.checkpoints


def test_offload_every_few_seconds_is_no_checkpoint() -> None:
    world = World(hours=2, seed=3)
    job = world.job()
    job.transmit += np.tile([7e9, 1e8], world.steps // 2)
    assert played(world) == []


def rollouts(world: World, **options) -> Job:
    """A job that hands 6 GB from its GPUs to a server every 300 s, and writes none of it."""
    job = world.job(**options)
    for start_s in np.arange(400.0, 5000.0, 300.0):
        cover(job.transmit, float(start_s), float(start_s) + 20.0, 1.5e8)
    return job


def test_what_leaves_the_gpus_and_is_written_nowhere_is_no_checkpoint() -> None:
    world = World(hours=2, seed=3)
    rollouts(world)
    assert played(world) == []
    assert world.detector.checkpoints == ()


def test_where_writing_cannot_be_seen_what_leaves_the_gpus_warns_and_never_pages() -> None:
    world = World(hours=2, seed=3, channels=())
    rollouts(world)
    found = played(world)
    assert first(found, 2) == pytest.approx(4900 + 300 + 120, abs=20)
    assert first(found, 3) is None
    assert variants(found) == {"late", "missed"}


def test_a_declared_interval_does_not_begin_with_what_was_written_nowhere() -> None:
    world = World(hours=2, seed=3)
    job = world.job(declared_s=900.0)
    cover(job.transmit, 100.0, 130.0, 2e8)
    assert played(world) == []


def test_inference_is_left_out() -> None:
    world, _, _ = world_of(Saves())
    for gpu in (0, 1):
        key = key_of(gpu)
        world.decisions[key] = Decision(
            key=key, monotonic_s=0.0, wall_s=0.0, workload="inference",
            probabilities={"training": 0.05, "inference": 0.9, "idle": 0.0, "other": 0.05},
            telemetry_probabilities=None, window_s=60.0, reason=None, since_monotonic_s=0.0, since_wall_s=0.0,
        )  # fmt: skip
    assert played(world) == []


def test_gpus_without_a_known_holder_are_the_job_without_a_name() -> None:
    world, _, _ = world_of(Saves(), key=None)
    assert first(played(world, ""), 3) is not None


def test_a_finding_ends_with_a_job_that_nobody_names() -> None:
    world, _, _ = world_of(Saves(), hours=2.6, key=None, ends_s=8700.0)
    found = played(world, "")
    assert first(found, 3) is not None
    last_s, severity, *_ = found[-1]
    assert (severity, last_s < 8850.0) == (0, True)


def test_a_job_whose_gpus_are_lost_is_absent() -> None:
    world, _, _ = world_of(Saves(), hours=2.6, lost_s=8700.0)
    found = played(world)
    assert first(found, 3) is not None
    assert found[-1][0] < 8850.0


@pytest.mark.parametrize("by_s", [-1e6, 1e6])
def test_the_time_since_the_last_one_does_not_follow_the_wall_clock(by_s: float) -> None:
    world, _, times = world_of(Saves())
    world.clock_set = (6700.0, by_s)
    found = [(time_s, whole) for time_s, severity, _, whole in played(world) if severity]
    assert found
    for time_s, whole in found:
        assert whole.evidence["seconds_since_last"] == pytest.approx(time_s - times[-1], abs=60.0)


def test_a_source_that_is_not_read_any_more_is_absent() -> None:
    world, _, _ = world_of(Saves(target="filesystem_written", style="rank0"))
    world.has_pcie = False
    world.channels = ("filesystem_written",)
    found: Played = []
    for now, some in world.play():
        if now.monotonic_s > 1000 + 6000:
            world.channels = ()
        found += [(now.monotonic_s - 1000, a.severity, "", a) for a in some]
    assert max(time_s for time_s, *_ in found) <= 6070


def restarted(world: World, at_s: float, state: object) -> Played:
    world.detector = MissedCheckpointDetector(MissedCheckpointConfig(), world.baselines)
    now = next(iter(world.play(at_s)))[0]
    world.detector = MissedCheckpointDetector(MissedCheckpointConfig(), world.baselines)
    world.detector.restore(json.loads(json.dumps(state)), now)
    return played(world, from_s=at_s + 5.0)


def test_the_cadence_survives_a_restart_of_the_agent() -> None:
    saves = Saves(spread=0.005)
    world, _, _ = world_of(saves, hours=2.4)
    for now, _ in world.play():
        if now.monotonic_s >= 1000 + 6700:
            state = world.detector.learned(now)
            break
    found = restarted(world, 6730.0, state)
    # The phase is lost: late 1.25 periods after the restart at the latest.
    assert first(found, 2) == pytest.approx(6735 + 1.25 * 620, abs=40)
    assert found[-1][1] == 3
    # Another start of the same process id is another process.
    section = state["jobs"]["slurm:7"]
    other = {"jobs": {"slurm:7": section | {"processes": [[pid, at - 50.0] for pid, at in section["processes"]]}}}
    world, _, _ = world_of(saves, hours=2.4)
    assert restarted(world, 6730.0, other) == []


@pytest.mark.parametrize(
    "change",
    [{"source": "tape"}, {"intervals": [0.0]}, {"sizes": "many"}, {"total": -1}, {"processes": [[1]]}, {"seen": None}],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, object]) -> None:
    world, _, _ = world_of(Saves(), hours=1.2)
    now = list(world.play())[-1][0]
    state = world.detector.learned(now)
    broken = {"jobs": {key: {**section, **change} for key, section in state["jobs"].items()}}
    detector = MissedCheckpointDetector(MissedCheckpointConfig(), world.baselines)
    with pytest.raises(ValueError, match=r"\w"):
        detector.restore(broken, now)
    assert detector.learned(now) == {"jobs": {}}


def test_the_number_of_jobs_is_bounded() -> None:
    world = World(hours=1, seed=3)
    world.detector = MissedCheckpointDetector(replace(MissedCheckpointConfig(), most_jobs=2), world.baselines)
    for number in range(4):
        job = world.job(
            gpus=(2 * number, 2 * number + 1), key=f"slurm:{number}", pids=(number * 10 + 1, number * 10 + 2)
        )
        Saves(every_s=300.0, spread=0.0, target="filesystem_written").run(world, job, 150.0 + 70 * number, 3600.0)
    list(world.play())
    assert {status.job_key for status in world.detector.checkpoints} == {"slurm:0", "slurm:1"}


def test_a_counter_of_checkpoints_never_falls_and_the_numbers_are_right() -> None:
    world, _, times = world_of(Saves(spread=0.0), hours=2.0, until_s=7000.0)
    totals: list[int] = []
    for _ in world.play():
        totals += [status.total for status in world.detector.checkpoints]
    assert totals == sorted(totals)
    status = world.detector.checkpoints[0]
    assert status.total == len(times) == totals[-1]
    assert status.last_size_bytes == pytest.approx(20e9, rel=0.05)
    assert status.last_wall_s == pytest.approx(1_700_001_000 + times[-1] + 20, abs=10)
    assert status.deadline_wall_s == pytest.approx(1_700_001_000 + times[-1] + 1.25 * 620, abs=40)


@pytest.mark.skipif(not PAUSES.is_file(), reason="the real recordings are not here")
def test_the_cadences_of_real_runs_are_never_missed() -> None:
    """Pauses of eight-GPU runs in which rank 0 saves; the bytes are made up, the times and lengths are not."""
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with PAUSES.open() as file:
        for row in csv.DictReader(file):
            runs[row["file"]].append((float(row["t_start_s"]), float(row["dur_s"])))
    assert len(runs) >= 4
    for name, pauses in runs.items():
        end_s = pauses[-1][0] + pauses[-1][1] + 30.0
        world = World(hours=end_s / 3600, seed=3)
        job = world.job()
        for start_s, length_s in pauses:
            job.pause(start_s, start_s + length_s)
            world.write("filesystem_written", start_s, start_s + length_s, 5e8)
        assert first(played(world), 3) is None, name


def test_a_tracker_tells_bursts_from_what_is_usual() -> None:
    tracker = BurstTracker(BurstConfig(), "disk")
    found = []
    for step in range(200):
        # 400 MB/s of everyday writing, give or take 5 %; 1.2 GB/s from 500 to 530 s; 100 MB/s above from 700 to 705 s.
        rate = 4e8 * (1.0 + 0.05 * (-1) ** step) + (8e8 if 100 <= step < 106 else 0.0) + (1e8 if step == 140 else 0.0)
        found.append(tracker.update(5.0 * (step + 1), rate))
    bursts = [burst for burst in found if burst]
    assert [(burst.start_s, burst.end_s) for burst in bursts] == [(500.0, 530.0)]
    assert bursts[0].written_bytes == pytest.approx(30 * 8e8, rel=0.1)


def test_a_gap_cuts_a_burst() -> None:
    tracker = BurstTracker(BurstConfig(), "disk")
    for step in range(40):
        assert tracker.update(5.0 * (step + 1), 1e9 if step >= 37 else 1e6) is None
    burst = tracker.update(400.0, 1e9)
    assert burst is not None
    assert burst.is_cut
    assert tracker.gaps == 1


def test_a_cadence_that_varies_too_much_is_none() -> None:
    cadence = Cadence(CadenceConfig())
    for time_s in (0.0, 300.0, 1500.0, 1900.0, 4000.0, 4700.0):
        cadence.add(time_s)
    assert cadence.period_s is None
    assert not cadence.is_armed


def test_one_out_of_turn_moves_nothing() -> None:
    cadence = Cadence(CadenceConfig())
    for number in range(6):
        cadence.add(600.0 * number)
    cadence.add(3240.0)
    assert cadence.period_s == 600.0
    # Due at 3600, but not before three quarters of a period after the one at 3240.
    assert cadence.expected_s == pytest.approx(3240 + 450)
    cadence.add(3600.0)
    assert cadence.expected_s == 4200.0


@pytest.mark.parametrize(
    ("table", "change"),
    [
        (BurstConfig, {"start_bytes_per_second": 0.0}),
        (BurstConfig, {"gap_seconds": 10.0}),
        (CadenceConfig, {"least_bursts": 2}),
        (CadenceConfig, {"late_ratio": 0.6}),
        (MissedCheckpointConfig, {"most_jobs": 0}),
        (MissedCheckpointConfig, {"long_factor": 1.0}),
    ],
)
def test_values_that_make_no_sense_are_refused(table, change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        table(**change)
