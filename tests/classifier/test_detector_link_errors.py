"""link_errors: rates against their own past, what fails at once, PCIe links below their speed, ports that go down."""

from __future__ import annotations

import dataclasses
import math

import pytest

from agent.records import GpuHealth, GpuProcess, GpuSample, GpuSlowSample, InfinibandPort
from classifier.detectors.error_rate import ErrorRate, ErrorRateConfig, probability_of_more
from classifier.detectors.link_errors import LinkErrorsConfig, LinkErrorsDetector
from classifier.detectors.link_ports import MAX_DEVICES
from tests.classifier.card_histories import KEY, Card, severity


def card(config: LinkErrorsConfig | None = None, **options: object) -> Card:
    return Card(LinkErrorsDetector(config or LinkErrorsConfig(judge_seconds=0)), **options)


def test_the_exact_probability_is_that_of_the_binomial():
    # 5 errors in 300 s after 2 in 600 s: 7 trials with 1/3 each, at least 5: (21 * 4 + 7 * 2 + 1) / 3^7.
    assert probability_of_more(5, 300, 2, 600) == pytest.approx(99 / 3**7)
    # None at all in 2700 s before: each of 4 falls into the newest tenth.
    assert probability_of_more(4, 300, 0, 2700) == pytest.approx(1e-4)
    assert probability_of_more(0, 300, 0, 2700) == 1.0
    assert probability_of_more(1, 300, 10, 2700) == 1.0  # less than expected
    assert probability_of_more(5, 300, 0, 0) == 1.0
    # Large counts do not overflow; 3000 where 1000 are expected is beyond doubt.
    assert probability_of_more(3000, 300, 288_000, 86_400) < 1e-300
    assert math.isfinite(probability_of_more(10**7, 300, 10**9, 86_400))
    assert 0 < probability_of_more(5.5, 300, 2, 600) < 0.1  # a counter of a hand-made trace


def played(counts: list[int], config: ErrorRateConfig | None = None, least: int = 10) -> list[bool]:
    """Return for readings every 30 s, with so many errors since the one before, whether they come too fast."""
    rate = ErrorRate(config or ErrorRateConfig(), least)
    rate.take(0.0, 1000)
    found, total = [], 1000
    for n, count in enumerate(counts, 1):
        total += count
        rate.take(30.0 * n, total)
        found.append(rate.is_high)
    return found


def test_errors_are_high_against_their_own_past_only():
    clean, noisy = [0] * 60, [20] * 60
    # After a clean half hour 4 every 30 s: least 10 errors in three parts are there with the third.
    assert played([*clean, *[4] * 10])[60:] == [False, False, *[True] * 8]
    # A link that always had 20 every 30 s has them still, and 100 every 30 s are five times as many.
    assert not any(played([*noisy, *[22] * 20]))
    # The window's mean has to be three times the usual one, 600 errors.
    assert played([*noisy, *[100] * 10])[60:].index(True) == 4  # 5 x 100 + 5 x 20 = 600
    # It ends with the errors: half of the least are left after nine of ten parts went by.
    ended = played([*clean, *[4] * 10, *[0] * 10])[70:]
    assert ended.index(False) == 8


def test_errors_that_come_in_clumps_have_to_stand_out_from_the_worst_of_the_past():
    # Clumps of 60 errors in three parts, every 25 min: against their mean, 40 an hour, each is beyond chance.
    clumps = [20, 20, 20, *[0] * 47] * 12
    bare = dataclasses.replace(ErrorRateConfig(), least_peak_factor=0.0)
    assert sum(played(clumps, bare)[100:]) > 0
    assert not any(played(clumps)[100:])
    # What goes on is more than the worst of it: 120 errors after six parts.
    assert played([*clumps, *[20] * 10])[600:].index(True) == 5


def test_one_burst_few_errors_and_a_short_past_are_none():
    assert not any(played([*[0] * 60, 5000, *[0] * 20]))
    assert not any(played([*[0] * 60, *[1, 0, 0] * 10]))
    assert not any(played([*[0] * 15, *[50] * 10]))  # 450 s, of which 300 s are the window


def test_a_reset_and_a_gap_are_no_errors_and_no_quiet():
    rate = ErrorRate(ErrorRateConfig(), 10)
    for n in range(60):
        rate.take(30.0 * n, 5000)
    rate.take(1800.0, 100)  # began anew: 100 errors of which nobody knows when
    assert (rate.errors, rate.is_high) == (0, False)
    rate.take(9000.0, 400)  # two hours unseen: they go into the past
    assert (rate.errors, rate.is_high) == (0, False)
    assert rate.learned[0] == pytest.approx(300)


