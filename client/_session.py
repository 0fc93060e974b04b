"""One session: its lease, its channel, its methods, and the region ids that hold in it.

`open_local` attaches by the side socket, `open_remote` by the Attach stream over TCP. Either watches its lease on a
thread and marks the session lost at its end, which cancels the calls in flight.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from topkd import _codec, _status
from topkd._arrays import HOST
from topkd._guard import Guard
from topkd._lane_book import LaneBook
from topkd._paths import ATTACH_SOCKET, GRPC_SOCKET
from topkd._regions import RegionIndex
from topkd._side import SideConnection, close_all
from topkd._timeline import Timeline
from topkd._types import Backend
from topkd._words import MOST_SLOTS, Words
from topkd.errors import AuthenticationError, ProtocolError, RegionError, SessionLostError, TopkdError, UnavailableError
from topkd.v1 import control_pb2, control_pb2_grpc, selection_pb2, selection_pb2_grpc, side_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from topkd._options import Options
    from topkd._regions import Record
    from topkd._types import TlsOptions

__all__ = ["Session", "open_local", "open_remote", "open_tcp_channel"]

_CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a session's connection is its own
    ("grpc.max_send_message_length", -1),  # the server's limit is checked before sending
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)
_TCP_OPTIONS: Final = (
    *_CHANNEL_OPTIONS,
    # A name may have the addresses of many servers: each session takes one of them, all its calls go there.
    ("grpc.service_config", '{"loadBalancingConfig":[{"pick_first":{"shuffleAddressList":true}}]}'),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class Session:
    """An attached session.

    Attributes:
        info: The server's information as of the attach.
        metadata: What every call carries.
        index: Where registered memory lies. Replaced whole under the core's lock.
        lost: Whether the lease has ended.
        memory_device: Device of memory that the session can share: `HOST`, a CUDA ordinal, or None.
        no_memory_because: Why `memory_device` is None.
        quarantine: What calls of unknown fate may still write to, until a later call has been answered.
        lanes: Its lanes; None if the server has none.
        timeline: The slots of calls that are ordered on CUDA streams; None if there are none.
        unreleased: Memory whose release the server has not acknowledged.
    """

    def __init__(self, attached: control_pb2.Session, data: grpc.Channel, control: Callable[[], grpc.Channel]) -> None:
        self.info = _codec.read_info(attached.info)
        self.metadata = (("topkd-token", attached.token),)
        self.index = RegionIndex({})
        self.lost = False
        self.closed = False
        self.no_memory_because = ""
        self.memory_device: int | None = self._find_memory_device()
        self.quarantine: list[Any] = []
        self.unreleased: list[Any] = []
        self.timeline: Timeline | None = None
        self.lanes: LaneBook | None = None
        self._report: Callable[[TopkdError], None] = lambda error: None
        self._because = ""
        self._data = data
        self._make_control = control
        self._control: grpc.Channel | None = None
        stub = selection_pb2_grpc.SelectionServiceStub(data)
        self.select_topk, self.merge_topk = stub.SelectTopK, stub.MergeTopK
        self.select_stream = stub.SelectTopKStream
        self.open_lane, self.close_lane = stub.OpenLane, stub.CloseLane
        self.create_plan, self.release_plan = stub.CreatePlan, stub.ReleasePlan
        self._register_region, self._release_region = stub.RegisterRegion, stub.ReleaseRegion

    def _find_memory_device(self) -> int | None:
        if self.info.device.backend is Backend.CPU:
            return HOST
        from topkd import _cuda

        try:
            return _cuda.ordinal_of(self.info.device.uuid)
        except RegionError as error:
            self.no_memory_because = str(error)
            return None

    @property
    def server_info(self) -> Any:
        """The method GetServerInfo of the front."""
        if self._control is None:
            self._control = self._make_control()
        return control_pb2_grpc.ControlServiceStub(self._control).GetServerInfo

    def register(self, record: Record, timeout: float) -> int:
        """Shares a record and returns its region id."""
        message = selection_pb2.RegisterRegionRequest(cuda_ipc=getattr(record.memory, "share_message", None))
        return int(self.call(self._register_region, message, timeout).region_id)

    def release(self, region_id: int, timeout: float) -> None:
        """Returns when nothing of the session can touch the region any more."""
        self.call(self._release_region, selection_pb2.ReleaseRegionRequest(region_id=region_id), timeout)

    def call(self, method: Any, message: Any, timeout: float) -> Any:
        """Calls a method and waits for it; for everything but selections."""
        try:
            return method(message, timeout=timeout, metadata=self.metadata)
        except (grpc.RpcError, ValueError) as error:
            raise self.error_of(error) from None

    def error_of(self, error: Exception) -> TopkdError:
        """Returns the exception for a failed RPC; notes the session's loss if it tells of one."""
        if isinstance(error, ValueError):  # "Cannot invoke RPC on closed channel!"
            return SessionLostError(f"session lost: {self._because or 'its channel is closed'}", code="UNAVAILABLE")
        failure = error.failure if isinstance(error, _status.CallFailedError) else _status.from_rpc(error)
        if failure.code == "CANCELLED" and self.lost:
            return SessionLostError(f"session lost: {self._because}", code="UNAVAILABLE")
        result = _status.to_error(failure)
        # A server that does not know the token which it gave has ended the session; the lease tells a moment later.
        if isinstance(result, (SessionLostError, AuthenticationError)):
            self.lose(failure.message)
            return SessionLostError(f"session lost: {failure.message}", reason=failure.reason, code=failure.code)
        return result

    def lose(self, because: str = "its worker is gone") -> None:
        """Marks the session lost and cancels its calls. Idempotent."""
        if not self.lost:
            self._because = because
            self.lost = True
            self.close()

    def close(self) -> None:
        """Ends the lease and closes the channels; calls in flight are cancelled. Idempotent.

        Waits for what was ordered on streams, unless the session is lost.
        """
        lost = self.lost
        self._end_lanes(lost)
        if self.timeline is not None:
            self.timeline.close(lost, self._report, self.lanes)
        if not lost:
            self._detach()
        self.closed = self.lost = True
        self._end_lease()
        self._data.close()
        if self._control is not None:
            self._control.close()

    def order_calls(self, options: Options, report: Callable[[TopkdError], None]) -> None:
        """Makes slots for calls that are ordered on streams, if the session has words and its memory is on a GPU."""

    def _end_lanes(self, lost: bool) -> None:
        """Breaks the lanes, if there are any, once the calls that are in streams are over; at a loss at once."""

    def _detach(self) -> None:
        """Tells the server, where that can be told, that the end to come is meant."""

    def _end_lease(self) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        """In a forked child: closes what would keep the parent's lease alive, without ending it."""


