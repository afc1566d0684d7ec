"""What samplers return: one frozen record per source and tick, values in base units, the unit in the name.

`None` means that this machine does not offer the value, or that this tick could not read it; zero is a
measurement. Counters stay counters here: rates are made in `agent.history`, where resets are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class GpuKey(NamedTuple):
    """Identity of a GPU, or of one MIG instance on it, in every record, decision and finding.

    `gpu` is the index when this UUID was first seen and stays with it until the agent restarts; `uuid` is
    the physical GPU's with its GPU- prefix, None in logs that hold none; `gpu_i_id` is the GPU instance id of
    a MIG instance, None for the whole card.
    """

    gpu: int
    uuid: str | None = None
    gpu_i_id: int | None = None

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key: index, instance (the card itself first), UUID."""
        return self.gpu, -1 if self.gpu_i_id is None else self.gpu_i_id, self.uuid or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of all records: when the values were read."""

    monotonic_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo(Record):
    """Identity of one physical GPU; sent at discovery and every 60 s."""

    key: GpuKey
    model_name: str | None = None  # nvmlDeviceGetName
    pci_bus_id: str | None = None  # nvmlDeviceGetPciInfo_v3, 8-digit domain
    device: str | None = None  # "nvidia" + nvmlDeviceGetMinorNumber; the minor number, not the index
    driver_version: str | None = None  # nvmlSystemGetDriverVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState(Record):
    """Whether one GPU can be sampled; sent every core tick, also for a GPU that no longer answers."""

    key: GpuKey
    state: str  # one of vocabulary.GPU_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample(Record):
    """The core tick of one GPU (1 s).

    The four `*_bytes_per_second` values come from foreign logs, which hold rates instead of counters, and from GPM.
    """

    key: GpuKey
    utilization_ratio: float | None = None  # nvmlDeviceGetUtilizationRates.gpu, 0..1
    memory_utilization_ratio: float | None = None  # nvmlDeviceGetUtilizationRates.memory, 0..1
    memory_used_bytes: int | None = None  # nvmlDeviceGetMemoryInfo_v2.used, without reserved
    memory_total_bytes: int | None = None  # nvmlDeviceGetMemoryInfo_v2.total
    power_watts: float | None = None  # nvmlDeviceGetPowerUsage: 1 s average on most boards
    sm_clock_hertz: float | None = None  # nvmlDeviceGetClockInfo(SM)
    memory_clock_hertz: float | None = None  # nvmlDeviceGetClockInfo(MEM)
    clock_event_reasons: tuple[str, ...] | None = None  # active now; words of CLOCK_EVENT_REASONS
    nvlink_receive_bytes_total: int | None = None  # field 139, all links; counts from driver load
    nvlink_transmit_bytes_total: int | None = None  # field 138, all links
    sm_active_ratio: float | None = None  # GPM 2
    sm_occupancy_ratio: float | None = None  # GPM 3
    tensor_active_ratio: float | None = None  # GPM 5
    dram_active_ratio: float | None = None  # GPM 10
    tensor_hmma_active_ratio: float | None = None  # GPM 7: half precision and TF32 matrix work
    tensor_imma_active_ratio: float | None = None  # GPM 9: integer matrix work
    tensor_dfma_active_ratio: float | None = None  # GPM 6: double precision matrix work
    fp64_active_ratio: float | None = None  # GPM 11
    fp32_active_ratio: float | None = None  # GPM 12
    fp16_active_ratio: float | None = None  # GPM 13; stays 0 for bfloat16
    pcie_receive_bytes_per_second: float | None = None
    pcie_transmit_bytes_per_second: float | None = None
    nvlink_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes_per_second: float | None = None


class GpuProcess(NamedTuple):
    """A compute process on a GPU, as the driver lists it."""

    pid: int  # in the driver's view: the host's PID
    memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSlowSample(Record):
    """The slow tick of one GPU (5 s): what changes slowly or costs a lot to read."""

    key: GpuKey
    energy_joules_total: float | None = None  # nvmlDeviceGetTotalEnergyConsumption, since driver load
    temperature_celsius: float | None = None  # nvmlDeviceGetTemperature(GPU)
    memory_temperature_celsius: float | None = None  # field 82
    pcie_receive_bytes_total: int | None = None  # field 198, only where the counter is 64-bit
    pcie_transmit_bytes_total: int | None = None  # field 197, only where the counter is 64-bit
    processes: tuple[GpuProcess, ...] | None = None  # nvmlDeviceGetComputeRunningProcesses_v3
    clock_event_seconds_total: Mapping[str, float] = field(default_factory=dict)  # cumulative, by reason


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLimits(Record):
    """Limits and maxima of one GPU (60 s)."""

    key: GpuKey
    power_limit_watts: float | None = None  # nvmlDeviceGetEnforcedPowerLimit
    sm_clock_max_hertz: float | None = None  # nvmlDeviceGetMaxClockInfo(SM)
    memory_clock_max_hertz: float | None = None  # nvmlDeviceGetMaxClockInfo(MEM)
    pcie_generation: int | None = None  # nvmlDeviceGetCurrPcieLinkGeneration: lower while idle
    pcie_generation_max: int | None = None  # nvmlDeviceGetMaxPcieLinkGeneration: of board and slot
    pcie_width: int | None = None  # nvmlDeviceGetCurrPcieLinkWidth, lanes
    pcie_width_max: int | None = None  # nvmlDeviceGetMaxPcieLinkWidth, lanes
    recovery_action: int | None = None  # field 230: 0 none, 1 reset GPU, 2 reboot node, 3 drain P2P, 4 drain and reset
    fabric_state: str | None = None  # nvmlDeviceGetGpuFabricInfoV: not_started, in_progress, completed


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFastPower(Record):
    """Power of one GPU at high rate since the record before: several readings in one record, oldest first.

    From field 186 (instant power) at about 10 Hz, or from the driver's ring (nvmlDeviceGetSamples, total power). The
    record's time is that of the newest reading; `ages_s` says how much older each reading is than that.
    """

    key: GpuKey
    power_watts: tuple[float, ...]
    ages_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealth(Record):
    """Error counters and marks of one physical GPU (5 s). Counters are the driver's own."""

    key: GpuKey
    ecc_corrected_volatile_total: int | None = None  # nvmlDeviceGetTotalEccErrors, since driver load
    ecc_uncorrected_volatile_total: int | None = None
    ecc_corrected_aggregate_total: int | None = None  # over the life of the board
    ecc_uncorrected_aggregate_total: int | None = None
    remapped_rows_correctable_total: int | None = None  # nvmlDeviceGetRemappedRows or fields 142, 143
    remapped_rows_uncorrectable_total: int | None = None
    is_row_remap_pending: bool | None = None  # field 144: a reset will remap
    is_row_remap_failed: bool | None = None  # field 145: no spare row is left
    pcie_replays_total: int | None = None  # field 94
    nvlink_crc_errors_total: int | None = None  # summed over links
    nvlink_replay_errors_total: int | None = None
    nvlink_recovery_errors_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuXids(Record):
    """All XID events of one physical GPU since the agent started, by code; sent when one came and every 5 s."""

    key: GpuKey
    #: Events by XID; the critical codes are there from the start, at 0.
    totals: Mapping[int, int] = field(default_factory=dict)
    last_wall_s: Mapping[int, float] = field(default_factory=dict)  # of the newest event by XID


