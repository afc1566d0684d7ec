"""One fault of the driver after the other against one running agent: what /metrics shows during and after each.

FAULTS is the matrix. While a fault lasts, what cannot be known is absent and counted, the other GPUs are fresh and
right, and the page answers; when it is over, every value is right again within a period and the documented pause of a
new start. All the while a second client scrapes and keeps every counter: none may fall but where the driver was
loaded anew. A library of another version than the driver ends the agent: test_driver.py.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.programs import Agent, fetch, wait_for
from tests.nvml_emulator.emulator import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    TIMEOUT,
    UNKNOWN,
    Emulator,
    MigInstance,
)

pytestmark = pytest.mark.end_to_end

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


def errors(metrics: Mapping[str, float], reason: str) -> float:
    return metrics.get(f'warpwatch_sampler_errors_total{{sampler="nvml",reason="{reason}"}}', 0)


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
            self.reads += 1

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
        assert falls == []
        assert silences == []
        assert self.agent.process.poll() is None
        assert "Traceback" not in self.agent.log()


@pytest.fixture(scope="module")
def node(nvml_emulator_library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    emulator = Emulator(folder, script())
    with Agent(folder, config=CONFIG, environment=emulator.environment()) as agent:
        agent.wait_until_ready()
        watcher = Watcher(agent)
        node = Node(agent, emulator, watcher)
        joules = wait_for("energy", lambda: get(agent.metrics(), "energy", 0))
        node.zero_s = time.time() - joules / COUNTERS["energy"][2](0)
        watcher.start()
        node.wait_until_right(10)
        node.threads_at_start = node.threads()
        yield node
        watcher.end()


@pytest.fixture
def calm(node):
    """Give the node without faults, and put it right again after a test that failed."""
    node.is_right = False
    yield node
    if not node.is_right:
        node.emulator.clear()
        node.wait_until_right(40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A row of the matrix.

    `begin` switches it on; GPUs that are not among `gpus` stay right in everything. Of `gpus`, `absent` has no series
    and all else is right, in `state`. Each of `reasons` is counted at least once more. `is_up` is the sampler's
    success, `visible` the GPUs that are counted, `also` what else is wrong in a page, by the page before. It shows
    within `shown_s`, and ends within `back_s` beyond what all others have. `restarts` where the library is started anew
    to be rid of it, and `is_remembered` where a return code stops calls until the GPU is found anew.
    """

    begin: Callable[[Emulator], object]
    gpus: tuple[int, ...] = (1,)
    state: str = "ok"
    absent: frozenset[str] | set[str] = frozenset()
    reasons: tuple[str, ...] = ()
    is_up: bool = True
    visible: int = GPUS
    restarts: bool = False
    is_remembered: bool = False
    back_s: float = 0.0
    shown_s: float = SHOWN_S
    also: Callable[[Mapping[str, float], Mapping[str, float]], list[str]] = lambda before, metrics: []


def all_of(*steps: Callable[[Emulator], object]) -> Callable[[Emulator], object]:
    return lambda emulator: [step(emulator) for step in steps]


def fail(code: int, call: str) -> Callable[[Emulator], object]:
    return lambda emulator: emulator.fail(code, gpu=1, call=call)


def override(**values: float) -> Callable[[Emulator], object]:
    return lambda emulator: [emulator.override(name, value, gpu=1) for name, value in values.items()]


EVERY_GPU = tuple(range(GPUS))
GPM_NAMES = set(GPM)

