"""How well simulated windows can be told from recorded ones: a figure about the simulator, not a test.

For each source of a folder of recordings, windows of one minute are compared with simulated ones of the same classes,
interval and columns. A classifier that never saw the source, nor the simulated scenarios it is compared with, says how
simulated each window looks: an area under the curve of 0.5 means that it cannot tell, 1 that it always can.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.errors import UsageError
from agent.history import Array
from classifier.simulator import SimulatedRun, available_kinds, random_scenario, simulate_arrays
from classifier.simulator.catalogue import workload_of
from classifier.training_realism import simulated_looks

WINDOW_S: Final = 60.0
#: Least samples of a window, and least windows of a source that gets a figure.
_LEAST_SAMPLES: Final = 4
_LEAST_WINDOWS: Final = 8
#: Most windows of one recording and GPU, evenly spread; and simulated windows of each source.
_MOST_WINDOWS: Final = 12
_SIMULATED: Final = 240
_WINDOWS_OF_A_RUN: Final = 3
_COLUMNS: Final = ("utilization", "memory_utilization", "memory", "power", "sm", "tensor", "dram")
_STATISTICS: Final = ("mean", "spread", "p5", "p50", "p95", "step", "zero", "repeated")
_LABELS: Final = frozenset({"training", "inference", "idle"})
_MIXED: Final = "mixed_node"
_CHANNELS: Final = {
    "utilization": "utilization_ratio",
    "memory_utilization": "memory_utilization_ratio",
    "memory": "memory_used_bytes",
    "power": "power_watts",
    "sm": "sm_active_ratio",
    "tensor": "tensor_active_ratio",
    "dram": "dram_active_ratio",
}


@dataclass(frozen=True, slots=True)
class _Recording:
    """One recorded trace: sample times and columns of each GPU, as shares of what the board has."""

    source: str
    label: str
    interval_s: float
    gpus: tuple[tuple[Array, dict[str, Array]], ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """Windows of one source, and simulated ones to compare them with, shape (windows, columns times statistics)."""

    name: str
    labels: tuple[str, ...]
    interval_s: float
    columns: tuple[str, ...]
    recorded: Array
    simulated: Array


def measure_realism(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Return one row for each source of `folder`, and a last one over all of them, each source weighing the same.

    `folder` holds INDEX.csv and gzipped CSV files in the form that `warpwatch convert` reads. A row has `source`,
    `labels`, `interval_s`, `columns`, `windows`, `auc` and `inside`: the share of the recorded values that lie between
    the 1st and the 99th percentile of the simulated ones. `auc` and `inside` are None where the source has fewer than 8
    windows. Takes about a minute. Raises UsageError where there is no INDEX.csv.
    """
    sources = [_source(name, recordings, seed) for name, recordings in sorted(_recordings(folder).items())]
    rows: list[dict[str, Any]] = []
    for source in sources:
        others = [other for other in sources if other is not source]
        rows.append(_row(source, _auc(source, others, seed) if len(source.recorded) >= _LEAST_WINDOWS else None))
    known = [row for row in rows if row["auc"] is not None]
    rows.append(
        {
            "source": "all",
            "labels": sorted({label for row in known for label in row["labels"]}),
            "interval_s": None,
            "columns": [],
            "windows": sum(row["windows"] for row in known),
            "auc": float(np.mean([row["auc"] for row in known])) if known else None,
            "inside": float(np.mean([row["inside"] for row in known])) if known else None,
        }
    )
    return rows


def _row(source: _Source, auc: float | None) -> dict[str, Any]:
    return {
        "source": source.name,
        "labels": list(source.labels),
        "interval_s": source.interval_s,
        "columns": list(source.columns),
        "windows": len(source.recorded),
        "auc": auc,
        "inside": None if auc is None else _inside(source),
    }


def _inside(source: _Source) -> float:
    known = np.isfinite(source.recorded).any(axis=0) & np.isfinite(source.simulated).any(axis=0)
    low, high = np.nanpercentile(source.simulated[:, known], [1, 99], axis=0)
    recorded = source.recorded[:, known]
    return float(np.mean((recorded >= low - 1e-9) & (recorded <= high + 1e-9)))


