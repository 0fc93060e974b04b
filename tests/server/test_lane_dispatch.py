"""Lanes without a device: what closes, ends and is freed while a call runs, with slots that do as they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.server.harness import eventually
from topkd._words import CLIENT_BELL, FIRST_LANE, Words
from topkd.server import _logging
from topkd.server._lanes import Lanes
from topkd.server._lanes_polled import Polled
from topkd.server._queue import TurnQueue
from topkd.server._slots import OrderedCall
from topkd.server.errors import DeadlinePassedError, FieldError, KernelFailedError, LaneLimitError, WorkerLostError
from topkd.server.metrics import ServerMetrics
from topkd.v1 import selection_pb2

PLAN = 5


class Slot:
    """Runs a call by the caller's leave; ends it by the caller's leave, too, as a stream would."""

    rung = True

    def __init__(self, number: int, words: Words) -> None:
        self.number = number
        self.words = words
        self.go = threading.Event()
        self.go.set()
        self.in_stream: list[OrderedCall] = []
        self.keeps = False
        self.fails: Exception | None = None
        self.runs = 0

    def run(self, call: OrderedCall) -> None:
        self.go.wait(10)
        if self.fails is not None:
            raise self.fails
        self.runs += 1
        if self.keeps:
            self.in_stream.append(call)
        else:
            self.skip(call.done)

    def skip(self, done: int) -> None:
        self.words.set_done(self.number, done)

    def unfinished(self) -> list[OrderedCall]:
        return list(self.in_stream)

    def enqueue(self, call: OrderedCall) -> bool:
        raise AssertionError

    def give_up(self, call: OrderedCall) -> None:
        raise AssertionError


class World:
    def __init__(self, fd: int) -> None:
        self.words = Words(fd)
        self.slots = [Slot(FIRST_LANE + number, self.words) for number in range(2)]
        self.plans: dict[int, Any] = {PLAN: object()}
        self.metrics = ServerMetrics(CollectorRegistry())
        self.queue = TurnQueue()
        log = _logging.configure("critical", "json", process="test")
        polled = Polled(self.words, self.queue, self.metrics, log)
        self.lanes = Lanes(self.words, self.slots, self.plans.get, [polled], self.metrics)

    def ask(self, lane: int, number: int = 1) -> None:
        self.words.set_done(FIRST_LANE + lane, 0)
        self.words.set_ready(FIRST_LANE + lane, number)
        self.words.ring(CLIENT_BELL)

    def called(self, lane: int, number: int = 1) -> None:
        self.ask(lane, number)
        assert self.words.wait_done(FIRST_LANE + lane, 1, 5)

    def failure(self, lane: int) -> int:
        return self.words.failure(FIRST_LANE + lane).code


@pytest.fixture
def world(page: int) -> Iterator[World]:
    made = World(page)
    yield made
    for slot in made.slots:
        slot.go.set()
    made.lanes.close_all(0.1)


@pytest.mark.parametrize("where", ["thread", "stream"])
def test_a_lane_that_closes_waits_for_its_call_and_keeps_its_place_until_it_is_over(world: World, where: str) -> None:
    opened = world.lanes.open([PLAN])
    assert (opened.number, opened.mode) == (0, selection_pb2.LANE_MODE_POLLED)
    slot = world.slots[0]
    if where == "thread":
        slot.go.clear()
    slot.keeps = where == "stream"
    world.ask(0)
    eventually(lambda: world.words.ready(FIRST_LANE) == 0)
    eventually(lambda: where == "thread" or slot.runs == 1)
    assert not world.lanes.settle(0.05)
    with pytest.raises(DeadlinePassedError):
        world.lanes.close(0, 0.05)
    assert not world.lanes.settle(0.05), "a region could be freed under the call"
    assert world.lanes.open([PLAN]).number == 1  # another place: the call is still to store this one's words
    with pytest.raises(LaneLimitError):
        world.lanes.open([PLAN])
    slot.go.set()
    slot.keeps = False
    slot.in_stream.clear()
    eventually(lambda: world.lanes.settle(0.0))
    assert world.lanes.open([PLAN]).number == 0
    with pytest.raises(FieldError):
        world.lanes.close(7, 0.1)


def test_a_dropped_lane_answers_nobody(world: World) -> None:
    number = world.lanes.open([PLAN]).number
    world.called(number)
    world.lanes.close(number, 1.0)
    world.ask(number)
    time.sleep(0.1)
    assert world.words.ready(FIRST_LANE + number) == 1
    assert world.slots[0].runs == 1
    assert world.lanes.open([PLAN]).number == number
    assert world.words.ready(FIRST_LANE + number) == 0  # what was asked meanwhile is forgotten


def test_calls_are_counted_where_the_client_looks(world: World) -> None:
    number = world.lanes.open([PLAN]).number
    cell = (2 * (FIRST_LANE + number) + 1) * 8 + 5
    for turn in range(3):
        assert world.words._cells[cell] == turn
        world.called(number)
    world.lanes.close(number, 1.0)
    world.lanes.open([PLAN])
    assert world.words._cells[cell] == 0


def test_what_fails_is_told_and_the_next_call_runs(world: World) -> None:
    number = world.lanes.open([PLAN, PLAN + 1]).number
    world.called(number, 2)
    assert world.failure(number) == selection_pb2.LANE_FAILURE_NO_PLAN
    world.slots[0].fails = KernelFailedError("no")
    world.called(number)
    assert world.failure(number) == selection_pb2.LANE_FAILURE_KERNEL_FAILED
    world.slots[0].fails = None
    world.called(number)
    assert world.words.failure(FIRST_LANE + number).total == 2


def test_the_end_is_told_to_all_and_waits_a_bounded_time(world: World) -> None:
    first, second = world.lanes.open([PLAN]).number, world.lanes.open([PLAN]).number
    world.slots[0].keeps = True
    world.ask(first)
    eventually(lambda: world.slots[0].runs == 1)
    started = time.monotonic()
    world.lanes.close_all(0.2)
    world.lanes.close_all(0.2)
    assert 0.15 < time.monotonic() - started < 5
    for lane in (first, second):
        assert world.failure(lane) == selection_pb2.LANE_FAILURE_SESSION_ENDED
        assert world.words.done(FIRST_LANE + lane) == 1
    with pytest.raises(WorkerLostError):
        world.lanes.open([PLAN])
    assert world.metrics.lanes.labels("polled")._value.get() == 0
