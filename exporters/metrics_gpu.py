"""Rows of the metric table that say what a GPU measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agent.records import GpuSample, GpuSlowSample
from agent.vocabulary import CLOCK_EVENT_REASONS, GPU_STATES
from exporters.metric_def import (
    CARD,
    CARD_LABELS,
    WORK,
    MetricDef,
    Number,
    Series,
    card_labels,
    card_views,
    in_order,
    one_hot,
)
from exporters.metrics_health import HEALTH_METRICS, MIG_METRICS
from exporters.metrics_owners import owner_metrics
from exporters.snapshot import GpuView, NodeSnapshot

_BASELINES: Final = ("context_idle", "busy")


def _core(read: Callable[[GpuSample], Number]) -> Callable[[GpuView], Number]:
    """Return a reader of the core sample that gives None where the sample is stale."""
    return lambda view: None if view.sample is None else read(view.sample)


def _slow(read: Callable[[GpuSlowSample], Number]) -> Callable[[GpuView], Number]:
    """Return a reader of the slow sample that gives None where the sample is stale."""
    return lambda view: None if view.slow is None else read(view.slow)


def _info(snapshot: NodeSnapshot) -> Series:
    for view in card_views(snapshot):
        if view.info is not None:
            facts = (view.info.model_name, view.info.pci_bus_id, view.info.device, view.info.driver_version)
            yield (*card_labels(view.key), *(fact or "" for fact in facts)), 1


def _temperatures(view: GpuView) -> list[tuple[str, Number]]:
    if view.slow is None:
        return []
    return [("gpu", view.slow.temperature_celsius), ("memory", view.slow.memory_temperature_celsius)]


def _clocks(view: GpuView) -> list[tuple[str, Number]]:
    if view.sample is None:
        return []
    return [("sm", view.sample.sm_clock_hertz), ("memory", view.sample.memory_clock_hertz)]


def _clock_events_active(view: GpuView) -> list[tuple[str, Number]]:
    if view.sample is None or view.sample.clock_event_reasons is None:
        return []
    active = view.sample.clock_event_reasons
    return [(reason, int(reason in active)) for reason in CLOCK_EVENT_REASONS]


def _clock_event_seconds(view: GpuView) -> list[tuple[str, float]]:
    return [] if view.slow is None else list(in_order(CLOCK_EVENT_REASONS, view.slow.clock_event_seconds_total))


IDENTITY_METRICS: Final = (
    MetricDef(
        name="gpu_info",
        kind="gauge",
        unit="",
        help="Identity of one physical GPU as NVML names it; always 1. `device` is the node in /dev.",
        labels=(*CARD_LABELS, "model_name", "pci_bus_id", "device", "driver_version"),
        values=_info,
    ),
    *owner_metrics(),
    CARD.words(
        "gpu_state",
        "gauge",
        "",
        "Whether the GPU can be sampled: 1 for the state it is in, 0 for the others; "
        "absent where nothing was heard for three periods.",
        label="state",
        read=lambda view: one_hot(GPU_STATES, view.state),
    ),
    CARD.metric(
        "gpu_sample_timestamp_seconds",
        "gauge",
        "seconds",
        "Wall time of the newest core sample of the GPU, however old.",
        lambda view: view.sample_wall_s,
    ),
)

ACTIVITY_METRICS: Final = (
    WORK.metric(
        "gpu_utilization_ratio",
        "gauge",
        "ratio",
        "Share of the driver's last sampling period in which a kernel ran (NVML utilization.gpu).",
        _core(lambda sample: sample.utilization_ratio),
    ),
    WORK.metric(
        "gpu_memory_utilization_ratio",
        "gauge",
        "ratio",
        "Share of the driver's last sampling period in which memory was read or written (NVML utilization.memory).",
        _core(lambda sample: sample.memory_utilization_ratio),
    ),
    WORK.metric(
        "gpu_sm_active_ratio",
        "gauge",
        "ratio",
        "Share of cycles in which a multiprocessor had a warp, over all of them (NVML GPM 2).",
        _core(lambda sample: sample.sm_active_ratio),
    ),
    WORK.metric(
        "gpu_sm_occupancy_ratio",
        "gauge",
        "ratio",
        "Resident warps over the most that fit (NVML GPM 3).",
        _core(lambda sample: sample.sm_occupancy_ratio),
    ),
    WORK.metric(
        "gpu_tensor_active_ratio",
        "gauge",
        "ratio",
        "Share of cycles in which a tensor core was busy (NVML GPM 5).",
        _core(lambda sample: sample.tensor_active_ratio),
    ),
    WORK.metric(
        "gpu_dram_active_ratio",
        "gauge",
        "ratio",
        "Memory bandwidth in use over its peak (NVML GPM 10).",
        _core(lambda sample: sample.dram_active_ratio),
    ),
    WORK.metric(
        "gpu_memory_used_bytes",
        "gauge",
        "bytes",
        "Framebuffer memory held by processes, without what the driver reserves (NVML memory info v2).",
        _core(lambda sample: sample.memory_used_bytes),
    ),
    WORK.metric(
        "gpu_memory_total_bytes",
        "gauge",
        "bytes",
        "Framebuffer memory of the GPU (NVML memory info v2).",
        _core(lambda sample: sample.memory_total_bytes),
    ),
)

BOARD_METRICS: Final = (
    CARD.metric(
        "gpu_power_watts",
        "gauge",
        "watts",
        "Power draw of the board, a 1 s average on most boards (NVML power usage).",
        _core(lambda sample: sample.power_watts),
    ),
    CARD.metric(
        "gpu_power_limit_watts",
        "gauge",
        "watts",
        "Power limit in force (NVML enforced power limit).",
        lambda view: None if view.limits is None else view.limits.power_limit_watts,
    ),
    CARD.words(
        "gpu_power_baseline_watts",
        "gauge",
        "watts",
        "Power that this GPU was learned to draw with an idle context and when busy.",
        label="state",
        read=lambda view: in_order(_BASELINES, view.power_baseline_watts),
    ),
    CARD.metric(
        "gpu_energy_joules_total",
        "counter",
        "joules",
        "Energy used since the driver was loaded (NVML total energy consumption).",
        _slow(lambda sample: sample.energy_joules_total),
    ),
    CARD.words(
        "gpu_temperature_celsius",
        "gauge",
        "celsius",
        "Temperature of the GPU (NVML temperature) and of its memory (NVML field 82).",
        label="sensor",
        read=_temperatures,
    ),
    CARD.words(
        "gpu_clock_hertz",
        "gauge",
        "hertz",
        "Current clock of the multiprocessors and of the memory (NVML clock info).",
        label="clock",
        read=_clocks,
    ),
    CARD.words(
        "gpu_clock_event_seconds_total",
        "counter",
        "seconds",
        "Time for which a reason held the clocks down, as the driver counts it.",
        label="reason",
        read=_clock_event_seconds,
    ),
    CARD.words(
        "gpu_clock_event_active",
        "gauge",
        "",
        "Whether a reason held the clocks down at any look since the core sample before (NVML clocks event reasons).",
        label="reason",
        read=_clock_events_active,
    ),
)

LINK_METRICS: Final = (
    CARD.metric(
        "gpu_pcie_receive_bytes_total",
        "counter",
        "bytes",
        "Bytes received over PCIe (NVML field 198); only where the counter has 64 bits.",
        _slow(lambda sample: sample.pcie_receive_bytes_total),
    ),
    CARD.metric(
        "gpu_pcie_transmit_bytes_total",
        "counter",
        "bytes",
        "Bytes sent over PCIe (NVML field 197); only where the counter has 64 bits.",
        _slow(lambda sample: sample.pcie_transmit_bytes_total),
    ),
    CARD.metric(
        "gpu_nvlink_receive_bytes_total",
        "counter",
        "bytes",
        "Bytes received over all NVLink links since the driver was loaded (NVML field 139).",
        _core(lambda sample: sample.nvlink_receive_bytes_total),
    ),
    CARD.metric(
        "gpu_nvlink_transmit_bytes_total",
        "counter",
        "bytes",
        "Bytes sent over all NVLink links since the driver was loaded (NVML field 138).",
        _core(lambda sample: sample.nvlink_transmit_bytes_total),
    ),
)

GPU_METRICS: Final[tuple[MetricDef, ...]] = (
    *IDENTITY_METRICS[:1],
    *MIG_METRICS,
    *IDENTITY_METRICS[1:],
    *ACTIVITY_METRICS,
    *BOARD_METRICS,
    *LINK_METRICS,
    *HEALTH_METRICS,
)
