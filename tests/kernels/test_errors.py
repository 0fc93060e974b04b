"""Bad arguments: each raises before anything runs, names the argument, its value and what is allowed."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from topkd.kernels import ArgumentTypeError, ArgumentValueError, select_topk, supports, validate_merge, validate_select

ROWS, WIDTH, K = 4, 16, 3
INT32 = torch.int32


def scores(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (ROWS, WIDTH), dtype=dtype)


def ints(*shape: int, dtype: torch.dtype = INT32) -> torch.Tensor:
    return torch.zeros(shape or (ROWS,), dtype=dtype)


class Index:
    """An integer by `__index__`, like numpy's."""

    def __index__(self) -> int:
        return 3


TYPES: list[tuple[str, dict[str, Any], str]] = [
    ("input", {"input": [[1.0, 2.0]]}, "torch.Tensor"),
    ("input", {"input": np.zeros((2, 4), np.float32)}, "torch.Tensor"),
    ("input", {"input": None}, "torch.Tensor"),
    ("input", {"input": scores(dtype=torch.float64)}, "torch.float64"),
    ("input", {"input": scores(dtype=torch.int32)}, "torch.bfloat16"),
    ("input", {"input": torch.zeros(2, 4, dtype=torch.complex64)}, "torch.complex64"),
    ("k", {"k": True}, "integer of 1 .. 1048576"),
    ("k", {"k": 2.0}, "2.0"),
    ("k", {"k": "3"}, "'3'"),
    ("k", {"k": None}, "None"),
    ("k", {"k": torch.tensor(3)}, "tensor of shape"),
    ("lengths", {"lengths": [1, 2, 3, 4]}, "torch.Tensor"),
    ("lengths", {"lengths": np.zeros(4, np.int32)}, "torch.Tensor"),
    ("lengths", {"lengths": ints(dtype=torch.int64)}, "torch.int32"),
    ("lengths", {"lengths": ints(dtype=torch.int16)}, "torch.int16"),
    ("next_n", {"next_n": True}, "integer >= 1"),
    ("next_n", {"next_n": 1.0}, "1.0"),
    ("max_length", {"max_length": False}, "False"),
    ("max_length", {"max_length": 5.5}, "5.5"),
    ("row_starts", {"row_starts": 0}, "torch.Tensor"),
    ("row_starts", {"row_starts": ints(dtype=torch.int64)}, "torch.int64"),
    ("group", {"group": True}, "True"),
    ("group", {"group": 8.0}, "8.0"),
    ("pooled", {"pooled": 1, "group": 8}, "a bool"),
    ("pin_newest", {"pin_newest": None}, "a bool"),
    ("drop_neg_inf", {"drop_neg_inf": 1}, "a bool"),
    ("expand", {"expand": "yes"}, "a bool"),
    ("largest", {"largest": 1}, "a bool"),
    ("largest", {"largest": None}, "a bool"),
    ("values", {"values": scores()}, "a bool"),
    ("order", {"order": None}, "'index'"),
    ("order", {"order": True}, "True"),
    ("ties", {"ties": 0}, "'lowest'"),
    ("index_dtype", {"index_dtype": torch.int16}, "torch.int64"),
    ("index_dtype", {"index_dtype": "int32"}, "torch.int32"),
    ("index_dtype", {"index_dtype": np.int32}, "torch.int32"),
    ("index_dtype", {"index_dtype": np.zeros(3)}, "torch.int32"),
    ("row_offsets", {"row_offsets": ints(dtype=torch.int16)}, "torch.int16"),
    ("row_offsets", {"row_offsets": 7}, "torch.Tensor"),
    ("page_table", {"page_table": ints(ROWS, 4, dtype=torch.int64)}, "torch.int64"),
    ("page_table", {"page_table": [[0]]}, "torch.Tensor"),
    ("page_size", {"page_table": ints(ROWS, 4), "page_size": True}, "True"),
    ("page_size", {"page_table": ints(ROWS, 4), "page_size": 4.0}, "4.0"),
    ("row_to_table", {"page_table": ints(ROWS, 4), "row_to_table": ints(dtype=torch.int64)}, "torch.int64"),
    ("table_starts", {"page_table": ints(ROWS, 4), "table_starts": ints(dtype=torch.int64)}, "torch.int64"),
    ("out_indices", {"out_indices": ints(ROWS, K, dtype=torch.int64)}, "torch.int32"),
    ("out_indices", {"out_indices": ints(ROWS, K), "index_dtype": torch.int64}, "torch.int64"),
    ("out_indices", {"out_indices": np.zeros((ROWS, K), np.int32)}, "torch.Tensor"),
    ("out_values", {"out_values": scores(ROWS, K, dtype=torch.float16), "values": True}, "torch.float16"),
    ("kernel", {"kernel": None}, "'torch'"),
    ("kernel", {"kernel": 1}, "'auto'"),
    ("kernels", {"kernels": "torch"}, "no option"),
    ("sorted", {"sorted": True}, "no option"),
]

VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("input", {"input": scores(16)}, r"\(16,\)"),
    ("input", {"input": scores(2, 3, 4)}, r"\(2, 3, 4\)"),
    ("input", {"input": torch.tensor(1.0)}, r"\(\)"),
    ("input", {"input": scores(WIDTH, ROWS).T}, r"stride \(1, 4\)"),
    ("input", {"input": scores(ROWS, 2 * WIDTH)[:, ::2]}, r"stride \(32, 2\)"),
    ("input", {"input": scores(ROWS, 1).expand(ROWS, WIDTH)}, r"stride \(1, 0\)"),
    ("input", {"input": scores().to_sparse()}, "sparse"),
    ("input", {"input": torch.empty(ROWS, WIDTH, device="meta")}, "device meta"),
    ("input", {"input": torch.zeros(1, dtype=torch.bfloat16).expand(1, 2**31).expand(2, -1)}, "2147483647"),
    ("k", {"k": 0}, "0"),
    ("k", {"k": -1}, "-1"),
    ("k", {"k": 2**20 + 1}, "1048576"),
    ("k", {"k": 10**5000}, "bits"),
    ("lengths", {"lengths": ints(ROWS + 1)}, r"\(4,\)"),
    ("lengths", {"lengths": ints(ROWS, 1)}, r"\(4, 1\)"),
    ("lengths", {"lengths": ints(ROWS), "next_n": 2}, r"of shape \(2,\)"),
    ("lengths", {"lengths": ints(2 * ROWS)[::2]}, "contiguous"),
    ("lengths", {"lengths": ints(1).expand(ROWS)}, "contiguous"),
    ("lengths", {"lengths": torch.empty(ROWS, dtype=INT32, device="meta")}, "on cpu"),
    ("next_n", {"next_n": 0}, "0"),
    ("next_n", {"next_n": 3}, "divisor"),
    ("next_n", {"next_n": 8}, "divisor"),
    ("next_n", {"next_n": 2**70}, "divisor"),
    ("max_length", {"max_length": -1}, "-1"),
    ("max_length", {"max_length": 2**31}, "2147483647"),
    ("row_starts", {"row_starts": ints(ROWS - 1)}, r"\(3,\)"),
    ("row_starts", {"row_starts": ints(2 * ROWS)[::2]}, "contiguous"),
    ("group", {"group": 0}, "0"),
    ("group", {"group": 3}, "3"),
    ("group", {"group": 256}, "256"),
    ("pooled", {"pooled": True}, "group"),
    ("pooled", {"pooled": True, "group": 8, "row_starts": ints()}, "row_starts"),
    ("largest", {"largest": False, "group": 8}, "group"),
    ("largest", {"largest": False, "pin_newest": True}, "pin_newest"),
    ("largest", {"largest": False, "drop_neg_inf": True}, "drop_neg_inf"),
    ("largest", {"largest": False, "expand": True}, "expand"),
    ("expand", {"expand": True, "values": True, "group": 8}, "values"),
    ("expand", {"expand": True, "values": True}, "values"),
    ("order", {"order": "ascending"}, "'ascending'"),
    ("order", {"order": ""}, "'index'"),
    ("ties", {"ties": "first"}, "'first'"),
    ("row_offsets", {"row_offsets": ints(dtype=torch.int64)}, "index_dtype"),
    ("row_offsets", {"row_offsets": ints(ROWS, 1)}, r"\(4, 1\)"),
    ("row_offsets", {"row_offsets": ints(2 * ROWS)[::2]}, "contiguous"),
    ("page_table", {"page_table": ints(ROWS, 4), "row_offsets": ints()}, "row_offsets"),
    ("page_table", {"page_table": ints(ROWS - 1, 4)}, "row_to_table"),
    ("page_table", {"page_table": ints(ROWS)}, r"\(4,\)"),
    ("page_table", {"page_table": ints(ROWS, 8)[:, ::2]}, "stride"),
    ("page_size", {"page_size": 2}, "page_table"),
    ("page_size", {"page_table": ints(ROWS, 4), "page_size": 0}, "0"),
    ("page_size", {"page_table": ints(ROWS, 4), "page_size": 3}, "power of two"),
    ("page_size", {"page_table": ints(ROWS, 4), "page_size": 2**31}, "1073741824"),
    ("row_to_table", {"row_to_table": ints()}, "page_table"),
    ("row_to_table", {"page_table": ints(1, 4), "row_to_table": ints(1)}, r"\(4,\)"),
    ("table_starts", {"table_starts": ints()}, "page_table"),
    ("table_starts", {"page_table": ints(ROWS, 4), "table_starts": ints(2 * ROWS)[::2]}, "contiguous"),
    ("out_indices", {"out_indices": ints(ROWS, K + 1)}, r"\(4, 3\)"),
    ("out_indices", {"out_indices": ints(ROWS, K), "group": 2, "expand": True}, r"\(4, 6\)"),
    ("out_indices", {"out_indices": ints(ROWS * K)}, r"\(12,\)"),
    ("out_indices", {"out_indices": ints(K, ROWS).T}, "last stride 1"),
    ("out_indices", {"out_indices": ints(1, K).expand(ROWS, K)}, "overlap"),
    ("out_indices", {"out_indices": ints(20).as_strided((ROWS, K), (2, 1))}, "row stride >= 3"),
    ("out_indices", {"out_indices": torch.empty(ROWS, K, dtype=INT32, device="meta")}, "on cpu"),
    ("out_values", {"out_values": scores(ROWS, K)}, "values"),
    ("out_values", {"out_values": scores(ROWS, K + 1), "values": True}, r"\(4, 3\)"),
    ("out_values", {"out_values": scores(1, K).expand(ROWS, K), "values": True}, "overlap"),
    ("kernel", {"kernel": "fastest"}, "'fastest'.*'auto'.*'torch'"),
    ("kernel", {"kernel": "cluster"}, "'cluster'.*'auto'.*'torch'"),
    ("kernel", {"kernel": ""}, "'torch'"),
]


