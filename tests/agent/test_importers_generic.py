"""Generic CSV with units in the column names, and the parsing of single values."""

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.errors import UsageError
from agent.importers import open_trace, values
from agent.records import GpuKey, GpuLimits, GpuSample, GpuSlowSample


def read(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    warnings = []
    trace = open_trace(path, warnings.append)
    return trace.header, list(trace), warnings


def of(ticks, kind, gpu=0):
    return [record for tick in ticks for record in tick.records if type(record) is kind and record.key.gpu == gpu]


def test_every_column_in_base_units(tmp_path):
    text = (
        "t_s,gpu,util_gpu_pct,util_mem_pct,mem_used_mib,mem_total_mib,power_w,power_limit_w,sm_clock_mhz,mem_clock_mhz,"
        "temp_c,pcie_tx_kbs,pcie_rx_kbs,nvlink_tx_kbs,nvlink_rx_kbs,sm_active,tensor_active,dram_active\n"
        "0.000,3,57,7,528,81559,104.9,700,1980,2619,29,36341.1,21012,8,9,0.25,0.125,6e-06\n"
        "0.253,3,0,,,,,,,,,,,,,,,\n"
    )
    header, ticks, warnings = read(tmp_path, text)
    at = {"monotonic_s": 0.0, "wall_s": 0.0, "key": GpuKey(3)}
    assert of(ticks, GpuSample, 3) == [
        GpuSample(
            **at,
            utilization_ratio=0.57,
            memory_utilization_ratio=0.07,
            memory_used_bytes=553_648_128,  # 528 * 1,048,576
            memory_total_bytes=85_520_809_984,
            power_watts=104.9,
            sm_clock_hertz=1.98e9,
            memory_clock_hertz=2.619e9,
            pcie_transmit_bytes_per_second=36_341_100.0,  # kB are 1000 bytes
            pcie_receive_bytes_per_second=21_012_000.0,
            nvlink_transmit_bytes_per_second=8000.0,
            nvlink_receive_bytes_per_second=9000.0,
            sm_active_ratio=0.25,
            tensor_active_ratio=0.125,
            dram_active_ratio=6e-06,
        ),
        GpuSample(monotonic_s=0.253, wall_s=0.253, key=GpuKey(3), utilization_ratio=0.0),
    ]
    assert of(ticks, GpuSlowSample, 3) == [GpuSlowSample(**at, temperature_celsius=29.0)]
    assert of(ticks, GpuLimits, 3) == [GpuLimits(**at, power_limit_watts=700.0)]
    assert (header.source, header.interval_s) == ("generic csv", 0.253)
    assert warnings == []


COLUMNS = {
    "util_gpu_pct": (["50", "60"], GpuSample, "utilization_ratio", [0.5, 0.6]),
    "power_w": (["100.5", ""], GpuSample, "power_watts", [100.5, None]),
    "mem_used_mib": (["1", "2"], GpuSample, "memory_used_bytes", [2**20, 2**21]),
    "temp_c": (["30", "31"], GpuSlowSample, "temperature_celsius", [30.0, 31.0]),
    "dram_active": (["0", "1"], GpuSample, "dram_active_ratio", [0.0, 1.0]),
    "note": (["a b", "c"], None, None, None),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.sampled_from(sorted(COLUMNS)), unique=True).filter(lambda names: set(names) - {"note"}),
    seed=st.integers(0, 999),
    with_gpu=st.booleans(),
)
def test_any_subset_and_order_of_columns_gives_the_same_values(tmp_path, chosen, seed, with_gpu):
    cells = {name: COLUMNS[name][0] for name in chosen} | {"t_s": ["5.0", "6.0"]}
    if with_gpu:
        cells["gpu"] = ["0", "0"]
    order = list(cells)
    random.Random(seed).shuffle(order)
    text = ",".join(order) + "\n" + "".join(",".join(cells[name][row] for name in order) + "\n" for row in (0, 1))
    _, ticks, warnings = read(tmp_path, text)
    assert [tick.monotonic_s for tick in ticks] == [0.0, 1.0]
    for name in chosen:
        _, kind, field, expected = COLUMNS[name]
        if kind is not None:
            assert [getattr(record, field) for record in of(ticks, kind)] == expected
    assert len(warnings) == (0 if with_gpu else 1)


