"""What the agent sees of another user's job at the three levels of permission, as a real unprivileged user.

The job is a real process of a user of its own, with a child that writes a counted number of bytes, in a mount namespace
of its own; the NVML emulator lists it on GPU 0.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.records import GpuOwners, ProcessSample
from agent.trace import TraceReader
from tests.end_to_end.levels import AGENT_UID, JOB_UID, as_user, open_folder, require_root
from tests.end_to_end.programs import Agent, wait_for, warpwatch
from tests.nvml_emulator.emulator import Emulator

pytestmark = pytest.mark.end_to_end

WRITTEN_BYTES = 8 * 2**20
JOB = f"""
import os, sys, time
with open(sys.argv[1], "wb") as file:
    file.write(bytes({WRITTEN_BYTES}))
    file.flush()
    os.fsync(file.fileno())
end = time.process_time() + 1.0
while time.process_time() < end:
    pass
print("worked", flush=True)
time.sleep(600)
"""
SCRIPT = """\
driver 580.95.05
end hold
gpu 0 uuid GPU-00000000-1111-2222-3333-444444444444
@ 0
0 utilization_gpu_percent=90 memory_used_bytes=30000000000 memory_total_bytes=85899345920 processes={pid}:1000000
"""


@pytest.fixture(scope="module")
def node(nvml_emulator_library):
    """Return folder and environment of a node, where a job of another user holds GPU 0."""
    require_root()
    with open_folder() as folder:
        job = subprocess.Popen(
            [*as_user("plain", JOB_UID), sys.executable, "-c", JOB, str(folder / "checkpoint")],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "worked\n"
            emulator = Emulator(folder, SCRIPT.format(pid=job.pid))
            emulator.freeze(0)
            yield folder, emulator.environment(), job.pid
        finally:
            job.kill()
            job.communicate()


class LevelAgent(Agent):
    """An agent that runs at a level."""

    def __init__(self, level: str, folder: Path, environment: dict[str, str]) -> None:
        self.level = level
        config = f'[agent]\nruntime_folder = "{folder}/none"\n[export]\nowner_user = true\n'
        super().__init__(folder, config=config, environment=environment, prefix=as_user(level))


def recorded(level: str, folder: Path, environment: dict[str, str]) -> list[object]:
    """Return all records of a recording of seven seconds at a level: two ticks of what comes every five."""
    out = folder / f"{level}.jsonl"
    command = [*as_user(level), warpwatch(), "record", str(out), "--duration", "7", "--identify"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert out.stat().st_uid == AGENT_UID
    return [record for tick in TraceReader(out, pytest.fail) for record in tick.records]


def errors(agent: Agent, sampler: str) -> dict[str, float]:
    """Return the errors of a sampler by reason."""
    prefix = f'warpwatch_sampler_errors_total{{sampler="{sampler}",reason="'
    return {
        name.removeprefix(prefix).removesuffix('"}'): value
        for name, value in agent.metrics().items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("level", ["plain", "hidepid", "capable"])
def test_what_each_level_sees_of_a_job(level, node):
    folder, environment, pid = node
    with LevelAgent(level, folder, environment) as agent:
        records = recorded(level, folder, environment)
        agent.wait_until_ready()
        wait_for("owner", lambda: "warpwatch_gpu_owner_share_ratio" in str(agent.metrics()))
        page = agent.metrics()
        expected = {"plain": {"no_permission": 1}, "hidepid": {"invisible": 1}, "capable": {}}[level]
        wait_for(f"errors {expected}", lambda: errors(agent, "processes") == expected)
        xid_errors = errors(agent, "xid")

    processes = [record for record in records if isinstance(record, ProcessSample)]
    holders = [record.holders for record in records if isinstance(record, GpuOwners)][-1]
    (info,) = (series for series in page if series.startswith("warpwatch_gpu_owner_info"))
    assert 'owners="1"' in info
    assert sum(value for name, value in page.items() if name.startswith("warpwatch_gpu_owner_share_ratio")) == 1.0
    assert page['warpwatch_sampler_success{sampler="processes"}'] == 1
    assert [(holder.share_ratio, holder.processes) for holder in holders] == [(1.0, 1)]

    if level == "hidepid":
        # Somebody holds the GPU; who and how is not to be seen, and that is said.
        assert processes == []
        assert 'job_key=""' in info
        return
    assert {record.pid for record in processes} == {pid}
    newest = processes[-1]
    assert newest.cpu_seconds_total == pytest.approx(1.0, abs=0.5)  # it burned one second, and started Python
    assert newest.state == "S"
    assert newest.resident_bytes > 2**20
    assert holders[0].job_key
    assert f'job_key="{holders[0].job_key}"' in info
    if level == "plain":
        assert newest.written_bytes_total is None
    else:
        assert newest.written_bytes_total == pytest.approx(WRITTEN_BYTES, rel=0.02)
        assert "no_permission" not in xid_errors