def test_the_past_holds_still_while_errors_are_high():
    rate = ErrorRate(ErrorRateConfig(), 10)
    total = 0
    for n in range(600):
        total += 0 if n < 100 else 10
        rate.take(30.0 * n, total)
    assert rate.is_high  # after four hours of it
    assert rate.baseline_per_hour < 100


QUIET = dict.fromkeys(
    ("nvlink_crc_errors_total", "nvlink_replay_errors_total", "nvlink_recovery_errors_total", "pcie_replays_total"), 7
)


def quiet_card(minutes: float = 30, **options: object) -> Card:
    watched = card(**options)
    said = watched.play(60 * minutes, lambda _: watched.health(**QUIET), 30)
    assert {severity(one) for one in said} == {0}  # 7 of each were there at first sight
    return watched


@pytest.mark.parametrize(
    ("name", "per_part", "expected"),
    [("nvlink_crc_errors_total", 10, 2), ("pcie_replays_total", 10, 2), ("pcie_replays_total", 2, 0)],
)
def test_counters_of_a_card_against_their_past(name, per_part, expected):
    watched = quiet_card()
    totals = iter(range(7, 10**6, per_part))
    said = watched.play(300, lambda _: watched.health(**QUIET | {name: next(totals)}), 30)
    assert severity(said[-1]) == expected
    if expected:
        short = name.removesuffix("_total")
        assert said[-1].action == "look"
        assert said[-1].evidence[f"{short}_usual_per_hour"] == 0
        assert said[-1].evidence[f"{short}_probability"] < 1e-4
        assert said[-1].evidence[f"{short}_recent"] == 90  # the window's first reading was the last quiet one


