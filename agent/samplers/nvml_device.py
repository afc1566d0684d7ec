"""One GPU through NVML: which calls it offers, what they cost, and records in base units.

Core tick (1 s): utilisation, memory, power, clocks, event reasons, NVLink bytes, GPM; microseconds each.
Slow tick (5 s): energy, temperatures, PCIe bytes, processes, errors; some milliseconds. Every 60 s: limits. Not called
is nvmlDeviceGetPcieThroughput, which blocks for 20 ms in each direction. docs/nvml.md has the whole table.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from agent.clock import Instant, stopwatch
from agent.records import GpuKey, GpuLimits, GpuSample, GpuSlowSample, GpuState, Record
from agent.samplers import nvml_binding as nvml
from agent.samplers import nvml_fields as ids
from agent.samplers.nvml_calls import MAX_COUNTER, NOT_OFFERED, Calls, TickOverError, value_of
from agent.samplers.nvml_fast import find_cheap
from agent.samplers.nvml_gpm import Gpm, Load
from agent.samplers.nvml_guards import Guards
from agent.samplers.nvml_health import MAX_MEGAHERTZ, MAX_MILLIWATTS, event_seconds, read_health, read_limits
from agent.samplers.nvml_links import Links
from agent.samplers.nvml_mig import MigInstances
from agent.samplers.nvml_plausible import PowerGuard
from agent.samplers.nvml_process_use import ProcessUses
from agent.samplers.nvml_readings import read_memory, read_processes

T = TypeVar("T")

_IDLE: Final = "gpu_idle"
#: Bits of nvmlDeviceGetCurrentClocksEventReasons. 0x2 (application clocks) and 0x100 (display) are no words of ours.
EVENT_REASON_BITS: Final = (
    (0x01, _IDLE),
    (0x04, "sw_power_cap"),
    (0x08, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
)
_CELSIUS: Final = (-60, 250)
#: A reading this many times the power limit is no power; excursions of milliseconds stay below twice.
_MOST_LIMITS: Final = 3
#: A GPU that answered nothing but errors in so many ticks is lost, or hung where they are timeouts.
_SILENT_TICKS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What names a GPU; read once when it is attached. None is what could not be read."""

    uuid: str | None
    model_name: str | None
    pci_bus_id: str | None
    device: str | None


class AttachError(nvml.NvmlError):
    """A GPU that is enumerated and cannot be attached; `identity` is what it says about itself all the same."""

    def __init__(self, code: int, identity: Identity) -> None:
        super().__init__(code)
        self.identity = identity


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


