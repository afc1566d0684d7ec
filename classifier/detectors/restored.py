"""What learners share: how GPUs and processes stand in the state file, and the wait until they are seen again.

What was learned of a program holds for its processes only: the same id and the same start. After a restart of the agent
a GPU's processes show within seconds; until then its section waits here, and with others it is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from agent.clock import Instant
from agent.history import GpuHistory
from agent.records import GpuKey
from classifier.detectors import monotonic_s_of, wall_s_of

#: What was learned of a program is dropped where the agent saw nothing of it for longer than this.
LONGEST_GAP_S: Final = 900.0
#: How long a section waits for the processes of its GPU to show.
_PATIENCE_S: Final = 120.0
#: Start times are whole clock ticks, and clocks are slewed.
_SAME_START_S: Final = 1.0
#: Most GPUs, processes and numbers that are taken from a file.
_GPUS: Final = 256
_PROCESSES: Final = 64
_NUMBERS: Final = 512

T = TypeVar("T")


def gpu_text(key: GpuKey) -> str | None:
    """Return how a GPU or instance is called in the state file; None where it has no UUID, no name that lasts."""
    if key.uuid is None:
        return None
    return key.uuid if key.gpu_i_id is None else f"{key.uuid}/{key.gpu_i_id}"


def processes_state(starts: Mapping[int, float], now: Instant) -> list[list[float]]:
    """Return id and start (wall clock seconds) of each of these processes: "processes" of a GPU's section."""
    return [[pid, wall_s_of(start_s, now)] for pid, start_s in sorted(starts.items())[:_PROCESSES]]


def process_starts(gpu: GpuHistory) -> Mapping[int, float]:
    """Return the start (monotonic seconds) of each process on the GPU that can be looked at, by its id."""
    mine = {process.pid for process in gpu.processes or ()}
    return {
        sample.pid: sample.started_monotonic_s
        for sample in gpu.process_samples
        if sample.pid in mine and sample.started_monotonic_s is not None
    }


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    value: T
    state: Mapping[str, object]
    processes: Mapping[int, float]  # id: start, monotonic seconds of this boot


class Pending(Generic[T]):
    """Sections of GPUs that wait for the same processes to show."""

    def __init__(self, now: Instant, gap_s: float = LONGEST_GAP_S) -> None:
        self._restored = now
        self._gap_s = gap_s
        self._waiting: dict[str, _Waiting[T]] = {}

    def put(self, name: str, state: Mapping[str, object], value: T, seen_wall_s: float) -> None:
        """Have `value`, made of `state`, wait for the processes that `state` names; not where they are none or old."""
        processes = {pid: monotonic_s_of(start_s, self._restored) for pid, start_s in _processes(state)}
        if processes and 0.0 <= self._restored.wall_s - seen_wall_s <= self._gap_s:
            self._waiting[name] = _Waiting(value, state, processes)

    def states(self, now: Instant) -> Mapping[str, Mapping[str, object]]:
        """Return what waits, as it was given: a restart soon after a restart loses nothing."""
        self._forget_old(now)
        return {name: waiting.state for name, waiting in self._waiting.items()}

    def take(self, gpu: GpuHistory, now: Instant) -> T | None:
        """Return what waits for this GPU once its processes are known to be the same; it waits no more then.

        It is dropped where all of them are known to be others, or where none shows within two minutes.
        """
        if not self._waiting:
            return None
        self._forget_old(now)
        name = gpu_text(gpu.key)
        waiting = None if name is None else self._waiting.get(name)
        if name is None or waiting is None or gpu.processes is None:
            return None
        starts = process_starts(gpu)
        for pid, start_s in starts.items():
            before_s = waiting.processes.get(pid)
            if before_s is not None and abs(start_s - before_s) <= _SAME_START_S:
                del self._waiting[name]
                return waiting.value
        if all(process.pid in starts or process.pid not in waiting.processes for process in gpu.processes):
            del self._waiting[name]
        return None

    def waits_for(self, gpu: GpuHistory) -> bool:
        """Return whether something may still be taken for this GPU."""
        return bool(self._waiting) and gpu_text(gpu.key) in self._waiting

    def _forget_old(self, now: Instant) -> None:
        if now.monotonic_s - self._restored.monotonic_s > _PATIENCE_S:
            self._waiting.clear()


def gpu_states(state: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield name and section of each GPU of a learner's section; ValueError where it is none."""
    gpus = state.get("gpus")
    if not isinstance(gpus, Mapping) or len(gpus) > _GPUS:
        raise ValueError(f"gpus is no table of at most {_GPUS} GPUs")
    for name, section in gpus.items():
        if not isinstance(name, str) or len(name) > 128 or not isinstance(section, Mapping):
            raise ValueError("a GPU has no table")
        yield name, section


def _processes(state: Mapping[str, object]) -> Iterator[tuple[int, float]]:
    pairs = state.get("processes")
    if not isinstance(pairs, list) or len(pairs) > _PROCESSES:
        raise ValueError("processes is no short list")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("a process is no pair of id and start")
        pid, start_s = (as_number(value, "processes") for value in pair)
        yield int(pid), start_s


def as_number(value: object, name: str) -> float:
    """Return a finite number; ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e15 or not math.isfinite(value):
        raise ValueError(f"{name} is no number")
    return float(value)


def number(state: Mapping[str, object], name: str) -> float:
    """Return the number of this name; ValueError where there is none."""
    return as_number(state.get(name), name)


def optional(state: Mapping[str, object], name: str) -> float | None:
    """Return the number of this name, None where there is none; ValueError where it is something else."""
    value = state.get(name)
    return None if value is None else as_number(value, name)


def flag(state: Mapping[str, object], name: str) -> bool:
    """Return the truth value of this name; ValueError where it is something else."""
    value = state.get(name)
    if value is True or value is False:
        return value
    raise ValueError(f"{name} is neither true nor false")


def numbers(state: Mapping[str, object], name: str) -> list[float]:
    """Return the list of numbers of this name; ValueError where it is none, or long."""
    values = state.get(name)
    if not isinstance(values, list) or len(values) > _NUMBERS:
        raise ValueError(f"{name} is no list of at most {_NUMBERS} numbers")
    return [as_number(value, name) for value in values]


def table(state: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return the table of this name; ValueError where there is none."""
    value = state.get(name)
    if isinstance(value, Mapping):
        return value
    raise ValueError(f"{name} is no table")
