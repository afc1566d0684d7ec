"""`warpwatch run` as a process: on the NVML emulator, without a driver, and told to stop."""

from __future__ import annotations

import gzip
import os
import re
import signal
import socket
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.agent.test_pci import device
from tests.end_to_end.programs import Agent, fetch, free_port, run_warpwatch, wait_for
from tests.nvml_emulator.emulator import DRIVER_NOT_LOADED, GPU_IS_LOST, NOT_SUPPORTED, Emulator

pytestmark = pytest.mark.end_to_end


def script(gpus=2):
    """Each GPU with values of its own, standing still; counters of 1,000,000 KiB a second and more."""
    lines = ["driver 580.95.05", "end hold"]
    for gpu in range(gpus):
        lines += [
            f"gpu {gpu} uuid GPU-0000000{gpu}-1111-2222-3333-444444444444",
            f"gpu {gpu} name NVIDIA H100 80GB HBM3",
        ]
        lines += [f"gpu {gpu} minor {gpus - gpu}"]
    lines.append("@ 0")
    for gpu in range(gpus):
        lines.append(
            f"{gpu} utilization_gpu_percent={10 + gpu} utilization_memory_percent={20 + gpu} "
            f"memory_used_bytes={30_000_000_000 + gpu} memory_total_bytes=85899345920 "
            f"power_milliwatts={400_500 + gpu * 1000} "
            f"sm_clock_megahertz={1900 + gpu} memory_clock_megahertz=2619 temperature_celsius={50 + gpu} "
            f"power_limit_milliwatts=700000 event_reasons_bits=4 energy_millijoules={9_000_000 + gpu} "
            f"nvlink_transmit_kibibytes={100 + gpu} nvlink_receive_kibibytes={200 + gpu} "
            f"pcie_transmit_bytes={5_000_000_000 + gpu} pcie_receive_bytes={6_000_000_000 + gpu}"
        )
    return "\n".join([*lines, ""])


@pytest.fixture
def emulator(nvml_emulator_library, tmp_path):
    emulator = Emulator(tmp_path, script())
    emulator.freeze(0)
    return emulator


@pytest.fixture
def agent(emulator, tmp_path):
    with Agent(tmp_path, environment=emulator.environment()) as agent:
        agent.wait_until_ready()
        wait_for("GPU series", lambda: series(agent, "warpwatch_gpu_temperature_celsius", sensor="gpu"))
        yield agent


def labels(gpu):
    return f'gpu="{gpu}",uuid="GPU-0000000{gpu}-1111-2222-3333-444444444444"'


def series(agent, name, **wanted):
    """Return value by the `gpu` label of the series of `name` that have the labels wanted."""
    found = {}
    for key, value in agent.metrics().items():
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', key))
        if key.split("{")[0] == name and wanted.items() <= pairs.items():
            found[pairs.get("gpu", "")] = value
    return found


def test_it_listens_within_a_second_and_is_ready_after_the_first_samples(emulator, tmp_path):
    started = time.monotonic()
    with Agent(tmp_path, environment=emulator.environment()) as agent:
        wait_for("answer", lambda: fetch(agent.url + "/-/healthy")[0] == 200, every=0.02)
        listening = time.monotonic() - started
        agent.wait_until_ready()
        ready = time.monotonic() - started
    # DESIGN.md promises 1 s on a node; these machines of two busy cores get three times that.
    assert listening < 3.0
    assert ready < 6.0


def test_every_value_of_the_driver_is_exported_in_base_units(agent):
    metrics = agent.metrics()
    for gpu in (0, 1):
        gpu_labels = labels(gpu)
        expected = {
            "warpwatch_gpu_utilization_ratio": 0.10 + gpu / 100,
            "warpwatch_gpu_memory_utilization_ratio": 0.20 + gpu / 100,
            "warpwatch_gpu_memory_used_bytes": 30e9 + gpu,
            "warpwatch_gpu_memory_total_bytes": 85899345920,
            "warpwatch_gpu_power_watts": 400.5 + gpu,
            "warpwatch_gpu_power_limit_watts": 700,
            "warpwatch_gpu_energy_joules_total": 9000 + gpu / 1000,
            "warpwatch_gpu_nvlink_transmit_bytes_total": (100 + gpu) * 1024,
            "warpwatch_gpu_nvlink_receive_bytes_total": (200 + gpu) * 1024,
            "warpwatch_gpu_pcie_transmit_bytes_total": 5e9 + gpu,
            "warpwatch_gpu_pcie_receive_bytes_total": 6e9 + gpu,
        }
        for name, value in expected.items():
            assert metrics[f"{name}{{{gpu_labels}}}"] == pytest.approx(value), name
        assert series(agent, "warpwatch_gpu_clock_hertz", clock="sm")[str(gpu)] == (1900 + gpu) * 1e6
        assert series(agent, "warpwatch_gpu_clock_event_active", reason="sw_power_cap")[str(gpu)] == 1
        assert series(agent, "warpwatch_gpu_clock_event_active", reason="hw_thermal")[str(gpu)] == 0
        assert series(agent, "warpwatch_gpu_state", state="ok")[str(gpu)] == 1
        # Beside the index stands the minor number, which differs from it.
        assert series(agent, "warpwatch_gpu_info", device=f"nvidia{2 - gpu}")[str(gpu)] == 1
        assert len(series(agent, "warpwatch_gpu_owner_info")) == 2
    assert metrics["warpwatch_replay"] == 0
    assert metrics["warpwatch_gpus_expected"] == metrics["warpwatch_gpus_visible"] == 2
    assert metrics['warpwatch_sampler_success{sampler="nvml"}'] == 1


