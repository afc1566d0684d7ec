"""Machines for tests: folders of /proc and /sys files, unpacked from the text files in fixtures/machines.

A machine is a folder with files `*.tree`, each a part of its tree. A line that begins with `== ` starts an entry:

    == proc/net/dev                      a file; the lines up to the next entry are its content
    == sys/class/net/eth0 -> ../x/y      a symbolic link
    == sys/empty/                        a folder

Lines before the first entry are comments. `\\xff` in a content stands for that byte, so that NULs and bytes that are
not UTF-8 can be written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

MACHINES = Path(__file__).parents[1] / "fixtures" / "machines"

#: Returns the root of a machine that tests read and do not change.
MachineFactory = Callable[[str], Path]


def unpack_machine(name: str, folder: Path) -> Path:
    """Write all parts of a machine below `folder` and return it."""
    parts = sorted((MACHINES / name).glob("*.tree"))
    assert parts, f"no machine is called {name}"
    for part in parts:
        _unpack(part.read_text(encoding="utf-8"), folder)
    return folder


def _unpack(text: str, folder: Path) -> None:
    _, *entries = re.split(r"^== ", text, flags=re.MULTILINE)
    for entry in entries:
        name, _, content = entry.partition("\n")
        name, arrow, target = name.partition(" -> ")
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if arrow:
            path.symlink_to(target)
            continue
        with path.open("xb") as file:  # two entries of one name are a mistake
            file.write(re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), content.encode()))
