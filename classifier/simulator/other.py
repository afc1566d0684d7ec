"""Idle GPUs, with and without a loaded model, servers that spin, notebooks; and miners."""

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
)
from classifier.simulator.steps import waiting_share
from classifier.simulator.training import Span


def _before(span: Span) -> Span:
    """Return `span` with a job that was there before the trace: an idle GPU has no start to show."""
    return Span(start_s=span.start_s, end_s=span.end_s, begin_s=min(span.begin_s, span.start_s))


def whole(span: Span, signals: tuple[Signal, ...], memory: float, *, workload: str, note: str, present: bool) -> Stage:
    """Return one stage that fills `span`."""
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
        stages=(whole(_before(span), (Constant(),) * len(gpus), 0.0, workload="idle", note="empty", present=False),),
    )


def loaded_idle_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:  # noqa: ARG001
    """Return GPUs that hold a model and a context and do next to nothing: a health check now and then at most."""
    memory = draws.log_uniform("memory", 0.01, 0.93)
    checks = draws.chance("health_checks", 0.4)
    every_s = draws.log_uniform("check_every_s", 5, 120)
    # An engine may poll its queue on a whole core; most sleep.
    polls = draws.log_uniform("idle_cores", 0.003, 0.1) + 1.0 * draws.chance("polls", 0.25)
    signals: list[Signal] = []
    for _ in gpus:
        if checks:
            length = float(draws.rng.uniform(0.02, 0.2)) / every_s
            work = {"busy": 1.0, "sm": 0.2, "tensor": 0.03, "dram": 0.3, "pcie_receive": 2e7, "cpu_cores": 1.0}
            breaks, levels = pieces([(length, work), (1 - length, {"pcie_receive": 1e6, "cpu_cores": polls})])
            starts = cycle_starts(draws.rng, span.start_s - 2 * every_s, span.end_s, period_s=every_s, spread=0.05)
            signals.append(Cyclic(breaks, levels, starts))
        else:
            signals.append(Constant({"pcie_receive": 1e6, "pcie_transmit": 3e5, "cpu_cores": polls}))
    return Job(
        gpus=gpus, stages=(whole(_before(span), tuple(signals), memory, workload="idle", note="loaded", present=True),)
    )


def spinning_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:
    """Return a tensor-parallel server that nobody asks: its workers spin in a broadcast, waiting for a prompt.

    Rank 0 reads 0 %, the others 100 % a little above the power of a context (GLM-130B issue 32: 53 and 66 of 300 W).
    The truth is inference, not idle: utilisation says busy, and the process serves. One request in minutes at most.
    """
    memory = draws.uniform("memory", 0.3, 0.95)
    waiting = waiting_share(draws, board)
    asked = draws.chance("asked", 0.5)
    every_s = draws.log_uniform("ask_every_s", 60, 1200)
    length = min(0.5, draws.log_uniform("answer_s", 0.5, 20) / every_s)
    link = min(draws.log_uniform("nvlink_gb_s", 2, 30) * 1e9, 0.3 * board.nvlink_bytes_per_second)
    answering = {
        "busy": 1.0,
        "sm": draws.uniform("sm", 0.2, 0.5),
        "tensor": draws.uniform("tensor", 0.01, 0.08),
        "dram": draws.uniform("dram", 0.2, 0.6),
        "nvlink_receive": link,
        "nvlink_transmit": link,
        "pcie_receive": 2e7,
        "cpu_cores": 1.0,
    }
    first_s = span.start_s - every_s * float(draws.rng.random())
    starts = cycle_starts(draws.rng, first_s, span.end_s, period_s=every_s, spread=0.5)
    signals: list[Signal] = []
    for rank in range(len(gpus)):
        rest = {"busy": 1.0, "spin": waiting, "dram": 0.0004, "pcie_receive": 6e5, "cpu_cores": 1.0}
        if rank == 0:
            rest = {"pcie_receive": 1e6, "cpu_cores": 1.0}
        breaks, levels = pieces([(length, answering), (1 - length, rest)])
        signals.append(Cyclic(breaks, levels, starts) if asked else Constant(rest))
    stage = whole(_before(span), tuple(signals), memory, workload="inference", note="spinning", present=True)
    watts = draws.log_uniform("waiting_watts", 2, 65)
    return Job(gpus=gpus, stages=(stage,), spin_watts=watts / waiting, drift=0.005)


