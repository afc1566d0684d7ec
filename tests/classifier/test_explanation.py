"""What decided: contributions of features, the three that are told, and their words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from agent.clock import Instant, stopwatch
from agent.history import History
from agent.records import GpuKey, GpuLimits, GpuOwners, GpuSample, Holder, Tick
from agent.vocabulary import CLASSES
from classifier.explanation import Cause, causes_of
from classifier.features import FEATURE_NAMES, FEATURES
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.model import Prediction, load
from classifier.simulator import Scenario, simulate
from classifier.training import trees_from
from classifier.trees import Trees
from classifier.words import family, say
from tests.classifier.fake_models import Domain

NAN = np.nan


def stump(threshold: float, left: float, right: float, cover: tuple[int, int] | None = None, feature: int = 1) -> Trees:
    """Return one tree of two leaves for a single class."""
    arrays = {
        "root": np.array([0], dtype=np.uint32),
        "feature": np.array([feature, 0, 0], dtype=np.uint16),
        "threshold": np.array([threshold, np.inf, np.inf]),
        "missing_left": np.array([True, True, True]),
        "left": np.array([1, 1, 2], dtype=np.uint32),
        "right": np.array([2, 1, 2], dtype=np.uint32),
        "value": np.array([0.0, left, right]),
        "baseline": np.array([0.0]),
    }
    if cover:
        arrays["cover"] = np.array([0, *cover], dtype=np.uint32)
    return Trees.from_arrays(arrays, features=3, classes=1)


@pytest.mark.parametrize(
    ("cover", "value", "expected"),
    [
        # Leaves of -1 and 3: 1 is expected where they count the same, 0 where three of four windows go left.
        (None, 0.0, -2.0),
        (None, 9.0, 2.0),
        ((3, 1), 0.0, -1.0),
        ((3, 1), 9.0, 3.0),
        ((3, 1), NAN, -1.0),
    ],
)
def test_a_branch_is_put_to_the_feature_that_was_asked(cover, value, expected) -> None:
    contributions = stump(5.0, -1.0, 3.0, cover).contributions(np.array([7.0, value, NAN]), 3)
    assert contributions.tolist() == [[0.0], [expected], [0.0]]


def test_contributions_sum_to_the_score_and_equal_a_walk_over_scikit_learns_nodes() -> None:
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(300, 6))
    rows[rng.random(rows.shape) < 0.3] = NAN
    classifier = HistGradientBoostingClassifier(
        max_iter=5, max_depth=4, min_samples_leaf=3, random_state=0, early_stopping=False
    ).fit(rows, rng.integers(0, 4, 300))
    trees = trees_from(classifier)

    def mean(nodes, at: int) -> tuple[float, float]:
        node = nodes[at]
        if node["is_leaf"]:
            return float(node["value"]) * int(node["count"]), int(node["count"])
        (left, left_count), (right, right_count) = mean(nodes, node["left"]), mean(nodes, node["right"])
        return left + right, left_count + right_count

    def expected(nodes, at: int) -> float:
        total, count = mean(nodes, at)
        return total / count

    for row in rows[:20]:
        walked = np.zeros((6, 4))
        for iteration in classifier._predictors:
            for position, tree in enumerate(iteration):
                nodes, at = tree.nodes, 0
                while not nodes[at]["is_leaf"]:
                    node = nodes[at]
                    value = row[node["feature_idx"]]
                    left = node["missing_go_to_left"] if np.isnan(value) else value <= node["num_threshold"]
                    child = int(node["left"] if left else node["right"])
                    walked[node["feature_idx"], position] += expected(nodes, child) - expected(nodes, at)
                    at = child
        contributions = trees.contributions(row, 6)
        assert np.abs(contributions - walked).max() <= 1e-9
        start = [trees.expected[trees.root[position::4]].sum() for position in range(4)]
        assert np.abs(contributions.sum(axis=0) + start + trees.baseline - trees.raw(row[np.newaxis])[0]).max() <= 1e-9


def test_a_leaf_without_cover_is_refused() -> None:
    with pytest.raises(ValueError, match="cover"):
        stump(5.0, -1.0, 3.0, (0, 4))


VALUES = (-0.6, 0.0, 0.003, 0.37, 0.98, 3.2)


@pytest.mark.parametrize("name", FEATURE_NAMES)
def test_every_feature_has_words_of_its_own(name) -> None:
    for value in VALUES:
        text = say(name, value)
        assert 10 <= len(text) <= 110
        assert "_" not in text
        assert "nan" not in text
        # A long window says so, and no other feature of the table is told in the same words.
        twins = [other for other in FEATURE_NAMES if other != name and say(other, value) == text]
        assert not twins, (text, twins)


def test_words_worked_out_by_hand() -> None:
    assert say("tensor_sm__mean_ratio__60", 0.58) == "tensor cores active 58 % of SM time (60 s)"
    assert say("power__p50__60", 0.876) == "power 88 % of its limit (60 s)"
    assert say("memory__swing__300", 0.001) == "memory held flat, swing 0.1 % of the card (5 min)"
    # log10(1 + 2.1e9 / 1e6) = 3.3224
    assert say("nvlink_tx__p50__60", 3.3224) == "NVLink sending 2.1 GB/s (60 s)"
    assert say("pcie_rx__p95__60", 0.0) == "PCIe to the GPU rarely above under 1 MB/s (60 s)"
    assert say("watts__cadence_lag__300", 12.4) == "steps every 12 s in power (5 min)"
    assert say("watts_nvlink_tx__cadence_agreement__300", 0.71).startswith("power and NVLink sending step together")
    assert say("memory__slope__300", -0.25) == "memory held falls by 25 % of the card in 5 min (5 min)"


def test_parts_that_are_not_known_are_written_as_they_are_called() -> None:
    assert say("warp_drive__new_thing__900", 0.25) == "warp drive: new thing 0.25 (15 min)"
    assert say("util__new_thing__60", 0.25) == "utilisation: new thing 0.25 (60 s)"
    assert say("plain", 0.25).startswith("plain")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("fast__peak_period__60", 0.42, "power at 10 Hz swings every 0.42 (60 s)"),
        ("watts__sync_median__300", 0.8, "power moves as the other GPUs, +0.80 (5 min)"),
        (
            "sm_nvlink_tx__correlation__300",
            -0.5,
            "NVLink sending rests while multiprocessors active is high, -0.50 (5 min)",
        ),
        ("filesystem_written__burst_rate__900", 1.5, "network file systems writing in bursts, 1.5 in 5 min (15 min)"),
        ("util__busy_share__900", 0.04, "utilisation above 2 % in 4.0 % of the samples (15 min)"),
    ],
)
def test_words_for_steps_bursts_and_the_other_gpus(name, value, words) -> None:
    # The unit comes from the table: " s" and the like stand where the table has the feature.
    assert say(name, value).replace("0.42 s", "0.42") == words


def test_features_of_one_signal_are_one_family_and_cadences_another() -> None:
    assert {family(name) for name in ("power__p50__60", "watts__relative_swing__60")} == {"power"}
    steps = ("watts__cadence_lag__300", "util__cadence_height__300", "fast__peak_period__60")
    assert {family(name) for name in steps} == {"cadence"}
    assert len({family(feature.name) for feature in FEATURES}) >= 12


@dataclass
class Additive:
    """A model that adds `weights` (by feature name, for training) to the scores, and says what it is told."""

    weights: dict[str, float]
    row: tuple[float, ...] = (0.97, 0.01, 0.01, 0.01)
    ratio: float = 0.5
    threshold: float = 0.7
    deciding_features: tuple[str, ...] = ()
    calls: int = 0
    domain = Domain()

    def thresholds_of(self, rows):
        return np.full(len(rows), self.threshold)

    def contributions(self, row):
        self.calls += 1
        added = np.zeros((len(FEATURE_NAMES), len(CLASSES)))
        for name, weight in self.weights.items():
            added[FEATURE_NAMES.index(name), CLASSES.index("training")] = weight
        return added

    def predict(self, rows):
        return Prediction(
            probabilities=np.tile(np.array(self.row), (len(rows), 1)),
            out_of_domain_ratio=np.full(len(rows), self.ratio),
        )


def told(model, label, measured=FEATURE_NAMES, probabilities=(0.7, 0.2, 0.0, 0.1)) -> list[str]:
    row = np.array([0.5 if name in measured else NAN for name in FEATURE_NAMES])
    causes = causes_of(model, row, np.array(probabilities), label)
    return [(f"{cause.workload}:" if cause.workload else "") + FEATURE_NAMES[cause.position] for cause in causes]


def test_the_strongest_feature_of_each_of_the_three_signals_that_add_most() -> None:
    weights = {"util__p50__60": 0.5, "power__p50__60": 0.4, "power__p95__60": 0.6, "memory__p50__60": 0.2}
    model = Additive({**weights, "tensor__p50__60": 0.1, "dram__p50__60": -3.0})
    # Power adds 1.0 in two features, utilisation 0.5, memory 0.2; tensor is the fourth, DRAM spoke against it.
    assert told(model, "training") == ["power__p95__60", "util__p50__60", "memory__p50__60"]
    # Of power, the stronger feature is not measured now; below 0.05 nothing is told.
    less = [name for name in FEATURE_NAMES if name != "power__p95__60"]
    assert told(model, "training", less)[0] == "power__p50__60"
    assert told(Additive({"util__p50__60": 0.04}), "training") == []
    # What speaks against training speaks for inference.
    assert told(model, "inference") == ["dram__p50__60"]


def test_where_two_classes_are_close_both_sides_are_told() -> None:
    model = Additive({"util__p50__60": 0.5, "power__p95__60": 0.6, "memory__p50__60": 0.2, "dram__p50__60": -1.0})
    assert told(model, None) == ["training:power__p95__60", "training:util__p50__60", "inference:dram__p50__60"]
    assert told(model, None, probabilities=(0.3, 0.2, 0.0, 0.5)) == [
        "other:dram__p50__60",
        "training:power__p95__60",
        "training:util__p50__60",
    ]
    row = np.full(len(FEATURE_NAMES), 0.5)
    cause = Cause(FEATURE_NAMES.index("power__p50__60"), "training")
    assert cause.words(row) == "for training: power 50 % of its limit (60 s)"
    assert cause.words(row * NAN) is None


KEY = GpuKey(0, "GPU-1")


def decisions(model, seconds, util=0.9, holders=(), config=None, **more):
    labeller, history, found = Labeller(model, config or LabellerConfig()), History(), []
    for t in range(seconds):
        at = {"monotonic_s": float(t), "wall_s": float(t)}
        limits = GpuLimits(**at, key=KEY, power_limit_watts=700.0)
        sample = GpuSample(**at, key=KEY, utilization_ratio=util, sm_active_ratio=util / 2, power_watts=70.0, **more)
        history.ingest(Tick(**at, records=(limits, sample, GpuOwners(**at, key=KEY, holders=holders))))
        if t % 5 == 0:
            found += labeller.decide(Instant(float(t), float(t)), history)
    return found


def test_causes_are_found_with_the_label_and_once_a_minute_and_their_values_are_of_now() -> None:
    model = Additive({"util__p50__60": 0.5, "power__p50__60": 0.4})
    found = decisions(model, 200)
    assert found[2].explanation == ()  # too few samples
    assert found[-1].explanation == ("utilisation 90 % (60 s)", "power 10 % of its limit (60 s)")
    assert list(found[-1].features)[:2] == ["util__p50__60", "power__p50__60"]
    # At 15, 75, 135 and 195 s.
    assert model.calls == 4


def test_idle_gaps_strange_and_poor_logs_are_explained_without_the_trees() -> None:
    model = Additive({})
    assert decisions(model, 61, util=0.0)[-1].explanation == (
        "utilisation rarely above 0 % (60 s)",
        "power 10 % of its limit (60 s)",
    )
    far = decisions(Additive({}, ratio=1.5), 61)[-1]
    assert far.reason == "out_of_domain"
    assert far.explanation == tuple(say(name, far_value) for name, far_value in list(far.features.items())[:3])
    poor = decisions(Additive({}, ratio=NAN), 61)[-1]
    assert poor.reason == "too_few_samples"
    assert model.calls == 0


def test_a_log_with_too_few_columns_says_what_is_there() -> None:
    labeller, history = Labeller(load(), LabellerConfig()), History()
    for t in range(61):
        sample = GpuSample(monotonic_s=float(t), wall_s=0.0, key=KEY, utilization_ratio=0.9)
        history.ingest(Tick(monotonic_s=float(t), wall_s=0.0, records=(sample,)))
    decision = labeller.decide(Instant(60.0, 0.0), history)[0]
    assert decision.reason == "too_few_channels"
    assert decision.explanation == ("all that is measured here: utilisation",)


def test_a_declaration_that_decided_is_told_first() -> None:
    open_row = (0.45, 0.40, 0.05, 0.10)
    model = Additive({"util__p50__60": 0.5}, row=open_row)
    said = decisions(model, 61, holders=(Holder(job_key="a", declared_class="training"),))[-1]
    assert (said.workload, said.explanation[0]) == ("training", "declared training by its job or program")
    sure = decisions(Additive({"util__p50__60": 0.5}), 61, holders=(Holder(job_key="a", declared_class="training"),))
    assert sure[-1].explanation == ("utilisation 90 % (60 s)",)


def test_the_shipped_model_explains_a_simulated_node_in_a_millisecond() -> None:
    model = load()
    labeller, history, last = Labeller(model, LabellerConfig()), History(), ()
    scenario = Scenario(kind="data_parallel_training", gpu_count=2, duration_s=120.0, begin_s=900.0)
    for tick in simulate(scenario, seed=3)[1]:
        history.ingest(tick)
        if round(tick.monotonic_s) % 5 == 0:
            last = labeller.decide(Instant(tick.monotonic_s, tick.wall_s), history)
    for decision in last:
        assert 1 <= len(decision.explanation) <= 3
        assert all("nan" not in text for text in decision.explanation)
    row = np.random.default_rng(0).random(len(FEATURE_NAMES))
    probabilities = np.array([0.7, 0.1, 0.1, 0.1])
    best = min(timed(lambda: causes_of(model, row, probabilities, "training")) for _ in range(20))
    assert best < 0.001


def timed(call) -> float:
    start = stopwatch()
    call()
    return stopwatch() - start
