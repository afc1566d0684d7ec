"""Runs every sampler at its period, each in a thread of its own, and keeps how each of them fares.

APScheduler owns the periodic jobs. It computes deadlines on the wall clock and sleeps until the next one, so that a
wall clock set back an hour would silence it for an hour; `ClockGuard` notices, and the jobs get a new scheduler. A job
only hands its work to a daemon thread that belongs to the source: a driver call that never returns costs that source
alone, and cannot hold up the end of the process either, as a thread of concurrent.futures would.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from agent.clock import Clock, Instant, stopwatch
from agent.records import Tick
from agent.samplers import Sampler, SamplerStatus
from agent.schedule_engine import ApschedulerEngine, Bell, PeriodicCall
from agent.schedule_jobs import CallbackJob, JobThread, SamplerJob, ScheduleConfig
from agent.threads import NamedThread

__all__ = ["ClockGuard", "Engine", "Schedule", "ScheduleConfig"]

_log: Final = logging.getLogger(__name__)


class ClockGuard:
    """Notices steps of the wall clock and waits that took too long, from readings of both clocks.

    The monotonic clock goes on in a suspend (see agent.clock), as the wall clock does: a suspend does not part the two,
    but shows as a gap. Steps add up: two of 0.6 s each are one of 1.2 s.
    """

    def __init__(self, now: Instant, *, tolerance_s: float = 1.0) -> None:
        self._tolerance_s = tolerance_s
        self._offset_s = now.wall_s - now.monotonic_s
        self._last_s = now.monotonic_s

    def step_s(self, now: Instant) -> float | None:
        """Return by how many seconds the wall clock has stepped, or None; a step is reported once."""
        offset_s = now.wall_s - now.monotonic_s
        step_s = offset_s - self._offset_s
        if abs(step_s) <= self._tolerance_s:
            return None
        self._offset_s = offset_s
        return step_s

    def gap_s(self, now: Instant, expected_s: float) -> float | None:
        """Return the seconds since the last call where they exceed the `expected_s` that was waited, else None."""
        gap_s, self._last_s = now.monotonic_s - self._last_s, now.monotonic_s
        return gap_s if gap_s > expected_s + self._tolerance_s else None


class Engine(Protocol):
    """What calls the jobs when they are due; it is thrown away and made anew after a clock step, and where it died."""

    @property
    def is_alive(self) -> bool:
        """Whether jobs are called; False after `stop` and where its thread ended by itself."""
        ...

    def wakeup(self) -> None:
        """Look at the clock now instead of at the next deadline."""
        ...

    def stop(self) -> None:
        """Call no job any more."""
        ...


class Schedule:
    """All periodic work of a live agent.

    `deliver` gets one Tick for each run that brought records. It and the functions given to `every` are called from
    the threads of their jobs, at the same time at times: what they share, they lock. A job is called at once at the
    start, unless it is to come after others, and then at its period; after a clock step all begin so anew.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler],
        clock: Clock,
        deliver: Callable[[Tick], object],
        config: ScheduleConfig | None = None,
        *,
        engine: Callable[[Sequence[PeriodicCall], Instant], Engine] = ApschedulerEngine,
    ) -> None:
        self._config = config or ScheduleConfig()
        self._clock = clock
        self._make_engine = engine
        self._engine: Engine | None = None
        self._samplers = [SamplerJob(sampler, clock, self._config, deliver) for sampler in samplers]
        self._workers = [JobThread(job, clock) for job in self._samplers]
        self._after_s: dict[str, float] = {}
        self._bell = Bell()
        self._guard: ClockGuard | None = None
        self._guard_thread = NamedThread("clock-guard", self._watch_clocks)

    def every(self, seconds: float, name: str, function: Callable[[], object], *, after_s: float = 0.0) -> None:
        """Have `function` called every `seconds`; before `start` only. What it raises is logged, not passed on.

        It comes `after_s` later than what is due at the same time: after the samplers, and not in their way.
        """
        if self._engine is not None:
            raise RuntimeError(f"the schedule has started; {name} comes too late")
        job = CallbackJob(name, seconds, self._clock, self._config, function)
        self._workers.append(JobThread(job, self._clock))
        self._after_s[job.name] = after_s

    def start(self) -> None:
        """Start all jobs, and the guard of the clocks; once only."""
        now = self._clock.now()
        # The reference of the guard is taken before the deadlines are set, so that a step in between is seen.
        self._guard = ClockGuard(now, tolerance_s=self._config.clock_tolerance_s)
        for worker in self._workers:
            worker.start()
        self._engine = self._make_engine(self._calls(), now)
        self._guard_thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop all jobs, wait at most `timeout_s` for those that run, and close the samplers that have returned.

        A sampler that hangs is named in the log and left to the end of the process, its handles open.
        """
        deadline_s = stopwatch() + timeout_s
        self._bell.ring()
        if self._engine is not None:
            if self._guard_thread.is_alive():
                self._guard_thread.join(timeout_s)
            self._engine.stop()
            for worker in self._workers:
                worker.stop()
        for worker in self._workers:
            if not worker.join(max(0.0, deadline_s - stopwatch())):
                _log.warning("%s does not return and is left behind", worker.job.name)
            elif isinstance(worker.job, SamplerJob):
                worker.job.close()

    def statuses(self) -> tuple[SamplerStatus, ...]:
        """Return how each sampler fares now, in the order they were given."""
        now = self._clock.now()
        return tuple(
            job.status(now, worker.overruns) for job, worker in zip(self._samplers, self._workers, strict=False)
        )

    def probe_now(self, name: str) -> None:
        """Have an absent source looked for with its sampler's next tick, whatever the back-off; for any thread.

        Nothing happens where there is no sampler of this name or where its source is here.
        """
        for job in self._samplers:
            if job.name == name:
                job.probe_soon()

    def run_once(self) -> None:
        """Run every job once in the calling thread, the samplers first; before `start` only."""
        for worker in self._workers:
            worker.job.run()

    def check_clocks(self, waited_s: float) -> None:
        """Compare the clocks after a wait of `waited_s`; set the schedule right where one jumped or where it died."""
        if self._guard is None or self._engine is None:
            return
        now = self._clock.now()
        step_s = self._guard.step_s(now)
        gap_s = self._guard.gap_s(now, waited_s)
        if step_s is not None:
            _log.warning("the wall clock was stepped by %+.1f s; the schedule starts anew", step_s)
            self._engine.stop()
            self._engine = self._make_engine(self._calls(), now)
        elif not self._engine.is_alive:
            _log.error("the thread that calls the jobs has ended; the schedule starts anew")
            self._engine = self._make_engine(self._calls(), now)
        elif gap_s is not None:
            level = logging.INFO if gap_s >= 60 else logging.DEBUG  # short ones are an overloaded machine's daily life
            _log.log(level, "nothing ran for %.1f s: a suspend or overload; all that is due runs now", gap_s)
            self._engine.wakeup()

    def _calls(self) -> list[PeriodicCall]:
        return [
            PeriodicCall(
                worker.job.name, worker.job.period_s, worker.offer, after_s=self._after_s.get(worker.job.name, 0.0)
            )
            for worker in self._workers
        ]

    def _watch_clocks(self) -> None:
        while not self._bell.wait(self._config.guard_period_s):
            self.check_clocks(self._config.guard_period_s)
