"""Turns any log that can be replayed into a trace of this program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.errors import FaultError, UsageError
from agent.importers import open_trace
from agent.trace import TraceHeader, TraceWriter

#: Ticks between two reports of progress.
_PROGRESS_TICKS: Final = 1000


def convert(
    in_path: Path, out_path: Path, warn: Callable[[str], None], progress: Callable[[float], None] | None = None
) -> int:
    """Write the log `in_path` as a trace to `out_path`, gzip where that ends in .gz, and return the number of ticks.

    The output appears under its name only when it is complete and replaces a file that was there. `progress` is
    called with the part of the input that was read, 0 to 1. Raises UsageError for input that cannot be read or an
    output that cannot be created, FaultError where writing fails later.
    """
    target = _target(in_path, out_path)
    trace = open_trace(in_path, warn)
    part = target.with_name(f".{os.getpid()}-{target.name}")
    ticks = 0
    try:
        with _writer(part, out_path, trace.header) as writer:
            for tick in trace:
                writer.write(tick)
                ticks += 1
                if progress is not None and ticks % _PROGRESS_TICKS == 0:
                    progress(trace.fraction_read())
        part.replace(target)
    except FaultError as error:
        # The person named another file than the one that is written first.
        raise FaultError(str(error).replace(str(part), str(out_path))) from error
    except OSError as error:
        raise FaultError(f"cannot write {out_path}: {error.strerror or error}") from error
    finally:
        trace.close()
        part.unlink(missing_ok=True)
    if progress is not None:
        progress(1.0)
    return ticks


def _writer(part: Path, out_path: Path, header: TraceHeader) -> TraceWriter:
    try:
        return TraceWriter(part, header)
    except UsageError as error:
        raise UsageError(str(error).replace(str(part), str(out_path))) from error


def _target(in_path: Path, out_path: Path) -> Path:
    """Return where to write, links followed; raises UsageError where that is the input or no plain file."""
    target = out_path.resolve()
    if target == in_path.resolve() or (target.exists() and in_path.exists() and target.samefile(in_path)):
        raise UsageError(f"cannot convert {in_path} onto itself; name another output")
    if target.exists() and not target.is_file():
        raise UsageError(f"cannot write {out_path}: it is no plain file")
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {out_path}: its folder does not exist")
    return target
