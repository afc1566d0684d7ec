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
    #: Words of CLOCK_EVENT_REASONS that were active since the sample before, as often as the driver is asked.
    clock_event_reasons: tuple[str, ...] | None = None
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
    sm_utilization_ratio: float | None = None  # share of time with a kernel of its own; 0 where it ran none of late
    memory_utilization_ratio: float | None = None  # share of time with its memory read or written


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSlowSample(Record):
    """The slow tick of one GPU (5 s): what changes slowly or costs a lot to read."""

    key: GpuKey
    energy_joules_total: float | None = None  # nvmlDeviceGetTotalEnergyConsumption, since driver load
    temperature_celsius: float | None = None  # nvmlDeviceGetTemperature(GPU)
    memory_temperature_celsius: float | None = None  # field 82
    pcie_receive_bytes_total: int | None = None  # field 198, only where the counter is 64-bit
    pcie_transmit_bytes_total: int | None = None  # field 197, only where the counter is 64-bit
    processes: tuple[GpuProcess, ...] | None = None  # nvmlDeviceGetComputeRunningProcesses_v3, ...GetProcessUtilization
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
    """Power and utilisation of one GPU at high rate since the record before: several readings, oldest first.

    From field 186 (instant power) at about 10 Hz, or from the driver's ring (nvmlDeviceGetSamples, total power). The
    record's time is that of the newest reading; `ages_s` says how much older each reading is than that.
    """

    key: GpuKey
    power_watts: tuple[float, ...]
    ages_s: tuple[float, ...]
    #: nvmlDeviceGetUtilizationRates.gpu beside each reading of power, 0..1; None where one of them could not be read.
    utilization_ratio: tuple[float, ...] | None = None


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
    nvlink_integrity_errors_total: int | None = None  # field 211, NVLink 5: a link's own errors came too often
    nvlink_failed_recoveries_total: int | None = None  # field 214, NVLink 5
    nvlink_effective_errors_total: int | None = None  # field 219, NVLink 5: left after forward error correction


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
    """Counters of one network interface (/proc/net/dev, 1 s); the loopback is left out."""

    device: str
    receive_bytes_total: int
    transmit_bytes_total: int
    receive_packets_total: int | None = None
    transmit_packets_total: int | None = None
    receive_errors_total: int | None = None
    transmit_errors_total: int | None = None
    receive_drops_total: int | None = None
    transmit_drops_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink(Record):
    """State of the link of one network interface (/sys/class/net, 5 s)."""

    device: str
    speed_bytes_per_second: float | None = None  # speed, which is in Mbit/s there; None while the link is down
    is_up: bool | None = None  # operstate is up, or carrier is 1 where that is unknown
    carrier_changes_total: int | None = None  # times that the link came or went
    is_default_route: bool | None = None  # the default route of the main table, of IPv4 or IPv6, leaves by it


@dataclass(frozen=True, slots=True, kw_only=True)
class InfinibandSample(Record):
    """Data counters of one InfiniBand, RoCE or EFA port (/sys/class/infiniband, 1 s), already in bytes."""

    device: str
    port: int
    receive_bytes_total: int | None = None  # counters/port_rcv_data times 4; hw_counters/rx_bytes of EFA
    transmit_bytes_total: int | None = None  # counters/port_xmit_data times 4; hw_counters/tx_bytes of EFA


