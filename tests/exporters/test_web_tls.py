"""TLS over real sockets: versions, client certificates, files that change, slow and hostile clients."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from waitress import wasyncore

from agent.clock import stopwatch
from exporters.web import WebApp, WebServer
from exporters.web_access import WebAccess
from exporters.web_connections import GuardedServer, WebServerConfig
from tests.exporters.certificates import Authority
from tests.exporters.snapshots import full_snapshot

HEAD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


class Site:
    """A folder with an authority, a web configuration and a server of it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.authority.issue("server", "localhost")
        self._stack = stack

    def write(self, *more: str) -> Path:
        """Write web.yml with the server's certificate and lines of `more`, of tls_server_config where indented."""
        lines = ["tls_server_config:", "  cert_file: server.crt", "  key_file: server.key", *more]
        path = self.folder / "web.yml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def serve(self, *more: str, config: WebServerConfig | None = None, app=None) -> None:
        self.access = WebAccess(self.write(*more))
        snapshot = full_snapshot()
        self.server = WebServer(app or WebApp(lambda: snapshot), "127.0.0.1", 0, config, access=self.access)
        self.server.start()
        self._stack.callback(self.server.stop)

    def dial(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.server.port), timeout=10)
        try:
            return self._stack.enter_context(context.wrap_socket(plain, server_hostname="localhost"))
        except BaseException:
            plain.close()
            raise

    def get(self, context: ssl.SSLContext, path: str = "/metrics") -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("localhost", self.server.port, timeout=10, context=context)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()


