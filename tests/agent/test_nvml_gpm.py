"""GPM of a whole GPU: values, first tick, gaps, glitches, and the library's memory."""

from __future__ import annotations

from collections.abc import Iterator

import pynvml
import pytest

from agent.records import GpuSample
from agent.samplers.nvml import NvmlSampler
from tests.agent.nvml_support import UUID, WITHOUT_FAST, at, of, sample_at
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    Emulator,
)

SCRIPT = f"""\
# simulated
driver 580.95.05
gpu 0 uuid {UUID}
gpu 0 name NVIDIA H100 80GB HBM3
gpu 0 nvlink_links 18
@ 0
0 utilization_gpu_percent=97 power_milliwatts=412345 power_limit_milliwatts=700000
0 nvlink_transmit_kibibytes=1800 nvlink_receive_kibibytes=3600
0 gpm_sm_active_percent=81.5 gpm_sm_occupancy_percent=22.25 gpm_any_tensor_percent=43 gpm_dfma_tensor_percent=1
0 gpm_hmma_tensor_percent=40 gpm_imma_tensor_percent=2 gpm_dram_bandwidth_percent=37.5
0 gpm_fp64_percent=3 gpm_fp32_percent=14 gpm_fp16_percent=5
0 gpm_pcie_transmit_mibibytes_per_second=1.5 gpm_pcie_receive_mibibytes_per_second=2
0 gpm_nvlink_transmit_mibibytes_per_second=3 gpm_nvlink_receive_mibibytes_per_second=4
"""
RATIOS = {
    "sm_active_ratio": 0.815,
    "sm_occupancy_ratio": 0.2225,
    "tensor_active_ratio": 0.43,
    "tensor_dfma_active_ratio": 0.01,
    "tensor_hmma_active_ratio": 0.4,
    "tensor_imma_active_ratio": 0.02,
    "dram_active_ratio": 0.375,
    "fp64_active_ratio": 0.03,
    "fp32_active_ratio": 0.14,
    "fp16_active_ratio": 0.05,
}
PCIE = {"pcie_transmit_bytes_per_second": 1.5 * 2**20, "pcie_receive_bytes_per_second": 2.0 * 2**20}
NVLINK = {"nvlink_transmit_bytes_per_second": 3.0 * 2**20, "nvlink_receive_bytes_per_second": 4.0 * 2**20}
ZERO = [f"gpm_{word}_percent" for word in ("sm_active", "sm_occupancy", "any_tensor", "dfma_tensor", "hmma_tensor")]
ZERO += [f"gpm_{word}_percent" for word in ("imma_tensor", "dram_bandwidth", "fp64", "fp32", "fp16")]


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(WITHOUT_FAST)
    yield sampler
    sampler.close()


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    return nvml_emulator(SCRIPT)


def gpm(emulator: Emulator, sampler: NvmlSampler, seconds: float) -> dict[str, float]:
    """Return what one tick brought by GPM."""
    sample = of(sample_at(emulator, sampler, seconds), GpuSample)
    values = {name: getattr(sample, name) for name in (*RATIOS, *PCIE, *NVLINK)}
    return {name: value for name, value in values.items() if value is not None}


def test_every_metric_has_its_field_and_its_unit_from_the_second_tick_on(emulator, sampler):
    assert gpm(emulator, sampler, 0) == {}
    assert gpm(emulator, sampler, 1) == pytest.approx(RATIOS | PCIE)
    assert gpm(emulator, sampler, 2) == pytest.approx(RATIOS | PCIE)
    assert sampler.errors == {}


def test_each_tick_compares_with_the_one_before(emulator, sampler):
    emulator.log_calls()
    for second in range(4):
        gpm(emulator, sampler, second)
    calls = emulator.calls()
    assert len(calls.of("nvmlGpmSampleGet")) == 4
    assert len(calls.of("nvmlGpmMetricsGet")) == 3
    assert len(calls.of("nvmlGpmSampleAlloc")) == 2
    assert len(calls.of("nvmlGpmQueryDeviceSupport")) == 1


