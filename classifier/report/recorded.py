"""Recordings of real machines: windows of whole sources, and figures in which every source weighs the same.

A source with recordings of several classes counts once per class (a unit). A log without a power limit gets the nominal
one of its board from INDEX.csv (column tdp_w), since a live node always knows it; everything else is as recorded.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import UsageError
from agent.history import GPU_CHANNELS, Array, GpuHistory, History
from agent.records import GpuLimits, Tick
from agent.vocabulary import CLASSES
from classifier.evaluation import Recording, read_index
from classifier.profiles import POWER_LIMIT, PROFILE_NAMES, mask
from classifier.report.answers import Answers
from classifier.report.baselines import Baseline
from classifier.report.metrics import ABSTAINED, Estimate, Flags, Labels, bootstrap
from classifier.report.windows import SPANS_S, Windows, WindowsBuilder, moments_of
from classifier.training_data import Dataset

#: Opens a trace or foreign log: its usual interval in seconds, and its ticks.
Opened = Callable[[Path], tuple[float, Iterable[Tick]]]
_HORIZON_S: Final = 1e6
_BUSY: Final = ("training", "inference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One recording that was read: which channels it holds (of GPU_CHANNELS, and POWER_LIMIT)."""

    recording: Recording
    number: int
    channels: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """All windows of one source and class, as shares; None where there is nothing to divide by."""

    source: str
    label: str
    windows: int
    coverage: float  # share with any word said
    recall: float  # share said right; an abstention is wrong
    said_idle: float
    classed: float  # share with a class said that is not idle
    right_of_classed: float | None
    forced: float | None  # share right were training or inference to be said, idle ones left out
    shares: tuple[float, ...]  # of each class among what was said with a class that is not idle, in the order of _BUSY


def read_windows(
    folder: Path, opened: Opened, baselines: Sequence[Baseline], *, per_gpu: int, gpus: int,
    files_per_source: int | None, advance: Callable[[str], None], warn: Callable[[str], None],
) -> tuple[Windows, list[Log]]:  # fmt: skip
    """Return the windows of every recording of INDEX.csv and what each recording holds.

    At most `per_gpu` windows of each length of evidence for each of `gpus` GPUs, evenly over the phases in which the
    labelled work goes on. A recording that cannot be read is reported through `warn` and left out.
    """
    builder, logs = WindowsBuilder(baselines), []
    limits = _nominal_limits(folder)
    seen: dict[tuple[str, str], int] = {}
    for number, recording in enumerate(read_index(folder)):
        unit = recording.source, recording.label
        seen[unit] = seen.get(unit, 0) + 1
        advance(f"reading {recording.path.name}")
        if files_per_source is not None and seen[unit] > files_per_source:
            continue
        try:
            history = read_history(recording.path, opened)
        except UsageError as error:
            warn(f"left out: {error}")
            continue
        channels = frozenset(
            name for gpu in history.gpus.values() for name in GPU_CHANNELS if gpu.has(name)
        ) | _limit_channel(history)
        logs.append(Log(recording=recording, number=number, channels=channels))
        give_limit(history, limits.get(recording.path))
        _add_windows(builder, history, recording, number, per_gpu=per_gpu, gpus=gpus)
    return builder.build(), logs


def read_history(path: Path, opened: Opened) -> History:
    """Return all that a recording holds; raises UsageError where it cannot be read or holds nothing."""
    interval_s, ticks = opened(path)
    history = History(_HORIZON_S, sample_interval_s=interval_s)
    for tick in ticks:
        history.ingest(tick)
    if not history.gpus:
        raise UsageError(f"{path} holds no sample of a GPU")
    return history


def give_limit(history: History, watts: float | None) -> None:
    """Give every GPU without a power limit the limit `watts`."""
    for key, gpu in history.gpus.items():
        if watts is not None and gpu.power_limit_watts is None:
            gpu.limits = GpuLimits(monotonic_s=0.0, wall_s=0.0, key=key, power_limit_watts=watts)


def _limit_channel(history: History) -> frozenset[str]:
    known = any(gpu.power_limit_watts is not None for gpu in history.gpus.values())
    return frozenset({POWER_LIMIT}) if known else frozenset()


