"""Writes /proc files of processes for tests."""

from __future__ import annotations

from pathlib import Path

from agent.gpu_roster import RosterGpu
from agent.records import GpuKey, GpuProcess


def stat_line(pid, *, name=b"python3", state="S", parent=1, own=0, waited=0, threads=1, start=1000, pages=0) -> bytes:
    """52 fields of proc_pid_stat(5); those without a parameter have values that no test expects anywhere."""
    fields = [
        state,
        parent,
        91,
        92,
        93,
        94,
        95,
        96,
        97,
        98,
        99,
        own,
        0,
        waited,
        0,
        20,
        0,
        threads,
        0,
        start,
        9999,
        pages,
    ]
    fields += [1] * 28
    return b"%d (%s) %s\n" % (pid, name, " ".join(map(str, fields)).encode())


class Processes:
    """A /proc of processes; `lists` says whether the kernel lists children."""

    def __init__(self, root: Path, *, lists: bool = True) -> None:
        self.root = root
        self.lists = lists
        self._parents: dict[int, int] = {}
        self._fields: dict[int, dict] = {}
        self.add(1, parent=0, start=0)

    def add(self, pid, *, read=None, written=None, command=b"python3\0train.py\0", **fields) -> None:
        folder = self.root / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        self._fields[pid] = fields
        (folder / "stat").write_bytes(stat_line(pid, **fields))
        (folder / "comm").write_bytes(b"python3\n")
        (folder / "cmdline").write_bytes(command)
        if read is not None:
            self.set_io(pid, read, written or 0)
        self._parents[pid] = fields.get("parent", 1)
        self._list_children()

    def set(self, pid, **fields) -> None:
        self._fields[pid] |= fields
        (self.root / str(pid) / "stat").write_bytes(stat_line(pid, **self._fields[pid]))
        self._parents[pid] = self._fields[pid].get("parent", 1)
        self._list_children()

    def set_io(self, pid, read, written) -> None:
        (self.root / str(pid) / "io").write_text(
            f"rchar: 7\nwchar: 7\nsyscr: 7\nsyscw: 7\nread_bytes: {read}\nwrite_bytes: {written}\n"
            "cancelled_write_bytes: 7\n"
        )

    def end(self, pid) -> None:
        for path in sorted((self.root / str(pid)).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (self.root / str(pid)).rmdir()
        del self._parents[pid]
        self._list_children()

    def _list_children(self) -> None:
        if self.lists:
            for pid in self._parents:
                children = [child for child, parent in self._parents.items() if parent == pid]
                (self.root / str(pid) / "task" / str(pid) / "children").write_text("".join(f"{c} " for c in children))


def gpu_with(*pids, listed_s=100.0, index=0) -> RosterGpu:
    return RosterGpu(
        key=GpuKey(index, f"GPU-{index}"), processes=tuple(GpuProcess(pid) for pid in pids), processes_s=listed_s
    )
