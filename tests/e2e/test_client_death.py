"""A client that is killed during a call, and clients that live: nobody notices, nothing is left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

import topkd
from tests.e2e import answers, processes, raw, scrape
from tests.e2e.answers import UNIQUE, best
from tests.e2e.conftest import Launch
from tests.e2e.engine import MEMORY_BYTES
from tests.e2e.engines import Engine
from tests.e2e.servers import Running

pytestmark = pytest.mark.timeout(120)
GAUGES = ("topkd_sessions", "topkd_regions", "topkd_region_bytes", "topkd_plans", "topkd_queued_requests")
BACK_WITHIN = 2.0


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch()


@pytest.fixture(scope="module")
def steady(own: Running) -> Iterator[Engine]:
    """Another client, which calls all the time and checks every bit."""
    engine = Engine(own.socket_dir, "steady")
    engine.wait_for("calling")
    yield engine
    engine.kill()


def gauges(own: Running) -> dict[str, float]:
    page = own.metrics()
    return {name: scrape.total(page, name) for name in GAUGES if name != "topkd_queued_requests"}


def test_a_killed_client_leaves_nothing_and_others_go_on(own: Running, steady: Engine) -> None:
    own.settle()
    before, workers = gauges(own), own.workers()
    kept = _worker_of_steady(own)
    memory = sum(processes.memory_bytes(pid) for pid in workers)
    spare = (workers - {kept}).pop()
    victim = Engine(own.socket_dir, "long")
    victim.wait_for("calling")
    held = gauges(own)
    assert held["topkd_region_bytes"] - before["topkd_region_bytes"] >= MEMORY_BYTES
    assert held["topkd_plans"] == before["topkd_plans"] + 1
    assert processes.memory_bytes(spare) - memory / len(workers) > MEMORY_BYTES / 2, "the worker has touched the memory"
    own.settle()  # the successor of the spare that the victim took
    processes.wait_until_busy(spare, 0.3)
    killed_at = processes.kill(victim.pid)
    processes.wait_until(lambda: not processes.alive(spare), BACK_WITHIN, "the victim's worker is gone")
    left = BACK_WITHIN - (time.monotonic() - killed_at)
    scrape.wait_for(own.metrics_port, {**before}, max(left, 0.5))
    assert time.monotonic() - killed_at < BACK_WITHIN + 0.5
    now = own.workers()
    assert len(now) == len(workers)
    assert kept in now
    assert sum(processes.memory_bytes(pid) for pid in now) < memory + (64 << 20)
    assert len(list(own.socket_dir.glob("w-*.sock"))) == len(now), "a dead worker's socket is left"
    victim.kill()
    report = steady.finish()
    assert report["calls"] > 50, report
    assert (report["wrong"], report["failed"]) == (0, 0), report
    assert report["longest"] < 2.0, report


def _worker_of_steady(own: Running) -> int:
    """Returns the worker that computes while another is only warm."""
    seen = {pid: processes.cpu_seconds(pid) for pid in own.workers()}
    time.sleep(0.5)
    return max(seen, key=lambda pid: processes.cpu_seconds(pid) - seen[pid])


def test_an_idle_client_is_not_reaped(own: Running) -> None:
    scores = answers.rows(1, 2, 500)
    with topkd.Client(own.socket_dir) as client:
        array = client.empty(scores.shape, "float32")
        array[...] = scores
        plan = client.plan(array, 9, **UNIQUE)
        attaches = scrape.total(own.metrics(), "topkd_attaches_total")
        time.sleep(4)
        assert client.attached
        started = time.monotonic()
        assert np.array_equal(plan().indices, best(scores, 9))
        assert time.monotonic() - started < 1.0, "the first call after a pause hangs"
        assert scrape.total(own.metrics(), "topkd_attaches_total") == attaches


def at_rest(own: Running) -> dict[str, float]:
    """Returns the gauges once every earlier session has ended and a spare is warm."""
    own.settle()
    scrape.wait_for(own.metrics_port, {"topkd_sessions": 0, "topkd_regions": 0, "topkd_plans": 0})
    return gauges(own)


def test_a_client_that_closes_leaves_nothing(own: Running) -> None:
    before = at_rest(own)
    with topkd.Client(own.socket_dir) as client:
        kept = client.empty((64, 1024), "float32")
        kept[...] = 3
        client.plan(kept, 5)()
        assert gauges(own)["topkd_sessions"] == before["topkd_sessions"] + 1
    scrape.wait_for(own.metrics_port, before, BACK_WITHIN)
    assert bool((kept == 3).all()), "arrays outlive the client"


def test_a_client_that_dies_while_it_attaches(own: Running) -> None:
    before = at_rest(own)
    for _ in range(3):
        with closing(raw.Side(own.socket_dir)) as side:
            side.send(raw.attach_request().SerializeToString())
    scrape.wait_for(own.metrics_port, before, 20)
    own.settle()
    # A worker that was started for a client that left meanwhile ends by itself once it is ready.
    processes.wait_until(lambda: len(own.workers()) == 1, 20, "one worker, the spare")
