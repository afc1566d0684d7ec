"""Training windows: simulated nodes, seen through the same history and features as live ones.

Each scenario is one simulated node with one kind of workload; its windows share its group, so that a split never puts
two windows of one scenario on both sides. What the sensors offer (channel groups, limits) is drawn per scenario,
independently of the class.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array, GpuHistory, HostHistory, Series
from agent.records import GpuLimits
from agent.trace import Phase
from agent.vocabulary import CLASSES
from classifier.features import FEATURE_NAMES, compute_all
from classifier.labeller import LabellerConfig, looks_idle
from classifier.profiles import columns_of
from classifier.signals import Signals
from classifier.simulator import SimulatedRun, random_scenario, simulate_arrays
from classifier.simulator.run import SimulatedGpu
from classifier.simulator.styles import with_random_recorder

#: Channels by the group that is there or not as a whole, and the probability that it is missing.
CHANNEL_GROUPS: Final[Mapping[str, tuple[float, tuple[str, ...]]]] = {
    "gpm": (0.5, ("sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio")),
    "pipes": (
        0.5,
        (
            "tensor_hmma_active_ratio",
            "tensor_imma_active_ratio",
            "tensor_dfma_active_ratio",
            "fp64_active_ratio",
            "fp32_active_ratio",
            "fp16_active_ratio",
        ),
    ),
    "fast_power": (0.5, ("power_fast_watts",)),
    "nvlink": (0.4, ("nvlink_receive_bytes_per_second", "nvlink_transmit_bytes_per_second")),
    "pcie": (0.4, ("pcie_receive_bytes_per_second", "pcie_transmit_bytes_per_second")),
    "memory_utilization": (0.2, ("memory_utilization_ratio",)),
    "processes": (0.4, ("process_count",)),
    "process_cpu": (0.4, ("process_cpu_ratio",)),
    "process_io": (0.5, ("process_read_bytes_per_second", "process_written_bytes_per_second")),
    "network": (0.5, ("network_receive_bytes_per_second", "network_transmit_bytes_per_second")),
    "infiniband": (0.5, ("infiniband_receive_bytes_per_second", "infiniband_transmit_bytes_per_second")),
    "disk": (0.5, ("disk_read_bytes_per_second", "disk_written_bytes_per_second")),
    "filesystem": (0.5, ("filesystem_read_bytes_per_second", "filesystem_written_bytes_per_second")),
    "power": (0.1, ("power_watts",)),
    "memory": (0.1, ("memory_used_bytes",)),
    "power_limit": (0.15, ()),
    "memory_total": (0.1, ("memory_total_bytes",)),
}
#: Groups that nvidia-smi does not show.
_RICH_GROUPS: Final = frozenset(
    {
        "gpm",
        "pipes",
        "fast_power",
        "nvlink",
        "pcie",
        "processes",
        "process_cpu",
        "process_io",
        "network",
        "infiniband",
        "disk",
        "filesystem",
    }
)
_BASIC_SHARE: Final = 0.25
_HORIZON_S: Final = 1e6
#: Least evidence of a window, as in the labeller.
_LEAST_S: Final = 15.0
_LABELLER: Final = LabellerConfig()
#: Features that only channels beyond nvidia-smi's give.
_RICH_COLUMNS: Final = ~columns_of("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """How much to simulate for training."""

    scenarios: int = 8000
    #: GPUs of each scenario that give windows, and windows of each.
    gpus: int = 2
    windows: int = 4
    #: Range of the scenarios' lengths.
    duration_s: tuple[float, float] = (300.0, 900.0)
    #: Share of the scenarios whose host also carries the traffic of another job.
    shared_host_share: float = 0.4
    #: Share of the scenarios that a recorder of a random style writes, with its columns, interval and failures. The
    #: others are seen by an agent that reads all there is, of which channel groups are left out at random.
    foreign_recorder_share: float = 0.3
    #: Sampling intervals to choose from, independently of the kind.
    intervals_s: tuple[float, ...] = (0.5, 1.0, 1.0, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Feature rows with their truth."""

    rows: Array  # (windows, features)
    labels: NDArray[np.int64]  # (windows,) position in vocabulary.CLASSES
    groups: NDArray[np.int64]  # (windows,) scenario
    kinds: NDArray[np.str_]  # (windows,) kind of the scenario

    @property
    def basic(self) -> NDArray[np.bool_]:
        """Which rows hold nothing but what nvidia-smi's columns give, shape (windows,)."""
        return np.asarray(np.isnan(self.rows[:, _RICH_COLUMNS]).all(axis=1))

    def digest(self) -> str:
        """Return the SHA-256 of rows (in single precision), labels and groups."""
        digest = hashlib.sha256()
        digest.update(np.ascontiguousarray(self.rows, dtype=np.float32).tobytes())
        digest.update(self.labels.tobytes())
        digest.update(self.groups.tobytes())
        return digest.hexdigest()


