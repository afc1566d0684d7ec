"""The thread that waits for XIDs in the driver, on the NVML emulator."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.clock import ManualClock, SystemClock, stopwatch
from agent.records import GpuKey, GpuXids
from agent.samplers.nvml import NvmlConfig, NvmlSampler
from agent.samplers.nvml_events import NvmlEvents, NvmlEventsConfig
from agent.samplers.xid import XidSampler
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import GPU_IS_LOST, NOT_SUPPORTED, Emulator

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"
SCRIPT = f"""
gpu 0 uuid {A}
gpu 1 uuid {B}
"""


def until(is_true: Callable[[], bool]) -> bool:
    """Wait for what a thread does; return whether it did within a time that no machine needs."""
    end_s = stopwatch() + 10
    pause = threading.Event()
    while stopwatch() < end_s:
        if is_true():
            return True
        pause.wait(0.01)
    return False


class Watcher:
    """Events of both GPUs, summed over batches."""

    def __init__(self, emulator: Emulator, events_per_second: int = 500) -> None:
        self.emulator = emulator
        config = NvmlEventsConfig(
            wait_s=0.1, pause_first_s=0.05, pause_most_s=0.2, close_wait_s=5.0, events_per_second=events_per_second
        )
        self.events = NvmlEvents(SystemClock(), config)
        self.counts: Counter[tuple[str, int]] = Counter()
        self.events.watch({A, B})

    def watched(self) -> frozenset[str]:
        batch = self.events.take()
        self.counts += Counter(batch.counts)
        return batch.watched

    def has(self, expected: dict[tuple[str, int], int]) -> bool:
        self.watched()
        return self.counts == expected


@pytest.fixture
def watcher(nvml_emulator: EmulatorFactory) -> Iterator[Watcher]:
    watcher = Watcher(nvml_emulator(SCRIPT))
    assert until(lambda: watcher.watched() == {A, B})
    yield watcher
    watcher.emulator.clear()
    watcher.events.close()


def test_each_event_is_told_with_its_gpu(watcher: Watcher):
    watcher.emulator.xid(0, 62)
    watcher.emulator.xid(0, 45)
    watcher.emulator.xid(1, 31)
    watcher.emulator.xid(1, 31)
    assert until(lambda: watcher.has({(A, 62): 1, (A, 45): 1, (B, 31): 2}))
    assert watcher.events.errors == {}


def test_all_before_the_last_wait_was_told(watcher: Watcher):
    now_s = SystemClock().now().monotonic_s
    assert until(lambda: watcher.events.take().complete_until_s > now_s)


def test_a_gpu_that_is_lost_still_tells_its_xid(watcher: Watcher):
    watcher.emulator.fail(GPU_IS_LOST, gpu=0, call="nvmlDeviceGetUUID")
    watcher.emulator.xid(0, 79)
    assert until(lambda: watcher.has({(A, 79): 1}))


def test_a_gpu_without_events_leaves_the_other(nvml_emulator: EmulatorFactory):
    emulator = nvml_emulator(SCRIPT)
    emulator.fail(NOT_SUPPORTED, gpu=0, call="nvmlDeviceGetSupportedEventTypes")
    watcher = Watcher(emulator)
    assert until(lambda: watcher.watched() == {B})
    emulator.xid(1, 13)
    assert until(lambda: watcher.has({(B, 13): 1}))
    assert watcher.events.errors == {}  # not offered is no failure
    watcher.events.close()


def test_a_set_that_fails_is_made_anew(watcher: Watcher):
    watcher.emulator.fail(GPU_IS_LOST, call="nvmlEventSetWait")
    watcher.emulator.fail_system(GPU_IS_LOST, call="nvmlEventSetWait")
    assert until(lambda: watcher.events.errors.get("gpu_is_lost", 0) >= 2)
    watcher.emulator.clear()
    assert until(lambda: watcher.watched() == {A, B})
    watcher.emulator.xid(1, 94)
    assert until(lambda: watcher.has({(B, 94): 1}))


def test_release_frees_the_library_and_resume_registers_anew(watcher: Watcher):
    assert watcher.events.release(5.0)
    assert watcher.watched() == frozenset()
    watcher.events.resume()
    assert until(lambda: watcher.watched() == {A, B})
    watcher.emulator.xid(0, 31)
    assert until(lambda: watcher.has({(A, 31): 1}))


def test_a_hung_wait_blocks_neither_release_nor_close(nvml_emulator: EmulatorFactory):
    emulator = nvml_emulator(SCRIPT)
    events = NvmlEvents(SystemClock(), NvmlEventsConfig(wait_s=0.05, close_wait_s=0.1))
    events.watch({A, B})
    assert until(lambda: events.take().watched == {A, B})
    emulator.hang(60, call="nvmlEventSetWait")
    emulator.hang_system(60, call="nvmlEventSetWait")
    heard_s = SystemClock().now().monotonic_s + 0.3
    assert until(lambda: SystemClock().now().monotonic_s > heard_s)
    started_s = stopwatch()
    assert not events.release(0.1)
    events.close()
    assert stopwatch() - started_s < 2
    emulator.clear()
    assert until(lambda: events.release(0.1))  # back from the driver, it leaves the library in order


def test_a_flood_is_paced_and_loses_nothing(nvml_emulator: EmulatorFactory):
    emulator = nvml_emulator(SCRIPT)
    watcher = Watcher(emulator, events_per_second=100)
    assert until(lambda: watcher.watched() == {A, B})
    started_s = stopwatch()
    emulator.xid(0, 31, count=150)
    assert until(lambda: watcher.has({(A, 31): 150}))
    # Seconds are counted from their first event: 100 in the first, the others in the next.
    assert stopwatch() - started_s > 0.9
    watcher.events.close()


def test_a_gpu_that_comes_back_after_a_new_start_of_the_library_is_watched_again(nvml_emulator: EmulatorFactory):
    emulator = nvml_emulator(SCRIPT + "@ 0\n0 power_milliwatts=100000\n1 power_milliwatts=101000\n")
    watcher = Watcher(emulator)
    clock = ManualClock(100.0)
    sampler = NvmlSampler(NvmlConfig(restart_first_s=5.0), companions=(watcher.events,))
    assert sampler.probe()
    sampler.sample(clock.now())
    assert until(lambda: watcher.watched() == {A, B})
    emulator.fail(GPU_IS_LOST, gpu=0)
    emulator.xid(0, 79)
    assert until(lambda: watcher.has({(A, 79): 1}))
    sampler.sample(clock.advance(1.0))
    assert sampler.visible_gpus == 1
    emulator.clear("fail")
    for _ in range(20):
        sampler.sample(clock.advance(1.0))
    assert sampler.visible_gpus == 2
    assert until(lambda: watcher.watched() == {A, B})
    emulator.xid(0, 31)
    assert until(lambda: watcher.has({(A, 79): 1, (A, 31): 1}))
    sampler.close()
    watcher.events.close()


def test_both_sources_at_once_count_each_event_once(nvml_emulator: EmulatorFactory, tmp_path: Path):
    emulator = nvml_emulator(SCRIPT)
    events = Watcher(emulator).events
    log = tmp_path / "kmsg"
    log.touch()
    clock = SystemClock()
    gpus = {A: (GpuKey(0, A), "00000000:3b:00.0"), B: (GpuKey(1, B), "00000000:5e:00.0")}
    sampler = XidSampler(lambda: gpus, clock, log, events=events)
    assert sampler.probe()
    assert until(lambda: events.take().watched == {A, B})
    with log.open("a") as file:
        file.write("3,1,1,-;NVRM: Xid (PCI:0000:3b:00): 62, pid=1\n3,2,2,-;NVRM: Xid (PCI:0000:3b:00): 45, pid=1\n")
    emulator.xid(0, 45, count=2)  # as the driver tells it
    emulator.xid(1, 94)
    totals: dict[int, dict[int, int]] = {}

    def is_complete() -> bool:
        for record in sampler.sample(clock.now()):
            assert isinstance(record, GpuXids)
            totals[record.key.gpu] = {code: count for code, count in record.totals.items() if count}
        return bool(totals.get(1))

    assert until(is_complete)
    # One more wait of the driver, for an event too many.
    now_s = clock.now().monotonic_s
    assert until(lambda: is_complete() and clock.now().monotonic_s > now_s + 0.3)
    assert totals == {0: {62: 1, 45: 1}, 1: {94: 1}}
    sampler.close()
