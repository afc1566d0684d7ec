"""What can go wrong with a node, source by source: each fault is switched on at once, and all are put right together.

`Chaos` holds the node's files and clocks; a fault is a function of it and of a random generator.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.clock_shim.shim import ShiftedClocks
from tests.end_to_end.fault_node import GPUS
from tests.end_to_end.fault_table import MIG, WRAPS
from tests.end_to_end.programs import Agent
from tests.nvml_emulator.emulator import GPU_IS_LOST, NO_PERMISSION, RESET_REQUIRED, TIMEOUT, UNKNOWN, Emulator

HOUR_NS = 3_600_000_000_000


@dataclass(slots=True)
class Chaos:
    """The node: its emulator, its trees of files, its clocks and its clients."""

    agent: Agent
    emulator: Emulator
    root: Path  # of /proc, /sys, kmsg and jobs.d
    disk: Path  # what the agent writes to
    clocks: ShiftedClocks | None
    good: dict[Path, bytes]
    #: Files that are not as they should be, and since when.
    hurt: dict[Path, float] = field(default_factory=dict)
    clients: list[socket.socket] = field(default_factory=list)
    #: By how much the agent's clocks are ahead of the machine's.
    realtime_ns: int = 0
    boottime_ns: int = 0
    #: Whether the driver was loaded anew in this episode, and whether a clock moved.
    reloaded: bool = False
    stepped: bool = False

    def damage(self, path: Path, how: str, chance: random.Random) -> None:
        """Replace a file of the tree, or take it away; once, for one that was open and is replaced stays as it was."""
        if path in self.hurt:
            return
        self.hurt.setdefault(path, time.monotonic())
        # A file that changes does so in place: the agent holds some of them open.
        if how not in {"garbage", "empty"}:
            _remove(path)
        if how == "garbage":
            # No digits: a counter is exported as the source gives it, so another number would be no fault of the agent.
            path.write_bytes(bytes(chance.choice(b"\0\xff\xfe {}:\n\t-xX%") for _ in range(chance.randrange(400))))
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "folder":
            path.mkdir()
        elif how == "loop":
            path.symlink_to(path.name)

    def shift(self, realtime_ns: int, boottime_ns: int) -> None:
        """Move the agent's clocks; CLOCK_BOOTTIME never goes back."""
        self.stepped = True
        self.realtime_ns, self.boottime_ns = realtime_ns, self.boottime_ns + boottime_ns
        if self.clocks is not None:
            self.clocks.shift(self.realtime_ns, self.boottime_ns)

    def mend(self) -> None:
        """Put everything right at once."""
        self.emulator.clear()
        for path in self.hurt:
            if path.is_symlink() or not path.is_file():
                _remove(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.good[path])
        self.hurt.clear()
        for name in ("filler", "state", "jobs"):
            _remove(self.disk / name) if name == "filler" else (self.disk / name).mkdir(exist_ok=True)
        for client in self.clients:
            client.close()
        self.clients.clear()
        if self.realtime_ns:
            self.shift(0, 0)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


Fault = Callable[[Chaos, random.Random], object]


def _gpu(chance: random.Random) -> int | None:
    return chance.choice([*range(GPUS), None])


def _reload(chaos: Chaos, _chance: random.Random) -> None:
    chaos.reloaded = True
    chaos.emulator.reload_driver()


def _counters(chaos: Chaos, chance: random.Random) -> None:
    name, bits = chance.choice(list(WRAPS.items()))
    gpu = chance.randrange(GPUS)
    how = chance.choice(["wrap", "fall", "leap"])
    if how == "wrap":
        chaos.emulator.wrap(name, bits, gpu=gpu)
    else:
        chaos.emulator.shift(name, 1e15 if how == "leap" else -1e15, gpu=gpu)


def _garbage(chaos: Chaos, chance: random.Random) -> None:
    names = ("power_milliwatts", "temperature_celsius", "utilization_gpu_percent", "memory_used_bytes")
    for name in chance.sample(names, 2):
        chaos.emulator.override(name, chance.choice([2**32 - 1, 2**64 - 1, 10**9]), gpu=_gpu(chance))


def _hurt_files(part: str) -> Fault:
    def fault(chaos: Chaos, chance: random.Random) -> None:
        files = [path for path in chaos.good if path.is_relative_to(chaos.root / part)]
        for path in (chaos.root / "proc" / name for name in ("net/dev", "diskstats") if part == "proc"):
            chaos.damage(path, chance.choice(["garbage", "empty"]), chance)
        for path in chance.sample(files, min(len(files), chance.choice([1, 5, 40]))):
            if path.parent.is_dir():
                chaos.damage(path, chance.choice(["garbage", "empty", "gone", "folder", "loop"]), chance)

    return fault


