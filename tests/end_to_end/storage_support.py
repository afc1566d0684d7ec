"""Real storage for tests: mounts that are taken down again, a FUSE file system with a server, counted direct I/O."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from agent.samplers.tcp_sockets import tcp_sockets
from tests.end_to_end.programs import wait_for

SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")
MIB = 1 << 20

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount")


def call(*command: str | Path) -> str:
    """Run a program and return what it says; fail the test with its words where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


def mount(source: str, target: Path, fstype: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), os.fsencode(target), fstype.encode(), 0, None) != 0:
        raise OSError(ctypes.get_errno(), f"mounting {fstype} on {target}")


def direct_io(path: Path, size: int, *, write: bool) -> None:
    """Write or read `size` bytes past the page cache, 1 MiB at a time."""
    flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_DIRECT)
    try:
        with mmap.mmap(-1, MIB) as buffer:
            for offset in range(0, size, MIB):
                done = os.pwritev(descriptor, [buffer], offset) if write else os.preadv(descriptor, [buffer], offset)
                assert done == MIB
        if write:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def loop_device(folder: Path, size: int) -> Iterator[Path]:
    """Yield a loop device over a file, or skip where the kernel has none."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(size)
    done = subprocess.run(
        ["losetup", "--show", "--find", str(image)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no loop device here: {done.stderr.strip()}")
    device = Path(done.stdout.strip())
    try:
        yield device
    finally:
        call("losetup", "--detach", device)


@contextlib.contextmanager
def mounted(device: Path, target: Path) -> Iterator[None]:
    target.mkdir()
    call("mount", device, target)
    try:
        yield
    finally:
        call("umount", target)


class Sshfs:
    """A file system of sshfs over a plain TCP connection to sftp-server: a daemon, a server and counted bytes."""

    def __init__(self, folder: Path, *prefix: str) -> None:
        for program in ("sshfs", "fusermount3"):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed")
        if not SFTP_SERVER.exists():
            pytest.skip("openssh-sftp-server is not installed")
        if not Path("/dev/fuse").exists():
            pytest.skip("the kernel has no FUSE")
        try:
            tcp_sockets(())
        except OSError as error:
            pytest.skip(f"the kernel does not list TCP sockets (tcp_diag): {error}")
        self.prefix = prefix
        self.store = folder / "store"
        self.mountpoint = folder / "my data"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._servers: list[subprocess.Popen[bytes]] = []
        self.daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.store.mkdir()
        self.mountpoint.mkdir()
        threading.Thread(target=self._serve, daemon=True).start()
        port = self._listener.getsockname()[1]
        options = f"directport={port},direct_io,subtype=sshfs"
        self.daemon = subprocess.Popen(
            [*self.prefix, "sshfs", "-f", f"localhost:{self.store}", str(self.mountpoint), "-o", options],
            stdin=subprocess.DEVNULL,
        )
        return self

    def wait(self) -> None:
        """Wait until the daemon has it mounted in its namespace, and then connected to the server."""
        assert self.daemon is not None
        mountinfo = Path(f"/proc/{self.daemon.pid}/mountinfo")
        wait_for("mount of sshfs", lambda: " fuse.sshfs " in mountinfo.read_text())
        wait_for("connection of sshfs", lambda: self._servers)

    def __exit__(self, *_: object) -> None:
        if self.daemon is not None:
            self.daemon.terminate()
            self.daemon.wait(timeout=30)
        self._listener.close()
        for server in self._servers:
            server.kill()
            server.wait(timeout=30)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    self._servers.append(subprocess.Popen([SFTP_SERVER], stdin=connection, stdout=connection))
