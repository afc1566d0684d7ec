"""The page as a file for the textfile collector of node_exporter, for hosts on which no other port may be opened.

The collector reads whole files that end in .prom, takes no time stamps, and fails where a family of its own is there
again: so the file has no process_*, and is put in place by a rename. What it says holds for as long as it is there, so
the agent takes it away when it stops; one left by an agent that was killed is known by its age
(node_textfile_mtime_seconds) and taken away by the next agent.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from exporters.metric_def import MetricDef
from exporters.prometheus import PrometheusPage
from exporters.snapshot import NodeSnapshot

log = logging.getLogger("warpwatch.textfile")

#: Everybody may read it: node_exporter runs as a user of its own.
_MODE = 0o644


class Textfile:
    """Writes the newest snapshot to one file."""

    def __init__(self, path: Path, get_snapshot: Callable[[], NodeSnapshot | None], table: Sequence[MetricDef]) -> None:
        """Prepare to write the families of `table`, but for those that node_exporter has itself."""
        self._path = path
        # A name that the collector does not read, on the same file system.
        self._part = path.with_name(f".{path.name}.part")
        self._page = PrometheusPage(get_snapshot, table=table, own_process=False)
        self._fault: str | None = None
        self._is_over = False

    def write(self) -> None:
        """Put the newest page in place; before the first samples, take away what an agent before has left."""
        if self._is_over:
            return
        page = self._page.render()
        try:
            if page is None:
                self._path.unlink(missing_ok=True)
            else:
                self._replace(page)
        except OSError as error:
            self._tell(f"cannot write {self._path}: {error.strerror}")
        else:
            self._tell(None)

    def remove(self) -> None:
        """Take the file away: what nobody measures any more must not look as if it held."""
        self._is_over = True
        for path in (self._path, self._part):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.error("cannot remove %s: %s", path, error.strerror)  # noqa: TRY400 - one sentence

    def _replace(self, page: bytes) -> None:
        # Not synchronised to disk: after a crash of the host the file is old anyway, and waiting for a disk would hold
        # up the schedule.
        # A new file each time: what others have put in its place, a pipe or a link, is neither opened nor written to.
        self._part.unlink(missing_ok=True)
        descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        with open(descriptor, "wb") as stream:  # noqa: PTH123 - of a descriptor
            os.fchmod(descriptor, _MODE)
            stream.write(page)
        self._part.replace(self._path)

    def _tell(self, fault: str | None) -> None:
        """Log a fault when it begins and when it ends."""
        if fault == self._fault:
            return
        if fault is not None:
            log.error("%s; node_exporter gets nothing new until that is mended", fault)
        else:
            log.warning("writing %s works again", self._path)
        self._fault = fault
