"""A simulated run as records, in the rhythm of the live sampler: core ticks, slow ticks, identity and limits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent.records import (
    DiskSample,
    GpuInfo,
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
from agent.trace import TraceHeader, TraceWriter
from classifier.simulator.run import SimulatedGpu, SimulatedRun, simulate_arrays
from classifier.simulator.scenario import Scenario
from classifier.simulator.signals import Array

#: Wall time of the first tick: 2026-01-05 09:00 UTC, a Monday morning; simulated traces need no other.
WALL_START_S: Final = 1_767_603_600.0
_RARE_S: Final = 60.0
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
    slow = [_rows(gpu.readings.slow) for gpu in run.gpus]
    every = max(1, round(run.scenario.slow_interval_s / run.scenario.interval_s))
    next_rare = 0.0
    host = _host_records(run)
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
            reasons = _reasons(bool(gpu.readings.gpu_idle[index]), bool(gpu.readings.power_capped[index]))
            records.append(GpuSample(**when, key=gpu.key, clock_event_reasons=reasons, **rows[index]))
        if index % every == 0:
            for gpu, rows in zip(run.gpus, slow, strict=True):
                records.append(_slow(gpu, rows[index // every], core_index=index, slow_index=index // every, when=when))
        records += host(index, when)
        yield Tick(monotonic_s=time_s, wall_s=wall_s, records=tuple(records))


def _rows(columns: dict[str, Array]) -> list[dict[str, Any]]:
    """Return the columns as keyword arguments per reading; NaN becomes None, counts become integers."""
    lists: dict[str, list[Any]] = {}
    for name, values in columns.items():
        whole = name in _WHOLE or (name.endswith("_total") and name != "energy_joules_total")
        lists[name] = [None if v != v else int(v) if whole else v for v in values.tolist()]  # noqa: PLR0124 - NaN
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]


def _reasons(gpu_idle: bool, power_capped: bool) -> tuple[str, ...]:
    return (*(("gpu_idle",) if gpu_idle else ()), *(("sw_power_cap",) if power_capped else ()))


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
    position = bisect_right(readings.processes, when["monotonic_s"], key=lambda change: change[0]) - 1
    used = int(readings.core["memory_used_bytes"][core_index])
    pids = readings.processes[position][1]
    return GpuSlowSample(
        **when,
        key=gpu.key,
        processes=tuple(GpuProcess(pid, used // len(pids)) for pid in pids),
        clock_event_seconds_total={
            "sw_power_cap": float(readings.capped_seconds[slow_index]),
            "sw_thermal": 0.0,
            "hw_thermal": 0.0,
            "hw_power_brake": 0.0,
        },
        **row,
    )


def _host_records(run: SimulatedRun) -> Callable[[int, dict[str, Any]], list[Record]]:
    counters = {name: np.asarray(values).astype(int).tolist() for name, values in run.host_counters.items()}

    def at(index: int, when: dict[str, Any]) -> list[Record]:
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
        if run.scenario.infiniband:
            records.append(
                InfinibandSample(
                    **when,
                    device="mlx5_0",
                    port=1,
                    receive_bytes_total=counters["infiniband_receive"][index],
                    transmit_bytes_total=counters["infiniband_transmit"][index],
                )
            )
        return records

    return at
