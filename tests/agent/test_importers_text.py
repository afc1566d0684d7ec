"""nvidia-smi dmon and pmon text, values worked out by hand from the rows."""

import pytest

from agent.errors import UsageError
from agent.importers import open_trace
from agent.records import GpuKey, GpuProcess, GpuSample, GpuSlowSample, GpuState

T0 = 1_796_067_684.0  # date -u -d '2026-11-30 19:41:24' +%s


def read(tmp_path, text):
    path = tmp_path / "log.txt"
    path.write_text(text)
    warnings = []
    trace = open_trace(path, warnings.append)
    return trace.header, list(trace), warnings


def of(ticks, kind, gpu=0):
    return [record for tick in ticks for record in tick.records if type(record) is kind and record.key.gpu == gpu]


DMON = """\
# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk  pviol  tviol     fb   bar1  rxpci  txpci
# Idx      W      C      C      %      %      %      %    MHz    MHz      %   bool     MB     MB   MB/s   MB/s
    0    350     60     71     99     57      0      0   2619   1980      3      0  40960      4    120     80
    1     70     35      -      0      0      0      0   2619    345      0      0      1      4      0      0
"""


def test_dmon_values_in_base_units(tmp_path):
    header, ticks, warnings = read(tmp_path, DMON)
    at = {"key": GpuKey(0), "monotonic_s": 0.0, "wall_s": 0.0}
    assert of(ticks, GpuSample) == [
        GpuSample(
            **at,
            power_watts=350.0,
            utilization_ratio=0.99,
            memory_utilization_ratio=0.57,
            memory_clock_hertz=2.619e9,
            sm_clock_hertz=1.98e9,
            memory_used_bytes=40 * 2**30,
            pcie_receive_bytes_per_second=1.2e8,
            pcie_transmit_bytes_per_second=8e7,
        )
    ]
    assert of(ticks, GpuSlowSample) == [GpuSlowSample(**at, temperature_celsius=60.0, memory_temperature_celsius=71.0)]
    assert of(ticks, GpuSlowSample, 1)[0].memory_temperature_celsius is None
    assert of(ticks, GpuSample, 1)[0].pcie_receive_bytes_per_second == 0.0
    assert (header.source, header.interval_s) == ("nvidia-smi dmon", 1.0)
    assert len(warnings) == 1
    assert "one sample every 1 s" in warnings[0]


def test_dmon_header_that_comes_again_and_any_columns(tmp_path):
    names = "# gpu     sm\n# Idx      %\n"
    _, ticks, _ = read(
        tmp_path, names + "    0     10\n    0     20\n" + names + "    0     30\n# gpu  pwr\n# Idx W\n  0  77\n"
    )
    assert [(tick.monotonic_s, tick.wall_s) for tick in ticks] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [s.utilization_ratio for s in of(ticks, GpuSample)] == [0.1, 0.2, 0.3, None]
    assert [s.power_watts for s in of(ticks, GpuSample)] == [None, None, None, 77.0]


def test_dmon_with_date_and_time(tmp_path):
    text = (
        "#Date       Time        gpu     sm\n#YYYYMMDD   HH:MM:SS    Idx      %\n"
        " 20261130   19:41:24      0     10\n 20261130   19:41:24      1     11\n"
        " 20261130   19:41:29      0     20\n 20261130   19:41:29      1     21\n"
    )
    header, ticks, warnings = read(tmp_path, text)
    assert [(tick.monotonic_s, tick.wall_s) for tick in ticks] == [(0.0, T0), (5.0, T0 + 5)]
    assert [s.utilization_ratio for s in of(ticks, GpuSample, 1)] == [0.11, 0.21]
    assert header.interval_s == 5.0
    assert warnings == []


def test_dmon_with_time_alone_goes_on_over_midnight_and_has_no_date(tmp_path):
    times = ("23:59:58", "23:59:59", "00:00:00", "00:00:01")
    text = "#Time gpu sm\n#HH:MM:SS Idx %\n" + "".join(f" {time}      0     10\n" for time in times)
    _, ticks, warnings = read(tmp_path, text)
    assert [(tick.monotonic_s, tick.wall_s) for tick in ticks] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert warnings == []


