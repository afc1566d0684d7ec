"""One node in chaos: a real agent on the emulator and a tree of files, faults from all sources, and what must hold.

While faults last: the page answers, no counter falls but those of a driver that was loaded anew, no GPU and no source
of the host has values older than its periods allow, the agent lives and no exception escapes. When they are over: every
value of every GPU is right again, every series of the host is back, and no finding of a fault is left.
"""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.faults import FAULTS, Chaos, mount_small_disk
from tests.clock_shim.shim import ShiftedClocks, build_shim
from tests.end_to_end.fault_node import CONFIG, COUNTERS, GPUS, OF_THE_DRIVER, Node, Watcher, get, script
from tests.end_to_end.programs import Agent, wait_for
from tests.machines import unpack_machine
from tests.nvml_emulator.emulator import GPU_IS_LOST, Emulator

#: How long the faults of an episode last: long enough for what is not read any more to be too old.
LEAST_S, MOST_S = 9.0, 12.0
#: A driver that is away is looked for every 30 s at most, and a counter that begins with a leap is believed again after
#: 60 s.
RECOVERY_S = 100.0
#: A page that takes longer is lost on a scraper with the usual timeout of 10 s.
PAGE_S = 5.0
#: Three periods of what is read every second, and what a page and a busy machine add.
OLDEST_S = 7.0
#: After a step the clocks of the page and of the test are two.
SETTLE_S = 6.0

#: Series of the host that have to be back after a fault; and by table of /proc those that are read every second.
HOST = ("warpwatch_network_", "warpwatch_disk_", "warpwatch_infiniband_", "warpwatch_pressure_")
EVERY_SECOND = {
    "net/dev": "warpwatch_network_receive_bytes_total{",
    "diskstats": "warpwatch_disk_read_bytes_total{",
}
#: Sums over what is there now: they fall with what goes, as with a process that ends.
MAY_FALL = r"warpwatch_(process|gpu_process)\w*"
CORE = ("warpwatch_gpu_power_watts{", "warpwatch_gpu_utilization_ratio{", "warpwatch_gpu_memory_used_bytes{")


