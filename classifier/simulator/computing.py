"""What is neither training nor inference and keeps a GPU busy: simulation codes, linear algebra, burn-in.

Ranges with their sources are in the tables (`priors` explains the short names); no recording of these was at hand, so
that most are priors: SM activity 0.6-0.95, DRAM 0.3-0.8, no tensor cores or those for double precision.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from classifier.simulator.boards import Board
from classifier.simulator.other import whole
from classifier.simulator.overlays import Extra, Overlaid
from classifier.simulator.priors import GB, Priors, even, log, take
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

_CODE: Final[Priors] = {
    "sm": even(0.5, 0.96, "0.6-0.95; prior"),
    "busy": even(0.88, 1.0, "0.9-1; prior"),
    "step_s": log(0.02, 4, "own period; prior"),
    "step_spread": log(0.005, 0.2, "prior"),
    "nvlink_gb_s": even(0, 30, "halos between neighbours: 0-30; prior"),
    "pcie_gb_s": log(0.005, 1, "0.01-1; prior"),
    "tensor": even(-0.02, 0.03, "below 0 none; some codes use them a little"),
    "dfma_share": even(0.0, 1.0, "of tensor; prior"),
    "fp64": even(-0.1, 0.45, "FP64 codes above 0.1, mixed precision below; prior"),
    "dram": even(0.25, 0.85, "0.3-0.8; prior"),
    "memory": even(0.03, 0.9, "prior"),
    "power_gain": even(0.7, 1.15, "0.5-0.95 of the limit; prior"),
    "dump_every_s": log(60, 1800, "periodic dumps; prior"),
    "dump_bytes_per_second": log(5e7, 2e9, "prior"),
    "fabric_gb_s": log(0.01, 5, "many small messages; prior"),
    "cores": even(0.9, 4, "a rank that spins in its library's progress loop, and threads; prior"),
}
CODES: Final[dict[str, Priors]] = {
    "hpc": _CODE,
    "molecular_dynamics": {
        **_CODE,
        "sm": even(0.55, 0.96, "prior"),
        "step_s": log(0.05, 3, "hundreds of steps of 1-10 ms between two outputs or neighbour lists; prior"),
        "nvlink_gb_s": even(0, 12, "prior"),
        "tensor": even(-0.1, 0.0, "none"),
        "fp64": even(-0.05, 0.08, "single precision with double accumulators; prior"),
        "dram": even(0.05, 0.45, "fits in caches; prior"),
        "memory": log(0.01, 0.3, "prior"),
        "dump_bytes_per_second": log(1e6, 3e8, "trajectories; prior"),
    },
    "fluid_dynamics": {
        **_CODE,
        "sm": even(0.4, 0.92, "prior"),
        "step_s": log(0.05, 6, "prior"),
        "tensor": even(-0.1, 0.01, "none"),
        "fp64": even(0.08, 0.5, "above 0.1 where profiled; prior"),
        "dram": even(0.5, 0.9, "memory-bound stencils; prior"),
        "memory": even(0.2, 0.95, "prior"),
        "dump_bytes_per_second": log(2e8, 5e9, "prior"),
    },
    # Waves through rock: single precision, bound by memory, shots read and images written.
    "seismic": {
        **_CODE,
        "sm": even(0.45, 0.92, "prior"),
        "step_s": log(0.01, 1, "prior"),
        "nvlink_gb_s": even(0, 40, "halos of a large domain; prior"),
        "tensor": even(-0.1, 0.0, "none"),
        "fp64": even(-0.1, 0.02, "hardly any"),
        "dram": even(0.5, 0.92, "stencils of high order; prior"),
        "memory": even(0.3, 0.97, "prior"),
        "pcie_gb_s": log(0.05, 6, "wavefields kept in host memory; prior"),
        "dump_every_s": log(20, 600, "prior"),
        "dump_bytes_per_second": log(1e8, 5e9, "prior"),
    },
    # Quantum chromodynamics: solvers of mixed precision, halos over NVLink and the fabric all the time.
    "lattice": {
        **_CODE,
        "sm": even(0.35, 0.85, "prior"),
        "step_s": log(0.02, 2, "an iteration of an outer solver; prior"),
        "nvlink_gb_s": even(5, 60, "prior"),
        "tensor": even(-0.1, 0.03, "prior"),
        "fp64": even(-0.05, 0.25, "the outer solver; prior"),
        "dram": even(0.5, 0.9, "prior"),
        "memory": even(0.1, 0.8, "prior"),
        "fabric_gb_s": log(0.5, 20, "halos between nodes; prior"),
    },
    # Alignment of sequences and queries over tables: integers, hashes, reads without end.
    "genomics": {
        **_CODE,
        "sm": even(0.3, 0.92, "prior"),
        "busy": even(0.4, 1.0, "batches wait for the host at times; prior"),
        "step_s": log(0.05, 10, "one batch; prior"),
        "step_spread": log(0.05, 0.4, "prior"),
        "nvlink_gb_s": even(0, 3, "prior"),
        "pcie_gb_s": log(0.1, 8, "batches in and results out; prior"),
        "tensor": even(-0.1, 0.0, "none"),
        "fp64": even(-0.1, 0.02, "none"),
        "dram": even(0.1, 0.8, "prior"),
        "dump_every_s": log(20, 600, "prior"),
        "cores": even(0.9, 12, "decompression and parsing; prior"),
    },
    # Dense factorisation in double precision on tensor cores: dense and powerful like training.
    "linear_algebra": {
        **_CODE,
        "sm": even(0.6, 0.98, "prior"),
        "step_s": log(0.2, 8, "one panel after another; prior"),
        "nvlink_gb_s": even(0, 60, "panels are broadcast; prior"),
        "tensor": even(0.1, 0.75, "DFMA; prior"),
        "dfma_share": even(0.85, 1.0, "prior"),
        "fp64": even(0.02, 0.3, "prior"),
        "dram": even(0.15, 0.5, "prior"),
        "memory": even(0.4, 0.97, "prior"),
        "power_gain": even(0.85, 1.15, "prior"),
    },
}
#: FP32 pipe over SM activity by code; priors: what is not done in double precision or in integers is done here.
_SINGLES: Final[dict[str, tuple[float, float]]] = {
    "hpc": (0.03, 0.6),
    "molecular_dynamics": (0.25, 0.7),
    "fluid_dynamics": (0.02, 0.3),
    "linear_algebra": (0.01, 0.12),
    "seismic": (0.2, 0.6),
    "lattice": (0.1, 0.5),
    "genomics": (0.01, 0.15),
}
#: Tests of a burn-in or acceptance run: what each does, from `sm` to link rates as shares of the board's.
_BURNS: Final[dict[str, dict[str, tuple[float, float]]]] = {
    "tensor": {"sm": (0.85, 0.99), "tensor": (0.5, 0.95), "dram": (0.05, 0.4)},
    "single": {"sm": (0.9, 0.99), "tensor": (0.0, 0.0), "dram": (0.05, 0.3)},
    "double": {"sm": (0.85, 0.99), "tensor": (0.0, 0.6), "dram": (0.05, 0.3), "fp64": (0.3, 0.9)},
    "memory": {"sm": (0.2, 0.8), "tensor": (0.0, 0.0), "dram": (0.7, 0.94)},
    "copies": {"sm": (0.0, 0.05), "tensor": (0.0, 0.0), "dram": (0.02, 0.1), "pcie": (0.4, 0.85)},
    "collectives": {"sm": (0.06, 0.25), "tensor": (0.0, 0.0), "dram": (0.1, 0.5), "nvlink": (0.1, 0.8)},
}


def code_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span, style: str = "hpc") -> Job:
    """Return a simulation code: steps of its own, halo exchange, dumps to disk from time to time."""
    priors = CODES[style]
    ranks = len(gpus)
    busy = take(draws, priors, "busy")
    period = take(draws, priors, "step_s")
    link = take(draws, priors, "nvlink_gb_s") * GB * (ranks > 1)
    breaks, levels = pieces(
        [
            (max(1e-3, 1 - busy), {"pcie_receive": 1.0}),
            (busy * 0.9, {"busy": 1.0, "sm": 1.0, "tensor": 1.0, "dram": 1.0, "nvlink": 0.2, "pcie_receive": 0.1}),
            (busy * 0.1, {"busy": 1.0, "sm": 0.4, "dram": 0.5, "nvlink": 3.0, "pcie_receive": 0.5}),
        ]
    )
    pcie = take(draws, priors, "pcie_gb_s") * GB
    levels["sm"] = scale_to_mean(breaks, levels["sm"], take(draws, priors, "sm"), 0.98)
    levels["tensor"] = scale_to_mean(breaks, levels["tensor"], max(0.0, take(draws, priors, "tensor")), 0.9)
    levels["tensor"] = np.minimum(levels["tensor"], 0.95 * levels["sm"])
    doubles = take(draws, priors, "dfma_share")
    levels["dfma"] = doubles * levels["tensor"]
    levels["hmma"] = (1 - doubles) * levels["tensor"]
    levels["fp64"] = levels["sm"] * max(0.0, take(draws, priors, "fp64"))
    levels["dram"] = scale_to_mean(breaks, levels["dram"], take(draws, priors, "dram"), 0.93)
    levels["pcie_receive"] = scale_to_mean(breaks, levels["pcie_receive"], pcie, board.pcie_bytes_per_second)
    levels["pcie_transmit"] = levels["pcie_receive"] * 0.9
    levels["nvlink_receive"] = levels["nvlink_transmit"] = levels.pop("nvlink") * min(
        link, 0.2 * board.nvlink_bytes_per_second
    )
    levels["cpu_cores"] = np.full(breaks.size - 1, take(draws, priors, "cores"))
    spread = take(draws, priors, "step_spread")
    starts = cycle_starts(draws.rng, span.start_s - 10, span.end_s, period_s=period, spread=spread)
    signals: list[Signal] = []
    for _ in gpus:
        wobble = 1 + float(draws.rng.normal(0, 0.02))
        own = {n: np.minimum(v * wobble, 0.99) if n in {"sm", "dram"} else v for n, v in levels.items()}
        signals.append(Cyclic(breaks, own, starts))
    memory = take(draws, priors, "memory")
    host = _dumps(draws, priors, span)
    dumps = tuple(
        Extra(load.start_s, load.end_s, {"process_written": load.bytes_per_second / ranks})
        for load in host
        if load.channel.endswith("_written")
    )
    written = tuple(Overlaid(signal, dumps) for signal in signals)
    return Job(
        gpus=gpus,
        stages=(whole(span, written, memory, workload="other", note=style, present=True),),
        host=host,
        power_gain=take(draws, priors, "power_gain"),
        drift=draws.log_uniform("drift", 0.002, 0.03),
        singles=_SINGLES[style],
    )


def _dumps(draws: Draws, priors: Priors, span: Span) -> tuple[HostLoad, ...]:
    """Return the dumps to storage and, between nodes, the halo exchange."""
    every_s = take(draws, priors, "dump_every_s")
    rate = take(draws, priors, "dump_bytes_per_second")
    channel = draws.choice("dump_to", ("disk_written", "filesystem_written"), (0.5, 0.5))
    traffic = partial(HostLoad, start_s=span.begin_s, end_s=span.end_s)
    logs = draws.log_uniform("log_bytes_per_second", 1e2, 3e5)
    host = [traffic(channel="disk_written", bytes_per_second=logs, roughness=1.2)]
    multi_node = draws.chance("multi_node", 0.4)
    fabric = take(draws, priors, "fabric_gb_s") * GB
    if multi_node:
        host += [
            traffic(channel=name, bytes_per_second=fabric, roughness=0.3)
            for name in ("infiniband_receive", "infiniband_transmit")
        ]
    now = span.start_s + every_s * float(draws.rng.random())
    while now < span.end_s:
        length = float(draws.rng.uniform(1, 12))
        host.append(HostLoad(start_s=now, end_s=now + length, channel=channel, bytes_per_second=rate))
        now += every_s
    return tuple(host)


def burn_in_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:
    """Return a burn-in or acceptance run: one test after another or one for hours, at the power limit mostly."""
    rng = draws.rng
    single = draws.chance("one_test", 0.5)
    names = tuple(_BURNS)
    first = draws.choice("test", names, (0.3, 0.15, 0.15, 0.15, 0.1, 0.15))
    length_s = draws.log_uniform("test_s", 30, 600)
    memory = draws.uniform("memory", 0.1, 0.97)
    check_s = draws.log_uniform("check_every_s", 1, 60)  # results are compared, with a short gap
    stages: list[Stage] = []
    now = span.begin_s if span.begin_s > span.start_s else span.start_s - length_s * float(rng.random())
    name = first
    while now < span.end_s:
        end = span.end_s if single else now + length_s
        stages.append(
            Stage(
                start_s=now,
                end_s=end,
                signals=_burn(rng, board, name, len(gpus), span=Span(now, end, now), check_s=check_s),
                memory_ratio=(memory, memory),
                workload="other",
                note="burn-in",
            )
        )
        now = end
        name = str(rng.choice(names))
    return Job(
        gpus=gpus,
        stages=tuple(stages),
        power_gain=draws.uniform("power_gain", 0.85, 1.25),
        drift=draws.log_uniform("drift", 0.001, 0.01),
    )


def _burn(
    rng: np.random.Generator, board: Board, name: str, ranks: int, *, span: Span, check_s: float
) -> tuple[Signal, ...]:
    test = {key: float(rng.uniform(low, high)) for key, (low, high) in _BURNS[name].items()}
    pcie = test.pop("pcie", 0.0) * board.pcie_bytes_per_second
    # Without NVLink, collectives go over PCIe.
    link = test.pop("nvlink", 0.0) * (ranks > 1)
    nvlink = link * board.nvlink_bytes_per_second
    pcie += link * board.pcie_bytes_per_second if nvlink == 0 else 0.0
    work = {
        **test,
        "busy": 0.3 if name == "copies" else 1.0,
        "dfma": test["tensor"] if "fp64" in test else 0.0,
        "fp32": test["sm"] * float(rng.uniform(0.6, 0.98) if name == "single" else rng.uniform(0.01, 0.15)),
        "hmma": 0.0 if "fp64" in test else test["tensor"],
        "nvlink_receive": nvlink,
        "nvlink_transmit": nvlink,
        "pcie_receive": pcie + 5e5,
        "pcie_transmit": 0.9 * pcie + 2e5,
        "cpu_cores": float(rng.uniform(0.3, 1.5)),
    }
    gap = min(0.2, float(rng.uniform(0.0, 0.3)) / check_s)
    breaks, levels = pieces([(1 - gap, work), (gap, {"pcie_transmit": 1e8, "cpu_cores": 1.0})])
    first_s = max(span.start_s, -30.0)
    starts = cycle_starts(rng, first_s, max(span.end_s, first_s + 1), period_s=check_s, spread=0.02)
    steady: Signal = Cyclic(breaks, levels, starts) if gap > 0 else Constant(work)
    return (steady,) * ranks
