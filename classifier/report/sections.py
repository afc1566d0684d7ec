"""The sections of the report: text and tables made of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agent.vocabulary import CLASSES, WORKLOADS
from classifier.profiles import PROFILE_NAMES
from classifier.report.answers import Answers
from classifier.report.bars import all_bars
from classifier.report.baselines import workloadtruth_version
from classifier.report.document import Block, Code, Figure, Heading, Table, Text
from classifier.report.experiment import Results
from classifier.report.figures import (
    SimulatedFigures,
    declared_of_profile,
    never_training,
    rule_figures,
    simulated_figures,
    simulated_methods,
    unknown_figures,
    usable,
)
from classifier.report.metrics import ABSTAINED
from classifier.report.playback import Track
from classifier.report.real_sections import real_sections
from classifier.report.windows import SPANS_S

_PROFILES_TEXT: Final = (
    "Profiles, each holding the one before: **U** utilisation and memory; **P** power, its limit, clocks and "
    "temperatures; **G** profiling ratios (GPM), NVLink and PCIe; **N** the node around the GPU (network, InfiniBand, "
    "disks, file systems, processes) and its fast power. A model is asked about a window with the channels outside of "
    "the profile removed. G and N are judged on boards that offer profiling ratios."
)


def sections(results: Results, date: str, command: str) -> list[Block]:
    """Return the whole report; `date` and `command` say when and how it was made."""
    model = results.model
    return [
        Heading(1, "How right the model is"),
        Text(
            f"Made on {date} by `{command}` with model {model.version} (SHA-256 {model.sha256[:12]}), which was "
            f"trained on {model.metadata.get('trained_on', 'data it does not name')}. Every figure is measured; what "
            "is simulated is called simulated and says nothing about real machines. Intervals hold 95 % of bootstrap "
            "draws of whole families or whole sources, and say how far a figure depends on which of them were at hand. "
            "[accuracy.md](accuracy.md) says how the rules were set and what the limits are."
        ),
        *_size(results),
        *_bars(results),
        *_simulated(results),
        *_over_time(results),
        *_unknown(results),
        *_never(results),
        *_declared(results),
        *real_sections(results),
        *_how(results),
    ]


def _size(results: Results) -> list[Block]:
    windows, recorded = results.simulated.windows, results.recorded
    text = (
        f"Simulated: {windows.size} windows of {len(np.unique(windows.groups))} runs of "
        f"{len(np.unique(windows.families))} families, answered by {len(results.simulated.folds)} models fitted on "
        f"{sum(results.training.values())} other windows less the families held out. "
        f"{results.simulated.waited} windows of jobs that waited (idle by its rule for all of the window) are left out."
    )
    if recorded is None:
        return [Text(text + " Real recordings: none were given.")]
    sources = len(np.unique(recorded.windows.families))
    more = f" Real: {recorded.windows.size} windows of {len(recorded.logs)} recordings of {sources} sources."
    return [Text(text + more)]


def _bars(results: Results) -> list[Block]:
    bars = all_bars(results)
    missed = [bar for bar in bars if bar.gap is not None and bar.gap > 1e-9]
    blocks: list[Block] = [
        Heading(2, "Bars"),
        Text(f"{sum(bar.verdict == 'met' for bar in bars)} of {len(bars)} met, {len(missed)} missed."),
        Table(
            ("bar", "must be", "measured", "verdict"),
            [(bar.name, bar.bar, bar.measured, bar.verdict) for bar in bars],
        ),
    ]
    if missed:
        reasons: dict[str, list[str]] = {}
        for bar in missed:
            reasons.setdefault(bar.why, []).append(bar.name)
        blocks += [
            Heading(3, "Why bars are missed, and what data would settle them"),
            Table(("missed", "why, and what would settle it"), [("; ".join(n), why) for why, n in reasons.items()]),
        ]
    return blocks


_SIMULATED_COLUMNS: Final = (
    "profile", "method", "windows", "balanced accuracy", "without other", "macro-F1", "calibration error",
    "area under risk", "said: coverage", "said: balanced accuracy", "training against rest",
)  # fmt: skip


def _simulated(results: Results) -> list[Block]:
    blocks: list[Block] = [
        Heading(2, "Simulated families held out"),
        Text(
            _PROFILES_TEXT
            + " Every family is held out as a whole by one of the models, which knows the other families "
            "of its class. Balanced accuracy is over all four classes and, without other, over training, inference and "
            "idle, which is the one held against the bars; macro-F1 is over all four. These, calibration error "
            "(15 bins of equal mass) and the area under risk against coverage are at full coverage: each window gets "
            "its likeliest class. `said` is what the program would say, with abstention; where kernels only wait it "
            "says nothing, since the word of before holds then and a window has none. Rules that abstain are wrong "
            "where they do; training against rest counts abstaining as not training."
        ),
        Figure("accuracy.png", "Simulated families held out, 60 s: balanced accuracy by channel profile"),
    ]
    for span_s in SPANS_S:
        rows = [row for profile in PROFILE_NAMES for row in _simulated_rows(results, profile, span_s)]
        blocks += [Heading(3, f"{span_s:.0f} s of evidence"), Table(_SIMULATED_COLUMNS, rows)]
    return [
        *blocks,
        Text(
            "The three rules say training or not; what is not is read as idle below 5 % utilisation and as inference "
            "above, in their favour. KempnerPulse names twelve categories and no classes; each means the class with "
            "the largest share of its simulated windows in it, learnt on the other families."
        ),
        Figure("reliability.png", "Simulated families held out, 60 s: share right against confidence"),
        Figure("risk.png", "Simulated families held out, 60 s: share wrong against share answered"),
        Heading(3, "By family, profile N, 60 s"),
        _families(results),
        Figure("families.png", "Simulated families held out, profile N, 60 s: what each is called"),
    ]


def _simulated_rows(results: Results, profile: str, span_s: float) -> list[tuple[str, ...]]:
    rows = [
        _figures_row(profile, name, simulated_figures(results, profile, span_s, name))
        for name in simulated_methods(results)
    ]
    rows += [
        _figures_row(profile, baseline.name, rule_figures(results, profile, span_s, position))
        for position, baseline in enumerate(results.baselines)
    ]
    if workloadtruth_version() is None:
        rows.append((profile, "workloadtruth-cli", *["not installed"] * (len(_SIMULATED_COLUMNS) - 2)))
    return rows


def _figures_row(profile: str, name: str, figures: SimulatedFigures) -> tuple[str, ...]:
    return (
        profile,
        name,
        str(figures.windows),
        figures.balanced.format(),
        figures.balanced_without_other.format(),
        figures.macro_f1.format(),
        "-" if figures.calibration is None else figures.calibration.format(),
        show(figures.risk_area),
        show(figures.coverage),
        figures.balanced_said.format(),
        show(figures.training_against_rest),
    )


def _families(results: Results) -> Table:
    windows, chosen = results.simulated.windows, usable(results, "N", 60.0)
    answers = results.simulated.answers["N"]
    rows: list[tuple[str, ...]] = []
    for label in CLASSES:
        for family, known in sorted(results.simulated.classes.items()):
            mine = chosen & (windows.families == family)
            if known == label and mine.any():
                held_out = any(family in fold for fold in results.simulated.folds)
                rows.append((label, family, "yes" if held_out else "no", str(int(mine.sum())), *_said(answers, mine)))
    return Table(("class", "family", "held out", "windows", "likeliest", *(f"said {w}" for w in WORKLOADS)), rows)


def _said(answers: Answers, mine: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[str]:
    forced, said = answers.forced[mine], answers.said[mine]
    commonest = int(np.bincount(forced, minlength=len(CLASSES)).argmax())
    words = [CLASSES.index(word) if word in CLASSES else ABSTAINED for word in WORKLOADS]
    share = float((forced == commonest).mean())
    return [f"{CLASSES[commonest]} {share:.2f}", *(show(float((said == word).mean())) for word in words)]


def _over_time(results: Results) -> list[Block]:
    rows: list[tuple[str, ...]] = []
    for profile, tracks in results.simulated.tracks.items():
        delays = [delay for track in tracks for delay in track.delays]
        known = [delay for delay in delays if delay is not None]
        hours = sum(track.hours for track in tracks)
        rows.append(
            (
                profile,
                str(len(tracks)),
                f"{hours:.1f}",
                str(len(delays)),
                _quantile(known, 0.5),
                _quantile(known, 0.95),
                show(1.0 - len(known) / len(delays)) if delays else "-",
                f"{sum(track.flips for track in tracks) / hours:.2f}" if hours else "-",
                *_right_over_time(tracks),
            )
        )
    return [
        Heading(2, "Decisions over time"),
        Text(
            "Whole simulated runs through the history and the labeller of a live node, a decision every 5 s, by models "
            "that never saw the family. Time to the right label counts from the start of a busy phase that the run "
            "shows; flips are changes of the word after the first one other than `unknown`, while the truth stays."
        ),
        Table(
            ("profile", "GPUs", "GPU hours", "starts", "time to the right label: median, s", "95 %, s",
             "never within the run", "flips an hour", "decisions right", "unknown", "wrong"),
            rows,
        ),
        Figure("delay.png", "Simulated jobs: share with the right label by seconds since the job began"),
    ]  # fmt: skip


def _right_over_time(tracks: Sequence[Track]) -> tuple[str, str, str]:
    pairs = [(w, t) for track in tracks for w, t in zip(track.words, track.truths, strict=True) if t is not None]
    if not pairs:
        return ("-", "-", "-")
    right = sum(word == truth for word, truth in pairs) / len(pairs)
    unknown = sum(word == "unknown" for word, _ in pairs) / len(pairs)
    return show(right), show(unknown), show(1.0 - right - unknown)


def _unknown(results: Results) -> list[Block]:
    rows, overall, coverage = unknown_figures(results)
    return [
        Heading(2, "Families the model does not know"),
        Text(
            "One model was fitted without any of these families and asked about them, profile N, 60 s. Called "
            f"training, families weighing the same: {show(overall)}. Coverage of the same model on windows of the "
            f"busy families that it knows: {show(coverage)}."
        ),
        Table(
            ("family", "windows", "called training", "answered at all"),
            [(family, str(count), show(training), show(answered)) for family, count, training, answered in rows],
        ),
    ]


def _never(results: Results) -> list[Block]:
    return [
        Heading(2, "Never called training"),
        Table(
            ("situation", "called training", "decisions"),
            [(name, str(said), str(total)) for name, said, total in never_training(results)],
        ),
    ]


def _declared(results: Results) -> list[Block]:
    rows = []
    for profile in PROFILE_NAMES:
        alone = simulated_figures(results, profile, 60.0).balanced
        rows.append((profile, alone.format(), declared_of_profile(results, profile).format()))
    return [
        Heading(2, "With a declaration of 95 % reliability"),
        Text(
            "Every busy simulated job declares its class, wrongly in 5 % of the jobs (another busy class then); it is "
            "weighed as the labeller weighs it. Balanced accuracy at full coverage on families held out, 60 s; the "
            "interval is over draws of who is wrong. What declarations do to recordings: [accuracy.md](accuracy.md)."
        ),
        Table(("profile", "telemetry alone", "with the declaration"), rows),
    ]


def _how(results: Results) -> list[Block]:
    config = results.config
    rows = [(baseline.name, baseline.source) for baseline in results.baselines]
    if workloadtruth_version() is None:
        rows.append(("workloadtruth-cli", "not installed; extra `evaluate`"))
    folds = [(str(n + 1), ", ".join(fold)) for n, fold in enumerate(results.simulated.folds)]
    lone = sorted(f for f in results.simulated.classes if not any(f in fold for fold in results.simulated.folds))
    blocks: list[Block] = [
        Heading(2, "How it was measured"),
        Code(
            f"seed {config.seed}, {config.training_scenarios} training scenarios, {config.scenarios_per_family} runs "
            f"a family for windows, {config.runs_per_family} for decisions"
        ),
        Text(
            "Training and test scenarios have seeds of their own. Test runs are recorded once a second with all that "
            "the board offers; a share of the hosts carries another job's traffic too. Equal seeds and versions give "
            "equal figures, but for the speed."
        ),
        Heading(3, "Baselines"),
        Table(("baseline", "source"), rows),
        Heading(3, "Families held out together"),
        Table(("fold", "families"), folds),
    ]
    if lone:
        blocks.append(
            Text(
                "Not held out whole, since their class has no other family: "
                + ", ".join(lone)
                + ". Their windows are of scenarios that no model saw."
            )
        )
    return blocks


def _quantile(values: Sequence[float], share: float) -> str:
    return f"{float(np.quantile(values, share)):.0f}" if values else "-"


def show(value: float | None) -> str:
    """Return a share with three digits, `-` for None."""
    return "-" if value is None else f"{value:.3f}"
