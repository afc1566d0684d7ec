"""The thread that calls the jobs: what is left where it dies, and the names of all of them. On the real clock."""

import ctypes
import logging
import queue
import threading
from pathlib import Path

import pytest

from agent.clock import SystemClock
from agent.schedule import Schedule, ScheduleConfig
from tests.agent.test_schedule import NO_GUARD_THREAD, FakeSampler, drain, until


def kill_scheduler():
    """End the thread of APScheduler as an error in it would, wherever it is."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "APScheduler"]
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)) == 1
    until(lambda: not thread.is_alive(), "end of the scheduler's thread")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_scheduler_that_died_is_made_anew(caplog):
    sampler = FakeSampler(period_s=0.02)
    schedule = Schedule([sampler], SystemClock(), lambda tick: None, ScheduleConfig(guard_period_s=0.05))
    schedule.start()
    until(lambda: sampler.samples.qsize() >= 2, "first samples")
    kill_scheduler()
    drain(sampler.samples)
    until(lambda: sampler.samples.qsize() >= 5, "samples after it")
    schedule.stop(1.0)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
        "the thread that calls the jobs has ended; the schedule starts anew"
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_a_scheduler_no_source_keeps_its_success():
    """Nobody puts it right here: what is asked for the state, as /-/ready is, has to see it by age alone."""
    sampler = FakeSampler(period_s=0.05)
    schedule = Schedule([sampler], SystemClock(), lambda tick: None, NO_GUARD_THREAD)
    schedule.start()
    until(lambda: schedule.statuses()[0].success, "success")
    kill_scheduler()
    until(lambda: not schedule.statuses()[0].success, "no success any more")
    schedule.stop(1.0)


def test_the_kernel_knows_the_threads_by_name():
    schedule = Schedule([FakeSampler("a_source")], SystemClock(), lambda tick: None)
    schedule.every(1.0, "judgement", lambda: None)
    schedule.start()
    wanted = {"a_source", "judgement", "clock-guard", "scheduler"}
    until(lambda: wanted <= {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}, "names")
    schedule.stop(1.0)


def test_what_is_to_come_after_others_does():
    calls = queue.SimpleQueue()
    clock = SystemClock()
    schedule = Schedule([], clock, lambda tick: None, NO_GUARD_THREAD)
    schedule.every(60.0, "later", lambda: calls.put(("later", clock.now().monotonic_s)), after_s=0.1)
    schedule.every(60.0, "first", lambda: calls.put(("first", clock.now().monotonic_s)))
    begin_s = clock.now().monotonic_s
    schedule.start()
    (first, _), (later, later_s) = calls.get(timeout=20.0), calls.get(timeout=20.0)
    schedule.stop(1.0)
    assert (first, later) == ("first", "later")
    assert later_s - begin_s >= 0.09
