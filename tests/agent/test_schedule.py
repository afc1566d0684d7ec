"""The schedule: on a clock that the test moves where time matters, on the real one where threads do."""

import logging
import queue
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from agent.clock import Instant, ManualClock, SystemClock, process_cpu_seconds, stopwatch
from agent.records import NetworkSample
from agent.samplers import SourceUnavailableError
from agent.schedule import ClockGuard, Schedule, ScheduleConfig
from agent.schedule_engine import Bell, next_due

NO_GUARD_THREAD = ScheduleConfig(guard_period_s=86_400.0)


class FakeSampler:
    """A sampler that does what the test says: `here` for probe, `act` (called with the moment) for sample."""

    def __init__(self, name="fake", period_s=1.0):
        self.name = name
        self.period_s = period_s
        self.errors = {}
        self.here = True
        self.act = None
        self.probes = []
        self.samples = queue.SimpleQueue()
        self.clock = None
        self.closed = 0

    def probe(self):
        if self.clock is not None:
            self.probes.append(self.clock.now().monotonic_s)
        return self.here

    def sample(self, now):
        self.samples.put(now)
        if self.act is not None:
            return self.act(now)
        return (record(now),)

    def close(self):
        self.closed += 1


def record(now):
    return NetworkSample(
        monotonic_s=now.monotonic_s, wall_s=now.wall_s, device="x", receive_bytes_total=0, transmit_bytes_total=0
    )


def raises(error):
    def act(now):
        raise error

    return act


def drain(samples):
    found = []
    while not samples.empty():
        found.append(samples.get())
    return found


def until(condition, what, deadline_s=20.0):
    """Wait in real time, for threads only."""
    end_s = stopwatch() + deadline_s
    pause = threading.Event()
    while not condition():
        assert stopwatch() < end_s, f"not within {deadline_s} s: {what}"
        pause.wait(0.002)


class Bench:
    """One sampler on a clock that the test moves, run in the test's own thread."""

    def __init__(self, **config):
        self.clock = ManualClock(0.0, 1_700_000_000.0)
        self.sampler = FakeSampler()
        self.sampler.clock = self.clock
        self.ticks = []
        self.schedule = Schedule([self.sampler], self.clock, self.ticks.append, ScheduleConfig(**config))

    def run(self, seconds):
        """Run once now and then every second, `seconds` times in all."""
        for _ in range(seconds):
            self.schedule.run_once()
            self.clock.advance(1.0)

    @property
    def status(self):
        return self.schedule.statuses()[0]


class FakeMachine:
    """A machine with a scheduler that waits as APScheduler does: deadlines in wall time, sleep in awake time."""

    STEP_S = 0.5
    is_alive = True

    def __init__(self, *samplers):
        self.clock = ManualClock(50.0, 1_700_000_000.0)
        self.awake_s = 0.0
        self.engines = 0
        self.schedule = Schedule(samplers, self.clock, lambda tick: None, NO_GUARD_THREAD, engine=self._start_engine)

    def _start_engine(self, calls, now):
        self.engines += 1
        self.calls = calls
        self.deadlines = [datetime.fromtimestamp(now.wall_s, UTC)] * len(calls)
        self.wakeup()
        return self

    def wakeup(self):
        now = datetime.fromtimestamp(self.clock.now().wall_s, UTC)
        for index, call in enumerate(self.calls):
            if self.deadlines[index] <= now:
                call.call()
                self.deadlines[index] = next_due(self.deadlines[index], call.period_s, now)
        self.wakes_s = self.awake_s + (min(self.deadlines) - now).total_seconds()

    def stop(self):
        self.wakes_s = float("inf")

    def run(self, seconds):
        """Let time pass, with a look at the clocks each half second, as the guard's thread does it."""
        for _ in range(int(seconds / self.STEP_S)):
            self.clock.advance(self.STEP_S)
            self.awake_s += self.STEP_S
            if self.awake_s >= self.wakes_s:
                self.wakeup()
            self.schedule.check_clocks(self.STEP_S)
            until(self._is_idle, "workers are idle")

    def _is_idle(self):
        return all(worker.is_idle for worker in self.schedule._workers)

    def suspend(self, seconds):
        self.clock.advance(seconds)


# --- the guard -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 1.5, -1.5, -1_700_000_000.0])
def test_guard_reports_a_step_once(step_s):
    guard = ClockGuard(Instant(10.0, 1000.0))
    assert guard.step_s(Instant(11.0, 1001.0)) is None
    assert guard.step_s(Instant(12.0, 1002.0 + step_s)) == pytest.approx(step_s)
    assert guard.step_s(Instant(13.0, 1003.0 + step_s)) is None


