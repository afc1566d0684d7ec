"""gpu_lost: by state, by XIDs with the catalogue's action, by what the driver asks for."""

from __future__ import annotations

import dataclasses

import pytest

from agent.clock import Instant
from agent.records import GpuKey, GpuSample, GpuState, Tick
from agent.samplers.nvml import NvmlSampler
from agent.xids import XIDS, XidCatalogue
from classifier.detectors.gpu_lost import GpuLostConfig, GpuLostDetector
from tests.agent.nvml_support import KEY as NVML_KEY
from tests.agent.nvml_support import UUID, WITHOUT_FAST, sample_at
from tests.classifier.card_histories import KEY, Card, severity
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import GPU_IS_LOST, RESET_REQUIRED


def card(config: GpuLostConfig | None = None, xids: XidCatalogue = XIDS) -> Card:
    return Card(GpuLostDetector(config or GpuLostConfig(), xids))


def test_a_gpu_that_answers_is_nothing():
    watched = card()
    watched.state()
    watched.xids({})
    assert severity(watched.only()) == 0


def test_a_lost_gpu_is_critical_at_once_and_ends_when_it_answers():
    watched = card()
    watched.state()
    assert severity(watched.only()) == 0
    watched.at = 5
    watched.state("lost")
    found = watched.only()
    assert (found.severity, found.action, found.scope, found.key) == (3, "reboot_node", "gpu", KEY)
    assert found.since_monotonic_s == watched.now.monotonic_s
    assert found.evidence["state"] == "lost"
    assert found.summary == "GPU 0: the driver does not reach it any more."
    watched.at = 15
    watched.state("lost")
    assert watched.only().evidence["state_seconds"] == 10
    watched.at = 20
    watched.state()
    assert severity(watched.only()) == 0


def test_a_gpu_that_hangs_is_a_warning_first():
    # 15 s by default: one slow call of the driver is no reason to wake anybody.
    watched = card()
    said = watched.play(25, lambda _: watched.state("hung"))
    assert [(one.severity, one.action) for one in said] == [
        (2, "look"),
        (2, "look"),
        (2, "look"),
        (3, "reboot_node"),
        (3, "reboot_node"),
    ]
    assert said[0].evidence["state"] == "hung"


def test_a_reset_that_is_required_is_the_action():
    watched = card()
    watched.state("reset_required")
    assert (watched.only().severity, watched.only().action) == (3, "reset_gpu")


@pytest.mark.parametrize(
    ("code", "expected"),
    [(79, (3, "reboot_node")), (119, (3, "reset_gpu")), (61, (2, "look")), (54, (2, "look"))],
)
def test_xids_of_hardware_have_the_action_of_the_catalogue(code, expected):
    watched = card()
    watched.state()
    watched.xids({code: 0})
    assert severity(watched.only()) == 0
    watched.at = 10
    watched.state()
    watched.xids({code: 1}, {code: 9.0})
    found = watched.only()
    assert (found.severity, found.action) == expected == (3 if XIDS[code].is_critical else 2, XIDS[code].action)
    assert found.since_monotonic_s == pytest.approx(watched.start_s + 9.0)
    assert found.evidence["xids"] == str(code)


def test_no_xid_of_a_program_of_memory_or_of_links_is_a_lost_gpu():
    others = [row.code for row in XIDS.rows() if row.kind != "hardware"]
    others += [48, 63, 64, 92, 94, 95, 140, 168, 171, 172, 74, 121, 136, *range(144, 151), 155, 164, 165]
    assert {13, 31, 43, 45} <= set(others)
    watched = card()
    watched.state()
    watched.xids({})
    watched.only()
    watched.at = 5
    watched.state()
    watched.xids(dict.fromkeys(others, 3), dict.fromkeys(others, 4.0))
    assert severity(watched.only()) == 0
    # Every other code of hardware is one.
    for code in {row.code for row in XIDS.rows()} - set(others):
        watched = card()
        watched.state()
        watched.xids({})
        watched.only()
        watched.xids({code: 1}, {code: 0.0})
        assert severity(watched.only()) >= 2, code


def test_a_site_may_say_that_a_code_is_no_hardware():
    watched = card(xids=XidCatalogue(kinds={119: "info"}))
    watched.state()
    watched.xids({})
    watched.only()
    watched.xids({119: 1}, {119: 0.0})
    assert severity(watched.only()) == 0


