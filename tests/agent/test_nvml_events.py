"""The thread that waits for XIDs in the driver, on the NVML emulator."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from agent.clock import SystemClock, stopwatch
from agent.samplers.nvml_events import NvmlEvents, NvmlEventsConfig
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import GPU_IS_LOST, NOT_SUPPORTED, Emulator

pytestmark = pytest.mark.skipif(not hasattr(Emulator, "xid"), reason="the emulator plays no events yet")

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

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.events = NvmlEvents(
            SystemClock(), NvmlEventsConfig(wait_s=0.1, pause_first_s=0.05, pause_most_s=0.2, close_wait_s=5.0)
        )
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


def test_a_flood_is_paced_and_loses_nothing(watcher: Watcher):
    for _ in range(20):
        watcher.emulator.xid(0, 31)
    assert until(lambda: watcher.has({(A, 31): 20}))