def test_guard_adds_small_steps_up():
    """Two steps of 0.6 s back are 1.2 s: above the tolerance of 1 s together, below it alone."""
    guard = ClockGuard(Instant(0.0, 1000.0))
    assert guard.step_s(Instant(1.0, 1000.4)) is None
    assert guard.step_s(Instant(2.0, 1000.8)) == pytest.approx(-1.2)


def test_guard_takes_a_suspend_for_a_gap_and_not_for_a_step():
    """Both clocks go on for an hour, and a wait of 0.5 s took 3600.5 s."""
    guard = ClockGuard(Instant(0.0, 1000.0))
    now = Instant(3600.5, 4600.5)
    assert guard.step_s(now) is None
    assert guard.gap_s(now, 0.5) == pytest.approx(3600.5)
    assert guard.gap_s(now.later(0.9), 0.5) is None  # 0.9 s: late by less than the tolerance


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous_s", "period_s", "now_s", "due_s"),
    [
        (0.0, 1.0, 0.0, 1.0),  # on time
        (0.0, 1.0, 0.3, 1.0),  # late by less than a period: the deadline stays absolute
        (0.0, 1.0, 3.7, 4.0),  # three missed: skipped, in step
        (0.0, 5.0, 5.0, 10.0),  # exactly one late
        (10.0, 1.0, 2.0, 11.0),  # the clock went back; the guard has to help
        (0.0, 1.0, 1_261_440_000.5, 1_261_440_001.0),  # forty years at once
    ],
)
def test_next_due(previous_s, period_s, now_s, due_s):
    origin = datetime(2000, 1, 1, tzinfo=UTC)
    due = next_due(origin + timedelta(seconds=previous_s), period_s, origin + timedelta(seconds=now_s))
    assert (due - origin).total_seconds() == due_s


# --- clock steps and a suspend, on a clock that the test moves -------------------------------------------------------


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_step_of_an_hour_loses_at_most_two_ticks(step_s, caplog):
    """In 60 s there are 60 ticks, give or take two, and the pause around the step is at most 3 s."""
    sampler = FakeSampler()
    machine = FakeMachine(sampler)
    machine.schedule.start()
    machine.run(10.0)
    drain(sampler.samples)
    machine.clock.step_wall(step_s)
    machine.run(60.0)
    machine.schedule.stop(5.0)
    times = [now.monotonic_s for now in drain(sampler.samples)]
    assert 58 <= len(times) <= 62
    assert max(later - earlier for earlier, later in zip([60.0, *times], times, strict=False)) <= 3.0
    assert machine.engines == 2  # one from the start, one after the step: once, not at every look
    assert caplog.text.count("the wall clock was stepped") == 1


@pytest.mark.parametrize("period_s", [1.0, 60.0])
def test_suspend_of_an_hour_runs_each_job_once_and_at_once(period_s, caplog):
    """Nothing is made up for: after the resume comes one tick, and the next one a period later at the latest."""
    sampler = FakeSampler(period_s=period_s)
    machine = FakeMachine(sampler)
    machine.schedule.start()
    machine.run(10.0)
    drain(sampler.samples)
    machine.suspend(3600.0)
    machine.run(0.5)
    (resumed,) = drain(sampler.samples)
    assert resumed.monotonic_s == 50.0 + 10.0 + 3600.0 + 0.5
    machine.run(120.0)
    machine.schedule.stop(5.0)
    assert len(drain(sampler.samples)) == 120.0 / period_s
    assert machine.engines == 1
    assert "nothing ran for 3600.5 s" in caplog.text


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    for name in ("agent.schedule", "agent.schedule_jobs"):
        caplog.set_level(logging.DEBUG, name)


# --- probing, faults and statuses, on a clock that the test moves ----------------------------------------------------


def test_first_run_probes_and_samples():
    bench = Bench()
    assert not bench.status.success
    assert bench.status.last_success_wall_s is None
    bench.run(1)
    assert bench.status.success
    assert bench.status.last_success_wall_s == 1_700_000_000.0
    assert bench.status.duration_s >= 0.0
    (tick,) = bench.ticks
    assert (tick.monotonic_s, tick.wall_s, tick.records) == (0.0, 1_700_000_000.0, (record(Instant(0.0, 1.7e9)),))


def test_absent_source_is_probed_with_back_off(caplog):
    """After 1, 2, 4, 8, 16 s and then every 30 s: at 0, 1, 3, 7, 15, 31, 61, 91 s. Absence is no error."""
    bench = Bench()
    bench.sampler.here = False
    bench.run(100)
    assert bench.sampler.probes == [0, 1, 3, 7, 15, 31, 61, 91]
    assert not bench.status.success
    assert dict(bench.status.errors) == {}
    assert caplog.text.count("not offered here") == 1
    bench.sampler.here = True  # the driver comes at 100 s
    bench.run(22)
    assert bench.sampler.probes[-1] == 121
    assert bench.status.success
    bench.run(1)
    assert len(bench.sampler.probes) == 9  # no probe while samples come