class ChaosWatcher(Watcher):
    """Looks in each page for what is stale, too."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.chaos: Chaos | None = None
        self.quiet_until_s = 0.0
        self.stale: list[str] = []

    def look(self, metrics: Mapping[str, float]) -> None:
        chaos = self.chaos
        if chaos is None or time.monotonic() < self.quiet_until_s:
            return
        now_s = time.time() + chaos.realtime_ns / 1e9
        for series, stamp in metrics.items():
            if series.startswith("warpwatch_gpu_sample_timestamp_seconds{") and now_s - stamp > OLDEST_S:
                labels = series.partition("{")[2]
                self.stale += [
                    f"{name}{labels} is {now_s - stamp:.1f} s old" for name in CORE if name + labels in metrics
                ]
        for table, prefix in EVERY_SECOND.items():
            age_s = time.monotonic() - chaos.hurt.get(chaos.root / "proc" / table, time.monotonic())
            left = next((series for series in metrics if series.startswith(prefix)), None)
            if age_s > OLDEST_S and left is not None:
                self.stale.append(f"{left} is there, its table was damaged {age_s:.1f} s ago")


class ChaosNode:
    """Plays episodes; `problems` of each are raised with what was switched on."""

    def __init__(self, node: Node, watcher: ChaosWatcher, chaos: Chaos, seed: int) -> None:
        self.episodes = 0
        self.met: set[str] = set()
        self.longest_recovery: tuple[float, str] = (0.0, "")
        self._node = node
        self._watcher = watcher
        self._chaos = chaos
        self._chance = random.Random(seed)
        self._decks: dict[str, list[str]] = {}
        self._families = self._host_series()

    def episode(self) -> None:
        """Switch on a fault of each source, wait, put all right, and check that all is right."""
        chosen = {source: self._draw(source) for source in FAULTS}
        names = ", ".join(chosen.values())
        self.met.update(chosen.values())
        chaos = self._chaos
        chaos.reloaded = chaos.stepped = False
        # A reload sets counters back. The first reading of a GPU that is found anew cannot be judged: where it is a
        # leap, the counter falls once it is right.
        is_anew = "driver reloaded" in chosen.values() or "counters" in chosen.values()
        falling = [MAY_FALL] + ([OF_THE_DRIVER.pattern] if is_anew else [])
        self._watcher.may_fall = re.compile("|".join(falling))
        self._watcher.quiet_until_s = time.monotonic() + (
            SETTLE_S if chosen["machine"] in {"clock step", "suspend"} else 0
        )
        for source, name in chosen.items():
            FAULTS[source][name](chaos, self._chance)
        if chaos.reloaded:
            self._node.zero_s = time.time()
        self._last(self._chance.uniform(LEAST_S, MOST_S))
        self._watcher.quiet_until_s = time.monotonic() + (SETTLE_S if chaos.stepped else 0)
        chaos.mend()
        if chosen["readings"] == "no permission":  # is remembered until the GPU is found anew
            self._find_anew()
        began = time.monotonic()
        try:
            self._node.wait_until_right(RECOVERY_S)
            self._node.expect(self._left_over, RECOVERY_S)
            self._node.ticks(1, None)  # the watcher has seen what is right, too
            self.calm()
        except BaseException as error:
            error.add_note(f"episode {self.episodes + 1}: {names}")
            raise
        self.longest_recovery = max(self.longest_recovery, (time.monotonic() - began, names))
        self.episodes += 1

    @property
    def slowest_page_s(self) -> float:
        """The longest wait for a page and for the sign of life together."""
        return self._watcher.slowest_s

    @property
    def pages(self) -> int:
        """How many pages were seen."""
        return self._watcher.reads

    def _find_anew(self) -> None:
        self._chaos.emulator.fail(GPU_IS_LOST, gpu=1)
        self._node.expect(lambda metrics: [] if get(metrics, "state", 1) != 1 else ["GPU 1 is ok"], RECOVERY_S)
        self._chaos.emulator.clear()

    def calm(self) -> None:
        """Assert what holds at all times."""
        stale, self._watcher.stale = self._watcher.stale, []
        assert not stale, stale[:5]
        self._node.is_calm()
        assert self._watcher.slowest_s < PAGE_S, f"a page took {self._watcher.slowest_s:.1f} s"

    def findings_are_right(self) -> None:
        """Lose one GPU for real at the end: that one is found, no other, and it is over when it is back."""
        self._watcher.may_fall = re.compile(MAY_FALL)
        self._chaos.emulator.fail(GPU_IS_LOST, gpu=1)
        self._node.expect(lambda metrics: [] if lost_gpus(metrics) == {1} else [f"lost: {lost_gpus(metrics)}"], 30.0)
        self._chaos.emulator.clear()
        self._node.wait_until_right(RECOVERY_S)
        self._node.expect(self._left_over, RECOVERY_S)
        self.calm()

    def _draw(self, source: str) -> str:
        deck = self._decks.setdefault(source, [])
        if not deck:
            deck += FAULTS[source]
            self._chance.shuffle(deck)
        return deck.pop()

    def _last(self, seconds: float) -> None:
        """Let the faults last, counted in pages that were seen, so that a busy machine does not skip them."""
        until, reads = time.monotonic() + seconds, self._watcher.reads + 3
        wait_for("pages", lambda: time.monotonic() > until and self._watcher.reads >= reads, seconds + 30)

    def _left_over(self, metrics: Mapping[str, float]) -> list[str]:
        found = [f"GPU {gpu} counts as lost" for gpu in sorted(lost_gpus(metrics))]
        missing = self._families - _of_host(metrics)
        return found + [f"{series} is not back" for series in sorted(missing)[:5]]

    def _host_series(self) -> set[str]:
        series: set[str] = set()

        def has_settled() -> bool:
            before = len(series)
            series.update(_of_host(self._node.agent.metrics()))
            return bool(series) and len(series) == before

        wait_for("series of the host", has_settled, 30, every=2.0)
        return series


def _of_host(metrics: Mapping[str, float]) -> set[str]:
    return {series for series in metrics if series.startswith(HOST)}


def lost_gpus(metrics: Mapping[str, float]) -> set[int]:
    """Return the GPUs with an active finding of being lost."""
    name = re.compile(r'warpwatch_gpu_anomaly_severity\{gpu="(\d+)",.*anomaly="gpu_lost"')
    return {int(found[1]) for series, value in metrics.items() if value >= 2 and (found := name.match(series))}


@contextmanager
def chaos_node(folder: Path, seed: int) -> Iterator[ChaosNode]:
    """Start a node in `folder` and yield it once all is right; what it printed is in `agent.log` there."""
    root = unpack_machine("dgx_slurm", folder / "root")
    good = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.is_symlink()}
    (root / "kmsg").touch()
    disk = folder / "disk"
    disk.mkdir()
    is_mounted = mount_small_disk(disk)
    try:
        for name in ("state", "jobs"):
            (disk / name).mkdir()
        text = script()
        for number in range(GPUS):  # the first ranks of the machine's job
            text = text.replace(f"processes={100 + number}:", f"processes={41000 + number}:")
        emulator = Emulator(folder, text)
        clocks = ShiftedClocks(build_shim(folder), folder)
        environment = emulator.environment() | clocks.variables
        with Agent(folder, config=_config(root, disk), environment=environment) as agent:
            agent.wait_until_ready()
            watcher = ChaosWatcher(agent)
            node = Node(agent, emulator, watcher)
            joules = wait_for("energy", lambda: get(agent.metrics(), "energy", 0))
            node.zero_s = time.time() - float(str(joules)) / COUNTERS["energy"][2](0)
            node.wait_until_right(20)
            chaos = Chaos(agent, emulator, root, disk, clocks, good)
            if not is_mounted:
                FAULTS["machine"].pop("disk full", None)
            watcher.chaos = chaos
            found = ChaosNode(node, watcher, chaos, seed)
            watcher.start()
            try:
                yield found
            finally:
                watcher.end()
                chaos.mend()
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)


def _config(root: Path, disk: Path) -> str:
    return f"""{CONFIG}
[agent]
proc_root = "{root / "proc"}"
sys_root = "{root / "sys"}"
kmsg = "{root / "kmsg"}"
state_directory = "{disk / "state"}"
[export]
host = "full"
textfile = "{disk / "warpwatch.prom"}"
textfile_period_s = 1.0
[owners]
jobs_folder = "{disk / "jobs"}"
"""
