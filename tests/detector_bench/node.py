"""A node that is drawn second by second: what its GPUs and its host do, as arrays, and the facts beside them.

Simulated. Figures are those of ../shared/SIGNALS.md (2.1, 2.4, 2.5, 3.1, 3.3 and 6c): power from the linear fit on H100
boards scaled to others, waiting at 0.06 to 0.2 of the multiprocessors, reported power that trails by a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from agent.history import Series
from agent.records import GpuKey
from classifier.simulator.boards import BOARDS, Board

#: Power a waiting kernel takes, as a share of the way from context-idle power to the limit: snapshots of public issues
#: (H100 0.14 to 0.22 of the limit, A100 0.19 to 0.24, V100 0.22 to 0.25, T4 0.57 to 0.59).
WAIT_SHARE = {"T4": (0.28, 0.36), "L4": (0.2, 0.35)}
WAIT_SHARE_OTHERS = (0.005, 0.1)
SLOW_S = 5
GB = 1e9
_ACTIVITY = (
    "busy",
    "sm",
    "spin",
    "tensor",
    "dram",
    "nvlink_tx",
    "nvlink_rx",
    "pcie_rx",
    "pcie_tx",
    "memory",
    "burn",
    "waiting_sm",
)
_HOST = (
    "disk_read",
    "disk_written",
    "network_receive",
    "network_transmit",
    "infiniband_receive",
    "infiniband_transmit",
    "filesystem_read",
    "filesystem_written",
)
REASONS = ("sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
HEALTH = (
    "ecc_corrected_volatile_total",
    "ecc_uncorrected_volatile_total",
    "remapped_rows_correctable_total",
    "remapped_rows_uncorrectable_total",
    "pcie_replays_total",
    "nvlink_crc_errors_total",
    "nvlink_replay_errors_total",
    "nvlink_recovery_errors_total",
)
PORT = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_wait")


@dataclass
class Filesystem:
    """A mounted file system; `readable` says whether its bytes can be seen."""

    mountpoint: str = "/data"
    fstype: str = "nfs4"
    readable: bool = True


@dataclass
class Node:
    """What one node does for `seconds`; painted by jobs and faults, read by the sensors."""

    rng: np.random.Generator
    board_name: str
    gpus: int
    seconds: int
    ports: int = 0
    filesystem: Filesystem | None = None
    board: Board = field(init=False)

    def __post_init__(self) -> None:
        n, gpus = self.seconds, self.gpus
        self.slow = n // SLOW_S + 1
        self.board = BOARDS[self.board_name]
        self.keys = tuple(GpuKey(gpu, f"GPU-{gpu:08x}-bench") for gpu in range(gpus))
        self.activity = {name: np.zeros((gpus, n)) for name in _ACTIVITY}
        self.clock = np.ones((gpus, n))
        self.shape = np.ones((gpus, 10 * n), dtype=np.float32)  # of power within the second, 10 a second
        self.host = {name: np.zeros(n) for name in _HOST}
        low, high = WAIT_SHARE.get(self.board_name, WAIT_SHARE_OTHERS)
        self.wait_share = float(self.rng.uniform(low, high))
        #: How well each board conducts heat and how much it draws: +-3 %.
        self.gain = self.rng.normal(1.0, 0.025, gpus)
        self.idle_offset = self.rng.normal(0.0, 0.02, gpus)
        self.held = np.zeros((gpus, n), dtype=bool)  # a context exists
        self.cpu = np.zeros((gpus, self.slow))
        self.process_read = np.zeros((gpus, self.slow))
        self.process_written = np.zeros((gpus, self.slow))
        self.process_state = np.full((gpus, self.slow), "S", dtype="<U1")
        self.pressure = {name: np.full(self.slow, 0.002) for name in ("cpu", "io", "memory")}
        self.dirty = np.abs(self.rng.normal(3e7, 1e7, self.slow))
        self.writeback = np.zeros(self.slow)
        self.blocked = np.zeros(self.slow, dtype=int)
        self.major_timeouts = np.zeros(self.slow)
        self.reasons = {name: np.zeros((gpus, self.slow)) for name in REASONS}  # share of time
        self.health = {name: np.zeros((gpus, self.slow)) for name in HEALTH}  # events in each slow tick
        self.remap_pending_s = np.full(gpus, np.inf)
        self.remap_failed_s = np.full(gpus, np.inf)
        self.port_events = {name: np.zeros((self.ports, self.slow)) for name in PORT}
        self.port_down = np.zeros((self.ports, self.slow), dtype=bool)
        self.port_rate_share = np.ones(self.ports)
        self.pcie_width = np.full((gpus, self.slow), 16)
        self.pcie_generation = np.full((gpus, self.slow), 5 if "H" in self.board_name else 4)
        self.state: dict[int, list[tuple[float, str]]] = {}
        self.xids: list[tuple[float, int, int]] = []
        self.pids: dict[int, list[tuple[float, tuple[int, ...]]]] = {gpu: [(0.0, ())] for gpu in range(gpus)}
        self.jobs: dict[int, list[tuple[float, str, float | None]]] = {gpu: [] for gpu in range(gpus)}
        #: Channels by GPU and of the host that are given instead of drawn: recorded or simulated elsewhere.
        self.given: tuple[list[dict[str, Series]], dict[str, Series]] | None = None
        self.gaps: list[tuple[float, float]] = []
        self.gpu_gaps: list[tuple[int, float, float]] = []
        self.restarts: list[float] = []
        self.temperature_offset = np.zeros((gpus, self.slow))
        self._next_pid = 4000
        # Logs, metrics, the page cache: no host is silent.
        self.host["disk_written"] += self._noise(float(np.exp(self.rng.uniform(np.log(1e4), np.log(2e6)))))
        for name in ("network_receive", "network_transmit"):
            self.host[name] += self._noise(float(np.exp(self.rng.uniform(np.log(1e4), np.log(3e6)))))
        # Some boards correct an error now and then, and some links replay a packet.
        self.health["ecc_corrected_volatile_total"] += self.rng.random((gpus, self.slow)) < 2e-5
        self.health["pcie_replays_total"] += self.rng.random((gpus, self.slow)) < 1e-4

    def _noise(self, level: float) -> np.ndarray:
        return level * np.exp(self.rng.normal(0, 0.8, self.seconds))

    def span(self, start_s: float, end_s: float) -> slice:
        """Return the cells from `start_s` to `end_s`, within the node's time."""
        return slice(max(0, int(start_s)), max(0, min(self.seconds, int(end_s))))

    def slow_span(self, start_s: float, end_s: float) -> slice:
        """Return the slow ticks from `start_s` to `end_s`."""
        return slice(max(0, int(np.ceil(start_s / SLOW_S))), max(0, min(self.slow, int(np.ceil(end_s / SLOW_S)))))

    def paint(self, gpus: tuple[int, ...], start_s: float, end_s: float, **levels: float | np.ndarray) -> None:
        """Set activity of `gpus` from `start_s` to `end_s`; what is not named becomes 0, memory stays as it was."""
        cells = self.span(start_s, end_s)
        if cells.stop <= cells.start:
            return
        if "memory" not in levels and cells.start > 0:
            levels["memory"] = self.activity["memory"][list(gpus), cells.start - 1][:, None]
        for name in _ACTIVITY:
            if name in levels or name != "memory":
                self.activity[name][list(gpus), cells] = levels.get(name, 0.0)
        self.shape[list(gpus), cells.start * 10 : cells.stop * 10] = 1.0

    def add_host(self, name: str, start_s: float, end_s: float, rate: float, roughness: float = 0.2) -> None:
        """Add traffic of the host."""
        cells = self.span(start_s, end_s)
        count = cells.stop - cells.start
        if count > 0:
            self.host[name][cells] += rate * np.exp(self.rng.normal(0, roughness, count))

    def start_processes(self, gpus: tuple[int, ...], start_s: float, key: str, declared_s: float | None = None) -> None:
        """Give each of `gpus` a process of its own from `start_s`, held by the job `key`."""
        for gpu in gpus:
            self._next_pid += int(self.rng.integers(1, 9))
            self.pids[gpu].append((start_s, (self._next_pid,)))
            self.jobs[gpu].append((start_s, key, declared_s))
            self.held[gpu, self.span(start_s, self.seconds)] = True

    def end_processes(self, gpus: tuple[int, ...], end_s: float, *, keeps_job: bool = False) -> None:
        """End the processes of `gpus`; the allocation goes as well unless `keeps_job`."""
        for gpu in gpus:
            self.pids[gpu].append((end_s, ()))
            if not keeps_job:
                self.jobs[gpu].append((end_s, "", None))
            cells = self.span(end_s, self.seconds)
            self.held[gpu, cells] = False
            self.activity["memory"][gpu, cells] = 0.0

    def mean_power(self) -> np.ndarray:
        """Return watts by GPU and second, before any sensor."""
        board, act = self.board, self.activity
        scale = board.power_scale
        idle = np.where(self.held, board.context_idle_watts, board.bare_idle_watts) * (1 + self.idle_offset[:, None])
        nvlink = (act["nvlink_tx"] + act["nvlink_rx"]) / 2 / 450e9
        dynamic = 601 * act["sm"] + 95 * act["tensor"] + 120 * act["dram"] + 339 * nvlink
        waiting = act["spin"] * self.wait_share * (board.power_limit_watts - board.context_idle_watts)
        watts = idle + (dynamic * scale * self.clock**1.5 + waiting) * self.gain[:, None] + act["burn"]
        return np.minimum(watts, board.power_limit_watts * (0.985 + 0.01 * self.rng.random(watts.shape)))


def between(rng: np.random.Generator, low: float, high: float) -> float:
    """Return a value between `low` and `high`, even in its logarithm."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))
