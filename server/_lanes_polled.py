"""Polled lanes: a thread of the worker watches the request words, takes what is there and runs it in its turn.

It needs nothing of the device, so that it serves every lane. The backend's slots run plans and see to the done words.
"""

import threading
import time
from contextlib import AbstractContextManager, nullcontext

from topkd._words import CLIENT_BELL, WORKER_BELL, Words
from topkd.v1 import selection_pb2

from ._lanes import Lane
from ._logging import Logger
from ._queue import Account, TurnQueue
from ._slots import OrderedCall
from .errors import DeadlinePassedError, KernelFailedError
from .metrics import ServerMetrics

__all__ = ["Polled"]

_SPIN_S = 500e-6
"""How long after a call the thread looks for the next one without a pause, where nobody rings."""
_PAUSES_S = ((0.02, 50e-6), (1.0, 500e-6))
"""Pauses between looks, where nobody rings, by the seconds since the last call; later `_IDLE_S`."""
_IDLE_S = 5e-3
_RUNG_S = 0.02
"""Between looks where stores are rung: the bound on what a store without a ring costs."""
_NONE_OPEN_S = 0.5
_TURN_S = 0.1


class Polled:
    """The polled lanes of a session. Thread-safe."""

    mode = "polled"
    code = selection_pb2.LANE_MODE_POLLED
    reason = "lanes of this server are polled"

    def __init__(self, words: Words, queue: TurnQueue, metrics: ServerMetrics, log: Logger) -> None:
        """Starts no thread yet: the first lane does.

        Args:
            words: the session's.
            queue: the worker's turn.
            metrics: where calls are counted.
            log: where failures go.
        """
        self._words = words
        self._queue = queue
        self._log = log
        self._account = Account(1 << 30)
        self._lock = threading.Lock()
        self._lanes: tuple[Lane, ...] = ()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._finished = metrics.lane_calls.labels(self.mode, "finished")
        self._failed = metrics.lane_calls.labels(self.mode, "failed")

    def take(self, lane: Lane) -> str | None:
        """Watches a lane from now on."""
        with self._lock:
            self._lanes = (*self._lanes, lane)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="topkd-lanes", daemon=True)
                self._thread.start()
        self._words.ring(CLIENT_BELL)
        return None

    def drop(self, lane: Lane) -> None:
        """Watches a lane no more."""
        with self._lock:
            self._lanes = tuple(one for one in self._lanes if one is not lane)

    def held(self) -> AbstractContextManager[None]:
        """Nothing is ahead of calls."""
        return nullcontext()

    def close(self) -> None:
        """Watches nothing any more."""
        self._closed = True
        with self._lock:
            self._lanes = ()
        self._words.ring(CLIENT_BELL)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed:
            seen = self._words.bell(CLIENT_BELL)
            lanes = self._lanes
            for lane in lanes:
                if self._words.ready(lane.line):
                    self._take_call(lane)
                    last = time.monotonic()
            self._pause(seen, time.monotonic() - last, lanes)

    def _pause(self, seen: int, since: float, lanes: tuple[Lane, ...]) -> None:
        if not lanes:
            self._words.wait(CLIENT_BELL, seen, _NONE_OPEN_S)
        elif lanes[0].slot.rung:
            self._words.wait(CLIENT_BELL, seen, _RUNG_S)
        elif since < _SPIN_S:
            time.sleep(0)  # gives other threads the interpreter
        else:
            pause = next((pause for until, pause in _PAUSES_S if since < until), _IDLE_S)
            self._words.wait(CLIENT_BELL, seen, pause)

    def _take_call(self, lane: Lane) -> None:
        with self._lock:
            if lane not in self._lanes:
                return
            lane.running = True  # from here on, who dropped the lane waits for it
        try:
            lane.count()
            number = self._words.ready(lane.line)
            self._words.set_ready(lane.line, 0)
            self._serve(lane, number)
        except Exception as error:  # noqa: BLE001  # the thread must outlive a defect: streams wait for it
            self._log.error("lane_stumbled", exc_info=error)
        finally:
            lane.running = False

    def _serve(self, lane: Lane, number: int) -> None:
        while True:
            try:
                self._queue.enter(self._account, _TURN_S)
                break
            except DeadlinePassedError:
                if self._closed:
                    return
        try:
            batch = lane.plan(number)
            if batch is None:
                self._fail(lane, selection_pb2.LANE_FAILURE_NO_PLAN)
                return
            try:
                lane.slot.run(OrderedCall(0, 1, 0.0, batch))
            except Exception as error:  # noqa: BLE001  # whatever it is, the caller is told
                self._log.error("lane_call_failed", exc_info=error)
                self._fail(lane, selection_pb2.LANE_FAILURE_KERNEL_FAILED)
            else:
                self._finished.inc()
        finally:
            self._queue.leave(self._account)

    def _fail(self, lane: Lane, code: int) -> None:
        self._failed.inc()
        lane.note(code)
        try:
            lane.slot.skip(1)
        except KernelFailedError:  # the device has failed: nothing is before it any more
            self._words.set_done(lane.line, 1)
            self._words.ring(WORKER_BELL)
