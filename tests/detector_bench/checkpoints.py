"""Days of jobs that save: as usual, late, never again, cut short, much too long. SIGNALS.md 3.3 and 4."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.detector_bench.cases import Draw, Truth, kind
from tests.detector_bench.node import Node
from tests.detector_bench.work import Job, draw_training

_DAY = {
    "hours": 24.0,
    "gpus": (1, 1, 2),
    "profiles": ("full", "no_profiling", "no_infiniband", "slow_polling", "unprivileged"),
    "boards": ("H100", "A100", "H200"),
}


class _Day:
    """One job over a day with its saves: period, spread, length and place are drawn once."""

    def __init__(self, draw: Draw, *, declared: bool = False, style: str | None = None) -> None:
        self.draw, self.rng = draw, draw.rng
        self.node: Node = draw.node(ports=0)
        self.period = draw.between(600, 5400)
        self.spread = draw.between(0.003, 0.04)
        self.length = draw.between(8, 60)
        self.rate = draw.between(3e8, 2e9)
        self.style = style or draw.pick("rank0", "all", "async")
        places = ["disk_written", "network_transmit"] + ["filesystem_written"] * (self.node.filesystem is not None)
        self.to = str(self.rng.choice(places))
        gpus = tuple(range(self.node.gpus))
        training = draw_training(self.rng, draw.pick("ddp", "fsdp", "small"))
        declared_s = self.period if declared else None
        self.job = Job(self.node, gpus, replace(training, read=min(training.read, 3e7)), declared_s=declared_s)
        self.job.load(0, 60)
        self.now = 60.0
        self.truth = Truth()
        self.truth.accept("collective_wait", severity=1)

    def pace(self) -> float:
        return self.period * float(self.rng.normal(1.0, self.spread))

    def until(self, end_s: float) -> bool:
        return self.now + 1.6 * self.period + self.length < min(end_s, self.node.seconds)

    def train(self, seconds: float) -> None:
        self.job.train(self.now, self.now + seconds)
        self.now += seconds

    def save(self, *, length: float = 1.0, rate: float = 1.0) -> None:
        took = self.length * length * float(self.rng.normal(1.0, 0.05))
        if self.style == "async":
            # A burst from the device, then the write in the background. Trained first: what is painted later would take
            # the burst away.
            start = self.now
            self.train(3.0)
            self.node.activity["pcie_tx"][:, self.node.span(start, self.now)] += 8e9
            self.job.save(start + 2, took * 1.5, to=self.to, style="async", rate=self.rate * rate / 1.5)
            return
        self.job.save(self.now, took, to=self.to, style=self.style, rate=self.rate * rate)
        self.now += took

    def regular(self, end_s: float) -> None:
        while self.until(end_s):
            self.train(self.pace())
            self.save()

    def finish(self) -> tuple[Node, Truth]:
        self.job.train(self.now, self.node.seconds)
        return self.node, self.truth


def _finish_regular(day: _Day) -> tuple[Node, Truth]:
    """Save as usual until the day is over: the last stretch is shorter than a period."""
    while day.now < day.node.seconds:
        day.train(day.pace())
        if day.now + 2 * day.length < day.node.seconds:
            day.save()
        else:
            break
    return day.finish()


@kind("jobday", "a day of saves as usual", **_DAY)
def day_regular(draw: Draw) -> tuple[Node, Truth]:
    return _finish_regular(_Day(draw))


@kind("jobday", "intervals that spread by 10 to 20 %", **_DAY)
def day_spread(draw: Draw) -> tuple[Node, Truth]:
    day = _Day(draw)
    day.spread = draw.rng.uniform(0.08, 0.15)
    day.pace = lambda: day.period * float(np.clip(day.rng.normal(1.0, day.spread), 0.7, 1.35))
    return _finish_regular(day)


@kind("jobday", "the period changes once, for good", **_DAY)
def day_changes(draw: Draw) -> tuple[Node, Truth]:
    day = _Day(draw)
    day.period = min(day.period, 2400)
    day.regular(draw.rng.uniform(0.35, 0.6) * day.node.seconds)
    at, factor = day.now, draw.pick(0.5, 2.0, 1.5)
    day.period *= factor
    # Until it is relearned a late save may be said: once, as a warning, three intervals long.
    day.truth.accept("missed_checkpoint", at, at + 4 * day.period, severity=2)
    return _finish_regular(day)


@kind("jobday", "a job that never saves from here", **_DAY)
def day_never(draw: Draw) -> tuple[Node, Truth]:
    return _Day(draw).finish()


@kind("jobday", "the job ends and starts again with other processes, twice", **_DAY)
def day_restarts(draw: Draw) -> tuple[Node, Truth]:
    day = _Day(draw)
    for share in (0.33, 0.66):
        day.regular(share * day.node.seconds)
        end = day.now + 0.4 * day.period
        day.train(0.4 * day.period)
        day.node.paint(day.job.gpus, end, day.node.seconds)
        day.node.end_processes(day.job.gpus, end)
        day.now = end + draw.between(60, 900)
        day.job = Job(day.node, day.job.gpus, day.job.training, key=day.job.key, start_s=day.now)
        day.job.load(day.now, day.now + 60)
        day.now += 60
    return _finish_regular(day)


@kind("jobday", "evaluations of up to half an hour between saves: no step, no save", **_DAY)
def day_evaluates(draw: Draw) -> tuple[Node, Truth]:
    day = _Day(draw)
    while day.until(day.node.seconds):
        day.train(day.pace())
        day.save()
        if draw.rng.random() < 0.2:
            length = draw.between(60, 1800)
            cells = day.node.span(day.now, day.now + length)
            rough = draw.rng.normal(1, 0.05, max(0, cells.stop - cells.start))
            day.node.paint(
                day.job.gpus, day.now, day.now + length, busy=0.9, sm=0.45 * rough, tensor=0.2 * rough, dram=0.3 * rough
            )
            # Nothing of the training runs; whether the clock of saves stops cannot always be told.
            day.truth.accept("missed_checkpoint", day.now, day.now + length + 1.3 * day.period, severity=2)
            day.now += length
    return _finish_regular(day)


@kind("jobday", "other programs write bursts of their own beside the saves", **_DAY)
def day_noisy_disk(draw: Draw) -> tuple[Node, Truth]:
    day = _Day(draw)
    for _ in range(int(draw.rng.integers(5, 40))):
        at = draw.rng.uniform(0, day.node.seconds)
        day.node.add_host(
            draw.pick("disk_written", "network_transmit"), at, at + draw.between(5, 120), draw.between(1e8, 1e9)
        )
    return _finish_regular(day)


@kind("jobday", "saves stop, training goes on", **_DAY)
def day_missed(draw: Draw) -> tuple[Node, Truth]:
    return _missed(_Day(draw))


@kind("jobday", "saves stop; the job's file declares the interval", **(_DAY | {"needs": ("owners",)}))
def day_missed_declared(draw: Draw) -> tuple[Node, Truth]:
    return _missed(_Day(draw, declared=True))


def _missed(day: _Day) -> tuple[Node, Truth]:
    first = max(7 * (day.period + day.length), 0.3 * day.node.seconds)
    day.regular(min(first, 0.5 * day.node.seconds))
    for _ in range(2):
        if day.now + 8 * day.period > day.node.seconds:
            break
        due = day.now + day.period
        seconds = day.period * day.rng.uniform(2.6, 3.5)
        _expect(day, due, day.now + seconds)
        day.train(seconds)
        day.save()
        for _ in range(5):
            day.train(day.pace())
            day.save()
    if not day.truth.expected:
        due = day.now + day.period
        _expect(day, due, day.node.seconds)
        return day.finish()
    day.truth.accept("missed_checkpoint", day.now - 5 * day.period, day.now, severity=2)
    return _finish_regular(day)


def _expect(day: _Day, due: float, end: float) -> None:
    # +50 % of the period; below 4 minutes the least allowance of 120 s counts.
    allowed = max(0.5 * day.period, 150.0) + 20.0
    day.truth.expect("missed_checkpoint", due, end, allowed, severity=2, tag="missed")


@kind("jobday", "one save holds less than half of the usual bytes", **_DAY)
def day_truncated(draw: Draw) -> tuple[Node, Truth]:
    day = _Day(draw)
    day.length = max(day.length, 15.0)
    day.regular(0.55 * day.node.seconds)
    day.train(day.pace())
    at = day.now
    day.save(length=draw.rng.uniform(0.1, 0.35), rate=1.0)
    day.truth.expect("missed_checkpoint", at, at + day.period, 420.0, severity=2, tag="truncated")
    day.truth.accept("missed_checkpoint", at, at + 2.5 * day.period, severity=2)
    return _finish_regular(day)


@kind("jobday", "one save takes five times as long as usual", **_DAY)
def day_overlong(draw: Draw) -> tuple[Node, Truth]:
    day = _Day(draw)
    day.length = max(day.length, 25.0)
    day.regular(0.55 * day.node.seconds)
    day.train(day.pace())
    at = day.now
    # The same bytes, by storage that is that much slower.
    factor = draw.rng.uniform(5, 8)
    day.save(length=factor, rate=1 / factor)
    took = 8 * day.length * (1.5 if day.style == "async" else 1.0)
    day.truth.expect("missed_checkpoint", at, at + took + day.period, took + 300.0, severity=2, tag="overlong")
    day.truth.accept("collective_wait", at, at + took + 60, severity=2)
    return _finish_regular(day)
