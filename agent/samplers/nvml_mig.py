"""The MIG instances of one GPU: memory, activity and processes, which the card as a whole does not have then.

Power, energy, temperatures, clocks, limits and errors are the card's. The layout may change at any time, so it is read
every ten seconds, and at once when a handle no longer holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from agent.clock import Instant
from agent.records import GpuKey, GpuMigInfo, GpuProcess, GpuSample, GpuSlowSample, Record
from agent.samplers import nvml_binding as nvml
from agent.samplers import nvml_mig_binding as mig
from agent.samplers.nvml_calls import Calls
from agent.samplers.nvml_gpm import Gpm, Load
from agent.samplers.nvml_readings import read_memory, read_processes

_MOST_DEVICES: Final = 64
#: Codes of a handle whose instance was destroyed.
_VOID: Final = frozenset({nvml.INVALID_ARGUMENT, nvml.NOT_FOUND, nvml.GPU_NOT_FOUND})
_FATAL: Final = frozenset({nvml.GPU_IS_LOST, nvml.UNINITIALIZED, nvml.RESET_REQUIRED})
#: "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb": the part of the compute instance is not the GPU instance's.
_PROFILE: Final = re.compile(r"MIG (?:\d+c\.)?(\S+)$")


class MigDevice(NamedTuple):
    """A place in the enumeration of MIG devices: one compute instance."""

    gpu_i_id: int
    compute_instance_id: int
    uuid: str
    profile: str | None
    handle: nvml.DeviceHandle


class _Instance:
    """One GPU instance with its compute instances."""

    def __init__(self, parent: nvml.DeviceHandle, name: str, devices: Sequence[MigDevice]) -> None:
        self.devices = devices
        self._name = f"{name} instance {devices[0].gpu_i_id}"
        self._calls = [Calls(device.handle, self._name) for device in devices]
        # Counted apart from the card, so that what one instance does not offer is asked of the next one.
        self._gpm_calls = Calls(parent, self._name)
        self._gpm = Gpm(self._gpm_calls, devices[0].gpu_i_id)

    def identity(self) -> tuple[tuple[int, int, str], ...]:
        return tuple(device[:3] for device in self.devices)

    def info(self, key: GpuKey, now: Instant) -> GpuMigInfo:
        first = self.devices[0]
        return GpuMigInfo(
            monotonic_s=now.monotonic_s, wall_s=now.wall_s, key=key, profile=first.profile, mig_uuid=first.uuid
        )

    def read(self, key: GpuKey, now: Instant, *, slow: bool) -> list[Record]:
        memory = read_memory(self._calls[0])
        activity: dict[str, Any] = dict(self._gpm.read(now.monotonic_s, Load(), with_nvlink=False))
        sample = GpuSample(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            key=key,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            **activity,
        )
        records: list[Record] = [sample]
        if slow:
            records.append(
                GpuSlowSample(monotonic_s=now.monotonic_s, wall_s=now.wall_s, key=key, processes=self._processes())
            )
        return records

    def settle(self, parent: Calls) -> bool:
        """Book what the calls brought with the card's, and return whether the handle still holds."""
        is_void = any(calls.codes & _VOID for calls in self._calls)
        for calls in (*self._calls, self._gpm_calls):
            parent.codes |= calls.codes & _FATAL
            parent.answered += calls.answered
            parent.driver_seconds += calls.driver_seconds
            for reason, count in calls.errors.items():
                if not is_void or reason not in _VOID_REASONS:
                    parent.errors[reason] += count
            calls.errors.clear()
            calls.driver_seconds = 0.0
            calls.begin_tick()
        return not is_void

    def close(self) -> None:
        self._gpm.close()

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        lists = [read_processes(calls) for calls in self._calls]
        if all(processes is None for processes in lists):
            return None
        found = {process.pid: process for processes in lists for process in processes or ()}
        return tuple(found.values())


#: The words for _VOID: no faults, for the layout is read anew.
_VOID_REASONS: Final = frozenset({"invalid_argument", "not_found", "gpu_not_found"})


class MigInstances:
    """The instances of one GPU. Used by one thread at a time."""

    def __init__(self, calls: Calls, period_s: float) -> None:
        self._calls = calls
        self._period_s = period_s
        self._look_s = float("-inf")
        self._is_divided = False
        self._has_changed = False
        self._instances: dict[int, _Instance] = {}

    def look(self, now: Instant) -> bool:
        """Return whether the GPU is in MIG mode, after reading the layout where that is due."""
        if now.monotonic_s >= self._look_s and self._calls.offers("MIG mode"):
            self._look_s = now.monotonic_s + self._period_s
            is_divided = bool(self._calls.read("MIG mode", mig.is_enabled))
            if is_divided != self._is_divided:
                # What a card does not offer in one mode it may well in the other.
                self._calls.offer_again("utilization", "memory", "processes", "process utilization", "GPM")
                self._is_divided = is_divided
            self._lay_out(self._devices() if is_divided else [])
        return self._is_divided

    def read(self, key: GpuKey, now: Instant, *, slow: bool, infos: bool) -> list[Record]:
        """Return the records of all instances; their identities too where asked for and after a change."""
        infos = infos or self._has_changed
        self._has_changed = False
        records: list[Record] = []
        for gpu_i_id, instance in sorted(self._instances.items()):
            own_key = key._replace(gpu_i_id=gpu_i_id)
            try:
                found = instance.read(own_key, now, slow=slow)
            finally:
                holds = instance.settle(self._calls)
            if not holds:
                self._look_s = float("-inf")  # in the next tick
                continue
            if infos:
                records.append(instance.info(own_key, now))
            records += found
        return records

    def close(self) -> None:
        """Free what the library holds."""
        for instance in self._instances.values():
            instance.close()

    def _devices(self) -> list[MigDevice]:
        count = min(self._calls.read("MIG device count", mig.most_devices) or 0, _MOST_DEVICES)
        devices = []
        for index in range(count):
            try:
                devices.append(self._device(index))
            except nvml.NvmlError as error:
                if error.code not in _VOID:  # an empty place, or one that was emptied just now
                    self._calls.failed("MIG device", error)
        return devices

    def _device(self, index: int) -> MigDevice:
        handle = mig.device_handle(self._calls.handle, index)
        match = _PROFILE.search(nvml.device_name(handle))
        try:
            profile = match[1] if match else mig.profile_of(handle)
        except nvml.NvmlError:
            profile = None
        return MigDevice(
            mig.gpu_instance_id(handle), mig.compute_instance_id(handle), nvml.device_uuid(handle), profile, handle
        )

    def _lay_out(self, devices: Sequence[MigDevice]) -> None:
        """Take a new layout; an instance that is still there keeps its buffers."""
        by_instance: dict[int, list[MigDevice]] = {}
        for device in sorted(devices, key=lambda device: device[:2]):
            by_instance.setdefault(device.gpu_i_id, []).append(device)
        before, self._instances = self._instances, {}
        for gpu_i_id, own in by_instance.items():
            known = before.get(gpu_i_id)
            if known is not None and known.identity() == tuple(device[:3] for device in own):
                self._instances[gpu_i_id] = before.pop(gpu_i_id)
            else:
                self._instances[gpu_i_id] = _Instance(self._calls.handle, self._calls.name, own)
                self._has_changed = True
        for gone in before.values():
            gone.close()
