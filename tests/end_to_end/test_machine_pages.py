"""The page of each whole machine of fixtures/machines, with the GPUs of the emulator; `make golden` writes it anew.

`warpwatch run --once` reads the machine's /proc and /sys. Times, durations and what this process takes are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.end_to_end.programs import run_warpwatch
from tests.machines import unpack_machine
from tests.nvml_emulator.emulator import Emulator
from tests.pod_resources_server import Kubelet, container, pod

pytestmark = pytest.mark.end_to_end

GOLDEN = Path(__file__).parents[2] / "fixtures" / "golden"
#: By machine: the name of its GPUs, their PCI addresses, and the processes on each of them.
MACHINES = {
    "dgx_slurm": (
        "NVIDIA H100 80GB HBM3",
        {bus: (41000 + rank,) for rank, bus in enumerate(("1B", "43", "52", "61", "9D", "C3", "D1", "DF"))},
    ),
    "roce_kubernetes": (
        "NVIDIA A100-SXM4-80GB",
        {
            "07": (51000,),
            "0B": (51001,),
            "48": (51002,),
            "4C": (51003,),
            "88": (52000,),
            "8B": (52001,),
            "C8": (),
            "CB": (),
        },
    ),
    "cloud_efa_fuse": (
        "NVIDIA H100 80GB HBM3",
        {bus: (61000 + rank,) for rank, bus in enumerate(("53", "64", "75", "86"))},
    ),
    "desktop": ("NVIDIA GeForce RTX 4070", {"01": (71000,)}),
}
#: Families that are different each time, or change with the model. Whether the XID sampler has registered its events by
#: the first tick is a matter of milliseconds.
VOLATILE = re.compile(
    r"(?:# \w+ )?(?:warpwatch_\w*_timestamp_seconds|warpwatch_sampler_duration|process_|warpwatch_build"
    r"|warpwatch_sampler_success.sampler=.xid|warpwatch_gpu_xid|warpwatch_xid_info|warpwatch_model)"
)


def uuid_of(bus: str) -> str:
    return f"GPU-{bus.lower()}000000-1111-4222-8333-444444444444"


def script(model: str, gpus: dict[str, tuple[int, ...]]) -> str:
    identities, values = [], []
    for number, (bus, pids) in enumerate(gpus.items()):
        identities += [
            f"gpu {number} uuid {uuid_of(bus)}",
            f"gpu {number} name {model}",
            f"gpu {number} pci_bus_id 00000000:{bus}:00.0",
            f"gpu {number} minor {number}",
        ]
        processes = ",".join(f"{pid}:30000000000" for pid in pids)
        values.append(
            f"{number} utilization_gpu_percent={90 if pids else 0} memory_used_bytes={30_000_000_000 if pids else 0} "
            f"memory_total_bytes=85899345920 power_milliwatts={400_000 if pids else 60_000} processes={processes}"
        )
    return "\n".join(["driver 580.95.05", "end hold", *identities, "@ 0", *values, ""])


def config(root: Path, host: str) -> str:
    return "\n".join(
        [
            "[agent]",
            f'proc_root = "{root / "proc"}"',
            f'sys_root = "{root / "sys"}"',
            f'kmsg = "{root / "kmsg"}"',
            "[export]",
            f'host = "{host}"',
            "[owners]",
            f'jobs_folder = "{root / "run" / "warpwatch" / "jobs.d"}"',
            "",
        ]
    )


@pytest.fixture(scope="module")
def page(nvml_emulator_library, tmp_path_factory):
    """Return the page of a machine at an export level, without what is different each time."""
    made: dict[tuple[str, str], list[str]] = {}

    def lines(machine: str, host: str = "full") -> list[str]:
        if (machine, host) not in made:
            folder = tmp_path_factory.mktemp(machine)
            root = unpack_machine(machine, folder / "root")
            emulator = Emulator(folder, script(*MACHINES[machine]))
            emulator.freeze(0)
            file = folder / "warpwatch.toml"
            file.write_text(config(root, host), encoding="utf-8")
            done = run_warpwatch("run", "--once", "--config", str(file), env=emulator.environment())
            assert done.returncode == 0, done.stderr
            made[machine, host] = [line for line in done.stdout.splitlines() if not VOLATILE.match(line)]
        return made[machine, host]

    return lines


@pytest.mark.parametrize("machine", MACHINES)
def test_the_page_of_a_machine(machine, page, request):
    golden = GOLDEN / f"machine_{machine}.prom"
    text = "\n".join([*page(machine), ""])
    if request.config.getoption("--update-golden"):
        golden.write_text(text, encoding="utf-8")
    assert text.splitlines() == golden.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("machine", MACHINES)
def test_the_page_keeps_to_the_budget_of_series(machine, page):
    """At most 120 series for a GPU and 150 for the node beside them, at the default level."""
    series = [line for line in page(machine, "summary") if not line.startswith("#")]
    by_gpu: dict[str, int] = {}
    node = 0
    for line in series:
        gpu = re.search(r'[{,]gpu="(\d+)"', line)
        if gpu:
            by_gpu[gpu[1]] = by_gpu.get(gpu[1], 0) + 1
        else:
            node += 1
    assert len(by_gpu) == len(MACHINES[machine][1])
    assert max(by_gpu.values()) <= 120
    assert node <= 150


def owners(lines: list[str]) -> dict[str, dict[str, str]]:
    """Return the labels of the owner series by GPU."""
    found = {}
    for line in lines:
        if line.startswith("warpwatch_gpu_owner_info{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            assert labels["gpu"] not in found
            found[labels["gpu"]] = labels
    return found


def test_every_gpu_of_the_slurm_node_names_its_job(page):
    found = owners(page("dgx_slurm"))
    assert set(found) == set("01234567")
    assert {labels["job_key"] for labels in found.values()} == {"slurm:812345"}
    assert {(labels["job_id"], labels["scheduler"]) for labels in found.values()} == {("812345", "slurm")}


def test_pods_are_named_by_the_kubelet(nvml_emulator_library, tmp_path):
    """Two pods of two and four GPUs, and one that holds a GPU without a process; GPU 7 is free."""
    model, gpus = MACHINES["roce_kubernetes"]
    uuids = [uuid_of(bus) for bus in gpus]
    root = unpack_machine("roce_kubernetes", tmp_path / "root")
    emulator = Emulator(tmp_path, script(model, gpus))
    emulator.freeze(0)
    with Kubelet(tmp_path) as kubelet:
        kubelet.answer(
            [
                pod("research", "llama-pretrain-worker-0", container("trainer", *uuids[:4])),
                pod("serving", "vllm-70b-0", container("server", *uuids[4:6])),
                pod("research", "notebook-ana-0", container("notebook", uuids[6])),
            ]
        )
        file = tmp_path / "warpwatch.toml"
        file.write_text(config(root, "off") + f'[pod_resources]\nsocket = "{kubelet.socket}"\n', encoding="utf-8")
        done = run_warpwatch("run", "--once", "--config", str(file), env=emulator.environment())
    assert done.returncode == 0, done.stderr
    found = owners(done.stdout.splitlines())
    names = [(found[str(gpu)]["owner_namespace"], found[str(gpu)]["owner_pod"]) for gpu in range(8)]
    assert names == [
        *[("research", "llama-pretrain-worker-0")] * 4,
        *[("serving", "vllm-70b-0")] * 2,
        ("research", "notebook-ana-0"),
        ("", ""),
    ]
    assert [found[str(gpu)]["owners"] for gpu in range(8)] == ["1"] * 7 + ["0"]


def test_no_page_holds_a_user_or_a_command_line(page):
    for machine in MACHINES:
        text = "\n".join(page(machine))
        assert "owner_user" not in text
        assert "train.py" not in text
