"""What decided: contributions of features, the three that are told, and their words."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier

from classifier.training import trees_from
from classifier.trees import Trees

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
