"""The one list of detectors, and the configuration of all of them: tables `[detectors.<name>]`."""

from __future__ import annotations

from dataclasses import dataclass, field

from classifier.detectors import Detector
from classifier.detectors.baseline import BaselineConfig, PowerBaselines
from classifier.detectors.low_utilization import LowUtilizationConfig, LowUtilizationDetector
from classifier.detectors.stalled_collective import StalledCollectiveConfig, StalledCollectiveDetector


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorsConfig:
    """Table `[detectors]`: one table for each detector, and one for the baselines they compare with."""

    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    low_utilization: LowUtilizationConfig = field(default_factory=LowUtilizationConfig)
    stalled_collective: StalledCollectiveConfig = field(default_factory=StalledCollectiveConfig)


def build_detectors(config: DetectorsConfig, baselines: PowerBaselines) -> tuple[Detector, ...]:
    """Return the detectors that are switched on; the caller updates `baselines` before it asks them."""
    detectors: list[Detector] = []
    if config.stalled_collective.enabled:
        detectors.append(StalledCollectiveDetector(config.stalled_collective, baselines))
    if config.low_utilization.enabled:
        detectors.append(LowUtilizationDetector(config.low_utilization, baselines))
    return tuple(detectors)
