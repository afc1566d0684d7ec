"""Tests of the simulated sensors: hand-worked values of what a driver makes of the physics, and what logs lack."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from agent.errors import UsageError
from agent.history import GPU_CHANNELS, History
from classifier.simulator import BOARDS, STYLES, Scenario, simulate, simulate_arrays, with_random_recorder
from classifier.simulator.meters import Integral, PowerMeter, last_window
from classifier.simulator.physics import CELL_S, Grid, board_state, host_activity
from classifier.simulator.recorder import ticks
from classifier.simulator.sensors import SampleTimes, read_gpu
from classifier.simulator.signals import Constant, Cyclic, HostLoad, Job, Stage, pieces

GRID = Grid.over(60.0)
MIDDLES = GRID.edges[:-1] + CELL_S / 2


def _meter(board, watts, seed=1):
    return PowerMeter(np.random.default_rng(seed), BOARDS[board], GRID, np.asarray(watts, dtype=float))


def _stopping():
    """Work at 695 W that stops at 30 s: 142 W from then on."""
    return np.where(MIDDLES < 30, 695.0, 142.0)


class TestPower:
    def test_one_second_average_ramps_down_after_work_stops(self):
        """Ten updates a second: each takes a tenth of 553 W off, 55.3 W; 142 W is reached within 1.2 s, as measured.

        At 30.55 s the last update was at 30.45 to 30.55 s, when 0.45 to 0.55 of the window was after the stop.
        """
        times = np.arange(29.0, 32.0, 0.01)
        reported = _meter("H100", _stopping()).reported(times)
        assert reported[times < 30.0] == pytest.approx(695, abs=1)
        assert reported[times > 31.2] == pytest.approx(142, abs=1)
        steps = np.diff(reported)
        ramp = steps[steps < -5]
        assert len(ramp) == 11  # the window's first and last update after the stop cover a part of a tenth
        assert ramp[1:-1] == pytest.approx([-55.3] * 9, abs=1)
        assert ramp.sum() == pytest.approx(-553, abs=2)
        at_half = reported[np.searchsorted(times, 30.55)]
        assert 695 - 0.55 * 553 - 1 <= at_half <= 695 - 0.45 * 553 + 1

    @pytest.mark.parametrize("board", ["A100", "V100"])
    def test_boards_that_do_not_average_fall_within_two_looks(self, board):
        times = np.arange(29.0, 32.0, 0.01)
        reported = _meter(board, np.minimum(_stopping(), 300)).reported(times)
        assert reported[times < 30.0].min() > 298
        assert reported[times > 30.2].max() < 144

    def test_energy_shows_the_stop_at_once_and_moves_ten_times_a_second(self):
        meter = _meter("H100", _stopping())
        times = np.arange(0, 60, 0.05)
        steps = np.diff(meter.energy(times))
        # Twenty readings a second of a counter that moves ten times: every other difference is nothing.
        assert np.mean(steps == 0) == pytest.approx(0.5, abs=0.02)
        before, after = meter.energy(np.array([29.5, 29.9, 30.3, 30.7])).reshape(2, 2)
        assert (before[1] - before[0]) / 0.4 == pytest.approx(695, rel=0.01)
        assert (after[1] - after[0]) / 0.4 == pytest.approx(142, rel=0.01)

    @pytest.mark.parametrize("board", BOARDS)
    def test_energy_and_power_agree(self, board):
        """Measured on H100: means agree within 0.6 %. One look a second, without an average, misses more."""
        run = simulate_arrays(
            Scenario(kind="data_parallel_training", board=board, gpu_count=2, duration_s=900, begin_s=3600), seed=4
        )
        for gpu in run.gpus:
            energy, power = gpu.channels["energy_power_watts"].values, gpu.channels["power_watts"].values
            assert energy.mean() == pytest.approx(
                power.mean(), rel=0.006 if BOARDS[board].power_window_s == 1 else 0.03
            )
            assert gpu.channels["power_fast_watts"].values.mean() == pytest.approx(energy.mean(), rel=0.006)

    def test_a_swing_of_2_54_hertz_shows_in_fast_power_only(self):
        """Tensor and pipeline parallel training: 220 to 525 W inside a step of 0.394 s, where power reads 402 to 452 W.

        The second holds 2.54 cycles. Of the 0.54 that does not average out, 0.14 to 0.54 is high where 0.6 of a cycle
        is: a swing of 0.4 cycles of 0.394 s at 305 W, 48 W, where 50 W was measured.
        """
        cycle = Cyclic(*pieces([(0.6, {"watts": 525.0}), (0.4, {"watts": 220.0})]), np.arange(-4, 70, 1 / 2.54))
        watts = cycle.cells(GRID.edges)["watts"]
        meter = _meter("H100", watts)
        fast = meter.instant(np.arange(2, 58, 0.1))
        reported = meter.reported(np.arange(2, 58, 1.0))
        assert np.subtract(*np.quantile(fast, (0.95, 0.05))) > 290
        assert np.ptp(reported) == pytest.approx(48, abs=4)
        assert reported.std() < 0.15 * fast.std()
        assert reported.mean() == pytest.approx(0.6 * 525 + 0.4 * 220, rel=0.03)
        # The cadence is in the fast readings: 4 x 0.1 s is the nearest lag to 0.394 s.
        lags = np.array([np.corrcoef(fast[:-lag], fast[lag:])[0, 1] for lag in range(1, 8)])
        assert int(np.argmax(lags)) + 1 == 4
        assert lags.max() > 0.6

    def test_a_sensor_that_looks_a_quarter_of_the_time_can_be_fooled(self):
        """Work in the first half of every tenth of a second: an H100 sees all or nothing of it, an A40 half."""
        watts = np.where(np.arange(GRID.size) % 2 == 0, 400.0, 200.0) * 0.7
        seen = np.array([_meter("H100", watts, seed).instant(np.array([30.0]))[0] for seed in range(40)])
        assert np.mean((seen < 150) | (seen > 270)) > 0.4
        whole = [_meter("A40", watts, seed).instant(np.array([30.0]))[0] for seed in range(10)]
        assert whole == pytest.approx([210.0] * 10, abs=2)

    def test_a_loaded_and_idle_board_is_as_quiet_as_measured(self):
        """Measured on H100: 0.14 W from one reading to the next of the one-second average."""
        meter = _meter("H100", np.full(GRID.size, 120.0))
        assert meter.reported(np.arange(2, 58, 1.0)).std() == pytest.approx(0.14, rel=0.35)


def test_utilization_counts_whole_windows_only():
    """A board that counts every 0.5 s shows a job that starts at 10 s as 0, then partly, then 1 within 1 s."""
    busy = Integral(GRID, (MIDDLES > 10).astype(float))
    times = np.arange(9, 12, 0.05)
    seen = last_window(np.random.default_rng(3), busy, times, 0.5)
    assert np.all(seen[times <= 10] < 1e-9)
    assert seen[times > 11.0] == pytest.approx(1.0)
    assert len(set(np.round(seen, 6))) <= 3  # before, the window it started in, after


def test_an_integral_is_exact_between_edges():
    """Cells of 0.05 s with rates 0, 1, 2, ...: from 0.02 s into the third, 0.02 s at 2 and 0.01 s at 3."""
    integral = Integral(GRID, np.arange(GRID.size, dtype=float))
    start = GRID.edges[2] + 0.03
    assert (integral.at(np.array([start + 0.03])) - integral.at(np.array([start])))[0] == pytest.approx(0.02 * 2 + 0.03)


def _read(levels):
    """Return the readings of an H100 whose one process holds `levels` for a minute."""
    stage = Stage(
        start_s=-10, end_s=70, signals=(Constant(levels),), memory_ratio=(0.5, 0.5), workload="other", note=None
    )
    rng, board, job = np.random.default_rng(1), BOARDS["H100"], Job(gpus=(0,), stages=(stage,))
    state = board_state(rng, board, GRID, job=job, rank=0, drift=np.zeros(GRID.size))
    times = SampleTimes(core_s=np.arange(0, 60, 1.0), slow_s=np.arange(0, 60, 5.0), fast_s=np.arange(0.1, 59, 0.1))
    return read_gpu(rng, board, GRID, state, times=times, style=STYLES["agent"])


def _run(**fields):
    base = {"kind": "data_parallel_training", "gpu_count": 2, "duration_s": 120.0, "begin_s": 3600.0}
    return simulate_arrays(Scenario(**{**base, **fields}), seed=2)


class TestWhatIsThere:
    def test_profiling_exists_on_hopper_and_later_only_unless_dcgm_reads(self):
        for board, there in (("H100", True), ("H200", True), ("A100", False), ("L40S", False)):
            channels = _run(board=board).gpus[0].channels
            for name in ("sm_active_ratio", "fp64_active_ratio", "tensor_hmma_active_ratio"):
                assert (name in channels) == there, (board, name)
        assert "sm_active_ratio" in _run(board="A100", recorder="dcgm").gpus[0].channels

    def test_bfloat16_is_tensor_work_of_half_precision_and_no_fp16(self):
        channels = _run().gpus[0].channels
        assert channels["tensor_hmma_active_ratio"].values.mean() == pytest.approx(
            channels["tensor_active_ratio"].values.mean(), rel=0.02
        )
        for name in ("fp16_active_ratio", "tensor_imma_active_ratio", "tensor_dfma_active_ratio"):
            assert channels[name].values.max() == 0.0

    def test_a_board_without_nvlink_has_no_counters_of_it(self):
        assert not any(name.startswith("nvlink") for name in _run(board="L4").gpus[0].readings.core)

    def test_memory_with_gddr_has_no_temperature(self):
        assert "memory_temperature_celsius" not in _run(board="L40S").gpus[0].channels
        assert "memory_temperature_celsius" in _run(board="A100").gpus[0].channels

    def test_what_pcie_is_read_from_depends_on_the_recorder(self):
        profiled = _run().gpus[0]
        assert profiled.channels["pcie_receive_bytes_per_second"].size > 100  # each second
        counted = _run(recorder="agent_without_profiling").gpus[0]
        assert counted.channels["pcie_receive_bytes_per_second"].size == 24  # 120 s, each 5 s
        assert not _run(board="A100", recorder="agent").gpus[0].channels.keys() & {"pcie_receive_bytes_per_second"}
        # A slice of 20 ms misses and catches bursts: from one reading to the next it jumps more than the means do.
        sliced = _run(recorder="dmon").gpus[0].channels["pcie_receive_bytes_per_second"].values
        assert "sm_active_ratio" not in _run(recorder="dmon").gpus[0].channels
        means = profiled.channels["pcie_receive_bytes_per_second"].values
        assert np.median(np.abs(np.diff(sliced))) / sliced.mean() > 5 * np.median(np.abs(np.diff(means))) / means.mean()

    def test_a_log_of_nvidia_smi_has_its_columns_and_no_more(self):
        run = _run(recorder="nvidia_smi")
        assert set(run.gpus[0].channels) == {
            *("utilization_ratio", "memory_utilization_ratio", "memory_used_bytes", "memory_total_bytes"),
            *("power_watts", "sm_clock_hertz", "memory_clock_hertz", "temperature_celsius"),
            *("memory_temperature_celsius", "samples"),
        }
        assert not run.host_channels

    def test_whole_numbers_are_whole(self):
        channels = _run().gpus[0].channels
        for name in ("utilization_ratio", "memory_utilization_ratio"):
            percent = channels[name].values * 100
            assert percent == pytest.approx(percent.round(), abs=1e-9)
        assert np.all(channels["temperature_celsius"].values % 1 == 0)
        watts = _run(recorder="dmon").gpus[0].channels["power_watts"].values
        assert np.all(watts % 1 == 0)

    def test_instant_power_swings_more_than_the_average(self):
        parameters = {"flavour": "offload", "step_s": 2.5, "busy": 0.3}
        spread = {
            recorder: _run(recorder=recorder, parameters=parameters).gpus[0].channels["power_watts"].values.std()
            for recorder in ("nvidia_smi", "nvidia_smi_instant")
        }
        assert spread["nvidia_smi_instant"] > 1.2 * spread["nvidia_smi"]

    def test_an_unknown_recorder_is_named(self):
        with pytest.raises(UsageError, match="stylus"):
            _run(recorder="stylus")


class TestHost:
    @pytest.mark.parametrize(
        ("levels", "low", "high"),
        [
            ({"busy": 1.0}, 0.99, 1.01),  # nothing said: a thread waits for the GPU on a core
            ({}, 0.0, 0.31),  # or rests with it
            ({"busy": 1.0, "cpu_cores": 3.5}, 3.49, 3.51),
        ],
    )
    def test_processes_use_the_cores_that_the_work_says(self, levels, low, high):
        readings = _read(levels)
        cores = np.diff(readings.process_totals["cpu_seconds_total"]) / 5.0
        assert low <= cores.min()
        assert cores.max() <= high

    def test_no_process_uses_no_cores(self):
        assert "process_cpu_ratio" not in _run(kind="idle").gpus[0].channels

    def test_the_plain_level_sees_no_process_io(self):
        assert "process_written_bytes_per_second" not in _run().gpus[0].channels
        assert "process_written_bytes_per_second" in _run(recorder="agent_capable").gpus[0].channels

    def test_file_systems_are_read_every_five_seconds_where_there_are_any(self):
        series = _run().host_channels["filesystem_read_bytes_per_second"]
        assert np.diff(series.times) == pytest.approx(5.0)
        assert not any(name.startswith("filesystem") for name in _run(filesystem=False).host_channels)

    def test_what_comes_from_a_file_server_comes_over_a_network(self):
        """1 GB/s from 20 s to 40 s is in the file system's counter, and in the network's or the fabric's or in none."""
        load = HostLoad(start_s=20, end_s=40, channel="filesystem_read", bytes_per_second=1e9, roughness=0.0)
        paths = set()
        for seed in range(30):
            activity = host_activity(np.random.default_rng(seed), GRID, (load,))
            inside = GRID.cells(21, 39)
            assert activity["filesystem_read"][inside].mean() == pytest.approx(1e9, rel=0.05)
            over = [name for name in ("network_receive", "infiniband_receive") if activity[name][inside].mean() > 5e8]
            paths.add(tuple(over))
        assert paths == {("network_receive",), ("infiniband_receive",), ()}


