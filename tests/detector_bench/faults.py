"""Faults beside stalls and checkpoints, drawn from SIGNALS.md 2.3, 4, 5.2, 5.3 and 6d."""

from __future__ import annotations

import numpy as np

from tests.detector_bench.cases import Draw, Truth, kind
from tests.detector_bench.node import Filesystem, Node
from tests.detector_bench.work import Job, draw_training

_HEALTH = ("full", "no_profiling", "no_nvlink", "no_infiniband", "slow_polling", "unprivileged")
_WAITS = ("collective_wait", "stalled_collective", "no_progress", "straggler", "fail_slow", "low_utilization")


def _work(draw: Draw, style: str = "fsdp", *, on: bool = True, **node) -> tuple[Node, Job, float]:
    """Return a node at work, and when the fault begins; work goes on from there unless `on` is False."""
    there = draw.node(**node)
    job = Job(there, tuple(range(there.gpus)), draw_training(draw.rng, style, multi_node=there.ports > 0))
    job.load(0, 40)
    at = float(int(draw.rng.uniform(0.45, 0.6) * there.seconds))
    job.train(40, at)
    if on:
        job.train(at, there.seconds)
    return there, job, at


# Lost GPUs


def _lose(draw: Draw, *, xid: int | None, state: str) -> tuple[Node, Truth]:
    node, job, at = _work(draw, on=False)
    gpu = int(draw.rng.integers(node.gpus))
    if xid is not None:
        node.xids.append((at, gpu, xid))
    if state != "ok":
        node.state[gpu] = [(at + draw.rng.uniform(0, 4), state)]
        node.gpu_gaps.append((gpu, at, 1e9))
    others = tuple(one for one in job.gpus if one != gpu)
    if others:
        job.wait(at, node.seconds, missing=(gpu,))
    truth = Truth()
    truth.expect("gpu_lost", at, node.seconds, 40.0, severity=3, gpus=(gpu,), also=_WAITS)
    return node, truth


@kind("fault", "XID 79 and the driver says lost", needs=("health",), profiles=_HEALTH, hours=0.6)
def lost_xid(draw: Draw) -> tuple[Node, Truth]:
    return _lose(draw, xid=79, state="lost")


@kind("fault", "the driver says lost, no XID is seen", needs=("health",), profiles=_HEALTH, hours=0.6)
def lost_state(draw: Draw) -> tuple[Node, Truth]:
    return _lose(draw, xid=None, state="lost")


# Memory errors


def _ecc(draw: Draw) -> tuple[Node, int, float, Truth]:
    node, _, at = _work(draw)
    return node, int(draw.rng.integers(node.gpus)), at, Truth()


