"""docs/nvml.md against the code: each row is tried on the emulator, by its call, its conversion and its tier."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agent.records import (
    PERIODS_S,
    RECORD_TYPES,
    GpuFastPower,
    GpuHealth,
    GpuInfo,
    GpuLimits,
    GpuMigInfo,
    GpuSample,
    GpuSlowSample,
    GpuState,
    Record,
)
from agent.samplers import nvml_fields as ids
from agent.samplers.nvml import NvmlSampler
from agent.samplers.nvml_config import NvmlConfig
from tests.agent.nvml_support import UUID, WITHOUT_FAST, sample_at
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import NOT_SUPPORTED, Emulator

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "nvml.md").read_text(encoding="utf-8")
KINDS = (GpuInfo, GpuSample, GpuFastPower, GpuSlowSample, GpuHealth, GpuLimits, GpuMigInfo)
#: Fields that need no reading of the driver.
OWN = {"GpuFastPower.ages_s"}


class Row(NamedTuple):
    field: str
    source: str
    unit: str
    conversion: str
    tier: str
    metric: str
    since: str

    @property
    def kind(self) -> type[Record]:
        return next(kind for kind in KINDS if kind.__name__ == self.field.partition(".")[0])

    @property
    def name(self) -> str:
        return self.field.partition(".")[2]

    @property
    def calls(self) -> list[str]:
        """The sources as the emulator names them."""
        gpm = re.match(r"GPM (\d+)", self.source)
        if gpm is not None:
            return [f"gpm:{gpm[1]}"]
        text = re.sub(r"R?5[0-9]{2}(\.\d+)?|NVLink 5|NVML 13|64 bits|version \d", " ", self.source)
        calls = re.findall(r"nvml[A-Z]\w+", text)
        return calls + [f"field:{number}" for number in re.findall(r"\b\d+\b", text)]


ROWS = [
    Row(*(cell.strip().strip("`") for cell in line.strip("|").split(" | ")))
    for line in PAGE.splitlines()
    if line.startswith("| `Gpu")
]

#: Raw value of the driver for each numeric row, under the name that the emulator has for it.
RAW = {
    "GpuSample.utilization_ratio": ("utilization_gpu_percent", 97),
    "GpuSample.memory_utilization_ratio": ("utilization_memory_percent", 41),
    "GpuSample.memory_used_bytes": ("memory_used_bytes", 33000001536),
    "GpuSample.memory_total_bytes": ("memory_total_bytes", 150754820096),
    "GpuSample.power_watts": ("power_milliwatts", 412345),
    "GpuSample.sm_clock_hertz": ("sm_clock_megahertz", 1755),
    "GpuSample.memory_clock_hertz": ("memory_clock_megahertz", 3200),
    "GpuSample.nvlink_transmit_bytes_total": ("nvlink_transmit_kibibytes", 1800),
    "GpuSample.nvlink_receive_bytes_total": ("nvlink_receive_kibibytes", 3600),
    "GpuSample.sm_active_ratio": ("gpm_sm_active_percent", 81.5),
    "GpuSample.sm_occupancy_ratio": ("gpm_sm_occupancy_percent", 22.25),
    "GpuSample.tensor_active_ratio": ("gpm_any_tensor_percent", 43),
    "GpuSample.tensor_dfma_active_ratio": ("gpm_dfma_tensor_percent", 1),
    "GpuSample.tensor_hmma_active_ratio": ("gpm_hmma_tensor_percent", 40),
    "GpuSample.tensor_imma_active_ratio": ("gpm_imma_tensor_percent", 2),
    "GpuSample.dram_active_ratio": ("gpm_dram_bandwidth_percent", 37.5),
    "GpuSample.fp64_active_ratio": ("gpm_fp64_percent", 3),
    "GpuSample.fp32_active_ratio": ("gpm_fp32_percent", 14),
    "GpuSample.fp16_active_ratio": ("gpm_fp16_percent", 5),
    "GpuSample.pcie_transmit_bytes_per_second": ("gpm_pcie_transmit_mibibytes_per_second", 1.5),
    "GpuSample.pcie_receive_bytes_per_second": ("gpm_pcie_receive_mibibytes_per_second", 2),
    "GpuSlowSample.energy_joules_total": ("energy_millijoules", 1234567),
    "GpuSlowSample.temperature_celsius": ("temperature_celsius", 61),
    "GpuSlowSample.memory_temperature_celsius": ("memory_temperature_celsius", 74),
    "GpuSlowSample.pcie_transmit_bytes_total": ("pcie_transmit_bytes", 5000000001),
    "GpuSlowSample.pcie_receive_bytes_total": ("pcie_receive_bytes", 7000000001),
    "GpuHealth.ecc_corrected_volatile_total": ("ecc_corrected_volatile", 1),
    "GpuHealth.ecc_uncorrected_volatile_total": ("ecc_uncorrected_volatile", 2),
    "GpuHealth.ecc_corrected_aggregate_total": ("ecc_corrected_aggregate", 30),
    "GpuHealth.ecc_uncorrected_aggregate_total": ("ecc_uncorrected_aggregate", 4),
    "GpuHealth.remapped_rows_correctable_total": ("remapped_rows_correctable", 5),
    "GpuHealth.remapped_rows_uncorrectable_total": ("remapped_rows_uncorrectable", 6),
    "GpuHealth.pcie_replays_total": ("pcie_replays", 7),
    "GpuHealth.nvlink_crc_errors_total": ("nvlink_crc_errors", 80),
    "GpuHealth.nvlink_replay_errors_total": ("nvlink_replay_errors", 9),
    "GpuHealth.nvlink_recovery_errors_total": ("nvlink_recovery_errors", 10),
    "GpuHealth.nvlink_integrity_errors_total": ("nvlink_integrity_errors", 21),
    "GpuHealth.nvlink_failed_recoveries_total": ("nvlink_failed_recoveries", 22),
    "GpuHealth.nvlink_effective_errors_total": ("nvlink_effective_errors", 23),
    "GpuLimits.power_limit_watts": ("power_limit_milliwatts", 700000),
    "GpuLimits.sm_clock_max_hertz": ("sm_clock_max_megahertz", 1980),
    "GpuLimits.memory_clock_max_hertz": ("memory_clock_max_megahertz", 3201),
    "GpuLimits.pcie_generation": ("pcie_generation", 4),
    "GpuLimits.pcie_generation_max": ("pcie_generation_max", 5),
    "GpuLimits.pcie_width": ("pcie_width", 8),
    "GpuLimits.pcie_width_max": ("pcie_width_max", 16),
    "GpuLimits.recovery_action": ("recovery_action", 2),
}
SCRIPT = (
    f"# simulated\ndriver 580.95.05\ngpu 0 uuid {UUID}\ngpu 0 name NVIDIA H100 80GB HBM3\ngpu 0 nvlink_links 18\n@ 0\n"
    + "".join(f"0 {name}={value}\n" for name, value in RAW.values())
    + "0 event_reasons_bits=4 fabric_state=3 row_remap_pending=1 row_remap_failure=0 processes=4242:1\n"
    + "0 power_cap_nanoseconds=1 thermal_nanoseconds=2 sw_thermal_nanoseconds=3 hw_thermal_nanoseconds=4\n"
    + "0 hw_power_brake_nanoseconds=5 gpm_nvlink_transmit_mibibytes_per_second=3\n"
    + "0 gpm_nvlink_receive_mibibytes_per_second=4\n"
)


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory, request: pytest.FixtureRequest) -> Emulator:
    """Play a board of the kind that has the field which is tried."""
    row = request.node.callspec.params["row"]
    is_newer = row.since.endswith("(NVLink 5)")
    return nvml_emulator(SCRIPT.replace("\n@ 0", "\ngpu 0 nvlink_version 5\n@ 0") if is_newer else SCRIPT)


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(WITHOUT_FAST)
    yield sampler
    sampler.close()


def values(emulator: Emulator, sampler: NvmlSampler) -> dict[str, object]:
    """Return every value of two ticks by its name on the page."""
    found = {}
    for second in (0, 1):
        for record in sample_at(emulator, sampler, second):
            for name in record.__dataclass_fields__:
                found[f"{type(record).__name__}.{name}"] = getattr(record, name)
    return {name: value for name, value in found.items() if value not in (None, {})}


def test_every_field_has_one_row_and_every_row_a_field():
    fields = {
        f"{kind.__name__}.{name}"
        for kind in KINDS
        for name in kind.__dataclass_fields__
        if name not in ("monotonic_s", "wall_s", "key")
    }
    assert sorted(row.field for row in ROWS) == sorted(fields - OWN)
    assert set(KINDS) <= set(RECORD_TYPES.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.field)
def test_the_tier_is_that_of_the_record(row):
    if row.kind is GpuFastPower:
        assert row.tier == f"{NvmlConfig().fast_hertz:.0f} Hz"
    else:
        assert row.tier == f"{PERIODS_S[row.kind]:.0f} s"


def test_the_sampler_keeps_the_periods_of_the_records():
    config = NvmlConfig()
    assert config.period_s == PERIODS_S[GpuSample]
    assert config.slow_period_s == PERIODS_S[GpuSlowSample] == PERIODS_S[GpuHealth]
    assert config.limits_period_s == PERIODS_S[GpuLimits] == PERIODS_S[GpuMigInfo] == PERIODS_S[GpuInfo]
    assert config.fast_period_s == PERIODS_S[GpuFastPower]


def test_the_periods_of_records_follow_the_configuration():
    assert NvmlConfig().record_periods_s() == {kind: PERIODS_S[kind] for kind in (*KINDS, GpuState)}
    periods_s = NvmlConfig(period_s=10.0, slow_period_s=30.0, limits_period_s=300.0).record_periods_s()
    assert [periods_s[kind] for kind in (GpuSample, GpuHealth, GpuLimits, GpuFastPower)] == [10.0, 30.0, 300.0, 10.0]


def test_metrics_are_those_of_the_table_of_metrics():
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for row in ROWS:
        assert not row.metric or f"`{row.metric}`" in metrics, row


@pytest.mark.parametrize("row", [row for row in ROWS if row.field in RAW], ids=lambda row: row.field)
def test_the_conversion_gives_what_the_sampler_gives(row, emulator, sampler):
    _, raw = RAW[row.field]
    sign, factor = re.match(r"([×÷]) (\d+)", row.conversion).groups()
    expected = raw * int(factor) if sign == "×" else raw / int(factor)
    assert values(emulator, sampler)[row.field] == pytest.approx(expected, rel=1e-15)


READ = [row for row in ROWS if row.kind in (GpuSample, GpuSlowSample, GpuHealth, GpuLimits)]


@pytest.mark.parametrize("row", READ, ids=lambda row: row.field)
def test_without_its_calls_a_field_is_absent(row, emulator, sampler):
    assert row.calls, row
    # Rates of NVLink stand in for the counters, so these are taken away first.
    is_stand_in = row.field.startswith("GpuSample.nvlink") and row.name.endswith("_per_second")
    for field in (138, 139, 202, 204) if is_stand_in else ():
        emulator.fail(NOT_SUPPORTED, call=f"field:{field}")
    assert row.field in values(emulator, sampler)
    sampler.close()
    for call in row.calls:
        emulator.fail(NOT_SUPPORTED, call=call)
    other = NvmlSampler(WITHOUT_FAST)
    assert row.field not in values(emulator, other)
    other.close()


def test_the_ids_of_the_page_are_those_of_the_code():
    constants = [value for name, value in vars(ids).items() if name.isupper() and name != "EVENT_TIMES"]
    used = {value[0] if isinstance(value, tuple) else value for value in constants if isinstance(value, tuple | int)}
    used -= {ids.ALL_LINKS}
    used |= {field for _, fields in ids.EVENT_TIMES for field, _ in fields.values()}
    on_page = {int(call.partition(":")[2]) for row in ROWS for call in row.calls if call.startswith("field:")}
    assert on_page | {ids.NVLINK_COUNT[0]} == used
    assert "field 91" in PAGE


def test_the_calls_of_the_page_are_those_of_the_code():
    bindings = [
        path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "agent" / "samplers").glob("nvml*binding.py"))
        if "event" not in path.name
    ]
    used = {
        re.sub(r"_v\d+$", "", name)
        for text in bindings
        for name in re.findall(r'call\("(?:_nvmlGetFunctionPointer", ")?(nvml\w+)"', text)
    }
    on_page = set(re.findall(r"`(nvml[A-Z]\w+)`", PAGE))
    assert on_page - used == {"nvmlDeviceGetPcieThroughput", "nvmlDeviceGetSamples"}  # named as what is not called
    assert used <= on_page
