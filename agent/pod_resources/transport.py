"""Calls of the kubelet over gRPC: the only module that imports grpcio, which has no type information."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

from agent.samplers.kernel_file import printable

_SERVICE: Final = "/v1.PodResourcesLister/"

#: What gRPC goes by when it is loaded: no lines of its own on standard error, and no part in forks of this process.
_ENVIRONMENT: Final = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "false"}


class GrpcMissingError(Exception):
    """The package grpcio is not installed, or does not fit this machine."""


class CallError(Exception):
    """A call brought no answer; the text says why, `reason` in a few words that stay the same."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Transport:
    """One connection, for the calls of one refresh.

    A new one each time: a kubelet that restarts makes a new socket, and gRPC would wait longer and longer before it
    tries an old one again. A connection costs a millisecond.
    """

    def __init__(self, socket: Path, deadline_s: float, answer_bytes_max: int) -> None:
        self._deadline_s = deadline_s
        self._grpc = _load()
        # A path may hold signs that mean something in the address of a target.
        target = "unix:" + quote(os.fspath(socket))
        options = (
            ("grpc.max_receive_message_length", answer_bytes_max),
            # Servers in Go refuse the path of the socket, which would be sent otherwise.
            ("grpc.default_authority", "localhost"),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
        )
        self._channel = self._grpc.insecure_channel(target, options=options)
        self._closing = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def call(self, method: str) -> bytes:
        """Return the bytes of the answer to an empty request; raises CallError, after the deadline at the latest."""
        # Without serializers gRPC takes and gives bytes.
        call = self._channel.unary_unary(_SERVICE + method)
        try:
            answer: bytes = call(b"", timeout=self._deadline_s)
        except self._grpc.RpcError as error:
            raise self._explain(error) from error
        except ValueError as error:  # the channel was closed in the meantime
            raise CallError("cancelled", "the agent ends") from error
        return answer

    def cancel(self) -> None:
        """Close the connection and end a call in flight; from any thread, idempotent."""
        with self._closing:
            self._channel.close()

    def _explain(self, error: Any) -> CallError:  # noqa: ANN401 - an error of grpcio, which has no types
        codes = self._grpc.StatusCode
        code = error.code()
        details = printable(str(error.details()))[:200]
        if code is codes.DEADLINE_EXCEEDED:
            return CallError("no answer in time", f"no answer within {self._deadline_s:g} s; is the kubelet hung?")
        if code is codes.UNIMPLEMENTED:
            return CallError("too old", "the kubelet does not know the interface v1; it needs Kubernetes 1.20 or newer")
        if code is codes.RESOURCE_EXHAUSTED:
            return CallError("too much", f"the kubelet's answer is too large, or it is asked too often ({details})")
        if code is codes.UNAVAILABLE:
            return CallError("not listening", "the kubelet does not listen; it may be restarting")
        return CallError(f"refused: {code.name}", f"the kubelet refuses with {code.name} ({details})")


def _load() -> Any:  # noqa: ANN401 - the module grpc has no types
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import grpc
    except ImportError as error:
        raise GrpcMissingError(str(error)) from error
    return grpc
