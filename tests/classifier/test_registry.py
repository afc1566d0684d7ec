"""Every detector of the list can be switched off, and then nothing is said of its anomalies."""

from __future__ import annotations

import dataclasses

import pytest

from agent.config import load_config
from agent.vocabulary import ANOMALIES
from classifier.detectors import Learner
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.registry import DetectorsConfig, build_detectors
from tests.classifier.detector_histories import WORKS, Node

#: Tables of what is not a detector but shared by some.
SHARED = {"baseline", "step_pace"}
SWITCHED = sorted({field.name for field in dataclasses.fields(DetectorsConfig)} - SHARED)


def built(config: DetectorsConfig):
    baselines = PowerBaselines(config.baseline)
    return baselines, build_detectors(config, baselines)


def anomalies(config: DetectorsConfig) -> list[str]:
    return [anomaly for detector in built(config)[1] for anomaly in detector.anomalies]


def test_each_anomaly_is_decided_in_one_place_and_is_a_word_of_the_vocabulary():
    found = anomalies(DetectorsConfig())
    assert len(found) == len(set(found))
    assert set(found) <= set(ANOMALIES)


@pytest.mark.parametrize("name", SWITCHED)
def test_switched_off_its_anomalies_have_no_series_and_the_others_stay(tmp_path, name):
    file = tmp_path / "warpwatch.toml"
    file.write_text(f"[detectors.{name}]\nenabled = false\n")
    config = load_config(file).detectors
    everything, left = anomalies(DetectorsConfig()), anomalies(config)
    gone = set(everything) - set(left)
    assert name in gone
    assert gone <= {name, "collective_wait"}  # decided together with stalled_collective
    baselines, detectors = built(config)
    node = Node(detectors, baselines, lambda _, __: WORKS, gpus=2)
    said = {assessment.anomaly for _, found in node.play(30) for assessment in found}
    assert said
    assert said.isdisjoint(gone)


def test_with_all_switched_off_nothing_is_said():
    off = {name: dataclasses.replace(getattr(DetectorsConfig(), name), enabled=False) for name in SWITCHED}
    assert anomalies(DetectorsConfig(**off)) == []


def test_learners_have_names_of_their_own():
    baselines, detectors = built(DetectorsConfig())
    names = [one.learner for one in (baselines, *detectors) if isinstance(one, Learner)]
    assert len(names) == len(set(names))
    assert {"baseline", "stalled_collective", "low_utilization"} <= set(names)