def names(cases: list[tuple[str, dict[str, Any], str]]) -> list[str]:
    return [f"{place}-{argument}" for place, (argument, _, _) in enumerate(cases)]


def call(options: dict[str, Any]) -> Any:
    options = {"input": scores(), "k": K} | options
    return validate_select(options.pop("input"), options.pop("k"), **options)


@pytest.mark.parametrize(("argument", "options", "text"), TYPES, ids=names(TYPES))
def test_wrong_types(argument: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"(?s){argument}.*{text}") as caught:
        call(options)
    assert isinstance(caught.value, ArgumentTypeError)
    assert caught.value.argument == argument


@pytest.mark.parametrize(("argument", "options", "text"), VALUES, ids=names(VALUES))
def test_wrong_values(argument: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){argument}.*{text}") as caught:
        call(options)
    assert isinstance(caught.value, ArgumentValueError)
    assert caught.value.argument == argument


FILLED = (-7, 2.5)


@pytest.mark.parametrize(("argument", "options", "text"), VALUES[-3:] + VALUES[10:20] + TYPES[6:10])
def test_outputs_are_untouched(argument: str, options: dict[str, Any], text: str) -> None:
    indices, values = torch.full((ROWS, K), FILLED[0], dtype=INT32), torch.full((ROWS, K), FILLED[1])
    arguments: dict[str, Any] = {
        "input": scores(),
        "k": K,
        "out_indices": indices,
        "out_values": values,
        "values": True,
    } | options
    with pytest.raises((TypeError, ValueError)):
        select_topk(arguments.pop("input"), arguments.pop("k"), **arguments)
    assert (indices == FILLED[0]).all()
    assert (values == FILLED[1]).all()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_and_nested_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="strided"):
        select_topk(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), 1)
    with pytest.raises(TypeError, match=r"input .*qint8"):
        select_topk(torch.quantize_per_tensor(scores(), 0.1, 0, torch.qint8), 1)