FAULTS: dict[str, Fault] = {
    "calls that are not offered": Fault(
        begin=all_of(
            fail(NOT_SUPPORTED, "nvmlDeviceGetPowerUsage"),
            fail(FUNCTION_NOT_FOUND, "nvmlDeviceGetUtilizationRates"),
            fail(NOT_SUPPORTED, "field:82"),
            fail(NOT_SUPPORTED, "nvmlGpmSampleGet"),
        ),
        absent={"power", "utilization", "memory_utilization", "memory_temperature", *GPM_NAMES},
        is_remembered=True,
    ),
    "calls without permission": Fault(
        begin=all_of(
            fail(NO_PERMISSION, "nvmlDeviceGetTotalEnergyConsumption"), fail(NO_PERMISSION, "nvmlDeviceGetMemoryInfo")
        ),
        absent={"energy", "memory_used", "memory_total"},
        reasons=("no_permission",),
        is_remembered=True,
    ),
    "calls with unknown errors": Fault(
        begin=all_of(
            fail(UNKNOWN, "nvmlDeviceGetPowerUsage"),
            fail(UNKNOWN, "nvmlDeviceGetClockInfo"),
            fail(UNKNOWN, "field:138"),
            fail(UNKNOWN, "gpm:2"),
            fail(TIMEOUT, "nvmlDeviceGetTotalEnergyConsumption"),
        ),
        absent={"power", "sm_clock", "memory_clock", "nvlink_sent", "sm_active", "energy"},
        reasons=("unknown", "timeout"),
    ),
    "GPU lost": Fault(
        begin=lambda emulator: emulator.fail(GPU_IS_LOST, gpu=1),
        state="lost",
        absent=CORE,
        reasons=("gpu_is_lost",),
        visible=GPUS - 1,
        restarts=True,
    ),
    "reset required": Fault(
        begin=lambda emulator: emulator.fail(RESET_REQUIRED, gpu=1),
        state="reset_required",
        absent=CORE,
        reasons=("reset_required",),
    ),
    "every call with an unknown error": Fault(
        begin=lambda emulator: emulator.fail(UNKNOWN, gpu=1),
        state="lost",
        absent=CORE,
        reasons=("unknown",),
        visible=GPUS - 1,
        restarts=True,
    ),
    "every call times out": Fault(
        begin=lambda emulator: emulator.fail(TIMEOUT, gpu=1),
        state="hung",
        absent=CORE,
        reasons=("timeout",),
        restarts=True,
    ),
    "GPU hangs": Fault(
        begin=lambda emulator: emulator.hang(60, gpu=1),
        state="hung",
        absent=CORE,
        reasons=("hung",),
        restarts=True,
    ),
    "all GPUs hang": Fault(
        begin=lambda emulator: emulator.hang(60),
        gpus=EVERY_GPU,
        state="hung",
        absent=CORE,
        reasons=("hung",),
        restarts=True,
    ),
    "a call slower than the deadline": Fault(
        begin=lambda emulator: emulator.latency(1.5, gpu=1, call="nvmlDeviceGetPowerUsage"),
        state="hung",
        absent=CORE,
        reasons=("hung",),
        restarts=True,
    ),
    "slow calls that burn the processor": Fault(
        begin=lambda emulator: emulator.latency(0.005, mode="burn", call="nvmlDeviceGetTotalEnergyConsumption"),
        gpus=(),
    ),
    "slow calls that wait": Fault(
        begin=lambda emulator: emulator.latency(0.05, mode="wait", call="nvmlDeviceGetPowerUsage"), gpus=()
    ),
    "count of GPUs hangs": Fault(
        begin=lambda emulator: emulator.hang_system(60, call="nvmlDeviceGetCount"), gpus=(), reasons=("hung",)
    ),
    "fast reading of power hangs": Fault(
        begin=lambda emulator: emulator.hang(60, gpu=1, call="field:186"), gpus=(), reasons=("hung",)
    ),
    "GPU vanishes": Fault(
        begin=lambda emulator: emulator.vanish(1), state="lost", absent=CORE, visible=GPUS - 1, restarts=True
    ),
    "counters that wrap": Fault(
        # Of a counter that ran for a second and more, 2 ** 18 mJ (262 J) and 2 ** 20 KiB are less.
        begin=lambda emulator: [emulator.wrap(name, bits, gpu=1) for name, bits in WRAPS.items()],
        absent={"energy", "nvlink_sent", "pcie_received"},
        reasons=("counter_fell",),
    ),
    "counters that fall": Fault(
        begin=lambda emulator: [emulator.shift(name, -(10.0**15), gpu=1) for name in WRAPS],
        absent={"energy", "nvlink_sent", "pcie_received"},
        reasons=("counter_fell",),
    ),
    "counters that leap": Fault(
        begin=lambda emulator: [emulator.shift(name, 10.0**15, gpu=1) for name in WRAPS],
        absent={"energy", "nvlink_sent", "pcie_received"},
        reasons=("implausible",),
    ),
    "sentinels of 32 and 64 bits": Fault(
        begin=override(
            power_milliwatts=2**32 - 1,
            temperature_celsius=2**31 - 1,
            memory_temperature_celsius=2**32 - 1,
            sm_clock_megahertz=2**32 - 1,
            utilization_gpu_percent=2**32 - 1,
            energy_millijoules=2**64 - 1,
            memory_used_bytes=2**64 - 1,
            pcie_transmit_bytes=2**64 - 1,
            power_limit_milliwatts=2**32 - 1,
        ),
        absent={
            "power",
            "temperature",
            "memory_temperature",
            "sm_clock",
            "utilization",
            "energy",
            "memory_used",
            "memory_total",
            "pcie_sent",
            "power_limit",
        },
        reasons=("implausible",),
    ),
    "values that cannot be": Fault(
        begin=override(
            utilization_gpu_percent=101,
            power_milliwatts=2_200_000,
            memory_used_bytes=90 * GIB,
            gpm_sm_active_percent=900,
        ),
        absent={"utilization", "power", "memory_used", "memory_total", "sm_active"},
        reasons=("implausible",),
    ),
    "nothing but zeros from GPM": Fault(
        begin=override(
            gpm_sm_active_percent=0, gpm_sm_occupancy_percent=0, gpm_any_tensor_percent=0, gpm_dram_bandwidth_percent=0
        ),
        absent=GPM_NAMES,
        reasons=("implausible",),
    ),
}
WRAPS = {"energy_millijoules": 18, "nvlink_transmit_kibibytes": 20, "pcie_receive_bytes": 28}

