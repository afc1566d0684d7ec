"""Whether the host reads, writes or sends while GPUs wait: what tells a checkpoint from a stall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array, History, Series
from agent.records import GpuKey

#: Both have to be measured before silence means anything: checkpoints go to disks or over the network.
_REQUIRED: Final = ("disk_written_bytes_per_second", "network_transmit_bytes_per_second")
_READS: Final = ("disk_read_bytes_per_second", "network_receive_bytes_per_second")


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
    #: A host channel without a reading for this long is not seen.
    stale_seconds: float = 15.0
    #: InfiniBand or network traffic of work is above this; silence is a hundredth of it.
    fabric_bytes_per_second: float = 10e6


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIo:
    """What the host did since a wait began; rates are means over the last 10 s."""

    seen: bool
    first_active_s: float | None
    last_active_s: float | None
    written_bytes_per_second: float | None
    transmit_bytes_per_second: float | None
    fabric_fell_silent: bool


def observe_host_io(
    config: HostIoConfig, history: History, gpus: Sequence[GpuKey], since_s: float, now_s: float
) -> HostIo:
    """Return the I/O of the host, and of `gpus` over PCIe, between `since_s` and `now_s`."""
    host = history.host
    seen = all(host.latest(channel, now_s, config.stale_seconds) is not None for channel in _REQUIRED)
    active: list[float] = []
    for channel in (*_REQUIRED, *_READS):
        settle_s = config.prefetch_seconds if channel in _READS else config.settle_seconds
        during = host.series(channel, now_s, max(now_s - since_s - settle_s, 0.0))
        before = host.series(channel, since_s, config.background_seconds)
        active += during.times[_is_active(config, during, before)].tolist()
    for key in gpus:
        for channel in ("pcie_transmit_bytes_per_second", "pcie_receive_bytes_per_second"):
            during = history.gpus[key].series(channel, now_s, max(now_s - since_s - config.pcie_settle_seconds, 0.0))
            active += during.times[during.values > config.active_bytes_per_second].tolist()
    return HostIo(
        seen=seen,
        first_active_s=min(active, default=None),
        last_active_s=max(active, default=None),
        written_bytes_per_second=_mean(host.series(_REQUIRED[0], now_s, 10.0)),
        transmit_bytes_per_second=_mean(host.series(_REQUIRED[1], now_s, 10.0)),
        fabric_fell_silent=_fell_silent(config, history, since_s, now_s),
    )


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
    # Readings further apart than `seconds` are means over more time already.
    means: Array = (amounts[1:] - amounts[firsts]) / np.maximum(seconds, steps)
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
