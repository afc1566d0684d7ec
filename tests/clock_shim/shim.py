"""Builds the clock shims: one that shifts clocks by offsets, and one that lets time go faster."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def build_shim(folder: Path, name: str = "clock_shim") -> Path:
    """Return the library of this name, built in `folder`; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the clock shim (Debian: apt-get install gcc libc6-dev)")
    library = folder / f"{name}.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, "-o", str(library), str(FOLDER / f"{name}.c"), "-ldl"]
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


class FastClock:
    """The clocks of processes that are started with `variables`: they go `speed` times as fast from now on."""

    def __init__(self, folder: Path, speed: float) -> None:
        self.speed = speed
        self._base_s = time.time()
        self.variables: dict[str, str] = {}
        if speed != 1:
            library = build_shim(folder, "fast_clock")
            self.variables = {
                "LD_PRELOAD": str(library),
                "WARPWATCH_CLOCK_SPEED": repr(speed),
                "WARPWATCH_CLOCK_BASE": repr(self._base_s),
            }

    def time(self) -> float:
        """Return what those processes take for the time."""
        return self._base_s + (time.time() - self._base_s) * self.speed
