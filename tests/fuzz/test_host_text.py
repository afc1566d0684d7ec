"""Damaged text of the kernel, of processes, of the kubelet and of headers: a value or nothing, never an exception."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clock import Instant, ManualClock
from agent.config import AgentConfig, Config
from agent.errors import UsageError
from agent.gpu_roster import GpuRoster
from agent.host import build_host
from agent.maintenance import parse_duration, parse_gpus
from agent.owners.cgroups import parse_cgroup
from agent.owners.users import parse_passwd
from agent.pod_resources.answers import read_allocatable, read_list
from agent.pod_resources.wire import WireError
from agent.records import GpuInfo, GpuKey, GpuProcess, GpuSample, GpuSlowSample, Tick
from agent.samplers import SourceUnavailableError
from agent.samplers.diskstats import parse_diskstats
from agent.samplers.fs_ceph import parse_ceph_metrics
from agent.samplers.fs_lustre import parse_llite_stats
from agent.samplers.fs_nfs import parse_mountstats
from agent.samplers.gpu_direct_storage import parse_nvidia_fs
from agent.samplers.infiniband_counters import parse_rate, parse_state
from agent.samplers.kmsg import parse_kmsg
from agent.samplers.mounts import parse_mountinfo
from agent.samplers.net_dev import parse_net_dev
from agent.samplers.net_link import default_route_interfaces
from agent.samplers.pressure import parse_blocked, parse_meminfo, parse_pressure
from agent.samplers.process_files import parse_io, parse_stat
from agent.samplers.xid import XidSampler
from exporters.prometheus import accepts_gzip, negotiate
from exporters.web import parse_listen
from tests.fuzz.mutation import damaged, in_time, profile
from tests.machines import unpack_machine

#: A machine of each kind; between them they have every source.
MACHINES = ("dgx_slurm", "roce_kubernetes", "cloud_efa_fuse")
KMSG = (
    b"4,1234,98765432,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.\n",
    b"6,7,8,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 12\n SUBSYSTEM=pci\n",
)
MOUNTSTATS = (
    (
        b"device /dev/sda1 mounted on / with fstype ext4\n"
        b"device srv:/x mounted on /data with fstype nfs4 statvers=1.1\n\topts:\trw\n\tage:\t9\n"
        b"\tbytes:\t1 2 3 4 500 600 7 8 \n\txprt:\ttcp 0 1 2\n\tper-op statistics\n\t        READ: 5 6 7 8 9 10 11\n"
    ),
)
CGROUP = (
    b"0::/system.slice/slurmstepd.scope/job_812345/step_0/user/task_0\n",
    (
        b"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1e2d3c4b_0000_1111_2222_333344445555.slice"
        b"/cri-containerd-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef.scope\n"
    ),
    (
        b"12:devices:/docker/0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n1:name=systemd:/user.slice"
        b"/user-1000.slice/session-3.scope\n"
    ),
)
PRESSURE = (b"some avg10=0.00 avg60=1.25 avg300=0.00 total=123456\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n",)
LUSTRE = (
    b"snapshot_time 1 secs.nsecs\nread_bytes 5 samples [bytes] 4096 8192 40960\nwrite_bytes 5 samples [bytes] 1 2 3\n",
)
CEPH = (b"item          total       avg_lat(us)  sz\nread  12 3 4 5 6 789 10\nwrite 1 2 3 4 5 6 7\n",)
NVFS = (b"GDS Version: 1.7\nReads : n=5 ok=5 err=0 readMiB=12\nWrites : n=0 ok=0 err=0 writeMiB=0 io_state_err=0\n",)
ROUTE = (
    b"Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\neth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\n",
)


def text(data: bytes) -> str:
    """Decode as the samplers do: what is no UTF-8 keeps its identity."""
    return data.decode("utf-8", "surrogateescape")


def of_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(text(data))


def machine_file(name: str) -> tuple[bytes, ...]:
    """Return this file of every machine that has it, from the text of the tree."""
    found = []
    for tree in sorted((Path(__file__).parents[2] / "fixtures/machines").glob("*/*.tree")):
        for entry in tree.read_bytes().split(b"\n== "):
            head, _, body = entry.partition(b"\n")
            if head.decode() == name:
                found.append(body + b"\n")
    assert found, name
    return tuple(found)


PARSERS: dict[str, tuple[Callable[[bytes], object], tuple[bytes, ...]]] = {
    "kmsg": (parse_kmsg, KMSG),
    "mountstats": (functools.partial(parse_mountstats, wanted={(b"srv:/x", b"/data")}), MOUNTSTATS),
    "mountinfo": (parse_mountinfo, machine_file("proc/self/mountinfo")),
    "net/dev": (of_text(parse_net_dev), machine_file("proc/net/dev")),
    "diskstats": (of_text(parse_diskstats), machine_file("proc/diskstats")),
    "route": (lambda data: default_route_interfaces(text(data), text(data)), ROUTE),
    "cgroup": (of_text(parse_cgroup), CGROUP),
    "passwd": (of_text(parse_passwd), (b"root:x:0:0:root:/root:/bin/bash\nann:x:1000:1000:,,,:/home/ann:/bin/sh\n",)),
    "stat": (
        functools.partial(parse_stat, 7),
        (b"7 (a) b) S 1 7 7 0 -1 0 1 2 3 4 5 6 7 8 20 0 3 0 99 1000 50 " + b"0 " * 30,),
    ),
    "io": (parse_io, (b"rchar: 1\nread_bytes: 5\nwrite_bytes: 6\ncancelled_write_bytes: 0\n",)),
    "pressure": (of_text(parse_pressure), PRESSURE),
    "meminfo": (of_text(parse_meminfo), (b"MemTotal:  1000 kB\nMemAvailable: 900 kB\nDirty: 5 kB\nWriteback: 0 kB\n",)),
    "blocked": (of_text(parse_blocked), (b"cpu  1 2 3\nprocs_running 2\nprocs_blocked 0\n",)),
    "rate": (of_text(parse_rate), (b"400 Gb/sec (4X NDR)",)),
    "state": (of_text(parse_state), (b"4: ACTIVE",)),
    "lustre": (of_text(parse_llite_stats), LUSTRE),
    "ceph": (of_text(parse_ceph_metrics), CEPH),
    "nvidia-fs": (of_text(parse_nvidia_fs), NVFS),
    "Accept": (of_text(negotiate), (b"application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3,*/*;q=0.1",)),
    "Accept-Encoding": (of_text(accepts_gzip), (b"gzip;q=0.5, br, *;q=0",)),
}


@pytest.mark.parametrize("name", PARSERS)
@profile()
@given(data=st.data())
def test_a_parser(name, data):
    parse, examples = PARSERS[name]
    damage = data.draw(damaged(examples))
    with in_time():
        parse(damage)


@pytest.mark.parametrize("name", PARSERS)
def test_a_long_text_takes_no_longer_than_its_length(name):
    # 2 MB of good lines, of one line, of one byte: quadratic work would take hours.
    parse, examples = PARSERS[name]
    for data in (examples[0] * (2_000_000 // len(examples[0])), b" " * 2_000_000, b"1" * 2_000_000, b"\n" * 2_000_000):
        with in_time():
            parse(data)


# Answers of the kubelet: bytes of protobuf.

UUID = b"GPU-aaaaaaaa-1111-4222-8333-444444444440"


def field(number: int, value: bytes) -> bytes:
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


#: ListPodResourcesResponse: pods (1) of name (1), namespace (2) and containers (3) of name (1) and devices (2).
POD = field(
    1,
    field(1, b"pod")
    + field(2, b"team")
    + field(3, field(1, b"c") + field(2, field(1, b"nvidia.com/gpu") + field(2, UUID))),
)


@profile(2)
@given(data=damaged((POD, POD * 3, field(1, field(1, b"nvidia.com/gpu") + field(2, UUID)))))
def test_answers_of_the_kubelet(data):
    for read in (read_list, read_allocatable):
        with in_time(), contextlib.suppress(WireError):
            read(data)


# Words of the command line.


@profile(2)
@given(word=st.text(max_size=12) | st.sampled_from(["30m", "1e9s", "٣d", "9" * 400 + "d", "0.0000000001s"]))
def test_words_of_the_command_line(word):
    for parse in (parse_duration, lambda text: parse_gpus([text]), parse_listen):
        with contextlib.suppress(UsageError):
            parse(word)


# All samplers of a host, on a machine whose files are damaged while they are read.

KEYS = [GpuKey(n, f"GPU-{n:08d}-1111-4222-8333-444444444440", None) for n in range(8)]


def roster(pids: list[int]) -> GpuRoster:
    """Return eight GPUs with the processes of the machine spread over them."""
    found = GpuRoster()
    records = []
    for number, key in enumerate(KEYS):
        mine = tuple(GpuProcess(pid, 1 << 30) for pid in pids[number::8][:4])
        identity = {"key": key, "monotonic_s": 1000.0, "wall_s": 1.8e9}
        records += [
            GpuInfo(**identity, pci_bus_id=f"00000000:{16 + number:02X}:00.0", device=f"nvidia{number}"),
            GpuSample(**identity, power_watts=100.0),
            GpuSlowSample(**identity, processes=mine),
        ]
    found.observe(Tick(monotonic_s=1000.0, wall_s=1.8e9, records=tuple(records)))
    return found


class Tree:
    """A copy of a machine, its files by name, and how each one was."""

    def __init__(self, name: str, root: Path) -> None:
        self.root = unpack_machine(name, root)
        self.files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        self.good = {path: path.read_bytes() for path in self.files}
        self.pids = sorted(int(path.name) for path in (root / "proc").iterdir() if path.name.isdigit())

    def damage(self, path: Path, kind: str, data: bytes) -> None:
        self._remove(path)
        if kind == "bytes":
            path.write_bytes(data)
        elif kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "unreadable":
            path.symlink_to("/proc/self/mem")  # reading it at 0 is an error of the system

    def mend(self, path: Path) -> None:
        self._remove(path)
        path.write_bytes(self.good[path])

    @staticmethod
    def _remove(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    return {name: Tree(name, tmp_path_factory.mktemp(name)) for name in MACHINES}


@profile()
@given(data=st.data(), name=st.sampled_from(MACHINES))
def test_samplers_of_a_damaged_machine(trees, data, name):
    tree = trees[name]
    folders = AgentConfig(proc_root=tree.root / "proc", sys_root=tree.root / "sys", kmsg=tree.root / "kmsg")
    clock = ManualClock(1000.0, 1.8e9)
    host = build_host(Config(agent=folders), clock, roster(tree.pids))
    hurt: list[Path] = []
    try:
        for _ in range(3):
            for path in data.draw(st.lists(st.sampled_from(tree.files), min_size=1, max_size=5, unique=True)):
                if path not in hurt:
                    hurt.append(path)
                kind = data.draw(st.sampled_from(["bytes", "bytes", "bytes", "gone", "folder", "loop", "unreadable"]))
                tree.damage(path, kind, data.draw(damaged((tree.good[path] or b"0\n",))) if kind == "bytes" else b"")
            for sampler in host.samplers:
                with in_time(), contextlib.suppress(SourceUnavailableError):
                    if sampler.probe():
                        sampler.sample(clock.now())
            clock.advance(61.0)
    finally:
        for sampler in host.samplers:
            sampler.close()
        for path in hurt:
            tree.mend(path)


@profile()
@given(data=damaged(KMSG), more=damaged(KMSG))
def test_a_damaged_kernel_log(tmp_path, data, more):
    log = tmp_path / "kmsg"
    log.write_bytes(data)
    sampler = XidSampler(lambda: {KEYS[0].uuid: (KEYS[0], "00000000:3B:00.0")}, ManualClock(1000.0, 1.8e9), log)
    try:
        with in_time(), contextlib.suppress(SourceUnavailableError):
            if sampler.probe():
                sampler.sample(Instant(1000.0, 1.8e9))
                with log.open("ab") as stream:
                    stream.write(more)
                os.utime(log)
                sampler.sample(Instant(1001.0, 1.8e9 + 1))
    finally:
        sampler.close()
