"""A client's way to a server and back to it: attaching, the end, and forks.

Everything here blocks; the asynchronous client runs it on threads. Locks, in the order they may nest: `_attach_lock`
(one attach at a time), `memory_lock` (records, plans and the index of the session).
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

from topkd import _guard, _session
from topkd._options import Deadline, Options, backoff, directory_of_device, target_directory
from topkd._pool import Pool
from topkd.errors import ClientClosedError, ForkError, SessionLostError, UnavailableError
from topkd.v1 import control_pb2

if TYPE_CHECKING:
    from topkd._session import Session
    from topkd.errors import TopkdError

__all__ = ["Core", "target_directory"]

PROTOCOL_REVISION: Final = 5

_cores: weakref.WeakSet[Core] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    _guard.forked()
    for core in list(_cores):
        core.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Core(Pool):
    """State of a client: what outlives sessions, and the session."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._attach_lock = threading.Lock()
        self._unusable: type[ClientClosedError | ForkError] | None = None
        self._was_attached = False
        self._failures = 0
        self._not_before = 0.0
        self._ordered_errors: deque[TopkdError] = deque(maxlen=16)
        _cores.add(self)

    def live(self) -> Session | None:
        """Returns the session if it is not known to be lost.

        Raises:
            ClientClosedError: The client is closed.
            ForkError: This is a forked child of the process that made it.
        """
        session = self.session
        if session is not None and not session.lost:
            return session
        self.check_usable()
        return None

    def raise_ordered(self) -> None:
        """Raises the error of a call that was ordered on a stream and failed after it had been accepted, once."""
        session = self.session
        timeline = None if session is None else session.timeline
        error = None if timeline is None else timeline.failure()
        if session is not None and isinstance(error, SessionLostError):
            session.lose()  # the watchdog knew it first
        if error is None and self._ordered_errors:
            error = self._ordered_errors.popleft()
        if error is not None:
            raise error

    def check_usable(self) -> None:
        """Raises if the client is closed or was made before a fork."""
        if self._unusable is ForkError:
            raise ForkError("this client was made before a fork: make a client of its own in the child process")
        if self._unusable is not None:
            raise ClientClosedError("the client is closed")

    def attach(self, deadline: Deadline) -> Session:
        """Attaches unless that has been done, trying again within the attach time-out and the deadline.

        Raises:
            UnavailableError: No server took the client in time.
            TopkdError: A server refused it.
        """
        if self.options.local and self._was_attached and self.live() is None:
            self._attach_in_background()
            raise UnavailableError("the session was lost, and the next one is being sought in the background")
        if not self._attach_lock.acquire(timeout=deadline.remaining()):
            raise UnavailableError("another thread is still attaching at this call's deadline")
        try:
            return self.live() or self._attach_within(deadline)
        finally:
            self._attach_lock.release()

    def _attach_in_background(self) -> None:
        """Computing locally waits for no server: the reaper's thread seeks one, once in a while."""
        if time.monotonic() >= self._not_before:
            self._put_off()
            self.reaper.run(self.attach_now)

    def attach_now(self) -> None:
        """Attaches unless that has been done or is under way; one attempt."""
        if self._attach_lock.acquire(blocking=False):
            try:
                if self.live() is None:
                    self._attach_once(self.options.attach_timeout)
                    self._failures = 0
            finally:
                self._attach_lock.release()

    def _attach_within(self, deadline: Deadline) -> Session:
        bound = Deadline(min(self.options.attach_timeout, deadline.remaining()))
        attempt = 0
        if self.options.local and time.monotonic() < self._not_before:
            raise UnavailableError("no server was there a moment ago; the next attempt is still to come")
        while True:
            try:
                session = self._attach_once(max(bound.remaining(), 0.1))
            except UnavailableError as error:
                delay = error.retry_after or backoff(attempt)
                if self.options.local:
                    self._put_off()
                    raise
                if delay >= bound.remaining():
                    raise UnavailableError(f"{error} (tried {attempt + 1} times)", reason=error.reason) from None
                time.sleep(delay)
                attempt += 1
                self.check_usable()
            else:
                self._failures = 0
                return session

    def _put_off(self) -> None:
        """Computing locally must not wait for a server in every call."""
        self._not_before = time.monotonic() + backoff(self._failures, 0.1, 5.0)
        self._failures += 1

    def _attach_once(self, timeout: float) -> Session:
        request = control_pb2.AttachRequest(
            client_name=self.options.name,
            client_version=importlib.metadata.version("topkd"),
            protocol_revision=PROTOCOL_REVISION,
            pid=os.getpid(),
            device_uuid=self.options.device_uuid,
            reattach=self._was_attached,
        )
        session = self._open(request, timeout)
        session.order_calls(self.options, self._ordered_errors.append)
        try:
            with self.memory_lock:
                self.restore(session)
                self.check_usable()
                self.session = session
                self._was_attached = True
                self.reaper.start()
        except BaseException:
            session.close()
            raise
        return session

    def _open(self, request: control_pb2.AttachRequest, timeout: float) -> Session:
        directory = target_directory(self.options.target)
        if directory is not None:
            folder = directory_of_device(directory, self.options.device_uuid)
            return _session.open_local(folder, request, timeout)
        target = str(self.options.target)
        channel = _session.open_tcp_channel(target, self.options.tls)
        return _session.open_remote(channel, request, target, self.options.token, timeout)

    def close(self) -> None:
        """Ends the session. Arrays over its memory stay valid. Idempotent."""
        if self._unusable is None:
            self._unusable = ClientClosedError
            self.reaper.stop()
        session, self.session = self.session, None
        if session is not None and self._unusable is not ForkError:
            session.close()
        self.forget()

    def forked(self) -> None:
        """In a forked child: forgets the session without ending the parent's."""
        self._unusable = ForkError
        self.reaper.forked()
        self.memory_lock = threading.RLock()  # another thread of the parent may have held it
        session, self.session = self.session, None
        if session is not None:
            session.abandon()
