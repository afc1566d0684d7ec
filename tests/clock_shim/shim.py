"""Builds the clock shim and sets its offsets."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("clock_shim.c")


def build_shim(folder: Path) -> Path:
    """Return the library, built in `folder`; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the clock shim (Debian: apt-get install gcc libc6-dev)")
    library = folder / "clock_shim.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, "-o", str(library), str(SOURCE), "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library


class ShiftedClocks:
    """The clocks of processes that are started with `variables`."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._offsets = folder / "offsets"
        self.variables = {"LD_PRELOAD": str(library), "WARPWATCH_CLOCK_SHIM": str(self._offsets)}
        self.shift(0, 0)

    def shift(self, realtime_ns: int, boottime_ns: int) -> None:
        """Have CLOCK_REALTIME and CLOCK_BOOTTIME be so far ahead of the machine's, from now on."""
        descriptor = os.open(self._offsets, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(descriptor, struct.pack("=qq", realtime_ns, boottime_ns), 0)
        os.close(descriptor)
