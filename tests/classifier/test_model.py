"""Model: NumPy evaluation equals scikit-learn, and a bundle that does not fit is refused with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from sklearn.ensemble import HistGradientBoostingClassifier

from agent.errors import UsageError
from agent.vocabulary import CLASSES
from classifier.features import CORE_FEATURES, FEATURE_NAMES, FEATURES
from classifier.hierarchy import STRANGE, both_scores, shared
from classifier.model import ARRAYS_NAME, JSON_NAME, BundleError, load
from classifier.training import TrainingConfig, train_on
from classifier.training_data import Dataset
from classifier.training_fit import fit_hierarchy, trees_from
from classifier.trees import Trees, softmax

SMALL = TrainingConfig(max_iter=8, members=2, min_samples_leaf=10, max_bins=16)


def dataset(seed=0, groups=80, per_group=6):
    """Return rows in which two features tell the class, with a third of all values missing."""
    rng = np.random.default_rng(seed)
    size = groups * per_group
    labels = np.repeat(np.arange(groups) % len(CLASSES), per_group)
    rows = rng.random((size, len(FEATURES)))
    rows[:, 0] += labels
    rows[:, FEATURE_NAMES.index("util__p50__60")] = labels / 4 + rng.random(size) * 0.2
    rows[rng.random(rows.shape) < 0.3] = np.nan
    number = np.repeat(np.arange(groups), per_group)
    kinds = np.array(
        [f"{CLASSES[label]} {group // len(CLASSES) % 3}" for label, group in zip(labels, number, strict=True)]
    )
    return Dataset(rows=rows, labels=labels, groups=number, kinds=kinds)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bundle")
    train_on(SMALL, dataset(), directory)
    return directory


@pytest.fixture
def copy(bundle, tmp_path):
    for path in bundle.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def hard_rows(classifier, rng):
    """Return rows at and beside every threshold, with infinities, extremes and nothing but NaN."""
    width = classifier.n_features_in_
    rows = [np.full(width, value) for value in (np.nan, np.inf, -np.inf, 0.0, 1e308, -1e308)]
    for iteration in classifier._predictors:
        for tree in iteration:
            inner = tree.nodes[tree.nodes["is_leaf"] == 0]
            for column, threshold in zip(inner["feature_idx"], inner["num_threshold"], strict=True):
                for value in (threshold, np.nextafter(threshold, np.inf), np.nextafter(threshold, -np.inf)):
                    row = rng.normal(size=width)
                    row[rng.random(width) < 0.2] = np.nan
                    row[column] = value
                    rows.append(row)
    return np.array(rows)


@settings(deadline=None, max_examples=8)
@given(
    seed=some.integers(0, 10_000),
    depth=some.integers(1, 6),
    classes=some.integers(2, 5),
    missing=some.sampled_from([0.0, 0.2, 0.6]),
    grid=some.booleans(),
)
def test_trees_equal_scikit_learn(seed, depth, classes, missing, grid):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(240, 6))
    if grid:
        rows = np.round(rows * 2) / 2  # few values: thresholds fall between equal ones
    rows[:3, 0], rows[3:6, 1] = np.inf, -np.inf
    rows[rng.random(rows.shape) < missing] = np.nan
    labels = rng.integers(0, classes, 240)
    classifier = HistGradientBoostingClassifier(
        max_iter=6, max_depth=depth, min_samples_leaf=3, learning_rate=0.5, random_state=seed, early_stopping=False
    ).fit(rows, labels)
    trees = trees_from(classifier)
    for probe in (rows, hard_rows(classifier, rng)):
        expected = classifier.decision_function(probe).reshape(len(probe), -1)  # of two classes, one score
        assert np.abs(trees.raw(probe) - expected).max() <= 1e-9
        assert np.abs(softmax(both_scores(trees.raw(probe))) - classifier.predict_proba(probe)).max() <= 1e-9


@settings(deadline=None, max_examples=4)
@given(seed=some.integers(0, 10_000), other=some.booleans(), missing=some.sampled_from([0.1, 0.5]))
def test_both_levels_equal_scikit_learn(seed, other, missing):
    # P(class) = P(busy) x P(class | busy), each level by scikit-learn's own predict_proba.
    # The second level has one class more, made-up work, whose probability the others share.
    rng = np.random.default_rng(seed)
    labels = rng.choice([0, 1, 2, 3] if other else [0, 1, 2], 300)
    rows = rng.normal(size=(300, len(FEATURES)))
    rows[:, 0] += labels
    rows[rng.random(rows.shape) < missing] = np.nan
    data = Dataset(rows=rows, labels=labels, groups=np.arange(300), kinds=np.array(CLASSES)[labels])
    config = TrainingConfig(members=1, max_iter=6, min_samples_leaf=3, max_bins=16, copies=1, exclude_kinds=("mining",))
    fitted = fit_hierarchy(config, data, seed=seed)
    hierarchy = fitted.hierarchy((1.0, 1.0))
    activity, workload = fitted.activity[0], fitted.workload[0]
    probes = [hard_rows(activity, rng)[::3], hard_rows(workload, rng)[::3], rows]
    for probe in probes:
        busy = activity.predict_proba(probe)[:, 1]
        *shares, strange = workload.predict_proba(probe).T
        expected = np.zeros((len(probe), 4))
        expected[:, CLASSES.index("idle")] = 1 - busy
        for share, name in zip(shares, fitted.classes[:-1], strict=True):
            # Of the rest beside made-up work its share; of made-up work as much as every other answer.
            among = share / sum(shares)
            expected[:, CLASSES.index(name)] = busy * ((1 - strange) * among + strange / len(shares))
        assert np.abs(hierarchy.probabilities(probe) - expected).max() <= 1e-9
        assert np.abs(hierarchy.probabilities(probe).sum(axis=1) - 1).max() <= 1e-12
    assert ("other" in fitted.classes) == other
    assert fitted.classes[-1] == STRANGE


def test_what_is_strange_is_no_more_likely_one_class_than_another():
    classes = ("training", "inference", "other", STRANGE)
    # By hand: of the row's 0.6 that is not strange, training has 2/3; each answer gets a third of the 0.4 as well.
    row = np.array([[0.4, 0.1, 0.1, 0.4]])
    assert shared(row, classes)[0] == pytest.approx([0.6 * 4 / 6 + 0.4 / 3, 0.6 / 6 + 0.4 / 3, 0.6 / 6 + 0.4 / 3])
    assert shared(np.array([[0.0, 0.0, 0.0, 1.0]]), classes)[0] == pytest.approx([1 / 3] * 3)
    assert (shared(row[:, :3], classes[:3]) == row[:, :3]).all()


def test_a_hand_made_domain_refuses_by_profile(bundle):
    # Two prototypes at 0 and 10 with deviation 1; U refuses above 2, all others above 1.
    model = load(bundle)
    size = len(CORE_FEATURES)
    domain = replace(
        model.domain,
        means=np.stack([np.zeros(size), np.full(size, 10.0)]),
        deviations=np.ones((2, size)),
        thresholds=np.array([2.0, 1.0, 1.0, 1.0]),
    )
    rows = np.full((4, len(FEATURES)), np.nan)
    utilization = [FEATURE_NAMES.index(name) for name in ("util__p50__60", "util__mad__60", "memutil__p50__60")]
    power = FEATURE_NAMES.index("power__p50__60")
    rows[0, utilization] = 3.0  # distance 3 of 2
    rows[1, utilization] = 9.0  # distance 1 to the second, of 2
    rows[2, [*utilization, power]] = 3.0  # distance 3 of 1
    rows[3, utilization[:2]] = 3.0  # two features are too few
    assert domain.ratio(rows)[:3] == pytest.approx([1.5, 0.5, 3.0])
    assert np.isnan(domain.ratio(rows)[3])


def test_members_are_averaged():
    rng = np.random.default_rng(3)
    rows, labels = rng.normal(size=(120, 4)), rng.integers(0, 4, 120)
    members = [
        HistGradientBoostingClassifier(
            max_iter=4, max_depth=4, min_samples_leaf=3, random_state=seed, early_stopping=False
        ).fit(rows[seed * 20 :], labels[seed * 20 :])
        for seed in range(3)
    ]
    expected = np.mean([member.decision_function(rows) for member in members], axis=0)
    assert np.abs(trees_from(*members).raw(rows) - expected).max() <= 1e-9


def test_bundle_predicts_as_the_model_it_was_written_from(bundle):
    model = load(bundle)
    data = dataset(seed=5)
    prediction = model.predict(data.rows)
    assert prediction.probabilities.shape == (len(data.labels), 4)
    assert prediction.probabilities.sum(axis=1) == pytest.approx(1.0, abs=1e-12)
    right = prediction.probabilities.argmax(axis=1) == data.labels
    assert right.mean() > 0.7
    assert model.hierarchy.workload.trees.depth <= 6


def test_far_rows_are_out_of_domain_and_rows_of_nothing_are_not_judged(bundle):
    model = load(bundle)
    near = dataset(seed=6).rows
    assert np.nanmean(model.predict(near).out_of_domain_ratio <= 1.0) > 0.95
    assert (model.predict(np.full((1, len(FEATURES)), 50.0)).out_of_domain_ratio > 1.0).all()
    empty = model.predict(np.full((2, len(FEATURES)), np.nan))
    assert np.isnan(empty.out_of_domain_ratio).all()
    assert np.isfinite(empty.probabilities).all()


def test_equal_training_gives_equal_bytes(bundle, tmp_path):
    train_on(SMALL, dataset(), tmp_path)
    for path in bundle.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def change_json(directory, **changes):
    path = directory / JSON_NAME
    metadata = json.loads(path.read_text())
    metadata.update(changes)
    path.write_text(json.dumps(metadata))


def refusal(directory):
    with pytest.raises(BundleError) as caught:
        load(directory)
    assert isinstance(caught.value, UsageError)
    return str(caught.value)


def test_thresholds_go_by_what_a_row_holds(copy):
    change_json(copy, thresholds={"U": 0.95, "P": 0.9, "G": 0.7, "N": 0.8})
    model = load(copy)
    rows = np.full((4, len(FEATURES)), np.nan)
    rows[:, FEATURE_NAMES.index("util__p50__60")] = 0.5
    rows[1, FEATURE_NAMES.index("power__p50__60")] = 0.5
    rows[2:, FEATURE_NAMES.index("sm__p50__60")] = 0.5
    rows[3, FEATURE_NAMES.index("network_rx__p50__60")] = 0.5
    assert list(model.thresholds_of(rows)) == [0.95, 0.9, 0.7, 0.8]
    assert model.threshold == 0.8  # of G and N the one that asks for more


def test_a_bundle_of_the_schema_before_is_refused_in_one_sentence(copy):
    change_json(copy, schema=1)
    assert refusal(copy) == (
        f"model bundle {copy} does not fit: bundle schema 1, this version reads 2; "
        "train or install one for this version"
    )


def test_other_schema_estimator_or_classes_are_refused(copy):
    change_json(copy, schema=99)
    assert "schema 99" in refusal(copy)
    change_json(copy, schema=2, estimator="RandomForestClassifier")
    assert "RandomForestClassifier" in refusal(copy)
    change_json(copy, estimator="HistGradientBoostingClassifier", classes=["a"])
    assert "classes" in refusal(copy)


def test_other_features_are_refused_and_named(copy):
    features = json.loads((copy / JSON_NAME).read_text())["features"]
    change_json(copy, features=[features[1], features[0], *features[2:]])
    assert FEATURES[0].name in refusal(copy)
    change_json(copy, features=features[:-1])
    assert FEATURES[-1].name in refusal(copy)
    change_json(copy, features=[*features, {"name": "extra__mean__60", "window_s": 60.0, "unit": "ratio"}])
    assert f"{len(FEATURES) + 1} features" in refusal(copy)
    change_json(copy, features=[{**features[0], "unit": "watts"}, *features[1:]])
    assert "units" in refusal(copy)


def test_changed_or_cut_arrays_are_refused(copy):
    path = copy / ARRAYS_NAME
    packed = bytearray(path.read_bytes())
    packed[len(packed) // 2] ^= 1
    path.write_bytes(bytes(packed))
    assert "SHA-256" in refusal(copy)
    path.write_bytes(b"")
    assert "SHA-256" in refusal(copy)


def repack(directory, **arrays):
    """Replace arrays and correct the digest, as somebody would who builds a bundle by hand."""
    import hashlib

    path = directory / ARRAYS_NAME
    with np.load(path) as stored:
        merged = {name: stored[name] for name in stored.files}
    merged.update(arrays)
    np.savez(path, **{name: array for name, array in merged.items() if array is not None})
    change_json(directory, arrays_sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("workload_left", np.zeros_like),  # a circle
        ("activity_left", lambda a: a + a.size),  # outside
        ("workload_feature", lambda a: a + 60_000),  # no such column
        ("workload_root", lambda a: a[:-1]),  # not a multiple of the classes
        ("activity_value", lambda a: a * np.nan),
        ("activity_threshold", lambda a: a.astype(np.float32)),
        ("workload_threshold", lambda a: a[:-1]),
        ("domain_deviation", lambda a: a * 0.0),
        ("domain_mean", lambda a: a[:, :-1]),
        ("domain_mean", lambda a: a[:0]),
        ("activity_baseline", lambda _: None),
    ],
)
def test_arrays_that_are_no_trees_are_refused(copy, name, change):
    with np.load(copy / ARRAYS_NAME) as stored:
        array = stored[name]
    repack(copy, **{name: change(array)})
    assert "does not fit" in refusal(copy)


def test_pickled_objects_are_never_loaded(copy):
    repack(copy, workload_value=np.array([{"a": 1}], dtype=object))
    assert "does not fit" in refusal(copy)


def test_missing_or_broken_json_is_refused_with_its_path(copy):
    (copy / JSON_NAME).write_text("{")
    assert JSON_NAME in refusal(copy)
    (copy / JSON_NAME).write_text("[]")
    assert "no object" in refusal(copy)
    (copy / JSON_NAME).unlink()
    assert str(copy / JSON_NAME) in refusal(copy)


LEVELS = {
    "activity": {"classes": ["idle", "busy"], "temperature": 1.0},
    "workload": {"classes": ["training", "inference", "other"], "temperature": 1.0},
}
HALVES = dict.fromkeys("UPGN", 0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"levels": {**LEVELS, "activity": {"classes": ["idle", "busy"], "temperature": 0.0}}},
        {"levels": {**LEVELS, "workload": {**LEVELS["workload"], "temperature": "warm"}}},
        {"levels": {**LEVELS, "workload": {**LEVELS["workload"], "classes": ["inference", "training", "other"]}}},
        {"levels": {**LEVELS, "workload": {**LEVELS["workload"], "classes": ["training"]}}},
        {"levels": {"activity": LEVELS["activity"]}},
        {"thresholds": {**HALVES, "G": 2.0}},
        {"thresholds": {"U": 0.5}},
        {"domain_thresholds": {**HALVES, "U": 0.0}},
    ],
)
def test_numbers_out_of_range_are_refused(copy, changes):
    change_json(copy, **changes)
    assert "does not fit" in refusal(copy)


def test_too_deep_trees_are_refused():
    size = 9
    chain = {
        "root": np.array([0]),
        "feature": np.zeros(size, dtype=np.int64),
        "threshold": np.zeros(size),
        "missing_left": np.zeros(size, dtype=bool),
        "left": np.append(np.arange(1, size), size - 1),
        "right": np.append(np.arange(1, size), size - 1),
        "value": np.zeros(size),
        "baseline": np.zeros(1),
    }
    with pytest.raises(ValueError, match="deeper"):
        Trees.from_arrays(chain, features=1, classes=1)


def test_a_model_with_deeper_trees_cannot_be_exported():
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(400, 2))
    deep = HistGradientBoostingClassifier(max_iter=2, max_depth=9, min_samples_leaf=1, early_stopping=False)
    with pytest.raises(UsageError, match="deeper than 6"):
        trees_from(deep.fit(rows, rng.integers(0, 3, 400)))


def test_other_estimators_are_refused_by_name():
    from sklearn.tree import DecisionTreeClassifier

    with pytest.raises(UsageError, match="DecisionTreeClassifier"):
        trees_from(DecisionTreeClassifier().fit([[0.0], [1.0]], [0, 1]))
    with pytest.raises(UsageError, match="RandomForestClassifier"):
        train_on(replace(TrainingConfig(), estimator="RandomForestClassifier"), dataset(), None)


_WITHOUT_SCIKIT_LEARN = """
import sys
sys.modules["sklearn"] = None
import classifier.evaluation, classifier.labeller
assert not any(name.startswith(("sklearn.", "scipy")) for name in sys.modules)
"""


def test_the_model_needs_no_scikit_learn():
    subprocess.run([sys.executable, "-c", _WITHOUT_SCIKIT_LEARN], check=True)
