"""GPU series under the names of dcgm-exporter, with its labels and units, for dashboards and rules that exist already.

Off by default. A row stands here only for what is measured, in the sense that DCGM gives the name; where the sources
differ, the help text says so. Of a divided card, what is measured on the card stands there once, and not again on each
instance as with dcgm-exporter, so that sums are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from agent.records import GpuHealth, GpuKey, GpuLimits, GpuSample, GpuSlowSample, GpuXids
from exporters.metric_def import MIG_LABEL, Kind, MetricDef, Number, Series, card_views, flag, work_views
from exporters.metrics_owners import Owner, owner_counts, owners_of
from exporters.snapshot import GpuView, NodeSnapshot

#: What dcgm-exporter calls the label of the host: the first one until May 2026, the second one since.
HostnameLabel = Literal["Hostname", "hostname"]

_MIB: Final = 1 << 20
_MEGA: Final = 1e6
#: Bits of nvmlClocksEventReasons by our words; bit 1, application clocks, is not among them.
_REASON_BITS: Final[Mapping[str, int]] = {
    "gpu_idle": 0x01,
    "sw_power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}

_Read = Callable[[GpuView], Number]
_Unit = Literal["", "MHz", "C", "W", "mJ", "percent", "MiB", "ratio", "bytes/s", "ns"]


def _core(read: Callable[[GpuSample], Number], scale: float = 1) -> _Read:
    return lambda view: None if view.sample is None else _times(read(view.sample), scale)


def _slow(read: Callable[[GpuSlowSample], Number], scale: float = 1) -> _Read:
    return lambda view: None if view.slow is None else _times(read(view.slow), scale)


def _limits(read: Callable[[GpuLimits], Number]) -> _Read:
    return lambda view: None if view.limits is None else read(view.limits)


def _health(read: Callable[[GpuHealth], Number]) -> _Read:
    return lambda view: None if view.health is None else read(view.health)


def _times(number: Number, scale: float) -> Number:
    return None if number is None else number * scale


def _held_down(reason: str) -> _Read:
    """Return a reader of the nanoseconds for which a reason held the clocks down."""
    return _slow(lambda sample: sample.clock_event_seconds_total.get(reason), 1e9)


def _reasons(sample: GpuSample) -> Number:
    active = sample.clock_event_reasons
    return None if active is None else sum(_REASON_BITS.get(reason, 0) for reason in active)


def _memory_free(sample: GpuSample) -> Number:
    if sample.memory_total_bytes is None or sample.memory_used_bytes is None:
        return None
    return sample.memory_total_bytes - sample.memory_used_bytes


def _last_xid(view: GpuView) -> Number:
    xids = view.xids
    return None if xids is None else _newest(xids)


def _newest(xids: GpuXids) -> int:
    return max(xids.last_wall_s, key=lambda code: (xids.last_wall_s[code], code), default=0)


#: Name without DCGM_FI_, type, unit, what it is, and how it is read; those of a card, then those of where work runs.
_Row = tuple[str, Kind, _Unit, str, _Read]
_CARD_ROWS: Final[tuple[_Row, ...]] = (
    ("DEV_SM_CLOCK", "gauge", "MHz", "Clock of the multiprocessors", _core(lambda s: s.sm_clock_hertz, 1 / _MEGA)),
    ("DEV_MEM_CLOCK", "gauge", "MHz", "Clock of the memory", _core(lambda s: s.memory_clock_hertz, 1 / _MEGA)),
    ("DEV_MEMORY_TEMP", "gauge", "C", "Temperature of the memory", _slow(lambda s: s.memory_temperature_celsius)),
    ("DEV_GPU_TEMP", "gauge", "C", "Temperature of the GPU", _slow(lambda s: s.temperature_celsius)),
    ("DEV_POWER_USAGE", "gauge", "W", "Power draw of the board", _core(lambda s: s.power_watts)),
    ("DEV_ENFORCED_POWER_LIMIT", "gauge", "W", "Power limit in force", _limits(lambda s: s.power_limit_watts)),
    (
        "DEV_TOTAL_ENERGY_CONSUMPTION",
        "counter",
        "mJ",
        "Energy used since the driver was loaded",
        _slow(lambda s: s.energy_joules_total, 1000),
    ),
    ("DEV_PCIE_REPLAY_COUNTER", "counter", "", "Retries on PCIe", _health(lambda s: s.pcie_replays_total)),
    ("DEV_PCIE_LINK_GEN", "gauge", "", "Generation of the PCIe link now", _limits(lambda s: s.pcie_generation)),
    (
        "DEV_PCIE_MAX_LINK_GEN",
        "gauge",
        "",
        "Highest generation of board and slot",
        _limits(lambda s: s.pcie_generation_max),
    ),
    ("DEV_PCIE_LINK_WIDTH", "gauge", "", "Lanes of the PCIe link now", _limits(lambda s: s.pcie_width)),
    ("DEV_PCIE_MAX_LINK_WIDTH", "gauge", "", "Most lanes of board and slot", _limits(lambda s: s.pcie_width_max)),
    (
        "DEV_XID_ERRORS",
        "gauge",
        "",
        "Code of the newest XID that the agent has heard of; 0 before the first",
        _last_xid,
    ),
    (
        "DEV_CLOCKS_EVENT_REASONS",
        "gauge",
        "",
        "Bit mask of what held the clocks down since the sample before; application clocks are not told",
        _core(_reasons),
    ),
    (
        "DEV_CLOCK_THROTTLE_REASONS",
        "gauge",
        "",
        "The same under its older name",
        _core(_reasons),
    ),
    *(
        (f"DEV_CLOCKS_EVENT_REASON_{name}_NS", "counter", "ns", f"Time for which {what} held the clocks down", read)
        for name, what, read in (
            ("SW_POWER_CAP", "the power limit", _held_down("sw_power_cap")),
            ("SYNC_BOOST", "another GPU of a group", _held_down("sync_boost")),
            ("SW_THERM_SLOWDOWN", "temperature, by the driver,", _held_down("sw_thermal")),
            ("HW_THERM_SLOWDOWN", "temperature, by the board,", _held_down("hw_thermal")),
            ("HW_POWER_BRAKE_SLOWDOWN", "the power supply", _held_down("hw_power_brake")),
        )
    ),
    *(
        (f"DEV_ECC_{name}_TOTAL", "counter", "", what, read)
        for name, what, read in (
            (
                "SBE_VOL",
                "Corrected memory errors since the driver was loaded",
                _health(lambda s: s.ecc_corrected_volatile_total),
            ),
            (
                "DBE_VOL",
                "Uncorrected memory errors since the driver was loaded",
                _health(lambda s: s.ecc_uncorrected_volatile_total),
            ),
            (
                "SBE_AGG",
                "Corrected memory errors over the life of the board",
                _health(lambda s: s.ecc_corrected_aggregate_total),
            ),
            (
                "DBE_AGG",
                "Uncorrected memory errors over the life of the board",
                _health(lambda s: s.ecc_uncorrected_aggregate_total),
            ),
        )
    ),
    (
        "DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "counter",
        "",
        "Rows of memory replaced after uncorrectable errors",
        _health(lambda s: s.remapped_rows_uncorrectable_total),
    ),
    (
        "DEV_CORRECTABLE_REMAPPED_ROWS",
        "counter",
        "",
        "Rows of memory replaced after correctable errors",
        _health(lambda s: s.remapped_rows_correctable_total),
    ),
    (
        "DEV_ROW_REMAP_FAILURE",
        "gauge",
        "",
        "Whether a row could not be replaced",
        _health(lambda s: flag(s.is_row_remap_failed)),
    ),
    (
        "DEV_ROW_REMAP_PENDING",
        "gauge",
        "",
        "Whether a row waits for the next reset to be replaced",
        _health(lambda s: flag(s.is_row_remap_pending)),
    ),
    *(
        (f"DEV_NVLINK_{name}_ERROR_COUNT_TOTAL", "counter", "", f"{what} on NVLink, summed over links", read)
        for name, what, read in (
            ("CRC_FLIT", "CRC errors", _health(lambda s: s.nvlink_crc_errors_total)),
            ("REPLAY", "Retries", _health(lambda s: s.nvlink_replay_errors_total)),
            ("RECOVERY", "Recoveries", _health(lambda s: s.nvlink_recovery_errors_total)),
        )
    ),
)
_WORK_ROWS: Final[tuple[_Row, ...]] = (
    (
        "DEV_GPU_UTIL",
        "gauge",
        "percent",
        "Share of time in which a kernel ran",
        _core(lambda s: s.utilization_ratio, 100),
    ),
    (
        "DEV_MEM_COPY_UTIL",
        "gauge",
        "percent",
        "Share of time in which memory was read or written",
        _core(lambda s: s.memory_utilization_ratio, 100),
    ),
    (
        "DEV_FB_TOTAL",
        "gauge",
        "MiB",
        "Framebuffer memory",
        _core(lambda s: s.memory_total_bytes, 1 / _MIB),
    ),
    (
        "DEV_FB_USED",
        "gauge",
        "MiB",
        "Framebuffer memory held by processes",
        _core(lambda s: s.memory_used_bytes, 1 / _MIB),
    ),
    (
        "DEV_FB_FREE",
        "gauge",
        "MiB",
        "Framebuffer memory that no process holds, with what the driver reserves",
        _core(_memory_free, 1 / _MIB),
    ),
    (
        "PROF_GR_ENGINE_ACTIVE",
        "gauge",
        "ratio",
        "Share of time in which a kernel ran, by the driver; DCGM asks the engine itself",
        _core(lambda s: s.utilization_ratio),
    ),
    (
        "PROF_SM_ACTIVE",
        "gauge",
        "ratio",
        "Share of cycles with a warp on a multiprocessor",
        _core(lambda s: s.sm_active_ratio),
    ),
    (
        "PROF_SM_OCCUPANCY",
        "gauge",
        "ratio",
        "Resident warps over the most that fit",
        _core(lambda s: s.sm_occupancy_ratio),
    ),
    *(
        (f"PROF_PIPE_{name}_ACTIVE", "gauge", "ratio", f"Share of cycles in which {what} was busy", read)
        for name, what, read in (
            ("TENSOR", "a tensor core", _core(lambda s: s.tensor_active_ratio)),
            ("TENSOR_HMMA", "a tensor core with half precision or TF32", _core(lambda s: s.tensor_hmma_active_ratio)),
            ("TENSOR_IMMA", "a tensor core with integers", _core(lambda s: s.tensor_imma_active_ratio)),
            ("TENSOR_DFMA", "a tensor core with double precision", _core(lambda s: s.tensor_dfma_active_ratio)),
            ("FP64", "the FP64 pipe", _core(lambda s: s.fp64_active_ratio)),
            ("FP32", "the FP32 pipe", _core(lambda s: s.fp32_active_ratio)),
            ("FP16", "the FP16 pipe", _core(lambda s: s.fp16_active_ratio)),
        )
    ),
    ("PROF_DRAM_ACTIVE", "gauge", "ratio", "Memory bandwidth over its peak", _core(lambda s: s.dram_active_ratio)),
    *(
        (f"PROF_{link}_{way}_BYTES", "gauge", "bytes/s", f"Bytes {verb} over {link_name} a second", read)
        for link, link_name, way, verb, read in (
            ("PCIE", "PCIe", "TX", "sent", _core(lambda s: s.pcie_transmit_bytes_per_second)),
            ("PCIE", "PCIe", "RX", "received", _core(lambda s: s.pcie_receive_bytes_per_second)),
            ("NVLINK", "NVLink", "TX", "sent", _core(lambda s: s.nvlink_transmit_bytes_per_second)),
            ("NVLINK", "NVLink", "RX", "received", _core(lambda s: s.nvlink_receive_bytes_per_second)),
        )
    ),
)


class _Labels:
    """The label values of each GPU and instance; worked out once for all rows of a snapshot."""

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._found: tuple[NodeSnapshot, dict[GpuKey, tuple[str, ...]]] | None = None

    def of(self, snapshot: NodeSnapshot) -> dict[GpuKey, tuple[str, ...]]:
        """Return the values in the order of `_label_names`."""
        found = self._found
        if found is None or found[0] is not snapshot:
            found = self._found = snapshot, self._work_out(snapshot)
        return found[1]

    def _work_out(self, snapshot: NodeSnapshot) -> dict[GpuKey, tuple[str, ...]]:
        owners = owners_of(snapshot)
        counts = owner_counts(snapshot, owners)
        infos = {view.key: view.info for view in snapshot.gpus}
        labels: dict[GpuKey, tuple[str, ...]] = {}
        for view in snapshot.gpus:
            key = view.key
            info = view.info or infos.get(key._replace(gpu_i_id=None))
            held = owners.get(key)
            owner = next(iter(held)) if held is not None and len(held) == counts.get(key) == 1 else Owner()
            labels[key] = (
                str(key.gpu),
                key.uuid or "",
                (info and info.pci_bus_id) or "",
                (info and info.device) or "",
                (info and info.model_name) or "",
                (view.mig and view.mig.profile) or "",
                "" if key.gpu_i_id is None else str(key.gpu_i_id),
                self._hostname,
                (info and info.driver_version) or "",
                owner.container,
                owner.namespace,
                owner.pod,
                owner.job_id if owner.scheduler == "slurm" else "",
            )
        return labels


def _label_names(hostname_label: HostnameLabel) -> tuple[str, ...]:
    card = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", MIG_LABEL, hostname_label)
    return (*card, "DCGM_FI_DRIVER_VERSION", "container", "namespace", "pod", "hpc_job")


def dcgm_metrics(hostname: str = "", hostname_label: HostnameLabel = "Hostname") -> tuple[MetricDef, ...]:
    """Return the rows, for a host of that name."""
    labels, names = _Labels(hostname), _label_names(hostname_label)

    def row_of(row: _Row, views: Callable[[NodeSnapshot], Sequence[GpuView]]) -> MetricDef:
        name, kind, unit, text, read = row

        def values(snapshot: NodeSnapshot) -> Series:
            of_key = labels.of(snapshot)
            return [(of_key[view.key], read(view)) for view in views(snapshot)]

        help_text = {"": f"{text}.", "ratio": f"{text} (0 to 1)."}.get(unit, f"{text} (in {unit}).")
        return MetricDef(
            name=name,
            prefix="DCGM_FI_",
            kind=kind,
            unit="",  # no name of DCGM's ends in its unit, as OpenMetrics demands
            help=help_text,
            labels=names,
            values=values,
            leaves_out_empty=True,
        )

    return (*(row_of(row, card_views) for row in _CARD_ROWS), *(row_of(row, work_views) for row in _WORK_ROWS))
