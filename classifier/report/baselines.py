"""Baselines on the same windows: published rules, round numbers, a package of others, and which columns a log has.

Each rule is written from its published description, which is named beside it; none of their code is used. A rule sees
the channels of one window as they were measured and answers a position in vocabulary.CLASSES, ABSTAINED, or, where it
names categories that are no classes, a category (`KEMPNER_CATEGORIES`), which `by_majority` turns into classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array, Series
from agent.vocabulary import CLASSES
from classifier.report.metrics import ABSTAINED, Labels

Window = Mapping[str, Series]
_TRAINING, _INFERENCE, _IDLE, _OTHER = (CLASSES.index(name) for name in ("training", "inference", "idle", "other"))
#: Mean utilisation up to which a rule that knows no idle is taken to say idle.
_IDLE_UTILIZATION: Final = 0.05
#: Lags of the autocorrelation of the three rules, in seconds, and its threshold.
_LAGS_S: Final = (0.2, 5.0)
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One rule: its name in tables, where it comes from and how its words are read."""

    name: str
    source: str
    answer: Callable[[Window], int]
    is_category: bool = False


def three_rules(window: Window) -> int:
    """Answer training where one of three holds; otherwise idle below 5 % utilisation, else inference.

    Mean power above 400 W; tensor over SM activity above 0.25; autocorrelation of NVLink traffic above 0.3 at a lag of
    0.2 to 5 s. The rules say training or not; what is not is read here in their favour. Abstains where none of the
    three is measured.
    """
    power, nvlink = _mean(window, "power_watts"), window.get("nvlink_transmit_bytes_per_second")
    tensor, sm = _mean(window, "tensor_active_ratio"), _mean(window, "sm_active_ratio")
    height = autocorrelation(nvlink) if nvlink is not None else None
    ratio = tensor / sm if tensor is not None and sm else None
    if power is None and ratio is None and height is None:
        return ABSTAINED
    if (power or 0.0) > 400.0 or (ratio or 0.0) > 0.25 or (height or 0.0) > 0.3:
        return _TRAINING
    return _IDLE if (_mean(window, "utilization_ratio") or 0.0) < _IDLE_UTILIZATION else _INFERENCE


def autocorrelation(series: Series) -> float | None:
    """Return the highest autocorrelation at 0.2 to 5 s; None with fewer than 10 samples or without any change."""
    if series.size < 10:
        return None
    spacing_s = float(np.median(np.diff(series.times)))
    times = np.arange(series.times[0], series.times[-1] + spacing_s / 2, spacing_s)
    values = np.interp(times, series.times, series.values)
    values = values - values.mean()
    power = float((values**2).sum())
    first, last = max(1, int(np.ceil(_LAGS_S[0] / spacing_s - 1e-9))), int(_LAGS_S[1] / spacing_s + 1e-9)
    last = min(last, values.size - 2)
    if not power > 0 or last < first:
        return None
    return max(float((values[:-lag] * values[lag:]).sum()) / power for lag in range(first, last + 1))


KEMPNER_CATEGORIES: Final = (
    "idle",
    "tensor-heavy compute",
    "tensor compute",
    "FP64 / HPC compute",
    "I/O or data-loading",
    "memory-bound",
    "compute-heavy",
    "compute-active",
    "memory-active",
    "busy, low SM use",
    "low utilization",
    "mixed / moderate",
)


def kempner_category(window: Window) -> int:
    """Return the first of KempnerPulse's twelve categories that fits, on means over the window.

    Abstains without SM, tensor and DRAM activity. Utilisation stands in for the activity of the graphics engine, as its
    own description allows, and memory utilisation for the share of copies; FP64 activity counts as 0 where it is not
    measured. The weights of its real utilisation are the default ones.
    """
    sm, tensor, dram = (_mean(window, f"{name}_active_ratio") for name in ("sm", "tensor", "dram"))
    if sm is None or tensor is None or dram is None:
        return ABSTAINED
    engine = _mean(window, "utilization_ratio")
    engine = sm if engine is None else engine
    fp64 = _mean(window, "fp64_active_ratio") or 0.0
    ways = (_mean(window, f"pcie_{way}_bytes_per_second") or 0.0 for way in ("receive", "transmit"))
    transfers = (_mean(window, "memory_utilization_ratio") or 0.0) >= 0.4 or max(ways) >= 1e9
    real = 0.35 * sm + 0.35 * tensor + 0.2 * dram + 0.1 * engine
    rules = (
        real < 0.05 and engine < 0.05 and dram < 0.05 and not transfers,
        tensor >= 0.5 and sm >= 0.6,
        tensor >= 0.15 and sm >= 0.4,
        fp64 >= 0.2 and sm >= 0.5,
        transfers and sm < 0.3,
        dram >= 0.5 and sm < 0.5,
        sm >= 0.8,
        sm >= 0.5,
        dram >= 0.4,
        engine >= 0.4 and sm < 0.25,
        engine < 0.15 and sm < 0.15 and dram < 0.15,
        True,
    )
    return rules.index(True)


def utilization_threshold(window: Window) -> int:
    """Answer by round numbers: training from 85 % mean utilisation on, inference below 40 %, idle below 5 %."""
    utilization = _mean(window, "utilization_ratio")
    if utilization is None or 0.4 <= utilization < 0.85:
        return ABSTAINED
    if utilization < _IDLE_UTILIZATION:
        return _IDLE
    return _TRAINING if utilization >= 0.85 else _INFERENCE


