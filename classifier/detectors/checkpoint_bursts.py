"""Bursts of writing in one rate: where a checkpoint may be, when it began and ended, and how large it was.

One tracker for one source: the host's disks, its file systems that bypass them (NFS, Lustre, Ceph, FUSE), GPUDirect
Storage, the network, and of one job what its processes write and what leaves its GPUs over PCIe (the first sign of an
asynchronous checkpoint). Sources stay apart, since one checkpoint shows in several of them with different bytes and
times. Whose burst it is and whether it is a checkpoint is decided in `missed_checkpoint`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from agent.history import GpuHistory, HostHistory
from classifier.config_checks import require

#: Sources of the host by channel, those first that hold checkpoints and little else.
HOST_SOURCES: Final = {
    "filesystem": "filesystem_written_bytes_per_second",
    "gpu_direct_storage": "gpu_direct_storage_written_bytes_per_second",
    "disk": "disk_written_bytes_per_second",
    "network": "network_transmit_bytes_per_second",
}
#: Sources of a job: sums over its GPUs.
JOB_SOURCES: Final = {
    "process": "process_written_bytes_per_second",
    "device_to_host": "pcie_transmit_bytes_per_second",
}
#: Readings between two looks at the background.
_BACKGROUND_EVERY: Final = 12
#: Readings without which no burst can be told from what is usual.
_LEAST_READINGS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstConfig:
    """What counts as a burst (SIGNALS 4.2, where no other source is named)."""

    #: A rate above this, and above the background by `spread_factor` of its spread, begins a burst.
    start_bytes_per_second: float = 50e6
    #: Half the way back to the background ends it, after `merge_seconds`.
    spread_factor: float = 5.0
    #: Pauses shorter than this belong to the burst: shards, or a page cache that goes out in lumps (dirty_expire 30 s).
    merge_seconds: float = 45.0
    #: A smaller burst is none.
    least_bytes: float = 200e6
    #: The same two for what the processes of a job write themselves: there is nothing else in it but logs.
    process_start_bytes_per_second: float = 4e6
    process_least_bytes: float = 20e6
    #: Readings that are remembered to tell what is usual: an hour of them, at one each 5 s.
    readings: int = 720
    #: Readings further apart than this are a gap: what was between them is not known.
    gap_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.start_bytes_per_second > 0, "start_bytes_per_second", self.start_bytes_per_second, "above 0")
        starts = self.process_start_bytes_per_second
        require(starts > 0, "process_start_bytes_per_second", starts, "above 0")
        require(self.spread_factor > 0, "spread_factor", self.spread_factor, "above 0")
        require(self.merge_seconds > 0, "merge_seconds", self.merge_seconds, "above 0")
        enough = f"at least {_LEAST_READINGS}"
        require(self.readings >= _LEAST_READINGS, "readings", self.readings, enough)
        is_longer = self.gap_seconds >= self.merge_seconds
        require(is_longer, "gap_seconds", self.gap_seconds, f"at least merge_seconds ({self.merge_seconds})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Writing from `start_s` to `end_s` (monotonic), and how much beyond the background."""

    source: str
    start_s: float
    end_s: float
    written_bytes: float
    #: Whether its end was not seen: a gap in telemetry came first.
    is_cut: bool = False

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


