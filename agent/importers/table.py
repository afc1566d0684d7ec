"""CSV tables as readings: the columns of a header, compiled once, then one reading a row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from agent.importers.logtext import Line, LogText
from agent.importers.reading import Reading
from agent.importers.values import Parser, failure, is_absent, is_complete
from agent.vocabulary import CLOCK_EVENT_REASONS

#: The parts of a row, in the order of `_Parts`: which GPU and when, then fields by record.
WHICH, SAMPLE, SLOW, LIMITS, INFO, REASONS, REASON_SECONDS = range(7)
#: Parts that are measurements: a table without any of them is no GPU log.
_MEASURED: Final = frozenset({SAMPLE, SLOW, REASONS, REASON_SECONDS})
_IDENTITIES: Final = frozenset({"index", "uuid", "bus"})
_Fields = dict[str, Any]
_Parts = tuple[_Fields, _Fields, _Fields, _Fields, _Fields, _Fields, _Fields]


class Column(NamedTuple):
    """What a column of a foreign table is here.

    `rank` decides where several columns give one field: the lowest that has a value in a row wins.
    """

    part: int
    field: str
    parse: Parser
    rank: int = 0


#: Returns what a header cell means, None where it is unknown.
Lookup = Callable[[str], Column | None]


class _Cell(NamedTuple):
    position: int
    name: str
    part: int
    field: str
    parse: Parser
    rank: int


@dataclass(frozen=True, slots=True)
class _Header:
    text: str
    width: int
    cells: tuple[_Cell, ...]
    says_which: bool


class Table:
    """Reads the rows of one CSV file; the header may come again, also with other columns.

    A row with too few or too many cells is left out; so is a last line without an end unless it has all its cells,
    and then its last number, which may be cut, is left out alone.
    """

    def __init__(self, text: LogText, lookup: Lookup, lost_bus: Callable[[str], str | None] | None = None) -> None:
        """Take a log and what its header cells mean; `lost_bus` finds a PCI address in a line that reports a loss."""
        self._text = text
        self._lookup = lookup
        self._lost_bus = lost_bus
        self._where = f"{text.path}: "
        self._warned: set[str] = set()
        self._damaged = 0
        self._buses: set[str] = set()

    def readings(self) -> Iterator[Reading]:
        """Return the readings of all rows."""
        header: _Header | None = None
        for line in self._text.lines():
            if header is None:
                header = self._header(line.text)
                continue
            if line.text == header.text:
                continue
            cells = split(line.text)
            if len(cells) != header.width and (len(cells) < header.width or any(map(str.strip, cells[header.width :]))):
                found = self._header(line.text)
                header = found or header
                reading = None if found else self._other_line(line)
            else:
                self._without_cut_value(line, cells)
                parts, unread = _parse(header, cells)
                found = self._header(line.text) if unread else None
                header = found or header
                reading = None if found else self._reading(header, line, cells, parts, unread)
            if reading is not None:
                yield reading
        if self._damaged > 1:
            self._text.warn(f"{self._where}left out {self._damaged} damaged lines in all")

    def _header(self, text: str) -> _Header | None:
        """Return the header that this line is or, where a restart glued it to a torn row, ends with."""
        cells = split(text)
        if not is_header(cells, self._lookup):
            return None
        columns = [self._lookup(cell) for cell in cells]
        first = next(position for position, column in enumerate(columns) if column is not None)
        if first > 0 and cells[0].strip()[:1].isdigit():
            glued = cells[first - 1]
            ends = (glued[start:] for start in range(len(glued)))
            cells = [next((end for end in ends if self._lookup(end) is not None), glued), *cells[first:]]
            columns = [self._lookup(cell) for cell in cells]
        known = [
            # Most cells repeat: names, limits, masks, an idle GPU.
            _Cell(position, cells[position].strip(), column.part, column.field, _remembering(column), column.rank)
            for position, column in enumerate(columns)
            if column is not None
        ]
        says_which = any(cell.part == WHICH and cell.field != "time_s" for cell in known)
        # The best column of a field comes last and overwrites the others.
        return _Header(text, len(cells), tuple(sorted(known, key=lambda cell: -cell.rank)), says_which)

    def _other_line(self, line: Line) -> Reading | None:
        """Take a line that is neither header nor row: a message that a GPU is lost, or damage."""
        bus = self._lost_bus(line.text) if self._lost_bus else None
        if bus is not None:
            if bus not in self._buses:
                self._warn_once(
                    bus, f"line {line.number} says that GPU {bus} is lost, but no row holds that pci.bus_id"
                )
                return None
            return Reading(None, None, None, bus, "lost", {}, {}, {}, {})
        if not line.whole:
            self._text.warn(f"{self._where}left out torn last line {line.number}")
            return None
        self._damaged += 1
        self._warn_once("damaged", f"left out damaged line {line.number}, which has not as many cells as the header")
        return None

    def _without_cut_value(self, line: Line, cells: list[str]) -> None:
        """Empty the last cell of a last line without an end, unless a unit or a bracket shows that it is complete."""
        if not line.whole and cells[-1].strip() and not is_complete(cells[-1]):
            self._text.warn(
                f"{self._where}last line {line.number} has no end; left out its last value, which may be cut"
            )
            cells[-1] = ""

    def _reading(
        self, header: _Header, line: Line, cells: list[str], parts: _Parts, unread: list[_Cell]
    ) -> Reading | None:
        for cell in unread:
            content = cells[cell.position].strip()[:40]
            self._warn_once(cell.name, f"no value of {cell.name} in line {line.number}: {content!r}")
        which, sample, slow, limits, info, reasons, reason_seconds = parts
        if header.says_which and not which.keys() & _IDENTITIES:
            self._warn_once("which", f"left out line {line.number}: it does not say which GPU it is about")
            return None
        if reasons and "clock_event_reasons" not in sample:
            sample["clock_event_reasons"] = tuple(word for word in CLOCK_EVENT_REASONS if reasons.get(word))
        if reason_seconds:
            slow["clock_event_seconds_total"] = reason_seconds
        if "bus" in which:
            self._buses.add(which["bus"])
            info["pci_bus_id"] = which["bus"]
        measured = sample or slow or limits
        return Reading(
            which.get("time_s"),
            which.get("index"),
            which.get("uuid"),
            which.get("bus"),
            "ok" if measured else _failed(header, cells),
            sample,
            slow,
            limits,
            info,
        )

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self._text.warn(self._where + message)


def _remembering(column: Column) -> Parser:
    return column.parse if column.field == "time_s" else lru_cache(maxsize=1024)(column.parse)


def _parse(header: _Header, cells: list[str]) -> tuple[_Parts, list[_Cell]]:
    """Return the values of a row by part, and the cells that hold something else than a value or the lack of one."""
    parts: _Parts = ({}, {}, {}, {}, {}, {}, {})
    unread: list[_Cell] = []
    for cell in header.cells:
        position, _, part, field, parse, _ = cell
        content = cells[position]
        value = parse(content)
        if value is not None:
            parts[part][field] = value
        elif not is_absent(content) and failure(content) is None:
            unread.append(cell)
    return parts, unread


def _failed(header: _Header, cells: list[str]) -> str | None:
    """Return the state of a GPU none of whose cells holds a value, None where they say only that there is none."""
    states = {failure(cells[cell.position]) for cell in header.cells if cell.part != WHICH}
    return "reset_required" if "reset_required" in states else "lost" if "lost" in states else None


def split(text: str) -> list[str]:
    """Return the cells of one line; quotes only where there are any."""
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], skipinitialspace=True), [""])
    except csv.Error:
        return text.split(",")


def is_header(cells: list[str], lookup: Lookup) -> bool:
    """Return whether these cells name at least one measurement."""
    return any(column is not None and column.part in _MEASURED for column in map(lookup, cells))


def by_name(columns: Mapping[str, Column]) -> Lookup:
    """Return a lookup by the name alone, in any case."""
    return lambda cell: columns.get(cell.strip().lower())
