"""Who holds a GPU: job files, pods and processes put together, in all the ways in which they agree and differ."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clock import Instant
from agent.gpu_roster import GpuRoster
from agent.owners.holders import PodOwner
from agent.owners.job_files import JobFilesConfig
from agent.owners.processes import ProcessesConfig, ProcessOwners
from agent.owners.users import Users, parse_passwd
from agent.records import GpuInfo, GpuKey, GpuMigInfo, GpuProcess, GpuSample, GpuSlowSample, GpuState, Holder, Tick
from agent.samplers.owners import OwnersConfig, OwnersSampler

NOW = Instant(1000.0, 1_800_000_000.0)
CARD = GpuKey(0, "GPU-00000000-0000-4000-8000-000000000000")
NEXT = GpuKey(1, "GPU-00000000-0000-4000-8000-000000000001")
FIRST, SECOND = CARD._replace(gpu_i_id=1), CARD._replace(gpu_i_id=2)
MIGS = {
    FIRST: "MIG-00000000-0000-4000-8000-0000000000f1",
    SECOND: "MIG-00000000-0000-4000-8000-0000000000f2",
}
ADDRESSES = {CARD: "00000000:1B:00.0", NEXT: "00000000:43:00.0"}
ID = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0"
POD = "6d0f7c1a-3a55-4c0e-9d53-2f7c8b1e4a90"

SLURM = "/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0"
KUBE = f"/kubepods/burstable/pod{POD}/{ID}"
DOCKER = f"/docker/{ID}"
SESSION = "/user.slice/user-{}.slice/session-1.scope"


class Node:
    """A host in a folder: processes, job files, pods, and a roster that lists what the driver would."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys, self.folder = root / "proc", root / "sys", root / "jobs.d"
        for folder in (self.proc, self.sys, self.folder):
            folder.mkdir()
        (root / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nana:x:1000:1000::/home/ana:/bin/sh\n")
        self.passwd = root / "passwd"
        self.pods: dict[str, Sequence[PodOwner]] | None = None
        self.classes: dict[int, str] = {}
        self.roster = GpuRoster()
        self.now = NOW
        self.lists: dict[GpuKey, Sequence[int] | None] = {}
        self.migs: dict[GpuKey, str] = {}
        self.made: OwnersSampler | None = None

    @property
    def sampler(self) -> OwnersSampler:
        if self.made is None:
            config = OwnersConfig(job_files=JobFilesConfig(folder=str(self.folder)))
            self.made = OwnersSampler(
                self.roster,
                config,
                proc_root=self.proc,
                sys_root=self.sys,
                passwd=self.passwd,
                pods=lambda: self.pods,
                declared=self.classes.get,
            )
        return self.made

    def process(
        self, pid: int, path: str, uid: int = 20001, name: str = "python3", parent: int = 1, start: int = 5000
    ) -> int:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "cgroup").write_text(f"0::{path}\n")
        # Field 22 is the start; proc_pid_stat(5).
        (folder / "stat").write_text(f"{pid} ({name}) S {parent} " + "0 " * 17 + f"{start} " + "0 " * 30 + "0\n")
        (folder / "status").write_text(f"Name:\t{name}\nPPid:\t{parent}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        return pid

    def job(self, name: str, **keys: object) -> None:
        path = self.folder / (name.replace("/", "_") + ".json")
        path.write_text(json.dumps({"job_key": name, **keys}))

    def on(self, key: GpuKey, *pids: int, is_seen: bool = True) -> None:
        self.lists[key] = pids if is_seen else None

    def observe(self) -> None:
        times = {"monotonic_s": self.now.monotonic_s, "wall_s": self.now.wall_s}
        records = []
        for key in {key._replace(gpu_i_id=None) for key in self.lists}:
            address = ADDRESSES[key]
            records.append(GpuInfo(**times, key=key, pci_bus_id=address, device=f"nvidia{key.gpu + 4}"))
        for key, mig in self.migs.items():
            records += [GpuMigInfo(**times, key=key, mig_uuid=mig), GpuSample(**times, key=key)]
        for key, pids in self.lists.items():
            processes = None if pids is None else tuple(map(GpuProcess, pids))
            records.append(GpuSlowSample(**times, key=key, processes=processes))
        self.roster.observe(Tick(**times, records=tuple(records)))

    def all(self) -> dict[GpuKey, tuple[Holder, ...]]:
        self.observe()
        found = {record.key: record.holders for record in self.sampler.sample(self.now)}
        self.now = self.now.later(5)
        for holders in found.values():
            assert not holders or abs(sum(holder.share_ratio for holder in holders) - 1) < 1e-12
            assert len({holder.job_key for holder in holders}) == len(holders) <= 8
        return found

    def holders(self, key: GpuKey = CARD) -> tuple[Holder, ...]:
        return self.all()[key]

    def counts(self, key: GpuKey = CARD) -> dict[str, int | None]:
        return {holder.job_key: holder.processes for holder in self.holders(key)}


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    made.sampler.close()


# Processes alone.


def test_an_empty_list_is_nobody_and_no_list_is_not_known(node):
    node.on(CARD)
    node.on(NEXT, is_seen=False)
    assert node.all() == {CARD: ()}


def test_no_gpus_are_no_records(node):
    assert node.sampler.probe()
    assert node.sampler.sample(NOW) == ()


def test_ranks_of_one_job_are_one_holder(node):
    node.on(CARD, node.process(100, SLURM.format(812345)), node.process(101, SLURM.format(812345)))
    assert node.holders() == (Holder("slurm:812345", job_id="812345", scheduler="slurm", user="20001", processes=2),)


def test_two_jobs_share_a_gpu_equally(node):
    node.on(CARD, node.process(100, SLURM.format(7)), node.process(101, SLURM.format(7)), node.process(102, DOCKER))
    assert [(holder.job_key, holder.share_ratio, holder.processes) for holder in node.holders()] == [
        ("docker:0f1e2d3c4b5a", 0.5, 1),
        ("slurm:7", 0.5, 2),
    ]


@pytest.mark.parametrize(
    ("path", "uid", "holder"),
    [
        (
            KUBE,
            1000,
            Holder(f"kubernetes:{POD}", job_id=POD, scheduler="kubernetes", container="0f1e2d3c4b5a", user="ana"),
        ),
        (
            DOCKER,
            0,
            Holder(
                "docker:0f1e2d3c4b5a",
                job_id="0f1e2d3c4b5a",
                scheduler="docker",
                container="0f1e2d3c4b5a",
                user="root",
            ),
        ),
        (
            "/system.slice/ollama.service",
            997,
            Holder("systemd:ollama.service", job_id="ollama.service", scheduler="systemd", user="997"),
        ),
        (SESSION.format(1000), 1000, Holder("process:1000", scheduler="process", user="ana")),
        ("/", 20001, Holder("process:20001", scheduler="process", user="20001")),
    ],
)
def test_each_kind_of_owner(node, path, uid, holder):
    node.on(CARD, node.process(100, path, uid=uid))
    assert node.holders() == (holder._replace(processes=1),)


def test_the_key_of_a_person_is_a_number(node):
    """The key is always exported, the name of the user on demand alone."""
    node.on(CARD, node.process(100, SESSION.format(1000), uid=1000))
    (holder,) = node.holders()
    assert (holder.job_key, holder.user) == ("process:1000", "ana")


def test_users_that_differ_are_left_empty(node):
    node.on(CARD, node.process(100, DOCKER, uid=1), node.process(101, DOCKER, uid=2))
    assert node.holders()[0].user == ""


def test_hidden_processes_are_somebody(node):
    node.on(CARD, 500, 501)
    assert node.holders() == (Holder("", processes=2),)
    node.holders()
    assert node.sampler.errors == {"hidden_process": 2}  # each once


def test_a_process_that_ended_is_nobody(node):
    """A real process, for the open file of one that ended fails: the driver's list is up to 5 s old."""
    with subprocess.Popen(["sleep", "60"]) as process:
        owners = ProcessOwners()
        assert set(owners.look_up({process.pid})) == {process.pid}
        process.kill()
        process.wait()
        assert owners.look_up({process.pid}) == {}
        assert owners.look_up({process.pid}) == {}
        assert owners.errors == {}
        owners.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_closed_with_their_processes():
    before = open_files()
    owners = ProcessOwners(config=ProcessesConfig(open_files=1))
    pids = {os.getpid(), os.getppid()}
    assert set(owners.look_up(pids)) == pids
    assert open_files() == before + 1
    assert set(owners.look_up(pids)) == pids
    assert open_files() == before + 1
    owners.look_up(set())
    assert open_files() == before


def test_processes_beyond_the_bound_are_counted(tmp_path):
    node = Node(tmp_path)
    owners = ProcessOwners(node.proc, ProcessesConfig(processes=2))
    found = owners.look_up({node.process(pid, DOCKER) for pid in (1, 2, 3)})
    assert [found[pid].owner is None for pid in (1, 2, 3)] == [False, False, True]
    assert owners.errors == {"too_many_processes": 1}
    owners.look_up({1, 2, 3})
    assert owners.errors == {"too_many_processes": 1}


def test_a_process_that_ends_keeps_its_owner(node):
    """Version 1 shows a process that exits at the root; its GPU is not another user's for that moment."""
    node.on(CARD, node.process(100, SLURM.format(7)))
    assert node.counts() == {"slurm:7": 1}
    (node.proc / "100" / "cgroup").write_text("0::/\n")
    assert node.counts() == {"slurm:7": 1}


def test_a_process_that_is_moved_is_followed(node):
    node.on(CARD, node.process(100, "/system.slice/slurmd.service"))
    assert node.counts() == {"systemd:slurmd.service": 1}
    node.process(100, SLURM.format(7))
    assert node.counts() == {"slurm:7": 1}


def test_a_sluid_is_resolved_by_the_slurmstepd_above(node):
    node.process(50, "/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/slurm", name="slurmstepd", uid=0)
    (node.proc / "50" / "cmdline").write_bytes(b"slurmstepd: [812345.0]\0")
    path = "/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0"
    node.process(60, path, name="slurmstepd", parent=50)  # a program of the job that poses as one
    (node.proc / "60" / "cmdline").write_bytes(b"slurmstepd: [1.0]\0")
    node.process(70, path, name="torchrun", parent=60, uid=0)
    (node.proc / "70" / "cmdline").write_bytes(b"slurmstepd: [2.0]\0")
    node.on(CARD, node.process(100, path, parent=70))
    assert node.holders()[0][:3] == ("slurm:812345", "812345", "slurm")


def test_a_sluid_without_its_slurmstepd_is_the_name(node):
    node.on(CARD, node.process(100, "/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0", parent=99))
    assert node.counts() == {"slurm:s5K1KKYAYG5D00": 1}


def test_the_service_that_shares_a_gpu_does_not_hold_it(node):
    node.process(90, "/system.slice/mps.service", name="nvidia-cuda-mps")
    node.on(CARD, 90, node.process(100, SLURM.format(7)))
    node.on(NEXT, 90)
    found = node.all()
    assert [holder.job_key for holder in found[CARD]] == ["slurm:7"]
    assert [holder.job_key for holder in found[NEXT]] == ["systemd:mps.service"]


def test_more_than_eight_holders_are_seven_and_the_others(node):
    """Ten jobs: seven with a tenth each, three together with three tenths and their four processes."""
    pids = [node.process(100 + job, SLURM.format(10 + job)) for job in range(10)]
    node.on(CARD, *pids, node.process(200, SLURM.format(19)))
    holders = node.holders()
    assert [holder.job_key for holder in holders] == [f"slurm:{job}" for job in range(10, 17)] + ["other"]
    assert holders[0].share_ratio == pytest.approx(0.1)
    assert holders[-1] == Holder("other", share_ratio=pytest.approx(0.3), processes=4)
    assert node.sampler.errors == {"too_many_holders": 1}


def test_all_holders_are_counted_and_that_they_are_too_many_once(node):
    pids = [node.process(100 + job, SLURM.format(10 + job)) for job in range(12)]
    node.on(CARD, *pids)
    node.on(NEXT, *pids[:8])
    for _ in range(3):
        node.observe()
        counts = {record.key: record.holder_count for record in node.sampler.sample(node.now)}
        assert counts == {CARD: 12, NEXT: 8}
        node.now = node.now.later(5)
    assert node.sampler.errors == {"too_many_holders": 1}
    node.on(CARD)
    node.all()
    node.on(CARD, *pids)  # it begins anew
    node.all()
    assert node.sampler.errors == {"too_many_holders": 2}


def test_programs_declare_where_they_agree(node):
    node.on(CARD, node.process(100, SLURM.format(7)), node.process(101, SLURM.format(7)))
    node.classes.update({100: "training"})
    assert node.holders()[0].declared_class == "training"
    node.classes.update({101: "inference"})
    assert node.holders()[0].declared_class is None


# A GPU that hangs or is lost.


def fail(node: Node, state: str, *silent: GpuKey) -> None:
    """Let a minute go by in which the first card is said to have failed, and nothing is listed of `silent`."""
    for key in silent:
        del node.lists[key]
    for _ in range(12):
        times = {"monotonic_s": node.now.monotonic_s, "wall_s": node.now.wall_s}
        said = (GpuState(**times, key=CARD, state=state), GpuInfo(**times, key=CARD, pci_bus_id=ADDRESSES[CARD]))
        node.roster.observe(Tick(**times, records=said))
        node.all()


@pytest.mark.parametrize("state", ["hung", "lost", "reset_required"])
def test_a_gpu_that_failed_keeps_the_owner_whose_processes_live(node, state):
    node.on(CARD, node.process(100, SLURM.format(7)), node.process(101, SLURM.format(7)))
    node.on(NEXT)
    assert node.counts() == {"slurm:7": 2}
    node.on(CARD, is_seen=False)  # the ticks before the driver is said to hang
    node.all()
    fail(node, state, CARD)
    assert node.counts() == {"slurm:7": 2}
    (node.proc / "101" / "cgroup").unlink()
    node.made._processes.close()  # an open file of /proc fails when its process ends; one of a folder does not
    assert node.counts() == {"slurm:7": 1}


def test_a_number_given_again_is_not_the_process_of_a_gpu_that_failed(node):
    node.on(CARD, node.process(100, SLURM.format(7), start=5000))
    node.on(NEXT)
    node.all()
    fail(node, "hung", CARD)
    node.made._processes.close()
    node.process(100, DOCKER, start=9000)
    assert node.all() == {NEXT: ()}
    node.process(100, SLURM.format(7), start=5000)  # it ended, and stays so
    assert node.all() == {NEXT: ()}


def test_nobody_knows_who_holds_a_gpu_that_failed_when_its_processes_ended(node):
    node.on(CARD, node.process(100, SLURM.format(7)))
    node.on(NEXT)
    node.all()
    shutil.rmtree(node.proc / "100")
    node.made._processes.close()
    fail(node, "lost", CARD)
    assert node.all() == {NEXT: ()}


def test_a_gpu_that_works_is_not_held_by_what_it_listed_long_ago(node):
    """Its list could not be read for a minute: whether the process let go of it, nobody can say."""
    node.on(CARD, node.process(100, SLURM.format(7)))
    node.on(NEXT)
    node.all()
    fail(node, "ok", CARD)
    assert node.all() == {NEXT: ()}
    fail(node, "hung")  # by now that list is too old
    assert node.all() == {NEXT: ()}


def test_a_gpu_that_answers_again_is_held_by_what_it_lists(node):
    node.on(CARD, node.process(100, SLURM.format(7)))
    node.on(NEXT)
    node.all()
    fail(node, "hung", CARD)
    fail(node, "ok")
    node.on(CARD)
    assert node.all() == {CARD: (), NEXT: ()}


def test_instances_of_a_card_that_failed_keep_their_owners(divided):
    divided.on(FIRST, divided.process(100, SLURM.format(7)))
    divided.on(NEXT)
    divided.all()
    divided.migs.clear()
    fail(divided, "hung", FIRST, SECOND, CARD)
    found = divided.all()
    assert [holder.job_key for holder in found[FIRST]] == ["slurm:7"]
    assert [holder.job_key for holder in found[CARD]] == ["slurm:7"]


def test_a_process_without_an_open_file_is_followed_by_its_start(tmp_path):
    node = Node(tmp_path)
    owners = ProcessOwners(node.proc, ProcessesConfig(open_files=0))
    node.process(100, SLURM.format(7), start=5000)
    first = owners.look_up({100})[100]
    assert (first.start_ticks, first.owner.name) == (5000, "7")
    (node.proc / "100" / "cgroup").write_text("0::/\n")  # it exits
    assert owners.look_up({100})[100].owner.name == "7"
    node.process(100, "/", start=9000)  # another one
    assert owners.look_up({100})[100].owner.scheduler == "process"


# Job files.


@pytest.mark.parametrize("device", [CARD.uuid, CARD.uuid.upper(), "0000:1b:00.0", "1b:00.0"])
def test_a_job_file_holds_a_gpu_without_a_process(node, device):
    node.job("exp-17", gpus=[device], user="ana", workload="training", expected_checkpoint_seconds=1800)
    node.on(CARD)
    node.on(NEXT)
    assert node.all() == {
        CARD: (
            Holder("exp-17", user="ana", declared_class="training", checkpoint_interval_seconds=1800.0, processes=0),
        ),
        NEXT: (),
    }


def test_a_job_file_is_seen_although_the_processes_are_not(node):
    node.job("exp-17", gpus=[CARD.uuid])
    node.on(CARD, is_seen=False)
    assert node.holders() == (Holder("exp-17", processes=None),)


def test_processes_count_for_the_job_file_of_their_gpu(node):
    """Preferred over guessing: a container started by the launcher is the launcher's."""
    node.job("exp-17", gpus=[CARD.uuid])
    node.on(CARD, node.process(100, DOCKER), node.process(101, DOCKER), 500)
    assert node.counts() == {"exp-17": 3}


def test_the_prolog_gives_the_job_of_the_cgroup_its_key(node):
    node.job("slurm:alpha/7", job_id="7", scheduler="slurm", gpus=[CARD.uuid], user="ana")
    node.on(CARD, node.process(100, SLURM.format(7)))
    # A GPU that the file does not name, but whose process is plainly of that job.
    node.on(NEXT, node.process(101, SLURM.format(7)))
    found = node.all()
    assert found[CARD] == found[NEXT]
    assert found[CARD][0][:3] == ("slurm:alpha/7", "7", "slurm")


def test_another_job_on_a_claimed_gpu_is_another_holder(node):
    node.job("slurm:7", job_id="7", scheduler="slurm", gpus=[CARD.uuid])
    node.on(CARD, node.process(100, SLURM.format(7)), node.process(101, SLURM.format(8)))
    assert node.counts() == {"slurm:7": 1, "slurm:8": 1}


def test_another_users_session_on_a_claimed_gpu_is_another_holder(node):
    node.job("exp-17", gpus=[CARD.uuid], user="bob")
    node.job("exp-18", gpus=[NEXT.uuid], user="20001")
    node.on(CARD, node.process(100, SESSION.format(1000), uid=1000))  # ana
    node.on(NEXT, node.process(101, SESSION.format(20001)), node.process(102, SESSION.format(1000), uid=1000))
    assert node.counts(CARD) == {"exp-17": 0, "process:1000": 1}
    assert node.counts(NEXT) == {"exp-18": 1, "process:1000": 1}


def test_two_job_files_on_one_gpu_share_it(node):
    node.job("a", gpus=[CARD.uuid])
    node.job("b", gpus=["0000:1b:00.0", CARD.uuid])
    node.on(CARD)
    assert node.holders() == (Holder("a", share_ratio=0.5, processes=0), Holder("b", share_ratio=0.5, processes=0))
    node.on(CARD, node.process(100, DOCKER))  # whose it is, nobody knows
    assert node.counts() == {"a": None, "b": None}
    node.job("b", gpus=[CARD.uuid], container=ID)
    assert node.counts() == {"a": 0, "b": 1}


def test_two_files_of_one_job_are_one_holder(node):
    (node.folder / "1.json").write_text(json.dumps({"job_key": "exp", "gpus": [CARD.uuid], "user": "ana"}))
    (node.folder / "2.json").write_text(json.dumps({"job_key": "exp", "gpus": [CARD.uuid], "user": "bob"}))
    node.on(CARD)
    assert node.holders() == (Holder("exp", user="ana", processes=0),)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"scheduler": "slurm", "job_id": "7"}, SLURM.format(7)),
        ({"scheduler": "kubernetes", "job_id": POD}, KUBE),
        ({"container": ID}, DOCKER),
        ({"container": ID[:12]}, KUBE),
    ],
)
def test_a_job_file_without_gpus_is_found_by_its_processes(node, keys, path):
    node.job("exp-17", workload="training", **keys)
    node.on(CARD, node.process(100, path))
    node.on(NEXT, node.process(101, "/system.slice/ollama.service"))
    found = node.all()
    assert [(holder.job_key, holder.declared_class, holder.processes) for holder in found[CARD]] == [
        ("exp-17", "training", 1)
    ]
    assert [holder.job_key for holder in found[NEXT]] == ["systemd:ollama.service"]


