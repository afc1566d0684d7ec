"""Jobs on a drawn node: training of several kinds, its pauses, serving, and what else healthy GPUs do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.detector_bench.node import GB, Node, between


@dataclass(frozen=True)
class Training:
    """How one job trains; shares are of a step."""

    step_s: float
    communication: float
    gap: float
    sm: float
    tensor: float
    dram: float
    nvlink: float  # bytes a second, mean
    infiniband: float
    memory: float
    spread: float = 0.015
    read: float = 2e7
    read_from: str = "disk_read"
    cpu: float = 1.0


#: Kinds of training with the ranges of SIGNALS.md 2.1 and 2.4.
STYLES = ("ddp", "fsdp", "tensor_pipeline", "experts", "vision", "small", "accumulation")


def draw_training(rng: np.random.Generator, style: str, *, multi_node: bool = False) -> Training:
    """Draw one job of `style`."""
    step = between(rng, 0.2, 3.0)
    base = Training(
        step_s=step,
        communication=rng.uniform(0.05, 0.2),
        gap=rng.uniform(0.0, 0.06),
        sm=rng.uniform(0.6, 0.9),
        tensor=rng.uniform(0.19, 0.6),
        dram=rng.uniform(0.3, 0.5),
        nvlink=between(rng, 1.5, 40) * GB,
        infiniband=between(rng, 1, 16) * GB if multi_node else 0.0,
        memory=rng.uniform(0.4, 0.93),
        spread=rng.uniform(0.008, 0.03),
        read=between(rng, 1e6, 2e8),
        read_from=str(rng.choice(["disk_read", "filesystem_read", "network_receive"])),
        cpu=rng.uniform(1.0, 3.0),
    )
    if style == "fsdp":
        return replace(base, nvlink=between(rng, 20, 120) * GB, sm=rng.uniform(0.4, 0.85), gap=rng.uniform(0, 0.03))
    if style == "tensor_pipeline":
        return replace(
            base, nvlink=between(rng, 30, 66) * GB, sm=rng.uniform(0.42, 0.58), tensor=rng.uniform(0.1, 0.25)
        )
    if style == "experts":
        return replace(base, nvlink=between(rng, 25, 40) * GB, sm=rng.uniform(0.45, 0.6), spread=0.05)
    if style == "vision":
        return replace(base, nvlink=between(rng, 0.1, 8) * GB, gap=rng.uniform(0.02, 0.12), read=between(rng, 1e8, 2e9))
    if style == "small":
        return replace(
            base, sm=rng.uniform(0.15, 0.4), tensor=rng.uniform(0.02, 0.15), dram=rng.uniform(0.08, 0.3),
            gap=rng.uniform(0.05, 0.25), step_s=between(rng, 0.1, 0.6), memory=rng.uniform(0.05, 0.3),
        )  # fmt: skip
    if style == "accumulation":
        return replace(base, step_s=between(rng, 4, 12), communication=rng.uniform(0.03, 0.08), nvlink=1.5 * GB)
    return base


def _share(phase: np.ndarray, low: float | np.ndarray, high: float | np.ndarray) -> np.ndarray:
    """Return for each cell which share of it lies between `low` and `high` of a step."""

    def integral(p: np.ndarray) -> np.ndarray:
        whole = np.floor(p)
        return whole * (high - low) + np.clip(p - whole - low, 0.0, high - low)

    width = np.maximum(np.diff(phase), 1e-9)
    return (integral(phase[1:]) - integral(phase[:-1])) / width


class Job:
    """A job on some GPUs of a node: paints what they do, in step."""

    def __init__(
        self,
        node: Node,
        gpus: tuple[int, ...],
        training: Training | None = None,
        *,
        key: str | None = None,
        start_s: float = 0.0,
        declared_s: float | None = None,
    ) -> None:
        self.node, self.gpus = node, gpus
        self.rng = node.rng
        self.training = training or draw_training(self.rng, "ddp")
        self.key = key or f"slurm/{int(self.rng.integers(1000, 99999))}"
        node.start_processes(gpus, start_s, self.key, declared_s)
        self.skew = self.rng.normal(1.0, 0.01, len(gpus))

    def train(
        self,
        start_s: float,
        end_s: float,
        *,
        pace: np.ndarray | float = 1.0,
        slow: dict[int, float] | None = None,
        gap: float | None = None,
        stretch: str = "communication",
    ) -> None:
        """Train from `start_s` to `end_s`.

        `pace` is the step time against the usual one, the lost time being `stretch` (`communication` or `compute`);
        `slow` makes the compute of single GPUs that much longer, and the others wait for it in the collective.
        """
        node, spec = self.node, self.training
        cells = node.span(start_s, end_s)
        count = cells.stop - cells.start
        if count <= 0:
            return
        gap = spec.gap if gap is None else gap
        worst = max((slow or {}).values(), default=1.0)
        compute = 1.0 - spec.communication - gap
        longer = 1.0 + compute * (worst - 1.0)
        rate = 1.0 / (spec.step_s * longer * np.broadcast_to(np.asarray(pace, dtype=float), (count,)))
        fine = np.repeat(rate, 10) * 0.1
        fine += self.rng.normal(0, spec.spread * np.sqrt(0.1 / spec.step_s), fine.size) * 0.5
        phase = np.concatenate(([self.rng.random()], np.maximum(fine, 1e-6))).cumsum()
        lost = 1.0 - 1.0 / np.broadcast_to(np.asarray(pace, dtype=float), (count,))
        whole = 1.0 / (longer * np.broadcast_to(np.asarray(pace, dtype=float), (count,)))  # pace of steps
        for rank, gpu in enumerate(self.gpus):
            own = compute * (slow or {}).get(gpu, 1.0) / longer
            own_gap = gap / longer
            if stretch == "communication":
                own_cells = own * (1 - lost)
                gap_cells = own_gap * (1 - lost)
            else:
                own_cells, gap_cells = own + 0 * lost, own_gap + 0 * lost
            fine_own = np.repeat(own_cells, 10)
            working = _share(phase, 0.0, fine_own)
            pausing = _share(phase, 1.0 - np.repeat(gap_cells, 10), 1.0)
            self._set(gpu, cells, working.reshape(-1, 10).mean(1), pausing.reshape(-1, 10).mean(1), rank, whole)
            usual = working.reshape(-1, 10).mean(1, keepdims=True)
            node.shape[gpu, cells.start * 10 : cells.stop * 10] = (
                (0.1 + working.reshape(-1, 10)) / (0.1 + usual)
            ).reshape(-1)
        rough = np.exp(self.rng.normal(0, 0.1, count)) * whole
        node.host["infiniband_transmit"][cells] += spec.infiniband * rough
        node.host["infiniband_receive"][cells] += spec.infiniband * rough
        if spec.read_from == "filesystem_read" and node.filesystem is None:
            node.host["disk_read"][cells] += spec.read * np.exp(self.rng.normal(0, 0.5, count)) * whole
        else:
            node.host[spec.read_from][cells] += spec.read * np.exp(self.rng.normal(0, 0.5, count)) * whole
        ticks = node.slow_span(start_s, end_s)
        node.cpu[list(self.gpus), ticks] = spec.cpu * self.rng.normal(1, 0.05, (len(self.gpus), 1))
        node.process_read[list(self.gpus), ticks] = spec.read / len(self.gpus)

    def _set(
        self, gpu: int, cells: slice, working: np.ndarray, pausing: np.ndarray, rank: int, pace: np.ndarray
    ) -> None:
        node, spec = self.node, self.training
        act = node.activity
        waiting = np.clip(1.0 - working - pausing, 0.0, 1.0)
        usual = 1.0 - spec.communication - spec.gap
        noise = self.rng.normal(1.0, 0.02, working.size) * self.skew[rank]
        level = working / usual * noise
        act["busy"][gpu, cells] = np.clip(1.0 - pausing, 0, 1)
        act["spin"][gpu, cells] = waiting
        act["waiting_sm"][gpu, cells] = 0.12 * waiting
        act["sm"][gpu, cells] = np.clip(spec.sm * level, 0, 0.97)
        # Its work in a step is that of the others, however long it takes for it: what counts work shows the pace.
        work = working / max(float(working.mean()), 1e-6) * pace * noise
        act["tensor"][gpu, cells] = np.clip(spec.tensor * work, 0, 0.9)
        act["dram"][gpu, cells] = np.clip(spec.dram * work, 0, 0.9)
        for way in ("nvlink_tx", "nvlink_rx"):
            # Every rank moves the same in a step, however long it computes.
            moved = spec.nvlink * pace * self.rng.normal(1.0, 0.02, pace.size) if len(self.gpus) > 1 else 0.0
            act[way][gpu, cells] = moved * (self.node.board.nvlink_bytes_per_second > 0)
        moved = self.rng.lognormal(np.log(5e7), 0.3, working.size) * pace
        act["pcie_rx"][gpu, cells] = moved
        act["pcie_tx"][gpu, cells] = 0.4 * moved
        act["memory"][gpu, cells] = spec.memory

    def load(self, start_s: float, end_s: float, source: str = "disk_read") -> None:
        """Load the model: memory grows, data comes in."""
        node = self.node
        cells = node.span(start_s, end_s)
        grown = np.linspace(0.01, self.training.memory, max(cells.stop - cells.start, 1))
        node.paint(self.gpus, start_s, end_s, busy=0.12, sm=0.02, dram=0.03, pcie_rx=2e9, pcie_tx=1e6)
        node.activity["memory"][list(self.gpus), cells] = grown[: cells.stop - cells.start]
        node.add_host(source, start_s, end_s, between(self.rng, 5e8, 5e9))
        node.cpu[list(self.gpus), node.slow_span(start_s, end_s)] = 1.5

    def wait(
        self,
        start_s: float,
        end_s: float,
        *,
        missing: tuple[int, ...] = (),
        sm: float | None = None,
        missing_cpu: float = 0.0,
        cpu: float = 1.0,
    ) -> None:
        """Wait in a collective: the signature of SIGNALS.md 3.1; `missing` are ranks that never came, at rest."""
        node = self.node
        there = tuple(gpu for gpu in self.gpus if gpu not in missing)
        held = float(self.rng.choice([0.0076, 0.061, 0.121, 0.1818])) if sm is None else sm
        node.paint(there, start_s, end_s, busy=1.0, spin=1.0, waiting_sm=held, dram=5e-4, pcie_rx=6e5, pcie_tx=4e5)
        if missing:
            node.paint(missing, start_s, end_s, pcie_rx=2e5, pcie_tx=1e5)
        ticks = node.slow_span(start_s, end_s)
        node.cpu[list(there), ticks] = cpu
        node.cpu[list(missing), ticks] = missing_cpu
        node.process_read[list(self.gpus), ticks] = 0.0
        node.process_written[list(self.gpus), ticks] = 0.0

    def rest(self, start_s: float, end_s: float, *, cpu: float = 0.02, gpus: tuple[int, ...] | None = None) -> None:
        """Hold the GPUs and do nothing with them."""
        who = self.gpus if gpus is None else gpus
        self.node.paint(who, start_s, end_s, pcie_rx=1e5, pcie_tx=1e5)
        self.node.cpu[list(who), self.node.slow_span(start_s, end_s)] = cpu
        self.node.process_read[list(who), self.node.slow_span(start_s, end_s)] = 0.0

    def save(
        self, start_s: float, seconds: float, *, to: str = "disk_written", style: str = "rank0", rate: float = 8e8
    ) -> None:
        """Save a checkpoint: rank 0 writes and the others wait, all write, or training goes on (`async`).

        `to` is a channel of the host, or `hidden` where no byte is counted.
        """
        node, end_s = self.node, start_s + seconds
        writers = self.gpus[:1] if style == "rank0" else self.gpus
        if style == "rank0":
            self.wait(start_s, end_s, missing=self.gpus[:1], missing_cpu=1.0)
            busy = self.rng.uniform(0.03, 0.06)  # measured: rank 0 reads 3 to 6 % while it saves
            node.activity["busy"][self.gpus[0], node.span(start_s, end_s)] = busy
        elif style == "all":
            node.paint(self.gpus, start_s, end_s, busy=0.04, dram=0.01, pcie_rx=1e5, pcie_tx=1e6)
        first = node.span(start_s, start_s + min(seconds, 6.0))
        node.activity["pcie_tx"][list(writers), first] += rate / len(writers) * (1.0 if style == "rank0" else 1.5)
        ticks = node.slow_span(start_s, end_s)
        node.cpu[list(writers), ticks] = 1.2
        node.process_written[list(writers), ticks] = rate / len(writers)
        if to == "hidden":
            return
        if to == "disk_written":
            # Pages get dirty first; the device follows some seconds later.
            node.dirty[ticks] += np.minimum(rate * 5.0 * np.arange(1, ticks.stop - ticks.start + 1), 4e9)
            lag = min(seconds * 0.3, float(self.rng.uniform(0, 4)))
            node.add_host(to, start_s + lag, end_s + lag, rate)
        else:
            node.add_host(to, start_s + float(self.rng.uniform(0, 1.5)), end_s, rate)
            if to == "filesystem_written":
                node.add_host("network_transmit", start_s, end_s, rate * 1.03)

    def serve(self, start_s: float, end_s: float, load: np.ndarray | float, *, memory: float = 0.9) -> None:
        """Serve requests: mostly decoding, at the load of each second (0 to 1)."""
        node = self.node
        cells = node.span(start_s, end_s)
        count = cells.stop - cells.start
        level = np.broadcast_to(np.asarray(load, dtype=float), (count,))
        for gpu in self.gpus:
            burst = np.clip(level * self.rng.lognormal(0, 0.25, count), 0, 1)
            burst = np.where(self.rng.random(count) < 1 - np.exp(-8 * level), burst, 0.0)
            act = node.activity
            act["busy"][gpu, cells] = np.clip(1.4 * burst, 0, 1)
            act["sm"][gpu, cells] = 0.4 * burst
            act["tensor"][gpu, cells] = 0.1 * burst
            act["dram"][gpu, cells] = 0.6 * burst
            act["spin"][gpu, cells] = 0.0
            act["pcie_rx"][gpu, cells] = 2e8 * burst
            act["pcie_tx"][gpu, cells] = 5e7 * burst
            act["memory"][gpu, cells] = memory
            if len(self.gpus) > 1:
                act["nvlink_tx"][gpu, cells] = act["nvlink_rx"][gpu, cells] = 2e10 * burst
        node.cpu[list(self.gpus), node.slow_span(start_s, end_s)] = 1.0
        node.add_host("network_transmit", start_s, end_s, 2e6)
