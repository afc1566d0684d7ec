"""XIDs of GPUs and SXIDs of NVSwitches from the kernel's log, /dev/kmsg.

Format and errors are those of the kernel's Documentation/ABI/testing/dev-kmsg. Each read returns one record, "prefix,
sequence number, microseconds, flags;text", with lines of keys after it that start with a blank; bytes beyond printable
ASCII are escaped. EPIPE says that records were overwritten unread; EINVAL that the buffer is too short, and the record
is lost with it.

What was logged before `open` is not counted: a restart of the agent must not repeat it, and the kernel's buffer holds
this boot only. `open` returns when each of those events came last, so that a rule on their age outlives a restart.

The microseconds are the kernel's local clock. It stands still in a suspend, as CLOCK_MONOTONIC does, but no time daemon
corrects it: the two part by some parts in a million, seconds to a minute after weeks. So stamps serve for the age of
what came before `open` alone; what comes later is dated by when it is read.

Only lines of the kernel itself count, facility 0: what a program writes to /dev/kmsg bears another one.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agent.clock import awake_seconds
from agent.samplers import SourceUnavailableError

_log = logging.getLogger(__name__)

_ADDRESS: Final = rb"(?:PCI:)?((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2,4}:[0-9a-fA-F]{2})(?:\.[0-7])?"
#: "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."; without "PCI:" before R304.
_XID: Final = re.compile(rb"NVRM: Xid \(" + _ADDRESS + rb"\): (\d{1,4})\b")
#: "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO"
_SXID: Final = re.compile(rb"nvidia-nvswitch\d+: SXid \(" + _ADDRESS + rb"\): (\d{1,6}), (Fatal)?")
_PREFIX: Final = re.compile(rb"(\d+),\d+,(\d+),[^;\n]*;")


@dataclass(frozen=True, slots=True, kw_only=True)
class KmsgConfig:
    """Bounds of the work on the kernel's log."""

    records_per_read: int = 20_000
    """Records looked at in one go, some 40 ms; the rest waits in the kernel's buffer, and may be overwritten there."""
    history_records: int = 200_000
    """Records looked at when the log is opened; the largest buffers hold less."""
    codes: int = 1024
    """Different events, by address and code, told in one go."""
    buffer_bytes: int = 16_384
    """Buffer for one record; the kernel's longest is 8 KiB with prefix and keys."""
    kernel_only: bool = True
    """Whether lines that programs wrote are left out; off, a written line can test the way to the pager."""


class KernelEvent(NamedTuple):
    """What one line says, without its time; equal lines are equal events."""

    address: str  # PCI domain, bus and device: 00000000:3b:00
    code: int
    is_switch: bool = False  # an SXID of an NVSwitch, else an XID of a GPU
    is_fatal: bool = False  # of an SXID: as the line says


class _Line(NamedTuple):
    event: KernelEvent
    stamp_s: float  # by the kernel's local clock


def pci_address(text: str) -> str:
    """Return domain, bus and device of a PCI address in one form, 00000000:3b:00; the function is left out."""
    domain, bus, device = ("0:" + text.lower().partition(".")[0]).split(":")[-3:]
    return f"{domain.rjust(8, '0')}:{bus[-2:]}:{device}"


def parse_kmsg(line: bytes, *, kernel_only: bool = True) -> tuple[KernelEvent, float] | None:
    """Return the event of one line with its stamp in seconds, or None where the line is about something else."""
    if b"Xid (" not in line:
        return None
    prefix = _PREFIX.match(line)
    if prefix is None or (kernel_only and int(prefix[1]) >= 8):  # facility * 8 + level
        return None
    xid = _XID.match(line, prefix.end())
    sxid = None if xid else _SXID.match(line, prefix.end())
    found = xid or sxid
    if found is None:
        return None
    address = pci_address(found[1].decode("ascii"))
    is_fatal = sxid is not None and sxid[3] is not None
    event = KernelEvent(address, int(found[2]), is_switch=sxid is not None, is_fatal=is_fatal)
    return event, int(prefix[2]) / 1e6


