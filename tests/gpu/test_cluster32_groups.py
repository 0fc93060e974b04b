"""Groups of f32 scores in the `cluster` family on a GPU: the contract's cases, kinds of rows, every size of groups,
ends of groups, clusters, rows against the sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.case import Case
from tests.cluster_sample import sampled_groups
from tests.conformance.backends import Backend, InProcess
from tests.conformance.directed import directed, rows_of
from tests.gpu.agree import FORMS, POISON, bits, same_scores
from tests.patterns import FILLS
from topkd.kernels import select_topk, supports, validate_select
from topkd.kernels._family import Job
from topkd.kernels._reference import group_keys, rank_keys
from topkd.kernels.cluster import GROUP, GROUPS32, MAX_K, MAX_K_BY_VALUE, SIZES, ClusterFamily

pytestmark = pytest.mark.gpu


def served(case: Case) -> bool:
    most = MAX_K_BY_VALUE if case.order == "value" else MAX_K
    return case.dtype == "bfloat16" and case.group in GROUPS32 and not case.pooled and case.k <= most


CASES = {name: case for name, case in directed().items() if served(case)}


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend("cluster", InProcess("cuda"))


def on_gpu(kind: str, rows: int, width: int) -> torch.Tensor:
    storage = rows_of(kind, rows, width, 1, dtype="float32").storage.reshape(rows, width)
    return torch.from_numpy(storage.view(np.float32)).cuda()


def keys_of(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Returns the keys of whole rows' groups."""
    missing = -scores.shape[1] % group
    padded = torch.nn.functional.pad(scores.view(torch.int32), (0, missing), value=-0x800000)  # -inf
    return group_keys(rank_keys(padded.view(torch.float32)), group)


def agree(scores: torch.Tensor, k: int, group: int, **options: Any) -> None:
    """Compares every form with the `torch` family: bit for bit, or where ties are free the scores that are selected."""
    keys = keys_of(scores, group)
    for form in FORMS:
        if form.get("order") == "value" and k > MAX_K_BY_VALUE:
            continue
        got = torch.full((len(scores), k), POISON, dtype=torch.int32, device="cuda")
        form = {**form, **options, "group": group}
        result = select_topk(scores, k, kernel="cluster", out_indices=got, **form)
        want = select_topk(scores, k, kernel="torch", **form)
        if "ties" in form:
            assert torch.equal(got, want.indices), form
        else:
            assert same_scores(keys, got, want.indices, None), form
        if result.values is not None and want.values is not None:
            assert torch.equal(bits(result.values), bits(want.values)), form


@pytest.mark.parametrize("name", CASES)
def test_directed(backend: Backend, name: str) -> None:
    case = CASES[name]
    storage = case.storage.astype(np.uint32) << np.uint32(16)
    backend.run(replace(case, storage=storage, dtype="float32", kernel="cluster"))


@pytest.mark.parametrize("pin_newest", [False, True])
@pytest.mark.parametrize("kind", FILLS)
@pytest.mark.parametrize(("rows", "width"), [(1, 131_072), (2, 300_001), (40, 70_000), (300, 9_000)])
def test_kinds_and_shapes(kind: str, rows: int, width: int, pin_newest: bool) -> None:
    scores = on_gpu(kind, rows, width)
    for k in (1, 512, 2048, 4096):
        agree(scores, k, 8, pin_newest=pin_newest, drop_neg_inf=not pin_newest)


@pytest.mark.parametrize("group", GROUPS32)
def test_every_group(group: int) -> None:
    """Rows with as many groups as are listed without a sample, one more, and many."""
    for elements in (600, 4096, 4097, 40_000):
        for short in (0, 1, group - 1):
            agree(torch.randn(2, elements * group - short, device="cuda"), 500, group, pin_newest=short == 1)


@pytest.mark.parametrize("group", GROUPS32)
def test_ends_of_groups_and_windows(group: int) -> None:
    """Lengths around the ends of groups and around k groups, at every alignment of the row's start."""
    torch.manual_seed(group)
    k = 100
    sizes = [n * group + d for n in (1, 2, k - 1, k, k + 1, 4095, 4096, 4100) for d in (-1, 0, 1)]
    lengths = torch.tensor(sizes * 4, dtype=torch.int32, device="cuda")
    starts = torch.arange(4, dtype=torch.int32, device="cuda").repeat_interleave(len(sizes))
    scores = torch.randn(len(lengths), 4101 * group + 4, device="cuda")
    scores[torch.rand_like(scores) < 0.5 / group] = float("nan")
    for pin_newest in (False, True):
        for order, ties in (("index", "lowest"), ("index", "highest"), ("value", "lowest")):
            options: dict[str, Any] = {"group": group, "lengths": lengths, "row_starts": starts, "values": True}
            options |= {"pin_newest": pin_newest, "order": order, "ties": ties}
            got = select_topk(scores, k, kernel="cluster", **options)
            want = select_topk(scores, k, kernel="torch", **options)
            assert torch.equal(got.indices, want.indices), (order, ties, pin_newest)
            assert got.values is not None
            assert want.values is not None
            assert torch.equal(bits(got.values), bits(want.values))


