"""Bounds of tensors as requests name them, in Python integers, which do not overflow."""

from collections.abc import Sequence
from typing import NamedTuple

from topkd.v1 import tensor_pb2

from .errors import FieldError, FieldTypeError

__all__ = ["ELEMENT_BYTES", "View", "check_inline", "check_region_view"]

ELEMENT_BYTES: dict[int, int] = {
    tensor_pb2.D_TYPE_BFLOAT16: 2,
    tensor_pb2.D_TYPE_FLOAT16: 2,
    tensor_pb2.D_TYPE_FLOAT32: 4,
    tensor_pb2.D_TYPE_INT32: 4,
    tensor_pb2.D_TYPE_INT64: 8,
}
_LARGEST = (1 << 63) - 1


class View(NamedTuple):
    """A checked view of bytes.

    Attributes:
        dtype: number of a DType.
        shape: one or two sizes.
        strides: as many, in elements; of dimensions of size 1 canonical.
        offset: elements from the storage's start to the first element.
    """

    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """Elements."""
        return self.shape[0] * (self.shape[1] if len(self.shape) == 2 else 1)


def _name(field: str) -> str:
    return field.rpartition(".")[2]


def _check_shape(tensor: tensor_pb2.Tensor, field: str) -> tuple[tuple[int, ...], int]:
    """Returns the sizes and the bytes of an element."""
    size = ELEMENT_BYTES.get(tensor.dtype)
    if size is None:
        raise FieldTypeError(
            f"{_name(field)}: dtype is {tensor.dtype}, which is no DType that a tensor can have", field=field
        )
    shape = tuple(tensor.shape)
    if not 1 <= len(shape) <= 2:
        raise FieldError(f"{_name(field)}: shape has {len(shape)} sizes; it must have one or two", field=field)
    if min(shape) < 0:
        raise FieldError(f"{_name(field)}: shape is {shape}; no size may be negative", field=field)
    if shape[0] * shape[-1] * size > _LARGEST and shape[0] and shape[-1]:
        raise FieldError(f"{_name(field)}: shape is {shape}, more elements than 64 bits can count", field=field)
    return shape, size


def _check_strides(tensor: tensor_pb2.Tensor, shape: Sequence[int], field: str) -> tuple[int, ...]:
    """Returns the strides with those of dimensions of size 1 made canonical."""
    given, contiguous = tuple(tensor.strides), (shape[1], 1) if len(shape) == 2 else (1,)
    if not given:
        return contiguous
    if len(given) != len(shape):
        raise FieldError(f"{_name(field)}: strides has {len(given)} entries; shape has {len(shape)}", field=field)
    if min(given) < 0:
        raise FieldError(f"{_name(field)}: strides is {given}; none may be negative", field=field)
    if shape[-1] > 1 and given[-1] != 1:
        raise FieldError(f"{_name(field)}: strides is {given}; the last must be 1", field=field)
    return tuple(want if size <= 1 else got for size, got, want in zip(shape, given, contiguous, strict=True))


def check_region_view(tensor: tensor_pb2.Tensor, region_bytes: int, field: str, address: int = 0) -> View:
    """Checks that every element that shape and strides can reach lies in a region.

    Args:
        tensor: names a place in a region of `region_bytes` bytes.
        region_bytes: size of that region.
        field: path of the tensor, for errors.
        address: where the region begins, for the elements' alignment.

    Raises:
        FieldError: it does not, or the view is not well formed.
    """
    shape, size = _check_shape(tensor, field)
    strides = _check_strides(tensor, shape, field)
    offset = tensor.region.offset
    if offset % size or address % size:
        where = f"offset {offset}" if offset % size else "the region's address"
        raise FieldError(f"{_name(field)}: {where} is no multiple of the element size {size}", field=field)
    last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    end = offset if 0 in shape else offset + (last + 1) * size
    if end > region_bytes:
        text = f"{_name(field)}: shape {shape}, strides {strides} and offset {offset} end at byte {end}"
        raise FieldError(f"{text}; the region has {region_bytes}", field=field)
    return View(tensor.dtype, shape, strides, offset // size)


def check_inline(tensor: tensor_pb2.Tensor, field: str) -> View:
    """Checks a tensor whose bytes are in the message.

    Raises:
        FieldError: there are more or fewer bytes than the shape says, or the view is not well formed.
    """
    shape, size = _check_shape(tensor, field)
    if tensor.strides:
        raise FieldError(f"{_name(field)}: inline data is contiguous; strides must be empty", field=field)
    view = View(tensor.dtype, shape, (shape[1], 1) if len(shape) == 2 else (1,), 0)
    if len(tensor.inline_data) != view.elements * size:
        text = f"inline_data has {len(tensor.inline_data)} bytes; shape {shape} needs {view.elements * size}"
        raise FieldError(f"{_name(field)}: {text}", field=field)
    return view
