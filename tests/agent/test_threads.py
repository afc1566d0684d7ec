"""Names of threads as the kernel has them."""

from __future__ import annotations

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
