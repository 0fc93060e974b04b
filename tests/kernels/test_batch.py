"""Batches: requests of one plan run as one call, results land in the right outputs, and errors name the selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.adapter import judge, request
from tests.oracle import Case
from tests.strategies import cases
from topkd.kernels import (
    ArgumentValueError,
    SelectRequest,
    _dispatch,
    _torch_family,
    choose,
    run_select,
    run_select_batch,
    validate_select,
)
from topkd.kernels._family import Job
from topkd.kernels._torch_family import TorchFamily


class Counting(TorchFamily):
    """The torch family, counting calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def run(self, jobs: Sequence[Job]) -> None:
        self.calls.append(len(jobs))
        super().run(jobs)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(_dispatch, "_FAMILIES", (counting,))
    return counting


@given(case=cases(), copies=st.integers(2, 4))
def test_equal_requests_together(case: Case, copies: int) -> None:
    for result in run_select_batch([request(case) for _ in range(copies)]):
        judge(case, result)


@given(many=st.lists(cases(), min_size=2, max_size=5))
def test_different_requests_together(many: list[Case]) -> None:
    results = run_select_batch([request(case) for case in many])
    for case, result in zip(many, results, strict=True):
        judge(case, result)


def pair(rows: int, seed: int, **options: Any) -> SelectRequest:
    torch.manual_seed(seed)
    scores = torch.randn(rows, 50).to(torch.bfloat16)
    lengths = torch.randint(0, 60, (rows,), dtype=torch.int32)
    arguments = {"lengths": lengths, "order": "value", "ties": "lowest", "values": True} | options
    return validate_select(scores, 7, **arguments)


def test_one_plan_is_one_call(family: Counting) -> None:
    batch = [pair(rows, rows) for rows in (3, 0, 1, 5)]
    assert len({one.plan_key for one in batch}) == 1
    together = run_select_batch(batch)
    assert family.calls == [3]  # a request without rows has nothing to run
    for one, result in zip(batch, together, strict=True):
        alone = run_select(one)
        assert result.values is not None
        assert alone.values is not None
        assert torch.equal(result.indices, alone.indices)
        assert torch.equal(result.values.view(torch.int16), alone.values.view(torch.int16))


def test_other_plans_run_apart(family: Counting) -> None:
    batch = [pair(2, 0), pair(2, 1, order="index"), pair(3, 2), pair(2, 3, lengths=None), pair(2, 4, order="index")]
    assert len(run_select_batch(batch)) == 5
    assert sorted(family.calls) == [1, 2, 2]


PLAN: dict[str, dict[str, Any]] = {
    "next_n": {"next_n": 2, "lengths": None},
    "lengths": {"lengths": None},
    "max_length": {"max_length": 9},
    "row_starts": {"row_starts": torch.zeros(4, dtype=torch.int32)},
    "group": {"group": 2},
    "pin_newest": {"pin_newest": True},
    "drop_neg_inf": {"drop_neg_inf": True},
    "largest": {"largest": False},
    "order": {"order": "any"},
    "ties": {"ties": "any"},
    "values": {"values": False},
    "index_dtype": {"index_dtype": torch.int64},
    "row_offsets": {"row_offsets": torch.zeros(4, dtype=torch.int32)},
    "page_table": {"page_table": torch.zeros(4, 2, dtype=torch.int32)},
    "page_size": {"page_table": torch.zeros(4, 2, dtype=torch.int32), "page_size": 4},
    "kernel": {"kernel": "torch"},
}


def test_plan_keys_tell_options_apart_and_nothing_else() -> None:
    keys = {name: pair(4, 0, **options).plan_key for name, options in PLAN.items()}
    keys["none"] = pair(4, 0).plan_key
    assert len(set(keys.values())) == len(keys)
    assert pair(4, 0).plan_key == pair(9, 5).plan_key


def test_tables_are_shared_or_apart(family: Counting) -> None:
    table = torch.randint(0, 1000, (5, 8), dtype=torch.int32)
    other = table.clone()
    batch = [pair(3, seed, page_table=which, page_size=8) for seed, which in enumerate((table, other, table))]
    together = run_select_batch(batch)
    assert family.calls == [3]
    for one, result in zip(batch, together, strict=True):
        assert torch.equal(result.indices, run_select(one).indices)


def test_large_requests_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_family, "CELLS", 60)
    sizes = []
    monkeypatch.setattr(_torch_family, "_run_together", lambda jobs: sizes.append(len(jobs)))
    run_select_batch([pair(1, 0), pair(1, 1)])
    assert sizes == []


def test_results_are_the_given_outputs() -> None:
    buffer = torch.full((3, 40), -9, dtype=torch.int32)
    values = torch.zeros(3, 40, dtype=torch.bfloat16)
    places = (0, 10, 20)
    batch = [
        pair(3, at, out_indices=buffer[:, at + 1 : at + 8], out_values=values[:, at + 1 : at + 8]) for at in places
    ]
    results = run_select_batch(batch)
    for at, one, result in zip(places, batch, results, strict=True):
        assert result.indices is one.out_indices
        assert result.values is one.out_values
        alone = pair(3, at)
        assert torch.equal(result.indices, run_select(alone).indices)
    assert (buffer[:, [0, 8, 9, 10, 18, 19, 20, 28]] == -9).all()


def test_a_batch_is_checked_before_any_of_it_runs() -> None:
    buffer = torch.full((3, 14), -9, dtype=torch.int32)
    batch = [pair(3, at, out_indices=buffer[:, at : at + 7]) for at in (0, 6)]
    with pytest.raises(ArgumentValueError, match="overlap") as caught:
        run_select_batch(batch)
    assert caught.value.selection == 1
    assert (buffer == -9).all()


def test_an_empty_batch() -> None:
    assert run_select_batch([]) == []


def test_choices_have_reasons(family: Counting) -> None:
    assert choose(pair(1, 0, kernel="torch")) == ("torch", "asked for by name")
    name, reason = choose(pair(1, 0))
    assert name == "torch"
    assert reason
