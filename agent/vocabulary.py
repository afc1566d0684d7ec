"""The closed word lists of warpwatch: the same in metrics, JSON, configuration keys, file names and runbooks.

A new word is added here first. The order is the order of export.
"""

from __future__ import annotations

from typing import Final

WORKLOADS: Final = ("training", "inference", "idle", "other", "unknown")
#: The classes that carry a probability: every workload but `unknown`, which means there is none.
CLASSES: Final = ("training", "inference", "idle", "other")

ANOMALIES: Final = (
    "stalled_collective",
    "collective_wait",
    "no_progress",
    "missed_checkpoint",
    "low_utilization",
    "input_starved",
    "straggler",
    "fail_slow",
    "throttled",
    "memory_leak",
    "link_errors",
    "ecc_remap",
    "gpu_lost",
    "storage_stall",
    "unknown_workload",
)
ACTIONS: Final = (
    "none",
    "restart_app",
    "reset_gpu",
    "reboot_node",
    "replace_hardware",
    "contact_user",
    "look",
)
SCOPES: Final = ("gpu", "node", "job")
#: Severity by name; the metric holds the position: 0 nothing, 1 info, 2 warning, 3 critical.
SEVERITIES: Final = ("none", "info", "warning", "critical")
GPU_STATES: Final = ("ok", "lost", "hung", "reset_required")
CLOCK_EVENT_REASONS: Final = (
    "gpu_idle",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
)
#: What gave a job its GPUs, as far as the agent finds out itself; a job file may name another one.
SCHEDULERS: Final = ("slurm", "kubernetes", "docker", "podman", "containerd", "systemd", "process")
NVLINK_ERROR_KINDS: Final = ("crc", "replay", "recovery")
