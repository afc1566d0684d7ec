"""What the cgroup of a process says about who started it: /proc/<pid>/cgroup, versions 1, 2 and both together.

A line is `hierarchy:controllers:path`; version 2 has one line that begins with `0::`. Where several layers stand above
one another the one that people schedule work by counts: a Slurm job inside a pod is the job, a pod inside the container
of a test cluster (kind) is the pod. Of two of one kind the inner one counts.

Where the names come from:

- Slurm, version 1: .../slurm[_<node>]/uid_<uid>/job_<id>/step_<id>; version 2:
  .../[<node>_]slurmstepd.scope/job_<id>/step_<id> (slurm.schedmd.com/cgroup_v2.html). From 26.05 on the folder of a
  job is named by its SLUID instead, slurmstepd.scope/s5K1KKYAYG5D00, unless CgroupJobIdPaths=yes is set
  (guilbaults/slurm-job-exporter issue 66, which quotes the release notes). Each task of an array and each component of
  a heterogeneous job has a number of its own, which is the one here.
- Kubernetes: kubelet's cgroup_manager_linux.go. The cgroupfs driver writes kubepods/[burstable|besteffort/]pod<uid>/
  <id>, the systemd driver kubepods[-burstable|-besteffort]-pod<uid with _>.slice/cri-containerd-<id>.scope (crio-<id>,
  docker-<id>). The UID of a static pod is a hash of 32 digits without hyphens.
- Docker docker/<id> or docker-<id>.scope; Podman libpod-<id>[.scope] below libpod_parent, machine.slice or the user's
  slice; containerd <namespace>/<id> (nerdctl: default/<id>, with the systemd driver nerdctl-<id>.scope).
- systemd: systemd.special(7), systemd-run(1): units run-u<n>, run-r<hex> and run-p<n>-i<n> are named by accident.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple


class CgroupOwner(NamedTuple):
    """Who a process belongs to by its cgroup."""

    scheduler: str  # a word of vocabulary.SCHEDULERS
    name: str = ""  # number or SLUID of a job, UID of a pod, id of a container, name of a unit; "" for `process`
    container: str = ""  # first 12 digits of the id of the innermost container
    uid: int | None = None  # where the path itself names the user


#: Folders that a path has; what lies deeper says nothing more.
_PARTS: Final = 64
_UNIT_CHARACTERS: Final = 128
_DELETED: Final = " (deleted)"

_ID: Final = r"[0-9a-f]{64}"
_POD_UID: Final = r"[0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12}"
_POD: Final = re.compile(rf"(?:(?:.*-)?kubepods(?:-burstable|-besteffort|-guaranteed)?-)?pod({_POD_UID})(?:\.slice)?")
_SLURM_JOB: Final = re.compile(r"job_(\d{1,10})")
_SLUID: Final = re.compile(r"s[0-9A-Z]{8,20}")
_SLURM_UID: Final = re.compile(r"uid_(\d{1,10})")
#: docker-<id>.scope, cri-containerd-<id>.scope, crio-<id>.scope, libpod-<id>.scope, nerdctl-<id>.scope, libpod-<id>
_CONTAINER: Final = re.compile(rf"(docker|cri-containerd|crio|libpod|libpod-payload|nerdctl)-({_ID})(?:\.scope)?")
_BARE_ID: Final = re.compile(_ID)
_USER_SLICE: Final = re.compile(r"user-(\d{1,10})\.slice")
_ACCIDENTAL: Final = re.compile(r"run-(?:u\d+|r[0-9a-f]{32}|p\d+-i\d+|\d+)\.(?:scope|service)")
_KINDS: Final = {
    "docker": "docker",
    "cri-containerd": "containerd",
    "crio": "containerd",
    "libpod": "podman",
    "libpod-payload": "podman",
    "nerdctl": "containerd",
}
#: Units that hold everything, and so say nothing.
_NO_UNITS: Final = frozenset({"init.scope"})
#: The layer that counts, the least first; containers alike.
_RANKS: Final = {
    "slurm": 0,
    "kubernetes": 1,
    "docker": 2,
    "podman": 2,
    "containerd": 2,
    "systemd": 3,
    "process": 4,
}

NOBODY: Final = CgroupOwner("process")


def parse_cgroup(text: str) -> CgroupOwner:
    """Return the owner that the lines of /proc/<pid>/cgroup name; `process` where they name none."""
    paths = {line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2}
    found = [_of_path(path) for path in sorted(paths)]
    return min(found, key=lambda owner: (_RANKS[owner.scheduler], owner.uid is None), default=NOBODY)


def _of_path(path: str) -> CgroupOwner:
    # A path that begins with /.. lies beside the cgroup namespace of the agent.
    # containerd without its systemd driver below a kubelet with it: <slice of the pod>:cri-containerd:<id>.
    path = path.removesuffix(_DELETED).replace(":cri-containerd:", "/cri-containerd-")
    parts = [part for part in path.split("/") if part not in {"", ".."}][:_PARTS]
    container = _container(parts)
    uid = _session_uid(parts)
    if uid is not None:
        # What is called a job or a pod below here a user made: systemd lets users make cgroups in their own slice.
        return CgroupOwner(container[0], container[1][:12], container[1][:12], uid) if container else _user(uid)
    if (job := _slurm(parts)) is not None:
        return job._replace(container=container[1][:12] if container else "")
    pod = next((match[1] for part in reversed(parts) if (match := _POD.fullmatch(part))), None)
    if pod is not None:
        return CgroupOwner("kubernetes", pod.replace("_", "-"), container[1][:12] if container else "")
    if container is not None:
        kind, name = container
        return CgroupOwner(kind, name[:12], name[:12])
    unit = next((part for part in reversed(parts) if part.endswith((".service", ".scope"))), None)
    if unit is not None and unit not in _NO_UNITS and not _ACCIDENTAL.fullmatch(unit):
        return CgroupOwner("systemd", _shown(unit.replace("\\x2d", "-")))
    return NOBODY


def _shown(unit: str) -> str:
    """Return the name of a unit as text that can be shown: at most 128 characters, others than printable as escapes."""
    text = unit[:_UNIT_CHARACTERS].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _user(uid: int) -> CgroupOwner:
    return CgroupOwner("process", uid=uid)


def _slurm(parts: Sequence[str]) -> CgroupOwner | None:
    """Return the innermost Slurm job of a path."""
    for at in range(len(parts) - 1, 0, -1):
        above = parts[at - 1]
        if above == "slurmstepd.scope" or above.endswith("_slurmstepd.scope"):
            name = job[1] if (job := _SLURM_JOB.fullmatch(parts[at])) else parts[at]
            if job or _SLUID.fullmatch(name):
                return CgroupOwner("slurm", name)
        user, job = _SLURM_UID.fullmatch(above), _SLURM_JOB.fullmatch(parts[at])
        if user and job and at >= 2 and (parts[at - 2] == "slurm" or parts[at - 2].startswith("slurm_")):
            return CgroupOwner("slurm", job[1], uid=int(user[1]))
    return None


def _container(parts: Sequence[str]) -> tuple[str, str] | None:
    """Return kind and id of the innermost container of a path."""
    for at in range(len(parts) - 1, -1, -1):
        part = parts[at]
        if match := _CONTAINER.fullmatch(part):
            return _KINDS[match[1]], match[2]
        if _BARE_ID.fullmatch(part) and at > 0:
            above = parts[at - 1]
            if above == "docker":
                return "docker", part
            # <namespace>/<id> of containerd, and the containers of a pod with the cgroupfs driver
            return "containerd", part
    return None


def _session_uid(parts: Sequence[str]) -> int | None:
    """Return the user whose sessions and units a path lies below."""
    if not parts or "user.slice" not in parts:
        return None
    return next((int(match[1]) for part in parts if (match := _USER_SLICE.fullmatch(part))), None)


#: The characters of a random suffix, without vowels and without digits that look like letters
#: (k8s.io/apimachinery/pkg/util/rand).
_RANDOM: Final = "[bcdfghjklmnpqrstvwxz2456789]{5}"
#: Pod of an indexed Job, <job>-<index>-<random>; indexes end below 100,000 (kubernetes.io, Jobs).
_INDEXED: Final = re.compile(rf"(.+)-(?:0|[1-9]\d{{0,4}})-{_RANDOM}")
#: Pod of a Deployment, <name>-<hash>-<random>: the hash is a decimal number whose digits are written with the first
#: and last of these characters (rand.SafeEncodeString).
_DEPLOYED: Final = re.compile(rf"(.+)-[bcdf4-9]{{8,10}}-{_RANDOM}")
#: Replica of a Kubeflow job, <job>-<role>-<index> (PyTorchJob, TFJob, MPIJob, XGBoostJob, PaddleJob).
_REPLICA: Final = re.compile(r"(.+)-(?:master|worker|launcher|chief|ps|evaluator)-(?:0|[1-9]\d{0,4})")


def pod_job(pod: str) -> str:
    """Return the name of the job that a pod is part of: the pod's name without what differs between its pods.

    Only forms that cannot well be anything else are cut. The pods of a StatefulSet (<name>-<index>), of a plain Job or
    a DaemonSet (<name>-<random>) keep their names: exp-1 and exp-2 may as well be two experiments, started by hand.
    """
    for pattern in (_DEPLOYED, _INDEXED):
        if match := pattern.fullmatch(pod):
            pod = match[1]
            break
    match = _REPLICA.fullmatch(pod)
    return match[1] if match else pod
