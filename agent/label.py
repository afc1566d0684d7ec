"""Marks in a trace what its GPUs were really doing: spans of ground truth in the header, every tick as it was.

Times that people give and read are seconds since the first sample of a GPU, as `replay` prints them; in the header they
are trace time, as the ticks have it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from agent.errors import FaultError, UsageError
from agent.records import GpuSample
from agent.trace import MAX_LINE, LogBytes, Phase, TraceHeader, TraceReader
from agent.vocabulary import CLASSES

_SPAN: Final = re.compile(r"(?P<start>[^:=]*):(?P<end>[^:=]*)=(?P<workload>.+)")
_TIME: Final = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[smh]?)")
_UNITS_S: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_HELP: Final = "write START:END=WORD, such as 0:600=training, 10m:1h=inference or 90:=idle to the end"
#: Ticks between two reports of progress, and bytes that are copied at once.
_PROGRESS_TICKS: Final = 500
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch to mark, in seconds since the first sample; None is the beginning or the end of the trace."""

    text: str
    start_s: float | None
    end_s: float | None
    workload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """What a trace holds and says of itself; `phases` are in seconds since the first sample."""

    header: TraceHeader
    first_s: float  # trace time of the first sample of a GPU
    seconds: float  # from the first sample of a GPU to the last tick
    gpus: tuple[int, ...]
    phases: tuple[Phase, ...]

    def format(self, name: str) -> str:
        """Return the spans as a table for a person."""
        header = self.header
        gpus = f"{len(self.gpus)} GPU{'s' if len(self.gpus) != 1 else ''}"
        lines = [f"{name}: {header.provenance}, {gpus}, {self.seconds:g} s, a sample every {header.interval_s:g} s"]
        if header.label:
            lines.append(f"recorded as {header.label} throughout; spans, where there are any, count instead")
        if not self.phases:
            return "\n".join([*lines, "no span is marked"])
        lines.append(f"{'start s':>10}{'end s':>10}  {'gpu':<5}{'workload':<11}note")
        for phase in self.phases:
            gpu = "all" if phase.gpu is None else str(phase.gpu)
            note = ", ".join(filter(None, (phase.anomaly, phase.note)))
            lines.append(f"{phase.start_s:10.1f}{phase.end_s:10.1f}  {gpu:<5}{phase.workload:<11}{note}".rstrip())
        marked = [self._seconds(gpu) for gpu in self.gpus]
        least, most = min(marked), max(marked)
        lines.append(
            f"marked: {least:g} of {self.seconds:g} s of every GPU"
            if least == most
            else f"marked: {least:g} to {most:g} of {self.seconds:g} s by GPU"
        )
        return "\n".join(lines)

    def _seconds(self, gpu: int) -> float:
        return round(sum(one.end_s - one.start_s for one in self.phases if one.gpu in (None, gpu)), 1)


