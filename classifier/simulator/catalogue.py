"""Which kinds can be simulated, which jobs each puts on the node, and how scenarios for training are drawn."""

from __future__ import annotations

from typing import Final

import numpy as np

from agent.errors import UsageError
from classifier.simulator.boards import BOARDS, Board
from classifier.simulator.families import FAMILIES, Family
from classifier.simulator.inference import serving_job
from classifier.simulator.other import idle_job, loaded_idle_job
from classifier.simulator.scenario import Draws, Scenario
from classifier.simulator.signals import Job
from classifier.simulator.training import Span, training_job

_MIXED: Final = "mixed_node"
#: Share of the scenarios whose recorder sits in a container and sees no process; prior.
_UNLISTED: Final = 0.08
_BOARD_WEIGHTS: Final = {
    "H100": 0.3,
    "A100": 0.22,
    "H200": 0.12,
    "V100": 0.1,
    "L40S": 0.1,
    "H100 PCIe": 0.06,
    "A40": 0.05,
    "L4": 0.05,
    "T4": 0.05,
    "RTX A6000": 0.03,
    "RTX A5000": 0.02,
    "RTX 3090": 0.03,
    "RTX 4090": 0.04,
}


def available_kinds() -> tuple[str, ...]:
    """Return the kinds that `Scenario.kind` may name."""
    return (*FAMILIES, _MIXED)


def workload_of(kind: str) -> str:
    """Return the class of a family's work; raises UsageError for a kind that is none."""
    return _family(kind).workload


def _family(kind: str) -> Family:
    family = FAMILIES.get(kind)
    if family is None:
        raise UsageError(f"unknown simulation kind {kind!r}; choose one of {', '.join(available_kinds())}")
    return family


def jobs_of(scenario: Scenario, board: Board, span: Span, rng: np.random.Generator) -> tuple[Job, ...]:
    """Return the jobs on the node, each GPU in exactly one; raises UsageError for an unknown kind or parameter."""
    if scenario.kind == _MIXED:
        return _mixed_node(scenario, board, span, rng)
    family = _family(scenario.kind)
    gpus = tuple(range(scenario.gpu_count))
    fixed: dict[str, float | str] = dict(scenario.parameters)
    width = scenario.gpu_count
    if family.widths:
        # Replicas of a server share nothing but the host: each tensor-parallel group is a job of its own.
        width = int(fixed.pop("tensor_parallel", rng.choice(family.widths)))
    jobs: list[Job] = []
    for first in range(0, scenario.gpu_count, width):
        draws = Draws(rng, fixed)
        jobs.append(family.build(draws, board, gpus[first : first + width], span))
        draws.check_all_asked(scenario.kind)
    return tuple(jobs)


def _mixed_node(scenario: Scenario, board: Board, span: Span, rng: np.random.Generator) -> tuple[Job, ...]:
    """Return the jobs of the demonstration: training that stalls, two servers, a loaded and an empty GPU."""
    if scenario.gpu_count != 8:
        raise UsageError(f"simulation kind {_MIXED} takes 8 GPUs, not {scenario.gpu_count}")
    training: dict[str, float | str] = {
        "flavour": "ddp",
        "step_s": 1.1,
        "sm": 0.78,
        "busy": 0.97,
        "tensor": 0.42,
        "dram": 0.4,
        "nvlink_gb_s": 18.0,
        "memory": 0.83,
        "load_s": 18.0,
        "warm_up_s": 14.0,
        "blocks": "24",
        "waiting_watts": 10.0,
        "evaluates": 0.0,
        "multi_node": 0.0,
        "save_style": "rank0",
        "save_every_s": 170.0,
        "save_spread": 0.01,
        "save_s": 16.0,
        "save_bytes_per_second": 9e8,
        "save_to": "disk_written",
        "dataset_from": "disk_read",
        "dataset_bytes_per_second": 4e7,
        "stall_at_s": 700.0,
        "stall_s": 215.0,
        "stall_variant": "all_wait",
        "stall_sleeps": 0.0,
        "accumulation": 2.0,
        "power_gain": 1.0,
    }
    training |= dict(scenario.parameters)
    # The job is submitted while the node already serves, as seen by an agent that has been there.
    submitted_s = float(training.pop("submitted_s", 100.0))
    later = Span(start_s=span.start_s, end_s=span.end_s, begin_s=max(span.begin_s, submitted_s))
    serving: dict[str, float | str] = {
        "memory": 0.9,
        "memory_grows": 0.0,
        "resident": 0.85,
        "concurrency": 9.0,
        "quiet_share": 0.05,
    }
    before = Span(start_s=span.start_s, end_s=span.end_s, begin_s=min(span.begin_s, -3600.0))
    return (
        training_job(Draws(rng, training), board, (0, 1, 2, 3), later, fault="stall"),
        serving_job(Draws(rng, serving), board, (4,), before),
        serving_job(Draws(rng, serving), board, (5,), before),
        loaded_idle_job(Draws(rng, {"memory": 0.2, "health_checks": 0.0}), board, (6,), span),
        idle_job(Draws(rng, {}), board, (7,), span),
    )


def random_scenario(
    rng: np.random.Generator,
    kind: str | None = None,
    *,
    duration_s: tuple[float, float] = (600.0, 3600.0),
    intervals_s: tuple[float, ...] = (1.0,),
) -> Scenario:
    """Return a scenario of `kind` (or of a random one) for training a model; the rest comes from the run's seed.

    `duration_s` is the range of lengths, `intervals_s` the sampling intervals to choose from.
    """
    if kind is None:
        likely = np.array([family.weight for family in FAMILIES.values()])
        kind = str(rng.choice(list(FAMILIES), p=likely / likely.sum()))
    family = FAMILIES.get(kind)
    collective = family is not None and family.collective
    boards = [name for name in BOARDS if not (collective and name in {"L4", "A40"})]
    weights = np.array([_BOARD_WEIGHTS[name] for name in boards])
    board = str(rng.choice(boards, p=weights / weights.sum()))
    counts = family.gpu_counts if family is not None else (8,)
    begin = float(rng.uniform(300, 7200))
    interval = float(rng.choice(intervals_s))
    return Scenario(
        kind=kind,
        board=board,
        gpu_count=int(rng.choice(counts)),
        duration_s=float(np.round(rng.uniform(*duration_s))),
        interval_s=interval,
        jitter_s=interval * float(np.exp(rng.uniform(np.log(0.001), np.log(0.05)))),
        begin_s=begin if rng.random() < 0.6 else 0.0,
        infiniband=board in {"H100", "H200", "A100"} and bool(rng.random() < 0.5),
        processes_listed=bool(rng.random() >= _UNLISTED),
    )
