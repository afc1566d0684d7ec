"""What survives a restart of the agent in the middle of a job: the same node, watched by new detectors from then on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from agent.clock import Instant
from agent.history import History
from agent.records import GpuKey, ProcessSample, Record
from classifier.detectors import Learner
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.stalled_collective import StalledCollectiveConfig, StalledCollectiveDetector
from tests.classifier.detector_histories import IDLES, WAITS, WALL_S, WORKS, Node, Shown, severities


@dataclass
class LookedAt(Node):
    """A node whose processes can be looked at: process p started at `started_s[p]`, else at second 0."""

    started_s: dict[int, float] | None = None
    is_visible: bool = True

    def _records(self, now: Instant) -> Iterator[Record]:
        shown = [self.script(gpu, self.now_s) for gpu in range(self.gpus)]
        yield from super()._records(now)
        if self.is_visible and self.now_s % 5.0 < self.interval_s:
            for pid in sorted({pid for one in shown if one is not None for pid in one.pids or ()}):
                started_s = (self.started_s or {}).get(pid, 0.0)
                yield ProcessSample(
                    monotonic_s=now.monotonic_s, wall_s=now.wall_s, pid=pid, started_monotonic_s=started_s
                )


def watched(script, *, gpus: int = 4, **options) -> LookedAt:
    baselines = PowerBaselines()
    detector = StalledCollectiveDetector(StalledCollectiveConfig(), baselines)
    return LookedAt((detector,), baselines, script, gpus=gpus, **options)


def learners(node: Node) -> list[Learner]:
    return [node.baselines, *node.detectors]


def restarted(node: LookedAt, down_s: float, *, saved_s: float | None = None, **options) -> LookedAt:
    """Return the node as a new agent sees it `down_s` after the old one saved and ended."""
    now = Instant(node.now_s, WALL_S + node.now_s)
    texts = [json.dumps(learner.learned(now), allow_nan=False) for learner in learners(node)]
    new = watched(node.script, gpus=node.gpus, started_s=options.pop("started_s", node.started_s), **options)
    new.now_s, new.history = node.now_s + down_s, History()
    then = Instant(new.now_s, WALL_S + new.now_s)
    for learner, text in zip(learners(new), texts, strict=True):
        learner.restore(json.loads(text), then)
    return new


def stalls_at(second: float):
    return lambda _, t: WORKS if t <= second else WAITS


def stalled_at(node: Node, until_s: float) -> float | None:
    """Play on and return when all GPUs were called stalled."""
    for now, assessments in node.play(until_s):
        if list(severities(assessments, "stalled_collective").values()) == [3] * node.gpus:
            return now.monotonic_s
    return None


def play(node: Node, until_s: float) -> Node:
    for _ in node.play(until_s):
        pass
    return node


def test_without_a_restart_the_stall_is_called_after_35_s() -> None:
    # The last sample of work is that of 400 s: waits begin at 401, 35 s later is 436, and judgements fall on fives.
    assert stalled_at(watched(stalls_at(400)), 500) == 440


def test_a_stall_during_which_the_agent_is_restarted_is_still_called() -> None:
    node = play(watched(stalls_at(400)), 410)
    # The agent was away from 410 to 414, and its first sample is that of 415: what was written before may have been a
    # checkpoint. That is activity within 10 s of the start of the wait (401)? No, 14 s: so quiet has to last 45 s.
    assert stalled_at(restarted(node, 4), 600) == pytest.approx(460, abs=5)


@pytest.mark.parametrize("restart_s", [398, 410], ids=["before_the_wait", "in_the_wait"])
def test_a_server_that_spins_is_none_after_a_restart_either(restart_s: float) -> None:
    def script(_: int, t: float) -> Shown:
        return replace(WORKS, utilization=random.Random(t).uniform(0.5, 1.0)) if t <= 400 else WAITS

    node = restarted(play(watched(script), restart_s), 4)
    assert stalled_at(node, 600) is None
    assert "bursts" in {a.evidence["reason"] for _, found in node.play(610) for a in found if a.severity == 2}


def test_a_stall_that_was_called_stays_called() -> None:
    node = play(watched(stalls_at(400)), 450)
    new = restarted(node, 30)
    played = [(now.monotonic_s, severities(found, "stalled_collective"), found) for now, found in new.play(520)]
    # The process list and what can be looked at come with the first tick of a fives: 485, judged then.
    first = next((t, seen, found) for t, seen, found in played if seen)
    assert first[0] == pytest.approx(485, abs=5)
    assert all(seen == dict.fromkeys(range(4), 3) for _, seen, _ in played if seen)
    (one, *_) = [a for a in first[2] if a.anomaly == "stalled_collective"]
    assert one.since_monotonic_s == pytest.approx(401, abs=1)  # not the restart


def test_a_stall_that_begins_while_the_agent_is_away_is_called() -> None:
    node = play(watched(stalls_at(405)), 400)
    # Away from 400 to 430: the wait counts from the first sample, at 431.
    assert stalled_at(restarted(node, 30), 600) == pytest.approx(470, abs=10)


def test_without_what_was_learned_it_would_never_be_called() -> None:
    node = play(watched(stalls_at(400)), 410)
    new = watched(node.script)
    new.now_s = 414
    assert stalled_at(new, 1300) is None


@pytest.mark.parametrize(
    ("options", "down_s"),
    [
        ({"started_s": {101: 405.0}}, 4),  # another process with the same id
        ({"is_visible": False}, 4),  # nobody knows when it started
        ({}, 1000),  # away too long
    ],
)
def test_what_may_be_other_work_is_dropped(options, down_s) -> None:
    node = play(watched(stalls_at(400)), 410)
    new = restarted(node, down_s, **options)
    assert stalled_at(new, new.now_s + 300) is None
    assert new.baselines.busy_watts(new.key(0)) is None
    assert all(not section.get("processes") for section in new.baselines.learned(Instant(9e3, 9e3))["gpus"].values())


def test_a_checkpoint_that_is_written_over_a_restart_is_no_stall() -> None:
    def script(_: int, t: float) -> Shown:
        return WAITS if 400 < t <= 480 else WORKS

    def host(t: float) -> tuple[float, float]:
        return (500e6 if 405 < t <= 440 else 1e6), 1e6

    node = play(watched(script, host=host), 436)
    # What is left of the writing is over before the first sample: the gap itself has to count.
    new = restarted(node, 6, host=host)
    assert [
        now.monotonic_s for now, found in new.play(480) if 3 in severities(found, "stalled_collective").values()
    ] == []


def test_the_power_of_an_idle_context_is_kept_for_weeks_and_for_other_processes() -> None:
    node = play(watched(lambda _, __: IDLES, gpus=1), 100)
    assert node.baselines.context_idle_watts(node.key(0)) == pytest.approx(120)
    new = restarted(node, 86400, started_s={101: 80_000.0})
    play(new, new.now_s + 6)
    assert new.baselines.context_idle_watts(new.key(0)) == pytest.approx(120)
    assert new.baselines.busy_watts(new.key(0)) is None


def test_a_gpu_that_has_not_shown_yet_keeps_what_was_learned() -> None:
    node = play(watched(lambda _, t: WORKS if t < 300 else IDLES, gpus=1), 400)
    states = [learner.learned(Instant(400, WALL_S + 400)) for learner in learners(node)]
    new = restarted(node, 2)
    again = [json.loads(json.dumps(learner.learned(Instant(403, WALL_S + 403)))) for learner in learners(new)]
    assert again == json.loads(json.dumps(states))


def test_busy_power_is_back_with_the_same_processes() -> None:
    node = play(watched(lambda _, __: WORKS, gpus=1), 200)
    new = play(restarted(node, 5), 216)
    assert new.baselines.busy_watts(new.key(0)) == pytest.approx(550)
    assert new.baselines.busy_memory_utilization_ratio(new.key(0)) == pytest.approx(0.4)


def test_a_gpu_without_a_uuid_has_no_name_that_lasts(monkeypatch) -> None:
    node = watched(lambda _, __: WORKS, gpus=1)
    monkeypatch.setattr(node, "key", nameless)
    play(node, 60)
    assert [learner.learned(Instant(60, WALL_S))["gpus"] for learner in learners(node)] == [{}, {}]


def nameless(gpu: int) -> GpuKey:
    return GpuKey(gpu, None)


def broken(state: object) -> Iterator[object]:
    """Yield `state` with each leaf replaced by what does not belong there, and with each key left out."""
    junk = ("x", [], {}, float("1e300"), True)
    if isinstance(state, dict):
        for key, value in state.items():
            yield {other: one for other, one in state.items() if other != key}
            for inner in broken(value):
                yield {**state, key: inner}
    elif isinstance(state, list) and state:
        for inner in broken(state[0]):
            yield [inner, *state[1:]]
    else:
        yield from junk


def test_a_broken_section_is_refused_whole_or_taken_and_never_half() -> None:
    node = play(watched(stalls_at(300), gpus=1), 330)
    now = Instant(330, WALL_S + 330)
    refused = taken = 0
    for learner, fresh in zip(learners(node), learners(watched(node.script, gpus=1)), strict=True):
        before = fresh.learned(now)
        for state in broken(json.loads(json.dumps(learner.learned(now)))):
            try:
                fresh.restore(state, now)
            except ValueError:
                refused += 1
                assert fresh.learned(now) == before
            else:
                taken += 1
                before = fresh.learned(now)
    assert refused > 100
    assert taken > 10  # a value that may be None, a key of its own


def test_the_size_is_bounded() -> None:
    node = play(watched(lambda _, t: WORKS if t % 40 < 30 else WAITS, gpus=16), 1000)
    sizes = [len(json.dumps(learner.learned(Instant(1000, WALL_S + 1000)))) for learner in learners(node)]
    assert sum(sizes) < 16 * 8000, sizes
