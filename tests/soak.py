"""Lets the running agent live through one driver fault after the other, and fails where it grows.

`make soak` plays for MINUTES (12 by default) on eight emulated GPUs of a simulated training run, with short pauses, so
that it meets more faults than a node meets in months: hangs, losses, resets, reloads, vanishing GPUs, floods of XIDs, a
new MIG layout. After each fault all GPUs have to be exported again. Memory, threads and open files are read from /proc
after each round, printed at the start, the middle and the end, and may not grow by more than what is said below.

With HOURS the agent's clocks go so much faster that so many hours of its time pass in these minutes
(tests/clock_shim/fast_clock.c), with longer periods, since 48 ticks in a second would measure the machine. The slope of
memory over the agent's time is printed with its interval of 95 %, by least squares over a value after each fault of the
second half of the run: what is learned of a day (how long waits lasted, at which rate links err) fills up more and more
slowly over the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clock_shim.shim import FastClock
from tests.end_to_end.budget_node import GPUS, busy_gpus, cpu_seconds, resident_bytes
from tests.end_to_end.programs import Agent, fetch
from tests.nvml_emulator.emulator import GPU_IS_LOST, RESET_REQUIRED, TIMEOUT, UNKNOWN, Emulator, MigInstance

#: Pauses and deadlines as short as two busy cores allow.
CONFIG = """[nvml]
tick_wait_s = 0.2
deadline_s = 0.7
start_deadline_s = 1.5
count_period_s = 1
mig_period_s = 1
restart_first_s = 1
restart_most_s = 2
"""
#: The same where time goes faster: half a second of the machine is then tens of seconds of the agent.
FAST_CONFIG = """[nvml]
period_s = 5
slow_period_s = 15
fast_hertz = 0
tick_wait_s = 5
deadline_s = 40
start_deadline_s = 80
stop_deadline_s = 5
release_deadline_s = 40
count_period_s = 60
mig_period_s = 60
restart_first_s = 60
restart_most_s = 120
"""
#: Until its line is gone.
ALWAYS_S = 1e6
#: Histories of 15 minutes and windows of an hour fill first, and half the run has to be over.
WARM_UP_S = 2 * 3600.0
#: Memory of a long-lived process may not grow faster than this in a day of its time.
MOST_BYTES_A_DAY = 1e6
#: How long a fault stays, and how long all GPUs may take to be back after it.
FAULT_SECONDS = 3.0
RECOVERY_SECONDS = 30.0
#: What the agent may gain from the first round on. Histories of 15 minutes fill and double meanwhile (docs/budgets.md);
#: a thread or file left behind by a fault would show as one for each round.
MOST_BYTES = 10e6
MOST_THREADS = 2
MOST_FILES = 3

Fault = Callable[[Emulator, int], None]


def _divide(emulator: Emulator, gpu: int) -> None:
    emulator.mig(gpu, [MigInstance(n, "3g.40gb", f"MIG-0000000{gpu}-0000-0000-0000-00000000000{n}") for n in (1, 2)])


def _xid_flood(emulator: Emulator, gpu: int) -> None:
    emulator.xid(gpu, 79, count=1000)


#: Each with the GPU whose turn it is; None is put right by `Emulator.clear`.
FAULTS: dict[str, Fault] = {
    "GPU hangs": lambda emulator, gpu: emulator.hang(ALWAYS_S, gpu=gpu),
    "GPU lost": lambda emulator, gpu: emulator.fail(GPU_IS_LOST, gpu=gpu),
    "all GPUs hang": lambda emulator, _: emulator.hang(ALWAYS_S),
    "driver reloaded": lambda emulator, _: emulator.reload_driver(),
    "fast power hangs": lambda emulator, gpu: emulator.hang(ALWAYS_S, gpu=gpu, call="nvmlDeviceGetFieldValues"),
    "reset required": lambda emulator, gpu: emulator.fail(RESET_REQUIRED, gpu=gpu),
    "GPU vanishes": lambda emulator, gpu: emulator.vanish(gpu),
    "reload that hangs": lambda emulator, _: (
        emulator.hang_system(ALWAYS_S, call="nvmlInit"),
        emulator.reload_driver(),
    )[1],
    "timeouts": lambda emulator, gpu: emulator.fail(TIMEOUT, gpu=gpu),
    "unknown errors": lambda emulator, gpu: emulator.fail(UNKNOWN, gpu=gpu),
    "count hangs": lambda emulator, _: emulator.hang_system(ALWAYS_S, call="nvmlDeviceGetCount"),
    "MIG on and off": _divide,
    "flood of XIDs": _xid_flood,
    "slow driver": lambda emulator, _: emulator.latency(0.02, mode="wait", call="nvmlDeviceGetPowerUsage"),
}


@dataclass(frozen=True, slots=True)
class Size:
    """What the process holds after a round."""

    at_s: float
    rounds: int
    faults: int
    resident_bytes: int
    threads: int
    files: int
    cpu_s: float


def size_of(agent: Agent, at_s: float, rounds: int, faults: int) -> Size:
    folder = Path(f"/proc/{agent.process.pid}")
    return Size(
        at_s=at_s,
        rounds=rounds,
        faults=faults,
        resident_bytes=resident_bytes(agent.process.pid),
        threads=len(list((folder / "task").iterdir())),
        files=len(list((folder / "fd").iterdir())),
        cpu_s=cpu_seconds(agent.process.pid),
    )


class Soak:
    """The agent on its emulator, and what was seen of it so far."""

    def __init__(self, agent: Agent, emulator: Emulator, clock: FastClock) -> None:
        self.sizes: list[Size] = []
        self.most_threads = 0
        self.longest_recovery: tuple[float, str] = (0.0, "")
        self.slowest_page_s = 0.0
        self.memory: list[tuple[float, int]] = []  # the agent's seconds since the start, and bytes
        self.pages = 0
        self._agent = agent
        self._emulator = emulator
        self._clock = clock
        self._began_s = clock.time()
        self._faults = 0

    def run(self, seconds: float) -> None:
        """Play whole rounds of all faults until the time is over; exit where the agent does not recover."""
        began = time.monotonic()
        while not self.sizes or time.monotonic() - began < seconds:
            for number, (name, fault) in enumerate(FAULTS.items()):
                gpu = (len(self.sizes) + number) % GPUS
                fault(self._emulator, gpu)
                self._faults += 1
                self._watch(name, FAULT_SECONDS)
                self._emulator.clear()
                self.recover(name)
                self.memory.append((self._clock.time() - self._began_s, resident_bytes(self._agent.process.pid)))
            time.sleep(2)  # threads of calls that were cut short end
            self.sizes.append(size_of(self._agent, time.monotonic() - began, len(self.sizes) + 1, self._faults))
            _say(_row("round", self.sizes[-1]))

    def _watch(self, name: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._page(name)
            self.most_threads = max(self.most_threads, size_of(self._agent, 0, 0, 0).threads)
            time.sleep(0.5)

    def _page(self, name: str) -> None:
        began = time.monotonic()
        status, _, _ = fetch(self._agent.url + "/metrics")
        if status == 0 and self._clock.speed > 1:
            # Its deadlines for a request are short now: a client that had to wait for a processor asks again.
            status, _, _ = fetch(self._agent.url + "/metrics")
        self.pages += 1
        self.slowest_page_s = max(self.slowest_page_s, time.monotonic() - began)
        if status != 200 or self._agent.process.poll() is not None:
            sys.exit(f"the page does not answer (status {status}) during: {name}\n{self._agent.log()[-3000:]}")

    def recover(self, name: str) -> None:
        """Wait until all GPUs are sampled whole, and not what was sampled before; exit where that takes too long."""
        began, wall_s = time.monotonic(), self._clock.time()
        while not self._is_whole(wall_s):
            if time.monotonic() - began > RECOVERY_SECONDS:
                sys.exit(f"not all GPUs are back {RECOVERY_SECONDS:g} s after: {name}\n{self._agent.log()[-3000:]}")
            time.sleep(0.2)
        self.longest_recovery = max(self.longest_recovery, (time.monotonic() - began, name))

    def _is_whole(self, since_s: float) -> bool:
        metrics = self._agent.metrics()
        fresh = [
            series.partition("{")[2]
            for series, stamp in metrics.items()
            if series.startswith("warpwatch_gpu_sample_timestamp_seconds{") and stamp > since_s
        ]
        # Of a card in MIG mode there is no utilisation.
        needed = ("warpwatch_gpu_power_watts", "warpwatch_gpu_utilization_ratio")
        return len(fresh) == GPUS and all(f"{name}{{{labels}" in metrics for name in needed for labels in fresh)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _row(name: str, size: Size) -> str:
    return (
        f"| {name} | {size.at_s / 60:.1f} | {size.rounds} | {size.faults} | {size.resident_bytes / 1e6:.1f} "
        f"| {size.threads} | {size.files} | {size.cpu_s:.1f} |"
    )


def growth(first: Size, last: Size) -> list[str]:
    """Return a sentence for each thing that grew by more than it may."""
    grown = {
        "resident memory, bytes": (last.resident_bytes - first.resident_bytes, MOST_BYTES),
        "threads": (last.threads - first.threads, MOST_THREADS),
        "open files": (last.files - first.files, MOST_FILES),
    }
    return [f"{what}: {more:+g}, at most {most:+g}" for what, (more, most) in grown.items() if more > most]


def settled(memory: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return days and bytes of the part of the run that counts for the slope."""
    return [(at_s / 86_400, size) for at_s, size in memory if at_s >= max(WARM_UP_S, memory[-1][0] / 2)]


