"""Traces: JSON Lines files, plain or gzip, that hold a header and then one line per tick.

The first line is the header (`TraceHeader`), every other line `{"t": …, "w": …, "r": {"gpu_sample": [{…}], …}}`
with the monotonic and the wall time of the tick and its records by type; a field that is None is left out. Files
are append-only: a torn last line loses that line and nothing else. Values are those of the records, in base units.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TextIO

from agent.errors import FaultError, UsageError
from agent.record_codec import Json, decode_number, decode_records, encode_records
from agent.records import Tick

SCHEMA: Final = 1
PROVENANCES: Final = ("recorded", "simulated", "imported")
#: Longest line that is read, in characters: a node of 16 GPUs with 100 processes each needs a tenth of it.
MAX_LINE: Final = 1 << 20
#: Longest pause that is taken for one: a time further ahead is damage, and replay would judge every second up to it.
MAX_PAUSE_S: Final = 30 * 86_400.0
#: How far lines of one recording may be out of order: more than a sampler run is given.
_DISORDER_S: Final = 10.0
#: A log unpacks to some dozen times its size, zeros to a thousand times: from so many bytes on, so much is a bomb.
BOMB_BYTES: Final = 8 << 20
BOMB_RATIO: Final = 250
_COMPRESSIONS: Final = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_UNWRITABLE: Final = frozenset({".zst", ".zstd", ".xz", ".bz2", ".zip"})
#: What reading a line that is not what it should be can raise.
_DAMAGE: Final = (
    OSError,
    EOFError,
    zlib.error,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    OverflowError,
    RecursionError,
)


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


class _Unpacked(gzip.GzipFile):
    """Unpacks, and raises UsageError where far more comes out than any log holds."""

    def __init__(self, raw: io.BufferedReader, path: Path) -> None:
        super().__init__(fileobj=raw)
        self._packed = raw
        self._log_path = path
        self._taken = 0

    def read1(self, size: int = -1) -> bytes:
        """Return some bytes; this is what the text layer calls."""
        data = super().read1(size)
        self._taken += len(data)
        if self._taken > BOMB_BYTES and self._taken > BOMB_RATIO * self._packed.tell():
            more = f"more than {BOMB_RATIO} times its size"
            raise UsageError(f"{self._log_path} unpacks to {more}, which no log does; it is left alone")
        return data


class LogBytes:
    """The bytes of a trace or foreign log, unpacked where they are gzip, with a measure of how far reading got."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises UsageError where it cannot be read or is compressed in another way."""
        try:
            self._raw = path.open("rb")
            start = self._raw.read(6)
            self._raw.seek(0)
            self._size = self._raw.seek(0, io.SEEK_END)
            self._raw.seek(0)
        except OSError as error:
            reason = error.strerror or "it is a pipe; save the log to a file first"
            raise UsageError(f"cannot read {path}: {reason}") from error
        for magic, name in _COMPRESSIONS.items():
            if start.startswith(magic):
                self._raw.close()
                raise UsageError(f"{path} is compressed with {name}; unpack it first, or pack it with gzip")
        is_gzip = start.startswith(b"\x1f\x8b")
        # No further buffer around gzip: filling one would lose what a truncated file still holds.
        self.stream = _Unpacked(self._raw, path) if is_gzip else self._raw

    def peek(self) -> bytes:
        """Return some kilobytes of what comes next without taking them; empty where nothing can be read."""
        try:
            return self.stream.peek(1)[:4096]
        except (OSError, EOFError, zlib.error):
            return b""

    def fraction_read(self) -> float:
        """Return the part of the file that was read, from 0 to 1, by its bytes on disk; 1 once closed."""
        if self._raw.closed or not self._size:
            return 1.0
        return min(1.0, self._raw.tell() / self._size)

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(ValueError):  # the text layer above may have been detached or closed already
            self.stream.close()
        self._raw.close()


_PHASE_FIELDS: Final = frozenset(f.name for f in dataclasses.fields(Phase))
_HEADER_FIELDS: Final = frozenset(f.name for f in dataclasses.fields(TraceHeader))


