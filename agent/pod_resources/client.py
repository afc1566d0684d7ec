"""Asks the kubelet which pods hold which GPUs, in a thread of its own.

The kubelet serves on a Unix socket that only root may use on most nodes. It may be gone, restart or hang: nothing here
makes another thread wait. gRPC takes 14 MB of memory, so it is loaded when there is a socket to speak to, not before.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.clock import Clock
from agent.owners.holders import PodOwner
from agent.pod_resources.answers import Allocation, read_allocatable, read_list
from agent.pod_resources.transport import CallError, GrpcMissingError, Transport
from agent.pod_resources.wire import WireError
from agent.threads import NamedThread

_log = logging.getLogger(__name__)

#: Where the kubelet listens, unless it was started with another root directory.
KUBELET_SOCKET: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
#: What can be given away changes with the hardware and its MIG layout only: asked for with every n-th list.
_ALLOCATABLE_EVERY: Final = 6
#: The kernel's limit for the path of a Unix socket.
_PATH_BYTES_MAX: Final = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResourcesConfig:
    """Where the kubelet is asked, and how often."""

    socket: Path = KUBELET_SOCKET
    """The kubelet's pod-resources socket."""
    refresh_s: float = 10.0
    """Distance of questions; the kubelet answers from memory."""
    deadline_s: float = 2.0
    """Time for one answer."""
    hold_s: float = 60.0
    """Age up to which the last answer counts while there is no newer one: the kubelet restarts in a few seconds."""
    answer_bytes_max: int = 16 * 1024 * 1024
    """Size of the largest answer that is taken; 5,000 pods with a GPU each make 1 MB."""


@dataclass(frozen=True, slots=True)
class _Answer:
    allocation: Allocation
    allocatable: frozenset[str] | None
    monotonic_s: float


