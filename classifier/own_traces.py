"""Own labelled traces as training data: windows of spans that people marked, each trace a group of its own.

A trace is a file of `warpwatch record` or `convert` whose header says what was going on (`warpwatch label`, or
`record --label` for the whole of it). No window is ever apart from the others of its trace: a split takes whole traces.
Traces in one folder are of one source, as a machine or a project; a trace beside the folders is its own source.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from agent.errors import UsageError
from agent.history import Array, GpuHistory, History
from agent.records import GpuKey, GpuSample
from agent.trace import Phase, TraceHeader, TraceReader
from agent.vocabulary import CLASSES
from classifier.features import FEATURE_NAMES, compute
from classifier.idle_rule import looks_idle
from classifier.labeller_config import LabellerConfig
from classifier.profiles import PROFILE_NAMES, mask
from classifier.signals import Signals
from classifier.training_data import Dataset

#: Begin of the kind of own windows, followed by their source.
OWN: Final = "own/"
_SUFFIXES: Final = (".jsonl", ".jsonl.gz")
#: Least evidence of a window, as in the labeller; half the windows look back no further than their span.
_LEAST_S: Final = 15.0
_LOOK_BACK_S: Final = 60.0
_LABELLER: Final = LabellerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTracesConfig:
    """How windows are taken from own traces."""

    #: Distance of two windows of one GPU, and how many a trace gives at most: a recording of a day is one recording.
    step_s: float = 30.0
    windows: int = 400
    #: Rows of each window with the channels of a poorer profile only, drawn at random, as on another machine.
    masked: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTraces:
    """Windows of own traces, and where they come from."""

    data: Dataset
    traces: int
    sources: tuple[str, ...]
    provenance: dict[str, int]  # traces by how they came about: recorded, imported, simulated

    def by_class(self) -> dict[str, int]:
        """Return the number of windows by class."""
        return {name: int((self.data.labels == position).sum()) for position, name in enumerate(CLASSES)}

    def as_dict(self) -> dict[str, object]:
        """Return what a bundle says of them: counts, and no names."""
        return {
            "traces": self.traces,
            "sources": len(self.sources),
            "provenance": dict(sorted(self.provenance.items())),
            "windows": self.by_class(),
            "data_sha256": self.data.digest(),
        }

    def describe(self) -> str:
        """Return where the windows come from, as in "12 own traces of 3 sources (12 recorded)"."""
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.provenance.items()))
        return f"{_count(self.traces, 'own trace')} of {_count(len(self.sources), 'source')} ({kinds})"


class _Window(NamedTuple):
    number: int  # among those of its GPU
    row: Array
    workload: str


def own_dataset(
    folders: Sequence[Path],
    seed: int,
    *,
    config: OwnTracesConfig | None = None,
    warn: Callable[[str], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> OwnTraces:
    """Return the windows of all labelled traces under `folders`; the same files and seed give the same rows.

    A trace without a label gives none and is told to `warn`. Raises UsageError where no trace is labelled, and for a
    folder or file that cannot be read.
    """
    config = config or OwnTracesConfig()
    found = find_traces(folders)
    rows: list[Array] = []
    labels: list[int] = []
    groups: list[int] = []
    kinds: list[str] = []
    provenance: Counter[str] = Counter()
    for number, (path, source) in enumerate(found):
        # By its place among the traces and not by its path: the same traces elsewhere give the same rows.
        rng = np.random.default_rng([seed, 7, number])
        reader = TraceReader(path, warn)
        windows = _windows_of(reader, rng, config)
        before = len(labels)
        for row, workload in windows:
            variants = [row, *(mask(row[np.newaxis], str(rng.choice(PROFILE_NAMES)))[0] for _ in range(config.masked))]
            rows += variants
            labels += [CLASSES.index(workload)] * len(variants)
        taken = len(labels) - before
        groups += [number] * taken
        kinds += [OWN + source] * taken
        if taken:
            provenance[reader.header.provenance] += 1
        else:
            warn(f"{path} gives no window: mark spans of at least {_LEAST_S:g} s with `warpwatch label`")
        progress(f"read {number + 1} of {_count(len(found), 'own trace')}, {len(labels)} windows")
    if not labels:
        raise UsageError("no trace is labelled; mark spans with `warpwatch label TRACE --span START:END=WORD`")
    data = Dataset(
        rows=np.array(rows).reshape(-1, len(FEATURE_NAMES)),
        labels=np.array(labels, dtype=np.int64),
        groups=np.array(groups, dtype=np.int64),
        kinds=np.array(kinds),
        sources=np.array([kind.removeprefix(OWN) for kind in kinds]),
    )
    return OwnTraces(
        data=data,
        traces=provenance.total(),
        sources=tuple(kind.removeprefix(OWN) for kind in np.unique(data.kinds)),
        provenance=dict(provenance),
    )


def find_traces(folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return the traces under `folders`, or those named themselves, each once, with its source.

    Raises UsageError where one does not exist or none is found.
    """
    found: dict[Path, tuple[Path, str]] = {}
    for folder in folders:
        if folder.is_file():
            found.setdefault(folder.resolve(), (folder, _stem(folder)))
            continue
        if not folder.is_dir():
            raise UsageError(f"cannot read {folder}: there is no such folder or trace")
        for path in sorted(folder.rglob("*")):
            if path.name.endswith(_SUFFIXES) and not path.name.startswith(".") and path.is_file():
                inner = path.relative_to(folder).parts
                source = inner[0] if len(inner) > 1 else _stem(path)
                found.setdefault(path.resolve(), (path, source))
    if not found:
        names = ", ".join(map(str, folders))
        raise UsageError(f"no trace in {names}; traces end in {' or '.join(_SUFFIXES)} (`warpwatch record`, `convert`)")
    return list(found.values())


