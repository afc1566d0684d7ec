"""The node of the fault matrix: what its emulator plays, what is right on its page, and who watches it meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.end_to_end.programs import Agent, fetch, wait_for
from tests.nvml_emulator.emulator import Emulator

GPUS = 3
#: Short periods and pauses: a new start costs the GPM ratios of the other GPUs a tick.
CONFIG = """[nvml]
period_s = 0.5
slow_period_s = 0.5
limits_period_s = 1
count_period_s = 1
mig_period_s = 1
tick_wait_s = 0.2
deadline_s = 0.7
start_deadline_s = 1.5
restart_first_s = 2
restart_most_s = 2
"""
#: A period and what two busy cores add to it; then the longest pause before a new start, and a look at the count.
PERIOD_S = 3.0
RESTART_S = 4.0
#: How long a fault may take to show: three ticks in which nothing but errors came make a GPU lost.
SHOWN_S = 8.0
#: A page that shows this GPU's sample is no older.
FRESH_S = 3.0

GIB = 1 << 30
GPM = {"sm_active": 0.60, "sm_occupancy": 0.25, "tensor_active": 0.40, "dram_active": 0.30}

#: Short name of what is exported: series, further labels, and the value of GPU n.
GAUGES: dict[str, tuple[str, str, Callable[[int], float]]] = {
    "state": ("warpwatch_gpu_state", ',state="ok"', lambda n: 1),
    "utilization": ("warpwatch_gpu_utilization_ratio", "", lambda n: 0.96 + n / 100),
    "memory_utilization": ("warpwatch_gpu_memory_utilization_ratio", "", lambda n: 0.20 + n / 100),
    "memory_used": ("warpwatch_gpu_memory_used_bytes", "", lambda n: (30 + n) * GIB),
    "memory_total": ("warpwatch_gpu_memory_total_bytes", "", lambda n: 80 * GIB),
    "power": ("warpwatch_gpu_power_watts", "", lambda n: 400 + 100 * n),
    "power_limit": ("warpwatch_gpu_power_limit_watts", "", lambda n: 700),
    "temperature": ("warpwatch_gpu_temperature_celsius", ',sensor="gpu"', lambda n: 50 + n),
    "memory_temperature": ("warpwatch_gpu_temperature_celsius", ',sensor="memory"', lambda n: 60 + n),
    "sm_clock": ("warpwatch_gpu_clock_hertz", ',clock="sm"', lambda n: (1900 + n) * 1e6),
    "memory_clock": ("warpwatch_gpu_clock_hertz", ',clock="memory"', lambda n: 2619e6),
    "power_cap_active": ("warpwatch_gpu_clock_event_active", ',reason="sw_power_cap"', lambda n: 1),
    "recovery_action": ("warpwatch_gpu_recovery_action", "", lambda n: 0),
    "remap_pending": ("warpwatch_gpu_row_remap_pending", "", lambda n: 0),
    "ecc_uncorrected": ("warpwatch_gpu_ecc_errors_total", ',severity="uncorrected",counter="volatile"', lambda n: 0),
    "ecc_aggregate": ("warpwatch_gpu_ecc_errors_total", ',severity="uncorrected",counter="aggregate"', lambda n: 7),
    "remapped": ("warpwatch_gpu_remapped_rows_total", ',kind="uncorrectable"', lambda n: n),
    "crc_errors": ("warpwatch_gpu_nvlink_errors_total", ',kind="crc"', lambda n: 0),
    **{name: (f"warpwatch_gpu_{name}_ratio", "", lambda n, share=share: share) for name, share in GPM.items()},
}
#: The same of counters: what GPU n adds in a second. All are 0 when the script starts and when the driver is loaded.
COUNTERS: dict[str, tuple[str, str, Callable[[int], float]]] = {
    "energy": ("warpwatch_gpu_energy_joules_total", "", lambda n: 400 + 100 * n),
    "nvlink_sent": ("warpwatch_gpu_nvlink_transmit_bytes_total", "", lambda n: 1024e6 * (n + 1)),
    "nvlink_received": ("warpwatch_gpu_nvlink_receive_bytes_total", "", lambda n: 2048e6 * (n + 1)),
    "pcie_sent": ("warpwatch_gpu_pcie_transmit_bytes_total", "", lambda n: 3e8 * (n + 1)),
    "pcie_received": ("warpwatch_gpu_pcie_receive_bytes_total", "", lambda n: 4e8 * (n + 1)),
    "power_cap": ("warpwatch_gpu_clock_event_seconds_total", ',reason="sw_power_cap"', lambda n: 0.5),
}
#: Read every 5 s and every 60 s by default: they may stay for three such periods, whatever the configuration.
LIMITS = {"power_limit", "recovery_action"}
SLOW = {
    *("energy", "temperature", "memory_temperature", "pcie_sent", "pcie_received", "power_cap"),
    *("remap_pending", "ecc_uncorrected", "ecc_aggregate", "remapped", "crc_errors"),
}
ALL = {*GAUGES, *COUNTERS} - {"state"}
CORE = ALL - SLOW - LIMITS
SLOW_STALE_S = 15.0
#: What may fall where the driver was loaded anew.
OF_THE_DRIVER = re.compile(
    r"warpwatch_gpu_(energy_joules|nvlink_(transmit|receive)_bytes|pcie_\w+_bytes|clock_event_seconds|ecc_errors"
    r"|remapped_rows|nvlink_errors)_total\{"
)


def script() -> str:
    begin, later = ["driver 580.95.05", "@ 0"], ["@ 1000"]
    for n in range(GPUS):
        begin.append(
            f"{n} utilization_gpu_percent={96 + n} utilization_memory_percent={20 + n} "
            f"memory_used_bytes={(30 + n) * GIB} memory_total_bytes={80 * GIB} "
            f"power_milliwatts={400_000 + 100_000 * n} power_limit_milliwatts=700000 "
            f"temperature_celsius={50 + n} memory_temperature_celsius={60 + n} "
            f"sm_clock_megahertz={1900 + n} memory_clock_megahertz=2619 event_reasons_bits=4 recovery_action=0 "
            f"ecc_corrected_volatile=0 ecc_uncorrected_volatile=0 ecc_corrected_aggregate=9 "
            f"ecc_uncorrected_aggregate=7 remapped_rows_correctable=0 remapped_rows_uncorrectable={n} "
            f"row_remap_pending=0 row_remap_failure=0 pcie_replays=0 nvlink_crc_errors=0 nvlink_replay_errors=0 "
            f"gpm_sm_active_percent=60 gpm_sm_occupancy_percent=25 gpm_any_tensor_percent=40 "
            f"gpm_dram_bandwidth_percent=30 energy_millijoules=0 nvlink_transmit_kibibytes=0 "
            f"nvlink_receive_kibibytes=0 pcie_transmit_bytes=0 pcie_receive_bytes=0 sw_power_cap_nanoseconds=0 "
            f"processes={100 + n}:{GIB}"
        )
        later.append(
            f"{n} energy_millijoules={(400 + 100 * n) * 10**6} nvlink_transmit_kibibytes={10**9 * (n + 1)} "
            f"nvlink_receive_kibibytes={2 * 10**9 * (n + 1)} pcie_transmit_bytes={3 * 10**11 * (n + 1)} "
            f"pcie_receive_bytes={4 * 10**11 * (n + 1)} sw_power_cap_nanoseconds={500 * 10**9}"
        )
    begin += [
        f"1:{n} memory_used_bytes={5 * n * GIB} memory_total_bytes={40 * GIB} gpm_sm_active_percent={70 + n}"
        for n in (1, 2)
    ]
    return "\n".join([*begin, *later, ""])


def get(metrics: Mapping[str, float], name: str, gpu: int) -> float | None:
    """Return what is exported of a whole GPU under a short name; "sampled_at" is the time of its newest sample."""
    known = GAUGES.get(name) or COUNTERS.get(name) or ("warpwatch_gpu_sample_timestamp_seconds", "", None)
    start, end = f'{known[0]}{{gpu="{gpu}",uuid="', f'"{known[1]}}}'
    return next(
        (
            value
            for series, value in metrics.items()
            if series.startswith(start) and series.endswith(end) and series.count('"') == 4 + known[1].count('"')
        ),
        None,
    )


def is_counted(before: Mapping[str, float], metrics: Mapping[str, float], reason: str) -> bool:
    """Return whether there are more failures for this reason; with those that have no series of their own any more."""
    start = 'warpwatch_sampler_errors_total{sampler="nvml",reason='
    name = f'{start}"{reason}"}}' if f'{start}"{reason}"}}' in metrics else f'{start}"other"}}'
    return metrics.get(name, 0) > before.get(name, 0)


class Watcher(threading.Thread):
    """Scrapes as fast as is fair and keeps the highest value of each counter: what fell, and what did not answer."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(daemon=True)
        self.falls: list[str] = []
        self.silences: list[str] = []
        self.slowest_s = 0.0
        self.may_fall: re.Pattern[str] | None = None
        self.reads = 0
        self._agent = agent
        self._last: dict[str, float] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.2):
            began = time.monotonic()
            status, _, _ = fetch(self._agent.url + "/-/healthy")
            metrics = self._agent.metrics()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            if status != 200 or not metrics:
                self.silences.append(f"/-/healthy answers {status}, /metrics {len(metrics)} series")
            for series, value in metrics.items():
                if "_total{" not in series and not series.endswith("_total"):
                    continue
                if value < self._last.get(series, 0) and not (self.may_fall and self.may_fall.match(series)):
                    self.falls.append(f"{series} fell from {self._last[series]} to {value}")
                self._last[series] = value
            self.look(metrics)
            self.reads += 1

    def look(self, metrics: Mapping[str, float]) -> None:
        """See more in a page; for watchers that know more."""

    def end(self) -> None:
        self._ended.set()
        self.join()


