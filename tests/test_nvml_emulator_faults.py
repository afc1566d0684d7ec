"""Faults of the emulator: events, counters that start again, slow calls, a driver that is loaded anew; the call log."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pynvml
import pytest

from agent.records import GpuFastPower, GpuHealth, GpuKey, GpuLimits, GpuMigInfo, GpuSample, Record, Tick
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import (
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    LIB_RM_VERSION_MISMATCH,
    NOT_SUPPORTED,
    TIMEOUT,
    UNINITIALIZED,
    Emulator,
    script_from_ticks,
)

SCRIPT = """\
driver 580.95.05
gpu 0 name NVIDIA H100 80GB HBM3
gpu 1 name NVIDIA H100 80GB HBM3
@ 0
0 power_milliwatts=100000 energy_millijoules=1000 pcie_transmit_bytes=0
0 ecc_corrected_volatile=5 ecc_corrected_aggregate=50
1 power_milliwatts=100000 energy_millijoules=1000
@ 10
0 energy_millijoules=2000 pcie_transmit_bytes=5000000000 ecc_corrected_volatile=6
1 energy_millijoules=2000
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


def device(gpu: int = 0) -> object:
    return pynvml.nvmlDeviceGetHandleByIndex(gpu)


def xids_of(events: object, *, timeout_ms: int = 0) -> list[tuple[str, int]]:
    found = []
    while True:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, timeout_ms)
        except pynvml.NVMLError_Timeout:
            return found
        assert (event.eventType, event.gpuInstanceId) == (pynvml.nvmlEventTypeXidCriticalError, 2**32 - 1)
        found.append((pynvml.nvmlDeviceGetUUID(event.device)[-1], event.eventData))


def test_an_xid_goes_once_to_every_set_that_waits_for_it(emulator: Emulator) -> None:
    assert pynvml.nvmlDeviceGetSupportedEventTypes(device()) & pynvml.nvmlEventTypeXidCriticalError
    emulator.xid(0, 13)  # before anybody is registered: never seen
    first, second = pynvml.nvmlEventSetCreate(), pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(device(0), pynvml.nvmlEventTypeXidCriticalError, first)
    pynvml.nvmlDeviceRegisterEvents(device(1), pynvml.nvmlEventTypeXidCriticalError, first)
    pynvml.nvmlDeviceRegisterEvents(device(1), pynvml.nvmlEventTypeXidCriticalError, second)
    assert error_of(pynvml.nvmlEventSetWait_v2, first, 0) == TIMEOUT
    emulator.xid(0, 79)
    emulator.xid(1, 31, count=3)
    emulator.event(1, pynvml.nvmlEventTypePState, 2)  # nobody waits for these
    emulator.clear()  # takes no event back
    assert xids_of(first) == [("0", 79), ("1", 31), ("1", 31), ("1", 31)]
    assert xids_of(second) == [("1", 31)] * 3
    assert xids_of(first) == []
    assert (
        error_of(pynvml.nvmlDeviceRegisterEvents, device(), pynvml.nvmlEventTypeFatalPoisonError, first)
        == NOT_SUPPORTED
    )
    pynvml.nvmlEventSetFree(second)
    assert error_of(pynvml.nvmlEventSetWait_v2, second, 0) == INVALID_ARGUMENT
    pynvml.nvmlEventSetFree(first)


def test_an_event_of_a_gpu_instance_names_it(emulator: Emulator) -> None:
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(device(), pynvml.nvmlEventTypeXidCriticalError, events)
    emulator.xid(0, 94, gpu_i_id=3)
    event = pynvml.nvmlEventSetWait_v2(events, 0)
    assert (event.eventData, event.gpuInstanceId, event.computeInstanceId) == (94, 3, 0)
    pynvml.nvmlEventSetFree(events)


def test_a_wait_ends_with_the_event_or_with_the_library(emulator: Emulator) -> None:
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(device(), pynvml.nvmlEventTypeXidCriticalError, events)
    results: list[int] = []

    def wait() -> None:
        for _ in range(2):
            try:
                results.append(pynvml.nvmlEventSetWait_v2(events, 30_000).eventData)
            except pynvml.NVMLError as error:
                results.append(-error.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    emulator.xid(0, 48)
    deadline = time.monotonic() + 10
    while not results and time.monotonic() < deadline:
        waiting.join(0.01)
    pynvml.nvmlShutdown()
    waiting.join(10)
    assert results == [48, -UNINITIALIZED]
    pynvml.nvmlEventSetFree(events)


def test_counters_wrap_and_start_again(emulator: Emulator) -> None:
    gpu = device()
    emulator.freeze(10)
    emulator.wrap("pcie_transmit_bytes", 32)
    answer = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES])[0]
    assert answer.value.ullVal == 5_000_000_000 - 2**32
    emulator.freeze(5)
    emulator.reset_counter("energy_millijoules", gpu=0)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 0
    emulator.freeze(6)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 100
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(device(1)) == 1600
    emulator.clear()
    emulator.freeze(7)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 200  # what happened is not taken back


