"""Recalibration: the trees of a bundle stay, and how sure they are is set anew on own labelled traces.

Own traces of a few machines are too few to learn from and enough to see how far probabilities can be trusted there.
The temperature and the threshold of the abstention change, and the bundle says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.errors import UsageError
from agent.vocabulary import CLASSES
from classifier.model import ARRAYS_NAME, BUNDLED, CARD_NAME, load
from classifier.own_traces import OwnTraces
from classifier.scores import Scores, score
from classifier.training import abstention_threshold, fit_temperature
from classifier.training_bundle import write_bundle
from classifier.trees import softmax

#: Least traces of a class, and least classes that are not idle: with fewer, agreement says nothing about being sure.
_LEAST_TRACES: Final = 2
_LEAST_CLASSES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecalibrationReport:
    """What a recalibration gave."""

    directory: Path
    own: OwnTraces
    temperature: tuple[float, float]  # before and after
    threshold: tuple[float, float]
    before: Scores
    after: Scores

    def format(self) -> str:
        """Return the report as text."""
        return (
            f"bundle written to {self.directory}: trees as they were, recalibrated on {self.own.describe()}\n"
            f"temperature {self.temperature[0]:.3g} -> {self.temperature[1]:.3g}, threshold {self.threshold[0]:.3g} -> "
            f"{self.threshold[1]:.3g}\n"
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
    """Write the trees of `bundle` to `out_dir` with temperature and threshold of the windows of `own`.

    `precision` is the share of right labels among the decided windows that are not idle. Raises UsageError where own
    traces are too few or of too few classes, FaultError where the bundle cannot be written.
    """
    _require_enough(own)
    model, data = load(bundle), own.data
    progress(f"recalibrating {bundle} on {len(data.labels)} windows")
    raw = model.trees.raw(data.rows)
    temperature = fit_temperature(raw, data.labels)
    before, after = softmax(raw / model.temperature), softmax(raw / temperature)
    busy = data.labels != CLASSES.index("idle")
    threshold = abstention_threshold(after[busy], data.labels[busy], precision)
    report = RecalibrationReport(
        directory=out_dir,
        own=own,
        temperature=(model.temperature, temperature),
        threshold=(model.threshold, threshold),
        before=score(before, data.labels, model.threshold),
        after=score(after, data.labels, threshold),
    )
    metadata: dict[str, Any] = dict(model.metadata)
    metadata["temperature"], metadata["threshold"] = temperature, threshold
    metadata["recalibrated"] = {
        "from_sha256": model.sha256,
        "temperature_before": model.temperature,
        "threshold_before": model.threshold,
        "own_traces": own.as_dict(),
    }
    with np.load(bundle / ARRAYS_NAME, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    card = (bundle / CARD_NAME).read_text(encoding="utf-8") if (bundle / CARD_NAME).exists() else ""
    write_bundle(out_dir, metadata, arrays, card.rstrip() + "\n" + _note(report))
    load(out_dir)  # what was written must be what the agent accepts
    return report


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

Temperature and threshold are no longer those above: {report.temperature[1]:.3g} and {report.threshold[1]:.3g}, set on
{report.own.describe()}; the trees are unchanged. These traces before:

{report.before.format()}
"""
