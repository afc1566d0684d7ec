"""Generic CSV: one row per GPU and moment, times in seconds from the start, units in the column names.

Columns: t_s and at least one value; gpu is the index. Any subset and order; empty where there is no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agent.importers.assembly import ImportedTrace
from agent.importers.logtext import LogText
from agent.importers.table import LIMITS, SAMPLE, SLOW, WHICH, Column, Table, by_name, is_header, split
from agent.importers.values import parse_time, quantity, whole_number

NAME: Final = "generic csv"
_PERCENT: Final = quantity("ratio", "%")
_RATIO: Final = quantity("ratio", "ratio")
_MIB: Final = quantity("bytes", "MiB")
_MHZ: Final = quantity("hertz", "MHz")
_KBS: Final = quantity("bytes_per_second", "kB/s")
_COLUMNS: Final = {
    "t_s": Column(WHICH, "time_s", parse_time),
    "gpu": Column(WHICH, "index", whole_number),
    "util_gpu_pct": Column(SAMPLE, "utilization_ratio", _PERCENT),
    "util_mem_pct": Column(SAMPLE, "memory_utilization_ratio", _PERCENT),
    "mem_used_mib": Column(SAMPLE, "memory_used_bytes", _MIB),
    "mem_total_mib": Column(SAMPLE, "memory_total_bytes", _MIB),
    "power_w": Column(SAMPLE, "power_watts", quantity("watts", "W")),
    "power_limit_w": Column(LIMITS, "power_limit_watts", quantity("watts", "W")),
    "sm_clock_mhz": Column(SAMPLE, "sm_clock_hertz", _MHZ),
    "mem_clock_mhz": Column(SAMPLE, "memory_clock_hertz", _MHZ),
    "temp_c": Column(SLOW, "temperature_celsius", quantity("celsius", "C")),
    "pcie_tx_kbs": Column(SAMPLE, "pcie_transmit_bytes_per_second", _KBS),
    "pcie_rx_kbs": Column(SAMPLE, "pcie_receive_bytes_per_second", _KBS),
    "nvlink_tx_kbs": Column(SAMPLE, "nvlink_transmit_bytes_per_second", _KBS),
    "nvlink_rx_kbs": Column(SAMPLE, "nvlink_receive_bytes_per_second", _KBS),
    "sm_active": Column(SAMPLE, "sm_active_ratio", _RATIO),
    "tensor_active": Column(SAMPLE, "tensor_active_ratio", _RATIO),
    "dram_active": Column(SAMPLE, "dram_active_ratio", _RATIO),
}
_LOOKUP: Final = by_name(_COLUMNS)


def matches(head: Sequence[str]) -> bool:
    """Return whether the head of a log has a line with t_s and a value column."""
    return any(
        "t_s" in (cell.strip().lower() for cell in cells) and is_header(cells, _LOOKUP) for cells in map(split, head)
    )


def lacks_time(head: Sequence[str]) -> bool:
    """Return whether the head of a log has value columns of this form, but no t_s."""
    return not matches(head) and any(is_header(cells, _LOOKUP) for cells in map(split, head))


def read(text: LogText) -> ImportedTrace:
    """Return the trace of a log in this form."""
    return ImportedTrace(text, NAME, Table(text, _LOOKUP).readings())
