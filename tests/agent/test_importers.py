"""Detection, bad input, and what is the same for every foreign format."""

import csv
import gzip
import lzma
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.convert import convert
from agent.errors import FaultError, UsageError
from agent.importers import open_trace
from agent.records import GpuSample, GpuState
from agent.trace import TraceReader

SHARED = Path(__file__).parents[3] / "shared" / "traces"
GENERIC = "t_s,gpu,util_gpu_pct,power_w\n0.0,0,50,100.5\n1.0,0,60,110\n"


def read(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    warnings = []
    trace = open_trace(path, warnings.append)
    return trace.header, list(trace), warnings


def samples(ticks, kind=GpuSample):
    return [record for tick in ticks for record in tick.records if type(record) is kind]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n \r\n\n", "is empty"),
        (b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0>\0\x01", "is binary"),
        (lzma.compress(b"t_s,gpu,power_w\n0,0,1\n"), "compressed with xz"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "compressed with zstd"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (gzip.compress(b"t_s,util_gpu_pct\n" * 50, mtime=0)[:12], "is empty"),
        (b"a,b,c\n1,2,3\n", "util_gpu_pct"),
        (b"hello\nworld\n", "is no GPU log"),
        (b"t_s,gpu\n0,0\n", "no column that is known"),
        (b"gpu,power_w\n0,70\n", "no column t_s"),
        (b"t_s,gpu,power_w\n", "holds no sample"),
        (b"2026/11/30 19:41:24.123, 0, 45 %, 1024 MiB\n", "without noheader"),
        (b"GPU-12345678-1234-1234-1234-123456789abc, 45, 1024\n", "without noheader"),
        (b"{}\n", "no trace header"),
        (b'{"type":"other"}\n', "no trace header"),
    ],
)
def test_input_that_is_no_log_is_one_sentence_that_names_the_file(tmp_path, content, words):
    with pytest.raises(UsageError, match=words) as error:
        read(tmp_path / "some.log", content)
    assert str(tmp_path / "some.log") in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_and_folder_are_usage_errors(tmp_path):
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            open_trace(path, print)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from(
        [
            "",
            "t_s,gpu,power_w\n",
            "timestamp, index, power.draw [W]\n",
            "utilization.gpu [%]\n",
            "# gpu pwr sm\n",
            "#Date Time gpu pid type sm command\n",
            '{"provenance":"imported","interval_s":1.0,"schema":1}\n',
        ]
    ),
    body=st.text(st.sampled_from(list("0123456789.,:-/ \n\n\r{}[]\"'#eE%xNA\tabt\0\ufeffé")), max_size=300),
    binary=st.binary(max_size=20),
)
def test_garbage_raises_nothing_but_usage_errors(tmp_path, start, body, binary):
    try:
        _, ticks, _ = read(tmp_path / "garbage", (start + body).encode() + binary)
    except UsageError:
        return
    times = [tick.monotonic_s for tick in ticks]
    assert times == sorted(times)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: text.encode("utf-16-be"),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\n\n  \n").encode(),
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text.replace("\n", "\r\n").encode("utf-16")),
    ],
)
def test_encodings_line_ends_and_gzip_read_the_same(tmp_path, encode):
    expected = read(tmp_path / "plain", GENERIC)
    assert read(tmp_path / "other", encode(GENERIC)) == expected
    assert [s.power_watts for s in samples(expected[1])] == [100.5, 110.0]
    assert expected[2] == []


def test_truncated_gzip_gives_what_is_there_and_a_warning(tmp_path):
    text = "t_s,gpu,power_w\n" + "".join(f"{i},0,{100 + i * 37 % 91}\n" for i in range(5000))
    packed = gzip.compress(text.encode())
    _, ticks, warnings = read(tmp_path / "log.gz", packed[: len(packed) // 2])
    assert 500 < len(ticks) < 5000
    assert [s.power_watts for s in samples(ticks)] == [100 + i * 37 % 91 for i in range(len(ticks))]
    assert any("ends in the middle" in warning for warning in warnings)


def test_torn_last_line_is_left_out_with_a_warning(tmp_path):
    _, ticks, warnings = read(tmp_path / "log", GENERIC + "2.0,0,7")
    assert len(ticks) == 2
    assert warnings == [f"{tmp_path / 'log'}: left out torn last line 4"]


def test_last_value_of_a_line_without_end_may_be_cut_and_is_left_out(tmp_path):
    _, ticks, warnings = read(tmp_path / "log", GENERIC + "2.0,0,70,12")
    last = samples(ticks)[-1]
    assert (last.utilization_ratio, last.power_watts) == (0.7, None)
    assert len(warnings) == 1


def test_convert_writes_a_trace_that_reads_back_the_same(tmp_path):
    source, target = tmp_path / "log.csv", tmp_path / "out.jsonl.gz"
    header, ticks, _ = read(source, GENERIC)
    progress = []
    assert convert(source, target, print, progress.append) == 2
    reader = TraceReader(target, print)
    assert (reader.header, list(reader)) == (header, ticks)
    assert progress == [1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "out.jsonl.gz"]
    first = target.read_bytes()
    convert(source, target, print)
    assert target.read_bytes() == first


def test_convert_leaves_nothing_behind_where_it_fails(tmp_path):
    source = tmp_path / "log.csv"
    source.write_text("t_s,gpu,power_w\n0,0,1\n1,0,2\n2,0,3\n0,1,1\n1,1,2\n")
    with pytest.raises(UsageError, match="one GPU after the other"):
        convert(source, tmp_path / "out.jsonl", print)
    with pytest.raises(UsageError, match="onto itself"):
        convert(source, tmp_path / "." / "log.csv", print)
    with pytest.raises(UsageError, match="folder does not exist"):
        convert(source, tmp_path / "no" / "out.jsonl", print)
    with pytest.raises(UsageError, match="no plain file"):
        convert(source, Path("/dev/null"), print)
    with pytest.raises(UsageError, match=r"out.jsonl.zst: zst is not offered"):
        convert(source, tmp_path / "out.jsonl.zst", print)
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_convert_onto_a_full_disk_is_a_fault(tmp_path):
    source, out = tmp_path / "log.csv", tmp_path / "out.jsonl"
    source.write_text("t_s,gpu,power_w\n" + "".join(f"{t},0,{t}\n" for t in range(3000)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # as good as a disk that is full after 20 kB
    try:
        with pytest.raises(FaultError, match=f"cannot write trace {out}: File too large"):
            convert(source, out, print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recordings beside the repository are not here")
def test_every_shared_recording_gives_all_its_rows(tmp_path):
    with (SHARED / "INDEX.csv").open() as file:
        index = list(csv.DictReader(file))
    assert len(index) == 74
    # The long ones only as far as needed to keep this quick; together about 90,000 rows are compared in full.
    for row in index:
        warnings = []
        trace = open_trace(SHARED / row["file"], warnings.append)
        if int(row["rows"]) > 4000:
            assert next(iter(trace)).records
            trace.close()
        else:
            ticks = list(trace)
            assert len(samples(ticks)) == int(row["rows"]), row["file"]
            assert len(samples(ticks, GpuState)) == int(row["rows"]), row["file"]
            assert ticks[0].monotonic_s == 0.0
        assert warnings == [], row["file"]
        assert trace.header.interval_s == pytest.approx(float(row["interval_s"]), rel=0.35), row["file"]
