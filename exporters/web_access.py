"""Who may read the pages and how: the web configuration in force, re-read when its file or one it names has changed.

A file that cannot be used leaves what holds as it is: `error` says why, until a good one is there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.clock import stopwatch
from agent.errors import UsageError
from exporters.web_auth import AuthLimits, BasicAuth, TokenBucket, Verdict
from exporters.web_config import WebConfig, load_web_config, password_checker

if TYPE_CHECKING:
    import ssl
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger("warpwatch.web")

_Application = Callable[..., Iterable[bytes]]
#: What tells that a file is another one: time of change, size, inode; None where it is not there.
_Signature = tuple[int, int, int] | None
#: Sessions of TLS 1.2 that OpenSSL may keep for clients without tickets; by itself it keeps 20480, and Python cannot
#: tell it otherwise.
_SESSIONS_MAX: Final = 1000
_RETRY_AFTER_S: Final = 2
_PLAIN: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One reading of the file."""

    config: WebConfig
    context: ssl.SSLContext | None
    limiter: TokenBucket | None
    number: int  # of the reading
    signatures: tuple[_Signature, ...]  # of the file and of those that it names, from before they were read
    names: frozenset[str] = field(default_factory=frozenset)  # one of which a client's certificate has to have


class WebAccess:
    """The web configuration that holds now."""

    def __init__(
        self, path: Path, *, limits: AuthLimits | None = None, seconds: Callable[[], float] = stopwatch
    ) -> None:
        """Read `path`; raises UsageError where it, or a file that it names, cannot be used."""
        self.error: str | None = None
        self._path = path
        self._limits = limits
        self._seconds = seconds
        self._lock = threading.Lock()  # of the limiter, which threads of the server share
        self._auth: BasicAuth | None = None
        self._loaded: _Loaded = self._load(0)

    @property
    def context(self) -> ssl.SSLContext | None:
        """What new connections are wrapped in; None for plain HTTP."""
        return self._loaded.context

    @property
    def client_names(self) -> frozenset[str]:
        """Names of which a client's certificate has to have one; empty where any will do."""
        return self._loaded.names

    @property
    def reading(self) -> int:
        """Number of the reading that holds; another one means that the rules have changed."""
        return self._loaded.number

    def refresh(self) -> None:
        """Read again where something has changed; to be called each second or so, never by the server's loop."""
        self._forget_sessions()
        # After a fault it is tried until it works: what was missing may come without a change of the file itself.
        if self.error is None and self._signatures(self._loaded.config) == self._loaded.signatures:
            return
        try:
            self._loaded = self._load(self._loaded.number + 1)
        except UsageError as error:
            if str(error) != self.error:
                log.error("%s; the web configuration read before still holds", error)  # noqa: TRY400 - one sentence
            self.error = str(error)
        else:
            self.error = None
            log.info("read the web configuration %s again", self._path)

    def _forget_sessions(self) -> None:
        """Take a new context in the place of one that has kept too many sessions."""
        loaded = self._loaded
        if loaded.context is None or loaded.config.tls is None:
            return
        if loaded.context.session_stats()["number"] > _SESSIONS_MAX:
            from exporters.web_tls import build_context

            # What cannot be read just now is what refresh will tell of.
            with contextlib.suppress(UsageError):
                self._loaded = replace(loaded, context=build_context(loaded.config.tls, self._path))

    def guard(self, app: _Application) -> _Application:
        """Return `app` behind authentication and rate limit, with the headers of the file."""

        def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            loaded = self._loaded
            extra = loaded.config.headers

            def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:  # noqa: ANN401 - of WSGI
                kept = [(name, value) for name, value in headers if name not in extra]
                return start_response(status, [*kept, *extra.items()], *more)

            refusal = self._refusal(loaded, environ)
            if refusal is None:
                return app(environ, start)
            status, text, headers = refusal
            body = text.encode("ascii")
            start(status, [*headers, ("Content-Type", _PLAIN), ("Content-Length", str(len(body)))])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

        return guarded

    def _refusal(self, loaded: _Loaded, environ: WSGIEnvironment) -> tuple[str, str, list[tuple[str, str]]] | None:
        """Return status, text and headers of an answer to a request that is not let in."""
        later = [("Retry-After", str(_RETRY_AFTER_S))]
        if loaded.limiter is not None:
            with self._lock:
                is_over = not loaded.limiter.take(self._seconds())
            if is_over:
                return "429 Too Many Requests", "Too many requests; rate_limit says how many are answered.\n", later
        users = loaded.config.users
        if not users or self._auth is None:
            return None
        verdict = self._auth.verdict(users, environ.get("HTTP_AUTHORIZATION"), environ.get("REMOTE_ADDR", ""))
        if verdict is Verdict.LATER:
            return "429 Too Many Requests", "Too many wrong passwords.\n", later
        if verdict is Verdict.DENIED:
            challenge = [("WWW-Authenticate", 'Basic realm="warpwatch", charset="UTF-8"')]
            return "401 Unauthorized", "This page needs a user name and a password.\n", challenge
        return None

    def _load(self, number: int) -> _Loaded:
        # Before it is read: a change in the meantime is another change.
        own = _signature(self._path)
        config = load_web_config(self._path)
        if number and config.is_blank and not self._loaded.config.is_blank:
            # Cut before it is written anew, or by a full disk: that must not open the page.
            raise UsageError(f"web configuration {self._path} is empty")
        signatures = (own, *self._signatures(config)[1:])
        context, names = None, frozenset[str]()
        if config.tls is not None:
            # OpenSSL is 3 MB that an agent without TLS does not need.
            from exporters.web_tls import build_context

            context, names = build_context(config.tls, self._path), frozenset(config.tls.client_allowed_sans)
        if config.users and self._auth is None:
            self._auth = BasicAuth(password_checker(self._path), self._limits, self._seconds)
        if config.users and config.tls is None:
            log.warning("%s asks for passwords without tls_server_config: whoever is on the way reads them", self._path)
        limit, limiter = config.rate_limit, None
        if limit.interval_s:
            limiter = TokenBucket(limit.burst, limit.interval_s, self._seconds())
        return _Loaded(config, context, limiter, number, signatures, names)

    def _signatures(self, config: WebConfig) -> tuple[_Signature, ...]:
        return tuple(_signature(path) for path in (self._path, *config.files))


def _signature(path: Path) -> _Signature:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def check_web_config(path: Path) -> None:
    """Raise UsageError where a server could not start with the web configuration `path`."""
    WebAccess(path)
