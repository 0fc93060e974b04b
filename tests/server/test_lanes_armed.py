"""Armed lanes with rounds that a thread acts out instead of a GPU: what is served, given up, armed again, handed on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from topkd._words import CALLS, FIRST_LANE, MOST_LANES, Words
from topkd.server import _logging
from topkd.server._lanes import Lanes
from topkd.server._lanes_armed import Armed, CannotArmError
from topkd.server._queue import Account, TurnQueue
from topkd.server.errors import KernelFailedError
from topkd.server.metrics import ServerMetrics
from topkd.v1 import selection_pb2

KEPT = 8


class Seconds:
    """A histogram that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def observe(self, seconds: float) -> None:
        self.seen.append(seconds)


FIRST, SECOND = (
    SimpleNamespace(calls=[SimpleNamespace(histogram=Seconds())], rows=3, input_bytes=600, output_bytes=24)
    for _ in range(2)
)
PLANS: dict[int, Any] = {11: FIRST, 12: SECOND}


class Device:
    """What all streams of a process share: calls that wait until every stream is empty."""

    def __init__(self) -> None:
        self.streams: list[ActedRounds] = []
        self.failed = False

    def free(self, timeout: float = 5) -> None:
        """What the driver does not do while a stream waits."""
        deadline = time.monotonic() + timeout
        while any(stream.left for stream in self.streams):
            assert time.monotonic() < deadline, "held up"
            time.sleep(1e-4)


class ActedRounds:
    """A stream of rounds: each waits for the request word, writes unless it is given up, and answers."""

    most = KEPT

    def __init__(self, device: Device, words: Words, line: int, batch: Any) -> None:
        if batch is SECOND:
            raise CannotArmError("the second plan does more than enqueue")
        self.device, self.words, self.line, self.batch = device, words, line, batch
        self.timed: list[int] = []
        self.signals = 0
        self.left = 0
        self.marked = False
        self.pushed = False
        self.writes = 0
        self.spared = 0
        self.closed = False
        self.armed_ever = 0
        self._count = 0
        self._ended = False
        device.streams.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self._ended:
            if not self.left or not (self.pushed or self.words.ready(self.line)):
                time.sleep(2e-5)
                continue
            given_up = self.marked
            time.sleep(1e-4)  # the kernel
            if given_up:
                self.spared += 1
            else:
                self.writes += 1
            if not self.marked:
                self._count += 1
                self.pushed = False
                self.words.set_ready(self.line, 0)
                self.words.set_done(self.line, 1)
            self.left -= 1

    def arm(self) -> int:
        assert not self.left
        assert not self.closed
        self.marked = False
        self.pushed = False
        self.armed_ever += 1
        self.left = KEPT
        return KEPT

    def refill(self) -> int:
        if self.device.failed:
            raise KernelFailedError("the device has failed")
        used = KEPT - self.left
        self.left += used
        return used

    def times(self) -> list[int]:
        timed, self.timed = self.timed, []
        return timed

    def answered(self) -> int:
        return self._count

    def give_up(self) -> None:
        self.marked = True
        self.pushed = True

    def idle(self) -> bool:
        return not self.left

    def close(self) -> None:
        self.device.free(0.0)  # the driver frees a graph when every stream is empty
        self.closed = True
        self._ended = True


class Unused:
    """A slot that nobody runs anything in."""

    def unfinished(self) -> list[Any]:
        return []


