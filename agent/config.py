"""The configuration of the agent: every key has a default, so that no file is needed.

A component's keys live in a dataclass beside the component; this module puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from agent.config_loader import dump_toml, load_toml, sources_of
from agent.pod_resources.client import PodResourcesConfig
from agent.samplers.nvml_config import NvmlConfig
from agent.samplers.xid import XidConfig
from classifier.detectors.registry import DetectorsConfig
from classifier.labeller_config import LabellerConfig
from exporters.web import parse_listen

_RELEASE_SECONDS_MAX: Final = 604_800
DEFAULT_PATH: Final = Path("/etc/warpwatch/warpwatch.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Table `[agent]`."""

    #: Least severe message that is logged to standard error.
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    #: Where /proc and /sys are found; other values are for containers that mount the host's elsewhere.
    proc_root: Path = Path("/proc")
    sys_root: Path = Path("/sys")
    #: The kernel's log, for XIDs; read where the user may.
    kmsg: Path = Path("/dev/kmsg")
    #: Folder for the file with the process id, by which `warpwatch driver` finds the agent; skipped where it is absent.
    runtime_folder: Path = Path("/run/warpwatch/agent")
    #: Folder for what outlives the agent: what it has learned, and what is in maintenance. Absent or not writable, the
    #: agent does without and says so.
    state_directory: Path = Path("/var/lib/warpwatch")
    #: How long `warpwatch driver release` holds without `resume`.
    driver_release_seconds: float = 600.0

    def __post_init__(self) -> None:
        """Raise ValueError for a release that would end before it begins, or hardly ever."""
        if not 1 <= self.driver_release_seconds <= _RELEASE_SECONDS_MAX:
            raise ValueError(
                f"driver_release_seconds is {self.driver_release_seconds}; "
                f"it must be from 1 to {_RELEASE_SECONDS_MAX}, a week"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """Table `[export]`."""

    #: Address and port of /metrics and the landing page; ":9836" listens on all addresses.
    listen: str = ":9836"
    #: Which families of the host are exported: "summary" is what labels and alerts need, "full" adds what node_exporter
    #: has too, "off" leaves all of them to it.
    host: Literal["summary", "full", "off"] = "summary"
    #: Whether owner series and the landing page name users; jobs, pods and containers are named in any case.
    owner_user: bool = False
    #: File in the format of the Prometheus exporter toolkit: TLS, client certificates, basic authentication
    #: (docs/exporter.md); needs warpwatch[web]. It is read again when it changes.
    web_config: Path | None = None
    #: File for the textfile collector of node_exporter; its name ends in .prom. Removed when the agent stops.
    textfile: Path | None = None
    #: How often it is written.
    textfile_period_s: float = 15.0
    #: Whether GPU series are exported under the names of dcgm-exporter too, with its labels and units.
    dcgm: bool = False
    #: What dcgm-exporter calls the label of the host: "Hostname" until May 2026, "hostname" since.
    dcgm_hostname_label: Literal["Hostname", "hostname"] = "Hostname"

    def __post_init__(self) -> None:
        """Raise UsageError for an address that cannot be one, ValueError for a text file that nobody would read."""
        parse_listen(self.listen)
        if self.textfile is not None and self.textfile.suffix != ".prom":
            raise ValueError(f"textfile is {str(self.textfile)!r}; node_exporter reads names that end in .prom only")
        if not 1 <= self.textfile_period_s <= 3600:
            raise ValueError(f"textfile_period_s is {self.textfile_period_s}; it must be from 1 to 3600")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplersConfig:
    """Table `[samplers]`: switches sources off, and says what should be there."""

    #: GPUs that this host should have. Without it the most that the driver has shown since the start, and while it has
    #: shown none, what is on the PCI bus.
    expected_gpus: int | None = None

    nvml: bool = True
    xid: bool = True
    network: bool = True
    infiniband: bool = True
    disk: bool = True
    filesystems: bool = True
    pressure: bool = True
    #: The processes that hold GPUs, with their descendants.
    processes: bool = True
    #: Who holds the GPUs: jobs, pods, containers, units, users.
    owners: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Table `[model]`."""

    #: Folder of a bundle that `warpwatch train` has written; without it, the one that ships with the package.
    bundle: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersTable:
    """Table `[owners]`: how it is found out who holds a GPU. docs/privacy.md says what is read and who can see it."""

    #: Where a Slurm prolog, a launcher or a pod's hook puts its job files (docs/jobs.md).
    jobs_folder: Path = Path("/run/warpwatch/jobs.d")
    #: Whether the program of a process on a GPU is looked up in the table of known programs.
    programs: bool = True
    #: Whether users that /etc/passwd does not hold are looked up by the system, which may wait for a directory service.
    ask_system_for_users: bool = False
    #: Whether the kubelet is asked for the names of pods, where its socket is there; needs warpwatch[kubernetes].
    pod_resources: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole file."""

    agent: AgentConfig = field(default_factory=AgentConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    samplers: SamplersConfig = field(default_factory=SamplersConfig)
    nvml: NvmlConfig = field(default_factory=NvmlConfig)
    xid: XidConfig = field(default_factory=XidConfig)
    owners: OwnersTable = field(default_factory=OwnersTable)
    pod_resources: PodResourcesConfig = field(default_factory=PodResourcesConfig)
    labels: LabellerConfig = field(default_factory=LabellerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    detectors: DetectorsConfig = field(default_factory=DetectorsConfig)


def load_config(path: Path | None) -> Config:
    """Return the configuration of `path`; of DEFAULT_PATH where it is None, and the defaults where that is absent.

    Raises UsageError as `agent.config_loader.load_toml` does.
    """
    file = _file(path)
    return Config() if file is None else load_toml(Config, file)


def print_config(path: Path | None, options: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the configuration of `load_config` as TOML, with every key that holds and where its value comes from.

    `options` are values of keys that the command line gives, by their full names. Raises as `load_config` does.
    """
    config, file = load_config(path), _file(path)
    sources = {} if file is None else sources_of(file)
    for name, value in options.items():
        table, _, key = name.partition(".")
        config = replace(config, **{table: replace(getattr(config, table), **{key: value})})
        sources[name] = "command line"
    return dump_toml(config, sources)


def _file(path: Path | None) -> Path | None:
    if path is None:
        return DEFAULT_PATH if DEFAULT_PATH.exists() else None
    return path
