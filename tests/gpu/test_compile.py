"""The in-process calls in compiled code on a GPU: by inductor, in CUDA graphs of its own and of the caller's."""

from __future__ import annotations

import pytest

from tests.compiled import compiled_anew
from topkd.kernels import merge_topk, select_topk

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compilers that torch calls
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
ROWS, WIDTH, K = 4, 8192, 64


fresh = pytest.fixture(autouse=True)(compiled_anew)


def step(scores: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = select_topk(scores * 2, K, lengths=lengths, values=True, order="value", ties="lowest")
    assert found.values is not None
    return found.indices + 1, found.values * 2, merge_topk(found.values, found.indices, 8, order="value").indices


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, WIDTH, device="cuda"), torch.randint(100, WIDTH, (ROWS,), device="cuda", dtype=torch.int32)


def wanted(scores: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    masked = (scores * 2).masked_fill(torch.arange(WIDTH, device="cuda") >= lengths[:, None], float("-inf"))
    values, indices = masked.sort(dim=1, descending=True, stable=True)
    return indices[:, :K].int() + 1, values[:, :K] * 2, indices[:, :8].int()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor(mode: str | None) -> None:
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(6):  # reduce-overhead: warm-up, capture, replays
        given = inputs()
        for got, want in zip(compiled(*given), wanted(*given), strict=True):
            assert torch.equal(got, want)


def test_compiled_code_in_a_graph_of_the_caller() -> None:
    compiled = torch.compile(step, fullgraph=True)
    given = inputs()
    compiled(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*given)
    for _ in range(5):
        for mine, new in zip(given, inputs(), strict=True):
            mine.copy_(new)
        graph.replay()
        for got, want in zip(captured, wanted(*given), strict=True):
            assert torch.equal(got, want)
