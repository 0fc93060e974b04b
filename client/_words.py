"""A session's words: one page of sealed shared memory that orders calls between a client and its worker.

The page is 64 lines of 64 bytes; a word is 64 bits, little-endian, at the start of a line, so that no two writers share
a cache line:

    line 2s      ready word of slot s: the caller stores or its stream writes it, nobody else but at a call's failure;
                 and the end word, which the client's watchdog stores (`topkd._watchdog`): 0, or why the slot has ended;
                 then, of a lane, the ticket of its last call by a kernel, which that kernel stores
    line 2s + 1  done word of slot s, and behind it what became of failures: first, last, code, total (8 bytes each);
                 then, of a lane, how many of its calls the worker has seen, and the slow word: 0 while it is armed
    lines 32 to 61 are those of lanes, two each, alike; a lane's ready word is its request word
    line 62, 63  bells: counters that the worker (62) and the client (63) raise when they have stored a word

A failure is stored before the done word that tells of it: code, first, total, last, done. `last` is the done value of
the last failed call, `first` of the first one in an unbroken run of failures that ends there.

Where kernels wait for lanes, there are words in device memory of the client's, too: 256 bytes a lane, at whose start is
the ticket of the last call, which the caller's kernel stores, and 128 bytes behind it the echo, which the worker
stores.

Both sides use this module; nothing here is CUDA. A wait is a futex of the bell that the other side rings, and looks at
the words again after a while all the same: a GPU writes words and rings no bell.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "CALLS",
    "CLIENT_BELL",
    "END",
    "FIRST_LANE",
    "LINE",
    "LONGEST_TIMELINE",
    "MOST_LANES",
    "MOST_SLOTS",
    "POISON",
    "SIGNALS_SIZE",
    "WORKER_BELL",
    "Failure",
    "Words",
    "offset_of_echo",
    "offset_of_ticket",
]

LINE: Final = 64
MOST_SLOTS: Final = 16
"""Slots that ordered calls have lines for."""

FIRST_LANE: Final = MOST_SLOTS
MOST_LANES: Final = 15
"""Lanes have the lines of the slots after those: lane n is slot FIRST_LANE + n. Its ready word is the request word."""

WORKER_BELL: Final = 62
CLIENT_BELL: Final = 63

LONGEST_TIMELINE: Final = 1 << 62
"""Ready and done values stay below it."""

POISON: Final = LONGEST_TIMELINE
"""A done word (or ready word) that satisfies every wait: the session is over."""

_CELLS: Final = LINE // 8
_FIRST, _LAST, _CODE, _TOTAL = 1, 2, 3, 4
CALLS: Final = 5
"""Cell in a done word's line: calls of a lane."""

_SLOW: Final = 6
"""Cell in a done word's line: the slow word."""

END: Final = 1
"""Cell in a ready word's line: the end word."""

_TICKETS: Final = 2
"""Cell in a ready word's line: the ticket of a lane's last call by a kernel."""

_SIGNALS: Final = 256
SIGNALS_SIZE: Final = MOST_LANES * _SIGNALS
"""Bytes of device memory for the tickets and echoes of all lanes."""

_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_LOOK_AGAIN: Final = 0.02
"""Seconds between looks at a word while waiting: the bound on what a store without a ring costs."""


def offset_of_ticket(slot: int) -> int:
    """Returns the offset of a lane's ticket in device memory."""
    return (slot - FIRST_LANE) * _SIGNALS


def offset_of_echo(slot: int) -> int:
    """Returns the offset of a lane's echo in device memory."""
    return offset_of_ticket(slot) + _SIGNALS // 2


