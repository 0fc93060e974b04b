"""numpy arrays and torch tensors seen alike: address, shape, strides, element type, device.

torch is looked up in `sys.modules`: who never imported it holds no tensor. Pure: knows nothing of sessions.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from topkd.errors import ArgumentTypeError, ArgumentValueError
from topkd.v1 import tensor_pb2 as pb

__all__ = [
    "CODES",
    "HOST",
    "Dtype",
    "View",
    "bits",
    "bits_dtype",
    "check_strides",
    "describe",
    "dtype_name",
    "extent",
    "itemsize",
    "memory",
    "numpy_dtype",
    "parse_dtype",
    "torch_module",
    "wrap_bits",
]

HOST: Final = -1
"""The device of host memory; CUDA devices are their ordinals."""

CODES: Final[dict[str, int]] = {
    "bfloat16": pb.D_TYPE_BFLOAT16,
    "float16": pb.D_TYPE_FLOAT16,
    "float32": pb.D_TYPE_FLOAT32,
    "int32": pb.D_TYPE_INT32,
    "int64": pb.D_TYPE_INT64,
}
_NAMES: Final[dict[int, str]] = {code: name for name, code in CODES.items()}
_ITEMSIZE: Final[dict[int, int]] = {
    pb.D_TYPE_BFLOAT16: 2,
    pb.D_TYPE_FLOAT16: 2,
    pb.D_TYPE_FLOAT32: 4,
    pb.D_TYPE_INT32: 4,
    pb.D_TYPE_INT64: 8,
}
_BITS: Final[dict[int, np.dtype[Any]]] = {2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}
_KNOWN: Final = tuple(CODES)
_FLOATS, _INT32, _INTEGERS = _KNOWN[:3], _KNOWN[3:4], _KNOWN[3:]
_ALLOWED: Final[dict[str, tuple[str, ...]]] = {
    "input": _FLOATS,
    "values": _FLOATS,
    "out_values": _FLOATS,
    "lengths": _INT32,
    "row_starts": _INT32,
    "page_table": _INT32,
    "row_to_table": _INT32,
    "table_starts": _INT32,
    "indices": _INTEGERS,
    "row_offsets": _INTEGERS,
    "out_indices": _INTEGERS,
    "index_dtype": _INTEGERS,
}
"""Element types that an argument may have, for the texts of errors; others may have all that requests can carry."""

_NUMPY_CODES: Final = {np.dtype(name): code for name, code in CODES.items() if name != "bfloat16"}


class View(NamedTuple):
    """A tensor as requests describe it.

    Attributes:
        array: The numpy array or torch tensor.
        library: "numpy" or "torch".
        device: `HOST` or the CUDA ordinal.
        address: Of the first element.
        shape: Sizes.
        strides: In elements.
        code: Element type, a `topkd.v1.DType`.
    """

    array: Any
    library: str
    device: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    code: int


class Dtype(NamedTuple):
    """An element type as a user names it, with the library that the name implies ("" for a plain string)."""

    code: int
    library: str


def torch_module() -> ModuleType | None:
    """Returns torch if something has imported it."""
    return sys.modules.get("torch")


def describe(argument: str, value: object, selection: int = 0) -> View:
    """Describes a tensor argument.

    Raises:
        ArgumentTypeError: It is no tensor, or of an element type that no request can carry.
        ArgumentValueError: Its memory is not strided, its strides are no whole elements, or its elements are not what
            their bits say: a lazily negated view.
    """
    if isinstance(value, np.ndarray):
        return _describe_numpy(argument, value, selection)
    torch = torch_module()
    if torch is not None and isinstance(value, torch.Tensor):
        return _describe_torch(argument, value, selection, torch)
    raise ArgumentTypeError(
        f"{argument} must be a numpy array or a torch tensor, not {type(value).__name__}",
        argument=argument,
        selection=selection,
    )


def _describe_numpy(argument: str, array: np.ndarray[Any, Any], selection: int) -> View:
    code = _NUMPY_CODES.get(array.dtype)
    if code is None:
        code = CODES.get(array.dtype.name)
        if code is None or not array.dtype.isnative:
            raise _bad_dtype(argument, array.dtype.str if code else array.dtype.name, selection)
    size = array.dtype.itemsize
    if any(stride % size for stride in array.strides):
        raise ArgumentValueError(
            f"{argument} has strides of {array.strides} bytes, which are no multiples of its {size}-byte elements",
            argument=argument,
            selection=selection,
        )
    strides = tuple(stride // size for stride in array.strides) if array.size else _contiguous(array.shape)
    return View(array, "numpy", HOST, array.__array_interface__["data"][0], array.shape, strides, code)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of an array without elements, whose own mean nothing."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _describe_torch(argument: str, tensor: Any, selection: int, torch: ModuleType) -> View:
    name = str(tensor.dtype).removeprefix("torch.")
    code = CODES.get(name)
    if code is None:
        raise _bad_dtype(argument, name, selection)
    kind = tensor.device.type
    if kind not in ("cpu", "cuda") or tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else f"with layout {tensor.layout}"
        raise ArgumentValueError(
            f"{argument} is on {tensor.device}, {layout}; allowed are strided CPU and CUDA tensors",
            argument=argument,
            selection=selection,
        )
    if tensor.is_neg():
        raise ArgumentValueError(
            f"{argument} is a lazily negated (or conjugated) view; pass .resolve_neg()",
            argument=argument,
            selection=selection,
        )
    device = HOST if kind == "cpu" else tensor.device.index
    return View(tensor, "torch", device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), code)


def _bad_dtype(argument: str, name: str, selection: int) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{argument} has dtype {name}; {_allowed(argument)}", argument=argument, selection=selection
    )


def check_strides(argument: str, view: View, selection: int = 0) -> None:
    """Raises ArgumentValueError unless the last stride is 1 and none is negative; those of size 1 are not looked at."""
    sizes = tuple(zip(view.shape, view.strides, strict=True))
    if (sizes and sizes[-1][0] > 1 and sizes[-1][1] != 1) or any(size > 1 and step < 0 for size, step in sizes):
        raise ArgumentValueError(
            f"{argument} has strides {view.strides}; the last must be 1, the other at least 0",
            argument=argument,
            selection=selection,
        )


def itemsize(code: int) -> int:
    """Returns the bytes of an element."""
    return _ITEMSIZE[code]


def dtype_name(code: int) -> str:
    """Returns the element type's name, "float32" and the like."""
    return _NAMES.get(code, f"dtype {code}")


