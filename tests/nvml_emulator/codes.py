"""Numbers of nvml.h that tests name."""

from __future__ import annotations

#: Return codes, for `Emulator.fail`.
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
UNKNOWN = 999

#: Type bit of an XID in an event, for `Emulator.event`.
XID_EVENT = 0x8

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
