"""Writes scripts of the emulator from traces and from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.records import (
    GpuFastPower,
    GpuHealth,
    GpuInfo,
    GpuKey,
    GpuLimits,
    GpuMigInfo,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    GpuState,
    Record,
    Tick,
)
from agent.trace import TraceReader
from tests.nvml_emulator.codes import EVENT_REASON_BITS, GPU_IS_LOST, RESET_REQUIRED

_STATE_VALUES = {
    "ok": {"status_code": 0, "hang": 0},
    "lost": {"status_code": GPU_IS_LOST, "hang": 0},
    "reset_required": {"status_code": RESET_REQUIRED, "hang": 0},
    "hung": {"status_code": 0, "hang": 1},
}
_FABRIC_STATES = {"not_supported": 0, "not_started": 1, "in_progress": 2, "completed": 3}


def script_from_trace(path: Path, *, end: str = "hold", speed: float = 1.0) -> str:
    """Return the script that plays the GPUs of a trace; `end` is "hold" or "loop"."""
    return script_from_ticks(tuple(TraceReader(path, warn=lambda _: None)), end=end, speed=speed)


def script_from_ticks(
    ticks: Sequence[Tick],
    *,
    end: str = "hold",
    speed: float = 1.0,
    pcie_counter_bits: int = 64,
) -> str:
    """Return the script that plays the GPU records of `ticks`, whose first tick is at 0 s.

    GPUs are numbered in the order of their keys. A value that is None keeps its last reading; one that is never given
    is [Not Supported]. Rates of logs without counters become counters that start at 0. The MIG layout is that of all
    ticks together; XIDs are not played.
    """
    writer = _ScriptWriter(ticks)
    start_s = ticks[0].monotonic_s if ticks else 0.0
    for tick in ticks:
        writer.add(tick.monotonic_s - start_s, tick.records)
    header = ["# simulated: written from warpwatch records", f"driver {writer.driver_version}", f"speed {speed}"]
    header += [f"end {end}", *writer.identity_lines(pcie_counter_bits)]
    return "\n".join([*header, *writer.lines, ""])


@dataclass(slots=True)
class _Unit:
    """A GPU, or a GPU instance on it."""

    who: str  # "3", or "3:1"
    last: dict[str, str] = field(default_factory=dict)  # by name, as last written
    sums: dict[str, float] = field(default_factory=dict)  # counters made from rates
    sampled_at_s: float | None = None
    powered_at_s: float = 0.0  # of the newest reading of fast power


class _ScriptWriter:
    def __init__(self, ticks: Sequence[Tick]) -> None:
        self.driver_version = "580.95.05"
        self.lines: list[str] = []
        self._units: dict[GpuKey, _Unit] = {}
        self._identities: dict[tuple[int, str | None], dict[str, str]] = {}  # by GPU, in the order of their numbers
        self._instances: dict[GpuKey, str] = {}
        self._counted = {name for tick in ticks for record in tick.records for name in _counters_in(record)}

    def add(self, elapsed_s: float, records: Sequence[Record]) -> None:
        changes: dict[str, dict[str, str]] = {}
        fast: list[str] = []
        for record in sorted((r for r in records if hasattr(r, "key")), key=lambda r: r.key.gpu):
            unit = self._units.get(record.key)
            if unit is None:
                unit = self._units[record.key] = self._new_unit(record.key)
                changes[unit.who] = dict(unit.last)
            if isinstance(record, GpuFastPower):
                fast += _fast_power_lines(unit, record, elapsed_s)
                continue
            values = self._values(unit, record, elapsed_s)
            counters = {name for name in values if _is_counter(name)}
            changed = {k: v for k, v in values.items() if k in counters or unit.last.get(k) != v}
            unit.last.update(changed)
            changes.setdefault(unit.who, {}).update(changed)
        self.lines += [*fast, f"@ {elapsed_s:.6f}"]
        for who, values in changes.items():
            if values:
                self.lines.append(" ".join([who, *(f"{k}={v}" for k, v in values.items())]))

    def identity_lines(self, pcie_counter_bits: int) -> list[str]:
        lines = []
        for number, identity in enumerate(self._identities.values()):
            told = identity | {"pcie_counter_bits": str(pcie_counter_bits)}
            lines += [f"gpu {number} {key} {value}" for key, value in told.items()]
        for key, words in sorted(self._instances.items(), key=lambda item: (item[0].gpu, item[0].gpu_i_id or 0)):
            lines.append(f"gpu {self._units[key].who.partition(':')[0]} mig {words}")
        return lines

    def _new_unit(self, key: GpuKey) -> _Unit:
        identity = self._identities.setdefault((key.gpu, key.uuid), {})
        if key.uuid is not None:
            identity["uuid"] = key.uuid
        number = list(self._identities).index((key.gpu, key.uuid))
        if key.gpu_i_id is None:
            # A value holds from its first point backwards as well, so a GPU is said to be well at first.
            return _Unit(str(number), last=_numbers(_STATE_VALUES["ok"]))
        self._instances[key] = f"{key.gpu_i_id} 1g.10gb MIG-00000000-0000-4000-8{number:03}-{key.gpu_i_id:012}"
        return _Unit(f"{number}:{key.gpu_i_id}")

    def _values(self, unit: _Unit, record: Record, elapsed_s: float) -> dict[str, str]:
        match record:
            case GpuInfo():
                self.driver_version = record.driver_version or self.driver_version
                minor = (record.device or "").removeprefix("nvidia")
                identity = {"name": record.model_name, "pci_bus_id": record.pci_bus_id, "minor": minor}
                self._identities[record.key.gpu, record.key.uuid].update({k: v for k, v in identity.items() if v})
                return {}
            case GpuMigInfo():
                default = self._instances[record.key].split(" ")
                profile, uuid = record.profile or default[1], record.mig_uuid or default[2]
                self._instances[record.key] = f"{record.key.gpu_i_id} {profile} {uuid}"
                return {}
            case GpuState():
                return _numbers(_STATE_VALUES[record.state]) if record.key.gpu_i_id is None else {}
            case GpuSample():
                rates = {k: v for k, v in _rates_summed(unit, record, elapsed_s).items() if k not in self._counted}
                return _numbers(_sample_values(record)) | _numbers(rates) | _reals(_gpm_values(record))
            case GpuSlowSample():
                return _numbers(_slow_values(record)) | _processes(record.processes)
            case GpuLimits():
                return _numbers(_limit_values(record))
            case GpuHealth():
                return _numbers(_health_values(record))
            case _:
                return {}


def _counters_in(record: Record) -> set[str]:
    """Return the names of the counters of bytes that a record gives."""
    match record:
        case GpuSample():
            values = _sample_values(record)
        case GpuSlowSample():
            values = _slow_values(record)
        case _:
            return set()
    return {name for name, value in values.items() if value is not None and _is_counter(name)}


def _fast_power_lines(unit: _Unit, record: GpuFastPower, elapsed_s: float) -> list[str]:
    lines = []
    for watts, age_s in zip(record.power_watts, record.ages_s, strict=True):
        # Points of a value are in the order of time; what lies before the script is left out.
        moment_s = elapsed_s - age_s
        if moment_s >= unit.powered_at_s:
            lines += [f"@ {moment_s:.6f}", f"{unit.who} power_instant_milliwatts={round(watts * 1e3)}"]
            unit.powered_at_s = moment_s
    return lines


def _sample_values(sample: GpuSample) -> dict[str, float | None]:
    reasons = sample.clock_event_reasons
    return {
        "utilization_gpu_percent": _times(sample.utilization_ratio, 100),
        "utilization_memory_percent": _times(sample.memory_utilization_ratio, 100),
        "memory_used_bytes": sample.memory_used_bytes,
        "memory_total_bytes": sample.memory_total_bytes,
        "power_milliwatts": _times(sample.power_watts, 1e3),
        "sm_clock_megahertz": _times(sample.sm_clock_hertz, 1e-6),
        "memory_clock_megahertz": _times(sample.memory_clock_hertz, 1e-6),
        "event_reasons_bits": None if reasons is None else sum(EVENT_REASON_BITS[reason] for reason in reasons),
        "nvlink_transmit_kibibytes": _times(sample.nvlink_transmit_bytes_total, 1 / 1024),
        "nvlink_receive_kibibytes": _times(sample.nvlink_receive_bytes_total, 1 / 1024),
    }


def _gpm_values(sample: GpuSample) -> dict[str, float | None]:
    values = {
        "gpm_sm_active_percent": _times(sample.sm_active_ratio, 100),
        "gpm_sm_occupancy_percent": _times(sample.sm_occupancy_ratio, 100),
        "gpm_any_tensor_percent": _times(sample.tensor_active_ratio, 100),
        "gpm_dfma_tensor_percent": _times(sample.tensor_dfma_active_ratio, 100),
        "gpm_hmma_tensor_percent": _times(sample.tensor_hmma_active_ratio, 100),
        "gpm_imma_tensor_percent": _times(sample.tensor_imma_active_ratio, 100),
        "gpm_dram_bandwidth_percent": _times(sample.dram_active_ratio, 100),
        "gpm_fp64_percent": _times(sample.fp64_active_ratio, 100),
        "gpm_fp32_percent": _times(sample.fp32_active_ratio, 100),
        "gpm_fp16_percent": _times(sample.fp16_active_ratio, 100),
    }
    if all(value is None for value in values.values()):
        return values  # rates alone are no sign of GPM
    return values | {
        "gpm_pcie_transmit_mibibytes_per_second": _times(sample.pcie_transmit_bytes_per_second, 2**-20),
        "gpm_pcie_receive_mibibytes_per_second": _times(sample.pcie_receive_bytes_per_second, 2**-20),
        "gpm_nvlink_transmit_mibibytes_per_second": _times(sample.nvlink_transmit_bytes_per_second, 2**-20),
        "gpm_nvlink_receive_mibibytes_per_second": _times(sample.nvlink_receive_bytes_per_second, 2**-20),
    }


def _slow_values(sample: GpuSlowSample) -> dict[str, float | None]:
    seconds = sample.clock_event_seconds_total
    return {
        "energy_millijoules": _times(sample.energy_joules_total, 1e3),
        "temperature_celsius": sample.temperature_celsius,
        "memory_temperature_celsius": sample.memory_temperature_celsius,
        "pcie_transmit_bytes": sample.pcie_transmit_bytes_total,
        "pcie_receive_bytes": sample.pcie_receive_bytes_total,
        "power_cap_nanoseconds": _times(seconds.get("sw_power_cap"), 1e9),
        "thermal_nanoseconds": _times(seconds.get("sw_thermal"), 1e9),
        "sw_thermal_nanoseconds": _times(seconds.get("sw_thermal"), 1e9),
        "hw_thermal_nanoseconds": _times(seconds.get("hw_thermal"), 1e9),
        "hw_power_brake_nanoseconds": _times(seconds.get("hw_power_brake"), 1e9),
    }


def _limit_values(limits: GpuLimits) -> dict[str, float | None]:
    fabric_state = None if limits.fabric_state is None else _FABRIC_STATES.get(limits.fabric_state)
    return {
        "power_limit_milliwatts": _times(limits.power_limit_watts, 1e3),
        "sm_clock_max_megahertz": _times(limits.sm_clock_max_hertz, 1e-6),
        "memory_clock_max_megahertz": _times(limits.memory_clock_max_hertz, 1e-6),
        "pcie_generation": limits.pcie_generation,
        "pcie_generation_max": limits.pcie_generation_max,
        "pcie_width": limits.pcie_width,
        "pcie_width_max": limits.pcie_width_max,
        "recovery_action": limits.recovery_action,
        "fabric_state": fabric_state,
    }


def _health_values(health: GpuHealth) -> dict[str, float | None]:
    return {
        "ecc_corrected_volatile": health.ecc_corrected_volatile_total,
        "ecc_uncorrected_volatile": health.ecc_uncorrected_volatile_total,
        "ecc_corrected_aggregate": health.ecc_corrected_aggregate_total,
        "ecc_uncorrected_aggregate": health.ecc_uncorrected_aggregate_total,
        "remapped_rows_correctable": health.remapped_rows_correctable_total,
        "remapped_rows_uncorrectable": health.remapped_rows_uncorrectable_total,
        "row_remap_pending": health.is_row_remap_pending,
        "row_remap_failure": health.is_row_remap_failed,
        "pcie_replays": health.pcie_replays_total,
        "nvlink_crc_errors": health.nvlink_crc_errors_total,
        "nvlink_replay_errors": health.nvlink_replay_errors_total,
        "nvlink_recovery_errors": health.nvlink_recovery_errors_total,
        "nvlink_integrity_errors": health.nvlink_integrity_errors_total,
        "nvlink_failed_recoveries": health.nvlink_failed_recoveries_total,
        "nvlink_effective_errors": health.nvlink_effective_errors_total,
    }


def _rates_summed(unit: _Unit, sample: GpuSample, elapsed_s: float) -> dict[str, float | None]:
    span_s = 0.0 if unit.sampled_at_s is None else elapsed_s - unit.sampled_at_s
    unit.sampled_at_s = elapsed_s
    rates = {
        "pcie_transmit_bytes": sample.pcie_transmit_bytes_per_second,
        "pcie_receive_bytes": sample.pcie_receive_bytes_per_second,
        "nvlink_transmit_kibibytes": _times(sample.nvlink_transmit_bytes_per_second, 1 / 1024),
        "nvlink_receive_kibibytes": _times(sample.nvlink_receive_bytes_per_second, 1 / 1024),
    }
    for name, rate in rates.items():
        if rate is not None:
            unit.sums[name] = unit.sums.get(name, 0.0) + rate * span_s
    return dict(unit.sums)


def _processes(processes: Sequence[GpuProcess] | None) -> dict[str, str]:
    if processes is None:
        return {}
    words = [f"{p.pid}" if p.memory_used_bytes is None else f"{p.pid}:{p.memory_used_bytes}" for p in processes]
    return {"processes": ",".join(words)}


def _is_counter(name: str) -> bool:
    # What the emulator counts on a straight line; a point is written even where it is equal to the one before.
    transfers = ("pcie_transmit_", "pcie_receive_", "nvlink_transmit_", "nvlink_receive_")
    return name.startswith(("energy_", *transfers)) or name.endswith("_nanoseconds")


def _numbers(values: Mapping[str, float | None]) -> dict[str, str]:
    # NVML gives whole numbers only, except for GPM.
    return {name: str(round(value)) for name, value in values.items() if value is not None}


def _reals(values: Mapping[str, float | None]) -> dict[str, str]:
    return {name: repr(round(float(value), 9)) for name, value in values.items() if value is not None}


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
