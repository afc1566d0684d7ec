"""The most that a host may hold: `python -m tests.worst_case` (as root), and what the agent costs there.

16 emulated GPUs of which 8 are divided into 7 MIG instances each, 4,000 processes of which 64 hold GPUs, and 200 mounts
in a mount namespace of its own. CPU time and memory are read from /proc of the agent, after a warm-up that fills its
windows. Printed are both, with the unit's limits (systemd/warpwatch.service) and the number of series; the exit status
is 1 where a limit does not hold.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.end_to_end.budget_node import cpu_seconds, resident_bytes
from tests.end_to_end.programs import Agent, fetch
from tests.nvml_emulator.emulator import Emulator, MigInstance

GPUS = 16
DIVIDED = 8
INSTANCES = 7
PROCESSES = 4000
HOLDERS = 64
MOUNTS = 200
#: Of the unit: MemoryHigh, and CPUQuota in seconds a minute.
MOST_BYTES = 160e6
MOST_CPU_S = 30.0

_MOUNT = """
for i in $(seq {count}); do mkdir -p {folder}/m$i; mount -t tmpfs -o size=4k m$i {folder}/m$i; done
exec "$@"
"""


def script(pids: list[int]) -> str:
    """Return 16 busy GPUs, and four processes on each."""
    lines = ["driver 580.95.05", "end hold"]
    base = "memory_total_bytes=85899345920 power_limit_milliwatts=700000 sm_clock_megahertz=1980"
    work = "utilization_gpu_percent=98 utilization_memory_percent=45 power_milliwatts=600000"
    for gpu in range(GPUS):
        lines += [
            f"gpu {gpu} uuid GPU-000000{gpu:02d}-1111-2222-3333-444444444444",
            f"gpu {gpu} name NVIDIA H100 80GB HBM3",
        ]
    for second in (0, 3600):
        lines.append(f"@ {second}")
        for gpu in range(GPUS):
            held = ",".join(f"{pid}:1000000000" for pid in pids[gpu::GPUS])
            lines.append(f"{gpu} {base} {work} memory_used_bytes=70000000000 processes={held}")
    return "\n".join([*lines, ""])


def divided(gpu: int) -> list[MigInstance]:
    """Return seven instances of one GPU."""
    return [
        MigInstance(gpu_i_id=number + 1, profile="1g.10gb", uuid=f"MIG-000000{gpu:02d}-0000-0000-0000-{number:012d}")
        for number in range(INSTANCES)
    ]


def main() -> int:
    """Run and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="measured, after two of warm-up")
    minutes = parser.parse_args().minutes
    sleepers = [subprocess.Popen(["sleep", "7200"], start_new_session=True) for _ in range(PROCESSES)]
    try:
        with tempfile.TemporaryDirectory() as name:
            return measure(Path(name), [one.pid for one in sleepers[:HOLDERS]], minutes)
    finally:
        for one in sleepers:
            one.kill()
        for one in sleepers:
            one.wait()


def measure(folder: Path, pids: list[int], minutes: float) -> int:
    """Measure an agent on that host."""
    emulator = Emulator(folder, script(pids))
    for gpu in range(DIVIDED):
        emulator.mig(gpu, divided(gpu))
    mounts = folder / "mounts"
    prefix = ["unshare", "-m", "sh", "-c", _MOUNT.format(count=MOUNTS, folder=mounts), "sh"]
    with Agent(folder, environment=emulator.environment(), prefix=prefix) as agent:
        agent.wait_until_ready(60)
        pid = agent.process.pid
        seen = sum(1 for line in Path(f"/proc/{pid}/mounts").read_text().splitlines() if str(mounts) in line)
        time.sleep(120)
        before, started = cpu_seconds(pid), time.monotonic()
        time.sleep(60 * minutes)
        cpu = (cpu_seconds(pid) - before) / (time.monotonic() - started) * 60
        memory = resident_bytes(pid)
        begun = time.monotonic()
        _, _, body = fetch(agent.url + "/metrics")
        took_s = time.monotonic() - begun
        series = sum(1 for line in body.splitlines() if line and not line.startswith(b"#"))
        instances = {line.split(b'GPU_I_ID="')[1].split(b'"')[0] for line in body.splitlines() if b'GPU_I_ID="' in line}
        sys.stdout.write(
            f"{GPUS} GPUs, {DIVIDED * INSTANCES} MIG instances, {PROCESSES} processes, {seen} mounts\n"
            f"CPU {cpu:.2f} s a minute (limit {MOST_CPU_S:.0f}); memory {memory / 1e6:.1f} MB "
            f"(limit {MOST_BYTES / 1e6:.0f})\n"
            f"{series} series, {len(body) / 1e3:.0f} kB, scraped in {took_s * 1e3:.0f} ms; "
            f"{len(instances)} instances a card\n"
        )
        return int(cpu > MOST_CPU_S or memory > MOST_BYTES or seen != MOUNTS)


if __name__ == "__main__":
    sys.exit(main())
