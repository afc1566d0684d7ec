"""GPUs that Slurm gave to a job, used or not: the device lists of cgroup version 1, which any user may read.

/sys/fs/cgroup/devices/slurm[_<node>]/uid_<uid>/job_<id>/devices.list holds `c 195:<minor> rwm` for each GPU where Slurm
constrains devices (ConstrainDevices=yes). Version 2 has a program in the kernel in its place, which only root may look
at; there the job file says it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.clock import Instant

_READ_AGAIN_S: Final = 15.0
_FOLDERS: Final = 1024
_JOBS: Final = 256
_LIST_BYTES: Final = 16_384
_JOB: Final = re.compile(r"job_(\d{1,10})")
#: Major number 195 is the driver's; minors from 254 on are modeset and nvidiactl, not GPUs.
_GPU: Final = re.compile(r"c 195:(\d{1,3}) [rwm]+")
_FIRST_OTHER_MINOR: Final = 254


class SlurmDevices:
    """Reads the device lists of all jobs every 15 s."""

    def __init__(self, sys_root: Path = Path("/sys")) -> None:
        self._root = sys_root / "fs" / "cgroup" / "devices"
        self._jobs: dict[str, set[str]] = {}
        self._again_s: float | None = None
        self._is_cut = False
        #: `too_many_slurm_jobs`, once when it begins
        self.errors: Counter[str] = Counter()

    def jobs(self, now: Instant) -> dict[str, set[str]]:
        """Return the numbers of the jobs by GPU, as `nvidia` and its minor number."""
        if self._again_s is None or now.monotonic_s >= self._again_s:
            self._again_s = now.monotonic_s + _READ_AGAIN_S
            self._jobs, is_cut = self._read()
            self.errors["too_many_slurm_jobs"] += is_cut and not self._is_cut
            self._is_cut = is_cut
        return self._jobs

    def _read(self) -> tuple[dict[str, set[str]], bool]:
        """Return the jobs by GPU, and whether there are more than are read."""
        found: dict[str, set[str]] = {}
        count = 0
        for root in _folders(self._root, "slurm"):
            if root.name != "slurm" and not root.name.startswith("slurm_"):
                continue
            for user in _folders(root, "uid_"):
                for folder in _folders(user, "job_"):
                    job = _JOB.fullmatch(folder.name)
                    if job is None:
                        continue
                    count += 1
                    if count > _JOBS:
                        return found, True
                    for minor in _minors(folder / "devices.list"):
                        found.setdefault(f"nvidia{minor}", set()).add(job[1])
        return found, False


def _folders(folder: Path, prefix: str) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for _, entry in zip(range(_FOLDERS), entries, strict=False)]
    except OSError:  # not there: no Slurm, or no cgroups of version 1
        return
    for name in sorted(names):
        if name.startswith(prefix):
            yield folder / name


def _minors(path: Path) -> list[int]:
    """Return the GPUs of a device list; none where all devices are allowed, which says nothing."""
    try:
        with path.open("rb", buffering=0) as file:
            text = (file.read(_LIST_BYTES) or b"").decode("ascii", "replace")
    except OSError:
        return []
    return [
        int(match[1])
        for line in text.split("\n")
        if (match := _GPU.fullmatch(line)) and int(match[1]) < _FIRST_OTHER_MINOR
    ]
