"""What docs/jobs.md shows is what the agent reads: example, launcher and the hook of a pod, taken from the page."""

from __future__ import annotations

import json
import re
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


def test_the_launcher_trains_where_the_folder_is_not_there(tmp_path, capsys):
    names: dict[str, object] = {}
    exec(block("import contextlib", "with job_file("), names)
    with names["job_file"]("exp-17", [UUID], folder=tmp_path / "none"):
        pass
    assert "not told" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_hook_of_a_pod_writes_and_removes(tmp_path, shell):
    uid = "6d0f7c1a-3a55-4c0e-9d53-2f7c8b1e4a90"
    environment = {"POD_UID": uid, "POD_NAME": "llama-worker-0", "POD_NAMESPACE": "research", "PATH": "/usr/bin:/bin"}
    write = block("printf", "preStop:").replace("/warpwatch-jobs", str(tmp_path))
    subprocess.run([shell, "-c", write], env=environment, check=True)
    (job,) = read(tmp_path)
    assert job == JobFile(
        job_key="kubernetes:research/llama",
        job_id=uid,
        scheduler="kubernetes",
        namespace="research",
        pod="llama-worker-0",
        declared_class="training",
        checkpoint_interval_seconds=1800.0,
    )
    remove = re.search(r'"(rm -f /warpwatch-jobs/.*?)"', PAGE)
    assert remove
    subprocess.run([shell, "-c", remove[1].replace("/warpwatch-jobs", str(tmp_path))], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
