"""The client's side of the watchdog: one process for each client process, started when the first session needs it.

Whoever may wait for a session's words holds its `Guard`; when nobody does, the watchdog is told to forget the session.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from topkd import _watchdog, _words
from topkd._side import close_all
from topkd._watchdog import END, LANE, PACKET, READY, WATCH
from topkd.errors import RegionError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Guard", "forked"]

_START_S: Final = 20.0
_SEND_S: Final = 5.0
_LAYOUT: Final = _watchdog.Layout(
    line=_words.LINE // 8,
    first_lane=_words.FIRST_LANE,
    lanes=_words.MOST_LANES,
    end=_words.END,
    calls=_words.CALLS,
    poison=_words.POISON,
)


class _Process:
    """A running watchdog. Its socket is a mere descriptor: it stays open to this process's very end."""

    def __init__(self) -> None:
        """Starts it, and waits until it is ready.

        Raises:
            OSError: It cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = str(Path(_watchdog.__file__))
        command = [sys.executable, "-I", "-S", path, *map(str, _LAYOUT)]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            actions = [
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, null, 2),
            ]
            # A session of its own: a signal to the engine's group is not for it. It ends with the engine by itself.
            self.pid = os.posix_spawn(sys.executable, command, dict(os.environ), file_actions=actions, setsid=True)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(null)
        ours.settimeout(_START_S)
        with contextlib.suppress(OSError):
            if ours.recv(len(READY)) == READY:
                self.fd = ours.detach()
                return
        ours.close()
        _reap(self.pid)
        raise ConnectionResetError("it ended, or hung, at its start")

    def tell(self, kind: int, session: int, line: int = 0, seconds: float = 0.0, fds: Sequence[int] = ()) -> None:
        """Sends a packet. Raises OSError if the process is gone."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        borrowed = socket.socket(fileno=self.fd)
        try:
            borrowed.settimeout(_SEND_S)
            borrowed.sendmsg([PACKET.pack(kind, session, line, seconds)], rights, socket.MSG_NOSIGNAL)
        finally:
            borrowed.detach()

    def close(self) -> None:
        """Lets go of a process that has ended."""
        os.close(self.fd)
        _reap(self.pid)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


class _Kennel:
    """The process's watchdog and the guards that it works for. Reentrant: a finaliser may come at any point."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: _Process | None = None
        self._guards: dict[int, tuple[tuple[int, int], dict[int, float]]] = {}

    def add(self, number: int, descriptors: tuple[int, int]) -> None:
        """Watches a session; takes the descriptors of its page and its worker over."""
        with self._lock:
            self._guards[number] = (descriptors, {})
            try:
                self._tell(WATCH, number, fds=descriptors)
            except BaseException:
                self._guards.pop(number, None)  # whoever asked closes the descriptors
                raise

    def lane(self, number: int, line: int, seconds: float) -> None:
        """Watches a lane's time; 0 seconds: no more."""
        with self._lock:
            _, lanes = self._guards[number]
            if seconds:
                lanes[line] = seconds
            else:
                lanes.pop(line, None)
            self._tell(LANE, number, line, seconds)

    def check(self) -> None:
        """Starts another watchdog if this one is gone."""
        with self._lock:
            self._tell(LANE, 0)  # of no session: only tells whether somebody is there

    def end(self, number: int) -> None:
        """Forgets a session; never raises."""
        with self._lock:
            descriptors, _ = self._guards.pop(number, ((), {}))
            close_all(descriptors)
            if self._process is not None:
                with contextlib.suppress(OSError):
                    self._process.tell(END, number)

    def _tell(self, kind: int, number: int, line: int = 0, seconds: float = 0.0, fds: Sequence[int] = ()) -> None:
        """Sends a packet, if need be to a new process, which is told of every session first.

        Raises:
            RegionError: There is no watchdog, and none can be started.
        """
        if self._process is not None:
            try:
                self._process.tell(kind, number, line, seconds, fds)
            except OSError:
                self._process.close()
                self._process = None
            else:
                return
        process = None
        try:
            process = _Process()
            for session, (descriptors, lanes) in list(self._guards.items()):
                process.tell(WATCH, session, fds=descriptors)
                for one, time in lanes.items():
                    process.tell(LANE, session, one, time)
        except OSError as error:
            if process is not None:
                process.close()
            raise RegionError(
                f"the watchdog of lanes and ordered calls cannot be started with {sys.executable!r}: {error}"
            ) from None
        self._process = process

    def forked(self) -> None:
        """In a forked child: the process and the sessions are the parent's."""
        process, self._process = self._process, None
        if process is not None:
            os.close(process.fd)
        guards, self._guards = self._guards, {}
        for descriptors, _ in guards.values():
            close_all(descriptors)
        self._lock = threading.RLock()


_kennel: Final = _Kennel()
_numbers: Final = itertools.count(1)


def forked() -> None:
    """In a forked child: forgets the parent's watchdog."""
    _kennel.forked()


class Guard:
    """A session as the watchdog sees it. Held by whoever may wait for the session's words. Thread-safe."""

    def __init__(self, page: int, worker: int) -> None:
        """Watches nothing yet.

        Args:
            page: The session's page; the descriptor stays the caller's.
            worker: A pidfd of the worker; the guard's.
        """
        self._number = next(_numbers)
        self._descriptors: tuple[int, int] | None = (os.dup(page), worker)
        self._lock = threading.Lock()
        self._unused = weakref.finalize(self, close_all, self._descriptors)
        self._unused.atexit = False

    def start(self) -> None:
        """Watches from now on. Blocks for some tens of milliseconds at a process's first.

        Raises:
            RegionError: The watchdog cannot be started.
        """
        with self._lock:
            if self._descriptors is not None:
                _kennel.add(self._number, self._descriptors)
                self._descriptors = None
                self._unused.detach()
                weakref.finalize(self, _kennel.end, self._number).atexit = False

    def lane(self, line: int, seconds: float) -> None:
        """Gives the calls of a lane so much time each; raises as `start`."""
        self.start()
        _kennel.lane(self._number, line, seconds)

    def forget(self, line: int) -> None:
        """Gives a lane all the time there is."""
        with contextlib.suppress(RegionError):
            _kennel.lane(self._number, line, 0.0)

    def lost(self) -> None:
        """The session was lost: sees to it that the watchdog is there."""
        with self._lock:
            started = self._descriptors is None
        if started:
            with contextlib.suppress(RegionError):
                _kennel.check()
