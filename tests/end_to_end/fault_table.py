"""The fault matrix: each fault of the driver, and what /metrics shows while it lasts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from tests.end_to_end.fault_node import CORE, GIB, GPM, GPUS, SHOWN_S
from tests.nvml_emulator.emulator import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    TIMEOUT,
    UNKNOWN,
    Emulator,
    MigInstance,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A row of the matrix.

    `begin` switches it on; GPUs that are not among `gpus` stay right in everything. Of `gpus`, `absent` has no series
    and all else is right, in `state`. Each of `reasons` is counted at least once more. `is_up` is the sampler's
    success, `visible` the GPUs that are counted, `also` what else is wrong in a page, by the page before. It shows
    within `shown_s`, and ends within `back_s` beyond what all others have. `restarts` where the library is started anew
    to be rid of it, and `is_remembered` where a return code stops calls until the GPU is found anew.
    """

    begin: Callable[[Emulator], object]
    gpus: tuple[int, ...] = (1,)
    state: str = "ok"
    absent: frozenset[str] | set[str] = frozenset()
    reasons: tuple[str, ...] = ()
    is_up: bool = True
    visible: int = GPUS
    restarts: bool = False
    is_remembered: bool = False
    back_s: float = 0.0
    shown_s: float = SHOWN_S
    also: Callable[[Mapping[str, float], Mapping[str, float]], list[str]] = lambda before, metrics: []


def all_of(*steps: Callable[[Emulator], object]) -> Callable[[Emulator], object]:
    return lambda emulator: [step(emulator) for step in steps]


def fail(code: int, call: str) -> Callable[[Emulator], object]:
    return lambda emulator: emulator.fail(code, gpu=1, call=call)


def override(**values: float) -> Callable[[Emulator], object]:
    return lambda emulator: [emulator.override(name, value, gpu=1) for name, value in values.items()]


EVERY_GPU = tuple(range(GPUS))
#: How long a fault may take to become a finding: it shows, and the agent judges every 5 s.
FOUND_S = SHOWN_S + 8.0


def finds(anomaly: str, severity: int) -> Callable[[Mapping[str, float], Mapping[str, float]], list[str]]:
    """Return what finds anything but a finding of this severity on GPU 1 alone."""

    def problems(_before: Mapping[str, float], metrics: Mapping[str, float]) -> list[str]:
        found = []
        for gpu in EVERY_GPU:
            name = re.compile(rf'warpwatch_gpu_anomaly_severity{{gpu="{gpu}",.*anomaly="{anomaly}"')
            values = [value for series, value in metrics.items() if name.match(series)]
            right = [severity if gpu == 1 else 0]
            found += [] if values == right else [f"{anomaly} of GPU {gpu} is {values}, not {right}"]
        return found

    return problems


GPM_NAMES = set(GPM)

