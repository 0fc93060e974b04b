"""The arithmetic of the `cluster` family's kernel, in numpy: keys, bins, how a range narrows, where outputs begin.

The model follows `kernels/cluster_*.py` step by step with small buffers, so that every way through is taken often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import decode
from topkd.kernels import _cute_launch, cluster, validate_select
from topkd.kernels._cute_flags import TIES_HIGHEST
from topkd.kernels._cute_launch import FLAGS, is_plain, launch_arguments
from topkd.kernels._family import Job
from topkd.kernels.cluster import (
    GROUPS32,
    KINDS,
    SIZES,
    ClusterFamily,
    kind_of,
    sizes,
    sizes_of,
    unmet_options,
)

Array = np.ndarray


def key_of(bits: Array, largest: bool, infinity: int = 0x7F80) -> Array:
    """What `word_keys` computes of one half: canonical, then flipped by sign."""
    canonical = np.where((bits & 0x7FFF) > infinity, 0x7FFF, np.where(bits == 0x8000, 0, bits)).astype(np.int64)
    flipped = canonical ^ (((canonical >> 15) & 1) * 0x7FFF) ^ 0x8000
    return flipped if largest else flipped ^ 0xFFFF


def bit_length(x: int) -> int:
    return int(x).bit_length()


@dataclass
class Range:
    low: int
    high: int
    above: int
    lower: list[int]
    ties: list[int]
    from_row: list[bool]
    settled: bool = False


class Model:
    """One row; `parts` are the (element, key) pairs of each CTA in the order in which they are looked at."""

    def __init__(self, keys: Array, cluster: int, k: int, bins: int, capacity: int) -> None:
        order = np.arange(len(keys))
        self.parts = [[(int(e), int(keys[e])) for e in order[r::cluster]] for r in range(cluster)]
        self.k, self.bins, self.capacity = k, bins, capacity
        self.bin_bits = bins.bit_length() - 1
        self.passes = 0

    def bin_of(self, key: int, low: int, shift: int) -> int:
        return min((key - low + (1 << shift) - 1) >> shift, self.bins - 1)

    def filter(self, low: int, shift: int) -> tuple[list[list[int]], list[bool]]:
        counts, overflows = [], []
        self.lists: list[list[tuple[int, int]]] = []
        for part in self.parts:
            bins, kept = [0] * self.bins, []
            for element, key in part:
                if key == low:
                    bins[0] += 1
                elif key > low:
                    bins[self.bin_of(key, low, shift)] += 1
                    kept.append((element, key))
            counts.append(bins)
            overflows.append(len(kept) > self.capacity)
            self.lists.append(kept[: self.capacity])
        return counts, overflows

    def count(self, found: Range, shift: int) -> list[list[int]]:
        counts = []
        for part, kept, from_row in zip(self.parts, self.lists, found.from_row, strict=True):
            bins = [0] * self.bins
            for _, key in part if from_row else kept:
                if found.low <= key <= found.high:
                    bins[self.bin_of(key, found.low, shift)] += 1
            counts.append(bins)
        return counts

    def narrow(self, found: Range, shift: int, counts: list[list[int]]) -> Range:
        reach = [[min(sum(bins[b:]), 0xFFFF) for b in range(self.bins)] + [0] for bins in counts]
        total = [sum(r[b] for r in reach) for b in range(self.bins + 1)]
        lower = [[sum(r[b] for r in reach[:rank]) for b in range(self.bins + 1)] for rank in range(len(reach))]
        b = sum(found.above + t >= self.k for t in total[: self.bins]) - 1
        above = found.above + total[b + 1]
        lowers = [old + now[b + 1] for old, now in zip(found.lower, lower, strict=True)]
        if b < 0:
            return Range(0, found.low - 1, above, lowers, found.ties, [True] * len(reach))
        ties = [now[b] - now[b + 1] for now in lower]
        high = min(found.low + (b << shift), found.high) if b < self.bins - 1 else found.high
        low = found.low + ((b - 1) << shift) + 1 if b else found.low
        return Range(low, high, above, lowers, ties, found.from_row, low >= high)

    def run(self, cutoff: int | None, shift: int = 0) -> list[int]:
        cluster = len(self.parts)
        zeros = [0] * cluster
        found = Range(0, 0xFFFF, 0, zeros, zeros, [True] * cluster)
        self.lists = [[] for _ in self.parts]
        counted = cutoff is not None
        counts: list[list[int]] = []
        if cutoff is not None:
            counts, overflows = self.filter(cutoff, shift)
            found = Range(cutoff, 0xFFFF, 0, zeros, zeros, overflows)
        while not found.settled:
            if not counted:
                shift = max(bit_length(found.high - found.low) - self.bin_bits, 0)
                counts = self.count(found, shift)
            found = self.narrow(found, shift, counts)
            counted = False
            self.passes += 1
            assert self.passes <= 8 * 16 // self.bin_bits
        out = [-1] * self.k
        for rank, (part, kept) in enumerate(zip(self.parts, self.lists, strict=True)):
            places = [found.lower[rank], found.above + found.ties[rank]]
            if found.low == cutoff and not found.from_row[rank]:
                kept = kept + [(element, key) for element, key in part if key == cutoff]
            for element, key in part if found.from_row[rank] else kept:
                if key < found.low:
                    continue
                tie = key == found.low
                if places[tie] < self.k:
                    assert out[places[tie]] == -1
                    out[places[tie]] = element
                places[tie] += 1
        return out


def check(keys: Array, k: int, out: list[int]) -> None:
    assert len(set(out)) == k
    assert min(out) >= 0
    assert sorted(keys[out].tolist()) == sorted(keys.tolist())[-k:]


rows = st.one_of(
    st.lists(st.integers(0, 0xFFFF), min_size=2, max_size=150),
    st.lists(st.integers(0x8000, 0x8000 + 12), min_size=2, max_size=150),
    st.lists(st.sampled_from([0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF]), min_size=2, max_size=150),
)


@settings(deadline=None, max_examples=400)
@given(rows, st.data())
def test_any_cutoff_gives_the_k_best(row: list[int], data: st.DataObject) -> None:
    keys = np.array(row)
    k = data.draw(st.integers(1, len(row) - 1))
    near = sorted(row)[-k] + data.draw(st.integers(-20, 20))
    cutoff = data.draw(st.one_of(st.none(), st.just(min(max(near, 0), 0xFFFF)), st.sampled_from(row), st.just(0)))
    cluster = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    bins = data.draw(st.sampled_from([8, 32, 256]))
    model = Model(keys, cluster, k, bins, capacity=data.draw(st.integers(1, 40)))
    check(keys, k, model.run(cutoff, data.draw(st.integers(0, 9))))


def test_many_equal_keys_are_counted_up_to_the_cap() -> None:
    keys = np.full(200_000, 0x9000)
    keys[::50_000] = 0x9001
    model = Model(keys, 2, 3, 256, capacity=20)
    check(keys, 3, model.run(0x9000))
    assert model.passes == 1


@pytest.mark.parametrize("largest", [True, False])
def test_keys_order_all_patterns(largest: bool) -> None:
    bits = np.arange(1 << 16)
    value = decode(bits.astype(np.uint16), "bfloat16") + 0.0
    keys = key_of(bits, largest)
    finite = ~np.isnan(value)
    best = 0xFFFF if largest else 0
    assert (keys[~finite] == best).all()
    sign = 1 if largest else -1
    order = np.lexsort((keys[finite],))
    assert (np.diff(sign * value[finite][order]) >= 0).all()
    assert len(np.unique(keys[finite])) == len(np.unique(value[finite]))
    assert (keys[finite] < best).all() if largest else (keys[finite] > best).all()
    assert keys[0x8000] == keys[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("largest", [True, False])
def test_cutoffs_are_compared_as_keys_are(largest: bool, dtype: str) -> None:
    """`cutoff_of`: what is compared as numbers agrees with the keys, for every key that a search may come to."""
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00}[dtype]
    scores = np.arange(1 << 16, dtype=np.uint16)
    values = decode(scores, dtype)
    keys = key_of(scores, largest, infinity)
    worst, no_zero = 0x7FFF - infinity, 0x7FFF if largest else 0x8000
    for low in (*range(worst + 3), *range(0x7FF0, 0x8010), *range(0x8000 + infinity - 3, 0x10000, 7), 0xFFFF):
        cutoff = low
        if cutoff < worst and (cutoff > 0 or largest):
            cutoff = worst
        cutoff += cutoff == no_zero
        if cutoff > 0x8000 | infinity:
            cutoff = 0xFFFF
        assert ((keys > low) >= (keys > cutoff)).all()
        assert ((keys >= low) == (keys >= cutoff)).all()
        ascending = cutoff if largest else cutoff ^ 0xFFFF
        nan = ascending == 0xFFFF
        bits = infinity if nan else ascending ^ (0x8000 if ascending >= 0x8000 else 0xFFFF)
        value = decode(np.array([bits], np.uint16), dtype)[0]
        above = ~(values <= value) if largest else values < value
        equal = values == value
        if nan:
            above, equal = (np.zeros_like(above), above) if largest else (above | equal, ~(above | equal))
        assert (above == (keys > cutoff)).all()
        assert (equal == (keys == cutoff)).all()


def test_direct_takes_two_counts() -> None:
    rng = np.random.default_rng(1)
    keys = key_of(rng.integers(0, 1 << 16, 5000), True)
    model = Model(keys, 4, 100, 256, 50)
    check(keys, 100, model.run(None))
    assert model.passes <= 3


@pytest.mark.parametrize(
    ("rows", "length", "best"),
    [
        (1, 131_072, 16),
        (1, 32_768, 8),
        (1, 16_384, 4),
        (1, 4_096, 1),
        (16, 131_072, 4),
        (16, 262_144, 8),
        (8, 131_072, 8),
        (16, 1 << 20, 8),
        (64, 131_072, 2),
        (64, 1 << 20, 2),
        (256, 1 << 20, 1),
    ],
)
def test_cluster_sizes_as_measured(rows: int, length: int, best: int) -> None:
    chosen = sizes(rows, length, 132)
    assert chosen == [size for size in SIZES if 1 < size <= best]


@pytest.mark.parametrize("max_length", [None, 50, 100, 1000])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_jobs_are_launched_with_the_same_arguments(
    monkeypatch: pytest.MonkeyPatch, max_length: int | None, largest: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    scores = torch.zeros((3, 200), dtype=dtype)[:, :100]
    request = validate_select(scores, 5, max_length=max_length, largest=largest)
    job = Job(request, torch.zeros((3, 8), dtype=torch.int32)[:, :5], None)
    assert is_plain(job)
    family = ClusterFamily()
    calls: list[tuple[int, ...]] = []
    bound = 100 if max_length is None else min(max_length, 100)
    family._choices[0, 3, bound, (largest, dtype, 1, False)] = lambda *arguments: calls.append(arguments)
    family._launch(job, 0, dependent=True)
    wanted = [*launch_arguments(job), 0, 1, 7]
    wanted[3] = min(wanted[3], 100)
    assert calls == [tuple(wanted)]


def test_jobs_with_more_than_scores_are_not_plain() -> None:
    scores = torch.zeros((2, 10), dtype=torch.float32)
    vector = torch.zeros(2, dtype=torch.int32)
    indices = torch.zeros((2, 3), dtype=torch.int32)
    for options in (
        {"lengths": vector},
        {"row_starts": vector},
        {"row_offsets": vector},
        {"page_table": torch.zeros((2, 10), dtype=torch.int32)},
        {"index_dtype": torch.int64},
        {"order": "index"},
        {"ties": "highest"},
    ):
        assert not is_plain(Job(validate_select(scores, 3, **options), indices, None))
    assert not is_plain(Job(validate_select(scores, 3, values=True), indices, scores[:, :3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_highest_of_ties_are_asked_for(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Also where nothing else is: order and ties of 16-bit scores choose a variant, but which ties is a flag."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    calls: list[tuple[int, ...]] = []
    family = ClusterFamily()
    monkeypatch.setattr(family, "_choose", lambda _: lambda *arguments: calls.append(arguments))
    job = Job(validate_select(torch.zeros((2, 600), dtype=dtype), 1, ties="highest"), torch.zeros(2, 1).int(), None)
    family._launch(job, 0, dependent=False)
    assert calls[0][FLAGS] & TIES_HIGHEST


def test_no_kind_is_launched_in_a_size_that_it_has_no_variant_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "processors", lambda _: 132)
    assert sum(len(sizes_of(kind)) for kind in KINDS) <= 69
    for kind in KINDS:
        family, asked = ClusterFamily(), []

        def launcher(_: int, size: int, kind: Any, asked: list[int] = asked) -> Any:
            asked.append(size)
            return cluster._Launcher(lambda: None, 0 if size > 1 else 264)

        monkeypatch.setattr(family, "_launcher", launcher)
        family._choose((0, 1, 1 << 20, kind))
        assert asked == list(sizes_of(kind))
        largest, _, _, ordered = kind
        assert (16 in asked) == (largest or not ordered)


def test_sizes_of_groups_share_a_variant_where_the_code_is_the_same() -> None:
    def kind(dtype: torch.dtype, **options: Any) -> Any:
        request = validate_select(torch.zeros((2, 600), dtype=dtype), 1, **options)
        assert unmet_options(request) is None
        assert kind_of(request) in KINDS
        return kind_of(request)

    assert len({kind(torch.float32, group=group) for group in GROUPS32}) == 1
    assert len({kind(torch.float32, group=group, ties="lowest") for group in GROUPS32}) == 1
    kinds = {kind(torch.float32), kind(torch.float32, group=8), kind(torch.float32, group=8, order="index")}
    assert len({*kinds, kind(torch.bfloat16), kind(torch.bfloat16, group=8)}) == 5
    for group in (2, 4, 128):
        request = validate_select(torch.zeros((2, 600), dtype=torch.float16), 1, group=group)
        assert "group" in str(unmet_options(request))


@pytest.mark.parametrize(
    "options", [{}, {"max_length": 7}, {"max_length": 700}, {"largest": False}, {"ties": "lowest"}]
)
def test_the_short_way_to_arguments_gives_what_the_long_one_does(options: dict[str, Any]) -> None:
    job = Job(validate_select(torch.zeros((3, 20))[:, :10], 4, **options), torch.zeros(3, 4).int(), None)
    assert is_plain(job)
    assert _cute_launch._plain_arguments(job) == _cute_launch._all_arguments(job)
