"""Detectors: one file per anomaly, one protocol, and `registry.py`, which lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from agent.clock import Instant
from agent.history import History
from agent.records import GpuKey
from classifier.results import Assessment, Decision


class Detector(Protocol):
    """One anomaly, or two that are decided together (stalled_collective and collective_wait)."""

    @property
    def anomalies(self) -> tuple[str, ...]:
        """The words of vocabulary.ANOMALIES this detector answers for."""
        ...

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return one assessment for every scope that can be judged now, also where nothing is wrong.

        A scope that cannot be seen (a channel is missing, the data is stale) is left out: absent, never 0. Called
        every few seconds with time that never goes back; state between calls lives in the instance.
        """
        ...


@runtime_checkable
class Learner(Protocol):
    """What a detector (or the baselines) learned slowly and has to know again after a restart of the agent.

    The composition root asks every learner once a minute and at a clean stop, and hands each its own section back at
    the start, before the first sample. Monotonic time does not outlive a boot, so every time in the state is in wall
    clock seconds: `wall_s_of` and `monotonic_s_of` convert.
    """

    @property
    def learner(self) -> str:
        """The key of its section in the state file."""
        ...

    def learned(self, now: Instant) -> Mapping[str, object]:
        """Return what was learned: JSON values only, times in wall clock seconds, bounded size."""
        ...

    def restore(self, state: Mapping[str, object], now: Instant) -> None:
        """Take back what `learned` returned; ValueError for what does not fit, and then nothing of it is taken.

        What was learned of processes that are not the same any more (id and start time) is dropped, silently: it may
        show only once the first processes are seen.
        """
        ...


def wall_s_of(monotonic_s: float, now: Instant) -> float:
    """Return a monotonic time as wall clock seconds, by the two clocks' distance now."""
    return now.wall_s + (monotonic_s - now.monotonic_s)


def monotonic_s_of(wall_s: float, now: Instant) -> float:
    """Return wall clock seconds as a monotonic time of this boot, by the two clocks' distance now."""
    return now.monotonic_s + (wall_s - now.wall_s)
