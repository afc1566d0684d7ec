"""The fast channel: instant power some ten times a second, in a thread that no hung call stops. Real time, briefly."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import pytest

from agent.clock import stopwatch
from agent.records import GpuFastPower, GpuSample, Record
from agent.samplers.nvml import NvmlConfig, NvmlSampler
from tests.agent.nvml_support import at
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import FUNCTION_NOT_FOUND, GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN, Emulator

#: A hundred times a second, so that a test takes a moment.
CONFIG = NvmlConfig(fast_hertz=100.0, deadline_s=0.5, start_deadline_s=1.0)
SCRIPT = """\
# simulated
@ 0
0 power_milliwatts=100000 power_instant_milliwatts=123456 power_limit_milliwatts=700000
1 power_milliwatts=200000 power_instant_milliwatts=223456 power_limit_milliwatts=700000
0 utilization_gpu_percent=93 utilization_memory_percent=7 event_reasons_bits=4
1 utilization_gpu_percent=0 utilization_memory_percent=0 event_reasons_bits=4
"""


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    return nvml_emulator(SCRIPT)


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(CONFIG)
    yield sampler
    sampler.close()


def fast(records: Sequence[Record]) -> dict[int, GpuFastPower]:
    return {record.key.gpu: record for record in records if isinstance(record, GpuFastPower)}


def until(seconds: float) -> Iterator[int]:
    begin = stopwatch()
    for number in itertools.count():
        if stopwatch() - begin > seconds:
            return
        yield number


def first_with(sampler: NvmlSampler, gpus: set[int], start_s: float) -> dict[int, GpuFastPower]:
    """Sample until these GPUs have readings of this channel, each round 2 s later for the sampler."""
    for number in until(10):
        found = fast(sampler.sample(at(start_s + 2 * number)))
        if gpus <= set(found):
            return found
    raise AssertionError(f"no fast power of {gpus}")


def test_readings_come_with_the_core_tick_oldest_first(emulator, sampler):
    assert fast(sampler.sample(at(0))) == {}
    sampler.sample(at(1))
    for _ in until(0.3):
        threading.Event().wait(0.05)
    began_s = stopwatch()
    records = fast(sampler.sample(at(2)))
    assert set(records) == {0, 1}
    for gpu, watts in ((0, 123.456), (1, 223.456)):
        record = records[gpu]
        assert set(record.power_watts) == {watts}
        assert 10 <= len(record.power_watts) <= 40  # 30 in 0.3 s on a machine that has nothing else to do
        assert list(record.ages_s) == sorted(record.ages_s, reverse=True)
        assert record.ages_s[-1] == 0
        assert 0.2 < record.ages_s[0] < stopwatch() - began_s + 1
        # The newest reading is from just before the tick, at 2 s of the sampler.
        assert 1001.5 < record.monotonic_s <= 1002.1
        assert record.wall_s - record.monotonic_s == pytest.approx(1.8e9 - 1000)


def test_a_record_comes_every_two_seconds(emulator, sampler):
    seen = []
    for second in range(7):
        threading.Event().wait(0.03)
        if fast(sampler.sample(at(second))):
            seen.append(second)
    assert seen == [2, 4, 6]


def test_utilization_stands_beside_each_reading_of_power(emulator, sampler):
    records = first_with(sampler, {0, 1}, 0)
    assert records[0].utilization_ratio == (0.93,) * len(records[0].power_watts)
    assert records[1].utilization_ratio == (0.0,) * len(records[1].power_watts)


@pytest.mark.parametrize("percent", [101, 2**32 - 1])
def test_where_one_utilization_cannot_be_believed_none_is_told(emulator, sampler, percent):
    first_with(sampler, {0, 1}, 0)
    emulator.override("utilization_gpu_percent", percent, gpu=0)
    threading.Event().wait(0.05)
    records = first_with(sampler, {0, 1}, 100)
    assert records[0].power_watts
    assert records[0].utilization_ratio is None
    assert records[1].utilization_ratio == (0.0,) * len(records[1].power_watts)


def reasons(sampler: NvmlSampler, second: float) -> list[tuple[str, ...] | None]:
    return [record.clock_event_reasons for record in sampler.sample(at(second)) if isinstance(record, GpuSample)]


def test_a_clock_event_between_two_ticks_is_not_missed(emulator, sampler):
    first_with(sampler, {0, 1}, 0)
    reasons(sampler, 100)
    # A brake and a moment of idling, over before the tick: the brake is told, idle it is not now.
    emulator.override("event_reasons_bits", 0x80 | 0x1, gpu=1)
    threading.Event().wait(0.1)
    emulator.clear("value")
    threading.Event().wait(0.1)
    assert reasons(sampler, 101) == [("sw_power_cap",), ("sw_power_cap", "hw_power_brake")]
    threading.Event().wait(0.05)
    assert reasons(sampler, 102) == [("sw_power_cap",), ("sw_power_cap",)]  # told once


def test_a_driver_before_r535_has_another_name_for_clock_events(emulator, sampler):
    emulator.fail(FUNCTION_NOT_FOUND, call="nvmlDeviceGetCurrentClocksEventReasons")
    emulator.override("event_reasons_bits", 0x40)
    first_with(sampler, {0, 1}, 0)
    assert reasons(sampler, 100) == [("hw_thermal",), ("hw_thermal",)]


@pytest.mark.parametrize("call", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetCurrentClocksEventReasons"])
def test_a_call_that_takes_long_is_left_out_alone(emulator, sampler, call):
    emulator.latency(0.003, gpu=0, call=call)
    first_with(sampler, {0, 1}, 0)
    emulator.log_calls()
    threading.Event().wait(0.2)
    # No tick meanwhile: the fast channel alone asks.
    assert emulator.calls().of(call, gpu=0) == ()
    assert len(emulator.calls().of(call, gpu=1)) > 5


def test_it_can_be_switched_off(emulator):
    sampler = NvmlSampler(NvmlConfig(fast_hertz=0))
    emulator.log_calls()
    for second in range(5):
        assert fast(sampler.sample(at(second))) == {}
    assert not emulator.calls().of("nvmlDeviceGetFieldValues", detail=186)
    assert not [thread for thread in threading.enumerate() if thread.name == "nvml-fast"]
    sampler.close()


def test_a_board_without_the_field_is_left_out(emulator, sampler):
    emulator.fail(NOT_SUPPORTED, gpu=0, call="field:186")
    assert set(first_with(sampler, {1}, 0)) == {1}
    assert "not_supported" not in sampler.errors


def test_a_board_whose_driver_takes_long_for_it_is_left_out(emulator, sampler):
    emulator.latency(0.003, gpu=0, call="nvmlDeviceGetFieldValues")
    assert set(first_with(sampler, {1}, 0)) == {1}


def test_a_hung_call_costs_one_thread_and_no_other_gpu(emulator, sampler):
    first_with(sampler, {0, 1}, 0)
    emulator.hang(60, gpu=0)  # the core tick and the fast channel, each in a thread of its own
    for number in until(2):
        sampler.sample(at(1000 + number))
        if sampler.parked_threads == 2:
            break
        threading.Event().wait(0.05)
    assert sampler.parked_threads == 2
    assert set(first_with(sampler, {1}, 5000)) == {1}
    assert len([thread for thread in threading.enumerate() if thread.name == "nvml-fast"]) == 2
    emulator.clear()
    assert set(first_with(sampler, {0, 1}, 90000)) == {0, 1}
    assert sampler.parked_threads == 0
    assert len([thread for thread in threading.enumerate() if thread.name == "nvml-fast"]) == 1


def test_impossible_power_is_left_out(emulator, sampler):
    first_with(sampler, {0, 1}, 0)
    emulator.override("power_instant_milliwatts", 2_100_000, gpu=0)  # three times the limit
    for number in range(3):  # what was read before goes with the first
        threading.Event().wait(0.05)
        seen = fast(sampler.sample(at(1000 + 2 * number)))
    assert set(seen) == {1}


def test_a_passing_error_costs_readings_only(emulator, sampler):
    first_with(sampler, {0, 1}, 0)
    emulator.fail(UNKNOWN, call="field:186")
    threading.Event().wait(0.05)
    emulator.clear()
    assert set(first_with(sampler, {0, 1}, 1000)) == {0, 1}


def test_a_gpu_that_was_lost_and_comes_back_is_read_again(emulator, sampler):
    first_with(sampler, {0, 1}, 0)
    emulator.fail(GPU_IS_LOST, gpu=0)
    threading.Event().wait(0.05)
    assert 0 not in fast(sampler.sample(at(1001)))
    assert set(first_with(sampler, {1}, 1002)) == {1}
    emulator.clear()
    assert set(first_with(sampler, {0, 1}, 2000)) == {0, 1}


def test_the_thread_ends_with_the_sampler(emulator, sampler):
    first_with(sampler, {0, 1}, 0)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "nvml-fast"]
    sampler.close()
    thread.join(5)
    assert not thread.is_alive()
    assert [record.power_watts for record in sampler.sample(at(100)) if isinstance(record, GpuSample)] == [100.0, 200.0]
    assert set(first_with(sampler, {0, 1}, 102)) == {0, 1}
