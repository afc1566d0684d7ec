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
from classifier.simulator.signals import (
    Array,
    Constant,
    Cyclic,
    HostLoad,
    Job,
    Signal,
    Stage,
    cycle_starts,
    pieces,
    scale_to_mean,
)

FLAVOURS: Final = ("ddp", "fsdp", "pipeline", "offload", "single", "starved")
_FLAVOUR_WEIGHTS: Final = (0.3, 0.22, 0.14, 0.08, 0.16, 0.1)
SAVE_STYLES: Final = ("rank0", "all_ranks", "async")

#: Per flavour: step seconds, SM activity, tensor share of it, DRAM activity, NVLink GB/s, busy share, step spread.
_RANGES: Final[dict[str, tuple[tuple[float, float], ...]]] = {
    "ddp": ((0.1, 6), (0.5, 0.92), (0.18, 0.7), (0.25, 0.6), (1, 40), (0.84, 1), (0.01, 0.05)),
    "fsdp": ((0.3, 6), (0.38, 0.88), (0.25, 0.68), (0.22, 0.55), (15, 120), (0.93, 1), (0.01, 0.06)),
    "pipeline": ((0.3, 4), (0.38, 0.6), (0.18, 0.45), (0.25, 0.45), (25, 70), (0.93, 1), (0.01, 0.05)),
    "offload": ((2, 10), (0.06, 0.3), (0.4, 0.7), (0.03, 0.18), (1, 8), (0.08, 0.4), (0.01, 0.06)),
    "single": ((0.1, 3), (0.4, 0.92), (0.1, 0.68), (0.3, 0.72), (0, 8), (0.8, 1), (0.02, 0.3)),
    "starved": ((0.2, 5), (0.08, 0.5), (0.1, 0.5), (0.08, 0.4), (0, 6), (0.2, 0.7), (0.1, 0.6)),
}


@dataclass(frozen=True, slots=True)
class Span:
    """The stretch of time to fill, of trace time, and since when the job has been running (at most `start_s`)."""

    start_s: float
    end_s: float
    begin_s: float


@dataclass(frozen=True, slots=True)
class _Step:
    """A training step of this job: its cycle per rank, and what it draws from."""

    flavour: str
    step_s: float
    spread: float
    breaks: Array
    levels: dict[str, Array]
    memory: float
    skew: Array
    wobble: Array  # factor on the activity per rank
    waiting: float  # SM activity of a rank that waits in a collective


def training_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span, fault: str | None = None) -> Job:
    """Return a training job that fills `span`; `fault` is None, "stall" or "rank0_saves"."""
    step = _draw_step(draws, board, len(gpus))
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


