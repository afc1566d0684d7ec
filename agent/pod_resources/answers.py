"""What the kubelet's answers say: which container of which pod holds which GPU or MIG instance.

Field numbers are those of package v1 of the kubelet's pod-resources interface, written down in
tests/pod_resources.proto as far as they are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from agent.owners.holders import PodOwner
from agent.pod_resources.wire import Reader

#: GPUs and MIG instances of one host: 16 cards of 7 instances are 128.
DEVICES_MAX: Final = 1024
#: Containers on one GPU; time-slicing is set up for a handful.
OWNERS_MAX: Final = 64
#: Kubernetes allows 253 characters for a pod and 63 for a namespace or container.
NAME_LENGTH_MAX: Final = 253

_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
#: As NVML writes UUIDs; drivers before R470 named MIG instances by the card's UUID and two numbers.
_DEVICE: Final = re.compile(rf"(GPU|MIG)-({_UUID})|(MIG-GPU)-({_UUID}/[0-9]{{1,3}}/[0-9]{{1,3}})", re.IGNORECASE)
#: The same within a longer name, not as the tail of another word.
_NAMED: Final = re.compile(rf"(?<![a-z0-9])(GPU|MIG)-({_UUID})(?![0-9a-f-])", re.IGNORECASE)
#: Pods whose bytes have none of these hold no GPU and are not taken apart; dynamic resources may write lower case.
_TRACES: Final = (b"GPU-", b"MIG-", b"gpu-", b"mig-", b"nvidia.com")
_PLUGIN_NAMES: Final = "nvidia.com/"  # of resources
_CLAIM_DRIVER: Final = "gpu.nvidia.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Who holds what, from one answer."""

    #: By UUID (GPU-... or MIG-...); owners in the order of their names. Devices that nobody holds are not in it.
    owners: Mapping[str, tuple[PodOwner, ...]] = field(default_factory=dict)
    #: Devices and owners beyond the bounds.
    left_out: int = 0
    #: A device of NVIDIA whose id names no UUID, as some device plugins do; None where there is none.
    unnamed_device: str | None = None


def read_list(answer: bytes) -> Allocation:
    """Return the allocation of a ListPodResourcesResponse; raises WireError where it is none."""
    reader = Reader()
    found: dict[str, set[PodOwner]] = {}
    left_out = 0
    unnamed: str | None = None
    (pods,) = reader.parts(answer, 1)
    for pod in pods:
        if not any(trace in pod for trace in _TRACES):
            continue
        for owner, device, is_uuid in _holdings(reader, pod):
            if not is_uuid:
                unnamed = unnamed or device
            elif device not in found and len(found) >= DEVICES_MAX:
                left_out += 1
            else:
                owners = found.setdefault(device, set())
                if owner in owners or len(owners) < OWNERS_MAX:
                    owners.add(owner)
                else:
                    left_out += 1
    owners_of = {device: tuple(sorted(owners)) for device, owners in sorted(found.items())}
    return Allocation(owners=MappingProxyType(owners_of), left_out=left_out, unnamed_device=unnamed)


def read_allocatable(answer: bytes) -> frozenset[str]:
    """Return the UUIDs of an AllocatableResourcesResponse: what the kubelet can give to pods, given away or not."""
    reader = Reader()
    found: set[str] = set()
    (kinds,) = reader.parts(answer, 1)
    for kind in kinds:
        found.update(device for device, is_uuid in _plugin_devices(reader, kind) if is_uuid)
    return frozenset(sorted(found)[:DEVICES_MAX])


def _holdings(reader: Reader, pod: bytes) -> Iterator[tuple[PodOwner, str, bool]]:
    """Give each device of one PodResources with the container that holds it, and whether its UUID is known."""
    names, namespaces, containers = reader.parts(pod, 1, 2, 3)
    for container in containers:
        container_names, kinds, claims = reader.parts(container, 1, 2, 5)
        owner = PodOwner(namespace=_last(namespaces), pod=_last(names), container=_last(container_names))
        for kind in kinds:
            for device, is_uuid in _plugin_devices(reader, kind):
                yield owner, device, is_uuid
        for claim in claims:
            for device, is_uuid in _claimed_devices(reader, claim):
                yield owner, device, is_uuid


def _plugin_devices(reader: Reader, kind: bytes) -> Iterator[tuple[str, bool]]:
    """Give the devices of one ContainerDevices; those of other vendors are passed over, whatever they are called."""
    resources, devices = reader.parts(kind, 1, 2)
    for device in devices:
        # Shared GPUs are given away as several devices each: GPU-...::0, GPU-...::1.
        match = _DEVICE.fullmatch(_text(device).partition("::")[0])
        if match is not None:
            yield _uuid(match), True
        elif _last(resources).startswith(_PLUGIN_NAMES):
            yield _text(device), False


def _claimed_devices(reader: Reader, claim: bytes) -> Iterator[tuple[str, bool]]:
    """Give the devices of one DynamicResource whose UUID is in a name: of a CDI device, the pool or the device."""
    (resources,) = reader.parts(claim, 4)
    for resource in resources:
        cdi_devices, drivers, pools, devices = reader.parts(resource, 1, 2, 3, 4)
        cdi_names = [name for cdi_device in cdi_devices for name in reader.parts(cdi_device, 1)[0]]
        matches = [match for name in (*cdi_names, *devices, *pools) for match in _NAMED.finditer(_text(name))]
        for match in matches:
            yield _uuid(match), True
        if not matches and _last(drivers) == _CLAIM_DRIVER:
            yield _last(devices), False


def _uuid(match: re.Match[str]) -> str:
    """Return a UUID as NVML writes it: the kind in upper case, the digits in lower case."""
    kind, digits = (group for group in match.groups() if group is not None)
    return f"{kind.upper()}-{digits.lower()}"


def _last(values: list[bytes]) -> str:
    """Return a single string field: the last one counts, and it is empty where none was written."""
    return _text(values[-1]) if values else ""


def _text(value: bytes) -> str:
    """Return a name as valid Unicode of bounded length."""
    # Four bytes are the most for one character.
    return value[: 4 * NAME_LENGTH_MAX].decode("utf-8", "backslashreplace")[:NAME_LENGTH_MAX]
