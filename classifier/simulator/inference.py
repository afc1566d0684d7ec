"""Online serving of language models: a server, or the pools of a disaggregated one.

A request has a prefill (compute-bound, near the power limit) and then decodes together with the others (memory-bound,
low power), after Splitwise (arXiv:2311.18677) and POLCA (arXiv:2308.12908). Ranges are in `serving_styles`; they reach
into those of training on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from classifier.simulator.arrivals import CELL_S, in_work, load_shape
from classifier.simulator.boards import Board
from classifier.simulator.checkpoints import READ
from classifier.simulator.priors import GB, Priors, take
from classifier.simulator.scenario import Draws
from classifier.simulator.serving_styles import SERVING_STYLES
from classifier.simulator.signals import Array, Constant, HostLoad, Job, Sampled, Stage
from classifier.simulator.training import Span

#: Where a file of prompts is read, and where the answers are written: disk, network file system, object storage.
_FILES: Final = {
    "disk": ("disk_read", "disk_written"),
    "filesystem": ("filesystem_read", "filesystem_written"),
    "network": ("network_receive", "network_transmit"),
}


def serving_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span, style: str = "online") -> Job:
    """Return a server on `gpus` (one tensor-parallel group) that takes requests throughout `span`."""
    priors = SERVING_STYLES[style]
    ranks = len(gpus)
    load_s = draws.log_uniform("load_s", 5, 60)
    memory = take(draws, priors, "memory")
    grows = draws.chance("memory_grows", 0.3)
    power_gain = take(draws, priors, "power_gain")
    loaded_s = span.begin_s + load_s
    first_s = max(span.start_s - 60, loaded_s)  # a minute ahead: requests are already in flight
    loading, host = loading_stage(draws, board, ranks, memory, Span(span.begin_s, loaded_s, span.begin_s))
    stages = [loading]
    if span.end_s > first_s:
        channels, requests_per_s = _served(draws, board, priors, ranks, span.end_s - first_s)
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
        host += _traffic(draws, priors, style, requests_per_s, Span(first_s, span.end_s, first_s))
    return Job(
        gpus=gpus,
        stages=tuple(stages),
        host=tuple(host),
        power_gain=power_gain,
        spin_watts=draws.log_uniform("waiting_watts", 2, 65) / 0.18,
        drift=draws.log_uniform("drift", 0.003, 0.03),
    )


def loading_stage(draws: Draws, board: Board, ranks: int, memory: float, span: Span) -> tuple[Stage, list[HostLoad]]:
    """Return the loading of a model: read from storage, copied to the GPU; 10-30 s, 2 s from NVMe."""
    length_s = span.end_s - span.start_s
    rate = min(4e9, memory * board.memory_bytes * ranks * 0.5 / length_s)
    source = draws.choice("load_from", READ, (0.6, 0.15, 0.25))
    copying = Constant(
        {
            "pcie_receive": min(rate / ranks, 0.8 * board.pcie_bytes_per_second),
            "busy": 0.2,
            "dram": 0.02,
            "cpu_cores": float(draws.rng.uniform(0.5, 3)),
            "process_read": rate / ranks,
        }
    )
    stage = Stage(
        start_s=span.start_s,
        end_s=span.end_s,
        signals=(copying,) * ranks,
        memory_ratio=(0.006, memory),
        workload="inference",
        note="loading",
    )
    traffic = partial(HostLoad, start_s=span.start_s, end_s=span.end_s)
    return stage, [traffic(channel=source, bytes_per_second=rate)]


def _traffic(draws: Draws, priors: Priors, style: str, requests_per_s: float, span: Span) -> list[HostLoad]:
    """Return what the host sends and receives: requests and answers, caches between pools, logs."""
    logs = draws.log_uniform("log_bytes_per_second", 1e3, 3e5)
    sizes = draws.log_uniform("bytes_per_request", 2e3, 2e6)
    caches = take(draws, priors, "fabric_gb_s") * GB
    over_fabric = draws.chance("caches_over_infiniband", 0.6)
    traffic = partial(HostLoad, start_s=span.start_s, end_s=span.end_s)
    host = [traffic(channel="disk_written", bytes_per_second=logs, roughness=1.2)]
    requests, answers = "network_receive", "network_transmit"
    if style == "batch_generation":  # prompts and answers are files
        requests, answers = _FILES[draws.choice("files_on", tuple(_FILES), (0.5, 0.3, 0.2))]
    for channel, share in ((requests, 0.6), (answers, 0.4)):
        rate = max(200.0, requests_per_s * sizes * share)
        host.append(traffic(channel=channel, bytes_per_second=rate, roughness=0.5))
    directions = {"prefill_pool": (0.03, 1.0), "decode_pool": (1.0, 0.03)}.get(style)
    if directions is not None:
        link = "infiniband" if over_fabric else "network"
        rate = caches if over_fabric else min(caches, 3e9)
        for name, share in zip(("receive", "transmit"), directions, strict=True):
            host.append(traffic(channel=f"{link}_{name}", bytes_per_second=rate * share, roughness=0.5))
    return host


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """How much is in work over the cells: shares of time with a prefill, with decoding, and the batch's depth."""

    filling: Array
    decoding: Array
    depth: Array
    requests_per_s: float


