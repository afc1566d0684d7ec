"""The trace file format: round trip, damage, truncation, unknown content, equal bytes."""

import dataclasses
import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.errors import UsageError
from agent.records import (
    RECORD_TYPES,
    GpuKey,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    Holder,
    Tick,
)
from agent.trace import Phase, TraceHeader, TraceReader, TraceWriter
from agent.vocabulary import CLASSES, CLOCK_EVENT_REASONS, GPU_STATES

HEADER = TraceHeader(
    provenance="simulated",
    interval_s=1.0,
    label="training",
    source="family",
    machine={"gpu_model": "simulated", "gpus": 2},
    samplers={"nvml": "1"},
    ground_truth=(
        Phase(start_s=0.0, end_s=5.0, workload="training"),
        Phase(start_s=5.0, end_s=9.0, workload="training", gpu=1, anomaly="straggler", note="slow clock"),
    ),
)
HEAD = '{"provenance":"recorded","interval_s":1.0,"schema":1}\n'
LINE = '{{"t":{0},"w":{0},"r":{{"gpu_sample":[{{"key":[0,null,null],"power_watts":70.0}}]}}}}\n'


def write(path, ticks, header=HEADER):
    with TraceWriter(path, header) as writer:
        for tick in ticks:
            writer.write(tick)
    return path.read_bytes()


def read(path, content=None):
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    warnings = []
    reader = TraceReader(path, warnings.append)
    return reader.header, list(reader), warnings


finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(0, 2**63)
keys = st.builds(GpuKey, st.integers(0, 15), st.none() | st.text(max_size=8), st.none() | st.integers(0, 6))
VALUES = {
    "float | None": st.none() | finite,
    "int | None": st.none() | whole,
    "int": whole,
    "str | None": st.none() | st.text(max_size=8),
    "tuple[str, ...] | None": st.none() | st.lists(st.sampled_from(CLOCK_EVENT_REASONS), max_size=3).map(tuple),
    "tuple[GpuProcess, ...] | None": st.none()
    | st.lists(
        st.builds(GpuProcess, whole, st.none() | whole, st.none() | st.floats(0, 1), st.none() | st.floats(0, 1)),
        max_size=3,
    ).map(tuple),
    "Mapping[str, float]": st.dictionaries(st.sampled_from(CLOCK_EVENT_REASONS), finite, max_size=3),
    "Mapping[str, int]": st.dictionaries(st.text(max_size=8), whole, max_size=3),
    "tuple[str, ...]": st.lists(st.text(max_size=8), max_size=3).map(tuple),
    "tuple[Holder, ...]": st.lists(
        st.builds(Holder, *[st.text(max_size=8)] * 7, st.floats(0, 1), st.none() | st.sampled_from(CLASSES)), max_size=3
    ).map(tuple),
    "bool | None": st.none() | st.booleans(),
    "tuple[float, ...]": st.lists(finite, max_size=3).map(tuple),
    "tuple[float, ...] | None": st.none() | st.lists(finite, max_size=3).map(tuple),
    "Mapping[int, int]": st.dictionaries(st.integers(1, 172), whole, max_size=3),
    "Mapping[int, float]": st.dictionaries(st.integers(1, 172), finite, max_size=3),
    "GpuKey": keys,
    "str": st.sampled_from(GPU_STATES),
}


@st.composite
def ticks_of_any_records(draw):
    times = sorted(draw(st.lists(st.floats(0, 1e6), max_size=4)))
    ticks = []
    for time in times:
        wall = draw(finite)
        records = {}
        for cls in draw(st.lists(st.sampled_from(list(RECORD_TYPES.values())), max_size=4)):
            fields = {
                field.name: draw(VALUES[field.type])
                for field in dataclasses.fields(cls)
                if field.name not in ("monotonic_s", "wall_s")
            }
            records.setdefault(cls, []).append(cls(**fields, monotonic_s=time, wall_s=wall))
        # A line groups records by type, so that is the order that comes back.
        ticks.append(Tick(monotonic_s=time, wall_s=wall, records=tuple(r for group in records.values() for r in group)))
    return ticks


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ticks=ticks_of_any_records(), packed=st.booleans())
def test_round_trip_of_any_records(tmp_path, ticks, packed):
    path = tmp_path / ("trace.jsonl.gz" if packed else "trace.jsonl")
    first = write(path, ticks)
    assert read(path) == (HEADER, ticks, [])
    assert write(path, ticks) == first


def test_every_record_type_is_covered_by_the_round_trip():
    """A record with a kind of field that the strategies above do not know would raise there."""
    for cls in RECORD_TYPES.values():
        kinds = {field.type for field in dataclasses.fields(cls) if field.name not in ("monotonic_s", "wall_s")}
        assert kinds <= set(VALUES), cls


