"""The worker's end of a session's side connection: it answers what follows the attach."""

import os
import socket
from collections.abc import Callable
from functools import partial

from google.protobuf.message import DecodeError

from topkd.v1 import side_pb2

from ._control import receive_packet, send_packet
from ._logging import Logger
from ._memory import Backend
from ._memory_vmm import MOST_ALLOCATIONS
from ._state import Session
from .errors import FieldError, ServerError, to_side_error

__all__ = ["serve_side"]

LONGEST_REQUEST = 64 << 10
_DETACH = side_pb2.SideRequest(detach=side_pb2.Detach()).SerializeToString()


def serve_side(
    connection: socket.socket, session: Session, backend: Backend, log: Logger, ended: Callable[[str], None]
) -> None:
    """Answers side requests until the client detaches or the connection ends, then calls `ended` with the cause.

    Args:
        connection: blocking, SOCK_SEQPACKET.
        session: whose requests they are.
        backend: opens the memory.
        log: where failures go.
        ended: called once, in this thread.
    """
    try:
        while (packet := receive_packet(connection, LONGEST_REQUEST, MOST_ALLOCATIONS)) is not None:
            data, fds = packet
            if data == _DETACH:
                ended("detached")
                return
            try:
                reply = _answer(data, fds, session, backend)
            except Exception as error:
                if not isinstance(error, ServerError):
                    log.error("side_request_failed", exc_info=error)
                reply = side_pb2.SideReply(error=to_side_error(error))
            finally:
                for fd in fds:
                    os.close(fd)
            send_packet(connection, reply.SerializeToString())
    except (OSError, ValueError) as error:
        log.info("side_connection_failed", error=str(error))
    ended("client_gone")


def _answer(data: bytes, fds: list[int], session: Session, backend: Backend) -> side_pb2.SideReply:
    try:
        request = side_pb2.SideRequest.FromString(data)
    except DecodeError:
        raise FieldError("the packet is no SideRequest", field="SideRequest") from None
    kind = request.WhichOneof("request")
    if kind == "register_vmm":
        return _register_vmm(request.register_vmm, fds, session, backend)
    if kind != "register_memfd":
        text = "the session is attached already" if kind == "attach" else "the request is empty"
        raise FieldError(text, field=kind or "request")
    if len(fds) != 1:
        raise FieldError(f"{len(fds)} descriptors came beside the request; it takes one", field="register_memfd")
    size = request.register_memfd.size
    backend.enter_thread()
    region_id = session.add_region(size, lambda: backend.open_memfd(fds[0], size), "register_memfd.size")
    return side_pb2.SideReply(registered_memfd=side_pb2.RegisteredMemfd(region_id=region_id))


def _register_vmm(
    message: side_pb2.RegisterVmm, fds: list[int], session: Session, backend: Backend
) -> side_pb2.SideReply:
    backend.enter_thread()
    open_region = partial(backend.open_vmm, message, fds)
    region_id = session.add_region(sum(message.sizes), open_region, "register_vmm.sizes")
    return side_pb2.SideReply(registered_vmm=side_pb2.RegisteredVmm(region_id=region_id))
