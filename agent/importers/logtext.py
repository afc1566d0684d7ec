"""The text of a foreign log: compression, encoding and lines, read as a stream."""

from __future__ import annotations

import codecs
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import UsageError
from agent.trace import MAX_LINE, LogBytes

_HEAD_LINES: Final = 200
_HEAD_CHARS: Final = 65_536


class Line(NamedTuple):
    """One line of a log without its end; `whole` is False for a last line that has no end: it may be torn."""

    number: int
    text: str
    whole: bool


class LogText:
    """Reads a log line by line: plain or gzip; UTF-8 or UTF-16, with or without a byte order mark; any line end.

    Blank lines are left out. A file that stops in the middle of its compressed data ends there, with a warning.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open the file and read its head; raises UsageError where it is unreadable, empty or no text."""
        self.path = path
        self.warn = warn
        self._bytes = LogBytes(path)
        self._number = 0
        encoding = _encoding(self._bytes.peek())
        if encoding is None:
            self.close()
            raise UsageError(f"{path} is binary; expected a trace, a CSV or the text of nvidia-smi dmon or pmon")
        self._text = io.TextIOWrapper(self._bytes.stream, encoding=encoding, errors="replace", newline=None)
        try:
            self.head: tuple[Line, ...] = tuple(self._read_head())
        except BaseException:
            self.close()
            raise
        if not self.head:
            self.close()
            raise UsageError(f"{path} is empty; expected a trace or a GPU log")

    def _read_head(self) -> Iterator[Line]:
        chars = 0
        for line in self._read():
            yield line
            chars += len(line.text)
            if self._number >= _HEAD_LINES or chars > _HEAD_CHARS:
                return

    def lines(self) -> Iterator[Line]:
        """Return every line from the first one on; once."""
        yield from self.head
        yield from self._read()

    def fraction_read(self) -> float:
        """Return how much of the file was read so far, from 0 to 1, by its bytes on disk."""
        return self._bytes.fraction_read()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._bytes.close()

    def _read(self) -> Iterator[Line]:
        while True:
            try:
                raw = self._text.readline(MAX_LINE)
            except (OSError, EOFError, zlib.error):
                self.warn(f"{self.path}: the file ends in the middle; read up to line {self._number}")
                return
            if not raw:
                return
            self._number += 1
            text = raw.strip("\n\r \t\ufeff\0")
            if len(raw) == MAX_LINE and not raw.endswith("\n"):
                self._skip_rest()
                self.warn(f"{self.path}: left out line {self._number}, which is longer than {MAX_LINE} characters")
            elif text:
                yield Line(self._number, text, raw.endswith("\n"))

    def _skip_rest(self) -> None:
        try:
            while (raw := self._text.readline(MAX_LINE)) and not raw.endswith("\n"):
                pass
        except (OSError, EOFError, zlib.error):
            return


def _encoding(head: bytes) -> str | None:
    """Return the encoding by the byte order mark or, without one, by where the zero bytes are; None where binary."""
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return encoding
    even, odd = head[0::2].count(0), head[1::2].count(0)
    half = len(head) // 2
    if half and odd > 0.9 * half and even < 0.1 * half:
        return "utf-16-le"
    if half and even > 0.9 * half and odd < 0.1 * half:
        return "utf-16-be"
    controls = sum(head.count(byte) for byte in (*range(9), *range(14, 27), *range(28, 32)))
    return None if controls > 0.05 * len(head) else "utf-8"
