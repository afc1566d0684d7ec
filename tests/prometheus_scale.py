"""What a cluster asks of Prometheus: `python -m tests.prometheus_scale --nodes 1000 --minutes 12`.

A real Prometheus scrapes so many nodes every 15 s and evaluates all shipped rules. Every node shows the page of an
emulated DGX with 8 GPUs (fixtures/golden/machine_dgx_slurm.prom) under UUIDs of its own, 32 nodes a job, with readings
that move. Printed are series, memory, CPU time and how long the rules take. One server on this machine answers for
all nodes, so that its own CPU time is not Prometheus's.
"""

from __future__ import annotations

import argparse
import gzip
import math
import re
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from tests.end_to_end.programs import Program, fetch, free_port, program, wait_for

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "fixtures" / "golden" / "machine_dgx_slurm.prom"
RULES = sorted((ROOT / "exporters" / "rules").glob("*.rules.yml"))
NODES_A_JOB = 32


class Nodes(ThreadingHTTPServer):
    """Answers /<number> with the page of that node."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.lines = PAGE.read_text(encoding="utf-8").splitlines()

    def page(self, number: int) -> bytes:
        """Return the page of node `number` now: other UUIDs, its job, and readings within 1 % of the page's."""
        swing = 1.0 + 0.01 * math.sin(time.monotonic() / 7.0 + number)
        moved = [line if line.startswith("#") else _moved(line, swing) for line in self.lines]
        text = "\n".join(moved).replace("-4222-8333-444444444444", f"-4222-8333-{number:012d}")
        text = text.replace("slurm:812345", f"slurm:{number // NODES_A_JOB}") + "\n"
        return gzip.compress(text.encode(), 1)


def _moved(line: str, swing: float) -> str:
    name, _, value = line.rpartition(" ")
    return f"{name} {float(value) * swing:.6g}" if re.fullmatch(r"\d{2,}\.?\d*|\d\.\d+", value) else line


class _Answer(BaseHTTPRequestHandler):
    server: Nodes
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.server.page(int(self.path.strip("/")))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def values(url: str) -> dict[str, float]:
    """Return Prometheus's own metrics; those with labels under their name and labels."""
    _, _, body = fetch(url + "/metrics")
    pairs = (line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def start(folder: Path, nodes: Nodes, count: int) -> tuple[Program, str]:
    """Start a Prometheus on `count` nodes."""
    address, url = f"127.0.0.1:{nodes.server_port}", f"http://127.0.0.1:{free_port()}"
    targets = [
        {"targets": [address], "labels": {"__metrics_path__": f"/{number}", "instance": f"node{number:04d}"}}
        for number in range(count)
    ]
    config = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [{"job_name": "warpwatch", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--log.level=warn",
    ]
    return Program("prometheus", command, folder), url


def report(before: dict[str, float], after: dict[str, float], seconds: float) -> str:
    """Return what it cost, from Prometheus's metrics at the start and the end of `seconds`."""

    def growth(counter: str) -> float:
        return sum(value - before.get(name, 0.0) for name, value in after.items() if name.partition("{")[0] == counter)

    series, memory = after["prometheus_tsdb_head_series"], after["process_resident_memory_bytes"]
    cpu, samples = growth("process_cpu_seconds_total"), growth("prometheus_tsdb_head_samples_appended_total")
    failures = growth("prometheus_rule_evaluation_failures_total")
    late = growth("prometheus_rule_group_iterations_missed_total")
    lines = [
        f"series {series:.0f}; samples a second {samples / seconds:.0f}",
        f"resident memory {memory / 1e9:.2f} GB; CPU {cpu / seconds:.2f} cores",
        f"evaluations of rules that failed {failures:.0f}, of groups that came too late {late:.0f}",
    ]
    groups = {
        name.partition('rule_group="')[2].rpartition(";")[2].rstrip('"}'): value
        for name, value in after.items()
        if name.startswith("prometheus_rule_group_last_duration_seconds{")
    }
    lines += [f"rule group {name}: {value:.2f} s" for name, value in sorted(groups.items())]
    return "\n".join(lines)


def main() -> int:
    """Run and print the costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=12.0)
    arguments = parser.parse_args()
    nodes = Nodes()
    threading.Thread(target=nodes.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        prometheus, url = start(Path(name), nodes, arguments.nodes)
        with prometheus:
            wait_for("prometheus", lambda: fetch(url + "/-/ready")[0] == 200, 60)
            time.sleep(60)
            before, started = values(url), time.monotonic()
            time.sleep(max(0.0, 60 * arguments.minutes - 60))
            after, seconds = values(url), time.monotonic() - started
            sys.stdout.write(f"{arguments.nodes} nodes of 8 GPUs, {arguments.minutes:g} min\n")
            sys.stdout.write(report(before, after, seconds) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
