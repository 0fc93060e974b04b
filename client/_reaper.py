"""Releases of regions and plans in the background: finalisers only queue them.

The thread holds no reference to its client while it waits, so that a client which was never closed can be collected.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from topkd._lane_book import come
from topkd._words import FIRST_LANE
from topkd.errors import DeadlineExceededError, TopkdError
from topkd.v1 import selection_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from topkd._lane_book import LaneBook
    from topkd._pool import Pool
    from topkd._regions import Record
    from topkd._session import Session

__all__ = ["Reaper"]

_log = logging.getLogger("topkd")
_LOOK_S: Final = 0.005
_HALTED_S: Final = 86400.0
"""That a worker may be halted: a lane that it is not told to close has its place until the session ends."""


class Reaper:
    """A queue and the thread that works it off. Putting something in is safe in a finaliser."""

    def __init__(self, pool: Pool) -> None:
        self._pool = weakref.ref(pool)
        self._queue: queue.SimpleQueue[Callable[[Pool], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._stopped = False

    def start(self) -> None:
        """Starts the thread unless it runs."""
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=_work, args=(self._queue, self._pool), name="topkd-reaper", daemon=True).start()

    def retire(self, record: Record) -> None:
        """Releases a record's region, then lets go of its memory."""
        if not self._stopped:
            self._queue.put(lambda pool: pool.retire(record))

    def let_go(self, record: Record, done: threading.Event) -> None:
        """Closes one hold of a registered allocation; sets `done` once the server cannot touch it on its account."""

        def work(pool: Pool) -> None:
            try:
                pool.let_go(record)
            finally:
                done.set()

        if self._stopped:
            done.set()
        else:
            self._queue.put(work)

    def release_plan(self, session: Session, request: Any) -> None:
        """Releases a plan of a session."""

        def work(_: Pool) -> None:
            if not session.lost:
                session.call(session.release_plan, request, 10.0)

        if not self._stopped:
            self._queue.put(work)

    def close_lane(
        self,
        session: Session,
        line: int,
        book: LaneBook,
        *,
        busy: Callable[[], bool],
        events: Sequence[Any],
        held: Any,
    ) -> None:
        """Closes a lane of a session once no thread waits for a call and its stream has come to some events.

        Args:
            session: The lane's.
            line: The lane's.
            book: Told when nothing waits for the lane any more, and when it is closed.
            busy: Says whether a thread calls the lane.
            events: Of torch.
            held: What calls of the lane write to: let go when the server has answered.
        """

        def work(pool: Pool) -> None:
            if busy() or (events and not come(events)):
                time.sleep(_LOOK_S)
                self._queue.put(work)
                return
            book.guard.forget(line)
            try:
                if session.lost:
                    pool.keep_for_a_while(held)
                else:
                    request = selection_pb2.CloseLaneRequest(lane=line - FIRST_LANE)
                    session.call(session.close_lane, request, _HALTED_S)
            except DeadlineExceededError:  # the server's own: the lane is closed, and its last call still runs
                session.unreleased.append(held)
            finally:
                book.end_close()

        if self._stopped:
            book.end_close()
        else:
            self._queue.put(work)

    def run(self, function: Callable[[], None]) -> None:
        """Runs something in the background."""
        self._queue.put(lambda _: function())

    def forked(self) -> None:
        """In a forked child: takes nothing more; the thread is the parent's."""
        self._stopped = True

    def stop(self) -> None:
        """Ends the thread; what comes later went with the session."""
        self._stopped = True
        self._queue.put(None)


def _work(tasks: queue.SimpleQueue[Callable[[Pool], None] | None], owner: weakref.ref[Pool]) -> None:
    while True:
        task = tasks.get()
        pool = owner()
        if task is None or pool is None:
            return
        try:
            task(pool)
        except TopkdError:
            pass  # refused, or the session is gone: its end releases the rest
        except Exception:  # noqa: BLE001 - the thread must outlive a defect
            _log.exception("a release in the background failed")
        del pool, task
