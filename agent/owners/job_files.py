"""Folders of small JSON files, read every 5 s: one file for each job that runs here, or for each maintenance.

A file ends with its removal or by the time it names. One that cannot be used costs itself alone: it is counted, and
logged once for each version of it. Files are opened so that a link is not followed and a pipe does not block.
"""

from __future__ import annotations

import heapq
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from agent.clock import Instant
from agent.owners.job_file import JobFile, JobFileError, parse_job_file

_log = logging.getLogger(__name__)

_SUFFIX: Final = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilesConfig:
    """Where job files are and how many are read."""

    folder: str = "/run/warpwatch/jobs.d"
    """Folder of the job files, <id>.json each."""
    files: int = 256
    """Files that are read, the newest of them where there are more."""
    names: int = 10_000
    """Names looked at in the folder."""
    file_bytes: int = 65_536
    """Size of one file."""
    list_again_seconds: float = 60.0
    """The folder is listed when it changed, and this often in any case."""


class _Version(NamedTuple):
    """What changes when a file is written anew."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class Said(Protocol):
    """What a file says."""

    @property
    def expires_wall_s(self) -> float | None:
        """When it ends by itself."""
        ...

    @property
    def unknown_keys(self) -> tuple[str, ...]:
        """Keys that mean nothing here."""
        ...


S = TypeVar("S", bound=Said)


@dataclass(frozen=True, slots=True)
class _Known(Generic[S]):
    version: _Version
    said: S | None  # None where this version cannot be used


class SmallFiles(Generic[S]):
    """Follows a folder of files that `parse` reads; not to be used by two threads at a time."""

    def __init__(self, config: JobFilesConfig, parse: Callable[[bytes], S], what: str) -> None:
        """Call a file `what` in the log; `parse` raises JobFileError for one that cannot be used."""
        self._config = config
        self._parse = parse
        self._what = what
        self._folder = Path(config.folder)
        self._known: dict[str, _Known[S]] = {}
        self._names: tuple[str, ...] = ()
        self._listed: tuple[int, int] | None = None  # inode and change of the folder when it was listed
        self._list_at_s = 0.0
        self._is_full = False
        self._is_unreadable = False
        #: Files that could not be used, by reason; each version of a file counts once.
        self.errors: Counter[str] = Counter()

    def read(self, now: Instant) -> tuple[S, ...]:
        """Return what all files say that hold now, by the name of the file."""
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._known.clear()
            self._names, self._listed = (), None
            was_unreadable = self._is_unreadable
            # Where it is not there, nobody writes such files here.
            self._is_unreadable = not isinstance(error, FileNotFoundError)
            if self._is_unreadable and not was_unreadable:  # it lasts, and says the same every 5 s
                self.errors["folder_unreadable"] += 1
                _log.warning("the folder of %ss %s cannot be read: %s", self._what, self._folder, error.strerror)
            return ()
        self._is_unreadable = False
        try:
            self._list(folder, now)
            found = {name: known for name in self._names if (known := self._load(folder, name)) is not None}
        finally:
            os.close(folder)
        self._known = found
        said = (known.said for known in found.values() if known.said is not None)
        return tuple(one for one in said if one.expires_wall_s is None or now.wall_s < one.expires_wall_s)

    def _list(self, folder: int, now: Instant) -> None:
        """List the folder where it changed since; a change within the grain of its stamp is met by a second look."""
        found = os.fstat(folder)
        state = (found.st_ino, found.st_mtime_ns)
        is_fresh = abs(now.wall_s - found.st_mtime_ns / 1e9) < 2.0
        if state == self._listed and now.monotonic_s < self._list_at_s:
            return
        names = []
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= self._config.names:
                    break
                # A name that begins with a dot is a file that is being written.
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                    names.append(entry.name)
        self._listed = state
        self._list_at_s = now.monotonic_s + (0.0 if is_fresh else self._config.list_again_seconds)
        is_full = len(names) > self._config.files
        if is_full:
            names = heapq.nlargest(self._config.files, names, key=lambda name: (_modified_ns(folder, name), name))
        if is_full and not self._is_full:
            self.errors["too_many_files"] += 1
            _log.warning("%s holds more than %d files; the newest are read", self._folder, self._config.files)
        self._is_full = is_full
        self._names = tuple(sorted(names))

    def _load(self, folder: int, name: str) -> _Known[S] | None:
        """Return the file, read again where it changed; None where it is gone."""
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        version = _version(status)
        known = self._known.get(name)
        if known is not None and known.version == version:
            return known
        said = None
        try:
            _check_regular(status)  # before it is opened: to open a device may act on it
            said, version = self._open(folder, name)
        except FileNotFoundError:
            return None
        except JobFileError as error:
            self._complain(error.reason, name, f"is left out: {error}")
        except OSError as error:
            self._complain("unreadable", name, f"cannot be read: {error.strerror}")
        if said is not None and said.unknown_keys:
            shown = ", ".join(repr(key[:40]) for key in said.unknown_keys[:5])
            self._complain("unknown_key", name, f"holds keys that mean nothing here: {shown}")
        return _Known(version, said)

    def _open(self, folder: int, name: str) -> tuple[S, _Version]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        file = os.open(name, flags, dir_fd=folder)
        try:
            found = os.fstat(file)
            _check_regular(found)
            if found.st_mode & stat.S_IWOTH:
                raise JobFileError("writable_by_others", "every user may write it; take that away with chmod o-w")
            data = b""
            if found.st_size <= self._config.file_bytes:
                data = os.read(file, self._config.file_bytes + 1)
            if max(found.st_size, len(data)) > self._config.file_bytes:
                raise JobFileError("too_large", f"it is larger than {self._config.file_bytes} bytes")
            return self._parse(data), _version(found)
        finally:
            os.close(file)

    def _complain(self, reason: str, name: str, what: str) -> None:
        self.errors[reason] += 1
        _log.warning("%s %r %s", self._what, name[:80], what)


class JobFiles(SmallFiles[JobFile]):
    """Follows the folder of job files."""

    def __init__(self, config: JobFilesConfig | None = None) -> None:
        super().__init__(config or JobFilesConfig(), parse_job_file, "job file")


def _check_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise JobFileError("not_a_file", "it is a link, a pipe or a device and no regular file")


def _version(found: os.stat_result) -> _Version:
    return _Version(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _modified_ns(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns
    except OSError:
        return 0
