"""When a node counts as ready, and what /-/ready says where it does not."""

from __future__ import annotations

import dataclasses

import pytest

from agent.clock import Instant
from agent.pipeline import Pipeline
from agent.records import GpuKey, GpuSample, GpuState, Tick
from agent.samplers import SamplerStatus
from classifier.detectors.baseline import PowerBaselines
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from exporters.landing import node_state
from exporters.snapshot import NodeSnapshot
from exporters.web import WebApp

CARD = GpuKey(0, "GPU-a")


def pipeline(interval_s: float = 1.0) -> Pipeline:
    return Pipeline(
        labeller=Labeller(None, LabellerConfig()),
        detectors=(),
        baselines=PowerBaselines(),
        sample_interval_s=interval_s,
    )


def at(second: float) -> Instant:
    return Instant(second, 5000.0 + second)


def status(name: str, last_s: float | None, now_s: float = 100.0) -> SamplerStatus:
    wall_s = None if last_s is None else at(last_s).wall_s
    return SamplerStatus(name=name, success=last_s == now_s, last_success_wall_s=wall_s)


def ask(snapshot: NodeSnapshot | None) -> tuple[str, str]:
    answered = []
    body = WebApp(lambda: snapshot)(
        {"REQUEST_METHOD": "GET", "PATH_INFO": "/-/ready"}, lambda *head: answered.append(head)
    )
    return answered[0][0][:3], b"".join(body).decode()


@pytest.mark.parametrize(
    ("last_s", "answer"),
    [
        # A source that never was here is no fault.
        ({"nvml": None, "net_dev": 100}, ("200", "ok\n")),
        ({"nvml": 100, "net_dev": 100}, ("200", "ok\n")),
        # A run that brought nothing, or a few, are none either: 15 s are three periods of 5 s.
        ({"nvml": 85, "net_dev": 100}, ("200", "ok\n")),
        ({"nvml": 84, "net_dev": 100}, ("503", "No records any more from nvml.\n")),
        ({"nvml": 84, "net_dev": 100, "diskstats": 20}, ("503", "No records any more from diskstats, nvml.\n")),
        ({"nvml": 99, "net_dev": 99}, ("503", "No source has brought fresh samples.\n")),
        ({"nvml": None}, ("503", "No source has brought fresh samples.\n")),
    ],
)
def test_ready_is_that_every_source_that_ever_worked_goes_on(last_s, answer):
    statuses = [status(name, second) for name, second in last_s.items()]
    assert ask(pipeline().snapshot(at(100), samplers=statuses)) == answer


def test_a_source_that_stopped_before_the_wall_clock_was_set_back_is_not_fresh():
    future = dataclasses.replace(status("nvml", 100), success=False, last_success_wall_s=at(3700).wall_s)
    snapshot = pipeline().snapshot(at(100), samplers=[future, status("net_dev", 100)])
    assert ask(snapshot)[0] == "503"


@pytest.mark.parametrize(("interval_s", "ready_until_s"), [(1.0, 65), (30.0, 140)])
def test_gpus_that_all_hang_are_not_ready_although_their_state_is_told(interval_s, ready_until_s):
    # The last sample is of 50 s: fresh for 15 s, or for three distances of 30 s.
    node = pipeline(interval_s)
    node.ingest(Tick(monotonic_s=50.0, wall_s=5050.0, records=(GpuSample(monotonic_s=50.0, wall_s=5050.0, key=CARD),)))
    for now_s, ready in ((ready_until_s, "200"), (ready_until_s + 1, "503")):
        state = GpuState(monotonic_s=now_s, wall_s=at(now_s).wall_s, key=CARD, state="hung")
        node.ingest(Tick(monotonic_s=now_s, wall_s=state.wall_s, records=(state,)))
        snapshot = node.snapshot(at(now_s), samplers=[status("nvml", now_s, now_s)])
        assert ask(snapshot)[0] == ready
        assert node_state(snapshot) == ("critical", "GPU 0: hung.")
    assert ask(snapshot)[1] == "No GPU brings samples any more.\n"


def test_the_state_names_the_source_and_not_all_of_them():
    node = pipeline()
    statuses = [status("diskstats", 20), status("nvml", 100)]
    node.ingest(
        Tick(monotonic_s=100.0, wall_s=5100.0, records=(GpuSample(monotonic_s=100.0, wall_s=5100.0, key=CARD),))
    )
    snapshot = node.snapshot(at(100), samplers=statuses)
    assert not snapshot.ready
    assert node_state(snapshot) == ("warning", "Sampling 1 GPU; no records any more from diskstats.")


def test_an_agent_without_samples_is_not_ready():
    assert ask(None) == ("503", "There are no samples yet.\n")
