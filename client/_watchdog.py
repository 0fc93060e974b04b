"""The watchdog of a client process: a process that lets waits go when the other side of a session is gone.

It is a process because the client's own threads may wait for the interpreter, or for the driver behind a stream that
waits, for as long as the engine likes. It is run by its path and imports nothing but a little of the standard library.

Its parent sends packets over its standard input: a kind, a session's number, a lane's line, seconds (`PACKET`).

    WATCH   with the session's page and a pidfd of its worker: once that is gone, every wait for the words is let go
    LANE    the lane of this line is late when none of its calls has come through for so many seconds; 0: it has closed
    END     nobody waits for this session any more

How a wait is let go: a slot's done word becomes `poison`, a lane's becomes 1 whenever it is 0, for a graph may be
replayed at any time and waits anew in each of its calls; a call by a kernel looks at the end word itself. Before that
it says why, in the end word: of a slot the done value it found, plus 1; of a lane LATE or LOST. The pidfd tells of the
worker's end when the kernel has taken everything of it down, its CUDA context too: nothing that it left behind writes
after that.

It ends with its parent.
"""

import array
import contextlib
import mmap
import os
import select
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["END", "LANE", "LATE", "LOST", "PACKET", "READY", "WATCH", "Layout", "Watch"]

PACKET = struct.Struct("=BQId")
WATCH, LANE, END = 1, 2, 3
READY = b"ready"
LATE, LOST = 1, 2
"""What a lane's end word says."""

_IDLE_S = 0.5
"""Between looks at whether the parent is there, beside the end of the socket, which a forked child may keep open."""
_LETTING_GO_S = (0.001, 0.02)
"""Between looks at lanes that are let go: while somebody waits for them, and later."""
_LOOKS = 20
"""Looks within a lane's time."""
_LOOK_S = (0.002, 0.1)
_DESCRIPTORS = 2


class Layout(NamedTuple):
    """Where the words of a page are, in cells of 8 bytes: see `topkd._words`."""

    line: int
    first_lane: int
    lanes: int
    end: int
    calls: int
    poison: int


class _Lane:
    """A lane that can be late: since when no call of it has ended, as far as is known."""

    def __init__(self, seconds: float, now: float) -> None:
        self.seconds = seconds
        self.since = now
        self.calls = -1


class Watch:
    """One session's page and what is known of its worker."""

    def __init__(self, page: int, worker: int, layout: Layout) -> None:
        """Maps the page; both descriptors are the object's."""
        self.worker = worker
        self.dead = False
        self._layout = layout
        self._mapping = mmap.mmap(page, 0)
        self._cells = memoryview(self._mapping).cast("Q")
        os.close(page)
        self._lanes: dict[int, _Lane] = {}
        self._pause = _LETTING_GO_S[0]

    def lane(self, line: int, seconds: float) -> None:
        """Watches a lane's time, or with 0 seconds no more."""
        if seconds:
            self._lanes[line] = _Lane(seconds, time.monotonic())
        else:
            self._lanes.pop(line, None)

    def look(self) -> float:
        """Lets go what is to be let go; returns the seconds until the next look."""
        now = time.monotonic()
        if not self.dead:
            pauses = [self._look_at(line, lane, now) for line, lane in self._lanes.items()]
            return min(pauses, default=_IDLE_S)
        for slot in range(self._layout.first_lane):
            self._poison(slot)
        first = self._layout.first_lane
        return self._next(sum(self._let_go(line, LOST) for line in range(first, first + self._layout.lanes)) > 0)

    def _look_at(self, line: int, lane: _Lane, now: float) -> float:
        layout, ready, done = self._layout, self._ready(line), self._done(line)
        if self._cells[ready + layout.end]:
            return self._next(self._let_go(line, LATE))
        calls = self._cells[done + layout.calls]
        # A call by a kernel leaves the done word as it is; the request's upper half is the worker's.
        idle = self._cells[done] and not self._cells[ready] & 0xFFFFFFFF
        if idle or calls != lane.calls:
            lane.since, lane.calls = now, calls
        elif now - lane.since > lane.seconds:
            return self._next(self._let_go(line, LATE))
        return min(max(lane.seconds / _LOOKS, _LOOK_S[0]), _LOOK_S[1])

    def _next(self, waited: bool) -> float:
        self._pause = _LETTING_GO_S[0] if waited else min(self._pause * 1.5, _LETTING_GO_S[1])
        return self._pause

    def _ready(self, slot: int) -> int:
        return 2 * slot * self._layout.line

    def _done(self, slot: int) -> int:
        return (2 * slot + 1) * self._layout.line

    def _poison(self, slot: int) -> None:
        done, end = self._cells[self._done(slot)], self._ready(slot) + self._layout.end
        if done < self._layout.poison:
            self._cells[end] = self._cells[end] or done + 1
            self._cells[self._done(slot)] = self._layout.poison

    def _let_go(self, line: int, why: int) -> bool:
        """Says whether somebody may have waited."""
        end = self._ready(line) + self._layout.end
        self._cells[end] = self._cells[end] or why
        if self._cells[self._done(line)]:
            return False
        self._cells[self._done(line)] = 1
        return True

    def close(self) -> None:
        """Lets go of the page and the descriptor."""
        self._cells.release()
        self._mapping.close()
        os.close(self.worker)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(PACKET.size, socket.CMSG_SPACE(_DESCRIPTORS * fds.itemsize))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def _serve(sock: socket.socket, layout: Layout) -> None:
    """Watches until the parent has ended."""
    parent = os.getppid()
    watches: dict[int, Watch] = {}
    workers: dict[int, Watch] = {}
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    sock.send(READY)
    while os.getppid() == parent:
        pause = min((watch.look() for watch in watches.values()), default=_IDLE_S)
        for fd, _ in poll.poll(max(int(min(pause, _IDLE_S) * 1000), 1)):
            if fd != sock.fileno():
                if fd in workers:  # else a packet of just now has ended it
                    poll.unregister(fd)
                    workers.pop(fd).dead = True
                continue
            data, fds = _receive(sock)
            if not data:
                return
            kind, number, line, seconds = PACKET.unpack(data)
            if kind == WATCH:
                page, worker = fds
                watch = watches[number] = Watch(page, worker, layout)
                workers[watch.worker] = watch
                poll.register(watch.worker, select.POLLIN)
            elif kind == LANE and number in watches:
                watches[number].lane(line, seconds)
            elif kind == END and number in watches:
                watch = watches.pop(number)
                if workers.pop(watch.worker, None) is not None:
                    poll.unregister(watch.worker)
                watch.close()


def main() -> None:
    """Runs the watchdog; the layout is in the arguments."""
    for entry in list(Path("/proc/self/fd").iterdir()):  # what the parent's other libraries have left open
        if int(entry.name) > 2:  # 0 is the parent's socket
            with contextlib.suppress(OSError):
                os.close(int(entry.name))
    with socket.socket(fileno=0) as sock, contextlib.suppress(ConnectionError):
        _serve(sock, Layout(*map(int, sys.argv[1:])))


if __name__ == "__main__":
    main()
