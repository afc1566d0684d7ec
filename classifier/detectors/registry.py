"""The one list of detectors, and the configuration of all of them: tables `[detectors.<name>]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.clock import Instant
from classifier.detectors import Detector, Learner
from classifier.detectors.baseline import BaselineConfig, PowerBaselines
from classifier.detectors.ecc_remap import EccRemapConfig, EccRemapDetector
from classifier.detectors.fail_slow import FailSlowConfig, FailSlowDetector
from classifier.detectors.gpu_lost import GpuLostConfig, GpuLostDetector
from classifier.detectors.input_starved import InputStarvedConfig, InputStarvedDetector
from classifier.detectors.link_errors import LinkErrorsConfig, LinkErrorsDetector
from classifier.detectors.low_utilization import LowUtilizationConfig, LowUtilizationDetector
from classifier.detectors.memory_leak import MemoryLeakConfig, MemoryLeakDetector
from classifier.detectors.missed_checkpoint import MissedCheckpointConfig, MissedCheckpointDetector
from classifier.detectors.no_progress import NoProgressConfig, NoProgressDetector
from classifier.detectors.stalled_collective import StalledCollectiveConfig, StalledCollectiveDetector
from classifier.detectors.step_pace import StepPaceConfig, StepPaces
from classifier.detectors.storage_stall import StorageStallConfig, StorageStallDetector
from classifier.detectors.straggler import StragglerConfig, StragglerDetector
from classifier.detectors.throttled import ThrottledConfig, ThrottledDetector
from classifier.detectors.unknown_workload import UnknownWorkloadConfig, UnknownWorkloadDetector


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorsConfig:
    """Table `[detectors]`: one table for each detector, and two for what they share: baselines and paces."""

    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    step_pace: StepPaceConfig = field(default_factory=StepPaceConfig)
    fail_slow: FailSlowConfig = field(default_factory=FailSlowConfig)
    no_progress: NoProgressConfig = field(default_factory=NoProgressConfig)
    input_starved: InputStarvedConfig = field(default_factory=InputStarvedConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
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
    made: tuple[tuple[bool, Callable[[], Detector]], ...] = (
        (config.stalled_collective.enabled, lambda: StalledCollectiveDetector(config.stalled_collective, baselines)),
        (config.low_utilization.enabled, lambda: LowUtilizationDetector(config.low_utilization, baselines)),
        (config.fail_slow.enabled, lambda: FailSlowDetector(config.fail_slow, paces)),
        (config.no_progress.enabled, lambda: NoProgressDetector(config.no_progress, paces)),
        (config.input_starved.enabled, lambda: InputStarvedDetector(config.input_starved, paces)),
        (config.straggler.enabled, lambda: StragglerDetector(config.straggler, paces)),
        (config.gpu_lost.enabled, lambda: GpuLostDetector(config.gpu_lost)),
        (config.ecc_remap.enabled, lambda: EccRemapDetector(config.ecc_remap)),
        (config.link_errors.enabled, lambda: LinkErrorsDetector(config.link_errors)),
        (config.throttled.enabled, lambda: ThrottledDetector(config.throttled)),
        (config.memory_leak.enabled, lambda: MemoryLeakDetector(config.memory_leak)),
        (config.unknown_workload.enabled, lambda: UnknownWorkloadDetector(config.unknown_workload)),
        (
            config.missed_checkpoint.enabled,
            lambda: MissedCheckpointDetector(config.missed_checkpoint, baselines, paces),
        ),
        (config.storage_stall.enabled, lambda: StorageStallDetector(config.storage_stall)),
    )
    return tuple(make() for is_enabled, make in made if is_enabled)


def changed_detectors(
    running: Sequence[Detector],
    tables: tuple[DetectorsConfig, DetectorsConfig],
    baselines: PowerBaselines,
    paces: StepPaces,
    now: Instant,
) -> tuple[Detector, ...]:
    """Return the detectors of the second of `tables` in the place of those that run by the first.

    One whose table is the same goes on as it is; another begins anew, with what the one before had learned.
    """
    before, after = tables
    known = {detector.anomalies[0]: detector for detector in running}
    found: list[Detector] = []
    for detector in build_detectors(after, baselines, paces):
        name = detector.anomalies[0]
        old = known.get(name)
        if old is not None and getattr(before, name) == getattr(after, name):
            found.append(old)
            continue
        _hand_over(old, detector, now)
        found.append(detector)
    return tuple(found)


def _hand_over(old: object, new: object, now: Instant) -> None:
    """Let one detector know what the one before it had learned, where both learn."""
    if isinstance(old, Learner) and isinstance(new, Learner):
        new.restore(old.learned(now), now)
