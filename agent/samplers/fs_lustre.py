"""Bytes of Lustre from the client's llite statistics: what programs read and wrote, from its cache too.

One directory for each mount, named <file system>-<hex digits>, in /proc/fs/lustre/llite up to Lustre 2.11 and in
/sys/kernel/debug/lustre/llite since, which only root or CAP_DAC_READ_SEARCH can enter. Its `stats` holds lines such as
`read_bytes 17 samples [bytes] 4096 1048576 8912896`: the count, the smallest, the largest, the sum, maybe the sum of
squares. A counter that never counted has no line. Nothing says which directory is which mount: all those of one file
system belong together.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Final

from agent.samplers.fs_totals import Readings, Values
from agent.samplers.kernel_file import counter
from agent.samplers.mounts import read_file

#: Mounts whose statistics are read.
MAX_INSTANCES: Final = 64
_MAX_STATS_BYTES: Final = 1 << 16
_INSTANCE: Final = re.compile(r"(.+)-[0-9a-f]{8,16}")
_LINE: Final = re.compile(r"^(read|write)_bytes\s+\d+ samples \[bytes\] \d+ \d+ (\d+)(?: \d+)?\s*$", re.MULTILINE)


def fsname(source: str) -> str | None:
    """Return the file system that the source of a mount names: `10.0.0.1@o2ib:/scratch/project` is scratch."""
    _, found, path = source.rpartition(":/")
    return path.split("/")[0] or None if found else None


def parse_llite_stats(text: str) -> tuple[int, int] | None:
    """Return the bytes read and written, or None where this is no such file."""
    if "snapshot_time" not in text:
        return None
    sums = {"read": 0, "write": 0}
    for line in text.split("\n"):
        if not line.startswith(("read_bytes", "write_bytes")):
            continue
        match = _LINE.match(line)
        total = counter(match[2]) if match else None
        if match is None or total is None:
            return None
        sums[match[1]] = total
    return sums["read"], sums["write"]


class LustreReader:
    """Reads the statistics of all Lustre mounts of this host."""

    def __init__(self, proc_root: Path, sys_root: Path, errors: Counter[str]) -> None:
        self._folders = proc_root / "fs" / "lustre" / "llite", sys_root / "kernel" / "debug" / "lustre" / "llite"
        self._errors = errors
        self._is_closed = False

    def read(self) -> dict[str, Readings] | None:
        """Return the bytes read and written by file system and directory; None where no directory can be listed.

        A directory that is there and cannot be read has None.
        """
        was_closed, instances = self._is_closed, self._instances()
        found: dict[str, dict[Hashable, Values | None]] = {}
        for name, path in (instances or {}).items():
            match = _INSTANCE.fullmatch(name)
            if match is not None:
                found.setdefault(match[1], {})[name] = self._read(path)
        if self._is_closed and not was_closed:  # counted when it begins: it lasts, and says the same every time
            self._errors["no_permission"] += 1
        return {**found} if instances is not None else None

    def _instances(self) -> dict[str, Path] | None:
        found: dict[str, Path] = {}
        denied = False
        for folder in self._folders:
            try:
                names = sorted(os.listdir(folder))[:MAX_INSTANCES]  # noqa: PTH208 - names are all that is wanted
            except PermissionError:
                denied = True
                continue
            except OSError:
                continue
            for name in names:
                found.setdefault(name, folder / name / "stats")
        self._is_closed = denied and not found
        return None if self._is_closed else found

    def _read(self, path: Path) -> tuple[int, int] | None:
        try:
            data, _ = read_file(path, _MAX_STATS_BYTES)
        except PermissionError:
            self._is_closed = True
            return None
        except OSError:
            return None
        total = parse_llite_stats(data.decode("utf-8", "replace"))
        if total is None:
            self._errors["malformed"] += 1
        return total
