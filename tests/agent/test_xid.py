"""Counting XIDs from two sources, each event once. The kernel's log is a file in its place, NVML a list of batches."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from agent.clock import ManualClock
from agent.composition import build_pipeline
from agent.config import Config
from agent.record_codec import decode_records, encode_records
from agent.records import GpuKey, GpuXids, NvswitchSxids, Record, Tick
from agent.samplers import SourceUnavailableError
from agent.samplers.kmsg import KmsgReader
from agent.samplers.nvml_events import EventBatch
from agent.samplers.xid import XidConfig, XidSampler
from agent.samplers.xid_tally import Unmatched
from agent.xids import XIDS

A, B = "GPU-aaaa", "GPU-bbbb"
GPUS: dict[str, tuple[GpuKey, str | None]] = {
    A: (GpuKey(0, A), "00000000:3B:00.0"),
    B: (GpuKey(1, B), "00000000:5E:00.0"),
}
PCI = {A: "0000:3b:00", B: "0000:5e:00"}


class Events:
    """NVML's side, told by the test: `tell` puts XIDs into the next batch."""

    def __init__(self) -> None:
        self.errors: Mapping[str, int] = {}
        self.watched: frozenset[str] = frozenset()
        self.complete_until_s = 0.0
        self.heard_s = 0.0
        self.is_settled = True
        self.offers = True
        self.is_closed = False
        self.is_released = False
        self._counts: Counter[tuple[str, int]] = Counter()

    def tell(self, uuid: str, *codes: int) -> None:
        self._counts.update((uuid, code) for code in codes)

    def watch(self, uuids: AbstractSet[str]) -> None:
        if self.offers:
            self.watched = frozenset(uuids)

    def take(self) -> EventBatch:
        counts, self._counts = self._counts, Counter()
        return EventBatch(counts, self.watched, self.complete_until_s, self.heard_s, self.is_settled)

    def release(self, wait_s: float) -> bool:
        self.is_released = True
        return wait_s > 0

    def resume(self) -> None:
        self.is_released = False

    def close(self) -> None:
        self.is_closed = True


class Host:
    """A sampler with what it reads; `tick` moves the clock by a second and samples."""

    def __init__(self, path: Path, config: XidConfig | None = None) -> None:
        self.path = path
        self.clock = ManualClock(100.0, 1_700_000_000.0)
        self.events = Events()
        self.gpus = dict(GPUS)
        self.nvml_hangs = False
        self.touched: list[str] = []
        self.sampler = XidSampler(
            lambda: self.gpus,
            self.clock,
            config=config,
            events=self.events,
            log=KmsgReader(path, awake_s=lambda: self.clock.now().monotonic_s),
            on_xid=self.touched.append,
        )
        self.latest: dict[GpuKey | str, GpuXids | NvswitchSxids] = {}

    def log(self, uuid: str, *codes: int, stamp_s: float = 0.0) -> None:
        self.write(*[f"3,1,{round(stamp_s * 1e6)},-;NVRM: Xid (PCI:{PCI[uuid]}): {code}, pid=1" for code in codes])

    def write(self, *lines: str) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def tick(self, seconds: float = 1.0) -> list[Record]:
        now = self.clock.advance(seconds)
        if not self.nvml_hangs:
            # The thread has come back from a wait that began in the last second.
            self.events.complete_until_s = now.monotonic_s - 1.0
            self.events.heard_s = now.monotonic_s
        records = list(self.sampler.sample(now))
        for record in records:
            if isinstance(record, GpuXids):
                self.latest[record.key] = record
            elif isinstance(record, NvswitchSxids):
                self.latest[record.device] = record
        return records

    def seen(self, uuid: str) -> dict[int, int]:
        """The codes of a GPU that are not at 0, from its latest record."""
        record = self.latest[self.gpus[uuid][0]]
        return {code: count for code, count in record.totals.items() if count}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "kmsg").touch()
    host = Host(tmp_path / "kmsg")
    assert host.sampler.probe()
    yield host
    host.sampler.close()
    assert host.events.is_closed


