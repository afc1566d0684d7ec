"""What docs/jobs.md shows is what the agent reads: example, launcher and the hook of a pod, taken from the page."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import textwrap
from pathlib import Path

import pytest

from agent.clock import Instant, SystemClock
from agent.owners.job_file import JobFile, parse_job_file
from agent.owners.job_files import JobFiles, JobFilesConfig

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text(encoding="utf-8")
UUID = "GPU-8f1b2c3d-0a1b-2c3d-4e5f-60718293a4b5"


def block(first: str, last: str) -> str:
    """Return the text of an example from the line that begins with `first` to that before `last`."""
    match = re.search(rf"^ *{re.escape(first)}.*?(?=^ *{re.escape(last)})", PAGE, re.MULTILINE | re.DOTALL)
    assert match, f"the page shows no {first}"
    return textwrap.dedent(match[0])


def read(folder: Path, now: Instant | None = None) -> tuple[JobFile, ...]:
    files = JobFiles(JobFilesConfig(folder=str(folder)))
    found = files.read(now or SystemClock().now())
    assert files.errors == {}
    return found


def test_the_example_is_a_job_file():
    job = parse_job_file(block('{"job_key"', "| Key").encode())
    assert (job.job_key, job.declared_class, job.checkpoint_interval_seconds) == (
        "slurm:alpha/812345",
        "training",
        1800.0,
    )
    assert job.gpus == {UUID.lower(), "00000000:43:00"}
    assert job.unknown_keys == ()


def test_the_table_holds_the_keys_that_are_read():
    keys = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))))
    value = json.dumps({**dict.fromkeys(keys), "job_key": "a"})
    assert parse_job_file(value.encode()).unknown_keys == ()
    assert keys >= {"job_key", "job_id", "scheduler", "user", "gpus", "workload", "expires", "pod"}


def test_the_launcher_holds_and_lets_go(tmp_path):
    names: dict[str, object] = {}
    exec(block("import contextlib", "with job_file("), names)
    job_file = names["job_file"]
    with job_file("exp-17", [UUID], folder=tmp_path, user="ana", workload="training"):
        (job,) = read(tmp_path)
        assert (job.job_key, job.user, job.declared_class, job.gpus) == ("exp-17", "ana", "training", {UUID.lower()})
        assert job.expires_wall_s is not None
    assert list(tmp_path.iterdir()) == []


def test_launchers_that_are_all_process_1_hold_a_file_each(tmp_path):
    """As in containers that share the folder: one that ends lets go of its own GPUs alone."""
    names: dict[str, object] = {}
    exec(block("import contextlib", "with job_file("), names)
    job_file = names["job_file"]
    with job_file("exp-17", [UUID], folder=tmp_path):
        with job_file("exp-18", [UUID], folder=tmp_path):
            assert {job.job_key for job in read(tmp_path)} == {"exp-17", "exp-18"}
        assert [job.job_key for job in read(tmp_path)] == ["exp-17"]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=[0o077, 0o000], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_the_agent_may_read_what_a_launcher_writes(tmp_path):
    names: dict[str, object] = {}
    exec(block("import contextlib", "with job_file("), names)
    with names["job_file"]("exp-17", [UUID], folder=tmp_path):
        (path,) = tmp_path.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_the_launcher_trains_where_the_folder_is_not_there(tmp_path, capsys):
    names: dict[str, object] = {}
    exec(block("import contextlib", "with job_file("), names)
    with names["job_file"]("exp-17", [UUID], folder=tmp_path / "none"):
        pass
    assert "not told" in capsys.readouterr().out


POD_UID = "6d0f7c1a-3a55-4c0e-9d53-2f7c8b1e4a90"


def hook(shell: str, folder: Path, log: Path) -> subprocess.CompletedProcess[bytes]:
    """Run the hook of a pod as the kubelet does, with the container's log in a file."""
    environment = {
        "POD_UID": POD_UID,
        "POD_NAME": "llama-worker-0",
        "POD_NAMESPACE": "research",
        "PATH": "/usr/bin:/bin",
    }
    text = block("new=", "preStop:").replace("/warpwatch-jobs", str(folder)).replace("/proc/1/fd/2", str(log))
    return subprocess.run([shell, "-c", text], env=environment, check=True, capture_output=True)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_hook_of_a_pod_writes_and_removes(tmp_path, shell):
    folder = tmp_path / "jobs.d"
    folder.mkdir()
    assert hook(shell, folder, tmp_path / "log").stderr == b""
    assert not (tmp_path / "log").exists()
    (job,) = read(folder)
    assert job == JobFile(
        job_key="kubernetes:research/llama",
        job_id=POD_UID,
        scheduler="kubernetes",
        namespace="research",
        pod="llama-worker-0",
        declared_class="training",
        checkpoint_interval_seconds=1800.0,
    )
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    (folder / f".{POD_UID}.json").write_text("left behind")
    remove = re.search(r'"(rm -f /warpwatch-jobs/.*?)"', PAGE)
    assert remove
    command = [shell, "-c", remove[1].replace("/warpwatch-jobs", str(folder))]
    subprocess.run(command, env={"POD_UID": POD_UID, "PATH": "/usr/bin:/bin"}, check=True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_hook_of_a_pod_that_may_not_write_says_so_and_lets_it_run(tmp_path, shell):
    hook(shell, tmp_path / "none", tmp_path / "log")  # checks that it ends with 0
    assert f"not told of this pod: user {os.getuid()} cannot write" in (tmp_path / "log").read_text()
