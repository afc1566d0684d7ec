"""Baselines answer as their descriptions say, and abstain where what they need is not measured."""

from __future__ import annotations

import numpy as np
import pytest

from agent.history import Series
from agent.vocabulary import CLASSES
from classifier.report.baselines import (
    ABSTAINED,
    KEMPNER_CATEGORIES,
    autocorrelation,
    availability,
    baselines,
    by_majority,
    kempner_category,
    named_classes,
    shuffled_range,
    three_rules,
    utilization_threshold,
    workloadtruth,
    workloadtruth_version,
)

TRAINING, INFERENCE, IDLE, OTHER = (CLASSES.index(name) for name in ("training", "inference", "idle", "other"))


def window(**values):
    """Return 60 s at 1 Hz of constant or given values."""
    times = np.arange(60.0)
    return {name: Series(times, np.broadcast_to(np.asarray(value, dtype=float), 60)) for name, value in values.items()}


@pytest.mark.parametrize(
    ("utilization", "answer"),
    [
        (0.9, TRAINING),
        (1.0, TRAINING),
        (0.85, TRAINING),
        (0.6, ABSTAINED),
        (0.4, ABSTAINED),
        (0.39, INFERENCE),
        (0.01, IDLE),
    ],
)
def test_the_round_numbers(utilization, answer):
    assert utilization_threshold(window(utilization_ratio=utilization)) == answer


def test_the_round_numbers_need_utilization():
    assert utilization_threshold(window(power_watts=300)) == ABSTAINED


@pytest.mark.parametrize(
    ("channels", "answer"),
    [
        ({"power_watts": 401}, TRAINING),
        ({"power_watts": 399, "utilization_ratio": 1.0}, INFERENCE),
        ({"power_watts": 70, "utilization_ratio": 0.0}, IDLE),
        ({"power_watts": 300, "tensor_active_ratio": 0.26, "sm_active_ratio": 1.0, "utilization_ratio": 1.0}, TRAINING),
        (
            {"power_watts": 300, "tensor_active_ratio": 0.24, "sm_active_ratio": 1.0, "utilization_ratio": 1.0},
            INFERENCE,
        ),
        ({"utilization_ratio": 1.0}, ABSTAINED),
    ],
)
def test_three_rules(channels, answer):
    assert three_rules(window(**channels)) == answer


def test_three_rules_hear_a_beat_in_nvlink():
    beat = 1e9 * (1 + np.cos(2 * np.pi * np.arange(60) / 4))  # a period of 4 s
    steps = window(nvlink_transmit_bytes_per_second=beat, power_watts=200, utilization_ratio=1.0)
    assert three_rules(steps) == TRAINING
    noise = np.random.default_rng(0).random(60)
    assert three_rules({**steps, **window(nvlink_transmit_bytes_per_second=noise)}) == INFERENCE


def test_autocorrelation_at_the_period():
    # 60 samples of a cosine of 4 s: at 4 s 56 of the 60 products are left, all of them squares.
    values = np.cos(2 * np.pi * np.arange(60) / 4)
    assert autocorrelation(Series(np.arange(60.0), values)) == pytest.approx(56 / 60)
    assert autocorrelation(Series(np.arange(60.0), np.ones(60))) is None
    assert autocorrelation(Series(np.arange(5.0), values[:5])) is None
    # A sample each 10 s holds no lag of 5 s or less.
    assert autocorrelation(Series(10 * np.arange(60.0), values)) is None


