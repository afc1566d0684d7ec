"""Any bytes on a connection: the server answers in HTTP or closes, and goes on answering others."""

from __future__ import annotations

import http.client
import socket

import pytest
from hypothesis import given

from exporters.web import WebApp, WebServer, WebServerConfig
from tests.exporters.snapshots import full_snapshot
from tests.fuzz.mutation import damaged, profile

REQUESTS = (
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text;q=0.5\r\nAccept-Encoding: gzip\r\n\r\n",
    b"HEAD / HTTP/1.0\r\n\r\n",
    b"GET /-/ready?x=%20 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nabcde",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    b"GET http://a:9836/metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Basic YTpi\r\n folded\r\n\r\n",
)
#: What the server may say: 500 would be an exception that escaped.
ALLOWED = {100, 200, 400, 404, 405, 411, 413, 414, 417, 431, 501, 503, 505}


@pytest.fixture(scope="module")
def server():
    config = WebServerConfig(request_timeout_s=0.5, idle_timeout_s=0.5)
    running = WebServer(WebApp(full_snapshot), "127.0.0.1", 0, config)
    running.start()
    yield running
    running.stop()


def exchange(server: WebServer, data: bytes) -> bytes:
    """Send all of it, say that no more comes, and return what was answered until the server closed."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(65536):
                answer += part
        except OSError:
            pass  # closed by the server before it had read all
    return answer


@profile(2)
@given(data=damaged(REQUESTS))
def test_any_bytes(server, caplog, data):
    caplog.clear()
    answer = exchange(server, data)
    if answer:
        head = answer.split(b"\r\n", 1)[0].split(b" ", 2)
        assert head[0] in {b"HTTP/1.0", b"HTTP/1.1"}, answer[:200]
        assert int(head[1]) in ALLOWED, answer[:500]
        assert b"Traceback" not in answer
    assert not [record for record in caplog.records if record.exc_info], caplog.text
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", "/-/healthy")
        assert connection.getresponse().status == 200
    finally:
        connection.close()
