"""Bytes of NFS from /proc/<pid>/mountstats: what crossed to the server and back, with direct I/O, without cache hits.

One block for each mount (fs/nfs/super.c: nfs_show_stats, net/sunrpc/stats.c), `device SOURCE mounted on MOUNTPOINT with
fstype nfs4 statvers=1.1`, and in it, for all mounts of the file system together:

- `bytes:` eight counters; the fifth is read from the server, the sixth written to it.
- `xprt:` and the transport, tcp or rdma; once for each connection (nconnect).
- `per-op statistics`, one line each: operation, requests, transmissions, major timeouts and more. A request is counted
  when it ends: on a hard mount, those that wait for a dead server are counted when it is back.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, NamedTuple

from agent.samplers.kernel_file import counter

_HEAD: Final = re.compile(rb"^device (\S*) mounted on (\S*) with fstype nfs4? statvers=1\.\d+$", re.MULTILINE)
_NEXT: Final = re.compile(rb"^(?:no )?device ", re.MULTILINE)
_BYTES: Final = re.compile(rb"^\s*bytes:\s+(?:\d+ ){4}(\d+) (\d+) ", re.MULTILINE)
_TRANSPORT: Final = re.compile(rb"^\s*xprt:\s+(\w+)", re.MULTILINE)
_OPERATION: Final = re.compile(rb"^\s+\w+: \d+ \d+ (\d+) ", re.MULTILINE)
_OPERATIONS: Final = b"per-op statistics\n"


class NfsCounters(NamedTuple):
    """Counters of one NFS file system since it was mounted."""

    read_bytes: int
    written_bytes: int
    is_rdma: bool | None
    major_timeouts: int | None


def parse_mountstats(
    data: bytes, wanted: Collection[tuple[bytes, bytes]]
) -> tuple[dict[tuple[bytes, bytes], NfsCounters], int]:
    """Return the counters of the `wanted` mounts, each (source, mountpoint) with its escapes, and how many are garbled.

    A block that is cut has a `bytes:` line or none; a mount without it is left out.
    """
    found: dict[tuple[bytes, bytes], NfsCounters] = {}
    malformed = 0
    for head in _HEAD.finditer(data):
        key = head[1], head[2]
        if key not in wanted or key in found:
            continue
        end = _NEXT.search(data, head.end())
        block = data[head.end() : end.start() if end else len(data)]
        counters = _parse_block(block)
        if counters is None:
            malformed += 1
        else:
            found[key] = counters
    return found, malformed


def _parse_block(block: bytes) -> NfsCounters | None:
    line = _BYTES.search(block)
    if line is None:
        return None
    read, written = counter(line[1].decode("ascii")), counter(line[2].decode("ascii"))
    if read is None or written is None:
        return None
    transports = _TRANSPORT.findall(block)
    _, has_operations, operations = block.partition(_OPERATIONS)
    return NfsCounters(
        read,
        written,
        b"rdma" in transports if transports else None,
        sum(map(int, _OPERATION.findall(operations))) if has_operations else None,
    )
