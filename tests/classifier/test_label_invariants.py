"""What holds for every decision: on all fixtures, on simulated nodes, on recordings where present, and at random."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.clock import Instant
from agent.history import History
from agent.importers import open_trace
from agent.records import GpuKey, GpuOwners, GpuSample, Holder, Tick
from agent.vocabulary import CLASSES, WORKLOADS
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.model import Prediction, load
from classifier.results import Decision
from classifier.simulator import Scenario, available_kinds, simulate
from tests.classifier.fake_models import Unexplained

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = sorted((ROOT / "fixtures/traces").rglob("*.jsonl*"))
RECORDINGS = ROOT.parent / "shared/traces"
#: Long training with idle stretches, hours of idleness, all channels, a slow log, a server that starts and stops.
RECORDED = (
    "training/gwtrain__h100_8gpu_ckpt1.csv.gz",
    "training/gwtrain__h100_8gpu_ckpt1000.csv.gz",
    "training/atharvanihalani__t2_ddp_136m.csv.gz",
    "inference/atharvanihalani__i4_speculative_decoding.csv.gz",
    "inference/gwinfer__falcon-7b_palmetto-v100_2024-03-29-11-16-49.csv.gz",
    "inference/abigit240__ollama_rtx4050.csv.gz",
    "inference/carsonsidhu__gpu_metrics_vgg16.csv.gz",
)


def decided(ticks: Iterable[Tick], labeller: Labeller) -> Iterator[tuple[History, Decision]]:
    history, next_s = History(), -1.0
    for tick in ticks:
        history.ingest(tick)
        if tick.monotonic_s >= next_s:
            next_s = tick.monotonic_s + 5.0
            for decision in labeller.decide(Instant(tick.monotonic_s, tick.wall_s), history):
                yield history, decision


def check(decision: Decision) -> None:
    assert decision.workload in WORKLOADS
    assert (decision.workload == "unknown") == (decision.reason is not None)
    assert decision.since_monotonic_s <= decision.monotonic_s
    assert (decision.declared_class is None) == (decision.mismatch is None)
    probabilities = decision.probabilities
    assert (probabilities is None) == (decision.telemetry_probabilities is None)
    if decision.workload != "unknown":
        assert probabilities is not None
        assert max(probabilities, key=probabilities.__getitem__) == decision.workload
    if probabilities is not None:
        for named in (probabilities, decision.telemetry_probabilities):
            assert tuple(named) == CLASSES
            assert sum(named.values()) == pytest.approx(1.0, abs=1e-9)
        assert decision.telemetry_probabilities["idle"] == pytest.approx(probabilities["idle"], abs=1e-9)
        assert decision.reason in (None, "ambiguous")


def check_idle(history: History, decision: Decision) -> None:
    """Idle is utilisation p95 at most 2 % in the last minute, by numpy's own quantile; fast logs by whole seconds."""
    start_s = min(60.0, decision.window_s + 1e-6)
    series = history.gpus[decision.key].series("utilization_ratio", decision.monotonic_s, start_s)
    if decision.workload != "idle" or series.size < 20:
        return
    seconds, values = np.floor(series.times), series.values
    if np.median(np.diff(series.times)) < 0.7:
        values = np.array([values[seconds == second].mean() for second in np.unique(seconds)])
    # A second that the window's start cuts in two counts in one and not in the other.
    assert np.quantile(values, 0.95 - 1 / values.size) <= 0.02


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_every_decision_on_a_fixture(path: Path) -> None:
    count = 0
    for _, decision in decided(open_trace(path, lambda _: None), Labeller(load(), LabellerConfig())):
        check(decision)
        count += 1
    assert count > 0


@pytest.mark.parametrize("kind", available_kinds())
def test_every_decision_on_a_simulated_node(kind: str) -> None:
    gpu_count = 8 if kind == "mixed_node" else 2
    _, ticks = simulate(Scenario(kind=kind, gpu_count=gpu_count, duration_s=240.0, begin_s=900.0), seed=3)
    for history, decision in decided(ticks, Labeller(load(), LabellerConfig())):
        check(decision)
        check_idle(history, decision)


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings in {RECORDINGS}")
@pytest.mark.parametrize("name", RECORDED)
def test_every_decision_on_a_recording(name: str) -> None:
    trace = open_trace(RECORDINGS / name, lambda _: None)
    ticks = itertools.takewhile(lambda tick: tick.monotonic_s < 900.0, trace)
    for history, decision in decided(ticks, Labeller(load(), LabellerConfig())):
        check(decision)
        check_idle(history, decision)


class Moods(Unexplained):
    """A model that says whatever it is told, moment by moment."""

    threshold = 0.7
    deciding_features = ()

    def __init__(self, moods: list[tuple[int, float, float]]) -> None:
        self._moods = itertools.cycle(moods)

    def predict(self, rows: np.ndarray) -> Prediction:
        leader, sure, ratio = next(self._moods)
        row = np.full(4, (1.0 - sure) / 3)
        row[leader] = sure
        return Prediction(probabilities=np.tile(row, (len(rows), 1)), out_of_domain_ratio=np.full(len(rows), ratio))


@settings(max_examples=60, deadline=None)
@given(
    moods=st.lists(
        st.tuples(st.integers(0, 3), st.floats(0.25, 1.0), st.sampled_from([0.1, 0.9, 1.1])), min_size=1, max_size=12
    ),
    stretches=st.lists(
        st.tuples(
            st.sampled_from([None, 0.0, 0.02, 0.03, 1.0]),
            st.integers(1, 90),
            st.sampled_from([None, "training", "inference", "other", "idle"]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_every_decision_at_random(moods: list, stretches: list) -> None:
    """With declarations that come and go; without them telemetry gives the same, sample for sample."""
    values = [(value, declared) for value, seconds, declared in stretches for _ in range(seconds)]
    key = GpuKey(0)

    def ticks(*, is_declared: bool) -> Iterator[Tick]:
        for t, (value, declared) in enumerate(values):
            at = {"monotonic_s": float(t), "wall_s": float(t)}
            holders = (Holder(job_key="a", declared_class=declared),) if is_declared else ()
            owners = GpuOwners(**at, key=key, holders=holders)
            sample = GpuSample(**at, key=key, utilization_ratio=value, sm_active_ratio=value)
            yield Tick(**at, records=(owners, sample))

    plain = [decision for _, decision in decided(ticks(is_declared=False), Labeller(Moods(moods), LabellerConfig()))]
    for before, (history, decision) in zip(
        plain, decided(ticks(is_declared=True), Labeller(Moods(moods), LabellerConfig())), strict=True
    ):
        check(before)
        check(decision)
        check_idle(history, decision)
        assert decision.telemetry_probabilities == before.probabilities
