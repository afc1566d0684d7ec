"""The shape of one training step, by style: forward, backward, all-reduce, bubbles, optimizer, transfers.

Levels are shapes only; `steps` scales them to the drawn means. `spin` alone is absolute: the SM activity of a rank
that waits in a collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Row = tuple[float, dict[str, float]]

#: Styles whose links carry activations or weights during compute, too, and how much against the reduction itself.
CONTINUOUS: Final = {
    "fsdp": 1.0,
    "full_tuning": 1.0,
    "reinforcement": 1.0,
    "pipeline": 1.0,
    "tensor": 1.0,
    "experts": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cycle depends on. `exposed` is the share of all-reduce that no compute hides."""

    flavour: str
    busy: float
    exposed: float
    accumulation: int
    waiting: float
    #: Pipeline only: share of the step that this stage idles, and its place in the pipeline from 0 to 1.
    bubble: float = 0.0
    place: float = 0.0
    #: Offload only: share of the step in which weights go to the GPU.
    transfer: float = 0.1
    #: Starved only: batches between two waits, and whether this rank waits in a collective for another's input.
    batches: int = 1
    waits_for_peer: bool = False


def rows_of(shape: Shape) -> list[Row]:
    """Return the pieces of a step in order, as (length, levels)."""
    if shape.flavour == "offload":
        return _offload(shape)
    if shape.flavour == "starved":
        return _starved(shape)
    if shape.flavour == "pipeline" and shape.bubble > 0:
        return _pipelined(shape)
    return [(1 - shape.busy, {"pcie_receive": 1.0}), *_work(shape, shape.busy), *_update(shape)]


def _work(shape: Shape, length: float) -> list[Row]:
    """Return forward and backward of each micro-batch and the all-reduce after the last."""
    link = CONTINUOUS.get(shape.flavour, 0.0)
    compute = 0.92 * length * (1 - shape.exposed)
    rows: list[Row] = []
    for micro in range(shape.accumulation):
        last = float(micro == shape.accumulation - 1)
        share = compute / shape.accumulation
        base = {"busy": 1.0, "dram": 1.0, "pcie_receive": 1.0, "nvlink": link * 0.6}
        rows.append((share / 3, {**base, "sm": 0.95, "tensor": 0.95}))
        rows.append((share * 2 / 3, {**base, "sm": 1.05, "tensor": 1.08, "nvlink": max(link, 0.4 * last)}))
    if shape.exposed > 0:
        rows.append((length * shape.exposed, {"busy": 1.0, "spin": shape.waiting, "dram": 0.3, "nvlink": 2.0}))
    return rows


def _update(shape: Shape) -> list[Row]:
    """Return the optimizer: memory-bound, no tensor cores."""
    length = 0.08 * shape.busy * (1 - shape.exposed)
    link = 0.3 * CONTINUOUS.get(shape.flavour, 0.0)
    return [(length, {"busy": 1.0, "sm": 0.8, "dram": 1.5, "pcie_receive": 1.0, "nvlink": link})]


def _pipelined(shape: Shape) -> list[Row]:
    """Return one stage of a pipeline (one forward, one backward in turn): the later the stage, the later it starts.

    A stage that waits has a receive kernel resident: busy, some SM activity, no traffic.
    """
    wait = {"busy": 1.0, "spin": 0.4 * shape.waiting, "dram": 0.02}
    work = shape.busy - shape.bubble
    early = shape.bubble * shape.place / 3
    middle = shape.bubble - 3 * early
    half = _work(shape, 0.5 * work)
    rows: list[Row] = [(1 - shape.busy, {"pcie_receive": 1.0}), (early, wait), *half, (middle, wait), *half]
    return [*rows, (2 * early, wait), *_update(shape)]


def _offload(shape: Shape) -> list[Row]:
    """Return a burst of compute, gradients to the host, Adam there, and weights back; copies are no kernels."""
    transfer = min(shape.transfer, 0.3 * (1 - shape.busy))
    adam = 1 - shape.busy - 2 * transfer
    return [
        *_work(shape, shape.busy),
        (0.08 * shape.busy, {"busy": 1.0, "sm": 0.8, "dram": 1.5, "pcie_receive": 1.0}),
        (transfer, {"offload_out": 1.0}),
        (adam, {"adam": 1.0}),
        (transfer, {"offload_in": 1.0, "adam": 0.3}),
    ]


def _starved(shape: Shape) -> list[Row]:
    """Return the batches that the queue held, one after another, and then the wait for the loader."""
    gap = 0.15 * (1 - shape.busy) / shape.batches
    rows: list[Row] = []
    for _ in range(shape.batches):
        rows.append((gap, {"pcie_receive": 1.0}))
        rows += [(length / shape.batches, levels) for length, levels in _work(shape, shape.busy)]
        rows += [(length / shape.batches, levels) for length, levels in _update(shape)]
    wait = {"busy": 1.0, "spin": shape.waiting, "dram": 0.002} if shape.waits_for_peer else {}
    rows.append((0.85 * (1 - shape.busy), {"pcie_receive": 0.3, **wait}))
    return rows