@dataclass(frozen=True, slots=True, kw_only=True)
class InfinibandPort(Record):
    """State and slow counters of one InfiniBand, RoCE or EFA port (5 s)."""

    device: str
    port: int
    link_layer: str | None = None  # infiniband or ethernet; efa where the device is one
    state: str | None = None  # lower-case word of the state file: active, down, init, armed
    rate_bytes_per_second: float | None = None  # of the rate file: 400 Gb/sec (4X NDR)
    receive_packets_total: int | None = None
    transmit_packets_total: int | None = None
    #: Files of counters/ by name, as the kernel writes them (events; port_xmit_wait in ticks); data and packets are
    #: above. A counter that stands at the maximum of its width is left out.
    counters: Mapping[str, int] = field(default_factory=dict)
    #: Files of hw_counters/ by name, those of the list in the sampler only.
    hw_counters: Mapping[str, int] = field(default_factory=dict)
    #: PCI addresses (domain of 8 digits) of the GPUs that no other port is nearer to, by the PCI tree; a GPU whose
    #: nearest ports are equally near is with each of them.
    near_gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSample(Record):
    """Counters of one whole block device (/proc/diskstats, 1 s); no partition, loop, RAM, dm or md device."""

    device: str
    read_bytes_total: int
    written_bytes_total: int
    reads_total: int | None = None  # completed requests
    writes_total: int | None = None
    busy_seconds_total: float | None = None  # time with at least one request in flight
    #: How an NVMe device is reached: pcie, tcp, rdma, fc, loop (/sys/class/nvme/<name>/transport); None for others.
    transport: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesystemSample(Record):
    """Bytes of one mounted file system that bypasses the block layer (5 s): NFS, Lustre, Ceph, FUSE.

    Counts what crosses to the server where the source knows it, else what programs read and wrote.
    """

    mountpoint: str  # as its first user sees it; one record for a file system, however often it is mounted
    fstype: str  # nfs4, lustre, ceph, fuse.juicefs, ...
    read_bytes_total: int | None = None  # None where the source cannot be read: the mount is known nevertheless
    written_bytes_total: int | None = None
    source: str | None = None  # what was read: mountstats, llite, ceph_debugfs, fuse_daemon, mmpmon
    is_rdma: bool | None = None  # NFS over RDMA, whose bytes no network interface counts
    major_timeouts_total: int | None = None  # NFS: requests that the server did not answer in time


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDirectStorageSample(Record):
    """Bytes that GPUs moved to and from storage by themselves (/proc/driver/nvidia-fs/stats, 5 s)."""

    read_bytes_total: int | None = None
    written_bytes_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureSample(Record):
    """Where the host's programs wait (5 s): pressure stall times, dirty pages, blocked tasks."""

    cpu_some_seconds_total: float | None = None  # /proc/pressure/cpu: time in which a task waited for a CPU
    io_some_seconds_total: float | None = None
    io_full_seconds_total: float | None = None  # time in which every task that was not idle waited
    memory_some_seconds_total: float | None = None
    memory_full_seconds_total: float | None = None
    dirty_bytes: int | None = None  # /proc/meminfo Dirty
    writeback_bytes: int | None = None  # /proc/meminfo Writeback
    memory_available_bytes: int | None = None
    blocked_tasks: int | None = None  # /proc/stat procs_blocked: in uninterruptible sleep for I/O


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample(Record):
    """One process that holds a GPU, with its descendants (5 s)."""

    pid: int
    started_monotonic_s: float | None = None  # field 22 of stat, on the clock of `monotonic_s`
    state: str | None = None  # one letter of stat: R, S, D, Z, T, ...
    cpu_seconds_total: float | None = None  # user and system time of the process itself
    descendants_cpu_seconds_total: float | None = None  # of the descendants that live, and of those waited for
    threads: int | None = None
    resident_bytes: int | None = None  # of the process itself
    descendants: int | None = None  # data loaders, compilers
    blocked: int | None = None  # of process and descendants: how many are in state D
    #: read_bytes and write_bytes of io, of the process and those descendants whose io can be read; None where the
    #: agent may read none of them, as at the plain level.
    read_bytes_total: int | None = None
    written_bytes_total: int | None = None
    program: str | None = None  # family of agent.programs, None for one that is not known or not looked at
    declared_class: str | None = None  # what that family declares: a word of vocabulary.CLASSES


class Holder(NamedTuple):
    """Who holds a GPU: a job, pod, container, unit or user with all its processes there.

    Texts are "" where they are not known. `job_key` is the same on all nodes of a job.
    """

    job_key: str
    job_id: str = ""
    scheduler: str = ""  # slurm, kubernetes, docker, podman, containerd, systemd, process, or what a job file says
    namespace: str = ""
    pod: str = ""
    container: str = ""
    user: str = ""
    share_ratio: float = 1.0  # the shares of the holders of one GPU sum to 1
    declared_class: str | None = None  # by its job file or its programs: a word of vocabulary.CLASSES
    checkpoint_interval_seconds: float | None = None  # declared by its job file
    processes: int | None = None  # on this GPU; 0 is allocated but unused, None where that cannot be seen


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOwners(Record):
    """Who holds one GPU, or one MIG instance (5 s); no holders: nobody. Not sent where it cannot be seen."""

    key: GpuKey
    holders: tuple[Holder, ...] = ()
    #: How many hold it, where `holders` has one for all beyond its bound; None where nobody counted.
    holder_count: int | None = None


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
    "network_link": NetworkLink,
    "infiniband_sample": InfinibandSample,
    "infiniband_port": InfinibandPort,
    "disk_sample": DiskSample,
    "filesystem_sample": FilesystemSample,
    "gpu_direct_storage_sample": GpuDirectStorageSample,
    "pressure_sample": PressureSample,
    "process_sample": ProcessSample,
    "gpu_owners": GpuOwners,
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
    NetworkLink: 5.0,
    InfinibandSample: 1.0,
    InfinibandPort: 5.0,
    DiskSample: 1.0,
    FilesystemSample: 5.0,
    GpuDirectStorageSample: 5.0,
    PressureSample: 5.0,
    ProcessSample: 5.0,
    GpuOwners: 5.0,
}
