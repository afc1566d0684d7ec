"""Plays hours of a node through the pipeline as fast as it goes: `python -m tests.bench_day HOURS` prints its memory.

Histories, labels, detectors, accounts and the page are those of a live node; sampling and serving are not here. The
demonstration trace is played again and again, each time with other processes, so that jobs come, hang and go. The last
line is `growth BYTES`: from the end of the first hour, when every history is full, to the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator

from agent.clock import Instant
from agent.composition import build_pipeline
from agent.config import Config
from agent.daemon import bundled_demo
from agent.pipeline import JUDGEMENT_PERIOD_S
from agent.records import GpuSlowSample, Record, Tick
from agent.trace import TraceReader
from exporters.prometheus import PrometheusPage
from tests.end_to_end.budget_node import SCRAPE_SECONDS, resident_bytes


def main(hours: float) -> int:
    pipeline = build_pipeline(Config(), replay=True)
    snapshot = None
    page = PrometheusPage(lambda: snapshot)
    judge_s = scrape_s = hour_s = 0.0
    after_first_hour = None
    for tick in _ticks():
        now = Instant(tick.monotonic_s, tick.wall_s)
        pipeline.ingest(tick)
        if now.monotonic_s >= judge_s:
            pipeline.judge(now)
            judge_s += JUDGEMENT_PERIOD_S
        if now.monotonic_s >= scrape_s:
            snapshot = pipeline.snapshot(now)
            page.render()
            scrape_s += SCRAPE_SECONDS
        if now.monotonic_s >= hour_s:
            resident, findings = resident_bytes(os.getpid()), sum(pipeline.findings.totals.values())
            _say(f"{hour_s / 3600:.0f} h: {resident / 1e6:.1f} MB resident, {findings} findings")
            if hour_s == 3600:
                after_first_hour = resident
            hour_s += 3600
        if now.monotonic_s >= hours * 3600:
            break
    _say(f"growth {resident_bytes(os.getpid()) - (after_first_hour or 0)}")
    return 0


def _ticks() -> Iterator[Tick]:
    recorded = tuple(TraceReader(bundled_demo(), _say))
    start_s = recorded[0].monotonic_s
    length_s = recorded[-1].monotonic_s - start_s + 1.0
    for round_number in itertools.count():
        for tick in recorded:
            later_s = round_number * length_s - start_s
            monotonic_s, wall_s = tick.monotonic_s + later_s, tick.wall_s + later_s
            records = tuple(_moved(record, monotonic_s, wall_s, round_number) for record in tick.records)
            yield Tick(monotonic_s=monotonic_s, wall_s=wall_s, records=records)


def _moved(record: Record, monotonic_s: float, wall_s: float, round_number: int) -> Record:
    """Return the record at another time, and with other process ids in each round."""
    if isinstance(record, GpuSlowSample) and record.processes:
        processes = tuple(process._replace(pid=process.pid + round_number) for process in record.processes)
        return dataclasses.replace(record, monotonic_s=monotonic_s, wall_s=wall_s, processes=processes)
    return dataclasses.replace(record, monotonic_s=monotonic_s, wall_s=wall_s)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
