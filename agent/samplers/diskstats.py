"""Byte counters of block devices from /proc/diskstats, every second; one read of a file kept open.

Which devices count, so that no byte counts twice: whole devices (those with a directory in /sys/block) that have a
size, but none that lies over other devices in the list or over memory: loop, ram, zram, dm, md, bcache, drbd and zvol
devices, whatever else names devices in /sys/block/<name>/slaves, optical and floppy drives, and the hidden paths of
an NVMe multipath device (nvme0c0n1), whose bytes the device itself (nvme0n1) counts from Linux 6.4 on.

Where /sys/block cannot be seen, names decide alone: `sda1` beside `sda`, `nvme0n1p1` beside `nvme0n1` are partitions.

NVMe devices say how they are reached: a namespace over fabrics moves its bytes through the network as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from agent.clock import Instant
from agent.records import DiskSample
from agent.samplers.device_table import DeviceTable
from agent.samplers.kernel_file import counter, is_name, printable, read_text

#: The unit of the sector counts, whatever sector size the device has (Documentation/admin-guide/iostats.rst).
SECTOR_BYTES: Final = 512
#: Devices over other devices, over files or over memory, and removable ones.
_LEFT_OUT: Final = re.compile(r"(?:loop|ram|zram|dm-|md|bcache|drbd|zd|sr|fd)[\d_].*|nvme\d+c\d+n\d+")
#: The kernel's words are short; what is longer or odd is none.
_TRANSPORT: Final = re.compile(r"[a-z0-9_-]{1,16}")


class DiskCounters(NamedTuple):
    """One line of /proc/diskstats: 512-byte sectors since the device was made."""

    name: str
    sectors_read: int
    sectors_written: int
    reads: int | None = None  # completed requests
    writes: int | None = None
    busy_milliseconds: int | None = None  # with at least one request in flight


def parse_diskstats(text: str) -> tuple[tuple[DiskCounters, ...], int]:
    """Parse /proc/diskstats and return all its devices, partitions too, and the count of lines that make no sense.

    A line is `major minor name` and 11 counters, 15 since Linux 4.18 (discards), 17 since 5.5 (flushes); more may come.
    The first and fifth counters are requests read and written, the third and seventh their sectors, the tenth the
    milliseconds with a request in flight. A line cut short gives nothing, since its last number may be cut.
    """
    found = []
    malformed = 0
    for line in text.split("\n"):
        fields = line.split()
        if not fields:
            continue
        read = written = None
        # A fourth field that is no number belongs to a name with a blank, which shifts all that follows.
        if len(fields) >= 14 and is_name(fields[2]) and counter(fields[3]) is not None:
            read = counter(fields[5])
            written = counter(fields[9])
        if read is None or written is None:
            malformed += 1
            continue
        reads, writes, busy = counter(fields[3]), counter(fields[7]), counter(fields[12])
        found.append(DiskCounters(fields[2], read, written, reads, writes, busy))
    return tuple(found), malformed


def choose_disks(names: Iterable[str], sys_root: Path) -> frozenset[str]:
    """Return those of `names` whose bytes count, by the rule in this module's docstring."""
    block = sys_root / "block"
    names = tuple(names)
    candidates = [name for name in names if not _LEFT_OUT.fullmatch(name)]
    if not block.is_dir():
        everything = frozenset(names)
        return frozenset(name for name in candidates if not _is_partition(name, everything))
    # The kernel writes a slash in a name as an exclamation mark in sysfs: cciss/c0d0 is cciss!c0d0 there.
    return frozenset(name for name in candidates if _is_whole(block / name.replace("/", "!")))


def _is_whole(directory: Path) -> bool:
    try:
        if not directory.is_dir() or read_text(f"{directory}/size") == "0" or read_text(f"{directory}/hidden") == "1":
            return False
        return not any((directory / "slaves").iterdir())
    except FileNotFoundError:  # no slaves directory, or the device went in between
        return directory.is_dir()


def _is_partition(name: str, names: frozenset[str]) -> bool:
    stem = name.rstrip("0123456789")
    if stem == name:
        return False
    # A disk whose name ends in a digit sets its partitions off by a p: nvme0n1p1, but sda1.
    return stem in names or (stem.endswith("p") and stem[:-1] in names and stem[-2:-1].isdigit())


def nvme_transport(name: str, sys_root: Path) -> str | None:
    """Return how an NVMe device is reached: pcie, tcp, rdma, fc, loop; None for another device, or where unknown.

    /sys/block/<name>/device is its controller, or, with multipath, its subsystem, which holds a link for each
    controller; controllers that differ give None.
    """
    if not name.startswith("nvme"):
        return None
    device = sys_root / "block" / name / "device"
    transport = read_text(f"{device}/transport")
    if transport is None:
        found = {read_text(str(path)) for path in device.glob("nvme*/transport")}
        transport = found.pop() if len(found) == 1 else None
    return transport if transport is not None and _TRANSPORT.fullmatch(transport) else None


class DiskstatsSampler:
    """Samples the whole block devices of this host."""

    name = "diskstats"
    period_s = 1.0

    def __init__(self, proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> None:
        self._sys_root = sys_root
        self._transports: dict[str, str | None] = {}
        self._table = DeviceTable(proc_root / "diskstats", parse_diskstats, self._choose)

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings: `malformed` lines."""
        return self._table.errors

    def probe(self) -> bool:
        """Return whether /proc/diskstats can be read."""
        return self._table.exists()

    def sample(self, now: Instant) -> tuple[DiskSample, ...]:
        """Return one record for each disk that counts; raises SourceUnavailableError where the file cannot be read."""
        return tuple(
            DiskSample(
                monotonic_s=now.monotonic_s,
                wall_s=now.wall_s,
                device=printable(disk.name),
                read_bytes_total=disk.sectors_read * SECTOR_BYTES,
                written_bytes_total=disk.sectors_written * SECTOR_BYTES,
                reads_total=disk.reads,
                writes_total=disk.writes,
                # 32 bits of milliseconds: back to zero after 50 days of work.
                busy_seconds_total=None if disk.busy_milliseconds is None else disk.busy_milliseconds / 1000,
                transport=self._transports.get(disk.name),
            )
            for disk in self._table.read(now)
        )

    def close(self) -> None:
        """Close the file."""
        self._table.close()

    def _choose(self, names: tuple[str, ...]) -> frozenset[str]:
        chosen = choose_disks(names, self._sys_root)
        self._transports = {name: nvme_transport(name, self._sys_root) for name in chosen}
        return chosen