class Handed:
    """A fallback that notes what it was given."""

    mode = "polled"
    code = selection_pb2.LANE_MODE_POLLED
    reason = "the fallback takes all"

    def __init__(self) -> None:
        self.lanes: list[Any] = []

    def take(self, lane: Any) -> None:
        self.lanes.append(lane)

    def drop(self, lane: Any) -> None:
        self.lanes.remove(lane)

    @contextmanager
    def held(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.lanes.clear()


class Worker:
    """Lanes over acted rounds, and a caller."""

    def __init__(self, page: int, most: int = 2) -> None:
        self.words, self.theirs = Words(page), Words(page)
        self.plans = dict(PLANS)
        self.device = Device()
        self.queue = TurnQueue()
        self.metrics = ServerMetrics(CollectorRegistry())
        self.handed = Handed()
        log = _logging.configure("error", "json", process="test")
        self.armed = Armed(self._open, most, self.handed, self.queue, self.metrics, log)
        slots: Any = [Unused()] * MOST_LANES
        find: Any = self.plans.get
        self.lanes = Lanes(self.theirs, slots, find, [self.armed, self.handed], self.metrics)

    def _open(self, line: int, signals: int, batch: Any) -> ActedRounds:
        self.device.free()  # capturing does what waits for every stream
        rounds = ActedRounds(self.device, self.theirs, line, batch)
        rounds.signals = signals
        return rounds

    def call(self, lane: int, timeout: float = 5) -> bool:
        line = FIRST_LANE + lane
        self.words.set_done(line, 0)
        self.words.set_ready(line, 1)
        deadline = time.monotonic() + timeout
        while not self.words.done(line):
            if time.monotonic() > deadline:
                return False
            time.sleep(2e-5)
        return True

    def counted(self, name: str = "lane_calls", **labels: str) -> float:
        if name == "lane_calls":
            labels = {"mode": "armed", "outcome": "finished"}
        return self.metrics.registry.get_sample_value(f"topkd_{name}_total", labels) or 0.0


@pytest.fixture
def worker(page: int) -> Iterator[Worker]:
    made = Worker(page)
    yield made
    made.lanes.close_all(1)


def eventually(true: Callable[[], bool], timeout: float = 5) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_calls_are_answered_and_rounds_put_behind_them(worker: Worker) -> None:
    opened = worker.lanes.open([11])
    assert (opened.mode, opened.reason) == (selection_pb2.LANE_MODE_ARMED, Armed.reason)
    for _ in range(20 * KEPT):
        assert worker.call(opened.number)
    rounds = worker.device.streams[0]
    assert rounds.writes == 20 * KEPT
    assert not rounds.spared
    eventually(lambda: worker.counted() == 20 * KEPT)
    assert worker.words._cells[(2 * FIRST_LANE + 1) * 8 + CALLS] == 20 * KEPT, "a client that watches its time sees it"
    assert [worker.counted(name) for name in ("rows", "input_bytes", "output_bytes")] == [
        20 * KEPT * each for each in (3, 600, 24)
    ]
    eventually(lambda: worker.counted("lane_rounds") == 21 * KEPT)


def test_kernels_that_wait_are_told_whether_answers_are_echoed(worker: Worker) -> None:
    opened = [worker.lanes.open(plans, 4096 * plans[0]) for plans in ([11], [12])]
    lines = [FIRST_LANE + lane.number for lane in opened]
    assert worker.device.streams[0].signals == 4096 * 11
    assert [worker.words.slow(line) for line in lines] == [0, 1]
    with worker.lanes.held():
        assert worker.words.slow(lines[0]) == 0, "the call is answered later"
        del worker.plans[11]
    eventually(lambda: worker.words.slow(lines[0]) == 1)
    assert worker.handed.lanes, "after that, whoever takes the call"
    third = worker.lanes.open([11])
    assert worker.words.slow(FIRST_LANE + third.number) == 1


def test_a_closed_lane_echoes_nothing(worker: Worker) -> None:
    lane = worker.lanes.open([11]).number
    assert worker.words.slow(FIRST_LANE + lane) == 0
    worker.lanes.close(lane, 1)
    assert worker.words.slow(FIRST_LANE + lane) == 1


def test_a_round_that_was_timed_is_noted_once(worker: Worker) -> None:
    seen = FIRST.calls[0].histogram.seen
    worker.lanes.open([11])
    worker.device.streams[0].timed = [2500]
    eventually(lambda: bool(seen))
    time.sleep(0.01)
    assert seen == [2.5e-6]
    seen.clear()


def test_a_dry_lane_is_counted_and_answers_when_there_are_rounds_again(worker: Worker) -> None:
    lane = worker.lanes.open([11]).number
    rounds = worker.device.streams[0]
    eventually(lambda: rounds.left == KEPT)
    assert not worker.counted("lane_dry")
    worker.armed._lock.acquire()  # the thread that refills
    for _ in range(KEPT):
        assert worker.call(lane)
    assert not worker.call(lane, 0.02)
    worker.armed._lock.release()
    eventually(lambda: worker.counted("lane_dry") == 1)
    line = FIRST_LANE + lane
    eventually(lambda: worker.words.done(line) == 1)


@pytest.mark.parametrize(("plans", "why"), [([11, 12], "one plan"), ([12], "more than enqueue")])
def test_what_cannot_be_armed_is_handed_on_with_the_reason(worker: Worker, plans: list[int], why: str) -> None:
    opened = worker.lanes.open(plans)
    assert opened.mode == selection_pb2.LANE_MODE_POLLED
    assert why in opened.reason
    assert len(worker.handed.lanes) == 1
    worker.lanes.close(opened.number, 1)
    assert not worker.handed.lanes


def test_no_more_lanes_are_armed_than_may_be(worker: Worker) -> None:
    modes = [worker.lanes.open([11]) for _ in range(3)]
    assert [one.mode for one in modes] == [selection_pb2.LANE_MODE_ARMED] * 2 + [selection_pb2.LANE_MODE_POLLED]
    assert "2 lanes are armed" in modes[2].reason
    worker.lanes.close(modes[0].number, 1)
    assert worker.lanes.open([11]).mode == selection_pb2.LANE_MODE_ARMED


def test_held_lanes_hold_nothing_up_and_lose_no_call(worker: Worker) -> None:
    lanes = [worker.lanes.open([11]).number for _ in range(2)]
    stop = threading.Event()
    served = [0, 0]

    def calls(place: int) -> None:
        while not stop.is_set():
            assert worker.call(lanes[place])
            served[place] += 1

    threads = [threading.Thread(target=calls, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        with worker.lanes.held():
            worker.device.free(0.0)
        time.sleep(0.003)
    stop.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for place, rounds in enumerate(worker.device.streams):
        assert served[place] > 0
        assert rounds.writes >= served[place]  # a round whose answer was given up is run again
        assert rounds.answered() == served[place]
        assert rounds.spared > 0
        assert rounds.armed_ever > 1


def test_a_call_that_comes_while_the_lane_is_held_waits(worker: Worker) -> None:
    lane = worker.lanes.open([11]).number
    with worker.lanes.held(), worker.lanes.held():
        assert not worker.call(lane, 0.05)
        assert not worker.device.streams[0].writes
    line = FIRST_LANE + lane
    eventually(lambda: worker.words.done(line) == 1)
    assert worker.words.ready(line) == 0


def test_what_nobody_holds_the_lanes_for_is_found_by_its_length(worker: Worker) -> None:
    lane = worker.lanes.open([11]).number
    account = Account(10)
    worker.queue.enter(account)
    started = time.monotonic()
    worker.device.free()
    assert time.monotonic() - started < 2
    worker.queue.leave(account)
    assert worker.call(lane)


def test_a_launch_that_rounds_hold_up_ends(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (worker.lanes.open([11]).number for _ in range(2))
    rounds = worker.device.streams[1]
    eventually(lambda: all(stream.left for stream in worker.device.streams))
    refill = rounds.refill

    def held_up() -> bool:
        monkeypatch.setattr(rounds, "refill", refill)
        worker.device.free()
        return True

    monkeypatch.setattr(rounds, "refill", held_up)
    eventually(lambda: rounds.spared > 0)
    for lane in (first, second):
        assert worker.call(lane)


def test_a_defect_while_rounds_are_given_up_leaves_the_lanes_to_be_armed_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = worker.lanes.open([11]).number
    rounds = worker.device.streams[0]
    eventually(lambda: rounds.left > 0)
    give_up, raised = rounds.give_up, threading.Event()

    def defect() -> None:
        monkeypatch.setattr(rounds, "give_up", give_up)
        raised.set()
        raise RuntimeError("a defect")

    account = Account(10)
    worker.queue.enter(account)
    monkeypatch.setattr(rounds, "give_up", defect)
    assert raised.wait(5)
    worker.queue.leave(account)
    assert worker.call(lane)


def test_a_lane_whose_plan_is_gone_is_handed_on_and_the_others_stay_armed(worker: Worker) -> None:
    worker.plans[13] = FIRST
    lane, other = (worker.lanes.open([plan]).number for plan in (11, 13))
    assert worker.call(lane)
    with worker.lanes.held():
        del worker.plans[11]
    eventually(lambda: len(worker.handed.lanes) == 1)
    assert worker.device.streams[0].closed
    assert not worker.call(lane, 0.05)
    for _ in range(3 * KEPT):
        assert worker.call(other)
    assert not worker.device.streams[1].closed
    worker.lanes.close(lane, 1)
    assert not worker.handed.lanes


def test_a_lane_is_not_armed_again_once_its_plan_is_gone(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the plan goes, and the lanes are held and let go, between two looks of the thread that arms."""
    lane = worker.lanes.open([11]).number
    rounds = worker.device.streams[0]
    eventually(lambda: rounds.left > 0)
    give_away = worker.armed._give_away

    def late() -> None:
        give_away()
        if worker.plans.pop(11, None) is not None:
            with worker.lanes.held():
                rounds.armed_ever = 0

    monkeypatch.setattr(worker.armed, "_give_away", late)
    with worker.lanes.held():
        pass
    eventually(lambda: len(worker.handed.lanes) == 1)
    assert not rounds.armed_ever
    assert not worker.call(lane, 0.05)


def test_a_lost_device_leaves_the_answers_to_the_fallback(worker: Worker) -> None:
    worker.lanes.open([11])
    worker.device.failed = True
    eventually(lambda: len(worker.handed.lanes) == 1)


def test_the_end_empties_the_streams_and_tells_who_waits(worker: Worker) -> None:
    lane = worker.lanes.open([11]).number
    with worker.lanes.held():
        assert not worker.call(lane, 0.01)
        worker.lanes.close_all(1)
    line = FIRST_LANE + lane
    assert worker.words.done(line) == 1
    assert worker.words.failure(line).code == selection_pb2.LANE_FAILURE_SESSION_ENDED
    assert worker.device.streams[0].closed
    worker.lanes.close_all(1)
