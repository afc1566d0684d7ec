"""Idle GPUs, with and without a loaded model, and what is neither training nor inference: HPC and mining."""

from __future__ import annotations

import numpy as np

from classifier.simulator.boards import Board
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import (
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
from classifier.simulator.training import Span


def _before(span: Span) -> Span:
    """Return `span` with a job that was there before the trace: an idle GPU has no start to show."""
    return Span(start_s=span.start_s, end_s=span.end_s, begin_s=min(span.begin_s, span.start_s))


def _whole(span: Span, signals: tuple[Signal, ...], memory: float, *, workload: str, note: str, present: bool) -> Stage:
    return Stage(
        start_s=span.begin_s,
        end_s=span.end_s,
        signals=signals,
        memory_ratio=(memory, memory),
        present=present,
        workload=workload,
        note=note,
    )


def idle_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:  # noqa: ARG001 - all kinds alike
    """Return GPUs without any process."""
    return Job(
        gpus=gpus,
        stages=(_whole(_before(span), (Constant(),) * len(gpus), 0.0, workload="idle", note="empty", present=False),),
    )


def loaded_idle_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:  # noqa: ARG001
    """Return GPUs that hold a model and a context and do next to nothing: a health check now and then at most."""
    memory = draws.log_uniform("memory", 0.01, 0.93)
    checks = draws.chance("health_checks", 0.4)
    every_s = draws.log_uniform("check_every_s", 5, 120)
    signals: list[Signal] = []
    for _ in gpus:
        if checks:
            length = float(draws.rng.uniform(0.02, 0.2)) / every_s
            work = {"busy": 1.0, "sm": 0.2, "tensor": 0.03, "dram": 0.3, "pcie_receive": 2e7}
            breaks, levels = pieces([(length, work), (1 - length, {"pcie_receive": 1e6})])
            starts = cycle_starts(draws.rng, span.start_s - 2 * every_s, span.end_s, period_s=every_s, spread=0.05)
            signals.append(Cyclic(breaks, levels, starts))
        else:
            signals.append(Constant({"pcie_receive": 1e6, "pcie_transmit": 3e5}))
    return Job(
        gpus=gpus, stages=(_whole(_before(span), tuple(signals), memory, workload="idle", note="loaded", present=True),)
    )


def hpc_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:
    """Return a simulation code: no tensor cores to speak of, halo exchange, dumps to disk from time to time."""
    ranks = len(gpus)
    sm = draws.uniform("sm", 0.5, 0.96)
    busy = draws.uniform("busy", 0.88, 1.0)
    period = draws.log_uniform("step_s", 0.02, 4)
    link = draws.uniform("nvlink_gb_s", 0, 30) * 1e9 if ranks > 1 else 0.0
    breaks, levels = pieces(
        [
            (max(1e-3, 1 - busy), {"pcie_receive": 1.0}),
            (busy * 0.9, {"busy": 1.0, "sm": 1.0, "tensor": 1.0, "dram": 1.0, "nvlink": 0.2, "pcie_receive": 0.1}),
            (busy * 0.1, {"busy": 1.0, "sm": 0.4, "dram": 0.5, "nvlink": 3.0, "pcie_receive": 0.5}),
        ]
    )
    tensor = draws.uniform("tensor", -0.02, 0.03)  # some codes use FP64 tensor cores a little, most do not
    pcie = draws.log_uniform("pcie_gb_s", 0.005, 1) * 1e9
    levels["sm"] = scale_to_mean(breaks, levels["sm"], sm, 0.98)
    levels["tensor"] = scale_to_mean(breaks, levels["tensor"], max(0.0, tensor), 0.9)
    levels["dram"] = scale_to_mean(breaks, levels["dram"], draws.uniform("dram", 0.25, 0.85), 0.93)
    levels["pcie_receive"] = scale_to_mean(breaks, levels["pcie_receive"], pcie, board.pcie_bytes_per_second)
    levels["pcie_transmit"] = levels["pcie_receive"] * 0.9
    levels["nvlink_receive"] = levels["nvlink_transmit"] = levels.pop("nvlink") * min(
        link, 0.2 * board.nvlink_bytes_per_second
    )
    spread = draws.log_uniform("step_spread", 0.005, 0.2)
    starts = cycle_starts(draws.rng, span.start_s - 10, span.end_s, period_s=period, spread=spread)
    signals: list[Signal] = []
    for _ in gpus:
        wobble = 1 + float(draws.rng.normal(0, 0.02))
        own = {n: np.minimum(v * wobble, 0.99) if n in {"sm", "dram"} else v for n, v in levels.items()}
        signals.append(Cyclic(breaks, own, starts))
    dump_every = draws.log_uniform("dump_every_s", 60, 1800)
    dump_rate = draws.log_uniform("dump_bytes_per_second", 5e7, 2e9)
    host: list[HostLoad] = []
    if draws.chance("multi_node", 0.4):
        fabric = draws.log_uniform("fabric_bytes_per_second", 1e7, 5e9)
        host += [
            HostLoad(start_s=span.begin_s, end_s=span.end_s, channel=channel, bytes_per_second=fabric, roughness=0.3)
            for channel in ("infiniband_receive", "infiniband_transmit")
        ]
    now = span.start_s + dump_every * float(draws.rng.random())
    while now < span.end_s:
        length = float(draws.rng.uniform(1, 12))
        host.append(HostLoad(start_s=now, end_s=now + length, channel="disk_written", bytes_per_second=dump_rate))
        now += dump_every
    return Job(
        gpus=gpus,
        stages=(
            _whole(
                span, tuple(signals), draws.uniform("memory", 0.03, 0.9), workload="other", note="hpc", present=True
            ),
        ),
        host=tuple(host),
        power_gain=draws.uniform("power_gain", 0.7, 1.15),
        drift=draws.log_uniform("drift", 0.002, 0.03),
    )


def mining_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:  # noqa: ARG001
    """Return a miner: utterly even, small memory, no traffic; bound by compute or by memory."""
    bound = draws.choice("bound", ("compute", "memory"))
    sm = draws.uniform("sm", 0.85, 0.995) if bound == "compute" else draws.uniform("sm", 0.3, 0.9)
    dram = draws.uniform("dram", 0.01, 0.1) if bound == "compute" else draws.uniform("dram", 0.7, 0.93)
    signals = tuple(
        Constant(
            {
                "busy": float(draws.rng.uniform(0.985, 1.0)),
                "sm": min(0.995, sm * (1 + float(draws.rng.normal(0, 0.01)))),
                "dram": dram,
                "pcie_receive": 3e5,
                "pcie_transmit": 1e5,
            }
        )
        for _ in gpus
    )
    memory = draws.uniform("memory", 0.01, 0.15)
    rate = draws.log_uniform("pool_bytes_per_second", 300, 2e4)
    return Job(
        gpus=gpus,
        stages=(_whole(span, signals, memory, workload="other", note="mining", present=True),),
        host=tuple(
            HostLoad(start_s=span.begin_s, end_s=span.end_s, channel=channel, bytes_per_second=rate, roughness=0.4)
            for channel in ("network_receive", "network_transmit")
        ),
        power_gain=draws.uniform("power_gain", 0.6, 1.2),
        drift=0.0015,
    )
