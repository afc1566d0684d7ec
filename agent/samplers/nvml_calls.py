"""Guarded driver calls on one handle: what it does not offer is not asked for again, all else is counted by reason."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from agent.clock import stopwatch
from agent.samplers import nvml_binding as nvml

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Codes by which a driver says that it does not have a value; no errors, and not asked for again.
NOT_OFFERED: Final = frozenset({nvml.NOT_SUPPORTED, nvml.FUNCTION_NOT_FOUND, nvml.VERSION_MISMATCH})
#: Counters at or above this are sentinels: -1, "not available" and the blank values of other tools lie here.
MAX_COUNTER: Final = 1 << 62


class TickOverError(Exception):
    """No further call on this GPU makes sense in this tick."""


class Calls:
    """The calls on one handle, with what they brought in this tick. Used by one thread at a time.

    `errors` counts failed readings by reason and `driver_seconds` the time inside calls until they are taken;
    `codes` and `answered` say how this tick went.
    """

    def __init__(self, handle: nvml.DeviceHandle, name: str) -> None:
        self.handle = handle
        self.name = name  # for the log: the UUID
        self.errors: Counter[str] = Counter()
        self.codes: set[int] = set()
        self.answered = 0
        self.driver_seconds = 0.0
        self._not_offered: set[str] = set()
        self._unknown_fields: set[nvml.FieldId] = set()

    def begin_tick(self) -> None:
        """Forget how the tick before went."""
        self.codes.clear()
        self.answered = 0

    def offers(self, label: str) -> bool:
        """Return False once the driver has said that it does not have what `read` calls by this name."""
        return label not in self._not_offered

    def forgo(self, label: str) -> None:
        """Ask no more for this."""
        self._not_offered.add(label)

    def offer_again(self, *names: str) -> None:
        """Ask again for these, for the GPU has changed its mode."""
        for name in names:
            self._not_offered = {
                label for label in self._not_offered if label != name and label[: len(name) + 1] != f"{name}/"
            }

    def read(self, name: str, *functions: Callable[[nvml.DeviceHandle], T]) -> T | None:
        """Return what the first function answers; the others are older calls for drivers without it."""
        if name in self._not_offered:
            return None
        for position, function in enumerate(functions):
            label = f"{name}/{position}"
            if label in self._not_offered:
                continue
            begin = stopwatch()
            try:
                value = function(self.handle)
            except nvml.NvmlError as error:
                self.failed(label, error)
                if error.code not in NOT_OFFERED:
                    return None
                if position == len(functions) - 1:
                    self._not_offered.add(name)
            else:
                self.answered += 1
                return value
            finally:
                self.driver_seconds += stopwatch() - begin
        return None

    def fields(self, name: str, wanted: Sequence[nvml.FieldId]) -> dict[nvml.FieldId, nvml.FieldReading]:
        """Return the fields that could be read; one the driver does not know is not asked for again."""
        asked = [entry for entry in wanted if entry not in self._unknown_fields]
        readings = self.read(name, lambda handle: nvml.field_values(handle, asked)) if asked else None
        found = {}
        for entry, reading in zip(asked, readings or (), strict=False):
            if reading.code == 0:
                found[entry] = reading
                continue
            if reading.code in NOT_OFFERED or reading.code in (nvml.INVALID_ARGUMENT, nvml.NO_PERMISSION):
                # A driver answers an id or scope that it does not know with "invalid argument".
                self._unknown_fields.add(entry)
            if reading.code != nvml.INVALID_ARGUMENT:
                self.failed(f"field {entry[0]}", nvml.NvmlError(reading.code))
        return found

    def offers_field(self, entry: nvml.FieldId) -> bool:
        """Return False once the driver has said that it does not have this field in this scope."""
        return entry not in self._unknown_fields

    def failed(self, label: str, error: nvml.NvmlError) -> None:
        """Note a code; raises TickOverError where the GPU or the library is gone."""
        self.codes.add(error.code)
        if error.code in NOT_OFFERED:
            self._not_offered.add(label)
            return
        self.errors[error.reason] += 1
        if error.code == nvml.NO_PERMISSION:
            name = label.partition("/")[0]
            self._not_offered.add(name)
            _log.warning("%s: the driver does not permit to read %s; it is left out", self.name, name)
        elif error.code in (nvml.GPU_IS_LOST, nvml.UNINITIALIZED):
            raise TickOverError

    def reject(self, reason: str = "implausible") -> None:
        """Count a value that is not believed."""
        self.errors[reason] += 1

    def scaled(self, value: float | None, factor: float, low: float, high: float) -> float | None:
        """Return the value in base units, None where it is not in [low, high) in the driver's units."""
        if value is None:
            return None
        if not low <= value < high or math.isnan(value):
            self.reject()
            return None
        # A quotient by a whole number is exact where a product with its inverse is not.
        return value / round(1 / factor) if factor < 1 else value * factor

    def percent(self, value: float | None) -> float | None:
        """Return a ratio; rounding may bring a little more than 1."""
        ratio = self.scaled(value, 1e-2, 0, 101)
        return None if ratio is None else min(ratio, 1.0)

    def count(self, value: float | None, unit: int = 1) -> int | None:
        """Return a counter in base units, None for a sentinel."""
        if value is None:
            return None
        if not 0 <= value < MAX_COUNTER:
            self.reject()
            return None
        return int(value) * unit


def value_of(reading: nvml.FieldReading | None) -> float | None:
    """Return the number of a field, None where it was not read."""
    return None if reading is None else reading.value
