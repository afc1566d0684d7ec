"""Everything the report measures, in one order and from one seed: `run` gives `Results`, which the tables read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from classifier.evaluation_report import EvaluationReport
from classifier.model import BUNDLED, Model, load
from classifier.profiles import PROFILE_NAMES, PROFILES
from classifier.report.answers import Answers, answer
from classifier.report.baselines import Baseline, availability, baselines
from classifier.report.metrics import Labels
from classifier.report.playback import Track, play
from classifier.report.recorded import Log, Opened, columns_matrix, read_windows, with_recorded
from classifier.report.simulated import (
    Fold,
    class_of_families,
    deal,
    held_out_answers,
    simulated_run,
    simulated_windows,
    subset,
    train_without,
    unknown_families,
)
from classifier.report.speed import Speed, measure_speed
from classifier.report.steady import Steady, steady_phases
from classifier.report.windows import Windows
from classifier.simulator import available_kinds
from classifier.training import TrainingConfig
from classifier.training_data import Dataset, DatasetConfig, simulate_dataset
from classifier.training_rivals import Rival, fit_rivals

Say = Callable[[str], None]
Replayed = Callable[[Path], EvaluationReport]
_MIXED: Final = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """How much to measure; the defaults are those of docs/model.md, `quick` those of the tests."""

    seed: int = 7
    training_scenarios: int = 2500
    folds: int = 8
    #: Windows of the simulated training that the models of the real sources are fitted on, too.
    recorded_training_windows: int = 5000
    scenarios_per_family: int = 12
    #: Runs of each family that are played through the labeller, under each profile.
    runs_per_family: int = 1
    #: One family in so many is played.
    played_stride: int = 2
    duration_s: tuple[float, float] = (600.0, 1200.0)
    run_duration_s: tuple[float, float] = (600.0, 900.0)
    rival_windows: int = 6000
    rival_trees: int = 100
    windows_per_gpu: int = 8
    gpus_per_recording: int = 4
    files_per_source: int | None = None
    #: Recordings with profiling columns whose steady phases are played; None for all.
    steady_recordings: int | None = None
    #: Sources that are left out in turn; None for all.
    sources_left_out: int | None = None
    #: One fit where the shipped model averages two, and two parts of families to calibrate on where it has four: what
    #: is held out is asked of one model in `folds`, and all have to be fitted within a quarter of an hour.
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(members=1, family_folds=2))


#: Small enough for a test, and every table has something in it.
QUICK: Final = ReportConfig(
    training_scenarios=220,
    folds=2,
    recorded_training_windows=600,
    scenarios_per_family=2,
    runs_per_family=1,
    played_stride=5,
    duration_s=(420.0, 480.0),
    run_duration_s=(240.0, 300.0),
    rival_windows=600,
    rival_trees=20,
    windows_per_gpu=2,
    gpus_per_recording=1,
    files_per_source=1,
    steady_recordings=1,
    sources_left_out=2,
    training=TrainingConfig(members=1, family_folds=2, max_iter=4, max_leaf_nodes=8, max_bins=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Answers to windows of simulated families that the answering model never saw."""

    windows: Windows
    waited: int
    classes: dict[str, str]  # of the families
    folds: tuple[tuple[str, ...], ...]
    answers: dict[str, Answers]  # by profile
    rivals: dict[str, dict[str, Answers]]  # by name and profile
    tracks: dict[str, list[Track]]  # by profile
    gaps: list[Track]  # decisions of runs with a gap, profile N
    gap_s: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A model that knows none of some families, asked about these and about the others, under profile N."""

    families: tuple[str, ...]
    answers: Answers  # to all windows of Simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Answers to windows of real sources."""

    windows: Windows
    logs: tuple[Log, ...]
    without_source: dict[str, Answers]  # by profile: trained on simulated data and the other sources
    left_out: tuple[str, ...]  # sources that were left out in turn
    shipped: dict[str, Answers]  # by profile: the shipped model
    rivals: dict[str, dict[str, Answers]]  # by name and profile, trained on simulated data
    availability: dict[str, list[str | None]]  # by profile, of each log
    steady: tuple[Steady, ...]
    replayed: EvaluationReport | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Results:
    """All that was measured; compared by identity, so that figures made of it can be kept."""

    config: ReportConfig
    model: Model
    baselines: tuple[Baseline, ...]
    training: dict[str, int]  # windows of the simulated training by family
    simulated: Simulated
    unknown: Unknown
    recorded: Recorded | None
    speed: Speed


