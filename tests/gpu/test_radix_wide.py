"""The `radix_wide` family on a GPU: graphs, repetition, large rows against the `torch` family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.agree import skip_unless_served
from topkd.kernels import _dispatch, select_topk
from topkd.kernels.radix_wide import RadixWideFamily

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def served() -> None:
    skip_unless_served("radix_wide")


def both(scores: torch.Tensor, k: int, **options: Any) -> None:
    """Outputs that the contract makes unique are the same of both families, bit for bit."""
    got = select_topk(scores, k, kernel="radix_wide", **options)
    want = select_topk(scores, k, kernel="torch", **options)
    assert torch.equal(got.indices, want.indices)
    if got.values is not None and want.values is not None:
        assert torch.equal(got.values.nan_to_num(7.0), want.values.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width", "k"), [(1, 1048577, 2048), (150, 33793, 2048), (3, 262144, 20000)])
def test_large_rows(dtype: torch.dtype, rows: int, width: int, k: int) -> None:
    scores = torch.randn(rows, width, device="cuda").to(dtype)
    both(scores, k, order="index", ties="lowest", values=True)
    both(scores, k, order="index", ties="highest", largest=False)
    both(scores[:, 3:], k // 8, group=8, order="index", ties="lowest", values=True, pin_newest=True)


@pytest.mark.parametrize("kind", ["equal", "zeros", "nan", "plateau", "ascending", "one-bin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_crowded_rows(kind: str, dtype: torch.dtype) -> None:
    random = torch.randn(5, 70000, device="cuda")
    scores = {
        "equal": torch.full_like(random, -2.5),
        "zeros": torch.where(random > 0, 0.0, -0.0),
        "nan": torch.full_like(random, float("nan")),
        "plateau": torch.where(random > 2, random, 0.0),
        "ascending": random.sort(dim=1).values,
        "one-bin": 1 + random.abs().clamp(max=1) / 4,
    }[kind].to(dtype)
    for ties in ("lowest", "highest"):
        both(scores, 4000, order="value", ties=ties, values=True)
        both(scores, 9000, order="index", ties=ties)


def test_graph_replays_with_other_data() -> None:
    scores = torch.empty(8, 20000, device="cuda")
    lengths = torch.empty(8, device="cuda", dtype=torch.int32)
    indices = torch.empty(8, 300, device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"lengths": lengths, "order": "index", "ties": "lowest"}
    scores.normal_()
    lengths.fill_(20000)
    select_topk(scores, 300, kernel="radix_wide", out_indices=indices, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_topk(scores, 300, kernel="radix_wide", out_indices=indices, **options)
    for _ in range(10):
        scores.normal_()
        lengths.random_(0, 20005)
        graph.replay()
        assert torch.equal(indices, select_topk(scores, 300, kernel="torch", **options).indices)


def test_a_cold_variant_refuses_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(2, 100, device="cuda")
    monkeypatch.setattr(_dispatch, "_FAMILIES", (RadixWideFamily(), _dispatch._FAMILIES[-1]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="warm it"):
        select_topk(scores, 3, kernel="radix_wide")


def test_many_calls_give_one_answer() -> None:
    scores = torch.randn(4, 30000, device="cuda", dtype=torch.bfloat16)
    first = select_topk(scores, 500, kernel="radix_wide", order="value", ties="lowest").indices
    again = torch.empty_like(first)
    for _ in range(2000):
        select_topk(scores, 500, kernel="radix_wide", order="value", ties="lowest", out_indices=again)
    assert torch.equal(first, again)


def test_a_batch_over_many_tensors() -> None:
    """Jobs of one plan key run as one launch over a table; with other row counts, by launches of their own."""
    requests, wanted = [], []
    for place in range(64):
        rows = 3 if place % 4 else 5
        scores = torch.randn(rows, 5000 + place, device="cuda")[:, place : place + 4900]
        lengths = torch.randint(0, 4900, (rows,), device="cuda", dtype=torch.int32)
        options: dict[str, Any] = {"lengths": lengths, "order": "index", "ties": "lowest", "values": True}
        requests.append(_dispatch.validate_select(scores, 200, kernel="radix_wide", **options))
        wanted.append(select_topk(scores, 200, kernel="torch", **options))
    for got, want in zip(_dispatch.run_select_batch(requests), wanted, strict=True):
        assert torch.equal(got.indices, want.indices)
        assert got.values is not None
        assert want.values is not None
        assert torch.equal(got.values, want.values)
