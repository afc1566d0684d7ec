"""The files of one process in /proc: stat, io, the list of children, cmdline and comm.

stat, io and the list of children never wait for the process. cmdline does: the kernel takes the lock of the process's
memory for it, which a process in uninterruptible sleep may hold (mm/util.c, fs/proc/base.c).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from agent.samplers.kernel_file import counter, read_start

#: stat has 52 numbers of at most 20 digits and a name of at most 64 bytes; io has 7 lines.
_FILE_BYTES: Final = 4096
#: A list of children is read up to this size, about 9,000 process ids.
_CHILDREN_BYTES: Final = 65_536

TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessStat(NamedTuple):
    """What is used of /proc/<pid>/stat (proc_pid_stat(5)); times in ticks of SC_CLK_TCK."""

    pid: int
    state: str  # of the main thread: R, S, D, Z, T, t, X, I
    parent: int
    own_ticks: int  # utime + stime: all threads, also those that ended
    waited_ticks: int  # cutime + cstime: children that were waited for, with theirs
    threads: int
    start_ticks: int  # since boot, suspends included (task->start_boottime)
    resident_pages: int

    @property
    def identity(self) -> tuple[int, int]:
        """Process id and start: an id alone is given again."""
        return self.pid, self.start_ticks

    @property
    def ticks(self) -> int:
        """CPU time of the process and of what it waited for."""
        return self.own_ticks + self.waited_ticks


class ProcessIo(NamedTuple):
    """What is used of /proc/<pid>/io: bytes that went to and came from storage, of the process with all its threads.

    Children that were waited for are in it, with theirs, as in cutime (kernel/exit.c, wait_task_zombie); those whose
    parent ignores SIGCHLD are lost, there as here.
    """

    read_bytes: int  # that storage was asked for; what the page cache held does not count
    written_bytes: int  # when the page was made dirty, not when it was written


def parse_stat(pid: int, data: bytes) -> ProcessStat | None:
    """Parse /proc/<pid>/stat, or return None where it makes no sense.

    The name stands in parentheses and may hold parentheses, blanks and newlines itself: the last `)` ends it. No other
    field can hold one.
    """
    _, parenthesis, rest = data.rpartition(b")")
    fields = rest.split()
    if not parenthesis or len(fields) < 22 or not data.endswith(b"\n"):
        return None
    state, *texts = (field.decode("ascii", "replace") for field in fields[:22])
    # Fields 4, 14 to 17, 20, 22 and 24 of the manual page.
    numbers = [counter(texts[place]) for place in (0, 10, 11, 12, 13, 16, 18, 20)]
    parent, user, system, waited_user, waited_system, threads, start, pages = numbers
    if (
        len(state) != 1
        or parent is None
        or user is None
        or system is None
        or waited_user is None
        or waited_system is None
        or threads is None
        or start is None
        or pages is None
    ):
        return None
    return ProcessStat(pid, state, parent, user + system, waited_user + waited_system, threads, start, pages)


def parse_io(data: bytes) -> ProcessIo | None:
    """Parse /proc/<pid>/io, or return None where a line that is used is missing or makes no sense."""
    found = dict.fromkeys(("read_bytes", "write_bytes"), -1)
    for line in data.decode("ascii", "replace").splitlines(keepends=True):
        name, _, text = line.partition(": ")
        number = counter(text.removesuffix("\n"))
        if name in found and number is not None and text.endswith("\n"):
            found[name] = number
    if min(found.values()) < 0:
        return None
    return ProcessIo(found["read_bytes"], found["write_bytes"])


class ProcessFiles:
    """Reads the files of processes below one root.

    All methods raise what the system says: FileNotFoundError or ProcessLookupError where the process ended,
    PermissionError where it belongs to somebody else.
    """

    def __init__(self, proc_root: Path) -> None:
        self._root = str(proc_root)

    def is_there(self) -> bool:
        """Return whether there is a process file system."""
        return Path(self._root).is_dir()

    def stat(self, pid: int) -> ProcessStat | None:
        """Return the parsed stat, None where it makes no sense."""
        return parse_stat(pid, self._read(f"{pid}/stat", _FILE_BYTES))

    def io(self, pid: int) -> ProcessIo | None:
        """Return the parsed io, None where it makes no sense; needs the right to trace the process."""
        return parse_io(self._read(f"{pid}/io", _FILE_BYTES))

    def children(self, pid: int, thread: int) -> list[int]:
        """Return the children that one thread started; the kernel offers the file with CONFIG_PROC_CHILDREN."""
        words = self._read(f"{pid}/task/{thread}/children", _CHILDREN_BYTES).split()
        return [int(word) for word in words if word.isdigit()]

    def threads(self, pid: int) -> list[int]:
        """Return the ids of the threads."""
        return self._numbers(f"{self._root}/{pid}/task")

    def all_processes(self) -> list[int]:
        """Return the ids of all processes that this user may see."""
        return self._numbers(self._root)

    def command(self, pid: int) -> tuple[bytes, bytes]:
        """Return the first 4 KiB of cmdline, and comm."""
        return self._read(f"{pid}/cmdline", _FILE_BYTES), self._read(f"{pid}/comm", _FILE_BYTES)

    @staticmethod
    def _numbers(folder: str) -> list[int]:
        # A Path for each of thousands of names would cost more than reading the files.
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]  # noqa: PTH208

    def _read(self, name: str, size: int) -> bytes:
        return read_start(f"{self._root}/{name}", size)
