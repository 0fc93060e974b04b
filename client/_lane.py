"""Lanes: plans that are called by a word in shared memory, without a request.

A call stores the plan's number to the lane's request word and waits for its done word; on a CUDA stream both are
operations of the stream, one batch of them, which a CUDA graph captures like a kernel. `LaneBook` is a session's lanes,
and sees to it that nobody waits for a session that is gone.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from topkd._arrays import HOST
from topkd._words import CLIENT_BELL, FIRST_LANE, WORKER_BELL, Words
from topkd.errors import (
    ArgumentValueError,
    ClientClosedError,
    DeadlineExceededError,
    KernelError,
    NotFoundError,
    RegionError,
    SessionLostError,
    TopkdError,
)
from topkd.v1 import selection_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from topkd._client import Plan
    from topkd._core import Core
    from topkd._session import Session
    from topkd._types import SelectResult

__all__ = ["Lane", "LaneBook", "open_lane"]

_RELEASE_S: Final = 1e-3
"""Between looks at the words of lanes whose session is gone: how long each of their waits lasts."""

_SPIN_S: Final = 200e-6
"""How long a caller on the host looks for its answer without a pause."""

_MODES: Final = {selection_pb2.LANE_MODE_POLLED: "polled", selection_pb2.LANE_MODE_ARMED: "armed"}


class LaneBook:
    """The lanes of a session.

    Attributes:
        words: The session's.
    """

    def __init__(self, words: Words) -> None:
        self.words = words
        self.lost: TopkdError | None = None
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, lane: Lane) -> None:
        """Takes a lane in."""
        with self._lock:
            self._lanes.add(lane)

    def lose(self, because: str) -> None:
        """Breaks every lane, and releases whoever waits for one, now and later, as long as the lane is there."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = SessionLostError(f"the lane is broken: {because}")
            if not self._lanes:
                return
        threading.Thread(
            target=_release, args=(self.words, self._lanes), name="topkd-lane-release", daemon=True
        ).start()


def _release(words: Words, lanes: weakref.WeakSet[Lane]) -> None:
    """Stores the done words of broken lanes: a graph may be replayed at any time, each of its calls waits anew."""
    while True:
        lines = [lane.line for lane in list(lanes) if not lane.closed]
        if not lines:
            return
        for line in lines:
            if not words.done(line):
                words.set_done(line, 1)
        time.sleep(_RELEASE_S)


