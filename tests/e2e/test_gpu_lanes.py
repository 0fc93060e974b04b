"""Lanes on CUDA streams: eager and captured calls, callers on the host, and the end of a worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import topkd
from tests.e2e import processes
from tests.e2e.conftest import Launch
from tests.e2e.servers import Running

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
ROWS, WIDTH, K = 4, 8192, 64
UNIQUE: Any = {"order": "index", "ties": "lowest"}


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch("cuda")


@pytest.fixture(scope="module")
def client(own: Running) -> Iterator[topkd.Client]:
    with topkd.Client(own.socket_dir, device="cuda:0", timeout=60, attach_timeout=60, ready_timeout=10) as attached:
        attached.connect()
        yield attached


def best(scores: Any) -> Any:
    return torch.topk(scores, K).indices.sort(dim=1).values.to(torch.int32)


def renew(scores: Any) -> None:
    scores.copy_(torch.randperm(scores.numel(), device="cuda").view(scores.shape))


def test_calls_are_in_the_order_of_the_stream(client: topkd.Client) -> None:
    scores = client.empty((ROWS, WIDTH), torch.float32)
    renew(scores)
    with client.plan(scores, K, **UNIQUE) as plan, plan.lane() as lane:
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        (lane().indices != best(scores)).sum()  # loads what a first call loads
        torch.cuda.synchronize()
        for _ in range(300):
            renew(scores)
            wrong += (lane().indices != best(scores)).sum()
        torch.cuda.synchronize()
        lane.check()
        assert int(wrong) == 0


def test_a_graph_holds_calls_of_two_plans(client: topkd.Client) -> None:
    scores = client.empty((ROWS, WIDTH), torch.float32)
    renew(scores)
    most, least = client.plan(scores, K, **UNIQUE), client.plan(scores, K, largest=False, **UNIQUE)
    with client.lane(most, least) as lane:
        lane(), lane(least)
        copies = [torch.empty(ROWS, K, dtype=torch.int32, device="cuda") for _ in range(64)]
        copies[0].copy_(most._state.output.indices)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for place, copy in enumerate(copies):
                copy.copy_(lane(least if place % 2 else most).indices)
        for _ in range(5):
            renew(scores)
            graph.replay()
            torch.cuda.synchronize()
            lane.check()
            wants = best(scores), best(-scores)
            assert all(torch.equal(copy, wants[place % 2]) for place, copy in enumerate(copies))


def test_a_caller_on_the_host(client: topkd.Client) -> None:
    scores = client.empty((ROWS, WIDTH), torch.float32)
    with client.plan(scores, K, **UNIQUE) as plan, plan.lane() as lane:
        for _ in range(50):
            renew(scores)
            torch.cuda.synchronize()
            assert torch.equal(lane.call_host().indices, best(scores))


def test_a_dead_worker_releases_a_graph_of_64_calls(launch: Launch) -> None:
    server = launch("cuda")
    worker = server.spare()
    with topkd.Client(server.socket_dir, timeout=60, attach_timeout=60) as doomed:
        scores = doomed.empty((ROWS, WIDTH), torch.float32)
        renew(scores)
        plan = doomed.plan(scores, K, **UNIQUE)
        lane = plan.lane()
        lane()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(64):
                lane()
        graph.replay()
        torch.cuda.synchronize()
        killed_at = processes.kill(worker)
        while not lane.broken:  # rounds that were armed may answer some more replays
            assert time.monotonic() - killed_at < 10
            graph.replay()
            torch.cuda.synchronize()
        with pytest.raises(topkd.SessionLostError):
            lane.check()
        with pytest.raises(topkd.SessionLostError):
            lane()
        with plan.lane() as again:  # the next session's
            assert torch.equal(again.call_host().indices, best(scores))
        lane.close()
    server.stop()
