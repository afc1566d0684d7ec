"""The families of the simulator that trains the model, as healthy work with every channel."""

from __future__ import annotations

import numpy as np

from classifier.simulator import BOARDS, Scenario, available_kinds, simulate_arrays
from classifier.simulator.families import FAMILIES
from tests.detector_bench.cases import Draw, Truth, kind
from tests.detector_bench.node import SLOW_S, Node

#: Families that hold a fault, or a node of several jobs of which one hangs.
_FAULTS = ("stalled_all_reduce", "starved_training", "mixed_node")
_IDLE = ("spinning_server", "loaded_idle", "notebook", "idle", "llm_serving", "diffusion", "tiny_training", "video")


def _simulate(draw: Draw, family: str) -> tuple[Node, Truth]:
    collective = FAMILIES[family].collective
    boards = [name for name in draw.kind.boards if not (collective and name in ("L4", "L40S"))]
    board = str(draw.rng.choice(boards))
    scenario = Scenario(
        kind=family,
        board=board,
        gpu_count=draw.kind.gpus[0],
        duration_s=float(draw.seconds),
        begin_s=float(draw.rng.choice([0.0, 1800.0])),
        infiniband=board in ("H100", "A100", "H200"),
    )
    run = simulate_arrays(scenario, seed=int(draw.rng.integers(1 << 30)))
    short = next(name for name, one in BOARDS.items() if one is run.gpus[0].board)
    node = Node(
        rng=draw.rng, board_name=short, gpus=len(run.gpus), seconds=draw.seconds, ports=int(scenario.infiniband)
    )
    node.given = ([dict(gpu.channels) for gpu in run.gpus], dict(run.host_channels))
    ticks = np.arange(node.slow) * SLOW_S
    for index, gpu in enumerate(run.gpus):
        events = [(start, tuple(pids)) for start, pids in gpu.readings.processes]
        node.pids[index] = events or [(0.0, ())]
        node.jobs[index] = [(start, "slurm/9" if pids else "", None) for start, pids in events]
        cpu = gpu.channels.get("process_cpu_ratio")
        if cpu is not None:
            node.cpu[index] = np.interp(ticks, cpu.times, cpu.values)
        for way, name in (("rx", "receive"), ("tx", "transmit")):
            moved = gpu.channels.get(f"pcie_{name}_bytes_per_second")
            if moved is not None:
                node.activity[f"pcie_{way}"][index] = np.interp(np.arange(node.seconds), moved.times, moved.values)
    for name in node.host:
        rate = run.host_channels.get(f"{name}_bytes_per_second")
        if rate is not None:
            node.host[name] = np.interp(np.arange(node.seconds), rate.times, rate.values)
    truth = Truth()
    if family in _IDLE:
        truth.accept("low_utilization", severity=2)
    if family == "spinning_server":
        truth.accept("collective_wait", severity=2)
    return node, truth


def _register() -> None:
    for family in available_kinds():
        if family in _FAULTS:
            continue

        def build(draw: Draw, family: str = family) -> tuple[Node, Truth]:
            return _simulate(draw, family)

        build.__name__ = f"sim_{family}"
        kind("healthy", f"the simulator's {family}", hours=1.5, gpus=(max(FAMILIES[family].gpu_counts),))(build)


_register()
