"""One text file of /proc, read again and again without opening it again."""

from __future__ import annotations

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
