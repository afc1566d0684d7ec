"""Where a checkpoint shows beside disks and network interfaces, and what only looks like one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest

from agent.history import History, Series
from agent.records import DiskSample, FilesystemSample, InfinibandSample, NetworkSample, Record, Tick
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.host_io import HostIoConfig, _trailing_means, observe_host_io
from classifier.detectors.stalled_collective import StalledCollectiveConfig, StalledCollectiveDetector
from tests.classifier.detector_histories import IDLES, WAITS, WORKS, Node, Shown, severities

SAVING_S = (406, 480)  # when bytes of the checkpoint leave the host
Rate = Callable[[float], float]


def saves(rate: float, usual: float = 0.0) -> Rate:
    """Return `rate` while rank 0 saves, and `usual` else."""
    return lambda t: rate if SAVING_S[0] < t <= SAVING_S[1] else usual


def rank0(gpu: int, t: float) -> Shown:
    """GPU 0 saves from 401 to 482 while the others wait in the next all-reduce, as on 8 H100."""
    pids = (100 + gpu,)
    if t <= 30:
        return replace(IDLES, pids=pids)
    if not 400 < t <= 482:
        return replace(WORKS, pids=pids)
    # At 4 % the odd one out would be given two minutes; at 0 % nothing but I/O tells this from a missing rank.
    return replace(WAITS if gpu else replace(IDLES, watts=146), pids=pids)


def stalls(gpu: int, t: float) -> Shown:
    return rank0(gpu, min(t, 450.0))


def played(script, traffic: Mapping[str, Rate], until_s: float = 600, gpus: int = 4, **more) -> tuple[list[float], set]:
    """Return when any GPU was critical, and the reasons that were given."""
    baselines = PowerBaselines()
    detector = StalledCollectiveDetector(StalledCollectiveConfig(), baselines)
    critical, reasons = [], set()
    for now, found in Node((detector,), baselines, script, gpus=gpus, traffic=traffic, **more).play(until_s):
        if 3 in severities(found, "stalled_collective").values():
            critical.append(now.monotonic_s)
        reasons |= {a.evidence["reason"] for a in found if a.severity}
    return critical, reasons


def pages(t: float) -> float:
    """Return dirty bytes: 300 MB/s more for 74 s, flushed as fast afterwards."""
    return 1e6 + 300e6 * max(0.0, min(t, 480.0) - 406.0) - 300e6 * max(0.0, min(t, 554.0) - 480.0)


CHECKPOINTS: dict[str, dict[str, Rate]] = {
    "nfs_over_rdma": {"filesystem_written": saves(800e6)},
    "nfs_over_rdma_beside_streaming": {"filesystem_written": saves(800e6), "filesystem_read": lambda _: 300e6},
    "lustre_over_infiniband_unreadable": {"infiniband": lambda t: saves(600e6)(t) if 400 < t <= 482 else 8e9},
    "io_of_the_rank": {"process_written.100": saves(400e6)},
    "dirty_pages_only": {"dirty_bytes": pages},
}


@pytest.mark.parametrize("traffic", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_that_no_disk_or_network_interface_shows_is_no_stall(traffic: dict[str, Rate]) -> None:
    critical, reasons = played(rank0, traffic)
    assert critical == []
    assert "host_io_active" in reasons


def test_the_same_wait_without_these_bytes_is_a_stall() -> None:
    # 35 s of waiting samples, the first of 401, at the next fifth second; over with the wait at 482.
    assert played(rank0, {})[0] == list(range(440, 485, 5))


BACKGROUNDS: dict[str, dict[str, Rate]] = {
    "dataset_streaming_that_stops": {"filesystem_read": lambda t: 900e6 if t <= 400 else 0.0},
    "another_job_streams_on": {"filesystem_read": lambda t: 900e6 if t <= 400 else 300e6},
    "loaders_fill_their_queues": {"filesystem_read": lambda t: 900e6 if 400 < t <= 412 else 20e6},
    "process_reads_that_fall": {"process_read.100": lambda t: 900e6 if t <= 400 else 200e6},
    "another_job_writes": {"filesystem_written": lambda _: 400e6},
    "a_log_is_flushed": {"filesystem_written": lambda t: 40e6 if 410 < t <= 415 else 0.0},
    "all_reduce_that_stops": {"infiniband": lambda t: 20e9 if t <= 400 else 0.0},
    "residual_infiniband": {"infiniband": lambda t: 20e9 if t <= 400 else 95e3},
    "dirty_pages_that_come_and_go_all_the_time": {"dirty_bytes": lambda t: 3e9 * (t % 20.0 < 10.0)},
    "dirty_pages_that_stand": {"dirty_bytes": lambda _: 4e9},
}


@pytest.mark.parametrize("traffic", BACKGROUNDS.values(), ids=BACKGROUNDS)
def test_what_went_on_before_or_only_stops_hides_no_stall(traffic: dict[str, Rate]) -> None:
    assert played(stalls, traffic, until_s=470)[0][0] == 440


def test_a_stall_after_a_checkpoint_to_nfs_has_begun_is_found_once_its_writes_end() -> None:
    critical, _ = played(stalls, {"filesystem_written": lambda t: 800e6 if 405 < t <= 430 else 0.0})
    # The last reading with writes is that of 430; quiet for 45 s from there.
    assert critical[0] == 475


@pytest.mark.parametrize(("others_since", "delay"), [(0, 440), (9999, None)])
def test_fabric_traffic_of_another_job_that_works_hides_no_stall(others_since: float, delay: float | None) -> None:
    """GPUs 4 to 7 are another job, whose all-reduce keeps half of the traffic up; without it the half is storage."""

    def script(gpu: int, t: float) -> Shown:
        if gpu < 4:
            return stalls(gpu, t)
        # Its own rhythm: power that has nothing to do with the steps of the others.
        return replace(WORKS, watts=450 + 100 * ((t * 7) % 13 < 6), pids=(200 + gpu,)) if t > others_since else IDLES

    critical, _ = played(script, {"infiniband": lambda t: 20e9 if t <= 400 else 10e9}, until_s=500, gpus=8)
    assert (critical[0] if critical else None) == delay


def beside_another_job(gpu: int, t: float, pids: int = 200) -> Shown:
    """GPU 7 is another job with a rhythm of its own; the others are saved by rank 0."""
    if gpu < 7:
        return rank0(gpu, t)
    return replace(WORKS, nvlink=0.0, watts=450 + 100 * ((t * 7) % 13 < 6), pids=(pids,))


def over_infiniband(t: float) -> float:
    """Return the all-reduce of the job that waits, what another job sends all the time, and the checkpoint."""
    return (0.0 if 400 < t <= 482 else 8e9) + 4e9 + saves(1.2e9)(t)


@pytest.mark.parametrize("fstype", ["lustre", "ceph", "gpfs", "beegfs", "nfs4", "fuse.dfuse"])
def test_a_checkpoint_to_a_file_system_without_bytes_is_no_stall_while_another_job_works(fstype: str) -> None:
    """The ports have its bytes, and those of the other job; no critical finding comes of what nobody can tell."""
    critical, reasons = played(beside_another_job, {"infiniband": over_infiniband}, gpus=8, unreadable=(fstype,))
    assert critical == []
    assert "host_io_not_seen" in reasons


def test_activity_is_activity_beside_such_a_mount() -> None:
    """NFS takes the checkpoint, and Lustre may take more: no warning after 60 s of what plainly is a checkpoint."""
    traffic = {"infiniband": over_infiniband, "filesystem_written": saves(800e6)}
    baselines = PowerBaselines()
    detector = StalledCollectiveDetector(StalledCollectiveConfig(), baselines)
    node = Node((detector,), baselines, beside_another_job, gpus=8, traffic=traffic, unreadable=("lustre",))
    waits = {now.monotonic_s: severities(found, "collective_wait").get(0) for now, found in node.play(480)}
    assert {severity for time_s, severity in waits.items() if time_s > 420} == {1}


@pytest.mark.parametrize(
    ("unreadable", "traffic"),
    [
        ((), {"infiniband": over_infiniband}),  # no such mount: what the ports carry is no storage
        (("fuse.sshfs",), {"infiniband": over_infiniband}),  # the network interfaces have its bytes
        (("lustre",), {}),  # no ports: the network interfaces have them as well
    ],
)
def test_quiet_is_quiet_where_nothing_can_hide(unreadable: tuple[str, ...], traffic: dict[str, Rate]) -> None:
    critical, _ = played(beside_another_job, traffic, gpus=8, unreadable=unreadable)
    assert critical[0] == 440


def test_a_stall_with_such_a_mount_is_found_where_the_ports_are_the_jobs_own() -> None:
    """Nobody else works: they carry 20 GB/s until the wait begins and nothing afterwards."""
    traffic = {"infiniband": lambda t: 20e9 if t <= 400 else 0.0}
    assert played(stalls, traffic, until_s=470, unreadable=("lustre",))[0][0] == 440


def test_a_stall_with_such_a_mount_beside_another_job_is_found_late() -> None:
    """Past `blind_critical_seconds`, 600 s after the wait began at 401."""

    def script(gpu: int, t: float) -> Shown:
        return beside_another_job(gpu, t) if gpu == 7 else stalls(gpu, t)

    critical, _ = played(script, {"infiniband": over_infiniband}, until_s=1020, gpus=8, unreadable=("lustre",))
    assert critical[0] == 1005


@pytest.mark.parametrize("fstype", ["virtiofs", "9p", "wekafs"])
def test_what_passes_by_every_counter_is_not_seen_by_anybody(fstype: str) -> None:
    critical, reasons = played(rank0, {}, unreadable=(fstype,))
    assert critical == []
    assert "host_io_not_seen" in reasons


def test_ports_without_bytes_hide_what_such_a_mount_moves() -> None:
    history = History()

    def seen(at: float, *records: Record) -> bool:
        usual = (
            DiskSample(monotonic_s=at, wall_s=at, device="sda", read_bytes_total=0, written_bytes_total=0),
            NetworkSample(monotonic_s=at, wall_s=at, device="eth0", receive_bytes_total=0, transmit_bytes_total=0),
            FilesystemSample(monotonic_s=at, wall_s=at, mountpoint="/s", fstype="lustre"),
        )
        history.ingest(Tick(monotonic_s=at, wall_s=at, records=(*usual, *records)))
        return observe_host_io(HostIoConfig(), history, [], at - 1.0, at).seen

    assert not seen(0.0)  # no rates yet
    assert seen(5.0)
    assert not seen(10.0, InfinibandSample(monotonic_s=10.0, wall_s=10.0, device="mlx5_0", port=1))


def test_the_evidence_says_what_file_systems_took() -> None:
    baselines = PowerBaselines()
    detector = StalledCollectiveDetector(StalledCollectiveConfig(), baselines)
    node = Node((detector,), baselines, rank0, gpus=4, traffic={"filesystem_written": saves(800e6)})
    _, found = list(node.play(450))[-1]
    assert found[0].evidence["host_filesystem_written_bytes_per_second"] == pytest.approx(800e6)
    io = observe_host_io(HostIoConfig(), node.history, [node.key(0)], 401.0, 450.0)
    assert io.seen
    assert io.last_active_s == 450.0


def test_what_slow_readings_still_hold_of_the_time_before_is_no_activity() -> None:
    baselines = PowerBaselines()
    detector = StalledCollectiveDetector(StalledCollectiveConfig(), baselines)
    # Pages dirtied and bytes written until 401.5 show in the readings of 405 s.
    traffic = {
        "dirty_bytes": lambda t: 1e9 * max(0.0, min(t, 401.5) - 400.0),
        "filesystem_written": lambda t: 1e9 if 400 < t <= 402 else 0.0,
    }
    node = Node((detector,), baselines, stalls, gpus=4, traffic=traffic)
    assert [now.monotonic_s for now, _ in node.play(430)][-1] == 430
    assert observe_host_io(HostIoConfig(), node.history, [node.key(0)], 401.0, 430.0).first_active_s is None
    early = HostIoConfig(slow_settle_seconds=0.0)
    assert observe_host_io(early, node.history, [node.key(0)], 401.0, 430.0).first_active_s == 405.0


def test_readings_that_jitter_around_the_window_count_once() -> None:
    times = np.array([0.0, 5.0, 9.99, 15.0, 19.98])
    # 40 MB/s throughout: two readings within 5 s are 10 s of it, not twice the rate.
    assert _trailing_means(Series(times, np.full(5, 40e6)), 5.0) == pytest.approx(np.full(5, 40e6), rel=0.01)


def read_from_disk(t: float) -> float:
    """Return what two jobs read: one up to 180 MB/s throughout, unevenly, and the one that waits 400 MB/s before."""
    rng = random.Random(int(t))
    return rng.uniform(20e6, 180e6) * (1.0 if rng.random() < 0.7 else 0.2) + (400e6 if t <= 400 else 0.0)


@pytest.mark.parametrize("before", [400e6, 0.0], ids=["the_job_that_waits_read_most", "another_job_reads_on"])
def test_reads_that_fall_or_go_on_unevenly_are_no_activity(before: float) -> None:
    assert reads(lambda t: read_from_disk(t) - (400e6 - before if t <= 400 else 0.0)) is None


def test_reads_beyond_what_was_read_before_are_activity() -> None:
    assert reads(lambda t: 60e6 + (600e6 if 420 < t <= 440 else 0.0)) == pytest.approx(421.0, abs=2.0)


def reads(rate: Rate, until_s: int = 460) -> float | None:
    """Return when a host that reads like this from its disks was first active in a wait that began at 401."""
    history, total = History(), 0.0
    for at in range(1, until_s + 1):
        total += rate(at)
        disk = DiskSample(monotonic_s=at, wall_s=at, device="sda", read_bytes_total=int(total), written_bytes_total=0)
        history.ingest(Tick(monotonic_s=at, wall_s=at, records=(disk,)))
    return observe_host_io(HostIoConfig(), history, [], 401.0, float(until_s)).first_active_s


@pytest.mark.parametrize(
    ("key", "value"),
    [("active_bytes_per_second", 0.0), ("sustained_seconds", -1.0), ("page_churn_ratio", 1.5)],
)
def test_values_that_make_no_sense_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{key} is"):
        HostIoConfig(**{key: value})