def test_a_job_id_of_another_scheduler_is_no_slurm_job(node):
    node.job("exp-17", scheduler="mylauncher", job_id="7")
    node.on(CARD, node.process(100, SLURM.format(7)))
    assert node.counts() == {"slurm:7": 1}


def test_hostile_names_stay_what_they_are(node):
    node.job('<b>"x"\\', user="</script>", gpus=[CARD.uuid])
    node.on(CARD)
    assert node.holders()[0][0] == '<b>"x"\\'


def test_a_path_that_is_not_utf8_does_no_harm(node):
    node.process(100, "/")
    (node.proc / "100" / "cgroup").write_bytes(b'0::/system.slice/\xff"<b>.service\n')
    node.on(CARD, 100)
    node.process(101, "/system.slice/" + "x" * 300 + "\x1b[31m.service")
    node.on(NEXT, 101)
    found = node.all()
    assert found[NEXT][0].job_key == "systemd:" + "x" * 128
    (holder,) = found[CARD]
    assert holder.job_key == 'systemd:\\xff"<b>.service'
    holder.job_key.encode()


# Pods.


def test_a_pod_holds_its_gpu_without_a_process(node):
    node.pods = {CARD.uuid: (PodOwner("research", "notebook-ana-0", "main"),)}
    node.on(CARD)
    assert node.holders() == (
        Holder(
            "kubernetes:research/notebook-ana-0",
            job_id="notebook-ana-0",
            scheduler="kubernetes",
            namespace="research",
            pod="notebook-ana-0",
            container="main",
            processes=0,
        ),
    )


