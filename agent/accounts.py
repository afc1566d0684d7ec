"""Accounts: how long each GPU held each label, and the energy it took. They never fall."""

from __future__ import annotations

from typing import Final

import numpy as np

from agent.history import GpuHistory
from agent.vocabulary import WORKLOADS

#: Power is averaged over at least this long, since the slow tick brings energy every 5 s.
_POWER_WINDOW_S: Final = 5.0


class Account:
    """Seconds and joules of one GPU by the label it held; time flows by samples, and a gap in them is unknown."""

    def __init__(self, max_gap_s: float) -> None:
        """Start at 0; two samples further apart than `max_gap_s` have a gap between them."""
        self.seconds = dict.fromkeys(WORKLOADS, 0.0)
        self.energy_joules = dict.fromkeys(WORKLOADS, 0.0)
        self.has_energy = False
        self.workload = "unknown"
        self._max_gap_s = max_gap_s
        self._mark_s: float | None = None  # up to here everything is booked
        self._sample_s: float | None = None  # newest sample that was looked at
        self._is_paused = False

    def pause(self) -> None:
        """Leave out the time until the next call of `book`: there was no such place to work."""
        self._is_paused = True

    def book(self, now_s: float, gpu: GpuHistory, *, is_final: bool = False) -> None:
        """Book the time from the last call to the newest sample, or to `now_s` where that sample is too old.

        A GPU without any sample is booked as unknown from the first call on.
        """
        newest_s = gpu.last_s
        if self._mark_s is None:
            self._mark_s = now_s if gpu.first_s is None else gpu.first_s
        if self._is_paused:
            self._mark_s, self._sample_s, self._is_paused = max(self._mark_s, newest_s or now_s), newest_s, False
        is_fresh = newest_s is not None and now_s - newest_s <= self._max_gap_s
        end_s = newest_s if newest_s is not None and is_fresh and not is_final else now_s
        # A sample may be delivered after a judgement that was later: what is booked stays booked.
        span_s = max(0.0, end_s - self._mark_s)
        covered_s = 0.0 if newest_s is None else self._covered_s(gpu, newest_s, self._mark_s)
        if is_final and newest_s is not None and is_fresh:
            covered_s += now_s - max(newest_s, self._mark_s)
        covered_s = min(covered_s, span_s)
        self.seconds[self.workload] += covered_s
        self.seconds["unknown"] += span_s - covered_s
        self._book_energy(gpu, covered_s)
        self._mark_s += span_s
        self._sample_s = newest_s

    def filled(self, length_s: float) -> dict[str, float]:
        """Return the seconds by label; what is missing to `length_s` in all is added to unknown."""
        missing_s = max(0.0, length_s - sum(self.seconds.values()))
        return self.seconds | {"unknown": self.seconds["unknown"] + missing_s}

    def _covered_s(self, gpu: GpuHistory, newest_s: float, mark_s: float) -> float:
        """Return the time after `mark_s` that lies between samples without a gap."""
        if self._sample_s is None:
            times = gpu.series("samples", newest_s, np.inf).times
            before = times[:-1]
            times = times[1:]
        else:
            times = gpu.series("samples", newest_s, newest_s - self._sample_s).times
            before = np.concatenate(([self._sample_s], times[:-1]))[: times.size]
        steps = times - np.maximum(before, mark_s)
        return float(steps[(times - before <= self._max_gap_s) & (steps > 0)].sum())

    def _book_energy(self, gpu: GpuHistory, covered_s: float) -> None:
        for channel in ("energy_power_watts", "power_watts"):
            if gpu.has(channel):
                self.has_energy = True
                watts = gpu.series(channel, gpu.last_s or 0.0, max(covered_s, _POWER_WINDOW_S)).values
                if watts.size:
                    self.energy_joules[self.workload] += float(watts.mean()) * covered_s
                return