def notebook_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:
    """Return a notebook: a context that idles for heavy-tailed times, and a cell that runs for 1 to 60 s.

    The gaps are idle. A running cell is `other`: whatever it computes, it is neither a training job nor a service.
    Only GPU 0 of the notebook works as a rule; memory goes up in steps and rarely down.
    """
    rng = draws.rng
    gap_s = draws.log_uniform("gap_s", 15, 400)
    cell_s = draws.log_uniform("cell_s", 2, 40)
    all_gpus = draws.chance("uses_all_gpus", 0.3)
    memory = draws.log_uniform("memory", 0.01, 0.2)
    most = draws.uniform("most_memory", 0.2, 0.9)
    stages: list[Stage] = []
    rest = (Constant({"pcie_receive": 1e6, "pcie_transmit": 3e5, "cpu_cores": 0.01}),) * len(gpus)
    now = _before(span).begin_s
    if now < span.start_s - 3600:  # what came before an hour ago is one long pause
        stages.append(_part(now, span.start_s - 3600, rest, (memory, memory), "idle"))
        now = stages[-1].end_s
    while now < span.end_s:
        pause_s = gap_s * float(np.clip(rng.lognormal(0, 1.2), 0.05, 40))
        stages.append(_part(now, now + pause_s, rest, (memory, memory), "idle"))
        now += pause_s
        length_s = float(np.clip(cell_s * rng.lognormal(0, 0.9), 1, 300))
        grown = min(most, memory * float(rng.choice([1.0, 1.0, 1.5, 2.5])))
        working = _cell(rng, board, now, now + length_s)
        signals = tuple(working if rank == 0 or all_gpus else rest[rank] for rank in range(len(gpus)))
        stages.append(_part(now, now + length_s, signals, (memory, grown), "other"))
        now += length_s
        memory = grown if rng.random() > 0.1 else max(0.01, 0.5 * grown)
    return Job(
        gpus=gpus,
        stages=tuple(stages),
        power_gain=draws.uniform("power_gain", 0.7, 1.1),
        drift=0.02,
        singles=(0.02, 0.6),
    )


def _part(start_s: float, end_s: float, signals: tuple[Signal, ...], memory: tuple[float, float], what: str) -> Stage:
    return Stage(
        start_s=start_s,
        end_s=end_s,
        signals=signals,
        memory_ratio=memory,
        workload=what,
        note="notebook" if what == "idle" else "notebook cell",
    )


def _cell(rng: np.random.Generator, board: Board, start_s: float, end_s: float) -> Signal:
    """Return what one cell does: copies, a loop of kernels with host work in between, or one long kernel."""
    sm = float(rng.uniform(0.05, 0.9))
    busy = float(rng.uniform(0.1, 1.0))
    work = {
        "busy": 1.0,
        "sm": sm,
        "tensor": sm * float(rng.uniform(0, 0.6)) * float(rng.random() < 0.7),
        "dram": float(rng.uniform(0.05, 0.8)),
        "cpu_cores": 1.0,
    }
    copies = {"pcie_receive": float(rng.uniform(0.01, 0.3)) * board.pcie_bytes_per_second, "cpu_cores": 1.2}
    breaks, levels = pieces([(max(1e-3, 1 - busy), copies), (busy, work)])
    period = float(np.exp(rng.uniform(np.log(0.05), np.log(5))))
    return Cyclic(breaks, levels, cycle_starts(rng, start_s, end_s, period_s=period, spread=0.3))


def mining_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:  # noqa: ARG001
    """Return a miner: utterly even, small memory, no traffic; bound by compute or by memory."""
    bound = draws.choice("bound", ("compute", "memory"))
    sm = draws.uniform("sm", 0.85, 0.995) if bound == "compute" else draws.uniform("sm", 0.3, 0.9)
    dram = draws.uniform("dram", 0.01, 0.1) if bound == "compute" else draws.uniform("dram", 0.7, 0.93)
    cores = draws.log_uniform("cores", 0.01, 0.5)
    signals = tuple(
        Constant(
            {
                "busy": float(draws.rng.uniform(0.985, 1.0)),
                "sm": min(0.985, sm * (1 + float(draws.rng.normal(0, 0.01)))),
                "dram": dram,
                "pcie_receive": 3e5,
                "pcie_transmit": 1e5,
                "cpu_cores": cores,
            }
        )
        for _ in gpus
    )
    memory = draws.uniform("memory", 0.01, 0.15)
    rate = draws.log_uniform("pool_bytes_per_second", 300, 2e4)
    return Job(
        gpus=gpus,
        stages=(whole(span, signals, memory, workload="other", note="mining", present=True),),
        host=tuple(
            HostLoad(start_s=span.begin_s, end_s=span.end_s, channel=channel, bytes_per_second=rate, roughness=0.4)
            for channel in ("network_receive", "network_transmit")
        ),
        power_gain=draws.uniform("power_gain", 0.6, 1.2),
        drift=0.0015,
        singles=(0.005, 0.08),  # hashes are integers
    )