MIG = [MigInstance(n, "3g.40gb", f"MIG-00000001-0000-0000-0000-00000000000{n}") for n in (1, 2)]


def mig_problems(_before: Mapping[str, float], metrics: Mapping[str, float]) -> list[str]:
    """Return what is wrong with the two instances of GPU 1, and with what a sum over the node counts."""
    found = []
    for n in (1, 2):
        for name, right in (("memory_used_bytes", 5 * n * GIB), ("sm_active_ratio", 0.70 + n / 100)):
            values = [v for s, v in metrics.items() if s.startswith(f"warpwatch_gpu_{name}{{") and f'_ID="{n}"' in s]
            found += [] if values == [pytest.approx(right)] else [f"{name} of instance {n} is {values}, not {right}"]
    for name, count in (("mig_info", 2), ("power_watts", GPUS), ("memory_total_bytes", GPUS + 1)):
        there = sum(series.startswith(f"warpwatch_gpu_{name}{{") for series in metrics)
        found += [] if there == count else [f"{there} series of {name}, not {count}"]
    return found


def xids(count: int) -> Callable[[Mapping[str, float], Mapping[str, float]], list[str]]:
    """Return what finds anything but so many more XIDs 79 of GPU 1 alone."""

    def problems(before: Mapping[str, float], metrics: Mapping[str, float]) -> list[str]:
        found = []
        for gpu in EVERY_GPU:
            name = re.compile(rf'warpwatch_gpu_xid_errors_total{{gpu="{gpu}",.*xid="79"')
            more = sum(v - before.get(series, 0) for series, v in metrics.items() if name.match(series))
            right = count if gpu == 1 else 0
            found += [] if more == right else [f"GPU {gpu}: {more} XIDs, not {right}"]
        return found

    return problems