@pytest.mark.parametrize(
    ("sm", "tensor", "dram", "more", "category"),
    [
        (0.0, 0.0, 0.0, {"utilization_ratio": 0.0}, "idle"),
        (0.7, 0.5, 0.3, {}, "tensor-heavy compute"),
        (0.5, 0.2, 0.3, {}, "tensor compute"),
        (0.6, 0.0, 0.3, {"fp64_active_ratio": 0.3}, "FP64 / HPC compute"),
        (0.1, 0.0, 0.2, {"pcie_receive_bytes_per_second": 2e9}, "I/O or data-loading"),
        (0.1, 0.0, 0.2, {"memory_utilization_ratio": 0.4}, "I/O or data-loading"),
        (0.4, 0.1, 0.6, {}, "memory-bound"),
        (0.9, 0.1, 0.3, {}, "compute-heavy"),
        (0.6, 0.1, 0.3, {}, "compute-active"),
        (0.45, 0.1, 0.45, {}, "memory-active"),
        (0.2, 0.0, 0.1, {"utilization_ratio": 0.9}, "busy, low SM use"),
        (0.1, 0.0, 0.1, {"utilization_ratio": 0.1}, "low utilization"),
        (0.4, 0.1, 0.3, {}, "mixed / moderate"),
    ],
)
def test_kempner_categories_in_their_order(sm, tensor, dram, more, category):
    channels = {"sm_active_ratio": sm, "tensor_active_ratio": tensor, "dram_active_ratio": dram, **more}
    assert KEMPNER_CATEGORIES[kempner_category(window(**channels))] == category


def test_kempner_needs_profiling():
    assert kempner_category(window(utilization_ratio=1.0, power_watts=300)) == ABSTAINED


def test_categories_become_the_class_with_the_largest_share_of_its_windows():
    # Category 5 holds half of inference and a quarter of training; category 6 the rest of training.
    labels = np.array([TRAINING] * 4 + [INFERENCE] * 2)
    categories = np.array([5, 6, 6, 6, 5, 7])
    chosen = np.ones(6, dtype=bool)
    classes = by_majority(categories, labels, chosen)
    assert classes == {5: INFERENCE, 6: TRAINING, 7: INFERENCE, ABSTAINED: ABSTAINED}
    assert named_classes(np.array([5, 6, 8, ABSTAINED]), classes).tolist() == [
        INFERENCE,
        TRAINING,
        ABSTAINED,
        ABSTAINED,
    ]
    without = by_majority(categories, labels, categories != 7)
    assert named_classes(np.array([7]), without).tolist() == [ABSTAINED]


def test_columns_alone_vote_by_source_without_their_own():
    patterns = np.array([[1, 0], [1, 0], [1, 0], [0, 1], [0, 1]], dtype=bool)
    labels = ["training", "training", "inference", "inference", "inference"]
    # Source a has two logs and asks b alone, which says inference; c and d ask each other.
    assert availability(patterns, labels, ["a", "a", "b", "c", "d"]) == [
        "inference", "inference", "training", "inference", "inference",
    ]  # fmt: skip


def test_columns_alone_do_not_decide_a_tie():
    patterns = np.ones((3, 1), dtype=bool)
    assert availability(patterns, ["training", "inference", "training"], ["a", "b", "c"])[2] is None


def test_shuffled_labels_of_a_constant_answer_are_a_coin():
    said = np.tile([0.0, 1.0], (6, 1))  # always training
    assert shuffled_range(said, ["training"] * 3 + ["inference"] * 3) == (0.5, 0.5)


def test_shuffled_labels_span_both_sides_of_a_half():
    labels = ["training"] * 5 + ["inference"] * 5
    said = np.array([[0.0, 1.0]] * 5 + [[1.0, 0.0]] * 5)
    low, high = shuffled_range(said, labels)
    assert low < 0.5 < high
    assert (low, high) == shuffled_range(said, labels)
    assert shuffled_range(said[:5], labels[:5]) is None


@pytest.mark.skipif(workloadtruth_version() is None, reason="workloadtruth-cli is not installed (extra evaluate)")
def test_workloadtruth_is_asked_as_it_is():
    # Its own words: steady 90 %, growing memory, steady power is training; 1 %, 40 W is idle.
    growing = 1e10 + np.arange(60) * 10 * 2**20
    steady = window(utilization_ratio=0.9, memory_used_bytes=growing, power_watts=300, memory_total_bytes=8e10)
    assert workloadtruth(steady) == TRAINING
    assert workloadtruth(window(utilization_ratio=0.01, memory_used_bytes=1e9, power_watts=40)) == IDLE
    assert workloadtruth(window(utilization_ratio=0.9, memory_used_bytes=1e9)) == ABSTAINED
    assert any(baseline.name.startswith("workloadtruth-cli ") for baseline in baselines())