def test_absent_source_is_probed_at_once_when_asked_for():
    """After 0, 1, 3, 7, 15, 31 s it would be 61 s; asked for at 41 s, the back-off starts anew: 41, 42, 44 s."""
    bench = Bench()
    bench.sampler.here = False
    bench.run(40)
    bench.schedule.probe_now("other")
    bench.run(1)
    bench.schedule.probe_now("fake")
    bench.run(4)
    assert bench.sampler.probes == [0, 1, 3, 7, 15, 31, 41, 42, 44]
    bench.sampler.here = True
    bench.schedule.probe_now("fake")
    bench.run(1)
    assert bench.status.success
    assert dict(bench.status.errors) == {}
    bench.schedule.probe_now("fake")  # nothing to look for
    bench.run(1)
    assert bench.sampler.probes[9:] == [45]


def test_lost_source_is_counted_by_reason_and_comes_back(caplog):
    """Lost at 5 s: probed at 6, 8 and 12 s, where it is back. The next loss starts at 1 s again."""
    bench = Bench()
    bench.run(5)
    bench.sampler.act = raises(SourceUnavailableError("driver_gone", "the driver was unloaded"))
    bench.sampler.here = False
    bench.run(1)
    assert not bench.status.success
    assert dict(bench.status.errors) == {"driver_gone": 1}
    bench.run(5)
    bench.sampler.act = None
    bench.sampler.here = True
    bench.run(2)
    assert bench.sampler.probes == [0, 6, 8, 12]
    assert bench.status.success
    bench.run(30)
    assert caplog.text.count("cannot be read: the driver was unloaded") == 1
    assert caplog.text.count("works again") == 1
    bench.sampler.act = raises(SourceUnavailableError("driver_gone", "the driver was unloaded"))
    bench.run(2)
    assert bench.sampler.probes[4:] == [44]  # lost at 43 s


def test_source_that_probes_well_and_fails_keeps_backing_off():
    """A probe that says yes is no success: sampled at 0, 1, 3, 7, 15 s only."""
    bench = Bench()
    bench.sampler.act = raises(SourceUnavailableError("reset", "the GPU is being reset"))
    bench.run(20)
    assert bench.sampler.probes == [0, 1, 3, 7, 15]
    assert dict(bench.status.errors) == {"reset": 5}


def test_programming_error_is_counted_each_time_and_logged_once(caplog):
    """The sampler goes on at every tick; the log has one traceback and, after 10 quiet seconds, one end."""
    bench = Bench()
    bench.run(2)
    bench.sampler.act = raises(ZeroDivisionError("one bug"))
    bench.run(30)
    assert dict(bench.status.errors) == {"exception": 30}
    assert not bench.status.success
    assert caplog.text.count("Traceback") == 1
    bench.sampler.act = raises(KeyError("another bug"))  # another kind within the same fault: one more line
    bench.run(5)
    assert caplog.text.count("Traceback") == 2
    bench.sampler.act = None
    bench.run(1)
    assert bench.status.success
    assert "works again" not in caplog.text
    bench.run(20)
    # From 2 s to 36 s, 30 + 5 failures.
    assert caplog.text.count("fake works again: 35 failures within 34 s") == 1


def test_fault_that_comes_and_goes_fills_no_log(caplog):
    """Every second run fails for five minutes: one start, no end."""
    bench = Bench()
    bench.sampler.act = lambda now: (record(now),) if int(now.monotonic_s) % 2 else raises(ValueError("odd"))(now)
    bench.run(300)
    assert len(caplog.records) == 1


def test_sampler_errors_and_own_errors_add_up():
    bench = Bench()
    bench.sampler.errors = {"not_supported": 3, "exception": 1}
    bench.sampler.act = raises(ValueError("bug"))
    bench.run(2)
    # In the first run the source was not yet taken for here: probed again 1 s later, and failed again.
    assert dict(bench.status.errors) == {"not_supported": 3, "exception": 3}


def test_a_source_with_nothing_to_tell_is_a_success_without_a_tick():
    """A node whose jobs have ended has no processes on its GPUs, and nothing has stopped."""
    bench = Bench()
    bench.run(1)
    bench.sampler.act = lambda now: ()
    bench.run(1)
    assert bench.status.success
    assert len(bench.ticks) == 1
    assert bench.status.last_success_wall_s == 1_700_000_001.0


