"""Bounded rings of what was measured, per GPU and for the host: what features and detectors read.

Counters become rates here and nowhere else, since this is where two readings of one counter meet: a reading
below the one before it is a reset and gives no rate. Missing values are not stored, so a series holds
finite numbers only; a gap shows in its times.

Bytes over a link may come twice, as a counter and as a rate (GPM, or a log that holds rates). One source fills the
channel at a time: for NVLink the counter, which is as often read and misses nothing, and the rate where the counter
gives none; for PCIe the rate, since the counter is read every 5 s only, and the counter where no rate came of late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from agent.host_history import HOST_CHANNELS, HostHistory
from agent.mig_layout import MigLayout, card_of
from agent.records import (
    PERIODS_S,
    GpuFastPower,
    GpuHealth,
    GpuInfo,
    GpuKey,
    GpuLimits,
    GpuMigInfo,
    GpuOwners,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    GpuState,
    GpuXids,
    ProcessSample,
    Record,
    Tick,
)
from agent.rings import Array, Channels, CounterRate, Ring, Series

__all__ = [
    "GPU_CHANNELS",
    "HOST_CHANNELS",
    "Array",
    "CounterRate",
    "GpuHistory",
    "History",
    "HostHistory",
    "Ring",
    "Series",
]

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
    "tensor_hmma_active_ratio",
    "tensor_imma_active_ratio",
    "tensor_dfma_active_ratio",
    "fp64_active_ratio",
    "fp32_active_ratio",
    "fp16_active_ratio",
)
#: Rates of GpuSample; they win over the counter of the same channel.
_SAMPLE_RATES: Final = ("pcie_receive_bytes_per_second", "pcie_transmit_bytes_per_second")
#: Counters whose rate is the channel of the right-hand name; they win over the rate of that name in the same sample.
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
#: A counter of the slow tick stays out of a channel that got a rate within this many seconds.
_RATE_HOLD_S: Final = 3 * PERIODS_S[GpuSlowSample]
#: All channels of a GPU. `throttled` is 1 while a thermal or hardware clock event reason is active, else 0; `samples`
#: holds 1 at the time of every GpuSample, whatever it could read; `process_count` counts compute processes;
#: `power_fast_watts` has ten readings and more a second, of the last 120 s only.
#: The three `process_` channels are sums over the GPU's processes with their descendants: CPU seconds a second (1 is
#: one core) and bytes that passed to and from storage.
GPU_CHANNELS: Final = (
    *_SAMPLE_FIELDS,
    *_SAMPLE_RATES,
    *_SAMPLE_COUNTERS.values(),
    *_SLOW_FIELDS,
    "energy_power_watts",
    "power_fast_watts",
    "throttled",
    "process_count",
    "process_cpu_ratio",
    "process_read_bytes_per_second",
    "process_written_bytes_per_second",
    "samples",
)
_THROTTLE_REASONS: Final = frozenset({"hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal"})
#: Channels that detectors alone read. `hw_slowed` is 1 while the power brake is active, or a hardware slowdown that is
#: not thermal, else 0.
DETECTOR_CHANNELS: Final = ("hw_slowed", "descendants_cpu_ratio")

#: Counters of a process, whose rate is summed over the processes of a GPU.
_PROCESS_COUNTERS: Final = {
    "read_bytes_total": "process_read_bytes_per_second",
    "written_bytes_total": "process_written_bytes_per_second",
}


class GpuHistory(Channels):
    """What was measured on one GPU: the channels of GPU_CHANNELS, and the newest facts about it."""

    def __init__(self, key: GpuKey, horizon_s: float) -> None:
        super().__init__(horizon_s)
        self.key = key
        self.state = "ok"
        #: When the state was last told (monotonic seconds); None where nobody tells it, as in foreign logs.
        self.state_s: float | None = None
        # The newest record of each kind, with its own time; of a divided card the card has the last four.
        self.info: GpuInfo | None = None
        self.limits: GpuLimits | None = None
        self.slow: GpuSlowSample | None = None
        self.health: GpuHealth | None = None
        self.xids: GpuXids | None = None
        self.processes: tuple[GpuProcess, ...] | None = None
        #: What was last heard of those of them that can be looked at; each with its own time.
        self.process_samples: tuple[ProcessSample, ...] = ()
        #: When the set of process ids last changed (monotonic seconds); None before the first list.
        self.processes_since_s: float | None = None
        #: Who holds it, as last heard; None where that was never seen.
        self.owners: GpuOwners | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None
        self._rate_s: dict[str, float] = {}  # when a channel of _SAMPLE_RATES last got a rate

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
        for name in _SAMPLE_RATES:
            rate = getattr(record, name)
            if rate is not None:
                self.put(name, time_s, rate)
                self._rate_s[name] = time_s
        for name, channel in _SAMPLE_COUNTERS.items():
            rate = self.rate((name,), time_s, getattr(record, name))
            self.put(channel, time_s, getattr(record, channel) if rate is None else rate)
        if record.clock_event_reasons is not None:
            reasons = record.clock_event_reasons
            self.put("throttled", time_s, float(not _THROTTLE_REASONS.isdisjoint(reasons)))
            is_slowed = "hw_power_brake" in reasons or ("hw_slowdown" in reasons and "hw_thermal" not in reasons)
            self.put("hw_slowed", time_s, float(is_slowed))
        self.put("samples", time_s, 1.0)
        self.first_s = time_s if self.first_s is None else self.first_s
        self.last_s = time_s

    def add_slow_sample(self, record: GpuSlowSample) -> None:
        """Take the values of a slow tick."""
        time_s = record.monotonic_s
        for name in _SLOW_FIELDS:
            self.put(name, time_s, getattr(record, name))
        for name, channel in _SLOW_COUNTERS.items():
            rate = self.rate((name,), time_s, getattr(record, name))
            rate_s = self._rate_s.get(channel)
            if rate_s is None or time_s - rate_s > _RATE_HOLD_S:
                self.put(channel, time_s, rate)
        if record.processes is not None:
            self.put("process_count", time_s, float(len(record.processes)))
            before = None if self.processes is None else {process.pid for process in self.processes}
            if before != {process.pid for process in record.processes}:
                self.processes_since_s = time_s
        self.processes = record.processes
        self.slow = record

    def add_processes(self, rates: Mapping[int, Mapping[str, float]], time_s: float) -> None:
        """Take what processes did, by process id and channel; only this GPU's own count."""
        mine = [rates[process.pid] for process in self.processes or () if process.pid in rates]
        for channel in {channel for one in mine for channel in one}:
            self.put(channel, time_s, sum(one.get(channel, 0.0) for one in mine))

    def note_processes(self, samples: Mapping[int, ProcessSample]) -> None:
        """Take what was heard of processes, by process id; only this GPU's own count."""
        self.process_samples = tuple(samples[process.pid] for process in self.processes or () if process.pid in samples)

    def add_fast_power(self, record: GpuFastPower) -> None:
        """Take several readings of power, each at the record's time less its age."""
        for watts, age_s in zip(record.power_watts, record.ages_s, strict=False):
            self.put("power_fast_watts", record.monotonic_s - age_s, watts)


