"""Puts the judgement together from the configuration: the same for a live node and for a replay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from agent.config import Config
from agent.errors import UsageError
from agent.importers import Trace, open_trace
from agent.model_store import ModelStore
from agent.pipeline import Pipeline
from agent.records import Record, Tick
from agent.replay import replay
from classifier import model
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.registry import build_detectors
from classifier.detectors.step_pace import StepPaces
from classifier.labeller import Labeller
from classifier.results import Decision
from exporters.snapshot import ModelInfo

log = logging.getLogger("warpwatch")


def choose_model(config: Config, bundle: Path | None = None) -> model.Model:
    """Return the model of `bundle`, else the configured one, else the installed one, else the shipped one.

    Raises UsageError where one that was named does not fit. An installed one that does not, as after an upgrade of the
    agent, is said and left alone: a node without labels would be worse than one with those of the shipped model.
    """
    named = bundle or config.model.bundle
    if named is not None:
        return model.load(named)
    installed = ModelStore(config.agent.state_directory).current()
    if installed is not None:
        try:
            return model.load(installed)
        except UsageError as error:
            log.error("%s; the shipped model is used until then", error)  # noqa: TRY400 - the sentence says it all
    return model.load(model.BUNDLED)


def build_pipeline(
    config: Config,
    *,
    bundle: Path | None = None,
    sample_interval_s: float = 1.0,
    facts_hold: bool = False,
    replay: bool = False,
    demo_notice: str | None = None,
    periods_s: Mapping[type[Record], float] | None = None,
) -> Pipeline:
    """Return the pipeline that `config` describes, with its model or the one in `bundle`.

    Raises UsageError where the bundle does not fit. The other arguments are those of Pipeline.
    """
    loaded = choose_model(config, bundle)
    baselines = PowerBaselines(config.detectors.baseline)
    paces = StepPaces(config.detectors.step_pace)
    return Pipeline(
        labeller=Labeller(loaded, config.labels),
        detectors=build_detectors(config.detectors, baselines, paces),
        baselines=baselines,
        paces=paces,
        sample_interval_s=sample_interval_s,
        facts_hold=facts_hold,
        replay=replay,
        demo_notice=demo_notice,
        periods_s=periods_s,
        model=ModelInfo(version=loaded.version, sha256=loaded.sha256),
    )


def build_replay(
    config: Config, path: Path, warn: Callable[[str], None], *, bundle: Path | None = None
) -> tuple[Trace, Pipeline]:
    """Open a trace or foreign log and return it with the pipeline that suits it; raises UsageError as both do."""
    trace = open_trace(path, warn)
    try:
        pipeline = build_pipeline(
            config,
            bundle=bundle,
            sample_interval_s=trace.header.interval_s,
            facts_hold=trace.header.provenance == "imported",
            replay=True,
        )
    except BaseException:
        trace.close()
        raise
    return trace, pipeline


def opened_ticks(path: Path, warn: Callable[[str], None]) -> tuple[float, Iterable[Tick]]:
    """Open a trace or foreign log and return its usual interval in seconds and its ticks."""
    trace = open_trace(path, warn)
    return trace.header.interval_s, trace


def replayed_decisions(
    config: Config, path: Path, warn: Callable[[str], None], *, bundle: Path | None = None
) -> Iterator[tuple[float, tuple[Decision, ...]]]:
    """Replay a trace or foreign log and yield what `replay --json` decides: seconds, and a decision for each GPU."""
    trace, pipeline = build_replay(config, path, warn, bundle=bundle)
    for step in replay(trace, pipeline, trace.header.interval_s):
        yield step.t, step.judgement.decisions
