"""What the NVML sampler makes of the driver's numbers: every value distinct, so that a swapped pair shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest

from agent.clock import Instant
from agent.records import GpuInfo, GpuKey, GpuLimits, GpuProcess, GpuSample, GpuSlowSample, GpuState, Record
from agent.samplers.nvml import NvmlConfig, NvmlSampler
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    Emulator,
)

UUID = "GPU-11111111-2222-4333-8444-555555555555"
SCRIPT = f"""\
# simulated
driver 570.124.06
gpu 0 uuid {UUID}
gpu 0 name NVIDIA H200
gpu 0 pci_bus_id 00000000:3B:00.0
gpu 0 minor 5
gpu 0 nvlink_links 18
@ 0
0 utilization_gpu_percent=97 utilization_memory_percent=41 power_milliwatts=412345 power_limit_milliwatts=700000
0 memory_total_bytes=150754820096 memory_used_bytes=33000001536 memory_reserved_bytes=600000000
0 sm_clock_megahertz=1755 sm_clock_max_megahertz=1980 memory_clock_megahertz=3200 memory_clock_max_megahertz=3201
0 temperature_celsius=61 memory_temperature_celsius=74 event_reasons_bits=4
0 energy_millijoules=1000000 power_cap_nanoseconds=2500000000 thermal_nanoseconds=750000000
0 pcie_transmit_bytes=5000000000 pcie_receive_bytes=7000000000
0 nvlink_transmit_kibibytes=1800 nvlink_receive_kibibytes=3600
0 processes=4242:33000000000,4243
@ 10
0 energy_millijoules=5000000 nvlink_transmit_kibibytes=3800 nvlink_receive_kibibytes=7600
"""
#: 97 % and 41 % of the GPU, which the emulator shares among the two in whole percent.
PROCESSES = (GpuProcess(4242, 33000000000, 0.48, 0.20), GpuProcess(4243, None, 0.48, 0.20))


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(NvmlConfig(fast_hertz=0))
    yield sampler
    sampler.close()


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    emulator = nvml_emulator(SCRIPT)
    emulator.freeze(0)
    return emulator


def at(seconds: float) -> Instant:
    return Instant(1000.0 + seconds, 1.8e9 + seconds)


def only(records: Sequence[Record], kind: type[Record]) -> Record:
    found = [record for record in records if type(record) is kind]
    assert len(found) == 1, found
    return found[0]


def test_every_value_has_its_place_and_its_unit(emulator: Emulator, sampler: NvmlSampler) -> None:
    times = {"monotonic_s": 1000.0, "wall_s": 1.8e9, "key": GpuKey(0, UUID)}
    assert sampler.probe()
    assert sampler.sample(at(0)) == [
        GpuInfo(
            **times,
            model_name="NVIDIA H200",
            pci_bus_id="00000000:3B:00.0",
            device="nvidia5",
            driver_version="570.124.06",
        ),
        GpuState(**times, state="ok"),
        GpuLimits(**times, power_limit_watts=700.0, sm_clock_max_hertz=1.980e9, memory_clock_max_hertz=3.201e9),
        GpuSample(
            **times,
            utilization_ratio=0.97,
            memory_utilization_ratio=0.41,
            memory_used_bytes=33000001536,
            memory_total_bytes=150754820096,
            power_watts=412.345,
            sm_clock_hertz=1.755e9,
            memory_clock_hertz=3.2e9,
            clock_event_reasons=("sw_power_cap",),
            nvlink_transmit_bytes_total=1843200,  # 1800 KiB over all links
            nvlink_receive_bytes_total=3686400,
        ),
        GpuSlowSample(
            **times,
            energy_joules_total=1000.0,
            temperature_celsius=61.0,
            memory_temperature_celsius=74.0,
            pcie_transmit_bytes_total=5000000000,
            pcie_receive_bytes_total=7000000000,
            processes=PROCESSES,
            clock_event_seconds_total={"sw_power_cap": 2.5, "sw_thermal": 0.75},
        ),
    ]
    assert sampler.errors == {}
    assert (sampler.expected_gpus, sampler.visible_gpus) == (1, 1)
    assert sampler.driver_seconds > 0


def test_counters_count_between_and_after_the_points_of_the_script(emulator: Emulator, sampler: NvmlSampler) -> None:
    sampler.sample(at(0))
    emulator.freeze(2.5)  # a quarter of the way: 1800 + 500 KiB, 3600 + 1000 KiB
    sample = only(sampler.sample(at(1)), GpuSample)
    assert (sample.nvlink_transmit_bytes_total, sample.nvlink_receive_bytes_total) == (2300 * 1024, 4600 * 1024)
    emulator.freeze(20)  # 10 s after the end at 400 J/s: 5000 + 4000 J
    assert only(sampler.sample(at(5)), GpuSlowSample).energy_joules_total == 9000.0


def test_tiers_have_periods_of_1_5_and_60_seconds(emulator: Emulator, sampler: NvmlSampler) -> None:
    kinds = []
    for second in range(121):
        jitter = 0.02 if second % 2 else -0.02  # a tick that comes a little early does not slip to the next one
        kinds += [(type(record), second) for record in sampler.sample(at(second + jitter))]
    assert [second for kind, second in kinds if kind is GpuState] == list(range(121))
    assert [second for kind, second in kinds if kind is GpuSlowSample] == list(range(0, 121, 5))
    assert [second for kind, second in kinds if kind is GpuLimits] == [0, 60, 120]
    assert [second for kind, second in kinds if kind is GpuInfo] == [0, 60, 120]


def test_event_reasons_follow_the_bits_of_nvml_h(emulator: Emulator, sampler: NvmlSampler) -> None:
    words = {
        0x0: (),
        0x1: ("gpu_idle",),
        0x2: (),  # application clocks: no word of ours
        0x4: ("sw_power_cap",),
        0x8: ("hw_slowdown",),
        0x10: ("sync_boost",),
        0x20: ("sw_thermal",),
        0x40: ("hw_thermal",),
        0x80: ("hw_power_brake",),
        0x100: (),  # display clock
        0x48: ("hw_slowdown", "hw_thermal"),
    }
    for second, (bits, expected) in enumerate(words.items()):
        emulator.clear()
        emulator.override("event_reasons_bits", bits)
        assert only(sampler.sample(at(second)), GpuSample).clock_event_reasons == expected, hex(bits)


def test_a_32_bit_pcie_counter_gives_no_bytes(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    nvml_emulator(SCRIPT + "gpu 0 pcie_counter_bits 32\n").freeze(0)
    slow = only(sampler.sample(at(0)), GpuSlowSample)
    assert (slow.pcie_transmit_bytes_total, slow.pcie_receive_bytes_total) == (None, None)
    assert slow.memory_temperature_celsius == 74.0  # 32 bits are enough for a temperature
    assert sampler.errors == {}


def test_what_a_board_does_not_offer_is_none_and_no_error(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    nvml_emulator("gpu 0 name NVIDIA GeForce RTX 3060\n@ 0\n0 power_milliwatts=30000\n")
    records = sampler.sample(at(0))
    sample = only(records, GpuSample)
    assert sample.power_watts == 30.0
    given = {name for name in GpuSample.__dataclass_fields__ if getattr(sample, name) is not None}
    assert given == {"monotonic_s", "wall_s", "key", "power_watts"}
    assert only(records, GpuSlowSample).processes is None
    assert only(records, GpuLimits).power_limit_watts is None
    assert sampler.errors == {}


def test_a_call_that_is_not_supported_is_not_made_again(emulator: Emulator, sampler: NvmlSampler) -> None:
    emulator.fail(NOT_SUPPORTED, call="nvmlDeviceGetPowerUsage")
    emulator.fail(NOT_SUPPORTED, call="field:138")
    sample = only(sampler.sample(at(0)), GpuSample)
    assert (sample.power_watts, sample.nvlink_transmit_bytes_total) == (None, None)
    assert (sample.utilization_ratio, sample.nvlink_receive_bytes_total) == (0.97, 3686400)
    emulator.clear()  # an answer now would show that it was asked again
    emulator.freeze(0)
    sample = only(sampler.sample(at(1)), GpuSample)
    assert (sample.power_watts, sample.nvlink_transmit_bytes_total) == (None, None)
    assert sampler.errors == {}


def test_a_field_or_scope_that_the_driver_does_not_know_is_not_offered(
    emulator: Emulator, sampler: NvmlSampler
) -> None:
    emulator.fail(INVALID_ARGUMENT, call="field:139")
    for second in (0, 1):
        sample = only(sampler.sample(at(second)), GpuSample)
        assert (sample.nvlink_transmit_bytes_total, sample.nvlink_receive_bytes_total) == (1843200, None)
    assert sampler.errors == {}


def test_no_permission_is_counted_and_logged_once(
    emulator: Emulator, sampler: NvmlSampler, caplog: pytest.LogCaptureFixture
) -> None:
    emulator.fail(NO_PERMISSION, call="nvmlDeviceGetComputeRunningProcesses")
    with caplog.at_level(logging.WARNING):
        for second in range(0, 20, 5):
            assert only(sampler.sample(at(second)), GpuSlowSample).processes is None
    assert sampler.errors == {"no_permission": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"{UUID}: the driver does not permit to read processes; it is left out"
    ]


def test_a_passing_error_costs_its_field_and_its_tick(emulator: Emulator, sampler: NvmlSampler) -> None:
    emulator.fail(UNKNOWN, call="nvmlDeviceGetUtilizationRates")
    emulator.fail(UNKNOWN, call="field:139")
    records = sampler.sample(at(0))
    sample = only(records, GpuSample)
    assert (sample.utilization_ratio, sample.nvlink_receive_bytes_total) == (None, None)
    assert (sample.power_watts, sample.nvlink_transmit_bytes_total) == (412.345, 1843200)
    assert only(records, GpuState).state == "ok"
    assert sampler.errors == {"unknown": 2}
    emulator.clear()
    emulator.freeze(0)
    sample = only(sampler.sample(at(1)), GpuSample)
    assert (sample.utilization_ratio, sample.nvlink_receive_bytes_total) == (0.97, 3686400)
    assert sampler.errors == {"unknown": 2}


def test_older_calls_stand_in_for_missing_ones(emulator: Emulator, sampler: NvmlSampler) -> None:
    emulator.fail(FUNCTION_NOT_FOUND, call="nvmlDeviceGetTemperatureV")
    emulator.fail(FUNCTION_NOT_FOUND, call="nvmlDeviceGetCurrentClocksEventReasons")
    emulator.fail(FUNCTION_NOT_FOUND, call="nvmlDeviceGetMemoryInfo_v2")
    emulator.fail(FUNCTION_NOT_FOUND, call="nvmlDeviceGetComputeRunningProcesses_v3")
    records = sampler.sample(at(0))
    sample, slow = only(records, GpuSample), only(records, GpuSlowSample)
    assert slow.temperature_celsius == 61.0
    assert slow.processes == PROCESSES
    assert sample.clock_event_reasons == ("sw_power_cap",)
    assert sample.memory_used_bytes == 33600001536  # the emulator's version 1 counts the reserved 600 MB
    assert sampler.errors == {}


@pytest.mark.parametrize(
    ("name", "raw", "kind", "field"),
    [
        ("utilization_gpu_percent", 101, GpuSample, "utilization_ratio"),
        ("utilization_memory_percent", 2**32 - 1, GpuSample, "memory_utilization_ratio"),
        ("memory_used_bytes", 2**64 - 1, GpuSample, "memory_used_bytes"),
        ("memory_used_bytes", 150754820097, GpuSample, "memory_used_bytes"),  # more than there is
        ("power_milliwatts", 2**32 - 1, GpuSample, "power_watts"),
        ("sm_clock_megahertz", -1, GpuSample, "sm_clock_hertz"),
        ("memory_clock_megahertz", 2**32 - 1, GpuSample, "memory_clock_hertz"),
        ("event_reasons_bits", 2**64 - 1, GpuSample, "clock_event_reasons"),
        ("nvlink_transmit_kibibytes", 2**64 - 1, GpuSample, "nvlink_transmit_bytes_total"),
        ("energy_millijoules", 2**64 - 1, GpuSlowSample, "energy_joules_total"),
        ("temperature_celsius", -2147483648, GpuSlowSample, "temperature_celsius"),
        ("memory_temperature_celsius", 2**32 - 1, GpuSlowSample, "memory_temperature_celsius"),
        ("pcie_receive_bytes", -1, GpuSlowSample, "pcie_receive_bytes_total"),
        ("power_limit_milliwatts", 2**32 - 1, GpuLimits, "power_limit_watts"),
    ],
)
def test_sentinels_and_nonsense_cost_their_field_and_are_counted(
    emulator: Emulator, sampler: NvmlSampler, name: str, raw: float, kind: type[Record], field: str
) -> None:
    emulator.fail(NOT_SUPPORTED, call="nvmlDeviceGetProcessUtilization")  # follows the GPU's in the emulator
    emulator.override(name, raw)
    assert getattr(only(sampler.sample(at(0)), kind), field) is None
    assert sampler.errors == {"implausible": 1}


def test_processes_with_impossible_pids_are_left_out(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    nvml_emulator("@ 0\n0 processes=0:5,4294967295:6,77:7\n")
    assert only(sampler.sample(at(0)), GpuSlowSample).processes == (GpuProcess(77, 7),)
    assert sampler.errors == {"implausible": 1}


def test_a_full_gpu_and_an_idle_gpu_are_plausible(emulator: Emulator, sampler: NvmlSampler) -> None:
    emulator.override("utilization_gpu_percent", 100)
    emulator.override("utilization_memory_percent", 0)
    emulator.override("memory_used_bytes", 0)
    sample = only(sampler.sample(at(0)), GpuSample)
    assert (sample.utilization_ratio, sample.memory_utilization_ratio, sample.memory_used_bytes) == (1.0, 0.0, 0)
    assert sampler.errors == {}
