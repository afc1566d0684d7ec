"""Bytes of TCP connections of this network namespace, from the kernel's socket diagnosis (sock_diag(7)).

Any user may ask; where tcp_diag is a module, the kernel loads it then. One request for each address family; the kernel
answers with all sockets in the wanted states, each with its inode, by which /proc/<pid>/fd names it, and its tcp_info.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

#: Sockets looked at in one family; a host with more gets no answer.
MAX_SOCKETS: Final = 20_000
_TIMEOUT_S: Final = 1.0
_BUFFER_BYTES: Final = 1 << 17
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_INET_DIAG_INFO: Final = 2
#: All states but SYN_RECV (3), TIME_WAIT (6), LISTEN (10) and NEW_SYN_RECV (12), which have carried nothing.
_STATES: Final = sum(1 << state for state in (1, 2, 4, 5, 7, 8, 9, 11))
_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST: Final = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: family, protocol, extensions, states, any socket
_COOKIE: Final = struct.Struct("=Q")  # inet_diag_msg.id.idiag_cookie
_COOKIE_AT: Final = 44
_INODE: Final = struct.Struct("=I")
_INODE_AT: Final = 68
_MESSAGE_BYTES: Final = 72
_ATTRIBUTE: Final = struct.Struct("=HH")
_BYTES: Final = struct.Struct("=QQ")  # tcp_info: tcpi_bytes_acked, tcpi_bytes_received; since Linux 4.2
_BYTES_AT: Final = 120


class TcpSocket(NamedTuple):
    """Payload of one connection since it was made."""

    cookie: int  # no other socket has it, whereas an inode is used again
    received_bytes: int
    sent_bytes: int  # acknowledged by the other end


def tcp_sockets(inodes: Collection[int]) -> tuple[TcpSocket, ...]:
    """Return the TCP sockets with these inodes; raises OSError where the kernel does not answer, or has too many."""
    return tuple(found for family in (socket.AF_INET, socket.AF_INET6) for found in _dump(family, inodes))


def _dump(family: int, inodes: Collection[int]) -> Iterator[TcpSocket]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as diagnosis:
        diagnosis.settimeout(_TIMEOUT_S)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _STATES)
        diagnosis.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + request)
        left = MAX_SOCKETS
        while True:
            answer = diagnosis.recv(_BUFFER_BYTES)
            at = 0
            while at + _HEADER.size <= len(answer):
                length, kind, _, _, _ = _HEADER.unpack_from(answer, at)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR or length < _HEADER.size + _MESSAGE_BYTES or left == 0:
                    raise OSError("the kernel does not list the sockets")
                left -= 1
                body = at + _HEADER.size
                if _INODE.unpack_from(answer, body + _INODE_AT)[0] in inodes:
                    found = _socket(answer, body, min(at + length, len(answer)))
                    if found is not None:
                        yield found
                at += (length + 3) & ~3


def _socket(answer: bytes, body: int, end: int) -> TcpSocket | None:
    at = body + _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(answer, at)
        if kind == _INET_DIAG_INFO and length >= _ATTRIBUTE.size + _BYTES_AT + _BYTES.size:
            sent, received = _BYTES.unpack_from(answer, at + _ATTRIBUTE.size + _BYTES_AT)
            return TcpSocket(_COOKIE.unpack_from(answer, body + _COOKIE_AT)[0], received, sent)
        at += max((length + 3) & ~3, _ATTRIBUTE.size)
    return None