class NvmlDevice:
    """The calls on one handle. Used by one thread at a time, but for `close`."""

    def __init__(
        self, index: int, driver_version: str | None = None, *, fast_most_s: float = 0.0, mig_period_s: float = 10.0
    ) -> None:
        """Attach the GPU at this position of the enumeration; raises AttachError where it does not answer.

        `fast_most_s` is how long a reading of instant power may take, at 0 it is not tried; `mig_period_s` the distance
        of looks at the MIG instances.
        """
        begin = stopwatch()
        handle, uuid = _find(index)
        self.uuid = uuid
        self._calls = Calls(handle, uuid)
        self._calls.driver_seconds += stopwatch() - begin
        self._silent_ticks = 0
        self._event_times = ids.event_time_fields(driver_version)
        self._slow_fields = (
            ids.POWER_CAP_TIME,
            ids.THERMAL_TIME,
            *self._event_times.values(),
            ids.MEMORY_TEMPERATURE,
            ids.PCIE_TRANSMIT,
            ids.PCIE_RECEIVE,
        )
        self._limit_watts: float | None = None
        self._guards = Guards(self._calls)
        self._power = PowerGuard()
        self._links = Links(self._calls)
        self._gpm = Gpm(self._calls)
        self._uses = ProcessUses(self._calls)
        self._mig = MigInstances(self._calls, mig_period_s)
        self._closing = threading.Lock()  # held while the tick runs
        self._is_closed = False
        try:
            minor = self._calls.read("minor number", nvml.device_minor)
            name = self._calls.read("name", nvml.device_name)
            pci_bus_id = self._calls.read("PCI address", nvml.device_pci_bus_id)
        except TickOverError:
            raise AttachError(nvml.GPU_IS_LOST, _identity(handle, uuid)) from None
        self.fast = find_cheap(handle, fast_most_s) if fast_most_s > 0 else None
        device = None if minor is None else f"nvidia{minor}"
        self.identity = Identity(uuid=uuid, model_name=name, pci_bus_id=pci_bus_id, device=device)

    @property
    def most_watts(self) -> float:
        """What no power reading can be."""
        return MAX_MILLIWATTS / 1e3 if self._limit_watts is None else _MOST_LIMITS * self._limit_watts

    def close(self) -> None:
        """Free what the library holds for this GPU; while a tick runs, or hangs, that is left to its end."""
        self._is_closed = True
        if self._closing.acquire(blocking=False):
            self._free()
            self._closing.release()

    def _free(self) -> None:
        self._gpm.close()
        self._mig.close()

    def read(self, key: GpuKey, now: Instant, *, slow: bool, limits: bool) -> Reading:
        """Return the records of this tick: state and core sample, and limits and slow sample where asked for."""
        with self._closing:
            reading = self._read_tick(key, now, slow=slow, limits=limits)
            if self._is_closed or reading.is_stale or reading.state == "lost":
                self._free()
            return reading

    def _read_tick(self, key: GpuKey, now: Instant, *, slow: bool, limits: bool) -> Reading:
        self._calls.begin_tick()
        records: list[Record] = []
        try:
            if limits:
                records.append(self._limits(key, now))
            is_divided = self._mig.look(now)
            records.append(self._core(key, now, is_divided=is_divided))
            if slow:
                records.append(self._slow(key, now, is_divided=is_divided))
                health = read_health(self._calls, self._links, self._guards, key, now)
                records += [] if health is None else [health]
            if is_divided:
                records += self._mig.read(key, now, slow=slow, infos=limits)
        except TickOverError:
            pass
        state = self._state()
        if state in ("lost", "hung"):
            records.clear()
        records.insert(0, GpuState(monotonic_s=now.monotonic_s, wall_s=now.wall_s, key=key, state=state))
        errors, self._calls.errors = self._calls.errors, Counter()
        driver_seconds, self._calls.driver_seconds = self._calls.driver_seconds, 0.0
        return Reading(
            state=state,
            records=tuple(records),
            is_stale=self._is_stale(),
            errors=errors,
            driver_seconds=driver_seconds,
        )

    def _state(self) -> str:
        codes = self._calls.codes
        is_silent = self._calls.answered == 0 and bool(codes - NOT_OFFERED - {nvml.NO_PERMISSION})
        self._silent_ticks = self._silent_ticks + 1 if is_silent else 0
        if nvml.GPU_IS_LOST in codes:
            return "lost"
        if nvml.RESET_REQUIRED in codes:
            return "reset_required"
        if self._silent_ticks < _SILENT_TICKS:
            return "ok"
        return "hung" if nvml.TIMEOUT in codes else "lost"

    def _is_stale(self) -> bool:
        # One call may dislike its argument; a void handle is disliked by all.
        void = {nvml.INVALID_ARGUMENT, nvml.GPU_NOT_FOUND} & self._calls.codes
        return nvml.UNINITIALIZED in self._calls.codes or (bool(void) and self._calls.answered == 0)

    def _limits(self, key: GpuKey, now: Instant) -> GpuLimits:
        limits = read_limits(self._calls, key, now)
        self._limit_watts = limits.power_limit_watts or self._limit_watts
        return limits

    def _core(self, key: GpuKey, now: Instant, *, is_divided: bool) -> GpuSample:
        """Return the core sample; of a GPU in MIG mode without what its instances have."""
        calls = self._calls
        busy, memory_busy, memory = None, None, None
        if not is_divided:
            busy, memory_busy = calls.read("utilization", nvml.utilization) or (None, None)
            memory = read_memory(calls)
        power = self._watts(now)
        sm_clock = calls.read("sm_clock", lambda handle: nvml.clock_megahertz(handle, nvml.CLOCK_SM))
        memory_clock = calls.read("memory_clock", lambda handle: nvml.clock_megahertz(handle, nvml.CLOCK_MEMORY))
        reasons = calls.read("event_reasons", nvml.event_reasons, nvml.event_reasons_old)
        transmitted, received = self._links.transmitted_and_received()
        utilization = calls.percent(busy)
        load = Load(utilization_ratio=utilization, power_watts=power, power_limit_watts=self._limit_watts)
        gpm: dict[str, float] = {}
        if not is_divided:
            gpm = self._gpm.read(now.monotonic_s, load, with_nvlink=not self._links.counts_bytes)
        return GpuSample(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            key=key,
            utilization_ratio=utilization,
            memory_utilization_ratio=calls.percent(memory_busy),
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=power,
            sm_clock_hertz=calls.scaled(sm_clock, 1e6, 0, MAX_MEGAHERTZ),
            memory_clock_hertz=calls.scaled(memory_clock, 1e6, 0, MAX_MEGAHERTZ),
            clock_event_reasons=self._reasons(reasons),
            nvlink_transmit_bytes_total=self._guards.whole("nvlink_transmit_bytes_total", transmitted, now.monotonic_s),
            nvlink_receive_bytes_total=self._guards.whole("nvlink_receive_bytes_total", received, now.monotonic_s),
            **gpm,
        )

    def _slow(self, key: GpuKey, now: Instant, *, is_divided: bool) -> GpuSlowSample:
        calls = self._calls
        temperature = calls.read("temperature", nvml.temperature_celsius, nvml.temperature_celsius_old)
        energy = self._joules(now)
        fields = calls.fields("fields", self._slow_fields)
        seconds = {
            reason: self._guards.number("clock_event_seconds_total", value, now.monotonic_s, part=reason)
            for reason, value in event_seconds(calls, fields, self._event_times).items()
        }
        return GpuSlowSample(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            key=key,
            energy_joules_total=energy,
            temperature_celsius=calls.scaled(temperature, 1.0, *_CELSIUS),
            memory_temperature_celsius=calls.scaled(value_of(fields.get(ids.MEMORY_TEMPERATURE)), 1.0, *_CELSIUS),
            pcie_transmit_bytes_total=self._pcie_bytes("pcie_transmit_bytes_total", fields.get(ids.PCIE_TRANSMIT), now),
            pcie_receive_bytes_total=self._pcie_bytes("pcie_receive_bytes_total", fields.get(ids.PCIE_RECEIVE), now),
            processes=None if is_divided else self._uses.of(read_processes(calls), now),
            clock_event_seconds_total={reason: value for reason, value in seconds.items() if value is not None},
        )

    def _watts(self, now: Instant) -> float | None:
        milliwatts = self._calls.read("power", nvml.power_milliwatts)
        watts = self._calls.scaled(milliwatts, 1e-3, 0, 1e3 * self.most_watts)
        watts, _ = self._power.check_power(watts, now.monotonic_s)
        return watts

    def _joules(self, now: Instant) -> float | None:
        millijoules = self._calls.read("energy", nvml.energy_millijoules)
        joules = self._calls.scaled(millijoules, 1e-3, 0, MAX_COUNTER)
        joules = self._guards.number("energy_joules_total", joules, now.monotonic_s)
        joules, lapse = self._power.check_energy(joules, now.monotonic_s)
        if lapse is not None:
            self._calls.reject(lapse)
        return joules

    def _pcie_bytes(self, name: str, reading: nvml.FieldReading | None, now: Instant) -> int | None:
        if reading is None or reading.bits < 64:
            return None  # 32 bits of bytes wrap within a second
        return self._guards.whole(name, self._calls.count(reading.value), now.monotonic_s)

    def _reasons(self, bits: int | None) -> tuple[str, ...] | None:
        if bits is None:
            return None
        if not 0 <= bits < 1 << 32:
            self._calls.reject()
            return None
        return tuple(word for bit, word in EVENT_REASON_BITS if bits & bit)


