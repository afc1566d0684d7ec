"""Inference that is not a chat: offline batches, embeddings and vision, pictures by diffusion."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from classifier.simulator.arrivals import CELL_S, load_shape
from classifier.simulator.boards import Board
from classifier.simulator.checkpoints import READ
from classifier.simulator.inference import loading_stage
from classifier.simulator.overlays import Extra, Overlaid
from classifier.simulator.priors import GB, take
from classifier.simulator.scenario import Draws
from classifier.simulator.serving_styles import BATCH, DIFFUSION, ITEM_STYLES
from classifier.simulator.signals import (
    Array,
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
from classifier.simulator.steps import PLAIN_SINGLES, SINGLES
from classifier.simulator.training import Span


def _job(
    draws: Draws,
    board: Board,
    gpus: tuple[int, ...],
    span: Span,
    *,
    memory: float,
    last_memory: float = 1.0,
    power_gain: float,
    signals: tuple[Signal, ...],
    host: list[HostLoad],
    loaded_s: float,
    singles: tuple[float, float] = SINGLES,
) -> Job:
    """Return a job that loads until `loaded_s` and then works."""
    loading, read = loading_stage(draws, board, len(gpus), memory, Span(span.begin_s, loaded_s, span.begin_s))
    working = Stage(
        start_s=loaded_s,
        end_s=max(loaded_s, span.end_s),
        signals=signals,
        memory_ratio=(memory, min(0.97, memory * last_memory)),
        workload="inference",
    )
    return Job(
        gpus=gpus,
        stages=(loading, working),
        host=(*read, *host),
        power_gain=power_gain,
        drift=draws.log_uniform("drift", 0.003, 0.03),
        singles=singles,
    )


def batch_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:
    """Return offline inference: the same batches one after another, from files to files."""
    loaded_s = span.begin_s + draws.log_uniform("load_s", 5, 60)
    files = _files(draws, loaded_s, span.end_s)
    batches = _batches(draws, board, len(gpus), max(span.start_s - 60, loaded_s), span.end_s)
    # What goes through files is read and written by the processes themselves.
    ways = {"disk_read": "process_read", "filesystem_read": "process_read", "disk_written": "process_written"}
    extras = tuple(
        Extra(load.start_s, load.end_s, {ways[load.channel]: load.bytes_per_second / len(gpus)})
        for load in files
        if load.channel in ways and load.end_s > span.start_s
    )
    return _job(
        draws,
        board,
        gpus,
        span,
        memory=take(draws, BATCH, "memory"),
        last_memory=max(1.0, take(draws, BATCH, "last_memory")),
        power_gain=take(draws, BATCH, "power_gain"),
        signals=tuple(Overlaid(signal, extras) for signal in batches),
        host=files,
        loaded_s=loaded_s,
    )


def _batches(draws: Draws, board: Board, ranks: int, start_s: float, end_s: float) -> tuple[Signal, ...]:
    """Return batch after batch per rank: in step where ranks share a model, each at its own pace where not."""
    period = take(draws, BATCH, "batch_s")
    spread = take(draws, BATCH, "batch_spread")
    busy = take(draws, BATCH, "busy")
    sm = take(draws, BATCH, "sm")
    tensor = take(draws, BATCH, "tensor", sm)
    dram = take(draws, BATCH, "dram")
    prefill = draws.uniform("prefill_share", 0.05, 0.95)
    link = take(draws, BATCH, "nvlink_gb_s") * GB * draws.chance("tensor_parallel", 0.5) * (ranks > 1)
    link = min(link, 0.3 * board.nvlink_bytes_per_second)
    pcie = take(draws, BATCH, "pcie_gb_s") * GB
    cores = take(draws, BATCH, "cores")
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
    levels["fp16"] = levels["sm"] * draws.uniform("fp16", 0.01, 0.15) * draws.chance("half_precision", 0.35)
    levels["cpu_cores"] = np.full(breaks.size - 1, cores)
    shared = cycle_starts(draws.rng, start_s, end_s, period_s=period, spread=spread)
    signals: list[Signal] = []
    for _ in range(ranks):
        own = shared if link > 0 else cycle_starts(draws.rng, start_s, end_s, period_s=period, spread=spread)
        wobble = 1 + float(draws.rng.normal(0, 0.02))
        scaled = {n: np.minimum(v * wobble, 0.99) if n in {"sm", "tensor", "dram"} else v for n, v in levels.items()}
        signals.append(Cyclic(breaks, scaled, own))
    return tuple(signals)


def _files(draws: Draws, start_s: float, end_s: float) -> list[HostLoad]:
    """Return what a batch reads and writes; an engine that writes shards does so in bursts minutes apart."""
    target = draws.choice("output_to", ("disk_written", "network_transmit"), (0.7, 0.3))
    written = draws.log_uniform("output_bytes_per_second", 5e3, 2e7)
    source = draws.choice("input_from", ("cache", *READ), (0.3, 0.3, 0.2, 0.2))
    read = draws.log_uniform("input_bytes_per_second", 1e5, 5e8)
    shard_s = draws.log_uniform("shard_every_s", 60, 1800)
    host: list[HostLoad] = []
    if draws.chance("writes_shards", 0.4):
        now = start_s + shard_s * float(draws.rng.random())
        while now < end_s:
            length = float(draws.rng.uniform(1, 20))
            rate = 5 * written * shard_s / length
            host.append(HostLoad(start_s=now, end_s=now + length, channel=target, bytes_per_second=min(rate, 2e9)))
            now += shard_s * float(np.clip(draws.rng.normal(1, 0.1), 0.5, 1.5))
    else:
        host.append(HostLoad(start_s=start_s, end_s=end_s, channel=target, bytes_per_second=written, roughness=1.0))
    if source != "cache":
        host.append(HostLoad(start_s=start_s, end_s=end_s, channel=source, bytes_per_second=read, roughness=0.8))
    logs = draws.log_uniform("log_bytes_per_second", 1e2, 3e5)
    host.append(HostLoad(start_s=start_s, end_s=end_s, channel="disk_written", bytes_per_second=logs, roughness=1.2))
    return host


#: By style: weights of where items come from (network, disk, network file system, another process), and how often the
#: tensor cores are not used.
_ITEM_HABITS: Final[dict[str, tuple[tuple[float, ...], float]]] = {
    "images": ((5, 1.5, 1.5, 2), 0.2),
    "embedding": ((1, 3, 3, 2), 0.08),
    "speech": ((1, 3, 3, 1), 0.1),
}


def vision_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span, style: str = "images") -> Job:
    """Return embeddings, images or speech: batches as items arrive or as a backlog gives them, one server per GPU."""
    priors, (sources, plain_share) = ITEM_STYLES[style], _ITEM_HABITS[style]
    loaded_s = span.begin_s + draws.log_uniform("load_s", 3, 30)
    first_s = max(span.start_s - 5, loaded_s)
    cells = max(2, int(np.ceil((span.end_s - first_s) / CELL_S)) + 1)
    load = take(draws, priors, "load")
    batch_s = take(draws, priors, "batch_s")
    items = take(draws, priors, "batch_size")
    sm = take(draws, priors, "sm")
    plain = draws.chance("without_tensor_cores", plain_share)
    tensor = take(draws, priors, "tensor", sm) * (not plain)
    dram = take(draws, priors, "dram")
    pcie = take(draws, priors, "pcie_gb_s") * GB
    halves = draws.uniform("fp16", 0.01, 0.15) * draws.chance("half_precision", 0.4)
    integers = draws.uniform("integer_share", 0.3, 0.95) * draws.chance("quantised", 0.15)
    back = draws.log_uniform("pcie_asymmetry", 0.005, 0.2)
    cores = take(draws, priors, "cores")
    shape = load_shape(draws, priors, cells)
    signals: list[Signal] = []
    for _ in gpus:
        # Batches that start in a cell; what a cell cannot hold waits for the next ones, two seconds at most.
        share = _queued(draws.rng.poisson(load * shape * CELL_S / batch_s), batch_s / CELL_S)
        wobble = 1 + float(draws.rng.normal(0, 0.02))
        rated = np.minimum(tensor * share * wobble, 0.9)
        signals.append(
            Sampled(
                first_s,
                CELL_S,
                {
                    "busy": share,
                    "sm": np.minimum(sm * share * wobble, 0.98),
                    "tensor": rated,
                    "hmma": rated * (1 - integers),
                    "imma": rated * integers,
                    "fp16": sm * share * halves,
                    "dram": np.minimum(dram * share * wobble, 0.93),
                    "pcie_receive": np.minimum(pcie * share, 0.8 * board.pcie_bytes_per_second),
                    "pcie_transmit": pcie * share * back,
                    "cpu_cores": 0.2 + cores * share,
                },
            )
        )
    rate = len(gpus) * min(load, 1.0) / batch_s * items * take(draws, priors, "bytes_per_item")
    # Over the network, from files, or from another process of the same host, which no counter sees.
    source = draws.choice("input_from", ("network_receive", "disk_read", "filesystem_read", "host"), sources)
    from_network = source == "network_receive"
    results = min(0.05 * rate, 2e8) if from_network else draws.log_uniform("result_bytes_per_second", 1e2, 1e6)
    logs = draws.log_uniform("log_bytes_per_second", 1e2, 3e5)
    traffic = partial(HostLoad, start_s=first_s, end_s=span.end_s)
    return _job(
        draws,
        board,
        gpus,
        span,
        memory=take(draws, priors, "memory"),
        power_gain=take(draws, priors, "power_gain"),
        signals=tuple(signals),
        host=[
            *([] if source == "host" else [traffic(channel=source, bytes_per_second=min(rate, 2e9), roughness=0.4)]),
            traffic(channel="network_transmit", bytes_per_second=results, roughness=0.4),
            traffic(channel="disk_written", bytes_per_second=logs, roughness=1.2),
        ],
        loaded_s=loaded_s,
        singles=PLAIN_SINGLES if plain else SINGLES,
    )


def _queued(batches: NDArray[np.int64], length: float) -> Array:
    """Return the share of each cell that is worked on when `batches` of `length` cells arrive in each."""
    waiting = 0.0
    worked = np.empty(batches.size)
    longest = 2.0 / CELL_S
    for index, more in enumerate(batches.tolist()):
        waiting = min(waiting + more * length, longest)
        worked[index] = min(1.0, waiting)
        waiting -= worked[index]
    return worked


def diffusion_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span) -> Job:
    """Return pictures one after another: denoising steps at full power, a decoder at the end, and idle in between."""
    loaded_s = span.begin_s + draws.log_uniform("load_s", 5, 60)
    first_s = max(span.start_s - 120, loaded_s)
    load = take(draws, DIFFUSION, "load")
    picture_s = take(draws, DIFFUSION, "picture_s")
    step_s = take(draws, DIFFUSION, "denoising_s")
    sm = take(draws, DIFFUSION, "sm")
    on = {
        "sm": sm,
        "tensor": take(draws, DIFFUSION, "tensor", sm),
        "dram": take(draws, DIFFUSION, "dram"),
        "cpu_cores": take(draws, DIFFUSION, "cores"),
        "streamed": min(take(draws, DIFFUSION, "host_gb_s") * GB, 0.7 * board.pcie_bytes_per_second)
        * draws.chance("weights_on_host", 0.3),
    }
    shown = Span(first_s, span.end_s, first_s)
    signals = tuple(_pictures(draws.rng, on, (load, picture_s, step_s), shown) for _ in gpus)
    rate = len(gpus) * load / picture_s * take(draws, DIFFUSION, "picture_bytes")
    traffic = partial(HostLoad, start_s=loaded_s, end_s=span.end_s)
    target = draws.choice("output_to", ("disk_written", "network_transmit"), (0.4, 0.6))
    return _job(
        draws,
        board,
        gpus,
        span,
        memory=take(draws, DIFFUSION, "memory"),
        power_gain=take(draws, DIFFUSION, "power_gain"),
        signals=signals,
        host=[traffic(channel=target, bytes_per_second=min(rate, 5e8), roughness=1.0)],
        loaded_s=loaded_s,
    )


def _pictures(rng: np.random.Generator, on: dict[str, float], pace: tuple[float, float, float], span: Span) -> Sampled:
    """Return the square wave of one GPU at a `pace` of (load, seconds of a picture, of a denoising step)."""
    load, picture_s, step_s = pace
    cells = max(2, int(np.ceil((span.end_s - span.start_s) / CELL_S)) + 1)
    seconds = np.arange(cells) * CELL_S
    denoising, decoding, swapping = np.zeros(cells), np.zeros(cells), np.zeros(cells)
    now = -picture_s * float(rng.random())
    while now < seconds[-1]:
        length = picture_s * float(np.clip(rng.lognormal(0, 0.15), 0.6, 1.8))
        gap = float(rng.exponential(picture_s * (1 - load) / load)) if load < 1 else 0.0
        swapping[(seconds >= now) & (seconds < now + 0.15 * length)] = 1.0
        denoising[(seconds >= now) & (seconds < now + 0.93 * length)] = 1.0
        decoding[(seconds >= now + 0.93 * length) & (seconds < now + length)] = 1.0
        now += length + gap + float(rng.uniform(0.05, 0.4))  # the host saves the picture
    # A denoising step ends in small kernels: a dip of a tenth of it.
    dip: Array = np.ones(cells)
    if step_s >= 2 * CELL_S:
        dip = np.where((seconds / step_s) % 1.0 < 0.1, 0.55, 1.05).astype(np.float64)
    return Sampled(
        span.start_s,
        CELL_S,
        {
            "busy": denoising + decoding,
            "sm": np.minimum(on["sm"] * (denoising * dip + 0.8 * decoding), 0.98),
            "tensor": np.minimum(on["tensor"] * (denoising * dip + 0.4 * decoding), 0.9),
            "dram": np.minimum(on["dram"] * (denoising + 1.5 * decoding), 0.93),
            # Swapped models come in for the denoiser and again for the decoder.
            "pcie_receive": 2e6 + on["streamed"] * np.maximum(swapping, decoding),
            "pcie_transmit": 1e6 + 4e7 * decoding + 0.7 * on["streamed"] * decoding,
            "cpu_cores": 0.05 + on["cpu_cores"] * (denoising + decoding),
        },
    )
