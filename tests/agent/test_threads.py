"""Names of threads as the kernel has them."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.threads import NamedThread


@pytest.mark.parametrize(
    ("name", "comm"),
    [("nvml-gpu-3", "nvml-gpu-3"), ("a-name-of-twenty-one-b", "a-name-of-twent"), ("é" * 8, "é" * 7)],
)
def test_the_kernel_knows_a_thread_by_its_name(name, comm):
    found = []

    def work(*words: str) -> None:
        text = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_bytes().removesuffix(b"\n")
        found.append((text.decode(errors="ignore"), words, threading.current_thread().daemon))

    thread = NamedThread(name, work, ("a", "b"))
    thread.start()
    thread.join(10)
    assert found == [(comm, ("a", "b"), True)]


def test_memory_is_taken_from_one_arena():
    """In a process of its own: what glibc was told holds for all that comes after in it."""
    program = """
import ctypes, threading
from agent.threads import share_memory
share_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
found = []
thread = threading.Thread(target=lambda: found.append(libc.malloc(100_000)))
thread.start()
thread.join()
print(found[0], libc.malloc(100_000))
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    other, main = map(int, printed.stdout.split())
    # The heap of the main arena is one; an arena of a thread begins on a multiple of 64 MiB elsewhere.
    assert abs(other - main) < 64 << 20
