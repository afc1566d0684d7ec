"""A GPU that answers late costs that GPU only: the others are read in every tick, on time."""

from __future__ import annotations

import time

import pytest

from agent.clock import stopwatch
from agent.records import GpuSample
from agent.samplers.nvml import NvmlConfig, NvmlSampler
from tests.agent.test_nvml_faults import at, script, states

WAIT_S = 0.1


@pytest.fixture
def sampler():
    sampler = NvmlSampler(NvmlConfig(tick_wait_s=WAIT_S, deadline_s=1.2, start_deadline_s=1.2, fast_hertz=0))
    yield sampler
    sampler.close()


def sampled(records):
    return {record.key.gpu for record in records if isinstance(record, GpuSample)}


def until(condition, seconds=5.0):
    """Tick ten times a second, as a schedule would, until `condition` holds of a tick's records; return how many."""
    for tick in range(1, int(seconds * 10)):
        if condition(tick):
            return tick
        time.sleep(0.1)
    pytest.fail("it never did")


def test_a_gpu_that_hangs_keeps_no_other_waiting(nvml_emulator, sampler):
    emulator = nvml_emulator(script(3))
    assert sampled(sampler.sample(at(0))) == {0, 1, 2}
    emulator.hang(60, gpu=1)
    begin = stopwatch()

    def hangs(tick):
        started = stopwatch()
        records = sampler.sample(at(tick))
        assert stopwatch() - started < WAIT_S + 0.3
        assert sampled(records) == {0, 2}
        return states(records)[1] == "hung"

    until(hangs)
    # Not before its deadline: until then it is slow, and its state is what it was.
    assert stopwatch() - begin >= 1.2
    emulator.clear("hang")
    until(lambda tick: sampled(sampler.sample(at(100 + tick))) == {0, 1, 2})


def test_a_slow_gpu_is_read_whenever_it_answers(nvml_emulator, sampler):
    emulator = nvml_emulator(script(3))
    sampler.sample(at(0))
    emulator.latency(0.4, gpu=1, call="nvmlDeviceGetPowerUsage")
    seen = []

    def came_twice(tick):
        records = sampler.sample(at(tick))
        assert {0, 2} <= sampled(records)
        assert states(records)[1] == "ok"
        seen.extend(r for r in records if isinstance(r, GpuSample) and r.key.gpu == 1)
        return len(seen) >= 2

    until(came_twice)
    # Each reading has the time at which it was asked for, and none comes twice.
    times = [record.monotonic_s for record in seen]
    assert times == sorted(set(times))
    assert not sampler.errors
