"""Which slot a call on a stream takes, what its stream does, and what is told of it: with a driver that only notes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

import topkd
from topkd import _cuda_words
from topkd._timeline import Timeline
from topkd._words import POISON, Failure, Words
from topkd.v1 import selection_pb2

TIMED_OUT = selection_pb2.ORDERED_FAILURE_READY_TIMEOUT


@dataclass(frozen=True)
class Stream:
    cuda_stream: int


class Device:
    """Notes what streams would do."""

    made: list[Device]

    def __init__(self, words: Words, guard: Any, ordinal: int) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.made.append(self)

    def identity(self, stream: int) -> int:
        return stream * 100

    def write_ready(self, stream: int, slot: int, value: int) -> None:
        self.notes.append(("ready", stream, slot, value))

    def wait_done(self, stream: int, slot: int, value: int) -> None:
        self.notes.append(("done", stream, slot, value))

    def retire(self, streams: list[Stream], lanes: Any) -> None:
        self.notes.append(("retire", *streams))


A, B, C = Stream(1), Stream(2), Stream(3)
GUARD: Any = object()


@pytest.fixture
def words(page: int) -> Words:
    return Words(page)


@pytest.fixture
def timeline(words: Words, monkeypatch: pytest.MonkeyPatch) -> Timeline:
    monkeypatch.setattr(Device, "made", [], raising=False)
    monkeypatch.setattr(_cuda_words, "DeviceWords", Device)
    return Timeline(words, GUARD, 2, 0, ready_timeout=0.25, timeout=0.2)


def begin(timeline: Timeline, stream: Stream) -> Any:
    ticket = timeline.begin(stream)
    assert ticket is not None
    return ticket


def call(timeline: Timeline, stream: Stream) -> Any:
    ticket = begin(timeline, stream)
    timeline.accepted(ticket)
    return ticket


def test_a_call_is_a_ready_word_a_request_and_a_wait(timeline: Timeline) -> None:
    ticket = begin(timeline, A)
    prepared = selection_pb2.SelectTopKRequest(items=[selection_pb2.BatchItem()])
    request = ticket.request(prepared)
    assert request.ordering == selection_pb2.Ordering(slot=0, ready=1, done=1, ready_timeout_ms=250)
    assert len(request.items) == 1
    assert not prepared.HasField("ordering")
    timeline.accepted(ticket)
    assert Device.made[0].notes == [("ready", 1, 0, 1), ("done", 1, 0, 1)]
    assert call(timeline, A).ordering.done == 2
    assert len(Device.made) == 1


def test_a_stream_keeps_its_slot_and_others_take_theirs(timeline: Timeline) -> None:
    assert [call(timeline, stream).slot.number for stream in (A, B, A, B, A)] == [0, 1, 0, 1, 0]


def test_a_slot_changes_streams_only_when_nothing_of_it_is_under_way(timeline: Timeline, words: Words) -> None:
    call(timeline, A)
    call(timeline, B)
    assert timeline.begin(C) is None
    words.set_ready(0, 1)
    assert timeline.begin(C) is None  # accepted, and not done
    words.set_done(0, 1)
    ticket = begin(timeline, C)
    assert (ticket.slot.number, ticket.ordering.ready, ticket.ordering.done) == (0, 2, 2)
    assert timeline.begin(A) is None


def test_a_ready_word_that_is_still_to_come_keeps_other_streams_away(timeline: Timeline, words: Words) -> None:
    for stream in (A, B):
        timeline.dropped(begin(timeline, stream))  # refused: the stream stores the word all the same
    assert timeline.begin(C) is None
    words.set_ready(1, 1)
    assert begin(timeline, C).slot.number == 1


def test_a_slot_is_one_calls_at_a_time(timeline: Timeline) -> None:
    first, second = begin(timeline, A), begin(timeline, A)
    assert (first.slot.number, second.slot.number) == (0, 1)
    assert timeline.begin(A) is None
    timeline.dropped(second)
    assert begin(timeline, A).ordering == selection_pb2.Ordering(slot=1, ready=2, done=2, ready_timeout_ms=250)


def test_memory_of_other_streams_calls_is_waited_for(timeline: Timeline, words: Words) -> None:
    call(timeline, A)
    call(timeline, B)
    del Device.made[0].notes[:]
    timeline.join(A)  # type: ignore[arg-type]
    timeline.join(C)  # type: ignore[arg-type]
    assert Device.made[0].notes == [("done", 1, 1, 1), ("done", 3, 0, 1), ("done", 3, 1, 1)]
    words.set_done(1, 1)
    del Device.made[0].notes[:]
    timeline.join(A)  # type: ignore[arg-type]
    assert Device.made[0].notes == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (TIMED_OUT, topkd.DeadlineExceededError),
        (selection_pb2.ORDERED_FAILURE_KERNEL_FAILED, topkd.KernelError),
        (selection_pb2.ORDERED_FAILURE_SESSION_ENDED, topkd.SessionLostError),
        (99, topkd.KernelError),
    ],
)
def test_failures_are_told_once_and_when_they_are_over(timeline: Timeline, words: Words, code: int, kind: type) -> None:
    for _ in range(3):
        call(timeline, A)
    assert timeline.failure() is None
    words.set_failure(0, Failure(1, 2, code, 2))
    assert timeline.failure() is None
    words.set_done(0, 2)
    assert type(timeline.failure()) is kind
    assert timeline.failure() is None
    words.set_failure(0, Failure(3, 3, code, 3))
    words.set_done(0, 3)
    assert type(timeline.failure()) is kind


def test_words_of_calls_that_never_were_tell_nothing(timeline: Timeline, words: Words) -> None:
    call(timeline, A)
    words.set_failure(0, Failure(7, 9, TIMED_OUT, 2))
    words.set_done(0, 9)
    assert timeline.failure() is None


def test_a_lost_session_says_so_and_leaves_its_streams_to_the_watchdog(timeline: Timeline, words: Words) -> None:
    call(timeline, A)
    told: list[tuple[Exception, int]] = []
    timeline.close(True, lambda error: told.append((error, words.done(0))))
    [(error, before)] = told
    assert isinstance(error, topkd.SessionLostError)
    assert before == 0  # told first: who wakes up finds it
    assert words.done(0) == 0  # the watchdog's to store, once the worker can write no more
    let_go(words, 0)
    assert timeline.failure() is None  # told already
    assert Device.made[0].notes[-1] == ("retire", A)
    assert timeline.begin(A) is None


def let_go(words: Words, slot: int) -> None:
    """Does what the watchdog does."""
    words.set_end(slot, words.done(slot) + 1)
    words.set_done(slot, POISON)


def test_who_is_let_go_hears_of_it_before_the_session_does(timeline: Timeline, words: Words) -> None:
    call(timeline, A)
    call(timeline, B)
    words.set_done(0, 1)
    let_go(words, 0)
    assert timeline.failure() is None  # it was over
    let_go(words, 1)
    assert isinstance(timeline.failure(), topkd.SessionLostError)
    assert timeline.failure() is None
    told: list[Exception] = []
    timeline.close(True, told.append)
    assert told == []


def test_a_call_that_is_accepted_while_the_session_is_lost_fails(timeline: Timeline) -> None:
    ticket = begin(timeline, A)
    timeline.close(True, lambda error: None)
    with pytest.raises(topkd.SessionLostError):
        timeline.accepted(ticket)


def test_closing_waits_for_accepted_calls_a_bounded_time(timeline: Timeline, words: Words) -> None:
    call(timeline, A)
    told: list[Exception] = []
    started = time.monotonic()
    timeline.close(False, told.append)
    assert 0.15 < time.monotonic() - started < 5
    assert isinstance(told[0], topkd.SessionLostError)
    assert words.done(0) == POISON
    timeline.close(False, told.append)
    assert len(told) == 1


def test_closing_after_everything_is_over_tells_nothing_but_failures(timeline: Timeline, words: Words) -> None:
    call(timeline, A)
    call(timeline, B)
    words.set_done(0, 1)
    words.set_failure(1, Failure(1, 1, TIMED_OUT, 1))
    words.set_done(1, 1)
    told: list[Exception] = []
    timeline.close(False, told.append)
    assert [type(error) for error in told] == [topkd.DeadlineExceededError]
