"""Bytes of the kernel's Ceph client from debugfs: what crossed to the object stores and back.

/sys/kernel/debug/ceph/<cluster>.client<number>/metrics/size (Linux 5.16; before, since 5.11, the file metrics itself)
has the lines `read` and `write` with count, mean, smallest, largest and the sum of bytes (fs/ceph/debugfs.c). debugfs
is open to root and CAP_DAC_READ_SEARCH alone. A client that has no metrics is one of block devices (rbd), whose bytes
/proc/diskstats has.

Nothing joins a client to its mount but the cluster, and that only where the source of the mount names it
(`user@cluster.name=/path`). So all mounts of a cluster are one file system here.
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

#: Clients whose metrics are read.
MAX_CLIENTS: Final = 64
_MAX_METRICS_BYTES: Final = 1 << 16
_CLIENT: Final = re.compile(r"([0-9a-f-]{36})\.client\d+")
_CLUSTER: Final = re.compile(r"[^@/]*@([0-9a-f-]{36})\.[^=]*=/")
_TABLE: Final = re.compile(r"^item\s.*total_sz\(bytes\)\s*$", re.MULTILINE)
_LINE: Final = re.compile(r"^(read|write)\s+(?:\d+\s+){4}(\d+)\s*$", re.MULTILINE)


def cluster_of(source: str) -> str | None:
    """Return the cluster's identity where the source of a mount names it: `user@cluster.name=/path`."""
    match = _CLUSTER.match(source)
    return match[1] if match else None


def parse_ceph_metrics(text: str) -> tuple[int, int] | None:
    """Return the bytes read and written, or None where the table of sizes is missing or garbled."""
    head = _TABLE.search(text)
    if head is None:
        return None
    table, _, _ = text[head.end() :].lstrip("\n").partition("\n\n")
    sums = {match[1]: counter(match[2]) for match in _LINE.finditer(table)}
    read, written = sums.get("read"), sums.get("write")
    return None if read is None or written is None else (read, written)


class CephReader:
    """Reads the metrics of all Ceph clients of this host."""

    def __init__(self, sys_root: Path, errors: Counter[str]) -> None:
        self._folder = sys_root / "kernel" / "debug" / "ceph"
        self._errors = errors
        self._is_denied = False

    def read(self) -> dict[str, Readings] | None:
        """Return the bytes read and written by cluster and client, None for a client that makes no sense.

        None where the clients cannot be listed.
        """
        try:
            names = sorted(os.listdir(self._folder))[:MAX_CLIENTS]  # noqa: PTH208 - names are all that is wanted
        except OSError as error:
            if isinstance(error, PermissionError) and not self._is_denied:
                self._errors["no_permission"] += 1
            self._is_denied = isinstance(error, PermissionError)
            return None
        self._is_denied = False
        found: dict[str, dict[Hashable, Values | None]] = {}
        for name in names:
            match = _CLIENT.fullmatch(name)
            data = self._read(self._folder / name) if match else None
            if match is None or data is None:
                continue
            total = parse_ceph_metrics(data)
            if total is None:
                self._errors["malformed"] += 1
            found.setdefault(match[1], {})[name] = total
        return {**found}

    @staticmethod
    def _read(client: Path) -> str | None:
        for path in (client / "metrics" / "size", client / "metrics"):
            try:
                data, _ = read_file(path, _MAX_METRICS_BYTES)
            except OSError:
                continue
            return data.decode("utf-8", "replace")
        return None
