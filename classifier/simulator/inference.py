"""Inference jobs: online serving of language models, and offline batches.

Serving follows arrivals: a request has a prefill (compute-bound, near the power limit) and then decodes together with
the others (memory-bound, low power), after Splitwise (arXiv:2311.18677) and POLCA (arXiv:2308.12908). Ranges come from
8x H100 recordings and engineering priors; they reach into those of training on purpose.
"""

from __future__ import annotations

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
    Sampled,
    Signal,
    Stage,
    cycle_starts,
    pieces,
    scale_to_mean,
)
from classifier.simulator.training import Span

#: Step of the arrival process; a divisor of what any sensor averages over.
CELL_S: Final = 0.05


def serving_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:
    """Return a server on `gpus` (one tensor-parallel group) that takes requests throughout `span`."""
    ranks = len(gpus)
    load_s = draws.log_uniform("load_s", 5, 60)
    memory = draws.uniform("memory", 0.15, 0.93)
    grows = draws.chance("memory_grows", 0.3)
    power_gain = draws.uniform("power_gain", 0.55, 1.1)
    loaded_s = span.begin_s + load_s
    first_s = max(span.start_s - 60, loaded_s)  # a minute ahead: requests are already in flight
    host: list[HostLoad] = []
    load_rate = min(4e9, memory * board.memory_bytes * ranks * 0.5 / load_s)
    host.append(HostLoad(start_s=span.begin_s, end_s=loaded_s, channel="disk_read", bytes_per_second=load_rate))
    copying = Constant({"pcie_receive": load_rate / ranks, "busy": 0.2, "dram": 0.02})
    stages = [
        Stage(
            start_s=span.begin_s,
            end_s=loaded_s,
            signals=(copying,) * ranks,
            memory_ratio=(0.006, memory),
            workload="inference",
            note="loading",
        )
    ]
    if span.end_s > first_s:
        channels, requests_per_s = _served(draws, board, ranks, span.end_s - first_s)
        signals = tuple(Sampled(first_s, CELL_S, rank) for rank in channels)
        late = memory * (1.06 if grows and memory < 0.85 else 1.0)
        stages.append(
            Stage(
                start_s=first_s,
                end_s=span.end_s,
                signals=signals,
                memory_ratio=(memory, late),
                workload="inference",
            )
        )
        logs = draws.log_uniform("log_bytes_per_second", 1e3, 3e5)
        sizes = draws.log_uniform("bytes_per_request", 2e3, 2e6)
        times = {"start_s": first_s, "end_s": span.end_s}
        for channel, share in (("network_receive", 0.6), ("network_transmit", 0.4)):
            rate = max(200.0, requests_per_s * sizes * share)
            host.append(HostLoad(**times, channel=channel, bytes_per_second=rate, roughness=0.5))
        host.append(HostLoad(**times, channel="disk_written", bytes_per_second=logs, roughness=1.2))
    return Job(
        gpus=gpus,
        stages=tuple(stages),
        host=tuple(host),
        power_gain=power_gain,
        spin_watts=draws.log_uniform("waiting_watts", 2, 65) / 0.18,
        drift=draws.log_uniform("drift", 0.003, 0.03),
    )