@pytest.fixture
def site(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Site(tmp_path, stack)


def test_a_scrape_with_tls(site):
    site.serve()
    assert site.server.url == f"https://127.0.0.1:{site.server.port}/"
    client = site.dial(site.authority.client())
    assert client.version() == "TLSv1.3"
    for _ in range(3):  # over one connection
        client.sendall(HEAD + b"\r\n")
        response = http.client.HTTPResponse(client)
        response.begin()
        assert response.status == 200
        assert b"warpwatch_gpu_power_watts{" in response.read()


def test_a_large_answer_comes_whole(site):
    body = os.urandom(3 << 20)

    def app(_environ, start_response):
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    site.serve(app=app)
    assert site.get(site.authority.client()) == (200, body)


def test_many_requests_in_one_record_are_all_answered(site):
    site.serve()
    client = site.dial(site.authority.client())
    client.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    received = b""
    while received.count(b"ok\n") < 3:
        part = client.recv(65536)
        assert part
        received += part
    assert received.count(b"HTTP/1.1 200 OK") == 3


def test_the_end_is_told_so_that_nothing_seems_cut_off(site):
    site.serve()
    client = site.dial(site.authority.client())
    client.sendall(HEAD + b"Connection: close\r\n\r\n")
    while client.recv(65536):  # an end without notice would raise SSLEOFError
        pass


def test_old_versions_are_refused(site):
    site.serve("  min_version: TLS13")
    with pytest.raises(ssl.SSLError):
        site.dial(site.authority.client(maximum_version=ssl.TLSVersion.TLSv1_2))
    assert site.get(site.authority.client())[0] == 200


def test_the_newest_version_and_the_suites_can_be_chosen(site):
    site.serve(
        "  max_version: TLS12",
        "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256]",
        "  curve_preferences: [CurveP384]",
    )
    client = site.dial(site.authority.client())
    assert client.version() == "TLSv1.2"
    assert client.cipher()[0] == "ECDHE-ECDSA-CHACHA20-POLY1305"


def test_only_clients_with_a_certificate_are_let_in(site, tmp_path):
    site.serve("  client_auth_type: RequireAndVerifyClientCert", "  client_ca_file: ca.pem")
    right = site.authority.issue("client", "prometheus.example.org")
    assert site.get(site.authority.client(right))[0] == 200
    strangers = {
        "none": None,
        "expired": site.authority.issue("old", "prometheus.example.org", days=-1),
        "of another authority": Authority(tmp_path, "other").issue("foreign", "prometheus.example.org"),
    }
    for pair in strangers.values():
        with pytest.raises((ssl.SSLError, ConnectionError)):
            site.get(site.authority.client(pair))
    assert site.get(site.authority.client(right))[0] == 200


def test_only_clients_of_the_right_name_are_let_in(site):
    site.serve(
        "  client_auth_type: RequireAndVerifyClientCert",
        "  client_ca_file: ca.pem",
        "  client_allowed_sans: [prometheus.example.org]",
    )
    right = site.authority.issue("client", "prometheus.example.org")
    wrong = site.authority.issue("visitor", "visitor.example.org")
    assert site.get(site.authority.client(right))[0] == 200
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        site.get(site.authority.client(wrong))


def test_a_certificate_that_is_optional_has_to_be_right_where_it_is_shown(site, tmp_path):
    site.serve("  client_auth_type: VerifyClientCertIfGiven", "  client_ca_file: ca.pem")
    assert site.get(site.authority.client())[0] == 200
    foreign = Authority(tmp_path, "other").issue("foreign", "x.example.org")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        site.get(site.authority.client(foreign))


def test_a_certificate_is_rotated_without_a_restart(site):
    site.authority.issue("server", "localhost", days=-1)
    site.serve()
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        site.get(site.authority.client())
    site.authority.issue("server", "localhost")
    site.access.refresh()
    assert site.get(site.authority.client())[0] == 200
    assert site.access.error is None


def test_a_bad_new_file_keeps_the_old_one_and_says_so_once(site, caplog):
    site.serve()
    key = site.folder / "server.key"
    right = key.read_bytes()
    with caplog.at_level(logging.ERROR, "warpwatch.web"):
        key.write_bytes(b"half a k")
        site.access.refresh()
        site.access.refresh()
        assert "cannot use the certificate" in (site.access.error or "")
        assert len(caplog.records) == 1
        assert caplog.messages[0].endswith("; the web configuration read before still holds")
    assert site.get(site.authority.client())[0] == 200
    key.write_bytes(right)
    site.access.refresh()
    assert site.access.error is None
    site.write("  min_version: TLS99")
    site.access.refresh()
    assert "line 4: tls_server_config.min_version is 'TLS99'" in (site.access.error or "")
    (site.folder / "web.yml").write_text("# half written\n")
    site.access.refresh()
    assert "web.yml is empty" in (site.access.error or "")
    (site.folder / "web.yml").unlink()
    site.access.refresh()
    assert "cannot read web configuration" in (site.access.error or "")
    assert site.get(site.authority.client())[0] == 200


def test_a_certificate_that_comes_after_the_file_that_names_it(site):
    site.serve()
    site.write()
    named = (site.folder / "web.yml").read_text().replace("server.", "next.")
    (site.folder / "web.yml").write_text(named)
    site.access.refresh()
    assert site.access.error == f"cannot read the certificate {site.folder / 'next.crt'}: No such file or directory"
    site.authority.issue("next", "localhost")
    site.access.refresh()
    assert site.access.error is None
    assert site.get(site.authority.client())[0] == 200


def test_tls_is_switched_on_and_off_and_idle_connections_end(site):
    site.serve()
    client = site.dial(site.authority.client())
    client.sendall(HEAD + b"\r\n")
    response = http.client.HTTPResponse(client)
    response.begin()
    response.read()
    (site.folder / "web.yml").write_text("{}", encoding="utf-8")
    site.access.refresh()
    assert client.recv(1) == b""
    plain = http.client.HTTPConnection("127.0.0.1", site.server.port, timeout=10)
    with contextlib.closing(plain):
        plain.request("GET", "/-/healthy")
        assert plain.getresponse().status == 200
    site.write()
    site.access.refresh()
    assert site.get(site.authority.client())[0] == 200


def test_sessions_that_clients_leave_behind_take_bounded_memory(site, monkeypatch):
    monkeypatch.setattr("exporters.web_access._SESSIONS_MAX", 3)
    site.serve()
    client = site.authority.client(maximum_version=ssl.TLSVersion.TLSv1_2)
    client.options |= ssl.OP_NO_TICKET
    first = site.access.context
    for number in range(1, 6):
        connection = site.dial(client)
        connection.sendall(HEAD + b"Connection: close\r\n\r\n")
        while connection.recv(65536):
            pass
        connection.unwrap().close()
        # Left in good order, else it keeps none.
        assert first.session_stats()["number"] == number
    site.access.refresh()
    assert site.access.context is not first
    assert site.access.context.session_stats()["number"] == 0
    assert site.get(client)[0] == 200


def test_a_client_without_tls_is_told_to_use_it(site):
    site.serve()
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=10) as client:
        client.sendall(HEAD + b"\r\n")
        answer = client.recv(4096)
    assert answer.startswith(b"HTTP/1.0 400 Bad Request\r\n")
    assert b"This server speaks HTTPS" in answer
    assert b"warpwatch_gpu" not in answer


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\xff\xff" + bytes(2000), b"\x00" * 4096, os.urandom(4096), b"\x16"])
def test_nonsense_instead_of_a_handshake_harms_nobody(site, sent):
    site.serve()
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=10) as client:
        client.sendall(sent)
        assert site.get(site.authority.client())[0] == 200