def test_processes_of_a_pod_count_for_its_name(node):
    node.pods = {CARD.uuid: (PodOwner("research", "llama-worker-0", "main"),)}
    node.on(CARD, node.process(100, KUBE), node.process(101, "/system.slice/ollama.service"))
    assert node.counts() == {"kubernetes:research/llama": 1, "systemd:ollama.service": 1}


def test_pods_that_share_a_gpu(node):
    """The kubelet does not tell UIDs: whose a process is, is not known, unless another source tells them."""
    first, second = PodOwner("a", "x", "main"), PodOwner("b", "y", "main")
    node.pods = {CARD.uuid + "::0": (first,), CARD.uuid + "::1": (second,)}
    node.on(CARD, node.process(100, KUBE))
    assert node.counts() == {"kubernetes:a/x": None, "kubernetes:b/y": None}
    node.pods = {CARD.uuid: (first._replace(pod_uid=POD.replace("-", "")), second._replace(pod_uid="b" * 32))}
    assert node.counts() == {"kubernetes:a/x": 1, "kubernetes:b/y": 0}


def test_two_pods_of_one_job_on_one_gpu_are_one_holder(node):
    node.pods = {CARD.uuid: (PodOwner("a", "x-worker-0", "main"), PodOwner("a", "x-worker-1", "main"))}
    node.on(CARD, node.process(100, KUBE))
    (holder,) = node.holders()
    assert (holder.job_key, holder.pod, holder.container, holder.processes) == ("kubernetes:a/x", "", "main", 1)


