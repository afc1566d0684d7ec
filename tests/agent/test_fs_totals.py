"""Totals of file systems behind a name that changes hands: they never fall, and hold nothing that was not seen."""

from __future__ import annotations

from agent.samplers.fs_totals import MAX_GONE_NAMES, GrowingTotals

DATA = ("/data", "nfs4")


def test_what_is_there_at_the_start_counts_whole_and_what_comes_later_by_its_growth():
    totals = GrowingTotals()
    assert totals.update({DATA: {"a": (1000, 7)}}) == {DATA: (1000, 7)}
    assert totals.update({DATA: {"a": (1500, 7)}}) == {DATA: (1500, 7)}
    # b has counted 5 000 000 in another life.
    assert totals.update({DATA: {"b": (5_000_000, 0)}}) == {DATA: (1500, 7)}
    assert totals.update({DATA: {"b": (5_000_040, 2)}}) == {DATA: (1540, 9)}
    # And one side by side with it.
    assert totals.update({DATA: {"b": (5_000_040, 2), "c": (9, 9)}}) == {DATA: (1540, 9)}
    assert totals.update({DATA: {"b": (5_000_050, 2), "c": (10, 9)}}) == {DATA: (1551, 9)}


def test_a_name_that_comes_later_begins_at_zero():
    totals = GrowingTotals()
    totals.update({})
    assert totals.update({DATA: {"a": (1000,)}}) == {DATA: (0,)}


def test_the_total_stays_where_counters_go_or_fall():
    totals = GrowingTotals()
    totals.update({DATA: {"a": (100,), "b": (50,)}})
    assert totals.update({DATA: {"a": (101,)}}) == {DATA: (151,)}
    assert totals.update({DATA: {"a": (3,)}}) == {DATA: (151,)}  # its statistics were cleared
    assert totals.update({DATA: {"a": (5,)}}) == {DATA: (153,)}
    # One that was gone is another one when it is back: its number may be that of another mount.
    assert totals.update({DATA: {"a": (5,), "b": (9000,)}}) == {DATA: (153,)}
    assert totals.update({}) == {}
    assert totals.update({DATA: {"a": (9000,)}}) == {DATA: (153,)}


def test_one_that_cannot_be_read_for_once_is_caught_up():
    totals = GrowingTotals()
    totals.update({DATA: {"a": (100,), "b": (50,)}})
    assert totals.update({DATA: {"a": None, "b": (60,)}}) == {}  # half of a sum would be a wrong number
    assert totals.update({DATA: None}) == {}
    assert totals.update({DATA: {"a": (130,), "b": (60,)}}) == {DATA: (190,)}


def test_one_counter_that_is_not_offered():
    totals = GrowingTotals()
    assert totals.update({DATA: {"a": (1, None)}}) == {DATA: (1, None)}
    assert totals.update({DATA: {"a": (2, 40)}}) == {DATA: (2, 0)}
    assert totals.update({DATA: {"a": (2, None)}}) == {DATA: (2, None)}
    assert totals.update({DATA: {"a": (2, 43)}}) == {DATA: (2, 3)}


def test_names_are_bounded_and_the_one_gone_longest_is_forgotten():
    totals = GrowingTotals()
    totals.update({("/old", "nfs"): {0: (10,)}, DATA: {"a": (70,)}})
    for number in range(MAX_GONE_NAMES + 1):
        totals.update({(f"/pod{number}", "nfs"): {number: (1,)}, DATA: {"a": (70,)}})
    assert len(totals._totals) == MAX_GONE_NAMES + 2  # with the one of now, and DATA
    assert totals.update({("/old", "nfs"): {0: (10,)}, DATA: {"a": (70,)}}) == {("/old", "nfs"): (0,), DATA: (70,)}
