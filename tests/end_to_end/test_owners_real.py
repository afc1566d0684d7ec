"""Owners of a real process of another user, as a real unprivileged user sees them at each level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.owners.cgroups import parse_cgroup
from tests.end_to_end.levels import JOB_UID, ROOT, as_user, open_folder, require_root

pytestmark = pytest.mark.end_to_end

UUID = "GPU-00000000-0000-4000-8000-000000000000"
#: Samples once and prints the holders of the GPU and the count of failed readings.
SAMPLE = """
import json, sys
from pathlib import Path
from agent.clock import SystemClock
from agent.gpu_roster import GpuRoster
from agent.owners.job_files import JobFilesConfig
from agent.records import GpuKey, GpuProcess, GpuSlowSample, Tick
from agent.samplers.owners import OwnersConfig, OwnersSampler
pid, uuid, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
now = SystemClock().now()
times = {"monotonic_s": now.monotonic_s, "wall_s": now.wall_s}
roster = GpuRoster()
listed = GpuSlowSample(**times, key=GpuKey(0, uuid), processes=(GpuProcess(pid),))
roster.observe(Tick(**times, records=(listed,)))
sampler = OwnersSampler(roster, OwnersConfig(job_files=JobFilesConfig(folder=folder)))
(record,) = sampler.sample(now)
print(json.dumps([[holder._asdict() for holder in record.holders], dict(sampler.errors)]))
"""


@contextmanager
def job_process() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of another user that waits."""
    command = ["setpriv", "--reuid", str(JOB_UID), "--regid", str(JOB_UID), "--clear-groups", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"  # it is `cat` now, and another user's
        yield process
        process.stdin.close()


def seen(level: str, pid: int, folder: Path) -> tuple[list[dict[str, object]], dict[str, int]]:
    command = [*as_user(level), sys.executable, "-c", SAMPLE, str(pid), UUID, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    holders, errors = json.loads(done.stdout)
    return holders, errors


@pytest.mark.parametrize("level", ["plain", "hidepid", "capable"])
def test_the_owner_of_another_users_process(level):
    require_root()
    with open_folder() as folder, job_process() as process:
        owner = parse_cgroup(Path(f"/proc/{process.pid}/cgroup").read_text(encoding="utf-8"))
        name = owner.name or str(JOB_UID if owner.uid is None else owner.uid)
        (holder,), errors = seen(level, process.pid, folder)
        if level == "hidepid":
            assert (holder["job_key"], holder["user"], holder["processes"]) == ("", "", 1)
            assert errors == {"hidden_process": 1}
        else:
            assert (holder["job_key"], holder["user"], holder["processes"]) == (
                f"{owner.scheduler}:{name}",
                str(JOB_UID),
                1,
            )
            assert errors == {}


@pytest.mark.parametrize("level", ["plain", "hidepid", "capable"])
def test_the_prolog_tells_every_level(level):
    """The prolog runs as root and writes a file that the agent may read, whatever it may read of processes."""
    require_root()
    with open_folder() as folder, job_process() as process:
        jobs = folder / "jobs.d"
        environment = {"SLURM_JOB_ID": "812345", "SLURM_JOB_USER": "ana", "CUDA_VISIBLE_DEVICES": UUID}
        old = os.umask(0o077)  # as slurmd may have it
        try:
            subprocess.run([ROOT / "slurm" / "prolog.sh", jobs], env=environment, check=True)
        finally:
            os.umask(old)
        (holder,), _ = seen(level, process.pid, jobs)
        assert (holder["job_key"], holder["user"], holder["processes"]) == ("slurm:812345", "ana", 1)
