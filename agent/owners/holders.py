"""Who holds a GPU or MIG instance, from everything that is known about it.

Job files go before the kubelet's list of pods, and that before the cgroups of the processes: what a job file or the
kubelet says holds without a process too. A process counts for the job file or pod that it plainly belongs to (equal
job number, pod or container), else for the only one that claims the GPU and that it does not plainly contradict, else
for the owner that its cgroup names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from agent.owners.cgroups import pod_job
from agent.owners.job_file import JobFile
from agent.owners.processes import ProcessOwner
from agent.records import Holder

#: Holders of one GPU, with the one for all others.
MOST_HOLDERS: Final = 8
#: The `job_key` of what is beyond that.
OTHERS: Final = "other"

_CONTAINER_ID: Final = re.compile(r"[0-9a-f]{12,64}")

#: Names of users by number, None where not known.
UserName = Callable[[int], str | None]
#: What the programs of a process declare, by its PID: a word of vocabulary.CLASSES.
Declared = Callable[[int], str | None]


class PodOwner(NamedTuple):
    """A pod that the kubelet gave a GPU or MIG instance to, as its pod-resources service lists it."""

    namespace: str
    pod: str
    container: str
    pod_uid: str = ""  # "" where the kubelet does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One GPU or MIG instance, and what is known about who holds it."""

    claims: Sequence[JobFile] = ()  # job files that name it
    pods: Sequence[PodOwner] = ()
    slurm_jobs: Collection[str] = ()  # numbers of jobs whose device list holds it
    processes: Sequence[ProcessOwner] | None = None  # None: cannot be seen

    @property
    def is_known(self) -> bool:
        """Return whether anything at all is known."""
        return self.processes is not None or bool(self.claims or self.pods or self.slurm_jobs)


@dataclass(slots=True)
class _Entry:
    """A holder while its parts are put together."""

    holder: Holder
    rank: int  # 0 job file, 1 pod, 2 device list, 3 process
    processes: list[ProcessOwner] = field(default_factory=list)
    is_countable: bool = True  # whether its processes can be told from those of others
    pods: set[str] = field(default_factory=set)
    users: set[str] = field(default_factory=set)
    containers: set[str] = field(default_factory=set)


class Holders:
    """Works holders out, with the job files of the whole host at hand."""

    def __init__(self, files: Sequence[JobFile], user_name: UserName, declared: Declared | None = None) -> None:
        self.user_name = user_name
        self.declared = declared
        self._by_slurm_job: dict[str, JobFile] = {}
        self._by_pod: dict[tuple[str, str], JobFile] = {}
        self._by_id: dict[str, JobFile] = {}
        # The first file by name counts where two say that they are one job.
        for file in reversed(files):
            if file.scheduler == "slurm":
                self._by_slurm_job[file.job_id] = file
            elif file.job_id:
                self._by_id[_digits(file.job_id)] = file
            if file.container:
                self._by_id[file.container[:12]] = file
            if file.pod:
                self._by_pod[file.namespace, file.pod] = file

    def of(self, place: Place) -> list[Holder]:
        """Return all holders of a place in a steady order, for `bounded` to give them their shares."""
        return _Join(self, place).holders()

    def file_of_slurm_job(self, job: str) -> JobFile | None:
        """Return the job file of a Slurm job."""
        return self._by_slurm_job.get(job)

    def file_of_pod(self, pod: PodOwner) -> JobFile | None:
        """Return the job file that names a pod."""
        return self._by_pod.get((pod.namespace, pod.pod)) or self._by_pod.get(("", pod.pod))

    def file_of_process(self, process: ProcessOwner) -> JobFile | None:
        """Return the job file that a process plainly belongs to."""
        owner = process.owner
        if owner is None:
            return None
        if owner.scheduler == "slurm":
            return self._by_slurm_job.get(owner.name)
        if owner.scheduler == "kubernetes" and (file := self._by_id.get(_digits(owner.name))):
            return file
        return self._by_id.get(owner.container) if owner.container else None


