"""New arrays and tensors in session memory."""

from __future__ import annotations

import importlib
import math
import operator
from typing import TYPE_CHECKING, Any

from topkd import _arrays
from topkd._arena import SMALL, NeedMemory, Slot, take_over, tensor_over
from topkd._arrays import HOST
from topkd.errors import ArgumentTypeError, ArgumentValueError, ResourceExhaustedError

if TYPE_CHECKING:
    from topkd._arrays import Dtype
    from topkd._core import Core
    from topkd._session import Session

__all__ = ["check_shape", "empty", "ordinary"]


def check_shape(shape: Any) -> tuple[int, ...]:
    """Returns a shape as a tuple; an integer is a vector's."""
    try:
        sizes = (_size(shape),) if hasattr(shape, "__index__") else tuple(map(_size, shape))
    except TypeError:
        raise ArgumentTypeError(f"shape must be an int or ints, not {shape!r}", argument="shape") from None
    if any(size < 0 for size in sizes):
        raise ArgumentValueError(f"shape is {sizes}; no size may be negative", argument="shape")
    return sizes


def _size(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a bool is no size")
    return operator.index(value)


def empty(core: Core, shape: tuple[int, ...], dtype: Dtype, session: Session) -> Any:
    """Returns a new array or tensor that the session shares. Blocks.

    Small ones are cut from the arena, large ones are regions of their own.
    """
    device = core.memory_device(session)
    if device != HOST and dtype.library == "numpy":
        raise ArgumentTypeError(
            f"the server's device is {session.info.device.uuid}, and numpy has no device memory: use a torch dtype",
            argument="dtype",
        )
    if device == HOST and dtype.library == "torch":
        importlib.import_module("torch")  # its dtype was given: it is loaded
    library = dtype.library or "numpy"
    nbytes = math.prod(shape) * _arrays.itemsize(dtype.code)
    slot = _slot(core, session, nbytes)
    if device != HOST:
        import torch

        if not torch.cuda.is_current_stream_capturing():
            take_over(slot, torch.cuda.current_stream(device), session)
    return tensor_over(slot, dtype.code, shape, library)


def _slot(core: Core, session: Session, nbytes: int) -> Slot:
    if nbytes > SMALL:
        record = core.new_record(session, nbytes)
        retire = core.reaper.retire
        return Slot(record, 0, nbytes, lambda slot: retire(slot.record))
    while True:
        try:
            return core.arena.take(nbytes)
        except NeedMemory as need:
            if not core.grow(session, need.size):
                raise ResourceExhaustedError("no more session memory can be shared: see info().limits") from None


def ordinary(shape: tuple[int, ...], dtype: Dtype) -> Any:
    """Returns an ordinary array or tensor, for computing locally."""
    if dtype.library == "torch":
        import torch

        return torch.empty(shape, dtype=getattr(torch, _arrays.dtype_name(dtype.code)))
    import numpy as np

    return np.empty(shape, _arrays.numpy_dtype(dtype.code))
