"""What a cluster puts around the agent, with the real programs: a Prometheus with TLS, client certificate and password,
node_exporter with the text file, and dcgm-exporter's names in a query.
"""

from __future__ import annotations

import base64
import http.client
import ssl
import time
from contextlib import closing

import bcrypt
import pytest

from tests.end_to_end.programs import (
    ROOT,
    Agent,
    Program,
    Prometheus,
    fetch,
    free_port,
    program,
    run_warpwatch,
    wait_for,
    warpwatch,
)
from tests.end_to_end.test_agent import script
from tests.exporters.certificates import Authority
from tests.nvml_emulator.emulator import Emulator

pytestmark = pytest.mark.end_to_end

PASSWORD = "correct horse"


@pytest.fixture
def environment(nvml_emulator_library, tmp_path):
    emulator = Emulator(tmp_path, script())
    emulator.freeze(0)
    return emulator.environment()


class Site:
    """A folder with certificates and a web configuration that asks for all of them."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.authority.issue("server", "localhost", "127.0.0.1")
        self.client = self.authority.issue("client", "prometheus.example.org")
        hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(10)).decode()
        self.text = (
            "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
            "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
            f"basic_auth_users:\n  prometheus: {hashed}\n"
        )
        self.file = folder / "web.yml"
        self.file.write_text(self.text, encoding="utf-8")

    @property
    def config(self) -> str:
        return f'[export]\nweb_config = "{self.file}"\n'

    @property
    def scrape(self) -> dict:
        return {
            "scheme": "https",
            "tls_config": {
                "ca_file": str(self.authority.file),
                "cert_file": str(self.client[0]),
                "key_file": str(self.client[1]),
                "server_name": "localhost",
            },
            "basic_auth": {"username": "prometheus", "password": PASSWORD},
        }

    def get(self, port: int, path: str = "/metrics", password: str = PASSWORD, **more) -> tuple[int, str]:
        """Return status and body, with the client's certificate unless `pair` says otherwise; status 0 for none."""
        context = self.authority.client(more.get("pair", self.client))
        credentials = base64.b64encode(f"prometheus:{password}".encode()).decode()
        try:
            with closing(http.client.HTTPSConnection("localhost", port, timeout=5, context=context)) as client:
                client.request("GET", path, headers={"Authorization": f"Basic {credentials}"})
                response = client.getresponse()
                return response.status, response.read().decode()
        except OSError:
            return 0, ""


def value(body: str, name: str) -> float | None:
    found = [line.rpartition(" ")[2] for line in body.splitlines() if line.startswith(name)]
    return float(found[0]) if found else None


def test_a_prometheus_scrapes_with_tls_a_client_certificate_and_a_password(environment, tmp_path):
    site = Site(tmp_path)
    with Agent(tmp_path, config=site.config, environment=environment) as agent:
        wait_for("ready agent", lambda: site.get(agent.port, "/-/ready")[0] == 200)
        target = f"127.0.0.1:{agent.port}"
        with Prometheus(tmp_path, [target], [], scrape=site.scrape) as prometheus:
            wait_for("scraped power", lambda: len(prometheus.query("warpwatch_gpu_power_watts")) == 2)
            # Neither without TLS, nor without the certificate, nor without the password.
            status, _, body = fetch(f"http://{target}/metrics")
            assert (status, b"This server speaks HTTPS" in body) == (400, True)
            assert site.get(agent.port, pair=None)[0] == 0
            assert site.get(agent.port, password="guessed")[0] == 401
            # A file that is wrong keeps what holds, and a rule can see it.
            site.file.write_text(site.text + "tls_sever_config:\n", encoding="utf-8")
            expression = "warpwatch_config_last_reload_successful == 0"
            wait_for("fault in the metric", lambda: prometheus.query(expression))
            assert "line 8: unknown key 'tls_sever_config'; did you mean 'tls_server_config'?" in agent.log()
            assert site.get(agent.port)[0] == 200
            site.file.write_text(site.text, encoding="utf-8")
            wait_for("no fault any more", lambda: not prometheus.query(expression))
            # A certificate of the next month, without a restart: the old one is not shown any more.
            before = (site.folder / "server.crt").read_bytes()
            site.authority.issue("server", "localhost", "127.0.0.1")
            assert (site.folder / "server.crt").read_bytes() != before
            new = ssl.PEM_cert_to_DER_cert((site.folder / "server.crt").read_text())
            wait_for("new certificate", lambda: shown(site, agent) == new)
            wait_for("scrape after that", lambda: prometheus.query(f"timestamp(up == 1) > {time.time():f}"))


