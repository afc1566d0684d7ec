"""Runs every sampler at its period, each in a thread of its own, and keeps how each of them fares.

APScheduler owns the periodic jobs. It computes deadlines on the wall clock and sleeps until the next one, so that a
wall clock set back an hour would silence it for an hour; `ClockGuard` notices, and the jobs get a new scheduler. A job
only hands its work to a daemon thread that belongs to the source: a driver call that never returns costs that source
alone, and cannot hold up the end of the process either, as a thread of concurrent.futures would.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, Protocol

from agent.clock import Clock, Instant, stopwatch
from agent.records import Tick
from agent.samplers import Sampler, SamplerStatus, SourceUnavailableError
from agent.schedule_engine import ApschedulerEngine, Bell, PeriodicCall

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Tunables of the schedule."""

    #: Seconds between two looks at the clocks; not above the shortest period, or a step may lose more than two ticks.
    guard_period_s: float = 0.5
    #: Seconds by which wall and monotonic clock may part, and by which a wait may run over, before it is acted upon.
    clock_tolerance_s: float = 1.0
    #: Seconds until an absent source is probed again: the first time, doubled after each, up to the second value. A
    #: probe falls on a tick of the sampler, so that it waits for one period at least.
    probe_first_s: float = 1.0
    probe_max_s: float = 30.0
    #: Periods after which a last success no longer counts as success.
    stale_periods: float = 3.0
    #: Seconds without a failure (or three periods, if longer) after which a fault is logged as over.
    fault_quiet_s: float = 10.0


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


class _Faults:
    """Decides what is worth a line in the log: the start of a fault, a new kind of failure within it, and its end."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._kinds: set[str] = set()
        self._first_s = 0.0
        self._last_s = 0.0
        self.failures = 0

    def failed(self, kind: str, now_s: float) -> bool:
        """Take a failure; return whether its kind is the first of this fault."""
        if not self._kinds:
            self._first_s, self.failures = now_s, 0
        self.failures += 1
        self._last_s = now_s
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        return is_new

    def succeeded(self, now_s: float) -> float | None:
        """Take a success; return how long the fault lasted where it is over with this, else None."""
        if not self._kinds or now_s - self._last_s < self._quiet_s:
            return None
        self._kinds.clear()
        return self._last_s - self._first_s


class _Job:
    """One periodic piece of work: runs in one thread at a time and never raises."""

    def __init__(self, name: str, period_s: float, clock: Clock, config: ScheduleConfig) -> None:
        self.name = name
        self.period_s = period_s
        self.errors: Counter[str] = Counter()
        self._clock = clock
        self._faults = _Faults(max(config.fault_quiet_s, 3 * period_s))

    def run(self) -> None:
        """Do the work once; count and log what goes wrong."""
        now = self._clock.now()
        try:
            self.work(now)
        except SourceUnavailableError as error:
            self.errors[error.reason] += 1
            self.lost(now)
            if self._faults.failed(error.reason, now.monotonic_s):
                _log.warning("%s cannot be read: %s", self.name, error)
        except Exception as error:  # noqa: BLE001 - the one place that keeps a programming error from ending the agent
            self.errors["exception"] += 1
            if self._faults.failed(type(error).__name__, now.monotonic_s):
                _log.error("%s failed; further failures of this kind are only counted", self.name, exc_info=error)

    def work(self, now: Instant) -> None:
        """Do what this job is for."""
        raise NotImplementedError

    def lost(self, now: Instant) -> None:
        """Note that the source went away."""

    def succeeded(self, now: Instant) -> None:
        """Note a success, and log it where it ends a fault."""
        lasted_s = self._faults.succeeded(now.monotonic_s)
        if lasted_s is not None:
            _log.info("%s works again: %d failures within %.0f s", self.name, self._faults.failures, lasted_s)


class _CallbackJob(_Job):
    """A function of the daemon's."""

    def __init__(
        self, name: str, period_s: float, clock: Clock, config: ScheduleConfig, function: Callable[[], object]
    ) -> None:
        super().__init__(name, period_s, clock, config)
        self._function = function

    def work(self, now: Instant) -> None:
        self._function()
        self.succeeded(now)