class Failure(NamedTuple):
    """The last failures of a slot: done values of the first and the last call of the run, why, and how many ever."""

    first: int
    last: int
    code: int
    total: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Words:
    """A mapping of the page. Stores are single 64-bit moves, in program order.

    Attributes:
        address: Where the page is in this process.
        size: Bytes.
    """

    def __init__(self, fd: int) -> None:
        """Maps the page; the descriptor stays the caller's."""
        self._mapping = mmap.mmap(fd, 0)
        self.size = len(self._mapping)
        self._bytes: np.ndarray[Any, Any] = np.frombuffer(self._mapping, np.uint8)
        self.address = int(self._bytes.__array_interface__["data"][0])
        self._cells = memoryview(self._mapping).cast("Q")
        self._halves = memoryview(self._mapping).cast("I")
        self._fence = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True) if _FUTEX else None

    def _store(self, cell: int, value: int) -> None:
        with self._fence:  # taking and leaving a lock keeps stores in order on every architecture
            self._cells[cell] = value

    def offset_of_ready(self, slot: int) -> int:
        """Returns the ready word's offset in the page."""
        return 2 * slot * LINE

    def offset_of_done(self, slot: int) -> int:
        """Returns the done word's offset in the page."""
        return (2 * slot + 1) * LINE

    def offset_of_end(self, slot: int) -> int:
        """Returns the end word's offset in the page."""
        return self.offset_of_ready(slot) + 8 * END

    def offset_of_slow(self, slot: int) -> int:
        """Returns the slow word's offset in the page."""
        return self.offset_of_done(slot) + 8 * _SLOW

    def offset_of_tickets(self, slot: int) -> int:
        """Returns the offset in the page of the ticket of a lane's last call by a kernel."""
        return self.offset_of_ready(slot) + 8 * _TICKETS

    def ready(self, slot: int) -> int:
        """Returns a slot's ready word."""
        return self._cells[2 * slot * _CELLS]

    def done(self, slot: int) -> int:
        """Returns a slot's done word."""
        return self._cells[(2 * slot + 1) * _CELLS]

    def set_ready(self, slot: int, value: int) -> None:
        """Stores a slot's ready word; the caller rings."""
        self._store(2 * slot * _CELLS, value)

    def set_done(self, slot: int, value: int) -> None:
        """Stores a slot's done word; the caller rings."""
        self._store((2 * slot + 1) * _CELLS, value)

    def end(self, slot: int) -> int:
        """Returns a slot's end word."""
        return self._cells[2 * slot * _CELLS + END]

    def set_end(self, slot: int, value: int) -> None:
        """Stores a slot's end word."""
        self._store(2 * slot * _CELLS + END, value)

    def tickets(self, slot: int) -> int:
        """Returns the ticket of a lane's last call by a kernel."""
        return self._cells[2 * slot * _CELLS + _TICKETS]

    def slow(self, slot: int) -> int:
        """Returns a lane's slow word."""
        return self._cells[(2 * slot + 1) * _CELLS + _SLOW]

    def set_slow(self, slot: int, value: int) -> None:
        """Stores a lane's slow word: 0 while it is armed, so that calls by kernels are echoed, else 1."""
        self._store((2 * slot + 1) * _CELLS + _SLOW, value)

    def set_calls(self, slot: int, value: int) -> None:
        """Stores how many calls of a lane were seen."""
        self._store((2 * slot + 1) * _CELLS + CALLS, value)

    def clear_upper(self, slot: int) -> None:
        """Clears the upper half of a slot's ready word; loses no value below 2^32 that comes at the same moment."""
        self._halves[4 * slot * _CELLS + 1] = 0

    def failure(self, slot: int) -> Failure:
        """Returns the last failures of a slot."""
        line = (2 * slot + 1) * _CELLS
        return Failure(*(self._cells[line + cell] for cell in (_FIRST, _LAST, _CODE, _TOTAL)))

    def set_failure(self, slot: int, failure: Failure) -> None:
        """Stores failures of a slot; the done word that tells of them is stored afterwards."""
        line = (2 * slot + 1) * _CELLS
        self._store(line + _CODE, failure.code)
        self._store(line + _FIRST, failure.first)
        self._store(line + _TOTAL, failure.total)
        self._store(line + _LAST, failure.last)

    def bell(self, bell: int) -> int:
        """Returns a bell's count, to wait for the next ring with."""
        return self._cells[bell * _CELLS] & 0xFFFFFFFF

    def ring(self, bell: int) -> None:
        """Raises a bell and wakes who waits for it."""
        with self._fence:
            self._cells[bell * _CELLS] = (self._cells[bell * _CELLS] + 1) & 0xFFFFFFFF
        self._futex(bell, _FUTEX_WAKE, 0x7FFFFFFF, None)

    def wait(self, bell: int, seen: int, timeout: float) -> None:
        """Waits until a bell's count is not `seen` any more, or the time is over; may return early."""
        if timeout <= 0:
            return
        if self._libc is None:
            if self.bell(bell) == seen:
                time.sleep(min(timeout, 0.001))
            return
        self._futex(bell, _FUTEX_WAIT, seen, _Timespec(int(timeout), int(timeout % 1 * 1e9)))

    def wait_done(self, slot: int, value: int, timeout: float) -> bool:
        """Waits for a slot's done word to reach a value; says whether it came in time."""
        deadline = time.monotonic() + timeout
        while True:
            seen = self.bell(WORKER_BELL)
            if self.done(slot) >= value:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(WORKER_BELL, seen, min(left, _LOOK_AGAIN))

    def _futex(self, bell: int, operation: int, value: int, timeout: _Timespec | None) -> None:
        """Calls the kernel on the low half of a bell; whatever it answers, the caller looks again."""
        if self._libc is not None:
            address = ctypes.c_void_p(self.address + bell * LINE)
            reference = None if timeout is None else ctypes.byref(timeout)
            self._libc.syscall(ctypes.c_long(_FUTEX), address, operation, ctypes.c_uint32(value), reference, None, 0)
