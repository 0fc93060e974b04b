"""The `radix_register` and `small` families on a GPU: every kind of row at every bound, graphs, PDL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.case import Case
from tests.conformance.backends import Backend, InProcess
from tests.conformance.directed import directed
from tests.gpu.agree import skip_unless_served
from tests.near_rows import KINDS, near_cases
from tests.oracle import check
from tests.patterns import FILLS, fill
from topkd.kernels import _dispatch, select_topk, validate_select
from topkd.kernels._family import Job
from topkd.kernels.radix_register import RadixRegisterFamily
from topkd.kernels.small import SmallFamily

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FAMILIES = {"radix_register": RadixRegisterFamily, "small": SmallFamily}


@pytest.fixture(autouse=True)
def served() -> None:
    skip_unless_served("radix_register")


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend("cuda", InProcess("cuda"))


@pytest.mark.parametrize("kernel", FAMILIES)
@pytest.mark.parametrize("part", range(8))
def test_directed(backend: Backend, kernel: str, part: int) -> None:
    done = 0
    for case in list(directed().values())[part::8]:
        try:
            backend.run(replace(case, kernel=kernel))
        except ValueError as error:
            assert "cannot serve" in str(error)  # noqa: PT017
        else:
            done += 1
    assert done > 30


def tensor(bits: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"int{bits.itemsize * 8}").copy()).cuda().view(DTYPES[dtype])


@pytest.mark.parametrize("kind", FILLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", FAMILIES)
def test_every_kind_of_row_at_every_capacity(kernel: str, dtype: str, kind: str) -> None:
    size = DTYPES[dtype].itemsize
    family = FAMILIES[kernel]
    for shape in family.shapes[size]:
        most = min(shape.scores(size), family.most)  # the largest shape holds more than the family takes
        for width in (most - 1, most):
            bits = np.stack([fill(kind, dtype, seed, width) for seed in range(2)])
            scores = tensor(bits, dtype)
            case = Case(storage=bits.reshape(-1), dtype=dtype, rows=2, width=width, k=1)
            for k in (1, 40, width // 8, width // 2, width - 1):
                for largest in (True, False):
                    options: dict[str, Any] = {"largest": largest}
                    indices = select_topk(scores, min(k, 8192), kernel=kernel, **options).indices
                    check(replace(case, k=min(k, 8192), **options), indices.cpu().numpy(), None)
                    options |= {"order": "index", "ties": "highest" if largest else "lowest"}
                    indices = select_topk(scores, min(k, 8192), kernel=kernel, **options).indices
                    check(replace(case, k=min(k, 8192), **options), indices.cpu().numpy(), None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", FAMILIES)
def test_rows_against_the_bins_of_16_bits(backend: Backend, kernel: str, dtype: str, kind: str) -> None:
    for width in (1000, 2048, 4096, 4600, 16_384, 33_000):
        if width <= FAMILIES[kernel].most:
            for case in near_cases(kind, dtype, width):
                backend.run(replace(case, kernel=kernel, k=min(case.k, 8192)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4096, 16_384, 32_768])
def test_windows_groups_and_values(dtype: str, width: int) -> None:
    memory = torch.randn(20, width + 11, device="cuda").to(DTYPES[dtype])
    lengths = torch.randint(-5, width + 5, (20,), device="cuda", dtype=torch.int32)
    starts = torch.randint(-5, width // 2, (20,), device="cuda", dtype=torch.int32)
    for scores in (memory[:, :width], memory[:, 3 : width + 3]):
        for options in (
            {"lengths": lengths, "row_starts": starts, "order": "index", "ties": "lowest"},
            {"order": "value", "ties": "lowest"},
            {"group": 8, "lengths": lengths, "row_starts": starts, "order": "index", "ties": "lowest"},
            {"group": 32, "pin_newest": True, "order": "value", "ties": "highest"},
            {"lengths": lengths[::4].contiguous(), "next_n": 4, "order": "index", "ties": "highest", "largest": False},
        ):
            got = select_topk(scores, 500, kernel="radix_register", values=True, **options)
            want = select_topk(scores, 500, kernel="torch", values=True, **options)
            assert torch.equal(got.indices, want.indices)
            assert got.values is not None
            assert torch.equal(got.values, want.values)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_graph_replays_with_other_data(kernel: str) -> None:
    scores = torch.zeros(8, 4000, device="cuda")
    lengths = torch.full((8,), 4000, device="cuda", dtype=torch.int32)
    indices = torch.empty(8, 300, device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"lengths": lengths, "order": "index", "ties": "lowest"}
    select_topk(scores, 300, kernel=kernel, out_indices=indices, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        select_topk(scores, 300, kernel=kernel, out_indices=indices, **options)
    for _ in range(10):
        scores.normal_()
        lengths.random_(0, 4005)
        graph.replay()
        assert torch.equal(indices, select_topk(scores, 300, kernel="torch", **options).indices)


def test_a_cold_variant_refuses_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    family = RadixRegisterFamily()
    job = Job(
        validate_select(torch.randn(2, 100, device="cuda"), 3),
        torch.empty(2, 3, dtype=torch.int32, device="cuda"),
        None,
    )
    with pytest.raises(RuntimeError, match="warm it"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        family.run([job])
    torch.cuda.synchronize()
    family.warm(job.request)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        family.run([job])
    assert any(family.name == one.name for one in _dispatch.families())


def test_dependent_launches_and_streams() -> None:
    family = RadixRegisterFamily()
    scores = torch.randn(4, 16_384, device="cuda", dtype=torch.bfloat16)
    want = select_topk(scores, 2048, kernel="torch", order="index", ties="lowest").indices
    request = validate_select(scores, 2048, order="index", ties="lowest")
    streams = [torch.cuda.Stream() for _ in range(4)]
    outputs = [torch.zeros(4, 2048, dtype=torch.int32, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, output in zip(streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                family.run([Job(request, output, None)] * 2, dependent=True)
    torch.cuda.synchronize()
    for output in outputs:
        assert torch.equal(output, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_calls_give_one_answer(dtype: str) -> None:
    scores = torch.randn(150, 16_000, device="cuda").to(DTYPES[dtype])
    values = select_topk(scores, 512, kernel="torch", order="value", ties="lowest", values=True).values
    assert values is not None
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    indices = torch.empty(150, 512, dtype=torch.int32, device="cuda")
    for _ in range(300):
        indices.fill_(-1)
        select_topk(scores, 512, kernel="radix_register", out_indices=indices)
        found = scores.gather(1, indices.long().clamp(min=0)).sort(dim=1, descending=True).values
        ordered = indices.sort(dim=1).values
        bad += (found != values).sum() + (ordered[:, 1:] == ordered[:, :-1]).sum() + (indices < 0).sum()
    assert int(bad) == 0