def simulate_dataset(config: DatasetConfig, seed: int, progress: Callable[[str], None]) -> Dataset:
    """Return the windows of simulated scenarios; the same configuration and seed give the same rows."""
    rows: list[Array] = []
    labels: list[int] = []
    groups: list[int] = []
    kinds: list[str] = []
    neighbour: SimulatedRun | None = None
    for number in range(config.scenarios):
        rng = np.random.default_rng([seed, 1, number])
        scenario = random_scenario(rng, duration_s=config.duration_s, intervals_s=config.intervals_s)
        if rng.random() < config.foreign_recorder_share:
            scenario = with_random_recorder(rng, scenario)
        else:
            scenario = replace(scenario, recorder="agent_capable")
        run = simulate_arrays(scenario, seed=int(rng.integers(2**31)))
        shared = neighbour if rng.random() < config.shared_host_share else None
        neighbour = run
        for row, label in windows_of(run, rng, config, neighbour=shared):
            rows.append(row)
            labels.append(CLASSES.index(label))
            groups.append(number)
            kinds.append(scenario.kind)
        if (number + 1) % 100 == 0:
            progress(f"simulated {number + 1} of {config.scenarios} scenarios, {len(rows)} windows")
    return Dataset(
        rows=np.array(rows).reshape(-1, len(FEATURE_NAMES)),
        labels=np.array(labels, dtype=np.int64),
        groups=np.array(groups, dtype=np.int64),
        kinds=np.array(kinds),
    )


def windows_of(
    run: SimulatedRun, rng: np.random.Generator, config: DatasetConfig, *, neighbour: SimulatedRun | None = None
) -> Iterator[tuple[Array, str]]:
    """Yield feature rows and labels of some GPUs and moments of one run, with channel groups left out at random.

    A window ends at least 15 s after its phase began. Half the windows start with their phase, as after a change of
    processes; the others look back over whatever came before. Windows that the labeller's idle rule answers are kept
    for idle GPUs only: no model is asked about a server that waits. The host's traffic includes that of `neighbour`,
    work of another kind on the same host: what the disks and networks do says little about one GPU.
    """
    missing = draw_missing(rng)
    host = HostHistory(_HORIZON_S)
    gpu_count = len(run.gpus) + (len(neighbour.gpus) if neighbour else 0)
    for channel, series in run.host_channels.items():
        if channel not in missing:
            host.load(channel, _with_neighbour(channel, series, neighbour))
    gpus = [_history_of(simulated, missing) for simulated in run.gpus]
    batch: list[Signals] = []
    labels: list[str] = []
    for position in rng.permutation(len(run.gpus))[: config.gpus]:
        gpu = gpus[position]
        for now_s in np.sort(rng.uniform(_LEAST_S, run.core_s[-1], config.windows)):
            phase = _phase_at(run, gpu.key.gpu, now_s)
            if phase is None or now_s - phase.start_s < _LEAST_S or phase.workload not in CLASSES:
                continue
            knows_start = bool(rng.random() < 0.5) or now_s - phase.start_s < 60.0
            since_s = phase.start_s if knows_start else 0.0
            signals = Signals(gpu, host, float(now_s), since_s=since_s, gpu_count=gpu_count, peers=gpus)
            if phase.workload != "idle" and looks_idle(signals, _LABELLER):
                continue
            batch.append(signals)
            labels.append(phase.workload)
    yield from zip(compute_all(batch), labels, strict=True)


def _history_of(simulated: SimulatedGpu, missing: frozenset[str]) -> GpuHistory:
    gpu = GpuHistory(simulated.key, _HORIZON_S)
    if "power_limit" not in missing:
        gpu.limits = GpuLimits(
            monotonic_s=0.0, wall_s=0.0, key=simulated.key, power_limit_watts=simulated.power_limit_watts
        )
    for channel, series in simulated.channels.items():
        if channel not in missing:
            gpu.load(channel, series)
    return gpu


def draw_missing(rng: np.random.Generator) -> frozenset[str]:
    """Return channels (and "power_limit") that this machine does not offer; a quarter has nvidia-smi's columns only."""
    bare = bool(rng.random() < _BASIC_SHARE)
    missing: set[str] = set()
    for group, (probability, channels) in CHANNEL_GROUPS.items():
        drawn = bool(rng.random() < probability)
        if drawn or (bare and group in _RICH_GROUPS):
            missing.update(channels or (group,))
    return frozenset(missing)


def _phase_at(run: SimulatedRun, gpu: int, now_s: float) -> Phase | None:
    for phase in run.phases:
        if phase.gpu in (None, gpu) and phase.start_s <= now_s < phase.end_s:
            return phase
    return None


def _with_neighbour(channel: str, series: Series, neighbour: SimulatedRun | None) -> Series:
    other = neighbour.host_channels.get(channel) if neighbour else None
    if other is None or not other.size:
        return series
    # The neighbour's run goes round where it is shorter.
    times = other.times[0] + (series.times - series.times[0]) % max(1.0, other.times[-1] - other.times[0])
    return Series(series.times, series.values + np.interp(times, other.times, other.values))
