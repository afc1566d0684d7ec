"""The one list of detectors, and the configuration of all of them: tables `[detectors.<name>]`."""

from __future__ import annotations

from dataclasses import dataclass, field

from classifier.detectors import Detector
from classifier.detectors.baseline import BaselineConfig, PowerBaselines
from classifier.detectors.fail_slow import FailSlowConfig, FailSlowDetector
from classifier.detectors.low_utilization import LowUtilizationConfig, LowUtilizationDetector
from classifier.detectors.stalled_collective import StalledCollectiveConfig, StalledCollectiveDetector
from classifier.detectors.step_pace import StepPaceConfig, StepPaces


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorsConfig:
    """Table `[detectors]`: one table for each detector, and two for what they share: baselines and paces."""

    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    step_pace: StepPaceConfig = field(default_factory=StepPaceConfig)
    fail_slow: FailSlowConfig = field(default_factory=FailSlowConfig)
    low_utilization: LowUtilizationConfig = field(default_factory=LowUtilizationConfig)
    stalled_collective: StalledCollectiveConfig = field(default_factory=StalledCollectiveConfig)


def build_detectors(
    config: DetectorsConfig, baselines: PowerBaselines, paces: StepPaces | None = None
) -> tuple[Detector, ...]:
    """Return the detectors that are switched on; the caller updates `baselines` before it asks them.

    `paces` is what they look at steps with, where the caller shows them as well.
    """
    paces = paces or StepPaces(config.step_pace)
    detectors: list[Detector] = []
    if config.stalled_collective.enabled:
        detectors.append(StalledCollectiveDetector(config.stalled_collective, baselines))
    if config.low_utilization.enabled:
        detectors.append(LowUtilizationDetector(config.low_utilization, baselines))
    if config.fail_slow.enabled:
        detectors.append(FailSlowDetector(config.fail_slow, paces))
    return tuple(detectors)
