"""What every exporter reads: one frozen picture of the node, swapped in whole.

The pipeline builds it; whatever was too old when it was built is already None or left out, so an exporter never judges
ages. Nothing here touches hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.clock import Instant
from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuDirectStorageSample,
    GpuHealth,
    GpuInfo,
    GpuKey,
    GpuLimits,
    GpuMigInfo,
    GpuOwners,
    GpuSample,
    GpuSlowSample,
    GpuXids,
    InfinibandPort,
    InfinibandSample,
    NetworkLink,
    NetworkSample,
    NvswitchSxids,
    PressureSample,
)
from agent.samplers import SamplerStatus
from classifier.results import Assessment, CheckpointStatus, Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """All that is known of one GPU, or of one MIG instance, now. A record that is stale or was never read is None.

    A card that is divided has no decision, no seconds and no baselines: its instances have them. The state of an
    instance is that of its card.
    """

    key: GpuKey
    state: str | None  # a word of vocabulary.GPU_STATES; None where nothing was heard for three periods
    info: GpuInfo | None = None
    sample: GpuSample | None = None
    slow: GpuSlowSample | None = None
    limits: GpuLimits | None = None
    health: GpuHealth | None = None
    xids: GpuXids | None = None
    critical_xids: frozenset[int] = frozenset()  # codes of the catalogue that ask for more than another try
    mig: GpuMigInfo | None = None  # of an instance
    owners: GpuOwners | None = None  # None where it cannot be seen who holds it
    decision: Decision | None = None
    sample_wall_s: float | None = None  # of the newest core sample, however old
    workload_seconds: Mapping[str, float] = field(default_factory=dict)  # by workload, all five, since the start
    workload_energy_joules: Mapping[str, float] | None = None  # likewise; None where neither energy nor power is read
    power_baseline_watts: Mapping[str, float] = field(default_factory=dict)  # context_idle, busy: learned so far
    training_step_seconds: float | None = None  # None where the GPU does not train or its steps are not seen


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceView:
    """A time during which nobody is to be told; findings are made and shown as ever."""

    keys: tuple[GpuKey, ...] | None  # whole cards; None is the node, with all of them
    anomalies: tuple[str, ...] = ()  # those that it is confined to; empty is all
    until_wall_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The loaded model bundle."""

    version: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """The node at one moment."""

    built: Instant
    replay: bool
    gpus: tuple[GpuView, ...] = ()
    #: Of the host's devices the ones that have series (agent.devices), by name.
    networks: tuple[NetworkSample, ...] = ()
    infiniband: tuple[InfinibandSample, ...] = ()
    disks: tuple[DiskSample, ...] = ()
    network_links: tuple[NetworkLink, ...] = ()
    infiniband_ports: tuple[InfinibandPort, ...] = ()
    filesystems: tuple[FilesystemSample, ...] = ()
    gpu_direct_storage: GpuDirectStorageSample | None = None
    pressure: PressureSample | None = None
    sxids: tuple[NvswitchSxids, ...] = ()
    assessments: tuple[Assessment, ...] = ()
    maintenance: tuple[MaintenanceView, ...] = ()  # the one that ends first before the others
    test_alerts: tuple[tuple[str, str], ...] = ()  # anomaly and severity of marked alerts that last
    checkpoints: tuple[CheckpointStatus, ...] = ()  # of the jobs whose cadence is known
    #: Findings since the start by identity (anomaly, subject) of classifier.results.Assessment, with their scope.
    finding_totals: Mapping[tuple[str, str, GpuKey | str | None], int] = field(default_factory=dict)
    #: What to do about an XID, a word of vocabulary.ACTIONS by code, for the codes that GPUs of this node had.
    xid_actions: Mapping[int, str] = field(default_factory=dict)
    samplers: tuple[SamplerStatus, ...] = ()
    gpus_expected: int | None = None  # None where neither a driver nor the configuration says how many
    gpus_visible: int | None = None  # None where the NVML sampler is not running, and during a release
    model: ModelInfo | None = None
    version: str = ""
    config_reload_successful: bool = True
    #: True while a sampler reads its source, and none that ever did has stopped: for 15 s, or three distances
    #: of the samples where that is longer. GPUs that all bring no sample any more count as a sampler that has stopped.
    ready: bool = False
    #: One sentence for the landing page and the log where GPUs are played from a file; None live.
    demo_notice: str | None = None


def stopped_samplers(snapshot: NodeSnapshot) -> list[str]:
    """Return the names of the samplers that have stopped; one that never worked has no source on this machine."""
    return sorted(one.name for one in snapshot.samplers if not one.success and one.last_success_wall_s is not None)
