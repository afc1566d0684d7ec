"""Threads whose names show in /proc/PID/task/*/comm, and so in top, ps and perf: Python names them for itself alone."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Final

_PR_SET_NAME: Final = 15
#: Of glibc's malloc.h.
_M_ARENA_MAX: Final = -8
#: The kernel keeps 15 bytes of a name.
_MOST_BYTES: Final = 15


def name_this_thread(name: str) -> None:
    """Have the kernel know the calling thread by the first 15 bytes of `name`; nothing happens where it refuses."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:_MOST_BYTES], 0, 0, 0)


class NamedThread(threading.Thread):
    """A daemon thread that the kernel knows by its name too: one that hangs in a driver call keeps no process alive."""

    def __init__(self, name: str, target: Callable[..., object], args: tuple[Any, ...] = ()) -> None:
        super().__init__(name=name, target=target, args=args, daemon=True)

    def run(self) -> None:
        """Name the thread and do its work."""
        name_this_thread(self.name)
        super().run()


def share_memory() -> None:
    """Have all threads that start from now on take memory from one arena; nothing happens without glibc.

    Each would get an arena of its own from glibc, whose freed memory no other uses: 2 MB more for the agent, whose
    threads hardly ever run at the same time.
    """
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is not None:
        change(_M_ARENA_MAX, 1)
