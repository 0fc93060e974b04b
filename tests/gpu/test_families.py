"""Every kernel family on a GPU, by what once went wrong in some implementation, judged by the `torch` family.

Every 16-bit pattern in one call, rows at the bound of everything that a kernel keeps somewhere, batches of lengths of
all kinds, replays with other data, streams side by side, chains of dependent launches, a hundred thousand calls.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.gpu.agree import DTYPES, agrees, forms_of, skip_unless_served
from topkd.kernels import _dispatch, merge_topk, run_select, select_topk, supports, validate_select
from topkd.kernels._family import Job
from topkd.kernels.cluster import MAX_K, SIZES, ClusterFamily
from topkd.kernels.radix_register import RadixRegisterFamily
from topkd.kernels.radix_register_shape import LIST_CAPACITY
from topkd.kernels.radix_wide import LIST_CAPACITY as WIDE_CAPACITY
from topkd.kernels.small import SmallFamily
from topkd.kernels.split_merge import GRAIN

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FAMILIES = [family.name for family in _dispatch.families() if family.capturable]
MOST = {"small": SmallFamily.most, "radix_register": RadixRegisterFamily.most}
"""Scores of a row that a family holds at most, where there is a bound."""


@pytest.fixture(autouse=True)
def served() -> None:
    skip_unless_served("radix_wide")
    torch.manual_seed(7)


def needs(kernel: str) -> None:
    unmet = supports(kernel, torch.zeros(1, 512, device="cuda"), 2)
    if unmet is not None:
        pytest.skip(unmet)


# ------------------------------------------------------------------------------------------------------ kinds of rows


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", FAMILIES)
def test_every_16_bit_pattern_at_once(kernel: str, dtype: str, largest: bool) -> None:
    """Of f32 the patterns are the upper halves; the lower ones are random."""
    needs(kernel)
    width = 1 << 16
    while width > MOST.get(kernel, width):
        width //= 2
    for _ in range(2):
        patterns = torch.randperm(1 << 16, device="cuda").to(torch.int32)
        if dtype == "float32":
            patterns = patterns << 16 | torch.randint(1 << 16, (1 << 16,), device="cuda", dtype=torch.int32)
        else:
            patterns = patterns.to(torch.int16)
        scores = patterns.view(DTYPES[dtype]).view(-1, width)
        assert all(agrees(kernel, scores, k, largest=largest) for k in (1, 300, 2048, min(4096, width - 1)))


def crowded(rows: int, width: int, crowd: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows of which so many scores lie in [1, 1.25), one bin of their high bits, and the others below."""
    scores = torch.rand(rows, width, device="cuda") / 2
    places = torch.rand(rows, width, device="cuda").argsort(dim=1)[:, :crowd]
    return scores.scatter_(1, places, 1 + torch.rand(rows, crowd, device="cuda") / 4).to(dtype)


def around(bound: int) -> tuple[int, int, int]:
    return bound - 1, bound, bound + 1


def crowds(kernel: str) -> set[int]:
    """Returns how many entries the lists of a family hold, for all of its variants, and the widths of its counts."""
    few = {32, 1024, 2048}
    if kernel == "cluster":
        from topkd.kernels import cluster32_layout, cluster_layout

        layouts = [layout(size) for size in SIZES for layout in (cluster_layout.Layout, cluster32_layout.Layout)]
        return few | {layout.capacity for layout in layouts} | {layout.capacity * layout.cluster for layout in layouts}
    if kernel in ("small", "radix_register"):
        family = {"small": SmallFamily, "radix_register": RadixRegisterFamily}[kernel]
        return few | {shape.list_capacity(size) for size, shapes in family.shapes.items() for shape in shapes}
    return few | {WIDE_CAPACITY}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", FAMILIES)
def test_crowds_at_the_bounds_of_the_lists(kernel: str, dtype: str) -> None:
    needs(kernel)
    most = MOST.get(kernel, 1 << 20)
    for bound in crowds(kernel):
        done = 0
        for crowd in around(bound):
            width = min(most, 2 * bound + 3)
            if crowd < width:
                scores = crowded(2, width, crowd, DTYPES[dtype])
                done += sum(agrees(kernel, scores, k) for k in {1, *around(min(crowd, MAX_K - 1))})
        assert done > 10 or bound >= most


