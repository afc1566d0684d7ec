"""Fixed rules as people use them today, on the same nodes: what the detectors are measured against.

Utilisation under 5 % for 15 minutes; utilisation 100 % with power under 30 % of the limit for a minute; and absolute
thresholds as alert rules for DCGM's exporter have them: any XID, any uncorrected error, more than 100 corrected ones in
an hour, any NVLink error or PCIe replay in 5 minutes, any thermal or brake event for a minute, 85 °C for 5 minutes,
memory over 95 % for 15 minutes, any symbol error or lost link of a port.
"""

from __future__ import annotations

import numpy as np

from tests.detector_bench.node import SLOW_S
from tests.detector_bench.play import Found
from tests.detector_bench.sensors import Seen


def fixed_rules(seen: Seen) -> list[Found]:
    """Return what fixed rules say of `seen`."""
    found: list[Found] = []
    limit = seen.node.board.power_limit_watts
    step = seen.profile.interval_s
    for gpu in range(seen.node.gpus):
        busy, watts = seen.utilization[gpu], seen.watts[gpu]
        low = _lasting(busy < 0.05, 900 // step)
        found += _findings("low_utilization", gpu, low, seen.times, 2)
        waits = _lasting((busy >= 0.995) & (watts < 0.3 * limit), 60 // step)
        found += _findings("stalled_collective", gpu, waits, seen.times, 3)
        used = seen.channels[gpu].get("memory_used_bytes")
        if used is not None:
            full = _lasting(used.values > 0.95 * seen.node.board.memory_bytes, 900 // step)
            found += _findings("memory_leak", gpu, full, used.times, 2)
    if seen.profile.health:
        found += _health_rules(seen)
    if seen.profile.infiniband and seen.profile.host:
        for name in ("symbol_error", "link_downed"):
            for port in range(seen.node.ports):
                grows = _lately(seen.node.port_events[name][port] > 0, 300)
                found += _findings("link_errors", None, grows, seen.slow_s, 2)
    return found


def _health_rules(seen: Seen) -> list[Found]:
    node, found = seen.node, []
    for gpu in range(node.gpus):
        health = {name: values[gpu] for name, values in node.health.items()}
        wrong = _lately(health["ecc_uncorrected_volatile_total"] > 0, 300)
        found += _findings("ecc_remap", gpu, wrong, seen.slow_s, 3)
        corrected = np.convolve(health["ecc_corrected_volatile_total"], np.ones(720))[: node.slow] > 100
        found += _findings("ecc_remap", gpu, corrected, seen.slow_s, 2)
        for since in (node.remap_pending_s[gpu], node.remap_failed_s[gpu]):
            found += _findings("ecc_remap", gpu, seen.slow_s >= since, seen.slow_s, 3)
        names = ["pcie_replays_total"]
        if seen.profile.nvlink:
            names += ["nvlink_crc_errors_total", "nvlink_replay_errors_total", "nvlink_recovery_errors_total"]
        for name in names:
            found += _findings("link_errors", gpu, _lately(health[name] > 0, 300), seen.slow_s, 2)
        for reason in ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"):
            lasting = _lasting(node.reasons[reason][gpu] > 0, 60 // SLOW_S)
            found += _findings("throttled", gpu, lasting, seen.slow_s, 2)
        hot = _lasting(seen.temperature[gpu] > 85, 300 // SLOW_S)
        found += _findings("throttled", gpu, hot[: seen.slow_s.size], seen.slow_s, 2)
        if seen.profile.xids:
            for at, who, _ in node.xids:
                if who == gpu:
                    found.append(Found("gpu_lost", "gpu", gpu, str(gpu), {3: at}, at + 300))
        for at, state in node.state.get(gpu, ()):
            found.append(Found("gpu_lost", "gpu", gpu, str(gpu), {3: at + 15}, None)) if state != "ok" else None
    return found


def _lasting(holds: np.ndarray, count: int) -> np.ndarray:
    """Return where `holds` has held for `count` readings."""
    count = max(count, 1)
    places = np.arange(holds.size)
    last_off = np.maximum.accumulate(np.where(holds, -1, places))
    return places - last_off >= count


def _lately(happens: np.ndarray, seconds: float) -> np.ndarray:
    window = int(seconds // SLOW_S)
    return np.convolve(happens.astype(float), np.ones(window))[: happens.size] > 0


def _findings(anomaly: str, gpu: int | None, holds: np.ndarray, times: np.ndarray, severity: int) -> list[Found]:
    size = min(holds.size, times.size)
    edges = np.diff(np.concatenate(([0], holds[:size].astype(int), [0])))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [
        Found(anomaly, "gpu", gpu, str(gpu), {severity: float(times[first])}, float(times[min(last, size - 1)]))
        for first, last in zip(starts, ends, strict=True)
    ]
