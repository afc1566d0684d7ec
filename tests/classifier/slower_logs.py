"""The same recording as a slower recorder would have it."""

from __future__ import annotations

from dataclasses import replace

from agent.history import History
from agent.records import GpuSample, GpuSlowSample

#: Fields of GpuSample that a recorder reads as the mean since its last look.
MEANS = (
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
    "pcie_receive_bytes_per_second",
    "pcie_transmit_bytes_per_second",
    "nvlink_receive_bytes_per_second",
    "nvlink_transmit_bytes_per_second",
)


def slower(ticks, every):
    """Yield each `every`-th tick: readings of a moment as they are, means over all readings since the last tick.

    Slow values (processes, PCIe counters) stay with their own ticks, as the agent reads them each 5 s whatever its
    interval; the fast power of the ticks that are left out goes with the next one.
    """
    gathered, waiting = {}, []
    for number, tick in enumerate(ticks):
        records = []
        for record in tick.records:
            if not isinstance(record, GpuSample):
                records.append(record)
                continue
            sums = gathered.setdefault(record.key, {})
            for name in MEANS:
                value = getattr(record, name)
                if value is not None:
                    sums.setdefault(name, []).append(value)
            if number % every == 0:
                means = {name: sum(values) / len(values) for name, values in sums.items()}
                records.append(replace(record, **means))
                gathered[record.key] = {}
        if number % every == 0:
            yield replace(tick, records=(*waiting, *records))
            waiting = []
        else:
            slow = [record for record in records if isinstance(record, GpuSlowSample) or _is_fast(record)]
            waiting += slow


def _is_fast(record):
    return type(record).__name__ == "GpuFastPower"


def history_of(ticks):
    """Return the history that holds all of `ticks`, and the time of the last."""
    history = History(900.0)
    last_s = 0.0
    for tick in ticks:
        history.ingest(tick)
        last_s = tick.monotonic_s
    return history, last_s
