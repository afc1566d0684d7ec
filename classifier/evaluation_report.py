"""What an evaluation found: counts per source and label, the figures made of them, and the report as text and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from agent.vocabulary import WORKLOADS

_BUSY: Final = ("training", "inference")
_SHUFFLES: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScore:
    """Decisions on all recordings of one source and label."""

    source: str
    label: str
    repository: str
    recordings: int
    decisions: Mapping[str, int]  # by workload said
    reasons: Mapping[str, int]  # of the unknown ones
    forced: Mapping[str, int]  # the likelier of training and inference, wherever there were probabilities

    @property
    def total(self) -> int:
        """Number of decisions."""
        return sum(self.decisions.values())

    @property
    def decided(self) -> int:
        """Number of decisions other than unknown."""
        return self.total - self.decisions.get("unknown", 0)

    @property
    def right(self) -> int:
        """Number of decisions that say the source's label."""
        return self.decisions.get(self.label, 0)

    @property
    def coverage(self) -> float | None:
        """Share of decisions that are decided."""
        return _share(self.decided, self.total)

    @property
    def recall(self) -> float | None:
        """Share of right decisions over all; unknown counts as wrong."""
        return _share(self.right, self.total)

    @property
    def recall_decided(self) -> float | None:
        """Share of right decisions over the decided ones."""
        return _share(self.right, self.decided)

    @property
    def said_idle(self) -> float | None:
        """Share of decisions that say idle."""
        return _share(self.decisions.get("idle", 0), self.total)

    def forced_share(self, label: str) -> float | None:
        """Share of `label` where training or inference had to be said."""
        return _share(self.forced.get(label, 0), sum(self.forced.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Scores per source and label; micro figures count decisions, macro figures average sources with equal weight."""

    sources: tuple[SourceScore, ...]
    model: str | None

    def micro(self, label: str) -> SourceScore:
        """Return the sum over the sources of `label`."""
        chosen = [one for one in self.sources if one.label == label]
        return SourceScore(
            source="all",
            label=label,
            repository="",
            recordings=sum(one.recordings for one in chosen),
            decisions=_sum(one.decisions for one in chosen),
            reasons=_sum(one.reasons for one in chosen),
            forced=_sum(one.forced for one in chosen),
        )

    def macro(self, label: str, figure: Callable[[SourceScore], float | None]) -> float | None:
        """Return the mean of `figure` over the sources of `label` that have one."""
        values = [figure(one) for one in self.sources if one.label == label]
        return _mean([value for value in values if value is not None])

    @property
    def forced_by_source(self) -> float | None:
        """Mean over training and inference sources of the share right without abstention."""
        return _mean([value for one in self._busy if (value := one.forced_share(one.label)) is not None])

    @property
    def majority_baseline(self) -> float | None:
        """Share of the sources of `forced_by_source` that are right when their commoner label is always said."""
        counts = Counter(one.label for one in self._busy if one.forced_share(one.label) is not None)
        return max(counts.values()) / counts.total() if counts else None

    @property
    def shuffled_range(self) -> tuple[float, float] | None:
        """Range (2.5 to 97.5 %) of `forced_by_source` when the labels of the sources are shuffled."""
        pairs = [(one.forced_share("training"), one.label) for one in self._busy]
        known = [(share, label) for share, label in pairs if share is not None]
        if not known:
            return None
        said_training = np.array([share for share, _ in known])
        is_training = np.array([label == "training" for _, label in known])
        rng = np.random.default_rng(0)
        means = [
            float(np.where(rng.permutation(is_training), said_training, 1.0 - said_training).mean())
            for _ in range(_SHUFFLES)
        ]
        return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))

    @property
    def wrong_share(self) -> float | None:
        """Share of all decisions that are decided and name another class.

        Counts idle said of training or inference too, also where the GPU did wait: labels are of whole recordings.
        """
        total = sum(one.total for one in self.sources)
        return _share(sum(one.decided - one.right for one in self.sources), total)

    @property
    def confused_share(self) -> float | None:
        """Share of all decisions that name another class than the label's, and not idle: the worst kind of error."""
        total = sum(one.total for one in self.sources)
        wrong = sum(one.decided - one.right for one in self.sources)
        waiting = sum(one.decisions.get("idle", 0) for one in self.sources if one.label != "idle")
        return _share(wrong - waiting, total)

    @property
    def _busy(self) -> Sequence[SourceScore]:
        return [one for one in self.sources if one.label in _BUSY]

    @property
    def _labels(self) -> list[str]:
        return [label for label in WORKLOADS if any(one.label == label for one in self.sources)]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values for JSON, shares rounded to four digits."""
        shuffled = self.shuffled_range
        return {
            "model": self.model,
            "sources": [{"source": one.source, "repository": one.repository, **_figures(one)} for one in self.sources],
            "micro": {label: _figures(self.micro(label)) for label in self._labels},
            "macro": {
                label: {name: _rounded(self.macro(label, figure)) for name, figure in _MACRO.items()}
                for label in self._labels
            },
            "wrong_share": _rounded(self.wrong_share),
            "confused_share": _rounded(self.confused_share),
            "forced_by_source": _rounded(self.forced_by_source),
            "majority_baseline": _rounded(self.majority_baseline),
            "shuffled_range": None if shuffled is None else [round(value, 4) for value in shuffled],
        }

    def format(self) -> str:
        """Return the report as text: a table per source and label, then the figures over sources."""
        heading = ("files", "decisions", *WORKLOADS, "coverage", "recall", "of decided", "forced")
        lines = [f"{'label':<10} {'source':<18}" + "".join(f"{word:>11}" for word in heading)]
        lines += [_line(one) for one in self.sources]
        lines.append("")
        lines += [_line(self.micro(label)) for label in self._labels]
        lines.append("")
        for label in self._labels:
            figures = ", ".join(f"{name} {_show(self.macro(label, figure))}" for name, figure in _MACRO.items())
            lines.append(f"mean over {label} sources: {figures}")
        lines += ["", *self._conclusions()]
        return "\n".join(lines) + "\n"

    def _conclusions(self) -> list[str]:
        busy_idle = _mean([value for one in self._busy if (value := one.said_idle) is not None])
        low, high = self.shuffled_range or (None, None)
        idle = self.macro("idle", lambda one: one.said_idle)
        forced, baseline = _show(self.forced_by_source), _show(self.majority_baseline)
        return [
            f"decided and wrong, share of all decisions: {_show(self.wrong_share)}",
            f"  of these without idle said of a GPU that waits: {_show(self.confused_share)}",
            f"said idle, mean over sources: of idle {_show(idle)}, of training and inference {_show(busy_idle)}",
            f"training or inference without abstention, mean over sources: {forced}",
            f"  for comparison: always the commoner {baseline}, labels shuffled {_show(low)} to {_show(high)}",
        ]


_MACRO: Final[Mapping[str, Callable[[SourceScore], float | None]]] = {
    "coverage": lambda one: one.coverage,
    "recall": lambda one: one.recall,
    "recall of decided": lambda one: one.recall_decided,
    "said idle": lambda one: one.said_idle,
    "forced": lambda one: one.forced_share(one.label),
}


def _figures(one: SourceScore) -> dict[str, Any]:
    return {
        "label": one.label,
        "recordings": one.recordings,
        "decisions": {word: one.decisions.get(word, 0) for word in WORKLOADS},
        "reasons": dict(sorted(one.reasons.items())),
        "coverage": _rounded(one.coverage),
        "recall": _rounded(one.recall),
        "recall_decided": _rounded(one.recall_decided),
        "forced": _rounded(one.forced_share(one.label)),
    }


def _line(one: SourceScore) -> str:
    forced = one.forced_share(one.label) if one.label in _BUSY else None
    counts = (one.recordings, one.total, *(one.decisions.get(word, 0) for word in WORKLOADS))
    shares = (one.coverage, one.recall, one.recall_decided, forced)
    cells = [*map(str, counts), *map(_show, shares)]
    return f"{one.label:<10} {one.source:<18}" + "".join(f"{cell:>11}" for cell in cells)


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
