"""Which cases there are, and playing them."""

from __future__ import annotations

import math
import os
import traceback
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np

from agent.clock import process_cpu_seconds
from tests.detector_bench import checkpoints, faults, healthy, held_out, lookalikes, simulated, splices, stalls
from tests.detector_bench.cases import KINDS, Draw, Kind
from tests.detector_bench.play import play
from tests.detector_bench.rules import fixed_rules
from tests.detector_bench.scoring import Scored, score
from tests.detector_bench.sensors import PROFILES, see

#: The modules that register kinds.
SOURCES = (checkpoints, faults, healthy, lookalikes, simulated, splices, stalls, held_out)
#: How much of each group the whole bench plays. Job-days without a fault are healthy work, too: some 80 GPU-days, which
#: make it more than 300.
HEALTHY_GPU_DAYS = 230.0
STALLS = 200
SPLICES = 100
JOB_DAYS = 90
FAULTS_EACH = 12
HELD_OUT_EACH = 6
#: Share of the cases that hear the labeller that ships; for the others every label is `unknown`.
LABELLED = 0.25


@dataclass(frozen=True)
class Case:
    """One case by its kind and number: all draws follow from these and the seed."""

    kind: str
    number: int
    seed: int


def plan(seed: int, share: float = 1.0) -> list[Case]:
    """Return the cases of the bench, or of a share of it: the same for equal seeds."""
    chosen: list[Case] = []
    for group, count in (("healthy", None), ("stall", STALLS), ("splice", SPLICES), ("jobday", JOB_DAYS), ("fault", 0)):
        kinds = [kind for _, kind in sorted(KINDS.items()) if kind.group == group and not kind.held_out]
        cases = [Case(kind.name, number, seed) for kind in kinds for number in range(_count(group, kind, kinds, count))]
        if count:
            cases = [Case(kinds[index % len(kinds)].name, index // len(kinds), seed) for index in range(count)]
        order = np.random.default_rng([seed, zlib.crc32(group.encode())]).permutation(len(cases))
        chosen += [cases[index] for index in order[: math.ceil(len(cases) * share)]]
    held = [
        Case(kind.name, number, seed)
        for _, kind in sorted(KINDS.items())
        if kind.held_out
        for number in range(HELD_OUT_EACH)
    ]
    order = np.random.default_rng([seed, 7]).permutation(len(held))
    return chosen + [held[index] for index in order[: math.ceil(len(held) * share)]]


def _count(group: str, kind: Kind, kinds: list[Kind], count: int | None) -> int:
    if count:
        return 0
    if group == "fault":
        return FAULTS_EACH
    days_each = kind.hours / 24 * float(np.mean(kind.gpus))
    return max(1, math.ceil(HEALTHY_GPU_DAYS / len(kinds) / days_each))


def run_case_or_say(case: Case) -> tuple[Scored, Scored] | str:
    """Play one case; where it cannot be, return why: one case must not cost a run of an hour."""
    try:
        return run_case(case)
    except Exception:  # noqa: BLE001 - whatever it is, the other cases are played
        return f"{case}: {traceback.format_exc()}"


def run_case(case: Case) -> tuple[Scored, Scored]:
    """Play one case and return it told, by the detectors and by fixed rules."""
    kind = KINDS[case.kind]
    rng = np.random.default_rng([case.seed, zlib.crc32(case.kind.encode()), case.number])
    weights = np.array([3.0 if name == "full" else 1.0 for name in kind.profiles])
    profile = PROFILES[str(rng.choice(kind.profiles, p=weights / weights.sum()))]
    labels = "real" if rng.random() < LABELLED and kind.name != "unlabelled" else "unknown"
    start = process_cpu_seconds()
    node, truth = kind.build(Draw(rng=rng, kind=kind, profile=profile, seconds=int(kind.hours * 3600)))
    if not profile.sees(*kind.needs):
        # Nothing has to be found, and what is found all the same is right.
        for one in truth.expected:
            for word in (one.anomaly, *one.also):
                truth.accept(word, one.start_s, one.end_s)
        truth.expected.clear()
    # A wait that will end is told by its name, as information.
    truth.accept("collective_wait", severity=1)
    # An hour of labels that say `unknown` is told as such, and rightly.
    truth.accept("unknown_workload", severity=1)
    seen = see(node, profile)
    told = []
    try:
        found_by_detectors = play(seen, labels)
    except Exception as error:
        error.add_note(f"in {case}, profile {profile.name}, labels {labels}")
        raise
    for found in (found_by_detectors, fixed_rules(seen)):
        into = Scored(
            kind=kind.name,
            group=kind.group,
            number=case.number,
            profile=profile.name,
            labels=labels,
            board=node.board_name,
            gpu_days=node.gpus * node.seconds / 86400,
            held_out=kind.held_out,
            healthy=kind.group == "healthy" or (kind.group == "jobday" and not truth.expected),
        )
        told.append(score(truth, found, into))
    told[0].cpu_s = process_cpu_seconds() - start
    return told[0], told[1]


def run(cases: list[Case], jobs: int | None = None) -> Iterator[tuple[Scored, Scored] | str]:
    """Play all cases, some at once, and yield each as it ends, or why it could not be played."""
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1:
        yield from map(run_case_or_say, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        # The long ones first, so that no process is left with one at the end.
        cases = sorted(cases, key=lambda case: -KINDS[case.kind].hours)
        for done in as_completed([pool.submit(run_case_or_say, case) for case in cases]):
            yield done.result()
