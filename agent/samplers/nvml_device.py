"""One GPU through NVML: which calls it offers, what they cost, and records in base units.

Core tick (1 s): utilisation, memory, power, clocks, event reasons, NVLink bytes; microseconds of driver time each. Slow
tick (5 s): energy, temperatures, PCIe bytes, processes; some milliseconds. nvmlDeviceGetPcieThroughput is never called:
it blocks for 20 ms in each direction. The NVLink bytes are fields 138 and 139 in the scope that sums over the links
(the default scope is link 0 alone). Boards with NVLink 5 count in the per-link fields 202 and 204 instead, which are
not read yet, and a driver may refuse the scope: such GPUs have no NVLink bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from agent.clock import Instant, stopwatch
from agent.records import GpuKey, GpuLimits, GpuProcess, GpuSample, GpuSlowSample, GpuState, Record
from agent.samplers import nvml_binding as nvml

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Bits of nvmlDeviceGetCurrentClocksEventReasons. 0x2 (application clocks) and 0x100 (display) are no words of ours.
EVENT_REASON_BITS: Final = (
    (0x01, "gpu_idle"),
    (0x04, "sw_power_cap"),
    (0x08, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
)
_NVLINK_TRANSMIT: Final = (138, nvml.ALL_LINKS)
_NVLINK_RECEIVE: Final = (139, nvml.ALL_LINKS)
#: Nanoseconds below a clock limit. The other reasons (251 to 273) were renumbered in driver 580.82 and are not read.
_POWER_CAP_TIME: Final = (74, 0)
_THERMAL_TIME: Final = (75, 0)
_MEMORY_TEMPERATURE: Final = (82, 0)
_PCIE_TRANSMIT: Final = (197, 0)
_PCIE_RECEIVE: Final = (198, 0)

_KIBIBYTE: Final = 1024
_MAX_COUNTER: Final = 1 << 63  # -1 and "not available" lie above, real counters far below
_MAX_MILLIWATTS: Final = 100_000_000
_MAX_MEGAHERTZ: Final = 100_000
_CELSIUS: Final = (-60, 250)
_MAX_MEMORY_BYTES: Final = 1 << 50
_MAX_PID: Final = 1 << 22  # PID_MAX_LIMIT of a 64-bit kernel
#: A GPU that answered nothing but errors in so many ticks is lost, or hung where they are timeouts.
_SILENT_TICKS: Final = 3
#: Codes by which a driver says that it does not have a value; no errors, and not asked for again.
_NOT_OFFERED: Final = frozenset({nvml.NOT_SUPPORTED, nvml.FUNCTION_NOT_FOUND, nvml.VERSION_MISMATCH})


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What names a GPU; read once when it is attached."""

    uuid: str
    model_name: str | None
    pci_bus_id: str | None
    device: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one tick of one GPU brought.

    `is_stale` says that the handle is void and the GPUs have to be enumerated anew.
    """

    state: str
    records: tuple[Record, ...] = ()
    is_stale: bool = False
    errors: Mapping[str, int] = field(default_factory=dict)
    driver_seconds: float = 0.0


class _TickOverError(Exception):
    """No further call on this GPU makes sense in this tick."""


class NvmlDevice:
    """The calls on one handle. Used by one thread at a time."""

    def __init__(self, index: int) -> None:
        """Attach the GPU at this position of the enumeration; raises NvmlError where it does not answer."""
        self._not_offered: set[str] = set()
        self._errors: Counter[str] = Counter()
        self._codes: set[int] = set()
        self._answered = 0
        self._silent_ticks = 0
        self._driver_seconds = 0.0
        begin = stopwatch()
        self._handle = nvml.device_handle(index)
        self._uuid = nvml.device_uuid(self._handle)
        self._driver_seconds += stopwatch() - begin
        try:
            minor = self._read("minor number", nvml.device_minor)
            name = self._read("name", nvml.device_name)
            pci_bus_id = self._read("PCI address", nvml.device_pci_bus_id)
        except _TickOverError:
            raise nvml.NvmlError(nvml.GPU_IS_LOST) from None
        device = None if minor is None else f"nvidia{minor}"
        self.identity = Identity(uuid=self._uuid, model_name=name, pci_bus_id=pci_bus_id, device=device)

    def read(self, key: GpuKey, now: Instant, *, slow: bool, limits: bool) -> Reading:
        """Return the records of this tick: state and core sample, and limits and slow sample where asked for."""
        self._codes.clear()
        self._answered = 0
        records: list[Record] = []
        try:
            if limits:
                records.append(self._limits(key, now))
            core = self._core(key, now)
            records += [core, self._slow(key, now)] if slow else [core]
        except _TickOverError:
            pass
        state = self._state()
        if state in ("lost", "hung"):
            records.clear()
        records.insert(0, GpuState(monotonic_s=now.monotonic_s, wall_s=now.wall_s, key=key, state=state))
        errors, self._errors = self._errors, Counter()
        driver_seconds, self._driver_seconds = self._driver_seconds, 0.0
        return Reading(
            state=state,
            records=tuple(records),
            is_stale=self._is_stale(),
            errors=errors,
            driver_seconds=driver_seconds,
        )

    def _state(self) -> str:
        is_silent = self._answered == 0 and bool(self._codes - _NOT_OFFERED - {nvml.NO_PERMISSION})
        self._silent_ticks = self._silent_ticks + 1 if is_silent else 0
        if nvml.GPU_IS_LOST in self._codes:
            return "lost"
        if nvml.RESET_REQUIRED in self._codes:
            return "reset_required"
        if self._silent_ticks < _SILENT_TICKS:
            return "ok"
        return "hung" if nvml.TIMEOUT in self._codes else "lost"

    def _is_stale(self) -> bool:
        # One call may dislike its argument; a void handle is disliked by all.
        void = {nvml.INVALID_ARGUMENT, nvml.GPU_NOT_FOUND} & self._codes
        return nvml.UNINITIALIZED in self._codes or (bool(void) and self._answered == 0)

    def _limits(self, key: GpuKey, now: Instant) -> GpuLimits:
        power = self._read("power_limit", nvml.power_limit_milliwatts)
        sm_clock = self._read("sm_clock_max", lambda handle: nvml.max_clock_megahertz(handle, nvml.CLOCK_SM))
        memory_clock = self._read("memory_clock_max", lambda h: nvml.max_clock_megahertz(h, nvml.CLOCK_MEMORY))
        return GpuLimits(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            key=key,
            power_limit_watts=self._scaled(power, 1e-3, 0, _MAX_MILLIWATTS),
            sm_clock_max_hertz=self._scaled(sm_clock, 1e6, 0, _MAX_MEGAHERTZ),
            memory_clock_max_hertz=self._scaled(memory_clock, 1e6, 0, _MAX_MEGAHERTZ),
        )

    def _core(self, key: GpuKey, now: Instant) -> GpuSample:
        busy, memory_busy = self._read("utilization", nvml.utilization) or (None, None)
        memory = self._read("memory", nvml.memory, nvml.memory_v1)
        if memory is not None and not 0 <= memory.used <= memory.total < _MAX_MEMORY_BYTES:
            self._errors["implausible"] += 1
            memory = None
        power = self._read("power", nvml.power_milliwatts)
        sm_clock = self._read("sm_clock", lambda handle: nvml.clock_megahertz(handle, nvml.CLOCK_SM))
        memory_clock = self._read("memory_clock", lambda handle: nvml.clock_megahertz(handle, nvml.CLOCK_MEMORY))
        reasons = self._read("event_reasons", nvml.event_reasons, nvml.event_reasons_old)
        links = self._fields((_NVLINK_TRANSMIT, _NVLINK_RECEIVE))
        return GpuSample(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            key=key,
            utilization_ratio=self._percent(busy),
            memory_utilization_ratio=self._percent(memory_busy),
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=self._scaled(power, 1e-3, 0, _MAX_MILLIWATTS),
            sm_clock_hertz=self._scaled(sm_clock, 1e6, 0, _MAX_MEGAHERTZ),
            memory_clock_hertz=self._scaled(memory_clock, 1e6, 0, _MAX_MEGAHERTZ),
            clock_event_reasons=self._reasons(reasons),
            nvlink_transmit_bytes_total=self._counter(links.get(_NVLINK_TRANSMIT), _KIBIBYTE),
            nvlink_receive_bytes_total=self._counter(links.get(_NVLINK_RECEIVE), _KIBIBYTE),
        )

    def _slow(self, key: GpuKey, now: Instant) -> GpuSlowSample:
        energy = self._read("energy", nvml.energy_millijoules)
        temperature = self._read("temperature", nvml.temperature_celsius, nvml.temperature_celsius_old)
        fields = self._fields((_POWER_CAP_TIME, _THERMAL_TIME, _MEMORY_TEMPERATURE, _PCIE_TRANSMIT, _PCIE_RECEIVE))
        memory_temperature = _value(fields.get(_MEMORY_TEMPERATURE))
        times = {"sw_power_cap": fields.get(_POWER_CAP_TIME), "sw_thermal": fields.get(_THERMAL_TIME)}
        seconds = {reason: self._scaled(_value(time), 1e-9, 0, _MAX_COUNTER) for reason, time in times.items()}
        return GpuSlowSample(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            key=key,
            energy_joules_total=self._scaled(energy, 1e-3, 0, _MAX_COUNTER),
            temperature_celsius=self._scaled(temperature, 1.0, *_CELSIUS),
            memory_temperature_celsius=self._scaled(memory_temperature, 1.0, *_CELSIUS),
            pcie_transmit_bytes_total=self._counter(fields.get(_PCIE_TRANSMIT), 1),
            pcie_receive_bytes_total=self._counter(fields.get(_PCIE_RECEIVE), 1),
            processes=self._processes(),
            clock_event_seconds_total={reason: value for reason, value in seconds.items() if value is not None},
        )

    def _read(self, name: str, *functions: Callable[[nvml.DeviceHandle], T]) -> T | None:
        """Return what the first function answers; the others are older calls for drivers without it."""
        for position, function in enumerate(functions):
            label = f"{name}/{position}"
            if label in self._not_offered or name in self._not_offered:
                continue
            begin = stopwatch()
            try:
                value = function(self._handle)
            except nvml.NvmlError as error:
                self._failed(label, error)
                if error.code not in _NOT_OFFERED:
                    return None
            else:
                self._answered += 1
                return value
            finally:
                self._driver_seconds += stopwatch() - begin
        return None

    def _fields(self, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], nvml.FieldReading]:
        """Return the fields that could be read; one the driver does not know is not asked for again."""
        asked = [entry for entry in wanted if f"field {entry[0]}" not in self._not_offered]
        readings = self._read("fields", lambda handle: nvml.field_values(handle, asked)) if asked else None
        found = {}
        for entry, reading in zip(asked, readings or (), strict=False):
            if reading.code == 0:
                found[entry] = reading
            elif reading.code == nvml.INVALID_ARGUMENT:
                self._not_offered.add(f"field {entry[0]}")  # how drivers answer an id or scope they do not know
            else:
                self._failed(f"field {entry[0]}", nvml.NvmlError(reading.code))
        return found

    def _failed(self, label: str, error: nvml.NvmlError) -> None:
        self._codes.add(error.code)
        if error.code in _NOT_OFFERED:
            self._not_offered.add(label)
            return
        self._errors[error.reason] += 1
        if error.code == nvml.NO_PERMISSION:
            name = label.partition("/")[0]
            self._not_offered.add(name)
            _log.warning("%s: the driver does not permit to read %s; it is left out", self._uuid, name)
        elif error.code in (nvml.GPU_IS_LOST, nvml.UNINITIALIZED):
            raise _TickOverError

    def _scaled(self, value: float | None, factor: float, low: float, high: float) -> float | None:
        if value is None:
            return None
        if not low <= value < high:
            self._errors["implausible"] += 1
            return None
        # A quotient by a whole number is exact where a product with its inverse is not.
        return value / round(1 / factor) if factor < 1 else value * factor

    def _percent(self, value: int | None) -> float | None:
        return self._scaled(value, 1e-2, 0, 101)

    def _counter(self, reading: nvml.FieldReading | None, unit: int) -> int | None:
        if reading is None or reading.value is None or reading.bits < 64:
            return None  # 32 bits of bytes wrap within a second
        if not 0 <= reading.value < _MAX_COUNTER:
            self._errors["implausible"] += 1
            return None
        return int(reading.value) * unit

    def _reasons(self, bits: int | None) -> tuple[str, ...] | None:
        if bits is None:
            return None
        if not 0 <= bits < 1 << 32:
            self._errors["implausible"] += 1
            return None
        return tuple(word for bit, word in EVENT_REASON_BITS if bits & bit)

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        readings = self._read("processes", nvml.processes, nvml.processes_v2)
        if readings is None:
            return None
        plausible = [process for process in readings if 0 < process.pid <= _MAX_PID]
        if len(plausible) < len(readings):
            self._errors["implausible"] += 1
        return tuple(GpuProcess(process.pid, process.used) for process in plausible)


def _value(reading: nvml.FieldReading | None) -> float | None:
    return None if reading is None else reading.value
