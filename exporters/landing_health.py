"""What the landing page says of a GPU's hardware: only what is not as it should be, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from exporters.landing_text import action_text, duration, moment
from exporters.markup import Html, tag
from exporters.snapshot import GpuView, NodeSnapshot

#: Codes that one row shows; the newest ones.
_XIDS_SHOWN: Final = 4
_RECOVERY: Final = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain and reset the GPU",
}


def health_lines(snapshot: NodeSnapshot, view: GpuView) -> tuple[Html, ...]:
    """Return one line for each thing that is not zero; nothing for a GPU that is well or says nothing of itself."""
    lines = [*_asked(view), *_memory(view), *_links(view)]
    return (*(tag("div", line, class_="small") for line in lines), *_xids(snapshot, view))


def _asked(view: GpuView) -> Iterator[str]:
    action = view.limits.recovery_action if view.limits else None
    if action:
        yield f"driver asks: {_RECOVERY.get(action, f'recovery action {action}')}"


def _memory(view: GpuView) -> Iterator[str]:
    health = view.health
    if health is None:
        return
    errors = (
        (health.ecc_uncorrected_volatile_total, "uncorrected"),
        (health.ecc_corrected_volatile_total, "corrected"),
        (health.ecc_uncorrected_aggregate_total, "uncorrected over the board's life"),
        (health.ecc_corrected_aggregate_total, "corrected over it"),
    )
    if any(count for count, _ in errors):
        yield "ECC errors: " + ", ".join(f"{count} {word}" for count, word in errors if count)
    rows = (health.remapped_rows_correctable_total or 0) + (health.remapped_rows_uncorrectable_total or 0)
    notes = [f"{rows} done"] if rows else []
    if health.is_row_remap_pending:
        notes.append("one waits for a reset")
    if health.is_row_remap_failed:
        notes.append("no spare row is left")
    if notes:
        yield f"row remapping: {', '.join(notes)}"


def _links(view: GpuView) -> Iterator[str]:
    health = view.health
    if health is None:
        return
    errors = (
        (health.nvlink_crc_errors_total, "CRC"),
        (health.nvlink_replay_errors_total, "replay"),
        (health.nvlink_recovery_errors_total, "recovery"),
    )
    if any(count for count, _ in errors):
        yield "NVLink errors: " + ", ".join(f"{count} {word}" for count, word in errors if count)
    if health.pcie_replays_total:
        yield f"PCIe replays: {health.pcie_replays_total}"


def _xids(snapshot: NodeSnapshot, view: GpuView) -> Iterator[Html]:
    if view.xids is None:
        return
    times = view.xids.last_wall_s
    seen = sorted((code for code, count in view.xids.totals.items() if count), key=lambda code: -times.get(code, 0.0))
    for code in seen[:_XIDS_SHOWN]:
        parts = [f"XID {code} × {view.xids.totals[code]}"]
        last_s = times.get(code)
        if last_s is not None:
            parts.append(f"{duration(snapshot.built.wall_s - last_s)} ago")
        step = action_text(snapshot.xid_actions.get(code, "none"))
        if step:
            parts.append(step)
        yield tag("div", ", ".join(parts), class_="small", title=None if last_s is None else moment(last_s))
    if len(seen) > _XIDS_SHOWN:
        yield tag("div", f"and {len(seen) - _XIDS_SHOWN} XIDs more", class_="small")
