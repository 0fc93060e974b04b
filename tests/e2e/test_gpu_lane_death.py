"""Streams that wait for calls when their worker, or the front, is killed or halted: all go on, and are told."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

import topkd
from tests.client.conftest import halt
from tests.e2e import processes
from tests.e2e.conftest import Launch
from tests.e2e.servers import Running
from topkd._lane import WaitsBy

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
ROWS, WIDTH, K = 4, 8192, 64
UNIQUE: Any = {"order": "index", "ties": "lowest"}
CALLS = 64
REPLAYS = 3
"""More calls than an armed lane has rounds in its stream, which a halted worker does not stop."""


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch("cuda")


class Held:
    """A client with a lane, a graph of its calls, and the process that serves it."""

    def __init__(self, own: Running, waits_by: WaitsBy, **options: Any) -> None:
        own.settle()
        self.client = topkd.Client(own.socket_dir, attach_timeout=60, ready_timeout=10, timeout=60, **options)
        self.client.connect()
        self.worker = processes.listener(self.client._core.session._data_path)  # type: ignore[union-attr]
        self.scores = self.client.empty((ROWS, WIDTH), torch.float32)
        self.plan = self.client.plan(self.scores, K, **UNIQUE)
        self.lane = self.plan.lane(waits_by=waits_by)
        assert (self.lane.mode, self.lane.waits_by) == ("armed", waits_by)
        self.check(self.lane)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(CALLS):
                self.lane()
        self.graph.replay()
        torch.cuda.synchronize()
        self.lane.check()

    def check(self, lane: topkd.Lane) -> None:
        """The lane answers right."""
        self.scores.copy_(torch.randperm(self.scores.numel(), device="cuda").view(self.scores.shape))
        got = lane().indices.clone()
        want = torch.topk(self.scores, K).indices.sort(dim=1).values.to(torch.int32)
        torch.cuda.synchronize()
        lane.check()
        assert torch.equal(got, want)

    def renewed(self) -> None:
        """The lane is broken and its graph hangs nobody; the next session's works."""
        for call in (self.lane.check, self.lane, self.lane.call_host):
            with pytest.raises(topkd.SessionLostError):
                call()
        with self.plan.lane() as lane:
            self.check(lane)
        self.graph.replay()  # the old session's: its page stays until its lane is closed
        torch.cuda.synchronize()
        self.lane.close()
        self.client.close()


def killer(pid: int, after: float) -> subprocess.Popen[bytes]:
    """Kills a process later, from another one."""
    return subprocess.Popen(["sh", "-c", f"sleep {after}; kill -9 {pid}"])


@pytest.mark.exclusive
def test_a_worker_that_dies_during_a_graph_while_the_interpreter_is_held(own: Running, waits_by: WaitsBy) -> None:
    held = Held(own, waits_by)
    halt(held.worker)  # so that the stream surely waits
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with killer(held.worker, 1.5):
        began.record()
        for _ in range(REPLAYS):
            held.graph.replay()
        ended.record()
        ctypes.PyDLL(None).sleep(6)  # holds the interpreter
        assert ended.query(), "the stream went on meanwhile"
    assert 500 < began.elapsed_time(ended) < 5500
    held.renewed()


@pytest.mark.parametrize("victim", ["worker", "front"])
def test_a_death_in_the_middle_of_graphs(launch: Launch, victim: str, waits_by: WaitsBy) -> None:
    own = launch("cuda")
    held = Held(own, waits_by)
    with killer(held.worker if victim == "worker" else own.pid, 0.2):
        until = time.monotonic() + 10
        while not held.lane.broken:
            assert time.monotonic() < until
            held.graph.replay()
            torch.cuda.synchronize()
    if victim == "front":
        assert own.process is not None
        own.process.wait(10)
        own.start()
    held.renewed()
    own.stop()


def test_a_worker_that_hangs_breaks_the_lane_after_its_time(own: Running, waits_by: WaitsBy) -> None:
    held = Held(own, waits_by)
    with held.plan.lane(timeout=2.0, waits_by=waits_by) as brief:
        held.check(brief)
        halt(held.worker)
        started = time.monotonic()
        with contextlib.suppress(topkd.DeadlineExceededError):  # if it takes so long to enqueue them
            for _ in range(REPLAYS * CALLS):
                brief()
        torch.cuda.synchronize()
        assert 0.3 < time.monotonic() - started < 15.0
        for call in (brief.check, brief):
            with pytest.raises(topkd.DeadlineExceededError):
                call()
        assert not held.lane.broken
    processes.resume(held.worker)
    book = held.client._core.session.lanes  # type: ignore[union-attr]
    assert book is not None
    assert book.wait_for_place(0, 30), "the late call is over: it writes the same outputs"
    held.check(held.lane)
    with held.plan.lane(timeout=1.0, waits_by=waits_by) as again:
        held.check(again)
        time.sleep(1.5)
        held.check(again)
    held.client.close()


def test_a_lane_that_is_closed_at_once_makes_its_calls(own: Running, waits_by: WaitsBy) -> None:
    held = Held(own, waits_by)
    for _ in range(30):
        held.scores.copy_(torch.randperm(held.scores.numel(), device="cuda").view(held.scores.shape))
        with held.plan.lane(waits_by=waits_by) as lane:
            torch.cuda._sleep(1_000_000)
            got = lane().indices
        want = torch.topk(held.scores, K).indices.sort(dim=1).values.to(torch.int32)
        torch.cuda.synchronize()
        lane_words = held.client._core.session.lanes  # type: ignore[union-attr]
        assert lane_words is not None
        assert lane_words.words.failure(lane.line).total == 0
        assert torch.equal(got, want)
    torch.cuda._sleep(100_000_000)
    result = held.lane()
    held.client.close()  # waits for it
    torch.cuda.synchronize()
    assert torch.equal(result.indices, want)


def test_a_graph_that_outlives_its_lane_hangs_no_stream(own: Running, waits_by: WaitsBy) -> None:
    held = Held(own, waits_by)
    held.lane.close()
    book = held.client._core.session.lanes  # type: ignore[union-attr]
    assert book is not None
    processes.wait_until(lambda: book.given_back == 1, 10, "the lane is closed")
    ended = torch.cuda.Event()
    held.graph.replay()
    ended.record()
    processes.wait_until(ended.query, 20, "its calls fail one by one")
    held.client.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
