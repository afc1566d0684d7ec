"""The running agent beside a driver that is reset, replaced, or reports XIDs."""

from __future__ import annotations

import argparse
import os
import re
import time

import pytest

from agent import commands
from agent.errors import FaultError
from tests.end_to_end.programs import Agent, fetch, run_warpwatch, wait_for
from tests.end_to_end.test_agent import script, series
from tests.nvml_emulator.emulator import Emulator

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def emulator(nvml_emulator_library, tmp_path):
    emulator = Emulator(tmp_path, script())
    emulator.freeze(0)
    return emulator


def start(tmp_path, emulator, config=""):
    return Agent(
        tmp_path, config=f'[agent]\nruntime_folder = "{tmp_path}"\n' + config, environment=emulator.environment()
    )


def wait_for_gpus(agent, count=2):
    wait_for("GPUs", lambda: len(series(agent, "warpwatch_gpu_power_watts")) == count, 30)


def test_an_xid_is_counted_once_with_its_time_and_what_to_do(emulator, tmp_path):
    with start(tmp_path, emulator) as agent:
        agent.wait_until_ready()
        wait_for_gpus(agent)
        wait_for("critical codes at 0", lambda: series(agent, "warpwatch_gpu_xid_errors_total", xid="79").get("1") == 0)
        before = time.time()
        emulator.xid(1, 79)
        wait_for("XID 79", lambda: series(agent, "warpwatch_gpu_xid_errors_total", xid="79").get("1") == 1)
        stamp = series(agent, "warpwatch_gpu_xid_last_timestamp_seconds", xid="79")["1"]
        assert before - 1 < stamp < time.time() + 1
        assert series(agent, "warpwatch_gpu_xid_errors_total", xid="79")["0"] == 0
        info = [key for key in agent.metrics() if key.startswith("warpwatch_xid_info")]
        assert info == ['warpwatch_xid_info{xid="79",action="reboot_node"}']
        emulator.xid(1, 79, count=2)
        wait_for("three of them", lambda: series(agent, "warpwatch_gpu_xid_errors_total", xid="79").get("1") == 3)


def test_an_operator_gets_the_driver_and_gives_it_back(emulator, tmp_path):
    emulator.log_calls()
    with start(tmp_path, emulator) as agent:
        agent.wait_until_ready()
        wait_for_gpus(agent)
        config = str(tmp_path / "warpwatch.toml")
        done = run_warpwatch("driver", "release", "--config", config)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"process {agent.process.pid} has released the NVIDIA driver, for 600 s" in done.stdout
        # It returns when the driver is free, not before: the last reference of each thread is gone.
        calls = emulator.calls()
        assert len(calls.of("nvmlShutdown")) == len(calls.of("nvmlInitWithFlags")) > 0
        wait_for_gpus(agent, 0)
        quiet_since = time.monotonic()
        opened = len(emulator.calls().of("nvmlInitWithFlags"))
        time.sleep(3)
        # Nothing asks the driver meanwhile, the page answers, and nothing is said to be zero. The node is not ready.
        assert len(emulator.calls().of("nvmlInitWithFlags")) == opened, time.monotonic() - quiet_since
        assert agent.metrics()['warpwatch_sampler_success{sampler="nvml"}'] == 0
        assert fetch(agent.url + "/-/healthy")[0] == 200
        wait_for("node that is not ready", lambda: fetch(agent.url + "/-/ready")[0] == 503, 30)
        assert run_warpwatch("driver", "resume", "--config", config).returncode == 0
        wait_for_gpus(agent)
        agent.wait_until_ready()


def test_a_release_ends_by_itself(emulator, tmp_path):
    with start(tmp_path, emulator, "driver_release_seconds = 4\n") as agent:
        agent.wait_until_ready()
        wait_for_gpus(agent)
        assert run_warpwatch("driver", "release", "--pid", str(agent.process.pid)).returncode == 0
        wait_for_gpus(agent, 0)
        wait_for_gpus(agent)


def test_a_release_waits_for_a_gpu_that_hangs_and_says_so(emulator, tmp_path, monkeypatch, capsys):
    with start(tmp_path, emulator, "[nvml]\ndeadline_s = 1\n") as agent:
        agent.wait_until_ready()
        wait_for_gpus(agent)
        emulator.hang(120, gpu=1)
        wait_for("hung GPU", lambda: series(agent, "warpwatch_gpu_state", state="hung").get("1") == 1)
        release = argparse.Namespace(action="release", pid=agent.process.pid, config=None)
        monkeypatch.setattr(commands, "RELEASE_WAIT_S", 3.0)
        with pytest.raises(
            FaultError, match=r"not released the NVIDIA driver within 3 s: GPU 1 \(.*\) hangs in a driver"
        ):
            commands.driver(release)
        assert re.search(r"not released yet: GPU 1 \(.*\) hangs in a driver call", capsys.readouterr().err)
        assert "is to be released, and cannot be yet: GPU 1" in agent.log()
        assert "the NVIDIA driver does not answer" not in agent.log()
        monkeypatch.setattr(commands, "RELEASE_WAIT_S", 30.0)
        emulator.clear()
        assert commands.driver(release) == 0
        assert run_warpwatch("driver", "resume", "--pid", str(agent.process.pid)).returncode == 0
        wait_for_gpus(agent)


def test_an_agent_without_a_driver_says_so(tmp_path):
    with Agent(tmp_path, "--demo", config=f'[agent]\nruntime_folder = "{tmp_path}"\n') as agent:
        agent.wait_until_ready()
        for action in ("release", "resume"):
            done = run_warpwatch("driver", action, "--config", str(tmp_path / "warpwatch.toml"))
            assert done.returncode == 0
            assert f"process {agent.process.pid} has no NVIDIA driver to {action}" in done.stdout
            assert done.stderr == ""
        wait_for("line in the log", lambda: "no NVIDIA driver to release" in agent.log())


def test_a_driver_that_was_replaced_ends_the_agent_for_its_supervisor(emulator, tmp_path):
    config = "[nvml]\nstart_tries = 2\nrestart_first_s = 1\n"
    with start(tmp_path, emulator, config) as agent:
        agent.wait_until_ready()
        wait_for_gpus(agent)
        emulator.reload_driver("590.10.00")
        wait_for("end of the agent", lambda: agent.process.poll() is not None, 60)
        assert agent.process.returncode == 1
        assert re.search(r"can only be read by a new process \(lib_rm_version_mismatch\)", agent.log())
        assert "Traceback" not in agent.log()


def test_no_other_process_is_ever_signalled(tmp_path):
    done = run_warpwatch("driver", "release", "--pid", str(os.getpid()))
    assert done.returncode == 1
    assert "is not `warpwatch run`" in done.stderr
    assert run_warpwatch("driver", "resume", "--pid", "4194304").returncode == 1
    (tmp_path / "c.toml").write_text(f'[agent]\nruntime_folder = "{tmp_path}"\n')
    done = run_warpwatch("driver", "release", "--config", str(tmp_path / "c.toml"))
    assert done.returncode == 1
    assert "make run" in done.stderr
    assert "--pid" in done.stderr