def test_two_containers_of_one_pod_are_one_holder(node):
    node.pods = {CARD.uuid: (PodOwner("a", "x", "main"), PodOwner("a", "x", "side"))}
    node.on(CARD)
    (holder,) = node.holders()
    assert (holder.pod, holder.container) == ("x", "")


def test_a_job_file_takes_the_pod_of_its_gpu_in(node):
    node.job("exp-17", gpus=[CARD.uuid])
    node.pods = {CARD.uuid: (PodOwner("research", "p-0", "main"),)}
    node.on(CARD, node.process(100, KUBE))
    (holder,) = node.holders()
    assert (holder.job_key, holder.namespace, holder.pod, holder.processes) == ("exp-17", "research", "p-0", 1)


def test_a_job_file_of_another_pod_does_not(node):
    node.job("exp-17", gpus=[CARD.uuid], namespace="research", pod="p-0")
    node.job("exp-18", namespace="research", pod="p-1", workload="inference")
    node.pods = {CARD.uuid: (PodOwner("research", "p-1", "main"),), NEXT.uuid: (PodOwner("other", "p-0", "main"),)}
    node.on(CARD)
    node.on(NEXT)
    found = node.all()
    assert [(holder.job_key, holder.declared_class) for holder in found[CARD]] == [
        ("exp-17", None),
        ("exp-18", "inference"),
    ]
    assert [holder.job_key for holder in found[NEXT]] == ["kubernetes:other/p-0"]


