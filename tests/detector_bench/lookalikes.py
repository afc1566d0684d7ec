"""What looks like a fault and is none: SIGNALS.md 3.2 and what is near it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.detector_bench.cases import Draw, Truth, kind
from tests.detector_bench.healthy import HOURS
from tests.detector_bench.node import Node
from tests.detector_bench.work import STYLES, Job, draw_training


def _start(draw: Draw, style: str | None = None, *, load: float = 40.0) -> tuple[Node, Job]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)), draw_training(draw.rng, style or draw.pick(*STYLES)))
    job.load(0, load)
    return node, job


@kind("healthy", "a rank that is late at the start: the others wait 5 to 30 min for it", hours=HOURS, gpus=(8, 4))
def late_rank(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw)
    until = 40 + draw.between(300, 1800)
    job.wait(40, until, missing=job.gpus[-1:], missing_cpu=1.0)
    node.activity["pcie_rx"][-1, node.span(40, until)] = 2e9
    cells = node.span(40, until)
    node.activity["memory"][-1, cells] = np.linspace(0.02, job.training.memory, cells.stop - cells.start)
    node.add_host("disk_read", 40, until, 2e9)
    job.train(until, node.seconds)
    truth = Truth()
    truth.accept("collective_wait", 0, until + 60, severity=1)
    return node, truth


@kind("healthy", "compilation in the middle: CPU busy, GPUs at rest for 1 to 10 min", hours=HOURS)
def compiles(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw)
    now = 40.0
    while now < node.seconds:
        train, pause = draw.between(900, 3600), draw.between(60, 600)
        job.train(now, now + train)
        now += train
        job.rest(now, now + pause, cpu=draw.between(4, 14))
        node.pressure["cpu"][node.slow_span(now, now + pause)] = 0.2
        for kernel in np.arange(now, now + pause, 17):
            node.paint(job.gpus, kernel, kernel + 1, busy=0.2, sm=0.05)
        now += pause
    return node, Truth()


@kind("healthy", "input pauses: GPUs at 0 % for 1 to 60 s while the loader reads", hours=HOURS)
def input_pauses(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw, "vision")
    now = 40.0
    while now < node.seconds:
        train, pause = draw.between(200, 1500), draw.between(1, 60)
        job.train(now, now + train)
        now += train
        job.rest(now, now + pause, cpu=6.0)
        node.add_host("disk_read", now, now + pause, 1.5e9)
        now += pause
    return node, Truth()


@kind("healthy", "the end of an epoch: a minute of nothing but the CPU", hours=HOURS)
def epochs(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw, "vision")
    now, epoch, pause = 40.0, draw.between(300, 1800), draw.between(10, 100)
    while now < node.seconds:
        job.train(now, now + epoch)
        now += epoch
        job.rest(now, now + pause, cpu=2.5)
        now += pause
    return node, Truth()


@kind("healthy", "a gap in telemetry of 1 to 20 min while work goes on", hours=HOURS)
def telemetry_gap(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw)
    job.train(40, node.seconds)
    at = 600.0
    while at < node.seconds - 1500:
        length = draw.between(60, 1200)
        node.gaps.append((at, at + length))
        at += length + draw.between(900, 2400)
    return node, Truth()


@kind("healthy", "the agent restarts in the middle of work, twice", hours=HOURS)
def agent_restart(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw)
    now, every = 40.0, draw.between(500, 1500)
    while now < node.seconds:
        job.train(now, now + every)
        job.save(now + every, 15.0)
        now += every + 15.0
    node.restarts = sorted(float(int(x)) for x in draw.rng.uniform(600, node.seconds - 600, 2))
    return node, Truth()


@kind("healthy", "the agent starts while rank 0 saves and the others wait", hours=1.0)
def restart_in_save(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw)
    job.train(40, 1500)
    job.save(1500, 120.0, rate=1e9)
    job.train(1620, node.seconds)
    node.restarts = [1530.0]
    return node, Truth()


@kind("healthy", "SIGSTOP: the scheduler suspends the job for minutes", hours=HOURS)
def suspended(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw)
    pause = draw.between(120, 1500)
    at = draw.between(900, 4000)
    job.train(40, at)
    job.rest(at, at + pause, cpu=0.0)
    node.process_state[:, node.slow_span(at, at + pause)] = "T"
    job.train(at + pause, node.seconds)
    truth = Truth()
    truth.accept("no_progress", at, at + pause + 60, severity=2)  # it makes none, and says why
    return node, truth


@kind("healthy", "a preempted job goes, another comes", hours=HOURS)
def preempted(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw)
    at = draw.between(1200, 5000)
    job.train(40, at)
    node.paint(job.gpus, at, node.seconds)
    node.end_processes(job.gpus, at)
    other = Job(node, job.gpus, draw_training(draw.rng, "fsdp"), start_s=at + 60)
    other.load(at + 60, at + 120)
    other.wait(at + 120, at + 180)
    other.train(at + 180, node.seconds)
    truth = Truth()
    truth.accept("collective_wait", at, at + 300, severity=1)
    return node, truth


@kind("healthy", "a save that takes four times as long as the others, and is written all the time", hours=HOURS)
def slow_save(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw)
    now, every, length = 40.0, draw.between(500, 1500), draw.between(15, 40)
    count = 0
    while now < node.seconds:
        job.train(now, now + every)
        now += every
        took = length * (4.0 if count % 4 == 3 else 1.0)
        job.save(now, took, rate=6e8)
        now += took
        count += 1
    truth = Truth()
    truth.accept("collective_wait", severity=2)
    truth.accept("missed_checkpoint", severity=2)  # much longer than usual is what it is
    return node, truth


@kind("healthy", "async checkpoints: a burst from the device, then a slow write", hours=HOURS)
def async_saves(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw, "fsdp")
    job.train(40, node.seconds)
    every = draw.between(600, 1800)
    for at in np.arange(300, node.seconds - 200, every):
        node.activity["pcie_tx"][:, node.span(at, at + 6)] += 1e10
        node.add_host(draw.pick("disk_written", "network_transmit"), at + 4, at + 130, 4e8)
    return node, Truth()


@kind("healthy", "cache warms up: memory grows for half an hour, then stays", hours=HOURS)
def memory_warms_up(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    for gpu in range(node.gpus):
        job = Job(node, (gpu,))
        job.serve(0, node.seconds, 0.5)
        t = np.arange(node.seconds)
        top, tau = draw.rng.uniform(0.5, 0.9), draw.between(300, 800)
        node.activity["memory"][gpu] = top * (1 - 0.7 * np.exp(-t / tau))
    return node, Truth()


@kind("healthy", "memory in stairs: the allocator takes blocks, rarely and ever more rarely", hours=HOURS)
def memory_stairs(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    for gpu in range(node.gpus):
        job = Job(node, (gpu,))
        job.serve(0, node.seconds, 0.4)
        level, at = 0.3, 300.0
        memory = np.full(node.seconds, level)
        step = draw.between(60, 200)
        while at < node.seconds and level < 0.8:
            level += draw.rng.uniform(0.01, 0.05)
            memory[int(at) :] = level
            step *= 1.7
            at += step
        node.activity["memory"][gpu] = memory
    return node, Truth()


@kind("healthy", "memory goes up and down with the length of sequences", hours=HOURS)
def memory_breathes(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw, "small")
    job.train(40, node.seconds)
    t = np.arange(node.seconds)
    wave = 0.5 + 0.15 * np.sin(2 * np.pi * t / draw.between(600, 2400)) + draw.rng.normal(0, 0.01, node.seconds)
    node.activity["memory"][:] = np.clip(wave, 0.1, 0.95)
    return node, Truth()


@kind("healthy", "hot and fine: long full load, 80 °C, no thermal event", hours=HOURS)
def hot(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw, "ddp")
    job.train(40, node.seconds)
    node.temperature_offset += draw.rng.uniform(6, 12)
    node.reasons["sw_power_cap"][:] = 1.0
    return node, Truth()


@kind("healthy", "thermal events for some seconds, rarely", hours=HOURS)
def thermal_blips(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw, "ddp")
    job.train(40, node.seconds)
    for gpu in range(node.gpus):
        tick = int(draw.rng.integers(20, 400))
        while tick < node.slow:
            # Two seconds, and no two within the minute that SIGNALS.md 6d looks at.
            node.reasons["sw_thermal"][gpu, tick] = 0.4
            tick += 40 + int(draw.rng.exponential(600))
    return node, Truth()


@kind("healthy", "idle links: narrower and slower PCIe while nothing runs, a port that was never cabled", hours=HOURS)
def links_asleep(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node(ports=8)
    job = Job(node, (0, 1), draw_training(draw.rng, "ddp"))
    job.load(0, 40)
    job.train(40, node.seconds)
    node.pcie_generation[2:] = 1
    node.pcie_generation[2:, -1] = 5
    node.port_down[-1] = True
    return node, Truth()


@kind("healthy", "pages get dirty and are written back by a copy while GPUs serve", hours=HOURS)
def big_copy(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    Job(node, tuple(range(node.gpus))).serve(0, node.seconds, 0.4)
    for at in np.arange(600, node.seconds - 600, 2000):
        length = draw.between(60, 500)
        node.add_host("disk_written", at, at + length, 8e8)
        ticks = node.slow_span(at, at + length)
        node.dirty[ticks] += 6e9
        node.writeback[ticks] += 5e8
        node.blocked[ticks] = draw.rng.integers(1, 4)
        node.pressure["io"][ticks] = 0.3
    return node, Truth()


@kind("healthy", "a longer context from half-way on: steps take longer, memory grows at once", hours=HOURS)
def longer_context(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw, "fsdp")
    half = node.seconds // 2
    job.train(40, half)
    job.save(half, 20.0)
    truth = Truth()
    # The work itself has changed: a word about slower steps is right as a warning and no page.
    job.training = replace(job.training, step_s=job.training.step_s * 1.6)
    job.train(half + 20, node.seconds)
    node.activity["memory"][:, half:] = np.minimum(job.training.memory * 1.15, 0.97)
    truth.accept("fail_slow", half, 1e9, severity=2)
    return node, truth


@kind("healthy", "steps of varying length: sequences of all lengths, spread 20 to 40 %", hours=HOURS)
def uneven_steps(draw: Draw) -> tuple[Node, Truth]:
    node, job = _start(draw, "small")
    job.training = replace(job.training, spread=draw.rng.uniform(0.2, 0.4))
    slowly = np.exp(np.cumsum(draw.rng.normal(0, 0.004, node.seconds)))
    job.train(40, node.seconds, pace=np.clip(slowly / np.median(slowly), 0.93, 1.07)[: node.seconds - 40])
    return node, Truth()
