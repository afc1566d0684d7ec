"""What the emulator answers to nvidia-ml-py: GPM, fields, health, processes, rings."""

from __future__ import annotations

import ctypes
import itertools
import time

import pynvml
import pytest

from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Emulator

EVERY_LINK = 2**32 - 1

SCRIPT = """\
driver 580.95.05
gpu 0 name NVIDIA H100 80GB HBM3
gpu 0 nvlink_links 4
@ 0
0 utilization_gpu_percent=90 utilization_memory_percent=40 power_milliwatts=500000 power_instant_milliwatts=512345
0 gpm_sm_active_percent=61.25 gpm_sm_occupancy_percent=33.5 gpm_any_tensor_percent=40.125
0 gpm_hmma_tensor_percent=40 gpm_imma_tensor_percent=0 gpm_dfma_tensor_percent=0.5 gpm_dram_bandwidth_percent=71
0 gpm_fp64_percent=1 gpm_fp32_percent=2 gpm_fp16_percent=3
0 gpm_pcie_transmit_mibibytes_per_second=100.5 gpm_pcie_receive_mibibytes_per_second=200.5
0 gpm_nvlink_transmit_mibibytes_per_second=300.5 gpm_nvlink_receive_mibibytes_per_second=400.5
0 ecc_corrected_volatile=3 ecc_uncorrected_volatile=1 ecc_corrected_aggregate=30 ecc_uncorrected_aggregate=10
0 remapped_rows_correctable=2 remapped_rows_uncorrectable=1 row_remap_pending=1 row_remap_failure=0
0 pcie_replays=7 pcie_generation=3 pcie_generation_max=5 pcie_width=8 pcie_width_max=16
0 nvlink_crc_errors=10 nvlink_replay_errors=5 nvlink_recovery_errors=1 recovery_action=2 fabric_state=3
0 nvlink_transmit_kibibytes=4000 nvlink_receive_kibibytes=8000
0 thermal_nanoseconds=750 sw_thermal_nanoseconds=691 hw_thermal_nanoseconds=701 hw_power_brake_nanoseconds=711
0 processes=4242:1048576,4343
@ 10
0 gpm_sm_active_percent=20 ecc_corrected_volatile=4
"""


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    emulator = nvml_emulator(SCRIPT)
    emulator.freeze(0)
    pynvml.nvmlInit()
    return emulator


def device() -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def error_of(call, *arguments) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        call(*arguments)
    return caught.value.value


def field(handle: object, *wanted: int | tuple[int, int]) -> list[tuple[int, int]]:
    """Return (return code, value) of each field, the value by its type."""
    answers = pynvml.nvmlDeviceGetFieldValues(handle, list(wanted))
    by_type = {1: "uiVal", 3: "ullVal"}
    return [(a.nvmlReturn, getattr(a.value, by_type[a.valueType]) if a.nvmlReturn == 0 else -1) for a in answers]


def metrics_between(first: object, second: object, *ids: int) -> dict[int, tuple[int, float]]:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(ids)
    request.sample1, request.sample2 = first, second
    for place, metric in enumerate(ids):
        request.metrics[place].metricId = metric
    pynvml.nvmlGpmMetricsGet(request)
    return {m.metricId: (m.nvmlReturn, m.value) for m in request.metrics[: len(ids)]}