@pytest.fixture
def nvml_only(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "kmsg")
    assert host.sampler.probe()
    yield host
    host.sampler.close()


# One source.


def test_critical_codes_are_there_at_0_from_the_first_record_on(host: Host):
    host.tick()
    record = host.latest[GPUS[A][0]]
    assert isinstance(record, GpuXids)
    assert record.totals == dict.fromkeys(XIDS.critical(), 0)
    assert record.last_wall_s == {}


def test_the_same_xid_twice_counts_two(nvml_only: Host):
    nvml_only.events.tell(A, 31, 31)
    nvml_only.tick()
    nvml_only.events.tell(A, 31)
    nvml_only.tick()
    assert nvml_only.seen(A) == {31: 3}
    assert nvml_only.latest[GPUS[A][0]].last_wall_s == {31: 1_700_000_002.0}


def test_all_codes_are_counted_and_not_the_last_alone(host: Host):
    host.log(A, 62, 45)
    host.log(B, 79)
    host.tick()
    assert host.seen(A) == {62: 1, 45: 1}
    assert host.seen(B) == {79: 1}


def test_every_tick_brings_a_record_and_every_gpu_one_in_5_s(tmp_path: Path):
    host = Host(tmp_path / "kmsg")
    host.gpus = {f"GPU-{n}": (GpuKey(n, f"GPU-{n}"), None) for n in range(8)}
    assert host.sampler.probe()
    assert len(host.tick()) == 8
    sent: Counter[int] = Counter()
    for _ in range(16):
        records = host.tick()
        # 8 GPUs in 5 ticks are 2 a tick: each GPU in every fourth.
        assert len(records) == 2
        sent.update(record.key.gpu for record in records if isinstance(record, GpuXids))
    assert sent == dict.fromkeys(range(8), 4)
    host.sampler.close()


def test_a_gpu_with_news_is_sent_at_once(host: Host):
    host.tick()
    host.tick()
    host.log(A, 48)
    host.log(B, 48)
    assert {record.key.gpu for record in host.tick() if isinstance(record, GpuXids)} == {0, 1}


# Two sources.


@pytest.mark.parametrize("delay", [-2, -1, 0, 1, 2])
def test_an_event_that_both_tell_counts_once(host: Host, delay: int):
    host.tick()
    (host.log if delay >= 0 else host.events.tell)(A, 79)
    for _ in range(abs(delay)):
        host.tick()
    (host.events.tell if delay >= 0 else host.log)(A, 79)
    for _ in range(6):
        host.tick()
    assert host.seen(A) == {79: 1}


def test_events_further_apart_than_the_window_are_two(host: Host):
    host.log(A, 31)
    for _ in range(6):
        host.tick()
    host.events.tell(A, 31)
    host.tick()
    assert host.seen(A) == {31: 2}


def test_whoever_wants_to_know_is_told_of_the_gpu_once_for_each_news(host: Host):
    host.tick()
    assert host.touched == []
    host.log(A, 48)
    host.tick()
    assert host.touched == [A]
    host.events.tell(A, 48)  # the same event
    host.events.tell(B, 79)
    host.tick()
    assert host.touched == [A, B]


def test_codes_and_gpus_are_not_mixed(host: Host):
    host.events.tell(A, 31)
    host.log(A, 13)
    host.log(B, 31)
    host.tick()
    # NVML's 31 of A came without a line of its code, and the line of 13 without an event: one event, as the log has it.
    assert host.seen(A) == {13: 1}
    for _ in range(5):
        host.tick()
    assert host.seen(B) == {31: 1}


def test_of_62_and_45_nvml_tells_45_twice_and_the_log_is_believed(host: Host):
    host.log(A, 62, 45)
    host.events.tell(A, 45, 45)
    host.tick()
    for _ in range(5):
        host.tick()
    assert host.seen(A) == {62: 1, 45: 1}