def _load(draws: Draws, priors: Priors, cells: int) -> _Load:
    rng = draws.rng
    shape = load_shape(draws, priors, cells)
    prefill_s = take(draws, priors, "prefill_s")
    decode_s = take(draws, priors, "decode_s")
    concurrency = take(draws, priors, "concurrency")
    batch = take(draws, priors, "batch_half")
    rate = min(concurrency / decode_s, 0.85 / prefill_s)
    if "load" in priors:  # a pool that is told by how busy it is
        rate = -float(np.log(1 - take(draws, priors, "load"))) / prefill_s
    arrivals = rng.poisson(rate * shape * CELL_S)
    index = np.repeat(np.arange(cells), arrivals)
    prefill = np.clip(rng.lognormal(np.log(prefill_s), 0.7, index.size), 0.01, 8.0)
    decode = np.clip(rng.lognormal(np.log(decode_s), 0.6, index.size), min(0.1, decode_s), 240.0)
    start = index * CELL_S + rng.uniform(0, CELL_S, index.size)
    filling = np.minimum(in_work(start, start + prefill, cells), 1.0)
    active = in_work(start + prefill, start + prefill + decode, cells)
    decoding = np.minimum(active, 1.0) * (1 - filling)
    return _Load(filling=filling, decoding=decoding, depth=active / (active + batch), requests_per_s=rate)


def _cadence(draws: Draws, priors: Priors, cells: int) -> Array:
    """Return the swing between proposing and verifying around 1; flat where nothing is proposed."""
    if "cadence_s" not in priors:
        return np.ones(cells)
    period = take(draws, priors, "cadence_s")
    swing = take(draws, priors, "swing")
    pace = 1 + 0.08 * np.repeat(draws.rng.standard_normal(cells // 8 + 1), 8)[:cells]
    phase = np.cumsum(np.clip(pace, 0.5, 1.5)) * CELL_S / period
    wave: Array = 1 + swing * np.where(phase % 1.0 < 0.5, 1.0, -1.0)
    return wave


def _served(
    draws: Draws, board: Board, priors: Priors, ranks: int, length_s: float
) -> tuple[list[dict[str, Array]], float]:
    """Return activity per rank and the mean arrival rate; concurrency comes from arrivals and their lengths."""
    rng = draws.rng
    cells = int(np.ceil(length_s / CELL_S)) + 1
    load = _load(draws, priors, cells)
    filling, decoding = load.filling, load.decoding
    resident = take(draws, priors, "resident")
    cadence = _cadence(draws, priors, cells)
    decode_sm = take(draws, priors, "decode_sm") * (0.5 + 0.9 * load.depth) * resident * cadence
    decode_dram = take(draws, priors, "decode_dram") * (0.8 + 0.2 * load.depth) * resident * cadence
    # Matrix products grow with the batch, attention does not use the tensor cores much.
    decode_tensor = take(draws, priors, "decode_tensor") * decode_sm * (0.6 + 0.5 * load.depth)
    prefill_sm = take(draws, priors, "prefill_sm")
    prefill_tensor = take(draws, priors, "prefill_tensor") * prefill_sm
    prefill_dram = take(draws, priors, "prefill_dram")
    link = take(draws, priors, "nvlink_gb_s") * GB * (ranks > 1)
    idle_spin = draws.chance("idle_spin", 0.2) and ranks > 1
    waiting = float(draws.choice("blocks", ("8", "16", "24", "32"))) / board.multiprocessors
    working = filling + decoding
    pcie = take(draws, priors, "pcie_gb_s") * GB
    decode_pcie = draws.log_uniform("decode_pcie_share", 0.02, 1.0)
    from_host = draws.chance("weights_on_host", 0.1 if priors is SERVING_STYLES["online"] else 0.0)
    streamed = min(take(draws, priors, "host_gb_s") * GB, 0.7 * board.pcie_bytes_per_second) * from_host
    back = draws.log_uniform("pcie_asymmetry", 0.02, 0.6)
    skewed = take(draws, priors, "nvlink_skew")
    # Eight-bit integers on the tensor cores of a quantised model; FP8 counts as half precision.
    integers = draws.uniform("integer_share", 0.3, 0.95) * draws.chance("quantised", 0.12)
    halves = draws.uniform("fp16", 0.01, 0.15) * draws.chance("half_precision", 0.35)
    cores = take(draws, priors, "cores") + take(draws, priors, "host_cores") * from_host
    # Workers poll their queue; some sleep.
    polls = 1.0 if draws.chance("workers_poll", 0.6) else 0.1
    channels: list[dict[str, Array]] = []
    for rank in range(ranks):
        wobble = 1 + float(rng.normal(0, 0.015))
        spin = np.where(working < 0.02, 1.0, 0.0) if idle_spin and rank > 0 else np.zeros(cells)
        links = np.minimum(link * (filling + 0.6 * decoding * resident), 0.5 * board.nvlink_bytes_per_second)
        busy = np.minimum(filling + decoding * min(1.0, resident * 1.1), 1.0)
        sm = np.minimum((filling * prefill_sm + decoding * decode_sm) * wobble, 0.98 * busy)
        tensor = np.minimum((filling * prefill_tensor + decoding * decode_tensor) * wobble, 0.9)
        channels.append(
            {
                "busy": np.minimum(busy + spin, 1.0),
                "sm": sm,
                "spin": spin * waiting,
                "tensor": tensor,
                "hmma": tensor * (1 - integers),
                "imma": tensor * integers,
                "fp16": sm * halves,
                "dram": np.minimum((filling * prefill_dram + decoding * decode_dram) * wobble, 0.92),
                "nvlink_receive": links,
                "nvlink_transmit": links * skewed,
                "pcie_receive": pcie * (filling + decode_pcie * decoding * resident) + streamed * working,
                "pcie_transmit": pcie * back * working,
                "cpu_cores": (cores if rank == 0 else 1.0) * (polls + (1 - polls) * np.minimum(working, 1.0)),
            }
        )
    return channels, load.requests_per_s
