"""Rows of the metric table that say how the hardware is: memory errors, links, XIDs, SXIDs, recovery action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agent.records import GpuHealth, GpuKey, GpuXids
from exporters.metric_def import (
    CARD,
    CARD_LABELS,
    MIG_LABEL,
    MetricDef,
    Number,
    Series,
    card_labels,
    card_views,
    flag,
    work_labels,
)
from exporters.metrics_owners import share_series
from exporters.snapshot import GpuView, NodeSnapshot

#: Series of XIDs that one GPU may have. A healthy GPU has one for each critical code, at 0; a code that occurred takes
#: two, its count and its time, and where places run short a code at 0 gives way, the last of the record first. Each
#: holder beyond the first takes one of these places too: together they stay within what a GPU may have.
XID_SERIES: Final = 17
#: Codes on a node that have an action: those with events, by number.
XID_INFO_SERIES: Final = 8
#: Series of SXIDs that a node may have, fatal codes first.
SXID_SERIES: Final = 4


def _health(read: Callable[[GpuHealth], Number]) -> Callable[[GpuView], Number]:
    """Return a reader of the health record that gives None where it is stale."""
    return lambda view: None if view.health is None else read(view.health)


def _ecc_errors(snapshot: NodeSnapshot) -> Series:
    for view in card_views(snapshot):
        health = view.health
        if health is not None:
            labels = card_labels(view.key)
            yield (*labels, "corrected", "volatile"), health.ecc_corrected_volatile_total
            yield (*labels, "corrected", "aggregate"), health.ecc_corrected_aggregate_total
            yield (*labels, "uncorrected", "volatile"), health.ecc_uncorrected_volatile_total
            yield (*labels, "uncorrected", "aggregate"), health.ecc_uncorrected_aggregate_total


def _remapped_rows(view: GpuView) -> list[tuple[str, Number]]:
    if view.health is None:
        return []
    return [
        ("correctable", view.health.remapped_rows_correctable_total),
        ("uncorrectable", view.health.remapped_rows_uncorrectable_total),
    ]


def _nvlink_errors(view: GpuView) -> list[tuple[str, Number]]:
    if view.health is None:
        return []
    return [
        ("crc", view.health.nvlink_crc_errors_total),
        ("replay", view.health.nvlink_replay_errors_total),
        ("recovery", view.health.nvlink_recovery_errors_total),
    ]


def exported_xids(view: GpuView) -> tuple[int, ...]:
    """Return the codes of one GPU that have series, by number.

    Codes that occurred have a place before those at 0, critical ones before others, and of these the first to occur.
    """
    xids = view.xids
    if xids is None:
        return ()
    places = XID_SERIES - max(0, share_series(view.owners) - 1)
    occurred = [code for code in xids.totals if _has_occurred(xids, code)]
    seen = sorted(occurred, key=lambda code: code not in view.critical_xids)[: places // 2]
    quiet = [code for code in xids.totals if not _has_occurred(xids, code)][: places - 2 * len(seen)]
    return tuple(sorted((*seen, *quiet)))


def _xid_errors(view: GpuView) -> list[tuple[str, Number]]:
    return [] if view.xids is None else [(str(code), view.xids.totals[code]) for code in exported_xids(view)]


def _xid_times(view: GpuView) -> list[tuple[str, Number]]:
    if view.xids is None:
        return []
    times = view.xids.last_wall_s
    return [(str(code), times.get(code)) for code in exported_xids(view) if _has_occurred(view.xids, code)]


def _has_occurred(xids: GpuXids, code: int) -> bool:
    """Return whether an event is known, also one from before the agent started, which has a time and no count."""
    return bool(xids.totals[code]) or code in xids.last_wall_s


def _xid_info(snapshot: NodeSnapshot) -> Series:
    seen = {
        code
        for view in snapshot.gpus
        if view.xids is not None
        for code in exported_xids(view)
        if _has_occurred(view.xids, code)
    }
    for code in sorted(seen)[:XID_INFO_SERIES]:
        yield (str(code), snapshot.xid_actions.get(code, "look")), 1


def _sxid_errors(snapshot: NodeSnapshot) -> Series:
    found = [
        (code not in switch.fatal_totals, switch.device, code, count)
        for switch in snapshot.sxids
        for code, count in switch.totals.items()
    ]
    for _, device, code, count in sorted(sorted(found)[:SXID_SERIES], key=lambda item: item[1:]):
        yield (device, str(code)), count


def _mig_info(snapshot: NodeSnapshot) -> Series:
    views: dict[GpuKey, GpuView] = {view.key: view for view in snapshot.gpus}
    for key in sorted(views, key=lambda key: key.order):
        mig = views[key].mig
        if mig is not None and key.gpu_i_id is not None:
            yield (*work_labels(key), mig.profile or "", mig.mig_uuid or ""), 1


MIG_METRICS: Final = (
    MetricDef(
        name="gpu_mig_info",
        kind="gauge",
        unit="",
        help="Identity of one MIG instance; always 1. `GPU_I_PROFILE` as nvidia-smi prints it.",
        labels=(*CARD_LABELS, MIG_LABEL, "GPU_I_PROFILE", "mig_uuid"),
        values=_mig_info,
    ),
)

HEALTH_METRICS: Final = (
    MetricDef(
        name="gpu_ecc_errors_total",
        kind="counter",
        unit="",
        help="Memory errors that ECC corrected or could not correct: `volatile` since the driver was loaded, "
        "`aggregate` over the life of the board (NVML total ECC errors).",
        labels=(*CARD_LABELS, "severity", "counter"),
        values=_ecc_errors,
    ),
    CARD.words(
        "gpu_remapped_rows_total",
        "counter",
        "",
        "Rows of memory that were replaced by spare ones, by the kind of error that led to it (NVML remapped rows).",
        label="kind",
        read=_remapped_rows,
    ),
    CARD.metric(
        "gpu_row_remap_pending",
        "gauge",
        "",
        "Whether a row waits for the next reset of the GPU to be replaced: 0 or 1 (NVML field 144).",
        _health(lambda health: flag(health.is_row_remap_pending)),
    ),
    CARD.metric(
        "gpu_row_remap_failure",
        "gauge",
        "",
        "Whether a row could not be replaced, for want of spare ones: 0 or 1 (NVML field 145).",
        _health(lambda health: flag(health.is_row_remap_failed)),
    ),
    CARD.metric(
        "gpu_recovery_action",
        "gauge",
        "",
        "What the driver asks for: 0 nothing, 1 reset the GPU, 2 reboot the node, 3 drain peer-to-peer, "
        "4 drain and reset (NVML field 230).",
        lambda view: None if view.limits is None else view.limits.recovery_action,
    ),
    CARD.words(
        "gpu_xid_errors_total",
        "counter",
        "",
        f"XID events since the agent started, by code; critical codes start at 0. At most {XID_SERIES} series of XIDs "
        "for each GPU, those with events first; one less for each holder beyond the first.",
        label="xid",
        read=_xid_errors,
    ),
    CARD.words(
        "gpu_xid_last_timestamp_seconds",
        "gauge",
        "seconds",
        "Wall time of the newest event of an XID; absent before the first.",
        label="xid",
        read=_xid_times,
    ),
    MetricDef(
        name="xid_info",
        kind="gauge",
        unit="",
        help="What to do about an XID that a GPU of this node had, by NVIDIA's catalogue; always 1.",
        labels=("xid", "action"),
        values=_xid_info,
    ),
    MetricDef(
        name="nvswitch_sxid_errors_total",
        kind="counter",
        unit="",
        help="SXID events of an NVSwitch since the agent started, by PCI address and code. "
        f"At most {SXID_SERIES} series on a node, codes that the kernel log calls fatal first.",
        labels=("device", "sxid"),
        values=_sxid_errors,
    ),
    CARD.words(
        "gpu_nvlink_errors_total",
        "counter",
        "",
        "Errors on the NVLink links since the driver was loaded, summed over links.",
        label="kind",
        read=_nvlink_errors,
    ),
)
