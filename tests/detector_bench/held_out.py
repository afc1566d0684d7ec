"""Written after the detectors were frozen: a family of work and two sensor profiles that none of them was tried on.

The family is a recommender: embedding tables spread over the GPUs, looked up and exchanged in every step, little
matrix work, input streamed from the network all the time, tables saved by all ranks. The profiles are a guest with a
virtual GPU (no power, no PCIe, no profiling, no NVLink, no health, as vGPU offers them: SIGNALS.md 5.1), and an
exporter that is read every 10 s (profiling, NVLink and health, but no processes, no host, no XIDs).
"""

from __future__ import annotations

from dataclasses import replace

from tests.detector_bench import checkpoints, faults, healthy, lookalikes, stalls
from tests.detector_bench.cases import KINDS, Draw, Truth, kind
from tests.detector_bench.node import GB, Node
from tests.detector_bench.sensors import PROFILES, Profile
from tests.detector_bench.stalls import expect_stall
from tests.detector_bench.work import Job, Training

#: The modules whose kinds are shown with the new profiles.
SOURCES = (checkpoints, faults, healthy, lookalikes, stalls)
_OLD = tuple(PROFILES)
GUEST = Profile(
    "vgpu_guest", power=False, profiling=False, nvlink=False, infiniband=False, health=False, xids=False, pcie=False
)
EXPORTER = Profile(
    "exporter_10s", interval_s=10, host=False, infiniband=False, processes=False, xids=False, process_io=False,
    pressure=False,
)  # fmt: skip
PROFILES.update({GUEST.name: GUEST, EXPORTER.name: EXPORTER})
_FAMILY = {"held_out": True, "profiles": _OLD, "boards": ("H100", "A100", "H200"), "gpus": (8, 8, 4)}


def _recommender(draw: Draw) -> Training:
    return Training(
        step_s=draw.between(0.04, 0.4),
        communication=draw.rng.uniform(0.25, 0.45),
        gap=draw.rng.uniform(0.02, 0.15),
        sm=draw.rng.uniform(0.3, 0.55),
        tensor=draw.rng.uniform(0.01, 0.06),
        dram=draw.rng.uniform(0.35, 0.65),
        nvlink=draw.between(30, 150) * GB,
        infiniband=draw.between(2, 30) * GB,
        memory=draw.rng.uniform(0.7, 0.95),
        spread=0.03,
        read=draw.between(5e8, 4e9),
        read_from="network_receive",
        cpu=draw.rng.uniform(3, 8),
    )


def _job(draw: Draw) -> tuple[Node, Job]:
    node = draw.node()
    training = _recommender(draw)
    job = Job(node, tuple(range(node.gpus)), replace(training, infiniband=training.infiniband * (node.ports > 0)))
    job.load(0, 90, source="network_receive")
    return node, job


@kind("healthy", "a recommender that streams its input and saves its tables", hours=2.0, **_FAMILY)
def recommender(draw: Draw) -> tuple[Node, Truth]:
    node, job = _job(draw)
    now, every, length = 90.0, draw.between(900, 3600), draw.between(10, 90)
    rate = draw.between(5e8, 4e9)  # a job's checkpoints are alike
    while now < node.seconds:
        job.train(now, now + every * draw.rng.uniform(0.97, 1.03))
        now += every
        if now + length < node.seconds:
            job.save(now, length, to="network_transmit", style="all", rate=rate)
            now += length
    return node, Truth()


@kind("stall", "the exchange of a recommender hangs", hours=0.8, **_FAMILY)
def recommender_stall(draw: Draw) -> tuple[Node, Truth]:
    node, job = _job(draw)
    at, length = int(0.4 * node.seconds), draw.rng.uniform(700, 1200)
    job.train(90, at)
    job.wait(at, at + length, missing=draw.pick((), (1,)))
    job.train(at + length, node.seconds)
    truth = Truth()
    expect_stall(draw, truth, at, at + length)
    return node, truth


@kind("fault", "one GPU of a recommender is too hot, and the others wait for it", hours=1.0, **_FAMILY)
def recommender_hot(draw: Draw) -> tuple[Node, Truth]:
    node, job = _job(draw)
    at = int(0.5 * node.seconds)
    gpu = int(draw.rng.integers(node.gpus))
    share = draw.between(0.15, 0.9)
    job.train(90, at)
    job.train(at, node.seconds, slow={gpu: 1.0 / (1.0 - 0.4 * share)})
    node.clock[gpu, at:] = 1.0 - 0.4 * share
    node.reasons["sw_thermal"][gpu, at // 5 :] = share
    truth = Truth()
    if draw.profile.health:
        truth.expect("throttled", at, node.seconds, 200.0, gpus=(gpu,), also=("straggler", "fail_slow"))
    else:
        # Reasons in nvidia-smi's columns show it as well, if not for certain: what is said of this GPU is right.
        truth.accept("throttled", at, severity=2)
    truth.accept("straggler", at, severity=2)
    truth.accept("fail_slow", at, severity=2)
    return node, truth


#: Kinds that are shown with the new profiles, and what a profile must see for their fault to be seen.
_SHOWN = {
    "training_ddp": (),
    "training_evaluates": (),
    "serving_diurnal": (),
    "saves_unseen": (),
    "late_rank": (),
    "notebooks": (),
    "stall_all_wait": ("power",),
    "stall_missing_rank": ("power",),
    "straggler_clock": (),
    "throttle_sw_thermal": ("health",),
    "ecc_double_bit": ("health",),
    "leak_serving": (),
}


def _register() -> None:
    for name, needs in _SHOWN.items():
        for profile in (GUEST, EXPORTER):
            shown = f"{name}_{profile.name}"
            KINDS[shown] = replace(KINDS[name], name=shown, needs=needs, profiles=(profile.name,), held_out=True)


_register()
