"""Seconds and joules by label: they add up, gaps are unknown, and nothing ever falls."""

from __future__ import annotations

import pytest

from agent.accounts import Account
from agent.history import GpuHistory
from agent.records import GpuKey, GpuSample

KEY = GpuKey(0, "GPU-0")


def sampled(gpu, *times):
    for t in times:
        gpu.add_sample(GpuSample(monotonic_s=t, wall_s=t, key=KEY, power_watts=200.0))


def seconds(account):
    return {word: value for word, value in account.seconds.items() if value}


def test_a_sample_that_is_delivered_late_takes_nothing_back():
    """After a suspend everything is due at once: a judgement may come before the sample that was taken before it."""
    gpu, account = GpuHistory(KEY, 900.0), Account(3.0)
    account.workload = "idle"
    sampled(gpu, *range(101))
    account.book(100.0, gpu)
    account.book(160.0, gpu)  # the gap so far is 60 s
    before = dict(account.seconds), dict(account.energy_joules)
    sampled(gpu, 159.95)
    account.book(160.3, gpu)
    assert (dict(account.seconds), dict(account.energy_joules)) == before
    sampled(gpu, 161.0)
    account.book(161.0, gpu)
    # The mark stood at 160 s; from there to 161 s there are samples.
    assert seconds(account) == {"idle": pytest.approx(101.0), "unknown": pytest.approx(60.0)}
    assert account.energy_joules["idle"] == pytest.approx(101 * 200.0)


def test_a_gpu_that_was_never_sampled_is_unknown_all_the_time():
    gpu, account = GpuHistory(KEY, 900.0), Account(3.0)
    for t in (0.0, 5.0, 10.0):
        account.book(t, gpu)
    assert seconds(account) == {"unknown": 10.0}
    sampled(gpu, 12.0, 13.0)
    account.workload = "idle"
    account.book(13.0, gpu)
    # Up to its first sample nothing is known; one second lies between two samples.
    assert seconds(account) == {"unknown": pytest.approx(12.0), "idle": pytest.approx(1.0)}


def test_what_is_missing_to_the_length_of_a_replay_is_unknown():
    gpu, account = GpuHistory(KEY, 900.0), Account(3.0)
    account.workload = "other"
    sampled(gpu, 60.0, 61.0)
    account.book(61.0, gpu, is_final=True)
    assert account.filled(100.0)["unknown"] == pytest.approx(99.0)
    assert sum(account.filled(100.0).values()) == pytest.approx(100.0)
    assert account.seconds["unknown"] == 0.0  # the counter itself is left alone


def test_a_pause_is_left_out():
    gpu, account = GpuHistory(KEY, 900.0), Account(3.0)
    account.workload = "idle"
    sampled(gpu, 0.0, 1.0, 2.0)
    account.book(2.0, gpu)
    account.pause()
    sampled(gpu, 50.0)
    account.book(50.0, gpu)
    sampled(gpu, 51.0)
    account.book(51.0, gpu)
    assert seconds(account) == {"idle": pytest.approx(3.0)}
