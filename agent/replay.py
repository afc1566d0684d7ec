"""Plays a trace through the pipeline: the code of a live node with the trace as its clock.

`replay` yields events in the order of trace time; `ReplayJson` writes them as DESIGN.md, Commands, says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TextIO

from agent.clock import Instant
from agent.pipeline import JUDGEMENT_PERIOD_S, STALE_PERIODS, Judgement, Pipeline
from agent.records import GpuKey, GpuSample, GpuState, Tick
from agent.vocabulary import SEVERITIES, WORKLOADS
from classifier.results import Decision, Finding

SIGNIFICANT_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One judgement of a replay, at `t` seconds after the first sample."""

    t: float
    now: Instant
    judgement: Judgement


def replay(ticks: Iterable[Tick], pipeline: Pipeline, interval_s: float) -> Iterator[ReplayStep]:
    """Feed `ticks` to the pipeline and yield each judgement: one for each 5 s from the first sample of a GPU on.

    Where the log is slower than that, one for each sample, and in a hole of more than three intervals one for each
    interval of it, so that a gap shows while it lasts. Traces keep their own monotonic times; `t` starts at 0.
    """
    is_slow = interval_s > JUDGEMENT_PERIOD_S
    step_s = max(JUDGEMENT_PERIOD_S, interval_s)
    # How late a judgement may wait for the sample it belongs to: clocks of slow loggers drift by whole seconds.
    patience_s = (STALE_PERIODS - 1.0) * step_s if is_slow else 0.0
    start: Tick | None = None
    last: Tick | None = None
    due_s = 0.0
    for tick in ticks:
        if start is None:
            if not any(isinstance(record, GpuSample | GpuState) for record in tick.records):
                pipeline.ingest(tick)  # of the host alone: there is nothing to judge yet
                continue
            start = tick
            due_s = tick.monotonic_s
        if last is not None:
            while due_s + patience_s < tick.monotonic_s:
                yield _judge(pipeline, start, last, due_s)
                due_s += step_s
        pipeline.ingest(tick)
        last = tick
        if is_slow or due_s <= tick.monotonic_s:
            yield _judge(pipeline, start, last, tick.monotonic_s)
            due_s = tick.monotonic_s + step_s if is_slow else due_s + step_s
    if start is not None and last is not None:
        pipeline.settle(start.monotonic_s, Instant(last.monotonic_s, last.wall_s))


def _judge(pipeline: Pipeline, start: Tick, last: Tick, at_s: float) -> ReplayStep:
    now = Instant(at_s, last.wall_s + at_s - last.monotonic_s)
    return ReplayStep(at_s - start.monotonic_s, now, pipeline.judge(now))


class ReplayJson:
    """Writes replay events as one JSON object a line; equal input gives equal bytes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._start_s: float | None = None
        self._last_s = 0.0
        self._labels: dict[GpuKey, Decision] = {}
        self._findings: dict[tuple[str, GpuKey | None, float], Finding] = {}

    def step(self, step: ReplayStep) -> None:
        """Write the decisions and the findings of one judgement."""
        if self._start_s is None:
            self._start_s = step.now.monotonic_s - step.t
        for decision in step.judgement.decisions:
            self._labels[decision.key] = decision
            self._write(
                {
                    "type": "decision",
                    "t": step.t,
                    **_gpu(decision.key),
                    "gpu_i_id": decision.key.gpu_i_id,
                    "workload": decision.workload,
                    "probabilities": decision.probabilities,
                    "telemetry_probabilities": decision.telemetry_probabilities,
                    "window_s": decision.window_s,
                    "reason": decision.reason,
                }
            )
        for event in step.judgement.events:
            finding = event.finding
            self._findings[finding.anomaly, finding.key, finding.start_monotonic_s] = finding
            self._write(
                {
                    "type": "finding",
                    "t": step.t,
                    "state": event.state,
                    "anomaly": finding.anomaly,
                    "scope": finding.scope,
                    "gpu": finding.key.gpu if finding.key else None,
                    "severity": SEVERITIES[finding.severity],
                    "start": self._t(finding.start_monotonic_s),
                    "end": self._t(finding.end_monotonic_s),
                    "evidence": finding.evidence,
                    "action": finding.action,
                }
            )

    def summary(self, seconds: Callable[[GpuKey], Mapping[str, float]]) -> None:
        """Write one summary for each GPU, and one for the node where findings of node or job scope exist."""
        for key in sorted(self._labels, key=lambda k: k.order):
            booked = {word: seconds(key)[word] for word in WORKLOADS}
            # Of equal times the last word counts: a trace of one sample is unknown.
            self._summary(key, max(reversed(WORKLOADS), key=lambda word: booked[word]), booked)
        if any(finding.key is None for finding in self._findings.values()):
            self._summary(None, None, None)

    def _summary(self, key: GpuKey | None, workload: str | None, booked: Mapping[str, float] | None) -> None:
        findings = sorted(
            (f for f in self._findings.values() if f.key == key), key=lambda f: (f.start_monotonic_s, f.anomaly)
        )
        self._write(
            {
                "type": "summary",
                "gpu": key.gpu if key else None,
                "workload": workload,
                "seconds": booked,
                "findings": [
                    {
                        "anomaly": f.anomaly,
                        "severity": SEVERITIES[f.severity],
                        "start": self._t(f.start_monotonic_s),
                        "end": self._t(f.end_monotonic_s),
                    }
                    for f in findings
                ],
            }
        )

    def _t(self, monotonic_s: float | None) -> float | None:
        return None if monotonic_s is None or self._start_s is None else monotonic_s - self._start_s

    def _write(self, event: Mapping[str, object]) -> None:
        self._out.write(json.dumps(_rounded(event), separators=(",", ":"), allow_nan=False) + "\n")


def _gpu(key: GpuKey) -> dict[str, int | str | None]:
    return {"gpu": key.gpu, "uuid": key.uuid}


def _rounded(value: object) -> object:
    """Round every float to six significant digits; what is not finite becomes null."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") + 0.0 if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value


class ReplayText:
    """Writes the changes of label and the findings for a person to read, then a table of hours."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._labels: dict[GpuKey, str] = {}

    def step(self, step: ReplayStep) -> None:
        """Write what changed at one judgement."""
        for decision in step.judgement.decisions:
            if self._labels.get(decision.key) != decision.workload:
                self._labels[decision.key] = decision.workload
                why = f" ({decision.reason})" if decision.reason else ""
                self._line(step.t, decision.key, f"{decision.workload}{why}")
        for event in step.judgement.events:
            finding = event.finding
            word = SEVERITIES[finding.severity] if event.state == "active" else event.state
            self._line(step.t, finding.key, f"{finding.anomaly} {word}: {finding.summary}")

    def summary(self, seconds: Callable[[GpuKey], Mapping[str, float]]) -> None:
        """Write the seconds by workload of each GPU."""
        self._out.write("\nseconds   " + "".join(f"{word:>12}" for word in WORKLOADS) + "\n")
        for key in self._labels:
            booked = seconds(key)
            self._out.write(f"{_name(key):10}" + "".join(f"{booked[word]:12.0f}" for word in WORKLOADS) + "\n")

    def _line(self, t: float, key: GpuKey | None, text: str) -> None:
        self._out.write(f"{t:10.1f} s  {_name(key):8}  {text}\n")


def _name(key: GpuKey | None) -> str:
    if key is None:
        return "node"
    return f"gpu {key.gpu}" if key.gpu_i_id is None else f"gpu {key.gpu}/{key.gpu_i_id}"
