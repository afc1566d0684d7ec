"""What is not there yet, or not any more, when the agent starts: it serves, says what is missing, and ends as told."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence

import pytest

from tests.end_to_end.programs import Agent, wait_for

pytestmark = pytest.mark.end_to_end


def ends(agent: Agent) -> None:
    """Check that it ends within two seconds, in peace."""
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(6) == 0, agent.log()  # two seconds, and this machine is busy
    assert "Traceback" not in agent.log()


def serves(agent: Agent) -> None:
    agent.wait_until_ready()
    assert agent.metrics()['warpwatch_sampler_success{sampler="nvml"}'] == 0


@pytest.mark.parametrize(
    "state",
    ["absent", "/proc/sys", "/proc/1/fd"],
    ids=["no state directory", "read-only", "of somebody else"],
)
def test_without_a_place_for_what_it_learns(tmp_path, state):
    folder = tmp_path / state if state == "absent" else state
    config = f'[agent]\nstate_directory = "{folder}"\nruntime_folder = "{tmp_path}"\n'
    with Agent(tmp_path, config=config) as agent:
        serves(agent)
        ends(agent)
    assert any(word in agent.log() for word in ("does not exist", "cannot be written", "cannot be read"))


@pytest.mark.parametrize(
    "prefix",
    [
        ["prlimit", "--fsize=0:0"],
        ["prlimit", "--nofile=48:48"],
        ["prlimit", "--as=1500000000"],
        ["prlimit", "--nproc=64"],
    ],
    ids=["not a byte can be written", "few file descriptors", "little memory", "few processes"],
)
def test_under_pressure(tmp_path, prefix: Sequence[str]):
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit (package util-linux) is absent")
    state = tmp_path / "state"
    state.mkdir()
    config = f'[agent]\nstate_directory = "{state}"\nruntime_folder = "{tmp_path}"\n'
    with Agent(tmp_path, config=config, prefix=prefix) as agent:
        serves(agent)
        assert len(agent.metrics()) > 20
        ends(agent)


def test_before_the_network(tmp_path):
    """No interface is up, not even the loopback: what would be scraped is written to the file for node_exporter."""
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to a network namespace of its own")
    page = tmp_path / "warpwatch.prom"
    config = f'[agent]\nruntime_folder = "{tmp_path}"\n[export]\ntextfile = "{page}"\ntextfile_period_s = 1\n'
    with Agent(tmp_path, config=config, prefix=["unshare", "-n"]) as agent:
        wait_for("page", page.exists, 30)
        assert "warpwatch_build_info" in page.read_text()
        ends(agent)
    assert not page.exists()
