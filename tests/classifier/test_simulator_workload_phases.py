"""Tests of what the simulated jobs do over time: steps, checkpoints, pools, pauses, and limits of the hardware."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from classifier.simulator import BOARDS, Scenario, random_scenario, simulate_arrays
from classifier.simulator.arrivals import CELL_S, load_shape
from classifier.simulator.catalogue import jobs_of
from classifier.simulator.families import FAMILIES
from classifier.simulator.overlays import Extra, Overlaid
from classifier.simulator.scenario import Draws
from classifier.simulator.serving_styles import SERVING_STYLES
from classifier.simulator.signals import Constant
from classifier.simulator.training import Span

QUIET = {"save_every_s": 36000.0, "evaluates": 0.0, "drift": 0.004}


def _run(kind, parameters=None, *, duration_s=300.0, gpu_count=8, interval_s=1.0, seed=3):
    scenario = Scenario(
        kind=kind,
        gpu_count=gpu_count,
        duration_s=duration_s,
        begin_s=3600,
        interval_s=interval_s,
        infiniband=True,
        parameters=parameters or {},
    )
    return simulate_arrays(scenario, seed=seed)


def _values(run, name, gpu=0):
    source = run.host_channels if name in run.host_channels else run.gpus[gpu].channels
    return source[name].values


def _during(run, name, note, gpu=0, margin=1.0):
    series = (run.host_channels if name in run.host_channels else run.gpus[gpu].channels)[name]
    keep = np.zeros(series.times.size, dtype=bool)
    for phase in run.phases:
        if phase.note == note and phase.gpu in {None, gpu}:
            keep |= (series.times > phase.start_s + margin) & (series.times <= phase.end_s)
    return series.values[keep]


def _truth(kind, seed, rng):
    """Yield the board and what one rank of a stage does in cells of 50 ms, before any noise."""
    scenario = random_scenario(rng, kind)
    board = BOARDS[scenario.board]
    begin_s = 0.0 if seed % 2 else -3600.0
    for job in jobs_of(scenario, board, Span(-2.0, 300.0, begin_s), np.random.default_rng(seed)):
        for stage in job.stages:
            first, last = max(stage.start_s, -2.0), min(stage.end_s, 300.0)
            count = min(int((last - first) / CELL_S), 600)
            if count > 2:
                edges = (np.ceil(first / CELL_S) + np.arange(count)) * CELL_S
                cells = stage.signals[-1].cells(edges)
                yield board, lambda name, cells=cells, size=count - 1: np.broadcast_to(cells.get(name, 0.0), size)


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_workload_does_what_hardware_cannot(kind):
    """Multiprocessors work within kernels, pipes within multiprocessors, and links within their rate."""
    rng = np.random.default_rng(8)
    for seed in range(8):
        for board, of in _truth(kind, seed, rng):
            assert np.all(of("sm") + of("spin") <= of("busy") + 1e-6)
            assert np.all(of("tensor") <= of("sm") + 1e-6)
            assert np.all(of("hmma") + of("imma") + of("dfma") <= of("tensor") + 1e-6)
            assert np.all(np.maximum(of("fp64"), of("fp16")) <= of("sm") + 1e-6)
            assert np.all(of("busy") <= 1 + 1e-9)
            assert np.all(of("dram") <= 1)
            for way in ("receive", "transmit"):
                assert np.all(of(f"pcie_{way}") <= board.pcie_bytes_per_second)
                assert np.all(of(f"nvlink_{way}") <= max(1.0, board.nvlink_bytes_per_second))
            assert np.all(of("cpu_cores") < 32)


def test_extras_count_for_the_part_of_a_cell_that_they_cover():
    """From 0.5 to 1.25 s in cells of 0.5 s: nothing, all, half of 4 on top of 1."""
    signal = Overlaid(Constant({"cpu_cores": 1.0}), (Extra(0.5, 1.25, {"cpu_cores": 4.0}),))
    assert signal.cells(np.array([0.0, 0.5, 1.0, 1.5]))["cpu_cores"] == pytest.approx([1.0, 5.0, 3.0])


def test_sixteen_micro_batches_keep_the_links_silent():
    """Measured: 5.4 s of silence in steps of 5.8 s. Here 15 1/3 of 16 micro-batches and the optimizer: 5.3-5.7 s."""
    parameters = QUIET | {"flavour": "ddp", "accumulation": 16.0, "step_s": 5.8, "step_spread": 0.002, "exposed": 0.0}
    run = _run("data_parallel_training", parameters | {"busy": 1.0}, duration_s=60, interval_s=0.1)
    silent = _values(run, "nvlink_transmit_bytes_per_second") < 1e6
    longest = max(len(list(group)) for quiet, group in itertools.groupby(silent) if quiet)
    assert 5.0 < 0.1 * longest < 5.8


def test_nodes_reduce_when_their_gpus_do():
    parameters = QUIET | {"flavour": "ddp", "accumulation": 8.0, "step_s": 5.0, "exposed": 0.1, "multi_node": 1.0}
    run = _run("data_parallel_training", parameters | {"fabric": "infiniband"}, duration_s=120, interval_s=0.5)
    links = _values(run, "nvlink_transmit_bytes_per_second")
    fabric = _values(run, "infiniband_transmit_bytes_per_second")
    assert np.corrcoef(links, fabric)[0, 1] > 0.85


def test_an_evaluation_reduces_nothing():
    parameters = {"flavour": "ddp", "evaluates": 1.0, "eval_every_s": 60.0, "eval_s": 30.0, "save_every_s": 36000.0}
    run = _run("data_parallel_training", parameters | {"eval_generates": 0.0, "precision": "bf16"})
    assert _during(run, "nvlink_transmit_bytes_per_second", "evaluation").max() == 0
    assert np.median(_during(run, "tensor_active_ratio", "evaluation")) > 0.03
    assert _during(run, "nvlink_transmit_bytes_per_second", None).min() > 0


def test_an_async_checkpoint_copies_for_a_second_and_writes_for_minutes():
    """30 s at 3 GB/s are 90 GB: 11.25 GB of each GPU, 1.1 s at 10 GB/s; written in three times 30 s."""
    parameters = {"save_style": "async", "save_every_s": 150.0, "save_s": 30.0, "save_bytes_per_second": 3e9}
    parameters |= {"to_host_gb_s": 10.0, "save_to": "filesystem_written", "flavour": "ddp", "evaluates": 0.0}
    run = _run("data_parallel_training", parameters | {"page_cache": 0.0}, duration_s=600)
    saves = [phase for phase in run.phases if phase.note == "checkpoint"]
    assert saves
    for save in saves:
        assert 0.7 < save.end_s - save.start_s < 2.0
    out = run.gpus[0].channels["pcie_transmit_bytes_per_second"]
    written = run.host_channels["filesystem_written_bytes_per_second"]
    for save in saves[:-1]:
        near = (out.times > save.start_s) & (out.times < save.end_s + 6)
        assert out.values[near].max() > 1.5e9
        after = (written.times > save.end_s + 10) & (written.times < save.end_s + 70)
        assert written.values[after].mean() == pytest.approx(1e9, rel=0.35)


def test_a_page_cache_writes_after_the_checkpoint():
    parameters = {"save_style": "all_ranks", "save_every_s": 200.0, "save_s": 6.0, "save_bytes_per_second": 1e9}
    parameters |= {"save_to": "disk_written", "page_cache": 1.0, "evaluates": 0.0, "flavour": "ddp"}
    run = _run("data_parallel_training", parameters, duration_s=500)
    saves = [phase for phase in run.phases if phase.note == "checkpoint"]
    assert len(saves) >= 2
    written = run.host_channels["disk_written_bytes_per_second"]
    late = (written.times > saves[0].end_s + 2) & (written.times < saves[0].end_s + 10)
    assert written.values[late].mean() > 5e7


def test_offload_works_on_the_cpu_while_the_gpu_rests():
    """Adam keeps 16 cores busy, then weights come back; the GPU's kernels are a fifth of the step."""
    fixed = QUIET | {"step_s": 8.0, "busy": 0.2, "cores": 16.0, "offload_gb_s": 10.0, "transfer": 0.1}
    scenario = Scenario(kind="offload_training", gpu_count=1, parameters=fixed)
    (job,) = jobs_of(scenario, BOARDS["H100"], Span(-2.0, 100.0, -3600.0), np.random.default_rng(1))
    of = job.stages[-1].signals[0].cells(np.arange(0, 80, CELL_S))
    resting = of["busy"] < 0.01
    assert resting.mean() == pytest.approx(0.8, abs=0.04)
    assert of["cpu_cores"][resting].max() == pytest.approx(17.0)
    assert of["cpu_cores"][of["busy"] > 0.99].max() == pytest.approx(1.0)
    # A tenth of the step at 10 GB/s in, at 0.57 of that out.
    for way, rate in (("receive", 1e9), ("transmit", 0.57e9)):
        assert of[f"pcie_{way}"].mean() == pytest.approx(rate, rel=0.2)


