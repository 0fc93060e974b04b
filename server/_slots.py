"""Slots: what a backend must be able to do for calls that are ordered by words."""

import time
from dataclasses import dataclass, field
from typing import Protocol

from ._execute import Batch

__all__ = ["OrderedCall", "Slot"]


@dataclass(slots=True, eq=False)
class OrderedCall:
    """A call that was accepted on a slot.

    Attributes:
        ready: runs once the slot's ready word is at least this.
        done: what the done word becomes afterwards.
        timeout: seconds that the ready word has, from the call's acceptance or the end of the one before it.
        batch: what runs; None: nothing, the call was refused and only its done word is owed.
        waited: nanoseconds from the request's arrival to its acceptance.
        given_up: its ready word did not come; if it is in a stream, it writes nothing any more.
    """

    ready: int
    done: int
    timeout: float
    batch: Batch | None
    waited: int = 0
    given_up: bool = False
    accepted: float = field(default_factory=time.monotonic)


class Slot(Protocol):
    """One slot of a session on a backend. Callers see to it that calls come in order, `enqueue` and `run` in the turn.

    Attributes:
        rung: whoever stores the ready word rings the bell too; else it must be looked at again and again.
    """

    rung: bool

    def enqueue(self, call: OrderedCall) -> bool:
        """Puts a call behind its ready word without waiting for it; False if the backend cannot do that with it.

        Raises:
            Exception: the launch failed; the done word is still owed (`skip`).
        """

    def run(self, call: OrderedCall) -> None:
        """Runs a call whose ready word has come, and sees to its done word. Raises as `enqueue`."""

    def skip(self, done: int) -> None:
        """Sees to the done word of a call of which nothing runs, after the calls before it."""

    def give_up(self, call: OrderedCall) -> None:
        """Makes an enqueued call without effect, and lets the stream go on behind it."""

    def unfinished(self) -> list[OrderedCall]:
        """Returns the calls that were enqueued or run and whose end is not known yet; notes the figures of the others.

        Raises:
            KernelFailedError: the device has failed; nothing that was enqueued will end.
        """
