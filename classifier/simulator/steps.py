"""One training step of a job: its cycle per rank with the drawn means, and the steps one after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from classifier.simulator.boards import Board
from classifier.simulator.cycles import Shape, rows_of
from classifier.simulator.priors import GB, Priors, take
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import Array, Cyclic, cycle_starts, pieces, scale_to_mean
from classifier.simulator.training_styles import STYLES

FLAVOURS: Final[Mapping[str, float]] = {
    "ddp": 0.3,
    "fsdp": 0.22,
    "pipeline": 0.14,
    "offload": 0.08,
    "single": 0.16,
    "starved": 0.1,
}
#: Styles whose ranks may as well be separate runs on separate GPUs, as in a sweep.
_SEPARABLE: Final = {"single", "lora", "starved", "tiny", "cnn"}
#: Styles whose batches differ in size.
_UNPACKED: Final = {"lora", "full_tuning", "reinforcement"}
#: Styles that exchange little enough for PCIe.
_OVER_PCIE: Final = {"ddp", "small_ddp", "single", "cnn", "starved", "tiny"}
#: Data types and how often: without tensor cores in older or careless code.
_PRECISIONS: Final = ("bf16", "fp16", "tf32", "fp32")
#: FP32 pipe over SM activity, with the matrices on the tensor cores and without; priors, as every use of this pipe.
SINGLES: Final = (0.02, 0.22)
PLAIN_SINGLES: Final = (0.25, 0.75)
_ONE_PROCESS: Final = 1.0  # cores of a main thread that launches kernels and waits for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A training step of this job: its cycle per rank, and what it draws from."""

    flavour: str
    priors: Priors
    step_s: float
    spread: float
    tail: float  # share of steps that take two to four times as long
    cycles: tuple[tuple[Array, dict[str, Array]], ...]  # per rank: breaks and levels
    memory: float
    first_memory: float  # before the longest sequence came: an allocator grows and does not give back
    skew: Array
    pace: Array  # factor on the step per rank; ones where the ranks are one job
    waiting: float  # SM activity of a rank that waits in a collective
    singles: tuple[float, float]  # of the job: FP32 pipe over SM activity
    together: bool  # whether the ranks wait for each other
    traffic: tuple[Array, Array]  # breaks and levels of the reduction over the step, mean 1

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return len(self.cycles)

    def mean(self, rank: int, name: str) -> float:
        """Return the mean of a channel over the cycle of `rank`."""
        breaks, levels = self.cycles[rank]
        return float(np.sum(levels[name] * np.diff(breaks))) if name in levels else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Means:
    """What the cycle of every rank has to come to, links in bytes per second."""

    sm: float
    tensor: float
    dram: float
    fp16: float
    nvlink: float
    asymmetry: float
    pcie: float
    pcie_back: float
    over_pcie: float  # all-reduce where there is no NVLink
    offload: float
    cores: float
    singles: tuple[float, float]


def draw_step(
    draws: Draws, board: Board, ranks: int, flavours: Mapping[str, float] = FLAVOURS, *, collective: bool = False
) -> Step:
    """Return the step of a job of `ranks` GPUs; its cycle has the drawn means, whatever its shape.

    `collective` keeps the ranks one job, whatever the style.
    """
    flavour = draws.choice("flavour", tuple(flavours), tuple(flavours.values()))
    priors = STYLES[flavour]
    step_s = take(draws, priors, "step_s")
    apart = draws.chance("separate_runs", 0.5 * (flavour in _SEPARABLE and not collective)) or ranks == 1
    waiting = waiting_share(draws, board)
    busy = take(draws, priors, "busy")
    shape = Shape(
        flavour=flavour,
        busy=busy,
        exposed=take(draws, priors, "exposed") * (not apart),
        accumulation=max(1, round(take(draws, priors, "accumulation"))),
        waiting=waiting,
    )
    means = _means(draws, board, priors, flavour, apart=apart)
    shapes = _shapes(draws, shape, priors, ranks, apart=apart)
    wobble = 1 + draws.rng.normal(0, draws.log_uniform("rank_spread", 0.003, 0.03), ranks)
    cycles = [_scaled(board, one, means, factor) for one, factor in zip(shapes, wobble, strict=True)]
    if flavour == "pipeline":
        _add_peers(draws, priors, cycles, board)
    memory = take(draws, priors, "memory")
    grows = draws.chance("memory_grows", 0.6 * (flavour in _UNPACKED))
    starved = flavour in {"single", "starved", "tiny"}
    return Step(
        flavour=flavour,
        priors=priors,
        step_s=step_s,
        spread=take(draws, priors, "step_spread"),
        tail=float(draws.rng.uniform(0, 0.05)) if starved else 0.0,
        cycles=tuple(cycles),
        memory=memory,
        first_memory=memory * (draws.uniform("first_memory", 0.75, 1.0) if grows else 1.0),
        skew=draws.rng.uniform(0, min(0.05, 0.1 * step_s), ranks),
        pace=draws.rng.uniform(0.8, 1.25, ranks) if apart and ranks > 1 else np.ones(ranks),
        waiting=waiting,
        singles=means.singles,
        together=not apart,
        traffic=_reduction(shapes[0]),
    )


