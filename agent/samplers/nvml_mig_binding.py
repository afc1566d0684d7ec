"""The typed face of NVML's multi-instance GPU (MIG) calls; beside `nvml_binding`."""

from __future__ import annotations

from agent.samplers.nvml_binding import DeviceHandle, call


def is_enabled(handle: DeviceHandle) -> bool:
    """Return whether the GPU is in MIG mode now; a mode that waits for a reset does not count."""
    current, _pending = call("nvmlDeviceGetMigMode", handle)
    return bool(current)


def most_devices(handle: DeviceHandle) -> int:
    """Return the length of the enumeration of MIG devices, most places of which may be empty."""
    return int(call("nvmlDeviceGetMaxMigDeviceCount", handle))


def device_handle(handle: DeviceHandle, index: int) -> DeviceHandle:
    """Return the MIG device at a place of the enumeration; NOT_FOUND where it is empty."""
    return DeviceHandle(call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index))


def gpu_instance_id(handle: DeviceHandle) -> int:
    """Return the GPU instance that a MIG device belongs to; several compute instances may share one."""
    return int(call("nvmlDeviceGetGpuInstanceId", handle))


def compute_instance_id(handle: DeviceHandle) -> int:
    """Return the compute instance of a MIG device."""
    return int(call("nvmlDeviceGetComputeInstanceId", handle))


def profile_of(handle: DeviceHandle) -> str:
    """Return the profile of a MIG device's GPU instance by its size: "1g.10gb"."""
    attributes = call("nvmlDeviceGetAttributes_v2", handle)
    gibibytes = round(int(attributes.memorySizeMB) / 1024)
    return f"{int(attributes.gpuInstanceSliceCount)}g.{gibibytes}gb"
