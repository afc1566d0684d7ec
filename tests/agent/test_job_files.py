"""Job files: what they may say, and what a bad one costs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clock import Instant, process_cpu_seconds
from agent.owners.job_file import JobFile, JobFileError, device_name, parse_job_file
from agent.owners.job_files import JobFiles, JobFilesConfig

UUID = "GPU-8f1b2c3d-0a1b-2c3d-4e5f-60718293a4b5"
MIG = "MIG-8f1b2c3d-0a1b-2c3d-4e5f-60718293a4b6"
#: Long after anything was written, so that the folder's stamp is not fresh.
LATER = Instant(1000.0, 4_000_000_000.0)


def parse(**keys: object) -> JobFile:
    return parse_job_file(json.dumps({"job_key": "exp-17", **keys}).encode())


def write(folder: Path, name: str, **keys: object) -> Path:
    path = folder / name
    path.write_text(json.dumps({"job_key": path.stem, **keys}))
    return path


def reader(folder: Path, **changes: int) -> JobFiles:
    return JobFiles(JobFilesConfig(folder=str(folder), **changes))


def keys(files: JobFiles, now: Instant = LATER) -> list[str]:
    return [job.job_key for job in files.read(now)]


def test_a_full_file_is_read():
    job = parse(
        job_id="812345",
        scheduler="slurm",
        namespace="research",
        pod="p-0",
        container="main",
        user="ana",
        gpus=[UUID.upper(), MIG, "0000:1B:00.0", "1b:00.0", "00000000:9d:00"],
        workload="training",
        expected_checkpoint_seconds=1800,
        expires=1_900_000_000.5,
    )
    assert job == JobFile(
        job_key="exp-17",
        job_id="812345",
        scheduler="slurm",
        namespace="research",
        pod="p-0",
        container="main",
        user="ana",
        gpus=frozenset({UUID.lower(), MIG.lower(), "00000000:1b:00", "00000000:9d:00"}),
        declared_class="training",
        checkpoint_interval_seconds=1800.0,
        expires_wall_s=1_900_000_000.5,
    )


def test_only_the_job_key_is_needed_and_null_says_nothing():
    assert parse(gpus=None, user=None, workload=None, expires=None) == JobFile(job_key="exp-17")


def test_names_of_devices_have_one_form():
    assert device_name("0:1b:00.0") is None
    assert device_name("1B:00.0") == device_name("0000:1b:00") == device_name("00000000:1B:00.0") == "00000000:1b:00"
    assert device_name("MIG-" + UUID + "/7/0") == f"mig-{UUID.lower()}/7/0"
    assert device_name("GPU-8f1b2c3d") is None


@pytest.mark.parametrize(
    ("keys", "reason", "words"),
    [
        ({"job_key": None}, "no_job_key", "missing"),
        ({"job_key": ""}, "no_job_key", "missing"),
        ({"job_key": "other"}, "bad_value", "other"),
        ({"job_key": 812345}, "bad_type", "text in quotes"),
        ({"job_id": 812345}, "bad_type", '"job_id" has to be text'),
        ({"job_key": "x" * 257}, "bad_value", "longer than 256"),
        ({"user": "a\nb"}, "bad_value", "cannot be printed"),
        ({"user": "a\x00b"}, "bad_value", "cannot be printed"),
        ({"user": "a\u202eb"}, "bad_value", "cannot be printed"),  # turns the direction of writing
        ({"user": "\ud800"}, "bad_value", "cannot be printed"),  # half a pair
        ({"user": " ana"}, "bad_value", "blanks"),
        ({"scheduler": "Slurm!"}, "bad_value", "lower case"),
        ({"gpus": UUID}, "bad_type", "list"),
        ({"gpus": [0]}, "gpu_index", "write the UUID"),
        ({"gpus": [True]}, "gpu_index", "write the UUID"),
        ({"gpus": ["3"]}, "gpu_index", "write the UUID"),
        ({"gpus": [[UUID]]}, "bad_type", "texts"),
        ({"gpus": ["nvidia0"]}, "bad_gpu", "nvidia0"),
        ({"gpus": [f"GPU-{i:08x}-0a1b-2c3d-4e5f-60718293a4b5" for i in range(129)]}, "bad_value", "more than 128"),
        ({"workload": "train"}, "bad_value", "training, inference, idle, other"),
        ({"workload": "unknown"}, "bad_value", "workload"),
        ({"workload": ["training"]}, "bad_value", "workload"),
        ({"expected_checkpoint_seconds": "1800"}, "bad_type", "number"),
        ({"expected_checkpoint_seconds": True}, "bad_type", "number"),
        ({"expected_checkpoint_seconds": 0}, "bad_value", "1 to 2678400"),
        ({"expected_checkpoint_seconds": -5}, "bad_value", "1 to 2678400"),
        ({"expires": 1_900_000_000_000}, "bad_value", "Unix seconds"),  # milliseconds
        ({"expires": 10**300}, "bad_value", "Unix seconds"),
    ],
)
def test_what_is_wrong_is_named(keys, reason, words):
    with pytest.raises(JobFileError, match=words) as raised:
        parse(**keys)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"exp"',
        b'{"job_key": "a", "expires": NaN}',
        b'{"job_key": "a", "expires": Infinity}',
        b'{"job_key": "a", "expires": 1e999}',
        b'{"job_key": "a", "job_key": "b"}',
        b'{"job_key": "\xff"}',
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b'{"job_key": "a", "expires": ' + b"9" * 50_000 + b"}",
    ],
    ids=lambda data: repr(data[:24]),
)
def test_what_is_no_job_file_is_refused(data):
    with pytest.raises(JobFileError):
        parse_job_file(data)


@given(st.binary(max_size=300) | st.text(alphabet='{}[]":,\\u0aE+-.', max_size=40).map(str.encode))
def test_no_content_raises_anything_else(data):
    with contextlib.suppress(JobFileError):
        assert parse_job_file(data).job_key


@given(
    st.dictionaries(
        st.sampled_from(["job_key", "job_id", "gpus", "workload", "expires", "expected_checkpoint_seconds", "x"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.none(), max_size=2),
    )
)
def test_no_value_of_any_type_raises_anything_else(value):
    try:
        job = parse_job_file(json.dumps(value).encode())
    except JobFileError:
        return
    assert job.job_key.isprintable()


def test_files_come_by_name_and_others_are_passed_over(tmp_path):
    write(tmp_path, "b.json")
    write(tmp_path, "a.json")
    write(tmp_path, ".c.json")  # being written
    write(tmp_path, "d.json.tmp")
    files = reader(tmp_path)
    assert keys(files) == ["a", "b"]
    assert files.errors == {}


def test_a_folder_that_is_not_there_is_no_fault_and_may_come(tmp_path):
    files = reader(tmp_path / "jobs.d")
    assert keys(files) == []
    assert files.errors == {}
    (tmp_path / "jobs.d").mkdir()
    write(tmp_path / "jobs.d", "a.json")
    assert keys(files, LATER.later(5)) == ["a"]


def test_a_file_ends_with_its_removal_and_a_new_one_is_seen(tmp_path):
    a = write(tmp_path, "a.json")
    files = reader(tmp_path)
    assert keys(files) == ["a"]
    a.unlink()
    write(tmp_path, "b.json")
    assert keys(files, LATER.later(5)) == ["b"]


def test_a_file_ends_at_its_own_time_and_comes_back_with_the_clock(tmp_path):
    write(tmp_path, "a.json", expires=LATER.wall_s + 10)
    files = reader(tmp_path)
    assert keys(files, LATER.later(9.9)) == ["a"]
    assert keys(files, LATER.later(10)) == []
    assert keys(files, Instant(LATER.monotonic_s + 11, LATER.wall_s)) == ["a"]  # the clock was stepped back


def test_a_file_is_read_again_only_when_it_changed(tmp_path):
    path = write(tmp_path, "a.json", user="ana")
    files = reader(tmp_path)
    first = files.read(LATER)[0]
    assert files.read(LATER.later(5))[0] is first
    write(tmp_path, ".a.json.tmp", user="bob").rename(path)  # as writers should
    assert files.read(LATER.later(10))[0].user == "bob"
    path.write_text(json.dumps({"job_key": "a", "user": "eve"}))  # and as some do, without a change of the folder
    assert files.read(LATER.later(15))[0].user == "eve"


def test_a_new_name_is_seen_although_the_folder_has_the_same_stamp(tmp_path):
    write(tmp_path, "a.json")
    stamp = tmp_path.stat().st_mtime_ns
    fresh = Instant(1000.0, stamp / 1e9 + 0.001)
    files = reader(tmp_path)
    assert keys(files, fresh) == ["a"]
    write(tmp_path, "b.json")
    os.utime(tmp_path, ns=(stamp, stamp))  # within the grain of the file system's clock
    assert keys(files, fresh.later(5)) == ["a", "b"]


def test_one_bad_file_costs_itself_and_is_logged_once(tmp_path, caplog):
    write(tmp_path, "good.json")
    bad = tmp_path / "bad.json"
    bad.write_text('{"job_key": "x", "gpus": [0]}')
    files = reader(tmp_path)
    with caplog.at_level(logging.WARNING):
        for tick in range(5):
            assert keys(files, LATER.later(5 * tick)) == ["good"]
        assert files.errors == {"gpu_index": 1}
        assert len(caplog.records) == 1
        assert "'bad.json' is left out: \"gpus\" holds '0'" in caplog.text
        bad.write_text('{"job_key": "x", "gpus": [0, 1]}')
        keys(files, LATER.later(30))
    assert files.errors == {"gpu_index": 2}
    assert len(caplog.records) == 2


def test_an_unknown_key_is_told_and_the_file_counts(tmp_path, caplog):
    write(tmp_path, "a.json", gpu_ids=[1], **{"line\nbreak": 1})
    files = reader(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert keys(files) == ["a"]
        assert keys(files, LATER.later(5)) == ["a"]
    assert files.errors == {"unknown_key": 1}
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()


def test_links_pipes_folders_and_devices_are_not_opened(tmp_path):
    folder = tmp_path / "jobs.d"
    folder.mkdir()
    write(tmp_path, "secret.json")
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    (folder / "dangling.json").symlink_to("nowhere")
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    write(folder, "good.json")
    files = reader(folder)
    done: list[list[str]] = []
    thread = threading.Thread(target=lambda: done.append(keys(files)), daemon=True)
    thread.start()
    thread.join(timeout=10)  # a pipe without a writer would block for ever
    assert done == [["good"]]
    assert files.errors == {"not_a_file": 4}


def test_a_file_of_a_gigabyte_costs_no_read(tmp_path):
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 30)  # sparse
    write(tmp_path, "good.json")
    files = reader(tmp_path)
    start = process_cpu_seconds()
    assert keys(files) == ["good"]
    assert process_cpu_seconds() - start < 0.2
    assert files.errors == {"too_large": 1}


def test_the_size_is_bounded_to_the_byte(tmp_path):
    text = json.dumps({"job_key": "a"}).encode()
    (tmp_path / "fits.json").write_bytes(text.ljust(100))
    (tmp_path / "beyond.json").write_bytes(text.ljust(101))
    files = reader(tmp_path, file_bytes=100)
    assert len(files.read(LATER)) == 1
    assert files.errors == {"too_large": 1}


def test_of_thousands_of_files_the_newest_are_read(tmp_path):
    for number in range(5000):
        path = write(tmp_path, f"{number:04}.json")
        os.utime(path, (2_000_000_000 - number, 2_000_000_000 - number))
    files = reader(tmp_path)
    start = process_cpu_seconds()
    assert keys(files) == [f"{number:04}" for number in range(256)]
    assert files.errors == {"too_many_files": 1}
    assert keys(files, LATER.later(5)) == [f"{number:04}" for number in range(256)]
    assert process_cpu_seconds() - start < 1.0
    assert files.errors == {"too_many_files": 1}


def test_a_name_that_is_not_utf8_is_logged_as_an_escape(tmp_path, caplog):
    (tmp_path / os.fsdecode(b"\xff<b>.json")).write_text("{")
    files = reader(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert keys(files) == []
    assert r"\udcff<b>" in caplog.text
    caplog.text.encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user who may not read the folder")
def test_a_folder_that_may_not_be_read_is_counted(open_path, caplog):
    folder = open_path / "jobs.d"
    folder.mkdir(mode=0o700)
    write(folder, "a.json")
    files = reader(folder)
    os.seteuid(65534)
    try:
        assert keys(files) == []
        assert keys(files) == []
    finally:
        os.seteuid(0)
    assert files.errors == {"folder_unreadable": 1}
    assert len(caplog.records) == 1
    assert keys(files, LATER.later(5)) == ["a"]
