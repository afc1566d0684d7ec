"""The three variants of low_utilization, and what of them survives a restart of the agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from agent.clock import Instant
from agent.history import History
from agent.records import GpuKey, GpuOwners, Holder, ProcessSample, Record
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.low_utilization import LowUtilizationConfig, LowUtilizationDetector
from classifier.results import Assessment, Decision
from tests.classifier.detector_histories import IDLES, WALL_S, WORKS, Node, Script, Shown

FAST = LowUtilizationConfig(
    info_seconds=120,
    warning_seconds=480,
    memory_info_seconds=300,
    memory_warning_seconds=600,
    empty_info_seconds=60,
    empty_warning_seconds=240,
)
#: A GPU that nobody is on.
BARE = replace(IDLES, pids=(), used_bytes=3_000_000, watts=60)
#: Memory that no process of the list holds.
LEFT = replace(IDLES, pids=())


def job(name: str = "slurm-7", processes: int | None = 0) -> Holder:
    return Holder(job_key=name, scheduler="slurm", processes=processes)


@dataclass
class Owned(Node):
    """One GPU, whose holders are known where `holders` says so, and whose processes began at `started_s`."""

    holders: Callable[[float], tuple[Holder, ...] | None] = lambda _: None
    started_s: float = 0.0

    def _slow_host_records(self, at, counted) -> Iterator[Record]:
        yield from super()._slow_host_records(at, counted)
        holders = self.holders(self.now_s)
        if holders is not None:
            yield GpuOwners(**at, key=self.key(0), holders=holders)
        shown = self.script(0, self.now_s)
        for pid in (shown.pids if shown is not None else None) or ():
            yield ProcessSample(**at, pid=pid, started_monotonic_s=self.started_s)


def node(script: Script, config: LowUtilizationConfig = FAST, **options) -> Owned:
    baselines = PowerBaselines()
    return Owned((LowUtilizationDetector(config, baselines),), baselines, script, gpus=1, **options)


def shows(shown: Shown) -> Script:
    return lambda _, __: shown


def found(player: Node, until_s: float) -> dict[float, Assessment | None]:
    return {now.monotonic_s: next(iter(said), None) for now, said in player.play(until_s)}


def first(said: dict[float, Assessment | None], severity: int) -> tuple[float, str] | None:
    """Return when this severity was first reached, and in which variant."""
    hits = ((t, a.evidence["variant"]) for t, a in said.items() if a is not None and a.severity >= severity)
    return next(hits, None)


def test_an_allocated_gpu_without_a_process_is_allocated_but_empty() -> None:
    said = found(node(shows(BARE), holders=lambda _: (job(),)), 400)
    # The owners come with the tick of second 5; the first call there counts one sample of what it saw: 60 s at 65.
    assert first(said, 1) == (65, "allocated_empty")
    assert first(said, 2) == (245, "allocated_empty")
    last = said[400]
    assert last.action == "contact_user"
    assert last.evidence["processes"] == 0
    assert last.summary == (
        "GPU 0 has been allocated but empty for 7 min: slurm-7 has it, no process is on it and draws 60 W."
    )


@pytest.mark.parametrize(
    ("shown", "holders"),
    [
        (BARE, lambda _: ()),  # nobody has it
        (BARE, lambda _: None),  # who has it cannot be seen
        (BARE, lambda _: (job(), job("slurm-8", processes=1))),  # somebody is there
        (BARE, lambda _: (job(processes=None),)),  # whether somebody is there cannot be seen
        (replace(BARE, pids=None), lambda _: (job(),)),  # nor can the processes
        (WORKS, lambda _: (job(processes=1),)),
        (BARE, lambda t: (job(f"slurm-{t // 50}"),)),  # jobs of 50 s
    ],
)
def test_it_is_not_empty_where_somebody_is_on_it_or_that_cannot_be_seen(shown, holders) -> None:
    assert first(found(node(shows(shown), holders=holders), 400), 1) is None


def test_owners_that_are_not_heard_of_any_more_hold_nothing() -> None:
    said = found(node(shows(BARE), holders=lambda t: (job(),) if t <= 40 else None), 200)
    assert first(said, 1) is None  # heard last at 40, and for 15 s more: 55 s


def test_a_process_ends_it() -> None:
    said = found(node(lambda _, t: BARE if t <= 100 else WORKS, holders=lambda t: (job(processes=int(t > 100)),)), 130)
    assert (said[100].severity, said[105].severity) == (1, 0)


def test_it_needs_neither_utilization_nor_power() -> None:
    bare = replace(BARE, utilization=None, sm=None, watts=None)
    assert first(found(node(shows(bare), holders=lambda _: (job(),)), 400), 1) == (65, "allocated_empty")


def test_memory_without_one_sample_of_work_for_long_is_memory_held_and_says_more() -> None:
    said = found(node(shows(IDLES)), 700)
    assert first(said, 1) == (125, "held_idle")
    assert said[300].evidence["variant"] == "held_idle"
    assert said[700].evidence["variant"] == "memory_held"  # both are warnings, and this one says more
    assert said[700].action == "contact_user"
    assert (
        said[700].summary == "GPU 0 has done nothing for 0.2 h and draws 120 W, while 40.0 GB of its memory are held."
    )


def test_memory_that_no_process_holds_is_looked_into() -> None:
    said = found(node(shows(LEFT)), 700)
    assert first(said, 1) == (305, "memory_held")
    assert first(said, 2) == (605, "memory_held")
    assert said[700].action == "look"
    assert said[700].summary.endswith("40.0 GB of its memory are held by no process that the driver lists.")


def test_power_above_that_of_an_idle_context_does_not_hide_it() -> None:
    """Some boards stay at high clocks, and draw far more than an idle context, while a context is open."""
    # What is learned lies between the two, and the limit 5 % of the range above it: every other 20 s count as work.
    said = found(node(lambda _, t: IDLES if t % 40 < 20 else replace(IDLES, watts=200)), 400)
    assert first(said, 1) == (305, "memory_held")


def test_a_little_work_is_held_idle_and_never_memory_held() -> None:
    said = found(node(lambda _, t: WORKS if t % 50 < 2 else IDLES), 700)  # 4 % of samples
    assert first(said, 1)[1] == "held_idle"
    assert {a.evidence["variant"] for a in said.values() if a.severity} == {"held_idle"}


def serving(t: float) -> dict[GpuKey, Decision]:
    key = GpuKey(0, "GPU-00000000")
    return {
        key: Decision(
            key=key, monotonic_s=t, wall_s=t, workload="inference" if t <= 60 else "idle", probabilities=None,
            telemetry_probabilities=None, window_s=60, reason=None, since_monotonic_s=0, since_wall_s=0,
        )
    }  # fmt: skip


def test_a_server_at_night_holds_its_memory_in_peace() -> None:
    assert first(found(node(shows(IDLES), decisions=serving), 1500), 1) is None


def restarted(old: Owned, down_s: float, **options) -> Owned:
    now = Instant(old.now_s, WALL_S + old.now_s)
    state = json.loads(json.dumps(old.detectors[0].learned(now), allow_nan=False))
    new = node(old.script, holders=options.pop("holders", old.holders), **options)
    new.now_s, new.history = old.now_s + down_s, History()
    new.detectors[0].restore(state, Instant(new.now_s, WALL_S + new.now_s))
    return new


def test_a_restart_pauses_the_count_of_idle_time() -> None:
    old = node(shows(IDLES))
    found(old, 100)
    said = found(restarted(old, 30), 300)
    # 96 s were observed by 100. From 131 on, each second: 120 s observed at 155. The same process shows by 135.
    assert first(said, 1) == (155, "held_idle")
    assert said[155].since_monotonic_s == pytest.approx(4)  # before the restart


def test_a_finding_is_not_ended_by_a_restart() -> None:
    old = node(shows(IDLES))
    found(old, 200)
    said = found(restarted(old, 30, judge_s=2), 300)
    seen = {t: a.severity for t, a in said.items() if a is not None}
    # Asked at 232 and 234, the process shows at 235: until then nobody knows, and at no time is it 0.
    assert min(seen) == 236
    assert set(seen.values()) == {1}


def test_another_process_begins_anew() -> None:
    old = node(shows(IDLES))
    found(old, 100)
    said = found(restarted(old, 30, started_s=115.0), 300)
    assert first(said, 1) == (255, "held_idle")  # the first call at 135 counts all five samples but the first


def test_that_it_served_is_remembered_over_a_restart() -> None:
    old = node(shows(IDLES), decisions=serving)
    found(old, 200)
    assert first(found(restarted(old, 5), 700), 1) is None


@pytest.mark.parametrize(
    ("holders", "expected"),
    [(lambda _: (job(),), 85), (lambda _: (job("slurm-8"),), 125)],
    ids=["the same job", "another job"],
)
def test_an_empty_allocation_is_counted_on_for_the_same_job(holders, expected) -> None:
    old = node(shows(BARE), holders=lambda _: (job(),))
    found(old, 50)
    said = found(restarted(old, 10, holders=holders), 200)
    assert first(said, 1) == (pytest.approx(expected, abs=5), "allocated_empty")


def broken(state: object) -> Iterator[object]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield {other: one for other, one in state.items() if other != key}
            yield from ({**state, key: inner} for inner in broken(value))
    else:
        yield from ("x", [], {}, 1e300)


@pytest.mark.parametrize("shown", [IDLES, BARE])
def test_a_broken_section_is_refused_whole(shown) -> None:
    old = node(shows(shown), holders=lambda _: (job(),))
    found(old, 100)
    now = Instant(100, WALL_S + 100)
    fresh = node(shows(shown)).detectors[0]
    refused = 0
    for state in broken(json.loads(json.dumps(old.detectors[0].learned(now)))):
        before = fresh.learned(now)
        try:
            fresh.restore(state, now)
        except ValueError:
            refused += 1
            assert fresh.learned(now) == before
    assert refused > 15
