"""The periodic jobs of an agent: what each does, how it fares, and the thread that it runs in."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from agent.clock import Clock, Instant, stopwatch
from agent.records import Tick
from agent.samplers import Sampler, SamplerStatus, SourceUnavailableError
from agent.threads import NamedThread

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


class Faults:
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


class Job:
    """One periodic piece of work: runs in one thread at a time and never raises."""

    def __init__(self, name: str, period_s: float, clock: Clock, config: ScheduleConfig) -> None:
        self.name = name
        self.period_s = period_s
        self.errors: Counter[str] = Counter()
        self._clock = clock
        self._faults = Faults(max(config.fault_quiet_s, 3 * period_s))

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


class CallbackJob(Job):
    """A function of the daemon's."""

    def __init__(
        self, name: str, period_s: float, clock: Clock, config: ScheduleConfig, function: Callable[[], object]
    ) -> None:
        super().__init__(name, period_s, clock, config)
        self._function = function

    def work(self, now: Instant) -> None:
        """Call the function."""
        self._function()
        self.succeeded(now)


class SamplerJob(Job):
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
        self._answered = False
        self._duration_s: float | None = None
        self._success: Instant | None = None
        self._errors: Mapping[str, int] = {}

    def probe_soon(self) -> None:
        """Probe with the next tick where the source is absent, and back off from the first wait again."""
        self._is_probe_wanted = True  # no more than a mark: another thread may be in the middle of a run

    def run(self) -> None:
        """Probe or sample where that is due, and note how it went."""
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
        self._answered = self._success is not before
        # Copied here, in the sampler's own thread: a reader never sees a mapping that changes.
        self._errors = dict(Counter(self._sampler.errors) + self.errors)

    def work(self, now: Instant) -> None:
        """Probe where the source is absent, and sample where it is here."""
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
        self._wait_s = self._config.probe_first_s
        # Before the delivery, so that what it publishes counts this very run.
        self._success = now
        self._answered = True
        if records:
            self._deliver(Tick(monotonic_s=now.monotonic_s, wall_s=now.wall_s, records=records))
        self.succeeded(now)

    def lost(self, now: Instant) -> None:
        """Probe again, after a wait."""
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
            success=self._answered
            and success is not None
            and now.monotonic_s - success.monotonic_s <= self._config.stale_periods * self.period_s,
            duration_s=self._duration_s,
            last_success_wall_s=success.wall_s if success else None,
            errors=errors,
        )

    def close(self) -> None:
        """Close the sampler."""
        self._sampler.close()


class JobThread:
    """The thread of one job; a tick that finds the last one still running is skipped and counted."""

    def __init__(self, job: Job, clock: Clock) -> None:
        self.job = job
        self.overruns = 0
        self._clock = clock
        self._orders: SimpleQueue[str] = SimpleQueue()
        self._busy_since_s: float | None = None
        self._is_hung = False
        self._thread = NamedThread(job.name, self._loop)

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
