"""Healthy work, long stretches of it, and the pauses that belong to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.detector_bench.cases import Draw, Truth, kind
from tests.detector_bench.node import Filesystem, Node
from tests.detector_bench.work import STYLES, Job, draw_training

HOURS = 3.0


def _training(draw: Draw, style: str, *, save: bool = True) -> tuple[Node, Truth]:
    node = draw.node()
    rng = draw.rng
    job = Job(node, tuple(range(node.gpus)), draw_training(rng, style, multi_node=node.ports > 0))
    now = draw.between(20, 90)
    job.load(0, now)
    every, length = draw.between(600, 3600), draw.between(5, 60)
    to = _target(draw, node)
    how, rate = draw.pick("rank0", "all", "async"), draw.between(3e8, 3e9)  # a job's checkpoints are alike
    while now < node.seconds:
        until = min(now + every * rng.uniform(0.99, 1.01), node.seconds)
        job.train(now, until)
        now = until
        if save and now + length < node.seconds:
            if how == "async":
                job.train(now, now + length)
            job.save(now, length, to=to, style=how, rate=rate)
            now += length
    return node, Truth()


def _target(draw: Draw, node: Node) -> str:
    options = ["disk_written", "network_transmit"]
    if node.filesystem is not None:
        options.append("filesystem_written")
    return str(draw.rng.choice(options))


def _register() -> None:
    for style in STYLES:

        def build(draw: Draw, style: str = style) -> tuple[Node, Truth]:
            return _training(draw, style)

        build.__name__ = f"training_{style}"
        kind("healthy", f"training ({style}) with checkpoints that come as usual", hours=HOURS)(build)


_register()


@kind("healthy", "training that never writes from this node", hours=HOURS)
def training_never_writes(draw: Draw) -> tuple[Node, Truth]:
    return _training(draw, "fsdp", save=False)


@kind("healthy", "training with an optimizer on the CPU: 0 and 100 % every 2 to 10 s", hours=HOURS)
def training_offload(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)), draw_training(draw.rng, "ddp"))
    job.load(0, 60)
    job.training = replace(job.training, step_s=draw.between(2.5, 9))
    job.train(60, node.seconds, gap=draw.rng.uniform(0.5, 0.8))
    node.cpu[:, 12:] = draw.rng.uniform(6, 14)
    node.activity["pcie_tx"] += 1.2e9 * (node.activity["busy"] < 0.6)
    node.activity["pcie_rx"] += 1.2e9 * (node.activity["busy"] < 0.6)
    node.pressure["cpu"][12:] = draw.rng.uniform(0.05, 0.25)
    return node, Truth()


@kind("healthy", "training with evaluations: forward passes only, each rank at its own pace", hours=HOURS)
def training_evaluates(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)), draw_training(draw.rng, "fsdp"))
    job.load(0, 40)
    now, every, length = 40.0, draw.between(400, 2400), draw.between(30, 500)
    while now < node.seconds:
        job.train(now, now + every)
        now += every
        if now >= node.seconds:
            break
        for gpu in job.gpus:
            cells = node.span(now, now + length)
            rough = draw.rng.normal(1, 0.08, cells.stop - cells.start)
            node.paint(
                (gpu,), now, now + length, busy=0.93 * np.minimum(rough, 1.07), sm=0.5 * rough, tensor=0.25 * rough,
                dram=0.3 * rough, pcie_rx=8e7,
            )  # fmt: skip
        # The ranks that are done first wait for the last one.
        late = job.gpus[1:]
        if late:
            node.paint(late, now + length - draw.rng.uniform(1, 9), now + length, busy=1.0, spin=1.0, waiting_sm=0.06)
        now += length
    return node, Truth()


@kind("healthy", "reinforcement tuning: generation and learning in turn", hours=HOURS)
def training_rollouts(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)), draw_training(draw.rng, "fsdp"))
    job.load(0, 60)
    now, generate, learn = 60.0, draw.between(40, 300), draw.between(30, 200)
    while now < node.seconds:
        job.serve(now, now + generate, 0.75, memory=job.training.memory)
        # The longest answers come last, on fewer and fewer ranks.
        for gpu in job.gpus:
            tail = draw.rng.uniform(0, 0.3) * generate
            node.paint((gpu,), now + generate - tail, now + generate, busy=0.3, sm=0.05, dram=0.1)
        now += generate
        job.train(now, now + learn)
        now += learn
    return node, Truth()


@kind("healthy", "adapter tuning on single GPUs, each at its own pace, small saves", hours=HOURS, gpus=(8, 4, 2))
def adapters(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    for gpu in range(node.gpus):
        job = Job(node, (gpu,), draw_training(draw.rng, "small"))
        job.load(0, 30)
        job.train(30, node.seconds)
        for start in np.arange(700, node.seconds, draw.between(300, 1500)):
            node.add_host("disk_written", start, start + 3, draw.between(2e7, 4e8))
    return node, Truth()


@kind("healthy", "short jobs one after another: each loads, works some minutes and ends", hours=HOURS)
def short_jobs(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    now = 10.0
    gpus = tuple(range(node.gpus))
    while now < node.seconds - 400:
        job = Job(node, gpus, draw_training(draw.rng, draw.pick(*STYLES)), start_s=now)
        load, length = draw.between(8, 60), draw.between(60, 900)
        job.load(now, now + load)
        job.train(now + load, now + load + length)
        now += load + length
        node.paint(gpus, now, node.seconds)
        node.end_processes(gpus, now)
        now += draw.between(5, 120)
    return node, Truth()


@kind("healthy", "serving with a day's rhythm, from near nothing to full load", hours=HOURS)
def serving_diurnal(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    width = draw.pick(1, 2, node.gpus)
    t = np.arange(node.seconds)
    day = 0.4 + 0.35 * np.sin(2 * np.pi * (t / node.seconds + draw.rng.random()))
    for first in range(0, node.gpus, width):
        job = Job(node, tuple(range(first, first + width)))
        job.serve(0, node.seconds, np.clip(day * draw.rng.uniform(0.6, 1.2), 0.03, 1))
    return node, Truth()


@kind("healthy", "a server with rare requests: a burst every few minutes", hours=HOURS, gpus=(8, 4, 1))
def serving_rare(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    truth = Truth()
    for gpu in range(node.gpus):
        job = Job(node, (gpu,))
        load = (np.repeat(draw.rng.random(node.seconds // 20 + 1) < 0.12, 20)[: node.seconds]) * 0.5
        job.serve(0, node.seconds, load)
    # Hours of a request now and then are a fair thing to tell, as information.
    truth.accept("low_utilization", severity=2)
    return node, truth


@kind("healthy", "a tensor-parallel server without requests: its workers spin in a broadcast", hours=HOURS)
def serving_spins(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)))
    job.serve(0, node.seconds, 0.5)
    now = draw.between(300, 1200)
    while now < node.seconds:
        length = draw.between(60, 2400)
        job.wait(now, now + length, missing=job.gpus[:1], missing_cpu=0.1)
        now += length + draw.between(120, 900)
    truth = Truth()
    truth.accept("collective_wait", severity=2)
    truth.accept("low_utilization", severity=2)
    return node, truth


@kind("healthy", "offline generation at full load", hours=HOURS)
def batch_inference(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    for gpu in range(node.gpus):
        Job(node, (gpu,)).serve(0, node.seconds, draw.rng.uniform(0.7, 1.0))
    return node, Truth()


@kind("healthy", "physics in double precision: level, own period, dumps of state", hours=HOURS)
def hpc(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    for gpu in range(node.gpus):
        Job(node, (gpu,), key="slurm/77")
        rough = draw.rng.normal(1, 0.02, node.seconds)
        node.paint((gpu,), 0, node.seconds, busy=0.97, sm=0.8 * rough, dram=0.5 * rough, pcie_rx=1e8, memory=0.3)
    for start in np.arange(600, node.seconds, draw.between(300, 1800)):
        length = draw.between(2, 20)
        node.add_host("disk_written", start, start + length, 1e9)
        node.paint(tuple(range(node.gpus)), start, start + length, busy=0.1, sm=0.03, dram=0.02, pcie_tx=2e9)
    return node, Truth()


@kind("healthy", "mining: flat for hours", hours=HOURS)
def mining(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    dram = draw.pick(0.05, 0.85)
    for gpu in range(node.gpus):
        Job(node, (gpu,))
        node.paint((gpu,), 0, node.seconds, busy=1.0, sm=0.93, dram=dram, memory=0.15)
    return node, Truth()


@kind("healthy", "notebooks: bursts at random, memory in steps, rests of minutes", hours=HOURS)
def notebooks(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    for gpu in range(node.gpus):
        job = Job(node, (gpu,))
        job.rest(0, node.seconds)
        now, memory = draw.between(10, 300), 0.02
        while now < node.seconds:
            length = draw.between(1, 60)
            memory = min(0.8, memory + draw.rng.exponential(0.02))
            node.paint((gpu,), now, now + length, busy=0.8, sm=0.4, dram=0.2, tensor=0.1)
            node.activity["memory"][gpu, int(now) :] = memory
            now += length + draw.between(10, 900)
    truth = Truth()
    truth.accept("low_utilization", severity=2)
    return node, truth


@kind("healthy", "empty GPUs: nobody holds them", hours=HOURS)
def empty(draw: Draw) -> tuple[Node, Truth]:
    return draw.node(), Truth()


@kind("healthy", "two jobs share the node: one trains, one serves, some GPUs are empty", hours=HOURS, gpus=(8,))
def shared_node(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, (0, 1, 2, 3), draw_training(draw.rng, "ddp"))
    job.load(0, 40)
    now = 40.0
    every, to = draw.between(600, 1800), _target(draw, node)
    while now < node.seconds:
        job.train(now, now + every)
        job.save(now + every, 12.0, to=to)
        now += every + 12.0
    Job(node, (4, 5)).serve(0, node.seconds, 0.4)
    return node, Truth()


@kind("healthy", "rank 0 saves where no byte is counted: a stall's signature for 15 to 60 s", hours=HOURS)
def saves_unseen(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    node.filesystem = Filesystem("/scratch", draw.pick("lustre", "gpfs", "beegfs"), readable=False)
    job = Job(node, tuple(range(node.gpus)), draw_training(draw.rng, "ddp"))
    job.load(0, 40)
    now, every, length = 40.0, draw.between(400, 1800), draw.between(15, 60)
    saved = length * draw.between(4e8, 2e9)  # bytes: a job's checkpoints are alike
    while now < node.seconds:
        job.train(now, now + every * draw.rng.uniform(0.98, 1.02))
        now += every
        took = length * draw.rng.uniform(0.9, 1.2)
        # The bytes of such a file system pass by the network interfaces or the fabric.
        job.save(now, took, to="infiniband_transmit" if node.ports else "network_transmit", rate=saved / took)
        now += took
    return node, Truth()


@kind("healthy", "a power cap for all: every clock lower, the software cap set all the time", hours=HOURS)
def power_capped(draw: Draw) -> tuple[Node, Truth]:
    node, truth = _training(draw, "ddp")
    node.clock[:] = draw.rng.uniform(0.7, 0.95)
    node.reasons["sw_power_cap"][:] = draw.rng.uniform(0.5, 1.0)
    return node, truth


@kind(
    "healthy", "errors at the rate of healthy boards: corrected ones, replays, a symbol error now and then", hours=HOURS
)
def benign_errors(draw: Draw) -> tuple[Node, Truth]:
    node, truth = _training(draw, "tensor_pipeline")
    shape = (node.gpus, node.slow)
    node.health["pcie_replays_total"] += draw.rng.random(shape) < 1 / 720
    node.health["ecc_corrected_volatile_total"] += draw.rng.random(shape) < 1 / 2000
    node.health["nvlink_crc_errors_total"] += draw.rng.random(shape) < 1 / 3000
    if node.ports:
        node.port_events["symbol_error"] += draw.rng.random((node.ports, node.slow)) < 1 / 3000
        node.port_events["port_xmit_wait"] += draw.rng.poisson(2000, (node.ports, node.slow))
    return node, truth


@kind("healthy", "other tenants keep disks, network and CPUs busy while GPUs work", hours=HOURS)
def noisy_host(draw: Draw) -> tuple[Node, Truth]:
    node, truth = _training(draw, "fsdp")
    for name in ("disk_written", "disk_read", "network_receive", "network_transmit"):
        load = np.repeat(draw.rng.random(node.seconds // 60 + 1) < 0.4, 60)[: node.seconds]
        node.host[name] += load * draw.between(5e7, 8e8)
    node.pressure["cpu"][:] = draw.rng.uniform(0.2, 0.5)
    node.pressure["io"][:] = draw.rng.uniform(0.05, 0.3)
    node.dirty += 2e9 * draw.rng.random(node.slow)
    return node, truth


@kind("healthy", "pipeline stages of different weight: ranks differ all the time", hours=HOURS)
def uneven_stages(draw: Draw) -> tuple[Node, Truth]:
    node, truth = _training(draw, "tensor_pipeline")
    weights = draw.rng.uniform(0.85, 1.0, node.gpus)[:, None]
    for name in ("sm", "tensor", "dram"):
        node.activity[name] *= weights
    return node, truth
