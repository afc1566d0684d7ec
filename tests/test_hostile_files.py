"""Files that are no files, that unpack without end, that anybody may write; and the modes of what is written here."""

from __future__ import annotations

import gzip
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.clock import Instant, ManualClock
from agent.config import load_config
from agent.errors import UsageError
from agent.importers import open_trace
from agent.learned_state import LearnedState
from agent.maintenance import MaintenanceFiles
from agent.model_store import ModelStore
from agent.owners.job_files import JobFiles, JobFilesConfig
from agent.pid_file import pid_file
from agent.trace import BOMB_BYTES, TraceHeader, TraceWriter
from classifier import model
from exporters.textfile import Textfile
from exporters.web_config import load_web_config
from tests.exporters.snapshots import full_snapshot

ROOT = Path(__file__).parents[1]
NOW = Instant(1000.0, 1.8e9)
HEAD = b'{"provenance":"recorded","interval_s":1.0,"schema":1}\n'


def bomb(path: Path, head: bytes, filler: bytes, total: int = 4 * BOMB_BYTES) -> Path:
    with gzip.open(path, "wb", 9) as packed:
        packed.write(head)
        block = filler * (1 << 22)
        for _ in range(total // len(block)):
            packed.write(block)
    return path


@pytest.mark.parametrize(
    ("head", "filler"),
    [
        (HEAD, b"\n"),
        (b"t_s,gpu,power_w\n0,0,90\n1,0,91\n", b"\n"),
        (b"t_s,gpu,power_w\n0,0,90\n1,0,91\n", b"0"),
        (b"t_s,gpu,power_w\n0,0,90\n1,0,91\n" * 2000, b"\0"),
    ],
)
def test_a_gzip_bomb_is_refused_with_its_name(tmp_path, head, filler):
    path = bomb(tmp_path / "bomb.csv.gz", head, filler)
    with pytest.raises(UsageError, match=r"bomb\.csv\.gz unpacks to more than 250 times its size"):
        list(open_trace(path, lambda warning: None))


def test_a_bomb_takes_no_memory(tmp_path):
    # In a process that may have 1 GB of address space: one line of 768 MB, which packs to 750 kB.
    path = bomb(tmp_path / "line.csv.gz", b"", b"a", total=768 << 20)
    code = f"from agent.cli import main; import sys; sys.exit(main(['replay', {str(path)!r}, '--fast']))"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        preexec_fn=limit,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "line.csv.gz" in done.stderr


@pytest.mark.parametrize("magic", [b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh9", b"PK\x03\x04"])
def test_other_compressions_are_refused_unopened(tmp_path, magic):
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(magic + b"\0" * 100)
    with pytest.raises(UsageError, match=r"trace\.jsonl\.zst is compressed with \w+; unpack it first"):
        open_trace(path, lambda warning: None)


@pytest.fixture(params=["link", "device", "pipe", "socket", "folder"])
def no_file(request):
    """Return a function that puts something in the place of a file."""
    import socket

    held = []

    def put(path: Path) -> None:
        if request.param == "link":
            path.symlink_to("/etc/passwd")
        elif request.param == "device":
            path.symlink_to("/dev/zero")
        elif request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "socket":
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].bind(str(path))
        else:
            path.mkdir()

    yield put
    for one in held:
        one.close()


def test_what_is_no_file_is_left_out_of_folders_and_state(open_path, no_file, caplog):
    no_file(open_path / "a.json")
    jobs = JobFiles(JobFilesConfig(folder=str(open_path)))
    assert jobs.read(NOW) == ()
    assert jobs.errors == {"not_a_file": 1}
    maintenance = open_path / "maintenance.d"
    maintenance.mkdir()
    no_file(maintenance / "b.json")
    assert MaintenanceFiles(open_path).read(NOW) == ()


def test_what_is_no_file_is_no_learned_state(tmp_path, no_file):
    no_file(tmp_path / "learned.json")
    state, learner = learned(tmp_path)
    state.restore()
    assert learner.taken is None
    assert sum(state.errors.values()) == 1
    # It is set aside, and not followed when the new one is written.
    with state.kept_beside():
        pass
    assert (tmp_path / "learned.json").is_file()
    assert not (tmp_path / "learned.json").is_symlink()


class Counts:
    learner = "counts"
    taken = None

    def learned(self, now):
        return {"value": 1}

    def restore(self, state, now):
        self.taken = state


def learned(folder: Path) -> tuple[LearnedState, Counts]:
    learner = Counts()
    clock = ManualClock(NOW.monotonic_s, NOW.wall_s)
    return LearnedState(folder, [learner], clock, threading.Lock(), proc_root=folder), learner


def test_a_link_that_waits_where_a_new_state_is_written_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "learned.json.new").symlink_to(victim)
    state, _ = learned(tmp_path)
    with state.kept_beside():
        pass
    assert victim.read_text() == "mine"
    assert state.errors == {"unwritable": 1}


def test_a_store_of_models_stays_within_its_folder(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models/current").symlink_to(outside)
    (tmp_path / "models/previous").symlink_to("../outside")
    assert [held.place for held in ModelStore(tmp_path).held()] == ["shipped"]


# What anybody may write.


def test_files_that_anybody_may_write_are_refused(tmp_path):
    config = tmp_path / "warpwatch.toml"
    config.write_text("[agent]\n")
    web = tmp_path / "web.yml"
    web.write_text("rate_limit: {}\n")
    for path, load in ((config, load_config), (web, load_web_config)):
        load(path)
        path.chmod(0o646)
        with pytest.raises(UsageError, match=rf"every user may write .*{path.name}; take that away with chmod o-w"):
            load(path)


@pytest.mark.parametrize("load", [load_config, load_web_config])
def test_a_pipe_that_nobody_writes_to_holds_nothing_up(tmp_path, load):
    os.mkfifo(tmp_path / "warpwatch.toml")
    with pytest.raises(UsageError, match=r"cannot read .*warpwatch\.toml: it is a pipe; save it to a file first"):
        load(tmp_path / "warpwatch.toml")


def test_small_files_that_anybody_may_write_are_left_out(tmp_path):
    jobs = JobFiles(JobFilesConfig(folder=str(tmp_path)))
    path = tmp_path / "a.json"
    path.write_text('{"job_key": "a:1"}')
    path.chmod(0o664)
    assert len(jobs.read(NOW)) == 1
    path.chmod(0o666)
    assert jobs.read(NOW) == ()
    assert jobs.errors == {"writable_by_others": 1}


def test_a_learned_state_that_anybody_may_write_is_set_aside(tmp_path):
    state, _ = learned(tmp_path)
    with state.kept_beside():
        pass
    (tmp_path / "learned.json").chmod(0o602)
    state, learner = learned(tmp_path)
    state.restore()
    assert learner.taken is None
    assert state.errors == {"writable_by_others": 1}
    assert [path.name[:21] for path in tmp_path.iterdir()] == ["learned.json.corrupt-"]


# The modes of what is written here, whatever the umask is.


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_the_agent_and_its_commands_write(tmp_path, umask):
    tmp_path.chmod(0o755)
    state, _ = learned(tmp_path)
    with state.kept_beside():
        pass
    TraceWriter(tmp_path / "trace.jsonl", TraceHeader(provenance="recorded", interval_s=1.0)).close()
    (tmp_path / "run").mkdir(0o755)
    with pid_file(tmp_path / "run"):
        assert mode(tmp_path / "run/warpwatch.pid") & ~0o640 == 0
    (tmp_path / "run").rmdir()
    # For the agent alone, and for whom its owner lets read.
    assert mode(tmp_path / "learned.json") == 0o600
    assert mode(tmp_path / "trace.jsonl") & ~0o640 == 0
    # Written by an administrator and read by the agent; made for node_exporter: others have to read these.
    MaintenanceFiles(tmp_path).start(NOW, 60.0, gpus=(), anomalies=(), reason="")
    ModelStore(tmp_path).install(model.BUNDLED)
    snapshot = full_snapshot()
    Textfile(tmp_path / "a.prom", lambda: snapshot, ()).write()
    written = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert len(written) >= 8
    for path in written:
        assert mode(path) & 0o022 == 0, path
        if path.name not in {"learned.json", "trace.jsonl"}:
            assert mode(path) == (0o755 if path.is_dir() else 0o644), path
