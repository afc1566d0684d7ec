"""The typed face of `pynvml` (nvidia-ml-py), which only the files `nvml_*binding` import: `Any` stops here.

Values keep NVML's raw units; errors become `NvmlError`. Every function is one driver call (two for processes) and may
block for as long as the driver likes. nvidia-ml-py keeps neither a failed load of the library nor a missing symbol:
both are tried again at the next call, so a driver that arrives later is found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NewType

import pynvml

#: A GPU as the driver knows it; void after nvmlShutdown or a re-enumeration.
DeviceHandle = NewType("DeviceHandle", object)

#: A field of nvmlDeviceGetFieldValues: its id, and the scope, such as a link.
FieldId = tuple[int, int]

UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
INSUFFICIENT_SIZE: Final = 7
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
    NOT_FOUND: "not_found",
    INSUFFICIENT_SIZE: "insufficient_size",
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


class ProcessUse(NamedTuple):
    """What a process used of a GPU over one of the driver's periods, in percent."""

    pid: int
    time_us: int  # of the wall clock
    sm: int
    memory: int


def call(name: str, *arguments: object) -> Any:  # noqa: ANN401 - nvidia-ml-py is untyped
    """Call a function of nvidia-ml-py; raises NvmlError."""
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
    call("nvmlInit")


def stop() -> None:
    """Call nvmlShutdown; the library stays loaded."""
    call("nvmlShutdown")


def driver_version() -> str:
    """Return the version of the kernel driver, such as "580.95.05"."""
    return _text(call("nvmlSystemGetDriverVersion"))


def device_count() -> int:
    """Return how many GPUs the driver enumerates."""
    return int(call("nvmlDeviceGetCount"))


def device_handle(index: int) -> DeviceHandle:
    """Return the GPU at a position of the enumeration; initialises it, which takes seconds without persistence mode."""
    return DeviceHandle(call("nvmlDeviceGetHandleByIndex", index))


def device_uuid(handle: DeviceHandle) -> str:
    """Return the UUID with its GPU- prefix."""
    return _text(call("nvmlDeviceGetUUID", handle))


def device_name(handle: DeviceHandle) -> str:
    """Return the product name."""
    return _text(call("nvmlDeviceGetName", handle))


def device_pci_bus_id(handle: DeviceHandle) -> str:
    """Return the PCI address with a domain of 8 digits."""
    return _text(call("nvmlDeviceGetPciInfo_v3", handle).busId)


def device_minor(handle: DeviceHandle) -> int:
    """Return N of /dev/nvidiaN."""
    return int(call("nvmlDeviceGetMinorNumber", handle))


def utilization(handle: DeviceHandle) -> tuple[int, int]:
    """Return the utilisation of GPU and memory in percent."""
    rates = call("nvmlDeviceGetUtilizationRates", handle)
    return int(rates.gpu), int(rates.memory)


