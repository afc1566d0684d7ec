"""The files of systemd/, judged by systemd's own programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.config import Config
from tests.end_to_end.levels import capabilities

SYSTEMD = Path(__file__).parents[1] / "systemd"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([name, *arguments], check=False, capture_output=True, text=True, timeout=60)


def install(folder: Path, *, with_drop_in: bool) -> Path:
    """Copy the unit into a folder, with a program that exists in the place of the agent's."""
    unit = folder / "warpwatch.service"
    text = (SYSTEMD / "warpwatch.service").read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/warpwatch/bin/warpwatch", "/bin/true"), encoding="utf-8")
    if with_drop_in:
        shutil.copytree(SYSTEMD / "warpwatch.service.d", folder / "warpwatch.service.d")
    return unit


@pytest.mark.parametrize("with_drop_in", [False, True])
def test_systemd_has_nothing_to_say_against_the_unit(with_drop_in, tmp_path):
    unit = install(tmp_path, with_drop_in=with_drop_in)
    done = run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_folders_are_where_the_configuration_looks_and_making_them_again_changes_nothing(tmp_path):
    """Launchers of the group may put files into the folder of jobs, and the agent's user may not replace it."""
    if os.getuid() != 0:
        pytest.skip("giving folders to other users needs root")
    for kind in ("sysusers", "tmpfiles"):
        place = tmp_path / "etc" / f"{kind}.d"
        place.mkdir(parents=True)
        shutil.copy(SYSTEMD / f"warpwatch.{kind}.conf", place / "warpwatch.conf")
    for _ in range(2):
        for command in (
            ["systemd-sysusers", f"--root={tmp_path}"],
            ["systemd-tmpfiles", f"--root={tmp_path}", "--create", "warpwatch.conf"],
        ):
            done = run(*command)
            assert done.returncode == 0, done.stderr
            assert "unsafe" not in done.stderr
    config = Config()
    ids = dict(line.split(":")[:3:2] for line in (tmp_path / "etc" / "passwd").read_text().splitlines())
    groups = dict(line.split(":")[:3:2] for line in (tmp_path / "etc" / "group").read_text().splitlines())
    agent = (tmp_path / config.agent.runtime_folder.relative_to("/")).stat()
    jobs = (tmp_path / config.owners.jobs_folder.relative_to("/")).stat()
    assert (agent.st_uid, oct(agent.st_mode)) == (int(ids["warpwatch"]), "0o40755")
    assert (jobs.st_uid, jobs.st_gid, oct(jobs.st_mode)) == (0, int(groups["warpwatch-jobs"]), "0o41775")
    assert (tmp_path / "run" / "warpwatch").stat().st_uid == 0


def test_the_drop_in_grants_what_it_allows_and_no_more():
    text = (SYSTEMD / "warpwatch.service.d" / "capabilities.conf").read_text(encoding="utf-8")
    bounding = next(line for line in text.splitlines() if line.startswith("CapabilityBoundingSet="))
    assert bounding.partition("=")[2].split() == ["CAP_SYS_PTRACE", "CAP_SYSLOG", "CAP_DAC_READ_SEARCH"]
    assert capabilities() == ("sys_ptrace", "syslog", "dac_read_search")


@pytest.mark.parametrize(("with_drop_in", "most"), [(False, "20"), (True, "26")])
def test_exposure_is_within_the_bars(with_drop_in, most, tmp_path):
    """2.0 as installed and 2.6 with the capabilities; systemd counts in tenths."""
    unit = install(tmp_path, with_drop_in=with_drop_in)
    done = run("systemd-analyze", "security", "--offline=yes", f"--threshold={most}", "--no-pager", str(unit))
    assert done.returncode == 0, done.stdout.splitlines()[-1]
