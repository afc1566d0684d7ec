"""Which known program a process is, by its own files or those of the processes that started it."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

from agent.programs import Program, recognise
from agent.samplers.process_files import ProcessFiles, ProcessStat

#: Ages of what is known at which a process is looked at again: programs give themselves a title after a while.
_LOOK_AGAIN_S: Final = (30.0, 60.0, 300.0)
#: How many parents are asked.
_PARENTS_MAX: Final = 4


class ProgramWords(NamedTuple):
    """All that is kept about a command line."""

    family: str | None = None
    declared_class: str | None = None


class _Look(NamedTuple):
    words: ProgramWords
    looked_s: float
    looks: int


class ProgramReader:
    """Tells the program of processes; looks at each a few times and then every 5 minutes."""

    def __init__(self, files: ProcessFiles, errors: Counter[str]) -> None:
        self._files = files
        self._errors = errors
        self._looks: dict[tuple[int, int], _Look] = {}
        self._met: set[tuple[int, int]] = set()
        self._parents: dict[int, tuple[Program | None, int]] = {}

    def begin(self) -> None:
        """Start a tick: forget the processes that the last one did not ask for."""
        self._looks = {identity: look for identity, look in self._looks.items() if identity in self._met}
        self._met = set()
        self._parents = {}

    def words(self, process: ProcessStat, now_s: float) -> ProgramWords:
        """Return the family and the declared class of a process.

        The nearest of the process and the launchers above it that declares a class decides, else the nearest one that
        is known: a worker of torchrun runs a script that nobody knows.
        """
        self._met.add(process.identity)
        known = self._looks.get(process.identity)
        if known is not None:
            wait_s = _LOOK_AGAIN_S[min(known.looks, len(_LOOK_AGAIN_S)) - 1]
            # The kernel would let the reader wait for the lock of a process that sleeps uninterruptibly.
            if now_s - known.looked_s < wait_s or process.state == "D":
                return known.words
        elif process.state == "D":
            return ProgramWords()
        words = self._find(process)
        self._looks[process.identity] = _Look(words, now_s, known.looks + 1 if known else 1)
        return words

    def _find(self, process: ProcessStat) -> ProgramWords:
        nearest = self._recognise(process.pid)
        if nearest is None or nearest.declared_class is None:
            pid = process.parent
            for _ in range(_PARENTS_MAX):
                if pid <= 1:
                    break
                program, pid = self._parent(pid)
                if program is not None and program.is_launcher:
                    nearest = nearest or program
                    if program.declared_class is not None:
                        nearest = program
                        break
        return ProgramWords(nearest.family, nearest.declared_class) if nearest else ProgramWords()

    def _parent(self, pid: int) -> tuple[Program | None, int]:
        """Return the program of a parent and the id of its own parent; read once a tick for all its children."""
        found = self._parents.get(pid)
        if found is None:
            try:
                stat = self._files.stat(pid)
            except OSError:
                stat = None
            program = self._recognise(pid) if stat is not None and stat.state != "D" else None
            found = self._parents[pid] = program, stat.parent if stat else 0
        return found

    def _recognise(self, pid: int) -> Program | None:
        try:
            return recognise(*self._files.command(pid))
        except PermissionError:
            self._errors["no_permission"] += 1
        except OSError:  # it ended
            pass
        return None
