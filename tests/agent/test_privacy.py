"""What docs/privacy.md promises of the file systems: whose comm and cmdline is opened, and that none of it is kept."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Self

from agent.clock import Instant
from agent.samplers.filesystems import FilesystemsSampler
from agent.samplers.tcp_sockets import TcpSocket
from tests.machines import unpack_machine

NOW = Instant(100.0, 1_700_000_000.0)
SECRET = "hunter2"


class Opened:
    """Lists the files that are opened while it is entered, by whatever call."""

    current: Opened | None = None

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Self:
        Opened.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Opened.current = None

    @property
    def private(self) -> set[str]:
        """Which comm and cmdline were opened, as <pid>/<name>."""
        return {"/".join(Path(name).parts[-2:]) for name in self.names if Path(name).name in {"comm", "cmdline"}}


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and Opened.current is not None:
        Opened.current.names.append(str(arguments[0]))


sys.addaudithook(_audit)  # stays for the rest of the process, idle


def test_no_name_of_a_process_is_opened_where_there_is_no_fuse_mount(machine):
    root = machine("dgx_slurm")
    sampler = FilesystemsSampler(root / "proc", root / "sys")
    with Opened() as opened:
        assert sampler.probe()
        assert sampler.sample(NOW)
    sampler.close()
    assert any(name.endswith("mountinfo") for name in opened.names)
    assert opened.private == set()


def test_with_a_fuse_mount_names_are_opened_and_the_line_of_its_daemon_alone_and_nothing_is_kept(tmp_path, caplog):
    root = unpack_machine("cloud_efa_fuse", tmp_path / "node")
    lines = {"900": "s3fs", "901": "python3"}
    for pid, name in lines.items():
        (root / "proc" / pid).mkdir(exist_ok=True)
        (root / "proc" / pid / "comm").write_text(f"{name}\n")
        (root / "proc" / pid / "cmdline").write_text(f"{name}\0data\0/mnt/bucket\0-o\0passwd={SECRET}\0")
    sampler = FilesystemsSampler(root / "proc", root / "sys", sockets=lambda inodes: [TcpSocket(1, 3, 4)])
    with caplog.at_level(logging.DEBUG), Opened() as opened:
        (record,) = sampler.sample(NOW)
    assert record.read_bytes_total == 3
    assert {name for name in opened.private if name.endswith("cmdline")} == {"900/cmdline"}
    assert opened.private >= {"900/comm", "901/comm"}
    sampler.close()
    assert SECRET not in caplog.text + repr(record) + repr(dict(sampler.errors)) + held(sampler)


def held(thing: object, depth: int = 8) -> str:
    """Return as text what an object of the agent holds, with what those hold."""
    if depth == 0 or isinstance(thing, str | bytes | int | float | None):
        return repr(thing)
    if isinstance(thing, dict):
        return "".join(held(key, depth - 1) + held(value, depth - 1) for key, value in thing.items())
    if isinstance(thing, list | tuple | set | frozenset):
        return "".join(held(item, depth - 1) for item in thing)
    slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    values = {name: getattr(thing, name) for name in slots if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    return held(values, depth - 1) if type(thing).__module__.startswith("agent.") else repr(thing)


def test_what_is_held_is_found():
    sampler = FilesystemsSampler(Path("/" + SECRET))
    assert SECRET in held(sampler)
