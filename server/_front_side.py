"""The side socket: peers are checked, sessions attached, connections handed to workers and watched."""

import array
import asyncio
import contextlib
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping

from google.protobuf.message import DecodeError

from topkd.v1 import control_pb2, side_pb2

from ._control import pack_bytes, receive_packet, send_packet
from ._logging import Logger
from ._words import create_words
from .config import ServerConfig
from .errors import FieldError, PeerNotAllowedError, ServerError, SessionLimitError, to_side_error
from .metrics import ServerMetrics

__all__ = ["HangupWatch", "Peer", "SideListener", "is_allowed", "peer_of"]

LONGEST_REQUEST = 64 << 10
_PENDING = 64
_UNWANTED_SECONDS = 1.0
_SO_PEERGROUPS = 59
_MAX_GROUPS = 256


class Peer:
    """Who is at the other end of a Unix socket."""

    def __init__(self, pid: int, uid: int, gids: frozenset[int]) -> None:
        self.pid = pid
        self.uid = uid
        self.gids = gids


def peer_of(connection: socket.socket) -> Peer:
    """Reads a connection's peer credentials: the kernel's word as of its connect, not the peer's own."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    groups = array.array("i")
    with contextlib.suppress(OSError):  # absent before Linux 4.13, and for more groups than asked for
        groups.frombytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS * groups.itemsize))
    return Peer(pid, uid, frozenset({gid, *groups}))


def is_allowed(peer: Peer, config: ServerConfig) -> bool:
    """Says whether a peer may attach: root, an allowed user, or a member of an allowed group."""
    return peer.uid == 0 or peer.uid in config.uids or not peer.gids.isdisjoint(config.allowed_gids)


class HangupWatch:
    """Tells when connections end, without reading from them (a worker does that)."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._ready)

    def add(self, fd: int, callback: Callable[[], None]) -> None:
        """Calls `callback` once when the connection of `fd` ends."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLRDHUP)

    def remove(self, fd: int) -> None:
        """Watches `fd` no longer; must come before it is closed, for the worker's copy keeps the connection alive."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _ready(self) -> None:
        for fd, _ in self._epoll.poll(0):
            callback = self._callbacks.get(fd)
            self.remove(fd)
            if callback is not None:
                callback()

    def close(self) -> None:
        """Stops watching."""
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()


class SideListener:
    """Accepts on the side socket and attaches sessions.

    Args:
        path: where to listen.
        attach: opens a session for a request and runs it; see `SideConnection`.
    """

    def __init__(self, path: str, config: ServerConfig, metrics: ServerMetrics, log: Logger, attach: "Attach") -> None:
        self._config = config
        self._metrics = metrics
        self._log = log
        self._attach = attach
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}  # those whose first packet has not come, the oldest first
        self._watch = HangupWatch()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(128)
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accepts one connection. Where too many wait, the one that has been silent the longest has to go."""
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: try again a little later
            self._log.warning("accept_failed", error=str(error))
            loop.remove_reader(self._listener)
            loop.call_later(0.1, self._listen)
            return
        connection.setblocking(False)
        if len(self._tasks) >= self._most and self._silent:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cancel()
        task = loop.create_task(self._serve(connection))
        self._tasks.add(task)
        self._silent[task] = None
        task.add_done_callback(self._over)

    @property
    def _most(self) -> int:
        """Connections that may be open, those that wait among them."""
        return self._config.limits.max_sessions + _PENDING

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._silent.pop(task, None)

    async def _serve(self, connection: socket.socket) -> None:
        """Runs one connection from its accept to the session's end."""
        side = SideConnection(connection, self._watch)
        try:
            peer = peer_of(connection)
            log = self._log.bind(peer_pid=peer.pid, peer_uid=peer.uid)
            allowed = is_allowed(peer, self._config)
            # Read before a refusal too: a connection closed on unread data loses the reply.
            async with asyncio.timeout(self._config.attach_timeout_s if allowed else _UNWANTED_SECONDS):
                packet = await side.read_packet()
            self._silent.pop(asyncio.current_task(), None)  # type: ignore[arg-type]  # this is a task
            if packet is None:
                return
            if not allowed:
                raise PeerNotAllowedError(f"uid {peer.uid} is not on the server's allow list")
            if len(self._tasks) > self._most:
                raise SessionLimitError("too many connections wait to attach", retry_after_ms=1000)
            await self._attach(side, parse_attach(packet), log)
        except ServerError as error:
            self._metrics.attaches.labels("unix", "refused").inc()
            self._log.info("attach_refused", message=str(error))
            side.reply(side_pb2.SideReply(error=to_side_error(error)))
        except TimeoutError:
            self._log.info("attach_timeout")
        except OSError as error:
            self._log.info("side_connection_failed", error=str(error))
        except Exception as error:  # noqa: BLE001  # logged and answered as internal
            self._log.error("attach_failed", exc_info=error)
            side.reply(side_pb2.SideReply(error=to_side_error(error)))
        finally:
            side.close()

    async def close(self) -> None:
        """Stops accepting, and waits for the connections' ends."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._watch.close()


def parse_attach(packet: bytes) -> control_pb2.AttachRequest:
    """Reads a connection's first packet. Raises FieldError if it is no attach."""
    try:
        request = side_pb2.SideRequest.FromString(packet)
    except DecodeError:
        raise FieldError("the packet is no SideRequest", field="SideRequest") from None
    if request.WhichOneof("request") != "attach":
        raise FieldError("the first request of a connection must be attach", field="attach")
    return request.attach


class SideConnection:
    """One accepted connection; `gone` is set when the client has ended it."""

    def __init__(self, connection: socket.socket, watch: HangupWatch) -> None:
        self._connection = connection
        self._watch = watch
        self.gone = asyncio.Event()
        watch.add(connection.fileno(), self.gone.set)

    async def read_packet(self) -> bytes | None:
        """Waits for the first packet and returns it without its descriptors; None if the client went away."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._connection)
        try:
            packet = receive_packet(self._connection, LONGEST_REQUEST)
        except ValueError as error:
            raise FieldError(str(error), field="SideRequest") from None
        if packet is None:
            return None
        for fd in packet[1]:
            os.close(fd)
        return packet[0]

    def reply(self, reply: side_pb2.SideReply) -> None:
        """Sends a reply if the client is there to take it."""
        with contextlib.suppress(OSError):
            send_packet(self._connection, reply.SerializeToString())

    def hand_over(self, tell: Callable[..., None], message: Mapping[str, object], session: control_pb2.Session) -> None:
        """Gives the connection to a worker, with the reply that it is to send and the session's words."""
        words = create_words()
        try:
            reply = pack_bytes(side_pb2.SideReply(session=session).SerializeToString())
            tell({**message, "reply": reply}, [self._connection.fileno(), words])
        finally:
            os.close(words)

    def close(self) -> None:
        """Closes the front's copy."""
        self._watch.remove(self._connection.fileno())
        self._connection.close()


Attach = Callable[[SideConnection, control_pb2.AttachRequest, Logger], Awaitable[None]]
