"""Clock steps and a suspend for real: a schedule in a process whose clocks a preloaded library shifts.

A time namespace would be of no use here: it shifts CLOCK_MONOTONIC and CLOCK_BOOTTIME, never the wall clock, and only
before its first process starts.
"""

import os
import queue
import re
import struct
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.clock_shim.shim import ShiftedClocks, build_shim

REPOSITORY = Path(__file__).parents[2]
SHIM = REPOSITORY / "tests" / "clock_shim"
PERIOD_S = 0.5
HOUR_NS = 3_600_000_000_000


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


class Machine:
    """A process that ticks, with clocks that can be shifted, and the times of its ticks."""

    def __init__(self, library, folder):
        clocks = ShiftedClocks(library, folder)
        self.shift = clocks.shift
        environment = os.environ | clocks.variables | {"PYTHONPATH": str(REPOSITORY)}
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SHIM / "ticker.py"), str(PERIOD_S)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.ticks = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.ticks.put(float(line))

    def next_ticks(self, count, deadline_s=20.0):
        """Return the times of the next `count` ticks."""
        end_s = time.monotonic() + deadline_s
        found = []
        while len(found) < count:
            try:
                found.append(self.ticks.get(timeout=max(0.0, end_s - time.monotonic())))
            except queue.Empty:
                pytest.fail(f"{len(found)} of {count} ticks within {deadline_s} s; log:\n{self.log.read_text()}")
        return found

    def close(self):
        """End the process as the agent ends, and see that it does."""
        self.process.stdin.close()
        try:
            assert self.process.wait(10) == 0, self.log.read_text()
        finally:
            self.process.kill()
            self._reader.join()
            self.process.stdout.close()


def clock_is_shifted(library, folder):
    """Return whether the shim reaches this Python: a statically linked one does not see it."""
    offsets = folder / "probe"
    offsets.write_bytes(struct.pack("=qq", HOUR_NS, 0))
    environment = os.environ | {"LD_PRELOAD": str(library), "WARPWATCH_CLOCK_SHIM": str(offsets)}
    command = [sys.executable, "-c", "import time; print(time.time())"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return abs(float(shown) - time.time() - 3600) < 60


#: Shift of CLOCK_REALTIME, of CLOCK_BOOTTIME, and what the log says of it.
JUMPS = {
    "an hour forward": (HOUR_NS, 0, r"stepped by \+3[56]\d\d\.\d s"),
    "an hour back": (-HOUR_NS, 0, r"stepped by -3[56]\d\d\.\d s"),
    # A machine without a battery starts in 1970: 40 * 365 * 86400 s = 1261440000 s.
    "forty years forward": (40 * 365 * 24 * HOUR_NS, 0, r"stepped by \+1261\d+\.\d s"),
    "a suspend of an hour": (HOUR_NS, HOUR_NS, r"nothing ran for 36\d\d\.\d s"),
}


@pytest.fixture(scope="module")
def recordings(shim, tmp_path_factory):
    """Return by jump: the times of 4 ticks before it and 8 after it, and the log; all run at the same time."""
    if not clock_is_shifted(shim, tmp_path_factory.mktemp("probe")):
        pytest.skip("the clock shim does not reach this Python")
    machines = {jump: Machine(shim, tmp_path_factory.mktemp("machine")) for jump in JUMPS}
    try:
        before = {jump: machine.next_ticks(4) for jump, machine in machines.items()}
        for jump, machine in machines.items():
            machine.shift(*JUMPS[jump][:2])
        after = {jump: machine.next_ticks(8) for jump, machine in machines.items()}
    finally:
        for machine in machines.values():
            machine.close()
    return {jump: (before[jump] + after[jump], machines[jump].log.read_text()) for jump in JUMPS}


@pytest.mark.parametrize("jump", JUMPS)
def test_jump_of_the_clock_loses_at_most_two_ticks(recordings, jump):
    """The longest pause around the jump is at most three periods, and the ticks go on at their period."""
    times, log = recordings[jump]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    # Two lost ticks make a pause of three periods; half a period is for a busy machine.
    assert max(pauses) < 3.5 * PERIOD_S, pauses
    # 11 periods; a start anew may bring one early tick or lose two, and no burst makes up for them.
    assert 9.5 * PERIOD_S < times[-1] - times[0] < 13.5 * PERIOD_S, pauses
    assert re.search(JUMPS[jump][2], log), log