def test_prefill_sends_its_caches_and_decode_receives_them():
    for kind, sign in (("prefill_pool", 1), ("decode_pool", -1)):
        run = _run(kind, {"tensor_parallel": 4.0, "caches_over_infiniband": 1.0})
        for link in ("nvlink", "infiniband"):
            sent, got = (_values(run, f"{link}_{way}_bytes_per_second").mean() for way in ("transmit", "receive"))
            assert sign * (sent - got) > 0
    prefill, decode = (_run(kind, {"tensor_parallel": 1.0}) for kind in ("prefill_pool", "decode_pool"))
    ratio = [
        _values(run, "tensor_active_ratio").mean() / _values(run, "sm_active_ratio").mean() for run in (prefill, decode)
    ]
    assert ratio[0] > ratio[1]
    assert _values(decode, "power_watts").std() < _values(prefill, "power_watts").std()


def test_a_starved_gpu_is_busy_and_not_in_turn():
    parameters = QUIET | {"step_s": 5.0, "busy": 0.4, "waits_in_collective": 0.0, "step_spread": 0.1}
    busy = _values(_run("starved_training", parameters, interval_s=0.2, duration_s=120), "utilization_ratio")
    assert np.mean(busy < 0.1) > 0.3
    assert np.mean(busy > 0.9) > 0.25


