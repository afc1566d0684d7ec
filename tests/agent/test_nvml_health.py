"""Error counters, marks, limits and event times: their calls, their units, and what stands in for a missing call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.records import GpuHealth, GpuLimits, GpuSample, GpuSlowSample
from agent.samplers.nvml import NvmlSampler
from tests.agent.nvml_support import UUID, WITHOUT_FAST, at, given, of, sample_at
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NOT_SUPPORTED, UNKNOWN, Emulator

SCRIPT = f"""\
# simulated
driver 580.95.05
gpu 0 uuid {UUID}
gpu 0 name NVIDIA H100 80GB HBM3
gpu 0 nvlink_links 18
@ 0
0 utilization_gpu_percent=97 power_milliwatts=412345 power_limit_milliwatts=700000 energy_millijoules=1000
0 ecc_corrected_volatile=1 ecc_uncorrected_volatile=2 ecc_corrected_aggregate=30 ecc_uncorrected_aggregate=4
0 remapped_rows_correctable=5 remapped_rows_uncorrectable=6 row_remap_pending=1 row_remap_failure=0
0 pcie_replays=7 nvlink_crc_errors=80 nvlink_replay_errors=9 nvlink_recovery_errors=10
0 nvlink_transmit_kibibytes=1800 nvlink_receive_kibibytes=3600
0 pcie_generation=4 pcie_generation_max=5 pcie_width=8 pcie_width_max=16 recovery_action=2 fabric_state=3
0 power_cap_nanoseconds=1500000000 thermal_nanoseconds=2500000000
0 sw_thermal_nanoseconds=3500000000 hw_thermal_nanoseconds=4500000000 hw_power_brake_nanoseconds=5500000000
"""
HEALTH = {
    "ecc_corrected_volatile_total": 1,
    "ecc_uncorrected_volatile_total": 2,
    "ecc_corrected_aggregate_total": 30,
    "ecc_uncorrected_aggregate_total": 4,
    "remapped_rows_correctable_total": 5,
    "remapped_rows_uncorrectable_total": 6,
    "is_row_remap_pending": True,
    "is_row_remap_failed": False,
    "pcie_replays_total": 7,
    "nvlink_crc_errors_total": 80,
    "nvlink_replay_errors_total": 9,
    "nvlink_recovery_errors_total": 10,
}
LIMITS = {
    "power_limit_watts": 700.0,
    "pcie_generation": 4,
    "pcie_generation_max": 5,
    "pcie_width": 8,
    "pcie_width_max": 16,
    "recovery_action": 2,
    "fabric_state": "completed",
}


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(WITHOUT_FAST)
    yield sampler
    sampler.close()


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    return nvml_emulator(SCRIPT)


def test_every_counter_and_mark_has_its_place(emulator, sampler):
    assert given(of(sample_at(emulator, sampler, 0), GpuHealth)) == HEALTH
    assert sampler.errors == {}


def test_limits_and_links(emulator, sampler):
    assert given(of(sample_at(emulator, sampler, 0), GpuLimits)) == LIMITS


def test_health_comes_every_5_seconds_and_limits_every_60(emulator, sampler):
    kinds = [(type(record), second) for second in range(66) for record in sample_at(emulator, sampler, second)]
    assert [second for kind, second in kinds if kind is GpuHealth] == list(range(0, 66, 5))
    assert [second for kind, second in kinds if kind is GpuLimits] == [0, 60]


def test_limits_come_at_once_after_an_event(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.override("recovery_action", 1)
    sampler.refresh_limits("GPU-of-somebody-else")
    assert not [record for record in sample_at(emulator, sampler, 1) if isinstance(record, GpuLimits)]
    sampler.refresh_limits(UUID)
    assert of(sample_at(emulator, sampler, 2), GpuLimits).recovery_action == 1


@pytest.mark.parametrize("version", ["570.124.06", "580.65.06", "580.82.07", "580.95.05", "590.44.01"])
def test_event_times_of_both_numberings(nvml_emulator, sampler, version):
    emulator = nvml_emulator(SCRIPT.replace("580.95.05", version))
    seconds = of(sample_at(emulator, sampler, 0), GpuSlowSample).clock_event_seconds_total
    assert seconds == {"sw_power_cap": 1.5, "sw_thermal": 3.5, "hw_thermal": 4.5, "hw_power_brake": 5.5}


def test_an_older_driver_has_the_two_old_event_times(nvml_emulator, sampler):
    emulator = nvml_emulator(SCRIPT.replace("580.95.05", "550.163.01"))
    emulator.log_calls()
    seconds = of(sample_at(emulator, sampler, 0), GpuSlowSample).clock_event_seconds_total
    assert seconds == {"sw_power_cap": 1.5, "sw_thermal": 2.5}
    asked = {field for call in emulator.calls().of("nvmlDeviceGetFieldValues") for field in call.details}
    assert not asked & set(range(251, 274))  # with this driver they mean nothing


def test_a_passing_error_of_the_newer_field_does_not_switch_to_the_older_one(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.fail(UNKNOWN, call="field:269")
    seconds = of(sample_at(emulator, sampler, 5), GpuSlowSample).clock_event_seconds_total
    assert "sw_thermal" not in seconds


def test_the_fabric_by_the_older_struct_and_its_states(emulator, sampler):
    words = {0: None, 1: "not_started", 2: "in_progress", 3: "completed", 4: None}
    for second, (state, word) in enumerate(words.items()):
        emulator.clear()
        emulator.override("fabric_state", state)
        sampler.refresh_limits(UUID)
        assert of(sample_at(emulator, sampler, second), GpuLimits).fabric_state == word
    assert sampler.errors == {"implausible": 1}  # the state 4


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_remapped_rows_by_fields_where_the_call_is_missing(emulator, sampler, code):
    emulator.fail(code, call="nvmlDeviceGetRemappedRows")
    for second in (0, 5):
        assert given(of(sample_at(emulator, sampler, second), GpuHealth)) == HEALTH
    assert sampler.errors == {}


def test_link_errors_one_by_one_where_there_are_no_sums(emulator, sampler):
    for field in (38, 45, 52, 59):
        emulator.fail(NOT_SUPPORTED, call=f"field:{field}")
    for second in (0, 5):
        assert given(of(sample_at(emulator, sampler, second), GpuHealth)) == HEALTH
    assert sampler.errors == {}


def test_link_errors_miss_no_link_that_they_held_before(emulator, sampler):
    for field in (38, 45, 52, 59):
        emulator.fail(NOT_SUPPORTED, call=f"field:{field}")
    sample_at(emulator, sampler, 0)
    emulator.fail(UNKNOWN, call="nvmlDeviceGetNvLinkErrorCounter")
    health = of(sample_at(emulator, sampler, 5), GpuHealth)
    assert health.nvlink_crc_errors_total is None
    assert health.pcie_replays_total == 7


def test_nvlink_5_is_read_link_by_link(nvml_emulator, sampler):
    # 20, 3 and 37 over 18 links: 2 or 1, 1 or 0, 3 or 2.
    more = "0 nvlink_integrity_errors=20 nvlink_failed_recoveries=3 nvlink_effective_errors=37\n"
    emulator = nvml_emulator(SCRIPT.replace("nvlink_links 18", "nvlink_links 18\ngpu 0 nvlink_version 5") + more)
    emulator.fail(INVALID_ARGUMENT, call="field:138")
    emulator.fail(INVALID_ARGUMENT, call="field:139")
    records = sample_at(emulator, sampler, 0)
    sample, health = of(records, GpuSample), of(records, GpuHealth)
    assert (sample.nvlink_transmit_bytes_total, sample.nvlink_receive_bytes_total) == (1800 * 1024, 3600 * 1024)
    assert (health.nvlink_crc_errors_total, health.nvlink_recovery_errors_total) == (80, 10)
    assert health.nvlink_replay_errors_total is None  # not counted there
    assert (health.nvlink_integrity_errors_total, health.nvlink_failed_recoveries_total) == (20, 3)
    assert health.nvlink_effective_errors_total == 37
    assert sampler.errors == {}


def test_a_board_without_ecc_links_and_counters_has_no_health(nvml_emulator, sampler):
    emulator = nvml_emulator(f"gpu 0 uuid {UUID}\n@ 0\n0 power_milliwatts=30000\n")
    records = sample_at(emulator, sampler, 0)
    assert not [record for record in records if isinstance(record, GpuHealth)]
    assert sampler.errors == {}


@pytest.mark.parametrize(
    ("name", "raw", "kind", "field"),
    [
        ("ecc_corrected_volatile", 2**64 - 1, GpuHealth, "ecc_corrected_volatile_total"),
        ("nvlink_crc_errors", 2**63 - 16, GpuHealth, "nvlink_crc_errors_total"),  # a blank value of another tool
        ("pcie_generation", 0, GpuLimits, "pcie_generation"),
        ("pcie_generation", 2**32 - 1, GpuLimits, "pcie_generation"),
        ("pcie_width", 65, GpuLimits, "pcie_width"),
        ("recovery_action", 2**32 - 1, GpuLimits, "recovery_action"),
        ("power_milliwatts", 2_100_000, GpuSample, "power_watts"),  # three times the limit of 700 W
    ],
)
def test_sentinels_and_nonsense_cost_their_field_and_are_counted(emulator, sampler, name, raw, kind, field):
    emulator.override(name, raw)
    assert getattr(of(sample_at(emulator, sampler, 0), kind), field) is None
    assert sampler.errors == {"implausible": 1}


def replays(emulator, sampler, seconds):
    return of(sample_at(emulator, sampler, seconds), GpuHealth).pcie_replays_total


def test_a_counter_that_falls_is_withheld_until_it_is_back(emulator, sampler):
    emulator.override("pcie_replays", 100)
    assert replays(emulator, sampler, 0) == 100
    emulator.clear("value")
    assert replays(emulator, sampler, 5) is None  # 7
    assert replays(emulator, sampler, 10) is None
    emulator.override("pcie_replays", 102)
    assert replays(emulator, sampler, 15) == 102
    assert sampler.errors == {"counter_fell": 1}


def test_a_counter_of_32_bits_that_wraps_goes_on(emulator, sampler):
    emulator.override("pcie_replays", 2**32 - 2)
    assert replays(emulator, sampler, 0) == 2**32 - 2
    emulator.clear("value")
    assert replays(emulator, sampler, 5) == 2**32 + 7
    assert sampler.errors == {}


def test_counters_start_anew_with_the_driver(emulator, sampler):
    assert replays(emulator, sampler, 0) == 7
    emulator.reload_driver()
    emulator.freeze(1)
    sampler.sample(at(1))
    seen = [record for second in range(2, 5) for record in sample_at(emulator, sampler, second)]
    (health,) = [record for record in seen if isinstance(record, GpuHealth)]
    assert health.pcie_replays_total == 0
    assert health.ecc_corrected_aggregate_total == 30
    assert not {"counter_fell", "implausible"} & set(sampler.errors)


def test_a_link_counter_that_leaps_is_withheld(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.override("nvlink_receive_kibibytes", 2**55)
    assert of(sample_at(emulator, sampler, 1), GpuSample).nvlink_receive_bytes_total is None
    emulator.clear("value")
    assert of(sample_at(emulator, sampler, 2), GpuSample).nvlink_receive_bytes_total == 3600 * 1024
    assert sampler.errors == {"implausible": 1}


def test_energy_that_stands_still_under_power_is_withheld(emulator, sampler):
    seen = [of(sample_at(emulator, sampler, second), GpuSlowSample).energy_joules_total for second in range(0, 75, 5)]
    assert seen == [1.0] * 12 + [None] * 3
    assert sampler.errors == {"frozen": 1}


def test_an_invalid_argument_of_one_call_does_not_end_the_attachment(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.fail(INVALID_ARGUMENT, call="nvmlDeviceGetTotalEccErrors")
    health = of(sample_at(emulator, sampler, 5), GpuHealth)
    assert health.ecc_corrected_volatile_total is None
    assert health.pcie_replays_total == 7
