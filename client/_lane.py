"""Lanes: plans that are called by a word in shared memory, without a request.

A call stores 0 to the lane's done word and the plan's number to its request word, and waits for the done word; on a
CUDA stream these are operations of the stream, one batch of them, which a CUDA graph captures like a kernel. Where the
client's kernels and the worker's run side by side (MPS), a kernel of one thread makes the call instead, and waits for
an echo in the GPU's own memory (`topkd.kernels.lane_call_kernel`). Nobody waits for ever: the watchdog stores the done
word when the worker is gone or a call is late, and says so in the end word, at which the kernel looks, too.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

from topkd import _flows
from topkd._arena import Stale
from topkd._arrays import HOST
from topkd._base import PlanBase
from topkd._closing import Closing
from topkd._lane_book import marks
from topkd._options import check_seconds
from topkd._types import SelectResult, WaitsBy
from topkd._watchdog import LATE
from topkd._words import CLIENT_BELL, FIRST_LANE, WORKER_BELL
from topkd.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ClientClosedError,
    DeadlineExceededError,
    KernelError,
    NotFoundError,
    RegionError,
    ResourceExhaustedError,
    SessionLostError,
    TopkdError,
)
from topkd.v1 import selection_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topkd._client import Plan
    from topkd._core import Core
    from topkd._cuda_call import CallKernel
    from topkd._lane_book import LaneBook
    from topkd._plan import PlanState
    from topkd._session import Session

__all__ = ["Lane", "open_lane"]

_LIMIT: Final = "LANE_LIMIT"

_SPIN_S: Final = 200e-6
"""How long a caller on the host looks for its answer without a pause."""

_MODES: Final = {selection_pb2.LANE_MODE_POLLED: "polled", selection_pb2.LANE_MODE_ARMED: "armed"}


class Lane(Closing):
    """Plans that are called without a request. Made by `Plan.lane` and `Client.lane`; usable as a context manager.

    One thread, or one stream, calls it at a time. Every call writes its plan's outputs. A lane ends with its session,
    and when a call takes longer than `timeout`: whoever waits for it then goes on, with outputs that are unspecified,
    `check` and every later call raise, and another lane must be opened.

    Attributes:
        mode: "armed": the worker's stream waits for calls, no CPU is in them. "polled": a thread of the worker looks
            for calls and launches them.
        reason: Why it is that.
        waits_by: What a call on a stream is: "operations" of memory, or a "kernel" that waits on the GPU.
        timeout: Seconds that a call has, from when its stream comes to it.
    """

    def __init__(
        self,
        core: Core,
        session: Session,
        plans: Sequence[Plan],
        opened: Any,
        *,
        book: LaneBook,
        timeout: float,
        kernel: CallKernel | None,
    ) -> None:
        self.mode = _MODES.get(opened.mode, "unknown")
        self.reason = str(opened.reason)
        self._kernel = kernel
        self.waits_by: WaitsBy = "operations" if self._kernel is None else "kernel"
        self.timeout = timeout
        self.line = FIRST_LANE + opened.lane
        self.closed = False
        self._core = core
        self._session = session
        self._plans = tuple(plans)
        self._book = book
        self._guard = book.guard
        self._words = book.words
        self._seen = self._words.failure(self.line).total
        self._first_ticket = self._words.tickets(self.line)
        self._stream: Any = None
        self._batches: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._words.set_end(self.line, 0)
        self._guard.lane(self.line, timeout)
        book.add(self)

    @property
    def broken(self) -> bool:
        """Whether it takes no calls any more."""
        return self._error() is not None

    def _error(self) -> TopkdError | None:
        """Returns why it is broken."""
        end = self._words.end(self.line)
        if end == LATE:
            return DeadlineExceededError(
                f"a call of the lane was not over within its time ({self.timeout:g} s, unless the call said another); "
                "the lane is broken and must be opened again"
            )
        return self._book.lost or (SessionLostError("the lane is broken: its worker is gone") if end else None)

    def _raise_if_broken(self) -> None:
        error = self._error()
        if error is None:
            return
        if isinstance(error, SessionLostError):
            self._session.lose()  # the watchdog may have known it first
        raise error

    def _check_usable(self) -> None:
        if self.closed:
            raise ClientClosedError("the lane is closed")
        self._raise_if_broken()

    def check_plan(self, plan: Plan) -> None:
        """Raises ArgumentValueError unless the plan is one of the lane's."""
        self._index(plan)

    def _index(self, plan: Plan | None) -> int:
        if plan is None:
            return 0
        for place, one in enumerate(self._plans):
            if one is plan:
                return place
        raise ArgumentValueError("the plan is none of the lane's", argument="plan")

    def __call__(self, plan: Plan | None = None) -> SelectResult:
        """Enqueues a call on the current CUDA stream and returns its outputs; neither waits nor sends anything.

        Can be captured in a CUDA graph, and replayed as long as the lane is open.

        Args:
            plan: One of the lane's plans; None for its first.

        Raises:
            RegionError: The plan's tensors are on the CPU: use `call_host`.
            SessionLostError: The session is gone.
            DeadlineExceededError: A call was late; the lane is broken.
        """
        self._check_usable()
        place = self._index(plan)
        state = self._plans[place]._state
        if not getattr(state.selection.input, "is_cuda", False):
            raise RegionError("a call on a stream needs CUDA tensors; call_host is for those on the CPU")
        import torch

        with self._lock:
            stream = torch.cuda.current_stream(state.selection.input.device)
            if self._stream is not None and self._stream != stream and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
            if stream != self._stream:
                self._book.note(stream)
            self._stream = stream
            batch = self._batches.get(place)
            if batch is None:
                timeline = self._session.timeline
                if timeline is None:
                    raise RegionError("the session's memory is not on a GPU of this process")
                device, number = timeline.mapped(), place + 1
                batch = self._batches[place] = (
                    device.batch(self.line, number)
                    if self._kernel is None
                    else device.launch(self._kernel, self.line, number)
                )
            batch(stream.cuda_stream)
        return _outputs(state)

    def call_host(self, plan: Plan | None = None, *, timeout: float | None = None) -> SelectResult:
        """Calls a plan and waits on this thread until its outputs are complete. Inputs must be complete already.

        Args:
            plan: One of the lane's plans; None for its first.
            timeout: Seconds, at most the lane's; None for those. A lane past it is broken.

        Raises:
            DeadlineExceededError: The time-out passed.
            TopkdError: The call failed.
        """
        seconds = self.timeout if timeout is None else check_seconds("timeout", timeout)
        place = self._index(plan)
        state = self._plans[place]._state
        with self._lock:
            self._check_usable()
            if self._stream is not None:
                self._stream.synchronize()
            until = time.monotonic() + seconds
            # A call that was interrupted may be under way, or a kernel's answer still store: its end would pass for
            # this one's.
            came = self._wait(until, self._last_done())
            if came:
                self._words.set_done(self.line, 0)
                self._words.set_ready(self.line, place + 1)
                self._words.ring(CLIENT_BELL)
                came = self._wait(until, 1)
            if not came:
                self._words.set_end(self.line, LATE)
        self.check()
        return _outputs(state)

    def _last_done(self) -> int:
        """Returns what the done word is, or more, once the answer to the last call has stored all."""
        ticket = self._words.tickets(self.line)
        return 1 if ticket == self._first_ticket else ticket + 1

    def _over(self, done: int) -> bool:
        """Says whether the done word is at least so much, or is not 0 and never becomes that."""
        found = self._words.done(self.line)
        return found >= done or (found > 0 and bool(self._words.slow(self.line) or self._words.end(self.line)))

    def _wait(self, until: float, done: int) -> bool:
        """Waits for the done word, or for the session's loss; says whether either came in time."""
        started = time.monotonic()
        while time.monotonic() - started < _SPIN_S:
            if self._over(done):
                return True
        while True:
            seen = self._words.bell(WORKER_BELL)
            if self._over(done) or self._book.lost is not None:
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._words.wait(WORKER_BELL, seen, min(left, 0.02 if self._session.memory_device == HOST else 100e-6))

    def check(self) -> None:
        """Raises if a call has failed since the last look; once broken, always. Does not wait: synchronise first.

        Raises:
            NotFoundError: The call's plan was released.
            KernelError: The kernel failed.
            SessionLostError: The session ended; the outputs of its calls since are unspecified.
            DeadlineExceededError: A call was late; its outputs and those since are unspecified.
        """
        self._raise_if_broken()
        found = self._words.failure(self.line)
        if found.total != self._seen:
            self._seen = found.total
            raise _failure(found.code)

    def close(self) -> None:
        """Gives the lane up, in the background, once calls of other threads and in its stream are over. Idempotent.

        Graphs with calls of it must not be replayed any more; replays on streams other than this thread's current one
        must be over.
        """
        if self.closed:
            return
        self.closed = True
        events = marks(self._streams())
        self._book.begin_close()
        self._core.reaper.close_lane(
            self._session, self.line, self._book, busy=self._lock.locked, events=events, held=self._plans
        )

    def _streams(self) -> list[Any]:
        """Returns the stream of the last call, and the current one, where a graph may have been replayed."""
        if self._stream is None:
            return []
        import torch

        return [self._stream, torch.cuda.current_stream(self._stream.device)]

    def __del__(self) -> None:
        if hasattr(self, "_stream") and not sys.is_finalizing():
            self.close()

    def __repr__(self) -> str:
        return f"<topkd.Lane: {'closed' if self.closed else 'broken' if self.broken else self.mode}>"


