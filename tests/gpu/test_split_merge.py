"""The `split_merge` family on a GPU: graphs, streams, repetition, large rows against the `torch` family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.agree import skip_unless_served
from topkd.kernels import _dispatch, run_select_batch, select_topk, validate_select
from topkd.kernels.split_merge import SplitMergeFamily

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def served() -> None:
    skip_unless_served("split_merge", 256)


def both(scores: torch.Tensor, k: int, **options: Any) -> None:
    """Outputs that the contract makes unique are the same of both families, bit for bit."""
    got = select_topk(scores, k, kernel="split_merge", **options)
    want = select_topk(scores, k, kernel="torch", **options)
    assert torch.equal(got.indices, want.indices)
    if got.values is not None and want.values is not None:
        assert torch.equal(bits(got.values), bits(want.values))


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "width", "k"), [(1, 1048577, 2048), (11, 33793, 512), (3, 262144, 20000), (2, 4096, 1)]
)
def test_large_rows(dtype: torch.dtype, rows: int, width: int, k: int) -> None:
    scores = torch.randn(rows, width, device="cuda").to(dtype)
    both(scores, k, order="index", ties="lowest", values=True)
    both(scores, k, order="index", ties="highest", largest=False)
    if k <= 8192:
        both(scores, k, order="value", ties="highest", values=True)
    few = max(1, k // 16)
    both(scores[:, 3:], few, group=8, order="index", ties="lowest", values=True, pin_newest=True)


@pytest.mark.parametrize("kind", ["equal", "zeros", "nan", "plateau", "ascending", "one-bin", "infinite"])
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
        "infinite": torch.where(random > 2, random, float("-inf")),
    }[kind].to(dtype)
    for ties in ("lowest", "highest"):
        both(scores, 4000, order="value", ties=ties, values=True)
        both(scores, 9000, order="index", ties=ties)
        both(scores, 4000, order="index", ties=ties, values=True, drop_neg_inf=True)


@pytest.mark.parametrize("k", [1, 63, 64, 65, 1000])
def test_every_length_around_the_ends_of_parts(k: int) -> None:
    width = 9000
    scores = torch.randn(60, width, device="cuda").bfloat16()
    ends = torch.arange(0, width + 65, 64, device="cuda", dtype=torch.int32)
    lengths = torch.cat([ends - 1, ends, ends + 1, torch.arange(0, 200, device="cuda", dtype=torch.int32)])
    for some in lengths[: lengths.numel() // 60 * 60].view(-1, 60):
        both(scores, k, lengths=some.contiguous(), order="index", ties="lowest", values=True)
        both(scores, k, lengths=some.contiguous(), order="value", ties="highest", values=True, pin_newest=True)


def test_graph_replays_with_other_data() -> None:
    scores = torch.empty(8, 50000, device="cuda")
    lengths = torch.empty(8, device="cuda", dtype=torch.int32)
    indices = torch.empty(8, 300, device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"lengths": lengths, "order": "index", "ties": "lowest"}
    scores.normal_()
    lengths.fill_(50000)
    select_topk(scores, 300, kernel="split_merge", out_indices=indices, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_topk(scores, 300, kernel="split_merge", out_indices=indices, **options)
    for _ in range(10):
        scores.normal_()
        lengths.random_(0, 50005)
        graph.replay()
        select_topk(torch.randn(8, 60000, device="cuda"), 700, kernel="split_merge")  # with scratch memory of its own
        assert torch.equal(indices, select_topk(scores, 300, kernel="torch", **options).indices)


def test_a_capture_that_torch_knows_nothing_of() -> None:
    """Its scratch memory is nobody else's at the replays, though torch has no pool for such a graph."""
    driver: Any = pytest.importorskip("cuda.bindings.driver")

    def done(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result
        return result[1] if len(result) > 1 else None

    scores = torch.randn(8, 50_000, device="cuda")
    indices = torch.empty(8, 300, device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"order": "index", "ties": "lowest"}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        select_topk(scores, 300, kernel="split_merge", out_indices=indices, **options)
        stream.synchronize()
        done(driver.cuStreamBeginCapture(stream.cuda_stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        select_topk(scores, 300, kernel="split_merge", out_indices=indices, **options)
        graph = done(driver.cuStreamEndCapture(stream.cuda_stream))
        ready = done(driver.cuGraphInstantiate(graph, 0))
        others = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1 << 10, 1 << 16, 1 << 18, 1 << 21)]
        for _ in range(5):
            scores.normal_()
            done(driver.cuGraphLaunch(ready, stream.cuda_stream))
            for other in others:
                other.fill_(255)
            assert torch.equal(indices, select_topk(scores, 300, kernel="torch", **options).indices)
        taken = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in range(1 << 10, 1 << 18, 1 << 12)]
        done(driver.cuGraphLaunch(ready, stream.cuda_stream))
        stream.synchronize()
        assert all(bool((one == 7).all()) for one in taken), "a replay wrote into memory that is another's"
        done(driver.cuGraphExecDestroy(ready))
        done(driver.cuGraphDestroy(graph))


def test_a_cold_variant_refuses_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(2, 100, device="cuda")
    monkeypatch.setattr(_dispatch, "_FAMILIES", (SplitMergeFamily(), _dispatch._FAMILIES[-1]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="warm it"):
        select_topk(scores, 3, kernel="split_merge")


def test_streams_do_not_share_scratch_memory() -> None:
    inputs = [torch.randn(2, 300000, device="cuda") for _ in range(4)]
    want = [select_topk(one, 2000, kernel="torch", order="index", ties="lowest").indices for one in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    outputs = [torch.empty(2, 2000, device="cuda", dtype=torch.int32) for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(200):
        for scores, stream, out in zip(inputs, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                select_topk(scores, 2000, kernel="split_merge", order="index", ties="lowest", out_indices=out)
    torch.cuda.synchronize()
    for got, one in zip(outputs, want, strict=True):
        assert torch.equal(got, one)


def test_a_batch_over_many_tensors() -> None:
    inputs = [torch.randn(2, 30000, device="cuda") for _ in range(5)]
    options: dict[str, Any] = {"kernel": "split_merge", "order": "value", "ties": "lowest", "values": True}
    results = run_select_batch([validate_select(one, 300, **options) for one in inputs])
    for scores, got in zip(inputs, results, strict=True):
        want = select_topk(scores, 300, **{**options, "kernel": "torch"})
        assert torch.equal(got.indices, want.indices)
        assert got.values is not None
        assert want.values is not None
        assert torch.equal(got.values, want.values)


def test_many_calls_give_one_answer() -> None:
    scores = torch.randn(4, 300000, device="cuda", dtype=torch.bfloat16)
    first = select_topk(scores, 500, kernel="split_merge", order="value", ties="lowest").indices
    again = torch.empty_like(first)
    for _ in range(2000):
        select_topk(scores, 500, kernel="split_merge", order="value", ties="lowest", out_indices=again)
    assert torch.equal(first, again)
