"""One bidirectional call, read and written by the threads that use it.

grpcio has two threads between such a call and its user: one takes requests from an iterator, one takes in events for
the whole channel; each wakes another, 30 us and more. Here the call has a queue of events of its own, as grpcio's unary
calls have, which is read by who waits for an answer. `open_call` falls back to grpcio's own way where grpcio is not
built as known: all that is used of it beyond its interface is in this file, and the same in 1.72 and 1.85.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc import _channel as grpcio
from grpc._cython import cygrpc  # type: ignore[attr-defined, unused-ignore]  # its stubs are empty

if TYPE_CHECKING:
    from topkd.v1 import selection_pb2

__all__ = ["StreamCall", "open_call"]


class StreamCall(Protocol):
    """A call. `send` is called by one thread at a time, and so is `take`."""

    @property
    def ready(self) -> bool:
        """Whether `send` may be called; becomes true by `take`."""

    def send(self, request: selection_pb2.SelectTopKStreamRequest) -> None:
        """Sends a request without waiting. What keeps it from being sent is raised by `take`."""

    def take(self) -> selection_pb2.SelectTopKStreamResponse | None:
        """Waits for what comes next: an answer, or None for something else.

        Raises:
            grpc.RpcError: The call has failed.
            StopIteration: The server has ended it.
            BaseException: What the handler of a signal raised meanwhile; the call is over then.
        """

    def cancel(self) -> None:
        """Ends it, from any thread; then `take` raises, and grpcio lets go of what it has of the call."""

    def forked(self) -> None:
        """In a forked child: leaves the call to the parent, whose threads may have held its locks."""


class _OwnThreads:
    """As grpcio makes it."""

    ready = True

    def __init__(self, method: Any, metadata: Any) -> None:
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = method(iter(self._outgoing.get, None), metadata=metadata)
        self.send = self._outgoing.put

    def take(self) -> Any:
        return next(self._call)

    def cancel(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()

    def forked(self) -> None:
        with contextlib.suppress(AttributeError):
            _forget(self._call._state)


class _CallersThreads:
    """Without threads of grpcio's."""

    def __init__(self, method: Any, metadata: Any) -> None:
        kinds = cygrpc.OperationType
        self._sending, self._receiving = kinds.send_message, kinds.receive_message
        self._serialize, self._deserialize = method._request_serializer, method._response_deserializer
        first = (kinds.send_initial_metadata, kinds.receive_initial_metadata, kinds.receive_status_on_client)
        self._state = grpcio._RPCState(first, None, None, None, None)
        self._state.method, self._state.target = method._method.decode(), method._target.decode()
        self._state.rpc_start_time = time.perf_counter()
        opening = cygrpc.SendInitialMetadataOperation(metadata, 0), cygrpc.ReceiveStatusOnClientOperation(0)
        self._segregated = method._channel.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            method._method,
            None,
            None,
            metadata,
            None,
            ((opening, None), ((cygrpc.ReceiveInitialMetadataOperation(0),), None)),
            method._context,
            method._registered_call_handle,
        )
        # Reads events, and is the exception that tells of the end.
        self._call: Any = grpcio._SingleThreadedRendezvous(self._state, self._segregated, None, None)
        self._wait = self._call._consume_next_event
        self._start(self._receiving, cygrpc.ReceiveMessageOperation(0))

    def _start(self, kind: Any, operation: Any) -> None:
        with self._state.condition:
            self._state.due.add(kind)
            if not self._segregated.operate((operation,), None):
                self._state.due.remove(kind)

    @property
    def ready(self) -> bool:
        return self._sending not in self._state.due

    def send(self, request: Any) -> None:
        self._start(self._sending, cygrpc.SendMessageOperation(self._serialize(request), 0))

    def take(self) -> Any:
        state = self._state
        while state.due:
            try:
                self._wait()
            except BaseException:  # an interrupt: grpcio may have let go of what it has of the call
                self._call.cancel()
                state.due.clear()
                raise
            answer, state.response = state.response, None
            if answer is not None:
                self._start(self._receiving, cygrpc.ReceiveMessageOperation(0))
                return self._decode(answer)
            if state.due and not state.cancelled:
                return None
        if state.code is grpc.StatusCode.OK:
            raise StopIteration
        raise self._call

    def _decode(self, answer: bytes) -> Any:
        """Reads an answer; what cannot be read ends the call."""
        try:
            return self._deserialize(answer)
        except DecodeError as error:
            self._segregated.cancel(cygrpc.StatusCode.internal, f"the server's answer cannot be read: {error}")
            return None

    def cancel(self) -> None:
        self._call.cancel()

    def forked(self) -> None:
        _forget(self._state)


def _forget(state: Any) -> None:
    """Has grpcio take a call for one that is over."""
    state.condition = threading.Condition()
    state.code = grpc.StatusCode.CANCELLED


def open_call(method: Any, metadata: Any) -> StreamCall:
    """Begins a call of a stub's method."""
    try:
        return _CallersThreads(method, metadata)
    except (AttributeError, TypeError):
        return _OwnThreads(method, metadata)