def widths(kernel: str, size: int) -> set[int]:
    """Returns lengths of rows at which a family goes about a row in another way, for scores of `size` bytes."""
    if kernel == "cluster":
        chunks = {4096, 16_384, 32_768, 65_535, 65_536}  # of a CTA: sizes are chosen by them, counts are of 16 bits
        return {chunk * cluster for chunk in chunks for cluster in SIZES if chunk * cluster <= 1 << 18}
    if kernel in ("small", "radix_register"):
        family = {"small": SmallFamily, "radix_register": RadixRegisterFamily}[kernel]
        held = {min(shape.scores(size), family.most) for shape in family.shapes[size]}
        return held | {part for part in (32, 256, 512, 1024, 2048) if part < family.most}
    if kernel == "split_merge":
        return {parts * GRAIN * 16 for parts in (2, 3, 8, 33)} | {WIDE_CAPACITY, 2 * WIDE_CAPACITY}
    return {32, 1024, 8192, 16_384, 32 * 1024, 65_536}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", FAMILIES)
def test_lengths_at_the_bounds_of_a_row(kernel: str, dtype: str) -> None:
    needs(kernel)
    for bound in widths(kernel, DTYPES[dtype].itemsize):
        for width in around(bound):
            if width > MOST.get(kernel, width):
                continue
            scores = torch.randn(2, width + 1, device="cuda").to(DTYPES[dtype])
            equal = torch.zeros_like(scores)
            for k in {1, min(width // 2, 2048)}:
                assert agrees(kernel, scores[:, 1:], k)
                assert agrees(kernel, (scores if k == 1 else equal)[:, :width], k)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_k_at_the_bounds_of_what_is_listed(kernel: str) -> None:
    needs(kernel)
    bound = {"cluster": MAX_K, "small": min(LIST_CAPACITY, SmallFamily.most)}.get(kernel, LIST_CAPACITY)
    width = MOST.get(kernel, 40_000)
    for dtype in (torch.bfloat16, torch.float32):
        scores = torch.randn(2, width, device="cuda").to(dtype)
        assert sum(agrees(kernel, scores, k) for k in around(bound) if k < width) > 1


def ragged(rows: int, width: int, k: int) -> torch.Tensor:
    """Returns lengths of all kinds in one batch: none, negative, about k, whole rows, more than there is."""
    special = [0, -5, 1, 2, k - 1, k, k + 1, 2 * k, width - 1, width, width + 1, 2**31 - 1, -(2**31)]
    lengths = torch.randint(0, width + 1, (rows,), dtype=torch.int64)
    lengths[: len(special)] = torch.tensor(special)
    return lengths[torch.randperm(rows)].to("cuda", torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", FAMILIES)
def test_ragged_batches(kernel: str, dtype: str) -> None:
    needs(kernel)
    for width in (4_600, 30_001, 140_000):
        if width > MOST.get(kernel, width):
            continue
        scores = torch.randn(64, width + 5, device="cuda").to(DTYPES[dtype])[:, 5:]
        for k in (1, 512, 2048):
            lengths = ragged(64, width, k)
            starts = torch.randint(-9, width + 9, (64,), device="cuda", dtype=torch.int32)
            assert agrees(kernel, scores, k, lengths=lengths)
            assert agrees(kernel, scores, k, lengths=lengths, row_starts=starts)
            assert agrees(kernel, scores, k, lengths=lengths[::4].contiguous(), next_n=4)
            assert agrees(kernel, scores, k, lengths=lengths, max_length=max(width // 2, 2 * k))


# ------------------------------------------------------------------------------------- graphs, streams, launches, calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", FAMILIES)
def test_replays_with_rows_and_lengths_of_other_kinds(kernel: str, dtype: str) -> None:
    needs(kernel)
    width, k = min(20_000, MOST.get(kernel, 20_000)), 700
    scores = torch.randn(16, width, device="cuda").to(DTYPES[dtype])
    lengths = torch.full((16,), width, dtype=torch.int32, device="cuda")
    options = {"lengths": lengths, **forms_of(kernel, scores, k)[1]}
    assert "ties" in options
    indices = torch.empty(16, k, dtype=torch.int32, device="cuda")
    request = validate_select(scores, k, kernel=kernel, out_indices=indices, **options)
    run_select(request)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_select(request)
    normal = torch.randn(16, width, device="cuda")
    kinds = [normal, crowded(16, width, width // 2, torch.float32), torch.zeros_like(normal), normal.sort(dim=1).values]
    kinds += [torch.full_like(normal, float("nan")), normal.relu(), -normal.sort(dim=1).values, normal * 1e-42]
    for kind in kinds:
        scores.copy_(kind)
        lengths.copy_(ragged(16, width, k))
        indices.fill_(-77)
        graph.replay()
        assert torch.equal(indices, select_topk(scores, k, kernel="torch", **options).indices)


def test_families_side_by_side_on_streams_of_their_own() -> None:
    work: list[tuple[Any, torch.Tensor, torch.Tensor, torch.cuda.Stream]] = []
    for dtype in (torch.bfloat16, torch.float32):
        for kernel in FAMILIES:
            width = min(50_000, MOST.get(kernel, 50_000))
            scores = torch.randn(3, width, device="cuda").to(dtype)
            options = forms_of(kernel, scores, 600)[1]
            want = select_topk(scores, 600, kernel="torch", **options).indices
            out = torch.empty_like(want)
            request = validate_select(scores, 600, kernel=kernel, out_indices=out, **options)
            run_select(request)
            work.append((request, out, want, torch.cuda.Stream()))
    bad = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in work]
    torch.cuda.synchronize()
    for _ in range(100):
        for (request, out, want, stream), wrong in zip(work, bad, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(-77)
                run_select(request)
                wrong += (out != want).sum()
    torch.cuda.synchronize()
    assert [int(one) for one in bad] == [0] * len(work)


DEPENDENT = [one.name for one in _dispatch.families() if "dependent" in inspect.signature(one.run).parameters]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", DEPENDENT)
def test_a_chain_of_dependent_launches(kernel: str, dtype: str) -> None:
    """Each launch takes as lengths what the one before it wrote, and may start before that one has ended."""
    needs(kernel)
    rows, width, links = 24, MOST.get(kernel, 60_000), 32
    family: Any = next(one for one in _dispatch.families() if one.name == kernel)
    scores = torch.randn(rows, width, device="cuda").to(DTYPES[dtype])
    chain = torch.full((links + 1, rows), width, dtype=torch.int32, device="cuda")
    jobs = []
    for link in range(links):
        out = chain[link + 1].view(rows, 1)
        request = validate_select(scores, 1, kernel=kernel, lengths=chain[link], out_indices=out)
        family.warm(request)
        jobs.append(Job(request, out, None))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for job in jobs:
            family.run([job], dependent=True)
    best = torch.arange(width, 0, -1, device="cuda") // 40  # falls slowly, so that the chain stays long
    for turn in range(4):
        scores.copy_(torch.randn(rows, width, device="cuda") if turn % 2 else best.expand(rows, width).flip(1))
        chain[1:].fill_(-77)
        if turn < 2:
            for job in jobs:
                family.run([job], dependent=True)
        else:
            graph.replay()
        assert int(wrong_links(scores.float(), chain)) == 0


def wrong_links(keys: torch.Tensor, chain: torch.Tensor) -> torch.Tensor:
    """Returns how many entries of a chain are not the best of as many scores as the entry before says."""
    places, bad = torch.arange(keys.shape[1], device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    for lengths, got in zip(chain[:-1].clamp(min=0), chain[1:], strict=True):
        peak = torch.where(places < lengths[:, None], keys, -torch.inf).amax(dim=1)
        chosen = keys.gather(1, got.clamp(min=0).long()[:, None])[:, 0]
        right = (got >= 0) & (got < lengths) & (chosen == peak)
        bad += (torch.where(lengths == 0, got == -1, right)).logical_not().sum()
    return bad


class Repeated:
    """A call that is captured again and again between a poisoning and a comparison of its output."""

    def __init__(self, call: Any, out: torch.Tensor, want: torch.Tensor, times: int) -> None:
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(times):
                out.fill_(-77)
                call()
                self.bad += (out != want).sum()


@pytest.mark.parametrize("kernel", [*FAMILIES, "merge"])
def test_a_hundred_thousand_calls(kernel: str) -> None:
    needs("radix_wide" if kernel == "merge" else kernel)
    rows, k = 2, 200
    width = 8000 if kernel in ("merge", "split_merge") else min(20_000, MOST.get(kernel, 20_000))
    scores = torch.randn(rows, width, device="cuda")
    order: dict[str, Any] = {"order": "index", "ties": "lowest"}
    want = select_topk(scores, k, kernel="torch", **order).indices
    out = torch.empty_like(want)
    if kernel == "merge":
        places = torch.arange(width, dtype=torch.int32, device="cuda").expand(rows, width).contiguous()
        chosen = torch.empty(rows, k, device="cuda")
        repeated = Repeated(
            lambda: merge_topk(scores, places, k, out_indices=out, out_values=chosen, **order), out, want, 100
        )
    else:
        request = validate_select(scores, k, kernel=kernel, out_indices=out, **order)
        repeated = Repeated(lambda: run_select(request), out, want, 100)
        for _ in range(5_000):  # and as they come
            run_select(request)
        assert torch.equal(out, want)
    for _ in range(1_000):
        repeated.graph.replay()
    torch.cuda.synchronize()
    assert int(repeated.bad) == 0


def test_the_families_that_take_dependent_launches_are_known() -> None:
    assert {"cluster", "small", "radix_register"} <= set(DEPENDENT)
    assert isinstance(next(one for one in _dispatch.families() if one.name == "cluster"), ClusterFamily)
