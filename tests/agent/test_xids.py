"""The table of XIDs against the list of SIGNALS.md 5.3, and a site's changes to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.errors import UsageError
from agent.vocabulary import ACTIONS
from agent.xids import KINDS, XIDS, XidCatalogue


def test_rows_hold_words_of_the_vocabulary_and_no_code_twice():
    rows = XIDS.rows()
    assert len({row.code for row in rows}) == len(rows) > 100
    assert {row.action for row in rows} <= set(ACTIONS)
    assert {row.kind for row in rows} == set(KINDS)
    assert all(row.name for row in rows)


@pytest.mark.parametrize("code", [46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158])
def test_the_catalogues_resets_are_critical_hardware(code: int):
    assert (XIDS[code].kind, XIDS[code].action, XIDS[code].is_critical) == ("hardware", "reset_gpu", True)


def test_a_gpu_off_the_bus_needs_the_node_rebooted():
    assert XIDS[79].action == "reboot_node"


@pytest.mark.parametrize("code", [13, 31, 43, 45])
def test_what_programs_cause_is_no_hardware_and_not_critical(code: int):
    assert XIDS[code].kind == "application"
    assert not XIDS[code].is_critical


def test_a_contained_memory_error_ends_one_program_and_is_hardware():
    assert (XIDS[94].kind, XIDS[94].action, XIDS[94].is_critical) == ("hardware", "restart_app", False)


def test_a_remapped_row_is_information():
    assert (XIDS[63].kind, XIDS[63].action) == ("info", "none")


def test_the_codes_counted_from_0_are_few_and_hold_those_that_others_alert_on():
    # FIELD.md, rules: 48, 62, 64, 74, 79, 95, 119, 120. At most 20 of the 120 series of a GPU.
    assert {48, 62, 64, 74, 79, 95, 119, 120} <= set(XIDS.critical())
    assert len(XIDS.critical()) <= 20


def test_an_unknown_code_asks_for_a_look():
    assert XIDS[999]._replace(name="") == (999, "info", "look", "")


def test_a_site_changes_action_and_kind_and_adds_codes():
    catalogue = XidCatalogue({109: "restart_app", 200: "replace_hardware"}, {109: "application", 200: "hardware"})
    assert (catalogue[109].action, catalogue[109].kind) == ("restart_app", "application")
    assert 109 not in catalogue.critical()
    assert 200 in catalogue.critical()
    assert XIDS[109].action == "reset_gpu"


def test_a_word_of_no_vocabulary_is_refused_by_name():
    with pytest.raises(UsageError, match="XID 79: 'reboot' is no action"):
        XidCatalogue({79: "reboot"})
    with pytest.raises(UsageError, match="XID 79: 'hw' is no kind"):
        XidCatalogue(kinds={79: "hw"})


def test_the_table_in_the_docs_is_the_one_in_the_code():
    text = (Path(__file__).parents[2] / "docs" / "xids.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert rows == [
        f"| {row.code} | {row.kind} | `{row.action}` | {'yes' if row.is_critical else ''} | {row.name} |"
        for row in XIDS.rows()
    ]
