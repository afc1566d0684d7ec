"""The families of workloads that can be simulated: what `Scenario.kind` may name, its class and its builder.

A family is what a held-out test holds out as a whole. `data_parallel_training` mixes several styles, the families
after it hold one each.

What each is labelled, where that is a choice: a tensor-parallel server that spins with nothing to do is inference (its
utilisation is 100 %, idle is what utilisation calls idle); a notebook is idle between its cells and `other` while one
runs (whatever it computes is neither a job nor a service); loading, warm-up, evaluation, checkpoints and hangs of a
training job are training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from classifier.simulator.batches import batch_job, diffusion_job, vision_job
from classifier.simulator.boards import Board
from classifier.simulator.computing import burn_in_job, code_job
from classifier.simulator.graphics import graphics_job
from classifier.simulator.inference import serving_job
from classifier.simulator.other import idle_job, loaded_idle_job, mining_job, notebook_job, spinning_job
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import Job
from classifier.simulator.training import Span, training_job

Builder = Callable[[Draws, Board, tuple[int, ...], Span], Job]
_MANY: Final = (2, 4, 8, 8)
_ANY: Final = (1, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of workloads; `workload` is the class of its work, though some phases may be idle."""

    workload: str
    build: Builder
    #: How often training data take it, relative to the others.
    weight: float
    #: Numbers of GPUs to choose from.
    gpu_counts: tuple[int, ...] = _ANY
    #: Widths of replicas: each group of that many GPUs is a job of its own; empty where all GPUs are one job.
    widths: tuple[int, ...] = ()
    #: Whether its ranks wait for each other in collectives, so that a board made for single GPUs is no place for it.
    collective: bool = False


def _training(weight: float, *flavours: str, counts: tuple[int, ...] = _MANY, collective: bool = True) -> Family:
    even = dict.fromkeys(flavours, 1.0)
    return Family(
        workload="training",
        build=partial(training_job, flavours=even),
        weight=weight,
        gpu_counts=counts,
        collective=collective,
    )


def _serving(weight: float, style: str, widths: tuple[int, ...], counts: tuple[int, ...] = _ANY) -> Family:
    build = partial(serving_job, style=style)
    return Family(workload="inference", build=build, weight=weight, gpu_counts=counts, widths=widths)


def _code(weight: float, style: str) -> Family:
    return Family(workload="other", build=partial(code_job, style=style), weight=weight)


FAMILIES: Final[dict[str, Family]] = {
    "data_parallel_training": Family(workload="training", build=training_job, weight=0.08),
    "llm_serving": Family(workload="inference", build=serving_job, weight=0.06, widths=(1, 1, 2, 4, 8)),
    "offline_batch": Family(workload="inference", build=batch_job, weight=0.07),
    "idle": Family(workload="idle", build=idle_job, weight=0.04),
    "loaded_idle": Family(workload="idle", build=loaded_idle_job, weight=0.06),
    "hpc": _code(0.025, "hpc"),
    "mining": Family(workload="other", build=mining_job, weight=0.025),
    "stalled_all_reduce": Family(
        workload="training", build=partial(training_job, fault="stall"), weight=0.03, gpu_counts=_MANY, collective=True
    ),
    "rank0_checkpoint": Family(
        workload="training",
        build=partial(training_job, fault="rank0_saves"),
        weight=0.04,
        gpu_counts=_MANY,
        collective=True,
    ),
    "small_model_training": _training(0.035, "small_ddp", counts=(1, 2, 4, 8), collective=False),
    "sharded_training": _training(0.035, "fsdp"),
    "tensor_pipeline_training": _training(0.035, "pipeline", "tensor"),
    "expert_training": _training(0.025, "experts"),
    "offload_training": _training(0.03, "offload", counts=_ANY),
    "adapter_tuning": _training(0.035, "lora", counts=(1, 1, 1, 2), collective=False),
    "full_tuning": _training(0.025, "full_tuning"),
    "reinforcement_tuning": _training(0.02, "reinforcement"),
    "vision_training": _training(0.03, "cnn", counts=_ANY, collective=False),
    "starved_training": _training(0.03, "starved", counts=_ANY, collective=False),
    "tiny_training": _training(0.025, "tiny", counts=(1, 1, 2, 4), collective=False),
    "tensor_parallel_serving": _serving(0.035, "tensor_parallel", (2, 4, 8), (2, 4, 8)),
    "prefill_pool": _serving(0.025, "prefill_pool", (1, 2, 4)),
    "decode_pool": _serving(0.025, "decode_pool", (1, 2, 4, 8)),
    "speculative_decoding": _serving(0.025, "speculative", (1,)),
    "batch_generation": _serving(0.03, "batch_generation", (1, 1, 1, 2, 4, 8)),
    "vision_inference": Family(workload="inference", build=vision_job, weight=0.035),
    "embedding_batch": Family(workload="inference", build=partial(vision_job, style="embedding"), weight=0.03),
    "speech_batch": Family(workload="inference", build=partial(vision_job, style="speech"), weight=0.03),
    "diffusion": Family(workload="inference", build=diffusion_job, weight=0.03),
    "spinning_server": Family(workload="inference", build=spinning_job, weight=0.02, gpu_counts=_MANY, collective=True),
    "notebook": Family(workload="other", build=notebook_job, weight=0.02, gpu_counts=(1, 1, 2)),
    "molecular_dynamics": _code(0.02, "molecular_dynamics"),
    "fluid_dynamics": _code(0.02, "fluid_dynamics"),
    "linear_algebra": _code(0.02, "linear_algebra"),
    "seismic": _code(0.02, "seismic"),
    "lattice": _code(0.02, "lattice"),
    "genomics": _code(0.02, "genomics"),
    "ray_tracing": Family(workload="other", build=partial(graphics_job, style="ray_tracing"), weight=0.02),
    "graphics": Family(workload="other", build=graphics_job, weight=0.02),
    "video": Family(workload="other", build=partial(graphics_job, style="video"), weight=0.02),
    "burn_in": Family(workload="other", build=burn_in_job, weight=0.025),
}