def workloadtruth_version() -> str | None:
    """Return the version of workloadtruth-cli; None where it is not installed."""
    try:
        return metadata.version("workloadtruth-cli")
    except metadata.PackageNotFoundError:
        return None


def workloadtruth(window: Window) -> int:
    """Return what the installed workloadtruth-cli answers to the window's samples, one a second at most.

    Abstains without utilisation, used memory and power, which it needs, and where it answers UNKNOWN.
    """
    from workloadtruth.classifier import classify
    from workloadtruth.types import TelemetrySample

    needed = [window.get(name) for name in ("utilization_ratio", "memory_used_bytes", "power_watts")]
    if any(series is None or series.size < 2 for series in needed):
        return ABSTAINED
    times = window["utilization_ratio"].times
    times = times[np.append(np.diff(np.floor(times)) > 0, True)]
    utilization, used, power = (np.interp(times, *series) for series in needed if series is not None)
    total = _mean(window, "memory_total_bytes") or 0.0
    samples: list[Any] = [
        TelemetrySample(
            timestamp=float(times[i]),
            gpu_index=0,
            gpu_utilization_pct=float(utilization[i]) * 100,
            memory_utilization_pct=0.0,
            memory_used_mib=float(used[i]) / _MIB,
            memory_total_mib=total / _MIB,
            power_draw_watts=float(power[i]),
            process_count=1,
        )
        for i in range(times.size)
    ]
    word = str(classify(samples).workload_type.value).lower()
    return CLASSES.index(word) if word in CLASSES else ABSTAINED


def baselines() -> tuple[Baseline, ...]:
    """Return the rules that can be asked here; workloadtruth-cli only where it is installed."""
    found = [
        Baseline(
            name="utilisation threshold",
            source="the usual round numbers: training 85 to 95 %, inference below 40 %",
            answer=utilization_threshold,
        ),
        Baseline(
            name="three rules",
            source="github.com/atharvanihalani/gpu-telemetry-exploration",
            answer=three_rules,
        ),
        Baseline(
            name="KempnerPulse categories",
            source="github.com/KempnerInstitute/kempnerpulse, docs/classification.md",
            answer=kempner_category,
            is_category=True,
        ),
    ]
    version = workloadtruth_version()
    if version is not None:
        found.append(
            Baseline(
                name=f"workloadtruth-cli {version}",
                source="pypi.org/project/workloadtruth-cli, Apache-2.0",
                answer=workloadtruth,
            )
        )
    return tuple(found)


def by_majority(categories: Labels, labels: Labels, chosen: NDArray[np.bool_]) -> Mapping[int, int]:
    """Return the class of each category: the one with the largest share of its own windows there, among `chosen`."""
    shares: dict[int, dict[int, float]] = {}
    for position in range(len(CLASSES)):
        mine = chosen & (labels == position)
        for category in np.unique(categories[mine]):
            shares.setdefault(int(category), {})[position] = float((categories[mine] == category).mean())
    best = {category: max(share, key=share.__getitem__) for category, share in shares.items()}
    return {**best, ABSTAINED: ABSTAINED}


def named_classes(categories: Labels, classes: Mapping[int, int]) -> Labels:
    """Return `categories` as classes; one that was never seen abstains."""
    return np.array([classes.get(int(category), ABSTAINED) for category in categories], dtype=np.int64)


def availability(patterns: NDArray[np.bool_], labels: Sequence[str], sources: Sequence[str]) -> list[str | None]:
    """Return for each log the label that its columns alone suggest, learnt from the logs of other sources.

    `patterns` says which columns each log has, shape (logs, columns). Logs of the other sources that have the most
    alike columns vote, each source with one vote; None where the vote is a tie.
    """
    answers: list[str | None] = []
    names = np.array(sources)
    for position, pattern in enumerate(patterns):
        others = np.flatnonzero(names != names[position])
        distance = (patterns[others] != pattern).sum(axis=1)
        votes: dict[str, float] = {}
        nearest = others[distance == distance.min()] if others.size else others
        for source in np.unique(names[nearest]):
            mine = [labels[i] for i in nearest.tolist() if names[i] == source]
            for label in mine:
                votes[label] = votes.get(label, 0.0) + 1.0 / len(mine)
        best = [label for label, vote in votes.items() if vote > max(votes.values()) - 1e-9]
        answers.append(best[0] if len(best) == 1 else None)
    return answers


def shuffled_range(
    said: Array, labels: Sequence[str], *, draws: int = 1000, seed: int = 0
) -> tuple[float, float] | None:
    """Return the range (2.5 to 97.5 %) of the class-balanced share right when the labels of sources are shuffled.

    `said` holds per source the share of its answers that are each of the labels in `sorted(set(labels))`, shape
    (sources, labels). None with fewer than two labels.
    """
    names = sorted(set(labels))
    if len(names) < 2:
        return None
    position = np.array([names.index(label) for label in labels])
    rng = np.random.default_rng([seed, 12])
    found = []
    for _ in range(draws):
        drawn = rng.permutation(position)
        right = said[np.arange(drawn.size), drawn]
        found.append(float(np.mean([right[drawn == one].mean() for one in range(len(names))])))
    return float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975))


def _mean(window: Window, channel: str) -> float | None:
    series = window.get(channel)
    # Rounded, so that sixty times 0.4 is 0.4 where a threshold lies there.
    return round(float(series.values.mean()), 9) if series is not None and series.size else None
