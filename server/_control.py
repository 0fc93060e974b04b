"""The control socket between the front and a worker: JSON messages on SOCK_SEQPACKET, descriptors beside them.

Front to worker: `session` (id and token; to a worker of its own also the reply, the connection and the words),
`close`, `drain`.
Worker to front: `ready`, `failed`, `metrics`, `opened` (the shared worker takes calls of a session),
`detached` (the client ended its session in order).
"""

import array
import base64
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

__all__ = ["Message", "control_pair", "pack_bytes", "receive", "receive_packet", "send", "send_packet", "unpack_bytes"]

Message = dict[str, Any]
MAX_PACKET = 128 << 10
_MAX_FDS = 8
_FD_BYTES = array.array("i").itemsize


def control_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a control socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Sends one packet with descriptors beside it."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive_packet(
    sock: socket.socket, limit: int = MAX_PACKET, most_fds: int = _MAX_FDS
) -> tuple[bytes, list[int]] | None:
    """Receives one packet of at most so many bytes and descriptors; None at the end of the connection.

    Returns:
        The bytes and the descriptors (close-on-exec), which the caller owns.

    Raises:
        ValueError: a packet or its descriptors were cut; what came is closed.
    """
    data, ancillary, flags, _ = sock.recvmsg(limit, socket.CMSG_SPACE(most_fds * _FD_BYTES), socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
            fds.extend(numbers)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise ValueError("a packet, or the descriptors beside it, was too large")
    if not data and not fds:
        return None
    return data, fds


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Sends one control message."""
    send_packet(sock, json.dumps(message, separators=(",", ":")).encode(), fds)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """Receives one control message; None at the end of the connection."""
    packet = receive_packet(sock)
    if packet is None:
        return None
    return json.loads(packet[0]), packet[1]


def pack_bytes(data: bytes) -> str:
    """Words bytes for a message."""
    return base64.b64encode(data).decode()


def unpack_bytes(text: str) -> bytes:
    """Reads what pack_bytes wrote."""
    return base64.b64decode(text)