FAULTS: dict[str, Fault] = {
    "calls that are not offered": Fault(
        begin=all_of(
            fail(NOT_SUPPORTED, "nvmlDeviceGetPowerUsage"),
            fail(FUNCTION_NOT_FOUND, "nvmlDeviceGetUtilizationRates"),
            fail(NOT_SUPPORTED, "field:82"),
            fail(NOT_SUPPORTED, "nvmlGpmSampleGet"),
        ),
        absent={"power", "utilization", "memory_utilization", "memory_temperature", *GPM_NAMES},
        is_remembered=True,
    ),
    "calls without permission": Fault(
        begin=all_of(
            fail(NO_PERMISSION, "nvmlDeviceGetTotalEnergyConsumption"), fail(NO_PERMISSION, "nvmlDeviceGetMemoryInfo")
        ),
        absent={"energy", "memory_used", "memory_total"},
        reasons=("no_permission",),
        is_remembered=True,
    ),
    "calls with unknown errors": Fault(
        begin=all_of(
            fail(UNKNOWN, "nvmlDeviceGetPowerUsage"),
            fail(UNKNOWN, "nvmlDeviceGetClockInfo"),
            fail(UNKNOWN, "field:138"),
            fail(UNKNOWN, "gpm:2"),
            fail(TIMEOUT, "nvmlDeviceGetTotalEnergyConsumption"),
        ),
        absent={"power", "sm_clock", "memory_clock", "nvlink_sent", "sm_active", "energy"},
        reasons=("unknown", "timeout"),
    ),
    "GPU lost": Fault(
        begin=lambda emulator: emulator.fail(GPU_IS_LOST, gpu=1),
        state="lost",
        absent=CORE,
        reasons=("gpu_is_lost",),
        visible=GPUS - 1,
        restarts=True,
        also=finds("gpu_lost", 3),
        shown_s=FOUND_S,
    ),
    "reset required": Fault(
        begin=lambda emulator: emulator.fail(RESET_REQUIRED, gpu=1),
        state="reset_required",
        absent=CORE,
        reasons=("reset_required",),
        also=finds("gpu_lost", 3),
        shown_s=FOUND_S,
    ),
    "every call with an unknown error": Fault(
        begin=lambda emulator: emulator.fail(UNKNOWN, gpu=1),
        state="lost",
        absent=CORE,
        reasons=("unknown",),
        visible=GPUS - 1,
        restarts=True,
    ),
    "every call times out": Fault(
        begin=lambda emulator: emulator.fail(TIMEOUT, gpu=1),
        state="hung",
        absent=CORE,
        reasons=("timeout",),
        restarts=True,
    ),
    "GPU hangs": Fault(
        begin=lambda emulator: emulator.hang(60, gpu=1),
        state="hung",
        absent=CORE,
        reasons=("hung",),
        restarts=True,
    ),
    "all GPUs hang": Fault(
        begin=lambda emulator: emulator.hang(60),
        gpus=EVERY_GPU,
        state="hung",
        absent=CORE,
        reasons=("hung",),
        restarts=True,
    ),
    "a call slower than the deadline": Fault(
        begin=lambda emulator: emulator.latency(1.5, gpu=1, call="nvmlDeviceGetPowerUsage"),
        state="hung",
        absent=CORE,
        reasons=("hung",),
        restarts=True,
    ),
    "slow calls that burn the processor": Fault(
        begin=lambda emulator: emulator.latency(0.005, mode="burn", call="nvmlDeviceGetTotalEnergyConsumption"),
        gpus=(),
    ),
    "slow calls that wait": Fault(
        begin=lambda emulator: emulator.latency(0.05, mode="wait", call="nvmlDeviceGetPowerUsage"), gpus=()
    ),
    "count of GPUs hangs": Fault(
        begin=lambda emulator: emulator.hang_system(60, call="nvmlDeviceGetCount"), gpus=(), reasons=("hung",)
    ),
    "fast reading of power hangs": Fault(
        begin=lambda emulator: emulator.hang(60, gpu=1, call="field:186"), gpus=(), reasons=("hung",)
    ),
    "GPU vanishes": Fault(
        begin=lambda emulator: emulator.vanish(1), state="lost", absent=CORE, visible=GPUS - 1, restarts=True
    ),
    "counters that wrap": Fault(
        # Of a counter that ran for a second and more, 2 ** 18 mJ (262 J) and 2 ** 20 KiB are less.
        begin=lambda emulator: [emulator.wrap(name, bits, gpu=1) for name, bits in WRAPS.items()],
        absent={"energy", "nvlink_sent", "pcie_received"},
        reasons=("counter_fell",),
    ),
    "counters that fall": Fault(
        begin=lambda emulator: [emulator.shift(name, -(10.0**15), gpu=1) for name in WRAPS],
        absent={"energy", "nvlink_sent", "pcie_received"},
        reasons=("counter_fell",),
    ),
    "counters that leap": Fault(
        begin=lambda emulator: [emulator.shift(name, 10.0**15, gpu=1) for name in WRAPS],
        absent={"energy", "nvlink_sent", "pcie_received"},
        reasons=("implausible",),
    ),
    "sentinels of 32 and 64 bits": Fault(
        begin=override(
            power_milliwatts=2**32 - 1,
            temperature_celsius=2**31 - 1,
            memory_temperature_celsius=2**32 - 1,
            sm_clock_megahertz=2**32 - 1,
            utilization_gpu_percent=2**32 - 1,
            energy_millijoules=2**64 - 1,
            memory_used_bytes=2**64 - 1,
            pcie_transmit_bytes=2**64 - 1,
            power_limit_milliwatts=2**32 - 1,
        ),
        absent={
            "power",
            "temperature",
            "memory_temperature",
            "sm_clock",
            "utilization",
            "energy",
            "memory_used",
            "memory_total",
            "pcie_sent",
            "power_limit",
        },
        reasons=("implausible",),
    ),
    "values that cannot be": Fault(
        begin=override(
            utilization_gpu_percent=101,
            power_milliwatts=2_200_000,
            memory_used_bytes=90 * GIB,
            gpm_sm_active_percent=900,
        ),
        absent={"utilization", "power", "memory_used", "memory_total", "sm_active"},
        reasons=("implausible",),
    ),
    "nothing but zeros from GPM": Fault(
        begin=override(
            gpm_sm_active_percent=0, gpm_sm_occupancy_percent=0, gpm_any_tensor_percent=0, gpm_dram_bandwidth_percent=0
        ),
        absent=GPM_NAMES,
        reasons=("implausible",),
    ),
}
WRAPS = {"energy_millijoules": 18, "nvlink_transmit_kibibytes": 20, "pcie_receive_bytes": 28}

