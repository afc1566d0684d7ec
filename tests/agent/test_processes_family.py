"""Descendants of the processes on the GPUs: how they are found, and sums over them that never fall."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clock import Instant
from agent.samplers import process_tree
from agent.samplers.process_files import ProcessFiles
from agent.samplers.process_totals import SteadyTotal
from agent.samplers.process_tree import ProcessTree
from agent.samplers.processes import ProcessesSampler
from tests.agent.process_trees import Processes, gpu_with
from tests.agent.test_processes import Opened, one_of, sampler_on

NOW = Instant(100.0, 1_700_000_000.0)


class Ticks:
    """Samples every 5 s; `gpus` may be changed in between."""

    def __init__(self, root, *gpus):
        self.gpus = list(gpus)
        self.sampler = ProcessesSampler(root, lambda: self.gpus)
        self.now = NOW

    def next(self, seconds=5.0):
        self.now = self.now.later(seconds)
        return {record.pid: record for record in self.sampler.sample(self.now)}


# The counter itself.


def test_a_low_reading_is_held_once_and_then_gone_on_from():
    total = SteadyTotal()
    # 30 is a race (the sum is whole again after it); 70 is a loss of 50, and what comes after it counts on.
    assert [total.update(value) for value in (100, 30, 110, 120, 70, 75, 80, 90)] == [
        100, 100, 110, 120, 120, 120, 125, 135,
    ]  # fmt: skip


@given(st.lists(st.integers(0, 10**12)))
def test_the_counter_never_falls_and_never_grows_by_more_than_the_sum_did(values):
    total = SteadyTotal()
    before = before_value = None
    for value in values:
        now = total.update(value)
        if before is not None:
            assert now >= before
            assert now - before <= max(0, value - before_value)
        before, before_value = now, value


# Who counts.


def test_children_of_children_count_and_neither_siblings_nor_parents(tmp_path):
    tree = Processes(tmp_path)
    tree.add(5, own=1_000_000)
    tree.add(10, parent=5, own=100, waited=10)
    tree.add(11, parent=5, own=1_000_000)
    tree.add(12, parent=10, own=200, waited=1)
    tree.add(13, parent=12, own=3000, state="D")
    record = one_of(sampler_on(tmp_path, gpu_with(10)))
    assert (record.cpu_seconds_total, record.descendants, record.blocked) == (1.0, 2, 1)
    assert record.descendants_cpu_seconds_total == 32.11  # 10 + 201 + 3000 ticks


@pytest.mark.parametrize("lists", [True, False])
def test_a_child_that_is_waited_for_moves_to_its_parent_and_the_sum_stands(tmp_path, lists):
    tree = Processes(tmp_path, lists=lists)
    tree.add(10, waited=10, read=5, written=50)
    tree.add(11, parent=10, own=500, waited=20, read=1000, written=2000)
    ticks = Ticks(tmp_path, gpu_with(10))
    first = ticks.next()[10]
    assert (first.descendants_cpu_seconds_total, first.read_bytes_total, first.written_bytes_total) == (5.3, 1005, 2050)
    tree.end(11)
    tree.set(10, waited=530)
    tree.set_io(10, 1005, 2050)
    second = ticks.next()[10]
    assert (second.descendants_cpu_seconds_total, second.read_bytes_total, second.written_bytes_total) == (
        5.3, 1005, 2050,
    )  # fmt: skip
    assert second.descendants == 0


def test_a_child_that_nobody_waits_for_does_not_make_the_sums_fall(tmp_path):
    tree = Processes(tmp_path)
    tree.add(10, waited=0, read=0, written=0)
    tree.add(11, parent=10, own=500, read=1000, written=0)
    ticks = Ticks(tmp_path, gpu_with(10))
    ticks.next()
    tree.end(11)
    lost = [ticks.next()[10], ticks.next()[10]]
    tree.set(10, waited=30)
    tree.set_io(10, 7, 0)
    after = ticks.next()[10]
    assert [record.descendants_cpu_seconds_total for record in (*lost, after)] == [5.0, 5.0, 5.3]
    assert [record.read_bytes_total for record in (*lost, after)] == [1000, 1000, 1007]


def test_a_descendant_on_a_gpu_counts_for_itself_only_and_not_again_when_it_ends(tmp_path):
    """mp.spawn from a process that used a GPU itself: 10 on GPU 0, its children 11 on GPU 0 and 12 on GPU 1."""
    tree = Processes(tmp_path)
    tree.add(10, own=100, waited=7, read=1, written=0)
    tree.add(11, parent=10, own=50_000, waited=1, read=100, written=0)
    tree.add(12, parent=10, own=90_000, read=200, written=0)
    tree.add(13, parent=12, own=400, read=1000, written=0)
    tree.add(14, parent=10, own=3, read=10, written=0)
    ticks = Ticks(tmp_path, gpu_with(10, 11), gpu_with(12, index=1))
    found = ticks.next()
    assert {pid: found[pid].descendants_cpu_seconds_total for pid in found} == {10: 0.1, 11: 0.01, 12: 4.0}
    assert {pid: found[pid].descendants for pid in found} == {10: 1, 11: 0, 12: 1}
    assert {pid: found[pid].read_bytes_total for pid in found} == {10: 11, 11: 100, 12: 1200}
    # 11 ends after 20 more ticks and 5 more bytes, and 10 waits for it: only these are new to 10.
    tree.end(11)
    tree.set(10, waited=7 + 50_001 + 20)
    tree.set_io(10, 1 + 105, 0)
    record = ticks.next()[10]
    assert record.descendants_cpu_seconds_total == pytest.approx(0.3)
    assert record.read_bytes_total == 16


def test_a_process_that_the_driver_forgets_for_a_moment_counts_on(tmp_path):
    """After a loss the sum stands on a base of its own, which must be there when the driver lists it again."""
    tree = Processes(tmp_path)
    tree.add(10)
    tree.add(11, parent=10, own=500)
    ticks = Ticks(tmp_path, gpu_with(10))
    ticks.next()
    tree.end(11)
    ticks.next()
    ticks.next()
    ticks.gpus[:] = [gpu_with()]
    for _ in range(5):
        assert ticks.next() == {}
    ticks.gpus[:] = [gpu_with(10, listed_s=200.0)]
    assert ticks.next()[10].descendants_cpu_seconds_total == 5.0


def test_without_io_files_there_are_no_bytes(tmp_path):
    tree = Processes(tmp_path)
    tree.add(10)
    tree.add(11, parent=10)
    record = one_of(sampler_on(tmp_path, gpu_with(10)))
    assert (record.read_bytes_total, record.written_bytes_total) == (None, None)


# How they are found.


def test_children_of_other_threads_are_looked_for_every_30_seconds_and_followed_in_between(tmp_path):
    tree = Processes(tmp_path)
    tree.add(10, threads=3)
    tree.add(11, parent=10, own=100)
    for thread in (20, 21):
        (tmp_path / "10" / "task" / str(thread)).mkdir()
        (tmp_path / "10" / "task" / str(thread) / "children").write_text("")
    ticks = Ticks(tmp_path, gpu_with(10))
    assert ticks.next()[10].descendants == 1
    tree.add(12, parent=10)
    (tmp_path / "10" / "task" / "21" / "children").write_text("12 ")
    (tmp_path / "10" / "task" / "10" / "children").write_text("11 ")
    assert [ticks.next()[10].descendants for _ in range(8)] == [1, 1, 1, 1, 1, 2, 2, 2]
    tree.set(12, parent=1)  # the id is another process now
    (tmp_path / "10" / "task" / "10" / "children").write_text("11 ")
    assert ticks.next()[10].descendants == 1


def test_lists_of_threads_are_read_up_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(process_tree, "_THREADS_MAX", 10)
    tree = Processes(tmp_path)
    for pid in (10, 11):
        tree.add(pid, threads=9)
        for thread in range(100, 108):
            (tmp_path / str(pid) / "task" / str(thread)).mkdir()
            (tmp_path / str(pid) / "task" / str(thread) / "children").write_text("")
    ticks = Ticks(tmp_path, gpu_with(10, 11))
    counts = []
    for _ in range(3):
        with Opened() as opened:
            ticks.next()
        counts.append(
            sum("children" in name and not name.endswith(("10/children", "11/children")) for name in opened.names)
        )
    assert counts == [10, 0, 0]


def test_a_scan_takes_a_bounded_part_of_a_tick_and_runs_every_30_seconds(tmp_path, monkeypatch):
    """Without lists of children: 25 processes, 10 a tick, so that the third tick ends the scan."""
    monkeypatch.setattr(process_tree, "_SCANNED_MAX", 10)
    tree = Processes(tmp_path, lists=False)
    tree.add(10)
    tree.add(11, parent=10, own=100)
    for pid in range(1000, 1022):
        tree.add(pid)
    ticks = Ticks(tmp_path, gpu_with(10))
    reads, found = [], []
    for step in range(12):
        with Opened() as opened:
            found.append(ticks.next()[10].descendants)
        reads.append(len({name for name in opened.names if name.endswith("/stat")}))
        if step == 3:
            tree.add(12, parent=10)
    assert found[:9] == [
        0,
        0,
        1,
        1,
        1,
        1,
        1,
        1,
        2,
    ]  # the second scan begins 30 s after the first, and takes three ticks
    assert found[9:] == [2, 2, 2]
    assert max(reads) <= 10 + 3


class EndingFiles(ProcessFiles):
    """The files of a host where process 10 ends just before its children are read."""

    def __init__(self, tree):
        super().__init__(tree.root)
        self._tree = tree

    def children(self, pid, thread):
        if pid == 10:
            self._tree.end(10)
        return super().children(pid, thread)


def test_a_process_that_ends_does_not_make_the_kernel_look_old(tmp_path):
    """Its list of children is missing because it ended; the next process has one."""
    hosts = Processes(tmp_path)
    hosts.add(10)
    hosts.add(12)
    hosts.add(13, parent=12)
    files = EndingFiles(hosts)
    tree = ProcessTree(files, Counter())
    tree.begin(100.0)
    first, second = files.stat(10), files.stat(12)
    assert tree.descendants(first, ()) == ([], [], True)
    with Opened() as opened:
        assert [child.pid for child in tree.descendants(second, ())[0]] == [13]
    # No scan: of the processes only 13 is looked at.
    assert {name for name in opened.names if name.endswith("/stat")} == {f"{tmp_path}/13/stat"}


def test_a_ring_of_parents_ends(tmp_path):
    """Ids given again while they are read may make a ring."""
    tree = Processes(tmp_path)
    tree.add(10, parent=12)
    tree.add(11, parent=10)
    tree.add(12, parent=11)
    assert one_of(sampler_on(tmp_path, gpu_with(10))).descendants == 2


# Bounds.


def test_too_many_descendants_are_cut_and_counted_and_have_no_sum(tmp_path, monkeypatch):
    monkeypatch.setattr(process_tree, "_DESCENDANTS_MAX", 20)
    tree = Processes(tmp_path, lists=False)
    tree.add(10, read=1, written=1)
    for pid in range(1000, 1030):
        tree.add(pid, parent=10, own=100, read=5, written=5)
    tree.add(11)
    sampler = sampler_on(tmp_path, gpu_with(10, 11))
    cut, other = sampler.sample(NOW)
    assert cut.descendants == 20
    assert (cut.descendants_cpu_seconds_total, cut.read_bytes_total, cut.written_bytes_total) == (None, None, None)
    assert cut.cpu_seconds_total == 0.0
    assert other.descendants_cpu_seconds_total == 0.0
    assert dict(sampler.errors) == {"too_many": 1}


def test_processes_beyond_the_bound_are_counted(tmp_path):
    tree = Processes(tmp_path, lists=False)
    for pid in range(10, 610):
        tree.add(pid)
    sampler = sampler_on(tmp_path, gpu_with(*range(10, 610)))
    records = sampler.sample(NOW)
    assert [record.pid for record in records] == list(range(10, 522))
    assert dict(sampler.errors) == {"too_many": 1}


def test_what_is_remembered_is_bounded_while_processes_come_and_go(tmp_path):
    """A new process on the GPU every tick for 10 minutes: those of the last minute are remembered."""
    tree = Processes(tmp_path)
    ticks = Ticks(tmp_path)
    for step in range(120):
        tree.add(1000 + step, threads=4)
        ticks.gpus[:] = [gpu_with(1000 + step, listed_s=100.0 + 5 * step)]
        assert len(ticks.next()) == 1
        tree.end(1000 + step)
    sizes = [len(value) for value in vars(ticks.sampler).values() if isinstance(value, dict)]
    sizes += [len(value) for value in vars(ticks.sampler._tree).values() if isinstance(value, dict)]
    sizes += [len(value) for value in vars(ticks.sampler._programs).values() if isinstance(value, dict)]
    assert max(sizes) <= 14
