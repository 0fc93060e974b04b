"""Calls that go on while a test does something to them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any


@dataclass
class Call:
    """A call on a thread of its own.

    Attributes:
        result: what it returned.
        error: what it raised.
        ended: when (monotonic).
    """

    thread: threading.Thread
    result: Any = None
    error: BaseException | None = None
    ended: float = 0.0

    def wait(self, timeout: float = 30.0) -> None:
        """Waits for its end."""
        self.thread.join(timeout)
        assert not self.thread.is_alive(), f"the call hangs after {timeout} s"


def start_call(function: Any, *args: Any, **kwargs: Any) -> Call:
    """Starts a call."""
    call = Call(threading.Thread())

    def run() -> None:
        try:
            call.result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            call.error = error
        call.ended = time.monotonic()

    call.thread = threading.Thread(target=run, daemon=True)
    call.thread.start()
    return call
