"""Figures read from the results: what the tables, the bars and the plots share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.declared import DeclaredConfig, combine
from classifier.features import FEATURE_NAMES
from classifier.profiles import PROFILE_NAMES, mask, profile_of
from classifier.report.answers import Answers
from classifier.report.baselines import by_majority, named_classes, shuffled_range
from classifier.report.experiment import Results, asked_of, baseline_answers
from classifier.report.metrics import (
    ABSTAINED,
    Estimate,
    Flags,
    Labels,
    area_under_risk,
    balanced_accuracy,
    bootstrap,
    calibration_error,
    macro_f1,
)
from classifier.report.playback import called
from classifier.report.recorded import Unit, forced_busy, over_sources, units_of
from classifier.report.windows import Windows

#: Name of this program's model in tables.
OURS: Final = "warpwatch"
RELIABILITY: Final = 0.95
_TRAINING, _IDLE, _OTHER = CLASSES.index("training"), CLASSES.index("idle"), CLASSES.index("other")
_BUSY: Final = tuple(CLASSES.index(name) for name in ("training", "inference", "other"))


def usable(results: Results, profile: str, span_s: float) -> Flags:
    """Return the simulated windows that `profile` is judged on: its length, and for G and N boards with profiling."""
    windows = results.simulated.windows
    chosen: Flags = (windows.spans_s == span_s) & offered(windows, profile)
    return chosen


def offered(windows: Windows, profile: str) -> Flags:
    """Return the windows whose machine offers what `profile` stands for: profiling ratios for G and N."""
    if profile not in ("G", "N"):
        return np.ones(windows.size, dtype=bool)
    columns = [position for position, name in enumerate(FEATURE_NAMES) if name.startswith("sm__")]
    return np.asarray(np.isfinite(windows.rows[:, columns]).any(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFigures:
    """Figures of one method under one profile and length of evidence."""

    windows: int
    balanced: Estimate  # at full coverage, or of all windows with abstentions wrong
    balanced_without_other: Estimate  # over training, inference and idle: windows of these, `other` a wrong answer
    macro_f1: Estimate
    coverage: float
    balanced_said: Estimate  # of what is said
    training_against_rest: float | None
    calibration: Estimate | None = None
    risk_area: float | None = None


def simulated_methods(results: Results) -> dict[str, dict[str, Answers]]:
    """Return the answers of this model (first) and of its rivals, by name and profile."""
    return {OURS: results.simulated.answers, **results.simulated.rivals}


@cache
def simulated_figures(results: Results, profile: str, span_s: float, method: str = OURS) -> SimulatedFigures:
    """Return the figures of a model on held-out families, intervals over families."""
    chosen = usable(results, profile, span_s)
    mine = simulated_methods(results)[method][profile].where(chosen)
    labels, confidence = results.simulated.windows.labels[chosen], mine.confidence
    right = mine.forced == labels
    return replace(
        _figures(results, chosen, mine.forced, mine.said),
        calibration=_over(results, chosen, lambda w: calibration_error(confidence, right, w)),
        risk_area=area_under_risk(confidence, right),
    )


@cache
def rule_figures(results: Results, profile: str, span_s: float, position: int) -> SimulatedFigures:
    """Return the figures of the baseline at `position`; where it abstains it is wrong."""
    chosen = usable(results, profile, span_s)
    said = rule_said(results, profile, position)[chosen]
    return _figures(results, chosen, said, said)


def _figures(results: Results, chosen: Flags, forced: Labels, said: Labels) -> SimulatedFigures:
    labels = results.simulated.windows.labels[chosen]
    return SimulatedFigures(
        windows=labels.size,
        balanced=_over(results, chosen, lambda w: balanced_accuracy(labels, forced, w)),
        balanced_without_other=_over(
            results, chosen, lambda w: balanced_accuracy(labels, forced, np.where(labels == _OTHER, 0.0, w))
        ),
        macro_f1=_over(results, chosen, lambda w: macro_f1(labels, forced, w)),
        coverage=_share(said != ABSTAINED),
        balanced_said=_over(results, chosen, lambda w: _of_said(labels, said, w)),
        training_against_rest=training_against_rest(labels, forced),
    )


def _over(results: Results, chosen: Flags, statistic: Callable[[Array], float | None]) -> Estimate:
    """Return `statistic` over the chosen windows with an interval over families, as many of each class drawn."""
    families = results.simulated.windows.families[chosen]
    classes = results.simulated.classes
    strata = np.array([CLASSES.index(classes[str(family)]) for family in families], dtype=np.int64)
    if not families.size:
        return Estimate(None)
    return bootstrap(families, statistic, strata=strata, draws=300, seed=results.config.seed)


def rule_said(results: Results, profile: str, position: int) -> Labels:
    """Return what a baseline says of the simulated windows; categories mean what they mean in the other folds."""
    windows = results.simulated.windows
    answers = baseline_answers(windows, position, profile)
    if not results.baselines[position].is_category:
        return answers
    said = np.full(windows.size, ABSTAINED, dtype=np.int64)
    fold = np.zeros(windows.size, dtype=np.int64)
    for number, held_out in enumerate(results.simulated.folds):
        fold[np.isin(windows.families, np.array(held_out, dtype=np.str_))] = number
    for number in range(len(results.simulated.folds)):
        mine = fold == number
        said[mine] = named_classes(answers, by_majority(answers, windows.labels, ~mine))[mine]
    return said


def _of_said(labels: Labels, said: Labels, weights: Array) -> float | None:
    kept = said != ABSTAINED
    return balanced_accuracy(labels[kept], said[kept], weights[kept]) if kept.any() else None


def training_against_rest(labels: Labels, said: Labels) -> float | None:
    """Return the balanced accuracy of training against anything else; an abstention is not training."""
    truth = (labels == _TRAINING).astype(np.int64)
    return balanced_accuracy(truth, (said == _TRAINING).astype(np.int64)) if labels.size else None


def worst_families(results: Results, profile: str, span_s: float = 60.0, count: int = 4) -> str:
    """Return the families that are most often taken for another class, and for which, as text."""
    chosen = usable(results, profile, span_s)
    windows, forced = results.simulated.windows, results.simulated.answers[profile].forced
    found: list[tuple[float, str]] = []
    for family in np.unique(windows.families[chosen]):
        mine = chosen & (windows.families == family)
        wrong = mine & (forced != windows.labels)
        share = float(wrong.sum() / mine.sum())
        if share > 0:
            commonest = CLASSES[int(np.bincount(forced[wrong], minlength=len(CLASSES)).argmax())]
            found.append((share, f"{family} ({share:.2f} wrong, mostly {commonest})"))
    return ", ".join(text for _, text in sorted(found, reverse=True)[:count])


def _share(flags: Flags) -> float:
    return float(flags.mean()) if flags.size else 0.0


def declared_accuracy(windows: Windows, answers: Answers, *, seed: int, draws: int = 20) -> Estimate:
    """Return the balanced accuracy at full coverage with a declaration of 95 % reliability for every busy job.

    A job is a scenario or recording and has one declaration: its class with 95 %, else another busy class; mean and
    range (2.5 to 97.5 %) over `draws`. The weighing is the labeller's own.
    """
    if not windows.size:
        return Estimate(None)
    config = DeclaredConfig()
    combined = np.zeros((len(_BUSY), windows.size), dtype=np.int64)
    for position, declared in enumerate(_BUSY):
        combined[position] = [int(combine(config, row, CLASSES[declared]).argmax()) for row in answers.probabilities]
    groups, member = np.unique(windows.groups, return_inverse=True)
    rng = np.random.default_rng([seed, 25])
    found = []
    for _ in range(draws):
        is_right = (rng.random(groups.size) < RELIABILITY)[member]
        shift = rng.integers(1, len(_BUSY), groups.size)[member]
        truth = np.array([_BUSY.index(label) if label in _BUSY else -1 for label in windows.labels])
        word = np.where(is_right, truth, (truth + shift) % len(_BUSY))
        said = np.where(truth < 0, answers.forced, combined[word, np.arange(windows.size)])
        accuracy = balanced_accuracy(windows.labels, said)
        if accuracy is not None:
            found.append(accuracy)
    return Estimate(float(np.mean(found)), float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975)))


@cache
def declared_of_profile(results: Results, profile: str, span_s: float = 60.0) -> Estimate:
    """Return `declared_accuracy` on the simulated windows of held-out families."""
    chosen = usable(results, profile, span_s)
    answers = results.simulated.answers[profile].where(chosen)
    return declared_accuracy(results.simulated.windows.where(chosen), answers, seed=results.config.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealFigures:
    """Figures of one method on real sources, each weighing the same; windows of training and inference, and of idle."""

    coverage: Estimate
    recall: Estimate
    answered: Estimate  # share of windows with a class said that is not idle
    right: Estimate  # class-balanced share right of these
    forced: Estimate | None  # class-balanced share right were training or inference to be said
    shuffled: tuple[float, float] | None  # of `right`, labels of sources shuffled
    units: tuple[Unit, ...]


def real_windows(windows: Windows, profile: str, span_s: float) -> Flags:
    """Return the real windows that `profile` is judged on: with power for P, with profiling ratios for G and N."""
    chosen: Flags = (windows.spans_s == span_s) & offered(windows, profile)
    if profile == "P":
        chosen &= profile_of(mask(windows.rows, "P")) >= PROFILE_NAMES.index("P")
    return chosen


def real_figures(windows: Windows, said: Labels, forced: Labels | None, *, seed: int) -> RealFigures:
    """Return the figures of answers to `windows`."""
    units = units_of(windows, said, forced)
    busy = [unit for unit in units if unit.label in ("training", "inference")]
    answering = [unit for unit in busy if unit.right_of_classed is not None]
    shares = np.array([unit.shares[::-1] for unit in answering]).reshape(-1, 2)  # sorted: inference, training
    return RealFigures(
        coverage=over_sources(busy, lambda u: u.coverage, seed=seed),
        recall=over_sources(busy, lambda u: u.recall, seed=seed),
        answered=over_sources(busy, lambda u: u.classed, seed=seed),
        right=over_sources(busy, lambda u: u.right_of_classed, seed=seed),
        forced=None if forced is None else over_sources(busy, lambda u: u.forced, seed=seed),
        shuffled=shuffled_range(shares, [unit.label for unit in answering], seed=seed),
        units=tuple(units),
    )


@cache
def real_methods(results: Results, profile: str, span_s: float) -> list[tuple[str, RealFigures]]:
    """Return all methods on real windows: each source left out, the shipped model, its rivals, the baselines."""
    recorded = results.recorded
    if recorded is None:
        return []
    seed = results.config.seed
    found: list[tuple[str, RealFigures]] = []

    def add(name: str, windows: Windows, answers: Answers) -> None:
        chosen = real_windows(windows, profile, span_s)
        if chosen.any():
            both = forced_busy(answers)[chosen]
            found.append((name, real_figures(windows.where(chosen), answers.said[chosen], both, seed=seed)))

    add("each source left out", asked_of(recorded), recorded.without_source[profile])
    add("shipped model", recorded.windows, recorded.shipped[profile])
    for name, answers in recorded.rivals.items():
        add(f"{name}, simulated only", recorded.windows, answers[profile])
    chosen = real_windows(recorded.windows, profile, span_s)
    windows = recorded.windows.where(chosen)
    for position, baseline in enumerate(results.baselines):
        said = baseline_answers(windows, position, profile)
        if baseline.is_category:
            simulated = results.simulated.windows
            theirs = baseline_answers(simulated, position, profile)
            said = named_classes(said, by_majority(theirs, simulated.labels, np.ones(simulated.size, dtype=bool)))
        if windows.size:
            found.append((baseline.name, real_figures(windows, said, None, seed=seed)))
    return found


def availability_right(results: Results, profile: str, sources: Sequence[str]) -> Estimate:
    """Return the class-balanced share of sources that their columns alone give away; a tie counts half."""
    recorded = results.recorded
    if recorded is None:
        return Estimate(None)
    rows: dict[tuple[str, str], list[float]] = {}
    for log, said in zip(recorded.logs, recorded.availability[profile], strict=True):
        recording = log.recording
        if recording.label in ("training", "inference") and recording.source in sources:
            right = 0.5 if said is None else float(said == recording.label)
            rows.setdefault((recording.source, recording.label), []).append(right)
    if {label for _, label in rows} != {"training", "inference"}:
        return Estimate(None)
    values = np.array([float(np.mean(right)) for right in rows.values()])
    names = np.array([label for _, label in rows])

    def statistic(weights: Array) -> float | None:
        means = [np.average(values[names == one], weights=weights[names == one]) for one in np.unique(names)]
        return float(np.mean(means))

    clusters = np.array([f"{source}/{label}" for source, label in rows])
    return bootstrap(clusters, statistic, strata=names, seed=results.config.seed)


def never_training(results: Results) -> list[tuple[str, int, int]]:
    """Return, per situation in which training must not be said, how often it was and how many decisions there were."""
    simulated = results.simulated
    found: list[tuple[str, int, int]] = []
    for family, name in (("idle", "empty GPU, simulated"), ("loaded_idle", "loaded GPU without work, simulated")):
        tracks = [track for mine in simulated.tracks.values() for track in mine if track.family == family]
        found.append((name, *called(tracks, "training")))
    # In a gap of 60 s nothing is measured after the third missed second.
    start_s, end_s = simulated.gap_s[0] + 5.0, simulated.gap_s[1]
    words = [
        word
        for track in simulated.gaps
        for time_s, word in zip(track.times, track.words, strict=True)
        if start_s <= time_s < end_s
    ]
    found.append(("gap in the samples, simulated", sum(word == "training" for word in words), len(words)))
    recorded = results.recorded
    if recorded is not None and recorded.replayed is not None:
        idle = recorded.replayed.micro("idle")
        found.append(("unused or loaded GPU, real", idle.decisions.get("training", 0), idle.total))
    return found


def unknown_figures(results: Results) -> tuple[list[tuple[str, int, float, float]], float, float]:
    """Return how families that the model never saw are answered, and how the ones it knows.

    A row per family: windows, share called training, share with any answer; then the share of all of them called
    training, families weighing the same, and the coverage on windows of known busy families.
    """
    windows, answers = results.simulated.windows, results.unknown.answers
    chosen, said = usable(results, "N", 60.0), answers.said
    rows: list[tuple[str, int, float, float]] = []
    for family in results.unknown.families:
        mine = chosen & (windows.families == family)
        if mine.any():
            rows.append((family, int(mine.sum()), _share(said[mine] == _TRAINING), _share(said[mine] != ABSTAINED)))
    known = chosen & np.isin(windows.labels, _BUSY)
    known &= ~np.isin(windows.families, np.array(results.unknown.families, dtype=np.str_))
    overall = float(np.mean([row[2] for row in rows])) if rows else 0.0
    return rows, overall, _share(said[known] != ABSTAINED)
