"""The file in which what took long to learn outlives the agent: `learned.json` in the state directory.

It is written whole or not at all, once a minute at most and at a clean stop, and only where something changed. A file
that cannot be used is set aside under another name and said; what one learner cannot use costs that learner alone; and
without a directory to write in the agent runs on. Times in the file are wall clock seconds by the clock of `saved`. In
the same boot they are counted from there by the monotonic clock: it does not matter that a clock was set meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from agent.clock import Clock, Instant
from agent.samplers import SamplerStatus
from agent.threads import NamedThread
from classifier.detectors import Learner

_log = logging.getLogger("warpwatch")

#: Seconds between two writings.
SAVE_PERIOD_S: Final = 60.0
_NAME: Final = "learned.json"
_SCHEMA: Final = 1
#: Size of the file, and of what one learner may put in.
_FILE_BYTES: Final = 4 << 20
_SECTION_BYTES: Final = 1 << 20
#: At the end, how long the lock may take, and the disk after everything else has stopped.
_END_S: Final = 0.3
#: Files set aside that are kept.
_KEPT: Final = 3
#: Between boots clocks may be off by so much before a file is from the future.
_FUTURE_S: Final = 3600.0
#: What foreign data may raise where a learner trusts it too far.
_BAD_SECTION: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


class _UnusableError(Exception):
    """The file cannot be used; `reason` is a short fixed word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Found(NamedTuple):
    sections: Mapping[str, Mapping[str, object]]  # no more is known of them than that they are JSON
    saved_wall_s: float
    elapsed_s: float | None  # since it was written; None where that was in another boot


