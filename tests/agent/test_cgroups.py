"""Owners by /proc/<pid>/cgroup, in every form that schedulers and container engines give it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.owners.cgroups import CgroupOwner, parse_cgroup, pod_job
from agent.vocabulary import SCHEDULERS

ID = "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0"
OTHER_ID = "a" * 64
SHORT = "0f1e2d3c4b5a"
POD = "6d0f7c1a-3a55-4c0e-9d53-2f7c8b1e4a90"
POD_ = POD.replace("-", "_")
STATIC = "0123456789abcdef0123456789abcdef"

SLURM = CgroupOwner("slurm", "812345")


def v2(path: str) -> CgroupOwner:
    return parse_cgroup(f"0::{path}\n")


@pytest.mark.parametrize(
    "path",
    [
        "/system.slice/slurmstepd.scope/job_812345/step_0/user/task_0",
        "/system.slice/slurmstepd.scope/job_812345/step_batch/user/task_special",
        "/system.slice/slurmstepd.scope/job_812345",
        "/system.slice/gpu17_slurmstepd.scope/job_812345/step_0/user/task_3",  # --enable-multiple-slurmd
        "/system.slice/slurmstepd.scope/job_812345/step_extern/user/task_0 (deleted)",
        "/../slurmstepd.scope/job_812345/step_0/user/task_0",  # seen from another cgroup namespace
    ],
)
def test_slurm_of_version_2(path):
    assert v2(path) == SLURM


@pytest.mark.parametrize("root", ["slurm", "slurm_gpu17"])
def test_slurm_of_version_1_names_the_user_too(root):
    text = (
        "12:pids:/system.slice/slurmd.service\n"
        f"11:devices:/{root}/uid_20001/job_812345/step_0\n"
        f"4:memory:/{root}/uid_20001/job_812345/step_0/task_0\n"
        "1:name=systemd:/system.slice/slurmd.service\n"
    )
    assert parse_cgroup(text) == SLURM._replace(uid=20001)


def test_slurm_of_both_versions_together():
    text = "11:devices:/slurm/uid_20001/job_812345/step_0\n0::/system.slice/slurmd.service\n"
    assert parse_cgroup(text) == SLURM._replace(uid=20001)


def test_the_sluid_layout_of_slurm_26():
    assert v2("/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0") == CgroupOwner(
        "slurm", "s5K1KKYAYG5D00"
    )
    assert v2("/system.slice/slurmstepd.scope/system") == CgroupOwner("systemd", "slurmstepd.scope")


def test_containers_inside_a_job_are_the_job():
    path = f"/system.slice/slurmstepd.scope/job_812345/step_0/user/task_0/docker-{ID}.scope"
    assert v2(path) == SLURM._replace(container=SHORT)


def test_slurm_inside_a_pod_is_the_job():
    path = (
        f"/kubepods.slice/kubepods-pod{POD_}.slice/cri-containerd-{ID}.scope/system.slice/slurmstepd.scope/job_812345"
    )
    assert v2(path) == SLURM._replace(container=SHORT)


def test_a_folder_called_job_elsewhere_is_no_slurm_job():
    assert v2("/jobs/uid_5/job_7/step_0").scheduler == "process"
    assert v2("/system.slice/job_7.service").scheduler == "systemd"
    assert v2("/slurmstepd.scope/job_99999999999").scheduler != "slurm"  # no 32-bit number


@pytest.mark.parametrize(
    "path",
    [
        # cgroupfs driver
        f"/kubepods/burstable/pod{POD}/{ID}",
        f"/kubepods/besteffort/pod{POD}/{ID}",
        f"/kubepods/pod{POD}/{ID}",  # guaranteed
        # systemd driver
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{POD_}.slice/crio-{ID}.scope",
        f"/kubepods.slice/kubepods-pod{POD_}.slice/docker-{ID}.scope",  # guaranteed
        f"/kubepods.slice/kubepods-pod{POD_}.slice/crio-{ID}.scope/container",  # crun
        # a runtime that does not follow the kubelet's driver
        f"/system.slice/containerd.service/kubepods-burstable-pod{POD_}.slice:cri-containerd:{ID}",
        # kind and k3s: a cluster inside a container
        f"/docker/{OTHER_ID}/kubelet/kubepods/burstable/pod{POD}/{ID}",
        f"/system.slice/docker-{OTHER_ID}.scope/kubelet.slice/kubelet-kubepods-pod{POD_}.slice/cri-containerd-{ID}.scope",
        f"/k3s/kubepods/besteffort/pod{POD}/{ID}",
        # seen from another pod
        f"/../../pod{POD}/{ID}",
        f"/../../kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
    ],
)
def test_kubernetes(path):
    assert v2(path) == CgroupOwner("kubernetes", POD, SHORT)


def test_kubernetes_of_version_1():
    text = "".join(
        f"{number}:{name}:/kubepods/burstable/pod{POD}/{ID}\n" for number, name in [(9, "cpuset"), (3, "pids")]
    )
    assert parse_cgroup(text + "0::/\n") == CgroupOwner("kubernetes", POD, SHORT)


def test_a_static_pod_has_a_hash_for_a_uid():
    assert v2(f"/kubepods/burstable/pod{STATIC}/{ID}") == CgroupOwner("kubernetes", STATIC, SHORT)


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        (f"/docker/{ID}", CgroupOwner("docker", SHORT, SHORT)),
        (f"/system.slice/docker-{ID}.scope", CgroupOwner("docker", SHORT, SHORT)),
        (f"/docker/{OTHER_ID}/docker/{ID}", CgroupOwner("docker", SHORT, SHORT)),  # Docker in Docker
        (f"/machine.slice/libpod-{ID}.scope", CgroupOwner("podman", SHORT, SHORT)),
        (f"/machine.slice/libpod-{ID}.scope/container", CgroupOwner("podman", SHORT, SHORT)),
        (f"/libpod_parent/libpod-{ID}", CgroupOwner("podman", SHORT, SHORT)),
        (f"/machine.slice/machine-libpod_pod_{OTHER_ID}.slice/libpod-{ID}.scope", CgroupOwner("podman", SHORT, SHORT)),
        (
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
            CgroupOwner("podman", SHORT, SHORT, 1000),
        ),
        (
            f"/user.slice/user-1000.slice/user@1000.service/app.slice/docker-{ID}.scope",
            CgroupOwner("docker", SHORT, SHORT, 1000),
        ),
        (f"/default/{ID}", CgroupOwner("containerd", SHORT, SHORT)),
        (f"/system.slice/nerdctl-{ID}.scope", CgroupOwner("containerd", SHORT, SHORT)),
        (f"/../docker-{ID}.scope", CgroupOwner("docker", SHORT, SHORT)),
    ],
)
def test_containers(path, owner):
    assert v2(path) == owner


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/system.slice/ollama.service", CgroupOwner("systemd", "ollama.service")),
        (
            "/gpu.slice/gpu-serving.slice/tritonserver@1.service/worker",
            CgroupOwner("systemd", "tritonserver@1.service"),
        ),
        ("/machine.slice/machine-qemu\\x2d1\\x2dgpu.scope", CgroupOwner("systemd", "machine-qemu-1-gpu.scope")),
        ("/system.slice/a\x1b[31m.service", CgroupOwner("systemd", "a\\x1b[31m.service")),
        ("/user.slice/user-1000.slice/session-5.scope", CgroupOwner("process", uid=1000)),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/app-blender-3000.scope",
            CgroupOwner("process", uid=1000),
        ),
        ("/system.slice/run-u123.service", CgroupOwner("process")),
        (f"/system.slice/run-r{STATIC}.scope", CgroupOwner("process")),
        ("/system.slice/run-p300-i301.service", CgroupOwner("process")),
        ("/init.scope", CgroupOwner("process")),
        ("/", CgroupOwner("process")),
        ("/../../..", CgroupOwner("process")),
    ],
)
def test_units_sessions_and_plain_processes(path, owner):
    assert v2(path) == owner


@pytest.mark.parametrize(
    "made",
    ["slurmstepd.scope/job_1/step_0", f"kubepods/pod{POD}/x", "slurm/uid_0/job_1/step_0", "ollama.service"],
)
def test_nobody_poses_as_a_job_from_his_own_slice(made):
    assert v2(f"/user.slice/user-1000.slice/user@1000.service/{made}") == CgroupOwner("process", uid=1000)


@pytest.mark.parametrize("text", ["", "\n", "0::", "garbage", "1:2", "0::/a:b/c\n", "::::\n", "0::/\udcff\n"])
def test_lines_that_make_no_sense_are_plain_processes(text):
    assert parse_cgroup(text) == CgroupOwner("process")


@given(
    st.text()
    | st.lists(st.sampled_from(["0::", "/", "..", "job_1", "pod" + POD, ID, ".scope", "\n", ":"])).map("".join)
)
def test_any_text_names_a_known_scheduler(text):
    owner = parse_cgroup(text)
    assert owner.scheduler in SCHEDULERS
    assert owner.name or owner.scheduler == "process"


def test_a_very_long_path_is_read_in_linear_time():
    assert v2("/x" * 100_000).scheduler == "process"
    assert v2("/kubepods-" * 2000 + "pod").scheduler == "process"
    assert v2("/" + "kubepods-" * 2000 + "pod").scheduler == "process"


@pytest.mark.parametrize(
    ("pod", "job"),
    [
        ("pretrain-0-x7k2p", "pretrain"),  # indexed Job
        ("pretrain-31-bcdfg", "pretrain"),
        ("llama-3-8b-99999-zz222", "llama-3-8b"),
        ("vllm-7d9c6b8f5d-x2x4q", "vllm"),  # Deployment
        ("vllm-70b-5f6b7c8d9-4q8zt", "vllm-70b"),
        ("llama-pretrain-worker-0", "llama-pretrain"),
        ("llama-pretrain-worker-11", "llama-pretrain"),
        ("llama-pretrain-master-0", "llama-pretrain"),
        ("bert-ps-1", "bert"),
        ("bert-chief-0", "bert"),
        ("set-worker-0-3-x7k2p", "set"),  # JobSet: <set>-<job>-<index of the job>-<index>-<random>
        # What may be something else keeps its name.
        ("vllm-70b-0", "vllm-70b-0"),  # StatefulSet, or the first of several experiments
        ("exp-3", "exp-3"),
        ("train-x7k2p", "train-x7k2p"),  # plain Job, or a name
        ("notebook-ana-0", "notebook-ana-0"),
        ("pretrain-00-x7k2p", "pretrain-00-x7k2p"),  # no index has leading zeros
        ("pretrain-100000-x7k2p", "pretrain-100000-x7k2p"),  # beyond the highest index
        ("pretrain-0-llama", "pretrain-0-llama"),  # a vowel: not random
        ("pretrain-0-x7k1p", "pretrain-0-x7k1p"),  # a 1 neither
        ("worker-0", "worker-0"),
        ("", ""),
    ],
)
def test_the_job_of_a_pod(pod, job):
    assert pod_job(pod) == job
