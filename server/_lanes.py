"""Lanes of one session: plans that are called by a word instead of a request.

A lane has a table of plans, which only the server can write, and two lines of the session's page. The caller, or its
stream, stores 0 to the done word and the number of a plan to the request word, and waits for the done word, which is 1
or more when the outputs are complete. A kernel of the caller's stores a ticket in device memory (`Signals`) instead of
the done word, and waits for its echo; where nobody echoes, the slow word tells it to go the other way. A client that
watches the time of its calls looks at how many were seen. The lines are those of slots past the ones of ordered calls
(`FIRST_LANE`). How a call gets from the request word to the device is a `Dispatch`, chosen when the lane is opened: the
first of a list that takes it. The last takes every lane (`topkd.server._lanes_polled`).

The number is data: what names no plan of the table, or one that was released, fails the call, and nothing runs.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from topkd._watchdog import LATE
from topkd._words import FIRST_LANE, WORKER_BELL, Failure, Words
from topkd.v1 import selection_pb2

from ._execute import Batch
from ._slots import Slot
from .errors import DeadlinePassedError, FieldError, KernelFailedError, LaneLimitError, WorkerLostError
from .metrics import ServerMetrics

__all__ = ["Dispatch", "Lane", "Lanes", "Opened"]

_LET_GO_S = (0.001, 0.1)
"""Between looks at calls of closed lanes: while some come, and later."""


class Lane:
    """A lane: its slot, its words and its table.

    Attributes:
        number: of the session's lanes.
        slot: runs its plans.
        words: the session's.
        plans: ids, in the table's order.
        running: a call was taken and its slot may not have it yet.
        signals: where the client's tickets and echoes are; 0: its calls have none.
    """

    def __init__(
        self,
        number: int,
        slot: Slot,
        words: Words,
        plans: Sequence[int],
        find: Callable[[int], Batch | None],
        signals: int = 0,
    ) -> None:
        self.number = number
        self.slot = slot
        self.words = words
        self.plans = tuple(plans)
        self.running = False
        self.signals = signals
        self._find = find
        self._failures = words.failure(self.line).total & 0x7FFF_FFFF  # the client can write there
        self._calls = 0
        words.set_calls(self.line, 0)

    @property
    def line(self) -> int:
        """The slot whose lines are the lane's words."""
        return FIRST_LANE + self.number

    def plan(self, number: int) -> Batch | None:
        """Returns the plan that a request word names, None if there is none or it is gone; in the turn."""
        return self._find(self.plans[number - 1]) if 1 <= number <= len(self.plans) else None

    def count(self, calls: int = 1) -> None:
        """Tells that calls came through: where none is told of for as long as a call may take, the client gives up."""
        self._calls += calls
        self.words.set_calls(self.line, self._calls)

    def echo(self, echoed: bool) -> None:
        """Tells kernels that wait whether an answer is echoed; they look at that now and then."""
        self.words.set_slow(self.line, int(not echoed))

    def note(self, code: int) -> None:
        """Tells of a failure; the done word must follow."""
        self._failures += 1
        self.words.set_failure(self.line, Failure(0, 0, code, self._failures))

    def busy(self) -> bool:
        """Says whether a call that was taken is not over."""
        try:
            return self.running or bool(self.slot.unfinished())
        except KernelFailedError:
            return False  # a device that has failed touches nothing


class Dispatch(Protocol):
    """A way for calls of lanes from the request word to the device. Thread-safe.

    It counts a lane's calls (`Lane.count`), within 20 ms or so.

    Attributes:
        mode: its name in metrics.
        code: the same in replies.
        reason: why a lane has it where nothing before it in the list said why not.
    """

    mode: str
    code: selection_pb2.LaneMode
    reason: str

    def take(self, lane: Lane) -> str | None:
        """Serves a lane from now on; the caller has the turn. If it cannot, changes nothing and says why."""

    def drop(self, lane: Lane) -> None:
        """Takes no more calls of a lane that it serves. One that was taken may still run: `Lane.busy`."""

    def held(self) -> AbstractContextManager[None]:
        """Keeps what it has in the device's streams ahead of calls from holding up others; calls wait meanwhile."""

    def close(self) -> None:
        """Drops every lane and ends. Idempotent."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A lane that was opened: its number, how it is served, and why so."""

    number: int
    mode: selection_pb2.LaneMode
    reason: str


