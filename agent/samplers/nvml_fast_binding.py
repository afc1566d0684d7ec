"""The calls of the fast channel, typed: each into the same memory again and again, half the cost of pynvml's own."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import pynvml

from agent.samplers.nvml_binding import (
    FUNCTION_NOT_FOUND,
    DeviceHandle,
    FieldId,
    NvmlError,
    call,
    field_reading,
)

_ONE: Final = ctypes.c_int32(1)
#: `valueType` of nearly every field.
_UNSIGNED_INT: Final = 1


class FastCalls:
    """What is read ten times a second, of one GPU after the other. For one thread.

    Every call gives None where its code is not 0. Codes matter for power alone: the core tick counts the others.
    """

    def __init__(self, power: FieldId) -> None:
        """Prepare the memory; `power` is the field of instant power."""
        self._field = (pynvml.c_nvmlFieldValue_t * 1)()
        # One object for the memory that all calls write to: ctypes makes a new one each time it is asked.
        self._entry = self._field[0]
        self._entry.fieldId, self._entry.scopeId = power
        self._value = self._entry.value
        self._rates = pynvml.c_nvmlUtilization_t()
        self._bits = ctypes.c_ulonglong()
        self._rates_at, self._bits_at = ctypes.byref(self._rates), ctypes.byref(self._bits)
        self._functions: dict[str, Any] = {}

    def power(self, handle: DeviceHandle) -> tuple[int, float | None]:
        """Return the code and the value of the field of instant power."""
        read = self._functions.get("power") or self._find(
            "power", call("_nvmlGetFunctionPointer", "nvmlDeviceGetFieldValues")
        )
        code = read(handle, _ONE, self._field)
        if code != 0:
            return int(code), None
        entry = self._entry
        if entry.valueType == _UNSIGNED_INT and entry.nvmlReturn == 0:
            return 0, self._value.uiVal
        reading = field_reading(entry)
        return reading.code, reading.value

    def utilization(self, handle: DeviceHandle) -> int | None:
        """Return the utilisation of the GPU in percent."""
        read = self._functions.get("utilization") or self._find(
            "utilization", call("_nvmlGetFunctionPointer", "nvmlDeviceGetUtilizationRates")
        )
        return self._rates.gpu if read(handle, self._rates_at) == 0 else None

    def event_reasons(self, handle: DeviceHandle) -> int | None:
        """Return the bits of the clock event reasons, by whichever name of the call this driver has."""
        read = self._functions.get("reasons") or self._find("reasons", _reasons_function())
        return self._bits.value if read(handle, self._bits_at) == 0 else None

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
