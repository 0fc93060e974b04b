"""SelectTopKStream: requests of one open stream, answered in order; a call's failure is an answer and ends nothing.

A stream keeps a thread of the worker's server for its life, so a session may have a few only. Requests wait in the
transport until the one before is answered: flow control holds back who sends ahead too far.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from topkd.v1 import selection_pb2

from ._direct import open_messages
from ._record import Recorder
from ._state import Session
from ._wire import join_response, split_request
from .config import ServerLimits
from .errors import FieldError, QueueFullError, to_call_error
from .metrics import ServerMetrics

__all__ = ["StreamedCall", "Streams"]

METHOD = "SelectTopKStream"
_NS = 1e-9
_RETRY_AFTER_MS = 1000


class _Watch:
    """Whether the stream is still there. gRPC calls back once a stream; calls come and go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None
        self.active = True

    def gone(self) -> None:
        with self._lock:
            self.active = False
            wake = self._wake
        wake()

    def tell(self, wake: Callable[[], None]) -> bool:
        """Has `wake` called at the stream's end, instead of what was given before; False if it has ended."""
        with self._lock:
            self._wake = wake
            return self.active


class StreamedCall:
    """What handlers ask of a call's context, for one request of a stream."""

    def __init__(self, watch: _Watch, timeout_ms: int, metadata: Any) -> None:
        self._watch = watch
        self._metadata = metadata
        self._deadline = time.monotonic() + timeout_ms / 1000 if timeout_ms else None

    def time_remaining(self) -> float | None:
        """Returns the seconds within which the call must begin; None without a bound."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def is_active(self) -> bool:
        """Says whether the caller is still there."""
        return self._watch.active

    def add_callback(self, wake: Callable[[], None]) -> bool:
        """Has a function called when the caller goes; False if it has gone."""
        return self._watch.tell(wake)

    def invocation_metadata(self) -> Any:
        """Returns the stream's metadata."""
        return self._metadata


class _Service(Protocol):
    """What streams need of SelectionService."""

    def refuse_if_draining(self) -> None: ...

    def take_turn(self, session: Session, message: bytes) -> bool: ...

    def select(self, session: Session, message: bytes, context: Any, *, entered: bool) -> bytes: ...

    def note_failure(self, method: str, error: Exception, context: Any, session: Session) -> str: ...

    def fail(self, method: str, error: Exception, context: Any, session: Session) -> None: ...


class Streams:
    """The streams of a worker."""

    def __init__(self, service: _Service, limits: ServerLimits, metrics: ServerMetrics, recorder: Recorder) -> None:
        self._service = service
        self._limits = limits
        self._metrics = metrics
        self._note = recorder.request
        self._seconds = metrics.request_seconds.labels(METHOD)
        self._succeeded = metrics.requests.labels(METHOD, "OK")

    def serve(self, session: Session, messages: Iterable[bytes], context: Any) -> Iterator[bytes]:
        """Answers the requests of a stream until the caller ends it."""
        try:
            self._service.refuse_if_draining()
            if not session.open_stream(self._limits.max_streams):
                text = "as many streams of the session as may (max_streams) are open"
                raise QueueFullError(text, retry_after_ms=_RETRY_AFTER_MS)
        except Exception as error:  # noqa: BLE001  # every one is answered with a status
            self._service.fail(METHOD, error, context, session)
        watch, metadata = _Watch(), context.invocation_metadata()
        self._metrics.streams.inc()
        answer: Callable[..., Any] = partial(self._answer, session, watch, metadata)
        try:
            if context.add_callback(watch.gone):
                direct = open_messages(context, partial(answer, direct=True))
                if direct is None:
                    for message in messages:
                        yield answer(message)
                else:
                    for message in direct:
                        direct.answer(answer(message))
        finally:
            self._metrics.streams.dec()
            session.close_stream()

    def _answer(
        self, session: Session, watch: _Watch, metadata: Any, message: bytes, direct: bool = False
    ) -> bytes | None:
        """Answers a message; if `direct`, only one that is answered without waiting, else returns None."""
        started = time.perf_counter_ns()
        call_id = 0
        call: StreamedCall | None = None
        try:
            try:
                call_id, request, timeout_ms = split_request(message)
            except DecodeError:
                if direct:
                    return None
                raise FieldError("the message is no SelectTopKStreamRequest", field="SelectTopKStreamRequest") from None
            call = StreamedCall(watch, timeout_ms, metadata)
            if direct and not self._service.take_turn(session, request):
                return None
            if not direct:
                self._service.refuse_if_draining()
            response = self._service.select(session, request, call, entered=direct)
        except Exception as error:  # noqa: BLE001  # every one is answered
            identity = self._service.note_failure(METHOD, error, call or StreamedCall(watch, 0, metadata), session)
            answer = selection_pb2.SelectTopKStreamResponse(call_id=call_id, error=to_call_error(error, identity))
            self._seconds.observe((time.perf_counter_ns() - started) * _NS)
            failed: bytes = answer.SerializeToString()
            return failed
        self._note(self._seconds, self._succeeded, time.perf_counter_ns() - started)
        return join_response(call_id, response)