class Lanes:
    """The lanes of a session. Thread-safe."""

    def __init__(
        self,
        words: Words,
        slots: Sequence[Slot],
        find: Callable[[int], Batch | None],
        dispatches: Sequence[Dispatch],
        metrics: ServerMetrics,
    ) -> None:
        """Opens none yet.

        Args:
            words: the session's.
            slots: of the lines from `FIRST_LANE` on; as many lanes may be open.
            find: returns a plan's batch by its id, None if the plan is gone; called in the turn.
            dispatches: ways to serve lanes, the best first; the last takes every lane.
            metrics: where open lanes are counted.
        """
        self._words = words
        self._slots = slots
        self._find = find
        self._dispatches = dispatches
        self._metrics = metrics
        self._lock = threading.Lock()
        self._lanes: dict[int, tuple[Lane, Dispatch]] = {}
        self._ending: dict[int, Lane] = {}  # closed, and their last call may still run
        self._closed = False
        self._opened: dict[int, Lane] = {}  # the last that each number was of
        self._over = threading.Event()
        self._letting_go: threading.Thread | None = None

    def open(self, plans: Sequence[int], signals: int = 0) -> Opened:
        """Opens a lane over plans; the caller has the turn.

        Args:
            plans: ids.
            signals: address of the client's device memory for tickets and echoes, 0 if it has none.

        Raises:
            LaneLimitError: as many are open as may be.
            WorkerLostError: the session has ended.
        """
        with self._lock:
            if self._closed:
                raise WorkerLostError("the session has ended")
            self._ending = {number: lane for number, lane in self._ending.items() if lane.busy()}
            taken = {*self._lanes, *self._ending}
            number = next((number for number in range(len(self._slots)) if number not in taken), None)
            if number is None:
                raise LaneLimitError(f"the session has {len(taken)} lanes, as many as may be (max_lanes)")
            lane = Lane(number, self._slots[number], self._words, plans, self._find, signals)
            lane.echo(False)
            self._words.set_ready(lane.line, 0)
            self._words.set_done(lane.line, 1)
            dispatch, refusals = self._dispatch(lane)
            self._lanes[number] = lane, dispatch
            self._opened[number] = lane
            self._metrics.lanes.labels(dispatch.mode).inc()
        return Opened(number, dispatch.code, "; ".join(refusals) or dispatch.reason)

    def _dispatch(self, lane: Lane) -> tuple[Dispatch, list[str]]:
        refusals: list[str] = []
        for dispatch in self._dispatches:
            refusal = dispatch.take(lane)
            if refusal is None:
                return dispatch, refusals
            refusals.append(refusal)
        raise LaneLimitError("; ".join(refusals))

    def close(self, number: int, timeout: float) -> None:
        """Closes a lane, once nothing of it runs any more; what was asked for and not taken fails.

        Raises:
            FieldError: there is no such lane.
            DeadlinePassedError: its last call does not end in time; the lane takes no calls any more all the same.
        """
        with self._lock:
            lane, dispatch = self._lanes.get(number, (None, None))
            if lane is None or dispatch is None:
                raise FieldError(f"lane is {number}; the session has no such lane", field="lane")
            dispatch.drop(lane)
            self._ending[number] = lane
            del self._lanes[number]
            self._metrics.lanes.labels(dispatch.mode).dec()
            if self._words.end(lane.line) == LATE:
                self._metrics.lane_released.labels("late").inc()
            if self._letting_go is None:
                self._letting_go = threading.Thread(target=self._let_go, name="topkd-let-go", daemon=True)
                self._letting_go.start()
        if not _settled([lane], timeout):
            raise DeadlinePassedError("the lane's last call is not over")

    def _let_go(self) -> None:
        """Fails calls of lanes that are closed, as a graph that was captured before may make: nobody else answers."""
        pause = _LET_GO_S[1]
        while not self._over.wait(pause):
            with self._lock:
                self._ending = {number: lane for number, lane in self._ending.items() if lane.busy()}
                taken = {*self._lanes, *self._ending}
                over = [lane for number, lane in self._opened.items() if number not in taken]
                waited = [lane for lane in over if not self._closed and not self._words.done(lane.line)]
                for lane in waited:
                    lane.note(selection_pb2.LANE_FAILURE_NO_PLAN)
                    self._words.set_done(lane.line, 1)
            if waited:
                self._words.ring(WORKER_BELL)
                self._metrics.lane_released.labels("closed").inc(len(waited))
            pause = _LET_GO_S[not waited]

    def settle(self, timeout: float) -> bool:
        """Waits until no call that was taken runs any more; says whether that came."""
        with self._lock:
            lanes = [lane for lane, _ in self._lanes.values()]
            lanes += self._ending.values()
        return _settled(lanes, timeout)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets the caller do what the driver does not do while a stream of the process waits: free, unmap, load code.

        Raises:
            KernelFailedError: what lanes have in the device's streams does not end.
        """
        with ExitStack() as stack:
            for dispatch in self._dispatches:
                stack.enter_context(dispatch.held())
            yield

    def flush(self) -> None:
        """Notes the figures of calls that are over."""
        for slot in self._slots:
            try:
                slot.unfinished()
            except KernelFailedError:
                return

    def close_all(self, timeout: float) -> None:
        """Ends every lane: whoever waits for one finds that it failed. Idempotent."""
        with self._lock:
            self._closed = True
            self._over.set()
            served, self._lanes = list(self._lanes.values()), {}
        for dispatch in self._dispatches:
            dispatch.close()
        for _, dispatch in served:
            self._metrics.lanes.labels(dispatch.mode).dec()
        _settled([*(lane for lane, _ in served), *self._ending.values()], timeout)
        for lane, _ in served:
            if not self._words.done(lane.line):
                self._metrics.lane_released.labels("session_ended").inc()
            lane.note(selection_pb2.LANE_FAILURE_SESSION_ENDED)
            self._words.set_done(lane.line, 1)
        self._words.ring(WORKER_BELL)


def _settled(lanes: Sequence[Lane], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while any(lane.busy() for lane in lanes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)
    return True