class Node:
    """The agent, its emulator, and when the emulator's counters were 0."""

    def __init__(self, agent: Agent, emulator: Emulator, watcher: Watcher) -> None:
        self.agent = agent
        self.emulator = emulator
        self.watcher = watcher
        self.zero_s = 0.0
        self.threads_at_start = 0
        self.is_right = False  # whether the last test left it so

    def wrong(self, metrics: Mapping[str, float], gpus: Iterable[int], but: Iterable[str] = ()) -> list[str]:
        """Return what is not as the script has it for these GPUs, `but` what may be anything."""
        now_s = time.time()
        found = []
        for gpu in gpus:
            sampled_s = get(metrics, "sampled_at", gpu)
            if sampled_s is None or now_s - sampled_s > FRESH_S:
                found.append(f"GPU {gpu}: sampled at {sampled_s}, now {now_s}")
            for name in GAUGES.keys() - set(but):
                value, right = get(metrics, name, gpu), GAUGES[name][2](gpu)
                if value != pytest.approx(right):
                    found.append(f"GPU {gpu}: {name} is {value}, not {right}")
            for name in COUNTERS.keys() - set(but):
                value, rate = get(metrics, name, gpu), COUNTERS[name][2](gpu)
                least, most = rate * (now_s - self.zero_s - FRESH_S), rate * (now_s - self.zero_s + 1)
                if value is None or not least <= value <= most:
                    found.append(f"GPU {gpu}: {name} is {value}, not between {least} and {most}")
        return found

    def wait_until_right(self, seconds: float) -> None:
        """Wait until every value of every GPU is right in one page, and of samples after now."""
        began_s, problems = time.time(), ["nothing"]
        deadline = time.monotonic() + seconds
        while problems and time.monotonic() < deadline:
            metrics = self.agent.metrics()
            problems = self.wrong(metrics, range(GPUS))
            if not problems and min(get(metrics, "sampled_at", gpu) for gpu in range(GPUS)) <= began_s:
                problems = ["no sample after the fault"]
            if metrics.get('warpwatch_sampler_success{sampler="nvml"}') != 1:
                problems.append("the sampler has no success")
            if metrics.get("warpwatch_gpus_visible") != GPUS:
                problems.append("not all GPUs are visible")
            time.sleep(0.1)
        self.is_right = not problems
        assert not problems, f"{seconds} s after the fault: {problems[:8]}\n{self.agent.log()[-700:]}"

    def expect(self, problems: Callable[[Mapping[str, float]], list[str]], seconds: float = SHOWN_S) -> None:
        """Wait until nothing is wrong in a page; fail with what is."""
        found: list[str] = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = problems(self.agent.metrics())
            if not found:
                return
            time.sleep(0.1)
        self.is_right = False
        pytest.fail(f"after {seconds} s: {found[:8]}\n{self.agent.log()[-700:]}")

    def ticks(self, count: int, gpu: int | None) -> None:
        """Wait for so many samples of a GPU, or where it is None for so many scrapes of the watcher."""
        if gpu is None:
            reads = self.watcher.reads
            wait_for("scrapes", lambda: self.watcher.reads >= reads + 5 * count, 10)
            return
        for _ in range(count):
            before = get(self.agent.metrics(), "sampled_at", gpu)
            wait_for("tick", lambda before=before: get(self.agent.metrics(), "sampled_at", gpu) != before, 5)

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.agent.process.pid}/task").iterdir()))

    def is_calm(self) -> None:
        """Assert what holds in every fault: no counter fell, the page answered, the agent lives."""
        falls, self.watcher.falls = self.watcher.falls, []
        silences, self.watcher.silences = self.watcher.silences, []
        assert falls == [], falls[:5]
        assert silences == [], silences[:5]
        assert self.agent.process.poll() is None
        assert "Traceback" not in self.agent.log()
