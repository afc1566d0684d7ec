"""Kernels that only wait: the word of before holds, and without one there is none."""

from __future__ import annotations

import numpy as np
import pytest

from classifier.smoothing import Smoother, SmoothingConfig
from tests.classifier.test_labeller import FakeModel, Node

#: As measured on an H100 whose communication kernel waits: 24 of 132 SMs, nothing computed, nothing moved.
SPIN = {
    "util": 1.0,
    "sm_active_ratio": 0.18,
    "tensor_active_ratio": 0.0,
    "dram_active_ratio": 0.001,
    "nvlink_transmit_bytes_per_second": 0.0,
    "nvlink_receive_bytes_per_second": 0.0,
}
WORK = {"util": 1.0, "sm_active_ratio": 0.9, "tensor_active_ratio": 0.5, "dram_active_ratio": 0.4}


@pytest.mark.parametrize("word", ["training", "inference", "other"])
def test_a_label_holds_as_it_is_while_kernels_only_wait(word):
    model = FakeModel(says=word)
    node = Node(model).feed(0, 61, pids=[1], **WORK)
    model.says = "training" if word == "inference" else "inference"
    calls = len(model.calls)
    node.feed(61, 3601, pids=[1], **SPIN)
    held = node.at(3600)
    assert (held.workload, held.since_monotonic_s, held.reason) == (word, 15.0, None)
    assert held.probabilities == node.at(80).probabilities
    assert max(held.probabilities, key=held.probabilities.get) == word
    assert held.explanation == ("kernels only wait, nothing computes or moves: as before",)
    # The model was asked for the last time while the 15 s before still held work.
    assert len(model.calls) - calls <= 3


def test_what_follows_a_wait_is_new_evidence_and_not_an_hour_of_it():
    """A wait of an hour does not make the first moment after it count for an hour."""
    model = FakeModel(says="training")
    node = Node(model).feed(0, 61, pids=[1], **WORK).feed(61, 3601, pids=[1], **SPIN)
    model.says = "inference"
    node.feed(3601, 3700, pids=[1], **WORK)
    assert node.at(3605).workload == "training"
    assert node.at(3605).probabilities["training"] > 0.8
    assert node.at(3695).workload == "inference"


def test_waiting_from_the_start_has_no_word_and_no_probabilities():
    node = Node(FakeModel()).feed(0, 301, **SPIN)
    decision = node.at(300)
    assert (decision.workload, decision.reason, decision.probabilities) == ("unknown", "waiting", None)
    assert node.labeller._model.calls == []
    assert {d.reason for d in node.decisions[3:]} == {"waiting"}
    node.feed(301, 400, **WORK)
    assert node.at(395).workload == "training"


def test_idle_does_not_come_back_for_a_wait_after_it():
    node = Node(FakeModel()).feed(0, 121, util=0.0, rich=False, sm_active_ratio=0.0).feed(121, 200, **SPIN)
    assert node.at(120).workload == "idle"
    assert (node.at(195).workload, node.at(195).reason) == ("unknown", "waiting")


@pytest.mark.parametrize("step", [1.0, 5.0, 10.0])
def test_the_rule_holds_at_any_interval(step):
    node = Node(FakeModel()).feed(0, 301, step=step, **SPIN)
    assert node.at(300).reason == "waiting"


@pytest.mark.parametrize(
    "more",
    [
        {"util": 0.9},
        {"sm_active_ratio": 0.5},
        {"tensor_active_ratio": 0.02},
        {"dram_active_ratio": 0.05},
        {"memory_utilization_ratio": 0.1},
        {"fp32_active_ratio": 0.05},
        {"nvlink_transmit_bytes_per_second": 5e6},
    ],
)
def test_whatever_computes_or_moves_is_the_models_to_judge(more):
    node = Node(FakeModel()).feed(0, 61, **{**SPIN, **more})
    assert node.labeller._model.calls
    assert node.at(60).reason != "waiting"


@pytest.mark.parametrize("missing", ["tensor_active_ratio", "dram_active_ratio"])
def test_without_profiling_a_wait_is_not_told_from_light_work(missing):
    spin = {name: value for name, value in SPIN.items() if name != missing}
    assert Node(FakeModel()).feed(0, 61, **spin).labeller._model.calls


def test_other_processes_end_what_was_held():
    node = Node(FakeModel()).feed(0, 61, pids=[1], **WORK).feed(61, 200, pids=[1], **SPIN)
    assert node.at(195).workload == "training"
    node.feed(200, 300, pids=[2], **SPIN)
    assert (node.at(295).workload, node.at(295).reason) == ("unknown", "waiting")


def test_without_a_list_of_processes_nobody_knows_who_waits():
    node = Node(FakeModel()).feed(0, 61, **WORK).feed(61, 200, **SPIN)
    assert node.at(60).workload == "training"
    assert (node.at(195).workload, node.at(195).reason, node.at(195).probabilities) == ("unknown", "waiting", None)


def test_waits_between_weak_evidence_do_not_keep_a_label_alive():
    smoother = Smoother(SmoothingConfig())
    weak, threshold, now_s = np.array([0.36, 0.34, 0.0, 0.30]), np.array([0.783, 0.783, np.inf, 0.783]), 0.0
    for _ in range(20):
        now_s += 5.0
        smoother.update(now_s, np.array([0.97, 0.01, 0.01, 0.01]), threshold)
    assert smoother.label == "training"
    for _ in range(20):
        for _ in range(2):
            now_s += 5.0
            smoother.update(now_s, weak, threshold)
        for _ in range(4):
            now_s += 5.0
            smoother.hold(now_s, "waiting")
    assert (smoother.label, smoother.reason) == ("unknown", "waiting")