def test_an_xid_ends_with_the_reset_of_the_card_or_its_time():
    def told(energy_j: float, seconds: float) -> int | None:
        watched.at += seconds
        watched.state()
        watched.slow(energy_joules_total=energy_j)
        watched.xids({119: 1}, {119: 5.0})
        return severity(watched.only())

    watched = card(GpuLostConfig(xid_hold_seconds=600))
    watched.state()
    watched.xids({})
    watched.only()
    assert told(5000, 5) == 3
    assert told(6000, 5) == 3
    assert told(10, 5) == 0  # the energy counter began anew with the driver
    assert told(20, 5) == 0  # and the same count is no news
    watched = card(GpuLostConfig(xid_hold_seconds=600))
    watched.state()
    watched.xids({})
    watched.only()
    assert told(5000, 5) == 3
    assert told(6000, 599) == 3
    assert told(7000, 6) == 0


def test_what_was_logged_before_the_agent_started_is_information():
    # The sampler does not count it and tells its time: 79 an hour ago, then the agent was started anew.
    watched = card()
    watched.state()
    watched.xids({}, {79: -3600.0})
    found = watched.only()
    assert (found.severity, found.evidence["before_start"]) == (1, 1.0)
    assert "before the agent started" in found.summary
    # A new one is news, and what came before goes on with it.
    watched.at = 10
    watched.state()
    watched.xids({79: 1}, {79: 10.0})
    assert (watched.only().severity, watched.only().evidence["before_start"]) == (3, 0.0)


def test_a_trace_that_begins_later_than_its_agent_has_no_news_in_its_first_counts():
    watched = card()
    watched.state()
    watched.xids({119: 4}, {119: -500.0})
    assert severity(watched.only()) == 1
    fresh = card()
    fresh.state()
    fresh.xids({119: 1}, {119: -20.0})  # while the sources were opened
    assert severity(fresh.only()) == 3


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(0, (0, "none")), (1, (3, "reset_gpu")), (2, (3, "reboot_node")), (3, (0, "none")), (4, (2, "reset_gpu"))],
)
def test_what_the_driver_asks_for(asked, expected):
    watched = card()
    watched.state()
    watched.limits(recovery_action=asked)
    assert (watched.only().severity, watched.only().action) == expected


def test_draining_for_a_row_that_waits_is_of_ecc_remap():
    watched = card()
    watched.state()
    watched.limits(recovery_action=4)
    watched.health(is_row_remap_pending=True)
    assert severity(watched.only()) == 0


def test_the_driver_knows_better_than_the_catalogue():
    watched = card()
    watched.state()
    watched.xids({})
    watched.only()
    watched.limits(recovery_action=2)
    watched.xids({119: 1}, {119: 0.0})
    assert watched.only().action == "reboot_node"


def test_where_nobody_tells_states_or_xids_nothing_is_said():
    watched = card()
    watched.feed(GpuSample, utilization_ratio=0.5)
    assert watched.only() is None


def test_a_state_that_is_not_told_any_more_is_none():
    watched = card()
    watched.state()
    assert severity(watched.only()) == 0
    watched.at = 15
    assert severity(watched.only()) == 0
    watched.at = 16
    assert watched.only() is None


def test_the_card_is_lost_for_each_of_its_instances():
    watched = card()
    instances = watched.divide()
    watched.feed(GpuState, state="lost")
    assert [(one.key, one.severity) for one in watched.assess()] == [(instance, 3) for instance in instances]


def test_of_two_gpus_one_is_lost():
    watched = card()
    other = GpuKey(1, "GPU-1")
    watched.state()
    watched.feed(GpuState, key=other, state="lost")
    assert {one.key: one.severity for one in watched.assess()} == {KEY: 0, other: 3}


@pytest.mark.parametrize("key", ["hung_seconds", "xid_hold_seconds"])
def test_refuses_what_makes_no_sense(key):
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(GpuLostConfig(), **{key: -1.0})


def test_a_gpu_of_the_emulator_is_lost_and_has_to_be_reset(nvml_emulator: EmulatorFactory):
    emulator = nvml_emulator(f"driver 580.95.05\ngpu 0 uuid {UUID}\n@ 0\n0 utilization_gpu_percent=97\n")
    sampler = NvmlSampler(WITHOUT_FAST)
    watched = Card(GpuLostDetector(GpuLostConfig()), key=NVML_KEY)

    def ask(second: float) -> tuple[int, str]:
        records = tuple(sample_at(emulator, sampler, second))
        now = Instant(records[0].monotonic_s, records[0].wall_s)
        watched.history.ingest(Tick(monotonic_s=now.monotonic_s, wall_s=now.wall_s, records=records))
        (found,) = watched.detector.assess(now, watched.history, {})
        return found.severity, found.action

    assert ask(0) == (0, "none")
    emulator.fail(RESET_REQUIRED, gpu=0)
    assert ask(1) == (3, "reset_gpu")
    emulator.clear()
    assert ask(2) == (0, "none")
    emulator.fail(GPU_IS_LOST, gpu=0)
    assert ask(3) == (3, "reboot_node")
    sampler.close()
