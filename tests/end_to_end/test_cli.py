"""The commands as a person types them: output, errors of one sentence, exit status."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.programs import ROOT, run_warpwatch, warpwatch

CSV = """\
timestamp, index, utilization.gpu [%], memory.used [MiB], memory.total [MiB], power.draw [W]
2026/11/30 10:00:00.000, 0, 0 %, 3 MiB, 81559 MiB, 70.00 W
2026/11/30 10:00:01.000, 0, 0 %, 3 MiB, 81559 MiB, 70.00 W
"""


def test_every_command_has_help_with_examples():
    for command in ("run", "replay", "record", "convert", "simulate", "train", "evaluate", "check-config"):
        done = run_warpwatch(command, "--help")
        assert done.returncode == 0
        assert f"warpwatch {command}" in done.stdout.split("examples:")[1]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["replay", "absent.csv"], 2, "absent.csv"),
        (["replay", "empty.csv"], 2, "empty.csv"),
        (["replay", "unknown.csv"], 2, "unknown.csv"),
        (["replay", "binary.bin", "--json"], 2, "binary.bin"),
        (["replay", "trace.jsonl", "--config", "bad.toml"], 2, "unknown key 'export.lisen'; did you mean"),
        (["check-config", "bad.toml"], 2, "bad.toml, line 2: unknown key 'export.lisen'"),
        (["run", "--config", "absent.toml"], 2, "absent.toml"),
        (["run", "--listen", "nowhere:99999"], 2, "99999"),
        (["run", "--demo", "unknown.csv"], 2, "unknown.csv"),
        (["convert", "log.csv", "absent/out.jsonl"], 2, "absent"),
        (["convert", "log.csv", "log.csv"], 2, "log.csv"),
        (["record", "absent/out.jsonl", "--duration", "1"], 2, "absent/out.jsonl"),
        (["simulate", "nonsense", "out.jsonl"], 2, "data_parallel_training"),
        (["simulate", "idle", "out.jsonl", "--board", "Z80"], 2, "Z80"),
        (["evaluate", "absent"], 2, "absent"),
        (["run", "--demo", "no_gpu.jsonl"], 2, "no sample of a GPU"),
        (["simulate", "idle", "out.jsonl", "--gpus", "17"], 2, "1 to 16"),
        (["simulate", "idle", "/dev/full"], 1, "No space left on device"),
        (["run", "--once", "--config", "address.toml"], 2, "99999"),
        (["train", "absent/bundle"], 2, "absent/bundle"),
    ],
)
def test_bad_input_gets_one_sentence_and_its_status(tmp_path, arguments, status, sentence):
    (tmp_path / "log.csv").write_text(CSV)
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "unknown.csv").write_text("colour,shape\nred,round\n")
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "address.toml").write_text('[export]\nlisten = ":99999"\n')
    (tmp_path / "no_gpu.jsonl").write_text(
        '{"provenance":"recorded","interval_s":1.0,"schema":1}\n{"t":0.0,"w":0.0,"r":{}}\n'
    )
    (tmp_path / "bad.toml").write_text('[export]\nlisen = ":1"\n')
    done = run_warpwatch(*arguments, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line]
    assert (done.returncode, len(lines)) == (status, 1), done.stderr
    assert lines[0].startswith("warpwatch: ")
    assert sentence in lines[0]


def test_a_full_disk_ends_a_command_with_one_sentence(tmp_path):
    (tmp_path / "log.csv").write_text(CSV)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [warpwatch(), "replay", "log.csv", "--json"], check=False, stdout=full, stderr=-1, text=True, cwd=tmp_path
        )
    assert (done.returncode, done.stderr) == (1, "warpwatch: cannot read or write output: No space left on device\n")
    done = run_warpwatch("record", "/dev/full", "--duration", "30", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("warpwatch: cannot write trace /dev/full: No space left on device")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit (package util-linux) is absent")
@pytest.mark.parametrize(("name", "size"), [("out.jsonl", 1200), ("out.jsonl.gz", 600)])
def test_a_disk_that_becomes_full_ends_a_recording_and_what_was_written_can_be_read(tmp_path, name, size):
    done = subprocess.run(
        ["prlimit", f"--fsize={size}:{size}", warpwatch(), "record", name, "--duration", "60"],
        check=False,
        stderr=-1,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    found = re.fullmatch(
        rf"warpwatch: cannot write trace {name}: File too large; the recording ends after (\d+) ticks", last
    )
    assert found, done.stderr
    done = run_warpwatch("convert", name, "read.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _header, *ticks = (tmp_path / "read.jsonl").read_text().splitlines()
    assert abs(len(ticks) - int(found[1])) <= 1


def test_a_replay_stops_when_told(tmp_path):
    run_warpwatch("simulate", "idle", "idle.jsonl", "--seconds", "7200", cwd=tmp_path)
    replay = subprocess.Popen([warpwatch(), "replay", "idle.jsonl", "--json"], stdout=-1, stderr=-1, cwd=tmp_path)
    replay.stdout.readline()
    replay.send_signal(signal.SIGTERM)
    out, error = replay.communicate(timeout=5)
    assert replay.returncode == 1
    assert error == b"warpwatch: interrupted\n"
    assert b'"summary"' not in out


def test_wrong_use_is_status_2():
    assert run_warpwatch("simulate", "idle", "x.jsonl", "--seed", "-1").returncode == 2
    assert "not a number above 0" in run_warpwatch("replay", "x", "--speed", "x").stderr
    assert run_warpwatch("replay").returncode == 2
    assert run_warpwatch("replay", "x", "--speed", "-1").returncode == 2
    assert run_warpwatch("nonsense").returncode == 2


def test_replay_prints_json_lines_alone_on_stdout_and_the_same_each_time(tmp_path):
    (tmp_path / "log.csv").write_text(CSV + "2026/11/30 10:00:02.000, 0, 0 %, 3 M")
    done = run_warpwatch("replay", "log.csv", "--json", cwd=tmp_path)
    assert done.returncode == 0
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["type"] for event in events] == ["decision", "summary"]
    assert "torn" in done.stderr or "incomplete" in done.stderr or "last line" in done.stderr
    assert run_warpwatch("replay", "log.csv", "--json", cwd=tmp_path).stdout == done.stdout


def test_a_converted_log_replays_to_the_same(tmp_path):
    (tmp_path / "log.csv").write_text(CSV)
    assert run_warpwatch("convert", "log.csv", "trace.jsonl.gz", cwd=tmp_path).returncode == 0
    direct = run_warpwatch("replay", "log.csv", "--json", cwd=tmp_path).stdout
    assert run_warpwatch("replay", "trace.jsonl.gz", "--json", cwd=tmp_path).stdout == direct


def test_a_recording_of_this_host_replays(tmp_path):
    done = run_warpwatch("record", "here.jsonl.gz", "--duration", "3", cwd=tmp_path)
    assert done.returncode == 0
    replayed = run_warpwatch("replay", "here.jsonl.gz", "--fast", cwd=tmp_path)
    assert replayed.returncode == 0
    assert "seconds" in replayed.stdout


def test_the_shipped_configuration_is_valid_and_a_printed_one_reads_back(tmp_path):
    assert run_warpwatch("check-config", str(ROOT / "systemd" / "warpwatch.toml")).returncode == 0
    printed = run_warpwatch("run", "--print-config")
    assert printed.returncode == 0
    (tmp_path / "all.toml").write_text(printed.stdout)
    again = run_warpwatch("run", "--print-config", "--config", "all.toml", cwd=tmp_path)

    def values(text):
        return [line.partition("  # ")[0] for line in text.splitlines()]

    assert values(again.stdout) == values(printed.stdout)
    assert "all.toml:2" in again.stdout


def test_a_reader_that_goes_away_is_no_traceback(tmp_path):
    run_warpwatch("simulate", "idle", "idle.jsonl.gz", "--gpus", "8", "--seconds", "900", cwd=tmp_path)
    piped = subprocess.run(
        ["sh", "-c", f"'{warpwatch()}' replay idle.jsonl.gz --json | head -1"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert json.loads(piped.stdout)["t"] == 0.0
    assert "Traceback" not in piped.stderr
