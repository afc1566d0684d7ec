"""From findings and truth to figures: recall, precision, delay, false findings for each day of a GPU."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from agent.vocabulary import ANOMALIES
from tests.detector_bench.cases import GRACE_S, Expected, Truth
from tests.detector_bench.play import Found

#: Of these, information is the finding; of all others it is a warning or more.
TOLD_AS_INFORMATION = ("low_utilization", "unknown_workload")
#: Findings of one case and word that begin within this time are one incident.
INCIDENT_S = 120.0


@dataclass
class Sought:
    """One fault: whether it was found, and after how long."""

    anomaly: str
    tag: str
    found: bool
    delay_s: float | None


@dataclass
class Wrong:
    """A finding that is not true."""

    anomaly: str
    severity: int
    gpu: int | None
    at_s: float
    summary: str


@dataclass
class Scored:
    """One case, told."""

    kind: str
    group: str
    number: int
    profile: str
    labels: str
    board: str
    gpu_days: float
    held_out: bool = False
    healthy: bool = False  # nothing is wrong from beginning to end
    sought: list[Sought] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    right_incidents: dict[str, int] = field(default_factory=dict)
    wrong_incidents: dict[str, int] = field(default_factory=dict)
    cpu_s: float = 0.0


def score(truth: Truth, found: list[Found], into: Scored) -> Scored:
    """Tell `found` by `truth`."""
    for expected in truth.expected:
        into.sought.append(_seek(expected, found))
    right: dict[str, list[float]] = defaultdict(list)
    wrong: dict[str, list[float]] = defaultdict(list)
    for one in found:
        bad = {level: at for level, at in one.reached.items() if not _is_right(truth, one, level, at)}
        first = min(one.reached.values())
        counts = one.severity >= 2 or one.anomaly in TOLD_AS_INFORMATION
        if bad:
            level = max(bad)
            into.wrong.append(Wrong(one.anomaly, level, one.gpu, bad[level], one.summary))
            if level >= 2 or one.anomaly in TOLD_AS_INFORMATION:
                wrong[one.anomaly].append(bad[level])
        elif counts:
            right[one.anomaly].append(first)
    into.right_incidents = {anomaly: _incidents(times) for anomaly, times in right.items()}
    into.wrong_incidents = {anomaly: _incidents(times) for anomaly, times in wrong.items()}
    return into


def _seek(expected: Expected, found: list[Found]) -> Sought:
    delays = []
    for one in found:
        if one.anomaly != expected.anomaly or not _in_scope(expected, one):
            continue
        at = [at for level, at in one.reached.items() if level >= expected.severity]
        if at and expected.start_s - 5 <= min(at) <= expected.end_s + GRACE_S:
            delays.append(max(0.0, min(at) - expected.start_s))
    delay = min(delays, default=None)
    return Sought(expected.anomaly, expected.tag, delay is not None and delay <= expected.allowed_s, delay)


def _in_scope(expected: Expected, one: Found) -> bool:
    return one.gpu is None or expected.gpus is None or one.gpu in expected.gpus


def _is_right(truth: Truth, one: Found, level: int, at: float) -> bool:
    for expected in truth.expected:
        if not expected.start_s - 5 <= at <= expected.end_s + GRACE_S:
            continue
        if one.anomaly in expected.also or (one.anomaly == expected.anomaly and _in_scope(expected, one)):
            return True
    return any(
        one.anomaly == accepted.anomaly
        and level <= accepted.severity
        and accepted.start_s - 5 <= at <= accepted.end_s + GRACE_S
        for accepted in truth.accepted
    )


def _incidents(times: list[float]) -> int:
    count, last = 0, -math.inf
    for at in sorted(times):
        if at - last > INCIDENT_S:
            count += 1
        last = at
    return count


def poisson_upper(count: int, confidence: float = 0.95) -> float:
    """Return the exact upper bound of the mean of a Poisson variable that was seen to be `count`."""

    def below(mean: float) -> float:
        return sum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(count + 1))

    low, high = 1e-9, 10.0 + 3 * count
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) > 1 - confidence else (low, middle)
    return high


@dataclass
class Figures:
    """One row of the table."""

    anomaly: str
    sought: int
    found: int
    median_s: float | None
    p95_s: float | None
    right: int
    wrong: int
    false_findings: int
    false_by_day: float
    false_by_day_upper: float

    @property
    def recall(self) -> float | None:
        return self.found / self.sought if self.sought else None

    @property
    def precision(self) -> float | None:
        told = self.right + self.wrong
        return self.right / told if told else None


def figures(cases: Iterable[Scored], anomaly: str, *, tag: str | None = None) -> Figures:
    """Return the row of one anomaly; false findings are warnings and pages on healthy work."""
    cases = list(cases)
    sought = [one for case in cases for one in case.sought if one.anomaly == anomaly and tag in (None, one.tag)]
    delays = np.array([one.delay_s for one in sought if one.found])
    days = sum(case.gpu_days for case in cases if case.healthy)
    false = sum(one.anomaly == anomaly and one.severity >= 2 for case in cases if case.healthy for one in case.wrong)
    return Figures(
        anomaly=anomaly,
        sought=len(sought),
        found=sum(one.found for one in sought),
        median_s=float(np.median(delays)) if delays.size else None,
        p95_s=float(np.quantile(delays, 0.95)) if delays.size else None,
        right=sum(case.right_incidents.get(anomaly, 0) for case in cases),
        wrong=sum(case.wrong_incidents.get(anomaly, 0) for case in cases),
        false_findings=false,
        false_by_day=false / days if days else 0.0,
        false_by_day_upper=poisson_upper(false) / days if days else float("inf"),
    )


def false_criticals(cases: Iterable[Scored]) -> tuple[int, float]:
    """Return the false critical findings on healthy work, and its days of GPUs."""
    cases = [case for case in cases if case.healthy]
    return sum(one.severity == 3 for case in cases for one in case.wrong), sum(case.gpu_days for case in cases)


def table(cases: list[Scored], rules: list[Scored]) -> list[str]:
    """Return the table: detectors, and fixed rules in the columns beside."""
    fixed = "fixed rules: recall | precision | false a GPU-day |"
    lines = [
        "| anomaly | cases | recall | precision | delay p50, p95, s | false a GPU-day (upper bound) | " + fixed,
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for anomaly in ANOMALIES:
        tags = sorted({one.tag for case in cases for one in case.sought if one.anomaly == anomaly and one.tag})
        lines.append(_row(anomaly, figures(cases, anomaly), figures(rules, anomaly)))
        lines += [
            _row(f"- {tag}", figures(cases, anomaly, tag=tag), figures(rules, anomaly, tag=tag), part=True)
            for tag in tags
        ]
    return lines


def _row(name: str, ours: Figures, theirs: Figures, *, part: bool = False) -> str:
    delay = "" if ours.median_s is None else f"{ours.median_s:.0f}, {ours.p95_s:.0f}"
    false = "" if part else f"{ours.false_by_day:.4f} ({ours.false_by_day_upper:.4f})"
    their_false = "" if part else f"{theirs.false_by_day:.3f}"
    precision, their_precision = ("", "") if part else (_ratio(ours.precision), _ratio(theirs.precision))
    mine = f"{name} | {ours.sought} | {_ratio(ours.recall)} | {precision} | {delay} | {false}"
    return f"| {mine} | {_ratio(theirs.recall)} | {their_precision} | {their_false} |"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
