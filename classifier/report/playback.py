"""Decisions over time: whole runs through the history and the labeller of a live node, seen through one profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from agent.clock import Instant
from agent.history import GPU_CHANNELS, HOST_CHANNELS, History
from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuFastPower,
    GpuLimits,
    GpuOwners,
    GpuSample,
    GpuSlowSample,
    InfinibandSample,
    NetworkSample,
    PressureSample,
    ProcessSample,
    Record,
    Tick,
)
from agent.vocabulary import CLASSES
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.model import Model
from classifier.profiles import POWER_LIMIT, PROFILES
from classifier.report.metrics import count_flips, time_to_label
from classifier.simulator import SimulatedRun
from classifier.simulator.recorder import ticks

#: Seconds between two decisions, as live.
STEP_S: Final = 5.0
#: Channels whose name is not made from the record's field by the rule of `_channel_of`.
_NAMES: Final = {"energy_joules_total": "energy_power_watts", "processes": "process_count"}
#: Records that hold one thing, by a channel that stands for all of them.
_WHOLE: Final[dict[type[Record], str]] = {
    GpuLimits: POWER_LIMIT,
    GpuFastPower: "power_fast_watts",
    NetworkSample: "network_transmit_bytes_per_second",
    InfinibandSample: "infiniband_transmit_bytes_per_second",
    DiskSample: "disk_read_bytes_per_second",
    FilesystemSample: "filesystem_read_bytes_per_second",
    PressureSample: "cpu_pressure_ratio",
    ProcessSample: "process_cpu_ratio",
    GpuOwners: "process_count",
}
_CHANNELS: Final = frozenset({*GPU_CHANNELS, *HOST_CHANNELS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The decisions of one GPU over one run."""

    group: int  # of the run
    gpu: int
    family: str
    times: tuple[float, ...]
    words: tuple[str, ...]
    truths: tuple[str | None, ...]  # class that is true at each time; None between classes
    starts: tuple[tuple[float, str], ...]  # start and class of each phase whose start the trace shows

    @property
    def hours(self) -> float:
        """Length in hours."""
        return (self.times[-1] - self.times[0] + STEP_S) / 3600 if self.times else 0.0

    @property
    def flips(self) -> int:
        """Changes of word within stretches of one truth."""
        total, first = 0, 0
        for position in range(1, len(self.truths) + 1):
            if position == len(self.truths) or self.truths[position] != self.truths[first]:
                total += count_flips(self.words[first:position])
                first = position
        return total

    @property
    def delays(self) -> list[float | None]:
        """Return, per busy phase whose start shows, the seconds to the right word; None where it did not come."""
        return [
            time_to_label(self.times, self._until(start_s), start_s, label)
            for start_s, label in self.starts
            if label != "idle"
        ]

    def _until(self, start_s: float) -> list[str]:
        """Return the words, emptied after the phase that starts at `start_s` ended."""
        later = [other for other, _ in self.starts if other > start_s]
        end_s = min(later, default=np.inf)
        return [word if time_s < end_s else "" for time_s, word in zip(self.times, self.words, strict=True)]


def through(profile: str, recorded: Iterable[Tick]) -> Iterator[Tick]:
    """Yield the ticks with only what the channels of `profile` show."""
    channels = PROFILES[profile]
    for tick in recorded:
        records = [_through(channels, record) for record in tick.records]
        yield replace(tick, records=tuple(record for record in records if record is not None))


def _through(channels: frozenset[str], record: Record) -> Record | None:
    stands_for = _WHOLE.get(type(record))
    if stands_for is not None:
        return record if stands_for in channels else None
    if not isinstance(record, GpuSample | GpuSlowSample):
        return record
    dropped: dict[str, Any] = {
        one.name: None
        for one in fields(record)
        if (name := _channel_of(one.name)) in _CHANNELS
        and name not in channels
        and getattr(record, one.name) is not None
    }
    return replace(record, **dropped) if dropped else record


def _channel_of(field: str) -> str:
    found = _NAMES.get(field, field)
    return found.removesuffix("_total") + "_per_second" if found.endswith("_bytes_total") else found


def play(
    model: Model | None, run: SimulatedRun, profile: str, *, group: int, gap: tuple[float, float] | None = None
) -> list[Track]:
    """Return the decisions on every GPU of `run` each 5 s, from what `profile` shows.

    Within `gap` (start and end in seconds) nothing is recorded, as by an agent that is held up.
    """
    history = History(sample_interval_s=run.scenario.interval_s)
    labeller = Labeller(model, LabellerConfig())
    times: list[float] = []
    words: dict[int, list[str]] = {}
    due_s = 0.0
    for tick in through(profile, ticks(run)):
        if gap is None or not gap[0] <= tick.monotonic_s < gap[1]:
            history.ingest(tick)
        while due_s <= tick.monotonic_s:
            times.append(due_s)
            for decision in labeller.decide(Instant(due_s, due_s), history):
                words.setdefault(decision.key.gpu, []).append(decision.workload)
            due_s += STEP_S
    return [
        Track(
            group=group,
            gpu=gpu,
            family=run.scenario.kind,
            times=tuple(times[-len(mine) :]),
            words=tuple(mine),
            truths=tuple(_truth(run, gpu, time_s) for time_s in times[-len(mine) :]),
            starts=_starts(run, gpu),
        )
        for gpu, mine in sorted(words.items())
    ]


def _truth(run: SimulatedRun, gpu: int, time_s: float) -> str | None:
    for phase in run.phases:
        if phase.gpu in (None, gpu) and phase.start_s <= time_s < phase.end_s:
            return phase.workload if phase.workload in CLASSES else None
    return None


def _starts(run: SimulatedRun, gpu: int) -> tuple[tuple[float, str], ...]:
    """Return where each class begins; what runs from the first second on began only where the run shows its start."""
    found: list[tuple[float, str]] = []
    before: str | None = None
    for phase in run.phases:
        if phase.gpu not in (None, gpu):
            continue
        if phase.workload != before and (phase.start_s > 0 or run.scenario.begin_s == 0):
            found.append((phase.start_s, phase.workload))
        before = phase.workload
    return tuple((start_s, word) for start_s, word in found if word in CLASSES)


def called(tracks: Sequence[Track], word: str, truth: str | None = None) -> tuple[int, int]:
    """Return how many decisions say `word`, and how many there are, where `truth` (or anything) is true."""
    chosen = [
        said
        for track in tracks
        for said, true in zip(track.words, track.truths, strict=True)
        if truth is None or true == truth
    ]
    return sum(said == word for said in chosen), len(chosen)
