"""Bounds of the web server's connections, on real sockets, with the loop driven by hand and a clock set by hand."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket

import pytest
from waitress import wasyncore

from agent.clock import stopwatch
from exporters.web import WebApp, WebServer
from exporters.web_connections import GuardedServer, WebServerConfig
from tests.exporters.snapshots import full_snapshot

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
#: More than the kernel takes for a client that reads nothing.
LARGE = bytes(32 << 20)


def answer(environ, start_response):
    body = LARGE if environ["PATH_INFO"] == "/large" else b"ok"
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


class Loop:
    """A server whose loop turns when told to, and whose clock stands still until it is moved."""

    def __init__(self, stack: contextlib.ExitStack, **limits) -> None:
        self.now_s = 100.0
        self._stack = stack
        listener = socket.create_server(("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        self._channels: dict[int, object] = {}
        config = WebServerConfig(**limits)
        self.server = GuardedServer(answer, listener, config, self._channels, lambda: self.now_s)
        stack.callback(wasyncore.close_all, self._channels)
        stack.callback(self.server.task_dispatcher.shutdown)

    def turn(self, is_done=lambda: False, rounds: int = 500) -> bool:
        for _ in range(rounds):
            if is_done():
                return True
            wasyncore.poll2(0.01, self._channels)
        return is_done()

    def dial(self, address: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), source_address=(address, 0))

    def connect(self, sent: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
        held = len(self.server.active_channels)
        client = self.dial(address)
        self._stack.enter_context(client)
        client.sendall(sent)
        # One more, or one less of the others where the server is full.
        assert self.turn(lambda: held < len(self.server.active_channels) or self.is_held(client))
        self.turn(rounds=3)
        return client

    def is_held(self, client: socket.socket) -> bool:
        return client.getsockname() in {channel.addr for channel in self.server.active_channels.values()}

    def after(self, seconds: float, client: socket.socket) -> bool:
        """Return whether the connection is still held after `seconds`."""
        self.now_s += seconds
        self.turn(rounds=3)
        return self.is_held(client)

    def fetch(self, client: socket.socket) -> bytes:
        client.sendall(HEAD + b"\r\n")
        assert self.turn(lambda: bool(select.select([client], [], [], 0)[0]))
        received = client.recv(4096)
        self.turn(rounds=3)
        return received


@pytest.fixture
def loop():
    with contextlib.ExitStack() as stack:
        yield lambda **limits: Loop(stack, **limits)


def test_a_request_has_a_deadline_whatever_trickles_in(loop):
    loop = loop(request_timeout_s=5.0)
    silent, dripping = loop.connect(), loop.connect(HEAD)
    for _ in range(4):
        dripping.sendall(b"X-a: b\r\n")
        assert loop.after(1.0, dripping)
    assert loop.is_held(silent)
    dripping.sendall(b"X-a: b\r\n")
    assert not loop.after(1.5, dripping)
    assert not loop.is_held(silent)


def test_so_has_the_body(loop):
    loop = loop(request_timeout_s=5.0)
    client = loop.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
    assert loop.after(4.9, client)
    assert not loop.after(1.0, client)


def test_an_idle_connection_is_kept_for_a_while_and_each_answer_starts_it_anew(loop):
    loop = loop(request_timeout_s=5.0, idle_timeout_s=20.0)
    client = loop.connect()
    for _ in range(3):
        assert loop.fetch(client).startswith(b"HTTP/1.1 200")
        assert loop.after(0.6, client)
        assert loop.after(18.0, client)
    # The next request has begun: 5 s from its first byte on.
    client.sendall(HEAD)
    loop.turn(rounds=3)
    assert loop.after(0.6, client)
    assert loop.after(4.8, client)
    assert not loop.after(0.6, client)


def test_an_idle_connection_ends(loop):
    loop = loop(idle_timeout_s=20.0)
    client = loop.connect()
    loop.fetch(client)
    assert loop.after(0.6, client)
    assert not loop.after(20.1, client)


def test_an_answer_has_to_be_fetched_in_time_and_taking_a_little_is_not_enough(loop):
    loop = loop(answer_timeout_s=20.0, unsent_max_bytes=1 << 30)
    client = loop.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
    assert loop.turn(lambda: any(channel.total_outbufs_len for channel in loop.server.active_channels.values()))
    assert loop.after(0.6, client)
    for _ in range(3):
        assert client.recv(1 << 20)
        assert loop.after(6.0, client)
    assert client.recv(1 << 20)
    assert not loop.after(6.0, client)


def test_answers_that_nobody_fetches_take_bounded_memory(loop):
    loop = loop(unsent_max_bytes=4 << 20)
    client = loop.connect(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
    assert loop.turn(lambda: not loop.is_held(client))


def test_many_requests_at_once_end_the_connection(loop):
    loop = loop(pipelined_max=4, threads=1)
    client = loop.connect((HEAD + b"\r\n") * 50)
    assert loop.turn(lambda: not loop.is_held(client))


def test_a_full_server_takes_the_oldest_of_the_address_that_has_most(loop):
    loop = loop(connection_limit=8)
    scraper = loop.connect(address="127.0.0.2")
    assert loop.fetch(scraper).startswith(b"HTTP/1.1 200")
    others = [loop.connect(HEAD) for _ in range(12)]
    # Seven places: one for the scraper, so that the first six of twelve had to go.
    assert [loop.is_held(client) for client in others] == [False] * 6 + [True] * 6
    assert loop.fetch(scraper).startswith(b"HTTP/1.1 200")


def test_an_incomplete_request_goes_before_an_idle_scraper_of_the_same_address(loop):
    loop = loop(connection_limit=4)
    scraper = loop.connect()
    assert loop.fetch(scraper).startswith(b"HTTP/1.1 200")
    for _ in range(6):
        loop.connect(HEAD)
    assert loop.fetch(scraper).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("held", ["idle", "unfetched"])
def test_whatever_fills_the_server_goes_before_a_scraper_that_asks(loop, held):
    loop = loop(connection_limit=4, unsent_max_bytes=1 << 30)
    oldest = loop.connect()
    if held == "idle":
        assert loop.fetch(oldest).startswith(b"HTTP/1.1 200")
    else:
        oldest.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert loop.turn(lambda: any(channel.total_outbufs_len for channel in loop.server.active_channels.values()))
    assert loop.after(0.6, oldest)
    others = [loop.connect() for _ in range(2)]
    for client in others:
        assert loop.fetch(client).startswith(b"HTTP/1.1 200")
    assert loop.after(1.0, oldest)
    scraper = loop.connect()
    assert not loop.is_held(oldest)
    assert all(map(loop.is_held, others))
    assert loop.fetch(scraper).startswith(b"HTTP/1.1 200")


def test_an_address_that_is_none_ends_the_connection_and_is_not_logged(loop, caplog):
    loop = loop()
    client = loop.connect(b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert loop.turn(lambda: not loop.is_held(client))
    assert not caplog.records


def test_a_connection_gets_no_event_of_the_one_that_had_its_descriptor(loop):
    # Three connect at once at a server for two: the third gets the descriptor of the first in the round that closes it.
    loop = loop(connection_limit=2)
    old = loop.connect(HEAD)
    with loop.dial() as second, loop.dial() as third:
        old.sendall(b"X-a: b\r\n")
        assert loop.turn(lambda: loop.is_held(third) and not loop.is_held(second))
        assert loop.fetch(third).startswith(b"HTTP/1.1 200")


def test_a_process_with_few_files_keeps_half_of_them_for_sampling(loop, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (10, 10))
    loop = loop()
    clients = [loop.connect(HEAD) for _ in range(7)]
    assert sum(map(loop.is_held, clients)) == 4  # five, the last kept free


def test_two_hundred_slow_clients_keep_no_scraper_out():
    server = WebServer(WebApp(full_snapshot), "127.0.0.1", 0)
    server.start()
    slow = []
    try:
        for _ in range(200):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
            slow.append(client)
            client.sendall(HEAD)
        for _ in range(5):
            for client in slow:
                client.sendall(b"X-a: b\r\n")
            started = stopwatch()
            scraper = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            with contextlib.closing(scraper):
                scraper.request("GET", "/metrics")
                assert scraper.getresponse().status == 200
            assert stopwatch() - started < 1.0
    finally:
        for client in slow:
            client.close()
        server.stop()
