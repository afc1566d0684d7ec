"""The labeller: one decision per GPU and moment, in five stages that each may end it.

1. A GPU that is lost, or whose samples stopped, is `unknown`: old values say nothing about now.
2. Evidence starts with the first sample after a gap or after another set of processes took over; below 15 s of it the
   answer is `unknown` (too_few_samples). Samples count where something that tells was measured, utilisation, power,
   profiling or NVLink: a log full of [N/A] is no evidence, however long (too_few_channels). Where fewer than three core
   features can be computed nothing says whether the model knows such a GPU, and there are no probabilities either: so
   few channels are measured (too_few_channels), or samples come so far apart (too_few_samples).
3. Idle is physics, not statistics: it is never said but while its rule holds, whatever the model thinks. The rule is
   utilisation p95 at most 2 % over the last minute, or since the evidence began where that is less, whether memory is
   held or not; 2 of 60 samples may be of any height. Where utilisation is not measured (any more), as on a MIG
   instance, SM and DRAM activity stand in for it. Once the rule no longer holds, the label is `unknown` until there is
   evidence for another. To be idle once more takes the quantile at 97.5 %, which is 1 of 60 samples: else a GPU that
   works for a second in every 25 would go in and out of idle, as the last minute holds three bursts or two.
4. Kernels that only wait say nothing about what waits (`waiting_rule`): a hung training job and a server between two
   requests look alike. The word of before holds, with its probabilities, while its processes are seen to stay; else it
   is `unknown` (waiting).
5. The model answers for all others; far from what it was trained on it is not believed, and where it is unsure, or
   where only nvidia-smi's columns exist and it is not very sure, the label is `unknown` (out_of_domain, ambiguous).

What the holders of a GPU declare (`declared`) is weighed beside the model's answer in the fifth stage only: it can tip
what telemetry leaves open among training, inference and other, and against telemetry that is sure it ends in `unknown`.
A second smoother then follows telemetry alone. Without a declaration there is one, and nothing differs.

A word other than `unknown` comes with probabilities, of which its own is the highest, and without a reason; `unknown`
always has a reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from agent.clock import Instant
from agent.history import Array, GpuHistory, History
from agent.records import GpuKey
from agent.vocabulary import CLASSES
from classifier.declared import Declared, MismatchWatch, combine, declared_of
from classifier.explanation import Explained, causes_of, has_core_channels, measured_here, strange
from classifier.features import FEATURE_NAMES, compute_all
from classifier.idle_rule import idle_features, looks_idle
from classifier.labeller_config import LabellerConfig
from classifier.model import Model
from classifier.results import Decision
from classifier.signals import LONGEST_WINDOW_S, Signals, median
from classifier.smoothing import AMBIGUOUS, UNKNOWN, Smoother
from classifier.waiting_rule import looks_waiting
from classifier.words import say

TOO_FEW_SAMPLES: Final = "too_few_samples"
TOO_FEW_CHANNELS: Final = "too_few_channels"
GAP: Final = "gap"
OUT_OF_DOMAIN: Final = "out_of_domain"
WAITING: Final = "waiting"
GPU_LOST: Final = "gpu_lost"
NO_MODEL: Final = "no_model"
#: Why a label is `unknown`: short words that stay as they are.
REASONS: Final = (TOO_FEW_SAMPLES, TOO_FEW_CHANNELS, GAP, OUT_OF_DOMAIN, AMBIGUOUS, WAITING, GPU_LOST, NO_MODEL)
#: Channels that tell training from inference by more than nvidia-smi's columns do.
_RICH_SIGNALS: Final = ("sm", "tensor", "dram", "nvlink_tx")
#: Channels of the core tick of which one at least makes a tick a sample.
_EVIDENCE_CHANNELS: Final = (
    "utilization_ratio",
    "power_watts",
    "memory_utilization_ratio",
    "sm_active_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "nvlink_receive_bytes_per_second",
    "nvlink_transmit_bytes_per_second",
)
_POSITIONS: Final = {name: position for position, name in enumerate(FEATURE_NAMES)}
_TELLING_FEATURES: Final = ("util__p50__60", "util__p95__60", "power__p50__60", "memory__p50__60")


@dataclass(slots=True, kw_only=True)
class _GpuState:
    """What the labeller remembers of one GPU."""

    smoother: Smoother
    mismatch: MismatchWatch
    telemetry: Smoother | None = None  # without declarations; None while there were none, and `smoother` is both
    since_s: float = -math.inf  # start of the evidence
    pids: frozenset[int] | None = None
    barred: str | None = None  # reason of an `unknown` that bypasses the smoother, and since when
    barred_since_s: float = 0.0
    explained: Explained = field(default_factory=Explained)
    was_idle: bool = False  # since the evidence began: to be so again takes more than to stay so

    def restart(self) -> None:
        """Forget the label: the evidence starts anew."""
        self.smoother.reset()
        self.telemetry = None
        self.was_idle = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """A GPU the model has to judge."""

    gpu: GpuHistory
    state: _GpuState
    declared: str | None
    signals: Signals
    rich: bool
    span_s: float
    row: Array = field(default_factory=lambda: np.empty(0))  # features; filled in for all at once
    threshold: float = 1.0  # least probability of a label by the profile that the row holds; filled in with it


class Labeller:
    """Keeps the label of every GPU; call `decide` every few seconds with time that never goes back."""

    def __init__(self, model: Model | None, config: LabellerConfig) -> None:
        self._model = model
        self._config = config
        self._states: dict[GpuKey, _GpuState] = {}
        self._refreshed_s = -math.inf  # when the explanation of a GPU was last found anew while its label held

    def decide(self, now: Instant, history: History) -> tuple[Decision, ...]:
        """Return one decision per GPU of `history`, in its order."""
        decisions: dict[GpuKey, Decision] = {}
        pending: list[_Evidence] = []
        config = self._config
        declared = {key: declared_of(config.declared, gpu, now.monotonic_s) for key, gpu in history.gpus.items()}
        for gone in self._states.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._states[gone]
        for key, gpu in history.gpus.items():
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = _GpuState(
                    smoother=Smoother(config.smoothing), mismatch=MismatchWatch(config.declared)
                )
            barred = self._bar(now.monotonic_s, gpu, state)
            span_s = min(LONGEST_WINDOW_S, max(0.0, now.monotonic_s - state.since_s))
            if barred is not None:
                decisions[key] = self._barred(now, gpu, state, barred, 0.0 if math.isinf(span_s) else span_s)
                continue
            signals = Signals(
                gpu, history.host, now.monotonic_s,
                since_s=state.since_s, gpu_count=len(history.gpus), peers=history.gpus.values(),
            )  # fmt: skip
            is_back = state.was_idle and state.smoother.label != "idle"
            if looks_idle(signals, config, share=config.idle_return_share if is_back else config.idle_share):
                state.was_idle = True
                decisions[key] = self._idle(now, gpu, state, signals, span_s)
                continue
            if state.smoother.label == "idle":
                state.smoother.release(now.monotonic_s)
            if self._model is None:
                decisions[key] = self._barred(now, gpu, state, NO_MODEL, span_s)
            elif looks_waiting(signals, config):
                decisions[key] = self._waiting(now, gpu, state, span_s)
            else:
                rich = any(
                    signals.window(name, LONGEST_WINDOW_S).size >= config.minimum_samples for name in _RICH_SIGNALS
                )
                said = declared[key].workload
                pending.append(
                    _Evidence(gpu=gpu, state=state, declared=said, signals=signals, rich=rich, span_s=span_s)
                )
        if pending and self._model is not None:
            rows = compute_all([evidence.signals for evidence in pending])
            thresholds = self._model.thresholds_of(rows).tolist()
            judged = [
                replace(evidence, row=row, threshold=threshold)
                for evidence, row, threshold in zip(pending, rows, thresholds, strict=True)
            ]
            decisions.update(self._judge(now, judged, self._model))
        return tuple(self._compare(now, decisions[key], declared[key]) for key in history.gpus)

    def _compare(self, now: Instant, decision: Decision, declared: Declared) -> Decision:
        """Return the decision with what is declared, and whether telemetry alone contradicts it."""
        state = self._states[decision.key]
        label = decision.workload if state.telemetry is None else state.telemetry.label or UNKNOWN
        mismatch = state.mismatch.update(now.monotonic_s, declared, label)
        if declared.workload is None:
            return decision
        return replace(decision, declared_class=declared.workload, mismatch=mismatch)

    def _bar(self, now_s: float, gpu: GpuHistory, state: _GpuState) -> str | None:
        """Move the start of the evidence and return why nothing can be said yet, if so."""
        config = self._config
        if gpu.state != "ok":
            state.since_s = now_s
            return GPU_LOST
        times = _measured_times(gpu, now_s, LONGEST_WINDOW_S + config.minimum_s)
        if times.size == 0:
            state.since_s = now_s
            if any(map(gpu.has, _EVIDENCE_CHANNELS)):
                return GAP
            ticks = gpu.series("samples", now_s, LONGEST_WINDOW_S).times
            is_long = ticks.size >= config.minimum_samples and now_s - float(ticks[0]) >= config.minimum_s
            return TOO_FEW_CHANNELS if is_long else TOO_FEW_SAMPLES
        steps = np.diff(times)
        period_s = max(config.shortest_period_s, median(steps) if steps.size else 0.0)
        if now_s - float(times[-1]) > config.gap_periods * period_s:
            state.since_s = now_s
            return GAP
        holes = np.flatnonzero(steps > config.gap_periods * period_s)
        start_s = float(times[holes[-1] + 1]) if holes.size else float(times[0])
        after_gap = bool(holes.size) and start_s > state.since_s
        if after_gap or math.isinf(state.since_s):
            state.since_s = start_s
            state.restart()
        if self._job_changed(gpu, state):
            state.since_s = max(state.since_s, gpu.processes_since_s or start_s)
            state.restart()
            after_gap = False
        count = int(times.size - np.searchsorted(times, state.since_s))
        if now_s - state.since_s < config.minimum_s or count < config.minimum_samples:
            recent_gap = bool(holes.size) and state.since_s == start_s
            return GAP if recent_gap else TOO_FEW_SAMPLES
        return None

    @staticmethod
    def _job_changed(gpu: GpuHistory, state: _GpuState) -> bool:
        """Return whether none of the processes seen before is left, and remember the ones of now.

        A worker that joins or leaves a set of processes changes no job; a driver that lists none at all (not permitted)
        is no change either.
        """
        if gpu.processes is None:
            return False
        before, state.pids = state.pids, frozenset(process.pid for process in gpu.processes)
        return before is not None and before != state.pids and before.isdisjoint(state.pids)

    def _barred(self, now: Instant, gpu: GpuHistory, state: _GpuState, reason: str, span_s: float) -> Decision:
        state.restart()
        if state.barred is None:
            state.barred_since_s = now.monotonic_s
        state.barred = reason
        return _decision(now, gpu, UNKNOWN, state.barred_since_s, span_s, reason=reason)

    def _idle(self, now: Instant, gpu: GpuHistory, state: _GpuState, signals: Signals, span_s: float) -> Decision:
        rest = round((1.0 - self._config.idle_probability) / (len(CLASSES) - 1), 12)  # 0.01, not 0.010000000000000009
        probabilities = np.array([self._config.idle_probability if name == "idle" else rest for name in CLASSES])
        state.barred = None
        state.telemetry = None
        label = state.smoother.settle(now.monotonic_s, "idle")
        features = idle_features(signals, self._config)
        return _decision(
            now, gpu, label, state.smoother.since_s, span_s,
            reason=state.smoother.reason, probabilities=probabilities, features=features,
            explanation=tuple(say(name, value) for name, value in features.items()),
        )  # fmt: skip

    def _waiting(self, now: Instant, gpu: GpuHistory, state: _GpuState, span_s: float) -> Decision:
        state.barred = None
        smoother = state.smoother
        for one in (smoother, state.telemetry):
            if one is None:
                continue
            if gpu.processes is None and one.label not in (None, UNKNOWN):
                one.release(now.monotonic_s)  # who waits now may be another job
            one.hold(now.monotonic_s, WAITING)
        is_known = smoother.label != UNKNOWN
        alone = state.telemetry or smoother
        text = "kernels only wait, nothing computes or moves" + (": as before" if is_known else "")
        return _decision(
            now, gpu, smoother.label or UNKNOWN, smoother.since_s, span_s,
            reason=smoother.reason,
            probabilities=smoother.mean if is_known else None,
            telemetry_probabilities=alone.mean if is_known else None,
            explanation=(text,),
        )  # fmt: skip

    def _judge(self, now: Instant, pending: list[_Evidence], model: Model) -> dict[GpuKey, Decision]:
        prediction = model.predict(np.stack([evidence.row for evidence in pending]))
        decisions: dict[GpuKey, Decision] = {}
        for evidence, row, ratio in zip(pending, prediction.probabilities, prediction.out_of_domain_ratio, strict=True):
            gpu, state, smoother = evidence.gpu, evidence.state, evidence.state.smoother
            if math.isnan(ratio):
                reason = TOO_FEW_SAMPLES if has_core_channels(evidence.signals) else TOO_FEW_CHANNELS
                decision = self._barred(now, gpu, state, reason, evidence.span_s)
                if reason == TOO_FEW_CHANNELS:
                    decision = replace(decision, explanation=measured_here(evidence.signals))
                decisions[gpu.key] = decision
                continue
            state.barred = None
            if state.telemetry is None and evidence.declared is not None:
                state.telemetry = smoother.branch()
            alone = state.telemetry or smoother
            if ratio > 1.0:
                smoother.refuse(now.monotonic_s, OUT_OF_DOMAIN)
                alone.refuse(now.monotonic_s, OUT_OF_DOMAIN)
            else:
                thresholds = self._thresholds(evidence)
                if alone is not smoother:
                    alone.update(now.monotonic_s, row, thresholds)
                smoother.update(now.monotonic_s, combine(self._config.declared, row, evidence.declared), thresholds)
            label = smoother.label or UNKNOWN
            explanation = self._explain(now.monotonic_s, evidence, model)
            decisions[gpu.key] = _decision(
                now, gpu, label, smoother.since_s, evidence.span_s,
                reason=smoother.reason,
                probabilities=None if ratio > 1.0 else smoother.mean,
                telemetry_probabilities=None if ratio > 1.0 else alone.mean,
                features=_telling(evidence, model),
                out_of_domain_ratio=float(ratio),
                explanation=explanation,
            )  # fmt: skip
        return decisions

    def _explain(self, now_s: float, evidence: _Evidence, model: Model) -> tuple[str, ...]:
        """Return what decided, in words: the causes are found with a label and now and then, for one GPU a decision."""
        state, smoother = evidence.state, evidence.state.smoother
        label, mean, explained = smoother.label or UNKNOWN, smoother.mean, state.explained
        subject = label, smoother.reason
        if subject != explained.subject or (
            now_s != self._refreshed_s and now_s - explained.at_s >= self._config.explanation_refresh_s
        ):
            if subject == explained.subject:
                self._refreshed_s = now_s
            if smoother.reason == OUT_OF_DOMAIN or mean is None:
                causes = strange(model, evidence.row)
            else:
                causes = causes_of(model, evidence.row, mean, None if label == UNKNOWN else label)
            explained.take(now_s, subject, causes)
        words = explained.words(evidence.row)
        alone = state.telemetry
        if alone is not None and label == evidence.declared and alone.label != label:
            return (f"declared {label} by its job or program", *words)
        return words

    def _thresholds(self, evidence: _Evidence) -> Array:
        """Return the least mean probability per class at which it is said; `idle` is the rule's to say, never here.

        The bundle sets it for each profile. On nvidia-smi's columns alone it was set on simulated machines, which do
        not differ as real ones do: `basic_threshold` is a floor below it.
        """
        busy = evidence.threshold
        if not evidence.rich:
            early = evidence.span_s < self._config.basic_minimum_s
            busy = math.inf if early else max(busy, self._config.basic_threshold)
        return np.array([math.inf if name == "idle" else busy for name in CLASSES])


def _measured_times(gpu: GpuHistory, now_s: float, seconds: float) -> Array:
    """Return the times at which any channel that tells was measured, in order."""
    merged: Array = np.empty(0)
    for channel in _EVIDENCE_CHANNELS:
        times = gpu.series(channel, now_s, seconds).times
        if times.size and not (times.size == merged.size and (times == merged).all()):
            merged = np.union1d(merged, times) if merged.size else times
    return merged


def _telling(evidence: _Evidence, model: Model) -> Mapping[str, float]:
    """Return the features to show, without NaN: what decided, the model's strongest, and a few everybody reads."""
    decided = (FEATURE_NAMES[cause.position] for cause in evidence.state.explained.causes)
    names = dict.fromkeys((*decided, *model.deciding_features, *_TELLING_FEATURES))
    values = ((name, float(evidence.row[_POSITIONS[name]])) for name in names)
    return {name: value for name, value in values if not math.isnan(value)}


def _decision(
    now: Instant,
    gpu: GpuHistory,
    workload: str,
    since_s: float,
    span_s: float,
    *,
    reason: str | None,
    probabilities: Array | None = None,
    telemetry_probabilities: Array | None = None,
    features: Mapping[str, float] | None = None,
    out_of_domain_ratio: float | None = None,
    explanation: tuple[str, ...] = (),
) -> Decision:
    named = _named(probabilities)
    return Decision(
        key=gpu.key,
        monotonic_s=now.monotonic_s,
        wall_s=now.wall_s,
        workload=workload,
        probabilities=named,
        telemetry_probabilities=named if telemetry_probabilities is None else _named(telemetry_probabilities),
        window_s=span_s,
        reason=reason,
        since_monotonic_s=since_s,
        since_wall_s=now.wall_s - (now.monotonic_s - since_s),
        features=features or {},
        out_of_domain_ratio=out_of_domain_ratio,
        explanation=explanation,
    )


def _named(probabilities: Array | None) -> Mapping[str, float] | None:
    return None if probabilities is None else dict(zip(CLASSES, map(float, probabilities), strict=True))