def test_pods_that_cannot_be_asked_leave_the_uid(node):
    node.pods = None
    node.on(CARD, node.process(100, KUBE))
    assert node.counts() == {f"kubernetes:{POD}": 1}


# Device lists of Slurm on cgroup version 1.


def allow(node: Node, job: int, *devices: str) -> None:
    folder = node.sys / "fs" / "cgroup" / "devices" / "slurm" / "uid_20001" / f"job_{job}"
    folder.mkdir(parents=True)
    (folder / "devices.list").write_text("".join(f"{device} rwm\n" for device in devices))


def test_a_device_list_holds_a_gpu_without_a_process(node):
    """The GPUs of the fixture are nvidia4 and nvidia5; 255 and 254 are no GPUs."""
    allow(node, 7, "c 1:3", "c 195:255", "c 195:254", "c 195:4")
    allow(node, 8, "a *:*")  # devices are not constrained: it says nothing
    node.on(CARD)
    node.on(NEXT)
    assert node.all() == {CARD: (Holder("slurm:7", job_id="7", scheduler="slurm", processes=0),), NEXT: ()}


def test_device_lists_beyond_the_bound_are_counted_once(node):
    for job in range(257):
        allow(node, job, "c 195:4")
    node.on(CARD)
    for _ in range(5):  # they are read every 15 s
        node.all()
    assert node.sampler.errors["too_many_slurm_jobs"] == 1


