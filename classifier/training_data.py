"""Training windows: simulated nodes, seen through the same history and features as live ones.

Each scenario is one simulated node with one kind of workload; its windows share its group, so that a split never puts
two windows of one scenario on both sides. Windows hold every channel that the simulated board has: what other machines
lack is left out later (`classifier.training_channels`), as often as wanted from one simulation.

`Dataset` is also how recorded windows come in: one group for each recording, one source for each place they are from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array, GpuHistory, HostHistory, Series
from agent.records import GpuLimits
from agent.trace import Phase
from agent.vocabulary import CLASSES
from classifier.features import FEATURE_NAMES, compute_all
from classifier.idle_rule import looks_idle
from classifier.labeller_config import LabellerConfig
from classifier.signals import Signals
from classifier.simulator import SimulatedRun, random_scenario, simulate_arrays
from classifier.simulator.run import SimulatedGpu
from classifier.simulator.styles import with_random_recorder

_HORIZON_S: Final = 1e6
#: Least evidence of a window, as in the labeller.
_LEAST_S: Final = 15.0
_LABELLER: Final = LabellerConfig()
#: Source of every simulated window.
SIMULATED: Final = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """How much to simulate for training."""

    scenarios: int = 5000
    #: GPUs of each scenario that give windows, and windows of each.
    gpus: int = 2
    windows: int = 4
    #: Range of the scenarios' lengths.
    duration_s: tuple[float, float] = (300.0, 900.0)
    #: Share of the scenarios whose host also carries the traffic of another job.
    shared_host_share: float = 0.4
    #: Share of the scenarios that a recorder of a random style writes, with its columns, interval and failures. The
    #: others are seen by an agent that reads all there is.
    foreign_recorder_share: float = 0.3
    #: Sampling intervals to choose from, independently of the kind.
    intervals_s: tuple[float, ...] = (0.5, 1.0, 1.0, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Feature rows with their truth."""

    rows: Array  # (windows, features)
    labels: NDArray[np.int64]  # (windows,) position in vocabulary.CLASSES
    groups: NDArray[np.int64]  # (windows,) scenario or recording: never on both sides of a split
    kinds: NDArray[np.str_]  # (windows,) family: kind of the scenario, or a name for what was recorded
    sources: NDArray[np.str_] = field(default_factory=lambda: np.empty(0, dtype=np.str_))  # (windows,); all simulated

    def __post_init__(self) -> None:
        """Raise ValueError where the parts differ in length; without sources all windows are simulated."""
        if not self.sources.size:
            object.__setattr__(self, "sources", np.full(self.labels.size, SIMULATED))
        sizes = {len(part) for part in (self.rows, self.labels, self.groups, self.kinds, self.sources)}
        if len(sizes) > 1:
            raise ValueError(f"the parts of a data set differ in length: {sorted(sizes)}")

    @property
    def recorded(self) -> NDArray[np.bool_]:
        """Which windows come from recordings, shape (windows,)."""
        return np.asarray(self.sources != SIMULATED)

    @property
    def families(self) -> NDArray[np.str_]:
        """Kind and class of every window in one word, shape (windows,): a trainer's idle time is no training."""
        names = np.array(CLASSES)[self.labels]
        return np.char.add(np.char.add(self.kinds.astype(np.str_), "/"), names)

    def take(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> Dataset:
        """Return the chosen windows."""
        return Dataset(
            rows=self.rows[chosen],
            labels=self.labels[chosen],
            groups=self.groups[chosen],
            kinds=self.kinds[chosen],
            sources=self.sources[chosen],
        )

    def without_kinds(self, kinds: Iterable[str]) -> Dataset:
        """Return the windows of all other kinds."""
        return self.take(~np.isin(self.kinds, list(kinds)))

    def joined(self, others: Sequence[Dataset]) -> Dataset:
        """Return these windows and those of `others`, whose groups get numbers of their own."""
        parts = [self, *others]
        groups: list[NDArray[np.int64]] = []
        first = 0
        for part in parts:
            names, position = np.unique(part.groups, return_inverse=True)
            groups.append(part.groups if part is self else first + position.astype(np.int64))
            first = (int(part.groups.max()) + 1 if part.groups.size else 0) if part is self else first + names.size
        return Dataset(
            rows=np.concatenate([part.rows for part in parts]),
            labels=np.concatenate([part.labels for part in parts]),
            groups=np.concatenate(groups),
            kinds=np.concatenate([part.kinds for part in parts]),
            sources=np.concatenate([part.sources for part in parts]),
        )

    def digest(self) -> str:
        """Return the SHA-256 of rows (in single precision), labels, groups, kinds and sources."""
        digest = hashlib.sha256()
        digest.update(np.ascontiguousarray(self.rows, dtype=np.float32).tobytes())
        digest.update(self.labels.tobytes())
        digest.update(self.groups.tobytes())
        digest.update("\n".join((*self.kinds.tolist(), *self.sources.tolist())).encode())
        return digest.hexdigest()


def simulate_dataset(
    config: DatasetConfig, seed: int, progress: Callable[[str], None], *, exclude_kinds: Collection[str] = ()
) -> Dataset:
    """Return the windows of simulated scenarios; the same configuration and seed give the same rows.

    A scenario of a kind in `exclude_kinds` is left out, and all others stay as they are without it.
    """
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
        if scenario.kind in exclude_kinds:
            continue
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
        kinds=np.array(kinds, dtype=np.str_),
    )


def windows_of(
    run: SimulatedRun, rng: np.random.Generator, config: DatasetConfig, *, neighbour: SimulatedRun | None = None
) -> Iterator[tuple[Array, str]]:
    """Yield feature rows and labels of some GPUs and moments of one run.

    A window ends at least 15 s after its phase began. Half the windows start with their phase, as after a change of
    processes; the others look back over whatever came before. Windows that the labeller's idle rule answers are kept
    for idle GPUs only: no model is asked about a server that waits. The host's traffic includes that of `neighbour`,
    work of another kind on the same host: what the disks and networks do says little about one GPU.
    """
    host = HostHistory(_HORIZON_S)
    gpu_count = len(run.gpus) + (len(neighbour.gpus) if neighbour else 0)
    for channel, series in run.host_channels.items():
        host.load(channel, _with_neighbour(channel, series, neighbour))
    gpus = [_history_of(simulated) for simulated in run.gpus]
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


def _history_of(simulated: SimulatedGpu) -> GpuHistory:
    gpu = GpuHistory(simulated.key, _HORIZON_S)
    gpu.limits = GpuLimits(
        monotonic_s=0.0, wall_s=0.0, key=simulated.key, power_limit_watts=simulated.power_limit_watts
    )
    for channel, series in simulated.channels.items():
        gpu.load(channel, series)
    return gpu


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
