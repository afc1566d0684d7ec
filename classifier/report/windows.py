"""Windows to be judged: one GPU at one moment with a fixed length of evidence, seen through every channel profile.

A window keeps the features of everything that was measured (a profile is a mask over them), what the idle rule says
under each profile, and what the baselines answer under each profile to the raw channels. Windows of a simulated run and
of a recording are made by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import GPU_CHANNELS, Array, GpuHistory, HostHistory, Series
from agent.records import GpuLimits
from agent.vocabulary import CLASSES
from classifier.features import FEATURE_NAMES, compute_gpu
from classifier.idle_rule import looks_idle
from classifier.labeller_config import LabellerConfig
from classifier.profiles import POWER_LIMIT, PROFILE_NAMES, PROFILES
from classifier.report.baselines import Baseline
from classifier.report.metrics import Flags, Labels
from classifier.signals import Signals
from classifier.simulator import SimulatedRun
from classifier.simulator.run import SimulatedGpu
from classifier.waiting_rule import looks_waiting

#: Lengths of the evidence in seconds.
SPANS_S: Final = (60.0, 300.0)
_LABELLER: Final = LabellerConfig()
_HORIZON_S: Final = 1e6
#: Utilisation up to which a sample shows no work.
_STILL: Final = 0.02
_RAW: Final = tuple(name for name in GPU_CHANNELS if name not in {"samples", "throttled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows as columns; `size` of them."""

    rows: Array  # (windows, features), of all channels
    labels: Labels  # (windows,) position in vocabulary.CLASSES
    groups: Labels  # (windows,) scenario or recording
    families: NDArray[np.str_]  # (windows,) family of the simulator, or source
    spans_s: Array  # (windows,) length of the evidence
    idle: Flags  # (windows, profiles) the idle rule holds
    waiting: Flags  # (windows, profiles) the waiting rule holds
    still: Flags  # (windows,) no sample of utilisation is above 2 %: nothing ran, whatever the recording's label
    answers: Labels  # (windows, profiles, baselines)

    @property
    def size(self) -> int:
        """Number of windows."""
        return int(self.labels.size)

    def where(self, chosen: Flags) -> Windows:
        """Return the chosen windows."""
        return Windows(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


class WindowsBuilder:
    """Collects windows; the baselines are asked as each is added."""

    def __init__(self, baselines: Sequence[Baseline]) -> None:
        self._baselines = tuple(baselines)
        self._columns: dict[str, list[object]] = {name: [] for name in Windows.__dataclass_fields__}

    def add(
        self,
        gpu: GpuHistory,
        host: HostHistory,
        now_s: float,
        span_s: float,
        *,
        label: str,
        group: int,
        family: str,
        gpu_count: int,
        peers: Sequence[GpuHistory] = (),
        skip_waiting: bool = False,
    ) -> bool:
        """Add the window of `span_s` that ends at `now_s` and return True; `peers` are the GPUs of the host.

        With `skip_waiting` nothing is added and False returned where the idle rule holds although the label is not
        idle: a job that waits is idle for as long, and no model is asked about it.
        """
        since_s = now_s - span_s
        seen = [_SeenGpu(gpu, PROFILES[name]) for name in PROFILE_NAMES]
        hosts = [_SeenHost(host, PROFILES[name]) for name in PROFILE_NAMES]
        signals = [
            Signals(one, other, now_s, since_s=since_s, gpu_count=gpu_count)
            for one, other in zip(seen, hosts, strict=True)
        ]
        idle = [looks_idle(one, _LABELLER) for one in signals]
        if skip_waiting and idle[-1] and label != "idle":
            return False
        raw = {name: gpu.series(name, now_s, span_s) for name in _RAW if gpu.has(name)}
        answers = []
        for name in PROFILE_NAMES:
            offered = {channel: series for channel, series in raw.items() if channel in PROFILES[name] and series.size}
            answers.append([baseline.answer(offered) for baseline in self._baselines])
        columns = self._columns
        columns["rows"].append(compute_gpu(gpu, host, now_s, since_s=since_s, gpu_count=gpu_count, peers=peers))
        columns["labels"].append(CLASSES.index(label))
        columns["groups"].append(group)
        columns["families"].append(family)
        columns["spans_s"].append(span_s)
        columns["idle"].append(idle)
        columns["waiting"].append([looks_waiting(one, _LABELLER) for one in signals])
        utilization = raw.get("utilization_ratio")
        columns["still"].append(
            utilization is not None and utilization.size > 0 and bool(utilization.values.max() <= _STILL)
        )
        columns["answers"].append(answers)
        return True

    def build(self) -> Windows:
        """Return all windows added."""
        columns, profiles = self._columns, len(PROFILE_NAMES)
        return Windows(
            rows=np.array(columns["rows"], dtype=np.float64).reshape(-1, len(FEATURE_NAMES)),
            labels=np.array(columns["labels"], dtype=np.int64),
            groups=np.array(columns["groups"], dtype=np.int64),
            families=np.array(columns["families"], dtype=np.str_),
            spans_s=np.array(columns["spans_s"], dtype=np.float64),
            idle=np.array(columns["idle"], dtype=bool).reshape(-1, profiles),
            waiting=np.array(columns["waiting"], dtype=bool).reshape(-1, profiles),
            still=np.array(columns["still"], dtype=bool),
            answers=np.array(columns["answers"], dtype=np.int64).reshape(-1, profiles, len(self._baselines)),
        )


def joined(parts: Sequence[Windows]) -> Windows:
    """Return the windows of all parts, in order; at least one part."""
    return Windows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in Windows.__dataclass_fields__})