@kind("fault", "double-bit errors", needs=("health",), profiles=_HEALTH, hours=0.6)
def ecc_double_bit(draw: Draw) -> tuple[Node, Truth]:
    node, gpu, at, truth = _ecc(draw)
    node.health["ecc_uncorrected_volatile_total"][gpu, int(at) // 5] += draw.rng.integers(1, 4)
    node.xids.append((at, gpu, draw.pick(48, 94)))
    truth.expect("ecc_remap", at, node.seconds, 30.0, severity=2, gpus=(gpu,), also=("gpu_lost",))
    return node, truth


@kind("fault", "a row waits to be remapped", needs=("health",), profiles=_HEALTH, hours=0.6)
def ecc_pending(draw: Draw) -> tuple[Node, Truth]:
    node, gpu, at, truth = _ecc(draw)
    node.remap_pending_s[gpu] = at
    node.health["remapped_rows_uncorrectable_total"][gpu, int(at) // 5] += 1
    truth.expect("ecc_remap", at, node.seconds, 30.0, severity=2, gpus=(gpu,))
    return node, truth


@kind("fault", "no spare row is left", needs=("health",), profiles=_HEALTH, hours=0.6)
def ecc_failed(draw: Draw) -> tuple[Node, Truth]:
    node, gpu, at, truth = _ecc(draw)
    node.remap_failed_s[gpu] = at
    truth.expect("ecc_remap", at, node.seconds, 30.0, severity=3, gpus=(gpu,))
    return node, truth


@kind("fault", "a storm of corrected errors", needs=("health",), profiles=_HEALTH, hours=0.8)
def ecc_storm(draw: Draw) -> tuple[Node, Truth]:
    node, gpu, at, truth = _ecc(draw)
    ticks = node.slow_span(at, node.seconds)
    rate = draw.between(2, 200)  # a second
    node.health["ecc_corrected_volatile_total"][gpu, ticks] += draw.rng.poisson(5 * rate, ticks.stop - ticks.start)
    truth.expect("ecc_remap", at, node.seconds, 300.0, severity=1, gpus=(gpu,))
    return node, truth


# Links


def _link(draw: Draw, name: str, per_minute: float, *, allowed_s: float = 600.0) -> tuple[Node, Truth]:
    node, _, at = _work(draw)
    gpu = int(draw.rng.integers(node.gpus))
    ticks = node.slow_span(at, node.seconds)
    node.health[name][gpu, ticks] += draw.rng.poisson(per_minute / 12, ticks.stop - ticks.start)
    truth = Truth()
    visible = not name.startswith("nvlink") or (draw.profile.nvlink and node.board.nvlink_bytes_per_second > 0)
    if visible:
        truth.expect("link_errors", at, node.seconds, allowed_s, gpus=(gpu,), also=("straggler", "fail_slow"))
    return node, truth


@kind("fault", "NVLink CRC errors, many a minute", needs=("health", "nvlink"), profiles=_HEALTH)
def link_nvlink_crc(draw: Draw) -> tuple[Node, Truth]:
    return _link(draw, "nvlink_crc_errors_total", draw.between(20, 2000))


@kind("fault", "NVLink recoveries", needs=("health", "nvlink"), profiles=_HEALTH)
def link_nvlink_recovery(draw: Draw) -> tuple[Node, Truth]:
    return _link(draw, "nvlink_recovery_errors_total", draw.between(3, 30))


@kind("fault", "PCIe replays, many a minute", needs=("health",), profiles=_HEALTH)
def link_pcie_replays(draw: Draw) -> tuple[Node, Truth]:
    return _link(draw, "pcie_replays_total", draw.between(60, 3000))


@kind("fault", "PCIe runs at fewer lanes under load", needs=("health",), profiles=_HEALTH)
def link_pcie_width(draw: Draw) -> tuple[Node, Truth]:
    node, _, at = _work(draw)
    gpu = int(draw.rng.integers(node.gpus))
    node.pcie_width[gpu, node.slow_span(at, node.seconds)] = draw.pick(1, 4, 8)
    truth = Truth()
    truth.expect("link_errors", at, node.seconds, 600.0, gpus=(gpu,), also=("straggler", "fail_slow"))
    return node, truth


_FABRIC = {"needs": ("infiniband", "host"), "profiles": ("full", "no_profiling", "slow_polling", "unprivileged"),
           "boards": ("H100", "A100", "H200")}  # fmt: skip


@kind("fault", "symbol errors on an InfiniBand port", **_FABRIC)
def link_symbol_errors(draw: Draw) -> tuple[Node, Truth]:
    node, _, at = _work(draw, ports=8)
    port = int(draw.rng.integers(node.ports))
    ticks = node.slow_span(at, node.seconds)
    node.port_events["symbol_error"][port, ticks] += draw.rng.poisson(draw.between(2, 100), ticks.stop - ticks.start)
    truth = Truth()
    truth.expect("link_errors", at, node.seconds, 600.0, also=("straggler", "fail_slow"))
    return node, truth


@kind("fault", "an InfiniBand link goes down, and comes back", **_FABRIC)
def link_flaps(draw: Draw) -> tuple[Node, Truth]:
    node, _, at = _work(draw, ports=8)
    port = int(draw.rng.integers(node.ports))
    tick = int(at) // 5
    node.port_events["link_downed"][port, tick] += 1
    node.port_events["link_error_recovery"][port, tick] += 1
    node.port_down[port, tick : tick + int(draw.rng.integers(1, 12))] = True
    truth = Truth()
    truth.expect("link_errors", at, node.seconds, 120.0, also=("straggler", "fail_slow"))
    return node, truth


# Throttling


def _throttle(draw: Draw, reason: str, share: float, severity: int, allowed_s: float) -> tuple[Node, Truth]:
    node, job, at = _work(draw, on=False)
    gpu = int(draw.rng.integers(node.gpus))
    ticks = node.slow_span(at, node.seconds)
    node.reasons[reason][gpu, ticks] = np.clip(share * draw.rng.lognormal(0, 0.3, ticks.stop - ticks.start), 0, 1)
    clock = 1.0 - min(0.45, 0.4 * share)
    node.clock[gpu, node.span(at, node.seconds)] = clock
    node.temperature_offset[gpu, ticks] += 18 if "thermal" in reason else 0
    _slow_down(draw, node, job, gpu, at, 1.0 / clock)
    truth = Truth()
    truth.expect(
        "throttled", at, node.seconds, allowed_s, severity=severity, gpus=(gpu,), also=("straggler", "fail_slow")
    )
    return node, truth


def _slow_down(draw: Draw, node: Node, job: Job, gpu: int, at: float, factor: float) -> None:
    """Make one GPU slow from `at` on: the others wait for it in every step."""
    job.train(at, node.seconds, slow={gpu: factor} if len(job.gpus) > 1 else None,
              pace=factor if len(job.gpus) == 1 else 1.0)  # fmt: skip


@kind("fault", "software thermal slow-down", needs=("health",), profiles=_HEALTH)
def throttle_sw_thermal(draw: Draw) -> tuple[Node, Truth]:
    return _throttle(draw, "sw_thermal", draw.between(0.12, 0.9), 2, 200.0)


@kind("fault", "hardware thermal slow-down", needs=("health",), profiles=_HEALTH)
def throttle_hw_thermal(draw: Draw) -> tuple[Node, Truth]:
    return _throttle(draw, "hw_thermal", draw.between(0.12, 0.9), 2, 200.0)


@kind("fault", "power brake by the board or the chassis", needs=("health",), profiles=_HEALTH)
def throttle_power_brake(draw: Draw) -> tuple[Node, Truth]:
    return _throttle(draw, "hw_power_brake", draw.between(0.03, 0.9), 3, 200.0)


# Slow GPUs and slow jobs

_PEERS = {"gpus": (8, 4), "profiles": (*_HEALTH, "nvidia_smi")}


@kind("fault", "one GPU's clock is lower than its peers' at equal load", **_PEERS)
def straggler_clock(draw: Draw) -> tuple[Node, Truth]:
    node, job, at = _work(draw, on=False)
    gpu = int(draw.rng.integers(node.gpus))
    clock = draw.rng.uniform(0.55, 0.88)
    node.clock[gpu, node.span(at, node.seconds)] = clock
    _slow_down(draw, node, job, gpu, at, 1 / clock)
    truth = Truth()
    truth.expect("straggler", at, node.seconds, 400.0, gpus=(gpu,), also=("fail_slow", "throttled"))
    truth.accept("fail_slow", at, 1e9, severity=2)
    return node, truth


@kind("fault", "one GPU is slow at full clock: it works while its peers spin", gpus=(8, 4),
      profiles=("full", "no_nvlink", "no_infiniband", "slow_polling", "unprivileged"),
      boards=("H100", "H200"), needs=("profiling",))  # fmt: skip
def straggler_busy(draw: Draw) -> tuple[Node, Truth]:
    node, job, at = _work(draw, draw.pick("ddp", "fsdp"), on=False)
    gpu = int(draw.rng.integers(node.gpus))
    _slow_down(draw, node, job, gpu, at, draw.rng.uniform(1.4, 2.2))
    truth = Truth()
    truth.expect("straggler", at, node.seconds, 400.0, gpus=(gpu,), also=("fail_slow",))
    truth.accept("fail_slow", at, 1e9, severity=2)
    return node, truth


@kind(
    "fault", "steps take longer from one moment on: the network is slow", hours=1.6, profiles=(*_HEALTH, "nvidia_smi")
)
def fail_slow_network(draw: Draw) -> tuple[Node, Truth]:
    return _fail_slow(draw, "communication")


@kind("fault", "steps take longer from one moment on: all ranks compute slower", hours=1.6,
      profiles=(*_HEALTH, "nvidia_smi"))  # fmt: skip
def fail_slow_compute(draw: Draw) -> tuple[Node, Truth]:
    return _fail_slow(draw, "compute")


def _fail_slow(draw: Draw, stretch: str) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)), draw_training(draw.rng, draw.pick("ddp", "fsdp", "accumulation")))
    job.load(0, 40)
    at = float(int(draw.rng.uniform(0.5, 0.6) * node.seconds))
    job.train(40, at)
    factor = draw.rng.uniform(1.25, 2.0)
    job.train(at, node.seconds, pace=factor, stretch=stretch)
    truth = Truth()
    # Steps show where NVLink, fast power or a period above 2.5 s tells them.
    telling = draw.profile.name != "nvidia_smi" and draw.profile.interval_s == 1 and node.board_name != "V100"
    if telling or job.training.step_s > 3.0 * draw.profile.interval_s:
        truth.expect("fail_slow", at, node.seconds, 600.0, also=("straggler",))
    else:
        truth.accept("fail_slow", at)
        truth.accept("straggler", at)
    return node, truth