def shown(site: Site, agent: Agent) -> bytes | None:
    with closing(
        http.client.HTTPSConnection("localhost", agent.port, timeout=5, context=site.authority.client(site.client))
    ) as client:
        client.connect()
        return client.sock.getpeercert(binary_form=True)


def test_a_bad_web_configuration_stops_the_start_and_the_check(tmp_path):
    (tmp_path / "web.yml").write_text("tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n")
    config = tmp_path / "warpwatch.toml"
    config.write_text(f'[export]\nweb_config = "{tmp_path / "web.yml"}"\n', encoding="utf-8")
    sentence = f"cannot read the certificate {tmp_path / 'server.crt'}: No such file or directory"
    for command in (["check-config", str(config)], ["run", "--config", str(config), "--listen", "127.0.0.1:0"]):
        ended = run_warpwatch(*command)
        assert ended.returncode == 2
        assert sentence in ended.stderr


def test_a_node_exporter_takes_the_file_and_the_file_goes_with_the_agent(environment, tmp_path):
    folder = tmp_path / "textfile"
    folder.mkdir()
    file = folder / "warpwatch.prom"
    file.write_text("warpwatch_of_an_agent_that_was_killed 1\n", encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [
        program("prometheus-node-exporter"),
        f"--web.listen-address={address}",
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={folder}",
    ]
    config = f'[export]\ntextfile = "{file}"\ntextfile_period_s = 1\n'

    def page() -> str:
        return fetch(f"http://{address}/metrics")[2].decode()

    with Program("node_exporter", command, tmp_path):
        with Agent(tmp_path, config=config, environment=environment):
            wait_for("power by way of the file", lambda: "warpwatch_gpu_power_watts{" in page())
            taken = page()
            assert value(taken, "node_textfile_scrape_error") == 0
            assert "killed" not in taken
            assert abs(time.time() - (value(taken, "node_textfile_mtime_seconds") or 0)) < 60
        assert list(folder.iterdir()) == []
        assert "warpwatch_gpu" not in page()


def test_a_replay_that_listens_serves_by_the_table_too(tmp_path):
    site = Site(tmp_path)
    port = free_port()
    config = tmp_path / "replay.toml"
    config.write_text(site.config + 'host = "full"\nowner_user = true\ndcgm = true\n', encoding="utf-8")
    trace = ROOT / "fixtures" / "traces" / "constructed_mig_and_health.jsonl"
    command = [warpwatch(), "replay", str(trace), "--fast", "--config", str(config), "--listen", f"127.0.0.1:{port}"]
    with Program("replay", command, tmp_path) as replay:
        wait_for("page", lambda: "warpwatch_gpu_power_watts{" in site.get(port)[1])
        _, body = site.get(port)
        assert site.get(port, password="guessed")[0] == 401
        assert f"https://127.0.0.1:{port}/" in replay.log()
    assert ',owner_user="' in body
    assert "warpwatch_replay 1\n" in body
    # Rules that others wrote for DCGM's names would take a replay for what is.
    assert "DCGM_FI" not in body


def test_dcgms_names_beside_ours(environment, tmp_path):
    with Agent(tmp_path, config="[export]\ndcgm = true\n", environment=environment) as agent:
        agent.wait_until_ready()
        with Prometheus(tmp_path, [f"127.0.0.1:{agent.port}"], []) as prometheus:
            # As dashboard 12239 asks.
            query = 'max(DCGM_FI_DEV_POWER_USAGE{Hostname=~".+", gpu=~"1"}) by (Hostname, gpu, UUID)'
            wait_for("power", lambda: prometheus.query(query))
            (found,) = prometheus.query(query)
            assert found["value"][1] == "401.5"
            assert found["metric"]["UUID"] == "GPU-00000001-1111-2222-3333-444444444444"
            # The minor number, which is not the index.
            assert prometheus.query('DCGM_FI_DEV_SM_CLOCK{gpu="1",device="nvidia1",modelName="NVIDIA H100 80GB HBM3"}')
