"""Bounded rings of what was measured, per GPU and for the host: what features and detectors read.

Counters become rates here and nowhere else, since this is where two readings of one counter meet: a reading
below the one before it is a reset and gives no rate. Missing values are not stored, so a series holds
finite numbers only; a gap shows in its times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.records import (
    DiskSample,
    GpuInfo,
    GpuKey,
    GpuLimits,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    GpuState,
    InfinibandSample,
    NetworkSample,
    Record,
    Tick,
)

Array = NDArray[np.float64]

#: Channels taken from GpuSample as they are.
_SAMPLE_FIELDS: Final = (
    "utilization_ratio",
    "memory_utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "sm_clock_hertz",
    "memory_clock_hertz",
    "sm_active_ratio",
    "sm_occupancy_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "pcie_receive_bytes_per_second",
    "pcie_transmit_bytes_per_second",
    "nvlink_receive_bytes_per_second",
    "nvlink_transmit_bytes_per_second",
)
#: Counters whose rate is the channel of the right-hand name.
_SAMPLE_COUNTERS: Final = {
    "nvlink_receive_bytes_total": "nvlink_receive_bytes_per_second",
    "nvlink_transmit_bytes_total": "nvlink_transmit_bytes_per_second",
}
_SLOW_FIELDS: Final = ("temperature_celsius", "memory_temperature_celsius")
_SLOW_COUNTERS: Final = {
    "pcie_receive_bytes_total": "pcie_receive_bytes_per_second",
    "pcie_transmit_bytes_total": "pcie_transmit_bytes_per_second",
    "energy_joules_total": "energy_power_watts",
}
#: All channels of a GPU. `throttled` is 1 while a thermal or hardware clock event reason is active, else 0; `samples`
#: holds 1 at the time of every GpuSample, whatever it could read; `process_count` counts compute processes.
GPU_CHANNELS: Final = (
    *_SAMPLE_FIELDS,
    *_SLOW_FIELDS,
    "energy_power_watts",
    "throttled",
    "process_count",
    "samples",
)
_THROTTLE_REASONS: Final = frozenset({"hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal"})

#: Channels of the host, each the sum over its devices.
HOST_CHANNELS: Final = (
    "network_receive_bytes_per_second",
    "network_transmit_bytes_per_second",
    "infiniband_receive_bytes_per_second",
    "infiniband_transmit_bytes_per_second",
    "disk_read_bytes_per_second",
    "disk_written_bytes_per_second",
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
}


class Series(NamedTuple):
    """Part of one channel: times (monotonic seconds, increasing) and values, same length, no NaN.

    Both are views into the ring: valid until the next ingest, not to be written to.
    """

    times: Array
    values: Array

    @property
    def size(self) -> int:
        """Number of samples (`len` of the tuple is always 2)."""
        return int(self.times.size)


class Ring:
    """Time series that forgets what is older than its horizon; contiguous, so that windows are views."""

    def __init__(self, horizon_s: float, rows: int = 256) -> None:
        self._horizon_s = horizon_s
        self._data = np.empty((2, rows))
        self._start = 0
        self._end = 0

    def append(self, time_s: float, value: float) -> None:
        """Add a sample; one that is not later than the last one is dropped."""
        if self._end > self._start and time_s <= self._data[0, self._end - 1]:
            return
        if self._end == self._data.shape[1]:
            self._make_room(time_s)
        self._data[0, self._end] = time_s
        self._data[1, self._end] = value
        self._end += 1

    def _make_room(self, time_s: float) -> None:
        self._start = int(np.searchsorted(self._data[0, : self._end], time_s - self._horizon_s))
        kept = self._data[:, self._start : self._end]
        size = kept.shape[1]
        capacity = self._data.shape[1]
        if size > capacity // 2:
            grown = np.empty((2, capacity * 2))
            grown[:, :size] = kept
            self._data = grown
        else:
            self._data[:, :size] = kept.copy()
        self._start, self._end = 0, size

    def window(self, now_s: float, seconds: float) -> Series:
        """Return the samples with `now_s - seconds < time <= now_s`."""
        times = self._data[0, self._start : self._end]
        low = self._start + int(np.searchsorted(times, now_s - seconds, side="right"))
        high = self._start + int(np.searchsorted(times, now_s, side="right"))
        return Series(self._data[0, low:high], self._data[1, low:high])

    def last(self) -> tuple[float, float] | None:
        """Return time and value of the newest sample."""
        if self._end == self._start:
            return None
        return float(self._data[0, self._end - 1]), float(self._data[1, self._end - 1])


class CounterRate:
    """Rate of a counter that may reset: per second between two readings, None for the first and over a reset."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def update(self, time_s: float, total: float) -> float | None:
        """Take a reading and return the mean rate since the one before."""
        last, self._last = self._last, (time_s, total)
        if last is None or total < last[1] or time_s <= last[0]:
            return None
        return (total - last[1]) / (time_s - last[0])


