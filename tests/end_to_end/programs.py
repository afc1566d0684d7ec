"""Starts the real programs of a small cluster on this machine: agent, Prometheus, Alertmanager, webhook receiver.

Everything listens on the loopback address at a free port and ends with the test.
"""

from __future__ import annotations

import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(what: str, condition: Callable[[], object], seconds: float = 30.0, every: float = 0.1) -> object:
    """Return the first true answer of `condition`; fail the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            pytest.fail(f"no {what} within {seconds:g} s")
        time.sleep(every)


def fetch(url: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers (lower-case names) and body; status 0 where nobody answers."""
    request = urllib.request.Request(url, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return 0, {}, b""


class Program:
    """A child process whose output goes to a file; stopped with SIGTERM at the end of the `with` block."""

    def __init__(self, name: str, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.output = folder / f"{name}.log"
        self._file = self.output.open("wb")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def log(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def stop(self, seconds: float = 10.0) -> int:
        """Send SIGTERM, wait, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._file.close()
        return self.process.returncode


class Agent(Program):
    """`warpwatch run` as a process."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        config: str = "",
        environment: dict[str, str] | None = None,
        port: int = 0,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it; `prefix` stands before the command."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        file = folder / "warpwatch.toml"
        file.write_text(config, encoding="utf-8")
        command = [*prefix, warpwatch(), "run", "--config", str(file), "--listen", f"127.0.0.1:{self.port}", *arguments]
        super().__init__("agent", command, folder, environment)

    def metrics(self) -> dict[str, float]:
        """Return the samples of /metrics by series as written."""
        _, _, body = fetch(self.url + "/metrics")
        lines = (line for line in body.decode().splitlines() if line and not line.startswith("#"))
        return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}

    def wait_until_ready(self, seconds: float = 20.0) -> None:
        wait_for(f"ready agent ({self.log()})", lambda: fetch(self.url + "/-/ready")[0] == 200, seconds)


class Prometheus(Program):
    """A real Prometheus that scrapes the given targets each second and evaluates the shipped rules."""

    def __init__(
        self,
        folder: Path,
        targets: list[str],
        rules: list[Path],
        alertmanager: str | None = None,
        scrape: dict | None = None,
    ) -> None:
        """Start it; `scrape` is more of the scrape configuration, such as TLS."""
        self.url = f"http://127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [_evaluated_each_second(path, folder) for path in rules],
            "scrape_configs": [{"job_name": "warpwatch", "static_configs": [{"targets": targets}], **(scrape or {})}],
        }
        if alertmanager:
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [
            program("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
            "--log.level=warn",
        ]
        super().__init__("prometheus", command, folder)

    def query(self, expression: str) -> list[dict]:
        """Return the result of an instant query; empty until Prometheus answers."""
        url = f"{self.url}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        status, _, body = fetch(url)
        return json.loads(body)["data"]["result"] if status == 200 else []

    def alerts(self) -> list[dict]:
        status, _, body = fetch(f"{self.url}/api/v1/alerts")
        return json.loads(body)["data"]["alerts"] if status == 200 else []


def _evaluated_each_second(path: Path, folder: Path) -> str:
    """Write the rules anew without the interval of 15 s, so that Prometheus' own holds, and return the file."""
    rules = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        if group.get("interval") == "15s":
            del group["interval"]
    made = folder / f"each_second.{path.name}"
    made.write_text(yaml.safe_dump(rules), encoding="utf-8")
    return str(made)


class Alertmanager(Program):
    """A real Alertmanager with the shipped routes, made fast, whose receivers are all one webhook."""

    def __init__(self, folder: Path, config_file: Path, webhook_url: str) -> None:
        config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
        _make_fast(config["route"])
        config["receivers"] = [
            {"name": name, "webhook_configs": [{"url": f"{webhook_url}/{name}", "send_resolved": True}]}
            for name in (receiver["name"] for receiver in config["receivers"])
        ]
        file = folder / "alertmanager.yml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.address = f"127.0.0.1:{free_port()}"
        command = [
            program("prometheus-alertmanager"),
            f"--config.file={file}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address={self.address}",
            "--cluster.listen-address=",
            "--log.level=warn",
        ]
        super().__init__("alertmanager", command, folder)


def _make_fast(route: dict) -> None:
    route.update({"group_wait": "1s", "group_interval": "2s"})
    for child in route.get("routes", ()):
        _make_fast(child)


class WebhookReceiver:
    """Takes what Alertmanager delivers; `payloads` holds the bodies in order of arrival."""

    def __init__(self) -> None:
        self.payloads: list[dict] = []
        payloads = self.payloads

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                payloads.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def warpwatch() -> str:
    """Return the console script beside the Python that runs the tests."""
    return str(Path(sys.executable).with_name("warpwatch"))


def run_warpwatch(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed and its exit status."""
    return subprocess.run(
        [warpwatch(), *arguments], check=False, capture_output=True, text=True, timeout=120, **options
    )
