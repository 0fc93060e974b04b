"""The f32 kernel of the `cluster` family on a GPU: the contract's cases, kinds of rows, clusters, rows against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.case import Case
from tests.conformance.backends import Backend, InProcess
from tests.conformance.directed import directed, rows_of
from tests.data import indexer_rows
from tests.patterns import FILLS, crowded
from topkd.kernels import select_topk, supports, validate_select
from topkd.kernels._family import Job
from topkd.kernels._reference import best_keys, is_selection, rank_keys, selected
from topkd.kernels.cluster import SIZES, ClusterFamily

pytestmark = pytest.mark.gpu

Bits = np.ndarray


def served(case: Case) -> bool:
    plain = case.group == 1 and not case.pin_newest and not case.drop_neg_inf
    return plain and case.dtype == "float32" and case.k <= (2048 if case.order == "value" else 4096)


CASES = {name: case for name, case in directed().items() if served(case)}
ORDERS = (("any", "any"), ("index", "lowest"), ("index", "highest"))


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend("cluster", InProcess("cuda"))


def on_gpu(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.float32)).cuda()


def judge(scores: torch.Tensor, k: int, indices: torch.Tensor, order: str = "any", ties: str = "any") -> None:
    """Compares an answer on the device: with the best keys of each row, or with the one answer there is."""
    keys = rank_keys(scores)
    if order == "any":
        assert is_selection(keys, best_keys(keys, k), indices)
        return
    counts = torch.full((len(keys),), keys.shape[1], dtype=torch.int32, device="cuda")
    if ties == "highest":
        want = (keys.shape[1] - 1 - selected(keys.flip(1), k, counts)).flip(1)
    else:
        want = selected(keys, k, counts)
    assert torch.equal(indices, want)


def sampled(width: int, attempt: int) -> Bits:
    """Which scores of a row, at a multiple of 64 bytes, the kernel samples: `load_sample`, four vectors a unit."""
    number = np.arange(512)
    places = []
    for band in range(4):
        mix = (number & 3) * 4 + band
        stratum = (number & 3) * 32 + (((number >> 4) * (2 * mix + 5) + mix * 11) & 31)
        salt = (stratum * 4 + band + attempt * 0x51ED27) * 0x9E3779B1 & 0xFFFFFFFF
        within = ((salt ^ salt >> 15) * 0x85EBCA77 & 0xFFFFFFFF) >> 7
        size = (width // 4 - 1) >> 4
        places.append(((stratum << 25 | within) * size >> 32) + band * size)
    units = np.unique(np.concatenate(places))
    return (units[:, None] * 16 + np.arange(16)).ravel()


def against(rows: int, width: int, large: bool, attempts: int) -> Bits:
    """Rows whose sampled scores are all above the others, or all below."""
    scores = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    for attempt in range(attempts):
        places = sampled(width, attempt)
        scores[:, places] = (np.abs(scores[:, places]) + 10) * (1 if large else -1)
    return scores.view(np.uint32)


@pytest.mark.parametrize("name", CASES)
def test_directed(backend: Backend, name: str) -> None:
    backend.run(replace(CASES[name], kernel="cluster"))


@pytest.mark.parametrize("kind", FILLS)
@pytest.mark.parametrize(("rows", "width"), [(1, 131_072), (2, 300_001), (40, 70_000), (300, 9_000)])
def test_kinds_and_shapes(kind: str, rows: int, width: int) -> None:
    scores = on_gpu(rows_of(kind, rows, width, 1, dtype="float32").storage.reshape(rows, width))
    for k in (1, 512, 2048, 4096):
        for order, ties in ORDERS if rows < 100 else ORDERS[:1]:
            judge(scores, k, select_topk(scores, k, kernel="cluster", order=order, ties=ties).indices, order, ties)


@pytest.mark.parametrize("size", SIZES)
def test_every_cluster_size(size: int) -> None:
    family = ClusterFamily()
    launchers = {ordered: family._launcher(0, size, (True, torch.float32, 1, ordered)) for ordered in (False, True)}
    if any(launcher.resident == 0 for launcher in launchers.values()):
        pytest.skip(f"the device holds no cluster of {size}")
    family._choose = lambda shape: launchers[shape[-1][-1]].function  # type: ignore[method-assign]
    for kind in ("near-one", "levels", "ascending"):
        scores = on_gpu(rows_of(kind, 3, 50_001, 1, dtype="float32").storage.reshape(3, 50_001))
        indices = torch.empty((3, 2048), dtype=torch.int32, device="cuda")
        for order, ties in ORDERS:
            request = validate_select(scores, 2048, order=order, ties=ties)
            for dependent in (False, True):
                indices.fill_(-7)
                family.run([Job(request, indices, None)] * 3, dependent=dependent)
                torch.cuda.synchronize()
                judge(scores, 2048, indices, order, ties)


@pytest.mark.parametrize("size", SIZES)
def test_crowds_at_the_kth_place(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Around the number of keys that are looked at one by one."""
    family = ClusterFamily()
    launchers = {ordered: family._launcher(0, size, (True, torch.float32, 1, ordered)) for ordered in (False, True)}
    if any(launcher.resident == 0 for launcher in launchers.values()):
        pytest.skip(f"the device holds no cluster of {size}")
    monkeypatch.setattr(family, "_choose", lambda shape: launchers[shape[-1][-1]].function)
    for crowd in (2, 31, 32, 33, 64, 127, 128, 129, 1000):
        for equal in (True, False):
            rows = [crowded("float32", seed, 70_001, 2048, crowd, equal=equal) for seed in range(3)]
            scores = on_gpu(np.stack(rows))
            indices = torch.empty((3, 2048), dtype=torch.int32, device="cuda")
            for order, ties in ORDERS:
                indices.fill_(-7)
                family.run([Job(validate_select(scores, 2048, order=order, ties=ties), indices, None)])
                judge(scores, 2048, indices, order, ties)


