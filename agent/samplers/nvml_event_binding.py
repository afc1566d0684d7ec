"""The typed face of NVML's event sets; beside `nvml_binding`."""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple, NewType

from agent.samplers.nvml_binding import DeviceHandle, call

#: Where the driver queues events for one waiter; void after nvmlShutdown.
EventSet = NewType("EventSet", object)

#: The bit of nvmlEventTypeXidCriticalError; the event's data is the XID.
XID_EVENTS: Final = 0x8


class EventReading(NamedTuple):
    """One event as the driver tells it."""

    address: int  # of the device's handle, see `handle_address`
    types: int
    data: int


def device_handle_by_uuid(uuid: str) -> DeviceHandle:
    """Return the GPU of a UUID; initialises it where nobody has."""
    return DeviceHandle(call("nvmlDeviceGetHandleByUUID", uuid))


def handle_address(handle: DeviceHandle) -> int:
    """Return what tells one handle from another: two objects of ctypes for one GPU are not equal."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0  # type: ignore[arg-type] # a pointer, seen as an object


def supported_event_types(handle: DeviceHandle) -> int:
    """Return the bits of the events that the GPU can tell."""
    return int(call("nvmlDeviceGetSupportedEventTypes", handle))


def create_set() -> EventSet:
    """Return a new set, without any GPU; to be freed before nvmlShutdown."""
    return EventSet(call("nvmlEventSetCreate"))


def register(handle: DeviceHandle, types: int, events: EventSet) -> None:
    """Have events of a GPU queued from now on; what came before is not told."""
    call("nvmlDeviceRegisterEvents", handle, types, events)


def wait(events: EventSet, milliseconds: int) -> EventReading:
    """Return the next event; raises NvmlError with TIMEOUT where none comes in time.

    Of XIDs that came between two calls the driver tells the newest code for each: so wait again at once.
    """
    data = call("nvmlEventSetWait_v2", events, milliseconds)
    return EventReading(handle_address(data.device), int(data.eventType), int(data.eventData))


def free_set(events: EventSet) -> None:
    """Free a set."""
    call("nvmlEventSetFree", events)
