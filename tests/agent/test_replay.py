"""Replay: one decision per 5 s of trace time, seconds that add up, and the JSON of DESIGN.md, Commands."""

from __future__ import annotations

import io
import json
import math

import pytest

from agent.clock import Instant
from agent.config import Config
from agent.pipeline import MAX_XIDS, Pipeline
from agent.records import GpuHealth, GpuKey, GpuMigInfo, GpuSample, GpuState, GpuXids, NetworkSample, Tick
from agent.replay import ReplayJson, ReplayText, replay
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.registry import build_detectors
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.results import Assessment

KEY = GpuKey(0, "GPU-0")


class StallBetween:
    """A detector that reports a critical stall between two moments, as a warning for its first five seconds."""

    anomalies = ("stalled_collective",)

    def __init__(self, start_s, end_s):
        self._start_s, self._end_s = start_s, end_s

    def assess(self, now: Instant, history, decisions):
        severity = 0
        if self._start_s <= now.monotonic_s < self._end_s:
            severity = 2 if now.monotonic_s < self._start_s + 5 else 3
        return [
            Assessment(
                anomaly="stalled_collective",
                scope="gpu",
                severity=severity,
                key=key,
                since_monotonic_s=self._start_s if severity else None,
                evidence={"power_watts": 122.123456789, "text": "x", "missing": None, "bad": math.nan},
                action="restart_app",
                summary="stalled",
            )
            for key in history.gpus
        ]


def ticks(times, utilization=0.0, keys=(KEY,), power=100.0):
    return [
        Tick(
            monotonic_s=t,
            wall_s=5000.0 + t,
            records=tuple(
                GpuSample(monotonic_s=t, wall_s=5000.0 + t, key=key, utilization_ratio=utilization, power_watts=power)
                for key in keys
            ),
        )
        for t in times
    ]


def run(trace, interval_s=1.0, detectors=()):
    pipeline = Pipeline(
        labeller=Labeller(None, LabellerConfig()),
        detectors=detectors,
        baselines=PowerBaselines(),
        sample_interval_s=interval_s,
        replay=True,
    )
    out = io.StringIO()
    writer = ReplayJson(out)
    for step in replay(trace, pipeline, interval_s):
        writer.step(step)
    writer.summary(pipeline.workload_seconds)
    return [json.loads(line) for line in out.getvalue().splitlines()], pipeline


def times_of(events, kind="decision"):
    return [event["t"] for event in events if event["type"] == kind]


def test_one_decision_for_each_five_seconds_from_the_first_sample_on():
    # The trace starts at 100 s on its own clock: t counts from there.
    events, _ = run(ticks([100.0 + i for i in range(13)]))
    assert times_of(events) == [0.0, 5.0, 10.0]


def test_a_log_faster_than_its_decisions_is_judged_on_the_grid():
    events, _ = run(ticks([i * 0.3 for i in range(40)]), interval_s=0.3)  # 0 to 11.7 s
    assert times_of(events) == [0.0, 5.0, 10.0]


def test_a_slow_log_gets_one_decision_for_each_sample_even_where_its_clock_drifts():
    events, _ = run(ticks([0.0, 60.0, 121.0, 180.0]), interval_s=60.0)
    assert times_of(events) == [0.0, 60.0, 121.0, 180.0]


def test_a_hole_is_judged_while_it_lasts_and_counted_as_unknown():
    events, pipeline = run(ticks([*range(61), *range(100, 161)]))
    assert times_of(events) == [5.0 * i for i in range(33)]
    in_hole = [e for e in events if e["type"] == "decision" and 65.0 <= e["t"] <= 95.0]
    assert {e["workload"] for e in in_hole} == {"unknown"}
    assert {e["reason"] for e in in_hole} == {"gap"}
    seconds = pipeline.workload_seconds(KEY)
    assert sum(seconds.values()) == pytest.approx(160.0)
    # Idle needs 15 s of evidence at both ends: unknown are 0-15 s, the hole 60-100 s, and 100 s until the first
    # decision with 15 s of new evidence, at 115 s.
    assert seconds["unknown"] == pytest.approx(15.0 + 40.0 + 15.0)
    assert seconds["idle"] == pytest.approx(160.0 - 70.0)


