"""An agent that is ended in the middle of a stall, gently and at once: the next one knows what it was looking at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from tests.end_to_end.programs import Agent, wait_for
from tests.nvml_emulator.emulator import Emulator

pytestmark = pytest.mark.end_to_end

STALL_S = 30
CONFIG = """
[agent]
state_directory = "{folder}"
[detectors.stalled_collective]
suspect_seconds = 5
confirm_seconds = 10
[detectors.stalled_collective.arm]
arm_seconds = 20
"""


def script(pids):
    """Two GPUs train together for 30 s and then hang in an all-reduce, as long as anybody looks."""
    lines = ["driver 580.95.05", "end hold"]
    for gpu in range(2):
        lines += [
            f"gpu {gpu} uuid GPU-0000000{gpu}-1111-2222-3333-444444444444",
            f"gpu {gpu} name NVIDIA H100 80GB HBM3",
        ]
    base = "memory_total_bytes=85899345920 power_limit_milliwatts=700000 sm_clock_megahertz=1980"
    work = "utilization_gpu_percent=98 utilization_memory_percent=45 power_milliwatts=600000"
    wait = "utilization_gpu_percent=100 utilization_memory_percent=0 power_milliwatts=120000"
    for second, shown in ((0, work), (STALL_S, wait), (3600, wait)):
        lines.append(f"@ {second}")
        total = min(second, STALL_S) * 30 * 1024 * 1024
        for gpu, pid in enumerate(pids):
            lines.append(
                f"{gpu} {base} {shown} memory_used_bytes=70000000000 processes={pid}:70000000000 "
                f"nvlink_transmit_kibibytes={total} nvlink_receive_kibibytes={total}"
            )
    return "\n".join([*lines, ""])


def severities(agent, anomaly):
    found = agent.metrics()
    return [value for key, value in found.items() if "gpu_anomaly_severity{" in key and f'anomaly="{anomaly}"' in key]


@pytest.fixture
def ranks():
    """Return the ids of two processes that do nothing: the ranks of the job."""
    started = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    yield [process.pid for process in started]
    for process in started:
        process.stdin.close()
        process.wait(10)


def test_a_stall_is_called_by_an_agent_that_never_saw_the_work(nvml_emulator_library, tmp_path, ranks):
    emulator = Emulator(tmp_path, script(ranks))
    folder = tmp_path / "state"
    folder.mkdir()
    options = {"config": CONFIG.format(folder=folder), "environment": emulator.environment()}
    with Agent(tmp_path, **options) as first:
        first.wait_until_ready()
        wait_for("wait", lambda: severities(first, "collective_wait") == [1, 1], STALL_S + 40, every=0.25)
        stopped = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(10) == 0
        assert time.monotonic() - stopped < 6, "it is to stop within two seconds, and this machine is busy"
    kept = json.loads((folder / "learned.json").read_text())["learners"]
    assert len(kept["stalled_collective"]["gpus"]) == 2
    assert (folder / "learned.json").stat().st_mode & 0o777 == 0o600

    emulator.freeze(STALL_S + 60)  # from here on, the GPUs wait and were never at work
    with Agent(tmp_path, **options) as second:
        second.wait_until_ready()
        os.kill(second.process.pid, signal.SIGKILL)
        second.process.wait(10)
    assert json.loads((folder / "learned.json").read_text())["learners"] == kept

    with Agent(tmp_path, **options) as third:
        third.wait_until_ready()
        wait_for("stall", lambda: severities(third, "stalled_collective") == [3, 3], 120, every=0.5)
        assert {v for k, v in third.metrics().items() if 'state="busy"' in k} == {600}


def test_a_state_that_cannot_be_read_or_kept_is_said_and_costs_nothing_else(nvml_emulator_library, tmp_path, ranks):
    emulator = Emulator(tmp_path, script(ranks))
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "learned.json").write_text("{")
    with Agent(tmp_path, config=CONFIG.format(folder=folder), environment=emulator.environment()) as agent:
        agent.wait_until_ready()
        error = 'warpwatch_sampler_errors_total{sampler="learned_state",reason="corrupt"}'
        wait_for("error", lambda: agent.metrics().get(error) == 1)
    assert agent.process.returncode == 0
    assert agent.log().count("what was learned before is lost") == 1
    assert "set aside as learned.json.corrupt-" in agent.log()
    names = sorted(path.name.partition(".corrupt-")[0] for path in folder.iterdir())
    assert names == ["learned.json", "learned.json"]  # the one that was set aside, and that of the stop
