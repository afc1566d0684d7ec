"""The language in which workloads say what hardware does: stages of a job, and signals over time within a stage.

A job is a state machine shared by its GPUs. It is written down as stages (loading, training, saving, stalled, ...)
with one signal per rank; a signal gives the mean of every activity channel over the cells of a time grid, however
short its cycle is, so that a step of 0.1 s is averaged and never aliased by the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: What a GPU does, per cell. `busy` share of time with a kernel resident; `sm` and `spin` the SM activity that works
#: and that only waits in a collective; `tensor`, `dram`, `fp64`, `fp32`, `fp16` pipe activity; `hmma`, `imma`, `dfma`
#: the parts of `tensor` by data type, all of it `hmma` where a workload names none of them; the links in bytes per
#: second. A channel that a workload leaves out is 0, but `fp32`, which is then `Job.singles` of the SM activity.
GPU_ACTIVITY: Final = (
    "busy",
    "sm",
    "spin",
    "tensor",
    "dram",
    "fp64",
    "fp32",
    "fp16",
    "hmma",
    "imma",
    "dfma",
    "nvlink_receive",
    "nvlink_transmit",
    "pcie_receive",
    "pcie_transmit",
)
#: What the processes of one rank do on the host, per cell, in the same signals: cores in use, bytes per second from and
#: to storage of any kind. Where a workload says no `cpu_cores`, its process waits for its GPU on one core (`sensors`).
PROCESS_ACTIVITY: Final = ("cpu_cores", "process_read", "process_written")
#: Traffic of the host. `disk` is local, `filesystem` what no local disk sees: NFS, Lustre, FUSE.
HOST_ACTIVITY: Final = (
    "network_receive",
    "network_transmit",
    "infiniband_receive",
    "infiniband_transmit",
    "disk_read",
    "disk_written",
    "filesystem_read",
    "filesystem_written",
)


class Signal(Protocol):
    """Activity of one rank during a stage."""

    def cells(self, edges: Array) -> Mapping[str, Array | float]:
        """Return the mean of each channel between neighbouring `edges` (seconds of trace time)."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """The same levels throughout; channels left out are zero."""

    levels: Mapping[str, float] = field(default_factory=dict)

    def cells(self, edges: Array) -> Mapping[str, Array | float]:  # noqa: ARG002 - the protocol's signature
        """Return the levels."""
        return self.levels


@dataclass(frozen=True, slots=True)
class Cyclic:
    """A cycle that repeats: `breaks` from 0 to 1 cut it, `levels` hold per channel one level for each piece.

    `starts` are the times at which cycles start (seconds, increasing, one more than there are cycles); before the
    first and after the last the pace of the neighbouring cycle goes on.
    """

    breaks: Array
    levels: Mapping[str, Array]
    starts: Array

    def cells(self, edges: Array) -> Mapping[str, Array | float]:
        """Return exact cell means, from the integral of the cycle."""
        position = self._position(edges)
        whole = np.floor(position)
        part = position - whole
        width = np.diff(position)
        cells: dict[str, Array | float] = {}
        for name, level in self.levels.items():
            integral = np.concatenate(([0.0], np.cumsum(level * np.diff(self.breaks))))
            means = np.diff(whole * integral[-1] + np.interp(part, self.breaks, integral)) / width
            cells[name] = np.maximum(means, 0.0)  # rounding must not turn a counter back
        return cells

    def _position(self, edges: Array) -> Array:
        starts = self.starts
        index = np.clip(np.searchsorted(starts, edges, side="right") - 1, 0, starts.size - 2)
        position: Array = index + (edges - starts[index]) / (starts[index + 1] - starts[index])
        shifted: Array = position - min(0.0, float(np.floor(position[0])))
        return shifted


@dataclass(frozen=True, slots=True)
class Sampled:
    """Ready-made cell means on a regular grid from `start_s` with `step_s`: for load that follows no cycle."""

    start_s: float
    step_s: float
    channels: Mapping[str, Array]

    def cells(self, edges: Array) -> Mapping[str, Array | float]:
        """Return the stretch of the channels that `edges` cover."""
        first = round((float(edges[0]) - self.start_s) / self.step_s)
        return {name: values[first : first + edges.size - 1] for name, values in self.channels.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One state of a job, from `start_s` to `end_s`; tuples hold one entry per rank."""

    start_s: float
    end_s: float
    signals: tuple[Signal, ...]
    memory_ratio: tuple[float, float]  # share of the memory used at start and end
    present: bool = True  # whether its processes exist
    workload: str
    anomaly: str | None = None
    note: str | None = None
    missing: int | None = None  # the rank that never came to a stalled collective


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """Traffic of the host from `start_s` to `end_s` in one channel of HOST_ACTIVITY."""

    start_s: float
    end_s: float
    channel: str
    bytes_per_second: float
    #: Spread of the logarithm of the rate from second to second.
    roughness: float = 0.3
    #: A signal whose channel "host" multiplies the rate: bursts in step with the job.
    shape: Signal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job on some GPUs of the node: what they do over time, and its traits that sensors never see by themselves."""

    gpus: tuple[int, ...]
    stages: tuple[Stage, ...]
    host: tuple[HostLoad, ...] = ()
    #: Multiplies the dynamic power of this workload: two workloads of equal SM activity differ by some 10 %.
    power_gain: float = 1.0
    #: Watts per unit of waiting SM activity (H100; scales with the board). Working SM activity takes 601.
    spin_watts: float = 100.0
    #: Relative slow drift of the activity, shared by all ranks.
    drift: float = 0.02
    #: Range of the FP32 pipe's activity over the SM's, drawn once for the job, where no signal says it. Matrices on the
    #: tensor cores leave it to norms, activations and softmax.
    singles: tuple[float, float] = (0.02, 0.2)
    #: Whether NVML lists its processes as compute processes: it does not list what only draws (nvml.h).
    listed: bool = True


def cycle_starts(
    rng: np.random.Generator, start_s: float, end_s: float, *, period_s: float, spread: float, tail: float = 0.0
) -> Array:
    """Return start times of cycles that cover a stage; `spread` is the coefficient of variation.

    `tail` is the share of cycles that take two to four times as long.
    """
    count = max(2, int((end_s - start_s) / period_s) + 2)
    factors = np.clip(rng.normal(1.0, spread, count), 0.2, 4.0)
    if tail > 0:
        factors *= np.where(rng.random(count) < tail, rng.uniform(2, 4, count), 1.0)
    starts: Array = start_s + np.concatenate(([0.0], np.cumsum(factors * period_s)))
    return starts


def pieces(rows: Sequence[tuple[float, Mapping[str, float]]]) -> tuple[Array, dict[str, Array]]:
    """Return `breaks` and `levels` of a cycle from (length, levels) rows; lengths are scaled to sum to 1."""
    lengths = np.array([row[0] for row in rows])
    breaks = np.concatenate(([0.0], np.cumsum(lengths / lengths.sum())))
    breaks[-1] = 1.0
    names = {name for _, levels in rows for name in levels}
    return breaks, {name: np.array([levels.get(name, 0.0) for _, levels in rows]) for name in sorted(names)}


def scale_to_mean(breaks: Array, level: Array, mean: float, ceiling: float) -> Array:
    """Return `level` scaled so that its mean over the cycle is `mean`, never above `ceiling`."""
    now = float(np.sum(level * np.diff(breaks)))
    if now <= 0:
        return level
    scaled = np.minimum(level * (mean / now), ceiling)
    # What the ceiling took away goes to the pieces below it, once: enough for a tolerance of some per cent.
    lost = mean - float(np.sum(scaled * np.diff(breaks)))
    room = np.where((level > 0) & (scaled < ceiling), ceiling - scaled, 0.0)
    free = float(np.sum(room * np.diff(breaks)))
    return scaled + room * min(1.0, lost / free) if lost > 0 and free > 0 else scaled
