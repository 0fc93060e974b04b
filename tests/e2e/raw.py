"""The protocol spoken by hand: attach, register, call. Nothing here checks what it sends."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2

from topkd.v1 import control_pb2, selection_pb2, selection_pb2_grpc, side_pb2, tensor_pb2

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
TIMEOUT = 20.0


def memfd(size: int, seals: int = SEALS) -> int:
    """Returns a memfd of `size` zeros with some seals."""
    fd = os.memfd_create("topkd-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class Side:
    """A connection to the side socket."""

    def __init__(self, socket_dir: Path, timeout: float = TIMEOUT) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(timeout)
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.socket.connect(str(socket_dir / "attach.sock"))
                break
            except BlockingIOError:  # more wait to be accepted than may: a time-out does not wait for that
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Sends one packet."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[side_pb2.SideReply | None, list[int]]:
        """Returns the next reply and its descriptors; None where the connection has ended."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 8)
        except ConnectionResetError:
            return None, []
        return (side_pb2.SideReply.FromString(data) if data else None), list(fds)

    def ask(self, request: side_pb2.SideRequest, fds: Sequence[int] = ()) -> side_pb2.SideReply | None:
        """Sends a request and returns its reply; descriptors that come with it are closed."""
        self.send(request.SerializeToString(), fds)
        reply, received = self.receive()
        for fd in received:
            os.close(fd)
        return reply

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()


def attach_request(name: str = "test") -> side_pb2.SideRequest:
    """Returns an ordinary attach."""
    request = control_pb2.AttachRequest(client_name=name, protocol_revision=1, pid=os.getpid())
    return side_pb2.SideRequest(attach=request)


@dataclass
class RawSession:
    """An attached session and a channel to its worker."""

    side: Side
    session: control_pb2.Session
    channel: grpc.Channel
    words: int

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("topkd-token", self.session.token),)

    @property
    def worker_socket(self) -> Path:
        """Where the worker listens."""
        return Path(self.session.data_address.removeprefix("unix:"))

    @property
    def stub(self) -> selection_pb2_grpc.SelectionServiceStub:
        """The data plane."""
        return selection_pb2_grpc.SelectionServiceStub(self.channel)

    def register(self, size: int) -> tuple[int, np.ndarray[Any, Any]]:
        """Registers a new memfd and returns the region's id and the bytes as an array."""
        fd = memfd(size)
        try:
            request = side_pb2.SideRequest(register_memfd=side_pb2.RegisterMemfd(size=size))
            reply = self.side.ask(request, [fd])
            assert reply is not None, "the server closed the side connection"
            assert reply.WhichOneof("reply") == "registered_memfd", reply
            memory = np.memmap(f"/proc/self/fd/{fd}", np.uint8, "r+", shape=(size,))
        finally:
            os.close(fd)
        return reply.registered_memfd.region_id, memory

    def select(
        self, *selections: selection_pb2.Selection, timeout: float = TIMEOUT
    ) -> selection_pb2.SelectTopKResponse:
        """Calls SelectTopK on a batch."""
        return self.stub.SelectTopK(batch(*selections), metadata=self.metadata, timeout=timeout)

    def close(self) -> None:
        """Ends the session by its lease."""
        self.channel.close()
        self.side.close()
        if self.words >= 0:
            os.close(self.words)
            self.words = -1


def attach(socket_dir: Path, name: str = "test") -> RawSession:
    """Attaches; AssertionError if the server refuses."""
    side = Side(socket_dir)
    side.send(attach_request(name).SerializeToString())
    reply, fds = side.receive()
    assert reply is not None, "the server closed the side connection"
    assert reply.WhichOneof("reply") == "session", reply
    assert len(fds) == 1, "an attach answers with the words' descriptor"
    address = reply.session.data_address or f"unix:{socket_dir}/grpc.sock"
    if not address.startswith("unix:/"):
        address = f"unix:{socket_dir / address.removeprefix('unix:')}"
    session = control_pb2.Session()
    session.CopyFrom(reply.session)
    session.data_address = address
    return RawSession(side, session, grpc.insecure_channel(address, OPTIONS), fds[0])


@contextlib.contextmanager
def attached(socket_dir: Path, name: str = "test") -> Iterator[RawSession]:
    """Attaches, and ends the session at the end."""
    session = attach(socket_dir, name)
    try:
        yield session
    finally:
        session.close()


def front(socket_dir: Path) -> grpc.Channel:
    """Returns a channel to the front."""
    return grpc.insecure_channel(f"unix:{socket_dir}/grpc.sock", OPTIONS)


def method(channel: grpc.Channel, path: str) -> Any:
    """Returns a method by its path; it takes anything with SerializeToString and returns bytes."""
    return channel.unary_unary(path, lambda message: message.SerializeToString())


def batch(*selections: selection_pb2.Selection) -> selection_pb2.SelectTopKRequest:
    """Returns a request of some selections."""
    return selection_pb2.SelectTopKRequest(items=[selection_pb2.BatchItem(selection=one) for one in selections])


def inline(values: np.ndarray[Any, Any]) -> tensor_pb2.Tensor:
    """Returns an array as a tensor inside the message."""
    dtype = getattr(tensor_pb2, f"D_TYPE_{values.dtype.name.upper()}")
    return tensor_pb2.Tensor(dtype=dtype, shape=values.shape, inline_data=np.ascontiguousarray(values).tobytes())


def placed(region_id: int, offset: int, shape: Sequence[int], dtype: str = "FLOAT32") -> tensor_pb2.Tensor:
    """Returns a contiguous tensor in a region."""
    place = tensor_pb2.RegionSlice(region_id=region_id, offset=offset)
    return tensor_pb2.Tensor(dtype=getattr(tensor_pb2, f"D_TYPE_{dtype}"), shape=shape, region=place)


def numbers(tensor: tensor_pb2.Tensor) -> np.ndarray[Any, Any]:
    """Reads an inline tensor of float32, int32 or int64."""
    name = tensor_pb2.DType.Name(tensor.dtype).removeprefix("D_TYPE_").lower()
    return np.frombuffer(tensor.inline_data, name).reshape(tuple(tensor.shape))


@dataclass(frozen=True)
class Refusal:
    """What a failed call said.

    Attributes:
        code: the status code's name.
        message: its text.
        reason: ErrorInfo's, of domain topkd.v1.
        fields: of the BadRequest's violations.
        retry_seconds: RetryInfo's, or None.
    """

    code: str
    message: str
    reason: str
    fields: tuple[str, ...]
    retry_seconds: float | None


def refusal(error: grpc.RpcError) -> Refusal:
    """Reads a failed call's status with its details."""
    reason, fields, retry = "", [], None
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, bad, again = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info) and info.domain == "topkd.v1":
                reason = info.reason
            elif detail.Unpack(bad):
                fields += [violation.field for violation in bad.field_violations]
            elif detail.Unpack(again):
                retry = again.retry_delay.ToTimedelta().total_seconds()
    return Refusal(error.code().name, error.details() or "", reason, tuple(fields), retry)


def refused(call: Any, *args: Any, **kwargs: Any) -> Refusal:
    """Makes a call that must fail and returns what it said."""
    try:
        reply = call(*args, **{"timeout": TIMEOUT, **kwargs})
    except grpc.RpcError as error:
        return refusal(error)
    raise AssertionError(f"the call succeeded: {str(reply)[:200]}")
