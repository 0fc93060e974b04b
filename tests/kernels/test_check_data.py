"""TOPKD_CHECK_DATA: what a kernel would clamp or skip raises, naming the argument, and outputs stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from topkd.kernels import ArgumentValueError, _env, run_select_batch, select_topk, validate_select


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> Any:
    _env.check_data.cache_clear()
    monkeypatch.setenv("TOPKD_CHECK_DATA", "1")
    yield
    _env.check_data.cache_clear()


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


TABLE = torch.tensor([[5, 6, -1], [0, 1, 2**30]], dtype=torch.int32)
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("lengths", {"lengths": ints(10, 11)}, "holds 11 for row 1; allowed is 0 .. 10"),
    ("lengths", {"lengths": ints(-1, 1)}, "holds -1 for row 0"),
    ("lengths", {"lengths": ints(0), "next_n": 2}, "holds -1 for row 0"),
    ("lengths", {"lengths": ints(5, 6), "max_length": 5}, "max_length=5"),
    ("lengths", {"lengths": ints(8, 8), "row_starts": ints(2, 3)}, "row 1"),
    ("lengths", {"lengths": ints(80, 81), "group": 8, "pooled": True}, "holds 81"),
    ("row_starts", {"row_starts": ints(0, -1)}, "holds -1 for row 1"),
    ("row_starts", {"row_starts": ints(11, 0)}, "holds 11 for row 0; allowed is 0 .. 10"),
    ("row_to_table", {"page_table": TABLE, "page_size": 4, "row_to_table": ints(0, 2), "lengths": ints(8, 8)}, "row 1"),
    ("row_to_table", {"page_table": TABLE, "page_size": 4, "row_to_table": ints(-1, 0), "lengths": ints(8, 8)}, "-1"),
    ("page_table", {"page_table": TABLE, "page_size": 4, "lengths": ints(8, 9), "index_dtype": torch.int32}, "index"),
    ("page_table", {"page_table": TABLE, "page_size": 4, "lengths": ints(9, 8)}, "holds -1 for row 0"),
    ("page_table", {"page_table": TABLE, "page_size": 2, "lengths": ints(4, 8), "row_to_table": ints(0, 1)}, "entry"),
    ("page_table", {"page_table": TABLE, "page_size": 4, "lengths": ints(4, 4), "table_starts": ints(-1, 0)}, "entry"),
]


@pytest.mark.parametrize(("argument", "options", "text"), BAD)
def test_bad_data(argument: str, options: dict[str, Any], text: str) -> None:
    k = 10
    out = torch.full((2, k), -9, dtype=options.get("index_dtype", torch.int32))
    with pytest.raises(ValueError, match=f"{argument} .*{text}") as caught:
        select_topk(torch.zeros(2, 10), k, out_indices=out, **options)
    assert isinstance(caught.value, ArgumentValueError)
    assert caught.value.argument == argument
    assert (out == -9).all()


GOOD: list[dict[str, Any]] = [
    {},
    {"lengths": ints(0, 10), "row_starts": ints(10, 0)},
    {"lengths": ints(9), "next_n": 2},
    {"lengths": ints(5, 0), "max_length": 5},
    {"page_table": TABLE, "page_size": 4, "lengths": ints(8, 8)},
    {"page_table": TABLE, "page_size": 4, "lengths": ints(8, 9), "index_dtype": torch.int64},
    {"page_table": TABLE, "page_size": 4, "lengths": ints(8, 0), "row_to_table": ints(1, -5)},  # never looked up
    {"page_table": TABLE[:, :0], "lengths": ints(0, 0), "values": True},
    {"next_n": 2},
    {"row_offsets": ints(-100, 2**31 - 1)},  # no length, start or table
]


@pytest.mark.parametrize("options", GOOD)
def test_good_data(options: dict[str, Any]) -> None:
    checked = select_topk(torch.zeros(2, 10), 4, **options)
    assert checked.indices.shape == (2, 4)


def test_a_batch_is_checked_whole() -> None:
    out = torch.full((2, 3), -9, dtype=torch.int32)
    scores = torch.zeros(2, 10)
    batch = [
        validate_select(scores, 3, lengths=ints(1, 2), out_indices=out),
        validate_select(scores, 3, lengths=ints(1, 12)),
    ]
    with pytest.raises(ArgumentValueError, match="lengths") as caught:
        run_select_batch(batch)
    assert caught.value.selection == 1
    assert (out == -9).all()


def test_requests_without_rows() -> None:
    empty = torch.zeros(0, dtype=torch.int32)
    select_topk(torch.zeros(0, 10), 3, lengths=empty, page_table=TABLE, row_to_table=empty)


@pytest.mark.parametrize(("text", "on"), [("1", True), ("0", False), ("", False), ("on", True), ("False", False)])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    _env.check_data.cache_clear()
    monkeypatch.setenv("TOPKD_CHECK_DATA", text)
    assert _env.check_data() is on
    monkeypatch.setenv("TOPKD_CHECK_DATA", "0" if on else "1")
    assert _env.check_data() is on  # read once


def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    _env.check_data.cache_clear()
    monkeypatch.setenv("TOPKD_CHECK_DATA", "maybe")
    with pytest.raises(ValueError, match="TOPKD_CHECK_DATA='maybe'"):
        _env.check_data()
