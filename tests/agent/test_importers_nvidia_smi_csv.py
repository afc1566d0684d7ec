"""nvidia-smi --query-gpu CSV: values, fields in any order, telling GPUs apart, times, losses, restarts."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.errors import UsageError
from agent.importers import open_trace
from agent.importers.nvidia_smi_csv import lookup
from agent.records import GpuInfo, GpuKey, GpuLimits, GpuSample, GpuSlowSample, GpuState

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-bbbbbbbb-0000-0000-0000-000000000002"
T0 = 1_796_067_684.0  # date -u -d '2026-11-30 19:41:24' +%s


def read(tmp_path, text):
    path = tmp_path / "smi.csv"
    path.write_text(text)
    warnings = []
    trace = open_trace(path, warnings.append)
    return trace.header, list(trace), warnings


def of(ticks, kind, gpu=0):
    return [record for tick in ticks for record in tick.records if type(record) is kind and record.key.gpu == gpu]


FULL = f"""\
timestamp, index, name, uuid, pci.bus_id, driver_version, pstate, temperature.gpu, temperature.memory, \
utilization.gpu [%], utilization.memory [%], memory.used [MiB], memory.total [MiB], power.draw [W], \
enforced.power.limit [W], clocks.current.sm [MHz], clocks.current.memory [MHz], clocks.max.sm [MHz], \
clocks_throttle_reasons.active, clocks_event_reasons_counters.sw_power_cap [us]
2026/11/30 19:41:24.125, 0, NVIDIA H100 80GB HBM3, {A}, 00000000:3B:00.0, 570.10, P0, 45, 61, \
57 %, 34 %, 10240 MiB, 81559 MiB, 512.34 W, 700.00 W, 1980 MHz, 2619 MHz, 1980 MHz, \
0x0000000000000024, 1500000 us
2026/11/30 19:41:24.131, 1, NVIDIA H100 80GB HBM3, {B}, 00000000:5D:00.0, 570.10, P0, 40, [N/A], \
0 %, 0 %, 1 MiB, 81559 MiB, [N/A], 700.00 W, 345 MHz, 2619 MHz, 1980 MHz, 0x0000000000000001, [N/A]
2026/11/30 19:41:26.125, 0, NVIDIA H100 80GB HBM3, {A}, 00000000:3B:00.0, 570.10, P0, 46, 61, \
58 %, 34 %, 10240 MiB, 81559 MiB, 512.34 W, 650.00 W, 1980 MHz, 2619 MHz, 1980 MHz, \
0x0000000000000000, 2500000 us
"""


def test_every_field_in_base_units(tmp_path):
    header, ticks, warnings = read(tmp_path, FULL)
    key = GpuKey(0, A)
    at = {"key": key, "monotonic_s": 0.0, "wall_s": T0 + 0.125}
    assert [(tick.monotonic_s, tick.wall_s) for tick in ticks] == [(0.0, T0 + 0.125), (2.0, T0 + 2.125)]
    assert of(ticks, GpuInfo)[0] == GpuInfo(
        **at, model_name="NVIDIA H100 80GB HBM3", pci_bus_id="00000000:3B:00.0", driver_version="570.10"
    )
    assert of(ticks, GpuSample)[0] == GpuSample(
        **at,
        utilization_ratio=0.57,
        memory_utilization_ratio=0.34,
        memory_used_bytes=10_737_418_240,  # 10 GiB
        memory_total_bytes=81_559 * 1_048_576,
        power_watts=512.34,
        sm_clock_hertz=1.98e9,
        memory_clock_hertz=2.619e9,
        clock_event_reasons=("sw_power_cap", "sw_thermal"),  # 0x24 = 4 + 32
    )
    assert of(ticks, GpuSlowSample)[0] == GpuSlowSample(
        **at,
        temperature_celsius=45.0,
        memory_temperature_celsius=61.0,
        clock_event_seconds_total={"sw_power_cap": 1.5},
    )
    # The limit is sent again when it changes.
    assert [(limit.monotonic_s, limit.power_limit_watts) for limit in of(ticks, GpuLimits)] == [(0, 700), (2, 650)]
    idle = of(ticks, GpuSample, 1)[0]
    assert (idle.utilization_ratio, idle.power_watts, idle.clock_event_reasons) == (0.0, None, ("gpu_idle",))
    assert of(ticks, GpuSlowSample, 1)[0].memory_temperature_celsius is None
    assert {state.state for state in of(ticks, GpuState) + of(ticks, GpuState, 1)} == {"ok"}
    assert (header.provenance, header.source, header.interval_s) == ("imported", "nvidia-smi csv", 2.0)
    assert header.machine == {"gpu_model": "NVIDIA H100 80GB HBM3", "driver_version": "570.10"}
    assert warnings == []


FIELDS = {
    "utilization.gpu [%]": (["57 %", "0 %"], ["57", "0"]),
    "memory.used [MiB]": (["10240 MiB", "1 MiB"], ["10240", "1"]),
    "power.draw [W]": (["512.34 W", "[N/A]"], ["512.34", "[Not Supported]"]),
    "clocks.sm [MHz]": (["1980 MHz", "345 MHz"], ["1980", "345"]),
    "temperature.gpu": (["45", "40"], ["45", "40"]),
    "enforced.power.limit [W]": (["700.00 W", "700.00 W"], ["700.00", "700.00"]),
    "clocks_event_reasons.active": (["0x4", "0x1"], ["0x4", "0x1"]),
    "pstate": (["P0", "P8"], ["P0", "P8"]),
    "fan.speed [%]": (["[N/A]", "30 %"], ["[N/A]", "30"]),
}
EXPECTED = {
    "utilization.gpu [%]": (GpuSample, "utilization_ratio", [0.57, 0.0]),
    "memory.used [MiB]": (GpuSample, "memory_used_bytes", [10_737_418_240, 1_048_576]),
    "power.draw [W]": (GpuSample, "power_watts", [512.34, None]),
    "clocks.sm [MHz]": (GpuSample, "sm_clock_hertz", [1.98e9, 3.45e8]),
    "temperature.gpu": (GpuSlowSample, "temperature_celsius", [45.0, 40.0]),
    "enforced.power.limit [W]": (GpuLimits, "power_limit_watts", [700.0, 700.0]),
    "clocks_event_reasons.active": (GpuSample, "clock_event_reasons", [("sw_power_cap",), ("gpu_idle",)]),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chosen=st.lists(st.sampled_from(sorted(FIELDS)), unique=True),
    seed=st.integers(0, 1000),
    nounits=st.booleans(),
    identity=st.sampled_from(["index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id"]),
    stamped=st.booleans(),
)
def test_any_subset_and_order_of_fields_gives_the_same_values(tmp_path, chosen, seed, nounits, identity, stamped):
    names = [*chosen, "utilization.gpu [%]"] if "utilization.gpu [%]" not in chosen else chosen
    cells = {name: FIELDS[name][nounits] for name in names}
    cells[identity] = {"index": ["0", "1"], "uuid": [A, B], "gpu_uuid": [A, B]}.get(identity, ["0:1:0.0", "0:2:0.0"])
    if stamped:
        cells["timestamp"] = ["2026/11/30 19:41:24.000", "2026/11/30 19:41:24.004"]
    order = list(cells)
    random.Random(seed).shuffle(order)
    text = ", ".join(order) + "\n" + "".join(", ".join(cells[name][gpu] for name in order) + "\n" for gpu in (0, 1))
    _, ticks, _ = read(tmp_path, text)
    assert len(ticks) == 1
    for name in names:
        if name in EXPECTED:
            kind, field, values = EXPECTED[name]
            assert [getattr(of(ticks, kind, gpu)[0], field) for gpu in (0, 1)] == values


def test_last_cell_without_unit_and_line_end_is_the_only_thing_lost(tmp_path):
    _, ticks, warnings = read(tmp_path, "index, utilization.gpu [%], power.draw [W]\n0, 5 %, 70.00 W\n0, 6 %, 71.00 W")
    assert [s.power_watts for s in of(ticks, GpuSample)] == [70.0, 71.0]
    assert len(warnings) == 1  # no times
    _, ticks, _ = read(tmp_path, "index, utilization.gpu [%], power.draw [W]\n0, 5 %, 70.00 W\n0, 6 %, 71.0")
    assert [(s.utilization_ratio, s.power_watts) for s in of(ticks, GpuSample)] == [(0.05, 70.0), (0.06, None)]


def test_a_cut_name_is_no_other_model(tmp_path):
    _, ticks, _ = read(tmp_path, "index, utilization.gpu [%], name\n0, 5 %, NVIDIA A100\n0, 6 %, NVIDIA A10")
    assert {info.model_name for info in of(ticks, GpuInfo)} == {"NVIDIA A100"}
    assert len(of(ticks, GpuSample)) == 2


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("power.draw.instant [W]", "power_watts"),
        ("power.draw.average [W]", "power_watts"),
        ("clocks.gr [MHz]", "sm_clock_hertz"),
        ("clocks.current.graphics [MHz]", "sm_clock_hertz"),
        ("clocks.mem [MHz]", "memory_clock_hertz"),
        ("CLOCKS.SM [MHz]", "sm_clock_hertz"),
        ("clocks_throttle_reasons.hw_thermal_slowdown", "hw_thermal"),
        ("clocks_event_reasons.hw_power_brake_slowdown", "hw_power_brake"),
        ("clocks.max.gr [MHz]", "sm_clock_max_hertz"),
        ("gpu_name", "model_name"),
    ],
)
def test_aliases(name, field):
    column = lookup(name)
    assert column is not None
    assert column.field == field


def test_other_fields_are_unknown():
    for name in ("serial", "gpu_serial", "ecc.errors.corrected.volatile.total", "power.draw [furlongs]", "45 %", ""):
        assert lookup(name) is None


def test_better_power_column_wins_row_by_row(tmp_path):
    text = "index, power.draw.instant [W], power.draw [W]\n0, 90.0 W, 80.0 W\n0, 91.0 W, [N/A]\n"
    _, ticks, _ = read(tmp_path, text)
    assert [s.power_watts for s in of(ticks, GpuSample)] == [80.0, 91.0]


def test_single_reason_columns(tmp_path):
    text = (
        "index, power.draw [W], clocks_throttle_reasons.sw_power_cap, clocks_throttle_reasons.hw_thermal_slowdown\n"
        "0, 99 W, Not Active, Active\n0, 99 W, Not Active, Not Active\n0, 99 W, [N/A], [N/A]\n"
    )
    _, ticks, _ = read(tmp_path, text)
    assert [s.clock_event_reasons for s in of(ticks, GpuSample)] == [("hw_thermal",), (), None]


def test_impossible_values_are_none_and_said_once(tmp_path):
    text = (
        "index, utilization.gpu [%], power.draw [W]\n"
        + "0, 4294967295 %, nan\n" * 3
        + "0, 5 %, -3.0 W\n0, 6 %, 1e99 W\n"
    )
    _, ticks, warnings = read(tmp_path, text)
    assert [s.utilization_ratio for s in of(ticks, GpuSample)] == [None, None, None, 0.05, 0.06]
    assert {s.power_watts for s in of(ticks, GpuSample)} == {None}
    assert sum("utilization.gpu" in warning for warning in warnings) == 1


def test_without_times_one_second_is_assumed_and_said(tmp_path):
    header, ticks, warnings = read(tmp_path, "index, utilization.gpu [%]\n0, 1 %\n1, 2 %\n0, 3 %\n1, 4 %\n")
    assert [(tick.monotonic_s, tick.wall_s) for tick in ticks] == [(0.0, 0.0), (1.0, 1.0)]
    assert header.interval_s == 1.0
    assert len(warnings) == 1
    assert "one sample every 1 s" in warnings[0]


def stamped(times, columns="utilization.gpu [%]", value="5 %"):
    return f"timestamp, {columns}\n" + "".join(f"{time}, {value}\n" for time in times)


def test_clock_step_back_and_repeated_time_keep_time_going(tmp_path):
    times = ["19:00:00.000", "19:00:02.000", "18:00:00.000", "18:00:02.000", "18:00:02.000", "18:00:04.000"]
    _, ticks, warnings = read(tmp_path, stamped([f"2026/11/30 {time}" for time in times]))
    # 0, +2, back: one interval of 2 s, +2, repeated: one interval, and then the log's clock has to catch up: a tenth.
    assert [tick.monotonic_s for tick in ticks] == pytest.approx([0, 2, 4, 6, 8, 8.2])
    assert ticks[2].wall_s == ticks[0].wall_s - 3600
    assert sum("goes back" in warning for warning in warnings) == 1
    assert sum("twice" in warning for warning in warnings) == 1


def test_pause_of_days_is_kept_and_a_clock_set_forward_by_years_is_not(tmp_path):
    times = ["1970/01/01 00:00:00", "1970/01/01 00:00:01", "2026/11/30 19:00:00", "2026/11/30 19:00:01"]
    header, ticks, warnings = read(tmp_path, stamped([*times, "2026/12/03 19:00:01"]))
    assert header.interval_s == 1.0
    assert [tick.monotonic_s for tick in ticks] == [0.0, 1.0, 2.0, 3.0, 3.0 + 3 * 86_400]
    assert sum("forward by months" in warning for warning in warnings) == 1


def test_two_samples_a_second_with_times_in_whole_seconds_do_not_drift(tmp_path):
    times = [f"2026-11-30T19:00:{second:02}" for second in range(30) for _ in (0, 1)]
    header, ticks, _ = read(
        tmp_path, "index, timestamp, utilization.gpu [%]\n" + "".join(f"0, {t}, 5 %\n" for t in times)
    )
    assert header.interval_s == pytest.approx(0.5, rel=0.05)
    assert ticks[-1].monotonic_s == pytest.approx(29.5, abs=0.1)


@pytest.mark.parametrize(
    "stamps",
    [
        ["2026/11/30 19:41:24.500", "2026/11/30 19:41:25.500"],
        ["2026-11-30 19:41:24.500", "2026-11-30 19:41:25.500"],
        ["2026-11-30T19:41:24.500Z", "2026-11-30T19:41:25.500Z"],
        ["2026-11-30T20:41:24.500+01:00", "2026-11-30T20:41:25.500+01:00"],
        [f"{T0 + 0.5}", f"{T0 + 1.5}"],
        [f"{(T0 + 0.5) * 1000:.0f}", f"{(T0 + 1.5) * 1000:.0f}"],
    ],
)
def test_forms_of_time(tmp_path, stamps):
    _, ticks, _ = read(tmp_path, stamped(stamps))
    assert [(tick.monotonic_s, tick.wall_s) for tick in ticks] == [(0.0, T0 + 0.5), (1.0, T0 + 1.5)]


def test_uuid_decides_and_indices_stay_with_it_when_they_are_swapped(tmp_path):
    text = f"index, uuid, utilization.gpu [%]\n0, {A}, 10 %\n1, {B}, 20 %\n0, {B}, 21 %\n1, {A}, 11 %\n"
    _, ticks, _ = read(tmp_path, text)
    assert [s.utilization_ratio for s in of(ticks, GpuSample, 0)] == [0.1, 0.11]
    assert [s.key for s in of(ticks, GpuSample, 1)] == [GpuKey(1, B), GpuKey(1, B)]


def test_gpus_without_identity_are_told_apart_by_equal_times(tmp_path):
    rows = "".join(f"2026/11/30 19:00:{s:02}.{ms:03}, {s + ms} %\n" for s in range(5) for ms in (0, 3, 7))
    _, ticks, warnings = read(tmp_path, "timestamp, utilization.gpu [%]\n" + rows)
    assert len(ticks) == 5
    assert [s.utilization_ratio for s in of(ticks, GpuSample, 2)] == [0.07, 0.08, 0.09, 0.10, 0.11]
    assert any("taken as 3 GPUs" in warning for warning in warnings)


def test_gpus_that_cannot_be_told_apart_are_refused(tmp_path):
    uneven = [f"2026/11/30 19:00:{s:02}.{ms:03}" for s in range(6) for ms in range(2 + s % 3)]
    with pytest.raises(UsageError, match="log the index or the uuid"):
        read(tmp_path, stamped(uneven))
    with pytest.raises(UsageError, match="log the index or the uuid"):
        read(tmp_path, "name, utilization.gpu [%]\nNVIDIA A100, 1 %\nTesla T4, 2 %\n")


def test_one_gpu_without_identity_or_time(tmp_path):
    _, ticks, warnings = read(tmp_path, "utilization.gpu [%]\n1 %\n2 %\n3 %\n")
    assert [s.utilization_ratio for s in of(ticks, GpuSample)] == [0.01, 0.02, 0.03]
    assert any("taken as one GPU" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("cells", "state"),
    [
        ("ERR!, ERR!", "lost"),
        ("[Unknown Error], [N/A]", "lost"),
        ("[GPU is lost], [GPU is lost]", "lost"),
        ("[GPU requires reset], [Unknown Error]", "reset_required"),
    ],
)
def test_rows_of_a_lost_gpu_give_its_state_and_no_sample(tmp_path, cells, state):
    ok = "0, 5 %, 70 W\n1, 5 %, 70 W\n"
    text = f"index, utilization.gpu [%], power.draw [W]\n{ok}0, 5 %, 70 W\n1, {cells}\n{ok}"
    _, ticks, _ = read(tmp_path, text)
    assert [record.state for record in of(ticks, GpuState, 1)] == ["ok", state, "ok"]
    assert len(of(ticks, GpuSample, 1)) == 2
    assert len(of(ticks, GpuSample, 0)) == 3


def test_one_failed_field_is_no_loss_and_unsupported_fields_say_nothing(tmp_path):
    _, ticks, _ = read(
        tmp_path, "index, utilization.gpu [%], power.draw [W]\n0, 5 %, [Unknown Error]\n0, [N/A], [N/A]\n"
    )
    assert [record.state for record in of(ticks, GpuState)] == ["ok"]
    assert len(of(ticks, GpuSample)) == 2


def test_message_that_a_gpu_is_lost(tmp_path):
    lost = "Unable to determine the device handle for GPU {}: GPU is lost.  Reboot the system to recover this GPU\n"
    text = "pci.bus_id, utilization.gpu [%]\n00000000:3B:00.0, 5 %\n00000000:5d:00.0, 5 %\n00000000:3B:00.0, 6 %\n"
    _, ticks, warnings = read(tmp_path, text + lost.format("0000:5D:00.0") + lost.format("0000:99:00.0"))
    assert [record.state for record in of(ticks, GpuState, 1)] == ["ok", "lost"]
    assert len(of(ticks, GpuState)) == 2
    assert any("99:00.0" in warning for warning in warnings)


def test_repeated_headers_also_with_other_columns_and_glued_to_a_torn_row(tmp_path):
    text = (
        "timestamp, index, utilization.gpu [%]\n2026/11/30 19:00:00, 0, 10 %\n"
        "timestamp, index, utilization.gpu [%]\n2026/11/30 19:00:01, 0, 20 %\n"
        "index, timestamp, power.draw [W]\n0, 2026/11/30 19:00:02, 70.00 W\n"
        "0, 2026/11/3timestamp, utilization.gpu [%], index\n2026/11/30 19:00:03, 40 %, 0\n"
    )
    _, ticks, _ = read(tmp_path, text)
    assert [tick.monotonic_s for tick in ticks] == [0.0, 1.0, 2.0, 3.0]
    assert [s.utilization_ratio for s in of(ticks, GpuSample)] == [0.1, 0.2, None, 0.4]
    assert [s.power_watts for s in of(ticks, GpuSample)] == [None, None, 70.0, None]


def test_lines_before_the_header_and_damaged_lines_are_left_out(tmp_path):
    text = "starting logger\n\nindex, utilization.gpu [%]\n0, 10 %\n0\n0, 1, 2, 3\n\0\0\0\n0, 20 %\n"
    _, ticks, warnings = read(tmp_path, text)
    assert [s.utilization_ratio for s in of(ticks, GpuSample)] == [0.1, 0.2]
    assert any("left out damaged line 5" in warning for warning in warnings)
    assert any("2 damaged lines in all" in warning for warning in warnings)


def test_quoted_cells(tmp_path):
    _, ticks, _ = read(tmp_path, '"index","name","utilization.gpu [%]"\n"0","NVIDIA, Inc. A100","15"\n')
    assert of(ticks, GpuInfo)[0].model_name == "NVIDIA, Inc. A100"
    assert of(ticks, GpuSample)[0].utilization_ratio == 0.15