class _SamplerJob(_Job):
    """A sampler: probed until its source is here, then sampled; `statuses` of the schedule come from here."""

    def __init__(
        self, sampler: Sampler, clock: Clock, config: ScheduleConfig, deliver: Callable[[Tick], object]
    ) -> None:
        super().__init__(sampler.name, sampler.period_s, clock, config)
        self._sampler = sampler
        self._config = config
        self._deliver = deliver
        self._is_here = False
        self._is_probe_wanted = False
        self._probe_s = clock.now().monotonic_s
        self._wait_s = config.probe_first_s
        self._brought_records = False
        self._duration_s: float | None = None
        self._success: Instant | None = None
        self._errors: Mapping[str, int] = {}

    def probe_soon(self) -> None:
        """Probe with the next tick where the source is absent, and back off from the first wait again."""
        self._is_probe_wanted = True  # no more than a mark: another thread may be in the middle of a run

    def run(self) -> None:
        if self._is_probe_wanted:
            self._is_probe_wanted = False
            self._probe_s, self._wait_s = self._clock.now().monotonic_s, self._config.probe_first_s
        # Half a period of slack: a probe that is due now must not wait for the next tick because this one came early.
        if not self._is_here and self._clock.now().monotonic_s + self.period_s / 2 < self._probe_s:
            return
        started_s = stopwatch()
        before = self._success
        super().run()
        self._duration_s = stopwatch() - started_s
        # Only now, so that a reader in the middle of a run does not take it for a failure.
        self._brought_records = self._success is not before
        # Copied here, in the sampler's own thread: a reader never sees a mapping that changes.
        self._errors = dict(Counter(self._sampler.errors) + self.errors)

    def work(self, now: Instant) -> None:
        if not self._is_here:
            self._postpone_probe(now)
            if not self._sampler.probe():
                if self._faults.failed("absent", now.monotonic_s):
                    _log.info(
                        "%s is not offered here now; looking again every %g s at most",
                        self.name,
                        self._config.probe_max_s,
                    )
                return
        records = tuple(self._sampler.sample(now))
        self._is_here = True
        if records:
            self._wait_s = self._config.probe_first_s
            # Before the delivery, so that what it publishes counts this very run.
            self._success = now
            self._brought_records = True
            self._deliver(Tick(monotonic_s=now.monotonic_s, wall_s=now.wall_s, records=records))
        self.succeeded(now)

    def lost(self, now: Instant) -> None:
        if self._is_here:
            self._is_here = False
            self._postpone_probe(now)

    def _postpone_probe(self, now: Instant) -> None:
        self._probe_s = now.monotonic_s + self._wait_s
        self._wait_s = min(2 * self._wait_s, self._config.probe_max_s)

    def status(self, now: Instant, overruns: int) -> SamplerStatus:
        """Return how this sampler fares; a run that does not end stops being a success after three periods."""
        success = self._success
        errors = dict(self._errors)
        if overruns:
            errors["overrun"] = overruns
        return SamplerStatus(
            name=self.name,
            success=self._brought_records
            and success is not None
            and now.monotonic_s - success.monotonic_s <= self._config.stale_periods * self.period_s,
            duration_s=self._duration_s,
            last_success_wall_s=success.wall_s if success else None,
            errors=errors,
        )

    def close(self) -> None:
        """Close the sampler."""
        self._sampler.close()


class _Worker:
    """The thread of one job; a tick that finds the last one still running is skipped and counted."""

    def __init__(self, job: _Job, clock: Clock) -> None:
        self.job = job
        self.overruns = 0
        self._clock = clock
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._busy_since_s: float | None = None
        self._is_hung = False
        self._thread = threading.Thread(target=self._loop, name=f"warpwatch-{job.name}", daemon=True)

    @property
    def is_idle(self) -> bool:
        """True between two runs."""
        return self._busy_since_s is None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def offer(self) -> None:
        """Have the job run once, unless it still runs; called by the scheduler's thread, returns at once."""
        now_s = self._clock.now().monotonic_s
        busy_since_s = self._busy_since_s
        if busy_since_s is None:
            self._busy_since_s = now_s
            self._orders.put("run")
            return
        self.overruns += 1
        if not self._is_hung and now_s - busy_since_s >= 3 * self.job.period_s:
            self._is_hung = True
            _log.warning("%s has not returned for %.1f s; its ticks are skipped", self.job.name, now_s - busy_since_s)

    def _loop(self) -> None:
        while self._orders.get() == "run":
            self.job.run()
            if self._is_hung:
                self._is_hung = False
                _log.warning("%s has returned; it is sampled again", self.job.name)
            self._busy_since_s = None

    def stop(self) -> None:
        """Have the thread end after the run it is in."""
        self._orders.put("end")

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, if it was ever started; return whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


class Engine(Protocol):
    """What calls the jobs when they are due; it is thrown away and made anew after a clock step."""

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
    start, and then at its period; after a clock step all jobs are due at once.
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
        self._samplers = [_SamplerJob(sampler, clock, self._config, deliver) for sampler in samplers]
        self._workers = [_Worker(job, clock) for job in self._samplers]
        self._bell = Bell()
        self._guard: ClockGuard | None = None
        self._guard_thread = threading.Thread(target=self._watch_clocks, name="warpwatch-clock-guard", daemon=True)

    def every(self, seconds: float, name: str, function: Callable[[], object]) -> None:
        """Have `function` called every `seconds`; before `start` only. What it raises is logged, not passed on."""
        if self._engine is not None:
            raise RuntimeError(f"the schedule has started; {name} comes too late")
        self._workers.append(_Worker(_CallbackJob(name, seconds, self._clock, self._config, function), self._clock))

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
            elif isinstance(worker.job, _SamplerJob):
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
        """Compare the clocks after a wait of `waited_s`, and set the schedule right where one has jumped."""
        if self._guard is None or self._engine is None:
            return
        now = self._clock.now()
        step_s = self._guard.step_s(now)
        gap_s = self._guard.gap_s(now, waited_s)
        if step_s is not None:
            _log.warning("the wall clock was stepped by %+.1f s; the schedule starts anew", step_s)
            self._engine.stop()
            self._engine = self._make_engine(self._calls(), now)
        elif gap_s is not None:
            level = logging.INFO if gap_s >= 60 else logging.DEBUG  # short ones are an overloaded machine's daily life
            _log.log(level, "nothing ran for %.1f s: a suspend or overload; all that is due runs now", gap_s)
            self._engine.wakeup()

    def _calls(self) -> list[PeriodicCall]:
        return [PeriodicCall(worker.job.name, worker.job.period_s, worker.offer) for worker in self._workers]

    def _watch_clocks(self) -> None:
        while not self._bell.wait(self._config.guard_period_s):
            self.check_clocks(self._config.guard_period_s)
