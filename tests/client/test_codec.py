from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from topkd import _arrays, _codec
from topkd._types import Backend, Merge, Selection
from topkd.errors import ArgumentTypeError, ArgumentValueError, ProtocolError
from topkd.v1 import control_pb2, selection_pb2, tensor_pb2

SCORES = np.zeros((2, 4), np.float32)


def encode(**options: Any) -> selection_pb2.Selection:
    return _codec.selection_message(Selection(SCORES, **{"k": 1, **options}))


def test_defaults_are_the_contracts() -> None:
    message = encode()
    assert (message.k, message.next_n, message.group, message.largest) == (1, 1, 1, True)
    assert (message.order, message.ties) == (selection_pb2.ORDER_ANY, selection_pb2.TIES_ANY)
    assert message.index_dtype == tensor_pb2.D_TYPE_INT32
    assert not any(message.HasField(name) for name in ("max_length", "drop_neg_inf", "page_size"))


def test_options_are_carried() -> None:
    message = encode(
        k=np.int64(7),
        max_length=0,
        group=8,
        drop_neg_inf=False,
        largest=False,
        order="value",
        ties="highest",
        index_dtype=torch.int64,
        page_size=16,
        pooled=True,
        pin_newest=True,
        expand=True,
        values=True,
        kernel="radix_wide",
    )
    assert (message.k, message.max_length, message.group, message.page_size) == (7, 0, 8, 16)
    assert message.HasField("max_length")
    assert message.HasField("drop_neg_inf")
    assert not message.drop_neg_inf
    assert (message.order, message.ties) == (selection_pb2.ORDER_VALUE, selection_pb2.TIES_HIGHEST)
    assert message.index_dtype == tensor_pb2.D_TYPE_INT64
    assert message.pooled
    assert message.pin_newest
    assert message.expand
    assert message.values
    assert message.kernel == "radix_wide"


@pytest.mark.parametrize("name", ["k", "next_n", "group", "page_size", "max_length"])
@pytest.mark.parametrize(
    "value", [True, 1.0, "1", np.bool_(True), np.ones(1, np.int64), torch.ones(1, dtype=torch.int64), [1]]
)
def test_integers_are_integers(name: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=name) as caught:
        encode(**{name: value})
    assert caught.value.argument == name


def test_a_cached_integer_does_not_let_its_equal_bool_through() -> None:
    encode(k=1, pooled=False)
    with pytest.raises(ArgumentTypeError, match="k"):
        encode(k=True)
    with pytest.raises(ArgumentTypeError, match="pooled"):
        encode(pooled=0)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**40])
def test_integers_beyond_64_bits(value: int) -> None:
    with pytest.raises(ArgumentValueError, match="beyond 64 bits"):
        encode(k=value)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("order", "sorted", ArgumentValueError),
        ("order", None, ArgumentTypeError),
        ("ties", "first", ArgumentValueError),
        ("ties", 1, ArgumentTypeError),
        ("largest", 1, ArgumentTypeError),
        ("values", None, ArgumentTypeError),
        ("values", np.bool_(True), ArgumentTypeError),
        ("drop_neg_inf", 0, ArgumentTypeError),
        ("kernel", None, ArgumentTypeError),
        ("index_dtype", "int8", ArgumentTypeError),
        ("group", None, ArgumentTypeError),
        ("order", [], ArgumentTypeError),
    ],
)
def test_other_wrong_options(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        encode(**{name: value})


def test_inline_tensors_there_and_back() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[:, :3]
    message = _codec.inline(_arrays.describe("input", array))
    assert (list(message.shape), list(message.strides)) == ([4, 3], [])
    assert (_codec.read_inline(message, "numpy") == array).all()
    back = _codec.read_inline(message, "torch")
    assert isinstance(back, torch.Tensor)
    assert (back.numpy() == array).all()


def test_inline_tensors_that_contradict_themselves() -> None:
    for tensor in (
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT32, shape=[3], inline_data=b"12345678"),
        tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_INT32, shape=[3], inline_data=b"123"),
        tensor_pb2.Tensor(shape=[1], inline_data=b"1234"),
    ):
        with pytest.raises(ProtocolError):
            _codec.read_inline(tensor, "numpy")


def test_references() -> None:
    view = _arrays.describe("input", SCORES[:, :2])
    message = _codec.reference(view, 2**63 + 5, 64)
    assert (message.region.region_id, message.region.offset) == (2**63 + 5, 64)
    assert (list(message.shape), list(message.strides)) == ([2, 2], [4, 1])


def test_merges() -> None:
    message = _codec.merge_message(Merge(SCORES, SCORES, 3, largest=False, order="index", ties="lowest"))
    assert (message.k, message.largest, message.HasField("largest")) == (3, False, True)
    with pytest.raises(ArgumentTypeError, match="k"):
        _codec.merge_message(Merge(SCORES, SCORES, 1.5))  # type: ignore[arg-type]


def test_server_information() -> None:
    info = _codec.read_info(
        control_pb2.ServerInfo(
            version="1",
            device=control_pb2.Device(backend=control_pb2.BACKEND_CUDA, uuid="GPU-1"),
            kernels=[control_pb2.KernelFamily(name="torch", dtypes=[tensor_pb2.D_TYPE_BFLOAT16, 77])],  # type: ignore[list-item]
            limits=control_pb2.Limits(max_batch=9),
        )
    )
    assert (info.device.backend, info.limits.max_batch) == (Backend.CUDA, 9)
    assert info.kernels[0].dtypes == ("bfloat16", "dtype 77")
