"""Tests of the figure that says how simulated the simulator looks."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent.errors import UsageError
from classifier.realism import measure_realism, rank_auc
from classifier.simulator import random_scenario, simulate_arrays

COLUMNS = ("t_s", "gpu", "util_gpu_pct", "util_mem_pct", "mem_used_mib", "mem_total_mib", "power_w", "power_limit_w")
REST = ("sm_active", "tensor_active", "dram_active")
MIB = 2**20


def _write(folder: Path, name: str, rows):
    path = folder / "inference" / f"{name}.csv.gz"
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, *REST))
        writer.writerows([*row, "", "", ""] for row in rows)
    return f"inference/{name}.csv.gz"


def _simulated(rng, kind):
    scenario = random_scenario(rng, kind, duration_s=(400, 401))
    run = simulate_arrays(replace(scenario, recorder="nvidia_smi", gpu_count=1), seed=int(rng.integers(2**31)))
    core = run.gpus[0].readings.core
    watts = run.gpus[0].power_limit_watts
    for i, time_s in enumerate(run.core_s):
        yield (
            time_s,
            0,
            100 * core["utilization_ratio"][i],
            100 * core["memory_utilization_ratio"][i],
            core["memory_used_bytes"][i] / MIB,
            core["memory_total_bytes"][i] / MIB,
            core["power_watts"][i],
            watts,
        )


def _index(folder: Path, files):
    with (folder / "INDEX.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("file", "label", "tdp_w"))
        writer.writerows((name, "inference", "700") for name in files)


def test_ranks_by_hand():
    """3 beats 1 and 2; 2 beats 1 and ties with 2: 3.5 of 4 pairs."""
    assert rank_auc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == pytest.approx(3.5 / 4)


def test_simulated_recordings_cannot_be_told_from_simulated_ones_and_absurd_ones_can(tmp_path):
    """Two sources are simulated, two hold what no board does: power that jumps between 0 and twice the limit."""
    rng = np.random.default_rng(4)
    kinds = ("llm_serving", "offline_batch", "vision_inference", "llm_serving", "offline_batch", "diffusion")
    files = [
        _write(tmp_path, f"{source}__{number}", _simulated(rng, kind))
        for source in ("ours", "theirs")
        for number, kind in enumerate(kinds)
    ]
    for source in ("absurd", "odd"):
        rows = [(t, 0, 37, 93, 1, 80_000, 1400 * (t % 2), 700) for t in range(600)]
        files.append(_write(tmp_path, f"{source}__1", rows))
    _index(tmp_path, files)
    rows = {row["source"]: row for row in measure_realism(tmp_path, seed=3)}
    assert list(rows) == ["absurd", "odd", "ours", "theirs", "all"]
    assert rows["ours"]["windows"] == 36  # 6 recordings of 400 s hold 6 windows each
    for source in ("ours", "theirs"):
        assert 0.25 < rows[source]["auc"] < 0.75
        assert rows[source]["inside"] > 0.9
    for source in ("absurd", "odd"):
        assert rows[source]["auc"] > 0.95
        assert rows[source]["inside"] < 0.8
    assert rows["all"]["auc"] == pytest.approx(np.mean([rows[name]["auc"] for name in list(rows)[:4]]))


def test_a_source_with_too_little_gets_no_figure(tmp_path):
    files = [_write(tmp_path, "short__1", [(t, 0, 50, 20, 1000, 80_000, 300, 700) for t in range(130)])]
    _index(tmp_path, files)
    (row, everything) = measure_realism(tmp_path, seed=1)
    assert (row["source"], row["windows"], row["auc"], row["inside"]) == ("short", 2, None, None)
    assert everything["auc"] is None


def test_a_folder_without_an_index_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"INDEX\.csv"):
        measure_realism(tmp_path, seed=1)