def test_ranks_that_wait_for_another_loader_spin():
    parameters = QUIET | {"step_s": 5.0, "busy": 0.4, "waits_in_collective": 1.0, "separate_runs": 0.0}
    run = _run("starved_training", parameters)
    means = sorted(_values(run, "utilization_ratio", gpu).mean() for gpu in range(8))
    assert means[0] < 0.6
    assert means[1] > 0.85


def test_runs_of_a_sweep_keep_their_own_pace():
    parameters = QUIET | {"step_s": 4.0, "separate_runs": 1.0, "step_spread": 0.02}
    run = _run("vision_training", parameters, interval_s=0.5)
    assert max(_values(run, "nvlink_transmit_bytes_per_second", gpu).max() for gpu in range(8)) == 0


def test_a_spinning_server_is_busy_at_the_power_of_a_context():
    run = _run("spinning_server", {"asked": 0.0})
    assert _values(run, "utilization_ratio").max() == 0
    for gpu in range(1, 8):
        assert _values(run, "utilization_ratio", gpu).min() == 1
        assert _values(run, "dram_active_ratio", gpu).max() < 0.002
        assert _values(run, "power_watts", gpu).mean() < 210
    assert {phase.workload for phase in run.phases} == {"inference"}


def test_a_notebook_is_idle_between_its_cells_and_takes_memory_in_steps():
    run = _run("notebook", {"gap_s": 40.0, "cell_s": 20.0}, gpu_count=1, duration_s=1800, seed=1)
    assert {phase.workload for phase in run.phases} == {"idle", "other"}
    resting = _during(run, "utilization_ratio", "notebook", margin=3.0)
    assert np.quantile(resting, 0.95) <= 0.02
    assert (
        _during(run, "power_watts", "notebook cell", margin=2.0).mean() > _during(run, "power_watts", "notebook").mean()
    )


def test_pictures_come_in_square_waves():
    power = _values(_run("diffusion", {"load": 0.5, "picture_s": 20.0}, duration_s=900), "power_watts")
    assert np.quantile(power, 0.1) < 150
    assert np.quantile(power, 0.9) > 0.75 * 700


def test_double_precision_shows_in_its_own_pipe():
    flow = _run("fluid_dynamics", {"fp64": 0.4, "sm": 0.7})
    assert _values(flow, "fp64_active_ratio").mean() == pytest.approx(0.28, rel=0.1)
    dense = _run("linear_algebra", {"tensor": 0.4, "dfma_share": 1.0})
    assert _values(dense, "tensor_hmma_active_ratio").max() == 0
    assert _values(dense, "tensor_dfma_active_ratio").mean() > 0.3


def test_integers_of_a_quantised_model_show_as_such():
    run = _run("decode_pool", {"quantised": 1.0, "integer_share": 0.8, "tensor_parallel": 1.0})
    whole = _values(run, "tensor_active_ratio").mean()
    assert _values(run, "tensor_imma_active_ratio").mean() == pytest.approx(0.8 * whole, rel=0.05)


def test_mining_is_even():
    power = _values(_run("mining"), "power_watts")
    assert power[60:].std() / power[60:].mean() < 0.01


def test_a_pipeline_that_waits_is_busy_with_nothing():
    """A bubble of 30 %: the utilisation stays, the SM activity falls; a stage without is busy to the same degree."""
    levels = {}
    for bubble in (0.03, 0.3):
        fixed = QUIET | {"flavour": "pipeline", "bubble": bubble, "step_s": 4.0, "sm": 0.45, "busy": 0.98}
        run = _run("tensor_pipeline_training", fixed | {"exposed": 0.05}, interval_s=0.2, duration_s=120)
        assert _values(run, "utilization_ratio").mean() > 0.95
        levels[bubble] = np.mean(_values(run, "nvlink_transmit_bytes_per_second") < 1e6)
    assert levels[0.3] > levels[0.03] + 0.1


def test_requests_follow_the_day_and_are_over_dispersed():
    """A depth of 0.8 gives (1 + 0.8) / (1 - 0.8) = 9 between the busiest and the quietest time of the day."""
    cells = int(86400 / CELL_S)
    fixed = {"day_depth": 0.8, "gusts": 0.0, "quiet_share": -0.3}
    shape = load_shape(Draws(np.random.default_rng(1), fixed), SERVING_STYLES["online"], cells)
    hours = shape.reshape(24, -1).mean(axis=1)
    assert hours.max() / hours.min() == pytest.approx(9.0, rel=0.1)
    gusty = load_shape(Draws(np.random.default_rng(1), fixed | {"gusts": 0.8}), SERVING_STYLES["online"], 40_000)
    counts = np.random.default_rng(2).poisson(0.05 * gusty).reshape(-1, 400).sum(axis=1)  # 20 s each
    assert counts.var() > 2 * counts.mean()
