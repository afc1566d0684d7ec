"""MIG in the emulator: devices of a layout, what the GPU no longer tells, layouts that change."""

from __future__ import annotations

import pynvml
import pytest

from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Emulator, MigInstance

GIB = 2**30
SMALL = "MIG-11111111-0000-4000-8000-000000000001"
LARGE = "MIG-11111111-0000-4000-8000-000000000002"

SCRIPT = f"""\
gpu 0 name NVIDIA H100 80GB HBM3
gpu 0 mig 7 1g.10gb {SMALL}
gpu 0 mig 2 3g.40gb {LARGE}
gpu 1 name NVIDIA H100 80GB HBM3
@ 0
0 utilization_gpu_percent=90 memory_total_bytes={80 * GIB} memory_used_bytes={30 * GIB} power_milliwatts=300000
0 processes=11:1
0:7 memory_total_bytes={9 * GIB} memory_used_bytes={GIB} processes=77:1024
0:7 gpm_sm_active_percent=12.5
0:2 gpm_sm_active_percent=50.5 processes=22:2048,23:4096
1 utilization_gpu_percent=10 processes=
"""


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    emulator = nvml_emulator(SCRIPT)
    emulator.freeze(0)
    pynvml.nvmlInit()
    return emulator


def error_of(call, *arguments) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        call(*arguments)
    return caught.value.value


def devices(gpu: object) -> list[object]:
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except pynvml.NVMLError_NotFound:
            continue
    return found


def test_mig_devices_have_an_identity_and_values_of_their_own(emulator: Emulator) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    small, large = devices(gpu)
    assert [pynvml.nvmlDeviceGetUUID(d) for d in (small, large)] == [SMALL, LARGE]
    assert [pynvml.nvmlDeviceGetGpuInstanceId(d) for d in (small, large)] == [7, 2]
    assert [pynvml.nvmlDeviceGetComputeInstanceId(d) for d in (small, large)] == [0, 0]
    assert pynvml.nvmlDeviceGetName(small) == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    memory = pynvml.nvmlDeviceGetMemoryInfo(small, version=pynvml.nvmlMemory_v2)
    assert (memory.total, memory.used, memory.free) == (9 * GIB, GIB, 8 * GIB)
    assert pynvml.nvmlDeviceGetMemoryInfo(large).total == 40 * GIB  # of the profile, as the script gives none
    attributes = pynvml.nvmlDeviceGetAttributes(large)
    assert (attributes.gpuInstanceSliceCount, attributes.memorySizeMB) == (3, 40 * 1024)
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(large)
    assert pynvml.nvmlDeviceGetUUID(parent) == pynvml.nvmlDeviceGetUUID(gpu)
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(LARGE)) == LARGE
    assert [bool(pynvml.nvmlDeviceIsMigDeviceHandle(d)) for d in (gpu, small)] == [False, True]


def test_neither_the_gpu_nor_its_devices_have_a_utilisation(emulator: Emulator) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert error_of(pynvml.nvmlDeviceGetUtilizationRates, gpu) == NOT_SUPPORTED
    assert error_of(pynvml.nvmlDeviceGetProcessUtilization, gpu, 0) == NOT_SUPPORTED
    assert error_of(pynvml.nvmlDeviceGetUtilizationRates, devices(gpu)[0]) == NOT_SUPPORTED
    assert error_of(pynvml.nvmlDeviceGetPowerUsage, devices(gpu)[0]) == NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetPowerUsage(gpu) == 300000
    assert pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(1)).gpu == 10