def test_rows_of_one_moment_become_one_tick_also_when_a_gpu_goes_missing(tmp_path):
    text = "t_s,gpu,power_w\n0.000,0,1\n0.004,1,2\n0.328,0,3\n0.329,1,4\n0.650,1,5\n0.980,0,6\n0.985,1,7\n"
    _, ticks, _ = read(tmp_path, text)
    assert [tick.monotonic_s for tick in ticks] == [0.0, 0.328, 0.65, 0.98]
    assert [len(of([tick], GpuSample) + of([tick], GpuSample, 1)) for tick in ticks] == [2, 2, 1, 2]


def test_limits_are_sent_on_change_and_once_a_minute(tmp_path):
    rows = "".join(f"{t},0,{700 if t < 100 else 650},5\n" for t in range(0, 200, 10))
    _, ticks, _ = read(tmp_path, "t_s,gpu,power_limit_w,util_gpu_pct\n" + rows)
    assert [(r.monotonic_s, r.power_limit_watts) for r in of(ticks, GpuLimits)] == [
        (0, 700),
        (60, 700),
        (100, 650),
        (160, 650),
    ]


def test_gpus_one_below_the_other_are_refused(tmp_path):
    rows = "".join(f"{t},{gpu},5\n" for gpu in (0, 1) for t in range(2000))
    with pytest.raises(UsageError, match="sort its rows by time"):
        read(tmp_path, "t_s,gpu,power_w\n" + rows)


@pytest.mark.parametrize(
    ("dimension", "unit", "cell", "value"),
    [
        ("ratio", "%", "57", 0.57),
        ("ratio", "%", " 29 % ", 0.29),
        ("ratio", "%", "100", 1.0),
        ("ratio", "%", "101", None),
        ("ratio", "%", "-1", None),
        ("bytes", "MiB", "1.5", 1_572_864),
        ("bytes", "MiB", "1 GiB", 2**30),
        ("bytes", "MiB", "1 MB", 1_000_000),
        ("watts", "W", "512.34 W", 512.34),
        ("watts", "W", "1500 mW", 1.5),
        ("watts", "W", "12 MHz", None),
        ("hertz", "MHz", "1.98 GHz", 1.98e9),
        ("celsius", "C", "-5", -5.0),
        ("seconds", "us", "2500000", 2.5),
        ("bytes_per_second", "KB/s", "3", 3000.0),
        ("watts", "W", "", None),
        ("watts", "W", "nan", None),
        ("watts", "W", "inf", None),
        ("watts", "W", "1e400", None),
        ("watts", "W", "[N/A]", None),
        ("watts", "W", "12,5", None),
    ],
)
def test_quantities(dimension, unit, cell, value):
    assert values.quantity(dimension, unit)(cell) == value


@given(st.text(max_size=20))
def test_no_cell_raises_and_none_gives_a_value_that_is_not_finite(cell):
    for dimension, unit in (("ratio", "%"), ("bytes", "MiB"), ("watts", "W")):
        value = values.quantity(dimension, unit)(cell)
        assert value is None or math.isfinite(value)
    time = values.parse_time(cell)
    assert time is None or math.isfinite(time)
    for parse in (values.whole_number, values.text, values.clock_event_reasons, values.activity, values.failure):
        parse(cell)


def test_clock_event_reasons():
    # 1 idle, 4 power cap, 8 hardware, 0x10 sync boost, 0x20, 0x40, 0x80; 2 and 0x100 are settings and have no word.
    assert values.clock_event_reasons("0x00000000000001ff") == (
        "gpu_idle",
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal",
        "hw_thermal",
        "hw_power_brake",
    )
    assert values.clock_event_reasons("0x102") == ()
    assert values.clock_event_reasons("8") == ("hw_slowdown",)
    assert values.clock_event_reasons("[N/A]") is None
