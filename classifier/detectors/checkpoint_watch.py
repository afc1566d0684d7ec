"""A job whose checkpoints are watched: its bursts by source, which source speaks for it, and what it wrote last."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from agent.clock import Instant
from agent.records import GpuKey
from classifier.detectors import wall_s_of
from classifier.detectors.checkpoint_bursts import JOB_SOURCES, Burst, BurstTracker
from classifier.detectors.checkpoint_jobs import JobActivity
from classifier.detectors.checkpoint_streams import NONE, STRONG, WEAK, Stream
from classifier.detectors.checkpoint_work import JobWork
from classifier.results import CheckpointStatus

#: A sign belongs to a burst from this long before its start to this long after it ...
_SIGN_BEFORE_S: Final = 15.0
_SIGN_AFTER_S: Final = 15.0
#: ... and on disks to this long before: a page cache keeps what it is given for up to 30 s (dirty_expire).
_DISK_BEFORE_S: Final = 40.0
#: What leaves the GPUs is a checkpoint where something of the host is written from this long before to this long after.
_WITNESS_AFTER_S: Final = 60.0
#: The source that only shows what leaves the GPUs.
DEVICE: Final = "device_to_host"
#: Bursts of each source whose starts are kept, to tell what came together.
_STARTS: Final = 8
#: How much better another source has to be for it to be used instead.
_SWITCH_SCORE: Final = 0.2
#: Bursts that another source has to have before it speaks for a checkpoint.
_WITNESS_BURSTS: Final = 3


@dataclass(slots=True)
class HostBursts:
    """The bursts of the host, which may be those of any job."""

    trackers: dict[str, BurstTracker]
    #: When the last ones of each source began.
    begun: dict[str, deque[float]] = field(default_factory=dict)


@dataclass(slots=True)
class WatchedJob:
    """What is known of one job."""

    job_key: str
    activity: JobActivity
    work: JobWork
    trackers: dict[str, BurstTracker]
    streams: dict[str, Stream]
    seen_s: float
    is_named: bool = False
    process_ids: frozenset[int] | None = None
    processes_by_gpu: dict[GpuKey, frozenset[int]] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    #: The clock when the burst that goes on began, by source.
    open_clocks: dict[str, float] = field(default_factory=dict)
    source_gaps: dict[str, int] = field(default_factory=dict)
    #: When the last bursts of its own sources began, checkpoints or not.
    begun: dict[str, deque[float]] = field(default_factory=dict)
    chosen: str | None = None
    chosen_s: float = float("-inf")  # when that was decided
    total: int = 0
    last_wall_s: float | None = None
    last_s: float | None = None  # the same in monotonic seconds: a clock may be set meanwhile
    last_bytes: float | None = None
    severity: int = 0

    def count(self, stream: Stream, now: Instant) -> None:
        """Take the newest burst of `stream` for a checkpoint."""
        if stream.last is None:
            return
        self.total += 1
        self.last_s, self.last_wall_s = stream.last.end_s, wall_s_of(stream.last.end_s, now)
        self.last_bytes = stream.last.written_bytes

    def sign(self, burst: Burst, host: HostBursts, *, is_own: bool, sees_all: bool) -> str:
        """Return the sign that a burst bears of this job.

        What its processes write is its own. What leaves its GPUs is a checkpoint where it is written as well, or where
        that could not be seen: else it is offloaded, or handed to a server (reinforcement tuning).
        """
        if is_own and burst.source != DEVICE:
            return STRONG
        if is_own:
            witnesses = (*host.trackers.values(), self.trackers["process"])
            begun = [*host.begun.values(), self.begun.get("process", ())]
            after_s = burst.end_s + _WITNESS_AFTER_S
            is_written = _any_within(burst.start_s - _SIGN_BEFORE_S, after_s, witnesses, begun)
            return STRONG if is_written or not sees_all else NONE
        before_s = burst.start_s - (_DISK_BEFORE_S if burst.source == "disk" else _SIGN_BEFORE_S)
        after_s = burst.start_s + _SIGN_AFTER_S
        if _any_within(before_s, after_s, self.trackers.values(), self.begun.values()):
            return STRONG
        return WEAK if self.activity.dipped(before_s, after_s) else NONE

    def choose(self, now: Instant) -> None:
        """Use the source whose cadence is surest; stay with the one in use while that is about as good."""
        if all(stream.cadence.period_s is None for stream in self.streams.values()):
            self.chosen = None
            return
        known = {
            source: stream.score
            for source, stream in self.streams.items()
            if stream.cadence.is_armed and stream.is_trusted(self.chance(stream.source, now))
        }
        best = max(known, key=lambda source: known[source], default=None)
        if self.chosen in known and best is not None and known[best] <= known[self.chosen] + _SWITCH_SCORE:
            return
        self.chosen = best
        if best is not None and self.streams[best].count > self.total:
            self.total = self.streams[best].count - 1
            self.count(self.streams[best], now)

    def chance(self, source: str, now: Instant) -> float:
        """Return how likely a burst of `source` falls together with a pause of the job by chance."""
        if source in JOB_SOURCES:
            return 0.0
        before_s = _DISK_BEFORE_S if source == "disk" else _SIGN_BEFORE_S
        return self.activity.dip_chance(_SIGN_AFTER_S, before_s, now.monotonic_s)

    def is_in_progress(self, stream: Stream, tracker: BurstTracker) -> bool:
        """Return whether a burst of `stream` goes on that may be a checkpoint."""
        return stream.source in self.open_clocks and tracker.open_since_s is not None

    def is_written(self, stream: Stream, now: Instant) -> bool:
        """Return whether another source of the job shows the checkpoint that is due."""
        expected_s = stream.cadence.expected_s
        return expected_s is not None and any(
            other.last_clock_s is not None
            and other.last_clock_s >= expected_s - stream.cadence.tolerance_s
            and other.count >= _WITNESS_BURSTS
            and other.is_trusted(self.chance(other.source, now))
            for other in self.streams.values()
            if other is not stream
        )

    def status(self, now: Instant | None) -> CheckpointStatus:
        """Return what is known of its checkpoints."""
        stream = self.streams[self.chosen or ""]
        deadline_s = stream.cadence.deadline_s
        wall_s = None if now is None or deadline_s is None else now.wall_s
        return CheckpointStatus(
            job_key=self.job_key,
            last_wall_s=self.last_wall_s,
            deadline_wall_s=(
                None if wall_s is None or deadline_s is None else wall_s + deadline_s - self.activity.clock_s
            ),
            interval_s=stream.cadence.period_s,
            last_size_bytes=self.last_bytes,
            total=self.total,
        )


def note_begun(begun: dict[str, deque[float]], burst: Burst) -> None:
    """Remember when a burst that is over began."""
    begun.setdefault(burst.source, deque(maxlen=_STARTS)).append(burst.start_s)


def _any_within(
    from_s: float, until_s: float, trackers: Iterable[BurstTracker], begun: Iterable[Iterable[float]]
) -> bool:
    """Return whether a burst began between the two, one that goes on or one that is over."""
    starts = [start_s for tracker in trackers if (start_s := tracker.open_since_s) is not None]
    return any(from_s <= start_s <= until_s for start_s in (*starts, *itertools.chain.from_iterable(begun)))
