"""A node whose GPUs train with visible steps: each step is a stretch of work and a short notch, as in an all-reduce."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agent.clock import Instant
from agent.history import History
from agent.records import GpuFastPower, GpuKey, GpuProcess, GpuSample, GpuSlowSample, Record, Tick

WALL_S = 1_700_000_000.0


@dataclass(frozen=True)
class Pacing:
    """How a GPU trains at one moment: the time of a step, and its work against a usual step."""

    step_s: float | None = 1.0  # None: no steps, steady power
    work: float = 1.0
    pids: tuple[int, ...] = (101,)


@dataclass
class PacedNode:
    """A node of GPUs that step together; plays a second at a time, with power ten times a second where `fast`."""

    pacing: Callable[[float], Pacing]
    gpus: int = 1
    fast: bool = True
    #: What is not measured: names of GpuSample.
    without: tuple[str, ...] = ()
    interval_s: float = 1.0
    #: A step of this length shows the usual activity; a longer one with the same work shows less.
    usual_s: float = 1.0
    jitter: random.Random = field(default_factory=lambda: random.Random(1))
    history: History = field(default_factory=History)
    now_s: float = 0.0
    _phase: float = 0.0
    _stretch: float = 1.0

    def key(self, gpu: int) -> GpuKey:
        return GpuKey(gpu, f"GPU-{gpu:08d}")

    def play(self, until_s: float, judge_s: float = 5.0) -> Iterator[Instant]:
        """Yield every `judge_s` seconds, after the samples until then."""
        next_s = self.now_s + judge_s
        while self.now_s < until_s:
            seconds = round(self.interval_s)
            watts = [self._watts() for _ in range(10 * seconds)]
            now = Instant(self.now_s, WALL_S + self.now_s)
            records = tuple(self._records(now, watts))
            self.history.ingest(Tick(monotonic_s=now.monotonic_s, wall_s=now.wall_s, records=records))
            if self.now_s >= next_s:
                next_s += judge_s
                yield now

    def _watts(self) -> float:
        """Return the power of the next tenth of a second."""
        self.now_s = round(self.now_s + 0.1, 1)
        step_s = self.pacing(self.now_s).step_s
        if step_s is None:
            return 600.0 + self.jitter.gauss(0, 3)
        self._phase += 0.1 / (step_s * self._stretch)
        if self._phase >= 1.0:
            self._phase -= 1.0
            self._stretch = self.jitter.gauss(1.0, 0.01)  # steps of one job differ by 1 to 3 % (SIGNALS 2.5)
        return (620.0 if self._phase < 0.75 else 420.0) + self.jitter.gauss(0, 3)

    def _records(self, now: Instant, watts: list[float]) -> Iterator[Record]:
        pacing = self.pacing(self.now_s)
        at = {"monotonic_s": now.monotonic_s, "wall_s": now.wall_s}
        rate = 0.0 if pacing.step_s is None else pacing.work * self.usual_s / pacing.step_s
        for gpu in range(self.gpus):
            key = self.key(gpu)
            values = {
                "utilization_ratio": 1.0,
                "memory_utilization_ratio": 0.4 * rate,
                "power_watts": sum(watts[-10:]) / 10,
                "sm_clock_hertz": 1.9e9,
                "memory_clock_hertz": 2.6e9,
                "tensor_active_ratio": 0.4 * rate,
                "nvlink_transmit_bytes_per_second": 20e9 * rate,
            }
            yield GpuSample(**at, key=key, **{k: v for k, v in values.items() if k not in self.without})
            if self.fast:
                ages = tuple(round(0.1 * (9 - n), 1) for n in range(10))
                yield GpuFastPower(**at, key=key, power_watts=tuple(watts[-10:]), ages_s=ages)
            if round(self.now_s) % 5 == 0:
                yield GpuSlowSample(**at, key=key, processes=tuple(GpuProcess(pid) for pid in pacing.pids))