def test_dmon_as_csv(tmp_path):
    _, ticks, _ = read(tmp_path, "#gpu, pwr, sm\n#Idx, W, %\n0, 100, 50\n0, 110, 60\n")
    assert [(s.power_watts, s.utilization_ratio) for s in of(ticks, GpuSample)] == [(100.0, 0.5), (110.0, 0.6)]


def test_dmon_dashes_say_nothing_about_the_state(tmp_path):
    _, ticks, _ = read(tmp_path, "# gpu pwr sm\n# Idx W %\n 0 100 50\n 1 - -\n")
    assert of(ticks, GpuState, 1) == []
    assert [record.state for record in of(ticks, GpuState)] == ["ok"]


def test_dmon_damaged_and_torn_rows(tmp_path):
    text = "# gpu pwr sm\n# Idx W %\n 0 100 50\n 0 100\n x 100 50\n 0 110 60\n 0 120 7"
    _, ticks, warnings = read(tmp_path, text)
    assert [(s.power_watts, s.utilization_ratio) for s in of(ticks, GpuSample)] == [(100, 0.5), (110, 0.6), (120, None)]
    assert sum("left out damaged line 4" in warning for warning in warnings) == 1
    assert sum("left out 2 damaged lines" in warning for warning in warnings) == 1
    assert sum("has no end" in warning for warning in warnings) == 1
    _, ticks, warnings = read(tmp_path, text[: -len(" 7")])
    assert len(ticks) == 2
    assert any("torn last line 7" in warning for warning in warnings)


PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa     fb   ccpm    command
# Idx           #    C/G      %      %      %      %      %      %     MB     MB    name
    0       4242     C     60     20      -      -      -      -   1024      -    python train.py
    0       4243     C     55     10      -      -      -      -   2048      -    python
    0        999     G      2      0      -      -      -      -     64      -    Xorg
    1          -     -      -      -      -      -      -      -      -      -    -
    0       4242   C+G     30      5      -      -      -      -   1024      -    python train.py
    1       5000     C      -      -      -      -      -      -    512      -    secret-name
"""


def test_pmon_sums_processes_and_lists_those_with_compute(tmp_path):
    header, ticks, _ = read(tmp_path, PMON)
    assert header.source == "nvidia-smi pmon"
    assert [tick.monotonic_s for tick in ticks] == [0.0, 1.0]
    # 60 + 55 + 2 = 117 %, capped; memory 20 + 10 + 0.
    assert [(s.utilization_ratio, s.memory_utilization_ratio) for s in of(ticks, GpuSample)] == [
        (1.0, 0.3),
        (0.3, 0.05),
    ]
    assert [s.utilization_ratio for s in of(ticks, GpuSample, 1)] == [None, None]
    assert [s.processes for s in of(ticks, GpuSlowSample)] == [
        (GpuProcess(4242, 2**30), GpuProcess(4243, 2**31)),
        (GpuProcess(4242, 2**30),),
    ]
    assert [s.processes for s in of(ticks, GpuSlowSample, 1)] == [(), (GpuProcess(5000, 512 * 2**20),)]
    assert "secret" not in repr(ticks)


def test_pmon_of_one_gpu_with_date_and_without_memory(tmp_path):
    text = (
        "#Date       Time        gpu        pid  type    sm   mem   enc   dec   command\n"
        "#YYYYMMDD   HH:MM:SS    Idx          #   C/G     %     %     %     %   name\n"
        " 20261130   19:41:24      0       4242     C    60    20     -     -   a b c\n"
        " 20261130   19:41:25      0       4243     C    40    10     -     -   a\n"
    )
    _, ticks, warnings = read(tmp_path, text)
    assert [tick.wall_s for tick in ticks] == [T0, T0 + 1]
    assert [s.processes for s in of(ticks, GpuSlowSample)] == [(GpuProcess(4242),), (GpuProcess(4243),)]
    assert warnings == []


def test_a_header_alone_holds_no_sample(tmp_path):
    with pytest.raises(UsageError, match="holds no sample"):
        read(tmp_path, "# gpu pwr sm\n# Idx W %\n")


def test_a_comment_line_is_no_dmon(tmp_path):
    with pytest.raises(UsageError, match="is no GPU log"):
        read(tmp_path, "# the gpu was busy\n1\n")
