"""Rows and columns cut into steps of any size give what the contract asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.backends import Backend, InProcess
from tests.kernels.adapter import cells, judge, request
from tests.oracle import Case, MergeCase
from tests.strategies import cases, merge_cases
from topkd.kernels import run_select, select_topk

SIZES = st.sampled_from([1, 2, 3, 7, 16, 64, 300, 1 << 21])


@given(case=cases(), size=SIZES)
def test_selections_in_steps(case: Case, size: int) -> None:
    with cells(size):
        judge(case, run_select(request(case)))


@given(case=merge_cases(), size=SIZES)
def test_merges_in_steps(case: MergeCase, size: int) -> None:
    with cells(size):
        Backend("in process", InProcess("cpu")).merge(case)


@pytest.mark.parametrize("width", [63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("ties", ["any", "lowest", "highest"])
def test_widths_around_a_step(width: int, ties: str) -> None:
    bits = np.random.default_rng(width).integers(0, 4, 3 * width).astype(np.uint32)
    lengths = np.array([width, width - 1, 65], np.int32)
    for order in ("any", "index", "value"):
        case = Case(
            storage=bits, dtype="float32", rows=3, width=width, k=20, lengths=lengths, order=order, ties=ties,
            values=True,
        )  # fmt: skip
        with cells(64):
            judge(case, run_select(request(case)))


def test_long_rows_at_the_real_step() -> None:
    width = (1 << 22) + 5
    scores = torch.zeros(1, width)
    winners = torch.tensor([0, (1 << 21) - 1, 1 << 21, (1 << 21) + 1, 1 << 22, width - 1])
    scores[0, winners] = torch.arange(6.0) + 1
    found = select_topk(scores, 8, order="value", ties="highest")
    assert found.indices.tolist() == [[*reversed(winners.tolist()), width - 3, width - 2]]
    assert select_topk(scores, 6, order="index").indices.tolist() == [winners.tolist()]


def test_rows_that_share_all_memory() -> None:
    scores = torch.arange(100.0).expand(70000, 100)
    found = select_topk(scores, 2, order="value", values=True)
    assert found.values is not None
    assert (found.indices == torch.tensor([99, 98])).all()
    assert (found.values == torch.tensor([99.0, 98.0])).all()
