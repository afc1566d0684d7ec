"""Collectives that hang: the variants of SIGNALS.md 3.1, on work of many kinds.

Delays: critical within 45 s where the host's I/O is seen; else a warning (collective_wait) after 60 s and critical past
10 minutes or twice the longest wait that ended by itself (DESIGN.md, budgets).
"""

from __future__ import annotations

from tests.detector_bench.cases import Draw, Truth, kind
from tests.detector_bench.node import Filesystem, Node
from tests.detector_bench.work import STYLES, Job, draw_training

BLIND_S = 600.0
#: Other words for a wait, right beside the main one.
ALSO = ("collective_wait", "no_progress", "straggler", "low_utilization", "fail_slow")


def expect_stall(draw: Draw, truth: Truth, start_s: float, end_s: float, *, longest_wait_s: float = 0.0,
                 gpus: tuple[int, ...] | None = None, hidden: bool = False) -> None:  # fmt: skip
    """Say when the stall must be found, by what the profile sees."""
    seen = draw.profile.host and not hidden
    slack = 3 * draw.profile.interval_s
    if seen:
        truth.expect("stalled_collective", start_s, end_s, 120.0 + slack, severity=3, gpus=gpus, also=ALSO,
                     tag="host I/O seen")  # fmt: skip
        return
    critical_s = max(BLIND_S, 2 * longest_wait_s) + 60.0 + slack
    truth.expect("collective_wait", start_s, end_s, 100.0 + slack, severity=2, gpus=gpus, also=ALSO)
    if end_s - start_s > critical_s:
        truth.expect("stalled_collective", start_s, end_s, critical_s, severity=3, gpus=gpus, also=ALSO,
                     tag="host I/O not seen")  # fmt: skip


def _run(draw: Draw, style: str, *, board: str | None = None, ports: int | None = None) -> tuple[Node, Job, float]:
    """Return a node that has trained for a while with some saves, and when that ends."""
    node = draw.node(board=board, ports=ports)
    job = Job(node, tuple(range(node.gpus)), draw_training(draw.rng, style, multi_node=node.ports > 0))
    job.load(0, 40)
    at = draw.rng.uniform(0.3, 0.5) * node.seconds
    job.train(40, at)
    return node, job, float(int(at))


def _stall(draw: Draw, style: str, **how) -> tuple[Node, Truth]:
    board, ports = how.pop("board", None), how.pop("ports", None)
    node, job, at = _run(draw, style, board=board, ports=ports)
    length = draw.rng.uniform(700, 0.45 * node.seconds)
    job.wait(at, at + length, **how)
    if draw.rng.random() < 0.5:
        job.train(at + length, node.seconds)
    else:
        # The watchdog ends it, and it starts again.
        node.paint(job.gpus, at + length, node.seconds)
        node.end_processes(job.gpus, at + length)
    truth = Truth()
    expect_stall(draw, truth, at, at + length)
    return node, truth


_STALL = {"hours": 0.8, "boards": ("H100", "H100", "A100", "H200", "V100", "H100 PCIe")}


@kind("stall", "all ranks wait at 100 %", **_STALL)
def stall_all_wait(draw: Draw) -> tuple[Node, Truth]:
    return _stall(draw, draw.pick(*STYLES))


@kind("stall", "one rank never comes and reads 0 %", **_STALL)
def stall_missing_rank(draw: Draw) -> tuple[Node, Truth]:
    rank = int(draw.rng.integers(4))
    return _stall(draw, draw.pick(*STYLES), missing=(rank,), missing_cpu=draw.pick(0.0, 1.0))


@kind("stall", "waiting kernels hold hardly any multiprocessor", **_STALL)
def stall_no_sm(draw: Draw) -> tuple[Node, Truth]:
    return _stall(draw, "fsdp", sm=0.0)


@kind("stall", "a small model, whose work draws little more than waiting does", **_STALL)
def stall_small_model(draw: Draw) -> tuple[Node, Truth]:
    return _stall(draw, "small")


@kind("stall", "several nodes: InfiniBand falls silent", **(_STALL | {"boards": ("H100", "H200", "A100")}))
def stall_multi_node(draw: Draw) -> tuple[Node, Truth]:
    return _stall(draw, draw.pick("fsdp", "ddp", "experts"), ports=8)


@kind("stall", "one GPU a node of a job over many nodes: InfiniBand or the signature alone tells",
      **(_STALL | {"gpus": (1,), "boards": ("H100", "A100")}))  # fmt: skip
def stall_one_gpu(draw: Draw) -> tuple[Node, Truth]:
    return _stall(draw, "ddp", ports=1)