MIG = [MigInstance(n, "3g.40gb", f"MIG-00000001-0000-0000-0000-00000000000{n}") for n in (1, 2)]


def mig_problems(_before: Mapping[str, float], metrics: Mapping[str, float]) -> list[str]:
    """Return what is wrong with the two instances of GPU 1, and with what a sum over the node counts."""
    found = []
    for n in (1, 2):
        for name, right in (("memory_used_bytes", 5 * n * GIB), ("sm_active_ratio", 0.70 + n / 100)):
            values = [v for s, v in metrics.items() if s.startswith(f"warpwatch_gpu_{name}{{") and f'_ID="{n}"' in s]
            found += [] if values == [pytest.approx(right)] else [f"{name} of instance {n} is {values}, not {right}"]
    for name, count in (("mig_info", 2), ("power_watts", GPUS), ("memory_total_bytes", GPUS + 1)):
        there = sum(series.startswith(f"warpwatch_gpu_{name}{{") for series in metrics)
        found += [] if there == count else [f"{there} series of {name}, not {count}"]
    return found


def xids(count: int) -> Callable[[Mapping[str, float], Mapping[str, float]], list[str]]:
    """Return what finds anything but so many more XIDs 79 of GPU 1 alone."""

    def problems(before: Mapping[str, float], metrics: Mapping[str, float]) -> list[str]:
        found = []
        for gpu in EVERY_GPU:
            name = re.compile(rf'warpwatch_gpu_xid_errors_total{{gpu="{gpu}",.*xid="79"')
            more = sum(v - before.get(series, 0) for series, v in metrics.items() if name.match(series))
            right = count if gpu == 1 else 0
            found += [] if more == right else [f"GPU {gpu}: {more} XIDs, not {right}"]
        return found

    return problems


FAULTS |= {
    "GPU divided by MIG": Fault(
        begin=lambda emulator: emulator.mig(1, MIG),
        absent={"utilization", "memory_utilization", "memory_used", "memory_total", *GPM},
        also=mig_problems,
        # The instances go with the first tick in which the card tells its own utilisation again.
        back_s=4.0,
    ),
    "one XID": Fault(begin=lambda emulator: emulator.xid(1, 79), gpus=(), also=xids(1)),
    "a thousand XIDs at once": Fault(
        begin=lambda emulator: emulator.xid(1, 79, count=1000), gpus=(), also=xids(1000), shown_s=20.0
    ),
}