def test_rates_of_nvlink_are_asked_for_only_without_its_counters(nvml_emulator, sampler):
    emulator = nvml_emulator(SCRIPT.replace("gpu 0 nvlink_links 18\n", ""))
    emulator.fail(NOT_SUPPORTED, call="field:138")
    emulator.fail(NOT_SUPPORTED, call="field:139")
    gpm(emulator, sampler, 0)
    assert gpm(emulator, sampler, 1) == pytest.approx(RATIOS | PCIE | NVLINK)


def test_a_gap_gives_no_average_over_it(emulator, sampler):
    gpm(emulator, sampler, 0)
    assert gpm(emulator, sampler, 1) != {}
    assert gpm(emulator, sampler, 7) == {}
    assert gpm(emulator, sampler, 8) != {}


def test_ticks_that_come_too_close_are_left_out(emulator, sampler):
    gpm(emulator, sampler, 0)
    assert gpm(emulator, sampler, 0.05) == {}
    assert gpm(emulator, sampler, 1) == pytest.approx(RATIOS | PCIE)
    assert sampler.errors == {}


def test_nothing_but_zeros_under_full_load_is_a_glitch(emulator, sampler):
    gpm(emulator, sampler, 0)
    for name in ZERO:
        emulator.override(name, 0)
    assert gpm(emulator, sampler, 1) == {}
    assert sampler.errors == {"implausible": 1}
    emulator.clear()
    assert gpm(emulator, sampler, 2) == pytest.approx(RATIOS | PCIE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("utilization_gpu_percent", 94),
        ("power_milliwatts", 279_000),  # less than two fifths of 700 W: a kernel that waits
    ],
)
def test_nothing_but_zeros_is_a_measurement_where_little_is_done(emulator, sampler, name, value):
    gpm(emulator, sampler, 0)
    for zero in ZERO:
        emulator.override(zero, 0)
    emulator.override(name, value)
    assert gpm(emulator, sampler, 1) == {**dict.fromkeys(RATIOS, 0.0), **PCIE}
    assert sampler.errors == {}


def test_a_stalled_collective_keeps_its_small_constant(emulator, sampler):
    gpm(emulator, sampler, 0)
    for name in ZERO:
        emulator.override(name, 18.18 if "sm_active" in name else 0)
    assert gpm(emulator, sampler, 1)["sm_active_ratio"] == pytest.approx(0.1818)
    assert sampler.errors == {}


@pytest.mark.parametrize("value", [-1, 101.5, 1e300])
def test_an_impossible_value_costs_its_metric(emulator, sampler, value):
    gpm(emulator, sampler, 0)
    emulator.override("gpm_any_tensor_percent", value)
    emulator.override("gpm_pcie_transmit_mibibytes_per_second", -5)
    seen = gpm(emulator, sampler, 1)
    assert set(seen) == (set(RATIOS) | set(PCIE)) - {"tensor_active_ratio", "pcie_transmit_bytes_per_second"}
    assert sampler.errors == {"implausible": 2}


def test_a_little_more_than_everything_is_everything(emulator, sampler):
    gpm(emulator, sampler, 0)
    emulator.override("gpm_sm_active_percent", 100.4)
    assert gpm(emulator, sampler, 1)["sm_active_ratio"] == 1.0


def test_ratios_that_no_longer_move_under_a_changing_load_are_withheld(emulator, sampler):
    for second in range(20):
        emulator.override("utilization_gpu_percent", 97 if second % 2 else 30)
        seen = gpm(emulator, sampler, second)
        emulator.clear("value")
    assert seen == {}
    assert set(sampler.errors) == {"frozen"}


@pytest.mark.parametrize("code", [NOT_SUPPORTED, INVALID_ARGUMENT])
def test_a_metric_that_is_not_offered_is_not_asked_again(emulator, sampler, code):
    gpm(emulator, sampler, 0)
    emulator.fail(code, call="gpm:11")
    assert set(gpm(emulator, sampler, 1)) == (set(RATIOS) | set(PCIE)) - {"fp64_active_ratio"}
    emulator.clear()
    emulator.log_calls()
    assert "fp64_active_ratio" not in gpm(emulator, sampler, 2)
    (call,) = emulator.calls().of("nvmlGpmMetricsGet")
    assert 11 not in call.details
    assert 10 in call.details
    assert sampler.errors == {}