def slope(memory: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return bytes a day after the warm-up, and half the width of its interval of 95 %; raises for too few values."""
    late = settled(memory)
    days, sizes = [day for day, _ in late], [size for _, size in late]
    line = statistics.linear_regression(days, sizes)
    errors = [size - line.slope * day - line.intercept for day, size in late]
    spread = sum((day - statistics.fmean(days)) ** 2 for day in days)
    return line.slope, 1.96 * (sum(error**2 for error in errors) / (len(late) - 2) / spread) ** 0.5


def say_slope(soak: Soak) -> list[str]:
    """Print how memory grew; return a sentence where it is too fast. Under some hours nothing can be said."""
    if len(settled(soak.memory)) < 30:
        _say("slope of memory: too short a run to say")
        return []
    bytes_a_day, half = slope(soak.memory)
    _say(f"slope of memory: {bytes_a_day / 1e6:+.2f} MB a day of the agent's time, give or take {half / 1e6:.2f}")
    return [f"memory grows by {bytes_a_day / 1e6:.2f} MB a day"] if bytes_a_day > MOST_BYTES_A_DAY else []


def main() -> None:
    """Play, print the table, and exit with 1 where the agent grew or did not recover."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("minutes", nargs="?", type=float, default=12.0, help="how long (default: %(default)g)")
    parser.add_argument("--hours", type=float, default=None, help="of the agent's time, in these minutes")
    arguments = parser.parse_args()
    minutes = arguments.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emulator = busy_gpus(folder)
        clock = FastClock(folder, 1.0 if arguments.hours is None else arguments.hours * 60 / minutes)
        config = CONFIG if clock.speed == 1 else FAST_CONFIG
        with Agent(folder, config=config, environment=emulator.environment() | clock.variables) as agent:
            agent.wait_until_ready()
            soak = Soak(agent, emulator, clock)
            soak.recover("the start")
            soak.run(minutes * 60)
            log = agent.log()
    first, middle, last = soak.sizes[0], soak.sizes[len(soak.sizes) // 2], soak.sizes[-1]
    _say("\n| | minutes | rounds | faults | resident memory, MB | threads | open files | CPU, s |")
    _say("|---|---|---|---|---|---|---|---|")
    _say("\n".join(_row(*row) for row in (("start", first), ("middle", middle), ("end", last))))
    _say(f"\ntime of the agent: {soak.memory[-1][0] / 3600:.1f} h; pages asked for: {soak.pages}, none lost")
    _say(f"most threads while a fault lasted: {soak.most_threads}")
    _say(f"longest recovery: {soak.longest_recovery[0]:.1f} s after {soak.longest_recovery[1]}")
    _say(f"slowest page: {soak.slowest_page_s * 1e3:.0f} ms")
    faults = say_slope(soak) + growth(first, last) + (["the log holds a traceback"] if "Traceback" in log else [])
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