class KmsgReader:
    """Reads new lines of the kernel's log without waiting for any."""

    def __init__(
        self,
        path: Path = Path("/dev/kmsg"),
        config: KmsgConfig | None = None,
        awake_s: Callable[[], float] = awake_seconds,
    ) -> None:
        self.path = path
        self._config = config or KmsgConfig()
        self._awake_s = awake_s
        self._file: int | None = None
        self._rest = b""
        self._buffer_bytes = self._config.buffer_bytes
        self.errors: Counter[str] = Counter()

    @property
    def is_open(self) -> bool:
        """Return whether the log is read."""
        return self._file is not None

    def open(self) -> Mapping[KernelEvent, float]:
        """Open the log at its end and return the events before it, each with the seconds since it came last.

        Raises SourceUnavailableError with the reason absent, no_permission or unreadable.
        """
        self.close()
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        history = None
        try:
            self._file = os.open(self.path, flags)
            try:
                # First the end, then a second look at all before it: no line can slip through between the two.
                os.lseek(self._file, 0, os.SEEK_END)
            except OSError as error:
                if error.errno != errno.ESPIPE:
                    raise
                return {}  # a pipe has no history
            history = os.open(self.path, flags)
            return self._history(history)
        except OSError as error:
            self.close()
            raise self._unavailable(error) from error
        finally:
            if history is not None:
                os.close(history)

    def read(self) -> Mapping[KernelEvent, int]:
        """Return the events since the last read, each with how often it came.

        Raises SourceUnavailableError where the log cannot be read any more; it has to be opened again then.
        """
        found: Counter[KernelEvent] = Counter()
        if self._file is None:
            return found
        try:
            for event, _ in self._lines(self._file, self._config.records_per_read):
                if event in found or len(found) < self._config.codes:
                    found[event] += 1
                else:
                    self.errors["too_many_codes"] += 1
        except OSError as error:
            self.close()
            raise self._unavailable(error) from error
        return found

    def close(self) -> None:
        """Close the log; idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._rest = b""

    def _history(self, file: int) -> Mapping[KernelEvent, float]:
        newest: dict[KernelEvent, float] = {}
        for event, stamp_s in self._lines(file, self._config.history_records):
            if event in newest or len(newest) < self._config.codes:
                newest[event] = stamp_s
        self._rest = b""
        now_s = self._awake_s()
        return {event: max(0.0, now_s - stamp_s) for event, stamp_s in newest.items()}

    def _lines(self, file: int, most: int) -> Iterator[_Line]:
        """Give the events of at most `most` records; raises OSError."""
        left = most
        while left > 0:
            try:
                data = os.read(file, self._buffer_bytes)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:
                    self.errors["overrun"] += 1
                elif error.errno == errno.EINVAL and self._buffer_bytes < 1 << 20:
                    self.errors["short_buffer"] += 1
                    self._buffer_bytes *= 4
                else:
                    raise
                left -= 1
                continue
            if not data:
                return
            # One record a read from the kernel; a pipe or a file gives many, and may cut one.
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > self._buffer_bytes:
                self._rest = b""
            left -= len(lines) or 1
            for line in lines:
                parsed = parse_kmsg(line, kernel_only=self._config.kernel_only)
                if parsed is not None:
                    yield _Line(*parsed)

    def _unavailable(self, error: OSError) -> SourceUnavailableError:
        if isinstance(error, FileNotFoundError):
            return SourceUnavailableError("absent", f"{self.path} is not there")
        if isinstance(error, PermissionError):
            return SourceUnavailableError(
                "no_permission",
                f"{self.path} may not be read (kernel.dmesg_restrict); CAP_SYSLOG allows it",
            )
        return SourceUnavailableError("unreadable", f"{self.path} cannot be read: {error.strerror}")
