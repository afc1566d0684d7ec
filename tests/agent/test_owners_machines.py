"""The holders on the whole machines of fixtures/machines, at each level of what the agent may see."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agent.clock import Instant
from agent.gpu_roster import GpuRoster
from agent.owners.holders import PodOwner
from agent.owners.job_files import JobFilesConfig
from agent.records import GpuInfo, GpuKey, GpuProcess, GpuSlowSample, Holder, Tick
from agent.samplers.owners import OwnersConfig, OwnersSampler

NOW = Instant(10_000.0, 1_800_000_000.0)
DGX = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
ROCE = ("07", "0b", "48", "4c", "88", "8b", "c8", "cb")
EFA = ("53", "64", "75", "86")

LLAMA_UID = "6d0f7c1a-3a55-4c0e-9d53-2f7c8b1e4a90"
VLLM_UID = "b7e4d2c0-11aa-4f3b-8c6d-0a9e8f7d6c5b"


def uuid(bus: str) -> str:
    return f"GPU-00000000-0000-4000-8000-0000000000{bus}"


def roster(buses: Sequence[str], pids: Sequence[Sequence[int]]) -> GpuRoster:
    """Make the roster that the records of the NVML sampler of such a machine give."""
    times = {"monotonic_s": NOW.monotonic_s, "wall_s": NOW.wall_s}
    made = GpuRoster()
    records: list[GpuInfo | GpuSlowSample] = []
    for index, (bus, of_gpu) in enumerate(zip(buses, pids, strict=True)):
        key = GpuKey(index, uuid(bus))
        address = f"00000000:{bus.upper()}:00.0"
        records.append(GpuInfo(**times, key=key, pci_bus_id=address, device=f"nvidia{index}"))
        records.append(GpuSlowSample(**times, key=key, processes=tuple(map(GpuProcess, of_gpu))))
    made.observe(Tick(**times, records=tuple(records)))
    return made


def holders(
    root: Path,
    made: GpuRoster,
    folder: Path,
    *,
    pods: Mapping[str, Sequence[PodOwner]] | None = None,
    proc: Path | None = None,
) -> list[tuple[Holder, ...]]:
    passwd = folder.parent / "passwd"
    passwd.write_text("root:x:0:0:root:/root:/bin/sh\nana:x:1000:1000::/home/ana:/bin/sh\n")
    sampler = OwnersSampler(
        made,
        OwnersConfig(job_files=JobFilesConfig(folder=str(folder))),
        proc_root=proc or root / "proc",
        sys_root=root / "sys",
        passwd=passwd,
        pods=lambda: pods,
    )
    found = [record.holders for record in sampler.sample(NOW)]
    sampler.close()
    return found


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "jobs.d"
    path.mkdir()
    return path


DGX_PIDS = [[41000 + rank] for rank in range(8)]


def test_dgx_slurm(machine, folder):
    """Rank i of job 812345 on GPU i, of user 20001, whom /etc/passwd does not know."""
    job = Holder("slurm:812345", job_id="812345", scheduler="slurm", user="20001", processes=1)
    assert holders(machine("dgx_slurm"), roster(DGX, DGX_PIDS), folder) == [(job,)] * 8


def test_dgx_slurm_with_the_prolog_before_the_first_process(machine, folder):
    keys = {"job_key": "slurm:alpha/812345", "job_id": "812345", "scheduler": "slurm", "user": "eve"}
    addresses = [f"0000:{bus}:00.0" for bus in DGX[:4]]
    (folder / "slurm-812345.json").write_text(json.dumps({**keys, "gpus": addresses}))
    job = Holder("slurm:alpha/812345", job_id="812345", scheduler="slurm", user="eve", processes=0)
    assert holders(machine("dgx_slurm"), roster(DGX, [[]] * 8), folder) == [(job,)] * 4 + [()] * 4


def test_dgx_slurm_under_hidepid(machine, folder, tmp_path):
    """Nothing is seen below /proc: somebody holds each GPU, and the job file alone says who."""
    made = roster(DGX, DGX_PIDS)
    root = machine("dgx_slurm")
    assert holders(root, made, folder, proc=tmp_path) == [(Holder("", processes=1),)] * 8
    keys = {"job_key": "slurm:812345", "job_id": "812345", "scheduler": "slurm"}
    (folder / "slurm-812345.json").write_text(json.dumps({**keys, "gpus": [uuid(bus) for bus in DGX]}))
    job = Holder("slurm:812345", job_id="812345", scheduler="slurm", processes=1)
    assert holders(root, made, folder, proc=tmp_path) == [(job,)] * 8


ROCE_PIDS = [[51000], [51001], [51002], [51003], [52000], [52001], [], []]


def test_roce_kubernetes_without_the_kubelet(machine, folder):
    """UIDs of pods and ids of containers; what a pod holds and does not use is not seen."""
    llama = Holder(
        f"kubernetes:{LLAMA_UID}", job_id=LLAMA_UID, scheduler="kubernetes", container="4ceefe9b713d", user="ana"
    )
    vllm = Holder(f"kubernetes:{VLLM_UID}", job_id=VLLM_UID, scheduler="kubernetes", container="9ea7b99e0391")
    found = holders(machine("roce_kubernetes"), roster(ROCE, ROCE_PIDS), folder)
    assert found[:4] == [(llama._replace(processes=1),)] * 4
    assert [found[4][0]._replace(user=""), found[5][0]._replace(user="")] == [vllm._replace(processes=1)] * 2
    assert found[6:] == [(), ()]


def test_roce_kubernetes_with_the_kubelet(machine, folder):
    llama = PodOwner("research", "llama-pretrain-worker-0", "pytorch")
    vllm = PodOwner("serving", "vllm-70b-0", "vllm")
    notebook = PodOwner("research", "notebook-ana-0", "notebook")
    pods = {uuid(bus): (pod,) for bus, pod in zip(ROCE, [llama] * 4 + [vllm] * 2 + [notebook], strict=False)}
    found = holders(machine("roce_kubernetes"), roster(ROCE, ROCE_PIDS), folder, pods=pods)
    assert (
        found[:4]
        == [
            (
                Holder(
                    "kubernetes:research/llama-pretrain",  # alike on the nodes of workers 1, 2, ...
                    job_id="llama-pretrain",
                    scheduler="kubernetes",
                    namespace="research",
                    pod="llama-pretrain-worker-0",
                    container="pytorch",
                    user="ana",
                    processes=1,
                ),
            )
        ]
        * 4
    )
    assert [(holder.job_key, holder.processes) for holders in found[4:] for holder in holders] == [
        ("kubernetes:serving/vllm-70b-0", 1),
        ("kubernetes:serving/vllm-70b-0", 1),
        ("kubernetes:research/notebook-ana-0", 0),  # held, and not used
    ]
    assert found[7] == ()


def test_cloud_efa_fuse(machine, folder):
    container = "d51f5d3e741a"
    job = Holder(f"docker:{container}", job_id=container, scheduler="docker", container=container, user="root")
    made = roster(EFA, [[61000], [61001], [61002], [61003]])
    assert holders(machine("cloud_efa_fuse"), made, folder) == [(job._replace(processes=1),)] * 4


def test_desktop(machine, folder):
    made = roster(("01",), [[71000]])
    assert holders(machine("desktop"), made, folder) == [
        (Holder("process:1000", scheduler="process", user="ana", processes=1),)
    ]
