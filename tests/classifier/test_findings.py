"""FindingTracker: from assessments to findings with a beginning, an end and a count."""

from __future__ import annotations

from agent.clock import Instant
from agent.records import GpuKey
from classifier.findings import FindingsConfig, FindingTracker
from classifier.results import Assessment

GPU = GpuKey(0, "GPU-00000000")


def at(seconds: float) -> Instant:
    return Instant(seconds, 1000.0 + seconds)


def seen(severity: int, since_s: float | None = None, anomaly: str = "stalled_collective", key: GpuKey = GPU):
    return Assessment(anomaly=anomaly, scope="gpu", severity=severity, key=key, since_monotonic_s=since_s)


def test_a_finding_begins_when_the_condition_began_and_ends_with_severity_0() -> None:
    tracker = FindingTracker()
    assert tracker.update(at(5), [seen(0)]) == ()
    (begun,) = tracker.update(at(50), [seen(3, since_s=14)])
    assert (begun.state, begun.finding.start_monotonic_s, begun.finding.start_wall_s) == ("active", 14, 1014)
    assert begun.finding.end_monotonic_s is None
    assert tracker.update(at(55), [seen(3, since_s=14)]) == ()
    assert len(tracker.active) == 1
    (ended,) = tracker.update(at(60), [seen(0)])
    assert (ended.state, ended.finding.start_monotonic_s, ended.finding.end_monotonic_s) == ("resolved", 14, 60)
    assert tracker.active == ()


def test_a_rising_severity_is_a_new_event_of_the_same_finding_and_a_falling_one_is_none() -> None:
    tracker = FindingTracker()
    tracker.update(at(20), [seen(1, since_s=5)])
    (risen,) = tracker.update(at(40), [seen(2, since_s=6)])
    assert (risen.state, risen.finding.severity, risen.finding.start_monotonic_s) == ("active", 2, 5)
    assert tracker.update(at(45), [seen(1, since_s=6)]) == ()
    assert tracker.active[0].severity == 2
    assert tracker.totals == {("stalled_collective", "gpu", GPU): 1}


def test_a_gap_is_no_resolution_and_a_long_one_ends_the_finding_at_its_last_sighting() -> None:
    tracker = FindingTracker(FindingsConfig(out_of_sight_seconds=60))
    tracker.update(at(10), [seen(3, since_s=1)])
    assert tracker.update(at(69), []) == ()
    assert tracker.update(at(70), [seen(3, since_s=1)]) == ()  # seen again: still the same finding
    assert tracker.update(at(130), []) == ()
    (ended,) = tracker.update(at(131), [])
    assert (ended.state, ended.finding.end_monotonic_s) == ("resolved", 70)


def test_totals_count_beginnings_and_hold_zero_for_what_was_never_found() -> None:
    tracker = FindingTracker()
    tracker.update(at(5), [seen(0), seen(0, anomaly="low_utilization")])
    for start in (10, 20, 30):
        tracker.update(at(start), [seen(3)])
        tracker.update(at(start + 5), [seen(0)])
    assert tracker.totals == {("stalled_collective", "gpu", GPU): 3, ("low_utilization", "gpu", GPU): 0}


def test_memory_is_bounded() -> None:
    tracker = FindingTracker(FindingsConfig(max_identities=4, out_of_sight_seconds=1))
    for index in range(20):
        tracker.update(at(5.0 * index), [seen(1, key=GpuKey(index))])
    assert len(tracker.totals) == 4
    assert len(tracker.active) == 1


def test_scopes_are_told_apart() -> None:
    tracker = FindingTracker()
    node = Assessment(anomaly="storage_stall", scope="node", severity=2, device="nvme0n1")
    job = Assessment(anomaly="missed_checkpoint", scope="job", severity=2, job_key="nvme0n1")
    assert len(tracker.update(at(5), [node, job])) == 2
    assert set(tracker.totals) == {
        ("storage_stall", "node", "nvme0n1"),
        ("missed_checkpoint", "job", "nvme0n1"),
    }
