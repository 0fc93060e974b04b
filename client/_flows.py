"""What a client does, written once: generators that yield the steps that wait, driven by threads or by asyncio.

`drive` runs a flow on the calling thread; `adrive` awaits its steps. A step that fails raises inside the flow.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

import grpc

from topkd import _codec, _local
from topkd._arena import NeedMemory, Stale
from topkd._options import Deadline, backoff, check_wait
from topkd._plan import PlanState
from topkd._prepare import Prepared, prepare_merges, prepare_selections
from topkd._status import CallFailedError
from topkd.errors import (
    DeadlineExceededError,
    ResourceExhaustedError,
    SessionLostError,
    UnavailableError,
)
from topkd.v1 import control_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from topkd._core import Core
    from topkd._session import Session
    from topkd._timeline import Ticket
    from topkd._types import Merge, Selection, SelectResult, ServerInfo

__all__ = [
    "Blocking",
    "Rpc",
    "Sleep",
    "adrive",
    "blocking",
    "drive",
    "drive_to",
    "info",
    "make_plan",
    "merge",
    "select",
]

_T = TypeVar("_T")
Flow: TypeAlias = "Generator[Step, Any, _T]"


class Rpc:
    """A unary call."""

    __slots__ = ("_metadata", "_method", "_request", "_timeout")

    def __init__(self, method: Any, request: Any, timeout: float, metadata: Any) -> None:
        self._method = method
        self._request = request
        self._timeout = timeout
        self._metadata = metadata

    def run(self) -> Any:
        """Waits on this thread."""
        return self._method(self._request, timeout=self._timeout, metadata=self._metadata)

    async def arun(self) -> Any:
        """Awaits. The call is cancelled with its task."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        call = self._method.future(self._request, timeout=self._timeout, metadata=self._metadata)
        call.add_done_callback(lambda _: _wake(loop, done))
        try:
            await done
        except asyncio.CancelledError:
            call.cancel()
            raise
        return call.result()


