"""A marked alert: what the command writes, what the agent makes of it, and what it refuses."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from agent.alert_trial import TrialWatch, begin_trial, parse_trial
from agent.cli import main
from agent.clock import Instant, ManualClock
from agent.errors import FaultError, UsageError
from agent.owners.job_file import JobFileError
from exporters.landing_maintenance import maintenance_lines
from exporters.metrics_maintenance import TEST_ALERT_METRIC
from exporters.snapshot import NodeSnapshot

NOW = Instant(1000.0, 1e9)


def test_it_lasts_as_long_as_was_asked_for_and_is_said_once(tmp_path, caplog):
    clock = ManualClock(NOW.monotonic_s, NOW.wall_s)
    watch = TrialWatch(tmp_path, clock)
    watch.read()
    assert watch.held(clock.now()) == ()
    begin_trial(tmp_path, NOW, "straggler", "warning", 300.0)
    begin_trial(tmp_path, NOW, "stalled_collective", "critical", 60.0)
    with caplog.at_level(logging.WARNING, "warpwatch"):
        watch.read()
        watch.read()
    assert watch.held(clock.now()) == (("stalled_collective", "critical"), ("straggler", "warning"))
    assert [record.getMessage() for record in caplog.records if "straggler" in record.getMessage()] == [
        "a test alert of straggler (warning) lasts now: nothing is wrong"
    ]
    clock.advance(60.0)
    assert watch.held(clock.now()) == (("straggler", "warning"),), "it ends without a look at the folder"
    clock.advance(240.0)
    assert watch.held(clock.now()) == ()


def test_trials_that_have_ended_are_removed_and_do_not_hide_a_new_one(tmp_path):
    watch = TrialWatch(tmp_path, ManualClock(NOW.monotonic_s, NOW.wall_s))
    for _ in range(40):
        begin_trial(tmp_path, NOW, "straggler", "warning", 60.0)
    for path in (tmp_path / "test-alerts.d").iterdir():
        os.utime(path, (NOW.wall_s - 3601, NOW.wall_s - 3601))
    begin_trial(tmp_path, NOW, "gpu_lost", "critical", 60.0)
    assert len(list((tmp_path / "test-alerts.d").iterdir())) == 1
    watch.read()
    assert watch.held(NOW) == (("gpu_lost", "critical"),)


def test_the_page_and_the_metric_show_it():
    snapshot = NodeSnapshot(built=NOW, replay=False, test_alerts=(("straggler", "warning"),))
    assert list(TEST_ALERT_METRIC.values(snapshot)) == [(("straggler", "warning"), 1)]
    assert "A test alert lasts</strong>: straggler, warning. Nothing is wrong." in str(maintenance_lines(snapshot))
    assert list(TEST_ALERT_METRIC.values(NodeSnapshot(built=NOW, replay=False))) == []


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no anomaly 'stall'; choose one of stalled_collective, "):
        begin_trial(tmp_path, NOW, "stall", "critical", 60.0)
    with pytest.raises(UsageError, match="longer than 60 minutes"):
        begin_trial(tmp_path, NOW, "straggler", "critical", 3601.0)
    with pytest.raises(FaultError, match="see \\[agent\\] state_directory"):
        begin_trial(tmp_path / "absent", NOW, "straggler", "critical", 60.0)


@pytest.mark.parametrize(
    "change",
    [
        {"anomaly": "stall"}, {"severity": "none"}, {"severity": 3}, {"start": "now"}, {"expires": 1e9 - 1},
        {"expires": 1e9 + 3601}, {"start": True}, {"expires": None},
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused(change):
    good = {"anomaly": "straggler", "severity": "warning", "start": 1e9, "expires": 1e9 + 60}
    assert parse_trial(json.dumps(good).encode()).severity == "warning"
    with pytest.raises(JobFileError):
        parse_trial(json.dumps(good | change).encode())
    for data in (b"{", b"[]", b"\xff", b"[" * 100_000):
        with pytest.raises(JobFileError):
            parse_trial(data)


def test_the_command_needs_an_agent_and_says_what_follows(tmp_path, capsys):
    config = tmp_path / "warpwatch.toml"
    config.write_text(f'[agent]\nstate_directory = "{tmp_path}"\nruntime_folder = "{tmp_path}"\n')
    command = ["test-alert", "straggler", "--config", str(config)]
    assert main(command) == 1
    assert "no running agent is known" in capsys.readouterr().err
    pid_file = tmp_path / "warpwatch.pid"
    pid_file.write_text(f"{2**22 + 1}\n")  # left by an agent that was killed; no process has this id
    assert main(command) == 1
    assert "is the agent running?" in capsys.readouterr().err
    assert main([*command, "--pid", "1"]) == 1
    assert "is not `warpwatch run`" in capsys.readouterr().err
    assert main(["test-alert", "stall", "--config", str(config)]) == 2
    assert "there is no anomaly 'stall'" in capsys.readouterr().err
    assert not (tmp_path / "test-alerts.d").exists()
    # A process that looks like the agent, and ends when its input does.
    words = [sys.executable, "-c", "input(print(flush=True) or '')", "warpwatch", "run"]
    agent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        agent.stdout.readline()  # it has its words now
        pid_file.write_text(f"{agent.pid}\n")
        assert main([*command, "--for", "2m", "--severity", "info"]) == 0
    finally:
        agent.communicate(b"\n")
    assert capsys.readouterr().out.startswith("WarpwatchTestAlert of straggler, info, lasts for 120 s; ")
    assert len(list((tmp_path / "test-alerts.d").glob("*.json"))) == 1
    assert main([*command, "--for", "soon"]) == 2
