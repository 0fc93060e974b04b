"""Builds request messages and reads replies: pure functions, shared by both clients.

Where a tensor is (in a region, inline) is decided elsewhere; here it is only written down. Python types are checked as
far as the wire needs it; all else the server checks, so that both clients and the server's own callers get one answer.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from topkd import _arrays
from topkd._types import Backend, Device, KernelFamily, Limits, Merge, Selection, ServerInfo
from topkd.errors import ArgumentTypeError, ArgumentValueError, ProtocolError
from topkd.v1 import control_pb2, selection_pb2, tensor_pb2

if TYPE_CHECKING:
    from topkd._arrays import View

__all__ = [
    "MERGE_TENSORS",
    "SELECTION_TENSORS",
    "inline",
    "merge_message",
    "options_key",
    "read_info",
    "read_inline",
    "reference",
    "selection_message",
    "text",
]

SELECTION_TENSORS: Final = (
    "input",
    "lengths",
    "row_starts",
    "row_offsets",
    "page_table",
    "row_to_table",
    "table_starts",
)
MERGE_TENSORS: Final = ("values", "indices")

_INTS: Final = ("k", "next_n", "group")
_BOOLS: Final = ("pooled", "pin_newest", "expand", "largest", "values")
_ORDERS: Final = {
    "any": selection_pb2.ORDER_ANY,
    "index": selection_pb2.ORDER_INDEX,
    "value": selection_pb2.ORDER_VALUE,
}
_TIES: Final = {
    "any": selection_pb2.TIES_ANY,
    "lowest": selection_pb2.TIES_LOWEST,
    "highest": selection_pb2.TIES_HIGHEST,
}


_options = operator.attrgetter(
    "k", *_BOOLS, "next_n", "group", "page_size", "max_length", "drop_neg_inf", "order", "ties", "index_dtype", "kernel"
)
_encoded: dict[Any, selection_pb2.Selection] = {}
_ENCODED: Final = 1024
"""Sets of options that are kept encoded before the table starts anew."""


def options_key(selection: Selection) -> tuple[Any, Any]:
    """Returns everything in a selection but its tensors, with types: True equals 1. Hashable if the options are."""
    options = _options(selection)
    return options, tuple(map(type, options))


def selection_message(selection: Selection, place: int = 0) -> selection_pb2.Selection:
    """Returns the message of everything in a selection but its tensors. It is shared: copy it.

    Args:
        selection: The arguments.
        place: Its place in the batch, for errors.

    Raises:
        ArgumentTypeError: A wrong Python type.
        ArgumentValueError: An integer outside 64 bits, or an unknown name of an order or of ties.
    """
    key = options_key(selection)
    try:
        message = _encoded.get(key)
    except TypeError:  # not hashable: not allowed either
        return _encode_options(selection, place)
    if message is None:
        message = _encode_options(selection, place)
        if len(_encoded) >= _ENCODED:
            _encoded.clear()
        _encoded[key] = message
    return message


def _encode_options(selection: Selection, place: int) -> selection_pb2.Selection:
    message = selection_pb2.Selection()
    for name in _INTS:
        setattr(message, name, _integer(name, getattr(selection, name), place))
    if (page_size := _integer("page_size", selection.page_size, place)) != 1:
        message.page_size = page_size
    if selection.max_length is not None:
        message.max_length = _integer("max_length", selection.max_length, place)
    for name in _BOOLS:
        setattr(message, name, _boolean(name, getattr(selection, name), place))
    if selection.drop_neg_inf is not None:
        message.drop_neg_inf = _boolean("drop_neg_inf", selection.drop_neg_inf, place)
    message.order = _choice("order", selection.order, _ORDERS, place)
    message.ties = _choice("ties", selection.ties, _TIES, place)
    message.index_dtype = _arrays.parse_dtype("index_dtype", selection.index_dtype, place).code  # type: ignore[assignment]
    message.kernel = text("kernel", selection.kernel, place)
    if not message.kernel:  # in the message it would stand for "auto"
        raise ArgumentValueError("kernel is ''; it must be a kernel family's name", argument="kernel", selection=place)
    return message


def merge_message(merge: Merge, place: int = 0) -> selection_pb2.Merge:
    """Returns the message of everything in a merge but its tensors. Raises as `selection_message`."""
    return selection_pb2.Merge(
        k=_integer("k", merge.k, place),
        largest=_boolean("largest", merge.largest, place),
        order=_choice("order", merge.order, _ORDERS, place),
        ties=_choice("ties", merge.ties, _TIES, place),
    )


def _integer(name: str, value: object, place: int) -> int:
    tensor = isinstance(value, np.ndarray) or hasattr(value, "data_ptr")  # they have __index__ too
    if isinstance(value, (bool, np.bool_)) or tensor or not hasattr(value, "__index__"):
        raise ArgumentTypeError(
            f"{name} must be an int, not {type(value).__name__} ({value!r})", argument=name, selection=place
        )
    number = operator.index(value)
    if not -(2**63) <= number < 2**63:
        raise ArgumentValueError(f"{name} is {number}, beyond 64 bits", argument=name, selection=place)
    return number


def _boolean(name: str, value: object, place: int) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(
            f"{name} must be a bool, not {type(value).__name__} ({value!r})", argument=name, selection=place
        )
    return value


def text(name: str, value: object, place: int = 0) -> str:
    """Returns a text that a message can carry.

    Raises:
        ArgumentTypeError: It is no str.
        ArgumentValueError: It holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise ArgumentTypeError(
            f"{name} must be a str, not {type(value).__name__} ({value!r})", argument=name, selection=place
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ArgumentValueError(f"{name} is {value!r}, which is no UTF-8", argument=name, selection=place) from None
    return value


def _choice(name: str, value: object, choices: dict[str, Any], place: int) -> Any:
    chosen = text(name, value, place)
    if chosen not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ArgumentValueError(f"{name} is {chosen!r}; allowed are {allowed}", argument=name, selection=place)
    return choices[chosen]


def reference(view: View, region_id: int, offset: int) -> tensor_pb2.Tensor:
    """Returns a tensor in a region."""
    return tensor_pb2.Tensor(
        dtype=view.code,  # type: ignore[arg-type]
        shape=view.shape,
        strides=view.strides,
        region=tensor_pb2.RegionSlice(region_id=region_id, offset=offset),
    )


def inline(view: View) -> tensor_pb2.Tensor:
    """Returns a host tensor with its elements in the message."""
    data = np.ascontiguousarray(_arrays.bits(view)).tobytes()
    return tensor_pb2.Tensor(dtype=view.code, shape=view.shape, inline_data=data)  # type: ignore[arg-type]


def read_inline(tensor: tensor_pb2.Tensor, library: str) -> Any:
    """Returns the contents of an inline tensor: a new numpy array or CPU torch tensor.

    Raises:
        ProtocolError: The message contradicts itself.
    """
    shape = tuple(tensor.shape)
    try:
        carrier = _arrays.bits_dtype(tensor.dtype)
        array = np.frombuffer(tensor.inline_data, carrier).reshape(shape).copy()
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"the server sent a tensor of shape {shape} that its data contradicts: {error}") from None
    return _arrays.wrap_bits(array, tensor.dtype, library)


def read_info(info: control_pb2.ServerInfo) -> ServerInfo:
    """Returns a server's information as plain data."""
    device = Device(
        backend=Backend.CUDA if info.device.backend == control_pb2.BACKEND_CUDA else Backend.CPU,
        uuid=info.device.uuid,
        name=info.device.name,
        memory_bytes=info.device.memory_bytes,
        compute_capability=info.device.compute_capability,
    )
    kernels = tuple(KernelFamily(k.name, tuple(map(_arrays.dtype_name, k.dtypes))) for k in info.kernels)
    limits = Limits(**{name: getattr(info.limits, name) for name in Limits.__dataclass_fields__})
    return ServerInfo(
        version=info.version,
        protocol_revision=info.protocol_revision,
        epoch=info.epoch,
        device=device,
        kernels=kernels,
        limits=limits,
        sessions=info.sessions,
    )
