"""Five simulated nodes, each an agent on an emulator of its own, and rules that wait a sixth of their time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.end_to_end.programs import ROOT, Agent
from tests.nvml_emulator.emulator import Emulator

#: Of all that the rules wait for. Detectors wait less as well (`CONFIG`); one is judged each 5 s as on any node.
FASTER = 6
GPUS = 7
#: Delays of the agent cut, so that what takes minutes takes seconds.
CONFIG = """
[agent]
proc_root = "{machine}/proc"
sys_root = "{machine}/sys"
kmsg = "{folder}/kmsg"
runtime_folder = "{folder}/run"
state_directory = "{folder}/state"
[owners]
jobs_folder = "{folder}/jobs.d"
[xid]
send_period_s = 1
[detectors.baseline]
observation_seconds = 1
settle_seconds = 2
[detectors.stalled_collective]
suspect_seconds = 2
confirm_seconds = 10
confirm_max_seconds = 12
[detectors.stalled_collective.arm]
arm_seconds = 5
[detectors.low_utilization]
info_seconds = 20
warning_seconds = 3600
"""
BASE = "memory_total_bytes=85899345920 power_limit_milliwatts=700000 sm_clock_megahertz=1980"
#: As in test_stall_to_pager: at work 600 W and 30 GiB/s over NVLink; a wait has 120 W and moves nothing.
WORK = "utilization_gpu_percent=98 utilization_memory_percent=45 power_milliwatts=600000 memory_used_bytes=70000000000"
IDLE = "utilization_gpu_percent=0 utilization_memory_percent=0 power_milliwatts=70000 memory_used_bytes=70000000000"
WAIT = {"utilization_gpu_percent": 100, "utilization_memory_percent": 0, "power_milliwatts": 120000}
KIBIBYTES_PER_SECOND = 30 * 1024 * 1024
_UNITS = {"s": 1, "m": 60, "h": 3600}


class Node:
    """One node: its emulator, its jobs and its agent."""

    def __init__(self, number: int, folder: Path, machine: Path, idle: Sequence[int] = ()) -> None:
        """Make a node whose GPUs work, but for those that are `idle`: their memory is held and they do nothing."""
        self.name = f"n{number}"
        self.number = number
        self.folder = folder / self.name
        (self.folder / "jobs.d").mkdir(parents=True)
        (self.folder / "state").mkdir()
        self.emulator = Emulator(self.folder, self._script(idle))
        self._config = CONFIG.format(folder=self.folder, machine=machine)
        self.agent: Agent | None = None

    def uuid(self, gpu: int) -> str:
        return f"GPU-{self.number:04d}{gpu:04d}-1111-2222-3333-444444444444"

    def start(self) -> Agent:
        self.agent = Agent(self.folder, config=self._config, environment=self.emulator.environment())
        return self.agent

    def job(self, job_key: str, gpus: Sequence[int], **more: object) -> None:
        """Write a job file that gives these GPUs to a job."""
        text = json.dumps({"job_key": job_key, "gpus": [self.uuid(gpu) for gpu in gpus], **more})
        (self.folder / "jobs.d" / f"{job_key}.json").write_text(text, encoding="utf-8")

    def wait(self, gpus: Sequence[int]) -> None:
        """Let GPUs wait in a collective from now on."""
        for gpu in gpus:
            for name, value in WAIT.items():
                self.emulator.override(name, value, gpu=gpu)
            for direction in ("transmit", "receive"):
                self.emulator.override(f"nvlink_{direction}_kibibytes", 10_000 * KIBIBYTES_PER_SECOND, gpu=gpu)

    def saved(self, job_key: str, seconds_ago: float) -> None:
        """Write what the agent kept before a restart of just now: the job wrote its last checkpoint then.

        Nothing is due before a whole interval from here on. To see one written, an agent needs a minute of writing.
        """
        now_s = time.time()
        job = {
            "seen": now_s,
            "processes": [],
            "source": "device_to_host",
            "intervals": [],
            "sizes": [4e9] * 4,
            "lengths": [5.0] * 4,
            "total": 4,
            "last": now_s - seconds_ago,
            "last_bytes": 4e9,
        }
        saved = {"monotonic_s": time.monotonic(), "wall_s": now_s, "boot_id": None}
        learners = {"checkpoint_cadence": {"jobs": {job_key: job}}}
        state = {"warpwatch": "learned", "schema": 1, "saved": saved, "learners": learners}
        (self.folder / "state/learned.json").write_text(json.dumps(state), encoding="utf-8")

    def _script(self, idle: Sequence[int]) -> str:
        lines = ["driver 580.95.05", "end hold"]
        for gpu in range(GPUS):
            lines += [f"gpu {gpu} uuid {self.uuid(gpu)}", f"gpu {gpu} name NVIDIA H100 80GB HBM3"]
        for second in (0, 3600):
            lines.append(f"@ {second}")
            for gpu in range(GPUS):
                moved = 0 if gpu in idle else second * KIBIBYTES_PER_SECOND
                lines.append(
                    f"{gpu} {BASE} {IDLE if gpu in idle else WORK} processes={1000 + gpu}:70000000000 "
                    f"nvlink_transmit_kibibytes={moved} nvlink_receive_kibibytes={moved} "
                    f"pcie_transmit_bytes=0 pcie_receive_bytes=0"
                )
        return "\n".join([*lines, ""])


def faster_rules(folder: Path) -> list[Path]:
    """Write the shipped rules anew with all `for` and `keep_firing_for` shortened, and return the files."""
    made = []
    for path in sorted((ROOT / "exporters/rules").glob("*.rules.yml")):
        rules = yaml.safe_load(path.read_text(encoding="utf-8"))
        for group in rules["groups"]:
            for rule in group["rules"]:
                for key in {"for", "keep_firing_for"} & rule.keys():
                    number, unit = re.fullmatch(r"(\d+)([smh])", rule[key]).groups()
                    rule[key] = f"{max(1, int(number) * _UNITS[unit] // FASTER)}s"
        made.append(folder / path.name)
        made[-1].write_text(yaml.safe_dump(rules), encoding="utf-8")
    return made


def scrape_of(nodes: Sequence[Node]) -> dict[str, object]:
    """Return the scrape configuration that names the nodes as a cluster does."""
    return {
        "static_configs": [
            {"targets": [node.agent.url.removeprefix("http://")], "labels": {"instance": node.name}} for node in nodes
        ]
    }


def told(payloads: Sequence[Mapping]) -> list[dict[str, str]]:
    """Return the labels of each firing alert of each message, in their order."""
    return [alert["labels"] for body in payloads for alert in body["alerts"] if alert["status"] == "firing"]
