"""The web server: a landing page, /metrics, and whether the agent lives and is ready.

Everything is answered from the newest snapshot; no request touches hardware or changes anything.
"""

from __future__ import annotations

import gzip
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agent.errors import FaultError, UsageError
from agent.threads import NamedThread
from exporters.landing import STYLE_SOURCE, render_landing
from exporters.metric_def import MetricDef
from exporters.metrics import METRICS
from exporters.prometheus import PrometheusPage, accepts_gzip, negotiate
from exporters.snapshot import NodeSnapshot, stopped_samplers
from exporters.web_connections import GuardedServer, WebServerConfig

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from exporters.web_access import WebAccess

__all__ = ["DEFAULT_PORT", "WebApp", "WebServer", "WebServerConfig", "parse_listen"]

DEFAULT_PORT: Final = 9836

_PLAIN: Final = "text/plain; charset=utf-8"
_HTML: Final = "text/html; charset=utf-8"
_GZIP_LEVEL: Final = 3
#: Below this, gzip costs more than it saves.
_GZIP_MIN_BYTES: Final = 1000
_CONTENT_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"style-src {STYLE_SOURCE}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_SECURITY_HEADERS: Final = (
    ("Content-Security-Policy", _CONTENT_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a path answers; `gzipped` bytes are sent with that coding."""

    status: str
    content_type: str
    body: bytes
    gzipped: bool = False


class WebApp:
    """The WSGI application."""

    def __init__(
        self,
        get_snapshot: Callable[[], NodeSnapshot | None],
        *,
        table: Sequence[MetricDef] = METRICS,
        owner_user: bool = False,
        own_process: bool = True,
    ) -> None:
        """Answer from what `get_snapshot` returns.

        `table` is what /metrics exports, `own_process` adds process_* to it; `owner_user` names users on the landing
        page.
        """
        self._get_snapshot = get_snapshot
        self._owner_user = owner_user
        self._page = PrometheusPage(get_snapshot, table=table, own_process=own_process)
        self._paths: dict[str, Callable[[WSGIEnvironment], _Answer]] = {
            "/": self._landing,
            "/metrics": self._metrics,
            "/-/healthy": self._healthy,
            "/-/ready": self._ready,
        }

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        method = environ["REQUEST_METHOD"]
        handler = self._paths.get(environ.get("PATH_INFO", "/"))
        headers: list[tuple[str, str]] = []
        if handler is None:
            answer = _Answer("404 Not Found", _PLAIN, b"There is no such page; / lists what there is.\n")
        elif method not in {"GET", "HEAD"}:
            answer = _Answer("405 Method Not Allowed", _PLAIN, b"Only GET and HEAD are answered here.\n")
            headers.append(("Allow", "GET, HEAD"))
        else:
            answer = handler(environ)
            headers.append(("Vary", "Accept, Accept-Encoding"))
        if answer.gzipped:
            headers.append(("Content-Encoding", "gzip"))
        headers += [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
        start_response(answer.status, [*headers, *_SECURITY_HEADERS])
        return [] if method == "HEAD" else [answer.body]

    def _landing(self, environ: WSGIEnvironment) -> _Answer:
        body = render_landing(self._get_snapshot(), owner_user=self._owner_user)
        if len(body) >= _GZIP_MIN_BYTES and accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING")):
            return _Answer("200 OK", _HTML, gzip.compress(body, _GZIP_LEVEL, mtime=0), gzipped=True)
        return _Answer("200 OK", _HTML, body)

    def _metrics(self, environ: WSGIEnvironment) -> _Answer:
        content_type = negotiate(environ.get("HTTP_ACCEPT"))
        gzipped = accepts_gzip(environ.get("HTTP_ACCEPT_ENCODING"))
        page = self._page.render(content_type, gzipped=gzipped)
        if page is None:
            return _Answer("503 Service Unavailable", _PLAIN, b"There are no samples yet.\n")
        return _Answer("200 OK", content_type, page, gzipped=gzipped)

    def _healthy(self, _environ: WSGIEnvironment) -> _Answer:
        return _Answer("200 OK", _PLAIN, b"ok\n")

    def _ready(self, _environ: WSGIEnvironment) -> _Answer:
        snapshot = self._get_snapshot()
        if snapshot is not None and snapshot.ready:
            return _Answer("200 OK", _PLAIN, b"ok\n")
        if snapshot is None:
            return _Answer("503 Service Unavailable", _PLAIN, b"There are no samples yet.\n")
        return _Answer("503 Service Unavailable", _PLAIN, _unready(snapshot).encode())


def _unready(snapshot: NodeSnapshot) -> str:
    """Return why a node is not ready."""
    if not any(status.success for status in snapshot.samplers):
        return "No source has brought fresh samples.\n"
    stopped = stopped_samplers(snapshot)
    return f"No records any more from {', '.join(stopped)}.\n" if stopped else "No GPU brings samples any more.\n"


def parse_listen(listen: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[IPV6]:PORT` or `:PORT`; the host is empty for all addresses.

    Raises UsageError for anything else.
    """
    host, colon, digits = listen.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    port = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 5 else -1
    if not colon or not 0 <= port <= 65535 or (":" in host) != bracketed or any(char.isspace() for char in host):
        raise UsageError(
            f"cannot read {listen!r} as an address to listen on; write HOST:PORT, [IPV6]:PORT or :PORT, "
            f"for example 127.0.0.1:{DEFAULT_PORT}"
        )
    return host, port


class WebServer:
    """A WSGI application on one address, in threads of its own.

    Slow clients hold no thread, and each step of a connection has its deadline (exporters.web_connections).
    """

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        host: str,
        port: int,
        config: WebServerConfig | None = None,
        *,
        access: WebAccess | None = None,
    ) -> None:
        """Prepare to serve `app`; an empty host means all addresses, port 0 one that is free.

        `access` encrypts connections and says who may come in; None for plain HTTP, open to all.
        """
        self._app = app if access is None else access.guard(app)
        self._access = access
        self._host = host
        self._port = port
        # Two threads may be with passwords that are being checked: one more answers in the meantime.
        self._config = config or (WebServerConfig() if access is None else WebServerConfig(threads=3))
        self._server: Any = None  # waitress has no types; everything it gives stays in this class
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """Port that is listened on, once started."""
        return self._port

    @property
    def url(self) -> str:
        """Address of the landing page from this machine."""
        host = {"": "localhost", "0.0.0.0": "localhost", "::": "localhost"}.get(self._host, self._host)  # noqa: S104
        scheme = "http" if self._access is None or self._access.context is None else "https"
        return f"{scheme}://[{host}]:{self._port}/" if ":" in host else f"{scheme}://{host}:{self._port}/"

    def start(self) -> None:
        """Listen and serve; raises FaultError where the address cannot be had."""
        listener = _listen(self._host, self._port, self._config.backlog)
        self._port = listener.getsockname()[1]
        # Its log lines are about clients (a scraper that hung up), not about the node.
        logging.getLogger("waitress").setLevel(logging.ERROR)
        self._server = GuardedServer(self._app, listener, self._config, {}, access=self._access)
        self._thread = NamedThread("web", self._server.run)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and all connections; idempotent."""
        server, thread, self._server, self._thread = self._server, self._thread, None, None
        if server is None or thread is None:
            return
        server.trigger.pull_trigger(server.close_all)
        thread.join(timeout=5)
        server.task_dispatcher.shutdown()
        if not thread.is_alive() and not server.task_dispatcher.threads:
            server.trigger.close()


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket; `""` and `::` take IPv4 and IPv6 where the machine has both."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if host in {"", "::"} and socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name with both (localhost): IPv4 first, as that is what scrapers are given.
        family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=backlog)
    except (OSError, UnicodeError) as error:
        raise FaultError(
            f"cannot listen on {shown}: {_reason(error)}; choose another with --listen or [export] listen"
        ) from error


def _reason(error: OSError | UnicodeError) -> str:
    """Return why an address cannot be had, in the system's words alone: create_server adds the address again."""
    if isinstance(error, UnicodeError):
        return "the host is no valid name"
    if isinstance(error, socket.gaierror) or error.errno is None:
        return str(error.strerror or error)
    return os.strerror(error.errno)