class Lane:
    """Plans that are called without a request. Made by `Plan.lane` and `Client.lane`; usable as a context manager.

    One thread, or one stream, calls it at a time. Every call writes its plan's outputs. A lane ends with its session:
    it is broken then, says so, and must be opened again.

    Attributes:
        mode: "polled": a thread of the worker looks for calls and launches them.
        reason: Why it is that.
    """

    def __init__(self, core: Core, session: Session, plans: Sequence[Plan], opened: Any, book: LaneBook) -> None:
        self.mode = _MODES.get(opened.mode, "unknown")
        self.reason = str(opened.reason)
        self.line = FIRST_LANE + opened.lane
        self.closed = False
        self._core = core
        self._session = session
        self._plans = tuple(plans)
        self._number = opened.lane
        self._book = book
        self._words = book.words
        self._broken: TopkdError | None = None
        self._seen = self._words.failure(self.line).total
        self._stream: Any = None
        self._batches: dict[int, Any] = {}
        self._lock = threading.Lock()
        book.add(self)

    @property
    def broken(self) -> bool:
        """Whether it takes no calls any more."""
        return self._broken is not None or self._book.lost is not None

    def _check_usable(self) -> None:
        if self.closed:
            raise ClientClosedError("the lane is closed")
        error = self._broken or self._book.lost
        if error is not None:
            raise error

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
            self._stream = stream
            batch = self._batches.get(place)
            if batch is None:
                timeline = self._session.timeline
                if timeline is None:
                    raise RegionError("the session's memory is not on a GPU of this process")
                batch = self._batches[place] = timeline.mapped().batch(self.line, place + 1)
            batch(stream.cuda_stream)
        return state.output.result(selection_pb2.SelectionResult(kernel=state.kernel), 0.0)

    def call_host(self, plan: Plan | None = None, *, timeout: float | None = None) -> SelectResult:
        """Calls a plan and waits on this thread until its outputs are complete. Inputs must be complete already.

        Args:
            plan: One of the lane's plans; None for its first.
            timeout: Seconds; None for the client's. A lane past it is broken.

        Raises:
            DeadlineExceededError: The time-out passed.
            TopkdError: The call failed.
        """
        seconds = self._core.options.timeout if timeout is None else timeout
        place = self._index(plan)
        state = self._plans[place]._state
        with self._lock:
            self._check_usable()
            if self._stream is not None:
                self._stream.synchronize()
            self._words.set_ready(self.line, place + 1)
            self._words.ring(CLIENT_BELL)
            if not self._wait(seconds):
                text = f"the lane has not answered within {seconds:g} s; it is broken and must be opened again"
                self._broken = DeadlineExceededError(text)
                raise self._broken
            self._words.set_done(self.line, 0)
        self.check()
        return state.output.result(selection_pb2.SelectionResult(kernel=state.kernel), 0.0)

    def _wait(self, timeout: float) -> bool:
        """Waits for the done word; says whether it came in time."""
        started = time.monotonic()
        while time.monotonic() - started < _SPIN_S:
            if self._words.done(self.line):
                return True
        while True:
            seen = self._words.bell(WORKER_BELL)
            if self._words.done(self.line):
                return True
            left = started + timeout - time.monotonic()
            if left <= 0:
                return False
            self._words.wait(WORKER_BELL, seen, min(left, 0.02 if self._session.memory_device == HOST else 100e-6))

    def check(self) -> None:
        """Raises if a call has failed since the last look; after a loss, always. Does not wait: synchronise first.

        Raises:
            NotFoundError: The call's plan was released.
            KernelError: The kernel failed.
            SessionLostError: The session ended; the outputs of its calls since are unspecified.
        """
        if self._book.lost is not None:
            raise self._book.lost
        found = self._words.failure(self.line)
        if found.total != self._seen:
            self._seen = found.total
            raise _error(found.code)

    def close(self) -> None:
        """Gives the lane up, in the background. Graphs with calls of it must not be replayed any more. Idempotent."""
        if not self.closed:
            self.closed = True
            request = selection_pb2.CloseLaneRequest(lane=self._number)
            self._core.reaper.close_lane(self._session, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self.close()

    def __repr__(self) -> str:
        return f"<topkd.Lane: {'closed' if self.closed else 'broken' if self.broken else self.mode}>"


def open_lane(core: Core, plans: Sequence[Plan], session: Session) -> Lane:
    """Opens a lane over plans. Blocks.

    Raises:
        RegionError: The session has no words (TCP), or the server no lanes.
        ResourceExhaustedError: As many lanes as may be are open.
    """
    if not plans:
        raise ArgumentValueError("a lane needs a plan", argument="plans")
    book = session.lanes
    if book is None:
        raise RegionError("no lanes: the session shares no memory with the server, or the server has none")
    request = selection_pb2.OpenLaneRequest(plan_ids=[plan._state.id_in(session) for plan in plans])
    opened = session.call(session.open_lane, request, core.options.timeout)
    return Lane(core, session, plans, opened, book)


def _error(code: int) -> TopkdError:
    if code == selection_pb2.LANE_FAILURE_NO_PLAN:
        return NotFoundError("the plan that a lane was called with is gone", reason="PLAN_NOT_FOUND")
    if code == selection_pb2.LANE_FAILURE_SESSION_ENDED:
        return SessionLostError("the session ended before a call of the lane")
    return KernelError("a call of the lane failed; the server's log says why")