def test_a_field_that_is_not_supported_is_absent_and_no_error(emulator, tmp_path):
    emulator.fail(NOT_SUPPORTED, gpu=0, call="nvmlDeviceGetPowerUsage")
    with Agent(tmp_path, environment=emulator.environment()) as agent:
        agent.wait_until_ready()
        wait_for("power", lambda: series(agent, "warpwatch_gpu_power_watts"))
        assert list(series(agent, "warpwatch_gpu_power_watts")) == ["1"]
        errors = [key for key in agent.metrics() if key.startswith('warpwatch_sampler_errors_total{sampler="nvml"')]
        assert not any("not_supported" in key for key in errors)


def test_text_openmetrics_and_gzip_by_what_the_client_accepts(agent):
    status, headers, text = fetch(agent.url + "/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    _, headers, body = fetch(agent.url + "/metrics", {"Accept": "application/openmetrics-text;version=1.0.0"})
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    names = {sample.name for family in text_string_to_metric_families(body.decode()) for sample in family.samples}
    assert "warpwatch_gpu_energy_joules_total" in names
    assert not any(name.endswith("_created") for name in names)
    _, headers, body = fetch(agent.url + "/metrics", {"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(body).splitlines()[0] == text.splitlines()[0]


def test_a_lost_gpu_shows_and_the_other_goes_on(agent, emulator):
    emulator.fail(GPU_IS_LOST, gpu=1)
    wait_for("lost GPU", lambda: series(agent, "warpwatch_gpu_state", state="lost").get("1") == 1)
    wait_for("absent values", lambda: "1" not in series(agent, "warpwatch_gpu_power_watts"))
    assert series(agent, "warpwatch_gpu_power_watts") == {"0": 400.5}
    assert fetch(agent.url + "/-/ready")[0] == 200


def test_a_missing_driver_is_no_fault_and_its_arrival_is_noticed(emulator, tmp_path):
    emulator.fail_system(DRIVER_NOT_LOADED, call="nvmlInit")
    with Agent(tmp_path, environment=emulator.environment()) as agent:
        agent.wait_until_ready()  # network and disks are sampled
        assert agent.metrics()['warpwatch_sampler_success{sampler="nvml"}'] == 0
        assert not series(agent, "warpwatch_gpu_state")
        assert "driver" in fetch(agent.url + "/")[2].decode().lower()
        emulator.clear()
        emulator.freeze(0)
        wait_for("GPUs", lambda: len(series(agent, "warpwatch_gpu_power_watts")) == 2, 45)
        assert agent.metrics()['warpwatch_sampler_success{sampler="nvml"}'] == 1
        assert agent.log().count("the NVIDIA driver is not loaded") == 1


def test_a_node_whose_driver_does_not_come_up_expects_the_gpus_on_its_bus(emulator, tmp_path):
    for slot in ("1b", "3b"):
        device(tmp_path / "sys", f"0000:{slot}:00.0", "0x10de", "0x030200")
    emulator.fail_system(DRIVER_NOT_LOADED, call="nvmlInit")
    config = f'[agent]\nsys_root = "{tmp_path / "sys"}"\n'
    with Agent(tmp_path, config=config, environment=emulator.environment()) as agent:
        agent.wait_until_ready()
        # What the rule WarpwatchAgentBlind fires on.
        assert agent.metrics()["warpwatch_gpus_expected"] == 2
        assert agent.metrics()['warpwatch_sampler_success{sampler="nvml"}'] == 0


def test_no_library_at_all(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    with Agent(tmp_path, environment=environment) as agent:
        agent.wait_until_ready()
        if series(agent, "warpwatch_gpu_state"):
            pytest.skip("this host has an NVIDIA driver")
        assert agent.metrics()['warpwatch_sampler_success{sampler="nvml"}'] == 0
        assert agent.metrics()["warpwatch_replay"] == 0


def test_sigterm_ends_it_within_two_seconds_also_while_a_call_hangs(emulator, tmp_path):
    with Agent(tmp_path, environment=emulator.environment()) as agent:
        agent.wait_until_ready()
        wait_for("GPUs", lambda: series(agent, "warpwatch_gpu_power_watts"))
        emulator.hang(60, gpu=0)
        wait_for("hung GPU", lambda: series(agent, "warpwatch_gpu_state", state="hung").get("0") == 1)
        assert series(agent, "warpwatch_gpu_state", state="ok").get("1") == 1
        started = time.monotonic()
        assert agent.stop() == 0
        assert time.monotonic() - started < 2.5


def test_a_port_in_use_is_one_sentence_and_status_1(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_warpwatch("run", "--listen", address)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "cannot listen" in line]
    assert address in line
    assert "--listen" in line


def test_once_prints_the_page_and_ends(emulator, tmp_path):
    done = run_warpwatch("run", "--once", env=emulator.environment())
    assert done.returncode == 0
    assert f"warpwatch_gpu_power_watts{{{labels(0)}}} 400.5" in done.stdout
    assert 'warpwatch_sampler_success{sampler="nvml"} 1' in done.stdout


def test_the_demo_says_so_everywhere(tmp_path):
    with Agent(tmp_path, "--demo") as agent:
        agent.wait_until_ready()
        wait_for("GPUs", lambda: series(agent, "warpwatch_gpu_power_watts"))
        metrics = agent.metrics()
        assert metrics["warpwatch_replay"] == 1
        first = agent.log().splitlines()[0]
        assert "DEMO" in first
        assert "simulated" in first
        page = fetch(agent.url + "/")[2].decode()
        assert "DEMO" in page
        assert "simulated" in page
        network = "warpwatch_network_receive_bytes_total"
        wait_for("the host's own network", lambda: any(key.startswith(network) for key in agent.metrics()))
        assert not any('sampler="nvml"' in key for key in metrics)


def test_a_service_manager_hears_when_it_serves_that_it_lives_and_when_it_ends(emulator, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        wanted = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"}
        with Agent(tmp_path, environment=emulator.environment() | wanted) as agent:
            ready = manager.recv(1000).decode()
            assert ready == f"READY=1\nSTATUS=serving {agent.url}/metrics"
            assert fetch(agent.url + "/-/healthy")[0] == 200  # it says so when the port is open, not before
            assert [manager.recv(1000) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            agent.process.terminate()
            while (last := manager.recv(1000)) == b"WATCHDOG=1":
                pass
            assert last == b"STOPPING=1\nSTATUS=told to"


def test_a_flood_of_reloads_and_one_during_the_start_do_no_harm(tmp_path):
    with Agent(tmp_path) as agent:
        wait_for("log", lambda: "open http" in agent.log(), 20, every=0.02)
        agent.process.send_signal(signal.SIGHUP)
        agent.wait_until_ready()
        for _ in range(300):
            agent.process.send_signal(signal.SIGHUP)
        wait_for("reload", lambda: "the configuration was read again" in agent.log())
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(6) == 0, agent.log()
    assert "Traceback" not in agent.log()
    assert "does not fit" not in agent.log()


def test_a_reload_takes_what_is_good_and_refuses_what_is_not(tmp_path):
    with Agent(tmp_path, config='[agent]\nlog_level = "info"\n') as agent:
        agent.wait_until_ready()
        file = tmp_path / "warpwatch.toml"
        file.write_text("[detectors.throttled]\nenabled = 1\n", encoding="utf-8")
        agent.process.send_signal(signal.SIGHUP)
        successful = "warpwatch_config_last_reload_successful"
        wait_for("refusal", lambda: agent.metrics().get(successful) == 0)
        assert "line 2: detectors.throttled.enabled is 1; it must be a boolean" in agent.log()
        assert "the configuration of before goes on to hold" in agent.log()

        file.write_text('[detectors.throttled]\nenabled = false\n[export]\nhost = "off"\n', encoding="utf-8")
        agent.process.send_signal(signal.SIGHUP)
        wait_for("reload", lambda: agent.metrics().get(successful) == 1)
        assert "read again; changed: detectors.throttled.enabled" in agent.log()
        assert "these keys hold from the next start on: export.host" in agent.log()
    assert agent.process.returncode == 0