class TraceWriter:
    """Appends ticks to a trace file; gzip where the name ends in .gz. Equal input gives equal bytes.

    All methods raise FaultError where the system refuses to write, as on a full disk.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Create the file and write the header; raises UsageError where the file cannot be created."""
        self._path = path
        self._has_failed = False
        if path.suffix in _UNWRITABLE:
            raise UsageError(f"cannot write trace {path}: {path.suffix[1:]} is not offered; end the name in .jsonl.gz")
        try:
            raw = os.fdopen(_open_new(path), "wb")
        except OSError as error:
            raise UsageError(f"cannot write trace {path}: {error.strerror}") from error
        self._raw = raw
        # Level 6 costs a third of the time of the default 9 and 2 % more bytes.
        stream = gzip.GzipFile("", "wb", 6, raw, mtime=0) if path.suffix == ".gz" else raw
        self._gzip = stream if isinstance(stream, gzip.GzipFile) else None
        self._text: TextIO = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
        self._line(_compact(dataclasses.asdict(header)))

    def write(self, tick: Tick) -> None:
        """Append one tick."""
        self._line({"t": tick.monotonic_s, "w": tick.wall_s, "r": encode_records(tick.records)})

    def _line(self, value: object) -> None:
        # One string, then one write: json.dump takes the slow encoder, and a half-written line could be left behind.
        line = json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"
        with self._writing():
            self._text.write(line)

    def flush(self) -> None:
        """Hand everything written so far to the system, so that a crash loses nothing before this moment."""
        with self._writing():
            self._text.flush()
            if self._gzip is not None:
                self._gzip.flush(zlib.Z_SYNC_FLUSH)
            self._raw.flush()

    def close(self) -> None:
        """Finish the file; idempotent, and silent about what an earlier call has already raised."""
        try:
            with contextlib.suppress(FaultError) if self._has_failed else contextlib.nullcontext(), self._writing():
                if not self._text.closed:
                    self._text.close()
        finally:
            with contextlib.suppress(OSError):
                self._raw.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._has_failed = True
            raise FaultError(f"cannot write trace {self._path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class TraceReader:
    """Reads a trace of this program: `header`, then the ticks by iteration, once.

    A torn last line is left out and reported through `warn`; a damaged line elsewhere, an unknown record type or
    field costs that line, record or field, and is reported once. A line that is not later than the one before it
    (a second recording appended to the first) is left out too.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open the file and read the header; raises UsageError where it is no trace."""
        self._path = path
        self._warn = warn
        self._warned: set[str] = set()
        self._bytes = LogBytes(path)
        self._text = io.TextIOWrapper(self._bytes.stream, encoding="utf-8", errors="replace", newline="\n")
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def fraction_read(self) -> float:
        """Return how much of the file was read so far, from 0 to 1, by its bytes on disk."""
        return self._bytes.fraction_read()

    def close(self) -> None:
        """Close the file; idempotent, and done by reading to the end."""
        self._bytes.close()

    def _read_header(self) -> TraceHeader:
        try:
            header = _decode_header(json.loads(self._text.readline(MAX_LINE), parse_constant=_no_constant))
        except _DAMAGE as error:
            raise UsageError(f"{self._path} is not a warpwatch trace: its first line is no trace header") from error
        if header.schema > SCHEMA:
            raise UsageError(f"{self._path} has trace schema {header.schema}; this version reads up to {SCHEMA}")
        return header

    def __iter__(self) -> Iterator[Tick]:
        try:
            yield from self._ticks()
        finally:
            self.close()

    def _ticks(self) -> Iterator[Tick]:
        number = 1
        last_s = -math.inf
        while True:
            number += 1
            try:
                line = self._text.readline(MAX_LINE)
            except (OSError, EOFError, zlib.error):
                self._warn_once(f"{self._path}: the file ends in the middle; read up to line {number - 1}")
                return
            if not line:
                return
            tick = self._parse(line, number, last_s)
            if tick is not None:
                last_s = tick.monotonic_s
                yield tick

    def _parse(self, line: str, number: int, last_s: float) -> Tick | None:
        try:
            value = json.loads(line, parse_constant=_no_constant)
            monotonic_s, wall_s = float(decode_number(value["t"])), float(decode_number(value["w"]))
            if monotonic_s < last_s - _DISORDER_S:
                self._warn_once(f"{self._path}: time goes back in the middle; those lines are left out")
                return None
            if monotonic_s - last_s > MAX_PAUSE_S and math.isfinite(last_s):
                raise ValueError("a month ahead")
            monotonic_s = max(monotonic_s, last_s)
            records = decode_records(value["r"], monotonic_s, wall_s, self._warn_of_record)
            return Tick(monotonic_s=monotonic_s, wall_s=wall_s, records=records)
        except _DAMAGE:
            kind = "damaged" if line.endswith("\n") else "torn last"
            self._warn(f"{self._path}: left out {kind} line {number}")
            return None

    def _warn_of_record(self, message: str) -> None:
        self._warn_once(f"{self._path}: {message}")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)


def _open_new(path: Path) -> int:
    # With --identify a recording names users and jobs.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _decode_header(value: Json) -> TraceHeader:
    """Return the header of a trace's first line; fields that only later versions know are left out."""
    phases = tuple(
        Phase(**{k: v for k, v in phase.items() if k in _PHASE_FIELDS}) for phase in value.get("ground_truth", ())
    )
    known = {k: v for k, v in value.items() if k in _HEADER_FIELDS and k != "ground_truth"}
    header = TraceHeader(**known, ground_truth=phases)
    if (
        not isinstance(header.schema, int)
        or header.provenance not in PROVENANCES
        or decode_number(header.interval_s) <= 0
    ):
        raise ValueError("no header")
    if not isinstance(header.machine, dict) or not isinstance(header.samplers, dict):
        raise TypeError("no header")
    if not isinstance(header.label, str | None) or not isinstance(header.source, str | None):
        raise TypeError("no header")
    return header


def _compact(value: dict[str, Any]) -> dict[str, Any]:
    compact = {k: v for k, v in value.items() if v is not None}
    compact["ground_truth"] = [{k: v for k, v in phase.items() if v is not None} for phase in value["ground_truth"]]
    return compact