def test_more_of_one_source_than_of_the_other_is_the_larger_number(host: Host):
    host.log(A, *[31] * 7)
    host.events.tell(A, *[31] * 10)
    host.log(B, *[31] * 10)
    host.events.tell(B, *[31] * 7)
    for _ in range(6):
        host.tick()
    assert host.seen(A) == {31: 10}
    assert host.seen(B) == {31: 10}


def test_a_driver_that_hangs_tells_its_events_late_and_they_count_once(host: Host):
    host.tick()
    host.nvml_hangs = True
    host.log(A, 119)
    for _ in range(60):
        host.tick()
    host.events.tell(A, 119)
    host.nvml_hangs = False
    for _ in range(6):
        host.tick()
    assert host.seen(A) == {119: 1}


def test_an_agent_that_stood_still_finds_both_and_counts_once(host: Host):
    host.tick()
    host.log(A, 31)
    host.events.tell(A, 31)
    host.tick(120.0)
    for _ in range(6):
        host.tick()
    assert host.seen(A) == {31: 1}


def test_a_lost_gpu_still_counts_what_either_source_tells(host: Host):
    host.tick()
    # NVML cannot register it any more; the table of GPUs keeps it.
    host.events.offers = False
    host.events.watched = frozenset({B})
    host.log(A, 79)
    host.tick()
    assert host.seen(A) == {79: 1}
    host.events.tell(A, 154)
    host.tick()
    assert host.seen(A) == {79: 1, 154: 1}


# Boots, restarts, addresses.


def test_what_came_before_is_dated_and_not_counted(tmp_path: Path):
    (tmp_path / "kmsg").touch()
    host = Host(tmp_path / "kmsg")
    host.log(A, 79, stamp_s=40.0)
    host.log(A, 31, stamp_s=90.0)
    host.sampler.probe()
    host.tick()
    record = host.latest[GPUS[A][0]]
    assert host.seen(A) == {}
    assert record.totals[31] == 0  # the next one shows as an increase
    # Awake for 100 s at the start, 1_700_000_000: 60 s and 10 s before.
    assert record.last_wall_s == {79: 1_699_999_940.0, 31: 1_699_999_990.0}
    host.sampler.close()


def test_lines_about_an_address_without_a_gpu_are_kept_until_it_has_one(host: Host):
    del host.gpus[B]
    host.log(B, 143, 143)
    host.tick()
    assert host.sampler.errors["unknown_gpu"] == 2
    host.gpus[B] = GPUS[B]
    host.tick()
    assert host.seen(B) == {143: 2}


def test_a_gpu_in_the_slot_of_another_starts_at_0(host: Host):
    host.log(A, 64)
    host.tick()
    host.gpus["GPU-new"] = (GpuKey(2, "GPU-new"), GPUS[A][1])
    host.log(A, 31)
    host.tick()
    assert host.seen("GPU-new") == {31: 1}
    for _ in range(5):
        host.tick()
    assert host.seen(A) == {64: 1}


# What is not offered.


def test_without_gpus_the_source_is_not_here(tmp_path: Path):
    host = Host(tmp_path / "kmsg")
    host.gpus = {}
    assert not host.sampler.probe()
    assert host.tick() == []
    host.sampler.close()


def test_without_the_log_nvml_goes_alone_and_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    host = Host(tmp_path / "kmsg")
    with caplog.at_level(logging.INFO):
        host.sampler.probe()
        for _ in range(200):
            host.tick()
    assert [record.message for record in caplog.records if "NVML alone" in record.message] == [
        f"XIDs come from NVML alone: {tmp_path / 'kmsg'} is not there"
    ]
    assert host.sampler.errors == {}
    host.sampler.close()


def test_a_log_that_appears_is_read_within_a_minute(nvml_only: Host):
    nvml_only.tick()
    nvml_only.path.touch()
    for _ in range(60):
        nvml_only.tick()
    nvml_only.log(A, 79)
    nvml_only.tick()
    assert nvml_only.seen(A) == {79: 1}


def test_a_gpu_of_which_nothing_is_told_has_no_zeros(nvml_only: Host):
    nvml_only.events.offers = False
    nvml_only.events.watched = frozenset({B})
    for _ in range(6):
        nvml_only.tick()
    assert set(nvml_only.latest) == {GPUS[B][0]}


