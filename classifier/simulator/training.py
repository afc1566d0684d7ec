"""Training jobs: steps with all-reduce, loading, evaluation, checkpoints, and what goes wrong with them.

Ranges are the class priors for training measured on 8x H100 (DDP, FSDP, tensor and pipeline parallel, CPU offload),
the Acme/InternLM production distributions (arXiv:2403.07648) and public hang reports; where no measurement is known
they are wide on purpose and reach into those of inference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from classifier.simulator.boards import Board
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import Constant, HostLoad, Job, Signal, Stage
from classifier.simulator.steps import Step, draw_step, step_signals

SAVE_STYLES: Final = ("rank0", "all_ranks", "async")


@dataclass(frozen=True, slots=True)
class Span:
    """The stretch of time to fill, of trace time, and since when the job has been running (at most `start_s`)."""

    start_s: float
    end_s: float
    begin_s: float


def training_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span, fault: str | None = None) -> Job:
    """Return a training job that fills `span`; `fault` is None, "stall" or "rank0_saves"."""
    step = draw_step(draws, board, len(gpus))
    saves = _Saves(draws, fault)
    load_s = draws.log_uniform("load_s", 8, 90)
    warm_s = draws.log_uniform("warm_up_s", 6, 120)
    stall = _Stall(draws, span, load_s + warm_s) if fault == "stall" else None
    evaluates = draws.chance("evaluates", 0.3)
    host: list[HostLoad] = []
    stages: list[Stage] = []
    now = span.begin_s
    while now < span.end_s:
        if stages:  # a restart: the processes are gone for a while
            down_s = float(draws.rng.uniform(6, 30))
            stages.append(_absent(now, now + down_s, len(gpus)))
            now += down_s
        until = min(span.end_s, stall.at_s) if stall and now < stall.at_s else span.end_s
        opening = _open(draws, step, board, host, start_s=now, load_s=load_s, warm_s=warm_s)
        stages += opening
        now = opening[-1].end_s
        for stage in _run(
            draws, step, saves, host, seen_from_s=span.start_s, start_s=now, until_s=until, evaluates=evaluates
        ):
            stages.append(stage)
            now = stage.end_s
        if stall and until == stall.at_s:
            stages.append(stall.stage(now, step))
            now = stages[-1].end_s
        elif now >= until:
            break
    _read_dataset(draws, stages, host)
    # Above context idle, on an H100: 1 to 65 W while a collective waits; 155-165 W in all beside a rank that saves.
    watts = draws.uniform("waiting_watts", 26, 38) if fault == "rank0_saves" else None
    waiting_watts = draws.log_uniform("waiting_watts", 2, 65) if watts is None else watts
    return Job(
        gpus=gpus,
        stages=tuple(stages),
        host=tuple(host),
        power_gain=draws.uniform("power_gain", 0.88, 1.12),
        spin_watts=waiting_watts / step.waiting,
        drift=draws.log_uniform("drift", 0.004, 0.04),
    )


def _absent(start_s: float, end_s: float, ranks: int) -> Stage:
    return Stage(
        start_s=start_s,
        end_s=end_s,
        signals=(Constant(),) * ranks,
        memory_ratio=(0.0, 0.0),
        present=False,
        workload="idle",
        note="no process",
    )


def _open(
    draws: Draws, step: Step, board: Board, host: list[HostLoad], *, start_s: float, load_s: float, warm_s: float
) -> list[Stage]:
    """Return loading (memory grows, data comes in) and warm-up (ranks wait for each other, kernels compile)."""
    rng = draws.rng
    ranks = step.skew.size
    size = step.memory * board.memory_bytes * ranks * float(rng.uniform(0.1, 0.5))
    source = "disk_read" if rng.random() < 0.6 else "network_receive"
    host.append(
        HostLoad(start_s=start_s, end_s=start_s + load_s, channel=source, bytes_per_second=min(6e9, size / load_s))
    )
    copy = {"pcie_receive": min(board.pcie_bytes_per_second, size / ranks / load_s), "busy": float(rng.uniform(0, 0.3))}
    middle, end = start_s + load_s, start_s + load_s + warm_s
    late = rng.integers(ranks)
    waits: list[Signal] = []
    for rank in range(ranks):
        compiling = Constant({"busy": 0.15, "sm": 0.05, "dram": 0.03, "pcie_receive": 2e6})
        waiting = Constant({"busy": 1.0, "spin": step.waiting, "dram": 0.001, "pcie_receive": 6e5})
        waits.append(compiling if rank == late or ranks == 1 else waiting)
    grown = step.memory * float(rng.uniform(0.3, 0.8))
    return [
        Stage(
            start_s=start_s,
            end_s=middle,
            signals=(Constant(copy),) * ranks,
            memory_ratio=(0.006, grown),
            workload="training",
            note="loading",
        ),
        Stage(
            start_s=middle,
            end_s=end,
            signals=tuple(waits),
            memory_ratio=(grown, step.memory),
            workload="training",
            note="warm-up",
        ),
    ]


class _Saves:
    """How this job writes checkpoints."""

    def __init__(self, draws: Draws, fault: str | None) -> None:
        rank0 = fault == "rank0_saves"
        style = draws.choice("save_style", SAVE_STYLES, (0.4, 0.35, 0.25))
        self.style = "rank0" if rank0 else style
        self.every_s = draws.log_uniform("save_every_s", *((60, 600) if rank0 else (90, 3600)))
        # 15-57 s measured where rank 0 writes alone; once 277 s.
        self.length_s = draws.log_uniform("save_s", *((15, 57) if self.style == "rank0" else (3, 60)))
        self.rate = draws.log_uniform("save_bytes_per_second", 8e7, 3e9)
        self.spread = draws.log_uniform("save_spread", 0.003, 0.1)
        self.channel = draws.choice("save_to", ("disk_written", "network_transmit"), (0.65, 0.35))
        self.offset = float(draws.rng.uniform(0.3, 1.0))

    def signals(self, rng: np.random.Generator, step: Step) -> tuple[Signal, ...]:
        """Return what each rank does during a save."""
        ranks = step.skew.size
        per_rank = self.rate / (1 if self.style == "rank0" else ranks)
        writer = Constant(
            {
                "busy": float(rng.uniform(0.028, 0.062)),
                "sm": float(rng.uniform(0.001, 0.006)),
                "dram": float(rng.uniform(0.0005, 0.004)),
                "pcie_transmit": per_rank,
                "pcie_receive": 1e6,
            }
        )
        if self.style != "rank0":
            return (writer,) * ranks
        waiter = Constant({"busy": 1.0, "spin": step.waiting, "dram": 0.001, "pcie_receive": 6e5})
        return (writer, *(waiter,) * (ranks - 1))


def _run(
    draws: Draws,
    step: Step,
    saves: _Saves,
    host: list[HostLoad],
    *,
    seen_from_s: float,
    start_s: float,
    until_s: float,
    evaluates: bool,
) -> Iterator[Stage]:
    """Yield training and saving in turn, from `start_s` to `until_s`; parts before the span cost nothing."""
    rng = draws.rng
    tail = float(rng.uniform(0, 0.05)) if step.flavour in {"single", "starved"} else 0.0
    now = start_s
    first = True
    while now < until_s:
        length = saves.every_s * (saves.offset if first else max(0.3, float(rng.normal(1.0, saves.spread))))
        first = False
        end = min(until_s, now + max(length, 2 * step.step_s))
        if evaluates and rng.random() < 0.3 and end - now > 90:
            evaluation_s = float(rng.uniform(10, 60))
            yield _evaluation(step, now, now + evaluation_s)
            now += evaluation_s
        seen_from = max(now, min(seen_from_s, end) - 30)
        yield Stage(
            start_s=now,
            end_s=end,
            signals=step_signals(draws, step, seen_from, end, tail),
            memory_ratio=(step.memory, step.memory),
            workload="training",
        )
        now = end
        if now >= until_s:
            return
        pause_s = saves.length_s * float(np.clip(rng.normal(1, 0.08), 0.6, 2))
        blocking_s = min(pause_s, 5.0) * 0.4 if saves.style == "async" else pause_s
        written_s = pause_s * (3 if saves.style == "async" else 1)
        host.append(
            HostLoad(
                start_s=now + float(rng.uniform(0, 2)),
                end_s=now + written_s + float(rng.uniform(0, 4)),
                channel=saves.channel,
                bytes_per_second=saves.rate * pause_s / written_s,
            )
        )
        yield Stage(
            start_s=now,
            end_s=min(until_s, now + blocking_s),
            signals=saves.signals(rng, step),
            memory_ratio=(step.memory, step.memory),
            workload="training",
            note="checkpoint",
        )
        now += blocking_s


def _evaluation(step: Step, start_s: float, end_s: float) -> Stage:
    """Return a forward-only stretch: no all-reduce, less activity."""
    means = {name: float(np.sum(level * np.diff(step.breaks))) for name, level in step.levels.items()}
    levels = {"busy": 0.9, "sm": 0.8 * means["sm"], "tensor": 0.85 * means["tensor"], "dram": 0.8 * means["dram"]}
    return Stage(
        start_s=start_s,
        end_s=end_s,
        signals=(Constant(levels),) * step.skew.size,
        memory_ratio=(step.memory, step.memory),
        workload="training",
        note="evaluation",
    )


class _Stall:
    """A collective that hangs: every rank waits in it, or one rank never came."""

    def __init__(self, draws: Draws, span: Span, opening_s: float) -> None:
        earliest = max(span.begin_s + opening_s, span.start_s) + 60
        latest = max(earliest + 1, span.start_s + 0.6 * (span.end_s - span.start_s))
        self.at_s = draws.uniform("stall_at_s", earliest, latest)
        self.length_s = draws.log_uniform("stall_s", 180, 3600)
        self._variant = draws.choice("stall_variant", ("all_wait", "missing_rank"), (0.7, 0.3))
        self._missing = int(draws.rng.integers(64))
        self._sleeps = draws.chance("stall_sleeps", 0.2)

    def stage(self, start_s: float, step: Step) -> Stage:
        """Return the hang: the utilisation stays at 100 % while nothing moves."""
        ranks = step.skew.size
        spin = 0.004 if self._sleeps else step.waiting
        waiting = Constant({"busy": 1.0, "spin": spin, "dram": 0.0004, "pcie_receive": 6e5, "pcie_transmit": 2e5})
        signals: list[Signal] = [waiting] * ranks
        missing = self._missing % ranks if self._variant == "missing_rank" and ranks > 1 else None
        if missing is not None:
            signals[missing] = Constant()
        return Stage(
            start_s=start_s,
            end_s=start_s + self.length_s,
            signals=tuple(signals),
            memory_ratio=(step.memory, step.memory),
            workload="training",
            anomaly="stalled_collective",
            note="waiting",
            missing=missing,
        )


def _read_dataset(draws: Draws, stages: list[Stage], host: list[HostLoad]) -> None:
    """Add what the job reads (a data set in the page cache reads nothing) and what it logs while it trains."""
    source = draws.choice("dataset_from", ("cache", "disk_read", "network_receive"), (0.4, 0.4, 0.2))
    rate = draws.log_uniform("dataset_bytes_per_second", 1e6, 8e8)
    multi_node = draws.chance("multi_node", 0.35)
    logs = draws.log_uniform("log_bytes_per_second", 1e3, 3e5)
    fabric = draws.log_uniform("fabric_bytes_per_second", 4e8, 5e10)
    for stage in stages:
        if stage.note is None and stage.workload == "training":
            times = {"start_s": stage.start_s, "end_s": stage.end_s}
            if source != "cache":
                host.append(HostLoad(**times, channel=source, bytes_per_second=rate, roughness=0.8))
            host.append(HostLoad(**times, channel="disk_written", bytes_per_second=logs, roughness=1.2))
            if multi_node:
                host += [
                    HostLoad(**times, channel=channel, bytes_per_second=fabric, roughness=0.2)
                    for channel in ("infiniband_receive", "infiniband_transmit")
                ]
