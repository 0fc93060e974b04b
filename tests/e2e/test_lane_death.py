"""Clients, workers and the front are killed, or halted, with lanes open and calls under way: nobody waits for ever."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import topkd
from tests.client.conftest import halt
from tests.e2e import answers, engine, processes, scrape
from tests.e2e.answers import UNIQUE, best
from tests.e2e.calls import start_call
from tests.e2e.conftest import Launch
from tests.e2e.engines import Engine
from tests.e2e.servers import Running
from topkd import _guard
from topkd._timeline import Timeline

pytestmark = pytest.mark.timeout(180)
ROWS, WIDTH, K = 4, 1000, 30
RELEASED_WITHIN = 5.0
"""A tenth of a second on a machine that is idle."""


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch()


@pytest.fixture(scope="module")
def steady(own: Running) -> Iterator[Engine]:
    """Another client, which calls a lane all the time and checks every bit."""
    other = Engine(own.socket_dir, "steady-lane")
    other.wait_for("calling")
    yield other
    report = other.finish()
    other.kill()
    assert report["calls"] > 50, report
    assert (report["wrong"], report["failed"]) == (0, 0), report
    assert report["longest"] < 3.0, report


class Held:
    """A client with a lane, its plan, and the process that serves it."""

    def __init__(self, own: Running, **options: Any) -> None:
        self.client = topkd.Client(own.socket_dir, attach_timeout=60, **options)
        self.client.connect()
        self.scores = self.client.empty((ROWS, WIDTH), "float32")
        self.plan = self.client.plan(self.scores, K, **UNIQUE)
        self.worker = processes.listener(self.client._core.session._data_path)  # type: ignore[union-attr]
        self.lane = self.plan.lane()
        self.check()

    def check(self, lane: topkd.Lane | None = None) -> None:
        """A lane answers right."""
        for seed in (1, 2):
            self.scores[...] = answers.rows(seed, ROWS, WIDTH)
            result = (lane or self.lane).call_host()
            assert np.array_equal(result.indices, best(np.asarray(self.scores), K))
            (lane or self.lane).check()

    def renewed(self) -> None:
        """The lane is broken; the next one, of the next session, works."""
        assert self.lane.broken
        with pytest.raises(topkd.SessionLostError):
            self.lane.check()
        with pytest.raises(topkd.SessionLostError):
            self.lane.call_host()
        self.lane.close()
        with self.plan.lane() as lane:
            self.check(lane)


@pytest.fixture
def held(own: Running) -> Iterator[Held]:
    made = Held(own)
    yield made
    made.client.close()


def long_lane(held: Held) -> topkd.Lane:
    scores, k = engine.long_call(held.client, 60.0)
    return held.client.plan(scores, k, timeout=60).lane(timeout=600)


@pytest.mark.parametrize("mode", ["lane", "steady-lane", "long-lane"])
def test_a_killed_client_leaves_no_lane(own: Running, steady: Engine, mode: str) -> None:
    own.settle()
    before = {name: scrape.total(own.metrics(), name) for name in ("topkd_sessions", "topkd_lanes", "topkd_plans")}
    workers = own.workers()
    victim = Engine(own.socket_dir, mode)
    victim.wait_for("idle" if mode == "lane" else "calling")
    scrape.wait_for(own.metrics_port, {"topkd_lanes": before["topkd_lanes"] + 1})
    own.settle()
    taken = [pid for pid in workers if not processes.alive(pid)]
    assert taken == []
    victim.kill()
    scrape.wait_for(own.metrics_port, before, 10)
    processes.wait_until(lambda: len(own.workers()) == len(workers), 20, "the victim's worker is gone")


def test_a_worker_that_dies_while_its_lane_is_idle(own: Running, steady: Engine, held: Held) -> None:
    processes.kill(held.worker)
    processes.wait_until(lambda: held.lane.broken, RELEASED_WITHIN, "the lane is broken")
    held.renewed()


def test_a_worker_that_dies_during_a_call(own: Running, steady: Engine, held: Held) -> None:
    call = start_call(long_lane(held).call_host)
    processes.wait_until_busy(held.worker, 0.3)
    killed_at = processes.kill(held.worker)
    call.wait()
    assert isinstance(call.error, topkd.SessionLostError), repr(call)
    assert call.ended - killed_at < RELEASED_WITHIN
    held.renewed()


OBSERVER = """
import ctypes, os, signal, sys, time
from topkd._words import Words
words, line, worker = Words(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
time.sleep(1.0)
assert words.done(line) == 0
os.kill(worker, signal.SIGKILL)
killed = time.monotonic()
while not words.done(line) and time.monotonic() < killed + 20:
    time.sleep(0.001)
print(time.monotonic() - killed, flush=True)
"""


def test_a_client_whose_interpreter_is_held_is_let_go_all_the_same(own: Running, held: Held) -> None:
    """As a stream would be: another process looks at the words, and kills the worker meanwhile."""
    lane = long_lane(held)
    page = held.client._core.session.words  # type: ignore[union-attr]
    call = start_call(lane.call_host)
    processes.wait_until_busy(held.worker, 0.3)
    command = [sys.executable, "-c", OBSERVER, str(page), str(lane.line), str(held.worker)]
    observer = subprocess.Popen(command, pass_fds=[page], stdout=subprocess.PIPE, text=True)
    assert observer.stdout is not None
    assert observer.stdout.readline() == "ready\n"
    began = time.monotonic()
    ctypes.PyDLL(None).sleep(8)  # holds the interpreter
    assert time.monotonic() - began > 7.5
    assert float(observer.stdout.readline()) < RELEASED_WITHIN
    observer.wait(10)
    observer.stdout.close()
    call.wait()
    assert isinstance(call.error, topkd.SessionLostError), repr(call)
    held.renewed()


def test_a_worker_that_hangs_breaks_the_lane_after_its_time(own: Running, steady: Engine) -> None:
    held = Held(own, timeout=60)
    brief = held.plan.lane(timeout=3.0)
    held.check(brief)
    with brief, held.plan.lane() as patient:
        halt(held.worker)
        for lane, seconds in ((brief, None), (patient, 0.3)):
            started = time.monotonic()
            with pytest.raises(topkd.DeadlineExceededError):
                lane.call_host(timeout=seconds)
            assert 0.2 < time.monotonic() - started < 3.0 + RELEASED_WITHIN
            assert lane.broken
            for call in (lane.call_host, lane.check):
                with pytest.raises(topkd.DeadlineExceededError):
                    call()
        assert not held.lane.broken
    processes.resume(held.worker)
    book = held.client._core.session.lanes  # type: ignore[union-attr]
    assert book is not None
    assert book.wait_for_place(1, 30), "the late calls are over: they write the same outputs"
    held.check()
    with held.plan.lane() as again:
        held.check(again)
    held.client.close()


@pytest.mark.parametrize("first", ["check", "lane"])
def test_what_the_watchdog_knows_first_is_the_sessions_loss(own: Running, first: str) -> None:
    """While the front is halted, nobody else tells the client that its worker is gone."""
    held = Held(own)
    session = held.client._core.session
    assert session is not None
    book = session.lanes  # type: ignore[attr-defined]
    timeline = Timeline(book.words, book.guard, 2, 0, ready_timeout=1.0, timeout=1.0)
    timeline._slots[0].accepted = 1  # as when a stream waits for an accepted call
    session.timeline, session._report = timeline, held.client._core._ordered_errors.append
    halt(own.pid)
    processes.kill(held.worker)
    processes.wait_until(lambda: book.words.end(0), RELEASED_WITHIN, "the watchdog lets the stream go")
    assert held.client.attached
    with pytest.raises(topkd.SessionLostError):
        held.client.check() if first == "check" else held.lane.check()
    assert not held.client.attached
    processes.resume(own.pid)
    if first == "lane":  # told of the lane, and still to be told of the accepted call
        with pytest.raises(topkd.SessionLostError):
            held.client.check()
    assert held.plan().indices.shape == (ROWS, K)  # of the next session, at once
    held.client.check()
    held.client.close()


def test_calls_in_a_row_do_not_make_a_lane_late(held: Held) -> None:
    with held.plan.lane(timeout=3.0) as lane:
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            lane.call_host()
        lane.check()


def test_a_closed_client_breaks_its_lanes(own: Running) -> None:
    held = Held(own)
    held.client.close()
    assert held.lane.broken
    with pytest.raises(topkd.SessionLostError):
        held.lane.call_host()


def test_a_killed_front_ends_a_call(launch: Launch) -> None:
    own = launch()
    held = Held(own)
    lane = long_lane(held)
    call = start_call(lane.call_host)
    processes.wait_until_busy(held.worker, 0.3)
    killed_at = processes.kill(own.pid)
    call.wait()
    assert isinstance(call.error, topkd.SessionLostError), repr(call)
    assert call.ended - killed_at < RELEASED_WITHIN
    processes.wait_until(lambda: not processes.alive(held.worker), 5, "the worker ends with the front")
    assert own.process is not None
    own.process.wait(10)
    own.start()
    held.renewed()
    held.client.close()


def test_the_watchdog_is_one_and_is_replaced(held: Held) -> None:
    process = _guard._kennel._process
    assert process is not None
    processes.kill(process.pid)
    processes.wait_until(lambda: not processes.alive(process.pid), 5, "it is gone")
    call = start_call(long_lane(held).call_host)
    processes.wait_until_busy(held.worker, 0.3)
    processes.kill(held.worker)
    call.wait()
    assert isinstance(call.error, topkd.SessionLostError), repr(call)
    held.renewed()
