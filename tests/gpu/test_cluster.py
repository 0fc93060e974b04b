"""The `cluster` family on a GPU, through `select_topk`: the contract's cases, order, capture, streams, PDL, sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.cluster_sample import sampled_elements
from tests.conformance.backends import Backend, InProcess
from tests.conformance.directed import directed, rows_of
from tests.oracle import Case, check
from topkd.kernels import select_topk, supports, validate_select
from topkd.kernels._cute_compile import arch_of, capability
from topkd.kernels._family import Job
from topkd.kernels.cluster import SIZES, ClusterFamily, resident_clusters

pytestmark = pytest.mark.gpu


def served(case: Case) -> bool:
    if case.dtype == "float32" or case.pooled or case.k > (2048 if case.order == "value" else 4096):
        return False
    ordered = case.order != "any" or case.ties != "any"
    if case.group == 1:
        return not case.pin_newest and not case.drop_neg_inf and (case.largest or not ordered)
    return case.group == 8 and not ordered


CASES = {name: case for name, case in directed().items() if served(case)}
KINDS = ("near-one", "one-bin", "ascending", "descending", "plateau", "equal", "specials", "any-bits", "nan", "zeros")


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend("cluster", InProcess("cuda"))


def judge(bits: np.ndarray, k: int, indices: torch.Tensor, **options: Any) -> None:
    rows, width = bits.shape
    case = Case(storage=bits.reshape(-1), dtype="bfloat16", rows=rows, width=width, k=k, **options)
    check(case, indices.cpu().numpy(), None)


def judge_on_device(scores: torch.Tensor, k: int, indices: torch.Tensor) -> None:
    """The same for rows without NaN that are too many for the oracle, by torch.topk."""
    ordered = indices.sort(dim=1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    assert int(ordered[:, 0].min()) >= 0
    chosen = scores.gather(1, indices.long()).float().sort(dim=1, descending=True).values
    assert torch.equal(chosen, scores.float().topk(k, dim=1).values)


def rows_on_gpu(kind: str, rows: int, width: int) -> tuple[np.ndarray, torch.Tensor]:
    bits = rows_of(kind, rows, width, 1).storage.reshape(rows, width)
    return bits, torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_directed(backend: Backend, name: str) -> None:
    backend.run(replace(CASES[name], kernel="cluster"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 131_072), (2, 300_001), (40, 70_000), (300, 9_000)])
def test_kinds_and_shapes(kind: str, rows: int, width: int) -> None:
    bits, scores = rows_on_gpu(kind, rows, width)
    for k in (1, 512, 2048, 4096):
        judge(bits, k, select_topk(scores, k, kernel="cluster").indices)


@pytest.mark.parametrize("ties", ["lowest", "highest"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 131_072), (2, 70_001), (40, 20_000)])
def test_ascending_indices(kind: str, rows: int, width: int, ties: str) -> None:
    bits, scores = rows_on_gpu(kind, rows, width)
    for k in (1, 512, 2048):
        options: dict[str, Any] = {"order": "index", "ties": ties}
        judge(bits, k, select_topk(scores, k, kernel="cluster", **options).indices, **options)


@pytest.mark.parametrize("pin_newest", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 131_072), (2, 70_001), (40, 20_000)])
def test_groups(kind: str, rows: int, width: int, pin_newest: bool) -> None:
    bits, scores = rows_on_gpu(kind, rows, width)
    for k in (1, 512, 2048):
        for drop in (False, True):
            options: dict[str, Any] = {"group": 8, "pin_newest": pin_newest, "drop_neg_inf": drop}
            judge(bits, k, select_topk(scores, k, kernel="cluster", **options).indices, **options)


@pytest.mark.parametrize("order", ["any", "index"])
@pytest.mark.parametrize("size", SIZES)
def test_every_cluster_size(size: int, order: str) -> None:
    family = ClusterFamily()
    launcher = family._launcher(0, size, (True, torch.bfloat16, 1, order == "index"))
    if launcher.resident == 0:
        pytest.skip(f"the device holds no cluster of {size}")
    family._choose = lambda *_: launcher.function  # type: ignore[method-assign]
    for kind, width in (("near-one", 50_000), ("plateau", 140_001), ("one-bin", 9_000)):
        bits, scores = rows_on_gpu(kind, 3, width)
        indices = torch.empty((3, 2048), dtype=torch.int32, device="cuda")
        for dependent in (False, True):
            indices.fill_(-7)
            request = validate_select(scores, 2048, order=order)
            family.run([Job(request, indices, None)] * 3, dependent=dependent)
            torch.cuda.synchronize()
            judge(bits, 2048, indices, order=order)


def test_resident_clusters_are_asked_for_in_any_thread() -> None:
    family = ClusterFamily()
    with ThreadPoolExecutor(1) as pool:
        for size in SIZES[:-1]:
            made = family._codes((arch_of(capability(0)), size, (True, torch.bfloat16, 1, False)))
            count = pool.submit(resident_clusters, made.binary, made.launch).result()
            assert count == resident_clusters(made.binary, made.launch)
            assert size > 8 or count > 0


def test_rows_built_against_the_sampling() -> None:
    width = 131_072
    sampled = sampled_elements(width, 2)
    for best in (0x4100, 0xC000):
        for rows in (1, 64, 256):
            bits = np.random.default_rng(0).integers(0x3F00, 0x3FFF, (rows, width)).astype(np.uint16)
            bits[:, sampled] = best + np.arange(len(sampled)) % 128
            scores = torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16)
            for k in (512, 2048, 4096):
                indices = select_topk(scores, k, kernel="cluster").indices
                judge_on_device(scores, k, indices)
                judge(bits[:2], k, indices[:2])


def test_capture_and_replay_with_other_data() -> None:
    family = ClusterFamily()
    scores = torch.zeros((2, 131_072), dtype=torch.bfloat16, device="cuda")
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    indices = torch.empty((2, 2048), dtype=torch.int32, device="cuda")
    job = Job(validate_select(scores, 2048, lengths=lengths), indices, None)
    with pytest.raises(RuntimeError, match="warm"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        family.run([job])
    torch.cuda.synchronize()
    family.run([job])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        family.run([job])
    for kind, valid in (("near-one", 131_072), ("plateau", 40_001), ("equal", 2_000)):
        bits, data = rows_on_gpu(kind, 2, 131_072)
        scores.copy_(data)
        lengths.fill_(valid)
        graph.replay()
        torch.cuda.synchronize()
        judge(np.ascontiguousarray(bits[:, :valid]), 2048, indices)


def test_streams_do_not_disturb_each_other() -> None:
    bits, scores = rows_on_gpu("near-one", 4, 131_072)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(select_topk(scores, 2048, kernel="cluster").indices)
    torch.cuda.synchronize()
    for result in results[::7]:
        judge(bits, 2048, result)


def test_what_is_not_served_is_named() -> None:
    scores = torch.zeros((1, 100), dtype=torch.bfloat16, device="cuda")
    assert supports("cluster", scores, 10) is None
    assert supports("cluster", scores.half(), 10, order="index", ties="lowest") is None
    assert "value" in str(supports("cluster", scores, 2049, order="value"))
    assert "k <= 4096" in str(supports("cluster", scores, 5000))
    assert supports("cluster", scores.float(), 10, group=8) is None
    assert "group" in str(supports("cluster", scores, 10, group=4))
    assert supports("cluster", scores, 10, group=8, pin_newest=True) is None
    assert "order" in str(supports("cluster", scores, 10, group=8, order="index"))
    assert "largest" in str(supports("cluster", scores, 10, ties="lowest", largest=False))
