"""Rings, and counters that become rates."""

from __future__ import annotations

import numpy as np
import pytest

from agent.history import GPU_CHANNELS, CounterRate, History, Ring
from agent.records import (
    DiskSample,
    GpuFastPower,
    GpuHealth,
    GpuKey,
    GpuLimits,
    GpuMigInfo,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    GpuState,
    GpuXids,
    Tick,
)

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


def test_fast_power_is_dated_by_age_and_kept_for_two_minutes():
    history = History()
    for second in range(0, 400, 2):
        record = GpuFastPower(
            monotonic_s=float(second),
            wall_s=0.0,
            key=KEY,
            power_watts=(100.0, 101.0, 102.0, 103.0),
            ages_s=(1.5, 1.0, 0.5, 0.0),
        )
        history.ingest(tick(float(second), record))
    gpu = history.gpus[KEY]
    last = gpu.series("power_fast_watts", 398.0, 2.0)
    assert last.times.tolist() == [396.5, 397.0, 397.5, 398.0]
    assert last.values.tolist() == [100.0, 101.0, 102.0, 103.0]
    # Two readings a second for 120 s are 240; what a ring holds beyond that is a matter of its size.
    assert 240 <= gpu.series("power_fast_watts", 398.0, 1e9).size <= 512
    assert not gpu.has("samples")


def test_profiling_detail_has_channels():
    history = History()
    history.ingest(tick(0.0, sample(0.0, tensor_hmma_active_ratio=0.25, fp64_active_ratio=0.0)))
    assert history.gpus[KEY].latest("tensor_hmma_active_ratio", 0.0, 1.0) == 0.25
    assert history.gpus[KEY].latest("fp64_active_ratio", 0.0, 1.0) == 0.0
    assert set(_fields_of_ratio()) <= set(GPU_CHANNELS)


def _fields_of_ratio():
    return [name for name in GpuSample.__dataclass_fields__ if name.endswith("_ratio")]


def test_the_nvlink_counter_wins_over_the_rate_of_the_same_sample():
    history = History()
    for t, total, rate in ((0.0, 1000, 7.0), (1.0, 1500, 8.0), (2.0, None, 9.0), (3.0, 200, 10.0), (4.0, 300, 11.0)):
        history.ingest(
            tick(t, sample(t, nvlink_receive_bytes_total=total, nvlink_receive_bytes_per_second=rate)),
        )
    # The first reading, a missing one and a reset (200 < 1500) give no rate: the sample's own one stands in.
    received = history.gpus[KEY].series("nvlink_receive_bytes_per_second", 4.0, 10.0)
    assert received.times.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert received.values.tolist() == [7.0, 500.0, 9.0, 10.0, 100.0]


def test_the_pcie_rate_wins_over_the_slow_counter_while_it_comes():
    history = History()
    for second in range(41):
        t = float(second)
        rate = 50.0 if second <= 10 else None
        records = [sample(t, pcie_transmit_bytes_per_second=rate)]
        if second % 5 == 0:
            total = 1000 * second
            records.append(GpuSlowSample(monotonic_s=t, wall_s=t, key=KEY, pcie_transmit_bytes_total=total))
        history.ingest(tick(t, *records))
    sent = history.gpus[KEY].series("pcie_transmit_bytes_per_second", 40.0, 100.0)
    # The last rate is of 10 s; three slow periods later the counter takes over, from its first reading after 25 s on.
    assert sent.times.tolist() == [*map(float, range(11)), 30.0, 35.0, 40.0]
    assert sent.values.tolist() == [50.0] * 11 + [1000.0] * 3


CARD = GpuKey(0, "GPU-0")
ONE, TWO = CARD._replace(gpu_i_id=1), CARD._replace(gpu_i_id=2)


def core(t, *keys, **values):
    return tick(t, *(GpuSample(monotonic_s=t, wall_s=t, key=key, **values) for key in keys))


def listed(t, *keys, uuid="MIG-a"):
    return tick(t, *(GpuMigInfo(monotonic_s=t, wall_s=t, key=key, mig_uuid=f"{uuid}-{key.gpu_i_id}") for key in keys))


