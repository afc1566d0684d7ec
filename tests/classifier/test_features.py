"""Features: the table, its normalisation, and what it must not show."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from agent.history import GPU_CHANNELS, HOST_CHANNELS, GpuHistory, HostHistory, Series
from agent.records import GpuKey, GpuLimits
from classifier import cadence, features, statistics
from classifier.features import CORE_FEATURES, FEATURE_NAMES, FEATURES, compute_gpu
from classifier.signals import REACH_S, SIGNALS, Window, whole_seconds, without_glitches

KEY = GpuKey(0)


def gpu_with(channels, *, limit=None, interval_s=1.0):
    gpu = GpuHistory(KEY, 900.0)
    if limit is not None:
        gpu.limits = GpuLimits(key=KEY, monotonic_s=0.0, wall_s=0.0, power_limit_watts=limit)
    for channel, values in channels.items():
        for position, value in enumerate(values):
            gpu.put(channel, position * interval_s, float(value))
    return gpu


def values_of(gpu, now_s, host=None, **more):
    row = compute_gpu(gpu, host or HostHistory(900.0), now_s, **more)
    return dict(zip(FEATURE_NAMES, row, strict=True))


def test_every_row_is_named_once_and_reads_known_signals():
    assert len(set(FEATURE_NAMES)) == len(FEATURES)
    for feature in FEATURES:
        assert set(feature.channels) <= SIGNALS.keys()
        assert feature.window_s in (15.0, 60.0, 300.0, 900.0)
        assert all(feature.window_s <= REACH_S[SIGNALS[name].step_s] for name in feature.channels)
        columns = min(feature.window_s / SIGNALS[name].step_s for name in feature.channels)
        assert 1 <= feature.minimum_samples <= columns
        assert feature.name.endswith(f"__{feature.window_s:g}")
        assert feature.unit in ("ratio", "decades", "seconds", "count", "per_300_s")
    assert set(CORE_FEATURES) <= set(FEATURE_NAMES)
    channels = {signal.channel for signal in SIGNALS.values()}
    assert channels <= {*GPU_CHANNELS, *HOST_CHANNELS}


def test_power_is_a_share_of_the_limit_and_memory_of_the_card():
    channels = {"power_watts": [350] * 60, "memory_used_bytes": [20e9] * 60, "memory_total_bytes": [80e9] * 60}
    values = values_of(gpu_with(channels, limit=700.0), 59.0)
    assert values["power__p50__60"] == 0.5  # 350 / 700
    assert values["memory__p50__60"] == 0.25  # 20 / 80
    assert values["watts__relative_swing__60"] == 0.0


def test_power_without_a_limit_gives_only_what_needs_none():
    values = values_of(gpu_with({"power_watts": [100, 300] * 30}), 59.0)
    assert math.isnan(values["power__p50__60"])
    # Half the samples 100, half 300: quantiles 5 % and 95 % are 100 and 300, the median 200.
    assert values["watts__relative_swing__60"] == 1.0


def test_quantiles_dwell_and_change_of_a_square_wave():
    values = values_of(gpu_with({"utilization_ratio": [0.0, 1.0] * 150}), 299.0)
    assert values["util__p05__300"] == 0.0
    assert values["util__p95__300"] == 1.0
    assert values["util__p50__300"] == 0.5
    assert values["util__mad__60"] == 0.5
    assert values["util__idle_share__300"] == 0.5
    assert values["util__saturated_share__60"] == 0.5
    assert values["util__step_change__60"] == 0.0  # a period of 2 s: the same again after 10 s
    # The 15 s window holds t = 285..299: 7 zeros (even times 286..298) and 8 ones (odd times).
    assert values["util__mean__15"] == pytest.approx(8 / 15)


def test_rates_are_decades_above_one_megabyte_per_second():
    channels = {
        "nvlink_transmit_bytes_per_second": [9e6] * 60,
        "nvlink_receive_bytes_per_second": [3e6] * 60,
    }
    values = values_of(gpu_with(channels), 59.0)
    assert values["nvlink_tx__p50__60"] == pytest.approx(1.0)  # log10(1 + 9)
    assert values["nvlink__symmetry__60"] == 0.5  # 6 / 12
    assert values["nvlink__direction__300"] == 0.5
    assert values["nvlink_tx__silent_share__60"] == 0.0


def test_host_rates_are_per_gpu():
    host = HostHistory(900.0)
    for second in range(60):
        host.put("disk_read_bytes_per_second", float(second), 8 * 99e6)
    values = values_of(gpu_with({}), 59.0, host, gpu_count=8)
    assert values["disk_read__p50__60"] == pytest.approx(2.0)  # log10(1 + 99)


def test_cadence_is_found_and_one_faster_than_the_sampling_is_not_invented():
    slow = [0.5 + 0.4 * math.sin(2 * math.pi * t / 10) for t in range(300)]
    values = values_of(gpu_with({"utilization_ratio": slow}), 299.0)
    # Peaks at 10, 20, ..., 100 s are about equally high: the first is the cadence.
    assert values["util__cadence_height__300"] > 0.95
    assert values["util__cadence_lag__300"] == 10.0
    every_other = [0.0, 1.0] * 150  # a period of 2 s at 1 s sampling: lags below 2.5 s do not count
    assert values_of(gpu_with({"utilization_ratio": every_other}), 299.0)["util__cadence_lag__300"] >= 2.5


def test_flat_signal_has_no_cadence():
    values = values_of(gpu_with({"utilization_ratio": [1.0] * 300}), 299.0)
    assert values["util__cadence_height__300"] == 0.0
    assert math.isnan(values["util__cadence_lag__300"])


def test_two_signals_agree_on_a_cadence_only_where_their_lags_do():
    def wave(period):
        return [100 + 50 * math.sin(2 * math.pi * t / period) for t in range(300)]

    same = {"power_watts": wave(12), "nvlink_transmit_bytes_per_second": [1e8 * v for v in wave(12)]}
    other = {"power_watts": wave(60), "nvlink_transmit_bytes_per_second": [1e8 * v for v in wave(11)]}
    assert values_of(gpu_with(same), 299.0)["watts_nvlink_tx__cadence_agreement__300"] > 0.9
    assert values_of(gpu_with(other), 299.0)["watts_nvlink_tx__cadence_agreement__300"] == 0.0


def test_memory_rises_in_steps():
    used = [10e9] * 100 + [20e9] * 100 + [30e9] * 100
    values = values_of(gpu_with({"memory_used_bytes": used, "memory_total_bytes": [100e9] * 300}), 299.0)
    assert values["memory__rising_steps__300"] == pytest.approx(2 * 300 / 295)  # 60 columns of 5 s
    assert values["memory__falling_steps__300"] == 0.0
    assert values["memory__swing__300"] == pytest.approx(0.2)
    # A line through three equal steps of 0.1: least squares gives 8/9 of the rise of 0.3 in 300 s.
    assert values["memory__slope__300"] == pytest.approx(0.3 * 8 / 9, rel=0.01)


def test_a_waiting_kernel_is_pinned_without_memory_traffic():
    channels = {"utilization_ratio": [1.0] * 60, "memory_utilization_ratio": [0.0] * 30 + [0.4] * 30}
    assert values_of(gpu_with(channels), 59.0)["util_memutil__pinned_without_memory__60"] == 0.5


def test_single_zero_between_busy_profiling_samples_is_no_pause():
    sm = [0.6] * 30 + [0.0] + [0.6] * 29
    assert values_of(gpu_with({"sm_active_ratio": sm}), 59.0)["sm__p05__60"] == pytest.approx(0.6)
    times, kept = without_glitches(np.arange(4.0), np.array([0.6, 0.0, 0.0, 0.6]))
    assert kept.size == times.size == 4  # two zeros in a row are a pause


def test_a_fast_log_shows_the_same_as_one_sample_a_second():
    rng = np.random.default_rng(0)
    fast = 0.1 + 0.9 * rng.random(3000)
    ten_hertz = values_of(gpu_with({"utilization_ratio": fast, "sm_active_ratio": fast}, interval_s=0.1), 299.95)
    slow = GpuHistory(KEY, 900.0)
    for second in range(300):  # a reading of the moment, and the mean since the last look
        slow.put("utilization_ratio", second + 0.9, float(fast[10 * second + 9]))
        slow.put("sm_active_ratio", second + 0.9, float(fast[10 * second : 10 * second + 10].mean()))
    one_hertz = values_of(slow, 299.95)
    for name, value in one_hertz.items():
        assert ten_hertz[name] == pytest.approx(value, abs=1e-9, nan_ok=True), name


def test_too_few_samples_and_missing_channels_are_nan():
    values = values_of(gpu_with({"utilization_ratio": [0.5] * 4}), 3.0)
    assert math.isnan(values["util__p50__60"])  # 4 samples, 5 needed
    assert values["util__mean__15"] == 0.5  # 3 needed
    assert math.isnan(values["tensor__p50__60"])
    assert np.isnan(compute_gpu(GpuHistory(KEY, 900.0), HostHistory(900.0), 0.0)).all()


def test_samples_before_the_start_of_the_evidence_do_not_count():
    gpu = gpu_with({"utilization_ratio": [1.0] * 100 + [0.0] * 20})
    assert values_of(gpu, 119.0)["util__p95__300"] == 1.0
    assert values_of(gpu, 119.0, since_s=99.5)["util__p95__300"] == 0.0


def test_whole_seconds_averages_fast_logs_only():
    slow = Series(np.arange(5.0) * 2, np.arange(5.0))
    assert whole_seconds(slow)[1] is slow.values
    times, values = whole_seconds(Series(np.array([0.0, 0.5, 1.0, 1.5]), np.array([1.0, 3.0, 5.0, 9.0])))
    assert values.tolist() == [2.0, 7.0]
    assert times.tolist() == [0.25, 1.25]


@settings(deadline=None, max_examples=60)
@given(
    values=some.lists(some.floats(0, 1e13, allow_nan=False), min_size=1, max_size=80),
    interval_s=some.sampled_from([0.1, 1.0, 5.0, 60.0]),
    channel=some.sampled_from(GPU_CHANNELS),
)
def test_any_series_gives_finite_numbers_or_nan(values, interval_s, channel):
    gpu = gpu_with({channel: values, "utilization_ratio": [0.5] * len(values)}, limit=300.0, interval_s=interval_s)
    row = compute_gpu(gpu, HostHistory(900.0), (len(values) - 1) * interval_s)
    assert row.shape == (len(FEATURES),)
    assert not np.isinf(row).any()


def test_quantile_is_numpys():
    rng = np.random.default_rng(1)
    values = rng.random(37)
    window = Window(np.arange(37.0), values)
    for share in (0.0, 0.05, 0.5, 0.95, 1.0):
        assert window.quantile(share) == pytest.approx(np.quantile(values, share), abs=1e-12)
    assert math.isnan(Window(np.empty(0), np.empty(0)).quantile(0.5))


def test_names_hold_the_statistic():
    for feature in FEATURES:
        name = feature.function.__name__
        assert hasattr(statistics, name) or hasattr(cadence, name)
        assert feature.name.split("__")[1] == name


def test_mapping_leaves_nan_out():
    row = np.full(len(FEATURES), math.nan)
    row[0] = 0.25
    assert features.as_mapping(row) == {FEATURE_NAMES[0]: 0.25}
