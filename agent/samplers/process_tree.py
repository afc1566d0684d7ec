"""Finds the descendants of processes without looking at all processes of the host.

The kernel lists the children of a thread in /proc/<pid>/task/<tid>/children (CONFIG_PROC_CHILDREN, which all large
distributions set). Nearly all children are those of the main thread, whose list is read every tick. The lists of the
other threads, of which a training process has hundreds, are read every 30 s; in between the children found there are
told by their parent's id. A child of such a thread that lives for less is not seen, but its CPU time is, in what its
parent waited for. The lists are no atomic picture: a child may be missing while a sibling ends.

Without these files all processes are looked through every 30 s, a thousand each tick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from agent.samplers.process_files import ProcessFiles, ProcessStat

#: Seconds between two looks at the lists of all threads, and between two scans of all processes.
_LOOK_S: Final = 30.0
#: Lists of other threads that are read in one tick (2.5 µs each); the rest waits for the next one.
_THREADS_MAX: Final = 4096
#: Processes that a scan looks at in one tick (8 µs each).
_SCANNED_MAX: Final = 1000
#: Descendants of one process, and of all, that are looked at in one tick.
_DESCENDANTS_MAX: Final = 512
_ALL_DESCENDANTS_MAX: Final = 2048


@dataclass(slots=True)
class _OtherThreads:
    """Children of a process that are not its main thread's."""

    looked_s: float
    children: tuple[int, ...] = ()


class ProcessTree:
    """Finds descendants; `begin` starts a tick."""

    def __init__(self, files: ProcessFiles, errors: Counter[str]) -> None:
        self._files = files
        self._errors = errors
        self._now_s = 0.0
        self._threads_left = 0
        self._descendants_left = 0
        self._others: dict[tuple[int, int], _OtherThreads] = {}
        self._met: set[tuple[int, int]] = set()
        #: Whether the kernel lists children; None until that was seen.
        self._has_lists: bool | None = None
        self._scan = _Scan(files)

    def begin(self, now_s: float) -> None:
        """Start a tick: forget the processes that the last one did not meet."""
        self._others = {identity: others for identity, others in self._others.items() if identity in self._met}
        self._met = set()
        self._now_s = now_s
        self._threads_left = _THREADS_MAX
        self._descendants_left = _ALL_DESCENDANTS_MAX
        if self._has_lists is False:
            self._scan.go_on(now_s)

    def descendants(self, root: ProcessStat, apart: Container[int]) -> tuple[list[ProcessStat], list[int], bool]:
        """Return the descendants of `root`, parents first, the ids in `apart` met below it, and whether that is all.

        Processes in `apart` and what is below them are left out. A list that is too long is cut and counted.
        """
        found: list[ProcessStat] = []
        met_apart: list[int] = []
        seen = {root.pid}
        waiting = [root]
        while waiting:
            parent = waiting.pop()
            for pid in self._children(parent):
                if pid in seen:
                    continue
                seen.add(pid)
                if pid in apart:
                    met_apart.append(pid)
                    continue
                if len(found) == _DESCENDANTS_MAX or not self._descendants_left:
                    self._errors["too_many"] += 1
                    return found, met_apart, False
                self._descendants_left -= 1
                child = self._stat(pid)
                # An id that was given again has another parent, unless that is the same family anyway.
                if child is not None and child.parent == parent.pid:
                    found.append(child)
                    waiting.append(child)
        return found, met_apart, True

    def _stat(self, pid: int) -> ProcessStat | None:
        try:
            stat = self._files.stat(pid)
        except OSError:  # it ended, or belongs to a user whose processes are hidden
            return None
        if stat is None:
            self._errors["malformed"] += 1
        return stat

    def _children(self, parent: ProcessStat) -> list[int]:
        if self._has_lists is False:
            return self._scan.children(parent.pid)
        try:
            children = self._files.children(parent.pid, parent.pid)
        except OSError:
            if self._has_lists or not self._is_alive(parent):
                return []
            self._has_lists = False
            self._scan.go_on(self._now_s)
            return self._scan.children(parent.pid)
        self._has_lists = True
        if parent.threads > 1:
            children.extend(self._children_of_other_threads(parent))
        return children

    def _is_alive(self, process: ProcessStat) -> bool:
        now = self._stat(process.pid)
        return now is not None and now.start_ticks == process.start_ticks

    def _children_of_other_threads(self, parent: ProcessStat) -> tuple[int, ...]:
        self._met.add(parent.identity)
        others = self._others.get(parent.identity)
        is_due = others is None or self._now_s - others.looked_s >= _LOOK_S
        if is_due and self._threads_left > 0:
            others = self._others[parent.identity] = _OtherThreads(self._now_s, self._look(parent.pid))
        return others.children if others else ()

    def _look(self, pid: int) -> tuple[int, ...]:
        found: list[int] = []
        try:
            threads = self._files.threads(pid)
        except OSError:
            return ()
        for thread in threads[: self._threads_left]:
            if thread != pid:
                self._threads_left -= 1
                try:
                    found.extend(self._files.children(pid, thread))
                except OSError:  # the thread ended
                    continue
        return tuple(found)


class _Scan:
    """Who is whose child, from the stat files of all processes, some in each tick."""

    def __init__(self, files: ProcessFiles) -> None:
        self._files = files
        self._started_s: float | None = None
        self._rest: list[int] = []
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}

    def children(self, pid: int) -> list[int]:
        """Return the children of a process when the last scan ended."""
        return self._children.get(pid, [])

    def go_on(self, now_s: float) -> None:
        """Look at the next processes; start anew where that is due."""
        if not self._rest:
            if self._started_s is not None and now_s - self._started_s < _LOOK_S:
                return
            self._started_s, self._parents = now_s, {}
            self._rest = self._files.all_processes()
        for _ in range(min(_SCANNED_MAX, len(self._rest))):
            pid = self._rest.pop()
            try:
                stat = self._files.stat(pid)
            except OSError:
                continue
            if stat is not None:
                self._parents[pid] = stat.parent
        if not self._rest:
            self._children = {}
            for pid, parent in self._parents.items():
                self._children.setdefault(parent, []).append(pid)
