"""One training step: its cycle of loading, forward, backward, all-reduce and optimizer, drawn per flavour of training.

Ranges are measured on 8x H100 where that is known (DDP, FSDP, tensor and pipeline parallel, CPU offload), else they
are priors, wide on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from classifier.simulator.boards import Board
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import Array, Cyclic, Signal, cycle_starts, pieces, scale_to_mean

FLAVOURS: Final = ("ddp", "fsdp", "pipeline", "offload", "single", "starved")
_FLAVOUR_WEIGHTS: Final = (0.3, 0.22, 0.14, 0.08, 0.16, 0.1)
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
class Step:
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


def draw_step(draws: Draws, board: Board, ranks: int) -> Step:
    """Return the step of a job of `ranks` GPUs; its cycle has the drawn means, whatever its shape."""
    flavour = draws.choice("flavour", FLAVOURS, _FLAVOUR_WEIGHTS)
    ranges = _RANGES[flavour]
    step_s = draws.log_uniform("step_s", *ranges[0])
    sm = draws.uniform("sm", *ranges[1])
    tensor = draws.uniform("tensor", ranges[2][0] * sm, ranges[2][1] * sm)
    dram = draws.uniform("dram", *ranges[3])
    nvlink = draws.uniform("nvlink_gb_s", *ranges[4]) * 1e9
    busy = draws.uniform("busy", *ranges[5])
    spread = draws.log_uniform("step_spread", *ranges[6])
    accumulation = round(draws.log_uniform("accumulation", 1, 1 if flavour == "offload" else 16))
    exposed = draws.uniform("exposed", 0.0, 0.25) * (ranks > 1)
    waiting = _waiting_share(draws, board)
    pcie = draws.log_uniform("pcie_gb_s", 0.02, 2.0 if flavour in {"single", "starved"} else 0.15) * 1e9
    bursty_pcie = draws.uniform("offload_gb_s", 4, 13) * 1e9 if flavour == "offload" else 0.0
    nvlink = min(nvlink, 0.3 * board.nvlink_bytes_per_second) * (ranks > 1)
    # Without NVLink the all-reduce goes over PCIe.
    reduced = min(nvlink or draws.uniform("all_reduce_gb_s", 0.3, 6) * 1e9, 0.3 * board.pcie_bytes_per_second)
    over_pcie = reduced if ranks > 1 and board.nvlink_bytes_per_second == 0 else 0.0
    breaks, levels = _cycle(flavour, busy, exposed, accumulation, waiting)
    levels["sm"] = scale_to_mean(breaks, levels["sm"], sm - waiting * busy * exposed, 0.985)
    levels["tensor"] = scale_to_mean(breaks, levels["tensor"], tensor, 0.9)
    levels["dram"] = scale_to_mean(breaks, levels["dram"], dram, 0.95)
    traffic = levels.pop("nvlink")
    links = scale_to_mean(breaks, traffic, nvlink, 0.9 * max(board.nvlink_bytes_per_second, 1.0))
    levels["nvlink_receive"] = links
    levels["nvlink_transmit"] = links * draws.uniform("nvlink_asymmetry", 0.96, 1.04)
    levels["pcie_receive"] = scale_to_mean(breaks, levels["pcie_receive"], pcie, board.pcie_bytes_per_second)
    offloaded: Array = np.asarray(levels["busy"] < 0.5, dtype=np.float64) * bursty_pcie
    levels["pcie_receive"] = levels["pcie_receive"] + offloaded
    levels["pcie_transmit"] = offloaded + pcie * draws.uniform("pcie_asymmetry", 0.02, 0.5)
    if over_pcie:
        exchanged = scale_to_mean(breaks, traffic, over_pcie, 0.8 * board.pcie_bytes_per_second)
        levels["pcie_receive"] = levels["pcie_receive"] + exchanged
        levels["pcie_transmit"] = levels["pcie_transmit"] + exchanged
    return Step(
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


def _cycle(
    flavour: str, busy: float, exposed: float, accumulation: int, waiting: float
) -> tuple[Array, dict[str, Array]]:
    """Return the pieces of a step with levels that have a shape only; `exposed` is all-reduce without compute."""
    link = 1.0 if flavour in {"fsdp", "pipeline"} else 0.0  # whether links are used during compute, too
    rows: list[tuple[float, dict[str, float]]] = [(1 - busy, {"pcie_receive": 1.0})]
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
    return pieces(rows)


def _waiting_share(draws: Draws, board: Board) -> float:
    """Return the SM activity of a waiting rank: its collective's thread blocks over the multiprocessors.

    Measured 24/132 on H100; the number of blocks depends on the collective and its tuning. A kernel that sleeps
    between polls reads near zero, which both must be accepted as waiting.
    """
    blocks = float(draws.choice("blocks", ("1", "8", "16", "24", "32"), (0.1, 0.2, 0.25, 0.3, 0.15)))
    return blocks / board.multiprocessors


def step_signals(draws: Draws, step: Step, start_s: float, end_s: float, tail: float) -> tuple[Signal, ...]:
    """Return steps one after another per rank: together up to some skew, not alike to the last per cent."""
    starts = cycle_starts(draws.rng, start_s, end_s, period_s=step.step_s, spread=step.spread, tail=tail)
    signals: list[Signal] = []
    for skew, wobble in zip(step.skew, step.wobble, strict=True):
        levels = dict(step.levels)
        for name in ("sm", "tensor", "dram"):
            levels[name] = np.minimum(levels[name] * wobble, 0.99)
        signals.append(Cyclic(step.breaks, levels, starts + skew))
    return tuple(signals)