class LocalSession(Session):
    """A session of this host: the side socket is its lease, the worker's socket its data plane."""

    def __init__(
        self, side: SideConnection, attached: control_pb2.Session, fds: Sequence[int], directory: Path
    ) -> None:
        address = attached.data_address.removeprefix("unix:")
        path = directory / (Path(address).name if address else GRPC_SOCKET)
        data = grpc.insecure_channel(f"unix:{path.absolute()}", options=_CHANNEL_OPTIONS)
        front = f"unix:{(directory / GRPC_SOCKET).absolute()}"
        super().__init__(attached, data, lambda: grpc.insecure_channel(front, options=_CHANNEL_OPTIONS))
        self._side = side
        self._data_path = path.absolute()
        self.words = fds[0]
        # Mapped before the thread starts: it closes the descriptor at the session's end, which may come at once.
        self._page = Words(self.words) if len(fds) > 1 else None
        self._guard = Guard(*fds) if len(fds) > 1 else None
        self._timeout = 0.0
        threading.Thread(target=self._watch, name="topkd-lease", daemon=True).start()

    def _watch(self) -> None:
        self._side.wait_for_end()
        self.lose("the server ended the session's connection")
        self._side.close()
        os.close(self.words)

    def order_calls(self, options: Options, report: Callable[[TopkdError], None]) -> None:
        """Makes slots and lanes, as far as the server takes their calls and tells of its worker's end."""
        guard, self._guard = self._guard, None
        page = self._page
        if guard is None or page is None:
            return
        self._timeout = options.timeout
        if self.info.limits.max_lanes:
            self.lanes = LaneBook(page, guard)
        slots = min(self.info.limits.max_slots, MOST_SLOTS)
        if slots and self.memory_device not in (HOST, None):
            self._report = report
            timeouts = {"ready_timeout": options.ready_timeout, "timeout": options.timeout}
            self.timeline = Timeline(page, guard, slots, self.memory_device, **timeouts)

    def _end_lanes(self, lost: bool) -> None:
        book = self.lanes
        if book is not None:
            if lost:
                book.guard.lost()
            else:
                book.finish(self._timeout)
            book.lose(self._because or "its client is closed")

    def register(self, record: Record, timeout: float) -> int:
        memory: Any = record.memory
        if hasattr(memory, "exported"):
            with memory.exported() as (message, fds):
                return int(self._ask(message, fds, timeout).registered_vmm.region_id)
        if not hasattr(memory, "fd"):
            return super().register(record, timeout)
        message = side_pb2.SideRequest(register_memfd=side_pb2.RegisterMemfd(size=memory.size))
        return int(self._ask(message, [memory.fd], timeout).registered_memfd.region_id)

    def _ask(self, message: side_pb2.SideRequest, fds: Sequence[int], timeout: float) -> side_pb2.SideReply:
        try:
            reply, _ = self._side.request(message, fds, timeout)
        except SessionLostError as error:
            self.lose(str(error))
            raise
        return reply

    def _detach(self) -> None:
        self._side.tell(side_pb2.SideRequest(detach=side_pb2.Detach()))

    def _end_lease(self) -> None:
        self._side.hang_up()

    def abandon(self) -> None:
        self._side.close()


