"""waitress with bounds on every connection that no client can stretch.

waitress reads and writes in one loop and gives a thread only to a request that has arrived whole, so slow clients cost
no thread. But it counts any byte as activity, does not end a connection with a request in it, and accepts nobody any
more at its limit: a few dozen slow clients would keep all scrapers out. Here each step of a connection has its own
deadline, whatever trickles, and a full server closes the connection it can do without best.

With TLS, OpenSSL reads and writes in the same loop, without waiting: the handshake is a part of the first request and
has its deadline with it, so that a client that trickles one costs no thread either (exporters.web_tls_channel).

Connections are closed in `GuardedServer.readable` alone, before the loop asks the kernel what has happened: a
connection accepted later may get the file descriptor of one that was closed, and must not get its events.
"""

from __future__ import annotations

import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

from agent.clock import stopwatch

if TYPE_CHECKING:
    from exporters.web_access import WebAccess

#: Seconds between two looks at the deadlines: a connection may outlive its deadline by this and the loop's wait of 1 s.
_LOOK_PERIOD_S: Final = 0.5
#: Seconds without accepting after an accept has failed, most likely for want of file descriptors: else the loop spins.
_REST_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WebServerConfig:
    """Limits of the web server; it is meant for a few scrapers and people, and holds no more."""

    threads: int = 2  #: Requests answered at the same time; each takes milliseconds.
    #: Open connections, and at most half of the files that the process may open; the last place is kept free.
    connection_limit: int = 256
    request_timeout_s: float = 5.0  #: For a request to arrive whole, from the accept or from its first byte on.
    answer_timeout_s: float = 20.0  #: For an answer to be fetched, from the whole request on.
    idle_timeout_s: float = 20.0  #: For the next request to begin: keeps the connection of a scraper each 15 s.
    header_max_bytes: int = 16384  #: A longer request head is refused (431).
    body_max_bytes: int = 1024  #: A longer request body is refused (413); no page reads one.
    pipelined_max: int = 4  #: A connection with more requests that wait for their answer is closed.
    unsent_max_bytes: int = 8 << 20  #: Answers that wait to be fetched, over all connections.
    backlog: int = 128  #: Connections that wait to be accepted.

    def timeout_s(self, step: Step) -> float:
        """Return how long a connection may be in `step`."""
        return {
            Step.REQUEST: self.request_timeout_s,
            Step.IDLE: self.idle_timeout_s,
            Step.ANSWER: self.answer_timeout_s,
        }[step]


class Step(IntEnum):
    """What a connection is waiting for; of two that began at once, the lower one goes first."""

    REQUEST = 0  #: The rest of a request, or its first one.
    IDLE = 1  #: The next request.
    ANSWER = 2  #: An answer, to be made or fetched.


class GuardedChannel(HTTPChannel):  # type: ignore[misc]  # no types published
    """One connection, which knows since when it has been in its step."""

    def __init__(self, server: GuardedServer, *rest: Any, **more: Any) -> None:  # noqa: ANN401 - waitress' own
        self._turn = 0  # counts the requests taken up
        self._seen = Step.REQUEST, 0
        self._since_s = server.seconds()
        self.reading = server.reading()
        super().__init__(server, *rest, **more)

    def look(self, now_s: float) -> tuple[Step, float]:
        """Return the step, and since when it has been seen in it."""
        if self.requests or self.total_outbufs_len:
            step = Step.ANSWER
        elif self.request is not None or not self._turn:
            step = Step.REQUEST
        else:
            step = Step.IDLE
        # Two answers at two looks are two steps.
        if (step, self._turn) != self._seen:
            self._seen, self._since_s = (step, self._turn), now_s
        return step, self._since_s

    def service(self) -> None:
        """Answer the next request, in a thread of the dispatcher."""
        self._turn += 1
        super().service()

    def received(self, data: bytes) -> bool:
        """Take what the client has sent."""
        try:
            is_taken: bool = super().received(data)
        except ValueError:  # an address that urllib cannot take apart, which waitress lets through to the log
            self.server.refuse(self)
            return False
        if len(self.requests) > self.server.config.pipelined_max:
            self.server.refuse(self)
        return is_taken

    def readable(self) -> bool:
        """Return whether to read; False once closed, when the loop may still hold the connection in its list."""
        return self._fileno is not None and bool(super().readable())

    def writable(self) -> bool:
        """Return whether to write, as `readable`."""
        return self._fileno is not None and bool(super().writable())