def test_gpm_gives_every_metric_at_the_second_sample(emulator: Emulator) -> None:
    assert pynvml.nvmlGpmQueryDeviceSupport(device()).isSupportedDevice == 1
    first, second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(device(), first)
    emulator.freeze(1)
    pynvml.nvmlGpmSampleGet(device(), second)
    ids = (2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 20, 21, 60, 61, 1)
    values = metrics_between(first, second, *ids)
    wanted = (61.25, 33.5, 40.125, 0.5, 40, 0, 71, 1, 2, 3, 100.5, 200.5, 400.5, 300.5)
    assert [values[metric] for metric in ids[:-1]] == [(0, value) for value in wanted]
    assert values[1] == (NOT_SUPPORTED, -1)  # no name in the script stands for the graphics utilisation

    emulator.freeze(10)
    pynvml.nvmlGpmSampleGet(device(), first)
    emulator.fail(NOT_SUPPORTED, call="gpm:3")
    assert metrics_between(second, first, 2, 3) == {2: (0, 20), 3: (NOT_SUPPORTED, -1)}
    pynvml.nvmlGpmSampleFree(first)
    pynvml.nvmlGpmSampleFree(second)
    assert error_of(pynvml.nvmlGpmSampleFree, second) == INVALID_ARGUMENT


def test_gpm_needs_two_samples_of_one_gpu_100_ms_apart(emulator: Emulator) -> None:
    first, second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(device(), first)
    assert error_of(metrics_between, first, second, 2) == INVALID_ARGUMENT  # the second is empty
    emulator.freeze(0.05)
    pynvml.nvmlGpmSampleGet(device(), second)
    assert error_of(metrics_between, first, second, 2) == INVALID_ARGUMENT
    emulator.freeze(0.1)
    pynvml.nvmlGpmSampleGet(device(), second)
    assert metrics_between(first, second, 2) == {2: (0, 61.25)}
    assert error_of(metrics_between, second, first, 2) == INVALID_ARGUMENT  # the wrong way round
    for sample in (first, second):
        pynvml.nvmlGpmSampleFree(sample)


@pytest.mark.parametrize("line", ["gpu 0 architecture ampere\n", "gpu 0 name NVIDIA A100-SXM4-80GB\n"])
def test_gpm_is_not_offered_before_hopper(nvml_emulator: EmulatorFactory, line: str) -> None:
    nvml_emulator(SCRIPT + line).freeze(0)
    pynvml.nvmlInit()
    assert pynvml.nvmlGpmQueryDeviceSupport(device()).isSupportedDevice == 0
    sample = pynvml.nvmlGpmSampleAlloc()
    assert error_of(pynvml.nvmlGpmSampleGet, device(), sample) == NOT_SUPPORTED
    pynvml.nvmlGpmSampleFree(sample)
    assert pynvml.nvmlDeviceGetArchitecture(device()) == pynvml.NVML_DEVICE_ARCH_AMPERE


def test_health_by_call_and_by_field(emulator: Emulator) -> None:
    gpu = device()
    assert pynvml.nvmlDeviceGetEccMode(gpu) == [1, 1]
    assert [pynvml.nvmlDeviceGetTotalEccErrors(gpu, kind, counter) for kind in (0, 1) for counter in (0, 1)] == [
        3,
        30,
        1,
        10,
    ]
    assert pynvml.nvmlDeviceGetMemoryErrorCounter(gpu, 0, 0, pynvml.NVML_MEMORY_LOCATION_DRAM) == 3
    assert pynvml.nvmlDeviceGetMemoryErrorCounter(gpu, 0, 0, pynvml.NVML_MEMORY_LOCATION_SRAM) == 0
    assert pynvml.nvmlDeviceGetRemappedRows(gpu) == (2, 1, 1, 0)
    assert pynvml.nvmlDeviceGetPcieReplayCounter(gpu) == 7
    assert pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu) == 3
    assert pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu) == 5
    assert pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu) == 8
    assert pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu) == 16
    assert field(gpu, 3, 4, 5, 6, 142, 143, 144, 145, 94, 185, 186, 230) == [
        (0, value) for value in (3, 1, 30, 10, 2, 1, 1, 0, 7, 500000, 512345, 2)
    ]
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
    assert (info.version, info.state, info.status) == (pynvml.nvmlGpuFabricInfo_v2, 3, 0)
    emulator.freeze(9.9)  # errors hold until the next point of the script
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 0, 0) == 3
    emulator.freeze(10)
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 0, 0) == 4


