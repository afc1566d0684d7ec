"""Configuration of the judgement: values that make no sense are refused with the key, the value and what it must be."""

from __future__ import annotations

import math

import pytest

from agent.config import load_config
from agent.errors import UsageError
from classifier.detectors.baseline import BaselineConfig
from classifier.detectors.low_utilization import LowUtilizationConfig
from classifier.detectors.stalled_collective import StalledCollectiveConfig
from classifier.detectors.wait_signature import SignatureConfig
from classifier.detectors.wait_watch import ArmConfig
from classifier.labeller_config import LabellerConfig
from classifier.smoothing import SmoothingConfig


@pytest.mark.parametrize(
    ("kind", "values", "key"),
    [
        (LabellerConfig, {"gap_periods": 0.0}, "gap_periods"),
        (LabellerConfig, {"gap_periods": 1.0}, "gap_periods"),
        (LabellerConfig, {"gap_periods": math.nan}, "gap_periods"),
        (LabellerConfig, {"basic_threshold": 7.0}, "basic_threshold"),
        (LabellerConfig, {"basic_threshold": -0.1}, "basic_threshold"),
        (LabellerConfig, {"minimum_samples": 0}, "minimum_samples"),
        (LabellerConfig, {"minimum_s": 0.0}, "minimum_s"),
        (LabellerConfig, {"idle_window_s": 0.0}, "idle_window_s"),
        (LabellerConfig, {"idle_probability": 0.2}, "idle_probability"),
        (SmoothingConfig, {"mean_s": 0.0}, "mean_s"),
        (SmoothingConfig, {"step_s": 0.0}, "step_s"),
        (StalledCollectiveConfig, {"confirm_max_seconds": 1.0}, "confirm_max_seconds"),
        (StalledCollectiveConfig, {"confirm_seconds": math.nan}, "confirm_seconds"),
        (StalledCollectiveConfig, {"confirm_seconds": -1.0}, "confirm_seconds"),
        (StalledCollectiveConfig, {"blind_critical_seconds": 59.0}, "blind_critical_seconds"),
        (StalledCollectiveConfig, {"blind_critical_factor": 0.5}, "blind_critical_factor"),
        (StalledCollectiveConfig, {"habit_waits": 0}, "habit_waits"),
        (StalledCollectiveConfig, {"constant_habit_waits": 1}, "constant_habit_waits"),
        (LowUtilizationConfig, {"warning_seconds": 60.0}, "warning_seconds"),
        (LowUtilizationConfig, {"utilization_ratio": 0.0}, "utilization_ratio"),
        (BaselineConfig, {"observations": 0}, "observations"),
        (BaselineConfig, {"observation_seconds": 0.0}, "observation_seconds"),
        (BaselineConfig, {"busy_utilization_ratio": 0.01}, "busy_utilization_ratio"),
        (SignatureConfig, {"work_utilization_ratio": 0.05}, "work_utilization_ratio"),
        (SignatureConfig, {"utilization_ratio": 0.4}, "utilization_ratio"),
        (ArmConfig, {"arm_seconds": 0.0}, "arm_seconds"),
        (ArmConfig, {"arm_window_seconds": 60.0}, "arm_window_seconds"),
    ],
)
def test_nonsense_is_refused_by_name(kind: type, values: dict, key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key} is \S+; it must be "):
        kind(**values)


def test_a_file_with_nonsense_is_refused_with_its_table(tmp_path) -> None:
    path = tmp_path / "warpwatch.toml"
    path.write_text("[detectors.stalled_collective]\nconfirm_max_seconds = 1.0\n")
    with pytest.raises(
        UsageError, match=r"stalled_collective.*confirm_max_seconds is 1.0; it must be at least confirm_s"
    ):
        load_config(path)
