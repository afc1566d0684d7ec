"""The shipped Slurm prolog and epilog, run by real shells; what they write is read by the agent's own reader."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from agent.clock import Instant
from agent.owners.job_file import JobFile
from agent.owners.job_files import JobFiles, JobFilesConfig

SCRIPTS = Path(__file__).parents[2] / "slurm"
UUIDS = ("GPU-8f1b2c3d-0a1b-2c3d-4e5f-60718293a4b5", "MIG-8f1b2c3d-0a1b-2c3d-4e5f-60718293a4b6")
NOW = Instant(1000.0, 1_800_000_000.0)

SHELLS = [
    pytest.param(shell, marks=pytest.mark.skipif(shutil.which(shell[0]) is None, reason=f"{shell[0]} is not installed"))
    for shell in (["sh"], ["dash"], ["bash", "--posix"])
]


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def shell(request):
    return request.param


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "jobs.d"


@pytest.fixture
def proc(machine):
    return machine("dgx_slurm") / "proc"


def run(script: str, shell: list[str], *arguments: Path, **environment: str | bytes) -> str:
    """Run a script as slurmd does, without PATH, and return what it says; it never fails."""
    command = [shutil.which(shell[0]), *shell[1:], SCRIPTS / script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    return done.stderr.decode("utf-8", "replace")


def jobs(folder: Path, now: Instant = NOW) -> tuple[JobFile, ...]:
    files = JobFiles(JobFilesConfig(folder=str(folder)))
    found = files.read(now)
    assert files.errors == {}
    return found


def test_a_job_is_written_and_removed(shell, folder, proc):
    said = run(
        "prolog.sh",
        shell,
        folder,
        proc,
        SLURM_JOB_ID="812345",
        SLURM_JOB_UID="20001",
        SLURM_JOB_USER="ana",
        SLURM_CLUSTER_NAME="alpha",
        SLURM_JOB_GPUS="0,2-3,7",
        CUDA_VISIBLE_DEVICES="0,1,2,3",
        SLURM_JOB_END_TIME="1800003600",
        SLURM_JOB_COMMENT="night run workload=training checkpoint=1800",
    )
    assert said == ""
    # Minors 0, 2, 3 and 7 of the fixture's /proc/driver/nvidia.
    assert jobs(folder) == (
        JobFile(
            job_key="slurm:alpha/812345",
            job_id="812345",
            scheduler="slurm",
            user="ana",
            gpus=frozenset({"00000000:1b:00", "00000000:52:00", "00000000:61:00", "00000000:df:00"}),
            declared_class="training",
            checkpoint_interval_seconds=1800.0,
            expires_wall_s=1_800_003_600.0 + 86_400,
        ),
    )
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644  # the agent is another user
    assert run("epilog.sh", shell, folder, SLURM_JOB_ID="812345") == ""
    assert list(folder.iterdir()) == []


def test_minors_are_no_order_of_addresses(shell, folder, tmp_path):
    """As on some AMD boards: /dev/nvidia0 is the GPU with the highest address (jobstats issue 34)."""
    for minor, address in ((0, "0000:C1:00.0"), (1, "0000:41:00.0"), (10, "0000:01:00.0")):
        information = tmp_path / "driver" / "nvidia" / "gpus" / address / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA A100\nBus Location: \t {address}\nDevice Minor: \t {minor}\n")
    run("prolog.sh", shell, folder, tmp_path, SLURM_JOB_ID="5", SLURM_JOB_GPUS="0")
    assert jobs(folder)[0].gpus == {"00000000:c1:00"}


def test_uuids_go_before_numbers(shell, folder, proc):
    run("prolog.sh", shell, folder, proc, SLURM_JOB_ID="5", SLURM_JOB_GPUS="0,1", CUDA_VISIBLE_DEVICES=",".join(UUIDS))
    assert jobs(folder)[0].gpus == {uuid.lower() for uuid in UUIDS}


def test_uuids_as_old_drivers_write_them_for_instances(shell, folder, proc):
    instance = f"MIG-{UUIDS[0]}/3/0"
    run("prolog.sh", shell, folder, proc, SLURM_JOB_ID="5", SLURM_JOB_GPUS="0", CUDA_VISIBLE_DEVICES=instance)
    assert jobs(folder)[0].gpus == {instance.lower()}


@pytest.mark.parametrize(
    "devices",
    [
        "GPU-abc,GPU-",
        "GPU-",
        "GPU-abc",
        f"{UUIDS[0]},GPU-",
        f"{UUIDS[0]},,{UUIDS[1]}",
        f"{UUIDS[0]}0",
        UUIDS[0].replace("8f1b", "8g1b"),
        f"MIG-{UUIDS[0]}/3",
        f"MIG-{UUIDS[0]}/3/0/1",
        f"MIG-{UUIDS[0]}/3/x",
        f"MIG-{UUIDS[0]}/33333/0",
    ],
)
def test_malformed_uuids_are_none(shell, folder, proc, devices):
    """The agent would refuse the whole file; minor 0 of the fixture is 1b:00."""
    run("prolog.sh", shell, folder, proc, SLURM_JOB_ID="5", SLURM_JOB_GPUS="0", CUDA_VISIBLE_DEVICES=devices)
    assert jobs(folder)[0].gpus == {"00000000:1b:00"}


def test_numbers_of_instances_are_no_minors(shell, folder, tmp_path):
    gpu = tmp_path / "driver" / "nvidia" / "gpus" / "0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Bus Location: \t 0000:01:00.0\nDevice Minor: \t 0\n")
    (tmp_path / "driver" / "nvidia" / "capabilities" / "gpu0" / "mig" / "gi1").mkdir(parents=True)
    said = run("prolog.sh", shell, folder, tmp_path, SLURM_JOB_ID="5", SLURM_JOB_GPUS="0")
    assert "not known" in said
    assert jobs(folder) == (JobFile(job_key="slurm:5", job_id="5", scheduler="slurm"),)


def test_a_job_without_gpus_writes_nothing(shell, folder, proc):
    assert run("prolog.sh", shell, folder, proc, SLURM_JOB_ID="5") == ""
    assert not folder.exists()


@pytest.mark.parametrize("job_id", ["", "../../etc/passwd", "5;rm", "5\n6", "9" * 30, "-1", "$(id)"])
def test_a_job_id_that_is_no_number_touches_no_file(shell, folder, proc, job_id):
    assert "is no number" in run("prolog.sh", shell, folder, proc, SLURM_JOB_ID=job_id, SLURM_JOB_GPUS="0")
    assert not folder.exists()
    if not job_id.isdigit():
        assert "is no number" in run("epilog.sh", shell, folder, SLURM_JOB_ID=job_id)


@pytest.mark.parametrize("name", ['a"b', "a\\", "a\nb", b"\xff", "<b>", "$(id)", "`id`", "*", " ", "x" * 65, "é"])
def test_names_cannot_break_the_file(shell, folder, proc, name):
    run(
        "prolog.sh",
        shell,
        folder,
        proc,
        SLURM_JOB_ID="5",
        SLURM_JOB_UID="20001",
        SLURM_JOB_USER=name,
        SLURM_CLUSTER_NAME=name,
        SLURM_JOB_NAME=name,
        SLURM_JOB_COMMENT=name,
        SLURM_JOB_GPUS="1",
    )
    (job,) = jobs(folder)
    assert (job.job_key, job.user) == ("slurm:5", "20001")


@pytest.mark.parametrize(
    "comment",
    [
        'workload=train"ing',
        "workload=",
        "checkpoint=0",
        "checkpoint=99999999",
        "checkpoint=1e3",
        "checkpoint=5;id",
        "* ?",
    ],
)
def test_a_comment_declares_only_what_is_allowed(shell, folder, proc, comment):
    run("prolog.sh", shell, folder, proc, SLURM_JOB_ID="5", SLURM_JOB_GPUS="1", SLURM_JOB_COMMENT=comment)
    (job,) = jobs(folder)
    assert (job.declared_class, job.checkpoint_interval_seconds) == (None, None)


def test_of_what_a_comment_declares_twice_the_last_counts(shell, folder, proc):
    comment = "workload=training checkpoint=60 workload=inference checkpoint=1800 workload=bad checkpoint=0"
    run("prolog.sh", shell, folder, proc, SLURM_JOB_ID="5", SLURM_JOB_GPUS="1", SLURM_JOB_COMMENT=comment)
    (job,) = jobs(folder)
    assert (job.declared_class, job.checkpoint_interval_seconds) == ("inference", 1800.0)


@pytest.mark.parametrize("numbers", ["*", "a-b", "0-", "-3", "5-2", "9999999999", '"', "08"])
def test_numbers_that_make_no_sense_name_no_gpu(shell, folder, proc, numbers):
    run("prolog.sh", shell, folder, proc, SLURM_JOB_ID="5", SLURM_JOB_GPUS=numbers)
    assert jobs(folder)[0].gpus is None


def test_a_planted_link_is_replaced_and_not_followed(shell, folder, proc, tmp_path):
    folder.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.mkdir()
    (folder / "slurm-5.json").symlink_to(victim)
    run("prolog.sh", shell, folder, proc, SLURM_JOB_ID="5", SLURM_JOB_GPUS="1")
    assert list(victim.iterdir()) == []
    assert not (folder / "slurm-5.json").is_symlink()
    assert jobs(folder)[0].job_id == "5"


def test_a_folder_that_cannot_be_made_does_not_fail_the_job(shell, proc, tmp_path):
    (tmp_path / "file").write_text("")
    said = run("prolog.sh", shell, tmp_path / "file" / "jobs.d", proc, SLURM_JOB_ID="5", SLURM_JOB_GPUS="1")
    assert "cannot be made" in said
    run("epilog.sh", shell, tmp_path / "file" / "jobs.d", SLURM_JOB_ID="5")


def test_the_epilog_removes_its_own_file_alone(shell, folder):
    folder.mkdir(parents=True)
    for name in ("slurm-5.json", ".slurm-5.abc", "slurm-55.json", ".slurm-55.abc", "exp.json"):
        (folder / name).write_text("{}")
    run("epilog.sh", shell, folder, SLURM_JOB_ID="5")
    assert sorted(path.name for path in folder.iterdir()) == [".slurm-55.abc", "exp.json", "slurm-55.json"]


def test_the_scripts_can_be_started():
    assert all(os.access(SCRIPTS / name, os.X_OK) for name in ("prolog.sh", "epilog.sh"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(["shellcheck", *SCRIPTS.glob("*.sh")], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)