def test_processes_name_their_instance(emulator: Emulator) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    listed = [(p.pid, p.gpuInstanceId) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
    assert listed == [(11, 2**32 - 1), (77, 7), (22, 2), (23, 2)]
    small, large = devices(gpu)
    assert [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(small)] == [77]
    assert [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(large)] == [2048, 4096]


def test_gpm_of_an_instance_by_its_id_and_by_its_handle(emulator: Emulator) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    by_id = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    by_handle = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    for second in range(2):
        emulator.freeze(second)
        pynvml.nvmlGpmMigSampleGet(gpu, 2, by_id[second])
        pynvml.nvmlGpmSampleGet(devices(gpu)[0], by_handle[second])
    for (first, second), active in ((by_id, 50.5), (by_handle, 12.5)):
        request = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=2, sample1=first, sample2=second)
        request.metrics[0].metricId, request.metrics[1].metricId = 2, 20
        pynvml.nvmlGpmMetricsGet(request)
        assert (request.metrics[0].value, request.metrics[1].nvmlReturn) == (active, NOT_SUPPORTED)
    assert error_of(pynvml.nvmlGpmMigSampleGet, gpu, 5, by_id[0]) == NOT_FOUND
    for sample in by_id + by_handle:
        pynvml.nvmlGpmSampleFree(sample)


def test_gpu_instances_and_profiles(emulator: Emulator) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    info = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(gpu, 2))
    assert (info.id, info.profileId, info.placement.size) == (2, 9, 3)
    assert error_of(pynvml.nvmlDeviceGetGpuInstanceById, gpu, 3) == NOT_FOUND
    profile = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, pynvml.NVML_GPU_INSTANCE_PROFILE_3_SLICE, version=2)
    assert (profile.id, profile.sliceCount, profile.name) == (9, 3, "MIG 3g.40gb")


def test_the_layout_changes_while_the_library_is_in_use(emulator: Emulator) -> None:
    gpu, other = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
    small, large = devices(gpu)
    new = MigInstance(3, "7g.80gb", "MIG-22222222-0000-4000-8000-000000000003")
    emulator.mig(0, [MigInstance(2, "3g.40gb", LARGE), new])
    assert pynvml.nvmlDeviceGetGpuInstanceId(large) == 2  # it has stayed
    assert error_of(pynvml.nvmlDeviceGetGpuInstanceId, small) == INVALID_ARGUMENT
    assert [pynvml.nvmlDeviceGetGpuInstanceId(d) for d in devices(gpu)] == [2, 3]
    emulator.mig(0, [])
    assert (pynvml.nvmlDeviceGetMigMode(gpu), devices(gpu)) == ([1, 1], [])
    emulator.mig(0, None)
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
    assert pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu == 90
    assert error_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 0) == NOT_SUPPORTED
    emulator.mig(1, [new])
    assert pynvml.nvmlDeviceGetUUID(devices(other)[0]) == new.uuid


def test_two_compute_instances_share_a_gpu_instance(emulator: Emulator) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    emulator.mig(0, [MigInstance(2, "1c.3g.40gb", "MIG-a"), MigInstance(2, "2c.3g.40gb", "MIG-b")])
    found = devices(gpu)
    assert [pynvml.nvmlDeviceGetGpuInstanceId(d) for d in found] == [2, 2]
    assert [pynvml.nvmlDeviceGetComputeInstanceId(d) for d in found] == [0, 1]
    assert [pynvml.nvmlDeviceGetAttributes(d).computeInstanceSliceCount for d in found] == [1, 2]
    assert [[p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(d)] for d in found] == [[22, 23], []]
    assert len(pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)) == 3  # none twice


def test_values_and_faults_of_one_instance(emulator: Emulator) -> None:
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    small, large = devices(gpu)
    emulator.override("memory_used_bytes", 2 * GIB, gpu=0, gpu_i_id=7)
    assert [pynvml.nvmlDeviceGetMemoryInfo(d).used for d in (gpu, small, large)] == [30 * GIB, 2 * GIB, 0]
    emulator.fail(NOT_FOUND, gpu=0, gpu_i_id=7, call="nvmlDeviceGetMemoryInfo")
    assert error_of(pynvml.nvmlDeviceGetMemoryInfo, small) == NOT_FOUND
    assert pynvml.nvmlDeviceGetMemoryInfo(large).used == 0
    emulator.fail(NOT_SUPPORTED, gpu=0)  # of the GPU: its instances too
    assert error_of(pynvml.nvmlDeviceGetMemoryInfo, large) == NOT_SUPPORTED