def _auc(source: _Source, others: Sequence[_Source], seed: int) -> float | None:
    """Return the area under the curve on one source, of a classifier fitted on the columns it has of the others.

    None where no other source has a column of this one.
    """
    there = np.isfinite(source.recorded).any(axis=0)
    rows, answers, weights = [], [], []
    for other in others:
        for part, simulated in ((other.recorded, 0), (other.simulated, 1)):
            seen = part[np.isfinite(part[:, there]).any(axis=1)]
            rows.append(seen)
            answers.append(np.full(len(seen), simulated))
            weights.append(np.full(len(seen), 1 / max(1, len(seen))))
    fitted = np.concatenate(rows)
    there &= np.isfinite(fitted).any(axis=0)
    if not there.any():
        return None
    looks = simulated_looks(
        fitted[:, there],
        np.concatenate(answers),
        np.concatenate(weights),
        np.concatenate([source.recorded, source.simulated])[:, there],
        seed,
    )
    return rank_auc(looks[len(source.recorded) :], looks[: len(source.recorded)])


def rank_auc(positive: Array, negative: Array) -> float:
    """Return the chance that a positive scores above a negative, ties counting half; both hold at least one score."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left")
    not_above = np.searchsorted(ordered, positive, side="right")
    return float(np.mean((below + not_above) / 2) / ordered.size)


def _source(name: str, recordings: Sequence[_Recording], seed: int) -> _Source:
    rows = [row for recording in recordings for times, columns in recording.gpus for row in _windows(times, columns)]
    recorded = np.array(rows).reshape(-1, len(_COLUMNS) * len(_STATISTICS))
    interval_s = round(float(np.median([recording.interval_s for recording in recordings])), 3)
    labels = tuple(sorted({recording.label for recording in recordings}))
    there = {column for recording in recordings for _, columns in recording.gpus for column in columns}
    columns = tuple(column for column in _COLUMNS if column in there)
    rng = np.random.default_rng([seed, *name.encode()])
    labels_of_all = [recording.label for recording in recordings]
    simulated = list(_simulated(rng, labels_of_all, interval_s, columns)) if len(recorded) >= _LEAST_WINDOWS else []
    compared = np.array(simulated).reshape(-1, recorded.shape[1])
    if len(compared):
        # Each simulated window lacks what some recorded one lacks: missing columns tell nothing.
        compared = np.where(np.isfinite(recorded[rng.integers(len(recorded), size=len(compared))]), compared, np.nan)
    return _Source(
        name=name,
        labels=labels,
        interval_s=interval_s,
        columns=columns,
        recorded=recorded,
        simulated=compared,
    )


def _simulated(
    rng: np.random.Generator, labels: Sequence[str], interval_s: float, columns: tuple[str, ...]
) -> Iterator[Array]:
    """Yield windows of simulated runs with the labels of a source in the shares that it has them."""
    profiled = bool({"sm", "tensor", "dram"} & set(columns))
    kinds = [kind for kind in available_kinds() if kind != _MIXED]
    made = 0
    while made < _SIMULATED:
        label = str(rng.choice(list(labels)))
        kind = str(rng.choice([kind for kind in kinds if workload_of(kind) == label]))
        scenario = random_scenario(rng, kind, duration_s=(240, 300), intervals_s=(max(0.1, interval_s),))
        recorder = "dcgm" if profiled else "nvidia_smi"
        scenario = replace(scenario, recorder=recorder, gpu_count=min(2, scenario.gpu_count))
        run = simulate_arrays(scenario, seed=int(rng.integers(2**31)))
        for row in _run_windows(rng, run, label, columns):
            yield row
            made += 1


def _run_windows(rng: np.random.Generator, run: SimulatedRun, label: str, columns: tuple[str, ...]) -> Iterator[Array]:
    gpu = run.gpus[int(rng.integers(len(run.gpus)))]
    scales = {"memory": gpu.board.memory_bytes, "power": gpu.power_limit_watts}
    seen = {
        column: gpu.readings.core[_CHANNELS[column]] / scales.get(column, 1.0)
        for column in columns
        if _CHANNELS[column] in gpu.readings.core
    }
    spans = [phase for phase in run.phases if phase.gpu in (None, gpu.key.gpu) and phase.workload == label]
    for _ in range(_WINDOWS_OF_A_RUN if spans else 0):
        span = spans[int(rng.integers(len(spans)))]
        if span.end_s - span.start_s < WINDOW_S:
            continue
        start_s = float(rng.uniform(span.start_s, span.end_s - WINDOW_S))
        inside = (run.core_s >= start_s) & (run.core_s < start_s + WINDOW_S)
        if np.count_nonzero(inside) >= _LEAST_SAMPLES:
            yield _statistics({column: values[inside] for column, values in seen.items()})


def _windows(times: Array, columns: Mapping[str, Array]) -> Iterator[Array]:
    """Yield the statistics of windows of one minute, evenly spread and without overlap."""
    if not times.size:
        return
    count = int((times[-1] - times[0]) / WINDOW_S)
    for number in np.unique(np.linspace(0, count - 1, min(count, _MOST_WINDOWS)).astype(int)).tolist():
        inside = (times >= times[0] + number * WINDOW_S) & (times < times[0] + (number + 1) * WINDOW_S)
        if np.count_nonzero(inside) >= _LEAST_SAMPLES:
            yield _statistics({column: values[inside] for column, values in columns.items()})


def _statistics(columns: Mapping[str, Array]) -> Array:
    row: list[float] = []
    for column in _COLUMNS:
        values = columns.get(column)
        values = values[np.isfinite(values)] if values is not None else np.empty(0)
        if values.size < _LEAST_SAMPLES:
            row += [math.nan] * len(_STATISTICS)
            continue
        steps = np.abs(np.diff(values))
        row += [float(values.mean()), float(values.std()), *np.quantile(values, (0.05, 0.5, 0.95)).tolist()]
        row += [float(steps.mean()), float(np.mean(values == 0)), float(np.mean(steps == 0))]
    return np.array(row)


def _recordings(folder: Path) -> dict[str, list[_Recording]]:
    """Return the recordings of a folder by source: the part of the file name before the double underscore."""
    index = folder / "INDEX.csv"
    if not index.is_file():
        raise UsageError(f"{folder} holds no INDEX.csv; give a folder of labelled recordings")
    found: dict[str, list[_Recording]] = {}
    with index.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            path = folder / row["file"]
            if row["label"] in _LABELS and path.is_file():
                source = path.name.partition("__")[0]
                limit = _number(row.get("tdp_w") or "")
                found.setdefault(source, []).append(_recording(path, source, row["label"], limit))
    return found


def _recording(path: Path, source: str, label: str, limit_watts: float) -> _Recording:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        names = next(reader)
        cells = np.array([[_number(cell) for cell in row] for row in reader if len(row) == len(names)])
    cells = cells.reshape(-1, len(names))
    table = {name: cells[:, position] for position, name in enumerate(names)}
    gpus: list[tuple[Array, dict[str, Array]]] = []
    for gpu in np.unique(table["gpu"]).tolist():
        mine = table["gpu"] == gpu
        one = {name: values[mine] for name, values in table.items()}
        limit = one["power_limit_w"] if np.isfinite(one["power_limit_w"]).any() else limit_watts
        columns = {
            "utilization": one["util_gpu_pct"] / 100,
            "memory_utilization": one["util_mem_pct"] / 100,
            "memory": one["mem_used_mib"] / one["mem_total_mib"],
            "power": one["power_w"] / limit,
            "sm": one["sm_active"],
            "tensor": one["tensor_active"],
            "dram": one["dram_active"],
        }
        gpus.append((one["t_s"], {name: values for name, values in columns.items() if np.isfinite(values).any()}))
    intervals = np.concatenate([np.diff(times) for times, _ in gpus])
    return _Recording(source, label, float(np.median(intervals)) if intervals.size else 1.0, tuple(gpus))


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


__all__ = ["WINDOW_S", "measure_realism", "rank_auc"]
