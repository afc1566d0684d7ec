"""The scenario bench of the detectors: `python -m tests.detector_bench`, or `make bench-detectors`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from fractions import Fraction
from pathlib import Path

from agent.clock import SystemClock
from tests.detector_bench import splices
from tests.detector_bench.bench import plan, run
from tests.detector_bench.cases import KINDS
from tests.detector_bench.report import head, report, troubles
from tests.detector_bench.scoring import Scored


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.detector_bench", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="equal seeds give equal cases")
    parser.add_argument("--share", default="1", help="how much of the bench: 1/30 takes a minute or two")
    parser.add_argument("--jobs", type=int, help="processes; the number of cores if not given")
    parser.add_argument("--only", metavar="WORD", help="kinds of this name or part of it, or faults of this anomaly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every case to FILE")
    parser.add_argument("--verbose", action="store_true", help="list every miss and every false finding")
    chosen = parser.parse_args(arguments)
    cases = plan(chosen.seed, float(Fraction(chosen.share)))
    if chosen.only:
        cases = [case for case in cases if chosen.only in case.kind or chosen.only in KINDS[case.kind].faults]
    if not splices.present():
        cases = [case for case in cases if KINDS[case.kind].group != "splice"]
        _say("no recordings in ../shared/traces: the splices are left out\n")
    clock = SystemClock()
    start_s = clock.now().monotonic_s
    ours: list[Scored] = []
    rules: list[Scored] = []
    failed = 0
    for result in run(cases, chosen.jobs):
        if isinstance(result, str):
            failed += 1
            _say(f"\nNOT PLAYED {result}\n")
            continue
        told, by_rules = result
        ours.append(told)
        rules.append(by_rules)
        _progress(len(ours) + failed, len(cases), clock.now().monotonic_s - start_s)
        if chosen.verbose:
            _say("".join(f"\n{line}" for line in troubles(told)))
    for told in (ours, rules):
        told.sort(key=lambda case: (case.group, case.kind, case.number))  # they ended in any order
    took_s = clock.now().monotonic_s - start_s
    if chosen.json:
        chosen.json.write_text(json.dumps([dataclasses.asdict(one) for one in ours], default=float) + "\n")
    sys.stdout.write("\n".join([*head(chosen.seed, chosen.share, ours, took_s), *report(ours, rules), ""]))
    return int(failed > 0)


def _progress(done: int, of: int, seconds: float) -> None:
    left = seconds / done * (of - done)
    filled = 30 * done // of
    end = "\n" if done == of else ""
    bar = "#" * filled + "." * (30 - filled)
    _say(f"\r[{bar}] {done} of {of}, {seconds / 60:.1f} min, {left / 60:.1f} min left {end}")


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
