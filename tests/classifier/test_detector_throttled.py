"""throttled: by the driver's counters of time, and by samples where it has none."""

from __future__ import annotations

import dataclasses

import pytest

from agent.clock import Instant
from agent.records import GpuSample, Tick
from agent.samplers.nvml import NvmlSampler
from classifier.detectors.throttled import ThrottledConfig, ThrottledDetector
from tests.agent.nvml_support import KEY as NVML_KEY
from tests.agent.nvml_support import UUID, WITHOUT_FAST, sample_at
from tests.classifier.card_histories import KEY, Card, severity
from tests.conftest import EmulatorFactory

QUIET = {"sw_power_cap": 0.0, "sw_thermal": 100.0, "hw_thermal": 0.0, "hw_power_brake": 7.0}


def card() -> Card:
    return Card(ThrottledDetector(ThrottledConfig(judge_seconds=0)))


def counted(watched: Card, seconds: float, shares: dict[str, float], start: float = 0.0) -> list:
    """Play counters that grow by these shares of the time, from 100 s of heat and 7 s of brake before the start."""

    def tell(second: float) -> None:
        totals = {reason: value + shares.get(reason, 0.0) * (second - start) for reason, value in QUIET.items()}
        watched.slow(clock_event_seconds_total=totals, temperature_celsius=88.0)

    return watched.play(seconds, tell)


def test_heat_for_more_than_a_twentieth_of_a_minute_is_a_warning():
    watched = card()
    said = counted(watched, 120, {"sw_thermal": 0.06, "sw_power_cap": 0.9})
    # 0.8 of the window have to be seen: the reading at 53 s and later has one 48 s and more before it.
    assert [severity(one) for one in said] == [*[0] * 10, *[2] * 14]
    assert said[-1].action == "look"
    assert said[-1].evidence["sw_thermal_ratio"] == pytest.approx(0.06)
    assert said[-1].evidence["sw_power_cap_ratio"] == pytest.approx(0.9)
    assert (said[-1].evidence["source"], said[-1].evidence["temperature_celsius"]) == ("counters", 88.0)
    assert "because it is hot for 6.0 % of the last 60 s" in said[-1].summary


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"sw_power_cap": 1.0}, 0),  # work at the power limit is normal
        ({}, 0),
        ({"sw_thermal": 0.04}, 0),
        ({"hw_thermal": 0.06}, 2),
        ({"hw_power_brake": 0.009}, 0),
        ({"hw_power_brake": 0.02}, 3),
        ({"hw_power_brake": 0.02, "sw_thermal": 0.5}, 3),
    ],
)
def test_reasons_and_their_limits(shares, expected):
    assert severity(counted(card(), 120, shares)[-1]) == expected


def test_it_ends_once_the_share_is_half_of_the_limit():
    watched = card()
    assert severity(counted(watched, 120, {"hw_thermal": 0.2})[-1]) == 2
    hot = 0.2 * 120

    def cool(_: float) -> None:
        watched.slow(clock_event_seconds_total=QUIET | {"hw_thermal": hot})

    said = [severity(one) for one in watched.play(90, cool)]
    # 2.5 % of 60 s are 1.5 s: at 0.2 a second they lie in the window until 52.5 s after the end of the heat.
    assert said == [*[2] * 10, *[0] * 8]


@pytest.mark.parametrize(("reason", "blips", "expected"), [
    ("sw_thermal", 4, 0), ("sw_thermal", 5, 2), ("hw_power_brake", 1, 0), ("hw_power_brake", 2, 3),
])  # fmt: skip
def test_a_blip_of_two_seconds_is_none_though_it_is_more_than_the_share(reason, blips, expected):
    watched = card()
    assert severity(counted(watched, 60, {})[-1]) == 0
    begins = [70.0 + 10 * n for n in range(blips)]

    def tell(second: float) -> None:
        seconds = 2.0 * sum(begin <= second for begin in begins)
        watched.slow(clock_event_seconds_total=QUIET | {reason: QUIET[reason] + seconds})

    assert max(severity(one) for one in watched.play(60, tell)) == expected


def test_what_was_counted_before_the_start_and_a_reload_of_the_driver_are_no_heat():
    watched = card()
    assert {severity(one) for one in counted(watched, 60, {})} == {0}

    def reloaded(second: float) -> None:
        watched.slow(clock_event_seconds_total={"sw_thermal": 0.0, "hw_thermal": 0.0, "hw_power_brake": 0.0})

    assert {severity(one) for one in watched.play(120, reloaded)} == {0}
    # And a leap from there is no share of the time before.
    watched.at += 5
    watched.slow(clock_event_seconds_total={"sw_thermal": 1.0, "hw_thermal": 0.0, "hw_power_brake": 0.0})
    assert severity(watched.only()) == 0


def test_counters_that_are_not_read_any_more_say_nothing():
    watched = card()
    assert severity(counted(watched, 120, {"sw_thermal": 0.5})[-1]) == 2
    watched.at += 25
    assert watched.only() is None
    # After an hour unseen the share begins anew.
    watched.at = 3600
    said = [severity(one) for one in counted(watched, 20, {"sw_thermal": 0.02}, start=0.0)]
    assert said == [0, 0, 0, 0]


@pytest.mark.parametrize(("length_s", "every_s", "expected"), [(5, 30, 0), (2, 30, 0), (5, 15, 2), (1, 10, 2)])
def test_blips_in_samples_are_no_heat(length_s: int, every_s: int, expected: int) -> None:
    watched, found = card(), []
    for n in range(300):
        watched.at = float(n)
        active = ("sw_thermal",) if (n + 2) % every_s < length_s else ()
        watched.feed(GpuSample, utilization_ratio=0.9, clock_event_reasons=active)
        if n % 5 == 0:
            found.append(severity(watched.only()) or 0)
    assert max(found) == expected


