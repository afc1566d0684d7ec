"""Model bundles of a site: installed beside the shipped one, and rolled back, each by one command.

`STATE/models/` holds a folder for each of at most two bundles, and the links `current` and `previous`. A link is
replaced in one step, so that an agent that starts meanwhile finds the old bundle or the new one.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.errors import FaultError, UsageError
from classifier import model

FOLDER: Final = "models"
_CURRENT: Final = "current"
_PREVIOUS: Final = "previous"
_FILES: Final = (model.JSON_NAME, model.ARRAYS_NAME)
_CARD: Final = "card.md"


@dataclass(frozen=True, slots=True)
class Held:
    """A bundle that the store may name: where it is, and its version and checksum, or why it does not load."""

    place: str  # config, current, previous or shipped
    folder: Path
    version: str | None
    sha256: str | None
    error: str | None = None

    def line(self) -> str:
        """Return it for people, in one line."""
        about = f"version {self.version}, SHA-256 {(self.sha256 or '')[:12]}" if self.error is None else self.error
        return f"{self.place:8s}  {about}  ({self.folder})"


class ModelStore:
    """The bundles below a state directory; without one there is the shipped bundle alone."""

    def __init__(self, state_directory: Path) -> None:
        self._folder = state_directory / FOLDER

    def current(self) -> Path | None:
        """Return the folder of the installed bundle; None where none is."""
        return self._target(_CURRENT)

    def held(self, configured: Path | None = None) -> list[Held]:
        """Return what is there, the one in use first (`configured`, where given); the shipped one is always last."""
        found = [(name, self._target(name)) for name in (_CURRENT, _PREVIOUS)]
        places = (("config", configured), *found, ("shipped", model.BUNDLED))
        return [_look(name, folder) for name, folder in places if folder is not None]

    def install(self, bundle: Path) -> Held:
        """Copy `bundle` and make it the current one; raises UsageError, and changes nothing, where it does not fit."""
        loaded = model.load(bundle)
        name = loaded.sha256[:12]
        try:
            self._folder.mkdir(0o755, exist_ok=True)
            self._folder.chmod(0o755)  # the administrator installs, another user reads
            if not (self._folder / name).exists():
                self._copy(bundle, name)
            before = self._target(_CURRENT)
            if before is not None and before.name != name:
                self._link(_PREVIOUS, before.name)
            self._link(_CURRENT, name)
            self._prune()
        except OSError as error:
            raise self._fault("write", error) from error
        return _look(_CURRENT, self._folder / name)

    def rollback(self) -> Held:
        """Make the previous bundle the current one, or the shipped one where there is no previous; once more undoes it.

        Raises UsageError where nothing is installed.
        """
        current, previous = self._target(_CURRENT), self._target(_PREVIOUS)
        if current is None and previous is None:
            raise UsageError(f"no model bundle is installed in {self._folder}; the shipped one is in use")
        try:
            if current is None:
                (self._folder / _PREVIOUS).unlink()
            else:
                self._link(_PREVIOUS, current.name)
            if previous is None:
                (self._folder / _CURRENT).unlink()
            else:
                self._link(_CURRENT, previous.name)
        except OSError as error:
            raise self._fault("change", error) from error
        return self.held()[0] if previous is not None else _look("shipped", model.BUNDLED)

    def _copy(self, bundle: Path, name: str) -> None:
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder))
        try:
            for file in (*_FILES, _CARD):
                if file in _FILES or (bundle / file).is_file():
                    shutil.copyfile(bundle / file, temporary / file)
                    (temporary / file).chmod(0o644)
            temporary.chmod(0o755)
            model.load(temporary)  # what was copied is what was looked at
            temporary.rename(self._folder / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _link(self, name: str, target: str) -> None:
        temporary = self._folder / f".{name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(self._folder / name)

    def _target(self, name: str) -> Path | None:
        """Return the folder that a link names; a link out of the store counts as none."""
        try:
            target = (self._folder / name).readlink()
        except OSError:
            return None
        return self._folder / target if target.name == str(target) else None

    def _fault(self, verb: str, error: OSError) -> FaultError:
        where = error.filename or self._folder
        return FaultError(f"cannot {verb} {where}: {error.strerror}; run this as root or as the agent's user")

    def _prune(self) -> None:
        kept = {target.name for name in (_CURRENT, _PREVIOUS) if (target := self._target(name)) is not None}
        for folder in self._folder.iterdir():
            if folder.is_dir() and not folder.is_symlink() and folder.name not in kept:
                shutil.rmtree(folder)


def _look(place: str, folder: Path) -> Held:
    try:
        loaded = model.load(folder)
    except UsageError as error:
        return Held(place, folder, None, None, str(error))
    return Held(place, folder, loaded.version, loaded.sha256)
