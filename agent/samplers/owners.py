"""Who holds each GPU and MIG instance, every 5 s: job files, the kubelet's pods, cgroups; no call of the driver.

Which GPUs there are and which processes the driver lists on them comes from the roster, joined by UUID or PCI address.
A GPU of which nothing is known has no record; one with an empty list of processes and no claim has no holders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.clock import Instant
from agent.gpu_roster import GpuRoster, RosterGpu
from agent.owners.holders import MOST_HOLDERS, Declared, Holders, Place, PodOwner, bounded, union
from agent.owners.job_file import JobFile, device_name
from agent.owners.job_files import JobFiles, JobFilesConfig
from agent.owners.last_known import LastKnown
from agent.owners.processes import ProcessesConfig, ProcessOwners
from agent.owners.slurm_devices import SlurmDevices
from agent.owners.users import Users
from agent.records import GpuKey, GpuOwners, Holder

#: The pods by device, GPU-... or MIG-... UUID; None where the kubelet cannot be asked.
Pods = Callable[[], Mapping[str, Sequence[PodOwner]] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersConfig:
    """What is read of who holds GPUs, and how much of it."""

    job_files: JobFilesConfig = field(default_factory=JobFilesConfig)
    """The folder of job files."""
    processes: ProcessesConfig = field(default_factory=ProcessesConfig)
    """Bounds of the work on processes."""
    ask_system_for_users: bool = False
    """Whether users that /etc/passwd does not hold are looked up by the system, which may wait for a directory."""


class OwnersSampler:
    """Samples the holders of all GPUs of the roster."""

    name = "owners"
    period_s = 5.0

    def __init__(
        self,
        roster: GpuRoster,
        config: OwnersConfig | None = None,
        *,
        proc_root: Path = Path("/proc"),
        sys_root: Path = Path("/sys"),
        passwd: Path = Path("/etc/passwd"),
        pods: Pods | None = None,
        declared: Declared | None = None,
    ) -> None:
        config = config or OwnersConfig()
        self._roster = roster
        self._pods = pods
        self._declared = declared
        self._job_files = JobFiles(config.job_files)
        self._last_known = LastKnown()
        self._processes = ProcessOwners(proc_root, config.processes)
        self._slurm_devices = SlurmDevices(sys_root)
        self._users = Users(passwd, ask_system=config.ask_system_for_users)
        self._errors: Counter[str] = Counter()
        self._crowded: set[GpuKey] = set()  # with more holders than are told apart

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of job files that cannot be used, of hidden processes, and of what was beyond a bound."""
        return self._errors + self._job_files.errors + self._processes.errors + self._slurm_devices.errors

    def probe(self) -> bool:
        """Return True: that no GPU is there is no fault of this source."""
        return True

    def sample(self, now: Instant) -> tuple[GpuOwners, ...]:
        """Return one record for each GPU and MIG instance of which anything is known."""
        gpus = self._roster.gpus
        if not gpus:
            self._processes.look_up(set())
            return ()
        self._users.refresh(now)
        files = self._job_files.read(now)
        pods = {} if self._pods is None else _by_name(self._pods() or {})
        slurm_jobs = self._slurm_devices.jobs(now)
        self._last_known.keep({gpu.key for gpu in gpus})
        listed = {process.pid for gpu in gpus for process in gpu.processes or ()}
        processes = self._processes.look_up(listed | self._last_known.pids)
        known = Holders(files, self._users.name, self._declared)
        claims: dict[str, list[JobFile]] = {}
        for file in files:
            for device in file.gpus or ():
                claims.setdefault(device, []).append(file)
        found: dict[GpuKey, list[Holder]] = {}
        for gpu in gpus:
            if gpu.is_divided:
                continue
            names = _names(gpu)
            place = Place(
                claims=[file for name in names for file in claims.get(name, ())],
                pods=[pod for name in names for pod in pods.get(name, ())],
                slurm_jobs=slurm_jobs.get(gpu.device or "", ()) if gpu.key.gpu_i_id is None else (),
                processes=self._last_known.present(gpu, processes, now),
            )
            if place.is_known:
                found[gpu.key] = known.of(place)
        for gpu in gpus:
            if gpu.is_divided:
                instances = [holders for key, holders in found.items() if _is_instance_of(key, gpu.key)]
                if instances:
                    found[gpu.key] = union(instances)
        crowded = {key for key, holders in found.items() if len(holders) > MOST_HOLDERS}
        self._errors["too_many_holders"] += len(crowded - self._crowded)  # once when it begins: it lasts
        self._crowded = crowded
        return tuple(_record(now, gpu.key, found[gpu.key]) for gpu in gpus if gpu.key in found)

    def close(self) -> None:
        """Close the files of the processes."""
        self._processes.close()


def _record(now: Instant, key: GpuKey, holders: Sequence[Holder]) -> GpuOwners:
    return GpuOwners(
        monotonic_s=now.monotonic_s,
        wall_s=now.wall_s,
        key=key,
        holders=bounded(holders),
        holder_count=len(holders),
    )


def _by_name(pods: Mapping[str, Sequence[PodOwner]]) -> dict[str, list[PodOwner]]:
    """Return pods by the names of `device_name`; a replica of a shared GPU is that GPU (its id ends in ::<n>)."""
    found: dict[str, list[PodOwner]] = {}
    for device, owners in pods.items():
        name = device_name(device.partition("::")[0])
        if name is not None:
            found.setdefault(name, []).extend(owners)
    return found


def _names(gpu: RosterGpu) -> list[str]:
    """Return the names by which a claim may mean this place: its own, and those of the whole card."""
    texts = (gpu.mig_uuid, gpu.key.uuid, gpu.pci_bus_id)
    return list(dict.fromkeys(name for text in texts if text and (name := device_name(text))))


def _is_instance_of(key: GpuKey, card: GpuKey) -> bool:
    return key.gpu_i_id is not None and key._replace(gpu_i_id=None) == card
