"""State of network interfaces' links from /sys/class/net, and which ones the default route leaves by.

A default route often lies over a bond, a VLAN, a bridge or a virtual function; it counts for these and for all
interfaces below, so that the hardware that carries it is known (/sys/class/net/<name>/lower_<other>, device/physfn).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.clock import Instant
from agent.records import NetworkLink
from agent.samplers.kernel_file import counter, printable, read_start, read_text

#: How much is read of a table of routes. The default route of IPv4 stands first (the kernel walks by prefix); a router
#: has more routes than a GPU host.
_ROUTE_BYTES: Final = 256 * 1024
#: How deep interfaces may lie over each other; the kernel's own limit (MAX_NEST_DEV).
_MAX_DEPTH: Final = 8
#: Flags of routes (include/uapi/linux/route.h): the route is in use; it is one that refuses.
_RTF_UP: Final = 0x1
_RTF_REJECT: Final = 0x200
#: Seconds after which the speed is asked for again while the link did not change: drivers ask the firmware for it.
_SPEED_AGE_S: Final = 60.0
#: Bytes per second in one Mbit/s.
_MBIT: Final = 1_000_000 / 8
#: Larger ones are the unsigned form of -1, unknown.
_MAX_MBIT: Final = 2**31 - 1


def default_route_interfaces(route: str | None, ipv6_route: str | None) -> frozenset[str] | None:
    """Return the interfaces of the default routes of lowest metric, of IPv4 and IPv6 each; None without either table.

    `route` is /proc/net/route: name, destination and gateway (hexadecimal), flags (hexadecimal), reference count, use,
    metric (decimal), mask (hexadecimal). `ipv6_route` is /proc/net/ipv6_route: destination, prefix length, source,
    its prefix length, next hop, metric, reference count, use, flags (all hexadecimal), name.
    Sources: fib_route_seq_show in net/ipv4/fib_trie.c, rt6_native_seq_show in net/ipv6/route.c
    """
    if route is None and ipv6_route is None:
        return None
    ipv4 = []
    for line in (route or "").split("\n"):
        fields = line.split()
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000" and _is_in_use(fields[3]):
            metric = counter(fields[6])
            if metric is not None:
                ipv4.append((metric, fields[0]))
    ipv6 = []
    for line in (ipv6_route or "").split("\n"):
        fields = line.split()
        if len(fields) >= 10 and fields[0] == "0" * 32 and fields[1] == "00" and _is_in_use(fields[8]):
            metric = _hexadecimal(fields[5])
            if metric is not None:
                ipv6.append((metric, fields[9]))
    return frozenset(_of_lowest_metric(ipv4) | _of_lowest_metric(ipv6))


def _of_lowest_metric(routes: Sequence[tuple[int, str]]) -> set[str]:
    lowest = min((metric for metric, _ in routes), default=None)
    return {name for metric, name in routes if metric == lowest}


def _is_in_use(flags: str) -> bool:
    value = _hexadecimal(flags)
    return value is not None and bool(value & _RTF_UP) and not value & _RTF_REJECT


def _hexadecimal(field: str) -> int | None:
    try:
        return int(field, 16)
    except ValueError:
        return None


def with_lower(names: Iterable[str], net: str) -> frozenset[str]:
    """Return `names` and all interfaces that they lie over; `net` is /sys/class/net."""
    found: set[str] = set()
    level = set(names)
    for _ in range(_MAX_DEPTH):
        found |= level
        level = {other for name in level for other in lower(net, name)} - found
        if not level:
            break
    return frozenset(found)


def lower(net: str, name: str) -> tuple[str, ...]:
    """Return what an interface lies over: its lower interfaces, and the physical function of a virtual one."""
    below = [entry[len("lower_") :] for entry in entries(f"{net}/{name}") if entry.startswith("lower_")]
    return (*below, *(other for other in physical_function(net, name) if other != name))


def physical_function(net: str, name: str) -> tuple[str, ...]:
    """Return the interfaces of the physical function of `name`, where it is a virtual one."""
    return entries(f"{net}/{name}/device/physfn/net")


def entries(folder: str) -> tuple[str, ...]:
    """Return the names in a folder; nothing where it is not there."""
    try:
        with os.scandir(folder) as found:
            return tuple(entry.name for entry in found)
    except OSError:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Speed:
    """The speed of a link, and when it was asked for."""

    bytes_per_second: float | None
    carrier_changes: int | None
    read_s: float


class LinkReader:
    """Reads the links of the interfaces that count."""

    def __init__(self, proc_root: Path, sys_root: Path) -> None:
        self._route = str(proc_root / "net" / "route")
        self._ipv6_route = str(proc_root / "net" / "ipv6_route")
        self._net = str(sys_root / "class" / "net")
        self._speeds: dict[str, _Speed] = {}

    def read(self, names: Sequence[str], now: Instant) -> tuple[NetworkLink, ...]:
        """Return one record for each of `names`; what an interface does not offer is None."""
        routes = default_route_interfaces(
            read_text(self._route, _ROUTE_BYTES), read_text(self._ipv6_route, _ROUTE_BYTES)
        )
        carriers = None if routes is None else with_lower(routes, self._net)
        self._speeds = {name: speed for name, speed in self._speeds.items() if name in names}
        return tuple(self._link(name, carriers, now) for name in names)

    def _link(self, name: str, carriers: frozenset[str] | None, now: Instant) -> NetworkLink:
        folder = f"{self._net}/{name}"
        is_up = _is_up(folder)
        changes = counter(read_text(f"{folder}/carrier_changes") or "")
        return NetworkLink(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            device=printable(name),
            speed_bytes_per_second=None if is_up is False else self._speed(name, changes, now),
            is_up=is_up,
            carrier_changes_total=changes,
            is_default_route=None if carriers is None else name in carriers,
        )

    def _speed(self, name: str, changes: int | None, now: Instant) -> float | None:
        known = self._speeds.get(name)
        if known is None or known.carrier_changes != changes or now.monotonic_s - known.read_s >= _SPEED_AGE_S:
            known = _Speed(
                bytes_per_second=_bytes_per_second(read_text(f"{self._net}/{name}/speed")),
                carrier_changes=changes,
                read_s=now.monotonic_s,
            )
            self._speeds[name] = known
        return known.bytes_per_second


def _is_up(folder: str) -> bool | None:
    state = read_text(f"{folder}/operstate")
    if state is None:
        return None
    if state != "unknown":  # up, or dormant, testing, lowerlayerdown, down, notpresent
        return state == "up"
    # Drivers that do not keep the state say unknown: loopbacks, tunnels, some paravirtual cards.
    try:
        return read_start(f"{folder}/carrier", 16).strip() == b"1"
    except OSError as error:
        return False if error.errno == errno.EINVAL else None  # EINVAL: switched off by the administrator


def _bytes_per_second(speed: str | None) -> float | None:
    megabits = counter(speed or "")  # -1 where it is unknown
    if megabits is None or not 0 < megabits <= _MAX_MBIT:
        return None
    return megabits * _MBIT