def test_errors_come_and_counters_go_backwards(emulator: Emulator) -> None:
    gpu = device()
    emulator.shift("ecc_corrected_volatile", 2, gpu=0)
    emulator.shift("energy_millijoules", -300, gpu=0)
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 0, 0) == 7
    assert [pynvml.nvmlDeviceGetTotalEnergyConsumption(device(number)) for number in (0, 1)] == [700, 1000]
    emulator.clear("shift", gpu=1)  # nothing is set for that one
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 700
    emulator.clear("shift", gpu=0)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) == 1000


def test_a_reload_makes_handles_stale_and_counters_start_at_0(emulator: Emulator) -> None:
    old = device()
    events = pynvml.nvmlEventSetCreate()
    emulator.freeze(5)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(old) == 1500
    emulator.reload_driver()
    for call in (pynvml.nvmlDeviceGetCount, pynvml.nvmlSystemGetDriverVersion):
        assert error_of(call) == UNINITIALIZED
    assert error_of(pynvml.nvmlDeviceGetTotalEnergyConsumption, old) == UNINITIALIZED
    assert error_of(pynvml.nvmlEventSetWait_v2, events, 0) == UNINITIALIZED
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert error_of(pynvml.nvmlDeviceGetTotalEnergyConsumption, old) == INVALID_ARGUMENT
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(device()) == 0
    assert pynvml.nvmlDeviceGetTotalEccErrors(device(), 0, 0) == 0
    assert pynvml.nvmlDeviceGetTotalEccErrors(device(), 0, 1) == 50  # the board's own count stays
    emulator.freeze(10)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(device()) == 500
    assert pynvml.nvmlDeviceGetTotalEccErrors(device(), 0, 0) == 1
    pynvml.nvmlEventSetFree(events)


def test_another_driver_version_is_refused_for_good_but_not_by_new_processes(emulator: Emulator) -> None:
    emulator.reload_driver("595.10")
    assert error_of(pynvml.nvmlDeviceGetCount) == UNINITIALIZED
    for _ in range(2):
        assert error_of(pynvml.nvmlInit) == LIB_RM_VERSION_MISMATCH
    code = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=emulator.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "595.10 2\n"


@pytest.mark.parametrize(("mode", "share"), [("burn", (0.8, 2.0)), ("wait", (0.0, 0.3))])
def test_latency_is_spent_as_cpu_time_or_asleep(emulator: Emulator, mode: str, share: tuple[float, float]) -> None:
    gpu = device()
    emulator.latency(0.05, mode=mode, gpu=0, call="nvmlDeviceGetPowerUsage")
    wall_s, cpu_s = time.monotonic(), time.thread_time()
    assert pynvml.nvmlDeviceGetPowerUsage(gpu) == 100000
    wall_s, cpu_s = time.monotonic() - wall_s, time.thread_time() - cpu_s
    assert wall_s >= 0.05
    assert share[0] * 0.05 <= cpu_s <= share[1] * 0.05


def test_every_call_is_logged_with_its_gpu_duration_and_return(emulator: Emulator) -> None:
    with pytest.raises(RuntimeError, match="log_calls"):
        emulator.calls()
    emulator.log_calls()
    start_s = time.monotonic()
    gpu = device(1)
    emulator.latency(0.03, gpu=1, call="nvmlDeviceGetPowerUsage")
    emulator.fail(GPU_IS_LOST, gpu=1, call="nvmlDeviceGetTotalEnergyConsumption")
    pynvml.nvmlDeviceGetPowerUsage(gpu)
    error_of(pynvml.nvmlDeviceGetTotalEnergyConsumption, gpu)
    pynvml.nvmlDeviceGetFieldValues(gpu, [83, (138, 0)])
    sample = pynvml.nvmlGpmSampleAlloc()
    assert emulator.calls().gpm_samples_alive == 1
    pynvml.nvmlGpmSampleFree(sample)
    error_of(pynvml.nvmlDeviceGetPowerUsage, None)
    calls = emulator.calls()
    assert [(c.name, c.gpu, c.code, c.details) for c in calls] == [
        ("nvmlDeviceGetHandleByIndex", 1, 0, ()),
        ("nvmlDeviceGetPowerUsage", 1, 0, ()),
        ("nvmlDeviceGetTotalEnergyConsumption", 1, GPU_IS_LOST, ()),
        ("nvmlDeviceGetFieldValues", 1, 0, (83, 138)),
        ("nvmlGpmSampleAlloc", None, 0, ()),
        ("nvmlGpmSampleFree", None, 0, ()),
        ("nvmlDeviceGetPowerUsage", None, INVALID_ARGUMENT, ()),
    ]
    power = calls.of("nvmlDeviceGetPowerUsage", gpu=1)
    assert len(power) == 1
    assert 0.03 <= power[0].duration_s < 5
    assert start_s - 0.001 <= power[0].began_s <= time.monotonic()
    assert len(calls.of("nvmlDeviceGetFieldValues", detail=138)) == 1
    assert calls.since(power[0].began_s)[0] == power[0]
    assert calls.gpm_samples_alive == 0
    emulator.forget_calls()
    assert emulator.calls() == ()


