"""The file by which other commands find the running agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agent.errors import FaultError

_NAME: Final = "warpwatch.pid"


@contextmanager
def pid_file(folder: Path) -> Iterator[None]:
    """Keep the id of this process in `folder` while the block runs; do without where nothing can be written there."""
    path = folder / _NAME
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o640), "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
    except OSError:
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_agent(folder: Path) -> int:
    """Return the process id of the running agent; raises FaultError where none says so."""
    path = folder / _NAME
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FaultError(
            f"no running agent is known by {path}: none runs, or it could not write there, as one that was started by "
            "hand or by `make run`; name its process, as with --pid $(pgrep -of 'warpwatch run')"
        ) from None


def check_agent(pid: int) -> None:
    """Raise FaultError where this process is no `warpwatch run`."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        raise FaultError(f"there is no process {pid}; is the agent running?") from None
    if b"run" not in words or not any(word.endswith(b"warpwatch") for word in words):
        raise FaultError(f"process {pid} is not `warpwatch run`; name the right one with --pid")


def signal_agent(pid: int, number: int) -> None:
    """Send a signal to the agent, after a look at what this process is: the signal would end any other program.

    Raises FaultError where it is no `warpwatch run`, or belongs to another user.
    """
    check_agent(pid)
    try:
        os.kill(pid, number)
    except PermissionError:
        raise FaultError(f"process {pid} belongs to another user; run this as root or as the agent's user") from None
    except ProcessLookupError:
        raise FaultError(f"process {pid} has just ended") from None