def memory(handle: DeviceHandle) -> MemoryReading:
    """Return the memory by version 2 of the call."""
    info = call("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
    return MemoryReading(int(info.total), int(info.used))


def memory_v1(handle: DeviceHandle) -> MemoryReading:
    """Return the memory by version 1, for drivers before R510; `used` is without the reserved part there too."""
    info = call("nvmlDeviceGetMemoryInfo", handle)
    return MemoryReading(int(info.total), int(info.used))


def power_milliwatts(handle: DeviceHandle) -> int:
    """Return the power draw."""
    return int(call("nvmlDeviceGetPowerUsage", handle))


def power_limit_milliwatts(handle: DeviceHandle) -> int:
    """Return the limit that is enforced now."""
    return int(call("nvmlDeviceGetEnforcedPowerLimit", handle))


def energy_millijoules(handle: DeviceHandle) -> int:
    """Return the energy since the driver was loaded."""
    return int(call("nvmlDeviceGetTotalEnergyConsumption", handle))


def clock_megahertz(handle: DeviceHandle, clock: int) -> int:
    """Return a clock, CLOCK_SM or CLOCK_MEMORY."""
    return int(call("nvmlDeviceGetClockInfo", handle, clock))


def max_clock_megahertz(handle: DeviceHandle, clock: int) -> int:
    """Return the maximum of a clock, CLOCK_SM or CLOCK_MEMORY."""
    return int(call("nvmlDeviceGetMaxClockInfo", handle, clock))


def temperature_celsius(handle: DeviceHandle) -> int:
    """Return the GPU's temperature by the call of NVML 13."""
    return int(call("nvmlDeviceGetTemperatureV", handle, 0))


def temperature_celsius_old(handle: DeviceHandle) -> int:
    """Return the GPU's temperature by the call that NVML 14 removes."""
    return int(call("nvmlDeviceGetTemperature", handle, 0))


def event_reasons(handle: DeviceHandle) -> int:
    """Return the bits of the clock event reasons that are active now."""
    return int(call("nvmlDeviceGetCurrentClocksEventReasons", handle))


def event_reasons_old(handle: DeviceHandle) -> int:
    """Return the same bits by the name of the call before R535."""
    return int(call("nvmlDeviceGetCurrentClocksThrottleReasons", handle))


def processes(handle: DeviceHandle) -> list[ProcessReading]:
    """Return the compute processes by version 3 of the call."""
    return _processes(call("nvmlDeviceGetComputeRunningProcesses_v3", handle))


def processes_v2(handle: DeviceHandle) -> list[ProcessReading]:
    """Return the compute processes by version 2, which has the same struct."""
    return _processes(call("nvmlDeviceGetComputeRunningProcesses_v2", handle))


def _processes(infos: Sequence[Any]) -> list[ProcessReading]:
    return [ProcessReading(int(i.pid), None if i.usedGpuMemory is None else int(i.usedGpuMemory)) for i in infos]


class ProcessSamples:
    """Reads what each process used of a GPU, into the same memory each time and by one driver call. For one thread."""

    _FIRST = 64
    _MOST = 4096

    def __init__(self) -> None:
        self._samples = (pynvml.c_nvmlProcessUtilizationSample_t * self._FIRST)()

    def read(self, handle: DeviceHandle, since_us: int) -> list[ProcessUse]:
        """Return the driver's samples after a moment of the wall clock; none where no process used anything."""
        function = call("_nvmlGetFunctionPointer", "nvmlDeviceGetProcessUtilization")
        for _ in range(2):
            count = ctypes.c_uint(len(self._samples))
            code = int(function(handle, self._samples, ctypes.byref(count), ctypes.c_ulonglong(since_us)))
            if code == NOT_FOUND:
                return []
            if code != INSUFFICIENT_SIZE:
                break
            # With room for those that come until the next call.
            self._samples = (pynvml.c_nvmlProcessUtilizationSample_t * min(2 * count.value, self._MOST))()
        if code != 0:
            raise NvmlError(code)
        return [
            ProcessUse(int(sample.pid), int(sample.timeStamp), int(sample.smUtil), int(sample.memUtil))
            for sample in self._samples[: min(count.value, len(self._samples))]
        ]


def field_values(handle: DeviceHandle, fields: Sequence[FieldId]) -> list[FieldReading]:
    """Return fields, each an (id, scope), by one driver call, which costs as much as its slowest member."""
    return [field_reading(entry) for entry in call("nvmlDeviceGetFieldValues", handle, fields)]


def field_reading(entry: Any) -> FieldReading:  # noqa: ANN401 - nvidia-ml-py is untyped
    """Return one entry of the answer, typed."""
    code = int(entry.nvmlReturn)
    member, bits = _UNION_MEMBERS.get(int(entry.valueType), (None, 0))
    if code == 0 and member is None:
        code = UNKNOWN
    return FieldReading(code, getattr(entry.value, member) if code == 0 and member else None, bits)


def ecc_errors(handle: DeviceHandle, *, uncorrected: bool, aggregate: bool) -> int:
    """Return errors of all memories: since the driver was loaded, or over the life of the board."""
    return int(call("nvmlDeviceGetTotalEccErrors", handle, int(uncorrected), int(aggregate)))


def remapped_rows(handle: DeviceHandle) -> tuple[int, int, bool, bool]:
    """Return rows remapped for correctable and for uncorrectable errors, whether one is pending, whether one failed."""
    correctable, uncorrectable, is_pending, is_failed = call("nvmlDeviceGetRemappedRows", handle)
    return int(correctable), int(uncorrectable), bool(is_pending), bool(is_failed)


def pcie_generation(handle: DeviceHandle) -> int:
    """Return the generation that the link runs at now."""
    return int(call("nvmlDeviceGetCurrPcieLinkGeneration", handle))


def pcie_generation_max(handle: DeviceHandle) -> int:
    """Return the highest generation of board and slot."""
    return int(call("nvmlDeviceGetMaxPcieLinkGeneration", handle))


def pcie_width(handle: DeviceHandle) -> int:
    """Return the lanes that are used now."""
    return int(call("nvmlDeviceGetCurrPcieLinkWidth", handle))


def pcie_width_max(handle: DeviceHandle) -> int:
    """Return the most lanes of board and slot."""
    return int(call("nvmlDeviceGetMaxPcieLinkWidth", handle))


def nvlink_errors(handle: DeviceHandle, link: int, counter: int) -> int:
    """Return errors of one link: counter 0 replay, 1 recovery, 2 CRC of flits, 3 CRC of data."""
    try:
        return int(call("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter))
    except NvmlError as error:
        # How a link that is not connected answers.
        raise NvmlError(NOT_SUPPORTED if error.code == INVALID_ARGUMENT else error.code) from None


def fabric_state(handle: DeviceHandle) -> int:
    """Return how far the GPU has joined its NVLink fabric: 0 has none, 1 not started, 2 in progress, 3 completed."""
    return _fabric_state(handle, "c_nvmlGpuFabricInfo_v3_t")


def fabric_state_v2(handle: DeviceHandle) -> int:
    """Return the same by the struct of drivers that do not know the third version."""
    return _fabric_state(handle, "c_nvmlGpuFabricInfo_v2_t")


def _fabric_state(handle: DeviceHandle, struct: str) -> int:
    info_type = getattr(pynvml, struct, None)
    if info_type is None:
        raise NvmlError(FUNCTION_NOT_FOUND)
    info = info_type()
    call("nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
    return int(info.state)