def _nominal_limits(folder: Path) -> dict[Path, float]:
    found: dict[Path, float] = {}
    with (folder / "INDEX.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                found[folder / row["file"]] = float(row.get("tdp_w") or "")
            except ValueError:
                continue
    return found


def nominal_limit(recording: Recording) -> float | None:
    """Return the nominal power of the board in watts, where INDEX.csv names it."""
    return _nominal_limits(recording.path.parents[1]).get(recording.path)


def _add_windows(
    builder: WindowsBuilder, history: History, recording: Recording, number: int, *, per_gpu: int, gpus: int
) -> None:
    keys = list(history.gpus)
    chosen = [keys[position] for position in np.unique(np.linspace(0, len(keys) - 1, min(gpus, len(keys))).astype(int))]
    for key in chosen:
        gpu = history.gpus[key]
        first_s, last_s = _extent(gpu)
        kept = recording.kept or ((0.0, last_s - first_s),)
        longest = sum(end - start for start, end in kept)
        for span_s in SPANS_S:
            for start_s, end_s in kept:
                end_s = min(end_s, last_s - first_s)  # noqa: PLW2901 - phases may be longer than the log
                share = max(1, round(per_gpu * (end_s - start_s) / longest)) if longest > 0 else 1
                for now_s in moments_of(start_s, end_s, span_s, share):
                    builder.add(
                        gpu, history.host, first_s + now_s, span_s,
                        label=recording.label, group=number, family=recording.source, gpu_count=len(keys),
                        peers=list(history.gpus.values()),
                    )  # fmt: skip


def _extent(gpu: GpuHistory) -> tuple[float, float]:
    return (gpu.first_s or 0.0, gpu.last_s or 0.0)


def units_of(windows: Windows, said: Labels, forced: Labels | None) -> list[Unit]:
    """Return the shares of each source and class; `forced` is training or inference for every window, if known."""
    found: list[Unit] = []
    for label in (*_BUSY, "idle", "other"):
        truth = CLASSES.index(label)
        for source in np.unique(windows.families[windows.labels == truth]):
            mine = (windows.families == source) & (windows.labels == truth)
            found.append(_unit(str(source), label, said[mine], None if forced is None else forced[mine]))
    return found


def _unit(source: str, label: str, said: Labels, forced: Labels | None) -> Unit:
    truth, idle = CLASSES.index(label), CLASSES.index("idle")
    classed = (said != ABSTAINED) & (said != idle)
    busy = said != idle
    shares = tuple(float((said[classed] == CLASSES.index(one)).mean()) if classed.any() else 0.0 for one in _BUSY)
    return Unit(
        source=source,
        label=label,
        windows=int(said.size),
        coverage=float((said != ABSTAINED).mean()),
        recall=float((said == truth).mean()),
        said_idle=float((said == idle).mean()),
        classed=float(classed.mean()),
        right_of_classed=float((said[classed] == truth).mean()) if classed.any() else None,
        forced=float((forced[busy] == truth).mean()) if forced is not None and busy.any() else None,
        shares=shares,
    )


def forced_busy(answers: Answers) -> Labels:
    """Return the likelier of training and inference for every window."""
    both = np.array([CLASSES.index(name) for name in _BUSY])
    return np.asarray(both[answers.probabilities[:, both].argmax(axis=1)], dtype=np.int64)


def over_sources(
    units: Sequence[Unit], figure: Callable[[Unit], float | None], labels: Sequence[str] = _BUSY, *, seed: int = 0
) -> Estimate:
    """Return the mean over `labels` of the mean of `figure` over units, with an interval over sources."""
    rows = [(unit, value) for unit in units if unit.label in labels and (value := figure(unit)) is not None]
    if {unit.label for unit, _ in rows} != set(labels):
        return Estimate(None)
    values = np.array([value for _, value in rows])
    names = np.array([unit.label for unit, _ in rows])
    clusters = np.array([f"{unit.source}/{unit.label}" for unit, _ in rows])

    def statistic(weights: Array) -> float | None:
        means = [float(np.average(values[names == label], weights=weights[names == label])) for label in labels]
        return sum(means) / len(means)

    return bootstrap(clusters, statistic, strata=names, seed=seed)


def idle_against_busy(units: Sequence[Unit], *, seed: int = 0) -> Estimate:
    """Return the balanced accuracy of idle against anything else, units of busy sources weighing the same."""
    merged = [replace(unit, label="idle" if unit.label == "idle" else "busy") for unit in units]
    return over_sources(
        merged, lambda u: u.said_idle if u.label == "idle" else 1.0 - u.said_idle, ("idle", "busy"), seed=seed
    )


def with_recorded(data: Dataset, windows: Windows, chosen: Flags) -> Dataset:
    """Return `data` with the chosen windows of recordings added, each once under every profile it has more of.

    They are groups and kinds of their own, so that a split never puts one recording on both sides.
    """
    rows, labels, groups, kinds = [data.rows], [data.labels], [data.groups], [data.kinds.astype(np.str_)]
    first = int(data.groups.max(initial=0)) + 1
    real = windows.where(chosen)
    before: Array | None = None
    for profile in PROFILE_NAMES:
        masked = mask(real.rows, profile)
        differs = np.ones(real.size, dtype=bool) if before is None else np.isfinite(masked).sum(1) > before
        before = np.isfinite(masked).sum(1).astype(np.float64)
        keep = differs & ~real.idle[:, PROFILE_NAMES.index(profile)]
        rows.append(masked[keep])
        labels.append(real.labels[keep])
        groups.append(first + real.groups[keep])
        kinds.append(np.char.add("recorded/", real.families[keep]))
    columns: dict[str, Any] = {
        "rows": np.concatenate(rows),
        "labels": np.concatenate(labels),
        "groups": np.concatenate(groups),
        "kinds": np.concatenate(kinds),
    }
    added = columns["labels"].size - data.labels.size
    for one in fields(data):
        value = getattr(data, one.name)
        if one.name not in columns and isinstance(value, np.ndarray) and value.shape[:1] == data.labels.shape:
            columns[one.name] = np.concatenate([value, np.repeat(value[:1], added, axis=0)])
    return replace(data, **columns)


def columns_matrix(logs: Sequence[Log], profile_channels: frozenset[str]) -> NDArray[np.bool_]:
    """Return which channels of a profile each log holds, shape (logs, channels)."""
    names = sorted(profile_channels - {"samples"})
    return np.array([[name in log.channels for name in names] for log in logs], dtype=bool).reshape(-1, len(names))