def _draw_step(draws: Draws, board: Board, ranks: int) -> _Step:
    flavour = draws.choice("flavour", FLAVOURS, _FLAVOUR_WEIGHTS)
    ranges = _RANGES[flavour]
    step_s = draws.log_uniform("step_s", *ranges[0])
    sm = draws.uniform("sm", *ranges[1])
    tensor = draws.uniform("tensor", ranges[2][0] * sm, ranges[2][1] * sm)
    dram = draws.uniform("dram", *ranges[3])
    nvlink = draws.uniform("nvlink_gb_s", *ranges[4]) * 1e9
    busy = draws.uniform("busy", *ranges[5])
    spread = draws.log_uniform("step_spread", *ranges[6])
    accumulation = round(draws.log_uniform("accumulation", 1, 16)) if flavour != "offload" else 1
    exposed = draws.uniform("exposed", 0.0, 0.25) if ranks > 1 else 0.0
    waiting = _waiting_share(draws, board)
    pcie = draws.log_uniform("pcie_gb_s", 0.02, 2.0 if flavour in {"single", "starved"} else 0.15) * 1e9
    bursty_pcie = draws.uniform("offload_gb_s", 4, 13) * 1e9 if flavour == "offload" else 0.0
    if ranks == 1 or board.nvlink_bytes_per_second == 0:
        nvlink = 0.0
    nvlink = min(nvlink, 0.3 * board.nvlink_bytes_per_second)
    link = 1.0 if flavour in {"fsdp", "pipeline"} else 0.0  # whether links are used during compute, too
    rows: list[tuple[float, dict[str, float]]] = [(1 - busy, {"pcie_receive": 1.0, "pcie_transmit": bursty_pcie})]
    compute = busy * (1 - exposed)
    for micro in range(accumulation):
        last = float(micro == accumulation - 1)
        share = 0.92 * compute / accumulation
        base = {"busy": 1.0, "dram": 1.0, "pcie_receive": 1.0, "nvlink": link * 0.6}
        rows.append((share / 3, {**base, "sm": 0.95, "tensor": 0.95}))
        rows.append((share * 2 / 3, {**base, "sm": 1.05, "tensor": 1.08, "nvlink": max(link, 0.4 * last)}))
    if exposed > 0:
        rows.append((busy * exposed, {"busy": 1.0, "spin": waiting, "dram": 0.3, "nvlink": 2.0}))
    rows.append((0.08 * compute, {"busy": 1.0, "sm": 0.8, "dram": 1.5, "pcie_receive": 1.0, "nvlink": link * 0.3}))
    breaks, levels = pieces(rows)
    levels["sm"] = scale_to_mean(breaks, levels["sm"], sm - waiting * busy * exposed, 0.985)
    levels["tensor"] = scale_to_mean(breaks, levels["tensor"], tensor, 0.9)
    levels["dram"] = scale_to_mean(breaks, levels["dram"], dram, 0.95)
    links = scale_to_mean(breaks, levels.pop("nvlink"), nvlink, 0.9 * max(board.nvlink_bytes_per_second, 1.0))
    levels["nvlink_receive"] = links
    levels["nvlink_transmit"] = links * draws.uniform("nvlink_asymmetry", 0.96, 1.04)
    levels["pcie_receive"] = scale_to_mean(breaks, levels["pcie_receive"], pcie, board.pcie_bytes_per_second)
    levels["pcie_receive"] = levels["pcie_receive"] + bursty_pcie * (levels["busy"] < 0.5)
    levels["pcie_transmit"] = levels["pcie_transmit"] + pcie * draws.uniform("pcie_asymmetry", 0.02, 0.5)
    return _Step(
        flavour=flavour,
        step_s=step_s,
        spread=spread,
        breaks=breaks,
        levels=levels,
        memory=draws.uniform("memory", 0.12, 0.96),
        skew=draws.rng.uniform(0, min(0.05, 0.1 * step_s), ranks),
        wobble=1 + draws.rng.normal(0, draws.log_uniform("rank_spread", 0.003, 0.03), ranks),
        waiting=waiting,
    )


def _waiting_share(draws: Draws, board: Board) -> float:
    """Return the SM activity of a waiting rank: its collective's thread blocks over the multiprocessors.

    Measured 24/132 on H100; the number of blocks depends on the collective and its tuning. A kernel that sleeps
    between polls reads near zero, which both must be accepted as waiting.
    """
    blocks = float(draws.choice("blocks", ("1", "8", "16", "24", "32"), (0.1, 0.2, 0.25, 0.3, 0.15)))
    return blocks / board.multiprocessors


def _cyclic(draws: Draws, step: _Step, start_s: float, end_s: float, tail: float) -> tuple[Signal, ...]:
    starts = cycle_starts(draws.rng, start_s, end_s, period_s=step.step_s, spread=step.spread, tail=tail)
    signals: list[Signal] = []
    for skew, wobble in zip(step.skew, step.wobble, strict=True):
        levels = dict(step.levels)
        for name in ("sm", "tensor", "dram"):
            levels[name] = np.minimum(levels[name] * wobble, 0.99)
        signals.append(Cyclic(step.breaks, levels, starts + skew))
    return tuple(signals)


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
    draws: Draws, step: _Step, board: Board, host: list[HostLoad], *, start_s: float, load_s: float, warm_s: float
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

    def signals(self, rng: np.random.Generator, step: _Step) -> tuple[Signal, ...]:
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
    step: _Step,
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
            signals=_cyclic(draws, step, seen_from, end, tail),
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


def _evaluation(step: _Step, start_s: float, end_s: float) -> Stage:
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

    def stage(self, start_s: float, step: _Step) -> Stage:
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
