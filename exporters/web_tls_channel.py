"""One connection with TLS in waitress' loop: OpenSSL without waiting, the handshake step by step.

The socket is non-blocking, so that every call returns at once with what there was, or says which way it has to go on.
A record has at most 16 KiB and OpenSSL reads no further than its end: one read of that size leaves nothing behind that
poll would not tell of.
"""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Any, Final

from exporters.web_connections import GuardedChannel
from exporters.web_tls import subject_alternative_names

#: Bytes of one TLS record at most.
_RECORD_BYTES: Final = 16384
_SPOKE_HTTP: Final = (
    b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"This server speaks HTTPS; write https:// before its address.\n"
)


def secured(context: ssl.SSLContext, connection: socket.socket) -> ssl.SSLSocket | None:
    """Return `connection` with TLS before its handshake; None, and closed, where the client has gone already."""
    connection.settimeout(0)
    try:
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    except (OSError, ValueError):
        connection.close()
        return None


class TlsChannel(GuardedChannel):
    """A connection that is encrypted."""

    def __init__(self, server: Any, sock: ssl.SSLSocket, *rest: Any, **more: Any) -> None:  # noqa: ANN401 - waitress' own
        self._shakes = True
        self._shakes_by_writing = False
        self._is_over = False
        # A thread of the dispatcher flushes answers while the loop may look at the same connection.
        self._tls_lock = threading.Lock()
        self._names = server.client_names()
        super().__init__(server, sock, *rest, **more)

    def readable(self) -> bool:
        """Return whether to read: also for the handshake."""
        if self._shakes:
            return self._fileno is not None and not self._shakes_by_writing
        return super().readable()

    def writable(self) -> bool:
        """Return whether to write: also for the handshake."""
        if self._shakes:
            return self._fileno is not None and self._shakes_by_writing
        return super().writable()

    def handle_read(self) -> None:
        """Take what has come."""
        if self._shakes:
            self._shake_hands()
            return
        try:
            with self._tls_lock:
                data = b"" if self._is_over else self.socket.recv(_RECORD_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except (OSError, ValueError):
            self.handle_close()
            return
        if data:
            self.received(data)
        else:
            self.handle_close()

    def handle_write(self) -> None:
        """Send what there is to send."""
        if self._shakes:
            self._shake_hands()
        else:
            super().handle_write()

    def send(self, data: bytes, do_close: bool = True) -> int:  # noqa: ARG002 - the name is waitress'
        """Return how many bytes were taken; what goes wrong is raised, and the loop closes."""
        try:
            with self._tls_lock:
                # Nothing after the goodbye: a socket that has left TLS would send it as it is.
                sent: int = 0 if self._is_over or self.socket is None else self.socket.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        return sent

    def handle_close(self) -> None:
        """Close, with the notice that tells the client that nothing was cut off."""
        self._say_goodbye()
        super().handle_close()

    def close(self) -> None:
        """Close at the end of the server."""
        self._say_goodbye()
        super().close()

    def _shake_hands(self) -> None:
        """Go on with the handshake, as far as it goes now."""
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._shakes_by_writing = False
        except ssl.SSLWantWriteError:
            self._shakes_by_writing = True
        except (OSError, ValueError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "HTTP_REQUEST":
                self._answer_plainly()
            self.handle_close()
        else:
            self._shakes = False
            if self._names and self._names.isdisjoint(subject_alternative_names(self.socket.getpeercert())):
                self.handle_close()

    def _answer_plainly(self) -> None:
        try:
            # What is not read when a connection is closed resets it, and the client would not see the answer.
            socket.socket.recv(self.socket, _RECORD_BYTES)
            socket.socket.send(self.socket, _SPOKE_HTTP)
        except OSError:
            return

    def _say_goodbye(self) -> None:
        with self._tls_lock:
            if self._is_over or self.socket is None:
                return
            self._is_over = True
            if self._shakes:
                return
            try:
                self.socket.unwrap()
            except (OSError, ValueError):
                # It is sent, or the client is gone: its own notice is not waited for.
                return