def with_reasons(sample: GpuSample, bits: int) -> GpuSample:
    """Return the sample with clock events that were seen since the tick before; idle it is only where it is so now."""
    if sample.clock_event_reasons is None:
        return sample
    now = frozenset(sample.clock_event_reasons)
    reasons = tuple(word for bit, word in EVENT_REASON_BITS if word in now or (bits & bit and word != _IDLE))
    return sample if len(reasons) == len(now) else replace(sample, clock_event_reasons=reasons)


def _find(index: int) -> tuple[nvml.DeviceHandle, str]:
    """Return handle and UUID of the GPU at a position; raises AttachError."""
    try:
        handle = nvml.device_handle(index)
    except nvml.NvmlError as error:
        nothing = Identity(uuid=None, model_name=None, pci_bus_id=None, device=None)
        raise AttachError(error.code, nothing) from None
    try:
        return handle, nvml.device_uuid(handle)
    except nvml.NvmlError as error:
        raise AttachError(error.code, _identity(handle, None)) from None


def _identity(handle: nvml.DeviceHandle, uuid: str | None) -> Identity:
    """Return what a GPU that fails still says about itself."""
    minor = _try(nvml.device_minor, handle)
    return Identity(
        uuid=uuid,
        model_name=_try(nvml.device_name, handle),
        pci_bus_id=_try(nvml.device_pci_bus_id, handle),
        device=None if minor is None else f"nvidia{minor}",
    )


def _try(function: Callable[[nvml.DeviceHandle], T], handle: nvml.DeviceHandle) -> T | None:
    try:
        return function(handle)
    except nvml.NvmlError:
        return None  # the first failure is the one that is counted
