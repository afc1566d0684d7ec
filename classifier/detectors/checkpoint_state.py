"""What is remembered of a job's checkpoints over a restart of the agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.clock import Instant
from classifier.detectors.checkpoint_bursts import HOST_SOURCES, JOB_SOURCES
from classifier.detectors.checkpoint_streams import ALL, REMEMBERED, STRONG, Stream
from classifier.detectors.restored import as_number, number, numbers, optional

#: How long a cadence waits for the processes of its job to show.
_PATIENCE_S: Final = 120.0
#: Without processes that can be looked at, a cadence of a named job holds over a pause of this length.
_NAMED_GAP_S: Final = 900.0
#: Start times are whole clock ticks, and clocks are slewed.
_SAME_START_S: Final = 1.0
_LONGEST_NAME: Final = 256
_PROCESSES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJob:
    """The cadence of one job, as it was; `state` is what it was read from."""

    state: Mapping[str, object]
    until_s: float  # monotonic: it is dropped then
    age_s: float
    processes: Mapping[int, float]  # id and start, wall clock
    source: str
    intervals: list[float]
    sizes: list[float]
    lengths: list[float]
    total: int
    last_wall_s: float | None
    last_bytes: float | None

    def is_of(self, starts: Mapping[int, float], *, is_named: bool) -> bool:
        """Return whether a job with these processes (id and start, wall clock) is the same.

        Where none of them can be looked at, the key of a job that has one of its own is enough for a short pause.
        """
        if not starts:
            return is_named and self.age_s <= _NAMED_GAP_S
        return any(abs(starts[pid] - self.processes.get(pid, -1.0)) <= _SAME_START_S for pid in starts)

    def give(self, stream: Stream, clock_s: float) -> None:
        """Let `stream` know what was learned."""
        stream.cadence.restore(self.intervals, clock_s)
        stream.sizes.extend(self.sizes)
        stream.lengths.extend(self.lengths)
        stream.signs.extend([STRONG] * len(self.sizes))
        stream.count = self.total


def saved_jobs(state: Mapping[str, object], now: Instant, most: int) -> dict[str, SavedJob]:
    """Return the jobs of a section of the state file by key; ValueError where it does not fit."""
    jobs = state.get("jobs")
    if not isinstance(jobs, Mapping) or len(jobs) > 2 * most:
        raise ValueError("jobs is no short table")
    found = {}
    for key, section in jobs.items():
        if not isinstance(key, str) or len(key) > _LONGEST_NAME or not isinstance(section, Mapping):
            raise ValueError("a job has no table")
        found[key] = _saved(section, now)
    return found


def _saved(section: Mapping[str, object], now: Instant) -> SavedJob:
    source = section.get("source")
    if source not in {*HOST_SOURCES, *JOB_SOURCES, *(one + ALL for one in HOST_SOURCES)}:
        raise ValueError("source is none that is known")
    rows = {name: numbers(section, name) for name in ("intervals", "sizes", "lengths")}
    if any(len(row) > REMEMBERED or any(value <= 0 for value in row) for row in rows.values()):
        raise ValueError("intervals, sizes and lengths are short lists of numbers above 0")
    total = number(section, "total")
    if total < 0:
        raise ValueError("total is below 0")
    return SavedJob(
        state=section,
        until_s=now.monotonic_s + _PATIENCE_S,
        age_s=max(0.0, now.wall_s - number(section, "seen")),
        processes=_processes(section.get("processes")),
        source=str(source),
        **rows,
        total=int(total),
        last_wall_s=optional(section, "last"),
        last_bytes=optional(section, "last_bytes"),
    )


def _processes(pairs: object) -> dict[int, float]:
    if not isinstance(pairs, list) or len(pairs) > _PROCESSES:
        raise ValueError("processes is no short list")
    found = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("a process is no pair of id and start")
        pid, start_s = (as_number(value, "processes") for value in pair)
        found[int(pid)] = start_s
    return found