class GuardedServer(TcpWSGIServer):  # type: ignore[misc]  # no types published
    """Serves `app` on `listener` and keeps the bounds of `config`."""

    channel_class = GuardedChannel

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        listener: socket.socket,
        config: WebServerConfig,
        channels: dict[int, Any],
        seconds: Callable[[], float] = stopwatch,
        *,
        access: WebAccess | None = None,
    ) -> None:
        """Listen; `channels` is filled with all that the loop watches, `seconds` is a clock that nobody steps.

        `access` says whether new connections are encrypted; None for plain HTTP.
        """
        self._access = access
        self.config = config
        self.seconds = seconds
        self._limit = _connection_limit(config)
        self._refused: list[GuardedChannel] = []
        self._look_s = self._rest_s = seconds()
        dispatcher = ThreadedTaskDispatcher()
        dispatcher.set_thread_count(config.threads)
        adjustments = Adjustments(
            sockets=[listener],
            max_request_header_size=config.header_max_bytes,
            max_request_body_size=config.body_max_bytes,
            backlog=config.backlog,
            log_socket_errors=False,
            asyncore_use_poll=True,
            ident=None,
        )
        super().__init__(
            app,
            channels,
            _sock=listener,
            dispatcher=dispatcher,
            adj=adjustments,
            bind_socket=False,
            sockinfo=(listener.family, listener.type, listener.proto, listener.getsockname()),
        )

    def close_all(self) -> None:
        """Close the port and all connections, whereupon the loop ends; called by the loop's thread alone.

        The trigger's pipe stays open until no thread may write to it any more (whoever stops the server closes it
        then): its number may be another file's by that time.
        """
        self.trigger.del_channel()
        wasyncore.close_all(self._map)

    def close(self) -> None:
        """Close the listening socket, and not the trigger as waitress does."""
        wasyncore.dispatcher.close(self)

    def readable(self) -> bool:
        """Return whether to accept; called by the loop once a round, which is when connections are closed."""
        now_s = self.seconds()
        while self._refused:
            self._refused.pop().handle_close()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_PERIOD_S
            self._close_overdue(now_s)
        if len(self.active_channels) >= self._limit:
            self._close_one(now_s)
        if sum(channel.total_outbufs_len for channel in self.active_channels.values()) > self.config.unsent_max_bytes:
            self._close_slowest_reader(now_s)
        return bool(self.accepting) and now_s >= self._rest_s

    def reading(self) -> int:
        """Return which reading of the web configuration holds."""
        return 0 if self._access is None else self._access.reading

    def client_names(self) -> frozenset[str]:
        """Return the names of which a client's certificate has to have one; empty where any will do."""
        return frozenset() if self._access is None else self._access.client_names

    def accept(self) -> tuple[socket.socket, Any] | None:
        """Accept a connection; where that fails, rest a moment."""
        try:
            accepted: tuple[socket.socket, Any] | None = super().accept()
        except OSError:
            self._rest_s = self.seconds() + _REST_S
            raise
        context = None if self._access is None else self._access.context
        self.channel_class = GuardedChannel
        if accepted is None or context is None:
            return accepted
        # OpenSSL is only loaded where it is used.
        from exporters.web_tls_channel import TlsChannel, secured

        self.channel_class = TlsChannel
        connection = secured(context, accepted[0])
        return None if connection is None else (connection, accepted[1])

    def refuse(self, channel: GuardedChannel) -> None:
        """Have `channel` closed at the next round."""
        self._refused.append(channel)

    def _close_overdue(self, now_s: float) -> None:
        for channel in list(self.active_channels.values()):
            step, since_s = channel.look(now_s)
            # Rules that have changed hold for who is connected already, too: it may come again.
            is_outdated = step is Step.IDLE and channel.reading != self.reading()
            if is_outdated or now_s - since_s > self.config.timeout_s(step):
                channel.handle_close()

    def _close_one(self, now_s: float) -> None:
        """Close, of the address with the most connections, the one that has been in its step for longest.

        Whatever fills the server, slow requests, idle connections or answers that nobody fetches, goes before the
        scraper that asks now; one that is idle between two scrapes comes again.
        """
        channels = list(self.active_channels.values())
        held = Counter(channel.addr[0] for channel in channels)

        def worth(channel: GuardedChannel) -> tuple[int, float, Step]:
            step, since_s = channel.look(now_s)
            return -held[channel.addr[0]], since_s, step

        min(channels, key=worth).handle_close()

    def _close_slowest_reader(self, now_s: float) -> None:
        readers = (channel for channel in self.active_channels.values() if channel.total_outbufs_len)
        slowest = min(readers, key=lambda channel: channel.look(now_s)[1], default=None)
        if slowest is not None:
            slowest.handle_close()


def _connection_limit(config: WebServerConfig) -> int:
    """Return how many connections may be open: sampling needs files too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return config.connection_limit if files == resource.RLIM_INFINITY else min(config.connection_limit, files // 2)