KEY = GpuKey(gpu=0, uuid="GPU-00000000-0000-4000-8000-000000000000")


def tick(second: float, *records: Record) -> Tick:
    return Tick(monotonic_s=second, wall_s=second, records=records)


def test_records_of_health_gpm_limits_and_fast_power_are_played(nvml_emulator: EmulatorFactory) -> None:
    at = {"monotonic_s": 2.0, "wall_s": 2.0}
    instance = KEY._replace(gpu_i_id=4)
    ticks = [
        tick(0.0, GpuSample(key=KEY, monotonic_s=0, wall_s=0, power_watts=100.0)),
        tick(
            2.0,
            GpuHealth(
                key=KEY, ecc_corrected_volatile_total=4, nvlink_crc_errors_total=36, is_row_remap_pending=True, **at
            ),
            GpuSample(key=KEY, sm_active_ratio=0.57, nvlink_transmit_bytes_per_second=2.5 * 2**20, **at),
            GpuLimits(key=KEY, pcie_generation=4, recovery_action=1, fabric_state="completed", **at),
            GpuFastPower(key=KEY, power_watts=(410.0, 420.5), ages_s=(1.0, 0.0), **at),
            GpuMigInfo(key=instance, profile="2g.20gb", mig_uuid="MIG-x", **at),
            GpuSample(key=instance, sm_active_ratio=0.25, memory_used_bytes=77, **at),
        ),
    ]
    emulator = nvml_emulator(script_from_ticks(ticks))
    emulator.freeze(1.5)
    pynvml.nvmlInit()
    gpu = device()
    instant = [pynvml.NVML_FI_DEV_POWER_INSTANT]
    assert pynvml.nvmlDeviceGetFieldValues(gpu, instant)[0].value.uiVal == 410000
    emulator.freeze(2)
    assert pynvml.nvmlDeviceGetFieldValues(gpu, instant)[0].value.uiVal == 420500
    assert pynvml.nvmlDeviceGetTotalEccErrors(gpu, 0, 0) == 4
    assert pynvml.nvmlDeviceGetNvLinkErrorCounter(gpu, 17, 2) == 2  # 36 over 18 links
    assert pynvml.nvmlDeviceGetRemappedRows(gpu)[2] == 1
    assert pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu) == 4
    assert pynvml.nvmlDeviceGetFieldValues(gpu, [230])[0].value.uiVal == 1
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
    assert (pynvml.nvmlDeviceGetUUID(mig), pynvml.nvmlDeviceGetGpuInstanceId(mig)) == ("MIG-x", 4)
    assert pynvml.nvmlDeviceGetMemoryInfo(mig).used == 77
    first, second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(gpu, first)
    emulator.freeze(3)
    pynvml.nvmlGpmSampleGet(gpu, second)
    request = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=2, sample1=first, sample2=second)
    request.metrics[0].metricId, request.metrics[1].metricId = 2, 61
    pynvml.nvmlGpmMetricsGet(request)
    assert [m.value for m in request.metrics[:2]] == [57.0, 2.5]
    for sample in (first, second):
        pynvml.nvmlGpmSampleFree(sample)


def test_a_control_file_of_another_host_starts_afresh(nvml_emulator: EmulatorFactory, tmp_path: Path) -> None:
    first = nvml_emulator(SCRIPT)
    first.freeze(5)
    pynvml.nvmlInit()
    first.reload_driver("595.10")
    assert error_of(pynvml.nvmlDeviceGetCount) == UNINITIALIZED
    pynvml.nvmlShutdown()
    (tmp_path / "other").mkdir()
    second = Emulator(tmp_path / "other", SCRIPT)
    second.freeze(5)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in second.variables().items():
            patch.setenv(name, value)
        pynvml.nvmlInit()
        assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(device()) == 1500
        pynvml.nvmlShutdown()
