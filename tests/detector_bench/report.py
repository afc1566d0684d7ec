"""The report of the bench as text."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from datetime import UTC, datetime

from tests.detector_bench.scoring import Scored, false_criticals, poisson_upper, table


def head(seed: int, share: str, cases: list[Scored], took_s: float) -> list[str]:
    """Return what was played, when, and on what machine."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    count = Counter(case.group for case in cases)
    days = sum(case.gpu_days for case in cases if case.healthy)
    healthy = {case.kind for case in cases if case.healthy}
    faulty = {case.kind for case in cases if case.sought}
    machine = f"{os.cpu_count()} cores ({platform.machine()}, Python {platform.python_version()}, load {load})"
    when = f"{datetime.now(UTC):%Y-%m-%d}, seed {seed}, share {share}, {took_s / 60:.1f} min"
    others = f"{count['jobday']} job-days, {count['fault']} others"
    faults = (
        f"{len(faulty)} kinds of faults: {count['stall']} stalls, {count['splice']} spliced into recordings, {others}"
    )
    labelled = sum(case.labels == "real" for case in cases)
    return [
        f"{when} on {machine}, {sum(case.cpu_s for case in cases):.0f} s CPU",
        f"{days:.1f} GPU-days of {len(healthy)} kinds of healthy work; {faults}.",
        f"Labels: the shipped model's once a minute in {labelled} cases, unknown throughout in the others.",
        "",
    ]


def report(ours: list[Scored], rules: list[Scored]) -> list[str]:
    """Return all figures: one table, the pages on healthy work, job-days, profiles, and what was written last."""
    cases, by_rules = ([case for case in some if not case.held_out] for some in (ours, rules))
    lines = table(cases, by_rules)
    for name, told in (("detectors", cases), ("fixed rules", by_rules)):
        false, days = false_criticals(told)
        if days:
            rate, upper = false / days, poisson_upper(false) / days
            figures = f"{false} in {days:.1f} GPU-days, {rate:.4f} a GPU-day (upper bound {upper:.4f})"
            lines += ["", f"False critical findings on healthy work, {name}: {figures}."]
    lines += ["", _job_days(cases), "", *_by_profile(cases)]
    held = [case for case in ours if case.held_out]
    if held:
        lines += ["", "Written after the detectors were frozen:", ""]
        lines += table(held, [case for case in rules if case.held_out])
        false, days = false_criticals(held)
        lines += ["", f"False critical findings on healthy work there: {false} in {days:.1f} GPU-days."]
    return lines


def _job_days(cases: list[Scored]) -> str:
    days = [case for case in cases if case.group == "jobday"]
    false = sum(case.wrong_incidents.get("missed_checkpoint", 0) for case in days)
    return f"False missed_checkpoint: {false} in {len(days)} job-days."


def _by_profile(cases: list[Scored]) -> list[str]:
    lines = ["| profile | cases | recall | false warnings and pages |", "|---|---|---|---|"]
    for profile in sorted({case.profile for case in cases}):
        own = [case for case in cases if case.profile == profile]
        sought = [one for case in own for one in case.sought]
        recall = f"{sum(one.found for one in sought) / len(sought):.3f} of {len(sought)}" if sought else ""
        wrong = sum(one.severity >= 2 for case in own for one in case.wrong)
        lines.append(f"| {profile} | {len(own)} | {recall} | {wrong} |")
    return lines


def troubles(case: Scored) -> list[str]:
    """Return a line for each fault that was missed and each kind of false finding of one case."""
    where = f"{case.kind} #{case.number} {case.profile} {case.board} labels={case.labels}"
    lines = [f"MISSED {one.anomaly} {one.tag} delay={one.delay_s} in {where}" for one in case.sought if not one.found]
    by_word: dict[str, list] = defaultdict(list)
    for one in case.wrong:
        by_word[one.anomaly].append(one)
    for word, some in by_word.items():
        first = min(some, key=lambda one: one.at_s)
        what = f"{len(some)} of severity up to {max(one.severity for one in some)}"
        lines.append(f"FALSE {word}: {what}, GPU {first.gpu} at {first.at_s:.0f} s in {where}: {first.summary[:160]}")
    return lines
