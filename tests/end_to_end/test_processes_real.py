"""The processes sampler on real processes: counted bytes and CPU time, children that end, what other users may see."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.clock import Instant, SystemClock
from agent.samplers.processes import ProcessesSampler
from tests.agent.process_trees import gpu_with
from tests.end_to_end.levels import JOB_UID, ROOT, as_user, open_folder, require_root

pytestmark = pytest.mark.end_to_end

#: Stands in for a training program: does what it is told line by line, and answers each line.
WORKER = r"""
import json, os, signal, sys, threading, time

def burn(seconds):
    while time.process_time() < seconds:
        pass
    return time.process_time()

def burning_child(seconds, below):
    # Start a child that burns and then waits to be killed; return its id and what it used, when it has.
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        used = 0.0
        if below:
            grandchild, used = burning_child(seconds, below - 1)
            end(grandchild)
        os.write(tell, repr(used + burn(seconds)).encode())
        while True:
            signal.pause()
    os.close(tell)
    used = float(os.read(told, 100))
    os.close(told)
    return pid, used

def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

def churn(count):
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

children = []
for line in sys.stdin:
    name, *values = json.loads(line)
    answer = None
    if name == "write":
        with open(values[0], "r+b", buffering=0) as file:
            for _ in range(values[1]):
                file.write(bytes(1 << 20))
            os.fsync(file.fileno())
    elif name == "read":
        with open(values[0], "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 20):
                pass
    elif name == "fork":
        children = [burning_child(*values) for _ in range(2)]
        answer = sum(used for _, used in children)
    elif name == "wait":
        for pid, _ in children:
            end(pid)
    elif name == "thread":
        # A child of another thread than the main one.
        made = []
        thread = threading.Thread(target=lambda: made.append(burning_child(*values)) or stop.wait(), daemon=True)
        stop = threading.Event()
        thread.start()
        while not made:
            time.sleep(0.01)
    elif name == "churn":
        thread = threading.Thread(target=churn, args=values, daemon=True)
        thread.start()
    elif name == "is_done":
        answer = not thread.is_alive()
    print(json.dumps(answer), flush=True)
"""

#: Samples processes as whoever runs it, with three lists of a driver that names them, and prints what it got.
LOOKER = r"""
import dataclasses, json, sys
from pathlib import Path
from agent.clock import Instant
from agent.samplers.processes import ProcessesSampler
from tests.agent.process_trees import gpu_with
pids = [int(word) for word in sys.argv[1:]]
now = Instant(100.0, 1e9)
sampler = ProcessesSampler(Path("/proc"), lambda: [gpu_with(*pids, listed_s=now.monotonic_s)])
assert sampler.probe()
for _ in range(3):
    records = sampler.sample(now)
    now = now.later(5)
print(json.dumps({"records": [dataclasses.asdict(record) for record in records], "errors": dict(sampler.errors)}))
"""


class Worker:
    """The running stand-in."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def tell(self, *words: object) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def worker(*prefix: str) -> Iterator[Worker]:
    """Start the stand-in; when it answers, all of `prefix` has given its process over to it."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        started = Worker(process)
        try:
            started.tell("hello")
            yield started
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with the children, which hold its pipes


@contextmanager
def sampling(pid: int) -> Iterator[ProcessesSampler]:
    sampler = ProcessesSampler(Path("/proc"), lambda: [gpu_with(pid)])
    yield sampler
    sampler.close()


def look(level: str, *pids: int) -> dict:
    """Return what the sampler sees as an unprivileged user at a level."""
    done = subprocess.run(
        [*as_user(level), sys.executable, "-c", LOOKER, *map(str, pids)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def on_disk(folder: Path) -> Path:
    """Return `folder`; skip where it lies in memory, whose pages go to no storage."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        pytest.skip(f"{folder} is a {kind}")
    return folder


def test_bytes_to_and_from_a_disk_are_what_was_written_and_read(tmp_path):
    """24 MiB written and synchronised, 24 MiB read with the page cache dropped; the file system's own pages are few."""
    path = on_disk(tmp_path) / "checkpoint"
    path.write_bytes(b"")
    with worker() as job, sampling(job.pid) as sampler:
        if not Path(f"/proc/{job.pid}/io").exists():
            pytest.skip("this kernel keeps no I/O accounts (CONFIG_TASK_IO_ACCOUNTING)")
        readings = [sampler.sample(Instant(100.0, 1e9))[0]]
        job.tell("write", str(path), 24)
        readings += sampler.sample(Instant(105.0, 1e9))
        job.tell("read", str(path))
        readings += sampler.sample(Instant(110.0, 1e9))
    before, written, read = readings
    size = 24 << 20
    assert size <= written.written_bytes_total - before.written_bytes_total <= size + (256 << 10)
    assert size <= read.read_bytes_total - written.read_bytes_total <= size + (256 << 10)
    assert read.written_bytes_total - written.written_bytes_total <= 256 << 10
    assert written.read_bytes_total - before.read_bytes_total <= 256 << 10


def test_cpu_time_of_children_is_what_they_used_while_they_live_and_when_they_ended():
    """Two children and one grandchild of each burn 0.3 s; the children wait for the grandchildren first.

    The kernel counts in ticks of 10 ms, cut off in user and system time of each process.
    """
    with worker() as job, sampling(job.pid) as sampler:
        (before,) = sampler.sample(Instant(100.0, 1e9))
        used = job.tell("fork", 0.3, 1)
        (living,) = sampler.sample(Instant(105.0, 1e9))
        job.tell("wait")
        (ended,) = sampler.sample(Instant(110.0, 1e9))
    assert used >= 1.2
    assert (before.descendants, living.descendants, ended.descendants) == (0, 2, 0)
    assert before.descendants_cpu_seconds_total == 0.0
    assert living.descendants_cpu_seconds_total == pytest.approx(used, abs=0.1)
    assert ended.descendants_cpu_seconds_total == pytest.approx(used, abs=0.1)
    assert ended.descendants_cpu_seconds_total >= living.descendants_cpu_seconds_total
    assert ended.cpu_seconds_total < 0.3  # its own: what children used is not in it


def test_a_child_of_another_thread_is_found():
    """The kernel lists children by the thread that started them."""
    with worker() as job, sampling(job.pid) as sampler:
        job.tell("thread", 0.05, 0)
        (record,) = sampler.sample(Instant(100.0, 1e9))
    assert (record.threads, record.descendants) == (2, 1)


def test_start_lies_on_the_agents_clock():
    before = SystemClock().now().monotonic_s
    with worker() as job, sampling(job.pid) as sampler:
        (record,) = sampler.sample(SystemClock().now())
        after = SystemClock().now().monotonic_s
    assert before - 0.02 <= record.started_monotonic_s <= after
    assert record.state in ("R", "S")  # it has answered, and may not sleep yet
    assert record.program is None
    assert record.resident_bytes > 4 << 20


def test_children_that_come_and_go_while_they_are_read_are_no_errors():
    """500 children that end at once, read as fast as that goes: no sum falls, no tick takes long."""
    with worker() as job, sampling(job.pid) as sampler:
        job.tell("churn", 500)
        readings = []
        while not job.tell("is_done"):
            started_s = time.perf_counter()
            readings += sampler.sample(Instant(100.0 + 5 * len(readings), 1e9))
            assert time.perf_counter() - started_s < 1.0
    for before, after in itertools.pairwise(readings):
        assert after.descendants_cpu_seconds_total >= before.descendants_cpu_seconds_total
        assert after.written_bytes_total >= before.written_bytes_total
    assert max(reading.descendants for reading in readings) == 1  # one at a time, and some were met
    assert dict(sampler.errors) == {}


def test_levels_of_a_real_unprivileged_user():
    """A process of another user: plain sees all but its I/O, hidepid nothing, capable everything."""
    require_root()
    with worker(*as_user("plain", JOB_UID)) as job:
        job.tell("fork", 0.05, 0)
        plain, hidden, capable = (look(level, job.pid) for level in ("plain", "hidepid", "capable"))
    (record,) = plain["records"]
    assert (record["pid"], record["descendants"], record["state"]) == (job.pid, 2, "S")
    assert record["descendants_cpu_seconds_total"] > 0
    assert (record["read_bytes_total"], record["written_bytes_total"]) == (None, None)
    assert plain["errors"] == {"no_permission": 1}  # once, not at every tick
    assert hidden == {"records": [], "errors": {"invisible": 1}}
    (record,) = capable["records"]
    assert record["read_bytes_total"] is not None
    assert record["written_bytes_total"] is not None
    assert capable["errors"] == {}


def test_program_of_another_users_process_is_known_at_the_plain_level():
    """A script called vllm, run by Python: who looks needs no rights, and gets a word."""
    require_root()
    with open_folder() as folder:
        script = folder / "vllm"
        script.write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n")
        script.chmod(0o644)
        command = [*as_user("plain", JOB_UID), sys.executable, str(script), "serve", "--api-key", "sk-secret"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            found = look("plain", process.pid)
            process.kill()
    (record,) = found["records"]
    assert (record["program"], record["declared_class"]) == ("vllm", "inference")
    assert "secret" not in json.dumps(found)
