"""Recalibration: the trees of a bundle stay, and how sure they are is set anew on own labelled traces.

Own traces of a few machines are too few to learn from and enough to see how far probabilities can be trusted there.
The temperatures and the thresholds of the abstention change, and the bundle says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.errors import UsageError
from agent.vocabulary import CLASSES
from classifier.hierarchy import LEVELS, Hierarchy, both_scores
from classifier.model import ARRAYS_NAME, BUNDLED, CARD_NAME, load
from classifier.own_traces import OwnTraces
from classifier.scores import Scores, score
from classifier.training import thresholds_on
from classifier.training_bundle import levels, write_bundle
from classifier.training_calibration import fit_temperatures
from classifier.training_windows import views

#: Least traces of a class, and least classes that are not idle: with fewer, agreement says nothing about being sure.
_LEAST_TRACES: Final = 2
_LEAST_CLASSES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecalibrationReport:
    """What a recalibration gave; temperatures are of the two levels, thresholds by profile."""

    directory: Path
    own: OwnTraces
    temperatures: tuple[tuple[float, float], tuple[float, float]]  # before and after
    thresholds: tuple[Mapping[str, float], Mapping[str, float]]
    before: Scores
    after: Scores

    def format(self) -> str:
        """Return the report as text."""
        return (
            f"bundle written to {self.directory}: trees as they were, recalibrated on {self.own.describe()}\n"
            f"temperatures {_pair(self.temperatures[0])} -> {_pair(self.temperatures[1])}, thresholds "
            f"{levels(self.thresholds[0])} -> {levels(self.thresholds[1])}\n"
            f"the own traces before:\n{self.before.format()}\n"
            f"and after (these traces have set it: no test):\n{self.after.format()}\n"
        )


def recalibrate(
    own: OwnTraces,
    out_dir: Path,
    *,
    bundle: Path = BUNDLED,
    precision: float = 0.97,
    progress: Callable[[str], None] = lambda _: None,
) -> RecalibrationReport:
    """Write the trees of `bundle` to `out_dir` with temperatures and thresholds of the windows of `own`.

    `precision` is the share of right labels among the decided windows that are not idle. Each window is also seen as
    poorer profiles show it. Raises UsageError where own traces are too few or of too few classes, FaultError where the
    bundle cannot be written.
    """
    _require_enough(own)
    model, data = load(bundle), own.data
    progress(f"recalibrating {bundle} on {len(data.labels)} windows")
    seen = views(data, 1)
    old = model.hierarchy
    scores = both_scores(old.activity.trees.raw(seen.rows)), both_scores(old.workload.trees.raw(seen.rows))
    temperatures = fit_temperatures(scores, seen.labels, old.workload.classes)
    new = Hierarchy(
        activity=replace(old.activity, temperature=temperatures[0]),
        workload=replace(old.workload, temperature=temperatures[1]),
    )
    thresholds = thresholds_on(precision, seen, new.probabilities(seen.rows))
    report = RecalibrationReport(
        directory=out_dir,
        own=own,
        temperatures=(old.temperatures, temperatures),
        thresholds=(model.thresholds, thresholds),
        before=score(old.probabilities(data.rows), data.labels, model.thresholds_of(data.rows)),
        after=score(
            new.probabilities(data.rows), data.labels, replace(model, thresholds=thresholds).thresholds_of(data.rows)
        ),
    )
    metadata: dict[str, Any] = dict(model.metadata)
    metadata["levels"] = {
        name: {**metadata["levels"][name], "temperature": temperature}
        for name, temperature in zip(LEVELS, temperatures, strict=True)
    }
    metadata["thresholds"] = thresholds
    metadata["recalibrated"] = {
        "from_sha256": model.sha256,
        "temperatures_before": list(old.temperatures),
        "thresholds_before": dict(model.thresholds),
        "own_traces": own.as_dict(),
    }
    with np.load(bundle / ARRAYS_NAME, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    card = (bundle / CARD_NAME).read_text(encoding="utf-8") if (bundle / CARD_NAME).exists() else ""
    write_bundle(out_dir, metadata, arrays, card.rstrip() + "\n" + _note(report))
    load(out_dir)  # what was written must be what the agent accepts
    return report


def _pair(temperatures: tuple[float, float]) -> str:
    return " and ".join(f"{one:.3g}" for one in temperatures)


def _require_enough(own: OwnTraces) -> None:
    data = own.data
    traces = {
        name: int(np.unique(data.groups[data.labels == position]).size)
        for position, name in enumerate(CLASSES)
        if name != "idle"
    }
    enough = [name for name, count in traces.items() if count >= _LEAST_TRACES]
    if len(enough) < _LEAST_CLASSES:
        have = ", ".join(f"{name} in {count}" for name, count in traces.items())
        raise UsageError(
            f"recalibration needs spans of {_LEAST_CLASSES} of {', '.join(traces)} in {_LEAST_TRACES} traces each; "
            f"there are {have}; label more traces"
        )


def _note(report: RecalibrationReport) -> str:
    return f"""
## Recalibrated

Temperatures and thresholds are no longer those above: {_pair(report.temperatures[1])}, and
{levels(report.thresholds[1])}, set on {report.own.describe()}; the trees are unchanged. These traces before:

{report.before.format()}
"""