def extent(view: View) -> int:
    """Returns the bytes from the first element to the end of the last that shape and strides can reach.

    Strides of dimensions of size 1 are not looked at; negative ones reach nothing beyond the first element here (the
    server refuses them).
    """
    reach = 0
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 0:
            return 0
        reach += (size - 1) * max(stride, 0)
    return (reach + 1) * _ITEMSIZE[view.code]


def bits(view: View) -> np.ndarray[Any, Any]:
    """Returns a host tensor's elements as integers of the same size, in the same memory."""
    carrier = _BITS[_ITEMSIZE[view.code]]
    if view.library == "numpy":
        array: np.ndarray[Any, Any] = view.array.view(carrier)
        return array
    torch = sys.modules["torch"]
    viewed: np.ndarray[Any, Any] = view.array.detach().view(getattr(torch, carrier.name)).numpy()
    return viewed


class _Memory:
    """Where a view's elements are, in numpy's words; keeps its array alive."""

    __slots__ = ("__array_interface__", "array")

    def __init__(self, view: View) -> None:
        size = _ITEMSIZE[view.code]
        strides = zip(view.shape, view.strides, strict=True)
        self.array = view.array
        self.__array_interface__ = {
            "version": 3,
            "data": (view.address, False),
            "shape": view.shape,
            "typestr": _BITS[size].str,
            "strides": tuple(stride * size if count > 1 else size for count, stride in strides),
        }


def memory(view: View) -> np.ndarray[Any, Any]:
    """Returns a writeable array of integers over the same memory, which may be read-only: the caller minds.

    Strides of dimensions of size 1 are those of an element. Of device memory it only tells where that lies.
    """
    return np.asarray(_Memory(view))


def wrap_bits(array: np.ndarray[Any, Any], code: int, library: str) -> Any:
    """Returns integers of the element's size as an array or CPU tensor of the element type, in the same memory."""
    if library == "numpy":
        return array.view(numpy_dtype(code))
    torch = sys.modules["torch"]
    return torch.from_numpy(array).view(getattr(torch, _NAMES[code]))


def bits_dtype(code: int) -> np.dtype[Any]:
    """Returns the integer dtype of the element's size."""
    return _BITS[_ITEMSIZE[code]]


def numpy_dtype(code: int) -> np.dtype[Any]:
    """Returns numpy's dtype; bfloat16 is the package `ml_dtypes`'.

    Raises:
        ArgumentTypeError: bfloat16 without `ml_dtypes`.
    """
    if code != pb.D_TYPE_BFLOAT16:
        return np.dtype(_NAMES[code])
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentTypeError(
            "numpy has no bfloat16 of its own: install the package ml_dtypes, or use a torch dtype", argument="dtype"
        ) from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def parse_dtype(argument: str, value: object, selection: int = 0) -> Dtype:
    """Reads an element type: its name, a numpy dtype or scalar type, or a torch dtype.

    Raises:
        ArgumentTypeError: It is none of them, or of no type that a request can carry.
    """
    torch = torch_module()
    if torch is not None and isinstance(value, torch.dtype):
        name, library = str(value).removeprefix("torch."), "torch"
    elif isinstance(value, str):
        name, library = value, ""
    elif isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        name, library = np.dtype(value).name, "numpy"
    else:
        name, library = str(getattr(value, "__name__", value)), "numpy"  # ml_dtypes' scalar types are no np.generic
        if not isinstance(value, type) or name != "bfloat16":
            raise _bad_dtype_argument(argument, repr(value), selection)
    if name not in CODES:
        raise _bad_dtype_argument(argument, name, selection)
    return Dtype(CODES[name], library)


def _bad_dtype_argument(argument: str, name: str, selection: int) -> ArgumentTypeError:
    return ArgumentTypeError(f"{argument} is {name}; {_allowed(argument)}", argument=argument, selection=selection)


def _allowed(argument: str) -> str:
    names = _ALLOWED.get(argument, _KNOWN)
    return f"allowed {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
