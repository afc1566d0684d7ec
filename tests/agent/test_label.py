"""`warpwatch label`: spans of ground truth in a trace, in place or beside it, and every mistake in one sentence."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from agent.cli import main
from agent.records import GpuKey, GpuSample, NetworkSample, Tick
from agent.trace import Phase, TraceHeader, TraceReader, TraceWriter

#: Trace time of the first sample, as on a host that has been up for a day; a second before it the host alone is read.
FIRST_S = 86_400.5


@pytest.fixture
def trace(tmp_path):
    """Return 100 s of two GPUs whose first sample is the second tick."""
    path = tmp_path / "own.jsonl"
    header = TraceHeader(provenance="recorded", interval_s=1.0, label="training", machine={"processors": 8})
    with TraceWriter(path, header) as writer:
        before = {"monotonic_s": FIRST_S - 1.0, "wall_s": 999.0}
        writer.write(
            Tick(
                **before,
                records=(NetworkSample(**before, device="eth0", receive_bytes_total=0, transmit_bytes_total=0),),
            )
        )
        for t in range(101):
            at = {"monotonic_s": FIRST_S + t, "wall_s": 1000.0 + t}
            records = tuple(GpuSample(**at, key=GpuKey(gpu), utilization_ratio=0.5) for gpu in (0, 1))
            writer.write(Tick(**at, records=records))
    return path


def header(path):
    reader = TraceReader(path, pytest.fail)
    reader.close()
    return reader.header


def label(path, *arguments) -> int:
    return main(["label", str(path), *map(str, arguments)])


def test_spans_are_marked_in_place_in_trace_time_and_nothing_else_changes(trace):
    before = trace.read_bytes().split(b"\n", 1)
    trace.chmod(0o640)
    assert label(trace, "--span", "0:60=training", "--span", "70:=idle", "--gpu", 1) == 0
    assert header(trace).ground_truth == (
        Phase(start_s=FIRST_S, end_s=FIRST_S + 60.0, workload="training", gpu=1),
        Phase(start_s=FIRST_S + 70.0, end_s=FIRST_S + 100.0, workload="idle", gpu=1),
    )
    after = trace.read_bytes().split(b"\n", 1)
    assert after[1] == before[1]
    assert {**json.loads(before[0]), "ground_truth": None} == {**json.loads(after[0]), "ground_truth": None}
    assert trace.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in trace.parent.iterdir()] == ["own.jsonl"]


def test_another_file_is_written_and_the_trace_left_alone(trace, tmp_path):
    before = trace.read_bytes()
    out = tmp_path / "labelled.jsonl.gz"
    assert label(trace, "--span", ":0.5m=inference", "-o", out) == 0
    assert trace.read_bytes() == before
    assert gzip.decompress(out.read_bytes()).split(b"\n", 1)[1] == before.split(b"\n", 1)[1]
    assert header(out).ground_truth == (Phase(start_s=FIRST_S, end_s=FIRST_S + 30.0, workload="inference"),)
    # In place a packed trace stays packed, and equal input gives equal bytes.
    assert label(out, "--span", "40:50=idle") == 0
    first = out.read_bytes()
    assert label(out, "--clear", "--span", ":30=inference", "--span", "40:50=idle") == 0
    assert out.read_bytes() == first
    assert len(header(out).ground_truth) == 2


def test_the_list_says_what_is_marked(trace, capsys):
    assert label(trace, "--list") == 0
    assert capsys.readouterr().out == (
        "own.jsonl: recorded, 2 GPUs, 100 s, a sample every 1 s\n"
        "recorded as training throughout; spans, where there are any, count instead\n"
        "no span is marked\n"
    )
    assert label(trace, "--span", "0:60=training", "--gpu", 1, "--list") == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "   start s     end s  gpu  workload   note",
        "       0.0      60.0  1    training",
        "marked: 0 to 60 of 100 s by GPU",
    ]
    assert label(trace, "--clear") == 0
    assert header(trace).ground_truth == ()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--span", "0:60"], "'0:60' is no span; write START:END=WORD"),
        (["--span", "0:60=busy"], "says 'busy'; choose one of training, inference, idle, other"),
        (["--span", "0:60=unknown"], "says 'unknown'; choose one of"),
        (["--span", "-1:60=idle"], "has the time '-1'"),
        (["--span", "0:1e9=idle"], "has the time '1e9'; write seconds"),
        (["--span", "60:60=idle"], "60:60=idle ends before it begins"),
        (["--span", "0:102=idle"], "0:102=idle ends after"),
        (["--span", "100:=idle"], "which is 100 s long"),
        (["--span", "0:60=idle", "--span", "59:80=other"], "59:80=other lies over 0:60=idle; spans of one GPU"),
        (["--span", "0:60=idle", "--gpu", "2"], "has no GPU 2; it holds 0, 1"),
        ([], "nothing to do"),
        (["--list", "-o", "copy.jsonl"], "copy.jsonl would be a plain copy"),
        (["--span", "0:60=idle", "-o", "nowhere/copy.jsonl"], "its folder does not exist"),
    ],
)
def test_mistakes_are_one_sentence_and_change_nothing(trace, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(trace.parent)
    before = trace.read_bytes()
    # argparse takes a value that begins with a dash for an option of its own.
    joined = [f"--span={arguments[1]}"] if arguments[:1] == ["--span"] and len(arguments) == 2 else arguments
    assert label("own.jsonl", *joined) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("warpwatch: ")
    assert error.count("\n") == 1
    assert trace.read_bytes() == before
    assert list(trace.parent.iterdir()) == [trace]


def test_spans_overlap_by_gpu(trace, capsys):
    assert label(trace, "--span", "0:60=training", "--gpu", 0) == 0
    assert label(trace, "--span", "30:90=idle", "--gpu", 1) == 0
    assert label(trace, "--span", "60:90=other", "--gpu", 0) == 0
    assert label(trace, "--span", "80:100=idle") == 2
    assert "lies over 30:90=idle of GPU 1" in capsys.readouterr().err
    # The sample of 100 s stands for the second until 101.
    assert label(trace, "--span", "90:101=idle") == 0
    assert [phase.gpu for phase in header(trace).ground_truth] == [0, 1, 0, None]


def test_a_truncated_trace_keeps_what_it_holds(trace, tmp_path):
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes(), mtime=0)[:-200])
    kept = sum(1 for _ in TraceReader(packed, lambda _: None))
    assert label(packed, "--span", "0:10=training") == 0
    assert sum(1 for _ in TraceReader(packed, lambda _: None)) >= kept > 0
    assert len(header(packed).ground_truth) == 1


def test_a_log_and_a_trace_without_gpus_are_refused(tmp_path, capsys):
    log = tmp_path / "log.csv"
    log.write_text("t_s,util_gpu_pct\n0,5\n")
    assert label(log, "--list") == 2
    assert "is no warpwatch trace; turn a log into one first: warpwatch convert" in capsys.readouterr().err
    empty = tmp_path / "empty.jsonl"
    TraceWriter(empty, TraceHeader(provenance="recorded", interval_s=1.0)).close()
    assert label(empty, "--list") == 2
    assert "holds no sample of a GPU" in capsys.readouterr().err
    assert label(tmp_path / "absent.jsonl", "--list") == 2


def test_a_span_in_the_header_that_is_none_can_be_cleared(trace, capsys):
    lines = trace.read_text().split("\n", 1)
    broken = {**json.loads(lines[0]), "ground_truth": [{"start_s": "a", "end_s": 5, "workload": "idle"}]}
    trace.write_text(json.dumps(broken) + "\n" + lines[1])
    assert label(trace, "--list") == 2
    assert "--clear" in capsys.readouterr().err
    assert label(trace, "--clear", "--span", "0:5=idle") == 0
    assert len(header(trace).ground_truth) == 1


def test_help_has_examples():
    done = subprocess.run(
        [sys.executable, "-c", "from agent.cli import main; main()", "label", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "warpwatch label trace.jsonl.gz --span 0:600=training" in done.stdout
