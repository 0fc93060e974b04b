"""The lanes of a session: what they share, and what becomes of them at its end."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from topkd._cuda import on_device
from topkd.errors import SessionLostError, TopkdError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topkd._guard import Guard
    from topkd._lane import Lane
    from topkd._words import Words

__all__ = ["LaneBook", "come", "marks"]

_LOOK_S: Final = 0.001


class LaneBook:
    """The lanes of a session. Thread-safe.

    Attributes:
        words: The session's.
        guard: Lets go who waits for a lane once the worker is gone, or the call late.
        lost: Why the session is over, if it is.
        streams: Torch streams that lanes were called on.
        given_back: Lanes that were closed, and whose place is free again.
    """

    def __init__(self, words: Words, guard: Guard) -> None:
        self.words = words
        self.guard = guard
        self.lost: TopkdError | None = None
        self.streams: list[Any] = []
        self.given_back = 0
        self._closing = 0
        self._changed = threading.Condition()
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, lane: Lane) -> None:
        """Takes a lane in."""
        with self._lock:
            self._lanes.add(lane)

    def note(self, stream: Any) -> None:
        """Remembers a stream that lanes are called on."""
        with self._lock:
            if stream not in self.streams:
                self.streams.append(stream)

    def begin_close(self) -> None:
        """Counts a lane that is to be given back."""
        with self._changed:
            self._closing += 1

    def end_close(self) -> None:
        """A lane has been given back, or will never be."""
        with self._changed:
            self._closing -= 1
            self.given_back += 1
            self._changed.notify_all()

    def wait_for_place(self, given_back: int, timeout: float) -> bool:
        """Waits until more lanes than so many have been given back, if any is to be; says whether that came."""
        with self._changed:
            self._changed.wait_for(lambda: self.given_back > given_back or not self._closing, timeout)
            return self.given_back > given_back

    def held(self) -> bool:
        """Says whether a lane may still be called, if only by a graph."""
        with self._lock:
            return any(not lane.closed for lane in self._lanes)

    def finish(self, timeout: float) -> None:
        """Waits until the calls that are in streams are over, or the time is."""
        deadline = time.monotonic() + timeout
        events = marks(self.streams)
        while not come(events) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def lose(self, because: str) -> None:
        """Breaks every lane."""
        self.lost = self.lost or SessionLostError(f"the lane is broken: {because}")


def marks(streams: Sequence[Any]) -> list[Any]:
    """Returns events behind all that is in some streams now. One that is being captured, or has failed, has none."""
    if not streams:
        return []
    import torch

    events = []
    for stream in list(streams):
        with suppress(RuntimeError):  # a device that has failed will come to nothing any more
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    continue
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            events.append(event)
    return events


def come(events: Sequence[Any]) -> bool:
    """Says whether the device has come to all of some events; one that has failed will come to nothing any more."""
    try:
        for event in events:
            with on_device(event.device.index):
                if not event.query():
                    return False
    except RuntimeError:
        return True
    return True
