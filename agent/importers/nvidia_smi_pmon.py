"""`nvidia-smi pmon`: one row per process, GPU and second; command names are never kept.

The utilisation of a GPU is the sum over its processes, at most 1: they share it in time. It is None where no process
shows a number: the tool writes `-` for one that it has no sample of, and a GPU without processes has no row of its own
but one of dashes. Processes with compute (type C or a mix) are listed, graphics alone is not. `fb` is the memory of the
process in MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from agent.importers.assembly import ImportedTrace
from agent.importers.columns_text import Row, TextRows, first_names
from agent.importers.logtext import LogText
from agent.importers.reading import Reading
from agent.importers.values import quantity
from agent.records import GpuProcess

NAME: Final = "nvidia-smi pmon"
_PERCENT: Final = quantity("ratio", "%")
_MIB: Final = quantity("bytes", "MiB")
_PID_MAX: Final = 2**31


def matches(head: Sequence[str]) -> bool:
    """Return whether the head of a log has the header of pmon."""
    names = first_names(head)
    return names is not None and "pid" in names


def read(text: LogText) -> ImportedTrace:
    """Return the trace of a log in this form."""
    return ImportedTrace(text, NAME, _readings(text))


def _readings(text: LogText) -> Iterator[Reading]:
    """Return one reading per GPU and moment; rows of a moment follow each other, by GPU."""
    rows: list[Row] = []
    for row in TextRows(text):
        if rows and not _same_moment(rows, row):
            yield _reading(rows)
            rows = []
        rows.append(row)
    if rows:
        yield _reading(rows)


def _same_moment(rows: Sequence[Row], row: Row) -> bool:
    """Return whether `row` is about the GPU and the moment of `rows`: a process that comes again starts the next."""
    first, pid = rows[0], row.cells.get("pid", "-")
    if first.gpu != row.gpu or first.time_s != row.time_s:
        return False
    return "-" not in (pid, first.cells.get("pid", "-")) and all(before.cells.get("pid") != pid for before in rows)


def _reading(rows: Sequence[Row]) -> Reading:
    sample: dict[str, Any] = {}
    for name, field in (("sm", "utilization_ratio"), ("mem", "memory_utilization_ratio")):
        shares = [share for share in (_PERCENT(row.cells.get(name, "-")) for row in rows) if share is not None]
        if shares:
            sample[field] = min(1.0, round(sum(shares), 6))
    processes = tuple(process for process in map(_process, rows) if process is not None)
    return Reading(rows[0].time_s, rows[0].gpu, None, None, "ok", sample, {"processes": processes}, {}, {})


def _process(row: Row) -> GpuProcess | None:
    pid = row.cells.get("pid", "-")
    kind = row.cells.get("type", "-")
    if not (pid.isascii() and pid.isdigit()) or int(pid) > _PID_MAX or not ("C" in kind or kind == "-"):
        return None
    return GpuProcess(int(pid), _MIB(row.cells.get("fb", "-")))
