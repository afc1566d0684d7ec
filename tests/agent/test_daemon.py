"""What the composition root serves when its own schedule has died."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from agent.clock import Instant
from agent.config import Config, ExportConfig, SamplersConfig
from agent.daemon import OLDEST_SNAPSHOT_S, Daemon
from agent.records import NetworkSample, Tick

OFF = {field.name: False for field in dataclasses.fields(SamplersConfig) if field.name != "expected_gpus"}


class StandingClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> Instant:
        return Instant(self.seconds, 1e9 + self.seconds)


@pytest.fixture
def clock():
    return StandingClock()


@pytest.fixture
def daemon(clock):
    """Return a node without samplers, whose schedule does not run, after one snapshot with a network interface."""
    config = Config(samplers=SamplersConfig(**OFF), export=ExportConfig(listen="127.0.0.1:0"))
    daemon = Daemon(config, clock)
    record = NetworkSample(
        monotonic_s=1000.0, wall_s=1e9 + 1000.0, device="eth0", receive_bytes_total=1, transmit_bytes_total=2
    )
    daemon._deliver(Tick(monotonic_s=1000.0, wall_s=1e9 + 1000.0, records=(record,)))
    return daemon


def test_a_young_snapshot_is_served_as_it_is(daemon, clock):
    first = daemon.snapshot()
    assert [sample.device for sample in first.networks] == ["eth0"]
    clock.seconds += OLDEST_SNAPSHOT_S
    assert daemon.snapshot() is first


def test_an_old_one_is_taken_anew_and_what_went_stale_is_absent(daemon, clock):
    clock.seconds += OLDEST_SNAPSHOT_S + 0.1  # the interface was read 5.1 s ago, three periods are 3 s
    served = daemon.snapshot()
    assert served.built == clock.now()
    assert served.networks == ()


def test_nothing_is_known_and_the_node_is_not_ready_while_the_pipeline_is_held(daemon, clock):
    clock.seconds += OLDEST_SNAPSHOT_S + 0.1
    held, done = threading.Event(), threading.Event()

    def hold():
        with daemon._lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        served = daemon.snapshot()
    finally:
        done.set()
        thread.join()
    assert (served.gpus, served.networks, served.ready) == ((), (), False)
    assert served.built == clock.now()
