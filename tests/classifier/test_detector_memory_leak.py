"""memory_leak: a line is one, stairs and what saturates are none."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest

from agent.records import GpuProcess, GpuSample
from classifier.detectors.memory_leak import MemoryLeakConfig, MemoryLeakDetector
from tests.classifier.card_histories import KEY, Card, severity

TOTAL = 80e9
GB = 1e9


def played(
    used: Callable[[float], float | None],
    hours: float,
    *,
    pids: Callable[[float], tuple[int, ...] | None] = lambda _: (10,),
    interval_s: float = 30.0,
) -> tuple[Card, list[int | None]]:
    """Play the memory in use by the second and return the severities, one a minute."""
    watched = Card(MemoryLeakDetector(MemoryLeakConfig(judge_seconds=0)))
    found = []
    for n in range(int(hours * 3600 / interval_s)):
        watched.at = n * interval_s
        value = used(watched.at)
        if value is not None:
            watched.feed(GpuSample, memory_used_bytes=int(value), memory_total_bytes=int(TOTAL))
            present = pids(watched.at)
            processes = None if present is None else tuple(GpuProcess(pid) for pid in present)
            watched.slow(processes=processes)
        said = watched.only()
        if watched.at % 60 == 0:
            found.append(severity(said))
    return watched, found


def test_a_steady_line_is_a_leak_that_is_full_in_time():
    # 30 GB and 8 GB an hour of 80: 10 %/h, full in six hours. An hour after ten minutes: the first median that counts
    # is that of 600 to 900 s, so the twelfth comes at 4200 s.
    watched, said = played(lambda t: 30 * GB + 8 * GB * t / 3600, 1.25)
    assert said.index(2) == 70
    assert set(said[:70]) == {0}
    found = watched.only()
    assert (found.action, found.key) == ("contact_user", KEY)
    assert found.evidence["slope_bytes_per_hour"] == pytest.approx(8 * GB, rel=0.01)
    assert found.evidence["full_in_seconds"] == pytest.approx((80 - 39.7) / 8 * 3600, rel=0.05)
    assert found.evidence["rising_share_ratio"] == 1
    assert "full in 5." in found.summary


def test_memory_that_is_full_soon_is_called_after_half_an_hour():
    # 40 GB an hour: after 40 minutes 57 of 80 GB are used, and the rest is full in 35 minutes.
    _, said = played(lambda t: 30 * GB + 40 * GB * t / 3600, 1)
    assert said.index(2) == 40


def test_growth_of_a_few_per_cent_is_waited_for():
    # 1 GB an hour of 80, from 72: full in 8 hours, and only after 4 hours a twentieth of the memory.
    _, said = played(lambda t: 72 * GB + 1 * GB * t / 3600, 4.6, interval_s=60.0)
    assert 4 * 60 <= said.index(2) <= 4.4 * 60


@pytest.mark.parametrize("hours", [1, 2])
def test_steps_that_differ_much_are_those_of_cells(hours: int):
    # 2 and 10 % in turn, every five minutes: 72 % an hour, and a quarter of that.
    per_part = (0.02, 0.10) if hours == 1 else (0.005, 0.025)
    sizes = [per_part[n % 2] for n in range(60)]

    def used(t: float) -> float:
        return TOTAL * min(0.95, 0.05 + sum(sizes[: int(t / 300)]))

    _, said = played(used, hours)
    assert not any(said)


def test_a_notebook_that_takes_memory_in_cells_is_no_leak():
    # SIGNALS 2.4: bursts every 10 to 900 s, each takes some per cent and gives nothing back.
    draws = random.Random(3)
    at, level, levels = 0.0, 5 * GB, []
    while at < 3 * 3600:
        at += draws.uniform(10, 900)
        level += draws.expovariate(1 / (0.02 * TOTAL))
        levels.append((at, level))
    _, said = played(lambda t: max([5 * GB, *(level for at, level in levels if at <= t)]), 3, interval_s=60.0)
    assert set(said) == {0}


def test_noise_on_a_leak_is_still_one():
    noise = random.Random(1)
    _, said = played(lambda t: 30 * GB + 8 * GB * t / 3600 + noise.gauss(0, 0.1 * GB), 1.5)
    assert said[-1] == 2


@pytest.mark.parametrize(
    "used",
    [
        lambda _: 60 * GB,
        lambda t: 40 * GB + 0.3 * GB * t / 3600,  # 0.4 %/h
        lambda t: 30 * GB + 2 * GB * t / 3600,  # full in a day
        lambda t: 30 * GB + 10 * GB * (t > 1500),  # a stair of the allocator
        lambda t: 30 * GB + 4 * GB * math.log1p(t / 600),  # growth that slows down
        lambda t: 70 * GB * (1 - math.exp(-t / 900)),
        lambda t: 40 * GB + 15 * GB * math.sin(t / 600),  # up and down
        lambda t: 5 * GB + min(60 * GB, 60 * GB * t / 500),  # loads for eight minutes
        lambda t: 30 * GB + 5 * GB * (int(t) // 3000 % 2),
    ],
)
def test_what_is_no_leak(used):
    _, said = played(used, 3, interval_s=60.0)
    assert set(said) == {0}


def test_it_ends_with_the_growth_and_with_the_job():
    def used(t: float) -> float:
        return 30 * GB + 8 * GB * min(t, 4800) / 3600

    _, said = played(used, 5, interval_s=60.0)
    assert said[79] == 2
    assert said[-1] == 0
    _, said = played(lambda t: 30 * GB + 8 * GB * t / 3600, 2, pids=lambda t: (10,) if t < 4800 else (11,))
    assert said[79] == 2
    assert set(said[80:]) == {0}  # another program, of which 40 min are known


def test_a_leak_that_begins_late_is_seen_within_the_hour():
    _, said = played(lambda t: 30 * GB + 8 * GB * max(0.0, t - 10_800) / 3600, 4.5, interval_s=60.0)
    assert 180 + 25 <= said.index(2) <= 180 + 60


def test_programs_that_come_and_go_beside_the_leak_are_no_new_job():
    _, said = played(lambda t: 30 * GB + 8 * GB * t / 3600, 1.25, pids=lambda t: (10, 1000 + int(t / 120)))
    assert said.index(2) == 70


def test_without_a_process_list_a_fall_begins_a_new_job():
    _, said = played(lambda t: 30 * GB + 8 * GB * t / 3600, 1.25, pids=lambda _: None)
    assert said.index(2) == 70
    _, said = played(
        lambda t: (30 * GB + 8 * GB * t / 3600) if t < 4800 else 10 * GB + 8 * GB * (t - 4800) / 3600,
        2,
        pids=lambda _: None,
    )
    assert said[79] == 2
    assert set(said[86:]) == {0}


def test_a_gap_leaves_medians_out_and_ends_nothing():
    watched, said = played(lambda t: None if 1500 < t < 2700 else 30 * GB + 8 * GB * t / 3600, 2)
    assert None in said
    assert said[-1] == 2
    assert watched.only().evidence["slope_bytes_per_hour"] == pytest.approx(8 * GB, rel=0.02)


def test_an_agent_that_starts_late_sees_it_after_the_same_time():
    _, said = played(lambda t: 50 * GB + 8 * GB * t / 3600, 1.25)
    assert said.index(2) == 70


def test_without_memory_or_its_size_nothing_is_said():
    watched = Card(MemoryLeakDetector(MemoryLeakConfig(judge_seconds=0)))
    watched.feed(GpuSample, utilization_ratio=0.9)
    assert watched.only() is None
    watched.at = 1
    watched.feed(GpuSample, memory_used_bytes=5)
    assert watched.only() is None


def test_an_instance_leaks_by_itself():
    watched = Card(MemoryLeakDetector(MemoryLeakConfig(judge_seconds=0)))
    one, other = KEY._replace(gpu_i_id=1), KEY._replace(gpu_i_id=2)
    for n in range(150):
        watched.at = 30.0 * n
        for key, slope in ((one, 2 * GB), (other, 0.0)):
            used = int(3 * GB + slope * watched.at / 3600)
            watched.feed(GpuSample, key=key, memory_used_bytes=used, memory_total_bytes=int(20 * GB))
        found = watched.assess()
    assert [(item.key, item.severity) for item in found] == [(one, 2), (other, 0)]


def test_a_lost_gpu_is_not_judged():
    watched, _ = played(lambda t: 30 * GB + 8 * GB * t / 3600, 1)
    watched.state("lost")
    assert watched.only() is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("judge_seconds", -1.0),
        ("median_seconds", 1.0),
        ("slope_ratio_per_hour", 0.0),
        ("rising_share_ratio", 1.1),
        ("determination_ratio", 0.0),
        ("fall_ratio", 0.0),
        ("full_seconds", 0.0),
    ],
)
def test_refuses_what_makes_no_sense(key, value):
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(MemoryLeakConfig(), **{key: value})
