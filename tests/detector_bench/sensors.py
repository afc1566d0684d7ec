"""What an agent sees of a drawn node: channels as `agent.history` keeps them, and the records of the slow tick.

A profile says what is missing. Simulated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from agent.history import Series
from agent.records import (
    FilesystemSample,
    GpuHealth,
    GpuInfo,
    GpuLimits,
    GpuOwners,
    GpuProcess,
    GpuSlowSample,
    GpuState,
    GpuXids,
    Holder,
    InfinibandPort,
    PressureSample,
    ProcessSample,
    Record,
)
from tests.detector_bench.node import HEALTH, PORT, REASONS, SLOW_S, Node

WALL_S = 1_767_603_600.0
RARE_S = 60


@dataclass(frozen=True)
class Profile:
    """What the agent can see; `interval_s` is the distance of two samples."""

    name: str
    interval_s: int = 1
    profiling: bool = True
    nvlink: bool = True
    infiniband: bool = True
    host: bool = True
    processes: bool = True
    owners: bool = True
    health: bool = True
    xids: bool = True
    process_io: bool = True
    pressure: bool = True
    memory_utilization: bool = True
    pcie: bool = True
    power: bool = True

    def sees(self, *what: str) -> bool:
        """Return whether all of `what` can be seen."""
        return all(getattr(self, name) for name in what)


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("full"),
        Profile("no_profiling", profiling=False),
        Profile("no_nvlink", nvlink=False),
        Profile("no_infiniband", infiniband=False),
        Profile("slow_polling", interval_s=5),
        Profile(
            "nvidia_smi", profiling=False, nvlink=False, infiniband=False, host=False, processes=False, owners=False,
            health=False, xids=False, process_io=False, pressure=False, pcie=False,
        ),
        Profile("unprivileged", xids=False, process_io=False),
    )
}  # fmt: skip


@dataclass
class Seen:
    """A node as it is seen: all that the player needs."""

    node: Node
    profile: Profile
    times: np.ndarray  # of the core ticks
    channels: list[dict[str, Series]]  # by GPU
    host: dict[str, Series]
    slow_s: np.ndarray
    temperature: np.ndarray
    watts: np.ndarray  # (GPU, core tick), for the fixed rules
    utilization: np.ndarray
    _counters: dict[str, np.ndarray] = field(default_factory=dict)

    def gone(self, time_s: float) -> bool:
        """Return whether the agent saw nothing at `time_s`."""
        return any(start <= time_s < end for start, end in self.node.gaps)


def see(node: Node, profile: Profile) -> Seen:
    """Return what an agent with `profile` sees of `node`."""
    if node.given is not None:
        return _see_given(node, profile)
    rng, act, board = node.rng, node.activity, node.board
    n, every = node.seconds, profile.interval_s
    mean = node.mean_power()
    # Reported power trails by a second, with the sensor's own noise.
    trail = 0.2 * np.concatenate((mean[:, :1], mean[:, :-1]), axis=1) + 0.8 * mean
    watts = np.round(trail + rng.normal(0, 0.0006 * board.power_limit_watts, trail.shape), 1)
    busy = np.round(np.clip(act["busy"], 0, 1), 2)
    times = np.arange(1, n + 1, dtype=float)
    keep = np.ones(n, dtype=bool)
    for start, end in node.gaps:
        keep &= ~((times >= start) & (times < end))
    last = np.flatnonzero(keep & (np.arange(n) % every == every - 1))
    core: dict[str, np.ndarray] = {"utilization_ratio": busy}
    if profile.power:
        core["power_watts"] = watts
    factor = rng.uniform(1.27, 1.31)
    if profile.memory_utilization:
        core["memory_utilization_ratio"] = np.round(np.clip(factor * act["dram"], 0, 1), 2)
    core["memory_used_bytes"] = np.round(act["memory"] * board.memory_bytes + np.where(node.held, 4.5e8, 3e6))
    core["memory_total_bytes"] = np.full((node.gpus, n), float(board.memory_bytes))
    idle_clock = np.where(node.held, board.sm_clock_max_hertz, board.sm_clock_idle_hertz)
    core["sm_clock_hertz"] = np.round(idle_clock * node.clock / 15e6) * 15e6
    core["memory_clock_hertz"] = np.full((node.gpus, n), float(board.memory_clock_max_hertz))
    core |= _means(node, profile)
    core["throttled"] = _throttled(node)
    core["samples"] = np.ones((node.gpus, n))
    channels = [_series(node, gpu, core, times, last) for gpu in range(node.gpus)]
    if profile.power and profile.pcie and profile.interval_s < 10 and board.power_window_s >= 1.0:
        for gpu, found in enumerate(channels):
            found["power_fast_watts"] = _fast(node, gpu, mean[gpu], keep)
    slow_s = np.arange(0, n + 1, SLOW_S, dtype=float)
    return Seen(
        node=node,
        profile=profile,
        times=times[last],
        channels=channels,
        host=_host(node, profile, times, keep, every),
        slow_s=slow_s,
        temperature=_temperature(node, mean),
        watts=watts[:, last] if profile.power else np.full((node.gpus, last.size), np.nan),
        utilization=busy[:, last],
    )


def _means(node: Node, profile: Profile) -> dict[str, np.ndarray]:
    """Return what is read as a mean between two ticks: profiling and links."""
    rng, act, board, n, every = node.rng, node.activity, node.board, node.seconds, profile.interval_s
    means: dict[str, np.ndarray] = {}
    if profile.profiling and board.profiling:
        means["sm_active_ratio"] = np.clip(act["sm"] + act["waiting_sm"], 0, 1)
        means["tensor_active_ratio"] = act["tensor"]
        means["tensor_hmma_active_ratio"] = act["tensor"] * 0.98
        means["dram_active_ratio"] = act["dram"]
        means["sm_occupancy_ratio"] = 0.4 * act["sm"]
        if profile.pcie:
            means["pcie_receive_bytes_per_second"] = act["pcie_rx"]
            means["pcie_transmit_bytes_per_second"] = act["pcie_tx"]
    if profile.nvlink and board.nvlink_bytes_per_second:
        means["nvlink_receive_bytes_per_second"] = act["nvlink_rx"]
        means["nvlink_transmit_bytes_per_second"] = act["nvlink_tx"]
    if every > 1:
        starts = np.arange(0, n, every)
        means = {
            name: np.repeat(np.add.reduceat(values, starts, axis=1) / every, every, axis=1)[:, :n]
            for name, values in means.items()
        }
    for name, values in means.items():
        if name.endswith("_ratio"):
            noisy = np.clip(values * rng.normal(1, 0.01, values.shape), 0, 1)
            noisy[rng.random(values.shape) < 0.001] = 0.0  # single readings are all zero now and then
            means[name] = noisy
    return means


_PROFILED = ("sm_", "tensor_", "dram_", "fp")
#: Channels that the slow tick fills.
_OF_SLOW_TICK = ("temperature", "memory_temperature", "energy", "process_")


def _see_given(node: Node, profile: Profile) -> Seen:
    """Return what is left of given channels with this profile."""
    assert node.given is not None
    hidden: tuple[str, ...] = _OF_SLOW_TICK
    if not profile.profiling or not node.board.profiling:
        hidden += ("pcie",) if not profile.profiling else ()
        hidden += _PROFILED if not profile.profiling else ()
    if not profile.nvlink:
        hidden += ("nvlink",)
    if profile.name == "nvidia_smi":
        hidden += ("power_fast",)
    channels = []
    for own in node.given[0]:
        kept = {name: values for name, values in own.items() if not name.startswith(hidden) or name == "sm_clock_hertz"}
        channels.append({name: _thinned(values, name, profile.interval_s) for name, values in kept.items()})
    host = {}
    if profile.host:
        host = {
            name: _thinned(values, name, profile.interval_s)
            for name, values in node.given[1].items()
            if not name.startswith("filesystem") and (profile.infiniband or not name.startswith("infiniband"))
        }
    times = channels[0]["samples"].times
    return Seen(
        node=node,
        profile=profile,
        times=times,
        channels=channels,
        host=host,
        slow_s=np.arange(0, node.seconds + 1, SLOW_S, dtype=float),
        temperature=np.full((node.gpus, node.slow), 50.0),
        watts=_grid(channels, "power_watts", times),
        utilization=_grid(channels, "utilization_ratio", times),
    )


def _thinned(values: Series, name: str, every: int) -> Series:
    """Keep each `every`-th reading; rates and activity become means over the readings that go."""
    if every == 1 or name == "power_fast_watts":
        return values
    size = values.size // every * every
    picked = values.values[:size].reshape(-1, every)
    means = name.endswith("bytes_per_second") or name.startswith(_PROFILED)
    return Series(values.times[every - 1 : size : every], picked.mean(1) if means else picked[:, -1])


def _grid(channels: list[dict[str, Series]], name: str, times: np.ndarray) -> np.ndarray:
    found = np.full((len(channels), times.size), np.nan)
    for gpu, own in enumerate(channels):
        if name in own and own[name].size:
            found[gpu] = np.interp(times, own[name].times, own[name].values)
    return found


def _throttled(node: Node) -> np.ndarray:
    share = np.zeros((node.gpus, node.slow))
    for reason in REASONS[1:]:
        share = np.maximum(share, node.reasons[reason])
    cells = np.minimum(np.arange(node.seconds) // SLOW_S + 1, node.slow - 1)
    return (node.rng.random((node.gpus, node.seconds)) < share[:, cells]).astype(float)


def _series(
    node: Node, gpu: int, core: Mapping[str, np.ndarray], times: np.ndarray, last: np.ndarray
) -> dict[str, Series]:
    chosen = last
    for who, start, end in node.gpu_gaps:
        if who == gpu:
            chosen = chosen[(times[chosen] < start) | (times[chosen] >= end)]
    return {name: Series(times[chosen], np.ascontiguousarray(values[gpu, chosen])) for name, values in core.items()}


def _fast(node: Node, gpu: int, mean: np.ndarray, keep: np.ndarray) -> Series:
    idle = node.board.context_idle_watts if node.held[gpu].any() else node.board.bare_idle_watts
    shape = node.shape[gpu]
    base = np.repeat(np.minimum(mean, idle), 10)
    watts = base + (np.repeat(mean, 10) - base) * shape
    watts = np.minimum(watts, node.board.power_limit_watts) + node.rng.normal(0, 0.5, watts.size)
    fine = np.repeat(keep, 10)
    return Series((np.arange(1, watts.size + 1) * 0.1)[fine], watts[fine])


def _host(node: Node, profile: Profile, times: np.ndarray, keep: np.ndarray, every: int) -> dict[str, Series]:
    if not profile.host:
        return {}
    found = {}
    chosen = np.flatnonzero(keep & (np.arange(node.seconds) % every == every - 1))
    for name, values in node.host.items():
        if name.startswith("filesystem") or (name.startswith("infiniband") and not (profile.infiniband and node.ports)):
            continue
        rates = values
        if every > 1:
            starts = np.arange(0, node.seconds, every)
            rates = np.repeat(np.add.reduceat(values, starts) / every, every)[: node.seconds]
        found[f"{name}_bytes_per_second"] = Series(times[chosen], rates[chosen])
    return found


def _temperature(node: Node, mean: np.ndarray) -> np.ndarray:
    """Return whole degrees at the slow ticks: first order, with 40 s."""
    padded = np.concatenate((mean[:, :1], mean), axis=1)[:, ::SLOW_S]
    target = 27 + 45 * padded / node.board.power_limit_watts
    found = np.empty_like(target)
    value = target[:, 0]
    for tick in range(target.shape[1]):
        value = value + (target[:, tick] - value) * 0.12
        found[:, tick] = value
    return np.round(found[:, : node.slow] + node.temperature_offset)


class SlowRecords:
    """Builds the records of each slow tick."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        node = seen.node
        self._health = {name: np.cumsum(values, axis=1).astype(int) for name, values in node.health.items()}
        self._ports = {name: np.cumsum(values, axis=1).astype(int) for name, values in node.port_events.items()}
        self._reasons = {name: np.cumsum(values * SLOW_S, axis=1) for name, values in node.reasons.items()}
        self._cpu = np.cumsum(node.cpu * SLOW_S, axis=1)
        self._read = np.cumsum(node.process_read * SLOW_S, axis=1).astype(np.int64)
        self._written = np.cumsum(node.process_written * SLOW_S, axis=1).astype(np.int64)
        self._pressure = {name: np.cumsum(values * SLOW_S) for name, values in node.pressure.items()}
        self._timeouts = np.cumsum(node.major_timeouts).astype(int)
        padded = {name: np.concatenate(([0.0], np.cumsum(values))) for name, values in node.host.items()}
        ends = np.minimum(np.arange(node.slow) * SLOW_S, node.seconds)
        self._filesystem = {way: padded[f"filesystem_{way}"][ends].astype(np.int64) for way in ("read", "written")}
        self._pcie = None
        if not (seen.profile.profiling and node.board.profiling) and seen.profile.pcie:
            self._pcie = {
                way: np.concatenate(
                    (np.zeros((node.gpus, 1)), np.cumsum(node.activity[f"pcie_{way}"], axis=1)), axis=1
                )[:, ends].astype(np.int64)
                for way in ("rx", "tx")
            }
        self._has_pids = {gpu: [time for time, _ in events] for gpu, events in node.pids.items()}
        self._has_jobs = {gpu: [time for time, _, _ in events] for gpu, events in node.jobs.items()}
        self._xid_codes = {48, 63, 64, 74, 79, 94, 95, 119}

    def at(self, tick: int, time_s: float, *, first: bool) -> list[Record]:
        """Return the records of one slow tick; `first` adds identity and limits."""
        node, profile = self._seen.node, self._seen.profile
        when = {"monotonic_s": time_s, "wall_s": WALL_S + time_s}
        records: list[Record] = []
        rare = first or tick % (RARE_S // SLOW_S) == 0
        for gpu, key in enumerate(node.keys):
            state = self._state(gpu, time_s)
            if profile.name != "nvidia_smi" and state is not None:
                records.append(GpuState(**when, key=key, state=state))
            if state in ("lost", "hung"):
                if profile.xids:
                    records.append(self._xids(gpu, key, when, time_s))
                records += self._owners(gpu, key, when, time_s)
                continue
            if state is None:
                continue
            pids = self._pids(gpu, time_s)
            if rare:
                records += self._rare(gpu, key, when, tick)
            more = {}
            if self._pcie is not None:
                more = {
                    "pcie_receive_bytes_total": int(self._pcie["rx"][gpu, tick]),
                    "pcie_transmit_bytes_total": int(self._pcie["tx"][gpu, tick]),
                }
            records.append(
                GpuSlowSample(
                    **when, key=key,
                    temperature_celsius=float(self._seen.temperature[gpu, tick]),
                    processes=tuple(GpuProcess(pid) for pid in pids) if profile.processes else None,
                    clock_event_seconds_total={n: float(v[gpu, tick]) for n, v in self._reasons.items()}
                    if profile.health else {},
                    **more,
                )
            )  # fmt: skip
            if profile.health:
                records.append(self._gpu_health(gpu, key, when, tick, time_s))
            if profile.xids:
                records.append(self._xids(gpu, key, when, time_s))
            records += self._owners(gpu, key, when, time_s)
            if profile.processes:
                records += [self._process(gpu, pid, when, tick) for pid in pids]
        if profile.host:
            records += self._host(when, tick)
        return records

    def _state(self, gpu: int, time_s: float) -> str | None:
        state: str | None = "ok"
        for since, word in self._seen.node.state.get(gpu, ()):
            if since <= time_s:
                state = None if word == "gone" else word
        return state

    def _pids(self, gpu: int, time_s: float) -> tuple[int, ...]:
        return self._seen.node.pids[gpu][bisect_right(self._has_pids[gpu], time_s) - 1][1]

    def _rare(self, gpu: int, key, when, tick: int) -> list[Record]:
        node, board = self._seen.node, self._seen.node.board
        if self._seen.profile.name == "nvidia_smi":
            return [GpuLimits(**when, key=key, power_limit_watts=board.power_limit_watts)]
        info = GpuInfo(
            **when, key=key, model_name=board.model_name, pci_bus_id=f"00000000:{0x10 + gpu:02X}:00.0",
            device=f"nvidia{gpu}", driver_version="580.82.07",
        )  # fmt: skip
        return [
            info,
            GpuLimits(
                **when, key=key, power_limit_watts=board.power_limit_watts,
                sm_clock_max_hertz=board.sm_clock_max_hertz, memory_clock_max_hertz=board.memory_clock_max_hertz,
                pcie_generation=int(node.pcie_generation[gpu, tick]),
                pcie_generation_max=int(node.pcie_generation[gpu].max()),
                pcie_width=int(node.pcie_width[gpu, tick]), pcie_width_max=16,
                recovery_action=0,
            ),
        ]  # fmt: skip

    def _gpu_health(self, gpu: int, key, when, tick: int, time_s: float) -> GpuHealth:
        node = self._seen.node
        values = {name: int(self._health[name][gpu, tick]) for name in HEALTH}
        if not node.board.nvlink_bytes_per_second or not self._seen.profile.nvlink:
            values = {name: value for name, value in values.items() if not name.startswith("nvlink")}
        return GpuHealth(
            **when, key=key, **values,
            ecc_corrected_aggregate_total=values["ecc_corrected_volatile_total"] + 3 * gpu,
            ecc_uncorrected_aggregate_total=values["ecc_uncorrected_volatile_total"],
            is_row_remap_pending=bool(time_s >= node.remap_pending_s[gpu]),
            is_row_remap_failed=bool(time_s >= node.remap_failed_s[gpu]),
        )  # fmt: skip

    def _xids(self, gpu: int, key, when, time_s: float) -> GpuXids:
        totals = dict.fromkeys(self._xid_codes, 0)
        last: dict[int, float] = {}
        for since, who, code in self._seen.node.xids:
            if who == gpu and since <= time_s:
                totals[code] = totals.get(code, 0) + 1
                last[code] = WALL_S + since
        return GpuXids(**when, key=key, totals=totals, last_wall_s=last)

    def _owners(self, gpu: int, key, when, time_s: float) -> list[Record]:
        if not self._seen.profile.owners:
            return []
        events = self._seen.node.jobs[gpu]
        place = bisect_right(self._has_jobs[gpu], time_s) - 1
        if place < 0 or not events[place][1]:
            return [GpuOwners(**when, key=key)]
        _, name, declared = events[place]
        holder = Holder(
            job_key=name, job_id=name.rpartition("/")[2], scheduler="slurm",
            checkpoint_interval_seconds=declared, processes=len(self._pids(gpu, time_s)),
        )  # fmt: skip
        return [GpuOwners(**when, key=key, holders=(holder,), holder_count=1)]

    def _process(self, gpu: int, pid: int, when, tick: int) -> ProcessSample:
        more = {}
        if self._seen.profile.process_io:
            more = {
                "read_bytes_total": int(self._read[gpu, tick]),
                "written_bytes_total": int(self._written[gpu, tick]),
            }
        state = str(self._seen.node.process_state[gpu, tick])
        return ProcessSample(
            **when, pid=pid, started_monotonic_s=0.0, state=state,
            cpu_seconds_total=float(self._cpu[gpu, tick]), descendants_cpu_seconds_total=0.0, threads=40,
            descendants=4, blocked=int(state == "D"), **more,
        )  # fmt: skip

    def _host(self, when, tick: int) -> list[Record]:
        node, profile = self._seen.node, self._seen.profile
        records: list[Record] = []
        if profile.pressure:
            records.append(
                PressureSample(
                    **when,
                    cpu_some_seconds_total=float(self._pressure["cpu"][tick]),
                    io_some_seconds_total=float(self._pressure["io"][tick]),
                    memory_some_seconds_total=float(self._pressure["memory"][tick]),
                    dirty_bytes=int(node.dirty[tick]),
                    writeback_bytes=int(node.writeback[tick]),
                    memory_available_bytes=900_000_000_000,
                    blocked_tasks=int(node.blocked[tick]),
                )
            )
        if node.filesystem is not None:
            mount = node.filesystem
            readable = {
                "read_bytes_total": int(self._filesystem["read"][tick]),
                "written_bytes_total": int(self._filesystem["written"][tick]),
                "source": "mountstats",
                "major_timeouts_total": int(self._timeouts[tick]),
            }
            more = readable if mount.readable else {}
            records.append(FilesystemSample(**when, mountpoint=mount.mountpoint, fstype=mount.fstype, **more))
        if profile.infiniband:
            for port in range(node.ports):
                down = bool(node.port_down[port, tick])
                records.append(
                    InfinibandPort(
                        **when, device=f"mlx5_{port}", port=1, link_layer="infiniband",
                        state="down" if down else "active",
                        rate_bytes_per_second=50e9 * node.port_rate_share[port],
                        counters={name: int(self._ports[name][port, tick]) for name in PORT},
                        near_gpus=(f"00000000:{0x10 + port:02X}:00.0",) if port < node.gpus else (),
                    )
                )  # fmt: skip
        return records
