"""What was measured on the host: sums over its devices as channels, and the newest of what has no sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuDirectStorageSample,
    InfinibandPort,
    InfinibandSample,
    NetworkLink,
    NetworkSample,
    PressureSample,
    Record,
)
from agent.rings import Channels

K = TypeVar("K")
R = TypeVar("R", bound=Record)

#: Channels of the host. Bytes are sums over devices and file systems; pressure is the share of time, 0..1.
HOST_CHANNELS: Final = (
    "network_receive_bytes_per_second",
    "network_transmit_bytes_per_second",
    "infiniband_receive_bytes_per_second",
    "infiniband_transmit_bytes_per_second",
    "disk_read_bytes_per_second",
    "disk_written_bytes_per_second",
    "filesystem_read_bytes_per_second",
    "filesystem_written_bytes_per_second",
    "gpu_direct_storage_written_bytes_per_second",
    "cpu_pressure_ratio",
    "io_pressure_ratio",
    "memory_pressure_ratio",
    "dirty_bytes",
    "writeback_bytes",
    "blocked_tasks",
)
_HOST_COUNTERS: Final[dict[type[Record], dict[str, str]]] = {
    NetworkSample: {
        "receive_bytes_total": "network_receive_bytes_per_second",
        "transmit_bytes_total": "network_transmit_bytes_per_second",
    },
    InfinibandSample: {
        "receive_bytes_total": "infiniband_receive_bytes_per_second",
        "transmit_bytes_total": "infiniband_transmit_bytes_per_second",
    },
    DiskSample: {
        "read_bytes_total": "disk_read_bytes_per_second",
        "written_bytes_total": "disk_written_bytes_per_second",
    },
    FilesystemSample: {
        "read_bytes_total": "filesystem_read_bytes_per_second",
        "written_bytes_total": "filesystem_written_bytes_per_second",
    },
    GpuDirectStorageSample: {
        "written_bytes_total": "gpu_direct_storage_written_bytes_per_second",
    },
    PressureSample: {
        "cpu_some_seconds_total": "cpu_pressure_ratio",
        "io_some_seconds_total": "io_pressure_ratio",
        "memory_some_seconds_total": "memory_pressure_ratio",
    },
}
#: How often counters that are gone are looked for.
_PRUNE_S: Final = 60.0
_HOST_FIELDS: Final = ("dirty_bytes", "writeback_bytes", "blocked_tasks")


class HostHistory(Channels):
    """What was measured on the host: the channels of HOST_CHANNELS, and what is known to be there without numbers."""

    def __init__(self, horizon_s: float) -> None:
        super().__init__(horizon_s)
        self._counted_s: dict[tuple[str, ...], float] = {}  # when a counter was last read
        self._filesystems: dict[tuple[str, str], FilesystemSample] = {}
        self._ports: dict[tuple[str, int], InfinibandPort] = {}
        self._links: dict[str, NetworkLink] = {}
        self._port_s: float | None = None
        self._pruned_s: float | None = None
        #: The newest record of pressure; None where there was none.
        self.pressure: PressureSample | None = None

    @property
    def filesystems(self) -> Mapping[tuple[str, str], FilesystemSample]:
        """The newest record of each file system of the horizon, by mountpoint and type."""
        return self._filesystems

    @property
    def infiniband_ports(self) -> Mapping[tuple[str, int], InfinibandPort]:
        """The newest record of each InfiniBand, RoCE or EFA port of the horizon, by device and port."""
        return self._ports

    @property
    def network_links(self) -> Mapping[str, NetworkLink]:
        """The newest record of each network link of the horizon, by device."""
        return self._links

    def add(self, records: Iterable[Record]) -> None:
        """Take the host records of one tick; each channel gets the sum over the devices that gave a rate."""
        sums: dict[str, tuple[float, float]] = {}
        now_s: float | None = None
        for record in records:
            now_s = record.monotonic_s
            self._note(record)
            for name, channel in _HOST_COUNTERS.get(type(record), {}).items():
                time_s = record.monotonic_s
                identity = (type(record).__name__, name, *_device_of(record))
                total = getattr(record, name)
                rate = self.rate(identity, time_s, total)
                if total is not None:
                    self._counted_s[identity] = time_s
                if rate is not None:
                    sums[channel] = (time_s, sums.get(channel, (time_s, 0.0))[1] + rate)
        for channel, (time_s, total) in sums.items():
            self.put(channel, time_s, total)
        if now_s is not None:
            self._prune(now_s)

    def unreadable_filesystems(self, now_s: float, max_age_s: float) -> frozenset[str]:
        """Return the types of the file systems that were mounted of late and whose bytes could not be read."""
        return frozenset(
            record.fstype
            for record in self._filesystems.values()
            if record.written_bytes_total is None or record.read_bytes_total is None
            if 0 <= now_s - record.monotonic_s <= max_age_s
        )

    def has_ports(self, now_s: float) -> bool:
        """Return whether the host has InfiniBand, RoCE or EFA ports, with bytes or without."""
        return self._port_s is not None and now_s - self._port_s <= self._horizon_s

    def _note(self, record: Record) -> None:
        if isinstance(record, PressureSample):
            self.pressure = record
            for name in _HOST_FIELDS:
                self.put(name, record.monotonic_s, getattr(record, name))
        elif isinstance(record, FilesystemSample):
            self._filesystems[record.mountpoint, record.fstype] = record
        elif isinstance(record, NetworkLink):
            self._links[record.device] = record
        elif isinstance(record, InfinibandSample | InfinibandPort):
            self._port_s = record.monotonic_s
            if isinstance(record, InfinibandPort):
                self._ports[record.device, record.port] = record

    def _prune(self, now_s: float) -> None:
        """Forget counters that were not read, and devices that were not seen, for the horizon."""
        if self._pruned_s is not None and now_s - self._pruned_s < min(_PRUNE_S, self._horizon_s):
            return
        self._pruned_s = now_s
        oldest_s = now_s - self._horizon_s
        for identity in [one for one, time_s in self._counted_s.items() if time_s < oldest_s]:
            del self._counted_s[identity], self._counters[identity]
        self._filesystems = _since(self._filesystems, oldest_s)
        self._ports = _since(self._ports, oldest_s)
        self._links = _since(self._links, oldest_s)


def _since(records: Mapping[K, R], oldest_s: float) -> dict[K, R]:
    return {identity: record for identity, record in records.items() if record.monotonic_s >= oldest_s}


def _device_of(record: Record) -> tuple[str, ...]:
    if isinstance(record, InfinibandSample):
        return record.device, str(record.port)
    if isinstance(record, NetworkSample | DiskSample):
        return (record.device,)
    if isinstance(record, FilesystemSample):
        return record.mountpoint, record.fstype
    return ()