def join(first: Dataset, second: Dataset) -> Dataset:
    """Return the windows of both, with groups of their own each."""
    offset = int(first.groups.max()) + 1 if first.groups.size else 0
    moved = dataclasses.replace(second, groups=second.groups + offset)
    names = [one.name for one in dataclasses.fields(Dataset)]
    return Dataset(**{name: np.concatenate((getattr(first, name), getattr(moved, name))) for name in names})


def _windows_of(reader: TraceReader, rng: np.random.Generator, config: OwnTracesConfig) -> list[tuple[Array, str]]:
    """Return feature rows and labels of the marked spans, in the order of time.

    Windows that the labeller's idle rule answers are kept for idle GPUs only, as in the simulated data.
    """
    history = History(sample_interval_s=reader.header.interval_s)
    found: list[_Window] = []
    taken: Counter[GpuKey] = Counter()
    due: dict[GpuKey, float] = {}
    step_s = config.step_s
    for tick in reader:
        history.ingest(tick)
        now_s = tick.monotonic_s
        for key in [record.key for record in tick.records if isinstance(record, GpuSample)]:
            gpu = history.gpus.get(key)  # None is a card that is divided: its instances are judged
            phase = None if gpu is None else _phase_at(reader.header, gpu, now_s)
            if gpu is None or phase is None or now_s < due.get(key, -np.inf) or now_s - phase.start_s < _LEAST_S:
                continue
            due[key] = now_s + step_s
            row = _row(history, gpu, phase, now_s, knows_start=bool(rng.random() < 0.5))
            if row is not None:
                found.append(_Window(taken[key], row, phase.workload))
                taken[key] += 1
        while len(found) > config.windows and max(taken.values()) > 1:
            # Every second window of every GPU goes, so that a long trace is thinned evenly.
            step_s *= 2.0
            found = [window._replace(number=window.number // 2) for window in found if window.number % 2 == 0]
            taken = Counter({key: (count + 1) // 2 for key, count in taken.items()})
    return [(window.row, window.workload) for window in found]


def _row(history: History, gpu: GpuHistory, phase: Phase, now_s: float, *, knows_start: bool) -> Array | None:
    is_early = now_s - phase.start_s < _LOOK_BACK_S
    since_s = phase.start_s if knows_start or is_early else -np.inf
    signals = Signals(
        gpu, history.host, now_s, since_s=since_s, gpu_count=len(history.gpus), peers=history.gpus.values()
    )
    if phase.workload != "idle" and looks_idle(signals, _LABELLER):
        return None
    row = compute(signals)
    return row if np.isfinite(row).any() else None


def _phase_at(header: TraceHeader, gpu: GpuHistory, now_s: float) -> Phase | None:
    """Return the span that `gpu` is in; without any spans, the label of the whole trace."""
    if not header.ground_truth:
        if header.label not in CLASSES:
            return None
        return Phase(start_s=gpu.first_s or 0.0, end_s=np.inf, workload=str(header.label))
    for phase in header.ground_truth:
        if phase.gpu in (None, gpu.key.gpu) and phase.start_s <= now_s < phase.end_s:
            return phase if phase.workload in CLASSES else None
    return None


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
