"""Text files of /proc and /sys: one that is read again and again without opening it again, and small ones."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from agent.samplers import SourceUnavailableError


class KernelFile:
    """A file that the kernel writes anew for each read from offset 0; kept open between reads.

    Keeping it open saves the path walk every second, and a descriptor that was granted stays readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def exists(self) -> bool:
        """Return whether the file is there; raises SourceUnavailableError where it is there but cannot be read."""
        try:
            self.read()
        except SourceUnavailableError as error:
            if error.reason == "absent":
                return False
            raise
        return True

    def read(self) -> str:
        """Return the whole file; bytes that are not UTF-8 become surrogates, so that names keep their identity.

        Raises SourceUnavailableError with reason `absent` or `unreadable`; the next read opens the file again.
        """
        try:
            if self._file is None:
                self._file = FileIO(str(self.path))
            else:
                self._file.seek(0)
            data = self._file.readall()
        except FileNotFoundError as error:
            self.close()
            raise SourceUnavailableError("absent", f"{self.path} is not there") from error
        except OSError as error:
            self.close()
            raise SourceUnavailableError("unreadable", f"{self.path} cannot be read: {error.strerror}") from error
        return data.decode("utf-8", "surrogateescape")

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_start(path: str, limit_bytes: int) -> bytes:
    """Return the first bytes of a file, all of it where it is no longer; raises OSError where it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        left = limit_bytes
        # The kernel hands out a table page by page, whatever is asked for.
        while left > 0 and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)


def read_text(path: str, limit_bytes: int = 4096) -> str | None:
    """Return the start of a small file without blanks around it, or None where it cannot be read.

    Absent, or not supported by this device: the kernel answers EOPNOTSUPP or EINVAL then.
    """
    try:
        return read_start(path, limit_bytes).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return None


def counter(field: str) -> int | None:
    """Return a kernel counter (decimal, at most 64 bits), or None where `field` is no such number."""
    if not (field.isascii() and field.isdecimal()) or len(field) > 20:
        return None
    return int(field)


def is_name(name: str) -> bool:
    """Return whether `name` can be the kernel's for a device: short, no NUL, and no step to another directory."""
    # IFNAMSIZ is 16, DISK_NAME_LEN 32 and a partition number; what is longer would only fail in path look-ups.
    return 0 < len(name) <= 64 and "\0" not in name and name not in {".", ".."}


def printable(name: str) -> str:
    """Return a device name as valid Unicode: bytes that were not UTF-8 are written as escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
