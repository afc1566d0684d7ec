"""Figures on inputs small enough to be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from classifier.report.metrics import (
    ABSTAINED,
    Estimate,
    area_under_risk,
    balanced_accuracy,
    bootstrap,
    calibration_error,
    count_flips,
    macro_f1,
    reliability,
    risk_coverage,
    time_to_label,
)


def ints(*values):
    return np.array(values, dtype=np.int64)


def test_balanced_accuracy_weighs_classes_and_not_windows():
    # Class 0: 3 of 4 right. Class 1: 0 of 1. Mean of 0.75 and 0.
    assert balanced_accuracy(ints(0, 0, 0, 0, 1), ints(0, 0, 0, 1, 0)) == pytest.approx(0.375)


def test_an_abstention_is_wrong():
    assert balanced_accuracy(ints(0, 0, 1, 1), ints(0, ABSTAINED, 1, 1)) == pytest.approx(0.75)


def test_balanced_accuracy_takes_weights():
    # Class 0: weight 3 of 4 right. Class 1: all right.
    assert balanced_accuracy(ints(0, 0, 1), ints(0, 1, 1), np.array([3.0, 1.0, 5.0])) == pytest.approx(0.875)


def test_nothing_has_no_accuracy():
    assert balanced_accuracy(ints(), ints()) is None
    assert macro_f1(ints(), ints()) is None
    assert calibration_error(np.empty(0), ints() == 1) is None
    assert area_under_risk(np.empty(0), ints() == 1) is None


def test_macro_f1():
    # Class 0: precision 2/3, recall 1: F1 0.8. Class 1: precision 1, recall 1/2: F1 2/3.
    assert macro_f1(ints(0, 0, 1, 1), ints(0, 0, 0, 1)) == pytest.approx((0.8 + 2 / 3) / 2)


def test_calibration_error_of_bins_of_equal_mass():
    # 30 windows, 2 a bin. Each bin: confidence 0.9, one of two right: |0.9 - 0.5| in every bin.
    assert calibration_error(np.full(30, 0.9), np.tile([True, False], 15)) == pytest.approx(0.4)
    # 15 windows, one a bin: 0.6 right is off by 0.4, 0.8 wrong by 0.8; ten of the first, five of the second.
    confidence = np.array([0.6] * 10 + [0.8] * 5)
    assert calibration_error(confidence, confidence < 0.7) == pytest.approx((10 * 0.4 + 5 * 0.8) / 15)


def test_errors_of_opposite_sign_do_not_cancel_across_bins():
    # The lower half is sure of too little, the upper of too much; in the mean both are right.
    confidence = np.concatenate([np.full(150, 0.4), np.full(150, 0.9)])
    right = np.concatenate([np.tile([True, False], 75)] * 2)
    assert calibration_error(confidence, right) == pytest.approx((0.1 + 0.4) / 2, abs=0.02)


def test_reliability_has_one_row_a_bin():
    rows = reliability(np.linspace(0, 1, 30), np.arange(30) >= 15)
    assert len(rows) == 15
    assert rows[0] == (pytest.approx(1 / 58), 0.0, 2)
    assert rows[-1][1] == 1.0


def test_risk_against_coverage():
    # Surest first: right, wrong, then two of equal confidence, answered together: one of each.
    confidence, right = np.array([0.9, 0.8, 0.5, 0.5]), ints(1, 0, 1, 0) == 1
    coverage, risk = risk_coverage(confidence, right)
    assert coverage.tolist() == [0.25, 0.5, 1.0]
    assert risk.tolist() == [0.0, 0.5, 0.5]
    # 0.25 * 0 + 0.25 * 0.5 + 0.5 * 0.5
    assert area_under_risk(confidence, right) == pytest.approx(0.375)


def test_time_to_the_right_label():
    times, words = [0, 5, 10, 15], ["training", "unknown", "unknown", "training"]
    assert time_to_label(times, words, 0.0, "training") == 0.0
    assert time_to_label(times, words, 3.0, "training") == 12.0  # what was said before the start does not count
    assert time_to_label(times, words, 0.0, "other") is None


def test_flips_count_after_the_first_word():
    assert count_flips(["unknown", "unknown", "training", "training"]) == 0
    # training to unknown, unknown to inference, inference to training
    assert count_flips(["unknown", "training", "unknown", "inference", "training"]) == 3
    assert count_flips(["unknown"]) == count_flips([]) == 0


def mean_of(values):
    return lambda weights: float(np.average(values, weights=weights)) if weights.sum() else None


def test_bootstrap_is_the_same_for_one_seed_and_another_for_another():
    values, clusters = np.arange(12.0), np.repeat(list("abcdef"), 2)
    first = bootstrap(clusters, mean_of(values), seed=1)
    assert first == bootstrap(clusters, mean_of(values), seed=1)
    assert first != bootstrap(clusters, mean_of(values), seed=2)
    assert first.value == pytest.approx(5.5)
    assert first.low < 5.5 < first.high


def test_bootstrap_draws_clusters_whole():
    # 100 windows of two sources: the mean of 2 draws of {0, 1} is 0, 0.5 or 1, however many windows there are.
    values = np.repeat([0.0, 1.0], 50)
    found = bootstrap(np.repeat(["a", "b"], 50), mean_of(values), draws=200)
    assert (found.low, found.value, found.high) == (0.0, 0.5, 1.0)


def test_bootstrap_keeps_every_stratum():
    seen = []

    def statistic(weights):
        seen.append((weights[:2].sum(), weights[2:].sum()))
        return 0.0

    bootstrap(ints(0, 1, 2, 3), statistic, strata=ints(0, 0, 1, 1), draws=50)
    assert set(seen) == {(2.0, 2.0)}


def test_one_cluster_has_no_interval():
    assert bootstrap(ints(1, 1), mean_of(np.array([0.0, 1.0]))) == Estimate(0.5)
    assert Estimate(0.5).format() == "0.500"
    assert Estimate(0.5, 0.25, 1.0).format() == "0.500 [0.250, 1.000]"
    assert Estimate(None).format() == "-"
