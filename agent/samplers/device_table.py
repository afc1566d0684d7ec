"""A file of /proc with one line for each device, and the choice of the devices that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

from agent.clock import Instant
from agent.samplers.kernel_file import KernelFile

#: Seconds after which the choice is made again although no name changed: a device may have been connected or bound.
_CHOICE_AGE_S: Final = 60.0


class Named(Protocol):
    """A line about one device."""

    @property
    def name(self) -> str:
        """The kernel's name of the device."""
        ...


Line = TypeVar("Line", bound=Named)


class DeviceTable(Generic[Line]):
    """Reads such a file and keeps the lines of the devices that count.

    `parse` returns the lines and how many made no sense; `choose` says by name which devices count, from what /sys
    shows of them. That is asked once a minute and when the set of names changes, since it opens files.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[str], tuple[tuple[Line, ...], int]],
        choose: Callable[[tuple[str, ...]], frozenset[str]],
    ) -> None:
        self._file = KernelFile(path)
        self._parse = parse
        self._choose = choose
        self._names: tuple[str, ...] = ()
        self._chosen: frozenset[str] = frozenset()
        self._chosen_s: float | None = None
        #: Count of failed readings: `malformed` lines.
        self.errors: Counter[str] = Counter()

    def exists(self) -> bool:
        """Return whether the file is there; raises SourceUnavailableError where it is there but cannot be read."""
        return self._file.exists()

    def read(self, now: Instant) -> list[Line]:
        """Return the lines of the devices that count; raises SourceUnavailableError where nothing can be read."""
        lines, malformed = self._parse(self._file.read())
        if malformed:
            self.errors["malformed"] += malformed
        names = tuple(line.name for line in lines)
        if names != self._names or self._chosen_s is None or now.monotonic_s - self._chosen_s >= _CHOICE_AGE_S:
            self._names, self._chosen, self._chosen_s = names, self._choose(names), now.monotonic_s
        return [line for line in lines if line.name in self._chosen]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