def sampled(reasons: tuple[str, ...] | None, every: int, interval_s: float = 1.0) -> list[int | None]:
    """Play 180 s of samples of a board without counters, every so many of them with these reasons."""
    watched = card()
    found = []
    for n in range(int(180 / interval_s)):
        watched.at = n * interval_s
        active = None if reasons is None else reasons if n % every == 0 else ("sw_power_cap",)
        watched.feed(GpuSample, utilization_ratio=0.9, clock_event_reasons=active)
        if watched.at % 5 == 0:
            found.append(severity(watched.only()))
    return found


@pytest.mark.parametrize(
    ("reasons", "every", "expected"),
    [
        (("sw_thermal",), 10, 2),
        (("sw_thermal",), 60, 0),
        (("hw_slowdown", "hw_thermal"), 10, 2),
        (("hw_power_brake", "hw_slowdown"), 10, 3),
        (("hw_slowdown",), 20, 3),
        (("hw_slowdown",), 60, 0),  # one sample of 60 is no share
        (("sw_power_cap", "gpu_idle"), 1, 0),
        (None, 1, None),
    ],
)
def test_samples_stand_in_for_counters(reasons, every, expected):
    assert sampled(reasons, every)[-1] == expected


def test_samples_of_one_blip_are_no_share():
    watched = card()
    found = []
    for n in range(120):
        watched.at = float(n)
        watched.feed(GpuSample, clock_event_reasons=("sw_thermal",) if n in (81, 82, 83, 84, 103, 104) else ())
        if n % 5 == 0:
            found.append(severity(watched.only()))
    assert set(found) == {0}  # six of sixty samples, in two of six parts


def test_samples_at_long_intervals():
    assert sampled(("sw_thermal",), 4, interval_s=5.0)[-1] == 2
    assert sampled(("hw_slowdown",), 100, interval_s=5.0)[-1] == 0


def test_of_an_older_driver_the_brake_shows_in_the_samples():
    watched = card()
    found = []
    for n in range(120):
        watched.at = float(n)
        watched.feed(GpuSample, clock_event_reasons=("hw_power_brake", "hw_slowdown") if n % 10 == 0 else ())
        if n % 5 == 0:
            watched.slow(clock_event_seconds_total={"sw_power_cap": 0.0, "sw_thermal": 3.0})
            found.append(watched.only())
    assert severity(found[-1]) == 3
    assert found[-1].evidence["hw_slowdown_ratio"] == pytest.approx(0.1)
    assert found[-1].evidence["sw_thermal_ratio"] == 0


def test_where_neither_is_offered_nothing_is_said():
    watched = card()
    watched.feed(GpuSample, utilization_ratio=0.9)
    watched.slow(temperature_celsius=90.0)
    assert watched.only() is None


def test_a_lost_gpu_is_not_hot():
    watched = card()
    counted(watched, 120, {"sw_thermal": 0.5})
    watched.state("lost")
    assert watched.only() is None


def test_between_two_looks_it_says_the_same():
    watched = Card(ThrottledDetector(ThrottledConfig()))
    said = [severity(one) for one in counted(watched, 120, {"sw_thermal": 0.5})]
    assert said.index(2) % 3 == 0
    assert all(len(set(said[n : n + 3])) == 1 for n in range(0, 24, 3))


def test_the_heat_of_the_card_is_that_of_each_instance():
    watched = card()
    instances = [KEY._replace(gpu_i_id=1), KEY._replace(gpu_i_id=2)]
    for n in range(0, 121, 5):
        watched.at = float(n)
        for instance in instances:
            watched.feed(GpuSample, key=instance, memory_used_bytes=1)
        watched.slow(clock_event_seconds_total=QUIET | {"sw_thermal": 0.5 * n})
        found = watched.assess()
    assert [(one.key, one.severity) for one in found] == [(instance, 2) for instance in instances]


@pytest.mark.parametrize(
    ("key", "value"), [("judge_seconds", -1.0), ("window_seconds", 5.0), ("thermal_ratio", 0.0), ("brake_ratio", 1.0)]
)
def test_refuses_what_makes_no_sense(key, value):
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(ThrottledConfig(), **{key: value})


def test_a_gpu_of_the_emulator_becomes_hot(nvml_emulator: EmulatorFactory):
    # The counters of heat stand still for 90 s and then take a tenth of the time.
    still = "sw_power_cap_nanoseconds=0 hw_thermal_nanoseconds=0 hw_power_brake_nanoseconds=0 utilization_gpu_percent=9"
    emulator = nvml_emulator(
        f"driver 580.95.05\ngpu 0 uuid {UUID}\n@ 0\n0 sw_thermal_nanoseconds=5000000000 {still}\n"
        "@ 90\n0 sw_thermal_nanoseconds=5000000000\n@ 1090\n0 sw_thermal_nanoseconds=105000000000\n"
    )
    sampler = NvmlSampler(WITHOUT_FAST)
    watched = Card(ThrottledDetector(ThrottledConfig(judge_seconds=0)), key=NVML_KEY)
    found = []
    for second in range(0, 181, 5):
        records = tuple(sample_at(emulator, sampler, second))
        now = Instant(records[0].monotonic_s, records[0].wall_s)
        watched.history.ingest(Tick(monotonic_s=now.monotonic_s, wall_s=now.wall_s, records=records))
        (one,) = watched.detector.assess(now, watched.history, {})
        found.append(one.severity)
    # Above 5 % of 60 s once more than 30 s of the window are hot: at 125 s.
    assert found.index(2) == 125 / 5
    assert set(found[:25]) == {0}
    sampler.close()
