"""One row of the metric table, and the few helpers that rows are written with.

Values are read from a `NodeSnapshot` only; a value that is None or not finite gives no series, so a row never decides
what is missing. Series come in a fixed order: GPUs by index, words in the order of their vocabulary, devices by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from agent.records import GpuKey
from classifier.results import Assessment
from exporters.snapshot import GpuView, NodeSnapshot

PREFIX: Final = "warpwatch_"
#: The label of a MIG instance: left out of a series, not empty, where the series is of a whole card.
MIG_LABEL: Final = "GPU_I_ID"
CARD_LABELS: Final = ("gpu", "uuid")
WORK_LABELS: Final = ("gpu", "uuid", MIG_LABEL)

Kind = Literal["gauge", "counter"]
#: From which `[export] host` on a family of the host is exported.
HostLevel = Literal["summary", "full"]
Number = float | int | None
Series = Iterable[tuple[tuple[str, ...], Number]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDef:
    """One metric family.

    `name` is without the prefix and, for a counter, with `_total`. `unit` is empty for words, flags and counts;
    otherwise the name ends in it. `values` yields one tuple of label values, in the order of `labels`, and a number
    per series. `host` is None for a family that is not of the host and so always there.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[NodeSnapshot], Series]
    host: HostLevel | None = None
    prefix: str = PREFIX
    leaves_out_empty: bool = False  # labels without a value are not there, rather than empty

    @property
    def full_name(self) -> str:
        """Name of its samples, as rules and dashboards write it."""
        return self.prefix + self.name


def card_views(snapshot: NodeSnapshot) -> Sequence[GpuView]:
    """Return the views of whole cards, by index."""
    return sorted((view for view in snapshot.gpus if view.key.gpu_i_id is None), key=lambda view: view.key.order)


def work_views(snapshot: NodeSnapshot) -> Sequence[GpuView]:
    """Return where work runs: the instances of a card that is divided, the card where it is whole."""
    divided = {view.key.gpu for view in snapshot.gpus if view.key.gpu_i_id is not None}
    views = (view for view in snapshot.gpus if view.key.gpu_i_id is not None or view.key.gpu not in divided)
    return sorted(views, key=lambda view: view.key.order)


def standing(snapshot: NodeSnapshot) -> Sequence[Assessment]:
    """Return the assessments of what is there: not of a card that is divided by now, or of an instance that is gone.

    Cards are divided between two judgements, and the last one stands until the next.
    """
    places = {view.key for view in work_views(snapshot)}
    return [item for item in snapshot.assessments if item.scope != "gpu" or item.key in places]


def card_labels(key: GpuKey) -> tuple[str, ...]:
    """Return the values of CARD_LABELS; the uuid is empty where the source holds none."""
    return str(key.gpu), key.uuid or ""


def work_labels(key: GpuKey) -> tuple[str, ...]:
    """Return the values of WORK_LABELS."""
    return str(key.gpu), key.uuid or "", "" if key.gpu_i_id is None else str(key.gpu_i_id)


@dataclass(frozen=True, slots=True)
class Level:
    """Where series of a GPU stand: on every card, or where work runs. Makes rows of that level."""

    labels: tuple[str, ...]
    label_values: Callable[[GpuKey], tuple[str, ...]]
    views: Callable[[NodeSnapshot], Sequence[GpuView]]

    def metric(self, name: str, kind: Kind, unit: str, text: str, read: Callable[[GpuView], Number]) -> MetricDef:
        """Return a row with one series for each place of this level."""

        def values(snapshot: NodeSnapshot) -> Series:
            return [(self.label_values(view.key), read(view)) for view in self.views(snapshot)]

        return MetricDef(name=name, kind=kind, unit=unit, help=text, labels=self.labels, values=values)

    def words(
        self,
        name: str,
        kind: Kind,
        unit: str,
        text: str,
        *,
        label: str,
        read: Callable[[GpuView], Iterable[tuple[str, Number]]],
    ) -> MetricDef:
        """Return a row with one series for each place of this level and word of one more label."""

        def values(snapshot: NodeSnapshot) -> Series:
            return [
                ((*self.label_values(view.key), word), number)
                for view in self.views(snapshot)
                for word, number in read(view)
            ]

        return MetricDef(name=name, kind=kind, unit=unit, help=text, labels=(*self.labels, label), values=values)


#: Power, energy, temperature, clocks, links, errors.
CARD: Final = Level(CARD_LABELS, card_labels, card_views)
#: Memory, activity, workload.
WORK: Final = Level(WORK_LABELS, work_labels, work_views)


def node_metric(name: str, kind: Kind, unit: str, text: str, read: Callable[[NodeSnapshot], Number]) -> MetricDef:
    """Return a row with one series for the node, without labels."""

    def values(snapshot: NodeSnapshot) -> Series:
        return [((), read(snapshot))]

    return MetricDef(name=name, kind=kind, unit=unit, help=text, labels=(), values=values)


def in_order(words: Sequence[str], numbers: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield what `numbers` holds in the order of a vocabulary; a word outside it is not exported."""
    for word in words:
        if word in numbers:
            yield word, numbers[word]


def one_hot(words: Sequence[str], word: str | None) -> Iterable[tuple[str, int]]:
    """Return 1 for `word` and 0 for the others; nothing where it is None."""
    return () if word is None else [(other, int(other == word)) for other in words]


def flag(value: bool | None) -> Number:
    """Return 0 or 1, None where it is not known."""
    return None if value is None else int(value)
