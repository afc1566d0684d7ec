"""The file of what was learned: written whole, read with suspicion, missed by nobody."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from agent.clock import Instant, ManualClock
from agent.learned_state import SAVE_PERIOD_S, LearnedState

BOOT = "11111111-2222-3333-4444-555555555555"
START = Instant(1000.0, 1.8e9)


class Counts:
    """A learner of one number, which lies at a time."""

    def __init__(self, name: str = "counts", value: float = 0.0) -> None:
        self.learner = name
        self.value = value
        self.taken: tuple[object, float] | None = None  # value, and how long ago it was

    def learned(self, now: Instant):
        return {"value": self.value, "wall_s": now.wall_s}

    def restore(self, state, now: Instant):
        self.taken = float(state["value"]), now.wall_s - state["wall_s"]


@pytest.fixture
def roots(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    boot = tmp_path / "proc/sys/kernel/random"
    boot.mkdir(parents=True)
    (boot / "boot_id").write_text(BOOT + "\n")
    return tmp_path


def agent(roots: Path, *learners: Counts, now: Instant = START) -> tuple[LearnedState, ManualClock]:
    clock = ManualClock(now.monotonic_s, now.wall_s)
    state = LearnedState(roots / "state", learners, clock, threading.Lock(), proc_root=roots / "proc")
    return state, clock


def stop(state: LearnedState) -> None:
    with state.kept_beside():
        pass


def save(roots: Path, *learners: Counts, now: Instant = START) -> Path:
    stop(agent(roots, *learners, now=now)[0])
    return roots / "state/learned.json"


def restored(roots: Path, *learners: Counts, now: Instant) -> LearnedState:
    state, _ = agent(roots, *learners, now=now)
    state.restore()
    return state


def test_what_was_learned_is_there_after_a_restart(roots):
    path = save(roots, Counts(value=7.5), Counts("other", 2.0))
    assert path.stat().st_mode & 0o777 == 0o600
    counts, other = Counts(), Counts("other")
    state = restored(roots, counts, other, now=START.later(30))
    assert (counts.taken, other.taken) == ((7.5, 30.0), (2.0, 30.0))
    assert (state.statuses(), list(path.parent.iterdir())) == ((), [path])


def test_a_clock_that_was_set_meanwhile_changes_nothing(roots):
    save(roots, Counts(value=7.5))
    counts = Counts()
    restored(roots, counts, now=Instant(START.monotonic_s + 30, START.wall_s - 7200))
    assert counts.taken == (7.5, 30.0)


def test_after_a_boot_the_wall_clock_counts(roots):
    save(roots, Counts(value=7.5))
    (roots / "proc/sys/kernel/random/boot_id").write_text("other\n")
    counts = Counts()
    restored(roots, counts, now=Instant(20.0, START.wall_s + 300))
    assert counts.taken == (7.5, 300.0)


def test_it_is_written_once_a_minute_and_only_when_something_changed(roots):
    class Still(Counts):
        def learned(self, now):
            return {"value": self.value, "wall_s": 0.0}

    counts = Still(value=1.0)
    state, clock = agent(roots, counts)
    path = roots / "state/learned.json"
    state.keep()  # at the start nothing is known
    assert not path.exists()
    clock.advance(SAVE_PERIOD_S)
    state.keep()
    first = path.stat().st_ino
    clock.advance(1.0)
    counts.value = 2.0
    state.keep()  # too soon
    assert json.loads(path.read_text())["learners"]["counts"]["value"] == 1.0
    clock.advance(SAVE_PERIOD_S)
    state.keep()
    assert json.loads(path.read_text())["learners"]["counts"]["value"] == 2.0
    second = path.stat().st_ino, path.stat().st_mtime_ns
    assert second[0] != first  # another file took its place
    clock.advance(SAVE_PERIOD_S)
    state.keep()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == second


def changed(**saved):
    def change(text: str) -> str:
        state = json.loads(text)
        state["saved"].update(saved)
        return json.dumps(state)

    return change


BROKEN = {
    "nothing": (lambda _: "", "corrupt"),
    "half": (lambda text: text[: len(text) // 2], "corrupt"),
    "no JSON": (lambda text: text.replace("7.5", "NaN"), "corrupt"),
    "nested": (lambda _: "[" * 100_000, "corrupt"),
    "digits": (lambda _: "9" * 100_000, "corrupt"),
    "bytes": (lambda _: "\udcff\udcfe", "corrupt"),
    "list": (lambda _: "[]", "corrupt"),
    "foreign": (lambda _: '{"schema": 1}', "corrupt"),
    "sections": (lambda text: text.replace('"learners":{', '"learners":[],"x":{'), "corrupt"),
    "time": (changed(wall_s="x"), "corrupt"),
    "infinite": (changed(monotonic_s=1e300), "corrupt"),
    "version": (lambda text: text.replace('"schema": 1', '"schema": 2'), "other_version"),
    "future": (changed(monotonic_s=START.monotonic_s + 100), "future"),
    "future boot": (changed(wall_s=START.wall_s + 90_000, boot_id="x"), "future"),
    "large": (lambda text: text + " " * (5 << 20), "too_large"),
}


@pytest.mark.parametrize(("change", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_cannot_be_used_is_set_aside_and_said_once(roots, caplog, change, reason):
    path = save(roots, Counts(value=7.5))
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    content = path.read_bytes()
    counts = Counts(value=3.5)
    state = restored(roots, counts, now=START.later(30))
    assert counts.taken is None
    (aside,) = path.parent.iterdir()
    assert aside.name == "learned.json.corrupt-20270115T080030Z"  # 1.8e9 s + 30 s
    assert aside.read_bytes() == content
    assert state.errors == {reason: 1}
    (message,) = caplog.messages
    assert message.startswith(f"what was learned before is lost: {path} ")
    assert message.endswith("it is set aside as learned.json.corrupt-20270115T080030Z")
    # And the agent goes on: what it knows now takes the place.
    stop(state)
    assert json.loads(path.read_text())["learners"]["counts"]["value"] == 3.5
    (status,) = state.statuses()
    assert (status.name, status.success, status.errors) == ("learned_state", True, {reason: 1})
    assert status.last_success_wall_s is None  # nothing of the node's readiness depends on it


def test_only_a_few_are_kept(roots):
    path = roots / "state/learned.json"
    for second in range(6):
        path.write_text("x")
        restored(roots, Counts(), now=START.later(second))
    assert sorted(file.name[-7:] for file in path.parent.iterdir()) == ["080003Z", "080004Z", "080005Z"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_followed_and_does_not_block(roots, kind):
    path, target = roots / "state/learned.json", roots / "target"
    target.write_text("untouched")
    {"link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    counts = Counts()
    state = restored(roots, counts, now=START)
    assert sum(state.errors.values()) == 1
    stop(state)
    assert json.loads(path.read_text())["learners"]["counts"]["value"] == 0.0
    assert target.read_text() == "untouched"


def test_a_bad_section_costs_its_learner_alone(roots, caplog):
    path = save(roots, Counts(value=7.5), Counts("other", 2.0))
    state = json.loads(path.read_text())
    for broken in ({"value": "x"}, [], None, 3, "text"):
        caplog.clear()
        state["learners"]["counts"] = broken
        path.write_text(json.dumps(state))
        counts, other = Counts(), Counts("other")
        found = restored(roots, counts, other, now=START)
        assert (counts.taken, other.taken) == (None, (2.0, 0.0))
        assert found.errors == ({} if broken is None else {"bad_section": 1})
        assert len(caplog.messages) == (broken is not None)
        assert path.exists()


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, "x" * (2 << 20)])
def test_what_is_no_json_or_too_large_costs_its_learner_alone_and_is_said_once(roots, caplog, value):
    counts, other = Counts(value=value), Counts("other", 2.0)
    state, clock = agent(roots, counts, other)
    for _ in range(3):
        clock.advance(SAVE_PERIOD_S)
        state.keep()
    assert json.loads((roots / "state/learned.json").read_text())["learners"].keys() == {"other"}
    assert len(caplog.messages) == 1


def test_without_a_directory_the_agent_runs_on_and_says_so_once(roots, caplog):
    (roots / "state").rmdir()
    state, clock = agent(roots, Counts())
    state.restore()
    for _ in range(3):
        clock.advance(SAVE_PERIOD_S)
        state.keep()
    why = f"the state directory {roots}/state does not exist ([agent] state_directory)"
    assert caplog.messages == [f"what is learned will not survive a restart: {why}"]
    (status,) = state.statuses()
    assert (status.success, status.errors) == (False, {"no_directory": 1})
    (roots / "state").mkdir()
    clock.advance(SAVE_PERIOD_S)
    state.keep()
    assert (roots / "state/learned.json").exists()
    assert state.statuses()[0].success


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_ours_is_said_as_well(roots):
    (roots / "state").chmod(0o500)
    state, _ = agent(roots, Counts())
    state.restore()
    stop(state)
    assert state.errors == {"unwritable": 1}


def test_a_disk_that_is_full_keeps_the_old_file(roots, monkeypatch):
    path = save(roots, Counts(value=7.5))
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    state, _ = agent(roots, Counts(value=9.0))
    stop(state)
    assert (path.read_bytes(), state.errors) == (before, {"unwritable": 1})


def test_the_end_does_not_wait_for_a_lock_or_a_disk_that_hangs(roots):
    lock = threading.Lock()
    state = LearnedState(roots / "state", (Counts(),), ManualClock(1.0, 1.0), lock, proc_root=roots / "proc")
    with lock, state.kept_beside():
        pass
    assert not (roots / "state/learned.json").exists()


def test_without_learners_no_file_is_touched(roots):
    state, clock = agent(roots)
    (roots / "state/learned.json").write_text("x")
    state.restore()
    clock.advance(SAVE_PERIOD_S)
    state.keep()
    stop(state)
    assert (roots / "state/learned.json").read_text() == "x"
