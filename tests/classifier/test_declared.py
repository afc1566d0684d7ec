"""What is declared beside what telemetry says: combined probabilities, the label, and mismatches that last."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from agent.clock import Instant
from agent.history import History
from agent.records import GpuKey, GpuOwners, GpuProcess, GpuSample, GpuSlowSample, Holder, Tick
from agent.vocabulary import CLASSES
from classifier.declared import DeclaredConfig, combine, declared_of
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.model import Prediction
from classifier.results import Decision
from tests.classifier.fake_models import Unexplained

KEY = GpuKey(0, "GPU-1")
CONFIG = DeclaredConfig()


class Says(Unexplained):
    """A model that gives `row` (training, inference, idle, other) whatever it is shown."""

    threshold = 0.7
    deciding_features = ()

    def __init__(self, *row: float, ratio: float = 0.5) -> None:
        self.row, self.ratio = row, ratio

    def predict(self, rows: np.ndarray) -> Prediction:
        probabilities = np.tile(np.array(self.row), (len(rows), 1))
        return Prediction(probabilities=probabilities, out_of_domain_ratio=np.full(len(rows), self.ratio))


class Node:
    """One GPU that is fed once a second with what its holders declare, and decided every five seconds."""

    def __init__(self, model: Says, config: LabellerConfig | None = None) -> None:
        self.history, self.model = History(), model
        self.labeller = Labeller(model, config or LabellerConfig())
        self.decisions: list[Decision] = []

    def feed(self, start: int, end: int, *holders: Holder, owners: bool = True, util=0.9, rich=True, pid=7) -> Node:
        for t in range(start, end):
            at = {"monotonic_s": float(t), "wall_s": 1000.0 + t}
            records = [GpuSample(**at, key=KEY, utilization_ratio=util, sm_active_ratio=0.5 * util if rich else None)]
            if t % 5 == 0:
                records.append(GpuSlowSample(**at, key=KEY, processes=(GpuProcess(pid),)))
            if t % 5 == 0 and owners:
                records.append(GpuOwners(**at, key=KEY, holders=holders))
            self.history.ingest(Tick(**at, records=tuple(records)))
            if t % 5 == 0:
                self.decisions += self.labeller.decide(Instant(float(t), 1000.0 + t), self.history)
        return self

    def at(self, t: float) -> Decision:
        return next(decision for decision in self.decisions if decision.monotonic_s == t)

    def raised(self) -> list[float]:
        """Return the times at which `mismatch` changed, without the first."""
        found = [(d.monotonic_s, d.mismatch) for d in self.decisions]
        return [time for (_, before), (time, after) in itertools.pairwise(found) if before is not after]


def job(declared: str | None, key: str = "a") -> Holder:
    return Holder(job_key=key, declared_class=declared)


OPEN = (0.45, 0.40, 0.05, 0.10)  # telemetry that cannot tell


def test_the_odds_of_the_declared_class_are_raised_and_idle_stays() -> None:
    row = np.array(OPEN)
    # Right 19 of 20 times, wrong with half of 1 in 20 each: 0.45 * 0.95, 0.40 * 0.025 and 0.10 * 0.025 are 0.4275, 0.01
    # and 0.0025, in all 0.44, and share the 0.95 that is not idle.
    assert combine(CONFIG, row, "training") == pytest.approx(
        [0.95 * 0.4275 / 0.44, 0.95 * 0.01 / 0.44, 0.05, 0.95 * 0.0025 / 0.44]
    )
    assert combine(CONFIG, row, None) is row
    assert combine(replace(CONFIG, error_ratio=0.667), row, "training") == pytest.approx(row)
    only_idle = np.array([0.0, 0.0, 1.0, 0.0])
    assert combine(CONFIG, only_idle, "training") == pytest.approx(only_idle)


@pytest.mark.parametrize(
    ("holders", "workload"),
    [
        ((), None),
        ((job(None),), None),
        ((job("inference"),), "inference"),
        ((job("inference"), job(None, "b")), "inference"),
        ((job("inference"), job("inference", "b")), "inference"),
        ((job("inference"), job("training", "b")), None),
        ((job("inference"), job("training", "a")), None),
        ((job("idle"),), None),
        ((job("nonsense"),), None),
    ],
)
def test_declared_is_what_all_holders_that_declare_agree_on(holders: tuple[Holder, ...], workload: str | None) -> None:
    gpu = Node(Says(*OPEN)).feed(0, 1, *holders).history.gpus[KEY]
    assert declared_of(CONFIG, gpu, 0.0).workload == workload
    assert declared_of(CONFIG, gpu, 120.0).workload == workload
    assert declared_of(CONFIG, gpu, 121.0).workload is None


def test_a_declaration_decides_what_telemetry_leaves_open_and_telemetry_stays_visible() -> None:
    decision = Node(Says(*OPEN)).feed(0, 61, job("training")).at(60)
    assert (decision.workload, decision.reason, decision.declared_class) == ("training", None, "training")
    assert decision.probabilities["training"] == pytest.approx(0.95 * 0.4275 / 0.44)
    assert tuple(decision.telemetry_probabilities.values()) == pytest.approx(OPEN)
    assert decision.mismatch is False
    alone = Node(Says(*OPEN)).feed(0, 61).at(60)
    assert (alone.workload, alone.reason, alone.declared_class, alone.mismatch) == ("unknown", "ambiguous", None, None)


def test_against_telemetry_that_is_sure_a_declaration_does_not_win() -> None:
    # 0.96 against 38 * 0.02: neither 0.96 / 1.73 nor 0.76 / 1.73 (with 0.99 not idle) is above 0.7.
    decision = Node(Says(0.02, 0.96, 0.01, 0.01)).feed(0, 61, job("training")).at(60)
    assert (decision.workload, decision.reason) == ("unknown", "ambiguous")
    decision = Node(Says(0.001, 0.997, 0.001, 0.001)).feed(0, 61, job("training")).at(60)
    assert decision.workload == "inference"


def test_a_declaration_helps_where_only_nvidia_smi_columns_exist_after_five_minutes() -> None:
    node = Node(Says(0.80, 0.15, 0.01, 0.04)).feed(0, 351, job("training"), rich=False)
    assert (node.at(295).workload, node.at(295).reason) == ("unknown", "ambiguous")
    # 30.4 of 30.59 times 0.99 is 0.984, above 0.97; telemetry alone stays far below.
    assert node.at(350).workload == "training"
    assert Node(Says(0.80, 0.15, 0.01, 0.04)).feed(0, 351, rich=False).at(350).workload == "unknown"


def test_a_declaration_says_nothing_without_evidence_out_of_domain_or_about_idleness() -> None:
    far = Node(Says(*OPEN, ratio=1.5)).feed(0, 61, job("training")).at(60)
    assert (far.workload, far.reason, far.probabilities) == ("unknown", "out_of_domain", None)
    early = Node(Says(*OPEN)).feed(0, 11, job("training")).at(10)
    assert (early.workload, early.reason, early.declared_class) == ("unknown", "too_few_samples", "training")
    idle = Node(Says(*OPEN)).feed(0, 1201, job("training"), util=0.0).at(1200)
    assert (idle.workload, idle.mismatch) == ("idle", False)
    assert idle.probabilities == idle.telemetry_probabilities


def test_a_declaration_that_ends_leaves_what_telemetry_says() -> None:
    node = Node(Says(*OPEN)).feed(0, 101, job("training")).feed(101, 401)
    assert node.at(100).workload == "training"
    after = node.at(400)
    assert (after.workload, after.declared_class, after.mismatch) == ("unknown", None, None)
    assert tuple(after.probabilities.values()) == pytest.approx(OPEN, abs=1e-3)
    assert after.since_monotonic_s > 100


SERVES = (0.02, 0.96, 0.01, 0.01)


def test_a_mismatch_comes_after_ten_minutes_and_goes_with_hysteresis() -> None:
    node = Node(Says(*SERVES)).feed(0, 1001, job("training"))
    # The first label is that of 15 s: 600 s of disagreement are full at 615.
    assert node.raised() == [615]
    node.model.row = (0.96, 0.02, 0.01, 0.01)
    node.feed(1001, 2001, job("training"))
    changed = node.raised()[1]
    turned = next(
        d.monotonic_s for d in node.decisions if d.monotonic_s > 1000 and d.telemetry_probabilities["training"] > 0.7
    )
    # 300 s are left of it 600 s after the telemetry-only label turned, which is within a minute of the model's turn.
    assert 1000 + 600 <= changed <= turned + 600 + 30
    assert node.decisions[-1].mismatch is False


def test_without_a_disagreement_of_ten_minutes_there_is_no_mismatch() -> None:
    node = Node(Says(*SERVES)).feed(0, 611, job("training"))
    assert {d.mismatch for d in node.decisions} == {False}
    assert {d.mismatch for d in Node(Says(*SERVES)).feed(0, 1201, job("inference")).decisions} == {False}
    assert {d.mismatch for d in Node(Says(*OPEN)).feed(0, 1201, job("training")).decisions} == {False}


def test_a_mismatch_survives_a_gap_in_samples_and_in_owners() -> None:
    node = Node(Says(*SERVES)).feed(0, 401, job("training")).feed(460, 1001, job("training"))
    # 385 s until 400; at 475 there is evidence again, and 215 s more are full at 690.
    assert node.raised() == [690]
    silent = Node(Says(*SERVES)).feed(0, 401, job("training")).feed(401, 601, owners=False).feed(
        601, 1001, job("training")
    )  # fmt: skip
    # Owners of 400 count until 520 (505 s by then), and again from 605 on: 95 s more are full at 700.
    assert {d.mismatch for d in silent.decisions if 525 <= d.monotonic_s <= 600} == {None}
    assert silent.raised() == [525, 605, 700]


def test_another_job_starts_anew_and_a_restart_of_the_same_job_does_not() -> None:
    other = Node(Says(*SERVES)).feed(0, 401, job("training")).feed(401, 1101, job("training", "b"))
    # The first decision with the new job is that of 405, the second one brings its first 5 s.
    assert other.raised() == [1005]
    same = Node(Says(*SERVES)).feed(0, 401, job("training")).feed(401, 1101, job("training"), pid=8)
    # Other processes: evidence starts at 405, a label is there at 420; 385 s before and 215 s after.
    assert same.raised() == [635]


def test_what_is_declared_instead_starts_anew() -> None:
    node = Node(Says(*SERVES)).feed(0, 701, job("training")).feed(701, 1101, job("other"))
    assert node.raised() == [615, 705]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("error_ratio", 0.0),
        ("error_ratio", float("nan")),
        ("error_ratio", 0.7),
        ("stale_seconds", 0.0),
        ("mismatch_seconds", 0.0),
        ("mismatch_seconds", 1000.0),
        ("mismatch_window_seconds", 1e6),
        ("mismatch_clear_seconds", 700.0),
    ],
)
def test_values_that_make_no_sense_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        DeclaredConfig(**{key: value})


def test_classes_are_in_the_order_the_rows_here_assume() -> None:
    assert CLASSES == ("training", "inference", "idle", "other")
