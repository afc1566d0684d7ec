"""ecc_remap: what is new, what is a state, and what was there before."""

from __future__ import annotations

import dataclasses

import pytest

from agent.clock import Instant
from agent.records import GpuSample, Tick
from agent.samplers.nvml import NvmlSampler
from classifier.detectors.ecc_remap import EccRemapConfig, EccRemapDetector
from tests.agent.nvml_support import KEY as NVML_KEY
from tests.agent.nvml_support import UUID, WITHOUT_FAST, sample_at
from tests.classifier.card_histories import KEY, Card, severity
from tests.conftest import EmulatorFactory

CLEAN = {
    "ecc_corrected_volatile_total": 0,
    "ecc_uncorrected_volatile_total": 0,
    "ecc_corrected_aggregate_total": 9,
    "ecc_uncorrected_aggregate_total": 4,
    "is_row_remap_pending": False,
    "is_row_remap_failed": False,
}


def card(config: EccRemapConfig | None = None) -> Card:
    return Card(EccRemapDetector(config or EccRemapConfig()))


def clean_card(config: EccRemapConfig | None = None) -> Card:
    """Return a card that was well at first sight, 10 s before."""
    watched = card(config)
    watched.health(**CLEAN)
    watched.xids({})
    assert severity(watched.only()) == 0
    watched.at = 10
    return watched


def test_a_new_uncorrectable_error_is_critical_until_the_reset():
    watched = clean_card()
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 2, "ecc_uncorrected_aggregate_total": 6})
    found = watched.only()
    assert (found.severity, found.action, found.key) == (3, "reset_gpu", KEY)
    assert (found.evidence["uncorrected_new"], found.evidence["uncorrected_aggregate"]) == (2, 6)
    assert found.summary == "GPU 0: 2 new uncorrectable memory errors."
    watched.at = 3600
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 2, "ecc_uncorrected_aggregate_total": 6})
    assert severity(watched.only()) == 3
    watched.at = 3610  # the driver was loaded anew
    watched.health(**CLEAN | {"ecc_uncorrected_aggregate_total": 6})
    assert severity(watched.only()) == 0
    watched.at = 3620
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 1, "ecc_uncorrected_aggregate_total": 7})
    assert watched.only().evidence["uncorrected_new"] == 1


def test_errors_before_the_first_sight_are_information():
    # An agent that was started anew on a card with errors of this boot; over the life of the board they say nothing.
    watched = card()
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 5})
    found = watched.only()
    assert (found.severity, found.action, found.evidence["before_start"]) == (1, "look", 1.0)
    watched.at = 5
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 6})
    found = watched.only()
    assert (found.severity, found.evidence["uncorrected_new"], found.evidence["before_start"]) == (3, 1, 0.0)
    # The reset takes both away.
    watched.at = 10
    watched.health(**CLEAN)
    assert severity(watched.only()) == 0


def test_a_counter_that_wraps_to_more_than_nothing_counts_what_is_left():
    watched = clean_card()
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 9})
    watched.at = 15
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 2})
    assert watched.only().evidence["uncorrected_new"] == 2


def test_where_only_the_life_of_the_board_is_counted_news_ends_with_time():
    life = {"ecc_uncorrected_aggregate_total": 4}
    watched = card(EccRemapConfig(hold_seconds=100))
    watched.health(**life)
    assert severity(watched.only()) == 0
    watched.at = 10
    watched.health(ecc_uncorrected_aggregate_total=5)
    assert severity(watched.only()) == 3
    watched.at = 110
    watched.health(ecc_uncorrected_aggregate_total=5)
    assert severity(watched.only()) == 3
    watched.at = 111
    watched.health(ecc_uncorrected_aggregate_total=5)
    assert severity(watched.only()) == 0


@pytest.mark.parametrize("since_start", [True, False])
def test_marks_are_states_whoever_saw_them_come(since_start):
    watched = card() if since_start else clean_card()
    watched.health(**CLEAN | {"is_row_remap_pending": True})
    found = watched.only()
    assert (found.severity, found.action) == (2, "reset_gpu")
    assert "drain the GPU" in found.summary
    watched.at += 5
    watched.health(**CLEAN | {"is_row_remap_pending": True, "is_row_remap_failed": True})
    found = watched.only()
    assert (found.severity, found.action) == (3, "replace_hardware")
    assert (found.evidence["row_remap_pending"], found.evidence["row_remap_failure"]) == (1.0, 1.0)
    watched.at += 5
    watched.health(**CLEAN)
    assert severity(watched.only()) == 0


def test_corrected_errors_are_a_matter_of_their_rate():
    watched = clean_card()
    counts = iter(range(0, 10**6, 3))  # 3 every 5 s: a hundred after 165 s

    def slow_storm(second: float) -> None:
        watched.health(**CLEAN | {"ecc_corrected_volatile_total": next(counts)})

    said = [severity(one) for one in watched.play(300, slow_storm)]
    # The reading at second 0 of play is the second; 34 steps of 3 are 102.
    assert said.index(2) == 34
    assert set(said[34:]) == {2}
    # Quiet for an hour: below half of the hundred it ends.
    last = next(counts)
    said = [
        severity(one)
        for one in watched.play(3700, lambda _: watched.health(**CLEAN | {"ecc_corrected_volatile_total": last}), 60)
    ]
    assert said[0] == 2
    assert said[-1] == 0


