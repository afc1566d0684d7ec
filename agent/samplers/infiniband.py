"""Ports of InfiniBand, RoCE and EFA devices from /sys/class/infiniband: bytes every second, the rest every 5 s.

What the bytes are:

- counters/port_xmit_data and port_rcv_data count words of 4 bytes, without link packets. On Ethernet ports of mlx5 they
  count RDMA alone, and the counters of the network interface (/proc/net/dev) everything but RDMA: neither holds the
  other, and nothing here adds them up. What IPoIB sends (ib0) is in both.
- Drivers without these files (EFA, bnxt_re) count in hw_counters/tx_bytes and rx_bytes, in bytes.
- A virtual function has a device of its own here, with the traffic of that function only.

Counters of the InfiniBand specification do not wrap: they stop at their largest value, which for some is 15. One that
has stopped tells nothing any more, so it is None or left out, and counted once as `saturated` until it was reset.

Source: Documentation/ABI/stable/sysfs-class-infiniband
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from agent.clock import Instant
from agent.records import PERIODS_S, InfinibandPort, InfinibandSample
from agent.samplers import SourceUnavailableError
from agent.samplers.infiniband_counters import (
    COUNTER_BITS,
    DATA_MAXIMA,
    HW_COUNTERS,
    WORD_BYTES,
    parse_rate,
    parse_state,
)
from agent.samplers.kernel_file import counter, is_name, printable
from agent.samplers.pci import PciPath, device_path, nearest_gpus

#: Most ports that are sampled, two files kept open for each; what is beyond is counted as `too_many_ports`.
MAX_PORTS: Final = 64
#: Seconds after which devices, their files and the GPUs near them are looked up again although nothing failed.
_LISTING_AGE_S: Final = 60.0
#: Bytes that are read of one file: a number, a state or a rate.
_READ_BYTES: Final = 64
#: Files of received and sent data, in words and in bytes, and of packets beside them.
_WORDS: Final = ("counters/port_rcv_data", "counters/port_xmit_data")
_BYTES: Final = ("hw_counters/rx_bytes", "hw_counters/tx_bytes")
_WORD_PACKETS: Final = ("counters/port_rcv_packets", "counters/port_xmit_packets")
_PACKETS: Final = ("hw_counters/rx_pkts", "hw_counters/tx_pkts")


@dataclass(slots=True, kw_only=True)
class _Port:
    """What a listing found of one port. Two files are kept open: 8 ports have some 400 files, too many to keep."""

    device: str
    number: int
    folder: str
    driver: str | None
    has_words: bool  # counters/ is there, in words; else hw_counters/tx_bytes
    counters: tuple[str, ...]
    hw_counters: tuple[str, ...]
    pci_path: PciPath | None
    receive: int | None = None  # file descriptors
    transmit: int | None = None
    near_gpus: tuple[str, ...] = ()

    def close(self) -> None:
        for descriptor in (self.receive, self.transmit):
            if descriptor is not None:
                os.close(descriptor)
        self.receive = self.transmit = None


Value = TypeVar("Value")


class InfinibandSampler:
    """Samples the ports of all RDMA devices that have files in /sys/class/infiniband."""

    name = "infiniband"
    period_s = 1.0

    def __init__(self, gpu_addresses: Callable[[], Sequence[str]], sys_root: Path = Path("/sys")) -> None:
        """`gpu_addresses` returns the PCI addresses of the GPUs in the driver's form; it is called every 5 s."""
        self._gpu_addresses = gpu_addresses
        self._sys_root = sys_root
        self._root = str(sys_root / "class" / "infiniband")
        self._ports: list[_Port] = []
        self._gpus: tuple[str, ...] | None = None  # those that `near_gpus` of the ports was made for
        self._listed_s = -math.inf
        self._slow_s = -math.inf
        self._stopped: set[tuple[str, int, str]] = set()  # counters that stand at their largest value
        self._beyond = 0
        self._errors: Counter[str] = Counter()

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings.

        `unreadable` and `malformed` files, counters found `saturated`, ports left out (`too_many_ports`).
        """
        return self._errors

    def probe(self) -> bool:
        """Return whether there is a port."""
        return any(True for _ in self._found())

    def sample(self, now: Instant) -> tuple[InfinibandSample | InfinibandPort, ...]:
        """Return the bytes of each port that counts them, and every 5 s the state of each port.

        Raises SourceUnavailableError where there is no port.
        """
        if now.monotonic_s - self._listed_s >= _LISTING_AGE_S:
            self._list(now)
        samples = [sample for port in self._ports if (sample := self._bytes(port, now)) is not None]
        # Half a period of grace: a tick may come some milliseconds early.
        if now.monotonic_s - self._slow_s < PERIODS_S[InfinibandPort] - self.period_s / 2:
            return tuple(samples)
        self._slow_s = now.monotonic_s
        self._find_near_gpus()
        return (*samples, *(self._port(port, now) for port in self._ports))

    def close(self) -> None:
        """Close all files."""
        for port in self._ports:
            port.close()
        self._ports = []
        self._listed_s = -math.inf

    def _found(self) -> Iterable[tuple[str, int]]:
        for device in sorted(_names(self._root), key=_natural):
            numbers = (counter(name) for name in _names(f"{self._root}/{device}/ports"))
            for number in sorted(number for number in numbers if number is not None):
                yield device, number

    def _list(self, now: Instant) -> None:
        self.close()
        found = list(self._found())
        if not found:
            raise SourceUnavailableError("absent", f"{self._root} has no port")
        self._ports = [self._open(device, number) for device, number in found[:MAX_PORTS]]
        beyond = len(found) - len(self._ports)
        if beyond > self._beyond:
            self._errors["too_many_ports"] += beyond - self._beyond
        self._beyond = beyond
        self._stopped &= {
            (port.device, port.number, name)
            for port in self._ports
            for name in (*port.counters, "port_rcv_data", "port_xmit_data", "port_rcv_packets", "port_xmit_packets")
        }
        self._listed_s = now.monotonic_s
        self._gpus = None

    def _open(self, device: str, number: int) -> _Port:
        hardware = Path(self._root, device, "device")
        folder = f"{self._root}/{device}/ports/{number}"
        counters, hw_counters = set(_names(f"{folder}/counters")), set(_names(f"{folder}/hw_counters"))
        has_words = not counters.isdisjoint({"port_rcv_data", "port_xmit_data"})
        try:
            driver = (hardware / "driver").readlink().name
        except OSError:  # a device in software, or a container that does not show it
            driver = None
        port = _Port(
            device=device,
            number=number,
            folder=folder,
            driver=driver,
            has_words=has_words,
            counters=tuple(name for name in COUNTER_BITS if name in counters),
            hw_counters=tuple(sorted(hw_counters & HW_COUNTERS)),
            pci_path=device_path(hardware),
        )
        receive, transmit = _WORDS if has_words else _BYTES
        port.receive = self._open_file(f"{folder}/{receive}")
        port.transmit = self._open_file(f"{folder}/{transmit}")
        return port

    def _open_file(self, path: str) -> int | None:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # this device does not offer it
            return None
        except OSError:
            self._errors["unreadable"] += 1
            return None

    def _bytes(self, port: _Port, now: Instant) -> InfinibandSample | None:
        if port.receive is None and port.transmit is None:
            return None
        factor = WORD_BYTES if port.has_words else 1
        receive = self._data(port, "port_rcv_data", self._read_kept(port.receive))
        transmit = self._data(port, "port_xmit_data", self._read_kept(port.transmit))
        return InfinibandSample(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            device=printable(port.device),
            port=port.number,
            receive_bytes_total=None if receive is None else receive * factor,
            transmit_bytes_total=None if transmit is None else transmit * factor,
        )

    def _port(self, port: _Port, now: Instant) -> InfinibandPort:
        link_layer = (self._read(port, "link_layer") or "").strip().lower()
        # EFA is neither and says Unknown; the driver cannot be seen everywhere.
        is_efa = port.driver == "efa" or (port.driver is None and link_layer == "unknown" and not port.has_words)
        receive, transmit = _WORD_PACKETS if port.has_words else _PACKETS
        return InfinibandPort(
            monotonic_s=now.monotonic_s,
            wall_s=now.wall_s,
            device=printable(port.device),
            port=port.number,
            link_layer="efa" if is_efa else link_layer if link_layer in {"infiniband", "ethernet"} else None,
            state=self._parsed(parse_state, self._read(port, "state")),
            rate_bytes_per_second=self._parsed(parse_rate, self._read(port, "rate")),
            receive_packets_total=self._data(port, "port_rcv_packets", self._read(port, receive)),
            transmit_packets_total=self._data(port, "port_xmit_packets", self._read(port, transmit)),
            counters=self._counters(port),
            hw_counters=self._hw_counters(port),
            near_gpus=port.near_gpus,
        )

    def _counters(self, port: _Port) -> dict[str, int]:
        found = {}
        for name in port.counters:
            value = self._number(self._read(port, f"counters/{name}"))
            if value is None or self._has_stopped(port, name, value == (1 << COUNTER_BITS[name]) - 1):
                continue
            found[name] = value
        return found

    def _hw_counters(self, port: _Port) -> dict[str, int]:
        read = {name: self._number(self._read(port, f"hw_counters/{name}")) for name in port.hw_counters}
        return {name: value for name, value in read.items() if value is not None}

    def _data(self, port: _Port, name: str, text: str | None) -> int | None:
        value = self._number(text)
        if value is None or self._has_stopped(port, name, value in DATA_MAXIMA):
            return None
        return value

    def _has_stopped(self, port: _Port, name: str, is_at_maximum: bool) -> bool:
        key = (port.device, port.number, name)
        if not is_at_maximum:
            self._stopped.discard(key)
        elif key not in self._stopped:
            self._stopped.add(key)
            self._errors["saturated"] += 1
        return is_at_maximum

    def _number(self, text: str | None) -> int | None:
        if text is None or text.startswith("N/A"):  # kernels before 5.13 write so where the device has no such counter
            return None
        return self._parsed(lambda text: counter(text.strip()), text)

    def _parsed(self, parse: Callable[[str], Value | None], text: str | None) -> Value | None:
        value = None if text is None else parse(text)
        if text is not None and value is None:
            self._errors["malformed"] += 1
        return value

    def _read_kept(self, descriptor: int | None) -> str | None:
        if descriptor is None:
            return None
        try:
            return os.pread(descriptor, _READ_BYTES, 0).decode("ascii", "replace")
        except OSError as error:
            self._failed(error)
            return None

    def _read(self, port: _Port, file: str) -> str | None:
        try:
            descriptor = os.open(f"{port.folder}/{file}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(descriptor, _READ_BYTES).decode("ascii", "replace")
            finally:
                os.close(descriptor)
        except FileNotFoundError:  # this device does not offer it
            return None
        except OSError as error:
            self._failed(error)
            return None

    def _failed(self, error: OSError) -> None:
        self._errors["unreadable"] += 1
        if (
            error.errno == errno.ENODEV
        ):  # the device is gone, and may be back under its name: look again at the next tick
            self._listed_s = -math.inf

    def _find_near_gpus(self) -> None:
        gpus = tuple(self._gpu_addresses())
        if gpus == self._gpus:
            return
        self._gpus = gpus
        near = nearest_gpus(dict(enumerate(port.pci_path for port in self._ports)), gpus, self._sys_root)
        for index, port in enumerate(self._ports):
            port.near_gpus = near[index]


def _names(folder: str) -> tuple[str, ...]:
    try:
        with os.scandir(folder) as found:
            return tuple(entry.name for entry in found if is_name(entry.name))
    except OSError:
        return ()


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Order mlx5_2 before mlx5_10."""
    return tuple(
        (int(part), "") if part.isdecimal() and part.isascii() else (-1, part) for part in re.split(r"(\d+)", name)
    )