class TestWhatGoesWrong:
    def test_single_profiling_samples_are_all_zero_while_the_gpu_works(self):
        run = _run(duration_s=3600.0, parameters={"evaluates": 0.0, "save_every_s": 36000.0})
        found = 0
        for gpu in run.gpus:
            core = gpu.readings.core
            ratios = np.array([values for name, values in core.items() if name.endswith("active_ratio")])
            zero = (ratios == 0).all(axis=0)
            assert np.all(core["utilization_ratio"][zero] > 0)
            assert not np.any(zero[1:] & zero[:-1])  # isolated
            found += int(zero.sum())
        assert 1 <= found <= 25  # of 7200 one in a thousand

    def test_counters_that_begin_anew_give_no_rate_over_the_reset(self):
        run = _run(counter_resets=1)
        for gpu in run.gpus:
            totals = gpu.readings.core["nvlink_transmit_bytes_total"]
            assert np.count_nonzero(np.diff(totals) < 0) == 1
            assert totals.min() >= 0
            for name in ("nvlink_transmit_bytes_per_second", "energy_power_watts"):
                assert gpu.channels[name].values.min() >= 0
            energy = gpu.channels["energy_power_watts"].values
            assert energy.max() < 1.05 * gpu.power_limit_watts

    def test_missed_ticks_and_unread_values_leave_gaps(self):
        run = _run(duration_s=2000.0, missed_share=0.1, unread_share=0.05)
        assert run.core_s.size == pytest.approx(1800, abs=50)
        power = run.gpus[0].channels["power_watts"]
        assert power.size == pytest.approx(0.95 * run.core_s.size, rel=0.02)
        assert np.all(np.isfinite(power.values))

    @pytest.mark.parametrize("share", [-0.1, 1.0])
    def test_impossible_shares_are_refused(self, share):
        with pytest.raises(UsageError, match="missed_share"):
            _run(missed_share=share)


