"""Plays the recordings of ../shared/traces through all detectors, as `replay` does, and lists what fires.

`python -m tests.detector_bench.recordings [PART OF A NAME]`. The exit status is 1 where a critical finding comes out of
healthy work: none of these recordings holds a fault.
"""

from __future__ import annotations

import csv
import sys

from agent.composition import build_replay
from agent.config import Config
from agent.replay import replay
from tests.detector_bench.play import Found, Tracker
from tests.detector_bench.splices import TRACES


def findings(name: str) -> tuple[list[Found], float]:
    """Return what fires on one recording, and its seconds."""
    trace, pipeline = build_replay(Config(), TRACES / name, lambda _: None)
    tracker, end_s = Tracker(), 0.0
    for step in replay(trace, pipeline, trace.header.interval_s):
        tracker.take(step.judgement.events, step.t)
        end_s = step.t
    trace.close()
    tracker.close(end_s)
    return tracker.found, end_s


def main(part: str) -> int:
    """Print a line for each word that fires on a recording."""
    with (TRACES / "INDEX.csv").open(newline="") as lines:
        names = [row["file"] for row in csv.DictReader(lines) if part in row["file"]]
    critical = 0
    for name in names:
        found, seconds = findings(name)
        critical += sum(one.severity == 3 for one in found)
        for anomaly in sorted({one.anomaly for one in found}):
            some = [one for one in found if one.anomaly == anomaly]
            severity = max(one.severity for one in some)
            first = min(some, key=lambda one: min(one.reached.values()))
            at = min(first.reached.values())
            words = f"{anomaly}: {len(some)}, severity up to {severity}, first at {at:.0f} of {seconds:.0f} s"
            sys.stdout.write(f"{name} {words}: {first.summary}\n")
        sys.stderr.write(f"{name}: {len(found)} findings in {seconds:.0f} s\n")
    sys.stdout.write(f"{len(names)} recordings, {critical} critical findings\n")
    return int(critical > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
