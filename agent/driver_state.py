"""What the agent says of its hold on the NVIDIA driver, for `warpwatch driver` to read.

The words lie in a file in memory that only the agent's process has open (memfd_create(2)). Whoever may signal the
agent finds it under /proc/PID/fd: no folder has to be writable, no port is needed, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

_NAME: Final = "warpwatch-driver"
_LINK: Final = f"/memfd:{_NAME} "


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    """How the agent and the driver stand."""

    state: str  # held, releasing, released; none where the agent reads no driver
    waits_for: tuple[str, ...] = ()  # while releasing: what still uses the driver, each a short sentence
    limit_s: float = 0.0  # for how long a release holds at most
    requests: int = 0  # signals that asked for a release, so that an answer is known to be to the newest


class DriverStateFile:
    """The agent's side; for any thread, but not for a signal handler."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._said: DriverState | None = None

    def say(self, state: DriverState) -> None:
        """Write this in the place of what was said before, whole or not at all; does nothing where it is the same.

        Where the kernel refuses such a file the agent goes without: `warpwatch driver` then says that it cannot see.
        """
        with self._lock, contextlib.suppress(OSError):
            if state == self._said:
                return
            self._said = state
            new = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.write(new, json.dumps(asdict(state)).encode())
            if self._descriptor is None:
                self._descriptor = new
            else:
                os.dup2(new, self._descriptor, inheritable=False)
                os.close(new)


def read_driver_state(pid: int) -> DriverState | None:
    """Return what the agent of this process id says; None where that cannot be read, for now or at all."""
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            # One that was closed meanwhile, or one that is being written, says nothing.
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                if str(link.readlink()).startswith(_LINK):
                    said = json.loads(link.read_text(encoding="utf-8"))
                    found.append(DriverState(**{**said, "waits_for": tuple(said["waits_for"])}))
    return max(found, key=lambda state: state.requests, default=None)
