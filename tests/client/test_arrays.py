from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from topkd import _arrays
from topkd.errors import ArgumentTypeError, ArgumentValueError
from topkd.v1 import tensor_pb2 as pb

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_numpy_views_are_described_in_elements() -> None:
    array = np.zeros((4, 10), np.float32)[1:, 2:7]
    view = _arrays.describe("x", array)
    assert (view.shape, view.strides, view.code) == ((3, 5), (10, 1), pb.D_TYPE_FLOAT32)
    assert view.address == array.ctypes.data
    assert _arrays.extent(view) == (2 * 10 + 5) * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64])
def test_torch_tensors_are_described_alike(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 10).to(dtype)[1:, 2:7]
    view = _arrays.describe("x", tensor)
    assert (view.shape, view.strides, view.device) == ((3, 5), (10, 1), _arrays.HOST)
    assert view.address == tensor.data_ptr()
    assert _arrays.dtype_name(view.code) == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    "value", [None, [1.0], 3, np.zeros(2, np.float64), np.zeros(2, ">f4"), torch.zeros(2, dtype=torch.int8)]
)
def test_what_is_no_tensor_of_ours_is_a_type_error(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="lengths") as caught:
        _arrays.describe("lengths", value, 2)
    assert (caught.value.argument, caught.value.selection) == ("lengths", 2)


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [
        ("input", "allowed are bfloat16, float16, float32"),
        ("lengths", "allowed is int32"),
        ("row_offsets", "allowed are int32, int64"),
        ("tensor", "allowed are bfloat16, float16, float32, int32, int64"),
    ],
)
def test_a_wrong_dtype_names_those_that_the_argument_may_have(argument: str, allowed: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        _arrays.describe(argument, np.zeros(2))
    assert str(caught.value) == f"{argument} has dtype float64; {allowed}"


def test_strides_of_broken_elements_are_refused() -> None:
    array = np.zeros(64, np.uint8)[:48].view(np.dtype([("a", "<f4"), ("b", "u1"), ("c", "u1")]))["a"]
    with pytest.raises(ArgumentValueError, match="strides"):
        _arrays.describe("input", array)


def test_sparse_and_meta_tensors_are_refused() -> None:
    for tensor in (torch.zeros(2, 2).to_sparse(), torch.zeros(2, 2, device="meta")):
        with pytest.raises(ArgumentValueError, match="input"):
            _arrays.describe("input", tensor)


def test_extent_ignores_strides_of_single_rows() -> None:
    view = _arrays.describe("x", np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (1, 4), (4000, 4)))
    assert _arrays.extent(view) == 16
    assert _arrays.extent(_arrays.describe("x", np.zeros((0, 5), np.float32))) == 0


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32", "int64"])
def test_bits_there_and_back(library: str, name: str) -> None:
    code = _arrays.CODES[name]
    carrier = np.arange(6).astype(_arrays.bits_dtype(code)).reshape(2, 3)
    wrapped = _arrays.wrap_bits(carrier, code, library)
    view = _arrays.describe("x", wrapped)
    assert (view.library, view.code, view.shape) == (library, code, (2, 3))
    assert np.shares_memory(_arrays.bits(view), carrier)
    assert (_arrays.bits(view) == carrier).all()


def test_bits_of_a_tensor_that_requires_grad() -> None:
    tensor = torch.ones(3, requires_grad=True)
    assert (_arrays.bits(_arrays.describe("x", tensor)) == np.float32(1).view(np.int32)).all()


@pytest.mark.parametrize(
    ("value", "name", "library"),
    [
        ("float32", "float32", ""),
        (np.float16, "float16", "numpy"),
        (np.dtype("int64"), "int64", "numpy"),
        (BF16, "bfloat16", "numpy"),
        (ml_dtypes.bfloat16, "bfloat16", "numpy"),
        (torch.bfloat16, "bfloat16", "torch"),
    ],
)
def test_names_of_dtypes(value: Any, name: str, library: str) -> None:
    assert _arrays.parse_dtype("dtype", value) == (_arrays.CODES[name], library)


@pytest.mark.parametrize("value", [None, 3, "float64", np.float64, torch.int8, float, object()])
def test_other_dtypes_are_a_type_error(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"index_dtype is .*; allowed are int32, int64$"):
        _arrays.parse_dtype("index_dtype", value)
