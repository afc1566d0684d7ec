"""What the agent tells the service manager that started it: sd_notify(3), over the datagram socket that it names.

Without a manager (NOTIFY_SOCKET is not set) nothing is told and nothing fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final

from agent.clock import awake_seconds

#: A manager that waits for signs of life gets this many in its time.
SIGNS_PER_WATCHDOG: Final = 3.0


class Supervisor:
    """The service manager, as the agent sees it."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID; values that make no sense count as absent."""
        address = environment.get("NOTIFY_SOCKET", "")
        # An address in the abstract namespace begins with "@" here and with a zero byte for the kernel.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(environment) if self._address else None

    @property
    def sign_period_s(self) -> float | None:
        """Seconds between two signs of life; None where nobody waits for one."""
        return None if self.watchdog_s is None else self.watchdog_s / SIGNS_PER_WATCHDOG

    def ready(self, status: str) -> None:
        """Say that the agent serves, with one line for `systemctl status`."""
        self._tell(f"READY=1\nSTATUS={_line(status)}")

    def reloading(self) -> None:
        """Say that the configuration is read again; `ready` ends that."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={int(awake_seconds() * 1e6)}")

    def alive(self) -> None:
        """Give a sign of life; a manager that gets none in its time ends the process and starts another."""
        self._tell("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        """Say that the agent is about to end, and why."""
        self._tell(f"STOPPING=1\nSTATUS={_line(status)}")

    def _tell(self, message: str) -> None:
        if not self._address:
            return
        # A manager that does not listen is no reason to stop sampling.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(0)
            channel.connect(self._address)
            channel.send(message.encode())


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    pid = environment.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdecimal() or int(microseconds) == 0 or pid != str(os.getpid()):
        return None
    return int(microseconds) / 1e6


def _line(text: str) -> str:
    return " ".join(text.split())