def test_without_any_source_there_is_a_reason(nvml_only: Host):
    nvml_only.events.offers = False
    nvml_only.events.watched = frozenset()
    nvml_only.events.is_settled = False
    assert nvml_only.tick() == []  # the driver is still being asked
    nvml_only.events.is_settled = True
    with pytest.raises(SourceUnavailableError, match="CAP_SYSLOG") as raised:
        nvml_only.tick()
    assert raised.value.reason == "no_source"


def test_a_hung_driver_without_the_log_leaves_no_zeros(nvml_only: Host):
    nvml_only.tick()
    nvml_only.nvml_hangs = True
    for _ in range(14):
        assert nvml_only.tick()
    nvml_only.tick()
    with pytest.raises(SourceUnavailableError):
        nvml_only.tick()


# Floods.


def test_a_flood_of_equal_events_keeps_its_count_and_little_else(host: Host):
    host.nvml_hangs = True  # else the lines would expire
    for _ in range(50):
        host.log(A, *[31] * 2000)
        host.tick()
    assert host.seen(A) == {31: 100_000}
    gpu = host.sampler._gpus[A]
    assert len(gpu.from_log) <= 8
    host.events.tell(A, *[31] * 5000)
    host.nvml_hangs = False
    host.tick()
    assert host.seen(A) == {31: 100_000}


def test_codes_beyond_the_bound_are_counted_as_errors(tmp_path: Path):
    (tmp_path / "kmsg").touch()
    host = Host(tmp_path / "kmsg", XidConfig(codes_per_device=20))
    host.sampler.probe()
    critical = len(XIDS.critical())
    host.log(A, *range(1000, 1100))
    host.tick()
    assert len(host.latest[GPUS[A][0]].totals) == 20
    assert host.sampler.errors["too_many_codes"] == 100 - (20 - critical)
    host.sampler.close()


def test_one_line_a_minute_is_logged_of_one_code(host: Host, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        for _ in range(120):
            host.log(A, 31)
            host.tick()
    assert [record.message for record in caplog.records] == [
        f"{A}: XID 31 (page fault in GPU memory); action: restart_app"
    ] * 2


def test_unmatched_events_are_taken_oldest_first_and_expire():
    events = Unmatched()
    for second in range(20):
        events.add(31, 1, float(second))
    assert len(events) == 8
    assert events.take(31, 3) == 3  # seconds 0, 1, 2
    events.expire(5.0)
    assert events.take(31, 100) == 15  # 5 and later; 3 and 4 are gone
    assert events.take(31, 1) == 0
    events.add(13, 2, 0.0)
    events.add(45, 2, 0.0)
    assert events.take_any(3) == 3
    assert events.take_any(3) == 1


# NVSwitches.


def test_sxids_are_counted_by_switch_with_the_fatal_ones_apart(host: Host):
    host.write(
        "3,1,0,-;nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO",
        "3,1,0,-;nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        "3,1,0,-;nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    )
    host.tick()
    (record,) = [record for record in host.tick() if isinstance(record, NvswitchSxids)]
    assert record.device == "00000000:c1:00"
    assert record.totals == {28006: 1, 20034: 2}
    assert record.fatal_totals == {20034: 2}
    assert record.last_wall_s == dict.fromkeys((28006, 20034), 1_700_000_001.0)
    warnings: list[str] = []
    encoded = encode_records((record,))
    assert decode_records(encoded, record.monotonic_s, record.wall_s, warnings.append) == (record,)
    assert warnings == []
    assert host.sampler.errors == {}
    pipeline = build_pipeline(Config())
    pipeline.ingest(Tick(monotonic_s=record.monotonic_s, wall_s=record.wall_s, records=(record,)))


def test_release_and_resume_are_handed_on(host: Host):
    assert host.sampler.release(0.5)
    assert host.events.is_released
    host.sampler.resume()
    assert not host.events.is_released
