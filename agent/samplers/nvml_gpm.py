"""GPM of one GPU or MIG instance: activity of its units and traffic of its links, on Hopper and newer.

The driver compares two samples of raw counters. Two buffers take turns: the newer one of this tick is the older one of
the next. They are the library's memory and are freed before it is shut down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from agent.samplers import nvml_binding as nvml
from agent.samplers import nvml_gpm_binding as gpm
from agent.samplers.nvml_calls import Calls
from agent.samplers.nvml_plausible import FROZEN, RepeatGuard

T = TypeVar("T")

_MIBIBYTE: Final = 1 << 20
#: Field of GpuSample by metric: percent of the time, or of the maximum.
RATIOS: Final[Mapping[int, str]] = {
    2: "sm_active_ratio",
    3: "sm_occupancy_ratio",
    5: "tensor_active_ratio",
    6: "tensor_dfma_active_ratio",
    7: "tensor_hmma_active_ratio",
    9: "tensor_imma_active_ratio",
    10: "dram_active_ratio",
    11: "fp64_active_ratio",
    12: "fp32_active_ratio",
    13: "fp16_active_ratio",
}
#: Field of GpuSample by metric: MiB/s of the whole GPU, which have no meaning for an instance.
PCIE_RATES: Final[Mapping[int, str]] = {20: "pcie_transmit_bytes_per_second", 21: "pcie_receive_bytes_per_second"}
NVLINK_RATES: Final[Mapping[int, str]] = {60: "nvlink_receive_bytes_per_second", 61: "nvlink_transmit_bytes_per_second"}
_RATES: Final[Mapping[int, str]] = {**PCIE_RATES, **NVLINK_RATES}
#: More MiB/s than any link of today carries.
_MAX_MIBIBYTES: Final = 8 << 20
#: Two samples closer together say nothing, and further apart nothing about now.
_LEAST_S: Final = 0.1
_MOST_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the other readings of the tick say; None where they are not offered."""

    utilization_ratio: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None

    def contradicts_silence(self) -> bool:
        """Return whether the GPU works so hard that activity of 0 in all units cannot be.

        A kernel that only waits draws little: a stalled collective takes a quarter of the limit, real work more than
        two fifths. Such samples occur one at a time in healthy runs on an H100.
        """
        if self.utilization_ratio is None or self.power_watts is None or self.power_limit_watts is None:
            return False
        return self.utilization_ratio >= 0.95 and self.power_watts >= 0.4 * self.power_limit_watts


class Gpm:
    """The two buffers of one GPU, or of the instance `gpu_instance_id`. Used by one thread at a time."""

    def __init__(self, calls: Calls, gpu_instance_id: int | None = None) -> None:
        self._calls = calls
        self._instance = gpu_instance_id
        self._name = "GPM" if gpu_instance_id is None else f"GPM of instance {gpu_instance_id}"
        self._query: gpm.GpmQuery | None = None
        self._asked: tuple[int, ...] = ()
        self._buffers: list[gpm.GpmSample] = []
        self._newer_s: float | None = None  # when the sample in the second buffer was taken
        self._repeats = RepeatGuard()

    def read(self, now_s: float, load: Load, *, with_nvlink: bool) -> dict[str, float]:
        """Return fields of GpuSample since the tick before; empty in the first tick and where there is no GPM.

        `with_nvlink` asks for the rates of NVLink, for boards whose counters cannot be read.
        """
        if not self._open(with_nvlink=with_nvlink):
            return {}
        older_s, self._newer_s = self._newer_s, None
        if older_s is not None and now_s - older_s < _LEAST_S:
            self._newer_s = older_s
            return {}
        self._buffers.reverse()
        if self._ask(self._take) is None:
            return {}
        self._newer_s = now_s
        if older_s is None or now_s - older_s > _MOST_S:
            return {}
        readings = self._ask(lambda _: self._metrics())
        return {} if readings is None else self._judged(readings, load)

    def close(self) -> None:
        """Free the buffers; idempotent. A library that is gone has freed them itself."""
        while self._buffers:
            with contextlib.suppress(nvml.NvmlError):
                gpm.free(self._buffers.pop())
        self._newer_s = None

    def _open(self, *, with_nvlink: bool) -> bool:
        """Allocate the buffers where that is not done; return whether there are any."""
        if not self._calls.offers(self._name):
            return False
        if not self._buffers:
            if not self._ask(gpm.is_supported):
                self._calls.forgo(self._name)
                return False
            while len(self._buffers) < 2:
                buffer = self._ask(lambda _: gpm.allocate())
                if buffer is None:
                    self.close()
                    return False
                self._buffers.append(buffer)
        wanted = list(RATIOS)
        if self._instance is None:
            wanted += [*PCIE_RATES, *(NVLINK_RATES if with_nvlink else ())]
        asked = tuple(metric for metric in wanted if self._calls.offers(f"{self._name} {metric}"))
        if self._query is None or asked != self._asked:
            self._query, self._asked = gpm.GpmQuery(asked), asked
        return bool(asked)

    def _take(self, handle: nvml.DeviceHandle) -> bool:
        if self._instance is None:
            gpm.take(handle, self._buffers[1])
        else:
            gpm.take_mig(handle, self._instance, self._buffers[1])
        return True

    def _metrics(self) -> list[gpm.GpmReading]:
        return [] if self._query is None else self._query.read(self._buffers[0], self._buffers[1])

    def _judged(self, readings: list[gpm.GpmReading], load: Load) -> dict[str, float]:
        """Return what can be believed of one comparison, in base units; an old binding has room for fewer metrics."""
        ratios: dict[str, float] = {}
        rates: dict[str, float] = {}
        for metric, reading in zip(self._asked, readings, strict=False):
            label = f"{self._name} {metric}"
            if reading.code != 0:
                if reading.code == nvml.INVALID_ARGUMENT:
                    self._calls.forgo(label)  # an id that this driver does not know
                else:
                    self._calls.failed(label, nvml.NvmlError(reading.code))
            elif metric in RATIOS:
                ratio = self._calls.percent(reading.value)
                if ratio is not None:
                    ratios[RATIOS[metric]] = ratio
            else:
                rate = self._calls.scaled(reading.value, _MIBIBYTE, 0, _MAX_MIBIBYTES)
                if rate is not None:
                    rates[_RATES[metric]] = rate
        if ratios and not any(ratios.values()) and load.contradicts_silence():
            self._calls.reject()
            return {}
        if self._repeats.is_frozen(tuple(ratios.values()), load.utilization_ratio):
            self._calls.reject(FROZEN)
            return {}
        return ratios | rates

    def _ask(self, function: Callable[[nvml.DeviceHandle], T]) -> T | None:
        return self._calls.read(self._name, function)