@pytest.mark.parametrize("call", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet"])
def test_a_gpu_without_gpm_is_asked_once(emulator, sampler, call):
    emulator.fail(NOT_SUPPORTED, call=call)
    emulator.fail_system(NOT_SUPPORTED, call=call)
    emulator.log_calls()
    for second in range(3):
        assert gpm(emulator, sampler, second) == {}
    assert len(emulator.calls().of(call)) == 1
    assert sampler.errors == {}


def test_an_old_board_is_asked_once(nvml_emulator, sampler):
    emulator = nvml_emulator(SCRIPT.replace("H100 80GB HBM3", "A100-SXM4-80GB"))
    emulator.log_calls()
    for second in range(3):
        assert gpm(emulator, sampler, second) == {}
    calls = emulator.calls()
    assert len(calls.of("nvmlGpmQueryDeviceSupport")) == 1
    assert len(calls.of("nvmlGpmSampleAlloc")) == 0


def test_an_old_driver_without_the_symbols_costs_nothing_else(emulator, sampler):
    emulator.fail(FUNCTION_NOT_FOUND, call="nvmlGpmQueryDeviceSupport")
    records = sample_at(emulator, sampler, 0)
    assert of(records, GpuSample).power_watts == 412.345
    assert sampler.errors == {}


def test_no_permission_is_counted_once(emulator, sampler, caplog):
    emulator.fail(NO_PERMISSION, call="nvmlGpmSampleGet")
    for second in range(4):
        assert gpm(emulator, sampler, second) == {}
    assert sampler.errors == {"no_permission": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"{UUID}: the driver does not permit to read GPM; it is left out"
    ]


def test_a_sample_that_failed_is_compared_with_nothing(emulator, sampler):
    gpm(emulator, sampler, 0)
    gpm(emulator, sampler, 1)
    emulator.fail(UNKNOWN, call="nvmlGpmSampleGet")
    assert gpm(emulator, sampler, 2) == {}
    emulator.clear()
    assert gpm(emulator, sampler, 3) == {}
    assert gpm(emulator, sampler, 4) == pytest.approx(RATIOS | PCIE)
    assert sampler.errors == {"unknown": 1}


def test_the_buffers_are_freed_at_the_end_and_before_each_new_start(emulator, sampler):
    emulator.log_calls()
    gpm(emulator, sampler, 0)
    assert emulator.calls().gpm_samples_alive == 2
    emulator.fail(GPU_IS_LOST)
    sample_at(emulator, sampler, 1)
    assert emulator.calls().gpm_samples_alive in (0, 2)  # the emulator may refuse the call on a lost GPU
    emulator.clear("fail")
    for second in range(2, 40):
        seen = gpm_or_nothing(emulator, sampler, second)
    assert seen == pytest.approx(RATIOS | PCIE)
    assert emulator.calls().gpm_samples_alive == 2
    sampler.close()
    assert emulator.calls().gpm_samples_alive == 0


def gpm_or_nothing(emulator: Emulator, sampler: NvmlSampler, seconds: float) -> dict[str, float]:
    emulator.freeze(seconds)
    samples = [record for record in sampler.sample(at(seconds)) if isinstance(record, GpuSample)]
    if not samples:
        return {}
    values = {name: getattr(samples[0], name) for name in (*RATIOS, *PCIE, *NVLINK)}
    return {name: value for name, value in values.items() if value is not None}


def test_the_array_of_metrics_is_as_long_as_the_binding_says(emulator, sampler, monkeypatch):
    # A binding of an older release has a shorter array; the sampler knows no number of its own.
    class Shorter(pynvml.c_nvmlGpmMetricsGet_t.__base__):
        _fields_ = (
            *pynvml.c_nvmlGpmMetricsGet_t._fields_[:-1],
            ("metrics", pynvml.c_nvmlGpmMetric_t * 8),
        )

    monkeypatch.setattr(pynvml, "c_nvmlGpmMetricsGet_t", Shorter)
    gpm(emulator, sampler, 0)
    seen = gpm(emulator, sampler, 1)
    assert len(seen) == 8
    assert seen["sm_active_ratio"] == pytest.approx(0.815)
