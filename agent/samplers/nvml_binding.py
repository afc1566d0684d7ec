"""The typed face of `pynvml` (nvidia-ml-py): the only file that imports it, so that `Any` stops here.

Values keep NVML's raw units; errors become `NvmlError`. Every function is one driver call (two for processes) and may
block for as long as the driver likes. nvidia-ml-py keeps neither a failed load of the library nor a missing symbol:
both are tried again at the next call, so a driver that arrives later is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NewType

import pynvml

#: A GPU as the driver knows it; void after nvmlShutdown or a re-enumeration.
DeviceHandle = NewType("DeviceHandle", object)

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
VERSION_MISMATCH: Final = 25
GPU_NOT_FOUND: Final = 28
UNKNOWN: Final = 999

CLOCK_SM: Final = 1
CLOCK_MEMORY: Final = 2
#: `scopeId` of a link field that asks for the sum over all links (UINT_MAX).
ALL_LINKS: Final = 0xFFFF_FFFF

_REASONS: Final = {
    UNINITIALIZED: "uninitialized",
    INVALID_ARGUMENT: "invalid_argument",
    NOT_SUPPORTED: "not_supported",
    NO_PERMISSION: "no_permission",
    6: "not_found",
    7: "insufficient_size",
    DRIVER_NOT_LOADED: "driver_not_loaded",
    TIMEOUT: "timeout",
    11: "irq_issue",
    LIBRARY_NOT_FOUND: "library_not_found",
    FUNCTION_NOT_FOUND: "function_not_found",
    GPU_IS_LOST: "gpu_is_lost",
    RESET_REQUIRED: "reset_required",
    17: "operating_system",
    LIB_RM_VERSION_MISMATCH: "lib_rm_version_mismatch",
    19: "in_use",
    20: "memory",
    21: "no_data",
    VERSION_MISMATCH: "version_mismatch",
    GPU_NOT_FOUND: "gpu_not_found",
    UNKNOWN: "unknown",
}
#: Member of the value union by `valueType`, and its width in bits.
_UNION_MEMBERS: Final = {
    0: ("dVal", 64),
    1: ("uiVal", 32),
    2: ("ulVal", 64),  # unsigned long: 64 bits on every Linux that has the driver
    3: ("ullVal", 64),
    4: ("sllVal", 64),
    5: ("siVal", 32),
    6: ("usVal", 16),
}


class NvmlError(Exception):
    """A driver call that did not succeed; `code` is NVML's, `reason` our short fixed word for it."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.reason = _REASONS.get(code, "other")
        super().__init__(f"NVML error {code} ({self.reason})")


class FieldReading(NamedTuple):
    """One value of nvmlDeviceGetFieldValues; `value` is None where `code` is not 0."""

    code: int
    value: float | None
    bits: int  # width of the type that the driver chose


class MemoryReading(NamedTuple):
    """Bytes of device memory; `used` is without what the driver reserves where version 2 of the call exists."""

    total: int
    used: int


class ProcessReading(NamedTuple):
    """A compute process; the memory is None where the driver does not tell it."""

    pid: int
    used: int | None


def _call(name: str, *arguments: object) -> Any:  # noqa: ANN401 - nvidia-ml-py is untyped
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlError(int(error.value)) from None
    except (AttributeError, UnicodeDecodeError) as error:
        # An nvidia-ml-py without the function, or a text that is no UTF-8 from a sick driver.
        raise NvmlError(FUNCTION_NOT_FOUND if isinstance(error, AttributeError) else UNKNOWN) from error


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def start() -> None:
    """Load the library where that is not done yet, and call nvmlInit."""
    _call("nvmlInit")


def stop() -> None:
    """Call nvmlShutdown; the library stays loaded."""
    _call("nvmlShutdown")


def driver_version() -> str:
    """Return the version of the kernel driver, such as "580.95.05"."""
    return _text(_call("nvmlSystemGetDriverVersion"))


def device_count() -> int:
    """Return how many GPUs the driver enumerates."""
    return int(_call("nvmlDeviceGetCount"))


def device_handle(index: int) -> DeviceHandle:
    """Return the GPU at a position of the enumeration; initialises it, which takes seconds without persistence mode."""
    return DeviceHandle(_call("nvmlDeviceGetHandleByIndex", index))


def device_uuid(handle: DeviceHandle) -> str:
    """Return the UUID with its GPU- prefix."""
    return _text(_call("nvmlDeviceGetUUID", handle))