class ProcessRates:
    """Rates of the counters of processes, by process id and channel of a GPU."""

    def __init__(self) -> None:
        self._counters: dict[tuple[int, float | None], dict[str, CounterRate]] = {}

    def update(self, records: Iterable[ProcessSample]) -> dict[int, dict[str, float]]:
        """Take all processes of one tick; one that is missing is forgotten, and another with its id begins anew."""
        known: dict[tuple[int, float | None], dict[str, CounterRate]] = {}
        found: dict[int, dict[str, float]] = {}
        for record in records:
            identity = record.pid, record.started_monotonic_s
            counters = known[identity] = self._counters.get(identity, {})
            totals = {channel: getattr(record, name) for name, channel in _PROCESS_COUNTERS.items()}
            if record.cpu_seconds_total is not None:
                totals["descendants_cpu_ratio"] = record.descendants_cpu_seconds_total
                totals["process_cpu_ratio"] = record.cpu_seconds_total + (record.descendants_cpu_seconds_total or 0.0)
            rates = {
                channel: counters.setdefault(channel, CounterRate()).update(record.monotonic_s, total)
                for channel, total in totals.items()
                if total is not None
            }
            found[record.pid] = {channel: rate for channel, rate in rates.items() if rate is not None}
        if known:
            self._counters = known
        return found


