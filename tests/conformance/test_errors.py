"""Bad arguments: the right class, the argument named, and outputs left as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conformance.backends import Backend, strided

ROWS, WIDTH, K = 4, 40, 7
EITHER = (TypeError, ValueError)
Make = Callable[[Backend], Any]


def memory(*shape: int, dtype: torch.dtype = torch.int32, strides: tuple[int, ...] | None = None) -> Make:
    """A tensor in the backend's memory; strides default to contiguous."""
    dense = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

    def make(backend: Backend) -> torch.Tensor:
        # A dtype that scores cannot have may have no place in shared memory.
        flat = torch.empty(4096, dtype=dtype) if dtype == torch.float64 else backend.api.empty(4096, dtype)
        flat.zero_()
        return strided(flat, shape, strides or dense)

    return make


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Make:
    """A tensor of another device."""
    return lambda _: torch.empty(shape, dtype=dtype, device="meta")


BAD: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("zero", ValueError, "k", {"k": 0}),
    ("negative", ValueError, "k", {"k": -1}),
    ("over-2-to-20", ValueError, "k", {"k": 2**20 + 1}),
    ("2-to-63", ValueError, "k", {"k": 2**63}),
    ("bool", TypeError, "k", {"k": True}),
    ("float", TypeError, "k", {"k": 7.0}),
    ("none", TypeError, "k", {"k": None}),
    ("text", TypeError, "k", {"k": "7"}),
    ("list", TypeError, "input", {"input": [[1.0, 2.0]]}),
    ("one-dimension", ValueError, "input", {"input": memory(WIDTH, dtype=torch.bfloat16)}),
    ("three-dimensions", ValueError, "input", {"input": memory(2, 2, 8, dtype=torch.bfloat16)}),
    ("int32", TypeError, "input", {"input": memory(ROWS, WIDTH)}),
    ("float64", TypeError, "input", {"input": memory(ROWS, WIDTH, dtype=torch.float64)}),
    ("last-stride", ValueError, "input", {"input": memory(ROWS, WIDTH, dtype=torch.float32, strides=(80, 2))}),
    ("transposed", ValueError, "input", {"input": memory(ROWS, WIDTH, dtype=torch.float32, strides=(1, ROWS))}),
    ("too-few", ValueError, "lengths", {"lengths": memory(ROWS - 1)}),
    ("too-many", ValueError, "lengths", {"lengths": memory(ROWS + 1)}),
    ("of-drafts", ValueError, "lengths", {"lengths": memory(ROWS), "next_n": 2}),
    ("int64", TypeError, "lengths", {"lengths": memory(ROWS, dtype=torch.int64)}),
    ("not-contiguous", ValueError, "lengths", {"lengths": memory(ROWS, strides=(2,))}),
    ("two-dimensions", ValueError, "lengths", {"lengths": memory(ROWS, 1)}),
    ("list", TypeError, "lengths", {"lengths": [1, 2, 3, 4]}),
    ("device", ValueError, "lengths", {"lengths": meta(ROWS)}),
    ("zero", ValueError, "next_n", {"next_n": 0}),
    ("divides-not", ValueError, "next_n", {"next_n": 3}),
    ("bool", TypeError, "next_n", {"next_n": True}),
    ("negative", ValueError, "max_length", {"max_length": -1}),
    ("over", ValueError, "max_length", {"max_length": 2**31}),
    ("bool", TypeError, "max_length", {"max_length": False}),
    ("tensor", TypeError, "max_length", {"max_length": memory(1)}),
    ("too-few", ValueError, "row_starts", {"row_starts": memory(ROWS - 1)}),
    ("int64", TypeError, "row_starts", {"row_starts": memory(ROWS, dtype=torch.int64)}),
    ("not-contiguous", ValueError, "row_starts", {"row_starts": memory(ROWS, strides=(3,))}),
    ("of-pooled", ValueError, "pooled", {"row_starts": memory(ROWS), "pooled": True, "group": 4}),
    ("three", ValueError, "group", {"group": 3}),
    ("zero", ValueError, "group", {"group": 0}),
    ("256", ValueError, "group", {"group": 256}),
    ("bool", TypeError, "group", {"group": True}),
    ("without-group", ValueError, "pooled", {"pooled": True}),
    ("integer", TypeError, "pooled", {"pooled": 1, "group": 4}),
    ("integer", TypeError, "pin_newest", {"pin_newest": 1}),
    ("integer", TypeError, "drop_neg_inf", {"drop_neg_inf": 0}),
    ("text", TypeError, "expand", {"expand": "yes"}),
    ("none", TypeError, "largest", {"largest": None}),
    ("integer", TypeError, "values", {"values": 1}),
    ("group", ValueError, "largest", {"largest": False, "group": 8}),
    ("pin", ValueError, "largest", {"largest": False, "pin_newest": True}),
    ("drop", ValueError, "largest", {"largest": False, "drop_neg_inf": True}),
    ("expand", ValueError, "largest", {"largest": False, "expand": True}),
    ("values", ValueError, "expand", {"expand": True, "values": True, "group": 4}),
    ("unknown", ValueError, "order", {"order": "sorted"}),
    ("none", EITHER, "order", {"order": None}),
    ("unknown", ValueError, "ties", {"ties": "first"}),
    ("int16", EITHER, "index_dtype", {"index_dtype": torch.int16}),
    ("too-few", ValueError, "row_offsets", {"row_offsets": memory(ROWS - 1)}),
    ("int64-to-int32", EITHER, "row_offsets", {"row_offsets": memory(ROWS, dtype=torch.int64)}),
    ("float", TypeError, "row_offsets", {"row_offsets": memory(ROWS, dtype=torch.float32)}),
    ("and-table", ValueError, "row_offsets", {"row_offsets": memory(ROWS), "page_table": memory(ROWS, 9)}),
    ("int64", TypeError, "page_table", {"page_table": memory(ROWS, 9, dtype=torch.int64)}),
    ("one-dimension", ValueError, "page_table", {"page_table": memory(9)}),
    ("last-stride", ValueError, "page_table", {"page_table": memory(ROWS, 9, strides=(18, 2))}),
    ("fewer-than-rows", ValueError, "page_table", {"page_table": memory(ROWS - 1, 9)}),
    ("three", ValueError, "page_size", {"page_table": memory(ROWS, 9), "page_size": 3}),
    ("zero", ValueError, "page_size", {"page_table": memory(ROWS, 9), "page_size": 0}),
    ("2-to-31", ValueError, "page_size", {"page_table": memory(ROWS, 9), "page_size": 2**31}),
    ("without-table", ValueError, "page_size", {"page_size": 4}),
    ("without-table", ValueError, "row_to_table", {"row_to_table": memory(ROWS)}),
    ("without-table", ValueError, "table_starts", {"table_starts": memory(ROWS)}),
    ("too-few", ValueError, "row_to_table", {"page_table": memory(ROWS, 9), "row_to_table": memory(1)}),
    ("int64", TypeError, "table_starts", {"page_table": memory(ROWS, 9), "table_starts": memory(4, dtype=torch.int64)}),
    ("columns", ValueError, "out_indices", {"out_indices": memory(ROWS, K + 1)}),
    ("columns-of-expand", ValueError, "out_indices", {"out_indices": memory(ROWS, K), "group": 4, "expand": True}),
    ("rows", ValueError, "out_indices", {"out_indices": memory(ROWS + 1, K)}),
    ("float", TypeError, "out_indices", {"out_indices": memory(ROWS, K, dtype=torch.float32)}),
    ("int64", TypeError, "out_indices", {"out_indices": memory(ROWS, K, dtype=torch.int64)}),
    ("overlapping", ValueError, "out_indices", {"out_indices": memory(ROWS, K, strides=(K - 1, 1))}),
    ("stride-zero", ValueError, "out_indices", {"out_indices": memory(ROWS, K, strides=(0, 1))}),
    ("last-stride", ValueError, "out_indices", {"out_indices": memory(ROWS, K, strides=(2 * K, 2))}),
    ("device", ValueError, "out_indices", {"out_indices": meta(ROWS, K)}),
    ("without-values", ValueError, "out_values", {"out_values": memory(ROWS, K, dtype=torch.bfloat16)}),
    ("dtype", TypeError, "out_values", {"out_values": memory(ROWS, K, dtype=torch.float16), "values": True}),
    ("columns", ValueError, "out_values", {"out_values": memory(ROWS, K - 1, dtype=torch.bfloat16), "values": True}),
    ("unknown", ValueError, "kernel", {"kernel": "fastest"}),
    ("none", EITHER, "kernel", {"kernel": None}),
]  # fmt: skip


