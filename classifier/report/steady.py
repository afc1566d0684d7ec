"""The steady phases of recordings with profiling columns, through the labeller: one verdict each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.clock import Instant
from agent.history import History
from agent.records import Tick
from classifier.evaluation import Recording
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.model import Model
from classifier.report.playback import STEP_S
from classifier.report.recorded import Log, Opened, give_limit, nominal_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Decisions within the steady phase of one recording, as recorded and with the board's power limit known."""

    recording: Recording
    as_recorded: Mapping[str, int]  # decisions by word
    with_limit: Mapping[str, int]

    @staticmethod
    def verdict(decisions: Mapping[str, int]) -> str:
        """Return the commonest word; `unknown` where there is no decision."""
        return max(sorted(decisions), key=decisions.__getitem__) if decisions else "unknown"


def steady_phases(model: Model, logs: Sequence[Log], opened: Opened) -> list[Steady]:
    """Return the decisions of `model` in the kept phases of `logs`, one for each GPU every 5 s."""
    found = []
    for log in logs:
        recording = log.recording
        by_limit = []
        for watts in (None, nominal_limit(recording)):
            interval_s, ticks = opened(recording.path)
            by_limit.append(_decisions(model, recording, interval_s, ticks, watts))
        found.append(Steady(recording=recording, as_recorded=by_limit[0], with_limit=by_limit[1]))
    return found


def _decisions(
    model: Model, recording: Recording, interval_s: float, ticks: Iterable[Tick], watts: float | None
) -> dict[str, int]:
    history = History(sample_interval_s=interval_s)
    labeller = Labeller(model, LabellerConfig())
    counts: Counter[str] = Counter()
    first_s: float | None = None
    due_s = 0.0
    for tick in ticks:
        if first_s is None:
            first_s = due_s = tick.monotonic_s
        history.ingest(tick)
        give_limit(history, watts)
        while due_s <= tick.monotonic_s:
            for decision in labeller.decide(Instant(due_s, due_s), history):
                if recording.keeps(due_s - first_s):
                    counts[decision.workload] += 1
            due_s += STEP_S
    return dict(counts)