def test_a_replay_now_and_then_is_normal():
    watched = quiet_card()
    said = watched.play(
        6000, lambda second: watched.health(**QUIET | {"pcie_replays_total": 7 + int(second // 60)}), 30
    )
    assert {severity(one) for one in said} == {0}


def test_a_recovery_that_failed_is_critical_at_once_and_for_a_while():
    watched = card(LinkErrorsConfig(hold_seconds=60, judge_seconds=0))
    watched.health(nvlink_failed_recoveries_total=3)
    assert severity(watched.only()) == 0  # before the start
    watched.at = 5
    watched.health(nvlink_failed_recoveries_total=4)
    assert (watched.only().severity, watched.only().action) == (3, "reset_gpu")
    watched.at = 65
    watched.health(nvlink_failed_recoveries_total=4)
    assert severity(watched.only()) == 3
    watched.at = 70
    watched.health(nvlink_failed_recoveries_total=4)
    assert severity(watched.only()) == 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [(74, (3, "look")), (136, (3, "reset_gpu")), (145, (2, "look")), (121, (2, "look")), (79, (0, "none"))],
)
def test_xids_about_links(code, expected):
    watched = card()
    watched.health(**QUIET)
    watched.xids({})
    assert severity(watched.only()) == 0
    watched.at = 5
    watched.xids({code: 1}, {code: 4.0})
    assert (watched.only().severity, watched.only().action) == expected


def test_the_driver_asks_to_end_peer_to_peer_work():
    watched = card()
    watched.health(**QUIET)
    watched.limits(recovery_action=3)
    assert (watched.only().severity, watched.only().action) == (2, "reset_gpu")


def test_where_the_catalogue_says_look_the_driver_may_know_more():
    watched = card()
    watched.health(**QUIET)
    watched.xids({})
    watched.only()
    watched.xids({74: 1}, {74: 0.0})
    watched.limits(recovery_action=1)
    assert (watched.only().severity, watched.only().action) == (3, "reset_gpu")


FULL = {"pcie_generation": 5, "pcie_generation_max": 5, "pcie_width": 16, "pcie_width_max": 16}


@pytest.mark.parametrize("slow", [{"pcie_width": 8}, {"pcie_generation": 3}])
def test_a_pcie_link_below_its_speed_counts_under_load_only(slow):
    def told(utilization: float, link: dict[str, int], minutes: int = 4) -> list[int | None]:
        def tell(second: float) -> None:
            watched.feed(GpuSample, utilization_ratio=utilization)
            watched.health(**QUIET)
            if second % 60 == 0:
                watched.limits(**link)

        return [severity(one) for one in watched.play(60 * minutes, tell)]

    watched = card()
    assert set(told(0.02, FULL | slow)) == {0}  # idle: saves power
    said = told(0.95, FULL | slow)
    assert said[11 + 24 :] == [2] * 13  # from the third reading under load on
    assert set(said[: 11 + 24]) == {0}
    assert watched.only().evidence["pcie_width"] == slow.get("pcie_width", 16)
    assert told(0.95, FULL)[-1] == 0


@pytest.mark.parametrize("link", [{"pcie_width": 8}, {}, {"pcie_width_max": 16}])
def test_a_link_whose_maximum_is_not_known_is_not_judged(link):
    watched = card()
    watched.health(**QUIET)

    def tell(second: float) -> None:
        watched.feed(GpuSample, utilization_ratio=0.9)
        watched.health(**QUIET)
        if second % 60 == 0:
            watched.limits(**link)

    assert {severity(one) for one in watched.play(300, tell)} == {0}


def test_without_counters_nothing_is_said():
    watched = card()
    watched.feed(GpuSample, utilization_ratio=0.9)
    assert watched.only() is None
    watched.health(ecc_corrected_volatile_total=0)
    assert watched.only() is None
    watched.limits(power_limit_watts=700)
    assert watched.only() is None


def test_errors_of_the_card_are_those_of_each_instance():
    watched = card()
    instances = watched.divide()
    watched.health(nvlink_failed_recoveries_total=0)
    assert [(one.key, one.severity) for one in watched.assess()] == [(instance, 0) for instance in instances]
    watched.health(nvlink_failed_recoveries_total=1)
    assert [(one.key, one.severity) for one in watched.assess()] == [(instance, 3) for instance in instances]


def port(watched: Card, device: str = "mlx5_0", state: str = "active", **counters: int) -> None:
    watched.feed(InfinibandPort, key=None, device=device, port=1, state=state, counters={"link_downed": 4} | counters)


def devices(watched: Card) -> dict[str, int]:
    """Return the severity by device."""
    found = watched.assess()
    assert {one.scope for one in found} <= {"node"}
    return {one.device: one.severity for one in found}


def test_a_port_whose_state_cannot_be_read_any_more_is_as_it_was():
    watched = card(LinkErrorsConfig(judge_seconds=0))
    for at, state in enumerate(("active", "down", None)):
        watched.at = 5.0 * at
        port(watched, state=state)
        said = watched.assess()
    assert said[-1].summary == "mlx5_0: port 1 is down, and was active."


def test_a_port_that_goes_down_is_critical_while_a_gpu_is_held():
    watched = card(LinkErrorsConfig(port_hold_seconds=60, judge_seconds=0))
    watched.feed(GpuSlowSample, processes=(GpuProcess(10),))
    port(watched)
    port(watched, "mlx5_1")
    assert devices(watched) == {"": 0}  # 4 downs before the start
    watched.at = 5
    port(watched, state="down", link_downed=5)
    node, found = watched.assess()
    assert (node.device, node.severity) == ("", 0)  # all other ports
    assert (found.scope, found.device, found.severity, found.action) == ("node", "mlx5_0", 3, "look")
    assert found.summary == "mlx5_0: port 1 is down, and was active."
    assert (found.evidence["port1_state"], found.evidence["port1_link_downed_recent"]) == ("down", 1)
    watched.at = 10
    port(watched, link_downed=5)
    _, found = watched.assess()
    assert (found.severity, found.summary) == (3, "mlx5_0: port 1 lost its link.")
    watched.at = 66
    port(watched, link_downed=5)
    assert devices(watched) == {"": 0, "mlx5_0": 0}
    watched.at = 3700
    port(watched, link_downed=5)
    assert devices(watched) == {"": 0}


def test_a_port_down_disturbs_nobody_where_no_gpu_is_held():
    watched = card()
    watched.feed(GpuSlowSample, processes=())
    port(watched)
    watched.assess()
    port(watched, state="down")
    assert devices(watched)["mlx5_0"] == 2


def test_a_port_that_was_never_active_is_not_in_use():
    watched = card()
    port(watched, state="down")
    assert watched.assess() == ()
    port(watched, state="init", link_downed=9)
    assert watched.assess() == ()


def test_errors_of_a_port_against_its_past_and_after_a_reset():
    watched = card()
    symbols = iter([*[3] * 60, *range(3, 200, 5)])
    said = []
    for n in range(70):
        watched.at = 30.0 * n
        port(watched, symbol_error=next(symbols))
        said.append(watched.assess())
    assert {(one.device, one.severity) for found in said[:60] for one in found} == {("", 0)}
    found = said[-1][-1]
    assert (found.device, found.severity) == ("mlx5_0", 2)
    assert found.evidence["port1_symbol_error_recent"] == 45
    watched.at += 30
    port(watched, symbol_error=0, link_downed=0)  # somebody cleared the counters
    assert devices(watched) == {"": 0, "mlx5_0": 0}


def test_a_port_that_is_not_read_any_more_is_left_out():
    watched = card()
    port(watched)
    assert len(watched.assess()) == 1
    watched.at = 61
    assert watched.assess() == ()


def test_few_devices_have_their_own_and_the_node_stands_for_the_rest():
    watched = card()
    names = [f"mlx5_{n:02}" for n in range(40)]
    for name in names:
        port(watched, name)
    assert devices(watched) == {"": 0}
    port(watched, names[-1], state="down")
    assert devices(watched) == {"": 0, names[-1]: 2}  # no GPU is known: nobody works
    for name in names[:5]:
        port(watched, name, state="init")
    found = {one.device: one for one in watched.assess()}
    assert len(found) == MAX_DEVICES + 1
    assert {found[name].severity for name in (*names[:3], names[-1], "")} == {2}
    assert found[""].summary == (
        "ports: mlx5_03 port 1 is init, and was active; mlx5_04 port 1 is init, and was active."
    )


def test_between_two_looks_it_says_the_same():
    watched = card(LinkErrorsConfig(judge_seconds=15))
    watched.feed(GpuSlowSample, processes=())
    port(watched)
    watched.assess()
    said = []
    for _ in range(5):
        watched.at += 5
        port(watched, state="down")
        said.append(devices(watched).get("mlx5_0"))
    assert said == [None, None, 2, 2, 2]
    # Another GPU is judged at once.
    watched.feed(GpuHealth, key=KEY._replace(gpu=1, uuid="GPU-1"), pcie_replays_total=0)
    assert {one.scope for one in watched.assess()} == {"gpu", "node"}


def test_what_was_learned_survives_a_restart():
    watched = quiet_card()
    port(watched, symbol_error=1)
    watched.assess()
    state = watched.detector.learned(watched.now)
    assert state["cards"]["GPU-0"]["pcie_replays_total"] == [0.0, pytest.approx(1470, abs=31), 0.0]
    later = card(start_s=5000.0)
    later.detector.restore(state, later.now)
    totals = iter(range(7, 10**6, 20))
    said = later.play(150, lambda _: later.health(**QUIET | {"nvlink_crc_errors_total": next(totals)}), 30)
    assert severity(said[-1]) == 2  # without its past it would have to learn for ten minutes
    fresh = card(start_s=5000.0)
    totals = iter(range(7, 10**6, 20))
    said = fresh.play(150, lambda _: fresh.health(**QUIET | {"nvlink_crc_errors_total": next(totals)}), 30)
    assert severity(said[-1]) == 0


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"cards": {}, "ports": []},
        {"cards": {"GPU-0": [1]}, "ports": {}},
        {"cards": {"GPU-0": {"x": [1]}}, "ports": {}},
        {"cards": {"GPU-0": {"x": [1, 1, -1]}}, "ports": {}},
        {"cards": {"GPU-0": {"x": [1, 1, math.nan]}}, "ports": {}},
        {"cards": {"GPU-0": {"x": [True, 1, 1]}}, "ports": {}},
        {"cards": {}, "ports": {str(n): {} for n in range(257)}},
    ],
)
def test_what_was_not_learned_is_refused(state):
    watched = card()
    with pytest.raises(ValueError, match=r"table|list|more than"):
        watched.detector.restore(state, watched.now)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (LinkErrorsConfig, "judge_seconds", -1.0),
        (LinkErrorsConfig, "hold_seconds", 0.0),
        (LinkErrorsConfig, "port_hold_seconds", 0.0),
        (LinkErrorsConfig, "load_utilization_ratio", 1.5),
        (ErrorRateConfig, "part_seconds", 0.0),
        (ErrorRateConfig, "window_seconds", 80.0),
        (ErrorRateConfig, "probability", 0.5),
        (ErrorRateConfig, "least_errors", 0),
        (ErrorRateConfig, "least_replays", 0),
        (ErrorRateConfig, "least_factor", 0.5),
        (ErrorRateConfig, "least_peak_factor", -1.0),
        (ErrorRateConfig, "memory_seconds", 0.0),
    ],
)
def test_refuses_what_makes_no_sense(kind, key, value):
    with pytest.raises(ValueError, match=key):
        dataclasses.replace(kind(), **{key: value})