@pytest.mark.parametrize(("rows", "width"), [(1, 131_072), (8, 65_536), (40, 131_072), (256, 131_072), (8, 1_048_576)])
@pytest.mark.parametrize("period", [0, 8, 32, 510])
def test_recorded_and_periodic_rows(rows: int, width: int, period: int) -> None:
    """Rows of a real model (period 0), and rows whose best stand at regular distances."""
    _, bits, _ = indexer_rows()
    if period:
        scores = torch.randn((rows, width), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        scores[:, period // 3 :: period] += 16
    else:
        recorded = torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16).float()
        places = (torch.arange(width)[None] + 509 * torch.arange(rows)[:, None]) % recorded.shape[1]
        scores = recorded[torch.arange(rows) % len(recorded)].gather(1, places.cuda())
    for k in (512, 2048, 4096):
        for order, ties in ORDERS if rows < 100 else ORDERS[:1]:
            judge(scores, k, select_topk(scores, k, kernel="cluster", order=order, ties=ties).indices, order, ties)


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("attempts", [1, 2])
def test_rows_built_against_the_sampling(large: bool, attempts: int) -> None:
    for rows in (1, 64, 256):
        scores = on_gpu(against(rows, 131_072, large, attempts))
        for k in (512, 2048, 4096):
            judge(scores, k, select_topk(scores, k, kernel="cluster").indices)


def test_repeated_launches_agree() -> None:
    scores = on_gpu(rows_of("near-one", 4, 131_072, 1, dtype="float32").storage.reshape(4, 131_072))
    first = select_topk(scores, 2048, kernel="cluster", order="index", ties="lowest").indices
    judge(scores, 2048, first, "index", "lowest")
    results = [select_topk(scores, 2048, kernel="cluster").indices for _ in range(500)]
    results += [select_topk(scores, 2048, kernel="cluster", order="index", ties="lowest").indices for _ in range(200)]
    for result in results:
        assert torch.equal(result.sort(dim=1).values, first)


def test_what_is_not_served_is_named() -> None:
    scores = torch.zeros((1, 100), device="cuda")
    assert supports("cluster", scores, 10, order="index", ties="highest") is None
    assert "value" in str(supports("cluster", scores, 2049, order="value"))
    assert "k <= 4096" in str(supports("cluster", scores, 5000))