def run(
    config: ReportConfig,
    *,
    bundle: Path | None = None,
    traces: Path | None = None,
    opened: Opened | None = None,
    replayed: Replayed | None = None,
    say: Say = lambda _: None,
    warn: Say = lambda _: None,
) -> Results:
    """Measure everything. `say` is told each step (`steps_of` counts them), `warn` what was left out.

    `traces` is a folder with INDEX.csv and `opened` opens a recording in it; without them nothing real is measured.
    """
    model = load(bundle or BUNDLED)
    rules = baselines()
    say("simulating the training data")
    data = simulate_dataset(DatasetConfig(scenarios=config.training_scenarios), config.seed, lambda _: None)
    kinds = tuple(kind for kind in available_kinds() if _MIXED not in kind)
    with tempfile.TemporaryDirectory() as folder:
        simulated, unknown = _simulated(config, data, kinds=kinds, rules=rules, folder=Path(folder), say=say)
        recorded = None
        if traces is not None and opened is not None:
            recorded = _recorded(
                config, data, model,
                rules=rules, traces=traces, opened=opened, replayed=replayed, folder=Path(folder), say=say, warn=warn,
            )  # fmt: skip
    say("measuring the speed")
    return Results(
        config=config,
        model=model,
        baselines=rules,
        training={str(kind): int((data.kinds == kind).sum()) for kind in np.unique(data.kinds)},
        simulated=simulated,
        unknown=unknown,
        recorded=recorded,
        speed=measure_speed(bundle or BUNDLED),
    )


def steps_of(config: ReportConfig, sources: int, recordings: int) -> int:
    """Return how often `run` will call `say`, for a progress bar."""
    kinds = [kind for kind in available_kinds() if _MIXED not in kind]
    steps = 2 + len(kinds) * config.scenarios_per_family + len(_played(config, kinds)) * config.runs_per_family
    steps += 2 * config.folds + 1
    if recordings:
        left_out = sources if config.sources_left_out is None else min(sources, config.sources_left_out)
        steps += 2 * recordings + left_out + 3
    return steps


def _simulated(
    config: ReportConfig,
    data: Dataset,
    *,
    kinds: Sequence[str],
    rules: Sequence[Baseline],
    folder: Path,
    say: Say,
) -> tuple[Simulated, Unknown]:
    windows, waited = simulated_windows(
        kinds, rules, scenarios=config.scenarios_per_family, duration_s=config.duration_s, seed=config.seed, advance=say
    )
    classes = class_of_families(
        np.concatenate([data.labels, windows.labels]), np.concatenate([data.kinds.astype(np.str_), windows.families])
    )
    folds: list[Fold] = []
    rivals: list[tuple[Rival, ...]] = []
    for number, held_out in enumerate(deal(classes, config.folds, config.seed)):
        say(f"training without {', '.join(held_out)}")
        folds.append(train_without(data, held_out, config.training, folder / f"fold{number}"))
        say(f"training rivals without {', '.join(held_out)}")
        kept = subset(data, ~np.isin(data.kinds, np.array(held_out, dtype=np.str_)))
        rivals.append(fit_rivals(kept, seed=config.seed, rows=config.rival_windows, trees=config.rival_trees))
    strange = unknown_families(classes)
    say("training without the unknown families")
    ignorant = train_without(data, strange, config.training, folder / "unknown")
    tracks, gaps, gap_s = _tracks(config, kinds, folds, say)
    held_out_families = [fold.held_out for fold in folds]
    return (
        Simulated(
            windows=windows,
            waited=waited,
            classes=classes,
            folds=tuple(held_out_families),
            answers={name: held_out_answers(_asked(folds), windows, name) for name in PROFILE_NAMES},
            rivals={
                rivals[0][position].name: {
                    name: held_out_answers(
                        [(fold.held_out, mine[position]) for fold, mine in zip(folds, rivals, strict=True)],
                        windows,
                        name,
                    )
                    for name in PROFILE_NAMES
                }
                for position in range(len(rivals[0]))
            },
            tracks=tracks,
            gaps=gaps,
            gap_s=gap_s,
        ),
        Unknown(families=strange, answers=answer(ignorant.model, windows, "N")),
    )


