"""Checks of single arguments; each raises with the argument's name, value and what is allowed.

Nothing here allocates, launches or synchronises, and nothing reads a tensor's data.
"""

import operator
from collections.abc import Collection

import torch
from torch import Tensor

from ._errors import type_error, value_error

MAX_K = 1 << 20
MAX_WIDTH = (1 << 31) - 1
SCORE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
ORDERS = ("any", "index", "value")
TIES = ("any", "lowest", "highest")


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` as an int of low .. high; anything with `__index__` but a bool or a tensor is an integer."""
    if type(value) is int and low <= value and (high is None or value <= high):
        return value  # nearly always, in a third of the time
    allowed = f"an integer >= {low}" if high is None else f"an integer of {low} .. {high}"
    if isinstance(value, (bool, Tensor)) or not hasattr(type(value), "__index__"):
        raise type_error(name, value, allowed)
    number = operator.index(value)  # type: ignore[arg-type]  # hasattr above
    if number < low or (high is not None and number > high):
        raise value_error(name, number, allowed)
    return number


def check_bool(name: str, value: object) -> None:
    """Check that `value` is True or False itself."""
    if not isinstance(value, bool):
        raise type_error(name, value, "a bool")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Check that `value` is one of some names."""
    if isinstance(value, str) and value in choices:
        return
    build = value_error if isinstance(value, str) else type_error
    raise build(name, value, "one of " + ", ".join(map(repr, choices)))


def check_tensor(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], device: torch.device | None = None
) -> Tensor:
    """Return `value` if it is a plain dense tensor of one of `dtypes`, on `device` (None: any CPU or CUDA device)."""
    if not isinstance(value, Tensor):
        raise type_error(name, value, "a torch.Tensor")
    if value.is_nested or value.layout != torch.strided:
        raise value_error(name, value, "a dense (strided) tensor")
    if value.dtype not in dtypes:
        raise type_error(name, value, "of dtype " + " or ".join(map(str, dtypes)))
    if device is not None:
        if value.device != device:
            raise value_error(name, value, f"on {device}, where the scores are")
    elif value.device.type not in ("cpu", "cuda"):
        raise value_error(name, value, "on a CPU or CUDA device")
    if value.is_neg():
        raise value_error(name, value, "free of torch's lazy negation (call resolve_neg())")
    return value


def check_matrix(name: str, value: Tensor, columns: str, highest: int = MAX_WIDTH) -> None:
    """Check shape (rows, columns) with last stride 1; strides of dimensions of size 1 are not looked at."""
    shape = value.shape
    if len(shape) != 2:
        raise value_error(name, value, f"of shape (rows, {columns})")
    if shape[1] > highest:
        raise value_error(name, value, f"of at most {highest} columns")
    if shape[1] > 1 and shape[0] and value.stride(1) != 1:
        raise value_error(name, value, "of last stride 1")


def check_vector(name: str, value: object, count: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Check a contiguous vector of `count` integers; None passes."""
    if value is None:
        return
    tensor = check_tensor(name, value, dtypes, device)
    if tuple(tensor.shape) != (count,):
        raise value_error(name, value, f"of shape ({count},)")
    if count > 1 and tensor.stride(0) != 1:
        raise value_error(name, value, "contiguous (stride 1)")


def check_output(
    name: str, value: object, shape: tuple[int, int], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Check an output: exact shape, dtype and device, last stride 1, rows that do not overlap; None passes."""
    if value is None:
        return
    tensor = check_tensor(name, value, dtypes, device)
    if tuple(tensor.shape) != shape:
        raise value_error(name, value, f"of shape {shape}")
    if shape[0] == 0:
        return
    if shape[1] > 1 and tensor.stride(1) != 1:
        raise value_error(name, value, "of last stride 1")
    if shape[0] > 1 and tensor.stride(0) < shape[1]:
        raise value_error(name, value, f"of a row stride >= {shape[1]}, so that its rows do not overlap")
