"""`nvidia-smi dmon`: one row per GPU and second, any columns (`-s pucvmet`), with or without date and time.

What the tool calls MB of memory is MiB; MB/s of PCIe is taken as 10^6 bytes, the mean over its last 20 ms. `pviol` and
`tviol` are shares of time and say no clock event reason, so they are left out. `-` is no value; the tool writes it for
every column of a GPU that it lost, but also where nothing is supported, so no GPU is called lost by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agent.importers.assembly import ImportedTrace
from agent.importers.columns_text import TextRows, first_names
from agent.importers.logtext import LogText
from agent.importers.reading import Reading
from agent.importers.values import Parser, quantity

NAME: Final = "nvidia-smi dmon"
_PERCENT: Final = quantity("ratio", "%")
_CELSIUS: Final = quantity("celsius", "C")
_MHZ: Final = quantity("hertz", "MHz")
_MBS: Final = quantity("bytes_per_second", "MB/s")
_SAMPLE: Final[Mapping[str, tuple[str, Parser]]] = {
    "pwr": ("power_watts", quantity("watts", "W")),
    "sm": ("utilization_ratio", _PERCENT),
    "mem": ("memory_utilization_ratio", _PERCENT),
    "mclk": ("memory_clock_hertz", _MHZ),
    "pclk": ("sm_clock_hertz", _MHZ),
    "fb": ("memory_used_bytes", quantity("bytes", "MiB")),
    "rxpci": ("pcie_receive_bytes_per_second", _MBS),
    "txpci": ("pcie_transmit_bytes_per_second", _MBS),
}
_SLOW: Final[Mapping[str, tuple[str, Parser]]] = {
    "gtemp": ("temperature_celsius", _CELSIUS),
    "temp": ("temperature_celsius", _CELSIUS),  # before driver 384
    "mtemp": ("memory_temperature_celsius", _CELSIUS),
}


def matches(head: Sequence[str]) -> bool:
    """Return whether the head of a log has the header of dmon with a column that is known here."""
    names = first_names(head)
    return names is not None and "pid" not in names and any(name in _SAMPLE or name in _SLOW for name in names)


def read(text: LogText) -> ImportedTrace:
    """Return the trace of a log in this form."""
    return ImportedTrace(text, NAME, _readings(text))


def _readings(text: LogText) -> Iterator[Reading]:
    for row in TextRows(text):
        sample = _values(row.cells, _SAMPLE)
        slow = _values(row.cells, _SLOW)
        yield Reading(row.time_s, row.gpu, None, None, "ok" if sample or slow else None, sample, slow, {}, {})


def _values(cells: Mapping[str, str], columns: Mapping[str, tuple[str, Parser]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, (field, parse) in columns.items():
        if name in cells:
            value = parse(cells[name])
            if value is not None:
                values[field] = value
    return values