def test_errors_of_links_are_spread_and_add_up(emulator: Emulator) -> None:
    gpu = device()
    crc = [pynvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT) for link in range(4)]
    assert crc == [3, 3, 2, 2]  # 10 over 4 links
    replays = [pynvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, 0) for link in range(4)]
    assert (replays, sum(replays)) == ([2, 1, 1, 1], 5)
    assert pynvml.nvmlDeviceGetNvLinkErrorCounter(gpu, 0, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA) == 0
    assert field(gpu, 38, 45, 52, 59, 32, 35, (163, 0), (161, 1), (162, 0)) == [
        (0, value) for value in (10, 0, 5, 1, 3, 2, 3, 1, 1)
    ]
    assert field(gpu, 36, (163, 4), (202, 0)) == [(NOT_SUPPORTED, -1), (INVALID_ARGUMENT, -1), (NOT_SUPPORTED, -1)]
    assert field(gpu, (138, EVERY_LINK), (138, 3), (139, EVERY_LINK)) == [(0, 4000), (0, 1000), (0, 8000)]
    emulator.override("nvlink_inactive_links", 1)
    assert [pynvml.nvmlDeviceGetNvLinkState(gpu, link) for link in range(4)] == [1, 1, 1, 0]
    assert error_of(pynvml.nvmlDeviceGetNvLinkState, gpu, 4) == INVALID_ARGUMENT


def test_nvlink_5_counts_bytes_and_errors_in_its_own_fields(nvml_emulator: EmulatorFactory) -> None:
    script = SCRIPT + "gpu 0 nvlink_version 5\ngpu 0 architecture blackwell\n@ 0\n0 nvlink_integrity_errors=4\n"
    nvml_emulator(script).freeze(0)
    pynvml.nvmlInit()
    assert field(device(), (202, 0), (204, 3), (208, 0), (211, 3), (215, 0), (215, 1)) == [
        (0, value) for value in (1000 * 1024, 2000 * 1024, 3, 1, 1, 0)
    ]
    assert field(device(), 38, (163, 0)) == [(NOT_SUPPORTED, -1)] * 2
    assert error_of(pynvml.nvmlDeviceGetNvLinkErrorCounter, device(), 0, 0) == NOT_SUPPORTED


OLD = {251: 691, 252: 701, 253: 711}
NEW = {269: 691, 270: 701, 271: 711}


@pytest.mark.parametrize(
    ("version", "times"),
    [("550.54.15", {}), ("570.86.10", OLD), ("580.65.06", OLD), ("580.82.07", NEW), ("595.10", NEW)],
)
@pytest.mark.parametrize("architecture", ["hopper", "blackwell"])
def test_fields_from_251_on_follow_the_driver(
    nvml_emulator: EmulatorFactory, version: str, times: dict[int, int], architecture: str
) -> None:
    nvml_emulator(SCRIPT + f"driver {version}\ngpu 0 architecture {architecture}\n").freeze(0)
    pynvml.nvmlInit()
    assert pynvml.nvmlSystemGetDriverVersion() == version
    ids = range(251, 274)
    # Whoever reads by the other table gets a power smoothing setting on Blackwell, and an error on Hopper.
    other = (0, 1) if times and architecture == "blackwell" else (NOT_SUPPORTED, -1)
    assert dict(zip(ids, field(device(), *ids), strict=True)) == {
        number: (0, times[number]) if number in times else other for number in ids
    }


def test_processes_of_every_version(emulator: Emulator) -> None:
    for call in (pynvml.nvmlDeviceGetComputeRunningProcesses_v2, pynvml.nvmlDeviceGetComputeRunningProcesses_v3):
        assert [(p.pid, p.usedGpuMemory, p.gpuInstanceId) for p in call(device())] == [
            (4242, 1048576, 2**32 - 1),
            (4343, None, 2**32 - 1),
        ]
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(device()) == []
    shares = pynvml.nvmlDeviceGetProcessUtilization(device(), 0)
    assert [(s.pid, s.smUtil, s.memUtil) for s in shares] == [(4242, 45, 20), (4343, 45, 20)]
    emulator.override("utilization_gpu_percent", 0)
    assert error_of(pynvml.nvmlDeviceGetProcessUtilization, device(), 0) == NOT_FOUND