FAULTS |= {
    "GPU divided by MIG": Fault(
        begin=lambda emulator: emulator.mig(1, MIG),
        absent={"utilization", "memory_utilization", "memory_used", "memory_total", *GPM},
        also=mig_problems,
        # The instances go with the first tick in which the card tells its own utilisation again.
        back_s=4.0,
    ),
    "one XID": Fault(begin=lambda emulator: emulator.xid(1, 79), gpus=(), also=xids(1)),
    "a thousand XIDs at once": Fault(
        begin=lambda emulator: emulator.xid(1, 79, count=1000), gpus=(), also=xids(1000), shown_s=20.0
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(calm, name):
    meet(calm, FAULTS[name])


def meet(node: Node, fault: Fault) -> None:
    """Switch a fault on, check what shows, switch it off, and check that all is right again."""
    before = node.agent.metrics()
    others = tuple(gpu for gpu in EVERY_GPU if gpu not in fault.gpus)

    def problems(metrics: Mapping[str, float]) -> list[str]:
        found = node.wrong(metrics, others)
        for gpu in fault.gpus:
            found += [f"{item} of GPU {gpu} is there" for item in fault.absent if get(metrics, item, gpu) is not None]
            state = [
                word
                for word in ("ok", "lost", "hung", "reset_required")
                for series, value in metrics.items()
                if value == 1 and re.match(rf'warpwatch_gpu_state{{gpu="{gpu}",.*state="{word}"', series)
            ]
            found += [] if state == [fault.state] else [f"GPU {gpu} is {state}, not {fault.state}"]
            if fault.state == "ok":
                found += node.wrong(metrics, [gpu], but=fault.absent)
        found += [f"{r} is not counted" for r in fault.reasons if errors(metrics, r) <= errors(before, r)]
        if metrics.get('warpwatch_sampler_success{sampler="nvml"}') != float(fault.is_up):
            found.append("the sampler's success")
        if metrics.get("warpwatch_gpus_expected") != GPUS:
            found.append("GPUs expected")
        if fault.state in ("ok", "lost") and metrics.get("warpwatch_gpus_visible") != fault.visible:
            found.append(f"{metrics.get('warpwatch_gpus_visible')} GPUs visible")

        return found + fault.also(before, metrics)

    fault.begin(node.emulator)
    node.expect(problems, fault.shown_s)
    # It stays so: nothing old comes back, and the others go on.
    node.ticks(1, others[0] if others else None)
    node.expect(problems, 2.5)
    if fault.is_remembered:
        # Found anew, the GPU is asked again: lose it once.
        node.emulator.clear()
        node.emulator.fail(GPU_IS_LOST, gpu=1)
        node.expect(lambda metrics: [] if get(metrics, "state", 1) == 0 else ["GPU 1 is not lost"])
    node.emulator.clear()
    node.wait_until_right(PERIOD_S + fault.back_s + (RESTART_S if fault.restarts or fault.is_remembered else 0))
    node.is_calm()


def test_a_driver_without_the_newest_process_list_is_asked_for_the_one_before(calm):
    calm.emulator.log_calls()
    without = fail(FUNCTION_NOT_FOUND, "nvmlDeviceGetComputeRunningProcesses_v3")

    def problems(_before: Mapping[str, float], _metrics: Mapping[str, float]) -> list[str]:
        old = calm.emulator.calls().of("nvmlDeviceGetComputeRunningProcesses_v2", gpu=1)
        return [] if len([call for call in old if call.code == 0]) >= 2 else [f"{len(old)} calls of version 2"]

    meet(calm, Fault(begin=without, also=problems, is_remembered=True))


def reload(node: Node) -> None:
    """Load the driver anew; its counters are 0 now."""
    node.watcher.may_fall = OF_THE_DRIVER
    node.emulator.reload_driver()
    node.zero_s = time.time()


def is_reloaded(node: Node, seconds: float) -> None:
    """Wait for right values after a reload; no counter may fall from then on."""
    node.wait_until_right(seconds)
    node.ticks(1, None)
    node.watcher.may_fall = None
    node.is_calm()


def test_a_reloaded_driver_starts_its_counters_again_and_no_other_falls(calm):
    before = calm.agent.metrics()
    reload(calm)
    is_reloaded(calm, PERIOD_S + RESTART_S)
    assert get(calm.agent.metrics(), "energy", 0) < get(before, "energy", 0)


def test_errors_of_memory_and_links_are_counted_until_the_driver_is_loaded_anew(calm):
    more = {"ecc_uncorrected": 2, "ecc_aggregate": 9, "remapped": 2, "crc_errors": 5, "remap_pending": 1}
    for name in ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"):
        calm.emulator.shift(name, 2, gpu=1)
    calm.emulator.shift("remapped_rows_uncorrectable", 1, gpu=1)
    calm.emulator.shift("nvlink_crc_errors", 5, gpu=1)
    calm.emulator.override("row_remap_pending", 1, gpu=1)
    calm.emulator.override("recovery_action", 1, gpu=1)
    more["recovery_action"] = 1
    calm.expect(
        lambda metrics: (
            calm.wrong(metrics, (0, 2))
            + calm.wrong(metrics, (1,), but=more)
            + [f"{n}: {get(metrics, n, 1)}" for n, right in more.items() if get(metrics, n, 1) != right]
        )
    )
    calm.is_calm()
    calm.emulator.clear()
    reload(calm)
    is_reloaded(calm, PERIOD_S + RESTART_S)


def test_a_driver_that_cannot_be_started_leaves_nothing_but_the_page(calm):
    def problems(metrics: Mapping[str, float], absent: Iterable[str]) -> list[str]:
        found = [f"{n} of GPU {gpu}" for gpu in EVERY_GPU for n in absent if get(metrics, n, gpu) is not None]
        found += [f"GPU {gpu} is ok" for gpu in EVERY_GPU if get(metrics, "state", gpu) == 1]
        if metrics.get('warpwatch_sampler_success{sampler="nvml"}') != 0:
            found.append("the sampler has success")
        if metrics.get("warpwatch_gpus_expected") != GPUS:
            found.append("GPUs expected")
        return found

    calm.emulator.hang_system(60, call="nvmlInit")
    reload(calm)
    calm.expect(lambda metrics: problems(metrics, CORE))
    calm.ticks(2, None)
    # The start that hung returns, and now there is no driver.
    calm.emulator.fail_system(DRIVER_NOT_LOADED, call="nvmlInit")
    calm.emulator.clear("hang")
    calm.expect(lambda metrics: problems(metrics, CORE | SLOW), SHOWN_S + SLOW_STALE_S)
    calm.emulator.clear()
    # A source that is away is looked for every 30 s at most.
    is_reloaded(calm, 30 + PERIOD_S)


def test_after_all_of_them_nothing_is_left_behind(calm):
    # One thread for each GPU and one for each other task: as many as at the start, and no file more.
    wait_for("threads to end", lambda: calm.threads() <= calm.threads_at_start, 10)
    assert calm.watcher.slowest_s < 2.0
    calm.is_calm()
