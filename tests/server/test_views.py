from typing import Any

import pytest

from topkd.server._views import ELEMENT_BYTES, check_inline, check_region_view
from topkd.server.errors import FieldError, FieldTypeError
from topkd.v1 import tensor_pb2

F32, BF16, I64 = tensor_pb2.D_TYPE_FLOAT32, tensor_pb2.D_TYPE_BFLOAT16, tensor_pb2.D_TYPE_INT64
BIG = (1 << 63) - 1


def tensor(dtype: Any, shape: list[int], strides: list[int] | None = None, offset: int = 0) -> tensor_pb2.Tensor:
    place = tensor_pb2.RegionSlice(region_id=1, offset=offset)
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, strides=strides or [], region=place)


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "offset", "size"),
    [
        (F32, [2, 3], None, 0, 24),
        (F32, [2, 3], [4, 1], 0, 28),
        (F32, [2, 3], [0, 1], 0, 12),
        (F32, [2, 3], [1, 1], 8, 24),
        (I64, [5], None, 8, 48),
        (F32, [1, 3], [BIG, 1], 0, 12),
        (F32, [3, 1], [2, BIG], 0, 20),
        (F32, [0, BIG], None, 24, 24),
        (BF16, [BIG, 0], [BIG, 1], 0, 0),
        (BF16, [1 << 50, 1], [0, 1], 0, 2),
    ],
)
def test_exactly_fits(dtype: int, shape: list[int], strides: list[int] | None, offset: int, size: int) -> None:
    message = tensor(dtype, shape, strides, offset)
    view = check_region_view(message, size, "items[0].selection.input")
    assert view.offset * ELEMENT_BYTES[dtype] == offset
    if size > offset:
        with pytest.raises(FieldError, match="the region has"):
            check_region_view(message, size - 1, "input")


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "offset"),
    [
        (0, [1, 1], None, 0),
        (77, [1, 1], None, 0),
        (F32, [], None, 0),
        (F32, [1, 1, 1], None, 0),
        (F32, [-1, 4], None, 0),
        (F32, [4, -1], None, 0),
        (F32, [2, 2], [2], 0),
        (F32, [2, 2], [-2, 1], 0),
        (F32, [2, 2], [1, 2], 0),
        (F32, [2, 2], None, 2),
        (F32, [2, 2], None, (1 << 64) - 4),
        (F32, [BIG, BIG], None, 0),
        (F32, [BIG, 2], [0, 1], 0),
        (F32, [2, 2], [BIG, 1], 0),
        (F32, [1 << 40, 1 << 20], [BIG, 1], 0),
        (F32, [0, 2], None, 1 << 40),
    ],
)
def test_refusals(dtype: int, shape: list[int], strides: list[int] | None, offset: int) -> None:
    with pytest.raises(FieldError) as caught:
        check_region_view(tensor(dtype, shape, strides, offset), 1 << 20, "items[3].selection.lengths")
    assert caught.value.field == "items[3].selection.lengths"
    assert str(caught.value).startswith("lengths: ")
    assert isinstance(caught.value, FieldTypeError) == (dtype in (0, 77))


def test_address_that_is_not_aligned() -> None:
    check_region_view(tensor(BF16, [1, 1]), 64, "input", address=2)
    with pytest.raises(FieldError, match="address"):
        check_region_view(tensor(F32, [1, 1]), 64, "input", address=2)


def test_inline() -> None:
    message = tensor_pb2.Tensor(dtype=F32, shape=[2, 2], inline_data=b"\0" * 16)
    assert check_inline(message, "input").shape == (2, 2)
    for change in ({"inline_data": b"\0" * 15}, {"inline_data": b""}, {"shape": [2, 2], "strides": [2, 1]}):
        wrong = tensor_pb2.Tensor(dtype=F32, shape=[2, 2], inline_data=b"\0" * 16)
        wrong.MergeFrom(tensor_pb2.Tensor(**change))
        with pytest.raises(FieldError):
            check_inline(wrong, "input")