class PodResources:
    """Which pods hold which GPUs, as the kubelet said last.

    `start` and `close` belong to one thread; the rest may be asked from any, and returns at once.
    """

    def __init__(self, config: PodResourcesConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._answer: _Answer | None = None  # swapped in whole
        self._unseen: str | None = "not asked yet"
        self._said: set[str] = set()
        self._lists = 0
        self._transport: Transport | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def pods(self) -> Mapping[str, tuple[PodOwner, ...]] | None:
        """Return the holders by UUID (GPU-... or MIG-...), or None where they are not known, now or any more.

        A device without a holder is not in it. The pod's UID is never known: the interface does not tell it.
        """
        answer = self._fresh()
        return None if answer is None else answer.allocation.owners

    def allocatable(self) -> frozenset[str] | None:
        """Return the UUIDs that the kubelet can give to pods, or None where it does not tell."""
        answer = self._fresh()
        return None if answer is None else answer.allocatable

    @property
    def left_out(self) -> int:
        """Devices and holders of the last answer that were beyond the bounds."""
        answer = self._fresh()
        return 0 if answer is None else answer.allocation.left_out

    @property
    def unseen(self) -> str | None:
        """Why the last question brought no answer, in a few words; None where it did."""
        return self._unseen

    def start(self) -> None:
        """Start the thread that asks."""
        if self._thread is None:
            self._thread = NamedThread("pod-resources", self._run)
            self._thread.start()

    def close(self) -> None:
        """End the thread, and a question in flight with it; idempotent."""
        self._stop.set()
        transport = self._transport
        if transport is not None:
            transport.cancel()
        if self._thread is not None:
            # No longer than anyone waits for an agent to end: the thread is a daemon.
            self._thread.join(timeout=0.5)

    def refresh(self) -> bool:
        """Ask once; returns whether asking again can help. Takes up to two deadlines."""
        try:
            self._check_socket()
            self._ask()
        except GrpcMissingError as error:
            self._say(
                "grpcio missing",
                logging.WARNING,
                "pods on GPUs cannot be named: the package grpcio cannot be loaded (%s); "
                "install warpwatch[kubernetes] and start the agent again",
                error,
            )
            return False
        except _UnseenError as error:
            self._say(error.reason, error.level, "pods on GPUs cannot be named: %s", error)
        except CallError as error:
            message = "pods on GPUs cannot be named for now: %s: %s"
            if not self._stop.is_set():  # otherwise it was `close` that ended the call
                self._say(error.reason, logging.WARNING, message, self._where, error)
        except WireError as error:
            message = "pods on GPUs cannot be named: %s: the answer is not of the interface v1 (%s); report it"
            self._say("unreadable", logging.WARNING, message, self._where, error)
        else:
            self._unseen = None
        return True

    @property
    def _where(self) -> Path:
        return self._config.socket

    def _run(self) -> None:
        while self.refresh() and not self._stop.wait(self._config.refresh_s):
            pass

    def _fresh(self) -> _Answer | None:
        answer = self._answer
        if answer is None or self._clock.now().monotonic_s - answer.monotonic_s > self._config.hold_s:
            return None
        return answer

    def _check_socket(self) -> None:
        """Raise _UnseenError where nobody can be asked, before anything is loaded for it."""
        if len(os.fsencode(self._where)) > _PATH_BYTES_MAX:
            message = f"{self._where} is longer than the path of a socket can be; correct socket in [pod_resources]"
            raise _UnseenError("unusable", logging.WARNING, message)
        try:
            mode = self._where.stat().st_mode
            is_allowed = os.access(self._where, os.W_OK)  # what connecting asks for
        except (FileNotFoundError, NotADirectoryError) as error:
            message = (
                f"{self._where} is not there, so no kubelet runs here; "
                "set pod_resources = false in [owners] where that is how it should be, "
                "or socket in [pod_resources] where the kubelet has another root directory"
            )
            raise _UnseenError("absent", logging.INFO, message) from error
        except PermissionError:
            is_allowed = False
        except OSError as error:
            message = f"{self._where} cannot be looked at: {error.strerror}; correct socket in [pod_resources]"
            raise _UnseenError("unusable", logging.WARNING, message) from error
        else:
            if not stat.S_ISSOCK(mode):
                message = f"{self._where} is not a socket; correct socket in [pod_resources]"
                raise _UnseenError("unusable", logging.WARNING, message)
        if not is_allowed:
            message = (
                f"{self._where} is closed to this user; run the agent as root, give its user access to the socket and "
                "its folders, or set pod_resources = false in [owners]"
            )
            raise _UnseenError("forbidden", logging.WARNING, message)

    def _ask(self) -> None:
        config = self._config
        with Transport(config.socket, config.deadline_s, config.answer_bytes_max) as transport:
            self._transport = transport
            if self._stop.is_set():  # `close` came before there was anything to cancel
                return
            allocation = read_list(transport.call("List"))
            now_s = self._clock.now().monotonic_s
            last = self._answer
            allocatable = None if last is None else last.allocatable
            if self._lists % _ALLOCATABLE_EVERY == 0:
                allocatable = _allocatable(transport)
            self._lists += 1
        self._answer = _Answer(allocation, allocatable, now_s)
        if "seen" not in self._said:
            self._said.add("seen")
            _log.info("pods on GPUs are named by the kubelet at %s", self._where)
        if allocation.unnamed_device is not None and "unnamed" not in self._said:
            self._said.add("unnamed")
            _log.warning(
                "the kubelet calls a GPU %r, which does not tell its UUID: pods on such GPUs are not named; "
                "use a device plugin that gives GPUs away by UUID",
                allocation.unnamed_device,
            )

    def _say(self, reason: str, level: int, message: str, *values: object) -> None:
        """Log `message` the first time that `reason` holds."""
        self._unseen = reason
        if reason not in self._said:
            self._said.add(reason)
            _log.log(level, message, *values)


class _UnseenError(Exception):
    """Nobody can be asked; the text says why and what to do about it."""

    def __init__(self, reason: str, level: int, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.level = level


def _allocatable(transport: Transport) -> frozenset[str] | None:
    """Return what can be given away; None where the kubelet is too old to tell, or has that switched off."""
    try:
        return read_allocatable(transport.call("GetAllocatableResources"))
    except (CallError, WireError) as error:
        _log.debug("the kubelet does not say which GPUs it can give away: %s", error)
        return None