class _Join:
    """Puts the holders of one place together."""

    def __init__(self, known: Holders, place: Place) -> None:
        self._known = known
        self._place = place
        self._entries: dict[str, _Entry] = {}
        self._pod_keys: dict[PodOwner, str] = {}
        self._listed_keys: set[str] = set()  # of the jobs whose device list holds the place

    def holders(self) -> list[Holder]:
        for file in self._place.claims:
            self._entry(_of_file(file), 0)
        for pod in self._place.pods:
            self._add_pod(pod)
        for job in sorted(self._place.slurm_jobs):
            self._add_slurm_job(job)
        for process in _without_mps_server(self._place.processes or ()):
            entry = self._entry_of(process)
            if entry is not None:
                entry.processes.append(process)
                if process.uid is not None:
                    entry.users.add(self._known.user_name(process.uid) or str(process.uid))
        ordered = sorted(self._entries.values(), key=lambda entry: (entry.rank, entry.holder.job_key))
        return [self._finish(entry) for entry in ordered]

    def _entry(self, holder: Holder, rank: int) -> _Entry:
        entry = self._entries.get(holder.job_key)
        if entry is None:
            entry = self._entries[holder.job_key] = _Entry(holder, rank)
        return entry

    def _add_pod(self, pod: PodOwner) -> None:
        claims = {file.job_key: file for file in self._place.claims if not _contradicts_pod(file, pod)}
        file = self._known.file_of_pod(pod) or (next(iter(claims.values())) if len(claims) == 1 else None)
        if file is None:
            entry = self._entry(_of_pod(pod), 1)
        else:
            entry = self._entry(_of_file(file), 0)
            if not file.pod:
                entry.holder = entry.holder._replace(namespace=file.namespace or pod.namespace)
        if file is None or not file.pod:
            entry.pods.add(pod.pod)
        entry.containers.add(pod.container)
        self._pod_keys[pod] = entry.holder.job_key

    def _add_slurm_job(self, job: str) -> None:
        file = self._known.file_of_slurm_job(job)
        if file is not None:
            entry = self._entry(_of_file(file), 0)
        elif any(claim.scheduler == "slurm" and not claim.job_id for claim in self._place.claims):
            return  # most likely that of the job file, which does not tell its number
        else:
            entry = self._entry(_of_slurm(job), 2)
        self._listed_keys.add(entry.holder.job_key)

    def _entry_of(self, process: ProcessOwner) -> _Entry | None:
        """Return the holder that a process counts for; None where it may be any of several."""
        file = self._known.file_of_process(process)
        if file is not None:
            return self._entry(_of_file(file), 0)
        user = self._known.user_name(process.uid) if process.uid is not None else None
        keys = {claim.job_key for claim in self._place.claims if not _contradicts_process(claim, process, user)}
        keys = keys or {self._pod_keys[pod] for pod in self._place.pods if _may_be_of_pod(pod, process)}
        if not keys and process.owner is None:
            keys = set(self._listed_keys)
        if len(keys) == 1:
            return self._entries[keys.pop()]
        for key in keys:
            self._entries[key].is_countable = False
        if keys:
            return None
        entry = self._entry(_of_process(process), 3)
        if process.owner is not None:
            entry.containers.add(process.owner.container)
        return entry

    def _finish(self, entry: _Entry) -> Holder:
        holder = entry.holder
        is_counted = self._place.processes is not None and entry.is_countable
        return holder._replace(
            pod=holder.pod or _only(entry.pods) or "",
            container=holder.container or _only(entry.containers - {""}) or "",
            user=holder.user or _only(entry.users) or "",
            declared_class=holder.declared_class or self._declared_class(entry.processes),
            processes=len(entry.processes) if is_counted else None,
        )

    def _declared_class(self, processes: Iterable[ProcessOwner]) -> str | None:
        declared = self._known.declared
        if declared is None:
            return None
        return _only({word for process in processes if (word := declared(process.pid)) is not None})


def _only(words: set[str]) -> str | None:
    return next(iter(words)) if len(words) == 1 else None


def _without_mps_server(processes: Sequence[ProcessOwner]) -> Sequence[ProcessOwner]:
    """Leave the service out that others share a GPU through: it holds it for them."""
    return [process for process in processes if not process.is_mps_server] or processes


