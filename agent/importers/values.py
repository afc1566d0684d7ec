"""Values of foreign logs: numbers with or without units, the words that stand for no value, and times.

A parser takes the text of one cell and returns the value in base units, or None where the cell holds none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any, Final

Parser = Callable[[str], Any]

#: What a tool writes where it has no value; compared in lower case, without brackets.
_ABSENT: Final = frozenset(
    {"", "-", "n/a", "na", "nan", "none", "null", "not supported", "not available", "insufficient permissions"}
)
#: What nvidia-smi writes in the cells of a GPU that it cannot talk to any more, and the state that this means.
_FAILED: Final = {
    "err!": "lost",
    "error": "lost",
    "unknown error": "lost",
    "gpu is lost": "lost",
    "gpu requires reset": "reset_required",
    "reset required": "reset_required",
}

#: Factor to the base unit by dimension; one below 1 is kept as a negative divisor, so that 57 % is exactly 0.57.
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "ratio": {"%": -100, "ratio": 1},
    "bytes": {
        "B": 1,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "KB": 10**3,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
    },
    "watts": {"W": 1, "mW": -1000, "kW": 1000},
    "hertz": {"Hz": 1, "kHz": 10**3, "MHz": 10**6, "GHz": 10**9},
    "celsius": {"C": 1, "°C": 1},
    "seconds": {"s": 1, "ms": -(10**3), "us": -(10**6), "ns": -(10**9)},
    "bytes_per_second": {
        "B/s": 1,
        "kB/s": 10**3,
        "KB/s": 10**3,
        "KiB/s": 2**10,
        "MB/s": 10**6,
        "MiB/s": 2**20,
        "GB/s": 10**9,
        "GiB/s": 2**30,
    },
}
#: Values outside are no measurement (an overflow, a sentinel of the driver).
_RANGES: Final = {
    "ratio": (0.0, 1.0),
    "bytes": (0.0, 2.0**50),
    "watts": (0.0, 1e5),
    "hertz": (0.0, 1e11),
    "celsius": (-100.0, 300.0),
    "seconds": (0.0, 1e12),
    "bytes_per_second": (0.0, 1e15),
}

#: Bits of NVML's clock event reasons by the words of this program; application clocks and display clock are settings.
_REASON_BITS: Final = {
    "gpu_idle": 0x1,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}


def quantity(dimension: str, unit: str) -> Parser:
    """Return a parser for numbers of `dimension`; a cell without a unit of its own is in `unit`.

    Bytes become int, all others float. A unit of another dimension, text, NaN and impossible values give None.
    """
    units = _UNITS[dimension]
    default = units[unit]
    low, high = _RANGES[dimension]
    whole = dimension == "bytes"

    def parse(cell: str) -> float | None:
        factor: float | None = default
        try:
            if cell[-1:].isdigit():
                value = float(cell)
            else:
                number, _, suffix = cell.strip().partition(" ")
                if suffix:
                    factor = units.get(suffix.strip())
                value = float(number)
        except ValueError:
            return None
        if factor is None:
            return None
        value = value * factor if factor > 0 else value / -factor
        if not low <= value <= high:
            return None
        return round(value) if whole else value

    return parse


def known_unit(dimension: str, unit: str) -> bool:
    """Return whether `unit` is one of `dimension`."""
    return unit in _UNITS[dimension]


def is_complete(cell: str) -> bool:
    """Return whether a cell cannot have lost its end: a number with its unit, or a word in brackets."""
    number, _, unit = cell.strip().partition(" ")
    return cell.rstrip().endswith("]") or (number[:1].isdigit() and any(unit in units for units in _UNITS.values()))


def whole_number(cell: str) -> int | None:
    """Return a count or an index from 0 to a million, also where a table tool wrote it as `3.0`; else None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return int(value) if 0 <= value <= 1_000_000 and value == int(value) else None


def text(cell: str) -> str | None:
    """Return the cell without surrounding space, None where it stands for no value."""
    stripped = cell.strip()
    return None if is_absent(stripped) or failure(stripped) else stripped


def clock_event_reasons(cell: str) -> tuple[str, ...] | None:
    """Return the active reasons of a bit mask, hexadecimal with `0x` or decimal; bits without a word are left out."""
    try:
        mask = int(cell.strip(), 0)
    except ValueError:
        return None
    return tuple(word for word, bit in _REASON_BITS.items() if mask & bit) if mask >= 0 else None


def activity(cell: str) -> bool | None:
    """Return True for `Active`, False for `Not Active`."""
    return {"active": True, "not active": False, "1": True, "0": False}.get(cell.strip().lower())


def is_absent(cell: str) -> bool:
    """Return whether the cell says that there is no value: empty, `-`, `[N/A]`, `[Not Supported]`, ..."""
    return cell.strip().strip("[]").lower() in _ABSENT


def failure(cell: str) -> str | None:
    """Return `lost` or `reset_required` for the words nvidia-smi has for a GPU that does not answer, else None."""
    return _FAILED.get(cell.strip().strip("[]").lower())


_STAMP: Final = re.compile(r"(\d{4})[/-](\d{1,2})[/-](\d{1,2})[ T](\d{1,2}):(\d{2}):(\d{2}(?:\.\d*)?)\Z")


def parse_time(cell: str) -> float | None:
    """Return seconds since 1970 of a timestamp, or the number itself where it is a small one.

    Reads nvidia-smi's `2026/11/30 19:41:24.123`, ISO 8601, and numbers: from 1e8 on since 1970, in seconds,
    milliseconds, microseconds or nanoseconds by their size. A time without a zone is taken as UTC, so a log in local
    time is off by its zone, and an hour is missing or doubled where summer time changes.
    """
    cell = cell.strip()
    match = _STAMP.match(cell)
    try:
        if match:
            year, month, day, hour, minute, second = match.groups()
            return _day_s(int(year), int(month), int(day)) + int(hour) * 3600 + int(minute) * 60 + float(second)
        if cell[4:5] in ("-", "/"):
            stamp = datetime.fromisoformat(cell.replace("/", "-"))
            return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
        number = float(cell)
    except (ValueError, OverflowError):
        return None
    return _seconds(number)


def _seconds(number: float) -> float | None:
    if not math.isfinite(number) or abs(number) > 1e19:
        return None
    for limit, divisor in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if number >= limit:
            return number / divisor
    return number


@lru_cache(maxsize=64)
def _day_s(year: int, month: int, day: int) -> int:
    return (date(year, month, day) - date(1970, 1, 1)).days * 86_400
