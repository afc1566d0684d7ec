"""`nvidia-smi --query-gpu=... --format=csv[,nounits]`: any fields in any order, units in the header or in the cells.

Without a time in the log a sample a second is assumed. Fields that this program has no use for are left out;
serial numbers are never read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from agent.importers.assembly import ImportedTrace
from agent.importers.logtext import LogText
from agent.importers.table import (
    INFO,
    LIMITS,
    REASON_SECONDS,
    REASONS,
    SAMPLE,
    SLOW,
    WHICH,
    Column,
    Table,
    is_header,
    split,
)
from agent.importers.values import (
    activity,
    clock_event_reasons,
    known_unit,
    parse_time,
    quantity,
    text,
    whole_number,
)

NAME: Final = "nvidia-smi csv"

#: Field: part, field here, dimension, unit without one in the header, rank.
_QUANTITIES: Final[dict[str, tuple[int, str, str, str, int]]] = {
    "utilization.gpu": (SAMPLE, "utilization_ratio", "ratio", "%", 0),
    "utilization.memory": (SAMPLE, "memory_utilization_ratio", "ratio", "%", 0),
    "memory.used": (SAMPLE, "memory_used_bytes", "bytes", "MiB", 0),
    "memory.total": (SAMPLE, "memory_total_bytes", "bytes", "MiB", 0),
    "power.draw": (SAMPLE, "power_watts", "watts", "W", 0),
    "power.draw.average": (SAMPLE, "power_watts", "watts", "W", 1),
    "power.draw.instant": (SAMPLE, "power_watts", "watts", "W", 2),
    "clocks.current.sm": (SAMPLE, "sm_clock_hertz", "hertz", "MHz", 0),
    # The graphics clock is the SM clock on every board with compute; only where the log lacks that.
    "clocks.current.graphics": (SAMPLE, "sm_clock_hertz", "hertz", "MHz", 1),
    "clocks.current.memory": (SAMPLE, "memory_clock_hertz", "hertz", "MHz", 0),
    "temperature.gpu": (SLOW, "temperature_celsius", "celsius", "C", 0),
    "temperature.memory": (SLOW, "memory_temperature_celsius", "celsius", "C", 0),
    "enforced.power.limit": (LIMITS, "power_limit_watts", "watts", "W", 0),
    "power.limit": (LIMITS, "power_limit_watts", "watts", "W", 1),
    "clocks.max.sm": (LIMITS, "sm_clock_max_hertz", "hertz", "MHz", 0),
    "clocks.max.graphics": (LIMITS, "sm_clock_max_hertz", "hertz", "MHz", 1),
    "clocks.max.memory": (LIMITS, "memory_clock_max_hertz", "hertz", "MHz", 0),
}
_ALIASES: Final = {
    "clocks.sm": "clocks.current.sm",
    "clocks.gr": "clocks.current.graphics",
    "clocks.mem": "clocks.current.memory",
    "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory",
    "gpu_uuid": "uuid",
    "gpu_name": "name",
    "gpu_bus_id": "pci.bus_id",
}
_REASON_FIELDS: Final = {
    "gpu_idle": "gpu_idle",
    "sw_power_cap": "sw_power_cap",
    "hw_slowdown": "hw_slowdown",
    "sync_boost": "sync_boost",
    "sw_thermal_slowdown": "sw_thermal",
    "hw_thermal_slowdown": "hw_thermal",
    "hw_power_brake_slowdown": "hw_power_brake",
}


def _bus(cell: str) -> str | None:
    """Return a PCI address in upper case with the 8-digit domain of NVML; messages write it with 4 or 8 digits."""
    address = text(cell)
    domain, colon, rest = (address or "").upper().partition(":")
    return f"{domain.zfill(8)}:{rest}" if colon else None


_PLAIN: Final = {
    "timestamp": Column(WHICH, "time_s", parse_time),
    "index": Column(WHICH, "index", whole_number),
    "uuid": Column(WHICH, "uuid", text),
    "pci.bus_id": Column(WHICH, "bus", _bus),
    "name": Column(INFO, "model_name", text),
    "driver_version": Column(INFO, "driver_version", text),
    "clocks_event_reasons.active": Column(SAMPLE, "clock_event_reasons", clock_event_reasons),
    **{f"clocks_event_reasons.{name}": Column(REASONS, word, activity) for name, word in _REASON_FIELDS.items()},
}
_HEADER_CELL: Final = re.compile(r"([a-z][a-z0-9_.]*)(?:\s*\[([^\]]+)\])?\Z")
_DATA_CELL: Final = re.compile(
    r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d+|GPU-[0-9a-f]{8}-[0-9a-f-]{27}|[\d.]+ (?:%|MiB|W|MHz)"
)
_LOST: Final = re.compile(
    r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\b.*(?:lost|unknown error)", re.IGNORECASE
)


def lookup(cell: str) -> Column | None:
    """Return what a header cell such as `power.draw [W]` means, None where it is unknown."""
    match = _HEADER_CELL.match(cell.strip().lower())
    if match is None:
        return None
    name = match[1].replace("clocks_throttle_reasons", "clocks_event_reasons")
    name = _ALIASES.get(name, name)
    if name in _PLAIN:
        return _PLAIN[name]
    word = _REASON_FIELDS.get(name.removeprefix("clocks_event_reasons_counters."))
    unit = cell.strip()[match.start(2) : match.end(2)] if match[2] else None
    if word is not None and name.startswith("clocks_event_reasons_counters."):
        part, field, dimension, default, rank = REASON_SECONDS, word, "seconds", "us", 0
    elif name in _QUANTITIES:
        part, field, dimension, default, rank = _QUANTITIES[name]
    else:
        return None
    if unit is not None and not known_unit(dimension, unit):
        return None
    return Column(part, field, quantity(dimension, unit or default), rank)


def matches(head: Sequence[str]) -> bool:
    """Return whether the head of a log has a header line with at least one field that is measured."""
    return any(is_header(cells, lookup) for cells in map(split, head))


def looks_headless(head: Sequence[str]) -> bool:
    """Return whether the head of a log looks like rows of nvidia-smi, logged with `noheader`."""
    return any(_DATA_CELL.fullmatch(cell.strip()) for line in head[:20] for cell in split(line))


def read(text: LogText) -> ImportedTrace:
    """Return the trace of a log in this form."""
    return ImportedTrace(text, NAME, Table(text, lookup, _lost_bus).readings())


def _lost_bus(line: str) -> str | None:
    """Return the PCI address in a message such as `Unable to determine the device handle for GPU ...: GPU is lost`."""
    match = _LOST.search(line)
    return _bus(match[1]) if match else None
