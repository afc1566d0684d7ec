"""Who the processes on the GPUs belong to: cgroup, user and name of each, at little cost.

/proc/<pid>/cgroup stays open while the process is on a GPU: an open file belongs to one process for ever, so that a
number that is given out again cannot be taken for the old process. Everything here any user may read, except under
hidepid. A process in a PID namespace that the agent does not see (the agent in a container without the host's) cannot
be found by its number.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agent.owners.cgroups import NOBODY, CgroupOwner, parse_cgroup
from agent.samplers.kernel_file import read_start
from agent.samplers.process_files import parse_stat

_CGROUP_BYTES: Final = 16_384
_STATUS_BYTES: Final = 4096
#: Steps up to the slurmstepd of a process.
_ANCESTORS: Final = 32
#: "slurmstepd: [812345.0]", "[812345.batch]", "[812345+1.0]": slurmstepd names itself so, for people.
_STEP: Final = re.compile(rb"slurmstepd: \[(\d{1,10})(?:[.+][^\]]*)?\]")
_MPS_SERVER: Final = "nvidia-cuda-mps"  # the kernel cuts names to 15 characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesConfig:
    """Bounds of the work on processes."""

    open_files: int = 128
    """Processes whose cgroup file stays open; the rest is opened at each tick."""
    processes: int = 1024
    """Processes looked at in one tick; the rest is counted as processes of nobody that is known."""


class ProcessOwner(NamedTuple):
    """One process that is there; all fields None or empty where it cannot be seen."""

    pid: int
    owner: CgroupOwner | None = None  # None: hidden from the agent
    uid: int | None = None
    start_ticks: int | None = None  # since boot: with the number it names one process for ever
    #: The multi-process service that other processes share a GPU through.
    is_mps_server: bool = False


@dataclass(slots=True)
class _Seen:
    """What is known of one process, and its open file."""

    process: ProcessOwner
    file: int | None = None
    cgroup: bytes = b""


class ProcessOwners:
    """Looks processes up; not to be used by two threads at a time."""

    def __init__(self, proc_root: Path = Path("/proc"), config: ProcessesConfig | None = None) -> None:
        self._proc = proc_root
        self._config = config or ProcessesConfig()
        self._seen: dict[int, _Seen] = {}
        self._ended: set[int] = set()
        self._hidden: set[int] = set()
        self._beyond: set[int] = set()  # the bound
        self._open_files = 0
        #: `hidden_process` and `too_many_processes`, each process once.
        self.errors: Counter[str] = Counter()

    def look_up(self, pids: set[int]) -> dict[int, ProcessOwner]:
        """Return those of `pids` that are there, and as hidden those that were never seen; forgets all others.

        A process that was seen and is gone has ended, although the driver's last list still holds it.
        """
        for pid in tuple(self._seen):
            if pid not in pids:
                self._forget(pid)
        self._ended &= pids
        self._hidden &= pids
        self._beyond &= pids
        found = {}
        for count, pid in enumerate(sorted(pids)):
            if count >= self._config.processes:
                if pid not in self._beyond:
                    self._beyond.add(pid)
                    self.errors["too_many_processes"] += 1
                found[pid] = ProcessOwner(pid)
                continue
            process = self._look_up(pid)
            if process is not None:
                found[pid] = process
        return found

    def close(self) -> None:
        """Close all files; idempotent."""
        for pid in tuple(self._seen):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        seen = self._seen.pop(pid)
        if seen.file is not None:
            os.close(seen.file)
            self._open_files -= 1

    def _look_up(self, pid: int) -> ProcessOwner | None:
        seen = self._seen.get(pid)
        if seen is not None:
            try:
                if seen.file is not None:
                    return self._update(seen, os.pread(seen.file, _CGROUP_BYTES, 0))
                if seen.process.start_ticks == self._start_ticks(pid):
                    return self._update(seen, self._read(pid, "cgroup", _CGROUP_BYTES))
            except OSError:  # ESRCH: it ended, and its number may be another process's by now
                pass
            self._forget(pid)
            self._ended.add(pid)
        try:
            file = os.open(self._proc / str(pid) / "cgroup", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None if pid in self._ended else self._hide(pid)
        try:
            data = os.pread(file, _CGROUP_BYTES, 0)
        except OSError:
            os.close(file)
            return None
        self._ended.discard(pid)
        self._hidden.discard(pid)
        seen = self._seen[pid] = _Seen(ProcessOwner(pid))
        if self._open_files < self._config.open_files:
            seen.file = file
            self._open_files += 1
        else:
            os.close(file)
        return self._update(seen, data)

    def _hide(self, pid: int) -> ProcessOwner:
        if pid not in self._hidden:
            self._hidden.add(pid)
            self.errors["hidden_process"] += 1
        return ProcessOwner(pid)

    def _update(self, seen: _Seen, data: bytes) -> ProcessOwner:
        if data == seen.cgroup:
            return seen.process
        seen.cgroup = data
        owner = parse_cgroup(data.decode("utf-8", "surrogateescape"))
        before = seen.process.owner
        if before is not None and owner == NOBODY:
            return seen.process  # a process that ends is shown at the root of its hierarchy
        process = seen.process
        if before is None:
            name, uid, _ = self._status(process.pid)
            start = self._start_ticks(process.pid)
            process = process._replace(uid=uid, start_ticks=start, is_mps_server=name == _MPS_SERVER)
        if owner.scheduler == "slurm" and not owner.name.isdecimal():
            owner = self._numbered(process.pid, owner)
        seen.process = process._replace(owner=owner, uid=process.uid if owner.uid is None else owner.uid)
        return seen.process

    def _numbered(self, pid: int, owner: CgroupOwner) -> CgroupOwner:
        """Return a job known by its SLUID with its number instead, where the slurmstepd above the process tells it.

        The command line of a slurmstepd of root alone is read: that of a job's own program is private, and could lie.
        """
        _, _, parent = self._status(pid)
        for _ in range(_ANCESTORS):
            if parent <= 1:
                break
            name, uid, above = self._status(parent)
            if name == "slurmstepd" and uid == 0:
                try:
                    step = _STEP.match(self._read(parent, "cmdline", 256))
                except OSError:
                    break
                if step:
                    return owner._replace(name=step[1].decode())
            parent = above
        return owner

    def _start_ticks(self, pid: int) -> int | None:
        """Return when a process started, None where that cannot be read."""
        try:
            stat = parse_stat(pid, self._read(pid, "stat", _STATUS_BYTES))
        except OSError:
            return None
        return stat.start_ticks if stat else None

    def _read(self, pid: int, name: str, most: int) -> bytes:
        return read_start(f"{self._proc}/{pid}/{name}", most)

    def _status(self, pid: int) -> tuple[str, int | None, int]:
        """Return name, real user and parent (0 where not known) of a process."""
        try:
            text = self._read(pid, "status", _STATUS_BYTES).decode("utf-8", "replace")
        except OSError:
            return "", None, 0
        fields = dict(line.split(":\t", 1) for line in text.split("\n") if ":\t" in line)
        uids = fields.get("Uid", "").split()
        parent = fields.get("PPid", "")
        return (
            fields.get("Name", ""),
            int(uids[0]) if uids and uids[0].isdecimal() else None,
            int(parent) if parent.isdecimal() else 0,
        )
