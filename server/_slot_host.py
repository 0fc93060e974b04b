"""Slots of the CPU backend: a call runs when its ready word has come, on the thread that saw it come."""

from topkd._words import WORKER_BELL, Words

from ._execute import Executor
from ._record import Recorder
from ._slots import OrderedCall

__all__ = ["HostSlot"]


class HostSlot:
    """One slot; calls are over when `run` returns."""

    rung = True

    def __init__(self, number: int, words: Words, executor: Executor, recorder: Recorder) -> None:
        self._number = number
        self._words = words
        self._executor = executor
        self._recorder = recorder

    def enqueue(self, call: OrderedCall) -> bool:
        """Never: the CPU has no stream that could wait."""
        return False

    def run(self, call: OrderedCall) -> None:
        """Runs a call and stores its done word."""
        if call.batch is not None:
            _, times, waited = self._executor.run(call.batch)
            self._recorder.batch(call.waited, call.batch, times, waited)
        self.skip(call.done)

    def skip(self, done: int) -> None:
        """Stores a done word."""
        self._words.set_done(self._number, done)
        self._words.ring(WORKER_BELL)

    def give_up(self, call: OrderedCall) -> None:
        """Nothing is ever enqueued."""

    def unfinished(self) -> list[OrderedCall]:
        """Nothing outlasts `run`."""
        return []
