"""What a declaration does to the labels of the recordings of ../shared/traces: `python -m tests.declared_recordings`.

Plays at most two recordings a source, the first 25 minutes of each, four times as `replay` does: with nothing declared,
and with a holder of every GPU that declares training, inference or other. Prints the table of docs/accuracy.md.
"""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from agent.composition import build_replay
from agent.config import Config
from agent.records import GpuOwners, GpuSample, Holder, Tick
from agent.replay import replay
from tests.detector_bench.splices import TRACES

_PER_SOURCE = 2
_SECONDS = 1500.0
_OWNERS_PERIOD_S = 5.0
_CLASSES = ("training", "inference")


def _with_owners(ticks: Iterable[Tick], declared: str | None) -> Iterator[Tick]:
    """Add to `ticks`, cut to 25 minutes, what the sampler of owners brings beside them."""
    start_s: float | None = None
    due_s = 0.0
    for tick in ticks:
        start_s = tick.monotonic_s if start_s is None else start_s
        if tick.monotonic_s - start_s > _SECONDS:
            return
        keys = {record.key for record in tick.records if isinstance(record, GpuSample)}
        if declared is None or not keys or tick.monotonic_s < due_s:
            yield tick
            continue
        due_s = tick.monotonic_s + _OWNERS_PERIOD_S
        holder = Holder(job_key="slurm:1", job_id="1", scheduler="slurm", declared_class=declared, processes=1)
        owners = tuple(
            GpuOwners(monotonic_s=tick.monotonic_s, wall_s=tick.wall_s, key=key, holders=(holder,), holder_count=1)
            for key in sorted(keys, key=lambda key: key.order)
        )
        yield dataclasses.replace(tick, records=(*tick.records, *owners))


def labels(name: str, declared: str | None) -> tuple[Counter[str], int]:
    """Return the decisions by word on one recording, and how many of them stood beside a mismatch."""
    trace, pipeline = build_replay(Config(), TRACES / name, lambda _: None)
    words: Counter[str] = Counter()
    mismatches = 0
    for step in replay(_with_owners(trace, declared), pipeline, trace.header.interval_s):
        words.update(decision.workload for decision in step.judgement.decisions)
        mismatches += sum(decision.mismatch is True for decision in step.judgement.decisions)
    trace.close()
    return words, mismatches


def chosen() -> dict[str, list[str]]:
    """Return the recordings by class: the first two of each source."""
    by_class: dict[str, list[str]] = {name: [] for name in _CLASSES}
    counts: Counter[tuple[str, str]] = Counter()
    with (TRACES / "INDEX.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            source = (row["label"], row["source_repo"])
            if row["label"] in by_class and counts[source] < _PER_SOURCE:
                counts[source] += 1
                by_class[row["label"]].append(row["file"])
    return by_class


def main() -> None:
    """Print a row for each class of recordings and each declaration: mean shares of decisions."""
    words = ("training", "inference", "other", "idle", "unknown")
    sys.stdout.write(f"| recordings | declared | {' | '.join(words)} | mismatch |\n|{'---|' * (len(words) + 3)}\n")
    for truth, names in chosen().items():
        for declared in (None, "training", "inference", "other"):
            shares: defaultdict[str, float] = defaultdict(float)
            for name in names:
                counts, mismatches = labels(name, declared)
                total = max(sum(counts.values()), 1)
                for word, count in (*counts.items(), ("mismatch", mismatches)):
                    shares[word] += count / total / len(names)
                sys.stderr.write(f"{name} {declared}: {dict(counts)}\n")
            figures = " | ".join(f"{shares[word]:.3f}" for word in (*words, "mismatch"))
            sys.stdout.write(f"| {truth}, {len(names)} | {declared or 'nothing'} | {figures} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