# Starved, unused, leaking


def _starve(draw: Draw, why: str) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)), draw_training(draw.rng, "vision"))
    job.load(0, 40)
    at = float(int(draw.rng.uniform(0.3, 0.45) * node.seconds))
    job.train(40, at)
    # Between batches nothing runs: 0 and 100 % in turn, for seconds each.
    period, gap = draw.between(2.5, 8), draw.rng.uniform(0.45, 0.75)
    usual = job.training
    job.training = type(usual)(**{**usual.__dict__, "step_s": period, "gap": gap, "communication": 0.04})
    job.train(at, node.seconds, gap=gap)
    ticks = node.slow_span(at, node.seconds)
    if why == "cpu":
        node.pressure["cpu"][ticks] = draw.rng.uniform(0.5, 0.9)
        node.cpu[:, ticks] = 8.0
    else:
        name = "disk_read"
        node.host[name][node.span(at, node.seconds)] = draw.between(1e9, 3e9) * draw.rng.normal(
            1, 0.03, node.seconds - int(at)
        )
        node.pressure["io"][ticks] = draw.rng.uniform(0.45, 0.8)
    truth = Truth()
    truth.expect("input_starved", at, node.seconds, 700.0, also=("fail_slow", "straggler"))
    return node, truth


_HOST_SEEN = ("full", "no_profiling", "no_nvlink", "no_infiniband", "unprivileged")


