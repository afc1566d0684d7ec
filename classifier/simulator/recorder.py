"""A simulated run as records, in the rhythm of the live sampler: core ticks, slow ticks, identity and limits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuFastPower,
    GpuInfo,
    GpuLimits,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    GpuState,
    InfinibandSample,
    NetworkSample,
    ProcessSample,
    Record,
    Tick,
)
from agent.trace import TraceHeader, TraceWriter
from classifier.simulator.run import SimulatedGpu, SimulatedRun, simulate_arrays
from classifier.simulator.scenario import Scenario
from classifier.simulator.signals import Array

#: Wall time of the first tick: 2026-01-05 09:00 UTC, a Monday morning; simulated traces need no other.
WALL_START_S: Final = 1_767_603_600.0
_RARE_S: Final = 60.0
#: Seconds between two hand-overs of fast readings.
_FAST_S: Final = 2.0
_WHOLE: Final = frozenset({"memory_used_bytes", "memory_total_bytes"})


def simulate(scenario: Scenario, *, seed: int) -> tuple[TraceHeader, Iterator[Tick]]:
    """Return the header and the ticks of a simulated trace; the same run as `simulate_arrays` gives."""
    run = simulate_arrays(scenario, seed=seed)
    return run.header, ticks(run)


def write_simulated(path: Path, scenario: Scenario, seed: int) -> TraceHeader:
    """Write a simulated trace to `path` (gzip where it ends in .gz) and return its header."""
    header, simulated = simulate(scenario, seed=seed)
    write_ticks(path, header, simulated)
    return header


def write_ticks(path: Path, header: TraceHeader, recorded: Iterable[Tick]) -> None:
    """Write a header and ticks to `path`."""
    with TraceWriter(path, header) as writer:
        for tick in recorded:
            writer.write(tick)


def ticks(run: SimulatedRun) -> Iterator[Tick]:
    """Yield the ticks of `run` in time order."""
    core = [_rows(gpu.readings.core) for gpu in run.gpus]
    slow = [_rows(gpu.readings.slow) or [{}] * run.slow_s.size for gpu in run.gpus]
    every = max(1, round(run.scenario.slow_interval_s / run.scenario.interval_s))
    next_rare = 0.0
    host = _host_records(run)
    fast_after_s = 0.0
    for index, time_s in enumerate(run.core_s.tolist()):
        wall_s = round(WALL_START_S + time_s, 3)
        when: dict[str, Any] = {"monotonic_s": time_s, "wall_s": wall_s}
        records: list[Record] = []
        if time_s >= next_rare:
            next_rare += _RARE_S
            for gpu in run.gpus:
                records += _rare(gpu, when)
        for gpu, rows in zip(run.gpus, core, strict=True):
            records.append(GpuState(**when, key=gpu.key, state="ok"))
            reasons = _reasons(gpu, index)
            records.append(GpuSample(**when, key=gpu.key, clock_event_reasons=reasons, **rows[index]))
        if time_s - fast_after_s >= _FAST_S - 0.5 * run.scenario.interval_s or index == run.core_s.size - 1:
            for gpu in run.gpus:
                records += _fast(gpu, fast_after_s, when)
            fast_after_s = time_s
        if index % every == 0:
            for gpu, rows in zip(run.gpus, slow, strict=True):
                records.append(_slow(gpu, rows[index // every], core_index=index, slow_index=index // every, when=when))
            for gpu in run.gpus:
                records += _processes(gpu, index // every, when)
        records += host(index, index // every if index % every == 0 else None, when)
        yield Tick(monotonic_s=time_s, wall_s=wall_s, records=tuple(records))


def _fast(gpu: SimulatedGpu, after_s: float, when: dict[str, Any]) -> list[Record]:
    """Return the fast readings since `after_s` as one record."""
    times, time_s = gpu.readings.fast_s, when["monotonic_s"]
    first, last = np.searchsorted(times, (after_s, time_s), side="right").tolist()
    if first == last:
        return []
    watts, ages = gpu.readings.fast_watts[first:last], np.round(time_s - times[first:last], 4)
    return [GpuFastPower(**when, key=gpu.key, power_watts=tuple(watts.tolist()), ages_s=tuple(ages.tolist()))]


def _pids(gpu: SimulatedGpu, time_s: float) -> tuple[int, ...]:
    changes = gpu.readings.processes
    return changes[bisect_right(changes, time_s, key=lambda change: change[0]) - 1][1] if changes else ()


def _processes(gpu: SimulatedGpu, slow_index: int, when: dict[str, Any]) -> list[Record]:
    """Return one record for each process of the GPU; the first of them is where all of it is counted."""
    totals = {name: values[slow_index] for name, values in gpu.readings.process_totals.items()}
    if not totals:
        return []
    counted = {name: float(total) if name == "cpu_seconds_total" else int(total) for name, total in totals.items()}
    return [
        ProcessSample(**when, pid=pid, **(counted if position == 0 else dict.fromkeys(counted, 0)))
        for position, pid in enumerate(_pids(gpu, when["monotonic_s"]))
    ]


def _rows(columns: dict[str, Array]) -> list[dict[str, Any]]:
    """Return the columns as keyword arguments per reading; NaN becomes None, counts become integers."""
    lists: dict[str, list[Any]] = {}
    for name, values in columns.items():
        whole = name in _WHOLE or (name.endswith("_total") and name != "energy_joules_total")
        lists[name] = [None if v != v else int(v) if whole else v for v in values.tolist()]  # noqa: PLR0124 - NaN
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _reasons(gpu: SimulatedGpu, index: int) -> tuple[str, ...] | None:
    readings = gpu.readings
    if not readings.reasons:
        return None
    active = (("gpu_idle", readings.gpu_idle[index]), ("sw_power_cap", readings.power_capped[index]))
    return tuple(name for name, is_active in active if is_active)


def _rare(gpu: SimulatedGpu, when: dict[str, Any]) -> list[Record]:
    board = gpu.board
    return [
        GpuInfo(
            **when,
            key=gpu.key,
            model_name=board.model_name,
            pci_bus_id=f"00000000:{0x10 + gpu.key.gpu:02X}:00.0",
            device=f"nvidia{gpu.key.gpu}",
        ),
        GpuLimits(
            **when,
            key=gpu.key,
            power_limit_watts=board.power_limit_watts,
            sm_clock_max_hertz=board.sm_clock_max_hertz,
            memory_clock_max_hertz=board.memory_clock_max_hertz,
        ),
    ]


def _slow(
    gpu: SimulatedGpu, row: dict[str, Any], *, core_index: int, slow_index: int, when: dict[str, Any]
) -> GpuSlowSample:
    readings = gpu.readings
    used = readings.core["memory_used_bytes"][core_index]
    pids = _pids(gpu, when["monotonic_s"])
    listed = tuple(GpuProcess(pid, int(used) // len(pids) if used == used else None) for pid in pids)  # noqa: PLR0124
    return GpuSlowSample(
        **when,
        key=gpu.key,
        processes=listed if readings.processes else None,
        clock_event_seconds_total=_reason_seconds(readings.capped_seconds[slow_index]) if readings.reasons else {},
        **row,
    )


def _reason_seconds(capped: float) -> dict[str, float]:
    return {"sw_power_cap": float(capped), "sw_thermal": 0.0, "hw_thermal": 0.0, "hw_power_brake": 0.0}


def _host_records(run: SimulatedRun) -> Callable[[int, int | None, dict[str, Any]], list[Record]]:
    counters = {name: np.asarray(values).astype(int).tolist() for name, values in run.host_counters.items()}

    def at(index: int, slow_index: int | None, when: dict[str, Any]) -> list[Record]:
        if not counters:
            return []
        records: list[Record] = [
            NetworkSample(
                **when,
                device="eth0",
                receive_bytes_total=counters["network_receive"][index],
                transmit_bytes_total=counters["network_transmit"][index],
            ),
            DiskSample(
                **when,
                device="nvme0n1",
                read_bytes_total=counters["disk_read"][index],
                written_bytes_total=counters["disk_written"][index],
            ),
        ]
        if "infiniband_receive" in counters:
            records.append(
                InfinibandSample(
                    **when,
                    device="mlx5_0",
                    port=1,
                    receive_bytes_total=counters["infiniband_receive"][index],
                    transmit_bytes_total=counters["infiniband_transmit"][index],
                )
            )
        if slow_index is not None and "filesystem_read" in counters:
            records.append(
                FilesystemSample(
                    **when,
                    mountpoint="/data",
                    fstype="nfs4",
                    source="mountstats",
                    read_bytes_total=counters["filesystem_read"][slow_index],
                    written_bytes_total=counters["filesystem_written"][slow_index],
                )
            )
        return records

    return at
