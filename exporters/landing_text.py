"""Words and numbers of the landing page: how values are written for a person."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from agent.records import GpuKey
from classifier.results import Assessment

#: Written where a value is not offered or not fresh.
NOTHING: Final = "–"

#: A sign beside each severity, so that colour is never the only one.
SIGNS: Final = {"info": "ℹ", "warning": "▲", "critical": "■", "good": "✓"}

_ACTIONS: Final = {
    "restart_app": "restart the application",
    "reset_gpu": "reset the GPU",
    "reboot_node": "reboot the node",
    "replace_hardware": "replace the hardware",
    "contact_user": "ask the user",
    "look": "look at the node",
}

_REASONS: Final = {
    "too_few_samples": "too few samples yet",
    "too_few_channels": "too little is measured here",
    "gap": "a gap in the telemetry",
    "out_of_domain": "unlike anything the model knows",
    "ambiguous": "the evidence is split",
    "waiting": "its kernels only wait",
    "gpu_lost": "the GPU is lost",
}


def action_text(action: str) -> str | None:
    """Return the next step in words; None where there is none."""
    return None if action == "none" else _ACTIONS.get(action, action)


def reason_text(reason: str | None) -> str | None:
    """Return why there is no decision, in words."""
    return None if reason is None else _REASONS.get(reason, reason)


def moment(wall_s: float) -> str:
    """Return a wall time as date and time in UTC; NOTHING where it is no date."""
    try:
        return datetime.fromtimestamp(wall_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return NOTHING


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h" if hours % 24 else f"{days} d"


def percent(ratio: float | None) -> str:
    """Return a ratio in percent."""
    return NOTHING if ratio is None else f"{100 * ratio:.0f} %"


def of_limit(value: float | None, limit: float | None, unit: str, digits: int = 0) -> str:
    """Return a value and its limit, as far as they are known: 600 / 700 W."""
    if value is None and limit is None:
        return NOTHING
    shown = NOTHING if value is None else f"{value:.{digits}f}"
    return f"{shown} {unit}" if limit is None else f"{shown} / {limit:.0f} {unit}"


def gibibytes(size: float | None) -> float | None:
    """Return a size in bytes in GiB."""
    return None if size is None else size / (1 << 30)


def byte_size(size: float | None) -> str:
    """Return a number of bytes in three digits: 512 B, 1.23 GB, 45.6 TB."""
    if size is None:
        return NOTHING
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def rate_text(bytes_per_second: float | None) -> str:
    """Return the speed of a link as it is sold: 400 Gbit/s."""
    if bytes_per_second is None:
        return NOTHING
    gigabits = 8 * bytes_per_second / 1e9
    return f"{gigabits:.6g} Gbit/s" if gigabits >= 1 else f"{1000 * gigabits:.6g} Mbit/s"


def shortened(value: str, length: int = 64) -> str:
    """Return a name from outside, cut where it is longer than `length`."""
    return value if len(value) <= length else f"{value[: length - 1]}…"


def gpu_name(key: GpuKey) -> str:
    """Return how a GPU or MIG instance is called: GPU 0, GPU 0 instance 3."""
    return f"GPU {key.gpu}" if key.gpu_i_id is None else f"GPU {key.gpu} instance {key.gpu_i_id}"


def subject_name(item: Assessment) -> str:
    """Return what an assessment is about."""
    if item.key is not None:
        return gpu_name(item.key)
    if item.job_key is not None:
        return f"job {item.job_key}"
    return f"device {item.device}" if item.device else "the node"


def evidence_text(item: Assessment) -> str:
    """Return the evidence as names with numbers in six significant digits."""
    return ", ".join(
        f"{name} {value:.6g}" if isinstance(value, (float, int)) else f"{name} {value}"
        for name, value in item.evidence.items()
        if value is not None
    )