class _Channels:
    """Named rings and the counters that feed some of them."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._rings: dict[str, Ring] = {}
        self._counters: dict[tuple[str, ...], CounterRate] = {}

    def put(self, channel: str, time_s: float, value: float | None) -> None:
        if value is None:
            return
        ring = self._rings.get(channel)
        if ring is None:
            ring = self._rings[channel] = Ring(self._horizon_s)
        ring.append(time_s, value)

    def rate(self, counter: tuple[str, ...], time_s: float, total: float | None) -> float | None:
        if total is None:
            return None
        return self._counters.setdefault(counter, CounterRate()).update(time_s, total)

    def series(self, channel: str, now_s: float, seconds: float) -> Series:
        """Return the samples of `channel` in the last `seconds`; empty where it was never measured."""
        ring = self._rings.get(channel)
        return ring.window(now_s, seconds) if ring else _EMPTY

    def latest(self, channel: str, now_s: float, max_age_s: float) -> float | None:
        """Return the newest value of `channel`, or None where it is older than `max_age_s` or absent."""
        ring = self._rings.get(channel)
        last = ring.last() if ring else None
        if last is None or now_s - last[0] > max_age_s:
            return None
        return last[1]

    def has(self, channel: str) -> bool:
        """Return whether `channel` was ever measured."""
        return channel in self._rings


_EMPTY: Final = Series(np.empty(0), np.empty(0))


class GpuHistory(_Channels):
    """What was measured on one GPU: the channels of GPU_CHANNELS, and the newest facts about it."""

    def __init__(self, key: GpuKey, horizon_s: float) -> None:
        super().__init__(horizon_s)
        self.key = key
        self.state = "ok"
        self.info: GpuInfo | None = None
        self.limits: GpuLimits | None = None
        self.processes: tuple[GpuProcess, ...] | None = None
        #: When the set of process ids last changed (monotonic seconds); None before the first list.
        self.processes_since_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None

    @property
    def power_limit_watts(self) -> float | None:
        """Enforced power limit; None where it was never read."""
        return self.limits.power_limit_watts if self.limits else None

    @property
    def memory_total_bytes(self) -> float | None:
        """Size of the memory; None where it was never read."""
        ring = self._rings.get("memory_total_bytes")
        last = ring.last() if ring else None
        return last[1] if last else None

    def add_sample(self, record: GpuSample) -> None:
        """Take the values of a core tick."""
        time_s = record.monotonic_s
        for name in _SAMPLE_FIELDS:
            self.put(name, time_s, getattr(record, name))
        for name, channel in _SAMPLE_COUNTERS.items():
            self.put(channel, time_s, self.rate((name,), time_s, getattr(record, name)))
        if record.clock_event_reasons is not None:
            self.put("throttled", time_s, float(not _THROTTLE_REASONS.isdisjoint(record.clock_event_reasons)))
        self.put("samples", time_s, 1.0)
        self.first_s = time_s if self.first_s is None else self.first_s
        self.last_s = time_s

    def add_slow_sample(self, record: GpuSlowSample) -> None:
        """Take the values of a slow tick."""
        time_s = record.monotonic_s
        for name in _SLOW_FIELDS:
            self.put(name, time_s, getattr(record, name))
        for name, channel in _SLOW_COUNTERS.items():
            self.put(channel, time_s, self.rate((name,), time_s, getattr(record, name)))
        if record.processes is not None:
            self.put("process_count", time_s, float(len(record.processes)))
            before = None if self.processes is None else {process.pid for process in self.processes}
            if before != {process.pid for process in record.processes}:
                self.processes_since_s = time_s
        self.processes = record.processes


class HostHistory(_Channels):
    """What was measured on the host: the channels of HOST_CHANNELS."""

    def add(self, records: Iterable[Record]) -> None:
        """Take the host records of one tick; each channel gets the sum over the devices that gave a rate."""
        sums: dict[str, tuple[float, float]] = {}
        for record in records:
            for name, channel in _HOST_COUNTERS.get(type(record), {}).items():
                time_s = record.monotonic_s
                identity = (type(record).__name__, name, *_device_of(record))
                rate = self.rate(identity, time_s, getattr(record, name))
                if rate is not None:
                    sums[channel] = (time_s, sums.get(channel, (time_s, 0.0))[1] + rate)
        for channel, (time_s, total) in sums.items():
            self.put(channel, time_s, total)


def _device_of(record: Record) -> tuple[str, ...]:
    if isinstance(record, InfinibandSample):
        return record.device, str(record.port)
    if isinstance(record, NetworkSample | DiskSample):
        return (record.device,)
    return ()


class History:
    """All that was measured in the last `horizon_s` seconds, by GPU and for the host."""

    def __init__(self, horizon_s: float = 900.0) -> None:
        self.horizon_s = horizon_s
        self._gpus: dict[GpuKey, GpuHistory] = {}
        self.host = HostHistory(horizon_s)

    @property
    def gpus(self) -> Mapping[GpuKey, GpuHistory]:
        """Every GPU that was ever seen, in the order of first sight."""
        return self._gpus

    def ingest(self, tick: Tick) -> None:
        """Take the records of one tick."""
        for record in tick.records:
            if isinstance(record, GpuSample):
                self._gpu(record.key).add_sample(record)
            elif isinstance(record, GpuSlowSample):
                self._gpu(record.key).add_slow_sample(record)
            elif isinstance(record, GpuState):
                self._gpu(record.key).state = record.state
            elif isinstance(record, GpuLimits):
                self._gpu(record.key).limits = record
            elif isinstance(record, GpuInfo):
                self._gpu(record.key).info = record
        self.host.add(tick.records)

    def _gpu(self, key: GpuKey) -> GpuHistory:
        found = self._gpus.get(key)
        if found is None:
            found = self._gpus[key] = GpuHistory(key, self.horizon_s)
        return found
