"""The client's end of the side socket: one packet a message, descriptors beside it.

The connection is the session's lease: it stays open as long as the session shall live, and its end is the session's.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
from typing import TYPE_CHECKING, Final

from topkd import _status
from topkd.errors import PermissionDeniedError, ProtocolError, SessionLostError, UnavailableError
from topkd.v1 import side_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["SideConnection", "close_all"]

_LONGEST: Final = 1 << 16
_DESCRIPTORS: Final = 4


class SideConnection:
    """A connected side socket. `request` may be called from several threads."""

    def __init__(self, path: Path, timeout: float) -> None:
        """Connects.

        Raises:
            UnavailableError: Nobody accepts there.
            PermissionDeniedError: The socket's mode keeps this user out.
        """
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(path))
        except PermissionError as error:
            self._socket.close()
            raise PermissionDeniedError(f"{path}: {error.strerror}: the socket's mode keeps this user out") from None
        except OSError as error:
            self._socket.close()
            raise UnavailableError(f"no server at {path}: {error.strerror or error}") from None

    def request(
        self, message: side_pb2.SideRequest, fds: Sequence[int] = (), timeout: float = 10.0
    ) -> tuple[side_pb2.SideReply, list[int]]:
        """Sends a request and waits for its reply.

        Returns:
            The reply, and the descriptors that came with it, close-on-exec; they are the caller's.

        Raises:
            TopkdError: The class of the refusal, if it is one.
            SessionLostError: The connection ended.
        """
        with self._lock:
            try:
                self._socket.settimeout(timeout)
                self._send(message.SerializeToString(), fds)
                reply, received = self._receive()
            except TimeoutError:
                self.hang_up()  # A late reply would be taken for the next one's.
                raise SessionLostError(f"the side socket gave no answer within {timeout:g} s") from None
            except OSError as error:
                raise SessionLostError(f"the side socket's connection ended: {error.strerror or error}") from None
        if reply.WhichOneof("reply") == "error":
            close_all(received)
            raise _status.to_error(_status.from_side(reply.error))
        return reply, received

    def tell(self, message: side_pb2.SideRequest) -> None:
        """Sends a message that is not answered, if it can be sent at once."""
        with contextlib.suppress(OSError):
            self._socket.sendmsg([message.SerializeToString()], [], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)

    def _receive(self) -> tuple[side_pb2.SideReply, list[int]]:
        space = socket.CMSG_SPACE(_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, flags, _ = self._socket.recvmsg(_LONGEST, space, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        received = list(fds)
        if not data:
            close_all(received)
            raise SessionLostError("the server closed the side socket's connection")
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("the server's packet is longer than the protocol allows")
            return side_pb2.SideReply.FromString(data), received
        except Exception as error:
            close_all(received)
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"the server's packet is no SideReply: {error}") from None

    def wait_for_end(self) -> None:
        """Waits until either side ends the connection. For a thread of its own."""
        poll = select.poll()
        with contextlib.suppress(ValueError, OSError):  # closed in the meantime
            poll.register(self._socket.fileno(), select.POLLRDHUP)
            poll.poll()

    def hang_up(self) -> None:
        """Ends the connection for both sides; waiting threads wake."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this process's descriptor only."""
        self._socket.close()


def close_all(fds: Sequence[int]) -> None:
    """Closes descriptors."""
    for fd in fds:
        os.close(fd)
