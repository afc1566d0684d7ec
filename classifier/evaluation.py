"""Evaluation: the labels against public recordings whose truth is known from where they come from.

Reads a folder of recordings with INDEX.csv (file, label, source_repo, ...) and PHASES.csv (loading, warm-up and the
like, which are left out), takes what a replay of each decides, and counts decisions per source.
A source is the part of the file name before the double underscore; sources, not windows, are what figures are averaged
over, since errors are per source.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.errors import UsageError
from agent.vocabulary import CLASSES, WORKLOADS
from classifier.evaluation_report import EvaluationReport, SourceScore
from classifier.results import Decision

Warn = Callable[[str], None]
#: Replays one recording: seconds since its first sample, and the decisions of that moment for all GPUs.
Replayed = Callable[[Path], Iterable[tuple[float, Iterable[Decision]]]]
#: Phases in which the labelled work is going on; others of PHASES.csv (loading, warm-up, teardown) are left out.
KEPT_PHASES: Final = frozenset({"steady", "inference", "training"})
_COLUMNS: Final = ("file", "label", "source_repo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One row of INDEX.csv, and where its kept phases lie."""

    path: Path
    label: str
    source: str
    repository: str
    kept: tuple[tuple[float, float], ...] | None  # seconds since the first sample; None: all

    def keeps(self, t: float) -> bool:
        """Return whether the labelled work is going on at `t` seconds."""
        return self.kept is None or any(start <= t <= end for start, end in self.kept)


def evaluate(
    traces_dir: Path,
    replayed: Replayed,
    *,
    model: str | None,
    per_source: int | None = None,
    warn: Warn = lambda _: None,
    progress: Warn = lambda _: None,
) -> EvaluationReport:
    """Replay every recording of `traces_dir` and return the scores per source and label.

    `model` is the version that the report names; at most `per_source` recordings of each source and label are replayed,
    all of them by default. Raises UsageError where INDEX.csv is missing or has other columns; a
    recording that cannot be read is reported through `warn` and left out.
    """
    tallies: dict[tuple[str, str], _Tally] = {}
    for recording in read_index(traces_dir):
        tally = tallies.setdefault((recording.source, recording.label), _Tally(recording))
        progress(f"{recording.label} {recording.path.name}")
        if per_source is not None and tally.recordings >= per_source:
            continue
        try:
            for t, decisions in replayed(recording.path):
                if recording.keeps(t):
                    tally.count(decisions)
        except UsageError as error:
            warn(f"left out: {error}")
            continue
        tally.recordings += 1
    scores = tuple(tally.score() for tally in tallies.values() if tally.workloads)
    return EvaluationReport(
        sources=tuple(sorted(scores, key=lambda s: (WORKLOADS.index(s.label), s.source))),
        model=model,
    )


def read_index(traces_dir: Path) -> list[Recording]:
    """Return the recordings of INDEX.csv with their phases; raises UsageError where it is missing or no index."""
    phases = _read_phases(traces_dir / "PHASES.csv")
    path = traces_dir / "INDEX.csv"
    recordings: list[Recording] = []
    for row in _rows(path, _COLUMNS):
        if row["label"] not in CLASSES:
            raise UsageError(
                f"{path} gives {row['file']} the label {row['label']!r}; choose one of {', '.join(CLASSES)}"
            )
        kept = phases.get(row["file"])
        recordings.append(
            Recording(
                path=traces_dir / row["file"],
                label=row["label"],
                source=Path(row["file"]).name.partition("__")[0],
                repository=row["source_repo"],
                kept=tuple(kept) if kept else None,
            )
        )
    if not recordings:
        raise UsageError(f"{path} lists no recording")
    return recordings


def _read_phases(path: Path) -> Mapping[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    if not path.exists():
        return found
    for row in _rows(path, ("file", "phase", "t_start_s", "t_end_s")):
        start, end = _number(row["t_start_s"]), _number(row["t_end_s"])
        if row["phase"] in KEPT_PHASES and start is not None and end is not None:
            found.setdefault(row["file"], []).append((start, end))
    return found


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(f"{path} has no column {missing[0]}; expected {', '.join(columns)}")
            return [{name: value or "" for name, value in row.items() if name} for row in reader]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; evaluate takes a folder with INDEX.csv") from error


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class _Tally:
    """Counts of one source and label."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.recordings = 0
        self.workloads: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._forced: Counter[str] = Counter()

    def count(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self.workloads[decision.workload] += 1
            if decision.workload == "unknown" and decision.reason:
                self._reasons[decision.reason] += 1
            if decision.probabilities is not None:
                self._forced[max(("training", "inference"), key=decision.probabilities.__getitem__)] += 1

    def score(self) -> SourceScore:
        recording = self._recording
        return SourceScore(
            source=recording.source,
            label=recording.label,
            repository=recording.repository,
            recordings=self.recordings,
            decisions=dict(self.workloads),
            reasons=dict(self._reasons),
            forced=dict(self._forced),
        )
