"""The sections about real sources: methods side by side, by source, steady phases, and decisions as replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from agent.vocabulary import CLASSES, WORKLOADS
from classifier.evaluation_report import EvaluationReport, SourceScore
from classifier.profiles import PROFILE_NAMES
from classifier.report.document import Block, Figure, Heading, Table, Text
from classifier.report.experiment import Recorded, Results
from classifier.report.figures import availability_right, real_methods, real_windows
from classifier.report.metrics import Estimate
from classifier.report.recorded import Unit, idle_against_busy, units_of
from classifier.report.steady import Steady
from classifier.report.windows import SPANS_S

_COLUMNS: Final = (
    "profile", "s", "method", "sources", "coverage", "recall of its class", "class said: share", "class said: right",
    "forced", "columns alone", "labels shuffled",
)  # fmt: skip
_IDLE: Final = CLASSES.index("idle")


def real_sections(results: Results) -> list[Block]:
    """Return the sections about real sources; one sentence where there are none."""
    recorded = results.recorded
    if recorded is None:
        return [Heading(2, "Real sources"), Text("No folder of recordings was given.")]
    return [
        Heading(2, "Real sources"),
        Text(
            "Recordings that other people published, labelled by what their repository says. Windows lie in the phases "
            "in which the labelled work goes on; every source weighs the same within its class, and training and "
            "inference weigh the same. A log without a power limit gets the nominal one of its board, which a live "
            "node always knows. **Each source left out**: fitted on simulated windows and on the recordings of all "
            "other sources. **Shipped model** and **simulated only**: no recording was used. `coverage` is the share "
            "of windows with any word, `recall` the share called by its class (`unknown` is wrong), `class said` the "
            "share called training, inference or other, and how much of that is right; `forced` what would be right "
            "were training or inference to be said everywhere but where the idle rule holds."
        ),
        Text(
            "Beside every figure stand two that know nothing of the work: what **columns alone** give away (logs of "
            "other sources with the same columns vote), and the range of `class said: right` (of `forced`, where no "
            "class is said) when the labels of the sources are **shuffled**. A figure within either is no evidence of "
            "skill."
        ),
        Table(
            _COLUMNS, [row for profile in PROFILE_NAMES for span in SPANS_S for row in _rows(results, profile, span)]
        ),
        *_idle(results),
        *_by_source(results),
        Figure("sources.png", "Real sources, 60 s: what the shipped model calls each"),
        *_steady(recorded),
        *_replayed(recorded.replayed),
    ]


def _rows(results: Results, profile: str, span_s: float) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, figures in real_methods(results, profile, span_s):
        busy = [unit for unit in figures.units if unit.label in ("training", "inference")]
        columns = availability_right(results, profile, [unit.source for unit in busy])
        rows.append(
            (
                profile,
                f"{span_s:.0f}",
                name,
                str(len(busy)),
                figures.coverage.format(),
                figures.recall.format(),
                figures.answered.format(),
                figures.right.format(),
                "-" if figures.forced is None else figures.forced.format(),
                columns.format(),
                _range(figures.shuffled),
            )
        )
    return rows


def _range(found: tuple[float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:.2f} to {found[1]:.2f}"


def _idle(results: Results) -> list[Block]:
    recorded = results.recorded
    if recorded is None:
        return []
    rows = []
    for profile in PROFILE_NAMES:
        chosen = real_windows(recorded.windows, profile, 60.0)
        said, still = recorded.shipped[profile].said, recorded.windows.still
        working = chosen & ~(still & (recorded.windows.labels != _IDLE))
        units = units_of(recorded.windows.where(chosen), said[chosen], None)
        without = units_of(recorded.windows.where(working), said[working], None)
        seed = results.config.seed
        rows.append(
            (
                profile,
                idle_against_busy(units, seed=seed).format(),
                idle_against_busy(without, seed=seed).format(),
                _mean_idle(units, is_idle=True),
                _mean_idle(units, is_idle=False),
                _mean_idle(without, is_idle=False),
            )
        )
    return [
        Heading(3, "Idle against busy, 60 s"),
        Text(
            "Recordings are labelled as a whole. The second figure leaves out windows of busy recordings in which no "
            "sample of utilisation is above 2 %: nothing ran there, whatever the label says."
        ),
        Table(
            ("profile", "balanced accuracy, as labelled", "without windows in which nothing ran", "idle said of idle",
             "idle said of busy", "without windows in which nothing ran"),
            rows,
        ),
    ]  # fmt: skip


def _mean_idle(units: Sequence[Unit], *, is_idle: bool) -> str:
    shares = [unit.said_idle for unit in units if (unit.label == "idle") == is_idle]
    return f"{sum(shares) / len(shares):.3f}" if shares else "-"


def _by_source(results: Results) -> list[Block]:
    rows: list[tuple[str, ...]] = []
    best = _best_profile(results)
    for key in sorted(best, key=lambda key: (key[1], key[0])):
        profile, units = best[key]
        for name, unit in units.items():
            forced = "-" if unit.forced is None else f"{unit.forced:.2f}"
            right = "-" if unit.right_of_classed is None else f"{unit.right_of_classed:.2f}"
            rows.append(
                (key[1], key[0], profile, name, str(unit.windows), f"{unit.coverage:.2f}", f"{unit.recall:.2f}",
                 f"{unit.said_idle:.2f}", f"{unit.classed:.2f}", right, forced)
            )  # fmt: skip
    return [
        Heading(3, "By source, 60 s"),
        Text("Under the richest profile that the source's logs hold."),
        Table(
            ("class", "source", "profile", "method", "windows", "coverage", "recall", "idle", "class said", "right",
             "forced"),
            rows,
        ),
    ]  # fmt: skip


def _best_profile(results: Results) -> dict[tuple[str, str], tuple[str, dict[str, Unit]]]:
    """Return, per source and class, the richest profile with windows and the units of both trainings."""
    found: dict[tuple[str, str], tuple[str, dict[str, Unit]]] = {}
    for profile in ("G", "P", "U"):
        methods = [
            (name, figures)
            for name, figures in real_methods(results, profile, 60.0)
            if name in ("shipped model", "each source left out")
        ]
        for key in {(unit.source, unit.label) for _, figures in methods for unit in figures.units}:
            units = {
                name: unit for name, figures in methods for unit in figures.units if (unit.source, unit.label) == key
            }
            found.setdefault(key, (profile, units))
    return found


def _steady(recorded: Recorded) -> list[Block]:
    def share(decisions: dict[str, int], word: str) -> str:
        total = sum(decisions.values())
        return f"{decisions.get(word, 0) / total:.2f}" if total else "-"

    rows: list[tuple[str, ...]] = []
    for one in recorded.steady:
        for name, decisions in (("as recorded", one.as_recorded), ("with the limit", one.with_limit)):
            counts = dict(decisions)
            rows.append(
                (one.recording.label, one.recording.path.name, name, Steady.verdict(counts), str(sum(counts.values())),
                 *(share(counts, word) for word in WORKLOADS))
            )  # fmt: skip
    return [
        Heading(3, "Steady phases of recordings with profiling columns"),
        Text(
            "Through the labeller with the shipped model, a decision for each GPU every 5 s. The verdict is the "
            "commonest word; the bar takes the run in which the power limit of the board is known, as on a live node."
        ),
        Table(("class", "recording", "power limit", "verdict", "decisions", *WORKLOADS), rows),
    ]


def _replayed(report: EvaluationReport | None) -> list[Block]:
    if report is None:
        return []
    columns = ("class", "source", "files", "decisions", *WORKLOADS, "coverage", "recall", "of decided", "forced")
    labels = [label for label in WORKLOADS if any(one.label == label for one in report.sources)]
    rows = [_score(one) for one in report.sources]
    for label in labels:
        rows.append(_score(report.micro(label)))
        rows.append(
            (label, "mean over sources", "", "", *[""] * len(WORKLOADS),
             *(Estimate(report.macro(label, figure)).format() for figure in _MACRO))
        )  # fmt: skip
    low, high = report.shuffled_range or (None, None)
    return [
        Heading(3, "Decisions as replayed"),
        Text(
            "What `warpwatch replay --json` decides with the shipped model and what each log holds, from its first "
            "sample on: one decision per GPU for each 5 s (each sample where the log is slower). Most logs hold no "
            "power limit. "
            "`forced` is the share right had training or inference to be said wherever there are probabilities."
        ),
        Table(columns, rows),
        Text(
            f"Decided and wrong: {_show(report.wrong_share)} of all decisions, {_show(report.confused_share)} without "
            f"idle said of a recording labelled busy. Forced, mean over sources: {_show(report.forced_by_source)}; "
            f"always the commoner class: {_show(report.majority_baseline)}; labels shuffled: {_show(low)} to "
            f"{_show(high)}."
        ),
    ]


_MACRO: Final[tuple[Callable[[SourceScore], float | None], ...]] = (
    lambda one: one.coverage,
    lambda one: one.recall,
    lambda one: one.recall_decided,
    lambda one: one.forced_share(one.label),
)


def _score(one: SourceScore) -> tuple[str, ...]:
    forced = one.forced_share(one.label) if one.label in ("training", "inference") else None
    return (
        one.label,
        one.repository.removeprefix("github.com/") or "all, by decision",
        str(one.recordings),
        str(one.total),
        *(str(one.decisions.get(word, 0)) for word in WORKLOADS),
        *map(_show, (one.coverage, one.recall, one.recall_decided, forced)),
    )


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