@kind("fault", "the loader's CPUs are not enough", needs=("host",), profiles=_HOST_SEEN)
def starved_by_cpu(draw: Draw) -> tuple[Node, Truth]:
    return _starve(draw, "cpu")


@kind("fault", "storage is read as fast as it goes, and is not enough", needs=("host",), profiles=_HOST_SEEN)
def starved_by_storage(draw: Draw) -> tuple[Node, Truth]:
    return _starve(draw, "storage")


@kind("fault", "a program holds GPU and memory and does nothing for hours", hours=3.0, gpus=(4, 2, 1))
def held_idle(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)))
    job.load(0, 40)
    job.train(40, 700)
    job.rest(700, node.seconds)
    truth = Truth()
    truth.expect("low_utilization", 700, node.seconds, 2300.0, severity=1, also=("no_progress",))
    return node, truth


@kind("fault", "allocated and empty: a job holds GPUs and starts nothing on them", hours=3.0, gpus=(4, 2),
      profiles=("full", "no_profiling", "unprivileged"), needs=("owners",))  # fmt: skip
def allocated_empty(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    job = Job(node, tuple(range(node.gpus)))
    node.end_processes(job.gpus, 5.0, keeps_job=True)
    truth = Truth()
    truth.expect("low_utilization", 5, node.seconds, 2300.0, severity=1)
    return node, truth


@kind("fault", "a server's memory grows until it will be full", hours=3.0, gpus=(4, 1))
def leak_serving(draw: Draw) -> tuple[Node, Truth]:
    return _leak(draw, serving=True)


@kind("fault", "training leaks memory", hours=3.0, gpus=(4, 1))
def leak_training(draw: Draw) -> tuple[Node, Truth]:
    return _leak(draw, serving=False)


def _leak(draw: Draw, *, serving: bool) -> tuple[Node, Truth]:
    node = draw.node()
    gpus = tuple(range(node.gpus))
    job = Job(node, gpus, draw_training(draw.rng, "small"))
    if serving:
        job.serve(0, node.seconds, 0.4)
    else:
        job.load(0, 30)
        job.train(30, node.seconds)
    t = np.arange(node.seconds) / 3600
    start, per_hour = draw.rng.uniform(0.3, 0.6), draw.rng.uniform(0.04, 0.12)
    for gpu in gpus:
        noise = draw.rng.normal(0, 0.0008, node.seconds)
        node.activity["memory"][gpu] = np.clip(start + per_hour * t + noise, 0, 0.99)
    truth = Truth()
    allowed_s = 5400.0
    # Memory that is full only after twelve hours from when it has to be told is no concern yet.
    if (1 - start) / per_hour - (600 + allowed_s) / 3600 < 12:
        truth.expect("memory_leak", 600, node.seconds, allowed_s, also=("low_utilization",))
    else:
        truth.accept("memory_leak", 600)
        truth.accept("low_utilization", 600)
    return node, truth


# Storage


@kind(
    "fault", "writes hang: dirty pages stay, tasks in D, nothing is written", needs=("pressure",), profiles=_HOST_SEEN
)
def storage_hangs(draw: Draw) -> tuple[Node, Truth]:
    return _storage(draw, timeouts=False)


@kind("fault", "the NFS server does not answer", needs=("pressure",), profiles=_HOST_SEEN)
def storage_nfs(draw: Draw) -> tuple[Node, Truth]:
    return _storage(draw, timeouts=True)


def _storage(draw: Draw, *, timeouts: bool) -> tuple[Node, Truth]:
    node, job, at = _work(draw, on=False)
    if timeouts and node.filesystem is None:
        node.filesystem = Filesystem()
    length = draw.rng.uniform(300, 0.35 * node.seconds)
    job.wait(at, at + length, missing=job.gpus[:1])
    cells, ticks = node.span(at, at + length), node.slow_span(at, at + length)
    for name in ("disk_written", "filesystem_written", "disk_read"):
        node.host[name][cells] = 0.0
    node.dirty[ticks] = draw.between(1e9, 8e9)
    node.writeback[ticks] = draw.between(2e8, 2e9)
    node.blocked[ticks] = draw.rng.integers(4, 40)
    node.pressure["io"][ticks] = draw.rng.uniform(0.6, 1.0)
    node.process_state[0, ticks] = "D"
    if timeouts:
        node.major_timeouts[ticks] = draw.rng.poisson(0.4, ticks.stop - ticks.start)
    job.train(at + length, node.seconds)
    truth = Truth()
    truth.expect("storage_stall", at, at + length, 240.0, also=_WAITS)
    return node, truth


# Labels


@kind(
    "fault", "work that no label fits for longer than a quarter of an hour", hours=1.0, profiles=("full", "no_nvlink")
)
def unlabelled(draw: Draw) -> tuple[Node, Truth]:
    node, _, _ = _work(draw)
    truth = Truth()
    truth.expect("unknown_workload", 0, node.seconds, 1500.0, severity=1)
    return node, truth
