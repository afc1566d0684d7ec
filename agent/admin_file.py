"""Reads the files an administrator writes for the agent: the configuration, and that of the web server."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from agent.errors import UsageError

#: Nobody reads a longer one.
_MAX_BYTES: Final = 1 << 20


def read_admin_file(path: Path, what: str) -> str:
    """Return the text of `path`, with line ends as they stand; `what` names it in errors, as in `configuration`.

    Raises UsageError for a file that cannot be read, that every user may write, that is too long or no UTF-8 text, and
    for a pipe or a socket: one that nobody writes to would hold the agent up for ever.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            data = b"" if stat.S_ISFIFO(mode) else stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from error
    if stat.S_ISFIFO(mode):
        raise UsageError(f"cannot read {what} {path}: it is a pipe; save it to a file first")
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise UsageError(f"every user may write {what} {path}; take that away with chmod o-w")
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{what} {path} is longer than {_MAX_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not UTF-8 text") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
