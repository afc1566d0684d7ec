"""Simulated boards that offer little: what is missing is absent, is asked for once, and nothing else suffers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.records import GpuHealth, GpuLimits, GpuSample, GpuSlowSample
from agent.samplers.nvml import NvmlSampler
from tests.agent.nvml_support import UUID, WITHOUT_FAST, given, sample_at
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import FUNCTION_NOT_FOUND, NOT_SUPPORTED

HEAD = f"# simulated\ngpu 0 uuid {UUID}\n"


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(WITHOUT_FAST)
    yield sampler
    sampler.close()


def brought(emulator, sampler) -> dict[str, set[str]]:
    """Return the names of all that came in the ticks of ten seconds."""
    found: dict[str, set[str]] = {}
    for second in range(11):
        for record in sample_at(emulator, sampler, second):
            if isinstance(record, GpuSample | GpuSlowSample | GpuHealth | GpuLimits):
                found.setdefault(type(record).__name__, set()).update(given(record))
    return found


def asked(emulator, sampler, second) -> list[str]:
    emulator.log_calls()
    emulator.forget_calls()
    sample_at(emulator, sampler, second)
    return [call.symbol for call in emulator.calls()]


def test_a_tesla_k80_with_an_old_driver(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(
        HEAD + "driver 470.256.02\ngpu 0 name Tesla K80\ngpu 0 architecture kepler\n@ 0\n"
        "0 utilization_gpu_percent=50 utilization_memory_percent=10 memory_total_bytes=12000000 memory_used_bytes=1\n"
        "0 power_milliwatts=60000 power_limit_milliwatts=149000 temperature_celsius=40 event_reasons_bits=1\n"
        "0 ecc_corrected_volatile=1 pcie_generation=3 pcie_generation_max=3 pcie_width=16 pcie_width_max=16\n"
        "0 processes=4\n"
    )
    for call in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetCurrentClocksEventReasons"):
        emulator.fail(FUNCTION_NOT_FOUND, call=call)
    for call in ("nvmlDeviceGetFieldValues", "nvmlDeviceGetMigMode", "nvmlGpmQueryDeviceSupport"):
        emulator.fail(FUNCTION_NOT_FOUND, call=call)
    for call in ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetNvLinkErrorCounter"):
        emulator.fail(FUNCTION_NOT_FOUND, call=call)
    assert brought(emulator, sampler) == {
        "GpuSample": {
            "utilization_ratio",
            "memory_utilization_ratio",
            "memory_used_bytes",
            "memory_total_bytes",
            "power_watts",
            "clock_event_reasons",
        },
        "GpuSlowSample": {"temperature_celsius", "processes"},
        "GpuHealth": {"ecc_corrected_volatile_total"},
        "GpuLimits": {
            "power_limit_watts",
            "pcie_generation",
            "pcie_generation_max",
            "pcie_width",
            "pcie_width_max",
        },
    }
    assert sampler.errors == {}
    # A core tick asks only for what this board has: four calls in place of nine.
    assert asked(emulator, sampler, 11) == [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    ]


def test_a_geforce(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(
        HEAD + "driver 580.95.05\ngpu 0 name NVIDIA GeForce RTX 4090\ngpu 0 architecture ada\n@ 0\n"
        "0 utilization_gpu_percent=50 memory_total_bytes=24000000000 memory_used_bytes=1 power_milliwatts=60000\n"
        "0 sm_clock_megahertz=2500 energy_millijoules=5 pcie_transmit_bytes=1 pcie_receive_bytes=2\n"
    )
    found = brought(emulator, sampler)
    assert found["GpuSample"] >= {"utilization_ratio", "memory_used_bytes", "power_watts", "sm_clock_hertz"}
    assert found["GpuSlowSample"] == {"energy_joules_total", "pcie_transmit_bytes_total", "pcie_receive_bytes_total"}
    assert "GpuHealth" not in found
    assert sampler.errors == {}


def test_a_grace_hopper_whose_memory_is_the_systems(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(
        HEAD + "driver 580.95.05\ngpu 0 name NVIDIA GH200 480GB\ngpu 0 architecture hopper\n@ 0\n"
        "0 utilization_gpu_percent=50 power_milliwatts=60000 gpm_sm_active_percent=40\n"
    )
    emulator.fail(NOT_SUPPORTED, call="nvmlDeviceGetMemoryInfo")
    found = brought(emulator, sampler)
    assert found["GpuSample"] == {"utilization_ratio", "memory_utilization_ratio", "power_watts", "sm_active_ratio"}
    assert sampler.errors == {}


def test_a_vgpu_guest_sees_neither_power_nor_links(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(
        HEAD + "driver 580.95.05\ngpu 0 name NVIDIA A100-40C\ngpu 0 architecture ampere\n@ 0\n"
        "0 utilization_gpu_percent=50 memory_total_bytes=40000000000 memory_used_bytes=7 sm_clock_megahertz=1410\n"
    )
    for call in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetMigMode"):
        emulator.fail(NOT_SUPPORTED, call=call)
    for call in ("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetFieldValues"):
        emulator.fail(NOT_SUPPORTED, call=call)
    found = brought(emulator, sampler)
    assert found["GpuSample"] >= {"utilization_ratio", "memory_used_bytes", "sm_clock_hertz"}
    assert "power_watts" not in found["GpuSample"]
    assert "GpuHealth" not in found
    assert sampler.errors == {}
