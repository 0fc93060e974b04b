"""The front is killed during a call: no process stays, the client hears of it at once and works with the next one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import topkd
from tests.e2e import answers, engine, processes, raw
from tests.e2e.answers import UNIQUE, best
from tests.e2e.calls import start_call
from tests.e2e.conftest import Launch
from tests.e2e.servers import Running, health

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch()


@pytest.fixture(scope="module")
def client(own: Running) -> Iterator[topkd.Client]:
    with topkd.Client(own.socket_dir, attach_timeout=30) as attached:
        attached.connect()
        yield attached


def test_a_second_server_is_refused_and_the_first_unharmed(own: Running, client: topkd.Client) -> None:
    second = Running(own.socket_dir)
    ended = subprocess.run(second.command(), capture_output=True, timeout=60, check=False, cwd="/")
    assert ended.returncode not in (0, -9), ended
    told = (ended.stdout + ended.stderr).decode()
    assert f"pid {own.pid}" in told, told
    assert "Traceback" not in told, told
    assert own.process is not None
    assert own.process.poll() is None
    with raw.front(own.socket_dir) as channel:
        assert health(channel) == "SERVING"
    scores = answers.rows(1, 2, 100)
    assert np.array_equal(client.select_topk(scores, 5, **UNIQUE).indices, best(scores, 5))


def test_a_killed_front_takes_its_workers_along_and_the_client_comes_back(own: Running, client: topkd.Client) -> None:
    own.settle()
    scores, out = client.empty((4, 1000), "float32"), client.empty((4, 30), "int32")
    plan = client.plan(scores, 30, **UNIQUE)
    epoch = client.info().epoch
    _check(client, scores, out, plan)
    matrix, k = engine.long_call(client)
    workers = own.workers()
    assert len(workers) == 2, workers
    call = start_call(client.select_topk, matrix, k)
    worker = _busy(workers)
    killed_at = processes.kill(own.pid)
    call.wait()
    assert isinstance(call.error, topkd.SessionLostError), repr(call)
    assert call.ended - killed_at < 1.0, f"the client heard of it after {call.ended - killed_at:.2f} s"
    processes.wait_until(lambda: not any(map(processes.alive, workers)), 2.0, "no worker outlives the front")
    assert time.monotonic() - killed_at < 2.5, f"worker {worker} or the spare took too long"
    _refuses_without_a_server(own)
    _selects_by_itself(own)
    assert own.process is not None
    own.process.wait(5)
    own.start()
    _check(client, scores, out, plan)
    assert client.info().epoch != epoch, "a restarted server has a new epoch"


def _busy(workers: set[int]) -> int:
    """Waits until one of the workers computes, and returns it."""
    before = {pid: processes.cpu_seconds(pid) for pid in workers}

    def busy() -> int:
        return next((pid for pid in workers if processes.cpu_seconds(pid) - before[pid] > 0.3), 0)

    return processes.wait_until(busy, 10, "a worker computes")


def _check(client: topkd.Client, scores: Any, out: Any, plan: topkd.Plan) -> None:
    for seed in (1, 2):
        scores[...] = answers.rows(seed, 4, 1000)
        want = best(np.asarray(scores), 30)
        client.select_topk(scores, 30, out_indices=out, **UNIQUE)
        assert np.array_equal(out, want)
        assert np.array_equal(plan().indices, want)


def _refuses_without_a_server(own: Running) -> None:
    with topkd.Client(own.socket_dir, attach_timeout=0.3) as stranger:
        started = time.monotonic()
        with pytest.raises(topkd.UnavailableError):
            stranger.select_topk(answers.rows(1, 1, 8), 2)
        assert time.monotonic() - started < 3.0


def _selects_by_itself(own: Running) -> None:
    scores = answers.rows(3, 4, 300)
    with topkd.Client(own.socket_dir, on_unavailable="local") as alone:
        result = alone.select_topk(scores, 11, **UNIQUE)
    assert result.local
    assert np.array_equal(result.indices, best(scores, 11))
