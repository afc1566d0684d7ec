"""The configuration file: strict, with errors that name file, line, key and what is allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from agent.config import Config, load_config, print_config
from agent.config_loader import dump_toml, load_toml
from agent.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    seconds: float = 30.0
    share_ratio: float = 0.5
    names: tuple[str, ...] = ("a",)

    def __post_init__(self):
        if self.seconds <= 0:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    level: Literal["info", "debug"] = "info"
    count: int = 3
    enabled: bool = True
    folder: Path = Path("/proc")
    state: Path | None = None
    inner: Inner = field(default_factory=Inner)


def load(tmp_path, text):
    file = tmp_path / "warpwatch.toml"
    file.write_text(text, encoding="utf-8")
    return load_toml(Schema, file)


def test_what_is_left_out_keeps_its_default(tmp_path):
    assert load(tmp_path, "") == Schema()
    assert load(tmp_path, "count = 4\n[inner]\nseconds = 5\n") == Schema(count=4, inner=Inner(seconds=5.0))


def test_a_dump_reads_back_to_the_same(tmp_path):
    config = Schema(folder=Path('/a "b"\\c\n'), state=Path("/x"), inner=Inner(names=("p", "q"), seconds=0.25))
    assert load(tmp_path, dump_toml(config)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ncuont = 4\n", "line 2: unknown key 'cuont'; did you mean 'count'?"),
        ("[inner]\nfoo = 1\n", "line 2: unknown key 'inner.foo'; allowed here: seconds, share_ratio, names"),
        ("[other]\n", "line 1: unknown key 'other'; allowed here: level, count, enabled, folder, state, inner"),
        ("count = 1.5\n", "line 1: count is 1.5; it must be a whole number"),
        ("count = true\n", "line 1: count is True; it must be a whole number"),
        ("enabled = 1\n", "line 1: enabled is 1; it must be a boolean"),
        ('level = "loud"\n', "line 1: level is 'loud'; it must be one of 'info', 'debug'"),
        ("inner = 3\n", "line 1: inner is 3; it must be a table"),
        ('[inner]\nnames = ["a", 2]\n', "line 2: inner.names is ['a', 2]; it must be a list of strings"),
        ("[inner]\nseconds = 0\n", "[inner] seconds is 0.0; it must be above 0"),
        ("[inner]\nseconds = -1\n", "line 2: inner.seconds is -1.0; it must be 0 or more"),
        ("[inner]\nseconds = nan\n", "line 2: inner.seconds is nan; it must be a finite number"),
        ("[inner]\nshare_ratio = 5\n", "line 2: inner.share_ratio is 5.0; it must be from 0 to 1"),
        ("count = \n", "not valid TOML"),
    ],
)
def test_an_error_says_where_what_and_what_is_allowed(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert str(tmp_path / "warpwatch.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read configuration .*absent\.toml: No such file"):
        load_toml(Schema, tmp_path / "absent.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        load_toml(Schema, binary)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[nvml]\nperiod_s = 0\n", "period_s"),
        ("[nvml]\ndeadline_s = 0\n", "deadline_s"),
        ("[nvml]\nfast_hertz = 1e308\n", "fast_hertz"),
        ("[nvml]\nperiod_s = 1e308\n", "period_s"),
        ("[xid]\nsend_period_s = 0\n", "send_period_s"),
        ("[xid]\ncodes_per_device = 1000000\n", "codes_per_device"),
    ],
)
def test_what_a_sampler_cannot_be_told_is_refused(tmp_path, text, key):
    file = tmp_path / "warpwatch.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=rf"{key} is .*; it must be"):
        load_config(file)


@pytest.mark.parametrize("value", ["", "proc", "./proc", "tcp://kubelet:1", "unix:///run/kubelet.sock", "/a\\u0000b"])
@pytest.mark.parametrize(
    "key",
    [
        "agent.proc_root",
        "agent.sys_root",
        "agent.kmsg",
        "agent.runtime_folder",
        "agent.state_directory",
        "owners.jobs_folder",
        "pod_resources.socket",
    ],
)
def test_a_path_is_absolute(tmp_path, key, value):
    file = tmp_path / "warpwatch.toml"
    table, _, name = key.rpartition(".")
    file.write_text(f'[{table}]\n{name} = "{value}"\n')
    with pytest.raises(UsageError, match=rf"line 2: {key} is '.*'; it must be an absolute path") as caught:
        load_config(file)
    assert "\0" not in str(caught.value)


def test_every_path_that_may_be_configured_is_tested():
    dump = dump_toml(Config())
    assert sorted(re.findall(r'^(\w+) = "/', dump, re.MULTILINE)) == sorted(
        ["proc_root", "sys_root", "kmsg", "runtime_folder", "state_directory", "jobs_folder", "socket"]
    )


@pytest.mark.parametrize("seconds", ["0", "0.5", "1e300"])
def test_a_release_of_the_driver_lasts_from_a_second_to_a_week(tmp_path, seconds):
    file = tmp_path / "warpwatch.toml"
    file.write_text(f"[agent]\ndriver_release_seconds = {seconds}\n")
    with pytest.raises(UsageError, match=r"\[agent\] driver_release_seconds is .*; it must be from 1 to 604800"):
        load_config(file)


def test_the_address_to_listen_on_is_checked_with_the_file(tmp_path):
    file = tmp_path / "warpwatch.toml"
    for address in ("nope", ":99999"):
        file.write_text(f'[export]\nlisten = "{address}"\n')
        with pytest.raises(UsageError, match=address):
            load_config(file)


def test_a_printed_configuration_says_where_each_value_comes_from_and_reads_back(tmp_path):
    file = tmp_path / "site.toml"
    file.write_text(
        '# ours\n[agent]\nlog_level = "debug"  # for now\n\n[ detectors . throttled ]\nenabled = false\n'
        "[labels]\ndeclared = { error_ratio = 0.2 }\n",
        encoding="utf-8",
    )
    printed = print_config(file, {"export.listen": ":9999"})
    lines = printed.splitlines()
    assert f'log_level = "debug"  # {file}:3' in lines
    assert f"enabled = false  # {file}:6" in lines
    assert f"error_ratio = 0.2  # {file}" in lines, "of an inline table only the file is known"
    assert 'listen = ":9999"  # command line' in lines
    assert "# web_config is not set  # default" in lines
    assert sum(line.endswith("# default") for line in lines) > 200
    assert not any(" = " in line and "  # " not in line for line in lines)
    back = tmp_path / "back.toml"
    back.write_text(printed, encoding="utf-8")
    read = load_config(back)
    given = load_config(file)
    assert read == replace(given, export=replace(given.export, listen=":9999"))


def test_what_the_command_line_gives_is_checked_as_well():
    with pytest.raises(UsageError, match="nowhere"):
        print_config(None, {"export.listen": "nowhere"})
