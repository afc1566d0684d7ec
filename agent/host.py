"""The samplers of the host around the GPUs, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent.clock import Clock
from agent.config import Config
from agent.gpu_roster import GpuRoster
from agent.owners.job_files import JobFilesConfig
from agent.pod_resources.client import PodResources
from agent.samplers import Sampler
from agent.samplers.diskstats import DiskstatsSampler
from agent.samplers.filesystems import FilesystemsSampler
from agent.samplers.infiniband import InfinibandSampler
from agent.samplers.net_dev import NetDevSampler
from agent.samplers.owners import OwnersConfig, OwnersSampler
from agent.samplers.pressure import PressureSampler
from agent.samplers.processes import ProcessesSampler


@dataclass(frozen=True, slots=True)
class Host:
    """The samplers, and who asks the kubelet for them."""

    samplers: tuple[Sampler, ...]
    pods: PodResources | None = None


def build_host(config: Config, clock: Clock, roster: GpuRoster | None) -> Host:
    """Return the host's samplers; without a roster those that go by the processes on the GPUs are left out."""
    proc_root, sys_root = config.agent.proc_root, config.agent.sys_root
    wanted = config.samplers

    def addresses() -> list[str]:
        gpus = roster.gpus if roster else ()
        return [gpu.pci_bus_id for gpu in gpus if gpu.pci_bus_id and gpu.key.gpu_i_id is None]

    def pids() -> list[int]:
        gpus = roster.gpus if roster else ()
        return [process.pid for gpu in gpus for process in gpu.processes or ()]

    pods = None
    chosen: list[Sampler] = []
    if wanted.network:
        chosen.append(NetDevSampler(proc_root, sys_root))
    if wanted.infiniband:
        chosen.append(InfinibandSampler(addresses, sys_root))
    if wanted.disk:
        chosen.append(DiskstatsSampler(proc_root, sys_root))
    if wanted.filesystems:
        chosen.append(FilesystemsSampler(proc_root, sys_root, pids=pids))
    if wanted.pressure:
        chosen.append(PressureSampler(proc_root))
    if roster is not None:
        pods = _pods(config, clock)
        chosen += _of_work(config, roster, pods)
    return Host(tuple(chosen), pods)


def _of_work(config: Config, roster: GpuRoster, pods: PodResources | None) -> Iterator[Sampler]:
    processes = None
    if config.samplers.processes:
        processes = ProcessesSampler(
            config.agent.proc_root, lambda: roster.gpus, look_at_programs=config.owners.programs
        )
        yield processes
    if config.samplers.owners:
        yield OwnersSampler(
            roster,
            OwnersConfig(
                job_files=JobFilesConfig(folder=str(config.owners.jobs_folder)),
                ask_system_for_users=config.owners.ask_system_for_users,
            ),
            proc_root=config.agent.proc_root,
            sys_root=config.agent.sys_root,
            pods=pods.pods if pods else None,
            declared=processes.declared if processes else None,
        )


def _pods(config: Config, clock: Clock) -> PodResources | None:
    if not (config.samplers.owners and config.owners.pod_resources):
        return None
    return PodResources(config.pod_resources, clock)