class TestRecorders:
    def test_the_recorder_does_not_disturb_the_work(self):
        runs = [
            _run(kind="mining", recorder=name, missed_share=share) for name, share in (("agent", 0.0), ("dmon", 0.1))
        ]
        assert runs[0].phases == runs[1].phases
        assert [gpu.key for gpu in runs[0].gpus] == [gpu.key for gpu in runs[1].gpus]
        first, second = (run.gpus[1].channels["power_watts"].values.mean() for run in runs)
        assert first == pytest.approx(second, rel=0.01)

    @pytest.mark.parametrize("style", STYLES)
    def test_every_style_records_what_its_arrays_say(self, style):
        scenario = Scenario(
            kind="stalled_all_reduce",
            gpu_count=2,
            duration_s=100,
            recorder=style,
            infiniband=True,
            missed_share=0.05,
            unread_share=0.02,
            counter_resets=1,
            jitter_s=0.02,
        )
        run = simulate_arrays(scenario, seed=8)
        history = History()
        for tick in ticks(run):
            history.ingest(tick)
        for gpu in run.gpus:
            kept = history.gpus[gpu.key]
            assert {name for name in GPU_CHANNELS if kept.has(name)} == set(gpu.channels)
            for name, series in gpu.channels.items():
                _same(kept.series(name, 200, 1000), series, name)
        for name, series in run.host_channels.items():
            _same(history.host.series(name, 200, 1000), series, name)

    def test_random_recorders_cover_every_style_and_repeat(self):
        scenario = Scenario(kind="idle", duration_s=300)
        drawn = [with_random_recorder(np.random.default_rng(seed), scenario) for seed in range(200)]
        assert {one.recorder for one in drawn} == set(STYLES)
        assert {0.1, 60.0} <= {one.interval_s for one in drawn}
        assert all(one.duration_s / one.interval_s >= 5 for one in drawn)
        assert drawn[7] == with_random_recorder(np.random.default_rng(7), scenario)
        assert dataclasses.replace(drawn[7], recorder="agent").kind == "idle"

    def test_equal_seeds_give_equal_runs_in_every_style(self):
        for style in STYLES:
            scenario = Scenario(kind="mining", gpu_count=1, duration_s=30, recorder=style, missed_share=0.1)
            first, again = (list(simulate(scenario, seed=5)[1]) for _ in range(2))
            assert first == again


def _same(kept, series, name):
    assert np.allclose(kept.times, series.times, rtol=0, atol=1e-9), name
    assert np.allclose(kept.values, series.values, rtol=1e-9), name