def _wake(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
    def finish() -> None:
        if not done.done():
            done.set_result(None)

    if not loop.is_closed():
        loop.call_soon_threadsafe(finish)


class Sleep:
    """A pause in seconds."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def run(self) -> None:
        """Waits on this thread."""
        time.sleep(self._seconds)

    async def arun(self) -> None:
        """Awaits."""
        await asyncio.sleep(self._seconds)


class Blocking:
    """A function that may wait for long."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def run(self) -> Any:
        """Waits on this thread."""
        return self._function()

    async def arun(self) -> Any:
        """Awaits it on another thread."""
        return await asyncio.to_thread(self._function)


class Step(Protocol):
    """Something that waits."""

    def run(self) -> Any:
        """Waits on this thread."""

    async def arun(self) -> Any:
        """Awaits."""


Send: TypeAlias = "Callable[[Session, Any, float], Step]"
"""Makes the step that sends a request with a time-out."""


def drive(flow: Flow[_T], step: Step | None = None) -> _T:
    """Runs a flow on this thread, from its beginning or from a step at which it stands."""
    try:
        step = step or flow.send(None)
        while True:
            try:
                outcome = step.run()
            except BaseException as error:  # noqa: BLE001 - the flow's to handle
                step = flow.throw(error)
            else:
                step = flow.send(outcome)
    except StopIteration as end:
        value: _T = end.value
        return value


def drive_to(flow: Flow[_T], kind: Any) -> tuple[Any, _T | None]:
    """Runs a flow on this thread until it stands at a step of a kind, which is begun.

    Returns:
        The step and None, or None and the flow's value if it ended before.
    """
    try:
        step: Any = flow.send(None)
        while True:
            try:
                if isinstance(step, kind):
                    step.begin()
                    return step, None
                outcome = step.run()
            except BaseException as error:  # noqa: BLE001 - the flow's to handle
                step = flow.throw(error)
            else:
                step = flow.send(outcome)
    except StopIteration as end:
        return None, end.value


async def adrive(flow: Flow[_T]) -> _T:
    """Runs a flow as part of this task."""
    try:
        step = flow.send(None)
        while True:
            try:
                outcome = await step.arun()
            except BaseException as error:  # noqa: BLE001 - the flow's to handle
                step = flow.throw(error)
            else:
                step = flow.send(outcome)
    except StopIteration as end:
        value: _T = end.value
        return value


_RETRIED: Final = "QUEUE_FULL"


def _begin(session: Session, method: str, prepared: Prepared, host: bool) -> Ticket | None:
    """Orders a call on its stream, if it can be: else the stream is waited for, and the reply tells of the end."""
    if host or method != "select_topk" or session.timeline is None or prepared.stream is None or prepared.carried:
        return None
    return session.timeline.begin(prepared.stream)


def _drop(session: Session, ticket: Ticket | None) -> None:
    if ticket is not None and session.timeline is not None:
        session.timeline.dropped(ticket)


def _call(
    core: Core,
    method: str,
    prepare: Callable[[Session, bool], Prepared],
    timeout: float | None,
    *,
    host: bool = True,
    send: Send | None = None,
) -> Flow[tuple[Prepared, Any]]:
    """Attaches if need be, prepares, sends; sends again only what the server has refused to queue.

    Unless `host`, a call with CUDA tensors is ordered on their stream, and returns when the server has accepted it.
    `send` makes the step that sends, instead of a unary call.
    """
    deadline = core.options.deadline(timeout)
    may_grow = True
    attempt = 0
    while True:
        session = core.live()
        if session is None:
            session = yield Blocking(partial(core.attach, deadline))
        try:
            prepared = prepare(session, may_grow)
        except NeedMemory as need:
            may_grow = yield from _grow(core, session, need.size)
            continue
        except Stale:
            if not deadline.remaining():
                raise DeadlineExceededError("the session kept changing until the call's deadline") from None
            continue
        ticket = _begin(session, method, prepared, host)
        if prepared.stream is not None and ticket is None:
            yield Blocking(prepared.stream.synchronize)
        request = prepared.request if ticket is None else ticket.request(prepared.request)
        try:
            if send is None:
                reply = yield Rpc(getattr(session, method), request, deadline.remaining(), session.metadata)
            else:
                reply = yield send(session, request, deadline.remaining())
        except (grpc.RpcError, ValueError, CallFailedError) as error:
            _drop(session, ticket)
            pause = _pause_after(core, session, prepared, error, deadline, attempt)
        except BaseException:  # interrupted: the server may run it still
            _drop(session, ticket)
            session.quarantine.append(prepared)
            raise
        else:
            session.quarantine.clear()
            if ticket is not None and session.timeline is not None:
                session.timeline.accepted(ticket)
            return prepared, reply
        yield Sleep(pause)
        attempt += 1


def _grow(core: Core, session: Session, size: int) -> Flow[bool]:
    """Returns whether asking the arena again makes sense."""
    try:
        grown: bool = yield Blocking(partial(core.grow, session, size))
    except SessionLostError:
        return True
    return grown


def _pause_after(
    core: Core, session: Session, prepared: Prepared, error: Exception, deadline: Deadline, attempt: int
) -> float:
    """Returns the seconds after which to send again.

    Raises:
        TopkdError: What the call failed with, unless it was not queued and there is time for another try.
    """
    core.check_usable()
    failure = session.error_of(error)
    if isinstance(failure, ResourceExhaustedError) and failure.reason == _RETRIED:
        pause = max(failure.retry_after or 0.0, backoff(attempt, 0.002))
        if pause < deadline.remaining():
            return pause
    elif isinstance(failure, SessionLostError):
        core.keep_for_a_while(prepared)
    elif isinstance(failure, DeadlineExceededError):
        session.quarantine.append(prepared)
    raise failure from None


def blocking(core: Core, function: Callable[[Session], _T], timeout: float | None) -> Flow[_T]:
    """Runs a function of the session, which may wait."""
    deadline = core.options.deadline(timeout)
    session = core.live()
    if session is None:
        session = yield Blocking(partial(core.attach, deadline))
    value: _T = yield Blocking(partial(function, session))
    return value


def select(
    core: Core,
    selections: Sequence[Selection | PlanState],
    timeout: float | None,
    wait: str,
    send: Send | None = None,
) -> Flow[list[SelectResult]]:
    """SelectTopK, or its local substitute."""
    host = check_wait(wait)
    if not selections:
        return []
    prepare = partial(prepare_selections, core.arena, selections)
    call = _call(core, "select_topk", prepare, timeout, host=host, send=send)
    return (yield from _served(core, call, partial(_local.select, selections)))


def merge(core: Core, merges: Sequence[Merge], timeout: float | None) -> Flow[list[SelectResult]]:
    """MergeTopK, or its local substitute."""
    call = _call(core, "merge_topk", partial(prepare_merges, core.arena, merges), timeout)
    return (yield from _served(core, call, partial(_local.merge, merges)))


def _served(
    core: Core, call: Flow[tuple[Prepared, Any]], compute: Callable[[], list[SelectResult]]
) -> Flow[list[SelectResult]]:
    """Calls the server; computes here while none is there, if the client may."""
    core.raise_ordered()
    try:
        prepared, reply = yield from call
    except UnavailableError:
        if not core.options.local:
            raise
        here: list[SelectResult] = yield Blocking(compute)
        return here
    return prepared.results(reply)


def info(core: Core, timeout: float | None) -> Flow[ServerInfo]:
    """GetServerInfo."""
    request = Prepared(control_pb2.GetServerInfoRequest())
    _, reply = yield from _call(core, "server_info", lambda session, may_grow: request, timeout)
    return _codec.read_info(reply.info)


def make_plan(core: Core, selection: Selection, timeout: float | None) -> Flow[PlanState]:
    """CreatePlan, with outputs of the plan's own where none are given."""
    plan = PlanState(core, selection)
    yield from blocking(core, partial(core.adopt, plan), timeout)
    return plan
