"""Selections over one open gRPC stream: half of what a unary call costs, and many may be under way.

`SelectStream` is what users see. A `Transport` is one stream of one session; a lost session's is replaced. Nobody reads
answers but those who wait for one: who waits first reads for the others too, so that an answer wakes one thread.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

import grpc

from topkd import _flows
from topkd._base import batch_entries
from topkd._closing import Closing
from topkd._status import CallFailedError, Failure
from topkd._stream_call import open_call
from topkd._types import Selection, SelectResult
from topkd.errors import ClientClosedError, ForkError
from topkd.v1 import selection_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Unpack

    from topkd._client import Plan
    from topkd._core import Core
    from topkd._session import Session
    from topkd._types import Array, SelectOptions, Wait

__all__ = ["Pending", "SelectStream"]

_WINDOW: Final = 64
"""Calls that may be under way on a stream; whoever sends one more takes in answers first."""

_GRACE_S: Final = 1.0
"""Beyond a call's time-out before its stream is broken off: the server answers with the time-out itself if it can."""

_LOOK_S: Final = 0.25


class Transport:
    """One stream. Thread-safe."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._call = open_call(session.select_stream, session.metadata)
        self._changed = threading.Condition()
        self._ids = itertools.count(1)
        self._deadlines: dict[int, float] = {}
        self._answers: dict[int, selection_pb2.SelectTopKStreamResponse] = {}
        self._reading = False
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._because: Exception = ClientClosedError("the stream is closed")
        threading.Thread(target=self._watch, name="topkd-stream", daemon=True).start()

    @property
    def broken(self) -> bool:
        """Whether it takes no calls any more."""
        return self._error is not None or self._ended.is_set()

    def send(self, request: selection_pb2.SelectTopKRequest, timeout: float) -> int:
        """Sends a request and returns its number. Waits while too many are under way.

        Raises:
            CallFailedError, grpc.RpcError: The stream is broken.
        """
        with self._changed:
            while len(self._deadlines) - len(self._answers) >= _WINDOW or not self._call.ready:
                self._take_in()
            self._raise_if_broken()
            number = next(self._ids)
            self._deadlines[number] = time.monotonic() + timeout
            milliseconds = min(max(int(timeout * 1000), 1), 0xFFFFFFFF)
            self._call.send(
                selection_pb2.SelectTopKStreamRequest(call_id=number, request=request, timeout_ms=milliseconds)
            )
        return number

    def receive(self, number: int) -> selection_pb2.SelectTopKResponse:
        """Waits for the answer to a request.

        Raises:
            CallFailedError: The server refused the call, or it took too long.
            grpc.RpcError: The stream broke.
        """
        with self._changed:
            try:
                while number not in self._answers:
                    self._take_in()
                answer = self._answers.pop(number)
            finally:
                self._deadlines.pop(number, None)
        if answer.WhichOneof("outcome") == "error":
            error = answer.error
            code = _CODE_NAMES.get(error.code, "UNKNOWN")
            retry_after = error.retry_after_ms / 1000 if error.retry_after_ms else None
            raise CallFailedError(Failure(code, error.message, error.reason, error.field, retry_after))
        return answer.response

    def forget(self, number: int) -> None:
        """Drops the answer to a request that nobody waits for any more."""
        with self._changed:
            self._answers.pop(number, None)
            self._deadlines.pop(number, None)

    def _take_in(self) -> None:
        """Reads an answer, or waits until another thread has read one; the lock is held, and let go meanwhile."""
        self._raise_if_broken()
        if self._reading:
            self._changed.wait()
            return
        self._read()

    def _read(self) -> None:
        """Reads what comes next; the lock is held, and let go meanwhile."""
        answer, error = None, None
        try:
            self._reading = True
            self._changed.release()
            try:
                answer = self._call.take()
            except (grpc.RpcError, StopIteration) as broken:
                error = broken if isinstance(broken, grpc.RpcError) else _ended("the server ended the stream")
            finally:
                self._lock_again()
            if error is not None:
                self._error = self._error or (self._because if self._ended.is_set() else error)
            if answer is not None and answer.call_id in self._deadlines:
                self._answers[answer.call_id] = answer
        except BaseException:  # a signal's handler has raised: what was read may be lost, and the call with it
            text = "a thread was interrupted while it read the stream's answers; the stream was broken off"
            self._error = self._error or CallFailedError(Failure("ABORTED", text))
            self._call.cancel()
            raise
        finally:
            self._reading = False
            self._changed.notify_all()

    def _lock_again(self) -> None:
        """Takes the lock, also if a signal's handler raises meanwhile, which is raised then."""
        try:
            self._changed.acquire()
        except BaseException:
            if not self._changed._is_owned():  # type: ignore[attr-defined]
                self._changed.acquire()
            raise

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ended.is_set():
            raise self._because

    def _watch(self) -> None:
        """Breaks the stream off when a call is late: a server that hangs must not hang its callers."""
        while not self._ended.wait(_LOOK_S):
            with self._changed:
                if self._error is not None:
                    return
                waiting = [at for number, at in self._deadlines.items() if number not in self._answers]
                late = bool(waiting) and time.monotonic() > min(waiting) + _GRACE_S
                if late:
                    text = "the server has not answered within the call's time-out; the stream was broken off"
                    self._error = CallFailedError(Failure("DEADLINE_EXCEEDED", text, "DEADLINE"))
            if late:
                self._call.cancel()
                return

    def forked(self) -> None:
        """In a forked child: leaves the stream to the parent, whose threads may have held its locks."""
        self._changed, self._ended = threading.Condition(), threading.Event()
        self._error = ForkError("this stream was opened before a fork: open one in the child process")
        self._call.forked()

    def close(self, because: Exception | None = None) -> None:
        """Ends the stream; calls under way raise ClientClosedError, or `because`. Idempotent."""
        if because is not None:
            self._because = because
        self._ended.set()
        self._call.cancel()
        with self._changed:
            while self._error is None and not self._reading:
                self._read()