class LearnedState:
    """Keeps what the learners of a pipeline know; without learners it touches no file."""

    name: Final = "learned_state"

    def __init__(
        self,
        folder: Path,
        learners: Sequence[Learner],
        clock: Clock,
        lock: threading.Lock,
        *,
        proc_root: Path = Path("/proc"),
    ) -> None:
        """Keep in `folder`; `lock` is held while the learners are asked, and never while a file is written."""
        self._clock = clock
        self._lock = lock
        self._kept_s = clock.now().monotonic_s
        self._folder = folder
        self._path = folder / _NAME
        self._learners = {learner.learner: learner for learner in learners}
        self._boot_id = _boot_id(proc_root)
        self._writing = threading.Lock()
        self._written: Mapping[str, str] | None = None
        self._said: set[str] = set()
        self._is_failing = False
        #: What went wrong since the start, by reason.
        self.errors: Counter[str] = Counter()

    def keep_for(self, learners: Sequence[Learner]) -> None:
        """Keep what these know from now on; the caller holds the lock."""
        if self._learners:
            self._learners = {learner.learner: learner for learner in learners}

    def statuses(self) -> tuple[SamplerStatus, ...]:
        """Return how it fares, beside the samplers; nothing while nothing ever went wrong."""
        if not self.errors:
            return ()
        return (SamplerStatus(name=self.name, success=not self._is_failing, errors=dict(self.errors)),)

    def keep(self) -> None:
        """Write what has changed, a period after the start or after the last time."""
        now = self._clock.now()
        if now.monotonic_s - self._kept_s < SAVE_PERIOD_S / 2:
            return
        self._kept_s = now.monotonic_s
        with self._lock:
            sections = self._sections(now)
        self._write(now, sections)

    @contextlib.contextmanager
    def kept_beside(self) -> Iterator[None]:
        """Write what has changed while the block runs, so that neither holds up the other: a disk may hang as well."""
        thread = NamedThread("learned state", self._keep_at_the_end)
        thread.start()
        yield
        thread.join(_END_S)

    def _keep_at_the_end(self) -> None:
        if not self._lock.acquire(timeout=_END_S):
            return
        try:
            now = self._clock.now()
            sections = self._sections(now)
        finally:
            self._lock.release()
        self._write(now, sections)

    def restore(self) -> None:
        """Hand each learner its section, before the first sample; says what could not be used."""
        if not self._learners:
            return
        now = self._clock.now()
        try:
            found = self._read(now)
        except FileNotFoundError:
            if not self._folder.is_dir():
                self._fail("no_directory", f"the state directory {self._folder} does not exist")
            return
        except _UnusableError as error:
            self._complain(
                error.reason, f"what was learned before is lost: {self._path} {error}; {self._set_aside(now)}"
            )
            return
        except OSError as error:
            why = f"{self._path} cannot be read: {error.strerror}"
            self._complain("unreadable", f"what was learned before is lost: {why}; {self._set_aside(now)}")
            return
        # `now` as the clock of the file would show it.
        then = now if found.elapsed_s is None else Instant(now.monotonic_s, found.saved_wall_s + found.elapsed_s)
        for name, learner in self._learners.items():
            section = found.sections.get(name)
            if section is None:
                continue
            try:
                learner.restore(section, then)
            except _BAD_SECTION as error:
                self._complain("bad_section", f"what {name} learned before is left out: {error} ({self._path})")

    def _sections(self, now: Instant) -> Mapping[str, str]:
        """Return what every learner knows now, as JSON; one whose section is no JSON or too large is left out."""
        found = {}
        for name, learner in self._learners.items():
            try:
                text = json.dumps(learner.learned(now), allow_nan=False, separators=(",", ":"))
                if len(text) > _SECTION_BYTES:
                    raise ValueError(f"it takes {len(text)} bytes")
            except _BAD_SECTION as error:
                if name not in self._said:
                    self._said.add(name)
                    self._complain("bad_section", f"what {name} has learned cannot be kept: {error}")
                continue
            found[name] = text
        return found

    def _write(self, now: Instant, sections: Mapping[str, str]) -> None:
        """Write the file where something changed since the last time; says once where that is not possible."""
        with self._writing:
            if self._learners and sections != self._written and self._put(now, sections):
                self._written = dict(sections)

    def _put(self, now: Instant, sections: Mapping[str, str]) -> bool:
        saved = {"monotonic_s": now.monotonic_s, "wall_s": now.wall_s, "boot_id": self._boot_id}
        body = ",".join(f"{json.dumps(name)}:{text}" for name, text in sections.items())
        head = json.dumps({"warpwatch": "learned", "schema": _SCHEMA, "saved": saved})
        data = f'{head[:-1]},"learners":{{{body}}}}}\n'.encode()
        if len(data) > _FILE_BYTES:
            self._fail("too_large", f"it takes {len(data)} bytes, more than {_FILE_BYTES}")
            return False
        try:
            _replace(self._folder, data)
        except FileNotFoundError:
            self._fail("no_directory", f"the state directory {self._folder} does not exist")
            return False
        except OSError as error:
            self._fail("unwritable", f"{self._path} cannot be written: {error.strerror}")
            return False
        if self._is_failing:
            _log.info("what is learned is kept again, in %s", self._path)
        self._is_failing = False
        return True

    def _read(self, now: Instant) -> _Found:
        file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise _UnusableError("not_a_file", "is no regular file")
            if found.st_mode & stat.S_IWOTH:
                raise _UnusableError("writable_by_others", "may be written by every user")
            if found.st_size > _FILE_BYTES:
                raise _UnusableError("too_large", f"is larger than {_FILE_BYTES} bytes")
            with os.fdopen(os.dup(file), "rb") as reader:
                data = reader.read(_FILE_BYTES + 1)
        finally:
            os.close(file)
        try:
            state = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise _UnusableError("corrupt", f"is no JSON ({str(error)[:80]})") from error
        return self._checked(state, now)

    def _checked(self, state: object, now: Instant) -> _Found:
        if not isinstance(state, dict) or state.get("warpwatch") != "learned":
            raise _UnusableError("corrupt", "is no state of warpwatch")
        if state.get("schema") != _SCHEMA:
            schema = str(state.get("schema"))[:20]
            raise _UnusableError("other_version", f"has schema {schema}, and this version reads {_SCHEMA}")
        saved, sections = state.get("saved"), state.get("learners")
        if not isinstance(saved, dict) or not isinstance(sections, dict):
            raise _UnusableError("corrupt", "holds no sections")
        saved_s, wall_s = _time(saved, "monotonic_s"), _time(saved, "wall_s")
        elapsed_s = None
        if self._boot_id is not None and saved.get("boot_id") == self._boot_id:
            elapsed_s = now.monotonic_s - saved_s
        if elapsed_s < -1.0 if elapsed_s is not None else wall_s > now.wall_s + _FUTURE_S:
            raise _UnusableError("future", "was written later than now; was the clock set back?")
        return _Found(sections, wall_s, elapsed_s)

    def _set_aside(self, now: Instant) -> str:
        """Keep the file under another name, so that nothing overwrites it, and say where."""
        stamp = datetime.fromtimestamp(max(now.wall_s, 0.0), UTC).strftime("%Y%m%dT%H%M%SZ")
        aside = self._path.with_name(f"{_NAME}.corrupt-{stamp}")
        try:
            self._path.rename(aside)
        except OSError as error:
            return f"it cannot be set aside: {error.strerror}"
        with contextlib.suppress(OSError):
            for old in sorted(self._folder.glob(f"{_NAME}.corrupt-*"))[:-_KEPT]:
                old.unlink(missing_ok=True)
        return f"it is set aside as {aside.name}"

    def _fail(self, reason: str, why: str) -> None:
        """Say that nothing can be kept, once for as long as it lasts."""
        if not self._is_failing:
            self._complain(reason, f"what is learned will not survive a restart: {why} ([agent] state_directory)")
        self._is_failing = True

    def _complain(self, reason: str, what: str) -> None:
        self.errors[reason] += 1
        _log.warning("%s", what)


def _replace(folder: Path, data: bytes) -> None:
    """Write the file beside the old one, make sure that it is on the disk, and put it in its place."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        new = f"{_NAME}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, _NAME, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    finally:
        os.close(directory)


def _time(saved: Mapping[str, object], name: str) -> float:
    value = saved.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise _UnusableError("corrupt", f"holds no time {name}")
    return float(value)


def _boot_id(proc_root: Path) -> str | None:
    try:
        return (proc_root / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
