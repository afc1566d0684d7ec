"""Damaged files that a person hands over: a value, or one sentence that names the file; no other exception, no stall.

Each case calls what the commands and the agent call. Names of files are part of the sentence, which is what a person
has to go by.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.clock import Instant, ManualClock
from agent.composition import build_pipeline
from agent.config import Config, load_config
from agent.config_loader import dump_toml
from agent.errors import FaultError, UsageError
from agent.importers import open_trace
from agent.learned_state import LearnedState
from agent.maintenance import MaintenanceFiles
from agent.model_store import ModelStore
from agent.owners.job_files import JobFiles, JobFilesConfig
from classifier import model
from exporters.web_config import load_web_config
from tests.fuzz.mutation import damaged, in_time, profile

ROOT = Path(__file__).parents[2]
NOW = Instant(1000.0, 1.8e9)
TRACE = (ROOT / "fixtures/traces/constructed_three_gpus.jsonl").read_bytes()
LINES = b"".join(TRACE.splitlines(keepends=True)[:4])
UUID = "GPU-00000000-1111-2222-3333-444444444444"

LOGS = (
    LINES,
    b"t_s,gpu,power_w,util_gpu_pct,mem_used_mib\n0,0,90.5,3,400\n1,0,300,99,500\n1,1,,NA,12\n2,0,301,99,500\n",
    (
        b"index, timestamp, utilization.gpu [%], power.draw [W], memory.used [MiB]\n"
        b"0, 2026/03/04 10:00:00.123, 98 %, 412.31 W, 30000 MiB\n0, 2026/03/04 10:00:01.120, [N/A], 400 W, 30000 MiB\n"
    ),
    (
        b"# gpu    pwr  gtemp  mtemp     sm    mem  mclk  pclk\n# Idx      W      C      C      %      %   MHz   MHz\n"
        b"    0    412     60     70     98     40  2619  1980\n    1     90     30      -      0      0  2619   345\n"
    ),
    (
        b"#Date       Time        gpu         pid  type    sm   mem   enc   dec   command\n"
        b"#YYYYMMDD   HH:MM:SS    Idx           #   C/G     %     %     %     %   name\n"
        b" 20260304   10:00:00      0       4711     C     98    40     -     -   python\n"
    ),
    gzip.compress(LINES, mtime=0),
    LINES.decode().encode("utf-16"),
)
CONFIG = (
    dump_toml(Config()).encode(),
    (
        b'[export]\nlisten = ":9836"\nweb_config = "/etc/web.yml"\n[samplers]\nexpected_gpus = 8\nnvml = false\n'
        b"[agent]\ndriver_release_seconds = 600.0\n"
    ),
)
WEB = (
    (
        b"tls_server_config:\n  cert_file: a.pem\n  key_file: a.key\n  client_auth_type: RequireAndVerifyClientCert\n"
        b"  client_ca_file: ca.pem\n  client_allowed_sans: [x]\n  min_version: TLS12\n  curve_preferences: [X25519]\n"
    ),
    (
        b"basic_auth_users:\n  prometheus: $2y$10$abcdefghijklmnopqrstuuABCDEFGHIJKLMNOPQRSTUVWXYZ01234567\n"
        b"rate_limit: {interval: 1s}\nhttp_server_config:\n  http2: true\n  headers:\n    X-Frame-Options: deny\n"
    ),
)
JOB = (
    json.dumps(
        {
            "job_key": "slurm:1",
            "job_id": "1",
            "user": "ann",
            "gpus": [UUID],
            "declared_class": "training",
            "expected_checkpoint_seconds": 600,
            "expires": 1.9e9,
        }
    ).encode(),
)
MAINTENANCE = (
    b'{"id":"0123abcd","node":true,"start":1799999000,"expires":1800001000,"reason":"x","anomalies":["gpu_lost"]}',
    b'{"id":"0123abcd","gpus":["0","gpu-1"],"start":1799999000,"expires":1800001000,"reason":"x"}',
)


def refused_or_read(path: Path, read: Callable[[Path], object]) -> None:
    """Read; fail on anything but a value, or an error of ours whose one sentence names the file."""
    with in_time():
        try:
            read(path)
        except (UsageError, FaultError) as error:
            sentence = str(error)
            assert path.name in sentence, f"{sentence!r} does not name {path.name}"
            assert "\n" not in sentence, sentence
            assert len(sentence) < 2000, len(sentence)


def read_log(path: Path) -> None:
    warnings: list[str] = []
    trace = open_trace(path, warnings.append)
    times = [tick.monotonic_s for tick in trace]
    assert times == sorted(times)
    assert all(path.name in warning for warning in warnings), warnings


@profile(2)
@given(data=damaged(LOGS))
def test_traces_and_foreign_logs(tmp_path, data):
    path = tmp_path / "a.log"
    path.write_bytes(data)
    refused_or_read(path, read_log)


@profile()
@given(data=damaged(LOGS[:-2]))
def test_packed_logs(tmp_path, data):
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(data, 1, mtime=0))
    refused_or_read(path, read_log)


@profile(2)
@given(data=damaged(CONFIG))
@example(data=b"x = " + b"[" * 5000)
@example(data=b"[agent]\ndriver_release_seconds = 1" + b"0" * 400)
@example(data=b"[samplers]\nexpected_gpus = 1" + b"0" * 5000)
def test_configuration(tmp_path, data):
    path = tmp_path / "a.toml"
    path.write_bytes(data)
    refused_or_read(path, load_config)


@profile(2)
@given(data=damaged(WEB))
def test_web_configuration(tmp_path, data):
    path = tmp_path / "web.yml"
    path.write_bytes(data)
    refused_or_read(path, load_web_config)


# The model bundle: the description, and the arrays with a checksum that is right again.

DESCRIPTION = (model.BUNDLED / model.JSON_NAME).read_bytes()
ARRAYS = (model.BUNDLED / model.ARRAYS_NAME).read_bytes()


@pytest.fixture(scope="module")
def small_arrays():
    """Return the arrays without compression, cut to few values: their headers and their places in the file matter."""
    packed = io.BytesIO()
    with np.load(io.BytesIO(ARRAYS)) as stored:
        np.savez(packed, **{name: stored[name][:3] for name in stored.files})
    return packed.getvalue()


def write_bundle(folder: Path, description: bytes, arrays: bytes) -> Path:
    (folder / model.JSON_NAME).write_bytes(description)
    (folder / model.ARRAYS_NAME).write_bytes(arrays)
    return folder


def with_checksum(arrays: bytes) -> bytes:
    return json.dumps(json.loads(DESCRIPTION) | {"arrays_sha256": hashlib.sha256(arrays).hexdigest()}).encode()


@profile()
@given(data=damaged((DESCRIPTION,)))
@example(data=b"[" * 100_000)
def test_description_of_a_model(tmp_path, data):
    refused_or_read(write_bundle(tmp_path, data, ARRAYS), model.load)


@st.composite
def other_values(draw: st.DrawFn) -> bytes:
    """Draw the description with one value replaced by one of another kind."""
    value = json.loads(DESCRIPTION)
    where = value
    while True:
        key = draw(st.sampled_from(sorted(where) if isinstance(where, dict) else list(range(len(where)))))
        if not isinstance(where[key], dict | list) or not where[key] or draw(st.booleans()):
            break
        where = where[key]
    where[key] = draw(st.sampled_from([None, True, -1, 0, 1e308, 10**400, "", "x", [], {}, [[]], {"a": {}}]))
    return json.dumps(value).encode()


@profile()
@given(data=other_values())
def test_values_in_the_description_of_a_model(tmp_path, data):
    refused_or_read(write_bundle(tmp_path, data, ARRAYS), model.load)


@profile()
@given(data=st.data())
def test_arrays_of_a_model(tmp_path, small_arrays, data):
    arrays = data.draw(damaged((small_arrays,)))
    refused_or_read(write_bundle(tmp_path, with_checksum(arrays), arrays), model.load)


# What lies in folders and is read again and again: nothing is raised, what is left out is counted and logged.


@profile(2)
@given(data=damaged(JOB))
def test_job_files(tmp_path, caplog, data):
    caplog.clear()
    path = tmp_path / "job.json"
    path.write_bytes(data)
    files = JobFiles(JobFilesConfig(folder=str(tmp_path)))
    with in_time():
        files.read(NOW)
    assert all("job.json" in line for line in caplog.messages)
    assert len(caplog.messages) == sum(files.errors.values())


@profile(2)
@given(data=damaged(MAINTENANCE))
def test_maintenance_files(tmp_path, caplog, data):
    caplog.clear()
    folder = tmp_path / "maintenance.d"
    folder.mkdir(exist_ok=True)
    (folder / "one.json").write_bytes(data)
    with in_time():
        MaintenanceFiles(tmp_path).read(NOW)
    assert all("one.json" in line for line in caplog.messages)


LEARNED = json.dumps(
    {
        "warpwatch": "learned",
        "schema": 1,
        "saved": {"monotonic_s": 900.0, "wall_s": 1.8e9 - 100, "boot_id": None},
        "learners": {},
    }
).encode()


@pytest.fixture(scope="module")
def learners():
    return build_pipeline(Config()).learners


@pytest.fixture(scope="module")
def learned(learners):
    """Return good files: one that holds nothing, and one in which every learner of this version has a section."""
    sections = {learner.learner: learner.learned(NOW) for learner in learners}
    assert sections
    return (LEARNED, json.dumps(json.loads(LEARNED) | {"learners": sections}).encode())


@profile()
@given(data=st.data())
def test_learned_state(tmp_path, caplog, learners, learned, data):
    caplog.clear()
    (tmp_path / "learned.json").write_bytes(data.draw(damaged(learned)))
    clock = ManualClock(NOW.monotonic_s, NOW.wall_s)
    with in_time():
        LearnedState(tmp_path, learners, clock, threading.Lock(), proc_root=tmp_path).restore()
    assert all("learned.json" in line for line in caplog.messages)


@st.composite
def foreign_sections(draw: st.DrawFn, names: tuple[str, ...]) -> bytes:
    """Draw a file that is whole, and in which learners find what they did not write."""
    value = st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
        max_leaves=12,
    )
    sections = draw(st.dictionaries(st.sampled_from(names), value, min_size=1, max_size=3))
    return json.dumps(json.loads(LEARNED) | {"learners": sections}).encode()


@profile()
@given(data=st.data())
def test_sections_that_no_learner_wrote(tmp_path, learners, data):
    names = tuple(learner.learner for learner in learners)
    (tmp_path / "learned.json").write_bytes(data.draw(foreign_sections(names)))
    clock = ManualClock(NOW.monotonic_s, NOW.wall_s)
    LearnedState(tmp_path, learners, clock, threading.Lock(), proc_root=tmp_path).restore()


@profile()
@given(name=st.sampled_from(["current", "previous"]), target=st.text(st.characters(codec="utf-8"), min_size=1))
def test_links_of_the_model_store(tmp_path, name, target):
    folder = tmp_path / "models"
    folder.mkdir(exist_ok=True)
    link = folder / name
    link.unlink(missing_ok=True)
    with contextlib.suppress(OSError, ValueError):  # names that the system refuses
        link.symlink_to(target)
    store = ModelStore(tmp_path)
    current = store.current()
    assert current is None or current.parent == folder
    store.held()