def test_a_device_list_agrees_with_processes_and_job_files(node):
    allow(node, 7, "c 195:4", "c 195:5")
    node.job("slurm:alpha/7", job_id="7", scheduler="slurm", gpus=[CARD.uuid])
    node.on(CARD, node.process(100, SLURM.format(7)))
    node.on(NEXT, 500)  # hidden: it can only be the job's
    found = node.all()
    assert {holder.job_key: holder.processes for holder in found[CARD]} == {"slurm:alpha/7": 1}
    assert {holder.job_key: holder.processes for holder in found[NEXT]} == {"slurm:alpha/7": 1}


# MIG.


@pytest.fixture
def divided(node):
    node.migs = dict(MIGS)
    node.on(CARD)
    node.on(FIRST)
    node.on(SECOND)
    return node


def test_the_card_has_the_holders_of_its_instances(divided):
    divided.on(FIRST, divided.process(100, SLURM.format(7)), divided.process(101, SLURM.format(8)))
    divided.on(SECOND, divided.process(102, SLURM.format(7)))
    found = divided.all()
    assert [(holder.job_key, holder.share_ratio, holder.processes) for holder in found[CARD]] == [
        ("slurm:7", 0.5, 2),
        ("slurm:8", 0.5, 1),
    ]
    assert [(holder.job_key, holder.share_ratio) for holder in found[SECOND]] == [("slurm:7", 1.0)]


