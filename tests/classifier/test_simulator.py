"""Tests of the simulator: against measured figures, and against its own promises."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from agent import vocabulary
from agent.errors import UsageError
from agent.history import GPU_CHANNELS, HOST_CHANNELS, History, Series
from agent.records import GpuSlowSample
from agent.trace import TraceReader
from classifier.simulator import (
    BOARDS,
    Scenario,
    available_kinds,
    random_scenario,
    simulate,
    simulate_arrays,
    write_simulated,
)
from classifier.simulator.signals import Cyclic, pieces, scale_to_mean

ROOT = Path(__file__).resolve().parents[2]
STEADY = {"save_every_s": 36000.0, "evaluates": 0.0, "power_gain": 1.0, "drift": 0.01}

#: Conditions recorded on 8x H100 SXM5 (limit 700 W): parameters that a recording fixes, then the measured mean of each
#: channel and the relative tolerance. Power is not among the parameters: it has to come out.
MEASURED = {
    "small model, data parallel": (
        "data_parallel_training",
        {
            "flavour": "ddp",
            "sm": 0.638,
            "tensor": 0.194,
            "dram": 0.323,
            "nvlink_gb_s": 8.9,
            "busy": 0.85,
            "step_s": 0.15,
        }
        | {"accumulation": 1.0, "exposed": 0.03, "memory": 0.147, "pcie_gb_s": 0.074}
        | STEADY,
        {
            "power_watts": (547, 0.1),
            "utilization_ratio": (0.85, 0.05),
            "memory_utilization_ratio": (0.42, 0.07),
            "sm_active_ratio": (0.638, 0.05),
            "tensor_active_ratio": (0.194, 0.05),
            "dram_active_ratio": (0.323, 0.05),
            "nvlink_transmit_bytes_per_second": (8.9e9, 0.06),
        },
    ),
    "3 billion parameters, 16 micro-batches": (
        "data_parallel_training",
        {"flavour": "ddp", "sm": 0.877, "tensor": 0.583, "dram": 0.369, "nvlink_gb_s": 1.5, "busy": 1.0, "step_s": 5.8}
        | {"accumulation": 16.0, "exposed": 0.01, "memory": 0.87}
        | STEADY,
        {
            "power_watts": (689, 0.05),
            "utilization_ratio": (1.0, 0.01),
            "sm_active_ratio": (0.877, 0.06),
            "tensor_active_ratio": (0.583, 0.06),
            "nvlink_transmit_bytes_per_second": (1.5e9, 0.1),
        },
    ),
    "optimizer on the CPU": (
        "data_parallel_training",
        {"flavour": "offload", "sm": 0.09, "tensor": 0.057, "dram": 0.039, "nvlink_gb_s": 5.0, "busy": 0.137}
        | {"step_s": 3.5, "exposed": 0.03}
        | STEADY,
        {"power_watts": (186, 0.1), "utilization_ratio": (0.137, 0.1), "sm_active_ratio": (0.09, 0.06)},
    ),
    "8 billion parameters, loaded": (
        "loaded_idle",
        {"health_checks": 0.0},
        {"power_watts": (120, 0.08), "utilization_ratio": (0.0, 0.0), "sm_active_ratio": (0.0, 0.0)},
    ),
    # 128 to 146 W, utilisation 6 to 13 %, SM 2.3 to 5.3 %: the middle, and tolerances that reach over that.
    "light streaming generation": (
        "llm_serving",
        {"tensor_parallel": 1.0, "resident": 0.09, "concurrency": 4.0, "prefill_s": 0.03, "decode_s": 10.0}
        | {
            "gusts": 0.05,
            "day_depth": 0.0,
            "quiet_share": -0.3,
            "power_gain": 0.7,
            "decode_sm": 0.4,
            "batch_half": 4.0,
        },
        {"power_watts": (137, 0.1), "utilization_ratio": (0.1, 0.6), "sm_active_ratio": (0.038, 0.5)},
    ),
    "empty": ("idle", {}, {"power_watts": (71, 0.08), "utilization_ratio": (0.0, 0.0)}),
}


@pytest.mark.parametrize("condition", MEASURED)
def test_recorded_conditions_come_out_of_the_simulation(condition):
    kind, parameters, expected = MEASURED[condition]
    scenario = Scenario(kind=kind, duration_s=400, begin_s=3600, parameters=parameters)
    run = simulate_arrays(scenario, seed=5)
    for gpu in (run.gpus[0], run.gpus[5]):
        for channel, (mean, tolerance) in expected.items():
            simulated = float(gpu.channels[channel].values.mean())
            assert simulated == pytest.approx(mean, rel=tolerance, abs=1e-9), channel


def test_offload_training_has_two_levels_of_power():
    """Measured: 121 W while the CPU works, 348 W in the burst, nothing steady in between."""
    _, parameters, _ = MEASURED["optimizer on the CPU"]
    run = simulate_arrays(
        Scenario(kind="data_parallel_training", duration_s=400, begin_s=3600, parameters=parameters), seed=5
    )
    power = run.gpus[0].channels["power_watts"].values
    assert np.quantile(power, 0.25) < 140
    assert np.quantile(power, 0.95) > 300


def _stretch(series, phase, after=5.0):
    keep = (series.times > phase.start_s + after) & (series.times < phase.end_s - 0.5)
    return series.values[keep]


@pytest.mark.parametrize("seed", range(4))
def test_a_stalled_collective_shows_the_recorded_signature(seed):
    run = simulate_arrays(
        Scenario(kind="stalled_all_reduce", duration_s=600, begin_s=3600, parameters={"stall_variant": "all_wait"}),
        seed=seed,
    )
    (phase,) = [phase for phase in run.phases if phase.anomaly == "stalled_collective"]
    assert phase.workload == "training"
    for gpu in run.gpus:
        seen = {name: _stretch(series, phase) for name, series in gpu.channels.items()}
        assert seen["utilization_ratio"].min() >= 0.99
        assert seen["tensor_active_ratio"].max() == 0
        assert seen["dram_active_ratio"].max() < 0.002
        assert 0.003 < np.median(seen["sm_active_ratio"]) < 0.26  # 1/132 to 32/132 blocks, or asleep
        assert seen["nvlink_transmit_bytes_per_second"].max() == 0
        assert np.median(seen["pcie_receive_bytes_per_second"]) < 5e6
        assert 110 < np.median(seen["power_watts"]) < 205  # measured 122-186 W, boards +-5 %, warm
        assert seen["power_watts"].std() < 3


def test_a_missing_rank_reads_zero_while_the_others_wait():
    run = simulate_arrays(
        Scenario(kind="stalled_all_reduce", duration_s=600, begin_s=3600, parameters={"stall_variant": "missing_rank"}),
        seed=3,
    )
    stalls = [phase for phase in run.phases if phase.anomaly]
    (missing,) = [phase for phase in stalls if phase.note == "missing_rank"]
    assert {phase.note for phase in stalls} == {"missing_rank", "waiting"}
    for phase in stalls:
        utilization = _stretch(run.gpus[phase.gpu].channels["utilization_ratio"], phase)
        assert np.all(utilization == (0.0 if phase is missing else 1.0))


def test_rank_0_saves_while_the_others_wait():
    """Measured: rank 0 at 3-6 %, the others at 100 % and 0.22-0.24 of the limit for 15-57 s; bytes are written."""
    parameters = {"save_every_s": 150.0, "save_s": 40.0, "save_to": "disk_written"}
    run = simulate_arrays(
        Scenario(kind="rank0_checkpoint", duration_s=900, begin_s=3600, parameters=parameters), seed=2
    )
    saves = [phase for phase in run.phases if phase.note == "checkpoint" and phase.end_s - phase.start_s > 15]
    assert len(saves) >= 3
    for save in saves:
        assert 0.02 <= _stretch(run.gpus[0].channels["utilization_ratio"], save).mean() <= 0.07
        assert _stretch(run.gpus[3].channels["utilization_ratio"], save).min() == 1.0
        share = _stretch(run.gpus[3].channels["power_watts"], save).mean() / 700
        assert 0.2 < share < 0.26
        assert _stretch(run.gpus[0].channels["pcie_transmit_bytes_per_second"], save).mean() > 3e7
        assert _stretch(run.host_channels["disk_written_bytes_per_second"], save).mean() > 3e7


@pytest.mark.parametrize("kind", available_kinds())
def test_every_kind_names_its_truth_for_the_whole_trace(kind):
    run = simulate_arrays(Scenario(kind=kind, duration_s=300), seed=1)
    end = float(run.core_s[-1])
    for gpu in range(8):
        phases = [phase for phase in run.phases if phase.gpu in {None, gpu}]
        assert phases[0].start_s == 0
        assert phases[-1].end_s == pytest.approx(end)
        for before, after in itertools.pairwise(phases):
            assert before.end_s == pytest.approx(after.start_s)
        assert {phase.workload for phase in phases} <= set(vocabulary.CLASSES)
        assert {phase.anomaly for phase in phases} <= {None, *vocabulary.ANOMALIES}
    for gpu in run.gpus:
        assert set(gpu.channels) <= set(GPU_CHANNELS)
        for name, series in gpu.channels.items():
            assert np.all(np.isfinite(series.values)), name
            assert np.all(np.diff(series.times) > 0), name
    assert set(run.host_channels) <= set(HOST_CHANNELS)


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path):
    scenario = Scenario(kind="mixed_node", duration_s=60)
    paths = [tmp_path / f"{name}.jsonl.gz" for name in ("first", "again", "other")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        write_simulated(path, scenario, seed)
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again
    assert first != other


def test_a_fixed_parameter_leaves_the_other_draws_alone():
    free = simulate_arrays(Scenario(kind="mining", duration_s=60), seed=4)
    fixed = simulate_arrays(Scenario(kind="mining", duration_s=60, parameters={"pool_bytes_per_second": 900.0}), seed=4)
    assert np.array_equal(free.gpus[0].channels["power_watts"].values, fixed.gpus[0].channels["power_watts"].values)


def test_arrays_are_what_the_history_makes_of_the_trace(tmp_path):
    scenario = Scenario(kind="mixed_node", duration_s=180, infiniband=True, jitter_s=0.01)
    path = tmp_path / "simulated.jsonl"
    write_simulated(path, scenario, 3)
    warnings: list[str] = []
    reader = TraceReader(path, warnings.append)
    history = History()
    for tick in reader:
        history.ingest(tick)
    run = simulate_arrays(scenario, seed=3)
    assert not warnings
    assert reader.header == run.header
    assert list(history.gpus) == [gpu.key for gpu in run.gpus]
    for gpu in run.gpus:
        kept = history.gpus[gpu.key]
        assert {name for name in GPU_CHANNELS if kept.has(name)} == set(gpu.channels)
        for name, series in gpu.channels.items():
            again = kept.series(name, 200, 1000)
            if name == "power_fast_watts":  # ten readings a second are kept for two minutes
                first = np.searchsorted(series.times, again.times[0] - 1e-6)
                assert again.times[-1] - again.times[0] > 110
                series = Series(series.times[first:], series.values[first:])  # noqa: PLW2901
            assert np.allclose(again.times, series.times, rtol=0, atol=1e-9), name
            assert np.allclose(again.values, series.values, rtol=1e-9), name
    for name, series in run.host_channels.items():
        assert np.allclose(history.host.series(name, 200, 1000).values, series.values, rtol=1e-9), name


def test_counters_never_fall_and_some_io_always_happens():
    run = simulate_arrays(Scenario(kind="mixed_node", duration_s=600), seed=9)
    for gpu in run.gpus:
        for name, values in (gpu.readings.core | gpu.readings.slow).items():
            if name.endswith("_total"):
                assert np.all(np.diff(values) >= 0), name
        assert np.all(np.diff(gpu.readings.capped_seconds) >= 0)
    for name in ("network_receive", "network_transmit"):
        assert np.all(np.diff(run.host_counters[name]) > 0), name
    for name in ("disk_read", "disk_written"):
        # A background below one sector a second may pause; over ten seconds there is always some.
        assert np.all(run.host_counters[name][10:] > run.host_counters[name][:-10]), name


def test_the_energy_counter_agrees_with_the_power_readings():
    run = simulate_arrays(Scenario(kind="data_parallel_training", duration_s=600, begin_s=3600), seed=1)
    for gpu in run.gpus:
        by_power = gpu.channels["power_watts"].values.mean()
        assert gpu.channels["energy_power_watts"].values.mean() == pytest.approx(by_power, rel=0.01)


def test_a_restart_brings_new_processes():
    scenario = Scenario(
        kind="stalled_all_reduce",
        gpu_count=2,
        duration_s=600,
        parameters={"stall_at_s": 200.0, "stall_s": 180.0, "load_s": 10.0, "warm_up_s": 10.0},
    )
    _, ticks = simulate(scenario, seed=6)
    seen = {
        process.pid
        for tick in ticks
        for record in tick.records
        if isinstance(record, GpuSlowSample) and record.key.gpu == 0
        for process in record.processes or ()
    }
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("board", "absent"),
    [("A100", "sm_active_ratio"), ("V100", "tensor_active_ratio"), ("L40S", "nvlink_transmit_bytes_per_second")],
)
def test_what_a_board_does_not_offer_is_absent(board, absent):
    run = simulate_arrays(Scenario(kind="data_parallel_training", board=board, gpu_count=2, duration_s=60), seed=1)
    assert absent not in run.gpus[0].channels


@pytest.mark.parametrize("board", BOARDS)
def test_power_stays_between_bare_idle_and_the_limit(board):
    limits = BOARDS[board]
    run = simulate_arrays(Scenario(kind="mining", board=board, gpu_count=2, duration_s=120, begin_s=600), seed=1)
    power = run.gpus[0].channels["power_watts"].values
    assert power.min() > 0.9 * limits.bare_idle_watts
    assert power.max() < 1.03 * limits.power_limit_watts


def test_mean_power_does_not_tell_training_from_inference():
    rng = np.random.default_rng(3)
    share = {}
    for kind in ("data_parallel_training", "offline_batch"):
        means = []
        for seed in range(25):
            scenario = random_scenario(rng, kind, duration_s=(120, 121))
            run = simulate_arrays(scenario, seed=seed)
            means.append(run.gpus[0].channels["power_watts"].values.mean() / run.gpus[0].power_limit_watts)
        share[kind] = np.quantile(means, (0.2, 0.8))
    low = max(span[0] for span in share.values())
    high = min(span[1] for span in share.values())
    assert high - low > 0.1  # more than a tenth of the limit in common, between the inner 60 % of both


def test_random_scenarios_cover_every_single_kind():
    rng = np.random.default_rng(1)
    kinds = {random_scenario(rng).kind for _ in range(300)}
    assert kinds == set(available_kinds()) - {"mixed_node"}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"kind": "gardening"}, "gardening"),
        ({"kind": "idle", "board": "Voodoo"}, "Voodoo"),
        ({"kind": "mining", "parameters": {"shovels": 1.0}}, "shovels"),
        ({"kind": "data_parallel_training", "parameters": {"flavour": "sour"}}, "sour"),
        ({"kind": "mixed_node", "gpu_count": 2}, "8 GPUs"),
        ({"kind": "idle", "gpu_count": 0}, "1 GPU"),
        ({"kind": "idle", "interval_s": 0.0}, "interval"),
    ],
)
def test_what_cannot_be_simulated_is_named(fields, word):
    with pytest.raises(UsageError, match=word):
        simulate_arrays(Scenario(**{"duration_s": 60, **fields}), seed=1)


def test_a_cycle_shorter_than_a_cell_is_averaged_exactly():
    """A step of 20 ms, 1/4 of it at 0.8, seen in cells of 50 ms that hold 2.5 steps."""
    breaks, levels = pieces([(1, {"sm": 0.8}), (3, {})])
    cycle = Cyclic(breaks, levels, np.arange(0, 2, 0.02))
    cells = cycle.cells(np.arange(0, 1.01, 0.05))["sm"]
    # 2.5 steps hold 2 or 3 bursts of 5 ms: 10 or 15 ms at 0.8 in 50 ms; on the long run 0.8 / 4.
    assert cells[:2] == pytest.approx([0.24, 0.16])
    assert cells.mean() == pytest.approx(0.2)


def test_scaling_to_a_mean_gives_what_the_ceiling_takes_to_the_rest():
    """Levels 1 and 3 in halves to a mean of 0.8: 0.4 and 1.2, of which 0.2 is over the ceiling."""
    scaled = scale_to_mean(np.array([0, 0.5, 1]), np.array([1.0, 3.0]), 0.8, 1.0)
    assert scaled == pytest.approx([0.6, 1.0])


def _traces():
    return [*(ROOT / "agent/demo").glob("*.jsonl.gz"), *sorted((ROOT / "fixtures/traces/simulated").glob("*.jsonl.gz"))]


@pytest.mark.parametrize("path", _traces(), ids=lambda path: path.name)
def test_shipped_traces_say_that_they_are_simulated(path):
    warnings: list[str] = []
    reader = TraceReader(path, warnings.append)
    ticks = sum(1 for _ in reader)
    assert not warnings
    assert reader.header.provenance == "simulated"
    assert "simulated" in str(reader.header.machine["about"])
    assert ticks > 500
    assert path.stat().st_size < 400_000


def test_the_demonstration_trains_stalls_and_restarts():
    reader = TraceReader(next((ROOT / "agent/demo").glob("simulated_*.jsonl.gz")), print)
    assert all(tick.records for tick in reader)
    on_gpu_0 = [phase for phase in reader.header.ground_truth if phase.gpu == 0]
    (stall,) = [phase for phase in on_gpu_0 if phase.anomaly]
    trained = sum(p.end_s - p.start_s for p in on_gpu_0 if p.note in {None, "checkpoint"} and p.end_s <= stall.start_s)
    assert trained >= 480
    assert stall.end_s - stall.start_s >= 180
    assert any(phase.note is None and phase.start_s > stall.end_s for phase in on_gpu_0)
    workloads = {phase.gpu: phase.workload for phase in reader.header.ground_truth if phase.start_s == 0}
    assert workloads == {4: "inference", 5: "inference", **dict.fromkeys((0, 1, 2, 3, 6, 7), "idle")}