def descriptions(value: Any) -> list[str]:
    """Texts of which a message about a bad value holds one."""
    if isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        return [
            str(shape),
            str(list(shape)),
            str(value.dtype).removeprefix("torch."),
            str(value.stride()),
            str(value.device),
        ]
    return [str(value), type(value).__name__]


def good(backend: Backend) -> dict[str, Any]:
    """A request that is right, outputs included."""
    outputs = {"out_indices": memory(ROWS, K)(backend), "out_values": memory(ROWS, K, dtype=torch.bfloat16)(backend)}
    for output in outputs.values():
        output.fill_(77)
    return {"input": memory(ROWS, WIDTH, dtype=torch.bfloat16)(backend), "k": K, "values": True, **outputs}


@pytest.mark.parametrize(("classes", "name", "bad"), [pytest.param(*one[1:], id=f"{one[2]}-{one[0]}") for one in BAD])
def test_bad_argument(backend: Backend, classes: Any, name: str, bad: dict[str, Any]) -> None:
    request = good(backend)
    kept = [request["out_indices"], request["out_values"]]
    if {"expand", "k", "values"} & set(bad) or "out_values" in bad or "out_indices" in bad:  # others would be wrong too
        del request["values"], request["out_values"], request["out_indices"]
    if "index_dtype" in bad or bad.get("row_offsets") is not None:
        del request["out_indices"]
    for key, value in bad.items():
        request[key] = value(backend) if callable(value) else value
    given = request.get(name)
    with pytest.raises(classes, match=rf"\b{name}\b") as error:
        backend.api.select_topk(request.pop("input"), request.pop("k"), **request)
    assert any(text in str(error.value) for text in descriptions(given)), "the message does not show the value"
    for output in kept:
        assert bool((output == 77).all()), "an output was written"