@dataclass(frozen=True, slots=True, kw_only=True)
class NvswitchSxids(Record):
    """All SXID events of one NVSwitch since the agent started, by code; sent from the first on."""

    device: str  # PCI address: domain of 8 digits, bus and device
    totals: Mapping[int, int] = field(default_factory=dict)  # events by SXID; fatal ones are among them
    fatal_totals: Mapping[int, int] = field(default_factory=dict)  # events that the kernel log calls fatal
    last_wall_s: Mapping[int, float] = field(default_factory=dict)  # of the newest event by SXID


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMigInfo(Record):
    """Identity of one MIG instance; sent at discovery, when the layout changes, and every 60 s."""

    key: GpuKey  # with gpu_i_id
    profile: str | None = None  # as nvidia-smi prints it: 1g.10gb
    mig_uuid: str | None = None  # MIG-...


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSample(Record):
    """Byte counters of one network interface (/proc/net/dev); the loopback is left out."""

    device: str
    receive_bytes_total: int
    transmit_bytes_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InfinibandSample(Record):
    """Data counters of one InfiniBand or RoCE port (/sys/class/infiniband), already in bytes."""

    device: str
    port: int
    receive_bytes_total: int | None = None
    transmit_bytes_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSample(Record):
    """Byte counters of one whole block device (/proc/diskstats); no partition, loop, RAM, dm or md device."""

    device: str
    read_bytes_total: int
    written_bytes_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Everything one sampler run (live) or one line of a trace (replay) brought, and when."""

    monotonic_s: float
    wall_s: float
    records: tuple[Record, ...]


#: Record types by the name they have in a trace line.
RECORD_TYPES: dict[str, type[Record]] = {
    "gpu_info": GpuInfo,
    "gpu_state": GpuState,
    "gpu_sample": GpuSample,
    "gpu_slow_sample": GpuSlowSample,
    "gpu_limits": GpuLimits,
    "gpu_fast_power": GpuFastPower,
    "gpu_health": GpuHealth,
    "gpu_xids": GpuXids,
    "nvswitch_sxids": NvswitchSxids,
    "gpu_mig_info": GpuMigInfo,
    "network_sample": NetworkSample,
    "infiniband_sample": InfinibandSample,
    "disk_sample": DiskSample,
}

#: Seconds between two records of a type live; a value older than three of its periods is not exported.
PERIODS_S: dict[type[Record], float] = {
    GpuInfo: 60.0,
    GpuState: 1.0,
    GpuSample: 1.0,
    GpuSlowSample: 5.0,
    GpuLimits: 60.0,
    GpuFastPower: 2.0,
    GpuHealth: 5.0,
    GpuXids: 5.0,
    NvswitchSxids: 5.0,
    GpuMigInfo: 60.0,
    NetworkSample: 1.0,
    InfinibandSample: 1.0,
    DiskSample: 1.0,
}