def open_lane(core: Core, plans: Sequence[Plan], timeout: float | None, waits_by: WaitsBy) -> Lane:
    """Opens a lane over plans. Blocks.

    Raises:
        ArgumentTypeError: One of them is no plan.
        ArgumentValueError: There is none, or one is of another client, whose sessions are not this one's; or there is
            no such `waits_by`.
        RegionError: The session has no words (TCP), the server no lanes, or the watchdog cannot be started; or no
            kernel can wait.
        ResourceExhaustedError: As many lanes as may be are open.
    """
    if not plans:
        raise ArgumentValueError("a lane needs a plan", argument="plans")
    for place, plan in enumerate(plans):
        name = f"plans[{place}]"
        if not isinstance(plan, PlanBase):
            raise ArgumentTypeError(
                f"{name} must be a plan of this client, not {type(plan).__name__}", argument="plans"
            )
        if plan._core is not core:
            raise ArgumentValueError(f"{name} is a plan of another client; allowed are this one's", argument="plans")
    seconds = core.options.timeout if timeout is None else check_seconds("timeout", timeout)
    if not seconds:
        raise ArgumentValueError("timeout is 0; it must be above 0 seconds", argument="timeout")
    if waits_by not in get_args(WaitsBy):
        raise ArgumentValueError(f"waits_by is {waits_by!r}; it must be 'operations' or 'kernel'", argument="waits_by")
    deadline = core.options.deadline(None)
    while True:
        try:
            return _flows.drive(_flows.blocking(core, partial(_open, core, plans, seconds, waits_by), None))
        except Stale:
            if not deadline.remaining():
                raise DeadlineExceededError("the session kept changing while a lane was being opened") from None


