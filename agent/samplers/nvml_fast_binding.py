"""The calls of the fast channel, typed: each into the same memory again and again, half the cost of pynvml's own."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import pynvml

from agent.samplers.nvml_binding import (
    FUNCTION_NOT_FOUND,
    DeviceHandle,
    FieldId,
    FieldReading,
    NvmlError,
    call,
    field_reading,
)

_ONE: Final = ctypes.c_int32(1)


class FastCalls:
    """What is read ten times a second, of one GPU after the other. For one thread."""

    def __init__(self, power: FieldId) -> None:
        """Prepare the memory; `power` is the field of instant power."""
        self._field = (pynvml.c_nvmlFieldValue_t * 1)()
        self._field[0].fieldId, self._field[0].scopeId = power
        self._rates = pynvml.c_nvmlUtilization_t()
        self._bits = ctypes.c_ulonglong()
        self._functions: dict[str, Any] = {}

    def power(self, handle: DeviceHandle) -> FieldReading:
        """Return the field of instant power."""
        read = self._functions.get("power") or self._find(
            "power", call("_nvmlGetFunctionPointer", "nvmlDeviceGetFieldValues")
        )
        _check(read(handle, _ONE, self._field))
        return field_reading(self._field[0])

    def utilization(self, handle: DeviceHandle) -> int:
        """Return the utilisation of the GPU in percent."""
        read = self._functions.get("utilization") or self._find(
            "utilization", call("_nvmlGetFunctionPointer", "nvmlDeviceGetUtilizationRates")
        )
        _check(read(handle, ctypes.byref(self._rates)))
        return int(self._rates.gpu)

    def event_reasons(self, handle: DeviceHandle) -> int:
        """Return the bits of the clock event reasons, by whichever name of the call this driver has."""
        read = self._functions.get("reasons") or self._find("reasons", _reasons_function())
        _check(read(handle, ctypes.byref(self._bits)))
        return int(self._bits.value)

    def _find(self, name: str, function: Any) -> Any:  # noqa: ANN401 - nvidia-ml-py is untyped
        self._functions[name] = function
        return function


def _reasons_function() -> Any:  # noqa: ANN401 - nvidia-ml-py is untyped
    try:
        return call("_nvmlGetFunctionPointer", "nvmlDeviceGetCurrentClocksEventReasons")
    except NvmlError as error:
        if error.code != FUNCTION_NOT_FOUND:
            raise
        return call("_nvmlGetFunctionPointer", "nvmlDeviceGetCurrentClocksThrottleReasons")


def _check(code: int) -> None:
    if code != 0:
        raise NvmlError(int(code))