def test_success_ends_after_three_periods_without_a_run():
    """Sampled at 0 s: a success until 3 s, none after it, though no run has failed."""
    bench = Bench()
    bench.schedule.run_once()
    bench.clock.advance(3.0)
    assert bench.status.success
    bench.clock.advance(0.1)
    assert not bench.status.success


def test_delivery_sees_its_own_run_as_a_success():
    """What is published while the first records are delivered is not `success 0`."""
    seen = []
    clock = ManualClock()
    schedule = Schedule([FakeSampler()], clock, lambda tick: seen.append(schedule.statuses()[0].success))
    schedule.run_once()
    assert seen == [True]


# --- threads, in real time -------------------------------------------------------------------------------------------


def test_hanging_sampler_delays_no_other_and_shows(caplog):
    """While one hangs, another ticks on; the hang is counted, logged once, and ends when the call returns."""
    release = threading.Event()
    hanging, ticking = FakeSampler("hanging", 0.05), FakeSampler("ticking", 0.05)
    hanging.act = lambda now: (record(now),) if release.wait(60.0) else ()
    schedule = Schedule([hanging, ticking], SystemClock(), lambda tick: None)
    schedule.start()
    try:
        for _ in range(12):
            ticking.samples.get(timeout=20.0)
        status, other = schedule.statuses()
        assert status.errors["overrun"] >= 5
        assert not status.success
        assert other.success
        assert hanging.samples.qsize() == 1  # never called a second time while it hangs
        assert caplog.text.count("hanging has not returned for") == 1
        release.set()
        until(lambda: schedule.statuses()[0].success, "the sampler that hung succeeds")
        assert caplog.text.count("hanging has returned") == 1
    finally:
        release.set()
        schedule.stop(10.0)


def test_stop_leaves_a_hanging_sampler_behind(caplog):
    """stop returns in its time, closes what has returned, and names the one that has not."""
    release = threading.Event()
    hanging, ticking = FakeSampler("hanging", 0.05), FakeSampler("ticking", 0.05)
    hanging.act = lambda now: release.wait(60.0) and ()
    schedule = Schedule([hanging, ticking], SystemClock(), lambda tick: None)
    schedule.start()
    ticking.samples.get(timeout=20.0)
    hanging.samples.get(timeout=20.0)
    started_s = stopwatch()
    schedule.stop(0.3)
    assert stopwatch() - started_s < 5.0
    assert (hanging.closed, ticking.closed) == (0, 1)
    assert "hanging does not return and is left behind" in caplog.text
    drain(ticking.samples)
    release.set()
    assert ticking.samples.empty()


def test_stop_before_start_closes_the_samplers():
    sampler = FakeSampler()
    Schedule([sampler], SystemClock(), lambda tick: None).stop(1.0)
    assert sampler.closed == 1


def test_callbacks_run_beside_samplers_and_survive_their_errors(caplog):
    calls = queue.SimpleQueue()

    def judge():
        calls.put(None)
        raise ValueError("a bug in the judgement")

    schedule = Schedule([], SystemClock(), lambda tick: None)
    schedule.every(0.05, "judgement", judge)
    schedule.start()
    for _ in range(4):
        calls.get(timeout=20.0)
    with pytest.raises(RuntimeError, match="late comes too late"):
        schedule.every(1.0, "late", judge)
    schedule.stop(10.0)
    assert caplog.text.count("judgement failed") == 1
    assert schedule.statuses() == ()


def test_jobs_cost_little():
    """Four jobs at 1 Hz may take 0.15 s of CPU a minute: 240 runs, 0.6 ms each. Here at 20 Hz, to see it in seconds."""
    samplers = [FakeSampler(f"fake{index}", 0.05) for index in range(4)]
    schedule = Schedule(samplers, SystemClock(), lambda tick: None)
    schedule.start()
    samplers[0].samples.get(timeout=20.0)
    before_s = process_cpu_seconds()
    for _ in range(40):
        samplers[0].samples.get(timeout=20.0)
    cost_s = process_cpu_seconds() - before_s
    schedule.stop(10.0)
    assert cost_s / (40 * 4) < 0.15 / 240


def test_bell_ends_a_wait_at_once_and_stays_rung():
    bell = Bell()
    assert not bell.wait(0.0)
    waiter = threading.Thread(target=bell.wait, args=(60.0,))
    waiter.start()
    bell.ring()
    waiter.join(20.0)
    assert not waiter.is_alive()
    assert bell.wait(60.0)


def test_bell_gives_its_descriptor_back():
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(50):
        Bell()
    assert len(list(descriptors.iterdir())) < before + 50
