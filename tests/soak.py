"""Lets the running agent live through one driver fault after the other, and fails where it grows.

`make soak` plays for MINUTES (12 by default) on eight emulated GPUs of a simulated training run, with short pauses, so
that it meets more faults than a node meets in months: hangs, losses, resets, reloads, vanishing GPUs, floods of XIDs, a
new MIG layout. After each fault all GPUs have to be exported again. Memory, threads and open files are read from /proc
after each round, printed at the start, the middle and the end, and may not grow by more than what is said below.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
    "GPU hangs": lambda emulator, gpu: emulator.hang(60, gpu=gpu),
    "GPU lost": lambda emulator, gpu: emulator.fail(GPU_IS_LOST, gpu=gpu),
    "all GPUs hang": lambda emulator, _: emulator.hang(60),
    "driver reloaded": lambda emulator, _: emulator.reload_driver(),
    "fast power hangs": lambda emulator, gpu: emulator.hang(60, gpu=gpu, call="nvmlDeviceGetFieldValues"),
    "reset required": lambda emulator, gpu: emulator.fail(RESET_REQUIRED, gpu=gpu),
    "GPU vanishes": lambda emulator, gpu: emulator.vanish(gpu),
    "reload that hangs": lambda emulator, _: (emulator.hang_system(60, call="nvmlInit"), emulator.reload_driver())[1],
    "timeouts": lambda emulator, gpu: emulator.fail(TIMEOUT, gpu=gpu),
    "unknown errors": lambda emulator, gpu: emulator.fail(UNKNOWN, gpu=gpu),
    "count hangs": lambda emulator, _: emulator.hang_system(60, call="nvmlDeviceGetCount"),
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

    def __init__(self, agent: Agent, emulator: Emulator) -> None:
        self.sizes: list[Size] = []
        self.most_threads = 0
        self.longest_recovery: tuple[float, str] = (0.0, "")
        self.slowest_page_s = 0.0
        self._agent = agent
        self._emulator = emulator
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
        self.slowest_page_s = max(self.slowest_page_s, time.monotonic() - began)
        if status != 200 or self._agent.process.poll() is not None:
            sys.exit(f"the page does not answer (status {status}) during: {name}\n{self._agent.log()[-3000:]}")

    def recover(self, name: str) -> None:
        """Wait until all GPUs are sampled whole, and not what was sampled before; exit where that takes too long."""
        began, wall_s = time.monotonic(), time.time()
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


def main() -> None:
    """Play, print the table, and exit with 1 where the agent grew or did not recover."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("minutes", nargs="?", type=float, default=12.0, help="how long (default: %(default)g)")
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emulator = busy_gpus(folder)
        with Agent(folder, config=CONFIG, environment=emulator.environment()) as agent:
            agent.wait_until_ready()
            soak = Soak(agent, emulator)
            soak.recover("the start")
            soak.run(minutes * 60)
            log = agent.log()
    first, middle, last = soak.sizes[0], soak.sizes[len(soak.sizes) // 2], soak.sizes[-1]
    _say("\n| | minutes | rounds | faults | resident memory, MB | threads | open files | CPU, s |")
    _say("|---|---|---|---|---|---|---|---|")
    _say("\n".join(_row(*row) for row in (("start", first), ("middle", middle), ("end", last))))
    _say(f"\nmost threads while a fault lasted: {soak.most_threads}")
    _say(f"longest recovery: {soak.longest_recovery[0]:.1f} s after {soak.longest_recovery[1]}")
    _say(f"slowest page: {soak.slowest_page_s * 1e3:.0f} ms")
    faults = growth(first, last) + (["the log holds a traceback"] if "Traceback" in log else [])
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
