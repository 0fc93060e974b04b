"""Calls that are ordered on the caller's CUDA streams: which slot a call takes, and what became of it.

A call on a stream: the stream stores the slot's ready word -> the request goes out -> the reply says that the server
has accepted it -> the stream waits for the slot's done word. No thread waits for the device.

A slot is one call's at a time, and one stream's as long as anything of it is under way there: what a stream has yet to
store must not come after what another has stored. Where none is free the call goes the old way (the thread waits for
its stream, then for the result).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from topkd._words import POISON, Words
from topkd.errors import DeadlineExceededError, KernelError, SessionLostError, TopkdError
from topkd.v1 import selection_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from topkd._cuda_words import DeviceWords
    from topkd._guard import Guard
    from topkd._lane_book import LaneBook

__all__ = ["Ticket", "Timeline"]

_ENDED: Final = selection_pb2.ORDERED_FAILURE_SESSION_ENDED


class _Slot:
    """A slot's state here.

    Attributes:
        stream: torch stream of its last call.
        identity: of that stream.
        busy: a call is between its ready word and its reply.
        ready, done: values given out last.
        accepted: done value of the last call that the server accepted.
        checked: done value up to which failures were raised.
    """

    __slots__ = ("accepted", "busy", "checked", "done", "identity", "number", "ready", "stream")

    def __init__(self, number: int) -> None:
        self.number = number
        self.stream: Any = None
        self.identity = 0
        self.busy = False
        self.ready = self.done = self.accepted = self.checked = 0


@dataclass(slots=True)
class Ticket:
    """One attempt at a call: its slot and values."""

    slot: _Slot
    stream: Any
    ordering: selection_pb2.Ordering

    def request(self, prepared: selection_pb2.SelectTopKRequest) -> selection_pb2.SelectTopKRequest:
        """Returns a request with this ordering; the prepared one may be shared."""
        request = selection_pb2.SelectTopKRequest(ordering=self.ordering)
        request.MergeFrom(prepared)
        return request


class Timeline:
    """The slots of a session. Thread-safe."""

    def __init__(
        self, words: Words, guard: Guard, slots: int, ordinal: int, *, ready_timeout: float, timeout: float
    ) -> None:
        """Maps nothing yet: the first call does.

        Args:
            words: The session's.
            guard: Lets streams go when the worker is gone.
            slots: How many the server offers.
            ordinal: The CUDA device.
            ready_timeout: Seconds that a call's stream has to come to it.
            timeout: Seconds that `close` waits for accepted calls.
        """
        self._words = words
        self._guard = guard
        self._ordinal = ordinal
        self._ready_timeout = ready_timeout
        self._timeout = timeout
        self._slots = [_Slot(number) for number in range(slots)]
        self._device: DeviceWords | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._told = self._lost = False
        self._telling = threading.Lock()

    def begin(self, stream: Any) -> Ticket | None:
        """Stores the ready word of a new call in a stream; None if no slot is free, or the session is over.

        Raises:
            RegionError: The driver refuses, or the watchdog cannot be started.
        """
        with self._lock:
            if self._closed:
                return None
            device = self._mapped()
            handle = stream.cuda_stream
            identity = device.identity(handle)
            slot = self._find(identity)
            if slot is None:
                return None
            slot.ready += 1
            slot.done += 1
            slot.stream, slot.identity = stream, identity
            device.write_ready(handle, slot.number, slot.ready)
            slot.busy = True
        ordering = selection_pb2.Ordering(
            slot=slot.number, ready=slot.ready, done=slot.done, ready_timeout_ms=max(1, int(self._ready_timeout * 1000))
        )
        return Ticket(slot, stream, ordering)

    def mapped(self) -> DeviceWords:
        """Returns the page as this process's streams use it; raises as `begin`."""
        with self._lock:
            return self._mapped()

    def _mapped(self) -> DeviceWords:
        if self._device is None:
            from topkd._cuda_words import DeviceWords

            self._device = DeviceWords(self._words, self._guard, self._ordinal)
        return self._device

    def _find(self, identity: int) -> _Slot | None:
        """Returns the free slot that the stream had last, else one of which nothing is under way."""
        idle = None
        for slot in self._slots:
            if not slot.busy:
                if slot.identity == identity and slot.stream is not None:
                    return slot
                if idle is None and self._is_idle(slot):
                    idle = slot
        return idle

    def _is_idle(self, slot: _Slot) -> bool:
        return self._words.ready(slot.number) >= slot.ready and self._words.done(slot.number) >= slot.accepted

    def accepted(self, ticket: Ticket) -> None:
        """Makes the stream wait for a call that the server has accepted.

        Raises:
            SessionLostError: The session was lost before it could.
        """
        slot = ticket.slot
        with self._lock:
            slot.accepted = ticket.ordering.done
            slot.busy = False
            if self._device is not None:
                self._device.wait_done(ticket.stream.cuda_stream, slot.number, ticket.ordering.done)
        if self._lost or self._words.done(slot.number) >= POISON:
            raise SessionLostError("the session was lost before a selection that it had accepted was over")

    def dropped(self, ticket: Ticket) -> None:
        """Frees the slot of a call that was not accepted, or of which nothing is known."""
        with self._lock:
            ticket.slot.busy = False

    def join(self, stream: Any) -> None:
        """Makes a stream wait for the accepted calls of other streams: memory that it gets may still be theirs."""
        with self._lock:
            for slot in self._slots:
                other = slot.stream is not None and slot.stream != stream
                if other and self._device is not None and self._words.done(slot.number) < slot.accepted:
                    self._device.wait_done(stream.cuda_stream, slot.number, slot.accepted)

    def failure(self) -> TopkdError | None:
        """Returns the error of accepted calls that failed and were not told of yet; None if there are none."""
        if self._cut_off():
            return _error(_ENDED, self._ready_timeout)
        for slot in self._slots:
            found = self._words.failure(slot.number)
            if slot.checked < found.last <= slot.done and self._words.done(slot.number) >= found.last:
                slot.checked = found.last
                return _error(found.code, self._ready_timeout)
        return None

    def _cut_off(self) -> bool:
        """Says, once, whether the watchdog has let a stream go on that waited for an accepted call."""
        return any(0 < self._words.end(slot.number) <= slot.accepted for slot in self._slots) and self._first_to_tell()

    def _first_to_tell(self) -> bool:
        """Says whether nobody has told yet of calls that the session's end has cut off."""
        with self._telling:
            first, self._told = not self._told, True
        return first

    def close(self, lost: bool, report: Callable[[TopkdError], None], lanes: LaneBook | None = None) -> None:
        """Ends it: waits for accepted calls unless the session is lost, then lets every stream go on.

        Args:
            lost: The session's end is the server's doing: the watchdog lets the streams go once the worker is dead.
            lanes: What else waits for the session's words.
            report: Told of accepted calls that were not over or had failed, before a stream goes on because of it.
        """
        if self._closed:
            return
        self._lost = lost
        self._closed = True
        slots = self._slots
        if not lost:
            deadline = time.monotonic() + self._timeout
            for slot in slots:
                self._words.wait_done(slot.number, slot.accepted, max(deadline - time.monotonic(), 0.0))
        unfinished = any(self._words.done(slot.number) < slot.accepted for slot in slots)
        ended = unfinished and self._first_to_tell()
        error = _error(_ENDED, self._ready_timeout) if ended else self.failure()
        self._first_to_tell()
        if error is not None:
            report(error)
        if not lost:
            for slot in slots:  # without the lock: who holds it may be held up by a stream that waits for these words
                self._words.set_done(slot.number, POISON)
        with self._lock:
            waiting = [slot.stream for slot in slots if slot.stream is not None]
        if self._device is not None:
            self._device.retire(waiting, lanes)


def _error(code: int, ready_timeout: float) -> TopkdError:
    if code == selection_pb2.ORDERED_FAILURE_READY_TIMEOUT:
        text = f"a selection was given up: its stream did not come to it within {ready_timeout:g} s (ready_timeout)"
        return DeadlineExceededError(text, reason="READY_TIMEOUT")
    if code == _ENDED:
        return SessionLostError("the session ended before selections that were ordered on a stream")
    return KernelError("a selection that was ordered on a stream failed; the server's log says why")
