"""The text tables of `nvidia-smi dmon` and `pmon`: a `#` line of names, a `#` line of units, rows split by space.

The header comes again every so many lines. With `-o DT` a date and a time stand first; with `-o T` a time alone, which
starts again at midnight. Commas between the cells (`--format csv`) read the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from agent.importers.logtext import Line, LogText
from agent.importers.values import whole_number

_DAY_S: Final = 86_400


class Row(NamedTuple):
    """One row: its GPU, the cells by column name in lower case, and its time where the log holds one."""

    gpu: int
    time_s: float | None
    cells: dict[str, str]


def header_names(line: str) -> list[str] | None:
    """Return the column names of a `#` line that has a gpu column, None for any other line."""
    if not line.startswith("#"):
        return None
    names = line[1:].replace(",", " ").lower().split()
    return names if "gpu" in names else None


def first_names(head: Sequence[str]) -> list[str] | None:
    """Return the column names of the first header in the head of a log, None where there is none."""
    return next((names for names in map(header_names, head) if names is not None), None)


class TextRows:
    """Reads the rows of one log; what is damaged is left out with a warning."""

    def __init__(self, text: LogText) -> None:
        """Take the log; nothing is read yet."""
        self._text = text
        self._names: list[str] = []
        self._damaged = 0
        self._days_s = 0.0
        self._clock_s: float | None = None

    def __iter__(self) -> Iterator[Row]:
        for line in self._text.lines():
            if line.text.startswith("#"):
                self._names = header_names(line.text) or self._names
                continue
            if not self._names:
                continue
            row = self._row(line)
            if row is None:
                self._leave_out(line)
            else:
                yield row
        if self._damaged > 1:
            self._text.warn(f"{self._text.path}: left out {self._damaged} damaged lines in all")

    def _row(self, line: Line) -> Row | None:
        names = self._names
        # The command of a process comes last and may hold spaces.
        spaced = line.text.replace(",", " ") if "," in line.text and names[-1] != "command" else line.text
        parts = spaced.split(maxsplit=len(names) - 1) if names[-1] == "command" else spaced.split()
        if len(parts) != len(names):
            return None
        cells = dict(zip(names, parts, strict=True))
        gpu = whole_number(cells["gpu"])
        if not line.whole and names[-1] != "command":
            self._text.warn(f"{self._text.path}: last line {line.number} has no end; left out its last value")
            cells[names[-1]] = "-"
        try:
            time_s = self._time(cells)
        except ValueError:
            return None
        return None if gpu is None else Row(gpu, time_s, cells)

    def _leave_out(self, line: Line) -> None:
        if not line.whole:
            self._text.warn(f"{self._text.path}: left out torn last line {line.number}")
            return
        self._damaged += 1
        if self._damaged == 1:
            self._text.warn(f"{self._text.path}: left out damaged line {line.number}, which does not fit the header")

    def _time(self, cells: dict[str, str]) -> float | None:
        """Return the time of a row; raises ValueError where it is none."""
        day, clock = cells.get("date"), cells.get("time")
        if day is None and clock is None:
            return None
        hour, minute, second = (int(part) for part in (clock or "0:0:0").split(":"))
        clock_s = float(hour * 3600 + minute * 60 + second)
        if day is not None:
            digits = day.replace("/", "").replace("-", "")
            start = datetime(int(digits[:4]), int(digits[4:6]), int(digits[6:8]), tzinfo=UTC)
            return start.timestamp() + clock_s
        if self._clock_s is not None and clock_s < self._clock_s - _DAY_S / 2:
            self._days_s += _DAY_S
        self._clock_s = clock_s
        return self._days_s + clock_s
