"""Whose turn it is: one request of a worker runs at a time, the others wait in order of arrival, a bounded number."""

import threading
import time
from collections import deque
from collections.abc import Callable

from .errors import CallCancelledError, DeadlinePassedError, QueueFullError, WorkerLostError

__all__ = ["Account", "TurnQueue"]

RETRY_AFTER_MS = 20


class Account:
    """What one session has in the queue.

    Attributes:
        limit: requests that may wait or run.
        pending: requests that do.
        closed: the session is over; what waits is sent away.
    """

    __slots__ = ("closed", "limit", "pending")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pending = 0
        self.closed = False


class _Waiter:
    __slots__ = ("account", "event", "granted")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.event = threading.Event()
        self.granted = False


class TurnQueue:
    """A fair lock with bounded accounts, deadlines and cancellation."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._idle = threading.Condition(self._mutex)
        self._waiters: deque[_Waiter] = deque()
        self._busy = False
        self._since = 0.0
        self._fullest = 0.0

    @property
    def depth(self) -> int:
        """Requests that wait or run."""
        return len(self._waiters) + self._busy

    def held_for(self) -> float:
        """Returns for how many seconds whoever has the turn has had it; 0 if nobody has."""
        return time.monotonic() - self._since if self._busy else 0.0

    def fullest(self) -> float:
        """Returns how full the fullest account was since the last call: 0 .. 1 of its limit."""
        with self._mutex:
            fullest = self._fullest
            self._fullest = 0.0
            for waiter in self._waiters:
                self._fullest = max(self._fullest, waiter.account.pending / waiter.account.limit)
            return fullest

    def enter(
        self, account: Account, timeout: float | None = None, watch: Callable[[Callable[[], None]], bool] | None = None
    ) -> None:
        """Waits for the turn; `leave` must follow.

        Args:
            account: who asks.
            timeout: seconds to wait; None means for ever.
            watch: called only if there is a wait, with a function to call when the caller gives up; returns False if it
                already has.

        Raises:
            QueueFullError: the account's limit is reached.
            DeadlinePassedError: the turn did not come in time.
            CallCancelledError: the caller gave up.
            WorkerLostError: the session ended.
        """
        with self._mutex:
            if account.closed:
                raise WorkerLostError("the session has ended")
            if account.pending >= account.limit:
                text = f"{account.pending} requests of the session wait or run, as many as may (max_queue)"
                raise QueueFullError(text, retry_after_ms=RETRY_AFTER_MS)
            if self._admit(account):
                return
            waiter = _Waiter(account)
            self._waiters.append(waiter)
        signalled = False
        try:
            alive = watch is None or watch(waiter.event.set)
            signalled = not alive or waiter.event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            granted = self._stop_waiting(waiter)
        if granted:
            return
        if account.closed:
            raise WorkerLostError("the session ended while the request waited")
        if not signalled:
            raise DeadlinePassedError("the deadline passed while the request waited; it was not run")
        raise CallCancelledError("cancelled while the request waited; it was not run")

    def take(self, account: Account) -> bool:
        """Takes the turn if nobody has it and the account may: `leave` must follow then. Does not wait."""
        with self._mutex:
            if self._busy or account.closed:
                return False
            self._admit(account)
            return True

    def _admit(self, account: Account) -> bool:
        """Counts a request; says whether it has the turn, which nobody else has. The mutex is held."""
        account.pending += 1
        if account.pending > self._fullest * account.limit:
            self._fullest = account.pending / account.limit
        if self._busy:
            return False
        self._since = time.monotonic()
        self._busy = True
        return True

    def _stop_waiting(self, waiter: _Waiter) -> bool:
        """Says whether the waiter has the turn; if not, it leaves the line."""
        with self._mutex:
            if not waiter.granted:
                self._waiters.remove(waiter)
                self._settle(waiter.account)
            return waiter.granted

    def leave(self, account: Account) -> None:
        """Ends the turn and gives it to the next in line."""
        with self._mutex:
            self._settle(account)
            if self._waiters:
                waiter = self._waiters.popleft()
                waiter.granted = True
                self._since = time.monotonic()
                waiter.event.set()
            else:
                self._busy = False

    def close(self, account: Account) -> None:
        """Refuses the account from now on and sends away what waits of it; what runs goes on."""
        with self._mutex:
            account.closed = True
            for waiter in self._waiters:
                if waiter.account is account:
                    waiter.event.set()

    def wait_idle(self, account: Account, timeout: float | None = None) -> bool:
        """Waits until nothing of the account waits or runs; says whether that came in time."""
        with self._mutex:
            return self._idle.wait_for(lambda: account.pending == 0, timeout)

    def _settle(self, account: Account) -> None:
        account.pending -= 1
        if account.pending == 0:
            self._idle.notify_all()
