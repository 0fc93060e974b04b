"""Remote selections in compiled code on a GPU: inductor's graphs, and those of the caller, hold a lane's calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import topkd
from tests.compiled import compiled_anew
from tests.e2e.conftest import Launch

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compilers that torch calls
]
ROWS, WIDTH, K = 4, 8192, 64
UNIQUE: Any = {"order": "value", "ties": "lowest", "values": True}


fresh = pytest.fixture(autouse=True)(compiled_anew)


@pytest.fixture(scope="module")
def client(launch: Launch) -> Iterator[topkd.Client]:
    own = launch("cuda")
    with topkd.Client(own.socket_dir, device="cuda:0", timeout=60, attach_timeout=60, ready_timeout=10) as attached:
        attached.connect()
        yield attached


@pytest.fixture
def plan(client: topkd.Client) -> Iterator[topkd.Plan]:
    scores = client.empty((ROWS, WIDTH), torch.float32)
    with client.plan(scores, K, **UNIQUE) as plan:
        plan.run()  # loads what a first call loads
        torch.cuda.synchronize()
        yield plan


def best(scores: Any) -> tuple[Any, Any]:
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    return indices[:, :K].int(), values[:, :K]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("by_lane", [False, True])
def test_inductor(plan: topkd.Plan, by_lane: bool, mode: str | None) -> None:
    from topkd import torch_ops

    lane = plan.lane() if by_lane else None
    select = torch_ops.PlanOperator(plan, lane)

    @torch.compile(fullgraph=True, mode=mode)
    def step(x: Any) -> tuple[Any, ...]:
        first = select.new(input=x * 2)
        second = select(input=x * -3)
        return first.indices, first.values, second.indices + 1, second.values * 2

    for _ in range(6):  # reduce-overhead: warm-up, capture, replays
        x = torch.randn(ROWS, WIDTH, device="cuda")
        got = [tensor.clone() for tensor in step(x)]
        least, low = best(x * -3)
        for one, want in zip(got, (*best(x * 2), least + 1, low * 2), strict=True):
            assert torch.equal(one, want)
    torch.cuda.synchronize()
    if lane is not None:
        lane.check()
        lane.close()


def test_a_graph_of_the_caller_holds_compiled_calls_of_a_lane(plan: topkd.Plan) -> None:
    from topkd import torch_ops

    with plan.lane() as lane:
        select = torch_ops.PlanOperator(plan, lane)
        step = torch.compile(lambda x: select(input=x + 1).indices * 2, fullgraph=True)
        x = torch.randn(ROWS, WIDTH, device="cuda")
        step(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(x)
        for _ in range(50):
            x.copy_(torch.randn(ROWS, WIDTH, device="cuda"))
            graph.replay()
            assert torch.equal(captured, best(x + 1)[0] * 2)
        lane.check()


def test_a_request_in_capture_is_refused(client: topkd.Client, plan: topkd.Plan) -> None:
    from topkd import torch_ops

    select, remote = torch_ops.PlanOperator(plan), torch_ops.ClientOperator(client)
    scores = torch.randn(ROWS, WIDTH, device="cuda")
    for call in (select, lambda: remote.select_topk(scores, K)):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(topkd.CaptureError), torch.cuda.graph(graph):
            call()
    assert torch.equal(remote.select_topk(scores, K, **UNIQUE).indices, best(scores)[0])