def test_the_good_request_is_good(backend: Backend) -> None:
    request = good(backend)
    result = backend.api.select_topk(request.pop("input"), request.pop("k"), **request)
    assert bool((result.indices != 77).all())


def test_unknown_option(backend: Backend) -> None:
    with pytest.raises(TypeError, match="sorted"):
        backend.api.select_topk(memory(1, 8, dtype=torch.float32)(backend), 2, sorted=True)


def test_unknown_kernel_lists_what_there_is(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"fastest.*torch"):
        backend.api.select_topk(memory(1, 8, dtype=torch.float32)(backend), 2, kernel="fastest")


def test_outputs_overlap_nothing(backend: Backend) -> None:
    scores = memory(ROWS, WIDTH, dtype=torch.float32)(backend)
    lengths = memory(ROWS)(backend)
    flat = backend.api.empty(4 * ROWS * K, torch.int32)
    outputs = strided(flat, (ROWS, K), (3 * K, 1))
    overlapping: list[dict[str, Any]] = [
        {"out_indices": strided(scores.view(torch.int32), (ROWS, K), (WIDTH, 1))},
        {"out_indices": strided(lengths, (ROWS, K), (K, 1)), "lengths": lengths},
        {"out_indices": outputs, "out_values": strided(flat.view(torch.float32), (ROWS, K), (3 * K, 1), K - 1)},
    ]
    for options in overlapping:
        with pytest.raises(ValueError, match="out_"):
            backend.api.select_topk(scores, K, values="out_values" in options, **options)
    beside = strided(flat.view(torch.float32), (ROWS, K), (3 * K, 1), K)  # between the rows of the other: no overlap
    result = backend.api.select_topk(scores, K, values=True, out_indices=outputs, out_values=beside)
    assert result.indices is outputs


BAD_MERGES: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("zero", ValueError, "k", {"k": 0}),
    ("bool", TypeError, "k", {"k": True}),
    ("float64", TypeError, "values", {"values": memory(ROWS, 9, dtype=torch.float64)}),
    ("one-dimension", ValueError, "values", {"values": memory(9, dtype=torch.float32)}),
    ("shape", ValueError, "indices", {"indices": memory(ROWS, 8)}),
    ("float", TypeError, "indices", {"indices": memory(ROWS, 9, dtype=torch.float32)}),
    ("device", ValueError, "indices", {"indices": meta(ROWS, 9)}),
    ("unknown", ValueError, "order", {"order": "sorted"}),
    ("unknown", ValueError, "ties", {"ties": "first"}),
    ("integer", TypeError, "largest", {"largest": 1}),
    ("int64", TypeError, "out_indices", {"out_indices": memory(ROWS, K, dtype=torch.int64)}),
    ("columns", ValueError, "out_values", {"out_values": memory(ROWS, K + 1, dtype=torch.float32)}),
    ("overlapping", ValueError, "out_values", {"out_values": memory(ROWS, K, dtype=torch.float32, strides=(3, 1))}),
]


@pytest.mark.parametrize(
    ("classes", "name", "bad"), [pytest.param(*one[1:], id=f"{one[2]}-{one[0]}") for one in BAD_MERGES]
)
def test_bad_merge(backend: Backend, classes: Any, name: str, bad: dict[str, Any]) -> None:
    request = {"values": memory(ROWS, 9, dtype=torch.float32)(backend), "indices": memory(ROWS, 9)(backend), "k": K}
    for key, value in bad.items():
        request[key] = value(backend) if callable(value) else value
    with pytest.raises(classes, match=rf"\b{name}\b"):
        backend.api.merge_topk(request.pop("values"), request.pop("indices"), request.pop("k"), **request)
