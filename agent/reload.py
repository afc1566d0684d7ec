"""A configuration that is read again while the agent runs: what changes at once, and what waits for the next start.

Labels, the model and the detectors are put in place between two judgements; history, counters, findings that last and
what was learned stay. What samples, serves and listens is built once: such keys are named, and hold from the next start
on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final, NamedTuple

from agent.clock import Instant
from agent.composition import choose_model
from agent.config import Config
from agent.pipeline import Pipeline
from classifier.detectors import Detector
from classifier.detectors.registry import changed_detectors
from classifier.labeller import Labeller
from exporters.snapshot import ModelInfo

#: Keys, or tables with all their keys, that change at once.
_AT_ONCE: Final = ("agent.log_level", "agent.driver_release_seconds", "labels", "model", "detectors")
#: Tables of detectors that all of them share, and that are part of what was learned.
_AT_START: Final = ("detectors.baseline", "detectors.step_pace")


class Changes(NamedTuple):
    """Keys that differ from those in force, as `table.key`."""

    at_once: tuple[str, ...]
    at_start: tuple[str, ...]


def changes(before: Config, after: Config) -> Changes:
    """Return what differs between two configurations."""
    keys = tuple(_differences(before, after, ""))
    at_once = tuple(key for key in keys if _is_in(key, _AT_ONCE) and not _is_in(key, _AT_START))
    return Changes(at_once, tuple(key for key in keys if key not in at_once))


def in_force(before: Config, after: Config) -> Config:
    """Return `before` with those keys of `after` that change at once."""
    detectors = dataclasses.replace(
        after.detectors, baseline=before.detectors.baseline, step_pace=before.detectors.step_pace
    )
    agent = dataclasses.replace(
        before.agent,
        log_level=after.agent.log_level,
        driver_release_seconds=after.agent.driver_release_seconds,
    )
    return dataclasses.replace(before, agent=agent, labels=after.labels, model=after.model, detectors=detectors)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judges:
    """What a pipeline judges by after a change."""

    labeller: Labeller | None  # None where the one that runs stays
    model: ModelInfo | None


def new_judges(before: Config, after: Config, sha256: str | None) -> Judges:
    """Return the labeller of `after`, where it or its model is another one; `sha256` is that of the model that runs.

    Raises UsageError where a bundle that is named does not fit.
    """
    loaded = choose_model(after)
    if before.labels == after.labels and loaded.sha256 == sha256:
        return Judges(labeller=None, model=None)
    info = ModelInfo(version=loaded.version, sha256=loaded.sha256)
    return Judges(labeller=Labeller(loaded, after.labels), model=info)


def new_detectors(before: Config, after: Config, pipeline: Pipeline, now: Instant) -> tuple[Detector, ...]:
    """Return the detectors of `after`; those whose table is the same are the ones that run."""
    baselines, paces = pipeline.shared
    return changed_detectors(pipeline.detectors, (before.detectors, after.detectors), baselines, paces, now)


def _differences(before: object, after: object, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(before):  # type: ignore[arg-type]
        old, new = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(old):
            yield from _differences(old, new, f"{prefix}{field.name}.")
        elif old != new:
            yield prefix + field.name


def _is_in(key: str, tables: tuple[str, ...]) -> bool:
    return any(key == table or key.startswith(table + ".") for table in tables)