def _reduction(shape: Shape) -> tuple[Array, Array]:
    """Return when the ranks of a job exchange data over the step."""
    breaks, levels = pieces(rows_of(shape))
    mean = float(np.sum(levels["nvlink"] * np.diff(breaks)))
    return breaks, levels["nvlink"] / mean if mean > 0 else np.ones(breaks.size - 1)


def _means(draws: Draws, board: Board, priors: Priors, flavour: str, *, apart: bool) -> _Means:
    sm = take(draws, priors, "sm")
    plain = 0.2 if flavour in {"cnn", "single", "starved", "tiny"} else 0.03
    precision = draws.choice("precision", _PRECISIONS, (0.6, 0.25, 0.15 - plain / 2, plain))
    nvlink = min(take(draws, priors, "nvlink_gb_s") * GB, 0.4 * board.nvlink_bytes_per_second) * (not apart)
    # Without NVLink, or with peer access switched off, the all-reduce goes over PCIe.
    bypassed = draws.chance("reduces_over_pcie", 0.15 * (flavour in _OVER_PCIE))
    nvlink *= not bypassed
    reduced = min(draws.uniform("all_reduce_gb_s", 0.3, 6) * GB, 0.3 * board.pcie_bytes_per_second)
    offload = take(draws, priors, "offload_gb_s") * GB if flavour == "offload" else 0.0
    pcie = take(draws, priors, "pcie_gb_s") * GB
    return _Means(
        sm=sm,
        tensor=min(0.9, take(draws, priors, "tensor", sm * (precision != "fp32"))),
        dram=take(draws, priors, "dram"),
        # Half-precision math outside the tensor cores shows with fp16 only; it stays 0 with bf16 [H100].
        fp16=draws.uniform("fp16", 0.01, 0.12) * sm * (precision == "fp16"),
        nvlink=nvlink,
        asymmetry=draws.uniform("nvlink_asymmetry", 0.96, 1.04),
        pcie=pcie,
        pcie_back=pcie * draws.uniform("pcie_asymmetry", 0.02, 0.5),
        over_pcie=reduced if (board.nvlink_bytes_per_second == 0 or bypassed) and not apart else 0.0,
        offload=min(offload, 0.8 * board.pcie_bytes_per_second),
        cores=take(draws, priors, "cores"),
        singles=PLAIN_SINGLES if precision == "fp32" else SINGLES,
    )


