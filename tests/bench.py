"""Measures the budgets of DESIGN.md over minutes and prints the table of docs/budgets.md: `make bench`.

`python -m tests.bench MINUTES` measures for longer than the 4 minutes of `make bench`. The six minutes before fill the
windows of the features and are not counted; what is measured is the cost of a node that has run for long. Then hours
of a node are played through the pipeline to see whether its memory stays flat. The exit status is 1 where it does not.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from agent.clock import SystemClock, process_cpu_seconds
from agent.samplers.nvml import NvmlSampler
from classifier.features import compute_all
from classifier.model import load
from classifier.signals import Signals
from tests.classifier.node import node
from tests.end_to_end import budget_node as budget
from tests.end_to_end.programs import ROOT, Agent
from tests.nvml_emulator.emulator import LIBRARY

#: The longest window of the features is 300 s; the rest is start-up.
WARM_UP_MINUTES = 6
#: Live growth that is no leak: histories hold 15 minutes, and their arrays double at 8.5 and 17 minutes.
MAX_GROWTH_BYTES_A_MINUTE = 0.5e6
#: Hours played through the pipeline, and its growth from the first hour on that is no leak.
HOURS = 6
MAX_GROWTH_BYTES = 1e6


def main(minutes: int) -> int:
    with tempfile.TemporaryDirectory() as folder, budget.busy_node(Path(folder)) as agent:
        pid = agent.process.pid
        for minute in range(WARM_UP_MINUTES):
            _say(f"warm-up minute {minute + 1}: {budget.cpu_over(agent, 60):.2f} s CPU, {_megabytes(pid)} resident")
        cpu, memory = [], [budget.resident_bytes(pid)]
        for minute in range(minutes):
            cpu.append(budget.cpu_over(agent, 60))
            memory.append(budget.resident_bytes(pid))
            _say(f"minute {minute + 1}: {cpu[-1]:.2f} s CPU, {_megabytes(pid)} resident")
        growth = (memory[-1] - memory[0]) / minutes
        rows = _live_rows(agent, cpu, memory, growth)
    growth_of_hours = _growth_of_hours()
    rows.append((f"growth of the pipeline over {HOURS} hours, MB", "0", f"{growth_of_hours / 1e6:+.2f}"))
    rows.append(("inside driver calls, s per minute", "apart", f"{_driver_seconds_a_minute():.3f}"))
    features, prediction = _decision_seconds()
    rows.append(("features of 16 GPUs, CPU ms per decision", "10 together", f"{features * 1e3:.1f}"))
    rows.append(("prediction for 16 GPUs, CPU ms per decision", "10 together", f"{prediction * 1e3:.1f}"))
    lines = [f"{datetime.now(UTC):%Y-%m-%d}, {minutes} minutes after {WARM_UP_MINUTES} of warm-up, {_machine()}", ""]
    lines += ["| | budget | measured |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    sys.stdout.write("\n".join([*lines, ""]))
    if growth > MAX_GROWTH_BYTES_A_MINUTE or growth_of_hours > MAX_GROWTH_BYTES:
        _say("memory is not flat")
        return 1
    return 0


def _live_rows(agent: Agent, cpu: list[float], memory: list[int], growth: float) -> list[tuple[str, str, str]]:
    rounds = budget.scrape_rounds(agent, least=30, most=30)
    cached = [seconds for scrapes in rounds for seconds in scrapes.cached]
    best = min(scrapes.cached_p99() for scrapes in rounds)
    cold = [seconds for scrapes in rounds for seconds in scrapes.cold]
    by_gpu, others = budget.series_counts(agent)
    return [
        ("CPU, s per minute", "1.0", f"{sum(cpu) / len(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})"),
        ("resident memory, MB", "80", f"{max(memory) / 1e6:.1f}"),
        ("its growth, MB per minute", "0", f"{growth / 1e6:+.3f}"),
        ("cached scrape, ms: p50, p99", "3", f"{_ms(cached, 0.5)}, {_ms(cached, 0.99)}"),
        ("the same in the best of 30 rounds, ms: p99", "3", f"{best * 1e3:.2f}"),
        ("cold scrape, ms: p50, largest", "25", f"{_ms(cold, 0.5)}, {_ms(cold, 1)}"),
        ("series per GPU", "120", str(max(by_gpu.values()))),
        ("series per node beside them", "150", str(others)),
    ]


def _growth_of_hours() -> int:
    """Return by how many bytes the pipeline alone grows after its first hour, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench_day", str(HOURS)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return int(printed.splitlines()[-1].removeprefix("growth "))


def _driver_seconds_a_minute() -> float:
    """Return the time inside the emulator's calls for 60 ticks of the sampler, one after another in this process.

    It is wall time and holds the waits of the eight threads for each other, when a call returns to Python.
    """
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(budget.busy_gpus(Path(folder)).variables())
        ctypes.CDLL(str(LIBRARY))  # nvidia-ml-py finds it, for a library of its name is loaded
        sampler = NvmlSampler()
        sampler.probe()
        now = clock.now()
        for second in range(60):
            sampler.sample(now.later(second))
        seconds = sampler.driver_seconds
        sampler.close()
    return seconds


def _decision_seconds() -> tuple[float, float]:
    """Return the CPU time of the features of 16 GPUs with every channel and 15 minutes of history, and of the model.

    The least of 30 rounds each: what it costs where nothing else has the caches.
    """
    gpus, host = node(16)
    model = load()
    features, prediction = [], []
    for _ in range(30):
        signals = [Signals(gpu, host, 899.0, gpu_count=len(gpus), peers=gpus) for gpu in gpus]
        start = process_cpu_seconds()
        rows = compute_all(signals)
        between = process_cpu_seconds()
        model.predict(rows)
        features.append(between - start)
        prediction.append(process_cpu_seconds() - between)
    return min(features), min(prediction)


def _machine() -> str:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, load average {load}"


def _megabytes(pid: int) -> str:
    return f"{budget.resident_bytes(pid) / 1e6:.1f} MB"


def _ms(seconds: list[float], share: float) -> str:
    return f"{budget.quantile(seconds, share) * 1e3:.2f}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4))
