"""Plans on a GPU: replays of their graph, in other captures, streams, threads and devices, dependent launch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.gpu.agree import skip_unless_served
from topkd.kernels import _dispatch, kernels, plan, select_topk, supports

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
UNIQUE: dict[str, Any] = {"order": "index", "ties": "lowest"}
FAMILIES = [family.name for family in _dispatch.families() if family.capturable]


@pytest.fixture(autouse=True)
def served() -> None:
    skip_unless_served("radix_wide")


def want(scores: torch.Tensor, k: int, **options: Any) -> torch.Tensor:
    return select_topk(scores, k, kernel="torch", **UNIQUE, **options).indices


@pytest.mark.parametrize("kernel", [*FAMILIES, "torch", "auto"])
def test_every_run_reads_the_tensors_anew(kernel: str) -> None:
    scores = torch.randn(4, 4500, device="cuda")
    lengths = torch.full((4,), 4500, dtype=torch.int32, device="cuda")
    unmet = supports(kernel, scores, 300, lengths=lengths, **UNIQUE)
    if unmet is not None:
        pytest.skip(unmet)
    selection = plan(scores, 300, lengths=lengths, kernel=kernel, **UNIQUE)
    assert selection.kernel in kernels()
    assert kernel in (selection.kernel, "auto")
    for _ in range(5):
        scores.normal_()
        lengths.random_(-3, 4600)
        selection.result.indices.fill_(-77)
        assert torch.equal(selection.run().indices, want(scores, 300, lengths=lengths))


def test_runs_on_any_stream_in_any_thread() -> None:
    scores = torch.randn(2, 30_000, device="cuda")
    selection, expected = plan(scores, 500, **UNIQUE), want(scores, 500)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()

    def run(stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(stream):
            copy = selection.run().indices.clone()
        stream.synchronize()
        return copy

    def on_the_current_stream() -> torch.Tensor:
        return selection.run().indices.cpu()

    for stream in streams:
        assert torch.equal(run(stream), expected)
    with ThreadPoolExecutor(1) as fresh:  # a thread in which nothing has used the device
        assert torch.equal(fresh.submit(on_the_current_stream).result(), expected.cpu())
    with ThreadPoolExecutor(3) as pool:
        for copy in pool.map(run, streams):
            assert torch.equal(copy, expected)


@pytest.mark.parametrize("dependent", [False, True])
def test_a_run_inside_another_capture(dependent: bool) -> None:
    scores = torch.randn(2, 60_000, device="cuda")
    selection = plan(scores, 500, dependent=dependent, kernel="cluster", **UNIQUE)
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(2, 500, dtype=torch.int32, device="cuda")
    with torch.cuda.graph(graph):
        for _ in range(3):
            scores.mul_(-1.0)
            total.copy_(selection.run().indices)
    for _ in range(4):
        scores.normal_()
        graph.replay()
        assert torch.equal(total, want(scores, 500))
    assert torch.equal(selection.run().indices, want(scores, 500))


def test_a_plan_cannot_be_made_in_a_capture() -> None:
    scores = torch.randn(1, 100, device="cuda")
    with pytest.raises(RuntimeError, match="before"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        plan(scores, 3)
    torch.cuda.synchronize()
    assert plan(scores, 3).run().indices.shape == (1, 3)


def test_what_has_no_dependent_launch_says_so() -> None:
    with pytest.raises(ValueError, match="dependent"):
        plan(torch.randn(1, 100, device="cuda"), 3, kernel="radix_wide", dependent=True)


def test_the_current_device_does_not_matter() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    scores = torch.randn(2, 9000, device="cuda:1")
    selection = plan(scores, 50, **UNIQUE)
    assert torch.cuda.current_device() == 0
    assert torch.equal(selection.run().indices, want(scores, 50))


def test_enqueued_runs_outlive_their_plan() -> None:
    scores = torch.randn(64, 100_000, device="cuda")
    expected = want(scores, 2000)
    out = torch.empty_like(expected)
    with plan(scores, 2000, out_indices=out, **UNIQUE) as selection:
        for _ in range(50):
            selection.run()
    assert torch.equal(out, expected)
