"""When the library is started anew, when it is let go of, and when only a new process helps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from agent.samplers.nvml_config import NvmlConfig

_log = logging.getLogger(__name__)

#: Causes that a new process may end and this one cannot: a library of another version than the driver stays loaded, and
#: a container that lost its devices ("Unknown Error") gets them back when it is started anew.
_ENDED_BY_A_NEW_PROCESS: Final = frozenset({"lib_rm_version_mismatch", "unknown"})


class Restarts:
    """Plans the next start of a library that runs, with growing pauses."""

    def __init__(self, config: NvmlConfig) -> None:
        self._config = config
        self._at_s: float | None = None
        self._pause_s = 0.0
        self._is_certain = False

    def take(self, now_s: float) -> bool:
        """Return whether a start is due, and if so forget it."""
        if self._at_s is None or now_s < self._at_s:
            return False
        self._at_s = None
        return True

    def ask(self, now_s: float, *, is_certain: bool = True) -> None:
        """Ask for a start in the next tick, or after a pause where that was tried just now."""
        self._is_certain = is_certain or (self._is_certain and self._at_s is not None)
        if self._at_s is None:
            self._at_s = now_s + self._pause_s
            self._pause_s = min(max(2 * self._pause_s, self._config.restart_first_s), self._config.restart_most_s)

    def settle(self, now_s: float, *, is_complete: bool) -> None:
        """Ask for a start where GPUs are missing; forget one that was asked for only because they were."""
        if not is_complete:
            # A lost GPU rarely comes back at once: never without a pause.
            self._pause_s = max(self._pause_s, self._config.restart_first_s)
            self.ask(now_s, is_certain=False)
        elif self._at_s is None or not self._is_certain:
            self._at_s = None  # whoever was missing is here: it only took long to attach
            self._pause_s = 0.0


class StartFailures:
    """Counts starts that failed in a row by a cause that only a new process ends."""

    def __init__(self, tries: int) -> None:
        self._tries = tries
        self._count = 0
        self.wants_restart: str | None = None  # the cause, once it was met often enough

    def failed(self, reason: str) -> None:
        """Note a start that failed."""
        if reason not in _ENDED_BY_A_NEW_PROCESS:
            self.succeeded()
            return
        self._count += 1
        if self._count >= self._tries and self.wants_restart is None:
            self.wants_restart = reason
            _log.error("NVML cannot be started (%s, tried %d times): this process has to end", reason, self._count)

    def succeeded(self) -> None:
        """Note a start that worked, or that failed by another cause."""
        self._count = 0
        self.wants_restart = None


class Hold:
    """Whether an operator wants the library closed, and until when; for any thread."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._lock = threading.RLock()  # a handler of one signal may interrupt that of another
        self._until_s: float | None = None

    def begin(self, limit_s: float) -> None:
        """Hold for so long at most, from now on."""
        with self._lock:
            self._until_s = self._seconds() + limit_s

    def end(self) -> None:
        """Hold no longer."""
        with self._lock:
            self._until_s = None

    def left_s(self) -> float:
        """Return the seconds left, 0 where nothing is held."""
        with self._lock:
            if self._until_s is not None and self._seconds() >= self._until_s:
                self._until_s = None
                _log.info("the time to release NVML is over: the GPUs are sampled again")
            return 0.0 if self._until_s is None else self._until_s - self._seconds()
