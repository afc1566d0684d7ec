"""The one list of detectors, and the configuration of all of them: tables `[detectors.<name>]`."""

from __future__ import annotations

from dataclasses import dataclass, field

from classifier.detectors import Detector
from classifier.detectors.baseline import BaselineConfig, PowerBaselines
from classifier.detectors.ecc_remap import EccRemapConfig, EccRemapDetector
from classifier.detectors.fail_slow import FailSlowConfig, FailSlowDetector
from classifier.detectors.gpu_lost import GpuLostConfig, GpuLostDetector
from classifier.detectors.link_errors import LinkErrorsConfig, LinkErrorsDetector
from classifier.detectors.low_utilization import LowUtilizationConfig, LowUtilizationDetector
from classifier.detectors.memory_leak import MemoryLeakConfig, MemoryLeakDetector
from classifier.detectors.no_progress import NoProgressConfig, NoProgressDetector
from classifier.detectors.missed_checkpoint import MissedCheckpointConfig, MissedCheckpointDetector
from classifier.detectors.stalled_collective import StalledCollectiveConfig, StalledCollectiveDetector
from classifier.detectors.step_pace import StepPaceConfig, StepPaces
from classifier.detectors.storage_stall import StorageStallConfig, StorageStallDetector
from classifier.detectors.throttled import ThrottledConfig, ThrottledDetector
from classifier.detectors.unknown_workload import UnknownWorkloadConfig, UnknownWorkloadDetector


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorsConfig:
    """Table `[detectors]`: one table for each detector, and two for what they share: baselines and paces."""

    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    step_pace: StepPaceConfig = field(default_factory=StepPaceConfig)
    fail_slow: FailSlowConfig = field(default_factory=FailSlowConfig)
    no_progress: NoProgressConfig = field(default_factory=NoProgressConfig)
    low_utilization: LowUtilizationConfig = field(default_factory=LowUtilizationConfig)
    ecc_remap: EccRemapConfig = field(default_factory=EccRemapConfig)
    gpu_lost: GpuLostConfig = field(default_factory=GpuLostConfig)
    link_errors: LinkErrorsConfig = field(default_factory=LinkErrorsConfig)
    memory_leak: MemoryLeakConfig = field(default_factory=MemoryLeakConfig)
    throttled: ThrottledConfig = field(default_factory=ThrottledConfig)
    unknown_workload: UnknownWorkloadConfig = field(default_factory=UnknownWorkloadConfig)
    missed_checkpoint: MissedCheckpointConfig = field(default_factory=MissedCheckpointConfig)
    storage_stall: StorageStallConfig = field(default_factory=StorageStallConfig)
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
    if config.no_progress.enabled:
        detectors.append(NoProgressDetector(config.no_progress, paces))
    if config.gpu_lost.enabled:
        detectors.append(GpuLostDetector(config.gpu_lost))
    if config.ecc_remap.enabled:
        detectors.append(EccRemapDetector(config.ecc_remap))
    if config.link_errors.enabled:
        detectors.append(LinkErrorsDetector(config.link_errors))
    if config.throttled.enabled:
        detectors.append(ThrottledDetector(config.throttled))
    if config.memory_leak.enabled:
        detectors.append(MemoryLeakDetector(config.memory_leak))
    if config.unknown_workload.enabled:
        detectors.append(UnknownWorkloadDetector(config.unknown_workload))
    if config.missed_checkpoint.enabled:
        detectors.append(MissedCheckpointDetector(config.missed_checkpoint, baselines))
    if config.storage_stall.enabled:
        detectors.append(StorageStallDetector(config.storage_stall))
    return tuple(detectors)
