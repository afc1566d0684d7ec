"""Bytes that GPUs moved to and from storage by themselves, from /proc/driver/nvidia-fs/stats.

Lines `Reads : n=.. ok=.. err=.. readMiB=.. io_state_err=..` and `Writes : .. writeMiB=..` (nvfs-stat.c of NVIDIA's
nvidia-fs). The module counts bytes only where its parameter rw_stats_enabled is 1; otherwise the lines hold errors
alone, and the bytes are None. Whole MiB. What goes to a local NVMe device shows in /proc/diskstats as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from agent.clock import Instant
from agent.records import GpuDirectStorageSample
from agent.samplers import SourceUnavailableError
from agent.samplers.kernel_file import KernelFile, counter

_MIB: Final = 1 << 20
_BYTES: Final = re.compile(r"^(Reads|Writes)\s*: .*?\b(?:read|write)MiB=(\d+)\b", re.MULTILINE)


def parse_nvidia_fs(text: str) -> tuple[int | None, int | None]:
    """Return the bytes read and written; None where they are not counted."""
    found = {match[1]: counter(match[2]) for match in _BYTES.finditer(text)}
    read, written = found.get("Reads"), found.get("Writes")
    return None if read is None else read * _MIB, None if written is None else written * _MIB


class GpuDirectStorageReader:
    """Reads the statistics of the module nvidia-fs; absent where it is not loaded."""

    def __init__(self, proc_root: Path) -> None:
        self._file = KernelFile(proc_root / "driver" / "nvidia-fs" / "stats")

    def read(self, now: Instant) -> tuple[GpuDirectStorageSample, ...]:
        """Return one record, or none where the module is not loaded or may not be read."""
        try:
            text = self._file.read()
        except SourceUnavailableError:
            return ()
        read, written = parse_nvidia_fs(text)
        return (
            GpuDirectStorageSample(
                monotonic_s=now.monotonic_s, wall_s=now.wall_s, read_bytes_total=read, written_bytes_total=written
            ),
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()