class BurstTracker:
    """Finds the bursts of one source; `update` takes one mean rate after the other."""

    def __init__(self, config: BurstConfig, source: str) -> None:
        self.source = source
        is_own = source == "process"
        self._config = config
        self._floor = config.process_start_bytes_per_second if is_own else config.start_bytes_per_second
        self._least_bytes = config.process_least_bytes if is_own else config.least_bytes
        self._rates: deque[float] = deque(maxlen=config.readings)
        self._until_background = 0
        self._base = 0.0  # the usual rate
        self._limit = float("inf")  # a rate above begins a burst
        self._start_s: float | None = None
        self._half: tuple[float, float] | None = None  # start and bytes of the reading before, where it was above half
        self._above_s = 0.0  # end of the last reading that belongs to the burst
        self._bytes = 0.0
        self._tail_bytes = 0.0  # since `_above_s`
        self.seen_s: float | None = None  # end of the newest reading
        self.gaps = 0  # how often a burst may have gone unseen
        #: Time up to which the channels were read.
        self.read_s: float | None = None

    @property
    def open_since_s(self) -> float | None:
        """Start of the burst that goes on, large enough to be one; None where there is none."""
        return self._start_s if self._bytes >= self._least_bytes else None

    @property
    def is_rising(self) -> bool:
        """Whether a burst goes on, however small so far."""
        return self._start_s is not None

    @property
    def open_end_s(self) -> float:
        """End of the last reading that belongs to the burst that goes on."""
        return self._above_s

    @property
    def open_bytes(self) -> float:
        """Bytes of the burst that goes on, beyond the background."""
        return self._bytes

    def read(self, channels: Iterable[GpuHistory | HostHistory], channel: str, now_s: float) -> Burst | None:
        """Take what `channel` brought since the last call, summed over `channels`; return the burst that is over."""
        lookback_s = self._config.gap_seconds if self.read_s is None else now_s - self.read_s
        if lookback_s <= 0:
            return None
        total, newest_s = 0.0, None
        for one in channels:
            times, values = one.series(channel, now_s, lookback_s)
            if times.size:
                # A list of a few numbers sums five times faster than an array of them.
                total += sum(values.tolist()) / times.size
                newest_s = float(times[-1]) if newest_s is None else max(newest_s, float(times[-1]))
        if newest_s is None:
            return None
        self.read_s = newest_s
        return self.update(newest_s, total)

    def update(self, time_s: float, rate: float) -> Burst | None:
        """Take the mean rate between the time of the last call and `time_s`; return the burst that is over by now."""
        before_s, self.seen_s = self.seen_s, time_s
        if before_s is None:
            return None
        span_s = time_s - before_s
        if span_s > self._config.gap_seconds:
            self.gaps += 1
            return self._close(is_cut=True)
        self._learn(rate)
        is_above = rate > (self._base + self._limit) / 2
        if self._start_s is None:
            half, self._half = self._half, ((before_s, (rate - self._base) * span_s) if is_above else None)
            # A short one may be cut in two by the readings: two halves above half the limit are one above it.
            if rate > self._limit or (is_above and half is not None):
                self._start_s, first_bytes = (before_s, 0.0) if half is None else half
                self._above_s = time_s
                self._bytes, self._tail_bytes = first_bytes + (rate - self._base) * span_s, 0.0
            return None
        self._tail_bytes += max(rate - self._base, 0.0) * span_s
        if is_above:
            self._above_s = time_s
            self._bytes += self._tail_bytes
            self._tail_bytes = 0.0
        return self._close() if time_s - self._above_s >= self._config.merge_seconds else None

    def _learn(self, rate: float) -> None:
        self._rates.append(rate)
        self._until_background -= 1
        if self._until_background > 0:
            return
        self._until_background = _BACKGROUND_EVERY
        if len(self._rates) < _LEAST_READINGS:
            self._until_background = 1
            return
        # From the lower 60 % alone, so that bursts that fill up to 40 % of the time leave it as it is. In a normal
        # distribution q60 - q30 is 0.78 of its deviation: 5 times that above q30 is median and 5 MAD of SIGNALS 4.2.
        ordered = sorted(self._rates)
        self._base = ordered[int(0.3 * len(ordered))]
        spread = ordered[int(0.6 * len(ordered))] - self._base
        self._limit = max(self._base + self._config.spread_factor * spread, self._base * 1.25, self._base + self._floor)

    def _close(self, *, is_cut: bool = False) -> Burst | None:
        start_s, written_bytes = self._start_s, self._bytes
        self._start_s, self._half, self._bytes, self._tail_bytes = None, None, 0.0, 0.0
        if start_s is None or written_bytes < self._least_bytes:
            return None
        return Burst(
            source=self.source, start_s=start_s, end_s=self._above_s, written_bytes=written_bytes, is_cut=is_cut
        )
