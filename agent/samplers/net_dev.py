"""Counters of network interfaces from /proc/net/dev, every second, and the state of their links every 5 s.

Which interfaces count, so that no byte counts twice:

1. The loopback never does.
2. Where at least one interface has hardware behind it (/sys/class/net/<name>/device), only such ones do. Bonds, VLANs,
   bridges, tunnels, veth pairs of containers and ifb devices carry what the hardware carries as well.
3. Where none has (inside a container), all do but those that are known to repeat another one: names of tunnels, ifb,
   dummy and veth devices, bridges, and tun or tap devices.
4. In both cases an interface that lies over another one in the list (/sys/class/net/<name>/lower_<other>) does not
   count, nor does a virtual function or its representor beside its physical function.

RDMA traffic (InfiniBand, RoCE) passes by these counters; the InfiniBand sampler has it. The numbers of an IPoIB
interface (ib0) are in both.

The file is read at one go and kept open. Of its lines only those of chosen interfaces are taken apart: a host with
hundreds of pods has hundreds of veth lines.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from agent.clock import Instant
from agent.records import PERIODS_S, NetworkLink, NetworkSample
from agent.samplers.kernel_file import KernelFile, counter, is_name, printable, read_text
from agent.samplers.net_link import LinkReader, entries, physical_function

#: Names of interfaces that repeat the traffic of another one, or carry none; used only where no hardware is in sight.
_REPEATING: Final = re.compile(
    r"(?:veth|ifb|dummy|docker|virbr|cali|flannel|cni|tun|tap|wg|vxlan|geneve|sit|tunl|gre|gretap|erspan|ip_vti|"
    r"ip6_vti|ip6tnl|ip6gre|nlmon|teql|bonding_masters)[-.\w]*"
)
#: Value of phys_port_name of a representor: the host's end of a virtual function or subfunction (kernel: devlink).
_REPRESENTOR: Final = re.compile(r"(?:c\d+)?pf\d+(?:vf|sf)\d+")
#: Most lines of the file that are looked at; what is beyond is counted as `too_many_lines`.
MAX_LINES: Final = 8192
#: Most interfaces without hardware that are looked at in /sys, which takes some 50 us each.
MAX_CANDIDATES: Final = 256
#: Most interfaces that have records; what is beyond is counted as `too_many_interfaces`.
MAX_INTERFACES: Final = 64
#: Seconds after which the choice is made again although no name changed: a device may have been connected or bound.
_CHOICE_AGE_S: Final = 60.0


class InterfaceCounters(NamedTuple):
    """One line of /proc/net/dev: counts since the interface was made."""

    name: str
    receive_bytes: int
    receive_packets: int
    receive_errors: int
    receive_drops: int
    transmit_bytes: int
    transmit_packets: int
    transmit_errors: int
    transmit_drops: int


def parse_net_dev(text: str) -> tuple[tuple[InterfaceCounters, ...], int]:
    """Parse /proc/net/dev and return its interfaces, the loopback too, and the count of lines that make no sense."""
    # The two header lines have no colon.
    parsed = [_parse_line(line) for line in text.split("\n") if ":" in line]
    found = tuple(line for line in parsed if line is not None)
    return found, len(parsed) - len(found)


def _parse_line(line: str) -> InterfaceCounters | None:
    """Parse `name: 8 receive fields, 8 transmit fields`, or return None where that makes no sense.

    The first four fields of each side are bytes, packets, errors and drops (net/core/net-procfs.c); the blank after
    the colon is missing in old kernels. A line cut short gives nothing, since its last number may be cut.
    """
    # A name cannot hold a colon, but an old alias (eth0:1) can.
    name, _, numbers = line.rpartition(":")
    name = name.strip()
    fields = numbers.split()
    if len(fields) < 16 or not is_name(name) or "/" in name:
        return None
    counts = [count for field in (*fields[:4], *fields[8:12]) if (count := counter(field)) is not None]
    return InterfaceCounters(name, *counts) if len(counts) == 8 else None


def choose_interfaces(names: Iterable[str], sys_root: Path) -> tuple[frozenset[str], int]:
    """Return those of `names` whose bytes count, by the rule at the top, and how many were not tried."""
    folder = sys_root / "class" / "net"
    net = str(folder)
    candidates = [name for name in names if name != "lo"]
    chosen = {name for name in candidates if (folder / name / "device").exists()}
    untried = 0
    if not chosen:
        unlike = [name for name in candidates if not _REPEATING.fullmatch(name)]
        chosen = {
            name for name in unlike[:MAX_CANDIDATES] if not _is_loopback(net, name) and not _repeats(folder / name)
        }
        untried = len(unlike[MAX_CANDIDATES:])
    # Lower links are looked up among what is chosen: a bond whose ports are in another namespace has to count itself.
    counted = frozenset(
        name for name in chosen if not _lies_over(net, name, chosen) and not _is_behind_function(net, name, chosen)
    )
    return counted, untried


def _is_loopback(net: str, name: str) -> bool:
    return read_text(f"{net}/{name}/type") == "772"  # ARPHRD_LOOPBACK


def _repeats(folder: Path) -> bool:
    return (folder / "bridge").exists() or (folder / "tun_flags").exists()


def _lies_over(net: str, name: str, chosen: set[str]) -> bool:
    return any(entry.startswith("lower_") and entry[len("lower_") :] in chosen for entry in entries(f"{net}/{name}"))


def _is_behind_function(net: str, name: str, chosen: set[str]) -> bool:
    port = read_text(f"{net}/{name}/phys_port_name")
    if port is not None and _REPRESENTOR.fullmatch(port):
        return True
    return any(other != name and other in chosen for other in physical_function(net, name))


class NetDevSampler:
    """Samples the interfaces of this network namespace."""

    name = "net_dev"
    period_s = 1.0

    def __init__(self, proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> None:
        self._file = KernelFile(proc_root / "net" / "dev")
        self._links = LinkReader(proc_root, sys_root)
        self._sys_root = sys_root
        self._labels: list[str] = []  # what stands before the colon of each line
        self._chosen: tuple[tuple[int, str], ...] = ()  # line and name of each interface that counts
        self._chosen_s = -math.inf
        self._linked_s = -math.inf
        self._beyond = 0
        self._errors: Counter[str] = Counter()

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings: `malformed` lines; `too_many_lines` and `too_many_interfaces` left out."""
        return self._errors

    def probe(self) -> bool:
        """Return whether /proc/net/dev can be read."""
        return self._file.exists()

    def sample(self, now: Instant) -> tuple[NetworkSample | NetworkLink, ...]:
        """Return one record for each interface that counts, and every 5 s one for its link.

        Raises SourceUnavailableError where nothing can be read.
        """
        lines = self._read(now)
        samples = tuple(
            NetworkSample(
                monotonic_s=now.monotonic_s,
                wall_s=now.wall_s,
                device=printable(line.name),
                receive_bytes_total=line.receive_bytes,
                transmit_bytes_total=line.transmit_bytes,
                receive_packets_total=line.receive_packets,
                transmit_packets_total=line.transmit_packets,
                receive_errors_total=line.receive_errors,
                transmit_errors_total=line.transmit_errors,
                receive_drops_total=line.receive_drops,
                transmit_drops_total=line.transmit_drops,
            )
            for line in lines
        )
        # Half a period of grace: a tick may come some milliseconds early.
        if now.monotonic_s - self._linked_s < PERIODS_S[NetworkLink] - self.period_s / 2:
            return samples
        self._linked_s = now.monotonic_s
        return (*samples, *self._links.read([name for _, name in self._chosen], now))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, now: Instant) -> list[InterfaceCounters]:
        lines = self._file.read().split("\n", MAX_LINES)
        is_cut = len(lines) > MAX_LINES and bool(lines.pop())
        labels = [line.rpartition(":")[0] for line in lines]
        if labels != self._labels or now.monotonic_s - self._chosen_s >= _CHOICE_AGE_S:
            if is_cut:
                self._errors["too_many_lines"] += 1
            self._choose(lines)
            self._labels, self._chosen_s = labels, now.monotonic_s
        found = []
        for index, _ in self._chosen:
            line = _parse_line(lines[index])
            if line is None:
                self._errors["malformed"] += 1
            else:
                found.append(line)
        return found

    def _choose(self, lines: list[str]) -> None:
        parsed = {index: _parse_line(line) for index, line in enumerate(lines) if ":" in line}
        names = {index: line.name for index, line in parsed.items() if line is not None}
        if len(names) < len(parsed):
            self._errors["malformed"] += len(parsed) - len(names)
        counted, untried = choose_interfaces(names.values(), self._sys_root)
        chosen = [(index, name) for index, name in names.items() if name in counted]
        self._chosen = tuple(chosen[:MAX_INTERFACES])
        beyond = len(chosen) - len(self._chosen) + untried
        if beyond > self._beyond:
            self._errors["too_many_interfaces"] += beyond - self._beyond
        self._beyond = beyond
