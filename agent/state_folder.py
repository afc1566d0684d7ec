"""A folder of the state directory to which commands write small files that the agent reads."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.errors import FaultError


class StateFolder:
    """One such folder; made with its first file. Whoever writes is root or the agent's user."""

    def __init__(self, state_directory: Path, name: str) -> None:
        """Name the folder; nothing is looked at yet."""
        self._state_directory = state_directory
        self._name = name
        self.path = state_directory / name

    def write(self, name: str, data: bytes) -> None:
        """Write a file that everybody may read, whole or not at all; raises FaultError where that fails."""
        with self._opened(create=True) as folder, self._told("written"):
            _write_new(folder, name, data)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; one that is gone already is no fault. Raises FaultError where that fails."""
        with self._opened(create=False) as folder, self._told("removed"):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)

    @contextmanager
    def _opened(self, *, create: bool) -> Iterator[int]:
        """Open the folder without following a link: it may be another user's, who is not to lead root elsewhere."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._told("opened"):
            parent = os.open(self._state_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                try:
                    folder = os.open(self._name, flags, dir_fd=parent)
                except FileNotFoundError:
                    if not create:
                        raise
                    os.mkdir(self._name, 0o755, dir_fd=parent)
                    folder = os.open(self._name, flags, dir_fd=parent)
                    # The agent, which is another user, has to read it whatever the umask is here.
                    os.fchmod(folder, 0o755)
            finally:
                os.close(parent)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _told(self, done: str) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise FaultError(f"{self.path} cannot be {done}: run this as root or as the agent's user") from error
        except OSError as error:
            why = error.strerror or str(error)
            raise FaultError(f"{self.path} cannot be {done}: {why}; see [agent] state_directory") from error


def _write_new(folder: int, name: str, data: bytes) -> None:
    """Write a file under a name that readers pass over, and give it its own when it is whole."""
    hidden = f".{name}"
    file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)
    try:
        with os.fdopen(file, "wb") as out:
            os.fchmod(out.fileno(), stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.rename(hidden, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(hidden, dir_fd=folder)
        raise