def device_name(handle: DeviceHandle) -> str:
    """Return the product name."""
    return _text(_call("nvmlDeviceGetName", handle))


def device_pci_bus_id(handle: DeviceHandle) -> str:
    """Return the PCI address with a domain of 8 digits."""
    return _text(_call("nvmlDeviceGetPciInfo_v3", handle).busId)


def device_minor(handle: DeviceHandle) -> int:
    """Return N of /dev/nvidiaN."""
    return int(_call("nvmlDeviceGetMinorNumber", handle))


def utilization(handle: DeviceHandle) -> tuple[int, int]:
    """Return the utilisation of GPU and memory in percent."""
    rates = _call("nvmlDeviceGetUtilizationRates", handle)
    return int(rates.gpu), int(rates.memory)


def memory(handle: DeviceHandle) -> MemoryReading:
    """Return the memory by version 2 of the call."""
    info = _call("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
    return MemoryReading(int(info.total), int(info.used))


def memory_v1(handle: DeviceHandle) -> MemoryReading:
    """Return the memory by version 1, for drivers before R510; `used` is without the reserved part there too."""
    info = _call("nvmlDeviceGetMemoryInfo", handle)
    return MemoryReading(int(info.total), int(info.used))


def power_milliwatts(handle: DeviceHandle) -> int:
    """Return the power draw."""
    return int(_call("nvmlDeviceGetPowerUsage", handle))


def power_limit_milliwatts(handle: DeviceHandle) -> int:
    """Return the limit that is enforced now."""
    return int(_call("nvmlDeviceGetEnforcedPowerLimit", handle))


def energy_millijoules(handle: DeviceHandle) -> int:
    """Return the energy since the driver was loaded."""
    return int(_call("nvmlDeviceGetTotalEnergyConsumption", handle))


def clock_megahertz(handle: DeviceHandle, clock: int) -> int:
    """Return a clock, CLOCK_SM or CLOCK_MEMORY."""
    return int(_call("nvmlDeviceGetClockInfo", handle, clock))


def max_clock_megahertz(handle: DeviceHandle, clock: int) -> int:
    """Return the maximum of a clock, CLOCK_SM or CLOCK_MEMORY."""
    return int(_call("nvmlDeviceGetMaxClockInfo", handle, clock))


def temperature_celsius(handle: DeviceHandle) -> int:
    """Return the GPU's temperature by the call of NVML 13."""
    return int(_call("nvmlDeviceGetTemperatureV", handle, 0))


def temperature_celsius_old(handle: DeviceHandle) -> int:
    """Return the GPU's temperature by the call that NVML 14 removes."""
    return int(_call("nvmlDeviceGetTemperature", handle, 0))


def event_reasons(handle: DeviceHandle) -> int:
    """Return the bits of the clock event reasons that are active now."""
    return int(_call("nvmlDeviceGetCurrentClocksEventReasons", handle))


def event_reasons_old(handle: DeviceHandle) -> int:
    """Return the same bits by the name of the call before R535."""
    return int(_call("nvmlDeviceGetCurrentClocksThrottleReasons", handle))


def processes(handle: DeviceHandle) -> list[ProcessReading]:
    """Return the compute processes by version 3 of the call."""
    return _processes(_call("nvmlDeviceGetComputeRunningProcesses_v3", handle))


def processes_v2(handle: DeviceHandle) -> list[ProcessReading]:
    """Return the compute processes by version 2, which has the same struct."""
    return _processes(_call("nvmlDeviceGetComputeRunningProcesses_v2", handle))


def _processes(infos: Sequence[Any]) -> list[ProcessReading]:
    return [ProcessReading(int(i.pid), None if i.usedGpuMemory is None else int(i.usedGpuMemory)) for i in infos]


def field_values(handle: DeviceHandle, fields: Sequence[tuple[int, int]]) -> list[FieldReading]:
    """Return fields, each an (id, scope), by one driver call, which costs as much as its slowest member."""
    readings = []
    for entry in _call("nvmlDeviceGetFieldValues", handle, fields):
        code = int(entry.nvmlReturn)
        member, bits = _UNION_MEMBERS.get(int(entry.valueType), (None, 0))
        if code == 0 and member is None:
            code = UNKNOWN
        readings.append(FieldReading(code, getattr(entry.value, member) if code == 0 and member else None, bits))
    return readings