@kind("stall", "boards whose waiting power is high: T4 and L4", **(_STALL | {"boards": ("T4", "L4"), "gpus": (4, 8)}))
def stall_small_board(draw: Draw) -> tuple[Node, Truth]:
    return _stall(draw, draw.pick("ddp", "vision"))


@kind("stall", "during long accumulation, steps of 4 to 12 s", **_STALL)
def stall_accumulation(draw: Draw) -> tuple[Node, Truth]:
    return _stall(draw, "accumulation")


@kind("stall", "half the node hangs, another job works on", **(_STALL | {"gpus": (8,)}))
def stall_beside_work(draw: Draw) -> tuple[Node, Truth]:
    node = draw.node()
    half = node.gpus // 2
    job = Job(node, tuple(range(half)), draw_training(draw.rng, "ddp"))
    other = Job(node, tuple(range(half, node.gpus)), draw_training(draw.rng, "fsdp"))
    job.load(0, 40)
    other.load(0, 55)
    at = int(0.4 * node.seconds)
    job.train(40, at)
    other.train(55, node.seconds)
    length = draw.rng.uniform(700, 1100)
    job.wait(at, at + length)
    job.train(at + length, node.seconds)
    truth = Truth()
    expect_stall(draw, truth, at, at + length, gpus=job.gpus)
    return node, truth


@kind("stall", "right after a save: the host was active, then is quiet", **_STALL)
def stall_after_save(draw: Draw) -> tuple[Node, Truth]:
    node, job, at = _run(draw, draw.pick(*STYLES))
    truth = Truth()
    took = draw.between(10, 40)
    # Two saves that end well come before.
    now, every = 40.0, (at - 3 * took) / 3
    for _ in range(2):
        job.train(now, now + every)
        now += every
        job.save(now, took)
        now += took
    job.train(now, at)
    job.save(at, took)
    length = draw.rng.uniform(900, 0.4 * node.seconds)
    job.wait(at + took, at + took + length)
    job.train(at + took + length, node.seconds)
    expect_stall(draw, truth, at + took, at + took + length, longest_wait_s=2 * took)
    truth.accept("collective_wait", 40, at + took, severity=1)
    return node, truth


@kind("stall", "after a gap in telemetry of a minute or two", **_STALL)
def stall_after_gap(draw: Draw) -> tuple[Node, Truth]:
    node, truth = _stall(draw, draw.pick(*STYLES))
    at = truth.expected[0].start_s
    node.gaps.append((at - draw.between(200, 400), at - 60.0))
    return node, truth


@kind("stall", "a file system is mounted whose bytes cannot be seen", **_STALL)
def stall_beside_unseen(draw: Draw) -> tuple[Node, Truth]:
    node, job, at = _run(draw, "ddp")
    node.filesystem = Filesystem("/scratch", "virtiofs", readable=False)
    length = draw.rng.uniform(750, 0.45 * node.seconds)
    job.wait(at, at + length)
    job.train(at + length, node.seconds)
    truth = Truth()
    expect_stall(draw, truth, at, at + length, hidden=True)
    return node, truth


@kind("fault", "all ranks read 0 %, processes live, nothing moves", hours=1.0, profiles=("full", "no_profiling",
      "no_nvlink", "no_infiniband", "slow_polling", "unprivileged"))  # fmt: skip
def hang_at_rest(draw: Draw) -> tuple[Node, Truth]:
    node, job, at = _run(draw, draw.pick(*STYLES))
    length = draw.rng.uniform(700, 0.45 * node.seconds)
    job.rest(at, at + length, cpu=0.01)
    job.train(at + length, node.seconds)
    truth = Truth()
    truth.expect("no_progress", at, at + length, 420.0, also=ALSO)
    return node, truth


@kind("fault", "a single GPU's training hangs at 0 %", hours=1.0, gpus=(1,), profiles=("full", "no_profiling",
      "slow_polling", "unprivileged"))  # fmt: skip
def hang_of_one(draw: Draw) -> tuple[Node, Truth]:
    node, job, at = _run(draw, draw.pick("ddp", "vision", "small"))
    length = draw.rng.uniform(800, 0.45 * node.seconds)
    job.rest(at, at + length, cpu=0.01)
    job.train(at + length, node.seconds)
    truth = Truth()
    # Alone, only steps that are seen tell training from requests that ceased, where no label does.
    telling = draw.profile.interval_s == 1 and node.board_name != "V100"
    if telling or job.training.step_s > 3.0 * draw.profile.interval_s:
        truth.expect("no_progress", at, at + length, 420.0, also=ALSO)
    else:
        truth.accept("no_progress", at, at + length, severity=2)
    return node, truth
