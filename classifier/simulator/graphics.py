"""Rendering and video: frames of 16 to 33 ms, scenes of seconds to minutes, encoders beside the multiprocessors."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from classifier.simulator.arrivals import CELL_S
from classifier.simulator.boards import Board
from classifier.simulator.other import whole
from classifier.simulator.priors import GB, Priors, even, log, take
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import Array, HostLoad, Job, Sampled
from classifier.simulator.training import Span

GRAPHICS: Final[dict[str, Priors]] = {
    # Games, remote desktops, offline rendering: frames that the display or the scene paces.
    "graphics": {
        "busy": even(0.15, 1.0, "utilisation 0.2-0.99; prior"),
        "sm": even(0.15, 0.9, "share of the busy time's SM activity; prior"),
        "tensor": even(-0.1, 0.1, "0-0.1: upscaling; below 0 none; prior"),
        "dram": even(0.1, 0.7, "prior"),
        "pcie_gb_s": log(0.05, 1.5, "0.1-1; prior"),
        "memory": log(0.02, 0.6, "prior"),
        "scene_s": log(2, 90, "prior"),
        "depth": even(0.05, 0.8, "how unlike scenes are; prior"),
        "network_bytes_per_second": log(1e3, 5e6, "streams of a remote desktop; prior"),
        "power_gain": even(0.6, 1.2, "prior"),
        "cores": even(0.5, 6, "prior"),
    },
    # Offline rendering by tracing rays: kernels of CUDA or OptiX, one frame after another, pictures to storage.
    "ray_tracing": {
        "busy": even(0.8, 1.0, "a farm's queue never empties; prior"),
        "sm": even(0.4, 0.92, "divergent rays; prior"),
        "tensor": even(-0.15, 0.12, "a denoiser at the end of a frame, in some; prior"),
        "dram": even(0.08, 0.5, "geometry and textures at random; prior"),
        "pcie_gb_s": log(0.003, 1.0, "scenes out of core; prior"),
        "memory": log(0.03, 0.9, "prior"),
        "scene_s": log(5, 240, "a frame; prior"),
        "depth": even(0.02, 0.3, "prior"),
        "network_bytes_per_second": log(1e3, 3e6, "prior"),
        "power_gain": even(0.7, 1.1, "prior"),
        "cores": even(0.9, 3, "prior"),
    },
    # Decoding, scaling and encoding: NVDEC and NVENC work, the multiprocessors hardly.
    "video": {
        "busy": even(0.05, 0.75, "prior"),
        "sm": even(0.03, 0.45, "scaling and filters; prior"),
        "tensor": even(-0.15, 0.1, "prior"),
        "dram": even(0.05, 0.5, "prior"),
        "pcie_gb_s": log(0.02, 4, "raw frames; prior"),
        "memory": log(0.02, 0.4, "prior"),
        "scene_s": log(1, 60, "prior"),
        "depth": even(0.02, 0.5, "prior"),
        "network_bytes_per_second": log(1e5, 3e8, "streams in and out; prior"),
        "power_gain": even(0.7, 1.3, "encoders take power that SM activity does not show"),
        "cores": even(0.5, 8, "prior"),
    },
}


#: FP32 pipe over SM activity: shaders, rays, filters, half of them integers; priors.
_SINGLES: Final = {"graphics": (0.15, 0.65), "ray_tracing": (0.2, 0.65), "video": (0.05, 0.5)}


def graphics_job(draws: Draws, board: Board, gpus: tuple[int, ...], span: Span, style: str = "graphics") -> Job:
    """Return rendering or video on every GPU, each by itself."""
    priors = GRAPHICS[style]
    first_s = max(span.start_s - 5, span.begin_s)
    cells = max(2, int(np.ceil((span.end_s - first_s) / CELL_S)) + 1)
    busy, sm = take(draws, priors, "busy"), take(draws, priors, "sm")
    tensor = max(0.0, take(draws, priors, "tensor"))
    dram = take(draws, priors, "dram")
    pcie = min(take(draws, priors, "pcie_gb_s") * GB, 0.5 * board.pcie_bytes_per_second)
    back = draws.uniform("pcie_asymmetry", 0.1, 1.2)
    scene_s, depth = take(draws, priors, "scene_s"), take(draws, priors, "depth")
    cores = take(draws, priors, "cores")
    signals = []
    for _ in gpus:
        scene = _scenes(draws.rng, cells, scene_s, depth)
        share = np.clip(busy * scene, 0.0, 1.0)
        signals.append(
            Sampled(
                first_s,
                CELL_S,
                {
                    "busy": share,
                    "sm": np.minimum(sm * share, 0.98),
                    "tensor": tensor * share,
                    "dram": np.minimum(dram * share, 0.93),
                    "pcie_receive": pcie * scene,
                    "pcie_transmit": np.minimum(pcie * back * scene, 0.5 * board.pcie_bytes_per_second),
                    "cpu_cores": cores * (0.5 + 0.5 * share),
                },
            )
        )
    rate = take(draws, priors, "network_bytes_per_second")
    incoming = draws.uniform("incoming", 0.05, 1.0)
    traffic = partial(HostLoad, start_s=span.begin_s, end_s=span.end_s)
    memory = take(draws, priors, "memory")
    return Job(
        gpus=gpus,
        stages=(whole(span, tuple(signals), memory, workload="other", note=style, present=True),),
        host=(
            traffic(channel="network_transmit", bytes_per_second=rate, roughness=0.4),
            traffic(channel="network_receive", bytes_per_second=rate * incoming, roughness=0.4),
        ),
        power_gain=take(draws, priors, "power_gain"),
        drift=draws.log_uniform("drift", 0.004, 0.04),
        singles=_SINGLES[style],
        # nvml.h: nvmlDeviceGetComputeRunningProcesses lists no OpenGL or DirectX applications. What traces rays or
        # scales video has a context of CUDA, and of the rest some have one beside.
        listed=style != "graphics" or draws.chance("compute_context", 0.35),
    )


def _scenes(rng: np.random.Generator, cells: int, scene_s: float, depth: float) -> Array:
    """Return how heavy the scene is, around 1: it changes at once, and wanders in between."""
    level = np.empty(cells)
    position = 0
    while position < cells:
        length = max(1, int(rng.exponential(scene_s) / CELL_S))
        level[position : position + length] = np.exp(depth * rng.standard_normal() - depth * depth / 2)
        position += length
    knots = rng.standard_normal(cells // 10 + 3)
    wander = np.interp(np.arange(cells) / 10, np.arange(knots.size), knots)
    scenes: Array = np.clip(level * (1 + 0.15 * depth * wander), 0.0, 4.0)
    return scenes
