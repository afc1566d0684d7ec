"""Readings that a GPU and a MIG instance have in common."""

from __future__ import annotations

from typing import Final

from agent.records import GpuProcess
from agent.samplers import nvml_binding as nvml
from agent.samplers.nvml_calls import Calls

_MAX_MEMORY_BYTES: Final = 1 << 50
_MAX_PID: Final = 1 << 22  # PID_MAX_LIMIT of a 64-bit kernel


def read_memory(calls: Calls) -> nvml.MemoryReading | None:
    """Return the memory of a GPU or instance where it can be believed."""
    memory = calls.read("memory", nvml.memory, nvml.memory_v1)
    if memory is not None and not 0 <= memory.used <= memory.total < _MAX_MEMORY_BYTES:
        calls.reject()
        return None
    return memory


def read_processes(calls: Calls) -> tuple[GpuProcess, ...] | None:
    """Return the compute processes of a GPU or instance; those with an impossible PID are left out and counted."""
    readings = calls.read("processes", nvml.processes, nvml.processes_v2)
    if readings is None:
        return None
    plausible = [process for process in readings if 0 < process.pid <= _MAX_PID]
    if len(plausible) < len(readings):
        calls.reject()
    return tuple(GpuProcess(process.pid, process.used) for process in plausible)
