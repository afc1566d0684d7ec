"""Counters that fall, leap or wrap, and values that no longer move, with figures worked out by hand."""

from __future__ import annotations

import pytest

from agent.samplers.nvml_plausible import CounterGuard, PowerGuard, RepeatGuard


def played(guard: CounterGuard, *readings: tuple[float, float]) -> list[tuple[float | None, str | None]]:
    return [guard.check(value, second) for second, value in readings]


def test_a_counter_that_counts_is_handed_on_as_it_is():
    guard = CounterGuard(most_per_s=100.0)
    assert played(guard, (0, 7), (1, 7), (2, 100), (60, 5000)) == [(7, None), (7, None), (100, None), (5000, None)]


def test_a_large_counter_keeps_every_digit():
    guard = CounterGuard(most_per_s=1e14)
    assert guard.check(2**60 + 1, 0)[0] == 2**60 + 1


def test_a_fall_is_withheld_and_counted_once_until_the_counter_is_back():
    guard = CounterGuard(most_per_s=100.0)
    seen = played(guard, (0, 500), (1, 3), (2, 3), (3, 10), (4, 520))
    assert seen == [(500, None), (None, "counter_fell"), (None, None), (None, None), (520, None)]
    assert guard.check(1, 5) == (None, "counter_fell")  # another lapse


def test_a_leap_is_withheld_and_spoils_nothing_after_it():
    guard = CounterGuard(most_per_s=100.0)
    # 100 a second and a second of slack: at most 200 more after a second, 300 after two.
    seen = played(guard, (0, 500), (1, 701), (2, 801), (3, 510))
    assert seen == [(500, None), (None, "implausible"), (None, None), (510, None)]


def test_a_fall_that_stays_for_a_minute_is_a_counter_that_was_cleared():
    guard = CounterGuard(most_per_s=100.0)
    guard.check(500, 0)
    seen = [guard.check(second // 10, second) for second in range(1, 70)]
    # Withheld from second 1 on; believed at 61, when it has been so for 60 s.
    assert [value for value, _ in seen[:60]] == [None] * 60
    assert seen[60:62] == [(6, "counter_reset"), (6, None)]
    assert [reason for _, reason in seen if reason] == ["counter_fell", "counter_reset"]


def test_garbage_that_falls_on_and_on_is_never_believed():
    guard = CounterGuard(most_per_s=100.0)
    guard.check(10_000, 0)
    assert {guard.check(5000 - second, second)[0] for second in range(1, 200)} == {None}


def test_a_wrap_of_32_bits_goes_on_in_64():
    guard = CounterGuard(most_per_s=100.0, bits=32)
    top = 2**32
    seen = played(guard, (0, top - 10), (1, 5), (2, 50), (3, 20))
    assert seen == [(top - 10, None), (top + 5, None), (top + 50, None), (None, "counter_fell")]


def test_a_fall_of_64_bits_is_no_wrap():
    assert played(CounterGuard(most_per_s=100.0), (0, 2**32 - 10), (1, 5))[1] == (None, "counter_fell")


def test_energy_that_stands_still_under_power_is_frozen():
    guard = PowerGuard()
    seen = []
    for second in range(0, 90, 5):
        guard.check_power(400.0 + second, second)
        seen.append(guard.check_energy(1000.0, second))
    # It last moved at 0 and is withheld from 60 s on; the lapse is counted once.
    assert seen[:12] == [(1000.0, None)] * 12
    assert seen[12:] == [(None, "frozen")] + [(None, None)] * 5
    assert guard.check_energy(1400.0, 90) == (1400.0, None)


@pytest.mark.parametrize("watts", [0.0, 9.0, None])
def test_energy_may_stand_still_without_power(watts):
    guard = PowerGuard()
    for second in range(0, 300, 5):
        guard.check_power(watts, second)
        assert guard.check_energy(1000.0, second) == (1000.0, None)


def test_power_that_repeats_while_energy_says_otherwise_is_frozen():
    guard = PowerGuard()
    powers, lapses = [], []
    for second in range(0, 100, 5):
        powers.append(guard.check_power(400.0, second)[0])
        lapses.append(guard.check_energy(100.0 * second, second)[1])  # 100 W in truth
    # Energy is compared from its first reading at 0; 60 s later it says 100 W against 400.
    assert lapses == [None] * 12 + ["frozen"] + [None] * 7
    assert powers == [400.0] * 13 + [None] * 7
    assert guard.check_power(101.0, 100) == (101.0, None)


def test_constant_power_that_energy_agrees_with_is_power():
    guard = PowerGuard()
    for second in range(0, 300, 5):
        assert guard.check_power(400.0, second) == (400.0, None)
        assert guard.check_energy(310.0 * second, second)[1] is None  # 22 % less: within 30 %


def test_a_suspend_is_no_lapse_of_power_or_energy():
    guard = PowerGuard()
    joules = 0.0
    for second in (*range(0, 90, 5), *range(700, 790, 5)):  # asleep for ten minutes, in which nothing was drawn
        joules += 5 * 400.0
        assert guard.check_power(400.0, second) == (400.0, None)
        assert guard.check_energy(joules, second) == (joules, None)
    # Energy that stands still on both sides of a sleep has not stood still for all of it.
    guard = PowerGuard()
    for second in (0, 5, 600, 605):
        guard.check_power(400.0, second)
        assert guard.check_energy(1000.0, second) == (1000.0, None)


def test_ratios_that_repeat_under_a_changing_load_are_frozen():
    guard = RepeatGuard(most_repeats=3)
    ratios = (0.123, 0.456)
    assert [guard.is_frozen(ratios, load) for load in (1.0, 1.0, 1.0, 1.0, 0.7, 0.7)] == [False] * 4 + [True, True]
    assert not guard.is_frozen((0.124, 0.456), 0.2)


def test_ratios_may_repeat_under_a_load_that_does_not_change():
    guard = RepeatGuard(most_repeats=3)
    assert not any(guard.is_frozen((0.5,), 0.95) for _ in range(100))
    assert not any(guard.is_frozen((0.0, 0.0), load) for load in (0.0, 1.0) * 50)
