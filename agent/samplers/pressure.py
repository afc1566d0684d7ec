"""Where the host's programs wait, every 5 s: pressure stall times, dirty pages, blocked tasks.

/proc/pressure/{cpu,io,memory} hold the time in which tasks waited (Documentation/accounting/psi.rst; from Linux 4.20,
and only where it is switched on: RHEL asks for `psi=1`). They hold no wait of a task that sleeps for its network.
cgroups have their own; these are the host's.

/proc/stat is the dear one: the kernel adds up every interrupt over every CPU for it, which takes milliseconds where
there are hundreds of CPUs, and the line that is wanted stands behind. It is read every tick where it is cheap, else
every 15 s.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agent.clock import Instant, stopwatch
from agent.records import PressureSample
from agent.samplers import SourceUnavailableError
from agent.samplers.kernel_file import KernelFile, counter

#: A read of /proc/stat that takes longer than this is dear.
_DEAR_S: Final = 0.0003
#: Seconds between two dear reads: a value is exported for three periods, so that none is missed.
_DEAR_PERIOD_S: Final = 15.0
#: Seconds between two attempts to read a file that was not there.
_ABSENT_PERIOD_S: Final = 60.0


def parse_pressure(text: str) -> dict[str, float]:
    """Return the stalled seconds by line of a pressure file: `some`, and `full` where that is offered.

    A line is `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, the total in microseconds; one that is cut gives
    nothing.
    """
    found = {}
    for line in text.splitlines(keepends=True):
        kind, _, rest = line.partition(" ")
        total = counter(rest.rpartition(" total=")[2].removesuffix("\n"))
        if kind in ("some", "full") and total is not None and line.endswith("\n"):
            found[kind] = total / 1e6
    return found


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the bytes by name in /proc/meminfo; a line is `Dirty:     123 kB`, in units of 1024 bytes."""
    return {name: int(number) * 1024 for name, number in re.findall(r"^(\w+): *([0-9]{1,16}) kB\n", text, re.MULTILINE)}


def parse_blocked(text: str) -> int | None:
    """Return procs_blocked of /proc/stat, or None where it is missing or cut."""
    found = re.search(r"^procs_blocked ([0-9]{1,10})\n", text, re.MULTILINE)
    return int(found[1]) if found else None


class _Optional:
    """A file that may be missing: None then, and looked for again every minute."""

    def __init__(self, path: Path, errors: Counter[str]) -> None:
        self._file = KernelFile(path)
        self._errors = errors
        self._failed_s: float | None = None

    def read(self, now_s: float) -> str | None:
        """Return the whole file or None; a file that is there but cannot be read is counted."""
        if self._failed_s is not None and now_s - self._failed_s < _ABSENT_PERIOD_S:
            return None
        try:
            text = self._file.read()
        except SourceUnavailableError as error:
            # Pressure files are there but answer EOPNOTSUPP where the accounting is switched off.
            if error.reason != "absent" and self._failed_s is None:
                self._errors[error.reason] += 1
            self._failed_s = now_s
            return None
        self._failed_s = None
        return text

    def close(self) -> None:
        self._file.close()


class PressureSampler:
    """Samples the host's waiting."""

    name = "pressure"
    period_s = 5.0

    def __init__(self, proc_root: Path = Path("/proc"), *, stopwatch: Callable[[], float] = stopwatch) -> None:
        """Read below `proc_root`; `stopwatch` tells in seconds how long a read took."""
        self._errors: Counter[str] = Counter()
        self._pressure = {
            name: _Optional(proc_root / "pressure" / name, self._errors) for name in ("cpu", "io", "memory")
        }
        self._meminfo = _Optional(proc_root / "meminfo", self._errors)
        self._stat = _Optional(proc_root / "stat", self._errors)
        self._stat_due_s = float("-inf")
        self._stopwatch = stopwatch

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings: `unreadable` files, when that begins; `malformed` ones."""
        return self._errors

    def probe(self) -> bool:
        """Return True: each file may be missing, /proc/meminfo hardly ever is."""
        return True

    def sample(self, now: Instant) -> tuple[PressureSample, ...]:
        """Return one record; raises SourceUnavailableError where no file can be read."""
        stalled = {name: self._stalled(file, now.monotonic_s) for name, file in self._pressure.items()}
        memory = parse_meminfo(self._meminfo.read(now.monotonic_s) or "")
        blocked = self._blocked(now.monotonic_s)
        if not memory and blocked is None and not any(stalled.values()):
            raise SourceUnavailableError("absent", "there is neither a pressure file nor meminfo nor stat")
        return (
            PressureSample(
                monotonic_s=now.monotonic_s,
                wall_s=now.wall_s,
                cpu_some_seconds_total=stalled["cpu"].get("some"),
                io_some_seconds_total=stalled["io"].get("some"),
                io_full_seconds_total=stalled["io"].get("full"),
                memory_some_seconds_total=stalled["memory"].get("some"),
                memory_full_seconds_total=stalled["memory"].get("full"),
                dirty_bytes=memory.get("Dirty"),
                writeback_bytes=memory.get("Writeback"),
                memory_available_bytes=memory.get("MemAvailable"),
                blocked_tasks=blocked,
            ),
        )

    def close(self) -> None:
        """Close the files."""
        for file in (*self._pressure.values(), self._meminfo, self._stat):
            file.close()

    def _stalled(self, file: _Optional, now_s: float) -> dict[str, float]:
        text = file.read(now_s)
        if text is None:
            return {}
        found = parse_pressure(text)
        if "some" not in found:
            self._errors["malformed"] += 1
        return found

    def _blocked(self, now_s: float) -> int | None:
        if now_s < self._stat_due_s:
            return None
        started_s = self._stopwatch()
        text = self._stat.read(now_s)
        is_dear = self._stopwatch() - started_s > _DEAR_S
        # Half a period early counts: the ticks of the schedule jitter.
        self._stat_due_s = now_s + (_DEAR_PERIOD_S - self.period_s / 2 if is_dear else 0.0)
        if text is None:
            return None
        blocked = parse_blocked(text)
        if blocked is None:
            self._errors["malformed"] += 1
        return blocked
