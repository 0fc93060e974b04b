"""A worker that is killed during a call: its client hears of it at once and goes on with the next, others do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import topkd
from tests.e2e import answers, engine, processes, scrape
from tests.e2e.answers import UNIQUE, best
from tests.e2e.calls import start_call
from tests.e2e.conftest import Launch
from tests.e2e.servers import Running

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch()


@dataclass
class Held:
    """A client with what must survive its session."""

    client: topkd.Client
    scores: Any
    out: Any
    plan: topkd.Plan
    worker: int

    def check(self) -> None:
        """Everything that was made before works: memory, outputs, the plan."""
        for seed in (1, 2):
            self.scores[...] = answers.rows(seed, 4, 1000)
            want = best(np.asarray(self.scores), 30)
            result = self.client.select_topk(self.scores, 30, out_indices=self.out, **UNIQUE)
            assert result.indices is self.out
            assert np.array_equal(self.out, want)
            assert np.array_equal(self.plan().indices, want)


@pytest.fixture(scope="module")
def held(own: Running) -> Iterator[Held]:
    worker = own.spare()
    with topkd.Client(own.socket_dir, attach_timeout=30) as client:
        scores = client.empty((4, 1000), "float32")
        out = client.empty((4, 30), "int32")
        made = Held(client, scores, out, client.plan(scores, 30, **UNIQUE), worker)
        made.check()
        yield made


def test_a_killed_worker_is_named_at_once_and_everything_is_restored(own: Running, held: Held) -> None:
    scores, k = engine.long_call(held.client)
    other_worker = _successor(own, held.worker)
    with topkd.Client(own.socket_dir) as other:
        kept = answers.rows(9, 2, 200)
        assert np.array_equal(other.select_topk(kept, 7, **UNIQUE).indices, best(kept, 7))
        call = start_call(held.client.select_topk, scores, k)
        processes.wait_until_busy(held.worker, 0.3)
        killed_at = processes.kill(held.worker)
        call.wait()
        assert isinstance(call.error, topkd.SessionLostError), repr(call)
        assert call.ended - killed_at < 1.0, f"the client heard of it after {call.ended - killed_at:.2f} s"
        held.check()
        assert processes.alive(other_worker)
        assert np.array_equal(other.select_topk(kept, 7, **UNIQUE).indices, best(kept, 7))
    samples = scrape.wait_for(own.metrics_port, {"topkd_sessions": 1})
    assert scrape.total(samples, "topkd_sessions_ended_total", cause="worker_lost") == 1


def _successor(own: Running, taken: int) -> int:
    own.settle()
    return next(iter(own.workers() - {taken}))


def test_a_worker_that_dies_between_calls(own: Running, held: Held) -> None:
    own.settle()
    worker = _of_session(own, held)
    processes.kill(worker)
    processes.wait_until(lambda: not held.client.attached, 1.0, "the client notices")
    held.check()


def _of_session(own: Running, held: Held) -> int:
    """Returns the worker that computes when the client calls."""
    before = {pid: processes.cpu_seconds(pid) for pid in own.workers()}
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        held.plan()
    return max(before, key=lambda pid: processes.cpu_seconds(pid) - before[pid])


def test_a_spare_that_dies_is_replaced(own: Running, held: Held) -> None:
    own.settle()
    worker = _of_session(own, held)
    (spare,) = own.workers() - {worker}
    starts = scrape.total(own.metrics(), "topkd_worker_starts_total")
    processes.kill(spare)
    scrape.wait_for(own.metrics_port, {"topkd_worker_starts_total": starts + 1})
    held.check()
    own.settle()
    assert len(own.workers()) == 2


def test_waiting_calls_of_a_killed_worker_all_hear_of_it(own: Running, held: Held) -> None:
    own.settle()
    scores, k = engine.long_call(held.client)
    worker = _of_session(own, held)
    calls = [start_call(held.client.select_topk, scores, k) for _ in range(6)]
    processes.wait_until_busy(worker, 0.3)
    killed_at = processes.kill(worker)
    for call in calls:
        call.wait()
        assert isinstance(call.error, topkd.SessionLostError), repr(call)
        assert call.ended - killed_at < 1.5
    held.check()