class History:
    """All that was measured in the last `horizon_s` seconds, by GPU and for the host.

    `sample_interval_s` is the usual distance of two core samples of a GPU.
    """

    def __init__(self, horizon_s: float = 900.0, *, sample_interval_s: float = 1.0) -> None:
        self.horizon_s = horizon_s
        self.host = HostHistory(horizon_s)
        self._layout = MigLayout(sample_interval_s)
        self._all: dict[GpuKey, GpuHistory] = {}
        self._work: dict[GpuKey, GpuHistory] = {}
        self._processes = ProcessRates()

    @property
    def gpus(self) -> Mapping[GpuKey, GpuHistory]:
        """Where work runs: every whole card that was ever seen, and the instances of each card that is divided now.

        This is what is labelled and assessed, in the order of first sight.
        """
        return self._work

    @property
    def all_gpus(self) -> Mapping[GpuKey, GpuHistory]:
        """Every card that was ever seen, divided or not, and every instance that exists now."""
        return self._all

    def card(self, key: GpuKey) -> GpuHistory | None:
        """Return the card that has this key or on which this instance is: health, links and XIDs are the card's."""
        return self._all.get(card_of(key))

    def ingest(self, tick: Tick) -> None:
        """Take the records of one tick."""
        gone = self._layout.observe(tick)
        for key in gone:
            self._all.pop(key, None)
        count = len(self._all)
        for record in tick.records:
            self._add(record)
        if gone or len(self._all) != count:
            self._work = {
                key: gpu
                for key, gpu in self._all.items()
                if key.gpu_i_id is not None or not self._layout.is_divided(key)
            }
        self.host.add(tick.records)
        samples = {record.pid: record for record in tick.records if isinstance(record, ProcessSample)}
        if samples:
            rates = self._processes.update(samples.values())
            for gpu in self._all.values():
                gpu.note_processes(samples)
                gpu.add_processes(rates, tick.monotonic_s)

    def _add(self, record: Record) -> None:
        if isinstance(record, GpuSample):
            self._gpu(record.key).add_sample(record)
        elif isinstance(record, GpuSlowSample):
            self._gpu(record.key).add_slow_sample(record)
        elif isinstance(record, GpuFastPower):
            self._gpu(record.key).add_fast_power(record)
        elif isinstance(record, GpuState):
            # An instance is as well as its card.
            for key in (record.key, *self._layout.instances(record.key)):
                gpu = self._gpu(key)
                gpu.state, gpu.state_s = record.state, record.monotonic_s
        elif isinstance(record, GpuHealth):
            self._gpu(record.key).health = record
        elif isinstance(record, GpuXids):
            self._gpu(record.key).xids = record
        elif isinstance(record, GpuLimits):
            self._gpu(record.key).limits = record
        elif isinstance(record, GpuInfo):
            self._gpu(record.key).info = record
        elif isinstance(record, GpuOwners):
            self._gpu(record.key).owners = record
        elif isinstance(record, GpuMigInfo):
            self._gpu(record.key)

    def _gpu(self, key: GpuKey) -> GpuHistory:
        found = self._all.get(key)
        if found is None:
            # An instance has a card, whether or not that was heard of before.
            card = None if key.gpu_i_id is None else self._gpu(card_of(key))
            found = self._all[key] = GpuHistory(key, self.horizon_s)
            if card is not None:
                found.state, found.state_s = card.state, card.state_s
        return found
