"""Real training, then the measured wait, then real training again: ../shared/traces, where it is present.

The wait is that of SIGNALS.md 3.1 and of spinwait_segments.csv: 100 % at 118 to 186 W of 700 on H100. Saves that the
recording holds (rank 0 alone, 15 to 277 s) stay in, and where the host is seen it writes then. The rank that is missing
reads 0 % (stall_snapshots.csv: what the others of a hung job read that do not spin), and sometimes up to the 6 % of a
rank that saves: then its process takes no CPU, since it does not.
"""

from __future__ import annotations

import csv
import gzip
from functools import cache
from pathlib import Path

import numpy as np

from agent.history import Series
from tests.detector_bench.cases import Draw, Truth, kind
from tests.detector_bench.node import SLOW_S, Node
from tests.detector_bench.stalls import expect_stall

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
_COLUMNS = {
    "util_gpu_pct": ("utilization_ratio", 0.01),
    "util_mem_pct": ("memory_utilization_ratio", 0.01),
    "mem_used_mib": ("memory_used_bytes", 1048576.0),
    "power_w": ("power_watts", 1.0),
    "sm_active": ("sm_active_ratio", 1.0),
    "tensor_active": ("tensor_active_ratio", 1.0),
    "dram_active": ("dram_active_ratio", 1.0),
    "nvlink_tx_kbs": ("nvlink_transmit_bytes_per_second", 1e3),
    "nvlink_rx_kbs": ("nvlink_receive_bytes_per_second", 1e3),
}
#: Recordings of steady training, with the seconds that are left out at the start. One that saves so often that it works
#: for 159 s in all, and one of a T4 that holds neither power nor profiling, are none: what they lack, a stall needs.
SOURCES = {
    "training/gwtrain__h100_8gpu_ckpt1000.csv.gz": 60,
    "training/gwtrain__h100_8gpu_ckpt500.csv.gz": 60,
    "training/gwtrain__h100_8gpu_ckpt100.csv.gz": 60,
    "training/gwtrain__h100_8gpu_run_0726.csv.gz": 60,
    "training/atharvanihalani__t2_ddp_136m.csv.gz": 60,
    "training/atharvanihalani__t13_tp_pp_node0.csv.gz": 60,
}
_WAIT = {
    "utilization_ratio": 1.0,
    "memory_utilization_ratio": 0.0,
    "tensor_active_ratio": 0.0,
    "dram_active_ratio": 0.0004,
    "nvlink_transmit_bytes_per_second": 0.0,
    "nvlink_receive_bytes_per_second": 0.0,
}


def present() -> bool:
    """Return whether the recordings are here."""
    return TRACES.is_dir()


@cache
def recorded(name: str) -> dict[str, np.ndarray]:
    """Return a recording at 1 Hz: by channel, GPU and second; NaN where nothing was read."""
    with gzip.open(TRACES / name, "rt", newline="") as lines:
        rows = list(csv.DictReader(lines))
    gpus = max(int(row["gpu"]) for row in rows) + 1
    seconds = int(float(rows[-1]["t_s"]))
    found = {channel: np.full((gpus, seconds + 1), np.nan) for channel, _ in _COLUMNS.values()}
    for row in rows:
        place = int(row["gpu"]), int(float(row["t_s"]))
        for column, (channel, scale) in _COLUMNS.items():
            if row.get(column):
                found[channel][place] = float(row[column]) * scale
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


@cache
def waits(name: str) -> tuple[tuple[float, float], ...]:
    """Return the waits that the recording itself holds: start and length in seconds."""
    with (TRACES / "spinwait_segments.csv").open(newline="") as lines:
        found = {(float(row["t_start_s"]), float(row["dur_s"])) for row in csv.DictReader(lines) if row["file"] == name}
    return tuple(sorted(found))


