"""What commands have in common: progress on a terminal, the log on standard error, and being told to stop."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agent.clock import stopwatch


class Pace:
    """Holds a replay back to a multiple of real time."""

    def __init__(self, speed: float, stop: threading.Event) -> None:
        """Begin now, at `speed` times real time; `stop` ends a wait."""
        self._speed = speed
        self._stop = stop
        self._started = stopwatch()

    def wait_until(self, t: float) -> bool:
        """Wait until second `t` of the trace is due; return False where the process was told to stop."""
        return not self._stop.wait(max(0.0, self._started + t / self._speed - stopwatch()))


@contextmanager
def progress(name: str, unit: str, total: float | None = None) -> Iterator[Callable[[float], object]]:
    """Show a progress bar on standard error while the block runs, where that is a terminal."""
    from tqdm import tqdm

    layout = (
        "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}" if total else "{desc}: {n:.0f} {unit} [{elapsed}]"
    )
    with tqdm(
        total=total, desc=name, unit=unit, bar_format=layout, leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        yield bar.update


def fractions_to(advance: Callable[[float], object]) -> Callable[[float], None]:
    """Return what takes the fraction done so far and moves a bar of 100 % by the difference."""
    done = 0.0

    def report(fraction: float) -> None:
        nonlocal done
        advance(100.0 * (fraction - done))
        done = fraction

    return report


def stop_event() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; a second SIGINT interrupts as usual."""
    stop = threading.Event()

    def handle(number: int, _frame: object) -> None:
        stop.set()
        # A second Ctrl-C is impatience; a second SIGTERM is what some supervisors send in any case.
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_IGN)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stop


def set_log_level(level: str) -> None:
    """Log what is at least as severe as `level` from now on."""
    logging.getLogger().setLevel(level.upper())


def log_to_stderr(level: str) -> None:
    """Log to standard error what is at least as severe as `level`."""
    logging.basicConfig(stream=sys.stderr, format="warpwatch: %(levelname)s: %(message)s")
    set_log_level(level)
    # The libraries' own messages are for their authors; ours carry what an administrator needs.
    for library in ("apscheduler", "waitress"):
        logging.getLogger(library).setLevel(logging.ERROR)
