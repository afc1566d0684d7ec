"""Plays what an agent sees of a node through the pipeline of `replay`, in compressed time.

The core channels of GPUs and host are laid into the history at once and uncovered step by step; the facts of the slow
tick go through `Pipeline.ingest` as records. `tests/classifier/test_detector_bench.py` compares this with a history
that takes every tick as records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from agent.clock import Instant
from agent.history import Channels, History, Series
from agent.pipeline import JUDGEMENT_PERIOD_S, Pipeline
from agent.records import Tick
from classifier import model
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.registry import DetectorsConfig, build_detectors
from classifier.detectors.step_pace import StepPaces
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.results import Decision
from tests.detector_bench.sensors import WALL_S, Seen, SlowRecords

LABEL_PERIOD_S = 60.0


class NoLabels:
    """Every label is `unknown`: what arms must not hang on it."""

    reason = "ambiguous"

    def decide(self, now: Instant, history: History) -> tuple[Decision, ...]:
        return tuple(
            Decision(
                key=key, monotonic_s=now.monotonic_s, wall_s=now.wall_s, workload="unknown", probabilities=None,
                telemetry_probabilities=None, window_s=60.0, reason=self.reason,
                since_monotonic_s=0.0, since_wall_s=0.0,
            )
            for key in history.gpus
        )  # fmt: skip


class SlowLabels:
    """The labeller that ships, asked once a minute instead of every 5 s; its answer holds in between."""

    def __init__(self) -> None:
        self._labeller = Labeller(_model(), LabellerConfig())
        self._asked_s = -np.inf
        self._held: tuple[Decision, ...] = ()

    def decide(self, now: Instant, history: History) -> tuple[Decision, ...]:
        if now.monotonic_s - self._asked_s >= LABEL_PERIOD_S or len(self._held) != len(history.gpus):
            self._asked_s = now.monotonic_s
            self._held = self._labeller.decide(now, history)
        return tuple(replace(one, monotonic_s=now.monotonic_s, wall_s=now.wall_s) for one in self._held)


_LOADED: list[model.Model] = []


def _model() -> model.Model:
    if not _LOADED:
        _LOADED.append(model.load(model.BUNDLED))
    return _LOADED[0]


@dataclass
class Found:
    """One finding as it came out: when it first reached each severity, and when it ended."""

    anomaly: str
    scope: str
    gpu: int | None
    subject: str
    reached: dict[int, float]
    end_s: float | None = None
    summary: str = ""
    suspect: bool = False

    @property
    def severity(self) -> int:
        return max(self.reached)


class _Uncovered:
    """Rings that hold a whole recording, of which `at` shows the part up to now."""

    def __init__(self) -> None:
        self._rings: list[tuple[object, list[int], list[int]]] = []
        self._places: dict[tuple[int, float, int], tuple[list[int], list[int]]] = {}

    def add(
        self, place: Channels, name: str, series: Series, steps: np.ndarray, horizon_s: float, from_s: float
    ) -> None:
        place.load(name, series)
        ring = place._rings[name]  # what is uncovered is the ring's own
        identity = (id(series.times), horizon_s, series.size)
        found = self._places.get(identity)
        if found is None:
            first = int(np.searchsorted(series.times, from_s, "right"))
            ends = np.searchsorted(series.times, steps, "right")
            starts = np.maximum(np.searchsorted(series.times, steps - horizon_s), first)
            found = self._places[identity] = (np.minimum(starts, ends).tolist(), ends.tolist())
        self._rings.append((ring, *found))

    def at(self, step: int) -> None:
        for ring, starts, ends in self._rings:
            ring._start = starts[step]
            ring._end = ends[step]


def play(seen: Seen, labels: str = "unknown", config: DetectorsConfig | None = None) -> list[Found]:
    """Play `seen` and return every finding; `labels` is `real` or `unknown`. An agent that restarts forgets."""
    bounds = [0.0, *seen.node.restarts, float(seen.node.seconds) + 1.0]
    found: list[Found] = []
    for start_s, end_s in pairwise(bounds):
        found += _play(seen, labels, config or DetectorsConfig(), start_s, end_s)
    return found


def new_pipeline(seen: Seen, labels: str, config: DetectorsConfig) -> Pipeline:
    """Return the pipeline of a live node with the labels of the bench."""
    baselines, paces = PowerBaselines(config.baseline), StepPaces(config.step_pace)
    labeller = SlowLabels() if labels == "real" else NoLabels()
    return Pipeline(
        labeller=labeller,
        detectors=build_detectors(config, baselines, paces),
        baselines=baselines,
        paces=paces,
        sample_interval_s=float(seen.profile.interval_s),
        facts_hold=seen.profile.name == "nvidia_smi",
        replay=True,
    )


def step_times(seen: Seen, start_s: float, end_s: float) -> np.ndarray:
    """Return the times of the judgements."""
    period = max(JUDGEMENT_PERIOD_S, float(seen.profile.interval_s))
    return np.arange(np.ceil(max(start_s, period) / period) * period, min(end_s, seen.node.seconds) + 0.1, period)


def _play(seen: Seen, labels: str, config: DetectorsConfig, start_s: float, end_s: float) -> list[Found]:
    steps = step_times(seen, start_s, end_s)
    pipeline = new_pipeline(seen, labels, config)
    slow = SlowRecords(seen)
    tracker = Tracker()
    uncovered: _Uncovered | None = None
    lasts = np.searchsorted(seen.times, steps, "right") - 1
    history = pipeline.history
    for step, now_s in enumerate(steps.tolist()):
        now = Instant(now_s, WALL_S + now_s)
        blind = seen.gone(now_s)
        if not blind:
            tick = min(int(now_s // 5), seen.node.slow - 1)
            records = tuple(slow.at(tick, now_s, first=uncovered is None))
            history.ingest(Tick(monotonic_s=now_s, wall_s=now.wall_s, records=records))
            if uncovered is None:
                uncovered = _lay(seen, history, steps, start_s)
        if uncovered is None:
            continue
        uncovered.at(step)
        newest_s = float(seen.times[lasts[step]]) if lasts[step] >= 0 else None
        _mark(seen, history, newest_s, now_s)
        tracker.take(pipeline.judge(now).events, now_s)
    tracker.close(float(steps[-1]) if steps.size else 0.0)
    return tracker.found


def _lay(seen: Seen, history: History, steps: np.ndarray, from_s: float) -> _Uncovered:
    uncovered = _Uncovered()
    for key, channels in zip(seen.node.keys, seen.channels, strict=True):
        gpu = history.all_gpus.get(key)
        if gpu is None:
            continue
        for name, series in channels.items():
            horizon_s = 120.0 if name == "power_fast_watts" else history.horizon_s
            uncovered.add(gpu, name, series, steps, horizon_s, from_s)
    for name, series in seen.host.items():
        uncovered.add(history.host, name, series, steps, history.horizon_s, from_s)
    return uncovered


def _mark(seen: Seen, history: History, newest_s: float | None, now_s: float) -> None:
    """Set what `GpuHistory.add_sample` sets beside the channels."""
    if newest_s is None:
        return
    for key in seen.node.keys:
        gpu = history.all_gpus.get(key)
        if gpu is None:
            continue
        last_s = newest_s
        for who, start, end in seen.node.gpu_gaps:
            if who == key.gpu and start <= newest_s < end:
                last_s = start - 1.0
        gpu.first_s = last_s if gpu.first_s is None else gpu.first_s
        gpu.last_s = last_s


class Tracker:
    """Collects the events of findings."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self._open: dict[tuple[str, str, str], Found] = {}

    def take(self, events: Sequence, now_s: float) -> None:
        for event in events:
            finding = event.finding
            subject = str(finding.key or finding.device or finding.job_key or "")
            identity = (finding.anomaly, finding.scope, subject)
            if event.state == "resolved":
                ended = self._open.pop(identity, None)
                if ended is not None:
                    ended.end_s = finding.end_monotonic_s
                continue
            one = self._open.get(identity)
            if one is None:
                gpu = finding.key.gpu if finding.key else None
                one = self._open[identity] = Found(finding.anomaly, finding.scope, gpu, subject, {})
                self.found.append(one)
            one.reached.setdefault(finding.severity, now_s)
            one.summary, one.suspect = finding.summary, one.suspect or finding.suspect

    def close(self, end_s: float) -> None:
        for one in self._open.values():
            one.end_s = end_s
