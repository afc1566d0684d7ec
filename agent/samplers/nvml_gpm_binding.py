"""The typed face of GPM, the driver's performance monitoring of Hopper and newer; beside `nvml_binding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NewType

import pynvml

from agent.samplers.nvml_binding import FUNCTION_NOT_FOUND, DeviceHandle, NvmlError, call

#: A buffer that holds the raw counters of one moment; allocated and freed by the library.
GpmSample = NewType("GpmSample", object)


class GpmReading(NamedTuple):
    """One metric of nvmlGpmMetricsGet; `value` means nothing where `code` is not 0."""

    code: int
    value: float


def is_supported(handle: DeviceHandle) -> bool:
    """Return whether the GPU has GPM."""
    return bool(call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice)


def allocate() -> GpmSample:
    """Return a new buffer; to be freed before nvmlShutdown."""
    return GpmSample(call("nvmlGpmSampleAlloc"))


def free(sample: GpmSample) -> None:
    """Free a buffer."""
    call("nvmlGpmSampleFree", sample)


def take(handle: DeviceHandle, sample: GpmSample) -> None:
    """Store the counters of this moment."""
    call("nvmlGpmSampleGet", handle, sample)


def take_mig(handle: DeviceHandle, gpu_instance_id: int, sample: GpmSample) -> None:
    """Store the counters of one GPU instance; the handle is the physical GPU's."""
    call("nvmlGpmMigSampleGet", handle, gpu_instance_id, sample)


class GpmQuery:
    """Asks for the same metrics again and again, in one struct whose array is as long as nvidia-ml-py says."""

    def __init__(self, metrics: Sequence[int]) -> None:
        struct = getattr(pynvml, "c_nvmlGpmMetricsGet_t", None)
        if struct is None:
            raise NvmlError(FUNCTION_NOT_FOUND)
        self._struct: Any = struct()
        self._count = min(len(metrics), len(self._struct.metrics))
        self._struct.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._struct.numMetrics = self._count
        for entry, metric in zip(self._struct.metrics, metrics, strict=False):
            entry.metricId = metric

    def read(self, older: GpmSample, newer: GpmSample) -> list[GpmReading]:
        """Return the metrics between two samples, in the order of the ids."""
        self._struct.sample1, self._struct.sample2 = older, newer
        call("nvmlGpmMetricsGet", self._struct)
        entries = self._struct.metrics
        return [GpmReading(entries[index].nvmlReturn, entries[index].value) for index in range(self._count)]
