"""A replayed trace as /metrics, byte for byte; `make golden` writes the pages anew after a wanted change.

The pages are made without a model bundle: a GPU that is idle is so by the labeller's rule, with fixed probabilities,
any other one is `unknown`. So a page changes with the metric table, the pipeline, the rule and the detectors, and never
with training. The version of the agent is replaced by VERSION, that a release changes no page either.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.clock import Instant
from agent.config import Config
from agent.importers import open_trace
from agent.pipeline import Pipeline
from agent.replay import replay
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.registry import build_detectors
from classifier.labeller import Labeller
from exporters.prometheus import OPENMETRICS, TEXT, PrometheusPage

FIXTURES = Path(__file__).parents[2] / "fixtures"
VERSION = "golden"
#: By the name of the page: the trace, and up to which second it is played.
TRACES = {
    "constructed_three_gpus": ("constructed_three_gpus.jsonl", 90.0),
    "constructed_mig_and_health": ("constructed_mig_and_health.jsonl", 60.0),
    "simulated_loaded_idle_l40s": ("simulated/loaded_idle_l40s.jsonl.gz", 600.0),
    # All four GPUs wait from 420 s on, until the job is killed at 720 s.
    "simulated_stalled_all_reduce_h100": ("simulated/stalled_all_reduce_h100.jsonl.gz", 600.0),
}


@functools.cache
def page(name: str, content_type: str = TEXT) -> bytes:
    """Return the page after the last tick that is played, made by the code of a live node but for the model."""
    file, end_s = TRACES[name]
    config, warnings = Config(), []
    trace = open_trace(FIXTURES / "traces" / file, warnings.append)
    baselines = PowerBaselines(config.detectors.baseline)
    pipeline = Pipeline(
        labeller=Labeller(None, config.labels),
        detectors=build_detectors(config.detectors, baselines),
        baselines=baselines,
        sample_interval_s=trace.header.interval_s,
        replay=True,
    )
    ends = []

    def watched():
        for tick in itertools.takewhile(lambda tick: tick.monotonic_s <= end_s, trace):
            ends[:] = [Instant(tick.monotonic_s, tick.wall_s)]
            yield tick

    for _ in replay(watched(), pipeline, trace.header.interval_s):
        pass
    assert warnings == []
    snapshot = dataclasses.replace(pipeline.snapshot(ends[0]), version=VERSION)
    return PrometheusPage(lambda: snapshot, own_process=False).render(content_type)


@pytest.mark.parametrize("name", TRACES)
def test_the_page_of_a_replayed_trace_byte_for_byte(name, request):
    golden = FIXTURES / "golden" / f"{name}.prom"
    rendered = page(name)
    if request.config.getoption("--update-golden"):
        golden.write_bytes(rendered)
    # Lines first: pytest shows which of them differ.
    assert rendered.decode().splitlines() == golden.read_text(encoding="utf-8").splitlines()
    assert rendered == golden.read_bytes()


def series(name: str) -> dict[str, str]:
    """Return the value, as written, of each series of a page."""
    lines = (line for line in page(name).decode().splitlines() if not line.startswith("#"))
    return {labels: value for labels, _, value in (line.rpartition(" ") for line in lines)}


# What the constructed trace holds, for t = 0 to 90 s; its wall clock reads 1,700,000,000 at t = 0. Slow samples
# (energy, temperature, PCIe, processes) come every 5 s, identity and limits at 0 and 60 s.
#   GPU 0 works: at t it holds 40e9 + 1e6 t bytes, has received 1e12 + 3e9 t and sent 2e12 + 4e9 t over NVLink, and
#     5e9 + 2e8 t and 6e9 + 1e8 t over PCIe, and used 1e6 + 400.25 t J. It draws 401.5 W, and 412.75 W at 90 s only.
#     From 88 s on the power cap holds its clocks; that counter goes from 12.25 s to 13.5 s at 90 s. It has 61 degrees,
#     64 from 45 s on.
#   GPU 1 is idle: 62.5 W, 2e6 + 62.5 t J, no NVLink, no memory sensor, no process.
#   GPU 2 works at 250.5 W, 3e6 + 150.5 t J, and is lost at 60 s: its last core sample is at 59 s, its last slow one at
#     55 s, its last limits at 0 s.
A = 'gpu="0",uuid="GPU-aaaaaaaa-1111-4222-8333-444444444440"'
B = 'gpu="1",uuid="GPU-bbbbbbbb-1111-4222-8333-444444444441"'
C = 'gpu="2",uuid="GPU-cccccccc-1111-4222-8333-444444444442"'
DRIVER = 'driver_version="580.95.05"'
UNSEEN = 'owners="",job_key="",job_id="",scheduler="",owner_namespace="",owner_pod="",owner_container=""'
BY_HAND = [
    # Facts as the trace states them. `device` is by the minor number, which runs against the index.
    f'gpu_info{{{A},model_name="Constructed Alpha 80GB",pci_bus_id="00000000:1A:00.0",device="nvidia2",{DRIVER}}} 1',
    f'gpu_info{{{C},model_name="Constructed Gamma 48GB",pci_bus_id="00000000:5C:00.0",device="nvidia0",{DRIVER}}} 1',
    # The trace holds no owners: one series for each GPU nevertheless, also for the lost one.
    f"gpu_owner_info{{{A},{UNSEEN}}} 1",
    f"gpu_owner_info{{{B},{UNSEEN}}} 1",
    f"gpu_owner_info{{{C},{UNSEEN}}} 1",
    f'gpu_state{{{A},state="ok"}} 1',
    f'gpu_state{{{A},state="lost"}} 0',
    f'gpu_state{{{C},state="ok"}} 0',
    f'gpu_state{{{C},state="lost"}} 1',
    # 1,700,000,000 + 90, and + 59 for the lost one.
    f"gpu_sample_timestamp_seconds{{{A}}} 1700000090",
    f"gpu_sample_timestamp_seconds{{{C}}} 1700000059",
    f"gpu_utilization_ratio{{{A}}} 0.87",
    f"gpu_utilization_ratio{{{B}}} 0",  # zero is a measurement
    f"gpu_memory_utilization_ratio{{{A}}} 0.43",
    f"gpu_sm_active_ratio{{{A}}} 0.81",
    f"gpu_sm_occupancy_ratio{{{A}}} 0.37",
    f"gpu_tensor_active_ratio{{{A}}} 0.29",
    f"gpu_dram_active_ratio{{{A}}} 0.53",
    f"gpu_memory_used_bytes{{{A}}} 40090000000",  # 40e9 + 90 x 1e6
    f"gpu_memory_used_bytes{{{B}}} 536870912",  # 512 MiB of context
    f"gpu_memory_total_bytes{{{A}}} 85899345920",  # 80 GiB
    f"gpu_power_watts{{{A}}} 412.75",
    f"gpu_power_watts{{{B}}} 62.5",
    # 700 and 300 W; what the lost GPU said of itself is gone with it.
    f"gpu_power_limit_watts{{{A}}} 700",
    f"gpu_power_limit_watts{{{B}}} 300",
    # The median of a constant power; one sample of 412.75 W does not move it.
    f'gpu_power_baseline_watts{{{A},state="busy"}} 401.5',
    f"gpu_energy_joules_total{{{A}}} 1036022.5",  # 1e6 + 90 x 400.25
    f"gpu_energy_joules_total{{{B}}} 2005625",  # 2e6 + 90 x 62.5
    f'gpu_temperature_celsius{{{A},sensor="gpu"}} 64',
    f'gpu_temperature_celsius{{{A},sensor="memory"}} 72',
    f'gpu_temperature_celsius{{{B},sensor="gpu"}} 33',
    f'gpu_clock_hertz{{{A},clock="sm"}} 1755000000',
    f'gpu_clock_hertz{{{A},clock="memory"}} 2619000000',
    f'gpu_clock_hertz{{{B},clock="sm"}} 210000000',
    f'gpu_clock_event_seconds_total{{{A},reason="sw_power_cap"}} 13.5',
    f'gpu_clock_event_seconds_total{{{A},reason="sw_thermal"}} 0',
    f'gpu_clock_event_active{{{A},reason="sw_power_cap"}} 1',
    f'gpu_clock_event_active{{{A},reason="gpu_idle"}} 0',
    f'gpu_clock_event_active{{{B},reason="gpu_idle"}} 1',
    f"gpu_pcie_receive_bytes_total{{{A}}} 23000000000",  # 5e9 + 90 x 2e8
    f"gpu_pcie_transmit_bytes_total{{{A}}} 15000000000",  # 6e9 + 90 x 1e8
    f"gpu_nvlink_receive_bytes_total{{{A}}} 1270000000000",  # 1e12 + 90 x 3e9
    f"gpu_nvlink_transmit_bytes_total{{{A}}} 2360000000000",  # 2e12 + 90 x 4e9
    # GPU 1 is idle by the rule once there are 15 s of evidence; without a model no other GPU gets a word.
    f'gpu_workload{{{A},workload="unknown"}} 1',
    f'gpu_workload{{{A},workload="idle"}} 0',
    f'gpu_workload{{{B},workload="idle"}} 1',
    f'gpu_workload{{{B},workload="unknown"}} 0',
    f'gpu_workload_probability{{{B},workload="idle",evidence="combined"}} 0.97',
    f"gpu_workload_since_timestamp_seconds{{{B}}} 1700000015",
    f'gpu_workload_seconds_total{{{A},workload="unknown"}} 90',
    f'gpu_workload_seconds_total{{{B},workload="unknown"}} 15',
    f'gpu_workload_seconds_total{{{B},workload="idle"}} 75',
    f'gpu_workload_seconds_total{{{C},workload="unknown"}} 90',  # 59 s of samples, then a gap
    f'gpu_workload_energy_joules_total{{{A},workload="unknown"}} 36022.5',  # 90 x 400.25: by the energy counter
    f'gpu_workload_energy_joules_total{{{B},workload="unknown"}} 937.5',  # 15 x 62.5
    f'gpu_workload_energy_joules_total{{{B},workload="idle"}} 4687.5',  # 75 x 62.5
    f'gpu_workload_energy_joules_total{{{C},workload="unknown"}} 8879.5',  # 59 x 150.5: nothing is known of the gap
    f'gpu_anomaly_severity{{{A},anomaly="low_utilization"}} 0',
    f'gpu_anomaly_severity{{{B},anomaly="low_utilization"}} 0',
    'network_receive_bytes_total{device="eth0"} 123546000',  # 123,456,000 + 90 x 1000
    'network_transmit_bytes_total{device="eth0"} 654501000',  # 654,321,000 + 90 x 2000
    'infiniband_receive_bytes_total{device="mlx5_0",port="1"} 9000090000000',  # 9e12 + 90 x 1e6
    'infiniband_transmit_bytes_total{device="mlx5_0",port="1"} 8000270000000',  # 8e12 + 90 x 3e6
    'disk_read_bytes_total{device="nvme0n1"} 111368640',  # 111,000,000 + 90 x 4096
    'disk_written_bytes_total{device="nvme0n1"} 222737280',  # 222,000,000 + 90 x 8192
    "replay 1",
    "config_last_reload_successful 1",
]


def test_lines_derived_by_hand_from_the_numbers_of_the_trace():
    lines = page("constructed_three_gpus").decode().splitlines()
    missing = [line for line in BY_HAND if f"warpwatch_{line}" not in lines]
    assert missing == []


# The trace of MIG and health, for t = 0 to 60 s on the same wall clock; health and XIDs come every 5 s, limits at 0 and
# 60 s.
#   GPU 0 has failing memory: at t the corrected errors are 100 + t, and 1000 + t over its life; from 30 s on a remap is
#     pending. XID 48 came at 32.5 s, XID 13 twice until 41.25 s. At 60 s the driver asks for a reset.
#   GPU 1 is divided, into instances 1 (1e9 + 1e6 t bytes) and 2; the list of 30 s has instance 1 only.
#   GPU 2 is divided until 20 s; 15 s later its card counts as whole, and it is idle for the judgement of 40 s,
#     since its samples of the time before count as evidence. Its last health and XIDs are of 40 s.
D = 'gpu="0",uuid="GPU-aaaaaaaa-2222-4222-8333-444444444440"'
E = 'gpu="1",uuid="GPU-bbbbbbbb-2222-4222-8333-444444444441"'
F = 'gpu="2",uuid="GPU-cccccccc-2222-4222-8333-444444444442"'
OF_MIG = 'GPU_I_PROFILE="1g.10gb",mig_uuid="MIG-bbbbbbbb-0000-4000-8000-000000000001"'
OF_MIG_AND_HEALTH = [
    f'gpu_mig_info{{{E},GPU_I_ID="1",{OF_MIG}}} 1',
    f"gpu_power_watts{{{E}}} 200.25",  # power is of the card ...
    f'gpu_sm_active_ratio{{{E},GPU_I_ID="1"}} 0.61',  # ... and activity of the instance
    f'gpu_memory_used_bytes{{{E},GPU_I_ID="1"}} 1060000000',  # 1e9 + 60 x 1e6
    f'gpu_memory_total_bytes{{{E},GPU_I_ID="1"}} 10737418240',  # 10 GiB
    f'gpu_workload{{{E},GPU_I_ID="1",workload="unknown"}} 1',
    f'gpu_workload_seconds_total{{{E},GPU_I_ID="1",workload="unknown"}} 60',
    f'gpu_owner_info{{{E},GPU_I_ID="1",{UNSEEN}}} 1',
    f"gpu_owner_info{{{E},{UNSEEN}}} 1",
    f"gpu_memory_used_bytes{{{F}}} 0",
    f'gpu_workload{{{F},workload="idle"}} 1',
    f"gpu_workload_since_timestamp_seconds{{{F}}} 1700000025",
    f'gpu_workload_seconds_total{{{F},workload="idle"}} 35',  # 60 - 25
    f'gpu_workload_seconds_total{{{F},workload="unknown"}} 0',
    f'gpu_ecc_errors_total{{{D},severity="corrected",counter="volatile"}} 160',  # 100 + 60
    f'gpu_ecc_errors_total{{{D},severity="corrected",counter="aggregate"}} 1060',  # 1000 + 60
    f'gpu_ecc_errors_total{{{D},severity="uncorrected",counter="volatile"}} 1',
    f'gpu_ecc_errors_total{{{D},severity="uncorrected",counter="aggregate"}} 4',
    f'gpu_ecc_errors_total{{{E},severity="uncorrected",counter="volatile"}} 0',
    f'gpu_remapped_rows_total{{{D},kind="correctable"}} 3',
    f'gpu_remapped_rows_total{{{D},kind="uncorrectable"}} 2',
    f"gpu_row_remap_pending{{{D}}} 1",
    f"gpu_row_remap_failure{{{D}}} 0",
    f"gpu_recovery_action{{{D}}} 1",
    f"gpu_recovery_action{{{E}}} 0",
    f'gpu_xid_errors_total{{{D},xid="13"}} 2',
    f'gpu_xid_errors_total{{{D},xid="48"}} 1',
    f'gpu_xid_errors_total{{{D},xid="79"}} 0',
    f'gpu_xid_errors_total{{{E},xid="48"}} 0',
    f'gpu_xid_last_timestamp_seconds{{{D},xid="48"}} 1700000032.5',
    f'gpu_xid_last_timestamp_seconds{{{D},xid="13"}} 1700000041.25',
    'xid_info{xid="13",action="restart_app"} 1',
    'xid_info{xid="48",action="reset_gpu"} 1',
    f'gpu_nvlink_errors_total{{{D},kind="crc"}} 7',
    f'gpu_nvlink_errors_total{{{D},kind="replay"}} 120',  # 2 x 60
    f'gpu_nvlink_errors_total{{{D},kind="recovery"}} 0',
    f"gpu_nvlink_receive_bytes_total{{{D}}} 60000000",  # 60 x 1e6
]


def test_lines_of_mig_and_health_derived_by_hand():
    lines = page("constructed_mig_and_health").decode().splitlines()
    assert [line for line in OF_MIG_AND_HEALTH if f"warpwatch_{line}" not in lines] == []


def test_no_metric_has_both_a_card_and_its_instances():
    found = series("constructed_mig_and_health")
    of_card = {key.partition("{")[0] for key in found if E in key and "GPU_I_ID" not in key}
    of_instance = {key.partition("{")[0] for key in found if E in key and "GPU_I_ID" in key}
    assert of_card & of_instance == {"warpwatch_gpu_owner_info"}
    # An instance that is gone has no series; neither has what is stale on a card.
    assert not [key for key in found if 'GPU_I_ID="2"' in key or 'GPU_I_ID="5"' in key]
    assert not [key for key in found if F in key and ("xid" in key or "ecc" in key)]
    assert not [key for key in found if 'xid_info{xid="79"' in key]


def test_what_is_stale_or_not_offered_has_no_series():
    found = series("constructed_three_gpus")
    families = {key.partition("{")[0].removeprefix("warpwatch_") for key in found}
    # A replay has no samplers and counts no GPUs; no model is loaded and none has an opinion.
    for absent in ("sampler", "gpus_", "model_", "node_", "job_", "checkpoint", "process_"):
        assert not [family for family in families if family.startswith(absent)], absent
    # eth1 was last read at 80 s. The lost GPU keeps what is not a reading, and judgements only as what was counted.
    assert not [key for key in found if "eth1" in key]
    of_lost = {key.partition("{")[0].removeprefix("warpwatch_gpu_") for key in found if 'gpu="2"' in key}
    assert of_lost == {
        "info", "owner_info", "state", "sample_timestamp_seconds",
        "power_baseline_watts", "workload", "workload_since_timestamp_seconds", "workload_seconds_total",
        "workload_energy_joules_total", "anomalies_total", "anomaly_severity", "suspect",
    }  # fmt: skip
    severities = {key: value for key, value in found.items() if "anomaly_severity" in key and 'gpu="2"' in key}
    assert [(key.partition("anomaly=")[2], value) for key, value in severities.items()] == [('"gpu_lost"}', "3")]
    # GPU 1 has no NVLink, no memory sensor and no profiling; without a program on it, there is no context to be idle.
    of_idle = {key.partition("{")[0].removeprefix("warpwatch_gpu_") for key in found if 'gpu="1"' in key}
    assert not of_idle & {"nvlink_receive_bytes_total", "sm_active_ratio", "power_baseline_watts"}
    assert f'warpwatch_gpu_temperature_celsius{{{B},sensor="memory"}}' not in found


def test_a_stall_of_the_simulated_trace_is_critical_on_each_of_its_gpus():
    found = series("simulated_stalled_all_reduce_h100")
    stalls = {key: value for key, value in found.items() if 'anomaly="stalled_collective"' in key}
    # Three minutes into the stall: critical, counted once, and with all four waiting alike no one is the odd one out.
    by_family = {}
    for key, value in stalls.items():
        by_family.setdefault(key.partition("{")[0], []).append(value)
    assert by_family == {
        "warpwatch_gpu_anomaly_severity": ["3"] * 4,
        "warpwatch_gpu_anomalies_total": ["1"] * 4,
        "warpwatch_gpu_suspect": ["0"] * 4,
    }


@pytest.mark.parametrize("name", TRACES)
def test_promtool_finds_nothing_to_say_about_a_page(name):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    checked = subprocess.run([promtool, "check", "metrics"], input=page(name), capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.parametrize("name", TRACES)
def test_openmetrics_holds_the_same_samples(name):
    text, openmetrics = page(name), page(name, OPENMETRICS)
    assert [line for line in openmetrics.splitlines() if not line.startswith(b"#")] == [
        line for line in text.splitlines() if not line.startswith(b"#")
    ]
