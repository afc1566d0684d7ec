"""Names of users by their numbers, from /etc/passwd alone where nothing else is asked for.

The system's own look-up may ask a directory server and hang with it, so it is off by default.
"""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import Final

from agent.clock import Instant

_READ_AGAIN_S: Final = 60.0
_FILE_BYTES: Final = 1 << 20
_USERS: Final = 10_000
#: Names found by the system's look-up.
_LOOKED_UP: Final = 1024
_NAME_CHARACTERS: Final = 64


class Users:
    """Knows the names of users."""

    def __init__(self, passwd: Path = Path("/etc/passwd"), *, ask_system: bool = False) -> None:
        self._passwd = passwd
        self._ask_system = ask_system
        self._names: dict[int, str] = {}
        self._looked_up: dict[int, str | None] = {}
        self._modified_ns: int | None = None
        self._again_s: float | None = None

    def refresh(self, now: Instant) -> None:
        """Read the file again where it changed, at most once a minute."""
        if self._again_s is not None and now.monotonic_s < self._again_s:
            return
        self._again_s = now.monotonic_s + _READ_AGAIN_S
        self._looked_up.clear()
        try:
            modified_ns = self._passwd.stat().st_mtime_ns
            if modified_ns != self._modified_ns:
                with self._passwd.open("rb") as file:
                    self._names = parse_passwd(file.read(_FILE_BYTES).decode("utf-8", "replace"))
                self._modified_ns = modified_ns
        except OSError:
            self._names, self._modified_ns = {}, None  # users go by their numbers

    def name(self, uid: int) -> str | None:
        """Return the name of a user, or None where it is not known."""
        name = self._names.get(uid)
        if name is not None or not self._ask_system:
            return name
        if uid not in self._looked_up and len(self._looked_up) < _LOOKED_UP:
            try:
                self._looked_up[uid] = _checked(pwd.getpwuid(uid).pw_name)
            except (KeyError, OverflowError, OSError):
                self._looked_up[uid] = None
        return self._looked_up.get(uid)


def parse_passwd(text: str) -> dict[int, str]:
    """Return names by number, the first line of a number as the system takes it; lines that make no sense are left."""
    found: dict[int, str] = {}
    for line in text.split("\n")[:_USERS]:
        fields = line.split(":")
        if len(fields) < 7 or not (fields[2].isascii() and fields[2].isdecimal()) or len(fields[2]) > 10:
            continue
        name = _checked(fields[0])
        if name is not None:
            found.setdefault(int(fields[2]), name)
    return found


def _checked(name: str) -> str | None:
    return name if 0 < len(name) <= _NAME_CHARACTERS and name.isprintable() else None
