"""What each process used of a GPU since the slow tick before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from agent.clock import Instant, SystemClock
from agent.records import GpuProcess
from agent.samplers import nvml_binding as nvml
from agent.samplers.nvml_calls import Calls

#: What is older says nothing about now; it is the first answer's window too.
_WINDOW_S: Final = 15.0
#: The driver stamps its samples by the wall clock; those from before a step back lie in the future.
_AHEAD_S: Final = 1.0


def _wall_seconds() -> float:
    return SystemClock().now().wall_s


class ProcessUses:
    """The process utilisation of one GPU. Used by one thread at a time."""

    def __init__(self, calls: Calls, wall_seconds: Callable[[], float] = _wall_seconds) -> None:
        """Read through `calls`; `wall_seconds` is the clock by which the driver stamps its samples."""
        self._calls = calls
        self._wall_seconds = wall_seconds
        self._samples = nvml.ProcessSamples()
        self._last_s = float("-inf")

    def of(self, processes: tuple[GpuProcess, ...] | None, now: Instant) -> tuple[GpuProcess, ...] | None:
        """Return the processes with the newest sample of each since the last call, as they came where none is offered.

        The driver has samples of those alone that used something: of the others the use is 0. GPUs without a process
        are not asked.
        """
        window_s = min(now.monotonic_s - self._last_s, _WINDOW_S)
        self._last_s = now.monotonic_s
        if not processes:
            return processes
        wall_s = self._wall_seconds()
        since_us = max(0, round((wall_s - window_s) * 1e6))
        samples = self._calls.read("process utilization", partial(self._samples.read, since_us=since_us))
        if samples is None:
            return processes
        until_us = (wall_s + _AHEAD_S) * 1e6
        # Not every driver heeds the moment it is asked for.
        newest = {
            sample.pid: sample
            for sample in sorted(samples, key=lambda sample: sample.time_us)
            if since_us < sample.time_us <= until_us
        }
        return tuple(self._with_use(process, newest.get(process.pid)) for process in processes)

    def _with_use(self, process: GpuProcess, sample: nvml.ProcessUse | None) -> GpuProcess:
        if sample is None:
            return process._replace(sm_utilization_ratio=0.0, memory_utilization_ratio=0.0)
        return process._replace(
            sm_utilization_ratio=self._calls.percent(sample.sm),
            memory_utilization_ratio=self._calls.percent(sample.memory),
        )
