"""Time-outs and order of ordered calls, on slots that stand in for streams of a GPU."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.server.harness import eventually
from topkd._words import POISON, Words
from topkd.server import _logging
from topkd.server._execute import Batch
from topkd.server._queue import TurnQueue
from topkd.server._slots import OrderedCall
from topkd.server._timeline import Timeline
from topkd.server.config import ServerLimits
from topkd.server.errors import KernelFailedError
from topkd.server.metrics import ServerMetrics
from topkd.v1 import selection_pb2

TIMED_OUT = selection_pb2.ORDERED_FAILURE_READY_TIMEOUT
BATCH = Batch([], [], 0, 0, 0, inline=False)


class Stream:
    """A slot that behaves as a stream does: a thread of its own takes what was enqueued in order."""

    rung = False

    def __init__(self, number: int, words: Words) -> None:
        self.number = number
        self.words = words
        self.gate = 0
        self.done: list[tuple[int, bool]] = []
        self.calls: list[tuple[OrderedCall | int, bool]] = []
        self.hold = threading.Event()  # set: kernels end
        self.hold.set()
        self.driver = threading.Lock()  # held: whoever calls the driver waits
        self.error: Exception | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        at = 0
        while True:
            time.sleep(0.001)
            if len(self.calls) <= at:
                continue
            call, waits = self.calls[at]
            if isinstance(call, int):
                self.words.set_done(self.number, call)
            else:
                while waits and self.words.ready(self.number) < call.ready:
                    time.sleep(0.001)
                self.hold.wait()
                self.done.append((call.done, self.gate < call.done))
                self.words.set_done(self.number, call.done)
            at += 1
            self.ended = at

    ended = 0

    def enqueue(self, call: OrderedCall) -> bool:
        with self.driver:
            if self.error is not None:
                raise self.error
            self.calls.append((call, True))
            return True

    def run(self, call: OrderedCall) -> None:
        with self.driver:
            self.calls.append((call, False))

    def skip(self, done: int) -> None:
        with self.driver:
            self.calls.append((done, False))

    def give_up(self, call: OrderedCall) -> None:
        self.gate = call.done
        if self.words.ready(self.number) < call.ready:
            self.words.set_ready(self.number, call.ready)

    def unfinished(self) -> list[OrderedCall]:
        with self.driver:
            if isinstance(self.error, KernelFailedError):
                raise self.error
            return [call for call, _ in self.calls[self.ended :] if isinstance(call, OrderedCall)]


class Ordered:
    """A timeline over such slots."""

    def __init__(self, fd: int) -> None:
        self.words = Words(fd)
        self.streams: list[Stream] = []
        limits = ServerLimits(max_slots=2)
        log = _logging.configure("error", "json", process="test")
        metrics = ServerMetrics(CollectorRegistry())
        self.timeline = Timeline(self.words, self._open, TurnQueue(), limits, metrics, log)

    def _open(self, words: Words, count: int) -> list[Stream]:
        self.streams = [Stream(number, words) for number in range(count)]
        return self.streams

    def accept(self, slot: int, ready: int, done: int, timeout_ms: int = 10_000) -> None:
        self.timeline.accept(ordering(slot, ready, done, timeout_ms), BATCH, 0)


def ordering(slot: int, ready: int, done: int, timeout_ms: int = 10_000) -> Any:
    return selection_pb2.Ordering(slot=slot, ready=ready, done=done, ready_timeout_ms=timeout_ms)


@pytest.fixture
def ordered(page: int) -> Iterator[Ordered]:
    made = Ordered(page)
    yield made
    for stream in made.streams:
        stream.hold.set()
    made.timeline.close()


def test_a_late_call_is_given_up_although_the_driver_holds_everybody_up(ordered: Ordered) -> None:
    ordered.accept(0, 1, 1, 200)
    with ordered.streams[0].driver:  # a first launch that waits for the blocked stream
        flushing = threading.Thread(target=ordered.timeline.flush)
        flushing.start()
        assert ordered.words.wait_done(0, 1, 10)
    flushing.join(10)
    assert ordered.words.failure(0) == (1, 1, TIMED_OUT, 1)
    assert ordered.streams[0].done == [(1, False)]


def test_a_call_that_is_still_being_enqueued_is_given_up_too(ordered: Ordered) -> None:
    ordered.accept(0, 0, 1)
    stream = ordered.streams[0]
    with stream.driver:
        entering = threading.Thread(target=ordered.accept, args=(0, 1, 2, 200))
        entering.start()
        eventually(lambda: stream.gate == 2)
    entering.join(10)
    assert ordered.words.wait_done(0, 2, 10)
    assert stream.done == [(1, True), (2, False)]
    assert ordered.words.failure(0) == (2, 2, TIMED_OUT, 1)


def test_a_late_call_behind_a_long_kernel_waits_for_its_end(ordered: Ordered) -> None:
    ordered.accept(1, 0, 1)
    stream = ordered.streams[1]
    stream.hold.clear()
    ordered.accept(1, 0, 2)  # its word has come, and its kernel is long
    ordered.accept(1, 5, 3, 100)  # its word does not come
    time.sleep(0.4)
    assert stream.gate == 0  # or the call before would write nothing
    stream.hold.set()
    assert ordered.words.wait_done(1, 3, 10)
    assert [wrote for _, wrote in stream.done[-2:]] == [True, False]
    assert ordered.words.failure(1) == (3, 3, TIMED_OUT, 1)


def test_each_late_call_is_given_up_in_its_turn_and_the_next_in_time_runs(ordered: Ordered) -> None:
    ordered.accept(0, 1, 1, 100)
    ordered.accept(0, 2, 2, 150)
    ordered.accept(0, 3, 3)
    assert ordered.words.wait_done(0, 2, 10)
    assert ordered.words.failure(0) == (1, 2, TIMED_OUT, 2)
    ordered.words.set_ready(0, 3)
    assert ordered.words.wait_done(0, 3, 10)
    assert ordered.streams[0].done == [(1, False), (2, False), (3, True)]


def test_a_word_that_goes_down_again_is_stored_until_the_stream_moves_on(ordered: Ordered) -> None:
    ordered.accept(0, 5, 1, 100)
    stop = threading.Event()

    def scribble() -> None:
        for _ in range(40):
            ordered.words.set_ready(0, 0)
            stop.wait(0.002)

    scribbling = threading.Thread(target=scribble)
    scribbling.start()
    assert ordered.words.wait_done(0, 1, 10)
    stop.set()
    scribbling.join()
    assert ordered.streams[0].done == [(1, False)]


def test_a_refused_call_keeps_its_place(ordered: Ordered) -> None:
    ordered.accept(0, 1, 1)
    ordered.timeline.refuse(ordering(0, 1, 2))
    ordered.accept(0, 2, 3)
    time.sleep(0.1)
    assert ordered.words.done(0) == 0
    ordered.words.set_ready(0, 2)
    assert ordered.words.wait_done(0, 3, 10)
    assert [done for done, _ in ordered.streams[0].done] == [1, 3]
    assert ordered.words.failure(0).total == 0


def test_a_launch_that_fails_raises_and_owes_nothing(ordered: Ordered) -> None:
    ordered.accept(0, 0, 1)
    ordered.streams[0].error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        ordered.accept(0, 1, 2)
    ordered.streams[0].error = None
    assert ordered.words.wait_done(0, 2, 10)
    ordered.timeline.refuse(ordering(0, 1, 2))  # what the handler does next changes nothing
    ordered.accept(0, 1, 3)
    ordered.words.set_ready(0, 1)
    assert ordered.words.wait_done(0, 3, 10)
    assert ordered.streams[0].done == [(1, True), (3, True)]


def test_a_device_that_fails_releases_everybody(ordered: Ordered) -> None:
    ordered.accept(0, 1, 1)
    ordered.accept(1, 1, 1)
    for stream in ordered.streams:
        stream.error = KernelFailedError("gone")
    for slot in range(2):
        assert ordered.words.wait_done(slot, POISON, 10)
        assert ordered.words.failure(slot).code == selection_pb2.ORDERED_FAILURE_KERNEL_FAILED
    assert ordered.timeline.settle(1)


def test_settling_waits_for_what_was_accepted_before(ordered: Ordered) -> None:
    assert ordered.timeline.settle(1)
    ordered.accept(0, 1, 1)
    assert not ordered.timeline.settle(0.1)
    settled: list[bool] = []
    settling = threading.Thread(target=lambda: settled.append(ordered.timeline.settle(10)))
    settling.start()
    time.sleep(0.05)
    ordered.accept(1, 1, 1)  # later: not waited for
    ordered.words.set_ready(0, 1)
    settling.join(10)
    assert settled == [True]
    assert ordered.words.done(1) == 0


def test_closing_ends_everything_and_lets_everybody_go(ordered: Ordered) -> None:
    ordered.accept(0, 1, 1)
    ordered.accept(0, 2, 2)
    ordered.timeline.close()
    assert ordered.words.failure(0) == (2, 2, selection_pb2.ORDERED_FAILURE_SESSION_ENDED, 1)
    assert ordered.words.done(0) == POISON
    assert [wrote for _, wrote in ordered.streams[0].done] in ([], [False], [False, False])
    ordered.timeline.close()


def test_a_calls_time_out_counts_from_the_end_of_the_one_before(ordered: Ordered) -> None:
    ordered.accept(0, 0, 1)
    ordered.streams[0].hold.clear()  # a long kernel
    ordered.accept(0, 0, 2)
    ordered.accept(0, 1, 3, 300)  # its stream comes to it when the one before is over
    time.sleep(0.6)
    ordered.streams[0].hold.set()
    assert ordered.words.wait_done(0, 2, 10)
    ordered.words.set_ready(0, 1)
    assert ordered.words.wait_done(0, 3, 10)
    assert ordered.words.failure(0).total == 0
    assert ordered.streams[0].done == [(1, True), (2, True), (3, True)]
