"""Traces: JSON Lines files, plain or gzip, that hold a header and then one line per tick.

The first line is the header (`TraceHeader`), every other line `{"t": …, "w": …, "r": {"gpu_sample": [{…}], …}}`
with the monotonic and the wall time of the tick and its records by type; a field that is None is left out. Files
are append-only: a torn last line loses that line and nothing else. Values are those of the records, in base units.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from agent.errors import UsageError
from agent.records import RECORD_TYPES, GpuKey, GpuProcess, Record, Tick

SCHEMA: Final = 1
PROVENANCES: Final = ("recorded", "simulated", "imported")
_TYPE_NAMES: Final = {cls: name for name, cls in RECORD_TYPES.items()}
_FIELDS: Final = {cls: frozenset(f.name for f in dataclasses.fields(cls)) for cls in RECORD_TYPES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of ground truth: what was really going on, from `start_s` to `end_s` of trace time.

    `gpu` is None where it holds for every GPU of the trace; `anomaly` is a word of vocabulary.ANOMALIES or None.
    """

    start_s: float
    end_s: float
    workload: str
    gpu: int | None = None
    anomaly: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """First line of a trace.

    `interval_s` is the usual distance of two samples of a GPU; `label` the workload that holds throughout, where one
    does; `machine` holds descriptive facts without host, user or serial (GPU model, driver, ...).
    """

    provenance: str
    interval_s: float
    schema: int = SCHEMA
    label: str | None = None
    source: str | None = None  # group for splits: recorder and repository, or simulator family
    machine: Mapping[str, str | int | float] = field(default_factory=dict)
    samplers: Mapping[str, str] = field(default_factory=dict)  # version by sampler
    ground_truth: tuple[Phase, ...] = ()


class TraceWriter:
    """Appends ticks to a trace file; gzip where the name ends in .gz. Equal input gives equal bytes."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Create the file and write the header; raises UsageError where the file cannot be created."""
        self._path = path
        try:
            raw = path.open("wb")
        except OSError as error:
            raise UsageError(f"cannot write trace {path}: {error.strerror}") from error
        self._raw = raw
        stream = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
        self._gzip = stream if isinstance(stream, gzip.GzipFile) else None
        self._text: TextIO = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
        self._line(_compact(dataclasses.asdict(header)))

    def write(self, tick: Tick) -> None:
        """Append one tick."""
        self._line({"t": tick.monotonic_s, "w": tick.wall_s, "r": encode_records(tick.records)})

    def _line(self, value: object) -> None:
        json.dump(value, self._text, separators=(",", ":"), allow_nan=False)
        self._text.write("\n")

    def flush(self) -> None:
        """Hand everything written so far to the system, so that a crash loses nothing before this moment."""
        self._text.flush()
        if self._gzip is not None:
            self._gzip.flush(zlib.Z_SYNC_FLUSH)
        self._raw.flush()

    def close(self) -> None:
        """Finish the file; idempotent."""
        if not self._text.closed:
            self._text.close()
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class TraceReader:
    """Reads a trace of this program: `header`, then the ticks by iteration, once.

    A torn last line is left out and reported through `warn`; a damaged line elsewhere, an unknown record type or
    field costs that line, record or field, and is reported once.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open the file and read the header; raises UsageError where it is no trace."""
        self._path = path
        self._warn = warn
        self._warned: set[str] = set()
        try:
            raw = path.open("rb")
        except OSError as error:
            raise UsageError(f"cannot read trace {path}: {error.strerror}") from error
        is_gzip = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        self._text = io.TextIOWrapper(
            gzip.GzipFile(fileobj=raw) if is_gzip else raw, encoding="utf-8", errors="replace", newline="\n"
        )
        self.header = self._read_header()

    def _read_header(self) -> TraceHeader:
        try:
            value = json.loads(self._text.readline())
            phases = tuple(Phase(**phase) for phase in value.pop("ground_truth", ()))
            header = TraceHeader(**value, ground_truth=phases)
        except (OSError, EOFError, zlib.error, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{self._path} is not a warpwatch trace: its first line is no trace header") from error
        if header.schema > SCHEMA:
            raise UsageError(f"{self._path} has trace schema {header.schema}; this version reads up to {SCHEMA}")
        return header

    def __iter__(self) -> Iterator[Tick]:
        with self._text:
            number = 1
            while True:
                number += 1
                try:
                    line = self._text.readline()
                except (OSError, EOFError, zlib.error):
                    self._warn_once(f"{self._path}: the file ends in the middle; read up to line {number - 1}")
                    return
                if not line:
                    return
                tick = self._parse(line, number)
                if tick is not None:
                    yield tick

    def _parse(self, line: str, number: int) -> Tick | None:
        try:
            value = json.loads(line)
            return Tick(
                monotonic_s=float(value["t"]),
                wall_s=float(value["w"]),
                records=decode_records(value["r"], float(value["t"]), float(value["w"]), self._warn_once),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            kind = "damaged" if line.endswith("\n") else "torn last"
            self._warn(f"{self._path}: left out {kind} line {number}")
            return None

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)


def encode_records(records: tuple[Record, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return the records by type name as JSON values; the times are the tick's and are left out."""
    encoded: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        fields: dict[str, Any] = {}
        for name in record.__dataclass_fields__:
            value = getattr(record, name)
            if name in ("monotonic_s", "wall_s") or value is None or value == {}:
                continue
            fields[name] = list(value) if isinstance(value, tuple) else value
        encoded.setdefault(_TYPE_NAMES[type(record)], []).append(fields)
    return encoded


def decode_records(
    encoded: Mapping[str, Any], monotonic_s: float, wall_s: float, warn: Callable[[str], None]
) -> tuple[Record, ...]:
    """Return the records of one line; unknown types and fields are left out and reported."""
    records: list[Record] = []
    for name, values in encoded.items():
        cls = RECORD_TYPES.get(name)
        if cls is None:
            warn(f"unknown record type {name!r} left out")
            continue
        for value in values:
            unknown = value.keys() - _FIELDS[cls]
            if unknown:
                warn(f"unknown field {name}.{min(unknown)} left out")
            fields = {k: v for k, v in value.items() if k not in unknown}
            if "key" in fields:
                fields["key"] = GpuKey(*fields["key"])
            if fields.get("clock_event_reasons") is not None:
                fields["clock_event_reasons"] = tuple(fields["clock_event_reasons"])
            if fields.get("processes") is not None:
                fields["processes"] = tuple(GpuProcess(*process) for process in fields["processes"])
            records.append(cls(**fields, monotonic_s=monotonic_s, wall_s=wall_s))
    return tuple(records)


def _compact(value: dict[str, Any]) -> dict[str, Any]:
    compact = {k: v for k, v in value.items() if v is not None}
    compact["ground_truth"] = [{k: v for k, v in phase.items() if v is not None} for phase in value["ground_truth"]]
    return compact
