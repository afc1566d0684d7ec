"""The guards of all counters of one attached GPU, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agent.samplers.nvml_calls import Calls
from agent.samplers.nvml_plausible import CounterGuard

#: Steps per second that no hardware makes, by counter, in base units. Each is some ten times what the fastest board of
#: today can do and leaves room for an emulator that plays a trace many times faster.
MOST_PER_S: Final[Mapping[str, float]] = {
    "energy_joules_total": 1e5,
    "nvlink_receive_bytes_total": 1e14,
    "nvlink_transmit_bytes_total": 1e14,
    "pcie_receive_bytes_total": 1e13,
    "pcie_transmit_bytes_total": 1e13,
    "clock_event_seconds_total": 100.0,
}
#: Counters of errors: a storm of them is possible, a leap of billions is a sentinel.
_MOST_ERRORS_PER_S: Final = 1e8


class Guards:
    """Made anew with each attachment of a GPU, so that a counter may start anew after a driver reload."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._counters: dict[str, CounterGuard] = {}

    def number(self, name: str, value: float | None, now_s: float, *, bits: int = 64, part: str = "") -> float | None:
        """Return a counter's value where it can be believed; `part` tells counters of one name apart."""
        if value is None:
            return None
        guard = self._counters.get(name + part)
        if guard is None:
            most = MOST_PER_S.get(name, _MOST_ERRORS_PER_S)
            guard = self._counters[name + part] = CounterGuard(most_per_s=most, bits=bits)
        believed, reason = guard.check(value, now_s)
        if reason is not None:
            self._calls.reject(reason)
        return believed

    def whole(self, name: str, value: int | None, now_s: float, *, bits: int = 64) -> int | None:
        """Return the same for a counter of whole numbers."""
        believed = self.number(name, value, now_s, bits=bits)
        return None if believed is None else int(believed)
