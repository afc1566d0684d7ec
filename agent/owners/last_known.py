"""The processes that a GPU had when the driver last listed them: a GPU that hangs or is lost still has its owner.

The driver lists nothing of such a GPU, but its processes are often there for hours, since they cannot be killed. They
count while /proc shows them with the same start; what ends does not come back, though its number be given again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from agent.clock import Instant
from agent.gpu_roster import RosterGpu
from agent.owners.processes import ProcessOwner
from agent.records import GpuKey

#: Seconds for which a list is remembered that the driver did not renew, before it says that the GPU failed.
_MEMORY_S: Final = 30.0


@dataclass(slots=True)
class _List:
    """Process ids with the start of each, and when it last held."""

    starts: dict[int, int]
    held_s: float


class LastKnown:
    """Remembers the list of each GPU and MIG instance; not to be used by two threads at a time."""

    def __init__(self) -> None:
        self._lists: dict[GpuKey, _List] = {}

    @property
    def pids(self) -> set[int]:
        """All processes that are remembered, so that they are looked up too."""
        return {pid for remembered in self._lists.values() for pid in remembered.starts}

    def keep(self, keys: Collection[GpuKey]) -> None:
        """Forget all GPUs but these."""
        self._lists = {key: remembered for key, remembered in self._lists.items() if key in keys}

    def present(self, gpu: RosterGpu, processes: Mapping[int, ProcessOwner], now: Instant) -> list[ProcessOwner] | None:
        """Return the processes on a GPU that are there, of `processes`; None where they cannot be seen.

        Of a GPU that failed those of its last list, and None when none of them is left: whether others are there,
        nobody can say.
        """
        if gpu.processes is not None:
            found = [processes[process.pid] for process in gpu.processes if process.pid in processes]
            starts = {process.pid: process.start_ticks for process in found if process.start_ticks is not None}
            self._lists[gpu.key] = _List(starts, now.monotonic_s)
            return found
        remembered = self._lists.get(gpu.key)
        if remembered is None:
            return None
        if not gpu.has_failed:
            if now.monotonic_s - remembered.held_s > _MEMORY_S:
                del self._lists[gpu.key]
            return None
        remembered.held_s = now.monotonic_s
        found = [
            process
            for pid, start in remembered.starts.items()
            if (process := processes.get(pid)) is not None and process.start_ticks == start
        ]
        remembered.starts = {process.pid: remembered.starts[process.pid] for process in found}
        return found or None
