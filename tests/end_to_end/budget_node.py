"""Measures what the agent costs on the emulated 8-GPU node that DESIGN.md's budgets are about.

CPU time and memory are read from /proc of the agent's process, as a node's administrator would; nothing is measured
from inside. All eight GPUs are busy with a simulated training run, so that features, model and detectors have work.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from agent.records import GpuProcess, GpuSlowSample, Record
from classifier.simulator.recorder import simulate
from classifier.simulator.scenario import Scenario
from tests.end_to_end.programs import Agent, wait_for
from tests.nvml_emulator.emulator import Emulator, script_from_ticks

GPUS = 8
#: The budgets of DESIGN.md.
CPU_SECONDS_A_MINUTE = 1.0
RESIDENT_BYTES = 80e6
CACHED_SCRAPE_SECONDS = 0.003
COLD_SCRAPE_SECONDS = 0.025
SERIES_PER_GPU = 120
SERIES_PER_NODE = 150

#: What `calibration_seconds` returned on the machine of docs/budgets.md (2026-12-01, 4.77 to 4.95 ms).
CALIBRATION_SECONDS = 0.0048

#: What Prometheus asks for, and how often by default it is told to.
_PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
SCRAPE_SECONDS = 15.0


def busy_gpus(folder: Path, ranks: Sequence[int] = ()) -> Emulator:
    """Return an emulator of eight GPUs that train; a simulated trace of 8 minutes is played in a loop.

    With `ranks` each GPU lists one of these processes.
    """
    scenario = Scenario(kind="data_parallel_training", board="H100", gpu_count=GPUS, duration_s=480.0, begin_s=600.0)
    ticks = tuple(simulate(scenario, seed=5)[1])
    if ranks:
        ticks = tuple(
            replace(tick, records=tuple(_held_by(ranks, record) for record in tick.records)) for tick in ticks
        )
    return Emulator(folder, script_from_ticks(ticks, end="loop"))


def _held_by(ranks: Sequence[int], record: Record) -> Record:
    if not isinstance(record, GpuSlowSample):
        return record
    return replace(record, processes=(GpuProcess(ranks[record.key.gpu], 60_000_000_000),))


@contextmanager
def running_ranks() -> Iterator[list[int]]:
    """Start eight processes with four children each, that wait; yield their ids."""
    command = ["sh", "-c", "for loader in 1 2 3 4; do sleep 3600 & done; echo started; wait"]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) for _ in range(GPUS)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "started\n"
        yield [rank.pid for rank in ranks]
    finally:
        for rank in ranks:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.communicate()


@contextmanager
def busy_node(folder: Path) -> Iterator[Agent]:
    """Start the agent on such GPUs, configured by default but for its state; yield once it exports all of them."""
    state = folder / "state"  # where there is none the agent says so, as an error of a sampler
    state.mkdir(exist_ok=True)
    config = f'[agent]\nstate_directory = "{state}"\n'
    with (
        running_ranks() as ranks,
        Agent(folder, config=config, environment=busy_gpus(folder, ranks).environment()) as agent,
    ):
        agent.wait_until_ready()
        wait_for("eight GPUs", lambda: len(watts(agent)) == GPUS)
        yield agent


def watts(agent: Agent) -> list[float]:
    """Return the power of each GPU that is exported."""
    return [value for series, value in agent.metrics().items() if series.startswith("warpwatch_gpu_power_watts{")]


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process since its start."""
    # The name in the second field may hold blanks and brackets: count from its end.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def cpu_over(agent: Agent, seconds: float) -> float:
    """Return the agent's CPU seconds per minute over so long, scraped as by a Prometheus every 15 s."""
    pid = agent.process.pid
    started, before = time.monotonic(), cpu_seconds(pid)
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=5)
    while (left := seconds - (time.monotonic() - started)) > 0:
        time.sleep(min(left, SCRAPE_SECONDS))
        _scrape(connection)
    connection.close()
    return (cpu_seconds(pid) - before) * 60 / (time.monotonic() - started)


def calibration_seconds(rounds: int = 20) -> float:
    """Return the CPU seconds of a fixed piece of work in this process, of Python and of NumPy: the machine's speed."""
    values = np.arange(300.0).reshape(3, 100)
    begin = time.thread_time()
    for _ in range(rounds):
        table = {}
        for number in range(20_000):
            table[number & 255] = (number, str(number & 15))
        for _ in range(300):
            np.sort(values - values.mean(axis=-1, keepdims=True), axis=-1)
    return (time.thread_time() - begin) / rounds


@dataclass(slots=True)
class Scrapes:
    """Durations of scrapes over one kept connection, in seconds, as the client sees them."""

    cold: list[float] = field(default_factory=list)  # the page was built for this scrape
    cached: list[float] = field(default_factory=list)  # the same snapshot was asked for before
    cpu: float = 0.0  # CPU seconds of the agent per scrape, with what else it did meanwhile

    def cached_p99(self) -> float:
        return quantile(self.cached, 0.99)


def quantile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def scrape_rounds(agent: Agent, *, least: int = 10, most: int = 10, scrapes_each: int = 100) -> list[Scrapes]:
    """Scrape in rounds a second apart, so that each meets a new page; whether a page is new shows in its bytes.

    After the `least` rounds, the first one within the budget ends it.
    """
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=5)
    last = _scrape(connection)[1]
    found: list[Scrapes] = []
    while len(found) < least or (len(found) < most and found[-1].cached_p99() >= CACHED_SCRAPE_SECONDS):
        time.sleep(1.0)
        scrapes = Scrapes()
        before = cpu_seconds(agent.process.pid)
        for _ in range(scrapes_each):
            seconds, page = _scrape(connection)
            (scrapes.cached if page == last else scrapes.cold).append(seconds)
            last = page
        scrapes.cpu = (cpu_seconds(agent.process.pid) - before) / scrapes_each
        found.append(scrapes)
    connection.close()
    return found


def _scrape(connection: http.client.HTTPConnection) -> tuple[float, bytes]:
    started = time.perf_counter()
    connection.request("GET", "/metrics", headers=_PROMETHEUS)
    page = connection.getresponse().read()
    return time.perf_counter() - started, page


def series_counts(agent: Agent) -> tuple[dict[str, int], int]:
    """Return the number of series by GPU, and that of all others."""
    by_gpu: dict[str, int] = {}
    others = 0
    for series in agent.metrics():
        _, is_of_gpu, rest = series.partition('{gpu="')
        if is_of_gpu:
            gpu = rest.partition('"')[0]
            by_gpu[gpu] = by_gpu.get(gpu, 0) + 1
        else:
            others += 1
    return by_gpu, others
