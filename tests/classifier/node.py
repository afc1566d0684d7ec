"""A node on which every channel is measured."""

from __future__ import annotations

import numpy as np

from agent.history import GPU_CHANNELS, HOST_CHANNELS, GpuHistory, HostHistory, Series
from agent.records import GpuKey, GpuLimits

#: Channels whose rings hold what came each 5 s.
SLOW = ("process", "pcie", "temperature", "memory_temperature", "energy")


def node(gpus, *, without=(), seconds=900, seed=0):
    """A node with every channel, all of it noise, which no statistic can mistake for a constant."""
    rng = np.random.default_rng(seed)
    times = np.arange(0.0, seconds)
    histories = []
    for number in range(gpus):
        gpu = GpuHistory(GpuKey(number), 900.0)
        if "power_limit" not in without:
            gpu.limits = GpuLimits(key=gpu.key, monotonic_s=0.0, wall_s=0.0, power_limit_watts=700.0)
        for channel in GPU_CHANNELS:
            when = times[::5] if channel.startswith(SLOW) else times
            when = np.arange((seconds - 120) * 10, seconds * 10 - 9) / 10 if channel == "power_fast_watts" else when
            values = scaled(channel, rng.random(when.size))
            if channel not in without:
                gpu.load(channel, Series(when, values))
        histories.append(gpu)
    host = HostHistory(900.0)
    for channel in HOST_CHANNELS:
        values = scaled(channel, rng.random(times.size))
        if channel not in without:
            host.load(channel, Series(times, values))
    return histories, host


def scaled(channel, values):
    if channel == "memory_total_bytes":
        return np.full(values.size, 80e9)
    if channel == "memory_used_bytes":
        return values * 80e9
    if "watts" in channel:
        return 200 + 400 * values
    return values * 1e9 if "bytes" in channel else values
