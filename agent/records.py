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

    The four `*_bytes_per_second` values come only from foreign logs, which hold rates instead of counters.
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
    NetworkSample: 1.0,
    InfinibandSample: 1.0,
    DiskSample: 1.0,
}