def test_instances_are_claimed_by_their_own_uuid_or_by_the_card(divided):
    divided.job("a", gpus=[MIGS[FIRST]])
    divided.pods = {MIGS[SECOND]: (PodOwner("n", "p", "c"),)}
    found = divided.all()
    assert [holder.job_key for holder in found[FIRST]] == ["a"]
    assert [holder.job_key for holder in found[SECOND]] == ["kubernetes:n/p"]
    assert [holder.job_key for holder in found[CARD]] == ["a", "kubernetes:n/p"]
    divided.job("b", gpus=[CARD.uuid])
    found = divided.all()
    assert [holder.job_key for holder in found[FIRST]] == ["a", "b"]
    assert [holder.job_key for holder in found[SECOND]] == ["b"]


def test_a_divided_card_whose_instances_are_not_known_is_not_known(divided):
    for key in (CARD, FIRST, SECOND):
        divided.on(key, is_seen=False)
    assert divided.all() == {}
    divided.on(SECOND)
    assert divided.all() == {CARD: (), SECOND: ()}


def test_the_union_of_many_holders_has_one_for_the_others(divided):
    for first, key in ((100, FIRST), (200, SECOND)):
        divided.on(key, *(divided.process(first + job, SLURM.format(first + job)) for job in range(9)))
    found = divided.all()
    assert [len(found[key]) for key in (CARD, FIRST, SECOND)] == [8, 8, 8]
    assert found[CARD][-1].job_key == "other"
    assert sum(holder.processes for holder in found[CARD]) == 18
    counts = {record.key: record.holder_count for record in divided.sampler.sample(divided.now)}
    assert counts == {CARD: 18, FIRST: 9, SECOND: 9}