def open_local(directory: Path, request: control_pb2.AttachRequest, timeout: float) -> Session:
    """Attaches by the side socket of a directory.

    Raises:
        UnavailableError: No server is there, or it takes nobody now.
        TopkdError: It refused.
    """
    side = SideConnection(directory / ATTACH_SOCKET, timeout)
    fds: list[int] = []
    try:
        reply, fds = side.request(side_pb2.SideRequest(attach=request), timeout=timeout)
        if reply.WhichOneof("reply") != "session" or len(fds) not in (1, 2):
            raise ProtocolError("the server's answer to an attach is no session with its descriptors")
        return LocalSession(side, reply.session, fds, directory)
    except SessionLostError as error:
        side.close()
        raise UnavailableError(f"the server at {directory} gave no session: {error}") from None
    except BaseException:
        side.close()
        close_all(fds)
        raise


class RemoteSession(Session):
    """A session over TCP: the Attach stream is its lease. It shares no memory."""

    def __init__(self, channel: grpc.Channel, stream: Any, attached: control_pb2.Session) -> None:
        super().__init__(attached, channel, lambda: channel)
        self._stream = stream

    def _find_memory_device(self) -> int | None:
        self.no_memory_because = "a session over TCP shares no memory with the server"
        return None

    def _end_lease(self) -> None:
        self._stream.cancel()


def open_tcp_channel(target: str, tls: TlsOptions | None) -> grpc.Channel:
    """Returns a channel to host:port, encrypted if `tls` is given."""
    if tls is None:
        return grpc.insecure_channel(target, options=_TCP_OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    names: Sequence[tuple[str, Any]] = (("grpc.ssl_target_name_override", tls.server_name),) if tls.server_name else ()
    return grpc.secure_channel(target, credentials, options=(*_TCP_OPTIONS, *names))


def open_remote(
    channel: grpc.Channel, request: control_pb2.AttachRequest, target: str, token: str | None, timeout: float
) -> Session:
    """Attaches by a stream on a channel to `target`, which becomes the session's.

    Raises:
        UnavailableError: No server is there, or it takes nobody now.
        TopkdError: It refused.
    """
    metadata = (("topkd-attach-token", token),) if token else ()
    stream = control_pb2_grpc.ControlServiceStub(channel).Attach(request, metadata=metadata)
    first: queue.SimpleQueue[Any] = queue.SimpleQueue()
    opened: list[Session] = []

    def watch() -> None:
        because = "the server ended the session"
        try:
            for event in stream:
                first.put(event)
        except grpc.RpcError as error:
            first.put(error)
            because = str(_status.from_rpc(error).message) or because
        first.put(UnavailableError(because))
        for session in opened:
            session.lose(because)

    threading.Thread(target=watch, name="topkd-lease", daemon=True).start()
    try:
        session = RemoteSession(channel, stream, _first_event(first, timeout, target))
    except BaseException:
        stream.cancel()
        channel.close()
        raise
    opened.append(session)
    if not stream.is_active():
        session.lose("the server ended the session")
    return session


def _first_event(first: queue.SimpleQueue[Any], timeout: float, target: str) -> control_pb2.Session:
    event: Any = UnavailableError(f"the server at {target} gave no session within {timeout:g} s")
    with contextlib.suppress(queue.Empty):
        event = first.get(timeout=timeout)
    if isinstance(event, grpc.RpcError):
        error = _status.to_error(_status.from_rpc(event))
        if not isinstance(error, SessionLostError):
            raise error
        raise UnavailableError(str(error) if error.reason else f"no server at {target}: {error}")
    if isinstance(event, TopkdError):
        raise event
    if event.WhichOneof("event") != "session":
        raise UnavailableError("the server drains")
    session: control_pb2.Session = event.session
    return session