def test_a_hole_in_a_slow_log_shows_too():
    events, pipeline = run(ticks([0.0, 60.0, 120.0, 600.0, 660.0]), interval_s=60.0)
    # The sample due at 180 s is missing; once the hole is longer than three intervals it is judged each minute.
    assert times_of(events)[:3] == [0.0, 60.0, 120.0]
    assert set(times_of(events)) >= {300.0, 360.0, 600.0, 660.0}
    assert sum(pipeline.workload_seconds(KEY).values()) == pytest.approx(660.0)
    assert pipeline.workload_seconds(KEY)["unknown"] >= 480.0


@pytest.mark.parametrize("times", [[0.0], [3.0, 3.5], list(range(7))])
def test_the_seconds_sum_to_the_length_of_the_trace(times):
    _, pipeline = run(ticks([float(t) for t in times]))
    assert sum(pipeline.workload_seconds(KEY).values()) == pytest.approx(times[-1] - times[0])


def test_the_keys_are_those_of_the_contract():
    events, _ = run(ticks(range(31)), detectors=[StallBetween(10, 20)])
    by_type = {event["type"]: list(event) for event in events}
    decision = "type t gpu uuid gpu_i_id workload probabilities telemetry_probabilities window_s reason"
    finding = "type t state anomaly scope gpu severity start end evidence action"
    assert by_type["decision"] == decision.split()
    assert by_type["finding"] == finding.split()
    assert by_type["summary"] == ["type", "gpu", "workload", "seconds", "findings"]
    for event in events:
        if event["type"] == "decision":
            assert (event["probabilities"] is None) == (event["telemetry_probabilities"] is None)
            if event["probabilities"] is None:
                assert event["reason"]
            else:
                assert list(event["probabilities"]) == ["training", "inference", "idle", "other"]
                assert sum(event["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)


def test_a_finding_begins_rises_and_ends():
    events, _ = run(ticks(range(41)), detectors=[StallBetween(10, 20)])
    findings = [event for event in events if event["type"] == "finding"]
    assert [(f["t"], f["state"], f["severity"], f["start"], f["end"]) for f in findings] == [
        (10.0, "active", "warning", 10.0, None),
        (15.0, "active", "critical", 10.0, None),
        (20.0, "resolved", "critical", 10.0, 20.0),
    ]
    # Six significant digits, and no NaN.
    assert findings[0]["evidence"] == {"power_watts": 122.123, "text": "x", "missing": None, "bad": None}
    assert events[-1]["findings"] == [
        {"anomaly": "stalled_collective", "severity": "critical", "start": 10.0, "end": 20.0}
    ]


def test_a_finding_that_lasts_to_the_end_has_no_end():
    events, _ = run(ticks(range(21)), detectors=[StallBetween(10, 99)])
    assert events[-1]["findings"][0]["end"] is None


def test_gpus_come_in_the_order_of_their_index_and_equal_input_gives_equal_bytes():
    keys = (GpuKey(3, "GPU-c"), GpuKey(0, "GPU-a"), GpuKey(10, "GPU-b"))
    events, _ = run(ticks(range(11), keys=keys))
    assert [event["gpu"] for event in events if event["type"] == "summary"] == [0, 3, 10]
    assert events == run(ticks(range(11), keys=keys))[0]


def test_an_empty_trace_prints_nothing():
    assert run([])[0] == []


def test_energy_goes_to_the_label_that_held():
    _, pipeline = run(ticks(range(61)))
    snapshot = pipeline.snapshot(Instant(60.0, 5060.0))
    energy = snapshot.gpus[0].workload_energy_joules
    # 100 W for 60 s, of which the first 15 s were unknown.
    assert energy["idle"] == pytest.approx(4500.0)
    assert energy["unknown"] == pytest.approx(1500.0)


def test_what_is_older_than_three_periods_is_left_out():
    pipeline = run(ticks(range(11)))[1]
    network = NetworkSample(monotonic_s=10.0, wall_s=0.0, device="eth0", receive_bytes_total=1, transmit_bytes_total=2)
    pipeline.ingest(Tick(monotonic_s=10.0, wall_s=0.0, records=(network,)))
    fresh = pipeline.snapshot(Instant(13.0, 5013.0))
    assert fresh.gpus[0].sample is not None
    assert fresh.networks == (network,)
    stale = pipeline.snapshot(Instant(13.1, 5013.1))
    assert stale.gpus[0].sample is None
    assert stale.gpus[0].sample_wall_s == 5010.0
    assert stale.networks == ()


def test_the_text_for_a_person_names_changes_findings_and_seconds():
    out = io.StringIO()
    pipeline = Pipeline(
        labeller=Labeller(None, LabellerConfig()), detectors=[StallBetween(10, 20)], baselines=PowerBaselines()
    )
    writer = ReplayText(out)
    for step in replay(ticks(range(31)), pipeline, 1.0):
        writer.step(step)
    writer.summary(pipeline.workload_seconds)
    text = out.getvalue()
    assert "gpu 0     unknown (too_few_samples)" in text
    assert "stalled_collective critical: stalled" in text
    assert text.splitlines()[-1].split() == ["gpu", "0", "0", "0", "15", "0", "15"]


CARD, ONE = GpuKey(0, "GPU-0"), GpuKey(0, "GPU-0", 1)


def play(pipeline, times, keys):
    for tick in ticks(times, keys=keys):
        pipeline.ingest(tick)
        if tick.monotonic_s % 5 == 0:
            judgement = pipeline.judge(Instant(tick.monotonic_s, tick.wall_s))
    return judgement


def test_labels_follow_the_work_when_a_card_is_divided_and_made_whole_again():
    pipeline = Pipeline(
        labeller=Labeller(None, LabellerConfig()), detectors=[StallBetween(0, 0)], baselines=PowerBaselines()
    )
    assert [d.key for d in play(pipeline, range(21), (CARD,)).decisions] == [CARD]
    assert [d.key for d in play(pipeline, range(21, 61), (CARD, ONE)).decisions] == [ONE]
    card, one = pipeline.snapshot(Instant(60.0, 5060.0)).gpus
    assert (card.decision, card.workload_seconds, card.workload_energy_joules) == (None, {}, None)
    assert (card.state, one.state, one.decision.workload) == ("ok", "ok", "idle")
    # The instance was there from 21 s on, and idle with 15 s of evidence at the judgement of 40 s.
    assert one.workload_seconds["unknown"] == pytest.approx(19.0)
    assert one.workload_seconds["idle"] == pytest.approx(20.0)
    # The card tells its utilisation and lists no instance: it is whole, and goes on counting where it stopped.
    assert [d.key for d in play(pipeline, range(61, 101), (CARD,)).decisions] == [CARD]
    (card,) = pipeline.snapshot(Instant(100.0, 5100.0)).gpus
    # Whole for the judgements of 0 to 20 s and again from that of 65 s on: 20 s and 35 s.
    assert sum(card.workload_seconds.values()) == pytest.approx(55.0)


def test_health_xids_and_mig_are_absent_once_stale():
    pipeline = Pipeline(labeller=Labeller(None, LabellerConfig()), detectors=(), baselines=PowerBaselines())
    at = {"monotonic_s": 0.0, "wall_s": 5000.0}
    pipeline.ingest(
        Tick(
            **at,
            records=(
                GpuHealth(**at, key=CARD, ecc_corrected_volatile_total=1),
                GpuXids(**at, key=CARD, totals={79: 0}),
                GpuMigInfo(**at, key=ONE, profile="1g.10gb", mig_uuid="MIG-1"),
            ),
        )
    )
    for t, expected in ((15.0, (True, True, True)), (15.1, (False, False, True)), (180.1, (False, False, False))):
        pipeline.ingest(ticks([t], keys=(ONE,))[0])  # keeps the instance
        views = {view.key: view for view in pipeline.snapshot(Instant(t, 5000.0 + t)).gpus}
        one, card = views[ONE], views[CARD]
        assert (card.health is not None, card.xids is not None, one.mig is not None) == expected


def test_counts_of_xids_never_fall_and_codes_are_bounded():
    pipeline = Pipeline(labeller=Labeller(None, LabellerConfig()), detectors=(), baselines=PowerBaselines())

    def xids(t, totals, last=None):
        at = {"monotonic_s": t, "wall_s": 5000.0 + t}
        sample = GpuSample(**at, key=CARD)
        pipeline.ingest(Tick(**at, records=(sample, GpuXids(**at, key=CARD, totals=totals, last_wall_s=last or {}))))
        return pipeline.snapshot(Instant(t, 5000.0 + t)).gpus[0].xids

    xids(0.0, {79: 0, 48: 0})
    assert xids(5.0, {79: 2, 48: 0, 13: 9}, {79: 5004.0}).totals == {79: 2, 48: 0, 13: 9}
    after = xids(10.0, {79: 1, 48: 1}, {79: 5001.0})
    assert (after.totals, after.last_wall_s) == ({79: 2, 48: 1, 13: 9}, {79: 5004.0})
    # A GPU with every code there is keeps the ones it had first.
    many = xids(15.0, dict.fromkeys(range(1, 200), 1))
    assert len(many.totals) == MAX_XIDS
    assert list(many.totals)[:5] == [79, 48, 13, 1, 2]
    assert many.totals[13] == 9


def test_detectors_forget_an_instance_that_is_gone():
    config = Config()
    baselines = PowerBaselines(config.detectors.baseline)
    pipeline = Pipeline(
        labeller=Labeller(None, LabellerConfig()),
        detectors=build_detectors(config.detectors, baselines),
        baselines=baselines,
    )

    def assessed(at_s):
        return {item.key for item in pipeline.snapshot(Instant(at_s, 5000.0 + at_s)).assessments}

    play(pipeline, range(31), (CARD, ONE))
    assert assessed(30.0) == {ONE}
    play(pipeline, range(31, 61), (CARD,))
    assert assessed(60.0) == {CARD}


def test_a_gpu_that_was_dead_all_the_time_is_unknown_in_the_summary():
    lost = [
        Tick(monotonic_s=t, wall_s=t, records=(GpuState(monotonic_s=t, wall_s=t, key=KEY, state="lost"),))
        for t in range(60)
    ]
    events, _ = run(lost)
    assert {event["reason"] for event in events if event["type"] == "decision"} == {"gpu_lost"}
    assert events[-1]["workload"] == "unknown"
    assert events[-1]["seconds"] == {"training": 0, "inference": 0, "idle": 0, "other": 0, "unknown": 59.0}


def test_a_trace_of_one_sample_is_unknown():
    assert run(ticks([0.0]))[0][-1]["workload"] == "unknown"


def test_a_gpu_that_comes_late_sums_to_the_length_too():
    late = GpuKey(1, "GPU-1")
    trace = [*ticks(range(60)), *ticks(range(60, 121), keys=(KEY, late))]
    events, _ = run(trace)
    by_gpu = {event["gpu"]: event["seconds"] for event in events if event["type"] == "summary"}
    assert sum(by_gpu[0].values()) == pytest.approx(120.0)
    assert sum(by_gpu[1].values()) == pytest.approx(120.0)
    assert by_gpu[1]["unknown"] >= 60.0


def test_the_first_decision_is_at_0_also_where_the_host_was_sampled_first():
    network = NetworkSample(monotonic_s=99.9, wall_s=0.0, device="eth0", receive_bytes_total=1, transmit_bytes_total=2)
    host = Tick(monotonic_s=99.9, wall_s=0.0, records=(network,))
    events, _ = run([host, *ticks([100.0 + i for i in range(6)])])
    assert times_of(events) == [0.0, 5.0]