def test_lazily_negated_inputs_are_refused() -> None:
    lazy = torch.zeros(4, 1, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    with pytest.raises(ValueError, match="resolve_neg"):
        select_topk(lazy, 1)


@pytest.mark.parametrize("number", [Index(), np.int64(3), np.uint8(3)])
def test_anything_with_an_index_is_an_integer(number: Any) -> None:
    assert call({"k": number}).k == 3
    assert type(call({"k": number, "max_length": number}).max_length) is int


def test_strides_of_dimensions_of_size_one_are_not_looked_at() -> None:
    column = scores(ROWS, 8)[:, :1]
    assert call({"input": column.as_strided((ROWS, 1), (8, 5)), "k": 1}).width == 1
    row = scores(64).as_strided((1, WIDTH), (0, 1))
    out = ints(64).as_strided((1, K), (1, 1))
    assert call({"input": row, "out_indices": out, "lengths": ints(8)[::8]}).rows == 1
    out = ints(64).as_strided((ROWS, 1), (3, 9))
    assert call({"k": 1, "out_indices": out}).columns == 1


def test_empty_requests_are_valid() -> None:
    empty = ints(0)
    request = call(
        {"input": scores(0, WIDTH), "lengths": empty, "row_starts": empty, "row_offsets": empty, "next_n": 7}
    )
    assert request.output_shape == (0, K)
    assert call({"input": scores(ROWS, 0)}).element_bound == 0


def test_defaults_are_resolved() -> None:
    assert call({}).drop_neg_inf is False
    assert call({"group": 8}).drop_neg_inf is True
    assert call({"group": 8, "drop_neg_inf": False}).drop_neg_inf is False
    assert call({"largest": False}).drop_neg_inf is False
    assert call({"expand": True}).columns == K
    assert call({"expand": True, "group": 8}).output_shape == (ROWS, 8 * K)


def test_errors_survive_pickling() -> None:
    error = ArgumentValueError("k", "k is 0", 5)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.argument, again.selection) == (ArgumentValueError, "k is 0", "k", 5)


def test_supports_raises_on_bad_arguments() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        supports("torch", scores(), 0)


MERGES: list[tuple[str, type[Exception], dict[str, Any]]] = [
    ("values", TypeError, {"values": np.zeros((2, 4), np.float32)}),
    ("values", TypeError, {"values": scores(2, 4, dtype=torch.float64)}),
    ("values", ValueError, {"values": scores(4)}),
    ("values", ValueError, {"values": scores(4, 2).T}),
    ("values", ValueError, {"values": torch.empty(2, 4, device="meta")}),
    ("indices", TypeError, {"indices": [[1]]}),
    ("indices", TypeError, {"indices": ints(2, 4, dtype=torch.int16)}),
    ("indices", ValueError, {"indices": ints(2, 5)}),
    ("indices", ValueError, {"indices": ints(2, 8)[:, ::2]}),
    ("indices", ValueError, {"indices": torch.empty(2, 4, dtype=INT32, device="meta")}),
    ("k", TypeError, {"k": True}),
    ("k", ValueError, {"k": 0}),
    ("largest", TypeError, {"largest": 1}),
    ("order", ValueError, {"order": "best"}),
    ("ties", ValueError, {"ties": "best"}),
    ("group", TypeError, {"group": 8}),
    ("kernel", TypeError, {"kernel": "torch"}),
    ("out_indices", TypeError, {"out_indices": ints(2, 3, dtype=torch.int64)}),
    ("out_indices", ValueError, {"out_indices": ints(2, 4)}),
    ("out_values", TypeError, {"out_values": scores(2, 3, dtype=torch.float16)}),
    ("out_values", ValueError, {"out_values": scores(1, 3).expand(2, 3)}),
]


@pytest.mark.parametrize(("argument", "kind", "options"), MERGES)
def test_wrong_merges(argument: str, kind: type[Exception], options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"values": scores(2, 4), "indices": ints(2, 4), "k": 3} | options
    with pytest.raises(kind, match=argument) as caught:
        validate_merge(**arguments)
    assert isinstance(caught.value, (ArgumentTypeError, ArgumentValueError))
    assert caught.value.argument == argument
