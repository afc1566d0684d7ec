"""Byte counters of network interfaces from /proc/net/dev, every second; one read of a file kept open.

Which interfaces count, so that no byte counts twice:

1. The loopback never does.
2. Where at least one interface has hardware behind it (/sys/class/net/<name>/device), only such ones do. Bonds, VLANs,
   bridges, tunnels, veth pairs of containers and ifb devices carry what the hardware carries as well.
3. Where none has (inside a container), all do but those that are known to repeat another one: names of tunnels, ifb,
   dummy and veth devices, bridges, and tun or tap devices.
4. In both cases an interface that lies over another one in the list (/sys/class/net/<name>/lower_<other>) does not
   count, nor does a virtual function or its representor beside its physical function.

RDMA traffic (InfiniBand, RoCE) passes by these counters; the InfiniBand sampler has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from agent.clock import Instant
from agent.records import NetworkSample
from agent.samplers.device_table import DeviceTable
from agent.samplers.kernel_file import counter, is_name, printable

#: Names of interfaces that repeat the traffic of another one, or carry none; used only where no hardware is in sight.
_REPEATING: Final = re.compile(
    r"(?:veth|ifb|dummy|docker|virbr|cali|flannel|cni|tun|tap|wg|vxlan|geneve|sit|tunl|gre|gretap|erspan|ip_vti|"
    r"ip6_vti|ip6tnl|ip6gre|nlmon|teql|bonding_masters)[-.\w]*"
)
#: Value of phys_port_name of a representor: the host's end of a virtual function or subfunction (kernel: devlink).
_REPRESENTOR: Final = re.compile(r"(?:c\d+)?pf\d+(?:vf|sf)\d+")


class InterfaceCounters(NamedTuple):
    """One line of /proc/net/dev: bytes since the interface was made."""

    name: str
    receive_bytes: int
    transmit_bytes: int


def parse_net_dev(text: str) -> tuple[tuple[InterfaceCounters, ...], int]:
    """Parse /proc/net/dev and return its interfaces, the loopback too, and the count of lines that make no sense.

    A line is `name: 8 receive fields, 8 transmit fields`, the first of each being bytes (net/core/net-procfs.c); the
    blank after the colon is missing in old kernels. A line cut short gives nothing, since its last number may be cut.
    """
    found = []
    malformed = 0
    for line in text.split("\n"):
        # The two header lines have no colon; a name cannot hold one, but an old alias (eth0:1) can.
        name, colon, numbers = line.rpartition(":")
        if not colon:
            continue
        name = name.strip()
        fields = numbers.split()
        received = sent = None
        if len(fields) >= 16 and is_name(name) and "/" not in name:
            received = counter(fields[0])
            sent = counter(fields[8])
        if received is None or sent is None:
            malformed += 1
            continue
        found.append(InterfaceCounters(name, received, sent))
    return tuple(found), malformed


def choose_interfaces(names: Iterable[str], sys_root: Path) -> frozenset[str]:
    """Return those of `names` whose bytes count, by the rule in this module's docstring."""
    net = sys_root / "class" / "net"
    candidates = [name for name in names if not _is_loopback(net, name)]
    physical = [name for name in candidates if (net / name / "device").exists()]
    chosen = set(physical or [name for name in candidates if not _repeats_by_name(net, name)])
    # Lower links are looked up among what is chosen: a bond whose ports are in another namespace has to count itself.
    return frozenset(
        name
        for name in chosen
        if not any((net / name / f"lower_{other}").exists() for other in chosen)
        and not _is_behind_physical_function(net, name, chosen)
    )


def _is_loopback(net: Path, name: str) -> bool:
    return name == "lo" or _read(net / name / "type") == "772"  # ARPHRD_LOOPBACK


def _repeats_by_name(net: Path, name: str) -> bool:
    directory = net / name
    return (
        _REPEATING.fullmatch(name) is not None or (directory / "bridge").exists() or (directory / "tun_flags").exists()
    )


def _is_behind_physical_function(net: Path, name: str, chosen: Iterable[str]) -> bool:
    port = _read(net / name / "phys_port_name")
    if port is not None and _REPRESENTOR.fullmatch(port):
        return True
    physical = net / name / "device" / "physfn" / "net"
    return any(other != name and (physical / other).exists() for other in chosen)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # absent, or not supported by this interface: the kernel answers EOPNOTSUPP or EINVAL
        return None


class NetDevSampler:
    """Samples the interfaces of this network namespace."""

    name = "net_dev"
    period_s = 1.0

    def __init__(self, proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> None:
        self._table = DeviceTable(
            proc_root / "net" / "dev", parse_net_dev, lambda names: choose_interfaces(names, sys_root)
        )

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings: `malformed` lines."""
        return self._table.errors

    def probe(self) -> bool:
        """Return whether /proc/net/dev can be read."""
        return self._table.exists()

    def sample(self, now: Instant) -> tuple[NetworkSample, ...]:
        """Return one record for each interface that counts; raises SourceUnavailableError where nothing can be read."""
        return tuple(
            NetworkSample(
                monotonic_s=now.monotonic_s,
                wall_s=now.wall_s,
                device=printable(interface.name),
                receive_bytes_total=interface.receive_bytes,
                transmit_bytes_total=interface.transmit_bytes,
            )
            for interface in self._table.read(now)
        )

    def close(self) -> None:
        """Close the file."""
        self._table.close()
