"""Builds the NVML emulator, writes its scripts and switches its faults.

A process that is started with `Emulator.environment()` finds the emulator as libnvidia-ml.so.1, whatever it uses to
load it. The format of scripts is described in script.c, that of the control file in control.c.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.records import GpuInfo, GpuKey, GpuLimits, GpuProcess, GpuSample, GpuSlowSample, GpuState, Record, Tick
from agent.trace import TraceReader

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "build" / "libnvidia-ml.so.1"

#: Return codes by the names of nvml.h, for `Emulator.fail`.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
UNKNOWN = 999

#: Bits of nvmlDeviceGetCurrentClocksEventReasons by our word.
EVENT_REASON_BITS = {
    "gpu_idle": 0x1,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
_STATE_VALUES = {
    "ok": {"status_code": 0, "hang": 0},
    "lost": {"status_code": GPU_IS_LOST, "hang": 0},
    "reset_required": {"status_code": RESET_REQUIRED, "hang": 0},
    "hung": {"status_code": 0, "hang": 1},
}


def build() -> Path:
    """Return the folder of the built library, after building it where a source is newer."""
    for program in ("make", "cc"):
        if shutil.which(program) is None:
            raise RuntimeError(f"{program} is missing: the NVML emulator needs the packages make and gcc")
    made = subprocess.run(["make", "-s", "-C", str(HERE)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise RuntimeError(f"the NVML emulator does not build: {made.stderr}")
    return LIBRARY.parent


class Emulator:
    """One emulated host: its script, its control file and the environment of processes that see it.

    The methods that switch faults take effect at the next call into the library, in every process that runs on it.
    `gpu` is the number of the GPU in the script, None for all of them.
    """

    def __init__(self, directory: Path, script: str) -> None:
        self.directory = directory
        self.script = directory / "nvml-script.txt"
        self.control = directory / "nvml-control.txt"
        self.script.write_text(script, encoding="utf-8")
        self._statements: list[str] = []
        self._write()

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return `base` (this process's environment by default) with what makes a new process see the emulator."""
        environment = dict(os.environ if base is None else base)
        paths = [str(build()), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        return environment | self.variables()

    def variables(self) -> dict[str, str]:
        """Return only the variables that name the script and the control file."""
        return {"WARPWATCH_NVML_SCRIPT": str(self.script), "WARPWATCH_NVML_CONTROL": str(self.control)}

    def fail(self, code: int, *, gpu: int | None = None, call: str = "*") -> None:
        """Let `call` (a symbol without its _vN, or "field:82") return `code`."""
        self._add(f"fail {_who(gpu)} {call} {code}")

    def fail_system(self, code: int, *, call: str = "*") -> None:
        """Let a call that names no GPU return `code`: "nvmlInit", "nvmlDeviceGetCount", ..."""
        self._add(f"fail system {call} {code}")

    def hang(self, seconds: float, *, gpu: int | None = None, call: str = "*") -> None:
        """Let `call` block for so long, or until `clear`."""
        self._add(f"hang {_who(gpu)} {call} {seconds}")

    def hang_system(self, seconds: float, *, call: str = "*") -> None:
        """Let a call that names no GPU block for so long, or until `clear`."""
        self._add(f"hang system {call} {seconds}")

    def override(self, name: str, number: float, *, gpu: int | None = None) -> None:
        """Give a value (name as in emulator.h) in place of the script's, to raw sentinels such as 2**32 - 1."""
        self._add(f"value {_who(gpu)} {name} {number}")

    def vanish(self, gpu: int) -> None:
        """Take a GPU out of the enumeration; its handle answers until the next nvmlInit."""
        self._add(f"gone {gpu}")

    def freeze(self, elapsed_s: float) -> None:
        """Let the script stand still at this moment, so that every value is known exactly."""
        self._statements = [line for line in self._statements if not line.startswith("at ")]
        self._add(f"at {elapsed_s}")

    def clear(self, verb: str | None = None) -> None:
        """Take everything back, or the statements of one verb of control.c: "fail", "hang", "value", "gone", "at"."""
        self._statements = [line for line in self._statements if verb is not None and not line.startswith(f"{verb} ")]
        self._write()

    def _add(self, statement: str) -> None:
        self._statements.append(statement)
        self._write()

    def _write(self) -> None:
        part = self.control.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in self._statements), encoding="utf-8")
        part.replace(self.control)


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
    is [Not Supported]. Rates of foreign logs become counters that start at 0.
    """
    writer = _ScriptWriter()
    start_s = ticks[0].monotonic_s if ticks else 0.0
    for tick in ticks:
        writer.add(tick.monotonic_s - start_s, tick.records)
    header = ["# simulated: written from warpwatch records", f"driver {writer.driver_version}", f"speed {speed}"]
    header += [f"end {end}", *writer.identity_lines(pcie_counter_bits)]
    return "\n".join([*header, *writer.lines, ""])


@dataclass(slots=True)
class _Gpu:
    number: int
    identity: dict[str, str] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)  # by name, as last written
    sums: dict[str, float] = field(default_factory=dict)  # counters made from rates
    sampled_at_s: float | None = None


class _ScriptWriter:
    def __init__(self) -> None:
        self.driver_version = "580.95.05"
        self.lines: list[str] = []
        self._gpus: dict[GpuKey, _Gpu] = {}

    def add(self, elapsed_s: float, records: Sequence[Record]) -> None:
        changes: dict[int, dict[str, str]] = {}
        for record in sorted((r for r in records if hasattr(r, "key")), key=lambda r: r.key.gpu):
            gpu = self._gpus.get(record.key)
            if gpu is None:
                # A value holds from its first point backwards as well, so a GPU is said to be well at first.
                gpu = self._gpus[record.key] = _Gpu(len(self._gpus), last=_numbers(_STATE_VALUES["ok"]))
                changes[gpu.number] = dict(gpu.last)
            if record.key.uuid is not None:
                gpu.identity["uuid"] = record.key.uuid
            values = self._values(gpu, record, elapsed_s)
            counters = {name for name in values if _is_counter(name)}
            changed = {k: v for k, v in values.items() if k in counters or gpu.last.get(k) != v}
            gpu.last.update(changed)
            changes.setdefault(gpu.number, {}).update(changed)
        self.lines.append(f"@ {elapsed_s:.6f}")
        for number, values in changes.items():
            if values:
                self.lines.append(" ".join([str(number), *(f"{k}={v}" for k, v in values.items())]))

    def identity_lines(self, pcie_counter_bits: int) -> list[str]:
        lines = []
        for gpu in self._gpus.values():
            identity = gpu.identity | {"pcie_counter_bits": str(pcie_counter_bits)}
            lines += [f"gpu {gpu.number} {key} {value}" for key, value in identity.items()]
        return lines

    def _values(self, gpu: _Gpu, record: Record, elapsed_s: float) -> dict[str, str]:
        match record:
            case GpuInfo():
                self.driver_version = record.driver_version or self.driver_version
                minor = (record.device or "").removeprefix("nvidia")
                identity = {"name": record.model_name, "pci_bus_id": record.pci_bus_id, "minor": minor}
                gpu.identity.update({k: v for k, v in identity.items() if v})
                return {}
            case GpuState():
                return _numbers(_STATE_VALUES[record.state])
            case GpuSample():
                return _numbers(_sample_values(record)) | _numbers(_rates_summed(gpu, record, elapsed_s))
            case GpuSlowSample():
                return _numbers(_slow_values(record)) | _processes(record.processes)
            case GpuLimits():
                return _numbers(
                    {
                        "power_limit_milliwatts": _times(record.power_limit_watts, 1e3),
                        "sm_clock_max_megahertz": _times(record.sm_clock_max_hertz, 1e-6),
                        "memory_clock_max_megahertz": _times(record.memory_clock_max_hertz, 1e-6),
                    }
                )
            case _:
                return {}


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
    }


def _rates_summed(gpu: _Gpu, sample: GpuSample, elapsed_s: float) -> dict[str, float | None]:
    span_s = 0.0 if gpu.sampled_at_s is None else elapsed_s - gpu.sampled_at_s
    gpu.sampled_at_s = elapsed_s
    rates = {
        "pcie_transmit_bytes": sample.pcie_transmit_bytes_per_second,
        "pcie_receive_bytes": sample.pcie_receive_bytes_per_second,
        "nvlink_transmit_kibibytes": _times(sample.nvlink_transmit_bytes_per_second, 1 / 1024),
        "nvlink_receive_kibibytes": _times(sample.nvlink_receive_bytes_per_second, 1 / 1024),
    }
    for name, rate in rates.items():
        if rate is not None:
            gpu.sums[name] = gpu.sums.get(name, 0.0) + rate * span_s
    return dict(gpu.sums)


def _processes(processes: Sequence[GpuProcess] | None) -> dict[str, str]:
    if processes is None:
        return {}
    words = [f"{p.pid}" if p.memory_used_bytes is None else f"{p.pid}:{p.memory_used_bytes}" for p in processes]
    return {"processes": ",".join(words)}


def _is_counter(name: str) -> bool:
    return name.startswith(("energy_", "pcie_", "nvlink_")) or name.endswith("_nanoseconds")


def _numbers(values: Mapping[str, float | None]) -> dict[str, str]:
    # NVML gives whole numbers only.
    return {name: str(round(value)) for name, value in values.items() if value is not None}


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _who(gpu: int | None) -> str:
    return "*" if gpu is None else str(gpu)