def test_a_line_as_documented(tmp_path):
    at = {"monotonic_s": 1.5, "wall_s": 100.25}
    tick = Tick(
        **at,
        records=(
            GpuSample(**at, key=GpuKey(0, "GPU-1"), utilization_ratio=0.0, clock_event_reasons=("gpu_idle",)),
            GpuSlowSample(**at, key=GpuKey(0, "GPU-1"), processes=(GpuProcess(7, None),)),
        ),
    )
    lines = write(tmp_path / "trace.jsonl", [tick]).decode().splitlines()
    assert json.loads(lines[0])["ground_truth"][1]["anomaly"] == "straggler"
    # Zero is a measurement and stays; None is left out.
    assert lines[1] == (
        '{"t":1.5,"w":100.25,"r":{"gpu_sample":[{"key":[0,"GPU-1",null],"utilization_ratio":0.0,'
        '"clock_event_reasons":["gpu_idle"]}],"gpu_slow_sample":[{"key":[0,"GPU-1",null],"processes":[[7,null]]}]}}'
    )


def test_gzip_bytes_hold_neither_name_nor_time(tmp_path):
    assert write(tmp_path / "a.jsonl.gz", []) == write(tmp_path / "other-name.jsonl.gz", [])


def test_flushed_lines_survive_a_crash(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    writer = TraceWriter(path, HEADER)
    writer.write(Tick(monotonic_s=1.0, wall_s=1.0, records=()))
    writer.flush()
    crashed = path.read_bytes()
    writer.close()
    _, ticks, warnings = read(tmp_path / "crashed.gz", crashed)
    assert [tick.monotonic_s for tick in ticks] == [1.0]
    assert warnings == [f"{tmp_path / 'crashed.gz'}: the file ends in the middle; read up to line 2"]


@pytest.mark.parametrize("cut", [1, 5, 30, 74])
def test_torn_last_line_costs_that_line_alone(tmp_path, cut):
    content = HEAD + LINE.format(0) + LINE.format(1) + LINE.format(2)
    _, ticks, warnings = read(tmp_path / "trace", content[:-cut])
    # Without its line end alone the last line is still whole.
    assert len(ticks) == (3 if cut == 1 else 2)
    assert len(warnings) == (0 if cut == 1 else 1)
    assert all("torn last line 4" in warning for warning in warnings)


@pytest.mark.parametrize(
    "damage",
    [
        "\n",
        "{\n",
        "[]\n",
        "null\n",
        '{"t":1,"w":1}\n',
        '{"t":NaN,"w":1,"r":{}}\n',
        '{"t":"1","w":1,"r":{}}\n',
        '{"t":true,"w":1,"r":{}}\n',
        '{"t":1,"w":1e999,"r":{}}\n',
        '{"t":1e300,"w":1,"r":{}}\n',
        '{"t":1,"w":1,"r":{"gpu_sample":[{"key":[0],"power_watts":-1e999}]}}\n',
        '{"t":1,"w":1,"r":{"gpu_sample":[{"key":[0,null,"x"]}]}}\n',
        '{"t":1,"w":1,"r":{"gpu_slow_sample":[{"key":[0],"processes":[["1"]]}]}}\n',
        '{"t":1,"w":1,"r":{"gpu_sample":[{"key":[0],"power_watts":"70"}]}}\n',
        '{"t":1,"w":1,"r":{"gpu_sample":[{"key":[0],"power_watts":Infinity}]}}\n',
        '{"t":1,"w":1,"r":{"gpu_sample":[{"key":["0"]}]}}\n',
        '{"t":1,"w":1,"r":{"gpu_sample":[{"power_watts":70}]}}\n',
        '{"t":1,"w":1,"r":{"gpu_state":[{"key":[0,null],"state":5}]}}\n',
        '{"t":1,"w":1,"r":{"gpu_slow_sample":[{"key":[0],"processes":[[1,2,3]]}]}}\n',
        '{"t":1,"w":1,"r":5}\n',
        "[" * 100_000 + "\n",
        '{"t":' + "9" * 5000 + "}\n",
        '{"t":' + "1" + "0" * 400 + ',"w":1,"r":{}}\n',
        "\0" * 100 + "\n",
    ],
)
def test_damaged_line_costs_that_line_alone(tmp_path, damage):
    _, ticks, warnings = read(tmp_path / "trace", HEAD + LINE.format(0) + damage + LINE.format(2))
    assert [tick.monotonic_s for tick in ticks] == [0.0, 2.0]
    assert warnings == [f"{tmp_path / 'trace'}: left out damaged line 3"]


def test_truncated_gzip_gives_the_lines_before(tmp_path):
    content = HEAD + "".join(LINE.format(i + i % 7 / 10) for i in range(3000))
    packed = gzip.compress(content.encode())
    _, ticks, warnings = read(tmp_path / "trace.gz", packed[: len(packed) * 2 // 3])
    assert 500 < len(ticks) < 3000
    assert len(warnings) == 1
    assert "ends in the middle" in warnings[0]


def test_unknown_fields_types_and_header_fields_of_a_later_writer_are_left_out(tmp_path):
    content = HEAD.replace("}", ',"new":1,"ground_truth":[{"start_s":0,"end_s":1,"workload":"idle","new":2}]}')
    line = '{"t":%d,"w":1,"r":{"gpu_sample":[{"key":[0,null,null],"new_w":1,"power_watts":70.0}],"new_type":[{}]}}\n'
    header, ticks, warnings = read(tmp_path / "trace", content + line % 1 + line % 2)
    assert header.ground_truth == (Phase(start_s=0, end_s=1, workload="idle"),)
    assert [record.power_watts for tick in ticks for record in tick.records] == [70.0, 70.0]
    assert warnings == [
        f"{tmp_path / 'trace'}: unknown field gpu_sample.new_w left out",
        f"{tmp_path / 'trace'}: unknown record type 'new_type' left out",
    ]


def test_lines_a_moment_out_of_order_never_take_time_back(tmp_path):
    content = HEAD + LINE.format(10) + LINE.format(9.99) + LINE.format(10) + LINE.format(11)
    _, ticks, warnings = read(tmp_path / "trace", content)
    assert [tick.monotonic_s for tick in ticks] == [10.0, 10.0, 10.0, 11.0]
    assert [record.monotonic_s for tick in ticks for record in tick.records] == [10.0, 10.0, 10.0, 11.0]
    assert warnings == []


def test_a_second_recording_appended_is_left_out_and_said_once(tmp_path):
    content = HEAD + LINE.format(100) + HEAD + LINE.format(1) + LINE.format(2) + LINE.format(101)
    _, ticks, warnings = read(tmp_path / "trace", content)
    assert [tick.monotonic_s for tick in ticks] == [100.0, 101.0]
    assert len(warnings) == 2  # the second header, and time going back


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("", "no trace header"),
        ("\n", "no trace header"),
        ("[1]\n", "no trace header"),
        ('{"provenance":"recorded"}\n', "no trace header"),
        ('{"provenance":"found","interval_s":1}\n', "no trace header"),
        ('{"provenance":"recorded","interval_s":0}\n', "no trace header"),
        ('{"provenance":"recorded","interval_s":"1"}\n', "no trace header"),
        ('{"provenance":"recorded","interval_s":1,"schema":"x"}\n', "no trace header"),
        ('{"provenance":"recorded","interval_s":1,"machine":[]}\n', "no trace header"),
        ('{"provenance":"recorded","interval_s":1,"ground_truth":[{}]}\n', "no trace header"),
        ('{"provenance":"recorded","interval_s":1,"schema":2}\n', "trace schema 2; this version reads up to 1"),
    ],
)
def test_a_file_without_header_is_refused(tmp_path, head, words):
    with pytest.raises(UsageError, match=words) as error:
        read(tmp_path / "trace", head)
    assert str(tmp_path / "trace") in str(error.value)


def test_fraction_read_grows_to_one(tmp_path):
    (tmp_path / "trace").write_text(HEAD + "".join(LINE.format(i) for i in range(5000)))
    reader = TraceReader(tmp_path / "trace", print)
    seen = [reader.fraction_read() for _ in reader]
    assert seen == sorted(seen)
    assert 0 < seen[0] < 0.2
    assert seen[-1] == reader.fraction_read() == 1.0


def test_writing_where_it_cannot_be_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot write trace"):
        TraceWriter(tmp_path / "no" / "trace.jsonl", HEADER)
    with pytest.raises(UsageError, match="zst is not offered"):
        TraceWriter(tmp_path / "trace.jsonl.zst", HEADER)


def test_nan_is_never_written(tmp_path):
    sample = GpuSample(monotonic_s=0.0, wall_s=0.0, key=GpuKey(0), power_watts=float("nan"))
    with TraceWriter(tmp_path / "trace", HEADER) as writer, pytest.raises(ValueError, match="not JSON compliant"):
        writer.write(Tick(monotonic_s=0.0, wall_s=0.0, records=(sample,)))
    assert read(tmp_path / "trace")[1:] == ([], [])