def _processes_vanish(chaos: Chaos, chance: random.Random) -> None:
    folders = [path for path in (chaos.root / "proc").iterdir() if path.name.isdigit()]
    for folder in chance.sample(folders, len(folders) // 2):
        chaos.hurt |= {path: time.monotonic() for path in chaos.good if path.is_relative_to(folder)}
        shutil.rmtree(folder)


def _kernel_log(chaos: Chaos, chance: random.Random) -> None:
    with (chaos.root / "kmsg").open("ab") as log:
        log.write(chance.randbytes(500) + b"\n4,1,1,-;NVRM: Xid (PCI:zzzz): 99999999999999, \xff\n" * 50)


def _job_files(chaos: Chaos, chance: random.Random) -> None:
    folder = chaos.disk / "jobs"
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "garbage.json").write_bytes(chance.randbytes(200))
    (folder / "link.json").symlink_to("/etc/passwd")
    (folder / "device.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.json")
    (folder / "large.json").write_bytes(b"{" * 100_000)
    (folder / "folder.json").mkdir()


def _full_disk(chaos: Chaos, _chance: random.Random) -> None:
    with (chaos.disk / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(b"\0" * 4096):
                pass
        except OSError:
            pass


def _no_state(chaos: Chaos, _chance: random.Random) -> None:
    _remove(chaos.disk / "state")


def _slow_clients(chaos: Chaos, chance: random.Random) -> None:
    """Connections that ask and never read, that trickle, and that say nothing."""
    for _ in range(60):
        client = socket.create_connection(("127.0.0.1", chaos.agent.port), timeout=5)
        client.settimeout(0)
        words = [b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /metr", b"", b"\0\xff\r\n\r\n"]
        client.send(chance.choice(words))
        chaos.clients.append(client)


def _clock_step(chaos: Chaos, chance: random.Random) -> None:
    chaos.shift(chance.choice([-HOUR_NS, HOUR_NS, 24 * HOUR_NS, -5_000_000_000]), 0)


def _suspend(chaos: Chaos, chance: random.Random) -> None:
    seconds = chance.choice([20, 600, 3600]) * 1_000_000_000
    chaos.shift(chaos.realtime_ns + seconds, seconds)


#: By source. `make test` takes one of each source in turn, so that few episodes meet all of them.
FAULTS: dict[str, dict[str, Fault]] = {
    "driver": {
        "GPU lost": lambda chaos, chance: chaos.emulator.fail(GPU_IS_LOST, gpu=_gpu(chance)),
        "GPU hangs": lambda chaos, chance: chaos.emulator.hang(60, gpu=_gpu(chance)),
        "reset required": lambda chaos, chance: chaos.emulator.fail(RESET_REQUIRED, gpu=_gpu(chance)),
        "GPU vanishes": lambda chaos, chance: chaos.emulator.vanish(chance.randrange(GPUS)),
        "timeouts": lambda chaos, chance: chaos.emulator.fail(TIMEOUT, gpu=_gpu(chance)),
        "unknown errors": lambda chaos, chance: chaos.emulator.fail(UNKNOWN, gpu=_gpu(chance)),
        "count hangs": lambda chaos, _: chaos.emulator.hang_system(60, call="nvmlDeviceGetCount"),
        "driver reloaded": _reload,
        "slow driver": lambda chaos, chance: chaos.emulator.latency(
            0.05, gpu=_gpu(chance), call="nvmlDeviceGetPowerUsage"
        ),
        "divided": lambda chaos, chance: chaos.emulator.mig(1, MIG),
    },
    "readings": {
        "counters": _counters,
        "garbage": _garbage,
        "no permission": lambda chaos, chance: chaos.emulator.fail(
            NO_PERMISSION, gpu=1, call="nvmlDeviceGetFieldValues"
        ),
        "fast power hangs": lambda chaos, chance: chaos.emulator.hang(60, gpu=chance.randrange(GPUS), call="field:186"),
        # A program's own fault (13): one of the card would hold its finding for a day.
        "flood of XIDs": lambda chaos, chance: chaos.emulator.xid(chance.randrange(GPUS), 13, count=1000),
    },
    "host": {
        "proc": _hurt_files("proc"),
        "sys": _hurt_files("sys"),
        "processes vanish": _processes_vanish,
        "kernel log": _kernel_log,
        "job files": _job_files,
    },
    "machine": {
        "disk full": _full_disk,
        "no state directory": _no_state,
        "slow clients": _slow_clients,
        "clock step": _clock_step,
        "suspend": _suspend,
    },
}


def mount_small_disk(folder: Path) -> bool:
    """Mount a file system of half a megabyte, if that is allowed here; without it nothing is full."""
    command = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=0755", "chaos", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