def _open(core: Core, plans: Sequence[Plan], seconds: float, waits_by: WaitsBy, session: Session) -> Lane:
    book = session.lanes
    if book is None:
        raise RegionError("no lanes: the session shares no memory with the server, or the server has none")
    book.guard.start()
    signals = _signals(session) if waits_by == "kernel" else None
    plan_ids = [plan._state.id_in(session) for plan in plans]
    request = selection_pb2.OpenLaneRequest(plan_ids=plan_ids, signals=signals)
    deadline = core.options.deadline(None)
    while True:
        given_back = book.given_back
        try:
            opened = session.call(session.open_lane, request, deadline.remaining())
            break
        except ResourceExhaustedError as error:  # while lanes that were closed are still to be given back
            if error.reason != _LIMIT or not book.wait_for_place(given_back, deadline.remaining()):
                raise
    try:
        kernel = None if signals is None else _kernel(session, opened)
    except RegionError:
        Lane(core, session, plans, opened, book=book, timeout=seconds, kernel=None).close()
        raise
    return Lane(core, session, plans, opened, book=book, timeout=seconds, kernel=kernel)


def _signals(session: Session) -> selection_pb2.CudaIpcMemory:
    """Returns the session's device memory for kernels that wait.

    Raises:
        RegionError: There is none.
    """
    timeline = session.timeline
    if timeline is None or session.memory_device in (None, HOST):
        raise _no_kernel("the session's memory is not on a GPU of this process")
    from topkd._cuda_call import take_turns

    because = take_turns(session.memory_device)
    if because is not None:
        raise _no_kernel(because)
    return timeline.mapped().signals().message


def _kernel(session: Session, opened: Any) -> CallKernel:
    """Returns the kernel that a server has sent for a lane's calls.

    Raises:
        RegionError: It has sent none, or the driver refuses it.
    """
    if not opened.call_code or session.memory_device is None:
        raise _no_kernel(str(opened.call_reason) or "the server has no kernel for it")
    from topkd._cuda_call import CallKernel

    return CallKernel(bytes(opened.call_code), str(opened.call_kernel), session.memory_device)


def _no_kernel(because: str) -> RegionError:
    return RegionError(f"no kernel can wait for the lane's calls: {because}")


def _outputs(state: PlanState) -> SelectResult:
    """Returns a plan's outputs, which all lie in regions: the server opens lanes over no others."""
    return SelectResult(state.output.indices, state.output.values, state.kernel)


def _failure(code: int) -> TopkdError:
    if code == selection_pb2.LANE_FAILURE_NO_PLAN:
        return NotFoundError("the plan that a lane was called with is gone", reason="PLAN_NOT_FOUND")
    if code == selection_pb2.LANE_FAILURE_SESSION_ENDED:
        return SessionLostError("the session ended before a call of the lane")
    return KernelError("a call of the lane failed; the server's log says why")
