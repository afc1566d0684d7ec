"""Run a schedule with one sampler and write the monotonic time of each tick, one a line, until standard input ends.

A program of its own, since the shim has to be loaded before Python starts. The times are CLOCK_MONOTONIC, which the
shim leaves alone.
"""

import logging
import sys
import time

from agent.clock import SystemClock
from agent.records import NetworkSample
from agent.schedule import Schedule


class Ticker:
    """A sampler that always succeeds."""

    name = "ticker"
    errors = {}  # noqa: RUF012 - a constant

    def __init__(self, period_s):
        self.period_s = period_s

    def probe(self):
        return True

    def sample(self, now):
        sys.stdout.write(f"{time.monotonic()}\n")
        sys.stdout.flush()
        return (
            NetworkSample(
                monotonic_s=now.monotonic_s,
                wall_s=now.wall_s,
                device="x",
                receive_bytes_total=0,
                transmit_bytes_total=0,
            ),
        )

    def close(self):
        pass


def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    schedule = Schedule([Ticker(float(sys.argv[1]))], SystemClock(), lambda tick: None)
    schedule.start()
    sys.stdin.read()
    schedule.stop(2.0)


main()
