"""`warpwatch evaluate --report`: opens the recordings for classifier.report and writes what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from agent.composition import opened_ticks, replayed_decisions
from agent.config import Config
from agent.records import Tick
from classifier import model
from classifier.evaluation import evaluate, read_index
from classifier.evaluation_report import EvaluationReport
from classifier.report import QUICK, ReportConfig, run, steps_of, write_report
from classifier.results import Decision

Warn = Callable[[str], None]
#: Shows progress over a number of steps while its block runs.
Progress = Callable[[float], AbstractContextManager[Callable[[float], object]]]


def report(
    config: Config,
    folder: Path,
    *,
    traces: Path | None,
    bundle: Path | None,
    quick: bool,
    seed: int | None,
    date: str,
    progress: Progress,
    warn: Warn,
) -> tuple[Path, Path]:
    """Measure the model of `bundle` (the shipped one by default), write the report to `folder` and return its files.

    `traces` is a folder of recordings with INDEX.csv; without it nothing real is measured. `quick` measures a little of
    everything: its figures mean nothing. Raises UsageError and FaultError as reading and writing do.
    """
    chosen = QUICK if quick else ReportConfig()
    chosen = chosen if seed is None else replace(chosen, seed=seed)
    recordings = read_index(traces) if traces else []
    version = model.load(bundle or model.BUNDLED).version

    def opened(path: Path) -> tuple[float, Iterable[Tick]]:
        return opened_ticks(path, warn)

    with progress(steps_of(chosen, len({one.source for one in recordings}), len(recordings))) as advance:

        def step(_: str) -> None:
            advance(1)

        def replayed(path: Path) -> Iterator[tuple[float, tuple[Decision, ...]]]:
            return replayed_decisions(config, path, warn, bundle=bundle)

        def scored(whole: Path) -> EvaluationReport:
            return evaluate(
                whole, replayed,
                model=version, per_source=chosen.files_per_source, warn=warn, progress=step,
            )  # fmt: skip

        results = run(
            chosen, bundle=bundle, traces=traces, opened=opened, replayed=scored,
            say=step, warn=warn,
        )  # fmt: skip
    command = "warpwatch evaluate --report DIR" + (" FOLDER" if traces else "") + (" --quick" if quick else "")
    if quick:
        command += "` (**quick: far too little data, the figures mean nothing**) `--seed " + str(chosen.seed)
    return write_report(results, folder, date=date, command=command)