def test_rows_of_almost_only_negative_infinity() -> None:
    """Fewer groups than k are better than -inf; they are dropped, or not."""
    scores = torch.full((6, 70_001), float("-inf"), device="cuda")
    for row, count in enumerate((0, 1, 511, 512, 513, 3000)):
        scores[row, torch.randperm(70_001, device="cuda")[:count]] = torch.randn(count, device="cuda")
    for drop in (False, True):
        for pin_newest in (False, True):
            for k in (1, 2, 512, 4096):
                agree(scores, k, 8, drop_neg_inf=drop, pin_newest=pin_newest)


def test_members_instead_of_groups() -> None:
    scores = torch.randn(3, 70_003, device="cuda")
    options: dict[str, Any] = {"group": 8, "expand": True, "order": "index", "ties": "lowest", "pin_newest": True}
    offsets = torch.tensor([0, 5, 2**33], dtype=torch.int64, device="cuda")
    options |= {"index_dtype": torch.int64, "row_offsets": offsets}
    got = select_topk(scores, 300, kernel="cluster", **options).indices
    assert torch.equal(got, select_topk(scores, 300, kernel="torch", **options).indices)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_cluster_size(size: int, ordered: bool) -> None:
    family = ClusterFamily()
    launcher = family._launcher(0, size, (True, torch.float32, GROUP, ordered))
    if launcher.resident == 0:
        pytest.skip(f"the device holds no cluster of {size}")
    family._choose = lambda _: launcher.function  # type: ignore[method-assign]
    form: dict[str, Any] = {"order": "index", "ties": "highest"} if ordered else {}
    for kind, group in (("near-one", 8), ("levels", 4), ("ascending", 16), ("equal", 8)):
        scores = on_gpu(kind, 3, 100_001)
        want = select_topk(scores, 2048, kernel="torch", group=group, **form).indices
        indices = torch.empty((3, 2048), dtype=torch.int32, device="cuda")
        request = validate_select(scores, 2048, group=group, **form)
        for dependent in (False, True):
            indices.fill_(POISON)
            family.run([Job(request, indices, None)] * 3, dependent=dependent)
            torch.cuda.synchronize()
            if ordered:
                assert torch.equal(indices, want)
            else:
                assert same_scores(keys_of(scores, group), indices, want, None)


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("attempts", [1, 2])
def test_rows_built_against_the_sampling(large: bool, attempts: int) -> None:
    """All groups that are sampled are above the others, or below; in both attempts none is left to say more."""
    for k in (512, 2048):
        scores = np.random.default_rng(0).standard_normal((3, 131_072)).astype(np.float32)
        for attempt in range(attempts):
            groups = sampled_groups(16_384, k == 512, attempt)
            places = (groups[:, None] * 8 + np.arange(8)).ravel()
            scores[:, places] = (np.abs(scores[:, places]) + 10) * (1 if large else -1)
        for rows in (1, 100):
            agree(torch.from_numpy(scores).cuda().repeat(rows, 1), k, 8)


def test_repeated_launches_agree() -> None:
    scores = on_gpu("near-one", 4, 131_072)
    options: dict[str, Any] = {"kernel": "cluster", "group": 8}
    first = select_topk(scores, 1024, kernel="torch", group=8, order="index", ties="lowest").indices
    ordered = [select_topk(scores, 1024, order="index", ties="lowest", **options).indices for _ in range(100)]
    assert all(torch.equal(one, first) for one in ordered)
    keys = keys_of(scores, 8)
    for _ in range(100):
        assert same_scores(keys, select_topk(scores, 1024, **options).indices, first, None)


def test_what_is_not_served_is_named() -> None:
    scores = torch.zeros((1, 1000), device="cuda")
    for group in GROUPS32:
        assert supports("cluster", scores, 10, group=group, order="index", pin_newest=True) is None
    assert "4 to 128" in str(supports("cluster", scores, 10, group=2))
    assert "k <= 2048" in str(supports("cluster", scores, 2049, group=8, order="value"))
    assert "pooled" in str(supports("cluster", scores, 10, group=8, pooled=True))