def _served(draws: Draws, board: Board, ranks: int, length_s: float) -> tuple[list[dict[str, Array]], float]:
    """Return activity per rank and the mean arrival rate; concurrency comes from arrivals and their lengths."""
    rng = draws.rng
    cells = int(np.ceil(length_s / CELL_S)) + 1
    load = _load_shape(draws, cells)
    prefill_s = draws.log_uniform("prefill_s", 0.03, 1.0)
    decode_s = draws.log_uniform("decode_s", 0.5, 25)
    concurrency = draws.log_uniform("concurrency", 0.1, 60)
    batch = draws.log_uniform("batch_half", 4, 64)  # concurrency at which decode reaches half of its extra SM activity
    rate = min(concurrency / decode_s, 0.85 / prefill_s)
    arrivals = rng.poisson(rate * load * CELL_S)
    index = np.repeat(np.arange(cells), arrivals)
    prefill = np.clip(rng.lognormal(np.log(prefill_s), 0.7, index.size), 0.01, 8.0)
    decode = np.clip(rng.lognormal(np.log(decode_s), 0.6, index.size), 0.1, 240.0)
    start = index * CELL_S + rng.uniform(0, CELL_S, index.size)
    filling = np.minimum(_active(start, start + prefill, cells), 1.0)
    active = _active(start + prefill, start + prefill + decode, cells)
    decoding = np.minimum(active, 1.0) * (1 - filling)
    depth = active / (active + batch)
    # A small model on a slow host leaves gaps between kernels: 6-13 % utilisation was measured under constant load.
    resident = draws.log_uniform("resident", 0.06, 1.0)
    decode_sm = draws.uniform("decode_sm", 0.2, 0.6) * (0.5 + 0.9 * depth) * resident
    decode_dram = draws.uniform("decode_dram", 0.25, 0.85) * (0.8 + 0.2 * depth) * resident
    decode_tensor = draws.uniform("decode_tensor", 0.02, 0.3) * (0.2 + depth) * resident
    prefill_sm = draws.uniform("prefill_sm", 0.45, 0.92)
    prefill_tensor = draws.uniform("prefill_tensor", 0.25, 0.7)
    prefill_dram = draws.uniform("prefill_dram", 0.2, 0.5)
    link = draws.uniform("nvlink_gb_s", 2, 45) * 1e9 * (ranks > 1)  # nothing where the board has no NVLink, see below
    idle_spin = draws.chance("idle_spin", 0.2) and ranks > 1
    waiting = float(draws.choice("blocks", ("8", "16", "24", "32"))) / board.multiprocessors
    working = filling + decoding
    pcie = draws.log_uniform("pcie_gb_s", 0.02, 0.6) * 1e9
    decode_pcie = draws.log_uniform("decode_pcie_share", 0.02, 1.0)
    back = draws.log_uniform("pcie_asymmetry", 0.02, 0.6)
    # Prefill and decode pools push their caches one way; tensor parallel traffic is symmetric.
    skewed = draws.uniform("nvlink_asymmetry", 0.96, 1.04) * (
        1.0 if rng.random() < 0.85 else float(rng.uniform(0.3, 1.7))
    )
    channels: list[dict[str, Array]] = []
    for rank in range(ranks):
        wobble = 1 + float(rng.normal(0, 0.015))
        spin = np.where(working < 0.02, 1.0, 0.0) if idle_spin and rank > 0 else np.zeros(cells)
        links = np.minimum(link * (filling + 0.6 * decoding * resident), 0.5 * board.nvlink_bytes_per_second)
        channels.append(
            {
                "busy": np.minimum(filling + decoding * min(1.0, resident * 1.1) + spin, 1.0),
                "sm": np.minimum((filling * prefill_sm + decoding * decode_sm) * wobble, 0.98),
                "spin": spin * waiting,
                "tensor": np.minimum((filling * prefill_tensor + decoding * decode_tensor) * wobble, 0.9),
                "dram": np.minimum((filling * prefill_dram + decoding * decode_dram) * wobble, 0.92),
                "nvlink_receive": links,
                "nvlink_transmit": links * skewed,
                "pcie_receive": pcie * (filling + decode_pcie * decoding * resident),
                "pcie_transmit": pcie * back * working,
            }
        )
    return channels, rate


def _load_shape(draws: Draws, cells: int) -> Array:
    """Return the arrival rate over time around 1: a daily wave seen for minutes, and gusts of minutes."""
    rng = draws.rng
    seconds = np.arange(cells) * CELL_S
    day = 1 + draws.uniform("day_depth", 0.0, 0.8) * np.sin(2 * np.pi * (seconds / 86400 + rng.random()))
    knots = np.arange(int(seconds[-1] / 20) + 3)
    gusts = np.exp(draws.uniform("gusts", 0.05, 1.0) * rng.standard_normal(knots.size))
    quiet = np.where(rng.random(knots.size) < draws.uniform("quiet_share", -0.3, 0.4), 0.02, 1.0)
    shape: Array = day * np.interp(seconds, knots * 20.0, gusts * quiet)
    return shape


def _active(start: Array, end: Array, cells: int) -> Array:
    """Return how many of the intervals are open in each cell."""
    opened = np.bincount(np.minimum((start / CELL_S).astype(int), cells), minlength=cells + 1)
    closed = np.bincount(np.minimum((end / CELL_S).astype(int), cells), minlength=cells + 1)
    # A stretch within one cell counts for the share of the cell that it fills.
    short = (start / CELL_S).astype(int) == (end / CELL_S).astype(int)
    partial = np.bincount(
        np.minimum((start[short] / CELL_S).astype(int), cells),
        weights=(end[short] - start[short]) / CELL_S,
        minlength=cells + 1,
    )
    total: Array = np.cumsum(opened - closed)[:cells] + partial[:cells]
    return total


