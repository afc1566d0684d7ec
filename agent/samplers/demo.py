"""Plays the GPUs of a trace as if they were in this host: only for `run --demo`, and never without saying so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent.clock import Instant
from agent.errors import UsageError
from agent.records import PERIODS_S, Record, Tick

#: A tick that is due so soon is taken now, so that a schedule that is late by some milliseconds at one call and not at
#: the next still gets one tick at each.
EARLY_S: Final = 0.25


class DemoSampler:
    """Loops over a trace in real time; the host records of the trace are left out, since this host has its own.

    Counters start again with each round, as after a driver reload.
    """

    name = "demo"
    period_s = 1.0

    def __init__(self, trace: Iterable[Tick], interval_s: float) -> None:
        """Read a trace into memory; `interval_s` is the usual distance of two ticks.

        Raises UsageError where it holds no GPU.
        """
        self.errors: Mapping[str, int] = {}
        self._ticks = tuple(tick for tick in map(_gpu_tick, trace) if tick.records)
        if not self._ticks:
            raise UsageError("the trace to play holds no sample of a GPU; name another one after --demo")
        self._first_s = self._ticks[0].monotonic_s
        self._length_s = self._ticks[-1].monotonic_s - self._first_s + interval_s
        self._started_s: float | None = None
        self._next = 0
        self._round = 0
        keys = {getattr(record, "key", None) for tick in self._ticks for record in tick.records}
        self.gpu_count = len(keys)

    def probe(self) -> bool:
        """Return True: the trace is in memory."""
        return True

    def sample(self, now: Instant) -> Sequence[Record]:
        """Return the newest record of each kind and GPU since the last call, stamped with the present time."""
        if self._started_s is None:
            self._started_s = now.monotonic_s
        records: dict[tuple[type[Record], object], Record] = {}
        while self._due_s() <= now.monotonic_s + EARLY_S:
            for record in self._ticks[self._next].records:
                records[type(record), getattr(record, "key", None)] = record
            self._next += 1
            if self._next == len(self._ticks):
                self._next, self._round = 0, self._round + 1
        stamp = {"monotonic_s": now.monotonic_s, "wall_s": now.wall_s}
        return tuple(dataclasses.replace(record, **stamp) for record in records.values())

    def _due_s(self) -> float:
        offset_s = self._ticks[self._next].monotonic_s - self._first_s + self._round * self._length_s
        return (self._started_s or 0.0) + offset_s

    def close(self) -> None:
        """Do nothing: the trace is in memory."""


def _gpu_tick(tick: Tick) -> Tick:
    records = tuple(record for record in tick.records if type(record) in PERIODS_S and hasattr(record, "key"))
    return dataclasses.replace(tick, records=records)
