"""Rings, and counters that become rates."""

from __future__ import annotations

import numpy as np
import pytest

from agent.history import CounterRate, History, Ring
from agent.records import DiskSample, GpuKey, GpuProcess, GpuSample, GpuSlowSample, Tick

KEY = GpuKey(0, "GPU-0")


def tick(t, *records):
    return Tick(monotonic_s=t, wall_s=1000.0 + t, records=records)


def sample(t, **values):
    return GpuSample(monotonic_s=t, wall_s=1000.0 + t, key=KEY, **values)


def test_a_window_holds_what_lies_after_its_start_up_to_now():
    ring = Ring(100.0, rows=4)
    for t in (1.0, 2.0, 3.0, 4.0):
        ring.append(t, t * 10)
    window = ring.window(3.0, 2.0)  # after 1.0, up to 3.0
    assert window.times.tolist() == [2.0, 3.0]
    assert window.values.tolist() == [20.0, 30.0]
    assert window.size == 2


def test_a_ring_forgets_what_is_older_than_its_horizon_and_stays_small():
    ring = Ring(10.0, rows=8)
    for t in range(10_000):
        ring.append(float(t), float(t))
    # The horizon holds 11 rows; twice that, rounded up to a power of two, is the most a ring may take.
    assert ring._data.shape[1] <= 32
    assert ring.window(9_999.0, 10.0).values.tolist() == [float(t) for t in range(9_990, 10_000)]


def test_a_ring_grows_where_the_horizon_holds_more_than_it_has_rows():
    ring = Ring(1e9, rows=2)
    for t in range(1000):
        ring.append(float(t), float(-t))
    assert ring.window(999.0, 2000.0).values.tolist() == [float(-t) for t in range(1000)]


def test_a_sample_that_is_not_later_is_dropped():
    ring = Ring(100.0)
    ring.append(5.0, 1.0)
    ring.append(5.0, 2.0)
    ring.append(4.0, 3.0)
    assert ring.last() == (5.0, 1.0)


@pytest.mark.parametrize(
    ("readings", "rates"),
    [
        ([(0.0, 100), (2.0, 300)], [None, 100.0]),  # (300 - 100) / 2
        ([(0.0, 100), (1.0, 40), (2.0, 50)], [None, None, 10.0]),  # a reset gives no rate, the next one does
        ([(0.0, 100), (0.0, 200)], [None, None]),  # no time has passed
        ([(0.0, 7), (1.0, 7)], [None, 0.0]),  # zero is a measurement
    ],
)
def test_rates_of_a_counter(readings, rates):
    counter = CounterRate()
    assert [counter.update(*reading) for reading in readings] == rates


def test_a_missing_value_leaves_no_sample_and_the_counter_goes_on_after_it():
    history = History()
    for t, total in ((0.0, 1000), (1.0, None), (2.0, 5000)):
        history.ingest(tick(t, sample(t, nvlink_receive_bytes_total=total, utilization_ratio=None)))
    gpu = history.gpus[KEY]
    received = gpu.series("nvlink_receive_bytes_per_second", 2.0, 10.0)
    assert received.times.tolist() == [2.0]
    assert received.values.tolist() == [2000.0]  # (5000 - 1000) / 2 s
    assert not gpu.has("utilization_ratio")
    assert gpu.series("samples", 2.0, 10.0).size == 3


def test_host_channels_are_sums_over_devices():
    history = History()
    for t, sda, nvme in ((0.0, 0, 1000), (1.0, 50, 1700)):
        history.ingest(
            tick(
                t,
                DiskSample(monotonic_s=t, wall_s=t, device="sda", read_bytes_total=0, written_bytes_total=sda),
                DiskSample(monotonic_s=t, wall_s=t, device="nvme0n1", read_bytes_total=0, written_bytes_total=nvme),
            )
        )
    assert history.host.latest("disk_written_bytes_per_second", 1.0, 1.0) == 750.0  # 50 + 700
    assert history.host.latest("disk_written_bytes_per_second", 9.0, 1.0) is None  # too old


def test_the_time_of_the_process_set_changes_with_its_members_only():
    history = History()
    for t, pids in ((0.0, (1, 2)), (5.0, (2, 1)), (10.0, (1, 3))):
        processes = tuple(GpuProcess(pid, 10) for pid in pids)
        history.ingest(tick(t, GpuSlowSample(monotonic_s=t, wall_s=t, key=KEY, processes=processes)))
        expected = 10.0 if t == 10.0 else 0.0
        assert history.gpus[KEY].processes_since_s == expected


def test_throttled_counts_thermal_and_hardware_reasons_only():
    history = History()
    for t, reasons in ((0.0, ("sw_power_cap", "gpu_idle")), (1.0, ("hw_thermal",)), (2.0, ()), (3.0, None)):
        history.ingest(tick(t, sample(t, clock_event_reasons=reasons)))
    assert history.gpus[KEY].series("throttled", 3.0, 10.0).values.tolist() == [0.0, 1.0, 0.0]
    assert np.isfinite(history.gpus[KEY].series("samples", 3.0, 10.0).values).all()