def parse_span(text: str) -> Span:
    """Return the span that `text` writes; raises UsageError with an example where it is none."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--span {text!r} is no span; {_HELP}")
    workload = match["workload"].strip()
    if workload not in CLASSES:
        raise UsageError(f"--span {text} says {workload!r}; choose one of {', '.join(CLASSES)}")
    start_s, end_s = _time(text, match["start"]), _time(text, match["end"])
    if start_s is not None and end_s is not None and end_s <= start_s:
        raise UsageError(f"--span {text} ends before it begins; {_HELP}")
    return Span(text, start_s, end_s, workload)


def label(
    path: Path,
    spans: Sequence[Span],
    *,
    gpus: Sequence[int] = (),
    clear: bool = False,
    out: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
    progress: Callable[[float], None] = lambda _: None,
) -> Labelled:
    """Mark `spans` for `gpus` (without any, for all) in the trace `path` and return all spans that are marked then.

    `clear` removes what was marked before. The trace is written to `out`, or in place; it appears under its name when
    it is complete, and nothing but the header changes. Without spans and `clear` nothing is written.
    Raises UsageError for spans that lie outside the trace or over others, and for a file that is no trace; FaultError
    where it cannot be written.
    """
    found = _inspect(path, warn, progress, keep=not clear)
    unknown = sorted(set(gpus) - set(found.gpus))
    if unknown:
        raise UsageError(f"{path} has no GPU {unknown[0]}; it holds {', '.join(map(str, found.gpus))}")
    phases = list(found.phases)
    for span in spans:
        for gpu in sorted(set(gpus)) or (None,):
            phases.append(_placed(path, span, gpu, found, phases))
    phases.sort(key=lambda one: (one.start_s, -1 if one.gpu is None else one.gpu))
    marked = dataclasses.replace(found, phases=tuple(phases))
    if spans or clear:
        _write(path, out or path, _in_trace_time(marked))
    return marked


def _time(text: str, part: str) -> float | None:
    part = part.strip()
    if not part:
        return None
    match = _TIME.fullmatch(part)
    if match is None:
        raise UsageError(f"--span {text} has the time {part!r}; write seconds, or minutes and hours as 10m and 1h")
    return float(match["number"]) * _UNITS_S[match["unit"]]


def _inspect(path: Path, warn: Callable[[str], None], progress: Callable[[float], None], *, keep: bool) -> Labelled:
    """Read the trace through for its length, its GPUs and its spans."""
    reader = _open(path, warn)
    first_s: float | None = None
    last_s, gpus = 0.0, set[int]()
    for number, tick in enumerate(reader):
        seen = [record.key.gpu for record in tick.records if isinstance(record, GpuSample)]
        gpus.update(seen)
        if seen and first_s is None:
            first_s = tick.monotonic_s
        last_s = tick.monotonic_s
        if number % _PROGRESS_TICKS == 0:
            progress(reader.fraction_read())
    if first_s is None:
        raise UsageError(f"{path} holds no sample of a GPU; there is nothing to label")
    try:
        phases = tuple(
            dataclasses.replace(one, start_s=round(one.start_s - first_s, 3), end_s=round(one.end_s - first_s, 3))
            for one in (reader.header.ground_truth if keep else ())
        )
    except TypeError as error:
        raise UsageError(f"{path} has a span in its header that is none; remove it with --clear") from error
    return Labelled(
        header=reader.header,
        first_s=first_s,
        seconds=round(last_s - first_s, 3),
        gpus=tuple(sorted(gpus)),
        phases=phases,
    )


def _open(path: Path, warn: Callable[[str], None]) -> TraceReader:
    try:
        return TraceReader(path, warn)
    except UsageError as error:
        if "no trace header" not in str(error):
            raise
        raise UsageError(f"{path} is no warpwatch trace; turn a log into one first: warpwatch convert") from error


def _placed(path: Path, span: Span, gpu: int | None, trace: Labelled, others: Sequence[Phase]) -> Phase:
    """Return the span as a phase; raises UsageError where it is outside the trace or over another."""
    start_s = 0.0 if span.start_s is None else span.start_s
    end_s = trace.seconds if span.end_s is None else span.end_s
    # The last sample stands for what comes until the next one.
    if end_s > trace.seconds + trace.header.interval_s or start_s >= trace.seconds:
        raise UsageError(f"--span {span.text} ends after {path}, which is {trace.seconds:g} s long")
    if end_s <= start_s:
        raise UsageError(f"--span {span.text} ends before it begins; {_HELP}")
    phase = Phase(start_s=start_s, end_s=end_s, workload=span.workload, gpu=gpu)
    for other in others:
        apart = other.end_s <= start_s or end_s <= other.start_s
        if not apart and (gpu is None or other.gpu in (None, gpu)):
            raise UsageError(
                f"--span {span.text} lies over {other.start_s:g}:{other.end_s:g}={other.workload}"
                f"{'' if other.gpu is None else f' of GPU {other.gpu}'}; spans of one GPU may not overlap, and --clear "
                "removes those that were marked before"
            )
    return phase


def _in_trace_time(trace: Labelled) -> list[dict[str, Any]]:
    """Return the phases as the header has them."""
    found = []
    for one in trace.phases:
        start_s, end_s = (round(time_s + trace.first_s, 6) for time_s in (one.start_s, one.end_s))
        moved = dataclasses.replace(one, start_s=start_s, end_s=end_s)
        found.append({name: value for name, value in dataclasses.asdict(moved).items() if value is not None})
    return found


def _write(path: Path, out: Path, ground_truth: list[dict[str, Any]]) -> None:
    """Write `path` with other ground truth to `out`, byte for byte beside the header."""
    target = out.resolve()
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write {out}: it is no plain file")
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {out}: its folder does not exist")
    part = target.with_name(f".{os.getpid()}-{target.name}")
    source = LogBytes(path)
    try:
        with part.open("wb") as raw:
            packed = isinstance(source.stream, gzip.GzipFile) if target == path.resolve() else out.suffix == ".gz"
            if packed:
                with gzip.GzipFile("", "wb", 6, raw, mtime=0) as stream:
                    _copy(source, stream, ground_truth)
            else:
                _copy(source, raw, ground_truth)
            raw.flush()
            os.fsync(raw.fileno())
        if target.exists():
            part.chmod(target.stat().st_mode & 0o7777)
        part.replace(target)
    except OSError as error:
        raise FaultError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        source.close()
        part.unlink(missing_ok=True)


def _copy(source: LogBytes, out: gzip.GzipFile | BinaryIO, ground_truth: list[dict[str, Any]]) -> None:
    header = json.loads(source.stream.readline(MAX_LINE))
    header["ground_truth"] = ground_truth
    out.write(json.dumps(header, separators=(",", ":"), allow_nan=False).encode() + b"\n")
    # read1, since read would lose what a truncated file still holds.
    with contextlib.suppress(EOFError, zlib.error):
        while chunk := source.stream.read1(_CHUNK_BYTES):
            out.write(chunk)
