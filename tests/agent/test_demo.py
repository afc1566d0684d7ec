"""The demo sampler: the records of a trace at the pace of the clock, again and again."""

from __future__ import annotations

import pytest

from agent.clock import Instant
from agent.errors import UsageError
from agent.records import GpuKey, GpuSample, NetworkSample, Tick
from agent.samplers.demo import DemoSampler

KEY = GpuKey(0, "GPU-0")


def trace(count=3):
    """GPU 0 at 0.1, 0.2, 0.3 of utilisation in seconds 100, 101, 102, with a network that must not be played."""
    for i in range(count):
        t = 100.0 + i
        yield Tick(
            monotonic_s=t,
            wall_s=t,
            records=(
                GpuSample(monotonic_s=t, wall_s=t, key=KEY, utilization_ratio=(i + 1) / 10),
                NetworkSample(monotonic_s=t, wall_s=t, device="eth0", receive_bytes_total=1, transmit_bytes_total=1),
            ),
        )


def played(sampler, t):
    return [record.utilization_ratio for record in sampler.sample(Instant(t, 5000.0 + t))]


def test_it_plays_in_real_time_and_starts_again_at_the_end():
    sampler = DemoSampler(trace(), 1.0)
    assert sampler.probe()
    assert sampler.gpu_count == 1
    assert played(sampler, 7000.0) == [0.1]
    assert played(sampler, 7000.5) == []
    assert played(sampler, 7001.0) == [0.2]
    # Seconds 2 (0.3), 3 (0.1 of the second round) and 4 (0.2) are due: the newest counts.
    assert played(sampler, 7004.2) == [0.2]
    assert played(sampler, 7005.0) == [0.3]


def test_records_carry_the_present_time_and_only_gpus_are_played():
    sampler = DemoSampler(trace(), 1.0)
    sampler.probe()
    (record,) = sampler.sample(Instant(7000.0, 12345.0))
    assert (record.monotonic_s, record.wall_s, record.key) == (7000.0, 12345.0, KEY)


def test_a_trace_without_gpus_is_refused():
    with pytest.raises(UsageError, match="no sample of a GPU"):
        DemoSampler(iter(()), 1.0)


def test_after_a_long_pause_it_goes_on_at_once():
    sampler = DemoSampler(trace(), 1.0)
    sampler.probe()
    sampler.sample(Instant(0.0, 0.0))
    # 86,400 s later: 28,800 rounds of 3 s, so second 0 of a round.
    assert played(sampler, 86_400.0) == [0.1]
