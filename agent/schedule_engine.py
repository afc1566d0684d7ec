"""The one place that knows APScheduler: periodic calls on the wall clock, without its executors' costs.

APScheduler 3 publishes no types, so `Any` ends here.
"""

from __future__ import annotations

import logging
import math
import os
import select
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from apscheduler.executors.base import BaseExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from agent.clock import Instant
from agent.threads import name_this_thread

#: APScheduler says at INFO what every job does every second; only its errors are of use.
_apscheduler_log: Final = logging.getLogger(f"{__name__}.apscheduler")
_apscheduler_log.setLevel(logging.ERROR)


class PeriodicCall(NamedTuple):
    """A function that is to be called every `period_s`; it returns at once and never raises."""

    name: str
    period_s: float
    call: Callable[[], None]
    after_s: float = 0.0  # how long after the others of its period it comes


def next_due(previous: datetime, period_s: float, now: datetime) -> datetime:
    """Return the first moment after `now` that lies whole periods after `previous`, or the one period after it.

    Missed deadlines are skipped at once rather than one by one: a wall clock set from 1970 to today would make
    APScheduler's own interval trigger count some 1.8 thousand million seconds for a job of 1 s.
    """
    periods = max(1, math.floor((now - previous).total_seconds() / period_s) + 1)
    return previous + timedelta(seconds=periods * period_s)


class _Every(BaseTrigger):  # type: ignore[misc]  # no types published
    """Fires every `period_s`, on absolute deadlines."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        """Return the next deadline, as APScheduler asks for it."""
        return now if previous_fire_time is None else next_due(previous_fire_time, self._period_s, now)


class _CallAtOnce(BaseExecutor):  # type: ignore[misc]  # no types published
    """Calls a job in the scheduler's own thread: a PeriodicCall only hands work on and returns."""

    def submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:  # noqa: ANN401 - untyped library
        """Call the job once, whatever the count of `run_times`."""
        self._do_submit_job(job, run_times)

    def _do_submit_job(self, job: Any, run_times: Sequence[datetime]) -> None:  # noqa: ANN401, ARG002 - as above
        job.func()


class _Scheduler(BackgroundScheduler):  # type: ignore[misc]  # no types published
    """APScheduler's, whose thread has a name and tells when it ends."""

    has_ended = False

    def _main_loop(self) -> None:
        name_this_thread("scheduler")
        try:
            super()._main_loop()
        finally:
            self.has_ended = True


class ApschedulerEngine:
    """Calls `calls` at once, or after their `after_s`, and then every period; from one thread of APScheduler's."""

    def __init__(self, calls: Sequence[PeriodicCall], now: Instant) -> None:
        self._scheduler = _Scheduler(
            logger=_apscheduler_log,
            timezone=UTC,  # else it looks for the local time zone in files and variables
            executors={"default": _CallAtOnce()},
            jobstores={"default": MemoryJobStore()},
            daemon=True,
        )
        # One first deadline for all: jobs of one period stay in step, and the scheduler wakes once for all of them.
        first = datetime.fromtimestamp(now.wall_s, UTC)
        for call in calls:
            self._scheduler.add_job(
                call.call,
                _Every(call.period_s),
                id=call.name,
                next_run_time=first + timedelta(seconds=call.after_s),
                coalesce=True,
                max_instances=1,
                misfire_grace_time=None,
            )
        self._scheduler.start()

    @property
    def is_alive(self) -> bool:
        """Whether calls are made."""
        return not self._scheduler.has_ended

    def wakeup(self) -> None:
        """Run what is due now: a wait that a suspend has stretched ends."""
        self._scheduler.wakeup()

    def stop(self) -> None:
        """End the scheduler's thread; calls that were made go on."""
        self._scheduler.shutdown(wait=False)


class Bell:
    """An event whose wait no clock step can stretch.

    threading.Event waits on the wall clock where Python was built against a C library without sem_clockwait (glibc
    before 2.30, musl): set back an hour, it would wait that hour. poll(2) takes a span and knows no date.
    """

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)

    def ring(self) -> None:
        """End all waits, now and from now on."""
        os.eventfd_write(self._event, 1)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the bell was rung."""
        return bool(self._poll.poll(seconds * 1000))

    def __del__(self) -> None:
        os.close(self._event)