def batch_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:
    """Return offline inference: the same batches one after another, from files to files."""
    ranks = len(gpus)
    load_s = draws.log_uniform("load_s", 5, 60)
    memory = draws.uniform("memory", 0.1, 0.95)
    loaded = span.begin_s + load_s
    copying = Constant({"pcie_receive": 1e9, "busy": 0.2, "dram": 0.02})
    signals = _batches(draws, board, ranks, max(span.start_s - 60, loaded), span.end_s)
    return Job(
        gpus=gpus,
        stages=(
            Stage(
                start_s=span.begin_s,
                end_s=loaded,
                signals=(copying,) * ranks,
                memory_ratio=(0.006, memory),
                workload="inference",
                note="loading",
            ),
            Stage(
                start_s=loaded,
                end_s=max(loaded, span.end_s),
                signals=signals,
                memory_ratio=(memory, memory),
                workload="inference",
            ),
        ),
        host=_files(draws, loaded, span.end_s),
        power_gain=draws.uniform("power_gain", 0.65, 1.12),
        drift=draws.log_uniform("drift", 0.003, 0.03),
    )


def _batches(draws: Draws, board: Board, ranks: int, start_s: float, end_s: float) -> tuple[Signal, ...]:
    """Return batch after batch per rank: in step where ranks share a model, each at its own pace where not."""
    period = draws.log_uniform("batch_s", 0.1, 30)
    spread = draws.log_uniform("batch_spread", 0.01, 0.5)
    busy = draws.uniform("busy", 0.6, 1.0)
    sm = draws.uniform("sm", 0.25, 0.88)
    tensor = draws.uniform("tensor", 0.12 * sm, 0.66 * sm)
    dram = draws.uniform("dram", 0.2, 0.8)
    prefill = draws.uniform("prefill_share", 0.05, 0.95)
    link = draws.uniform("nvlink_gb_s", 2, 60) * 1e9 * draws.chance("tensor_parallel", 0.5) * (ranks > 1)
    link = min(link, 0.3 * board.nvlink_bytes_per_second)
    pcie = draws.log_uniform("pcie_gb_s", 0.02, 3) * 1e9
    work = {"busy": 1.0, "nvlink": 1.0}
    breaks, levels = pieces(
        [
            (max(1e-3, 1 - busy), {"pcie_receive": 2.0, "pcie_transmit": 1.0}),
            (busy * prefill, {**work, "sm": 1.2, "tensor": 1.6, "dram": 0.7, "pcie_receive": 0.5}),
            (busy * (1 - prefill), {**work, "sm": 0.8, "tensor": 0.5, "dram": 1.3, "pcie_transmit": 0.2}),
        ]
    )
    for name, mean, ceiling in (("sm", sm, 0.97), ("tensor", tensor, 0.9), ("dram", dram, 0.93)):
        levels[name] = scale_to_mean(breaks, levels[name], mean, ceiling)
    for name, mean in (
        ("pcie_receive", pcie),
        ("pcie_transmit", pcie * draws.log_uniform("pcie_asymmetry", 0.02, 0.6)),
    ):
        levels[name] = scale_to_mean(breaks, levels[name], mean, board.pcie_bytes_per_second)
    levels["nvlink_receive"] = levels.pop("nvlink") * link
    levels["nvlink_transmit"] = levels["nvlink_receive"] * draws.uniform("nvlink_asymmetry", 0.96, 1.04)
    shared = cycle_starts(draws.rng, start_s, end_s, period_s=period, spread=spread)
    signals: list[Signal] = []
    for _ in range(ranks):
        own = shared if link > 0 else cycle_starts(draws.rng, start_s, end_s, period_s=period, spread=spread)
        wobble = 1 + float(draws.rng.normal(0, 0.02))
        scaled = {n: np.minimum(v * wobble, 0.99) if n in {"sm", "tensor", "dram"} else v for n, v in levels.items()}
        signals.append(Cyclic(breaks, scaled, own))
    return tuple(signals)


def _files(draws: Draws, start_s: float, end_s: float) -> tuple[HostLoad, ...]:
    """Return what a batch reads and writes."""
    target = draws.choice("output_to", ("disk_written", "network_transmit"), (0.7, 0.3))
    written = draws.log_uniform("output_bytes_per_second", 5e3, 2e7)
    source = draws.choice("input_from", ("cache", "disk_read", "network_receive"), (0.3, 0.4, 0.3))
    read = draws.log_uniform("input_bytes_per_second", 1e5, 5e8)
    output = HostLoad(start_s=start_s, end_s=end_s, channel=target, bytes_per_second=written, roughness=1.0)
    if source == "cache":
        return (output,)
    return output, HostLoad(start_s=start_s, end_s=end_s, channel=source, bytes_per_second=read, roughness=0.8)
