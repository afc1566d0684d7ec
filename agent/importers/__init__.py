"""Foreign logs: one file per format, told apart by what is in them and never by their name.

A new format is one file with `NAME`, `matches(head)` and `read(text)`, and one line in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from agent.errors import UsageError
from agent.importers import generic_csv, nvidia_smi_csv, nvidia_smi_dmon, nvidia_smi_pmon
from agent.importers.assembly import ImportedTrace
from agent.importers.logtext import LogText
from agent.records import Tick
from agent.trace import TraceHeader, TraceReader


class Trace(Protocol):
    """A trace or foreign log that is being read: the header, then the ticks by iteration, once."""

    @property
    def header(self) -> TraceHeader:
        """Facts about the trace; in a foreign log only what it says itself."""
        ...

    def __iter__(self) -> Iterator[Tick]: ...

    def fraction_read(self) -> float:
        """Return how much of the file was read so far, from 0 to 1, by its bytes on disk."""
        ...

    def close(self) -> None:
        """Close the file; idempotent, and done by reading to the end."""
        ...


class Format(NamedTuple):
    """One kind of foreign log: how it is called, whether the first lines are of it, and how it is read."""

    name: str
    matches: Callable[[Sequence[str]], bool]
    read: Callable[[LogText], ImportedTrace]


#: In the order of asking: a form with a sharper mark comes first.
FORMATS: Final = (
    Format(nvidia_smi_pmon.NAME, nvidia_smi_pmon.matches, nvidia_smi_pmon.read),
    Format(nvidia_smi_dmon.NAME, nvidia_smi_dmon.matches, nvidia_smi_dmon.read),
    Format(generic_csv.NAME, generic_csv.matches, generic_csv.read),
    Format(nvidia_smi_csv.NAME, nvidia_smi_csv.matches, nvidia_smi_csv.read),
)
_ACCEPTED: Final = (
    "a warpwatch trace, nvidia-smi --query-gpu CSV with its header (utilization.gpu, power.draw, memory.used, ...), "
    "nvidia-smi dmon or pmon text, or CSV with t_s and columns such as util_gpu_pct, power_w, mem_used_mib"
)


def open_trace(path: Path, warn: Callable[[str], None]) -> Trace:
    """Open a trace or any foreign log, gzip or plain, and read its header.

    Raises UsageError where the file cannot be read or is none of the accepted formats; reading on may raise it too.
    What was left out or assumed goes to `warn`, one sentence each.
    """
    text = LogText(path, warn)
    head = [line.text for line in text.head]
    form = next((form for form in FORMATS if form.matches(head)), None)
    if form is not None:
        try:
            return form.read(text)
        except BaseException:
            text.close()
            raise
    text.close()
    if head[0].startswith("{"):
        return TraceReader(path, warn)
    raise _unknown(path, head)


def _unknown(path: Path, head: Sequence[str]) -> UsageError:
    if nvidia_smi_csv.looks_headless(head):
        return UsageError(f"{path} has rows of nvidia-smi and no header line; log again without noheader")
    if generic_csv.lacks_time(head):
        return UsageError(f"{path} has no column t_s; the generic CSV needs it, in seconds from the start")
    if any("," in line for line in head):
        return UsageError(f"{path} has no column that is known here; expected {_ACCEPTED}")
    return UsageError(f"{path} is no GPU log; expected {_ACCEPTED}")