def test_process_details(nvml_emulator: EmulatorFactory) -> None:
    # nvidia-ml-py 13.615 raises TypeError where the memory of a process is not told, so here it is.
    nvml_emulator("@ 0\n0 processes=4242:1048576,4343:2\n").freeze(0)
    pynvml.nvmlInit()
    by_mode = [
        pynvml.nvmlDeviceGetRunningProcessDetailList(device(), pynvml.nvmlProcessDetailList_v1, mode)
        for mode in (pynvml.NVML_PROCESS_MODE_COMPUTE, pynvml.NVML_PROCESS_MODE_GRAPHICS)
    ]
    assert [[(p.pid, p.usedGpuMemory) for p in listed] for listed in by_mode] == [[(4242, 1048576), (4343, 2)], []]


def test_the_first_version_of_the_process_list_has_pairs(emulator: Emulator) -> None:
    class ProcessInfoV1(ctypes.Structure):
        _fields_ = (("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong))

    call = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses")
    count, infos = ctypes.c_uint(8), (ProcessInfoV1 * 8)()
    assert call(device(), ctypes.byref(count), infos) == 0
    assert [(p.pid, p.usedGpuMemory) for p in infos[: count.value]] == [(4242, 1048576), (4343, 2**64 - 1)]


def test_the_power_ring_is_offered_where_the_script_says(nvml_emulator: EmulatorFactory, emulator: Emulator) -> None:
    assert error_of(pynvml.nvmlDeviceGetSamples, device(), pynvml.NVML_TOTAL_POWER_SAMPLES, 0) == NOT_SUPPORTED
    pynvml.nvmlShutdown()
    nvml_emulator(SCRIPT + "gpu 0 power_ring 20 119\n").freeze(0)
    pynvml.nvmlInit()
    kind, samples = pynvml.nvmlDeviceGetSamples(device(), pynvml.NVML_TOTAL_POWER_SAMPLES, 0)
    assert (kind, len(samples)) == (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 119)
    times = [sample.timeStamp for sample in samples]
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {20000}
    assert abs(times[-1] / 1e6 - time.time()) < 1
    assert {sample.sampleValue.uiVal for sample in samples} == {512345}
    _, later = pynvml.nvmlDeviceGetSamples(device(), pynvml.NVML_TOTAL_POWER_SAMPLES, times[100])
    assert later[0].timeStamp == times[101]
    assert error_of(pynvml.nvmlDeviceGetSamples, device(), 0, times[-1] + 10**9) == NOT_FOUND


def test_what_programs_ask_at_their_start(emulator: Emulator) -> None:
    gpu = device()
    assert pynvml.nvmlDeviceGetBrand(gpu) == pynvml.NVML_BRAND_NVIDIA
    assert pynvml.nvmlDeviceGetCudaComputeCapability(gpu) == (9, 0)
    assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000
    assert pynvml.nvmlSystemGetNVMLVersion() == "13.580.95.05"
    assert pynvml.nvmlDeviceGetDisplayActive(gpu) == 0
    assert pynvml.nvmlDeviceGetPersistenceMode(gpu) == 1
    assert pynvml.nvmlDeviceGetPerformanceState(gpu) == 0
    assert pynvml.nvmlDeviceGetEncoderUtilization(gpu)[0] == 0
    assert pynvml.nvmlDeviceGetBAR1MemoryInfo(gpu).bar1Total == 2**37
    assert error_of(pynvml.nvmlDeviceGetFanSpeed, gpu) == NOT_SUPPORTED
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) == 0
    assert str(pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)) == "GPU is lost"
