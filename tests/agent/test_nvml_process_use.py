"""What each process uses of a GPU, on the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.records import GpuKey, GpuProcess, GpuSlowSample
from agent.samplers.nvml import NvmlSampler
from tests.agent.nvml_support import KEY, UUID, WITHOUT_FAST, at, of
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import NO_PERMISSION, NOT_SUPPORTED, UNKNOWN, Emulator

SCRIPT = f"""\
# simulated
driver 580.95.05
gpu 0 uuid {UUID}
@ 0
0 utilization_gpu_percent=80 utilization_memory_percent=30 processes=11:100,22
"""
#: The emulator shares the use of the GPU among its processes: 80 / 2 and 30 / 2 percent.
BUSY = (GpuProcess(11, 100, 0.40, 0.15), GpuProcess(22, None, 0.40, 0.15))
STILL = (GpuProcess(11, 100, 0.0, 0.0), GpuProcess(22, None, 0.0, 0.0))
NOT_TOLD = (GpuProcess(11, 100), GpuProcess(22))
CALL = "nvmlDeviceGetProcessUtilization"


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    return nvml_emulator(SCRIPT)


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(WITHOUT_FAST)
    yield sampler
    sampler.close()


def processes(sampler: NvmlSampler, second: float, key: GpuKey = KEY) -> tuple[GpuProcess, ...] | None:
    return of(sampler.sample(at(second)), GpuSlowSample, key).processes


def test_each_process_has_its_share_and_0_where_it_ran_nothing(emulator, sampler):
    emulator.log_calls()
    assert processes(sampler, 0) == BUSY
    emulator.override("utilization_gpu_percent", 0)  # the driver has no sample then
    assert processes(sampler, 5) == STILL
    # One call for each slow tick: the memory for the answer is there already.
    assert len(emulator.calls().of(CALL)) == 2
    assert sampler.errors == {}


@pytest.mark.parametrize(("age_s", "expected"), [(3, BUSY), (7, STILL), (30, STILL)])
def test_a_sample_from_before_the_last_tick_says_nothing_about_now(emulator, sampler, age_s, expected):
    processes(sampler, 0)
    emulator.override("process_utilization_age_seconds", age_s)
    assert processes(sampler, 5) == expected


def test_a_sample_from_the_future_is_one_from_before_a_step_of_the_clock(emulator, sampler):
    emulator.override("process_utilization_age_seconds", -3600)
    assert processes(sampler, 0) == STILL
    assert sampler.errors == {}


def test_the_first_answer_holds_what_is_15_s_old(emulator, sampler):
    emulator.override("process_utilization_age_seconds", 14)
    assert processes(sampler, 0) == BUSY


def test_nonsense_is_counted_and_costs_its_field(emulator, sampler):
    emulator.override("utilization_gpu_percent", 250)  # 125 % for each
    assert processes(sampler, 0) == (GpuProcess(11, 100, None, 0.15), GpuProcess(22, None, None, 0.15))
    assert sampler.errors == {"implausible": 3}  # the GPU's own too


def test_more_processes_than_there_was_room_for(nvml_emulator, sampler):
    emulator = nvml_emulator(SCRIPT.replace("11:100,22", ",".join(str(pid) for pid in range(1, 101))))
    emulator.log_calls()
    # 80 / 100 and 30 / 100 percent, in whole numbers.
    assert processes(sampler, 0) == tuple(GpuProcess(pid, None, 0.0, 0.0) for pid in range(1, 101))
    assert len(emulator.calls().of(CALL)) == 2
    assert processes(sampler, 5) is not None
    assert len(emulator.calls().of(CALL)) == 3
    assert sampler.errors == {}


def test_a_gpu_without_processes_is_not_asked(nvml_emulator, sampler):
    emulator = nvml_emulator(SCRIPT.replace("11:100,22", ""))
    emulator.log_calls()
    assert processes(sampler, 0) == ()
    assert emulator.calls().of(CALL) == ()


@pytest.mark.parametrize(
    ("code", "counted", "calls"),
    [(NOT_SUPPORTED, {}, 1), (NO_PERMISSION, {"no_permission": 1}, 1), (UNKNOWN, {"unknown": 2}, 2)],
)
def test_where_it_is_not_offered_the_list_is_as_before(emulator, sampler, code, counted, calls):
    emulator.fail(code, call=CALL)
    emulator.log_calls()
    assert processes(sampler, 0) == NOT_TOLD
    assert processes(sampler, 5) == NOT_TOLD
    assert sampler.errors == counted
    assert len(emulator.calls().of(CALL)) == calls