def test_work_runs_on_instances_where_a_card_is_divided():
    history = History()
    other = GpuKey(1, "GPU-1")
    history.ingest(core(0.0, CARD, other))
    assert list(history.gpus) == [CARD, other]
    history.ingest(core(1.0, CARD, ONE, TWO, other))
    assert list(history.gpus) == [other, ONE, TWO]
    assert list(history.all_gpus) == [CARD, other, ONE, TWO]
    assert history.all_gpus[CARD].series("samples", 1.0, 9.0).size == 2


def test_a_card_is_whole_again_once_its_instances_bring_nothing_more():
    history = History()
    history.ingest(core(0.0, CARD, ONE))
    for t in range(1, 16):
        history.ingest(core(float(t), CARD))
        assert list(history.gpus) == [ONE]
    history.ingest(core(15.5, CARD))  # more than 15 s after the last sample of the instance
    assert list(history.gpus) == [CARD]
    assert list(history.all_gpus) == [CARD]


def test_a_card_that_hangs_keeps_its_instances():
    history = History()
    history.ingest(core(0.0, CARD, ONE))
    lost = GpuState(monotonic_s=500.0, wall_s=500.0, key=CARD, state="lost")
    history.ingest(tick(500.0, lost))
    assert list(history.gpus) == [ONE]
    assert history.gpus[ONE].state == "lost"  # as its card


def test_a_new_list_of_instances_ends_those_that_are_not_on_it():
    history = History()
    history.ingest(core(0.0, CARD, ONE, TWO))
    history.ingest(listed(0.0, ONE, TWO))
    history.ingest(core(1.0, CARD, ONE, TWO))
    history.ingest(listed(2.0, TWO))
    assert list(history.gpus) == [TWO]


def test_an_instance_that_is_only_listed_stands_for_three_periods_of_the_list():
    history = History()
    history.ingest(listed(0.0, ONE))
    assert list(history.gpus) == [ONE]
    history.ingest(core(180.0, CARD))
    assert list(history.gpus) == [ONE]
    history.ingest(core(181.0, CARD))
    assert list(history.gpus) == [CARD]


def test_another_instance_with_the_same_id_starts_anew():
    history = History()
    history.ingest(listed(0.0, ONE, uuid="MIG-a"))
    history.ingest(core(1.0, CARD, ONE))
    before = history.gpus[ONE]
    history.ingest(listed(2.0, ONE, uuid="MIG-a"))
    assert history.gpus[ONE] is before
    history.ingest(listed(3.0, ONE, uuid="MIG-b"))
    assert history.gpus[ONE] is not before
    assert history.gpus[ONE].first_s is None


def test_health_limits_and_xids_of_an_instance_are_those_of_its_card():
    history = History()
    at = {"monotonic_s": 1.0, "wall_s": 1001.0}
    instance = KEY._replace(gpu_i_id=1)
    history.ingest(
        tick(
            1.0,
            GpuHealth(**at, key=KEY, ecc_uncorrected_volatile_total=2),
            GpuXids(**at, key=KEY, totals={79: 1}, last_wall_s={79: 990.0}),
            GpuLimits(**at, key=KEY, recovery_action=1),
            GpuSample(**at, key=instance, memory_used_bytes=5),
            GpuState(**at, key=KEY, state="reset_required"),
        )
    )
    assert list(history.gpus) == [instance]
    card = history.card(instance)
    assert card is history.all_gpus[KEY] is history.card(KEY)
    assert card.health.ecc_uncorrected_volatile_total == 2
    assert (card.xids.totals, card.xids.last_wall_s) == ({79: 1}, {79: 990.0})
    assert card.limits.recovery_action == 1
    assert (history.gpus[instance].state, history.gpus[instance].state_s) == ("reset_required", 1.0)
    assert history.card(GpuKey(7)) is None


def test_nobody_tells_the_state_in_a_log_without_one():
    history = History()
    history.ingest(tick(1.0, sample(1.0)))
    assert (history.gpus[KEY].state, history.gpus[KEY].state_s) == ("ok", None)
