"""MIG: what the instances have and the card keeps, and layouts that change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from agent.records import (
    GpuHealth,
    GpuKey,
    GpuLimits,
    GpuMigInfo,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    GpuState,
    Record,
)
from agent.samplers.nvml import NvmlSampler
from tests.agent.nvml_support import KEY, UUID, WITHOUT_FAST, given, of, sample_at
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Emulator,
    MigInstance,
)

SMALL, LARGE = KEY._replace(gpu_i_id=7), KEY._replace(gpu_i_id=2)
LAYOUT = [MigInstance(2, "3g.40gb", "MIG-aaaa"), MigInstance(7, "1g.10gb", "MIG-bbbb")]
SCRIPT = f"""\
# simulated
driver 580.95.05
gpu 0 uuid {UUID}
gpu 0 name NVIDIA H100 80GB HBM3
gpu 0 mig 2 3g.40gb MIG-aaaa
gpu 0 mig 7 1g.10gb MIG-bbbb
@ 0
0 utilization_gpu_percent=97 utilization_memory_percent=4 power_milliwatts=412345 power_limit_milliwatts=700000
0 memory_total_bytes=85000000000 memory_used_bytes=50000000000 temperature_celsius=61 sm_clock_megahertz=1755
0 ecc_corrected_volatile=3 processes=11:100,22:200 energy_millijoules=7000
0 gpm_sm_active_percent=50 gpm_pcie_receive_mibibytes_per_second=2
0:2 memory_total_bytes=42000000000 memory_used_bytes=30000000000 processes=11:100
0:2 gpm_sm_active_percent=80 gpm_dram_bandwidth_percent=20
0:7 memory_total_bytes=10000000000 memory_used_bytes=5000000000 processes=22:200,33
0:7 gpm_sm_active_percent=10
"""


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(WITHOUT_FAST)
    yield sampler
    sampler.close()


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    return nvml_emulator(SCRIPT)


def keys(records: Sequence[Record], kind: type[Record]) -> list[GpuKey]:
    return [record.key for record in records if type(record) is kind]


def test_the_instances_have_memory_activity_and_processes(emulator, sampler):
    records = sample_at(emulator, sampler, 0)
    assert given(of(records, GpuSample, LARGE)) == {
        "memory_used_bytes": 30_000_000_000,
        "memory_total_bytes": 42_000_000_000,
    }
    assert given(of(records, GpuSlowSample, LARGE)) == {"processes": (GpuProcess(11, 100),)}
    assert of(records, GpuSlowSample, SMALL).processes == (GpuProcess(22, 200), GpuProcess(33, None))
    records = sample_at(emulator, sampler, 1)
    large, small = of(records, GpuSample, LARGE), of(records, GpuSample, SMALL)
    assert (large.sm_active_ratio, large.dram_active_ratio) == (0.8, 0.2)
    assert (small.sm_active_ratio, small.dram_active_ratio) == (0.1, None)
    assert small.pcie_receive_bytes_per_second is None  # has no meaning for an instance
    assert sampler.errors == {}


def test_the_card_keeps_the_rest_and_nothing_is_there_twice(emulator, sampler):
    records = sample_at(emulator, sampler, 0)
    assert given(of(records, GpuSample)) == {"power_watts": 412.345, "sm_clock_hertz": 1.755e9}
    assert given(of(records, GpuSlowSample)) == {"energy_joules_total": 7.0, "temperature_celsius": 61.0}
    assert of(records, GpuHealth).ecc_corrected_volatile_total == 3
    assert of(records, GpuLimits).power_limit_watts == 700.0
    assert keys(records, GpuState) == [KEY]
    assert keys(records, GpuHealth) == [KEY]
    assert sample_at(emulator, sampler, 1)
    assert of(sample_at(emulator, sampler, 2), GpuSample).sm_active_ratio is None


def test_identities_come_at_the_start_and_every_60_seconds(emulator, sampler):
    infos = [
        (second, record.key.gpu_i_id, record.profile, record.mig_uuid)
        for second in range(62)
        for record in sample_at(emulator, sampler, second)
        if isinstance(record, GpuMigInfo)
    ]
    assert infos == [
        (0, 2, "3g.40gb", "MIG-aaaa"),
        (0, 7, "1g.10gb", "MIG-bbbb"),
        (60, 2, "3g.40gb", "MIG-aaaa"),
        (60, 7, "1g.10gb", "MIG-bbbb"),
    ]


def test_a_new_layout_is_seen_within_ten_seconds_and_an_instance_that_stays_goes_on(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.mig(0, [*LAYOUT, MigInstance(9, "1g.10gb", "MIG-cccc")])
    seen = {second: sample_at(emulator, sampler, second) for second in range(1, 12)}
    assert [second for second, records in seen.items() if keys(records, GpuMigInfo)] == [10]
    assert keys(seen[10], GpuMigInfo) == [LARGE, SMALL, KEY._replace(gpu_i_id=9)]
    assert of(seen[10], GpuSample, LARGE).sm_active_ratio == 0.8  # its buffers were kept


def test_an_instance_that_is_destroyed_is_gone_in_the_next_tick(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.mig(0, LAYOUT[:1])
    assert keys(sample_at(emulator, sampler, 1), GpuSample) == [KEY, LARGE]
    records = sample_at(emulator, sampler, 2)
    assert keys(records, GpuSample) == [KEY, LARGE]
    assert keys(records, GpuState) == [KEY]
    assert sampler.errors == {}


def test_an_instance_made_anew_with_the_same_number_is_another(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.mig(0, [LAYOUT[0], MigInstance(7, "1g.20gb", "MIG-dddd")])
    infos = [
        (record.profile, record.mig_uuid)
        for second in range(1, 12)
        for record in sample_at(emulator, sampler, second)
        if isinstance(record, GpuMigInfo) and record.key == SMALL
    ]
    assert infos == [("1g.20gb", "MIG-dddd")]


def test_compute_instances_of_one_gpu_instance_are_one(emulator, sampler):
    emulator.mig(0, [MigInstance(2, "1c.3g.40gb", "MIG-aaaa"), MigInstance(2, "2c.3g.40gb", "MIG-eeee")])
    records = sample_at(emulator, sampler, 0)
    assert of(records, GpuMigInfo, LARGE).profile == "3g.40gb"
    assert keys(records, GpuSample) == [KEY, LARGE]
    assert of(records, GpuSlowSample, LARGE).processes == (GpuProcess(11, 100),)


def test_mig_mode_is_switched_off_and_on(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.mig(0, None)
    seen = {second: sample_at(emulator, sampler, second) for second in range(1, 12)}
    assert keys(seen[11], GpuSample) == [KEY]
    whole = of(seen[11], GpuSample)
    assert (whole.utilization_ratio, whole.memory_used_bytes, whole.sm_active_ratio) == (0.97, 50_000_000_000, 0.5)
    emulator.mig(0, LAYOUT)
    seen = {second: sample_at(emulator, sampler, second) for second in range(12, 32)}
    assert keys(seen[31], GpuSample) == [KEY, LARGE, SMALL]
    assert of(seen[31], GpuSample).memory_used_bytes is None


def test_mig_mode_without_instances_has_only_the_card(emulator, sampler):
    emulator.mig(0, [])
    records = sample_at(emulator, sampler, 0)
    assert keys(records, GpuSample) == [KEY]
    assert of(records, GpuSample).memory_used_bytes is None


def test_an_instance_whose_processes_may_not_be_seen_has_none(emulator, sampler, caplog):
    emulator.fail(NO_PERMISSION, call="nvmlDeviceGetComputeRunningProcesses")
    for second in range(0, 20, 5):
        records = sample_at(emulator, sampler, second)
        assert of(records, GpuSlowSample, LARGE).processes is None
    assert sampler.errors == {"no_permission": 2}
    assert len(caplog.records) == 2  # each instance says so once


def test_a_card_that_is_lost_takes_its_instances_with_it(emulator, sampler):
    sample_at(emulator, sampler, 0)
    emulator.fail(GPU_IS_LOST)
    records = sample_at(emulator, sampler, 1)
    assert [type(record) for record in records] == [GpuState]
    assert of(records, GpuState).state == "lost"


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_a_driver_without_mig_is_asked_once(emulator, sampler, code):
    emulator.mig(0, None)
    emulator.fail(code, call="nvmlDeviceGetMigMode")
    emulator.log_calls()
    for second in range(30):
        sample_at(emulator, sampler, second)
    assert len(emulator.calls().of("nvmlDeviceGetMigMode")) == 1
    assert sampler.errors == {}


def test_the_buffers_of_instances_are_freed(emulator, sampler):
    emulator.log_calls()
    sample_at(emulator, sampler, 0)
    assert emulator.calls().gpm_samples_alive == 4
    emulator.mig(0, LAYOUT[:1])
    for second in range(1, 4):
        sample_at(emulator, sampler, second)
    assert emulator.calls().gpm_samples_alive == 2
    sampler.close()
    assert emulator.calls().gpm_samples_alive == 0