def test_clients_that_do_not_read_hold_nobody_up(site):
    site.serve()
    # Each asks for about 2 MB and reads nothing: more of them than there are threads.
    for _ in range(8):
        client = site.dial(site.authority.client())
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
    assert site.get(site.authority.client())[0] == 200
    assert site.get(site.authority.client(), "/-/healthy") == (200, b"ok\n")


def test_requests_over_the_limits_are_refused_through_tls(site):
    site.serve()
    client = site.dial(site.authority.client())
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20000 + b"\r\n\r\n")
    assert client.recv(100).split()[1] == b"431"


def test_two_hundred_clients_that_trickle_handshakes_and_requests_keep_no_scraper_out(site):
    site.serve()
    slow: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for index in range(200):
            if index % 4:  # within the handshake
                client = socket.create_connection(("127.0.0.1", site.server.port), timeout=10)
                client.sendall(b"\x16\x03\x01\x02")
            else:  # within the head of a request
                client = site.dial(site.authority.client())
                client.sendall(HEAD)
            slow.append(stack.enter_context(client))
        for _ in range(3):
            for index, client in enumerate(slow):
                with contextlib.suppress(OSError):
                    client.sendall(b"X-a: b\r\n" if index % 4 == 0 else b"\x00")
            started = stopwatch()
            assert site.get(site.authority.client())[0] == 200
            assert stopwatch() - started < 2.0


def test_a_handshake_has_the_deadline_of_a_request(site):
    now_s = 100.0
    access = WebAccess(site.write())
    channels: dict[int, object] = {}
    listener = socket.create_server(("127.0.0.1", 0))
    server = GuardedServer(WebApp(full_snapshot), listener, WebServerConfig(), channels, lambda: now_s, access=access)
    try:
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"\x16\x03\x01\x02")
            for _ in range(20):
                wasyncore.poll2(0.01, channels)
            assert len(server.active_channels) == 1
            for _ in range(6):  # a byte each second
                now_s += 1.0
                with contextlib.suppress(OSError):
                    client.sendall(b"\x00")
                for _ in range(3):
                    wasyncore.poll2(0.01, channels)
            assert not server.active_channels
    finally:
        wasyncore.close_all(channels)
        server.task_dispatcher.shutdown()


CURL = shutil.which("curl")


@pytest.mark.skipif(CURL is None, reason="curl is not installed")
def test_curl_with_a_client_certificate(site):
    site.serve("  client_auth_type: RequireAndVerifyClientCert", "  client_ca_file: ca.pem")
    certificate, key = site.authority.issue("client", "prometheus.example.org")
    command = [CURL, "--silent", "--show-error", "--cacert", str(site.authority.file), "--noproxy", "*"]
    url = f"https://localhost:{site.server.port}/-/healthy"
    shown = [*command, "--cert", str(certificate), "--key", str(key), url]
    assert subprocess.run(shown, capture_output=True, check=True, timeout=30).stdout == b"ok\n"
    assert subprocess.run([*command, url], capture_output=True, check=False, timeout=30).returncode != 0
