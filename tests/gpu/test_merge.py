"""The kernel of `merge_topk` on a GPU: against torch operations, bit for bit where the answer is unique."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from topkd.kernels import _merge, merge_topk, validate_merge
from topkd.kernels._torch_merge import merge_by_torch
from topkd.kernels.merge import MAX_K, MergeKernel

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ORDERS = ("index", "value")
TIES = ("lowest", "highest")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
INDICES = [torch.int32, torch.int64]


@pytest.fixture(autouse=True)
def served() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    small = torch.zeros(1, 2, device="cuda")
    unmet = MergeKernel().unmet(validate_merge(small, small.int(), 1))
    if unmet is not None:
        pytest.skip(unmet)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def by_torch(values: torch.Tensor, indices: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = indices.new_empty(values.shape[0], k), values.new_empty(values.shape[0], k)
    merge_by_torch(validate_merge(values, indices, k, **options), *out)
    return out


def both(values: torch.Tensor, indices: torch.Tensor, k: int, **options: Any) -> None:
    """The kernel gives what torch operations give."""
    assert _merge._KERNEL.unmet(validate_merge(values, indices, k, **options)) is None
    poison = indices.new_full((values.shape[0], k), -77), values.new_full((values.shape[0], k), 77)
    got = merge_topk(values, indices, k, out_indices=poison[0], out_values=poison[1], **options)
    want = by_torch(values, indices, k, **options)
    assert got.values is not None
    assert torch.equal(got.indices, want[0]), options
    assert torch.equal(bits(got.values), bits(want[1])), options


def spread(rows: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Different indices in no order, some of them huge where the dtype holds them."""
    base = torch.stack([torch.randperm(count, device="cuda") for _ in range(rows)]).to(dtype)
    return base * 7919 if dtype == torch.int32 or count == 0 else base * (2**61 // count) - 2**60


def every(values: torch.Tensor, indices: torch.Tensor, k: int) -> None:
    for order, ties, largest in itertools.product(ORDERS, TIES, (True, False)):
        both(values, indices, k, order=order, ties=ties, largest=largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", INDICES)
def test_bounds_of_the_list(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    for count in (0, 1, 31, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 20000):
        values = torch.randn(3, count, device="cuda").to(dtype)
        indices = spread(3, count, index_dtype)
        for k in (1, 1000, MAX_K - 1, MAX_K):
            both(values, indices, k, order="value", ties="lowest")
            both(values, indices, k, order="index", ties="highest", largest=False)


@pytest.mark.parametrize("kind", ["equal", "zeros", "nan", "levels", "one-bin", "infinite", "any-bits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index_dtype", INDICES)
def test_crowded_rows(kind: str, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    random = torch.randn(4, 30000, device="cuda")
    anything = torch.randint(-(2**31), 2**31, (4, 30000), device="cuda", dtype=torch.int32).view(torch.float32)
    values = {
        "equal": torch.full_like(random, -2.5),
        "zeros": torch.where(random > 0, 0.0, -0.0),
        "nan": torch.full_like(random, float("nan")),
        "levels": (random * 4).round(),
        "one-bin": 1 + random.abs().clamp(max=1) / 4,
        "infinite": torch.where(random > 2, random, float("-inf")),
        "any-bits": anything,
    }[kind].to(dtype)
    every(values, spread(4, 30000, index_dtype), 1500)


@pytest.mark.parametrize("index_dtype", INDICES)
def test_gaps_and_short_rows(index_dtype: torch.dtype) -> None:
    values = (torch.randn(6, 9000, device="cuda") * 3).round()
    indices = spread(6, 9000, index_dtype)
    for some in (0.0, 0.02, 0.5, 0.999):
        thinned = torch.where(torch.rand(6, 9000, device="cuda") < some, indices, -1)
        every(values, thinned, 300)
        both(values, thinned, 300) if (thinned >= 0).sum(dim=1).max() <= 300 else None


def test_an_index_that_stands_often_counts_as_often() -> None:
    indices = torch.randint(0, 3, (3, 20000), device="cuda", dtype=torch.int32)
    every(torch.zeros(3, 20000, device="cuda"), indices, 4000)
    signed = torch.where(torch.rand(3, 20000, device="cuda") < 0.5, 0.0, -0.0)
    for order, ties in itertools.product(ORDERS, TIES):
        runs = [merge_topk(signed, indices, 4000, order=order, ties=ties) for _ in range(3)]
        assert all(torch.equal(runs[0].indices, run.indices) for run in runs)
        assert all(torch.equal(bits(runs[0].values), bits(run.values)) for run in runs)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_order_is_a_right_set(dtype: torch.dtype) -> None:
    values = (torch.randn(5, 50000, device="cuda") * 8).round().to(dtype)
    indices = spread(5, 50000, torch.int32)
    got = merge_topk(values, indices, 2048)
    want = by_torch(values, indices, 2048, order="value", ties="lowest")
    assert got.values is not None
    assert torch.equal(got.values.float().sort(descending=True).values, want[1].float())
    at = indices.argsort(dim=1)
    places = at.gather(1, torch.searchsorted(indices.gather(1, at), got.indices))
    assert torch.equal(indices.gather(1, places), got.indices)
    assert torch.equal(values.gather(1, places), got.values)
    assert all(row.unique().numel() == 2048 for row in got.indices)


def test_views_and_given_outputs() -> None:
    values = torch.randn(7, 5000, device="cuda")[:, 3:4900]
    indices = torch.randint(0, 2**40, (7, 6000), device="cuda")[:, 1:4898]
    out = torch.full((7, 900), -5, device="cuda"), torch.full((7, 901), 5.0, device="cuda")
    given: dict[str, Any] = {"out_indices": out[0][:, 3:803], "out_values": out[1][:, :800]}
    merge_topk(values, indices, 800, order="value", ties="lowest", **given)
    want = by_torch(values, indices, 800, order="value", ties="lowest")
    assert torch.equal(given["out_indices"], want[0])
    assert torch.equal(given["out_values"], want[1])
    assert (out[0][:, :3] == -5).all()
    assert (out[0][:, 803:] == -5).all()
    assert (out[1][:, 800:] == 5).all()


def test_graph_replays_with_other_data() -> None:
    values, indices = torch.randn(4, 30000, device="cuda"), spread(4, 30000, torch.int32)
    out = indices.new_empty(4, 500), values.new_empty(4, 500)
    options: dict[str, Any] = {"order": "index", "ties": "lowest"}
    merge_topk(values, indices, 500, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        merge_topk(values, indices, 500, out_indices=out[0], out_values=out[1], **options)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "nothing is allocated"
    for _ in range(10):
        values.normal_()
        indices.copy_(spread(4, 30000, torch.int32))
        graph.replay()
        want = by_torch(values, indices, 500, **options)
        assert torch.equal(out[0], want[0])
        assert torch.equal(out[1], want[1])


def test_what_the_kernel_does_not_serve_refuses_capture() -> None:
    values, indices = torch.randn(1, 10000, device="cuda"), spread(1, 10000, torch.int32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="torch"):
        merge_topk(values, indices, MAX_K + 1)


def test_a_cold_kernel_refuses_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_merge, "_KERNEL", MergeKernel())
    values, indices = torch.randn(1, 100, device="cuda"), spread(1, 100, torch.int32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="warm it"):
        merge_topk(values, indices, 3)
