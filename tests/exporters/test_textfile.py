"""The file for node_exporter: what is in it, how it is put in place, and when it goes."""

from __future__ import annotations

import logging
import os
import re
import stat

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.config import load_config
from agent.errors import UsageError
from exporters.metrics import METRICS
from exporters.textfile import Textfile
from tests.exporters.snapshots import full_snapshot


@pytest.fixture
def path(tmp_path):
    return tmp_path / "warpwatch.prom"


def test_it_holds_the_page_without_what_node_exporter_has_itself(path):
    Textfile(path, full_snapshot, METRICS).write()
    text = path.read_text(encoding="utf-8")
    names = {family.name for family in parse_text(text)}
    assert "warpwatch_gpu_power_watts" in names
    # node_exporter fails as a whole where a family of its own comes again with other labels or help.
    assert {name for name in names if not name.startswith("warpwatch_")} == set()
    # And it refuses a file with time stamps: a sample is a name and one number.
    assert all(re.search(r"^[^ ]+(\{.*\})? [^ ]+$", line) for line in text.splitlines() if not line.startswith("#"))
    assert text.endswith("\n")


def test_a_reader_finds_the_old_page_or_the_new_one_and_may_read_it(path, tmp_path):
    snapshots = iter([full_snapshot(gpus=1), full_snapshot(gpus=8)])
    textfile = Textfile(path, lambda: next(snapshots), METRICS)
    textfile.write()
    with path.open(encoding="utf-8") as reader:
        begun = reader.read(100)
        textfile.write()
        whole = begun + reader.read()
    assert 'warpwatch_gpu_power_watts{gpu="7"' not in whole
    assert whole.endswith("\n")
    assert 'warpwatch_gpu_power_watts{gpu="7"' in path.read_text(encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (
            'textfile = "/a/warpwatch.txt"',
            "textfile is '/a/warpwatch.txt'; node_exporter reads names that end in .prom",
        ),
        ('textfile = "warpwatch.prom"', "export.textfile is 'warpwatch.prom'; it must be an absolute path"),
        ("textfile_period_s = 0", "textfile_period_s is 0.0; it must be from 1 to 3600"),
        (
            'dcgm_hostname_label = "host"',
            "export.dcgm_hostname_label is 'host'; it must be one of 'Hostname', 'hostname'",
        ),
        ('web_config = "web.yml"', "export.web_config is 'web.yml'; it must be an absolute path"),
    ],
)
def test_what_the_table_cannot_be_told_is_refused(tmp_path, keys, complaint):
    file = tmp_path / "warpwatch.toml"
    file.write_text(f"[export]\n{keys}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(complaint)):
        load_config(file)


def test_what_others_have_put_in_its_way_is_neither_waited_for_nor_written_to(path, tmp_path):
    part, victim = tmp_path / ".warpwatch.prom.part", tmp_path / "victim"
    textfile = Textfile(path, full_snapshot, METRICS)
    os.mkfifo(part)
    textfile.write()
    assert stat.S_ISREG(path.lstat().st_mode)
    victim.write_text("mine")
    part.hardlink_to(victim)
    textfile.write()
    assert victim.read_text() == "mine"
    assert stat.S_ISREG(path.lstat().st_mode)


def test_it_goes_with_the_agent_and_does_not_come_again(path, tmp_path):
    textfile = Textfile(path, full_snapshot, METRICS)
    textfile.write()
    textfile.remove()
    textfile.write()
    textfile.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_agent_has_left_goes_before_the_first_samples(path):
    path.write_text("warpwatch_replay 0\n", encoding="utf-8")
    Textfile(path, lambda: None, METRICS).write()
    assert not path.exists()


def test_a_folder_that_is_not_there_is_said_once_and_its_coming_too(tmp_path, caplog):
    path = tmp_path / "later" / "warpwatch.prom"
    textfile = Textfile(path, full_snapshot, METRICS)
    with caplog.at_level(logging.WARNING, "warpwatch.textfile"):
        textfile.write()
        textfile.write()
        path.parent.mkdir()
        textfile.write()
        textfile.write()
    assert caplog.messages == [
        f"cannot write {path}: No such file or directory; node_exporter gets nothing new until that is mended",
        f"writing {path} works again",
    ]
    assert path.exists()


def test_a_link_in_the_place_of_the_part_is_not_followed(path, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched", encoding="utf-8")
    (tmp_path / ".warpwatch.prom.part").symlink_to(victim)
    Textfile(path, full_snapshot, METRICS).write()
    assert victim.read_text(encoding="utf-8") == "untouched"