def union(of_instances: Iterable[Sequence[Holder]]) -> list[Holder]:
    """Return all holders of a divided card from those of its instances."""
    found: dict[str, Holder] = {}
    for holder in (holder for holders in of_instances for holder in holders):
        known = found.get(holder.job_key)
        found[holder.job_key] = holder if known is None else _merged(known, holder)
    return list(found.values())


def _merged(one: Holder, other: Holder) -> Holder:
    """Return one holder that is on two instances; what differs is left empty."""
    is_counted = one.processes is not None and other.processes is not None
    return one._replace(
        pod=one.pod if one.pod == other.pod else "",
        container=one.container if one.container == other.container else "",
        user=one.user if one.user == other.user else "",
        declared_class=one.declared_class if one.declared_class == other.declared_class else None,
        processes=(one.processes or 0) + (other.processes or 0) if is_counted else None,
    )


def bounded(holders: Sequence[Holder]) -> tuple[Holder, ...]:
    """Give each an equal share, so that they sum to 1, and merge those beyond MOST_HOLDERS into one, OTHERS."""
    count = len(holders)
    shown = holders if count <= MOST_HOLDERS else holders[: MOST_HOLDERS - 1]
    found = [holder._replace(share_ratio=1.0 / count) for holder in shown]
    if rest := holders[len(shown) :]:
        counts = [holder.processes for holder in rest if holder.processes is not None]
        processes = sum(counts) if len(counts) == len(rest) else None
        found.append(Holder(OTHERS, share_ratio=len(rest) / count, processes=processes))
    return tuple(found)


def _of_file(file: JobFile) -> Holder:
    return Holder(
        file.job_key,
        job_id=file.job_id,
        scheduler=file.scheduler,
        namespace=file.namespace,
        pod=file.pod,
        container=file.container,
        user=file.user,
        declared_class=file.declared_class,
        checkpoint_interval_seconds=file.checkpoint_interval_seconds,
    )


def _of_pod(pod: PodOwner) -> Holder:
    job = pod_job(pod.pod)
    return Holder(f"kubernetes:{pod.namespace}/{job}", job_id=job, scheduler="kubernetes", namespace=pod.namespace)


def _of_slurm(job: str) -> Holder:
    return Holder(f"slurm:{job}", job_id=job, scheduler="slurm")


def _of_process(process: ProcessOwner) -> Holder:
    owner = process.owner
    if owner is None:
        return Holder("")  # somebody, who cannot be named
    if owner.scheduler != "process":
        return Holder(f"{owner.scheduler}:{owner.name}", job_id=owner.name, scheduler=owner.scheduler)
    uid = owner.uid if owner.uid is not None else process.uid
    if uid is None:
        return Holder("")
    # By number: a label that cannot be left out must not tell the name, which is shown on demand alone.
    return Holder(f"process:{uid}", scheduler="process")


def _contradicts_pod(file: JobFile, pod: PodOwner) -> bool:
    is_other = bool(file.pod) and (file.pod != pod.pod or file.namespace not in {"", pod.namespace})
    return file.scheduler == "slurm" or is_other


def _contradicts_process(file: JobFile, process: ProcessOwner, user: str | None) -> bool:
    """Return whether a process plainly is not of the job of a file, which does not name it."""
    owner = process.owner
    if owner is None:
        return False
    if owner.scheduler == file.scheduler == "slurm":
        # A SLUID may be that of the job whose number the file has.
        return bool(file.job_id) and owner.name.isdecimal()
    if owner.scheduler == "kubernetes" and len(_digits(file.job_id)) == 32:
        return True
    if owner.container and _CONTAINER_ID.fullmatch(file.container):
        return True
    if owner.scheduler == "process" and file.user and process.uid:
        return file.user != str(process.uid) if file.user.isdecimal() else user is not None and user != file.user
    return False


def _may_be_of_pod(pod: PodOwner, process: ProcessOwner) -> bool:
    owner = process.owner
    if owner is None:
        return True
    return owner.scheduler == "kubernetes" and (not pod.pod_uid or _digits(pod.pod_uid) == _digits(owner.name))


def _digits(uid: str) -> str:
    return uid.replace("-", "").lower()
