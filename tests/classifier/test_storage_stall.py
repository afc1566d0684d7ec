"""storage_stall on a simulated host, a reading each 5 s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from agent.clock import Instant
from agent.history import History
from agent.records import DiskSample, FilesystemSample, NetworkSample, PressureSample, Record, Tick
from classifier.detectors.storage_stall import StorageStallConfig, StorageStallDetector
from classifier.results import Assessment

MB = 1e6


@dataclass(frozen=True)
class Shown:
    """What the host does in one reading; rates in B/s, None is not measured."""

    written: float | None = 20 * MB
    read: float = 0.0
    dirty: float | None = 50 * MB
    blocked: int | None = 0
    full: float | None = 0.0  # share of time
    timeouts: int = 0  # new ones of NFS
    sent: float = 1 * MB
    hidden: bool = False  # a file system is mounted whose bytes are not read


STALLS = Shown(written=0.0, dirty=3000 * MB, blocked=6, full=0.2)


def play(script: Callable[[float], Shown | None], until_s: float = 400.0) -> list[tuple[float, tuple[Assessment, ...]]]:
    detector, history = StorageStallDetector(StorageStallConfig()), History()
    totals = dict.fromkeys(("written", "read", "sent", "full", "timeouts"), 0.0)
    found = []
    for step in range(1, int(until_s / 5) + 1):
        time_s = 5.0 * step
        now = Instant(time_s, 1e9 + time_s)
        shown = script(time_s)
        if shown is not None:
            at = {"monotonic_s": time_s, "wall_s": now.wall_s}
            totals["written"] += 5 * (shown.written or 0.0)
            totals["read"] += 5 * shown.read
            totals["sent"] += 5 * shown.sent
            totals["full"] += 5 * (shown.full or 0.0)
            totals["timeouts"] += shown.timeouts
            records: list[Record] = [
                NetworkSample(**at, device="eth0", receive_bytes_total=0, transmit_bytes_total=int(totals["sent"])),
                PressureSample(
                    **at,
                    io_full_seconds_total=None if shown.full is None else totals["full"],
                    dirty_bytes=None if shown.dirty is None else int(shown.dirty),
                    writeback_bytes=0,
                    blocked_tasks=shown.blocked,
                ),
                FilesystemSample(
                    **at, mountpoint="/data", fstype="nfs4", read_bytes_total=0, written_bytes_total=0,
                    major_timeouts_total=int(totals["timeouts"]),
                ),
            ]  # fmt: skip
            if shown.written is not None:
                counted = {"read_bytes_total": int(totals["read"]), "written_bytes_total": int(totals["written"])}
                records.append(DiskSample(**at, device="nvme0n1", **counted))
            if shown.hidden:
                records.append(FilesystemSample(**at, mountpoint="/scratch", fstype="gpfs"))
            history.ingest(Tick(**at, records=tuple(records)))
        found.append((time_s, tuple(detector.assess(now, history, {}))))
    return found


def severity_at(found: list[tuple[float, tuple[Assessment, ...]]]) -> dict[float, int | None]:
    return {time_s: some[0].severity if some else None for time_s, some in found}


def test_dirty_pages_that_stay_while_tasks_are_blocked_are_a_stall_after_a_minute() -> None:
    found = play(lambda t: STALLS if 100 < t <= 300 else Shown())
    levels = severity_at(found)
    # The first reading is at 105 s.
    assert (levels[160], levels[165], levels[300]) == (0, 2, 2)
    assert levels[320] == 0  # 15 s without it
    finding = next(some[0] for time_s, some in found if time_s == 200)
    assert (finding.scope, finding.device) == ("node", "")
    assert finding.since_monotonic_s == 105
    assert finding.evidence["reason"] == "dirty_pages"
    assert finding.evidence["dirty_bytes"] == 3000 * MB
    assert finding.evidence["blocked_tasks"] == 6


def test_all_programs_waiting_while_nothing_moves_is_a_stall() -> None:
    levels = severity_at(play(lambda t: Shown(written=0.0, full=0.97, blocked=None) if t > 100 else Shown()))
    assert levels[400] == 2


def test_nfs_requests_that_time_out_are_a_stall_while_tasks_are_blocked() -> None:
    # One each minute.
    found = play(lambda t: Shown(written=0.0, blocked=2, timeouts=int(t % 60 == 0)) if t > 100 else Shown())
    assert severity_at(found)[300] == 2
    assert found[-1][1][0].evidence["reason"] == "nfs_timeouts"
    assert "/data" in str(next(s[0].summary for t, s in found if t == 360))


@pytest.mark.parametrize(
    "shown",
    [
        Shown(written=900 * MB, dirty=8000 * MB, blocked=12, full=0.9),  # a checkpoint at full speed
        Shown(written=0.0, dirty=3000 * MB, blocked=0),  # pages that wait for their time
        Shown(written=0.0, dirty=20 * MB, blocked=3),  # a few tasks, hardly anything to write
        Shown(written=0.0, read=400 * MB, full=0.95, blocked=8),  # a slow disk that is read
        Shown(written=0.0, dirty=3000 * MB, blocked=4, hidden=True, sent=300 * MB),  # to where no bytes are counted
        Shown(written=0.0, dirty=0.0, blocked=0),  # nothing to do
    ],
)
def test_what_is_no_stall(shown: Shown) -> None:
    levels = severity_at(play(lambda t: shown if t > 100 else Shown()))
    assert set(levels.values()) - {None} == {0}


def test_dirty_pages_that_become_fewer_go_somewhere() -> None:
    found = play(lambda t: Shown(written=0.0, dirty=8000 * MB - 20 * MB * t, blocked=3) if t > 100 else Shown())
    assert set(severity_at(found).values()) - {None} == {0}


def test_a_short_one_is_none() -> None:
    levels = severity_at(play(lambda t: STALLS if 100 < t <= 140 else Shown()))
    assert set(levels.values()) - {None} == {0}


def test_without_disks_or_pressure_it_is_absent() -> None:
    assert set(severity_at(play(lambda _: Shown(written=None))).values()) == {None}
    assert set(severity_at(play(lambda _: Shown(blocked=None, full=None))).values()) == {None}


def test_a_gap_begins_anew() -> None:
    levels = severity_at(play(lambda t: None if 140 < t <= 200 else STALLS if t > 100 else Shown()))
    assert levels[180] is None
    assert levels[245] == 0
    assert levels[400] == 2


def test_values_that_make_no_sense_are_refused() -> None:
    for change in ({"confirm_seconds": 0.0}, {"blocked_tasks": 0}, {"pressure_ratio": 1.5}):
        with pytest.raises(ValueError, match=next(iter(change))):
            StorageStallConfig(**change)