# Users.


def test_passwd_is_read_as_the_system_reads_it():
    text = "root:x:0:0::/:/bin/sh\ntoor:x:0:0::/:/bin/sh\n+::::::\nbad\na\x1bb:x:5:5:::\n:x:6:6:::\nx:x:-1:1:::\n"
    assert parse_passwd(text) == {0: "root"}


def test_users_are_followed_once_a_minute(tmp_path):
    path = tmp_path / "passwd"
    users = Users(path)
    users.refresh(NOW)
    assert users.name(5) is None
    path.write_text("eve:x:5:5:::\n")
    users.refresh(NOW.later(59))
    assert users.name(5) is None
    users.refresh(NOW.later(60))
    assert users.name(5) == "eve"


def test_the_system_is_asked_only_on_demand(tmp_path):
    """Root is known to every system; the file given here does not hold it."""
    for ask_system, name in ((False, None), (True, "root")):
        users = Users(tmp_path / "none", ask_system=ask_system)
        users.refresh(NOW)
        assert users.name(0) == name
        assert users.name(2**40) is None


@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([CARD, NEXT])), max_size=30),
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([CARD, NEXT])), max_size=12),
)
def test_shares_sum_to_one_for_any_mixture(tmp_path_factory, processes, claims):
    node = Node(tmp_path_factory.mktemp("node"))
    lists: dict[GpuKey, list[int]] = {CARD: [], NEXT: []}
    for pid, (job, key) in enumerate(processes, 100):
        lists[key].append(node.process(pid, SLURM.format(job)))
    for number, (job, key) in enumerate(claims):
        node.job(f"{number}", job_id=str(job), scheduler="slurm", gpus=[key.uuid])
    for key, pids in lists.items():
        node.on(key, *pids)
    found = node.all()  # checks the sum and the bound
    assert {key for key, holders in found.items() if not holders} == {
        key for key in lists if not lists[key] and key not in {claim for _, claim in claims}
    }
    node.sampler.close()