def _shapes(draws: Draws, shape: Shape, priors: Priors, ranks: int, *, apart: bool) -> list[Shape]:
    """Return the shape of the step for each rank."""
    if shape.flavour == "pipeline":
        stages = round(draws.log_uniform("pipeline_stages", 2, 8))
        within = draws.chance("stages_within_node", 0.4)
        bubble = min(take(draws, priors, "bubble"), 0.6 * shape.busy)
        here = int(draws.rng.integers(stages))
        places = [(rank * stages // ranks if within else here) / max(1, stages - 1) for rank in range(ranks)]
        return [replace(shape, bubble=bubble, place=place) for place in places]
    if shape.flavour == "starved":
        batches = round(draws.log_uniform("queued_batches", 1, 8))
        # The ranks of one job wait for the slowest loader, in the all-reduce or all of them at their own.
        peers = draws.chance("waits_in_collective", 0.4) and not apart
        late = int(draws.rng.integers(ranks))
        return [replace(shape, batches=batches, waits_for_peer=peers and rank != late) for rank in range(ranks)]
    if shape.flavour == "offload":
        return [replace(shape, transfer=draws.uniform("transfer", 0.06, 0.2))] * ranks
    return [shape] * ranks


def _scaled(board: Board, shape: Shape, means: _Means, wobble: float) -> tuple[Array, dict[str, Array]]:
    """Return breaks and levels with the drawn means; a rank differs from the others by `wobble`."""
    breaks, levels = pieces(rows_of(shape))
    nothing = np.zeros(breaks.size - 1)
    lengths = np.diff(breaks)
    spin = levels.get("spin", nothing)
    # Waiting counts as SM activity, too; what a rank waits for another's input comes on top.
    sm = max(0.4 * means.sm, means.sm - float(np.sum(spin * lengths)))
    levels["sm"] = scale_to_mean(breaks, levels["sm"], sm * wobble, 0.985)
    for name, mean, ceiling in (("tensor", means.tensor, 0.9), ("dram", means.dram, 0.95)):
        # No more than an instant of the work allows: a burst of a tenth of the step cannot have a mean above that.
        levels[name] = scale_to_mean(breaks, levels.get(name, nothing), mean * wobble, ceiling)
    levels["tensor"] = np.minimum(levels["tensor"], 0.95 * levels["sm"])  # a pipe is part of its multiprocessor
    if means.fp16 > 0:
        levels["fp16"] = scale_to_mean(breaks, levels["sm"], means.fp16, 0.9)
    traffic = levels.pop("nvlink")
    links = scale_to_mean(breaks, traffic, means.nvlink, 0.9 * max(board.nvlink_bytes_per_second, 1.0))
    levels["nvlink_receive"] = links if means.nvlink > 0 else nothing
    levels["nvlink_transmit"] = levels["nvlink_receive"] * means.asymmetry
    levels["pcie_receive"] = scale_to_mean(
        breaks, levels.get("pcie_receive", nothing), means.pcie, board.pcie_bytes_per_second
    )
    levels["pcie_receive"] = levels["pcie_receive"] + levels.pop("offload_in", nothing) * means.offload
    # Gradients leave at about half the rate at which weights come back: 6.9 against 12.2 GB/s [H100 T6].
    levels["pcie_transmit"] = means.pcie_back + levels.pop("offload_out", nothing) * 0.57 * means.offload
    if means.over_pcie > 0:
        exchanged = scale_to_mean(breaks, traffic, means.over_pcie, 0.8 * board.pcie_bytes_per_second)
        levels["pcie_receive"] = levels["pcie_receive"] + exchanged
        levels["pcie_transmit"] = levels["pcie_transmit"] + exchanged
    adam = levels.pop("adam", None)
    levels["cpu_cores"] = _ONE_PROCESS + (nothing + means.cores if adam is None else adam * means.cores)
    return breaks, levels


def _add_peers(draws: Draws, priors: Priors, cycles: list[tuple[Array, dict[str, Array]]], board: Board) -> None:
    """Let the GPUs that hand activations to the next node do so over PCIe: two of eight in H100 T13."""
    rate = min(take(draws, priors, "peer_gb_s") * GB, 0.5 * board.pcie_bytes_per_second)
    count = max(1, len(cycles) // 4)
    for rank in draws.rng.permutation(len(cycles))[:count]:
        breaks, levels = cycles[rank]
        handed = scale_to_mean(breaks, levels["sm"], rate, board.pcie_bytes_per_second)
        levels["pcie_receive"] = levels["pcie_receive"] + handed
        levels["pcie_transmit"] = levels["pcie_transmit"] + handed


def waiting_share(draws: Draws, board: Board) -> float:
    """Return the SM activity of a waiting rank: its collective's thread blocks over the multiprocessors.

    Measured 24/132 on H100; the number of blocks depends on the collective and its tuning. A kernel that sleeps
    between polls reads near zero, which both must be accepted as waiting.
    """
    blocks = float(draws.choice("blocks", ("1", "8", "16", "24", "32"), (0.1, 0.2, 0.25, 0.3, 0.15)))
    return blocks / board.multiprocessors


def step_signals(draws: Draws, step: Step, start_s: float, end_s: float) -> tuple[Cyclic, ...]:
    """Return steps one after another per rank: together up to some skew, or each at its own pace."""

    def starts(pace: float = 1.0) -> Array:
        return cycle_starts(draws.rng, start_s, end_s, period_s=step.step_s * pace, spread=step.spread, tail=step.tail)

    shared = starts()
    signals: list[Cyclic] = []
    for (breaks, levels), skew, pace in zip(step.cycles, step.skew, step.pace, strict=True):
        own = shared if step.together or step.ranks == 1 else starts(pace)
        signals.append(Cyclic(breaks, levels, own + skew))
    return tuple(signals)