class _SeenGpu(GpuHistory):
    """A GPU's history through a profile: channels outside of it were never measured."""

    def __init__(self, whole: GpuHistory, channels: frozenset[str]) -> None:
        super().__init__(whole.key, _HORIZON_S)
        self._whole = whole
        self._channels = channels
        self.state = whole.state
        self.limits = whole.limits if POWER_LIMIT in channels else None

    def has(self, channel: str) -> bool:
        return channel in self._channels and self._whole.has(channel)

    def series(self, channel: str, now_s: float, seconds: float) -> Series:
        if channel not in self._channels:
            return Series(np.empty(0), np.empty(0))
        return self._whole.series(channel, now_s, seconds)

    @property
    def memory_total_bytes(self) -> float | None:
        return self._whole.memory_total_bytes if "memory_total_bytes" in self._channels else None


class _SeenHost(HostHistory):
    """The host's history through a profile."""

    def __init__(self, whole: HostHistory, channels: frozenset[str]) -> None:
        super().__init__(_HORIZON_S)
        self._whole = whole
        self._channels = channels

    def has(self, channel: str) -> bool:
        return channel in self._channels and self._whole.has(channel)

    def series(self, channel: str, now_s: float, seconds: float) -> Series:
        if channel not in self._channels:
            return Series(np.empty(0), np.empty(0))
        return self._whole.series(channel, now_s, seconds)


def add_run(
    builder: WindowsBuilder,
    run: SimulatedRun,
    rng: np.random.Generator,
    *,
    group: int,
    gpus: int,
    moments: int,
    neighbour: SimulatedRun | None = None,
) -> int:
    """Add windows of one simulated run, nothing left out of what its sensors offer; return how many waited.

    `moments` ends are drawn for each of `gpus` GPUs and each length of evidence; a window whose truth changes within
    its evidence is left out. The host's traffic includes that of `neighbour`, as on a shared node.
    """
    traffic = {name: _with_neighbour(name, one, neighbour) for name, one in run.host_channels.items()}
    count = len(run.gpus) + (len(neighbour.gpus) if neighbour else 0)
    last_s = float(run.core_s[-1])
    spans_s = [span_s for span_s in SPANS_S if span_s <= last_s]
    drawn = [
        (float(now_s), span_s, int(position))
        for position in np.sort(rng.permutation(len(run.gpus))[:gpus])
        for span_s in spans_s
        for now_s in rng.uniform(span_s, last_s, moments)
    ]
    host, histories = HostHistory(_HORIZON_S), [_history(simulated) for simulated in run.gpus]
    fillers = [_Filler(history, one.channels) for history, one in zip(histories, run.gpus, strict=True)]
    fillers.append(_Filler(host, traffic))
    waited = 0
    for now_s, span_s, position in sorted(drawn):
        label = label_over(run, run.gpus[position].key.gpu, now_s - span_s, now_s)
        if label is None:
            continue
        for filler in fillers:
            filler.fill_to(now_s)
        is_added = builder.add(
            histories[position], host, now_s, span_s,
            label=label, group=group, family=run.scenario.kind, gpu_count=count, peers=histories, skip_waiting=True,
        )  # fmt: skip
        waited += not is_added
    return waited


def _history(simulated: SimulatedGpu) -> GpuHistory:
    """Return the empty history of a GPU whose limit is known."""
    gpu, watts = GpuHistory(simulated.key, _HORIZON_S), simulated.power_limit_watts
    gpu.limits = GpuLimits(monotonic_s=0.0, wall_s=0.0, key=simulated.key, power_limit_watts=watts)
    return gpu


def label_over(run: SimulatedRun, gpu: int, start_s: float, end_s: float) -> str | None:
    """Return the class that is true from `start_s` to `end_s`; None where it changes, or is none of the classes."""
    words = {
        phase.workload
        for phase in run.phases
        if phase.gpu in (None, gpu) and phase.start_s < end_s and phase.end_s > start_s
    }
    if len(words) != 1:
        return None
    word = words.pop()
    return word if word in CLASSES else None


def _with_neighbour(channel: str, series: Series, neighbour: SimulatedRun | None) -> Series:
    other = neighbour.host_channels.get(channel) if neighbour else None
    if other is None or not other.size or not series.size:
        return series
    # The neighbour's run goes round where it is shorter.
    times = other.times[0] + (series.times - series.times[0]) % max(1.0, other.times[-1] - other.times[0])
    return Series(series.times, series.values + np.interp(times, other.times, other.values))


class _Filler:
    """Puts channels into a history up to a time that moves on: some rings forget within two minutes."""

    def __init__(self, history: GpuHistory | HostHistory, channels: Mapping[str, Series]) -> None:
        self._history = history
        self._channels = channels
        self._done = dict.fromkeys(channels, 0)

    def fill_to(self, now_s: float) -> None:
        """Put everything that was measured by `now_s`."""
        for channel, (times, values) in self._channels.items():
            first, last = self._done[channel], int(np.searchsorted(times, now_s, side="right"))
            for time_s, value in zip(times[first:last].tolist(), values[first:last].tolist(), strict=True):
                self._history.put(channel, time_s, value)
            self._done[channel] = last


def moments_of(start_s: float, end_s: float, span_s: float, count: int) -> Iterator[float]:
    """Yield at most `count` evenly spaced ends of windows of `span_s` that lie within start and end."""
    if end_s - start_s < span_s:
        return
    yield from np.linspace(start_s + span_s, end_s, min(count, 1 + int((end_s - start_s - span_s) // 15.0))).tolist()
