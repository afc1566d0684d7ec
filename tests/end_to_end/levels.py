"""Starts programs as a real unprivileged user, at the three levels that are supported.

`plain`: an ordinary user. `hidepid`: likewise, and /proc shows only the user's own processes. `capable`: with the
capabilities of the opt-in drop-in of systemd/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DROP_IN = ROOT / "systemd" / "warpwatch.service.d" / "capabilities.conf"
#: Nobody's number, and the number of a user whose processes the agent looks at.
AGENT_UID = 54321
JOB_UID = 54322


def require_root() -> None:
    """Skip the test where another user cannot be taken on, or a mount namespace of its own cannot be had."""
    if os.getuid() != 0:
        pytest.skip("starting programs as other users needs root")
    for name in ("unshare", "setpriv", "mount"):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not allow a mount namespace")


def capabilities() -> tuple[str, ...]:
    """Return the capabilities that the drop-in grants, as setpriv writes them."""
    for line in DROP_IN.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name == "AmbientCapabilities":
            return tuple(word.removeprefix("CAP_").lower() for word in value.split())
    raise AssertionError("the drop-in grants nothing")


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that every user may enter and write to, as pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="warpwatch-level-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def as_user(level: str, uid: int = AGENT_UID) -> list[str]:
    """Return what to write before a command, so that it runs as `uid` at a level."""
    lines = list(_reachable())
    if level == "hidepid":
        lines.append("mount -t proc -o hidepid=2 proc /proc")
    wanted = ",".join(f"+{name}" for name in capabilities()) if level == "capable" else ""
    granted = f"--inh-caps {wanted} --ambient-caps {wanted} " if wanted else ""
    lines.append(f'exec setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs {granted}"$@"')
    return ["unshare", "-m", "sh", "-ec", "\n".join(lines), "sh"]


def _reachable() -> Iterator[str]:
    """Yield commands that let every user reach Python and the repository, though a folder above them is private."""
    wanted = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT}
    closed = {path: next((up for up in reversed(path.parents) if not up.stat().st_mode & 1), None) for path in wanted}
    hidden = {path: top for path, top in closed.items() if top is not None}
    if not hidden:
        return
    yield "aside=$(mktemp -d)"
    for number, path in enumerate(hidden):
        yield f'mkdir "$aside/{number}"; mount --bind "{path}" "$aside/{number}"'
    for top in set(hidden.values()):
        yield f'mount -t tmpfs -o mode=755 none "{top}"'
    for number, path in enumerate(hidden):
        yield f'mkdir -p "{path}"; mount --bind "$aside/{number}" "{path}"'