def _splice(draw: Draw, variant: str) -> tuple[Node, Truth]:
    name = draw.pick(*SOURCES)
    source = recorded(name)
    skip = SOURCES[name]
    values = {channel: data[:, skip:] for channel, data in source.items()}
    gpus, length = next(iter(values.values())).shape
    own = [(start - skip, long) for start, long in waits(name) if start > skip]
    at = _place(draw, own, values["utilization_ratio"])
    longest = max((long for _, long in own), default=0.0)
    blind = not draw.profile.host
    wait = int(draw.between(300, 700) if not blind else max(660.0, 2 * longest + 60) + draw.between(100, 600))
    node = Node(rng=draw.rng, board_name="H100", gpus=gpus, seconds=length + wait)
    limit = node.board.power_limit_watts
    level = limit * np.clip(draw.rng.normal(0.21, 0.025), 0.168, 0.266)
    missing = int(draw.rng.integers(gpus)) if variant == "missing" else None
    # The utilisation of a missing rank, at most: nothing, or something while its process takes no CPU.
    use = 0.06 if draw.rng.random() < 0.5 else 0.0
    channels: list[dict[str, Series]] = []
    times = np.arange(1, node.seconds + 1, dtype=float)
    for gpu in range(gpus):
        row = {}
        for channel, data in values.items():
            missing_use = use if gpu == missing else None
            inserted = _inserted(draw, channel, level, wait, missing_use=missing_use, data=data[gpu, :at])
            whole = np.concatenate((data[gpu, :at], inserted, data[gpu, at:]))
            keep = np.isfinite(whole)
            row[channel] = Series(times[keep], whole[keep])
        row["samples"] = Series(row["utilization_ratio"].times, np.ones(row["utilization_ratio"].size))
        row["memory_total_bytes"] = Series(times, np.full(times.size, float(node.board.memory_bytes)))
        channels.append(row)
    node.start_processes(tuple(range(gpus)), 0.0, "slurm/7")
    node.cpu[:] = 1.2
    if missing is not None:
        node.cpu[missing, node.slow_span(at, at + wait)] = 0.02 if use else draw.pick(0.0, 1.0)
    for start, long in own:
        begin = start + 0.5 + (wait if start >= at else 0)
        # What such a save writes was not recorded: 500 MB/s, as dirty pages first.
        node.add_host("disk_written", begin + 1, begin + long, 5e8)
        ticks = node.slow_span(begin, begin + long)
        node.dirty[ticks] += 5e8 * SLOW_S * np.arange(1, ticks.stop - ticks.start + 1)
    host = {f"{name}_bytes_per_second": Series(times, rate) for name, rate in node.host.items() if name[0] in "dn"}
    node.given = (channels, host)
    truth = Truth()
    expect_stall(draw, truth, float(at), float(at + wait), longest_wait_s=longest)
    truth.accept("collective_wait", severity=2)
    return node, truth


def _place(draw: Draw, own: list[tuple[float, float]], utilization: np.ndarray) -> int:
    """Return where to cut: in work, after more than two minutes of it, and not in a wait or just beside one.

    Some recordings hold minutes without a run, in which nothing is there to hang.
    """
    length = utilization.shape[1]
    mean = np.nan_to_num(utilization).mean(axis=0) / np.maximum(np.isfinite(utilization).mean(axis=0), 1e-9)
    works = mean >= 0.5
    for start, long in own:
        works[max(0, int(start)) : int(start + long) + 1] = False
    for attempt in range(2000):
        apart = 20 if attempt < 500 else 5  # some save every 25 s
        at = int(draw.rng.uniform(0.3, 0.8) * length)
        is_work = np.median(mean[at - 10 : at]) >= 0.5 and np.count_nonzero(works[:at]) >= 150
        if is_work and all(at < start - apart or at > start + long + apart for start, long in own):
            return at
    raise ValueError(f"no place for a stall in {length} s")


def _inserted(
    draw: Draw, channel: str, level: float, wait: int, *, missing_use: float | None, data: np.ndarray
) -> np.ndarray:
    missing = missing_use is not None
    if channel == "power_watts":
        watts = level * (0.92 if missing else 1.0) + draw.rng.normal(0, 0.8, wait)
        # Reported power trails by 1.2 s.
        before = data[np.isfinite(data)][-1]
        watts[0] = 0.3 * watts[0] + 0.7 * before
        return watts
    if channel == "memory_used_bytes":
        return np.full(wait, data[np.isfinite(data)][-1])
    if channel == "sm_active_ratio":
        return np.full(wait, 0.0 if missing else 24 / 132)
    if channel == "utilization_ratio" and missing_use is not None:
        return np.round(draw.rng.uniform(0.0, missing_use, wait), 2)
    return np.full(wait, 0.0 if missing else _WAIT[channel])


_SPLICE = {"hours": 0.5, "profiles": ("full", "no_profiling", "nvidia_smi", "unprivileged", "nvidia_smi")}


@kind("splice", "real training, all ranks wait, real training", **_SPLICE)
def splice_all_wait(draw: Draw) -> tuple[Node, Truth]:
    return _splice(draw, "all")


@kind("splice", "real training, one rank is missing, real training", **_SPLICE)
def splice_missing_rank(draw: Draw) -> tuple[Node, Truth]:
    return _splice(draw, "missing")