def _asked(folds: Sequence[Fold]) -> list[tuple[tuple[str, ...], Model]]:
    return [(fold.held_out, fold.model) for fold in folds]


def _tracks(
    config: ReportConfig, kinds: Sequence[str], folds: Sequence[Fold], say: Say
) -> tuple[dict[str, list[Track]], list[Track], tuple[float, float]]:
    """Return the decisions of whole runs by profile, those around a gap, and where the gap was."""
    tracks: dict[str, list[Track]] = {name: [] for name in PROFILE_NAMES}
    gaps: list[Track] = []
    middle = config.run_duration_s[0] / 2
    gap_s = (middle, middle + 60.0)
    played = _played(config, kinds)
    for number in range(config.runs_per_family * len(played)):
        rng = np.random.default_rng([config.seed, 23, number])
        kind = played[number % len(played)]
        say(f"playing {kind}")
        simulated = simulated_run(rng, kind, config.run_duration_s, gpus=2)
        model = next((fold.model for fold in folds if kind in fold.held_out), folds[0].model)
        for name in PROFILE_NAMES:
            tracks[name] += play(model, simulated, name, group=number)
        if number < len(played):
            gaps += play(model, simulated, "N", group=number, gap=gap_s)
    return tracks, gaps, gap_s


def _played(config: ReportConfig, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the families that are played: idle ones always, which must not be called training."""
    return tuple(
        kind for place, kind in enumerate(kinds) if place % config.played_stride == 0 or kind in ("idle", "loaded_idle")
    )


def _recorded(
    config: ReportConfig, data: Dataset, model: Model, *, rules: Sequence[Baseline], traces: Path, opened: Opened,
    replayed: Replayed | None, folder: Path, say: Say, warn: Say,
) -> Recorded:  # fmt: skip
    windows, logs = read_windows(
        traces, opened, rules,
        per_gpu=config.windows_per_gpu, gpus=config.gpus_per_recording, files_per_source=config.files_per_source,
        advance=say, warn=warn,
    )  # fmt: skip
    rng = np.random.default_rng([config.seed, 24])
    some = np.zeros(data.labels.size, dtype=bool)
    some[rng.permutation(data.labels.size)[: config.recorded_training_windows]] = True
    base = subset(data, some)
    sources = [str(source) for source in np.unique(windows.families)]
    left_out = tuple(sources[: config.sources_left_out])
    folds: list[tuple[tuple[str, ...], Model]] = []
    for source in left_out:
        say(f"training without source {source}")
        with_others = with_recorded(base, windows, windows.families != source)
        folds.append(((source,), train_without(with_others, (), config.training, folder / f"source_{source}").model))
    asked = np.isin(windows.families, np.array(left_out, dtype=np.str_))
    say("training rivals on simulated data")
    rivals = fit_rivals(data, seed=config.seed, rows=config.rival_windows, trees=config.rival_trees)
    say("playing the steady phases of recordings with profiling")
    profiled = [log for log in logs if "sm_active_ratio" in log.channels][: config.steady_recordings]
    steady = steady_phases(model, profiled, opened)
    say("replaying the recordings")
    labels = [log.recording.label for log in logs]
    names = [log.recording.source for log in logs]
    return Recorded(
        windows=windows,
        logs=tuple(logs),
        without_source={name: held_out_answers(folds, windows.where(asked), name) for name in PROFILE_NAMES},
        left_out=left_out,
        shipped={name: answer(model, windows, name) for name in PROFILE_NAMES},
        rivals={rival.name: {name: answer(rival, windows, name) for name in PROFILE_NAMES} for rival in rivals},
        availability={
            name: availability(columns_matrix(logs, PROFILES[name]), labels, names) for name in PROFILE_NAMES
        },
        steady=tuple(steady),
        replayed=replayed(traces) if replayed is not None else None,
    )


def asked_of(recorded: Recorded) -> Windows:
    """Return the windows of the sources that were left out in turn: those `without_source` answers."""
    windows = recorded.windows
    return windows.where(np.isin(windows.families, np.array(recorded.left_out, dtype=np.str_)))


def baseline_answers(windows: Windows, position: int, profile: str) -> Labels:
    """Return what the baseline at `position` answers to `windows` under `profile`."""
    return np.asarray(windows.answers[:, PROFILE_NAMES.index(profile), position], dtype=np.int64)
