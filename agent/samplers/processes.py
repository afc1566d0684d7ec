"""The processes that hold GPUs, from /proc, every 5 s: CPU time, state, memory, descendants, I/O, program.

Which processes these are comes from the driver's lists (agent/gpu_roster.py), whose ids are the host's. Two reads each
for a process and each of its descendants; no file is kept open.

Times: `starttime` counts from boot with suspends, as the agent's monotonic clock does (CLOCK_BOOTTIME), so that the
start needs no conversion but to seconds.

A descendant that holds a GPU too counts for itself and not for its ancestor; when it ends and its ancestor waits for
it, what it used does not count again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.clock import Instant
from agent.gpu_roster import RosterGpu
from agent.records import ProcessSample
from agent.samplers import SourceUnavailableError
from agent.samplers.process_files import PAGE_BYTES, TICKS_PER_SECOND, ProcessFiles, ProcessIo, ProcessStat
from agent.samplers.process_programs import ProgramReader, ProgramWords
from agent.samplers.process_totals import SteadyTotal
from agent.samplers.process_tree import ProcessTree

#: Processes that hold GPUs; those beyond are counted as `too_many`, the highest ids first.
_PROCESSES_MAX: Final = 512
#: Seconds for which a process is remembered that the driver lists no more: its counters go on where it comes back.
_MEMORY_S: Final = 60.0


@dataclass(slots=True)
class _Used:
    """What one process had used when it was last read, with what it waited for."""

    ticks: int
    io: ProcessIo | None = None


@dataclass(slots=True)
class _Known:
    """What is remembered of a process that holds a GPU."""

    met_s: float
    waited: SteadyTotal = field(default_factory=SteadyTotal)
    read_bytes: SteadyTotal = field(default_factory=SteadyTotal)
    written_bytes: SteadyTotal = field(default_factory=SteadyTotal)
    is_refusal_counted: bool = False
    #: Descendants that hold GPUs themselves, at the last tick.
    apart: dict[tuple[int, int], _Used] = field(default_factory=dict)
    #: The last of those that do not any more.
    gone_ticks: int = 0
    gone_read_bytes: int = 0
    gone_written_bytes: int = 0


@dataclass(slots=True)
class _Missing:
    """A process that the driver lists and /proc does not."""

    listed_s: float
    is_counted: bool = False


class ProcessesSampler:
    """Samples the processes that the driver lists."""

    name = "processes"
    period_s = 5.0

    def __init__(
        self, proc_root: Path, gpus: Callable[[], Sequence[RosterGpu]], *, look_at_programs: bool = True
    ) -> None:
        """Ask `gpus` for the roster at each tick; with `look_at_programs` off, cmdline and comm are never opened."""
        self._errors: Counter[str] = Counter()
        self._files = ProcessFiles(proc_root)
        self._gpus = gpus
        self._tree = ProcessTree(self._files, self._errors)
        self._programs = ProgramReader(self._files, self._errors) if look_at_programs else None
        self._known: dict[tuple[int, int], _Known] = {}
        #: Start of the process by id, and the time of the driver's list that it was taken for.
        self._taken: dict[int, tuple[int, float]] = {}
        self._missing: dict[int, _Missing] = {}
        self._declared: Mapping[int, str] = {}

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings.

        `invisible`: the driver lists the process, /proc hides it (hidepid, another PID namespace); once a process.
        `no_permission`: its I/O or its command line may not be read; the I/O once a process.
        `too_many`: lists that were cut. `malformed`: files that make no sense. `unreadable`: any other failure.
        """
        return self._errors

    def probe(self) -> bool:
        """Return whether there is a process file system."""
        return self._files.is_there()

    def sample(self, now: Instant) -> tuple[ProcessSample, ...]:
        """Return one record for each process that holds a GPU; one that ended in between has none."""
        if not self._files.is_there():
            raise SourceUnavailableError("absent", "there is no process file system")
        listed = self._listed()
        self._tree.begin(now.monotonic_s)
        if self._programs:
            self._programs.begin()
        stats = [stat for pid, listed_s in listed.items() if (stat := self._stat(pid, listed_s)) is not None]
        self._missing = {pid: missing for pid, missing in self._missing.items() if pid in listed}
        self._taken = {pid: taken for pid, taken in self._taken.items() if pid in listed}
        for stat in stats:
            self._known.setdefault(stat.identity, _Known(now.monotonic_s)).met_s = now.monotonic_s
        # Parents before their children: what moves from a child to its parent meanwhile must not count twice.
        used = {stat.pid: (stat.identity, self._used(stat)) for stat in stats}
        records = tuple(self._record(stat, now, used) for stat in stats)
        self._declared = {record.pid: record.declared_class for record in records if record.declared_class}
        self._known = {
            identity: known for identity, known in self._known.items() if now.monotonic_s - known.met_s <= _MEMORY_S
        }
        return records

    def declared(self, pid: int) -> str | None:
        """Return the class that the program of a process declares, as of the last tick; other threads may ask."""
        return self._declared.get(pid)

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def _listed(self) -> dict[int, float]:
        """Return the processes that hold GPUs, each with the time of the newest list that names it."""
        found: dict[int, float] = {}
        for gpu in self._gpus():
            for process in gpu.processes or ():
                found[process.pid] = max(gpu.processes_s or 0.0, found.get(process.pid, 0.0))
        if len(found) > _PROCESSES_MAX:
            self._errors["too_many"] += 1
        return dict(sorted(found.items())[:_PROCESSES_MAX])

    def _stat(self, pid: int, listed_s: float) -> ProcessStat | None:
        try:
            stat = self._files.stat(pid)
        except (FileNotFoundError, ProcessLookupError):
            # It ended, and the driver's next list will not name it; or it is hidden, and that list names it again.
            missing = self._missing.setdefault(pid, _Missing(listed_s))
            if listed_s > missing.listed_s:
                self._count_invisible(missing)
            return None
        except PermissionError:
            self._count_invisible(self._missing.setdefault(pid, _Missing(listed_s)))
            return None
        except OSError:
            self._errors["unreadable"] += 1
            return None
        self._missing.pop(pid, None)
        if stat is None:
            self._errors["malformed"] += 1
            return None
        start_ticks, taken_s = self._taken.get(pid, (stat.start_ticks, listed_s))
        if start_ticks != stat.start_ticks and taken_s >= listed_s:
            return None  # the id was given again since the driver made this list
        self._taken[pid] = stat.start_ticks, listed_s
        return stat

    def _count_invisible(self, missing: _Missing) -> None:
        if not missing.is_counted:
            missing.is_counted = True
            self._errors["invisible"] += 1

    def _used(self, stat: ProcessStat) -> _Used:
        known = self._known[stat.identity]
        try:
            return _Used(stat.ticks, self._files.io(stat.pid))
        except PermissionError:
            if not known.is_refusal_counted:
                known.is_refusal_counted = True
                self._errors["no_permission"] += 1
        except OSError:  # it ended, or the kernel keeps no such accounts
            pass
        return _Used(stat.ticks)

    def _record(
        self, stat: ProcessStat, now: Instant, used: Mapping[int, tuple[tuple[int, int], _Used]]
    ) -> ProcessSample:
        known = self._known[stat.identity]
        descendants, apart, is_whole = self._tree.descendants(stat, used)
        self._set_apart(known, dict(used[pid] for pid in apart))
        waited_ticks = stat.waited_ticks + sum(child.ticks for child in descendants) - known.gone_ticks
        accounts = [used[stat.pid][1].io, *(self._io(child) for child in descendants)]
        readable = [io for io in accounts if io is not None]
        words = self._programs.words(stat, now.monotonic_s) if self._programs else ProgramWords()
        read_bytes = written_bytes = waited_seconds = None
        if is_whole:  # a cut list is not the same one each time, and a sum over it means nothing
            waited_seconds = known.waited.update(waited_ticks) / TICKS_PER_SECOND
            if readable:
                read_bytes = known.read_bytes.update(sum(io.read_bytes for io in readable) - known.gone_read_bytes)
                written = sum(io.written_bytes for io in readable) - known.gone_written_bytes
                written_bytes = known.written_bytes.update(written)
        return ProcessSample(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            pid=stat.pid,
            started_monotonic_s=stat.start_ticks / TICKS_PER_SECOND,
            state=stat.state,
            cpu_seconds_total=stat.own_ticks / TICKS_PER_SECOND,
            descendants_cpu_seconds_total=waited_seconds,
            threads=stat.threads,
            resident_bytes=stat.resident_pages * PAGE_BYTES,
            descendants=len(descendants),
            blocked=sum(process.state == "D" for process in (stat, *descendants)),
            read_bytes_total=read_bytes,
            written_bytes_total=written_bytes,
            program=words.family,
            declared_class=words.declared_class,
        )

    def _io(self, child: ProcessStat) -> ProcessIo | None:
        try:
            return self._files.io(child.pid)
        except OSError:
            return None

    @staticmethod
    def _set_apart(known: _Known, apart: dict[tuple[int, int], _Used]) -> None:
        """Take note of the descendants that count for themselves, and of those that did.

        What such a one used is in its ancestor's sums once that has waited for it; where nobody did, the sums are too
        low by as much, which they get over as they do with every child that is lost.
        """
        for identity, used in known.apart.items():
            if identity not in apart:
                known.gone_ticks += used.ticks
                if used.io is not None:
                    known.gone_read_bytes += used.io.read_bytes
                    known.gone_written_bytes += used.io.written_bytes
        known.apart = apart