_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def _ended(text: str) -> CallFailedError:
    return CallFailedError(Failure("UNAVAILABLE", text))


class _Step:
    """A step of a flow: a call on a stream, which can be sent apart from being waited for."""

    def __init__(self, transport: Transport, request: selection_pb2.SelectTopKRequest, timeout: float) -> None:
        self._transport = transport
        self._request = request
        self._timeout = timeout
        self._number = 0

    def begin(self) -> None:
        """Sends it."""
        self._number = self._transport.send(self._request, self._timeout)

    def run(self) -> Any:
        """Sends it if that has not been done, and waits on this thread."""
        if not self._number:
            self.begin()
        return self._transport.receive(self._number)

    async def arun(self) -> Any:
        """Streams are for threads."""
        raise NotImplementedError

    def forget(self) -> None:
        """Gives the answer up."""
        self._transport.forget(self._number)


class Pending:
    """Selections that were sent. Made by `SelectStream.submit`; dropped without `result`, their outcome is lost."""

    def __init__(self, flow: Any, step: Any, results: list[SelectResult] | None) -> None:
        self._flow = flow
        self._step = step
        self._results = results

    def result(self) -> list[SelectResult]:
        """Waits for the answer, as `Client.select_topk_batch` does. With CUDA tensors call it in the streams' order.

        Raises:
            TopkdError: As `Client.select_topk`.
        """
        if self._results is None:
            step, self._step = self._step, None
            if step is None:
                raise ClientClosedError("the result of this call was an error, and has been raised")
            self._results = _flows.drive(self._flow, step)
        return self._results

    def __del__(self) -> None:
        step, self._step = getattr(self, "_step", None), None
        if step is not None:
            step.forget()
            self._flow.close()


class SelectStream(Closing):
    """One open stream to the server, for callers that call again and again. Made by `Client.stream`.

    Its calls are those of the client, in order; a thread pays about half for each. Usable from any number of threads
    and as a context manager. After the session was lost, the next call opens a stream in the next session.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._closed = False
        self._opened: list[Transport] = []
        self._finalizer = weakref.finalize(self, _close_all, self._opened)
        _streams.add(self)

    def forked(self) -> None:
        """In a forked child: leaves the stream to the parent."""
        self._lock = threading.Lock()
        for transport in self._opened:
            transport.forked()

    def _transport(self, session: Session) -> Transport:
        with self._lock:
            if self._closed:
                raise ClientClosedError("the stream is closed")
            if self._opened:
                if self._opened[0].session is session and not self._opened[0].broken:
                    return self._opened[0]
                self._opened.pop().close(_ended("its session is over"))
            self._opened.append(Transport(session))
            return self._opened[0]

    def _step(self, session: Session, request: Any, timeout: float) -> _Step:
        return _Step(self._transport(session), request, timeout)

    def _flow(self, entries: list[Any], timeout: float | None, wait: str) -> Any:
        return _flows.select(self._core, entries, timeout, wait, self._step)

    def select_topk(
        self,
        input: Array,
        k: int,
        *,
        timeout: float | None = None,
        wait: Wait = "stream",
        **options: Unpack[SelectOptions],
    ) -> SelectResult:
        """Selects the k best of each row. See `Client.select_topk`."""
        result: SelectResult = _flows.drive(self._flow([Selection(input, k, **options)], timeout, wait))[0]
        return result

    def select_topk_batch(
        self, selections: Iterable[Selection | Plan], *, timeout: float | None = None, wait: Wait = "stream"
    ) -> list[SelectResult]:
        """Does several selections in one call. See `Client.select_topk_batch`."""
        entries = batch_entries(self._core, selections)
        results: list[SelectResult] = _flows.drive(self._flow(entries, timeout, wait))
        return results

    def run(self, plan: Plan, *, timeout: float | None = None, wait: Wait = "stream") -> SelectResult:
        """Runs a plan. See `Plan.run`."""
        entries = batch_entries(self._core, (plan,))
        result: SelectResult = _flows.drive(self._flow(entries, timeout, wait))[0]
        return result

    def submit(
        self, selections: Iterable[Selection | Plan], *, timeout: float | None = None, wait: Wait = "stream"
    ) -> Pending:
        """Sends selections and returns without waiting for the answer, unless 64 calls are under way already.

        Raises:
            TopkdError: As `Client.select_topk`, as far as that is known before the answer.
        """
        flow = self._flow(batch_entries(self._core, selections), timeout, wait)
        step, results = _flows.drive_to(flow, _Step)
        return Pending(flow, step, results)

    def close(self) -> None:
        """Ends the stream; calls under way raise ClientClosedError. Idempotent."""
        with self._lock:
            self._closed = True
        self._finalizer()


def _close_all(opened: list[Transport]) -> None:
    for transport in opened:
        transport.close()


_streams: weakref.WeakSet[SelectStream] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for stream in list(_streams):
        stream.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
