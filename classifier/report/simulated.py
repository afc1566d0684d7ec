"""Simulated families held out: models that never saw a family are asked about its windows, under every profile.

Families are the simulator's kinds. They are dealt into folds within their class, so that a fold takes one or more
families of every class that has at least two; a class with one family cannot be held out whole, and its windows are of
scenarios the model never saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.vocabulary import CLASSES
from classifier.model import Model, load
from classifier.report.answers import Answers, Predictor, answer
from classifier.report.baselines import Baseline
from classifier.report.windows import Windows, WindowsBuilder, add_run
from classifier.simulator import SimulatedRun, random_scenario, simulate_arrays
from classifier.training import TrainingConfig, train_on
from classifier.training_data import Dataset

#: The recorder style that leaves nothing out.
RECORDER: Final = "agent_capable"
Advance = Callable[[str], None]
#: Families that a model may not know: parts of their names. They are held out together.
UNKNOWN_WORDS: Final = (
    "mining", "graphic", "video", "game", "render", "ray", "hpc", "dynamics", "algebra", "seismic", "lattice",
    "genomics",
)  # fmt: skip
#: Families that are another with a fault in it: held out with it, or the model would have seen it after all.
VARIANTS: Final[Mapping[str, str]] = {
    "stalled_all_reduce": "data_parallel_training",
    "rank0_checkpoint": "data_parallel_training",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One model, the families it never saw, and where it is."""

    held_out: tuple[str, ...]
    model: Model


def simulated_windows(
    kinds: Sequence[str],
    baselines: Sequence[Baseline],
    *,
    scenarios: int,
    duration_s: tuple[float, float],
    seed: int,
    advance: Advance,
) -> tuple[Windows, int]:
    """Return windows of `scenarios` runs of each of `kinds`, and how many were left out because the job waited.

    The scenarios are others than those of any training: their seeds are apart. They are recorded by an agent that sees
    all that the board offers, once a second.
    """
    builder, waited = WindowsBuilder(baselines), 0
    neighbour: SimulatedRun | None = None
    for number in range(scenarios * len(kinds)):
        rng = np.random.default_rng([seed, 21, number])
        kind = kinds[number % len(kinds)]
        run = simulated_run(rng, kind, duration_s)
        shared = neighbour if rng.random() < 0.4 else None
        neighbour = run
        waited += add_run(builder, run, rng, group=number, gpus=2, moments=2, neighbour=shared)
        advance(f"simulated {kind}")
    return builder.build(), waited


def simulated_run(
    rng: np.random.Generator, kind: str, duration_s: tuple[float, float], *, gpus: int = 8
) -> SimulatedRun:
    """Return a random run of `kind` with all channels its board offers, once a second, on `gpus` GPUs at most."""
    drawn = random_scenario(rng, kind, duration_s=duration_s)
    scenario = replace(drawn, recorder=RECORDER, interval_s=1.0, gpu_count=min(drawn.gpu_count, gpus))
    return simulate_arrays(scenario, seed=int(rng.integers(2**31)))


def class_of_families(labels: NDArray[np.int64], families: NDArray[np.str_]) -> dict[str, str]:
    """Return the commonest class of the windows of each family."""
    return {
        str(family): CLASSES[int(np.bincount(labels[families == family]).argmax())] for family in np.unique(families)
    }


def deal(classes: Mapping[str, str], folds: int, seed: int) -> list[tuple[str, ...]]:
    """Return the families of each fold: within every class shuffled and dealt in turn; a lone family is in none.

    Variants of a family (VARIANTS) go where it goes.
    """
    rng = np.random.default_rng([seed, 22])
    dealt: list[list[str]] = [[] for _ in range(folds)]
    for name in CLASSES:
        variants: dict[str, list[str]] = {}
        for family in sorted(family for family, workload in classes.items() if workload == name):
            variants.setdefault(VARIANTS.get(family, family), []).append(family)
        if len(variants) < 2:
            continue
        # No fold takes all of a class: with fewer families than folds some folds hold none of it.
        for position, base in enumerate(rng.permutation(sorted(variants)).tolist()):
            dealt[position % folds] += variants[base]
    return [tuple(sorted(fold)) for fold in dealt if fold]


def subset(data: Dataset, chosen: NDArray[np.bool_]) -> Dataset:
    """Return the chosen windows of `data`, whatever columns it has."""
    columns: dict[str, Any] = {}
    for one in fields(data):
        value = getattr(data, one.name)
        if isinstance(value, np.ndarray) and value.shape[:1] == chosen.shape:
            columns[one.name] = value[chosen]
    return replace(data, **columns)


def train_without(data: Dataset, held_out: Sequence[str], config: TrainingConfig, folder: Path) -> Fold:
    """Return a model trained on `data` without the families `held_out`, by the same code as the shipped one."""
    kept = ~np.isin(data.kinds, np.array(held_out, dtype=np.str_))
    train_on(config, subset(data, kept), folder)
    return Fold(held_out=tuple(held_out), model=load(folder))


def held_out_answers(models: Sequence[tuple[tuple[str, ...], Predictor]], windows: Windows, profile: str) -> Answers:
    """Return answers to `windows`, each by the model that never saw its family: `models` names what each never saw.

    A family that was never held out is answered by the first model, which never saw its scenarios.
    """
    chosen = np.zeros(windows.size, dtype=np.int64)
    for position, (held_out, _) in enumerate(models):
        chosen[np.isin(windows.families, np.array(held_out, dtype=np.str_))] = position
    probabilities = np.zeros((windows.size, len(CLASSES)))
    decided = np.zeros(windows.size, dtype=bool)
    for position, (_, model) in enumerate(models):
        mine = chosen == position
        found = answer(model, windows.where(mine), profile)
        probabilities[mine], decided[mine] = found.probabilities, found.decided
    return Answers(probabilities=probabilities, decided=decided)


def unknown_families(classes: Mapping[str, str]) -> tuple[str, ...]:
    """Return the families of `other` to hold out together; all but one where otherwise none would be left to train."""
    other = sorted(family for family, workload in classes.items() if workload == "other")
    named = tuple(family for family in other if any(word in family for word in UNKNOWN_WORDS))
    return named if len(named) < len(other) else named[:-1]
