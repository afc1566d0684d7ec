"""`warpwatch maintenance`: what a person writes and the agent reads."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from agent import commands
from agent.cli import build_parser, main
from agent.clock import Instant, ManualClock
from agent.config import AgentConfig, Config, ExportConfig, SamplersConfig
from agent.daemon import Daemon
from agent.maintenance import LONGEST_S, MaintenanceFiles, MaintenanceWatch, parse_duration
from agent.maintenance_command import run
from agent.records import GpuKey, GpuSample, Tick

UUID = "GPU-11111111-2222-4333-8444-555555555555"
NOW = Instant(1000.0, 1.8e9)  # 2027-01-15 08:00:00Z


@pytest.fixture
def config(tmp_path):
    (tmp_path / "state").mkdir()
    file = tmp_path / "warpwatch.toml"
    file.write_text(f'[agent]\nstate_directory = "{tmp_path}/state"\n')
    return file


def tell(config: Path, *words: str, now: Instant = NOW) -> int:
    """Do what the command does, at a given moment."""
    arguments = build_parser().parse_args(["maintenance", *words, "--config", str(config)])
    return run(arguments, ManualClock(now.monotonic_s, now.wall_s))


def held(config: Path, now: Instant = NOW):
    return MaintenanceFiles(config.parent / "state").read(now)


def test_start_list_and_end(config, capsys):
    assert tell(config, "start", "--gpu", "3", "--for", "2h", "--reason", "new board, ticket 47") == 0
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"GPU 3 is in maintenance until 2027-01-15 10:00:00Z \(id [0-9a-f]{8}\); a running agent knows within 5 s\n",
        said,
    )
    assert tell(config, "start", "--node", "--for", "1d", "--anomaly", "low_utilization") == 0
    capsys.readouterr()
    tell(config, "list")
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("  until 2027-01-15 10:00:00Z  GPU 3  new board, ticket 47")
    assert second.endswith("  until 2027-01-16 08:00:00Z  the node  low_utilization")
    tell(config, "end", "--gpu", "3")
    assert [one.is_of_node for one in held(config)] == [True]
    tell(config, "end", held(config)[0].id)
    capsys.readouterr()
    tell(config, "list")
    assert capsys.readouterr().out == "nothing is in maintenance\n"


def test_it_ends_by_itself_and_does_not_last_longer_where_the_clock_is_set_back(config):
    tell(config, "start", "--gpu", UUID, "--gpu", "0", "--for", "90s")
    (one,) = held(config, NOW.later(89))
    assert one.gpus == (UUID.lower(), "0")
    assert [one.names(key) for key in (GpuKey(5, UUID), GpuKey(0, None), GpuKey(5, None))] == [True, True, False]
    assert held(config, NOW.later(90)) == ()
    assert held(config, NOW.later(-3600)) == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("start", "--for", "2h"), "name what is in maintenance"),
        (("start", "--node"), "say how long with --for"),
        (("start", "--node", "--for", "2"), "--for is '2'"),
        (("start", "--node", "--for", "0s"), "--for is '0s'"),
        (("start", "--node", "--for", "32d"), "31d at most"),
        (("start", "--gpu", "x", "--for", "2h"), "--gpu is 'x'"),
        (("start", "--gpu", "MIG-11111111-2222-4333-8444-555555555555", "--for", "2h"), "name a card"),
        (("start", "--gpu", "../../etc/x", "--for", "2h"), "--gpu is"),
        (("start", "--node", "--for", "2h", "--anomaly", "stall"), "choose one of stalled_collective, "),
        (("start", "--node", "--for", "2h", "--reason", "x" * 201), "200 characters"),
        (("start", "--node", "--for", "2h", "--reason", "a\nb"), "one line"),
        (("start", "--all", "--for", "2h"), "--all does not go with `maintenance start`"),
        (("end", "--node", "--for", "2h"), "--for does not go with `maintenance end`"),
        (("end",), "say what ends"),
        (("end", "1f2e3d4c", "--node"), "say what ends"),
        (("list", "--node"), "--node does not go with `maintenance list`"),
    ],
)
def test_wrong_use_is_one_sentence_and_status_2(config, capsys, words, said):
    assert main(["maintenance", *words, "--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
    assert held(config) == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("end", "1f2e3d4c"), "no maintenance 1f2e3d4c"),
        (("end", "--node"), "nothing of that"),
        (("end", "--all"), "nothing"),
    ],
)
def test_what_is_not_there_cannot_end(config, capsys, words, said):
    assert main(["maintenance", *words, "--config", str(config)]) == 1
    assert said in capsys.readouterr().err


def test_without_a_state_directory_it_says_so(config, capsys):
    (config.parent / "state").rmdir()
    assert main(["maintenance", "start", "--node", "--for", "1h", "--config", str(config)]) == 1
    assert "No such file or directory; see [agent] state_directory" in capsys.readouterr().err
    assert main(["maintenance", "list", "--config", str(config)]) == 0


def test_the_command_is_found_and_has_examples(capsys):
    assert callable(commands.maintenance)
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["maintenance", "--help"])
    assert ended.value.code == 0
    assert "warpwatch maintenance start --gpu 3 --for 2h" in capsys.readouterr().out


def test_the_agent_may_read_it_whatever_the_umask_of_the_person_is(config):
    before = os.umask(0o077)
    try:
        tell(config, "start", "--node", "--for", "1h")
    finally:
        os.umask(before)
    folder = config.parent / "state/maintenance.d"
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o755, 0o644)


def test_a_link_in_the_place_of_the_folder_leads_nobody_elsewhere(config, capsys):
    elsewhere = config.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (config.parent / "state/maintenance.d").symlink_to(elsewhere)
    assert main(["maintenance", "start", "--node", "--for", "1h", "--config", str(config)]) == 1
    assert "cannot be opened" in capsys.readouterr().err
    assert (list(elsewhere.iterdir()), elsewhere.stat().st_mode & 0o777) == ([], 0o700)


GOOD = {"id": "1f2e3d4c", "node": True, "start": 1.8e9, "expires": 1.8e9 + 60, "reason": ""}


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../x"}, {"id": None}, {"id": "1F2E3D4C"}, {"node": False}, {"node": "yes"}, {"gpus": ["0"]},
        {"node": False, "gpus": [0]}, {"node": False, "gpus": "0"}, {"node": False, "gpus": ["0"] * 65},
        {"start": "x"}, {"start": True}, {"start": -1}, {"expires": 1.8e9}, {"expires": 1.8e9 + LONGEST_S + 2},
        {"expires": 1e300}, {"expires": None}, {"reason": 1}, {"reason": "x" * 201}, {"reason": "\x1b[2J"},
        {"anomalies": ["all"]}, {"anomalies": {"low_utilization": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_file_costs_itself_alone(config, change):
    tell(config, "start", "--gpu", "0", "--for", "1h")
    folder = config.parent / "state/maintenance.d"
    (folder / "good.json").write_text(json.dumps(GOOD))
    (folder / "bad.json").write_text(json.dumps(GOOD | change))
    assert len(held(config)) == 2


@pytest.mark.parametrize("data", [b"", b"[" * 9000, b"\xff", b"[]", b"x" * 9000, b'{"start": NaN}', b"9" * 5000])
def test_what_is_no_json_costs_itself_alone(config, data):
    folder = config.parent / "state/maintenance.d"
    folder.mkdir()
    (folder / "good.json").write_text(json.dumps(GOOD))
    (folder / "bad.json").write_bytes(data)
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to("/etc/passwd")
    assert [one.id for one in held(config)] == ["1f2e3d4c"]


def test_a_file_of_another_name_is_said_where_it_cannot_be_ended(config, capsys):
    folder = config.parent / "state/maintenance.d"
    folder.mkdir()
    (folder / "mine.json").write_text(json.dumps(GOOD))
    with pytest.raises(Exception, match=r"maintenance 1f2e3d4c lies in a file of another name in .*maintenance\.d"):
        tell(config, "end", "--node")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("31d", LONGEST_S)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


def test_the_watch_keeps_what_it_read_until_it_ends(config):
    clock = ManualClock(NOW.monotonic_s, NOW.wall_s)
    watch = MaintenanceWatch(config.parent / "state", clock)
    watch.read()
    assert watch.held(clock.now()) == ()
    tell(config, "start", "--node", "--for", "1m")
    watch.read()
    assert len(watch.held(clock.now())) == 1
    assert watch.held(NOW.later(60)) == ()


def test_a_running_agent_shows_it(config):
    off = {name: False for name in SamplersConfig.__slots__ if name != "expected_gpus"}
    agent = AgentConfig(state_directory=config.parent / "state")
    clock = ManualClock(NOW.monotonic_s, NOW.wall_s)
    node = Daemon(Config(agent=agent, samplers=SamplersConfig(**off), export=ExportConfig(listen="127.0.0.1:0")), clock)
    keys = GpuKey(0, UUID), GpuKey(1, "GPU-b")
    at = {"monotonic_s": NOW.monotonic_s, "wall_s": NOW.wall_s}
    node._deliver(Tick(**at, records=tuple(GpuSample(**at, key=key, utilization_ratio=0.5) for key in keys)))
    tell(config, "start", "--gpu", UUID, "--for", "1h", "--reason", "why")
    tell(config, "start", "--gpu", "9", "--for", "2h")
    node._maintenance.read()
    node._take_snapshot()
    first, second = node.snapshot().maintenance
    assert (first.keys, first.until_wall_s, first.reason) == ((keys[0],), NOW.wall_s + 3600, "why")
    assert second.keys == ()  # there is none of that index