def test_few_corrected_errors_and_many_before_the_start_are_normal():
    watched = card()
    watched.health(**CLEAN | {"ecc_corrected_volatile_total": 10**6})
    assert severity(watched.only()) == 0
    said = watched.play(
        7200, lambda second: watched.health(**CLEAN | {"ecc_corrected_volatile_total": 10**6 + int(second / 60)}), 30
    )
    assert {severity(one) for one in said} == {0}  # 60 an hour


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (48, (3, "reset_gpu")),
        (63, (1, "none")),
        (64, (3, "reset_gpu")),
        (92, (2, "look")),
        (94, (2, "restart_app")),
        (95, (3, "reset_gpu")),
        (140, (3, "reset_gpu")),
        (79, (0, "none")),
        (74, (0, "none")),
        (31, (0, "none")),
    ],
)
def test_xids_about_memory_have_the_action_of_the_catalogue(code, expected):
    watched = clean_card()
    watched.health(**CLEAN)
    watched.xids({code: 1}, {code: 9.0})
    assert (watched.only().severity, watched.only().action) == expected


def test_a_contained_error_takes_one_program():
    watched = clean_card()
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 1})
    watched.xids({94: 1}, {94: 9.0})
    assert (watched.only().severity, watched.only().action) == (3, "restart_app")
    watched.xids({94: 1, 48: 1}, {94: 9.0, 48: 9.5})
    assert watched.only().action == "reset_gpu"


def test_an_old_xid_is_information():
    watched = card()
    watched.health(**CLEAN)
    watched.xids({}, {48: -7200.0})
    assert (watched.only().severity, watched.only().evidence["before_start"]) == (1, 1.0)


def test_the_driver_knows_better_and_never_less_than_a_new_board():
    watched = clean_card()
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 1})
    watched.limits(recovery_action=2)
    assert watched.only().action == "reboot_node"
    watched.health(**CLEAN | {"is_row_remap_failed": True})
    assert watched.only().action == "replace_hardware"


@pytest.mark.parametrize("fields", [{}, {"pcie_replays_total": 3}])
def test_a_board_without_ecc_cannot_be_judged(fields):
    watched = card()
    watched.feed(GpuSample, utilization_ratio=0.5)
    assert watched.only() is None
    watched.health(**fields)
    assert watched.only() is None


def test_old_counters_say_nothing_about_now():
    watched = clean_card()
    watched.at = 60
    assert severity(watched.only()) == 0
    watched.at = 61
    assert watched.only() is None


def test_an_error_of_the_card_is_one_of_each_instance():
    watched = clean_card()
    instances = watched.divide()
    watched.health(**CLEAN | {"ecc_uncorrected_volatile_total": 1})
    assert [(one.key, one.severity) for one in watched.assess()] == [(instance, 3) for instance in instances]


@pytest.mark.parametrize(("key", "value"), [("hold_seconds", 0.0), ("storm_errors", 0), ("storm_seconds", 59.0)])
def test_refuses_what_makes_no_sense(key, value):
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(EccRemapConfig(), **{key: value})


def test_errors_of_a_gpu_of_the_emulator(nvml_emulator: EmulatorFactory):
    emulator = nvml_emulator(
        f"driver 580.95.05\ngpu 0 uuid {UUID}\n@ 0\n0 utilization_gpu_percent=97 ecc_corrected_volatile=0 "
        "ecc_uncorrected_volatile=0 ecc_corrected_aggregate=9 ecc_uncorrected_aggregate=3 remapped_rows_correctable=0 "
        "remapped_rows_uncorrectable=1 row_remap_pending=0 row_remap_failure=0\n"
    )
    sampler = NvmlSampler(WITHOUT_FAST)
    watched = Card(EccRemapDetector(EccRemapConfig()), key=NVML_KEY)

    def ask(second: float) -> tuple[int, str]:
        records = tuple(sample_at(emulator, sampler, second))
        now = Instant(records[0].monotonic_s, records[0].wall_s)
        watched.history.ingest(Tick(monotonic_s=now.monotonic_s, wall_s=now.wall_s, records=records))
        (found,) = watched.detector.assess(now, watched.history, {})
        return found.severity, found.action

    assert ask(0) == (0, "none")
    emulator.override("row_remap_pending", 1)
    assert ask(5) == (2, "reset_gpu")
    emulator.override("ecc_uncorrected_volatile", 1)
    assert ask(10) == (3, "reset_gpu")
    emulator.override("row_remap_failure", 1)
    assert ask(15) == (3, "replace_hardware")
    sampler.close()
