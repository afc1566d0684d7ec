"""Whether the host reads, writes or sends while GPUs wait: what tells a checkpoint from a stall.

A checkpoint shows in one of several places, depending on where it goes: block devices, network interfaces, file systems
that pass both by (NFS over RDMA, Lustre), the InfiniBand ports below them, the I/O counters of the rank that writes, or
at first in dirty pages only. Any of them is activity.

Silence means something only where all of these places can be looked at. Where a file system is mounted whose bytes
cannot be read (Lustre or Ceph without the privilege, GPFS, BeeGFS, the NFS volume of a pod), its bytes show on the
network interfaces, or, where the host has InfiniBand, RoCE or EFA ports, perhaps on those alone. They belong to the
wait only while no other GPU of the host works: else the ports say nothing, and the host's I/O is not seen.

The places are those of `checkpoint_bursts`, which finds checkpoints over hours, in readings of 5 s; here every second
of one wait counts, reads and dirty pages as well, and what was there before the wait is what is usual.

CPU time is no activity: a rank that spins in a collective burns a core
or more as well, and so does the one that hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array, GpuHistory, History, HostHistory, Series
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.checkpoint_bursts import HOST_SOURCES, JOB_SOURCES

#: Both have to be measured before silence means anything: checkpoints go to disks or over the network.
_REQUIRED: Final = (HOST_SOURCES["disk"], HOST_SOURCES["network"])
_READS: Final = ("disk_read_bytes_per_second", "network_receive_bytes_per_second")
_FILESYSTEM_WRITTEN: Final = HOST_SOURCES["filesystem"]
#: GPUs that write by themselves: where that goes through no block device that is counted.
_DIRECT: Final = HOST_SOURCES["gpu_direct_storage"]
_FILESYSTEM_READ: Final = "filesystem_read_bytes_per_second"
#: The ports that carry collectives, and storage as well: InfiniBand, RoCE, EFA.
_FABRIC: Final = ("infiniband_transmit_bytes_per_second", "infiniband_receive_bytes_per_second")
#: File systems whose bytes cross the network interfaces by TCP, whatever ports the host has.
_BY_TCP: Final = frozenset({"fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.mount-s3", "fuse.rclone", "fuse.goofys"})
#: File systems whose bytes pass by everything that is counted: through the hypervisor's memory, or through interfaces
#: that their client keeps for itself.
_PAST_ALL: Final = frozenset({"virtiofs", "9p", "wekafs"})
_PROCESS: Final = (JOB_SOURCES["process"], "process_read_bytes_per_second")
#: Rates of the slow tick: each reading is a mean over the 5 s before it.
_SLOW: Final = frozenset({_FILESYSTEM_WRITTEN, _FILESYSTEM_READ, _DIRECT, *_PROCESS})
#: What only data loaders move besides: less of it than before the wait is no activity.
_LOADED: Final = frozenset({_FILESYSTEM_READ, "process_read_bytes_per_second", *_READS})
#: Loaders read unevenly: what they read before the wait is taken at this quantile of its means.
_LOADED_QUANTILE: Final = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIoConfig:
    """What counts as activity."""

    #: A mean rate above this is activity, unless it went on like this before the wait, ...
    active_bytes_per_second: float = 50e6
    #: ... and goes on for this long: a log that is flushed is no checkpoint.
    sustained_seconds: float = 5.0
    #: Background is what was there before: a rate within this share of the median before the wait.
    background_share_ratio: float = 0.3
    #: Length of the time before the wait that shows the background.
    background_seconds: float = 300.0
    #: A host rate this soon after the start still holds the last step ...
    settle_seconds: float = 2.0
    #: ... and reading this soon after it fills the queues of a data loader.
    prefetch_seconds: float = 10.0
    #: PCIe counters are means over a slow tick; readings this soon after the start still hold work.
    pcie_settle_seconds: float = 6.0
    #: So do those of file systems and processes; reading gets `prefetch_seconds` more.
    slow_settle_seconds: float = 6.0
    #: Dirty pages and pages under writeback count where their sum grows or shrinks by `active_bytes_per_second`, unless
    #: it did in more than this share of the time before the wait.
    page_churn_ratio: float = 0.25
    #: A host channel without a reading for this long is not seen.
    stale_seconds: float = 15.0
    #: InfiniBand or network traffic of work is above this; silence is a hundredth of it.
    fabric_bytes_per_second: float = 10e6

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.active_bytes_per_second > 0, "active_bytes_per_second", self.active_bytes_per_second, "above 0")
        require(self.sustained_seconds > 0, "sustained_seconds", self.sustained_seconds, "above 0")
        require(self.slow_settle_seconds >= 0, "slow_settle_seconds", self.slow_settle_seconds, "at least 0")
        is_share = 0 <= self.page_churn_ratio <= 1
        require(is_share, "page_churn_ratio", self.page_churn_ratio, "a share between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIo:
    """What the host did since a wait began; rates are means over the last 10 s.

    `seen` is whether no activity means that there was none.
    """

    seen: bool
    first_active_s: float | None
    last_active_s: float | None
    written_bytes_per_second: float | None
    filesystem_written_bytes_per_second: float | None
    transmit_bytes_per_second: float | None
    fabric_fell_silent: bool


def observe_host_io(
    config: HostIoConfig,
    history: History,
    gpus: Sequence[GpuKey],
    since_s: float,
    now_s: float,
    *,
    others_work: bool = False,
) -> HostIo:
    """Return the I/O of the host, and of `gpus` over PCIe and by their processes, between `since_s` and `now_s`.

    With `others_work`, other GPUs of the host work meanwhile: traffic on the fabric may be theirs and says nothing.
    """
    host = history.host
    active: list[float] = []
    fabric = () if others_work else _FABRIC
    for channel in (*_REQUIRED, *_READS, _FILESYSTEM_WRITTEN, _FILESYSTEM_READ, _DIRECT, *fabric):
        active += _active_times(config, host, channel, since_s, now_s)
    active += _page_times(config, host, since_s, now_s)
    for key in gpus:
        gpu = history.gpus[key]
        for channel in (JOB_SOURCES["device_to_host"], "pcie_receive_bytes_per_second"):
            during = gpu.series(channel, now_s, max(now_s - since_s - config.pcie_settle_seconds, 0.0))
            active += during.times[during.values > config.active_bytes_per_second].tolist()
        for channel in _PROCESS:
            active += _active_times(config, gpu, channel, since_s, now_s)
    return HostIo(
        seen=_is_seen(config, host, now_s, others_work=others_work),
        first_active_s=min(active, default=None),
        last_active_s=max(active, default=None),
        written_bytes_per_second=_mean(host.series(_REQUIRED[0], now_s, 10.0)),
        filesystem_written_bytes_per_second=_mean(host.series(_FILESYSTEM_WRITTEN, now_s, 10.0)),
        transmit_bytes_per_second=_mean(host.series(_REQUIRED[1], now_s, 10.0)),
        fabric_fell_silent=_fell_silent(config, history, since_s, now_s),
    )


def _is_seen(config: HostIoConfig, host: HostHistory, now_s: float, *, others_work: bool) -> bool:
    """Return whether I/O of the host would have been seen, wherever it went."""

    def is_fresh(channel: str) -> bool:
        return host.latest(channel, now_s, config.stale_seconds) is not None

    if not all(map(is_fresh, _REQUIRED)):
        return False
    hidden = host.unreadable_filesystems(now_s, config.stale_seconds) - _BY_TCP
    if hidden & _PAST_ALL:
        return False
    # Without ports all that is left are the network interfaces.
    return not hidden or not host.has_ports(now_s) or (not others_work and is_fresh(_FABRIC[0]))


def counts_all_writes(host: HostHistory, now_s: float, stale_s: float) -> bool:
    """Return whether the bytes of a checkpoint would show in one of `checkpoint_bursts.HOST_SOURCES`, wherever it went.

    Ports are no such source: on them nobody tells a checkpoint from a collective.
    """
    if any(host.latest(channel, now_s, stale_s) is None for channel in _REQUIRED):
        return False
    hidden = host.unreadable_filesystems(now_s, stale_s) - _BY_TCP
    return not hidden & _PAST_ALL and not (hidden and host.has_ports(now_s))


def _active_times(
    config: HostIoConfig, source: GpuHistory | HostHistory, channel: str, since_s: float, now_s: float
) -> list[float]:
    """Return the times since the wait began at which one rate was activity."""
    is_loaded = channel in _LOADED
    if channel in _SLOW:
        settle_s = config.slow_settle_seconds + (config.prefetch_seconds if is_loaded else 0.0)
    else:
        settle_s = config.prefetch_seconds if is_loaded or channel == _FABRIC[1] else config.settle_seconds
    during = source.series(channel, now_s, max(now_s - since_s - settle_s, 0.0))
    before = source.series(channel, since_s, config.background_seconds)
    active = _is_active(config, during, before)
    if is_loaded and before.size and active.any():
        usual = float(np.quantile(_trailing_means(before, config.sustained_seconds), _LOADED_QUANTILE))
        active &= _trailing_means(during, config.sustained_seconds) > (1.0 + config.background_share_ratio) * usual
    times: list[float] = during.times[active].tolist()
    return times


def _page_times(config: HostIoConfig, host: HostHistory, since_s: float, now_s: float) -> list[float]:
    """Return the times since the wait began at which dirty pages came or went fast.

    They come before a disk or server sees anything, and go to servers that nothing else shows.
    """

    def fast(end_s: float, seconds: float) -> tuple[Array, NDArray[np.bool_]]:
        dirty, writeback = (host.series(name, end_s, seconds) for name in ("dirty_bytes", "writeback_bytes"))
        if dirty.size < 2 or not np.array_equal(dirty.times, writeback.times):
            return np.empty(0), np.empty(0, dtype=bool)
        rates = np.abs(np.diff(dirty.values + writeback.values)) / np.diff(dirty.times)
        return dirty.times[1:], rates > config.active_bytes_per_second

    _, before = fast(since_s, config.background_seconds)
    if before.size and float(np.mean(before)) > config.page_churn_ratio:
        return []
    # Both readings of each difference are from within the wait, so that nothing has to settle.
    times, during = fast(now_s, now_s - since_s)
    found: list[float] = times[during].tolist()
    return found


def _is_active(config: HostIoConfig, during: Series, before: Series) -> NDArray[np.bool_]:
    means = _trailing_means(during, config.sustained_seconds)
    above: NDArray[np.bool_] = means > config.active_bytes_per_second
    if before.size and above.any():
        usual = float(np.median(before.values))
        if usual > config.active_bytes_per_second:
            # The first means are still rising, so that the readings themselves have to differ as well.
            above &= np.abs(means / usual - 1.0) > config.background_share_ratio
            above &= np.abs(during.values / usual - 1.0) > config.background_share_ratio
    return above


def _trailing_means(series: Series, seconds: float) -> Array:
    """Return for each sample the mean rate over the `seconds` before it; time before the first sample counts as 0."""
    if series.size < 2:
        return np.zeros(series.size)
    steps = np.diff(series.times, prepend=series.times[0] - float(np.median(np.diff(series.times))))
    amounts = np.concatenate(([0.0], np.cumsum(series.values * steps)))
    firsts = np.searchsorted(series.times, series.times - seconds, side="right")
    spans = np.concatenate(([0.0], np.cumsum(steps)))
    # Readings further apart than `seconds` are means over more time already, and so are two that jitter around it.
    means: Array = (amounts[1:] - amounts[firsts]) / np.maximum(seconds, spans[1:] - spans[firsts])
    return means


def _fell_silent(config: HostIoConfig, history: History, since_s: float, now_s: float) -> bool:
    """Return whether the fabric carried traffic before the wait and carries none now."""
    for kind in ("infiniband", "network"):
        channel = f"{kind}_transmit_bytes_per_second"
        before = history.host.series(channel, since_s, config.background_seconds)
        during = history.host.series(channel, now_s, min(10.0, now_s - since_s))
        if before.size and during.size and float(np.median(before.values)) > config.fabric_bytes_per_second:
            return float(np.max(during.values)) < config.fabric_bytes_per_second / 100
    return False


def _mean(series: Series) -> float | None:
    values: Array = series.values
    return float(np.mean(values)) if values.size else None
