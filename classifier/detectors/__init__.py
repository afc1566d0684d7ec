"""Detectors: one file per anomaly, one protocol, and `registry.py`, which lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

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
