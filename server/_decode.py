"""From messages to checked requests of `topkd.kernels`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from topkd import kernels
from topkd.kernels import MergeRequest, SelectRequest
from topkd.v1 import selection_pb2, tensor_pb2

from ._memory import DTYPES, Backend, Region
from ._views import check_inline, check_region_view
from .config import ServerLimits
from .errors import FieldError, FieldTypeError, RegionNotFoundError

__all__ = ["Decoder", "located"]

_T = TypeVar("_T")

_ORDERS = {
    selection_pb2.ORDER_UNSPECIFIED: "any",
    selection_pb2.ORDER_ANY: "any",
    selection_pb2.ORDER_INDEX: "index",
    selection_pb2.ORDER_VALUE: "value",
}
_TIES = {
    selection_pb2.TIES_UNSPECIFIED: "any",
    selection_pb2.TIES_ANY: "any",
    selection_pb2.TIES_LOWEST: "lowest",
    selection_pb2.TIES_HIGHEST: "highest",
}
_SELECT_TENSORS = ("lengths", "row_starts", "row_offsets", "page_table", "row_to_table", "table_starts")
_OUTPUTS = ("out_indices", "out_values")
_OPTIONAL = ("next_n", "max_length", "group", "drop_neg_inf", "largest", "page_size")
_FLAGS = ("pooled", "pin_newest", "expand", "values")


class Decoder:
    """Decodes one batch against one session's regions.

    Attributes:
        inline: whether a tensor came inside the message, so that the result cannot be kept for a later call.
    """

    def __init__(self, backend: Backend, regions: Mapping[int, Region], limits: ServerLimits) -> None:
        self._backend = backend
        self._regions = regions
        self._limits = limits
        self.inline = False

    def selection(self, message: selection_pb2.Selection, path: str) -> SelectRequest:
        """Decodes and checks one selection.

        Args:
            message: the selection.
            path: path of the message, with a dot at its end.

        Raises:
            FieldError, RegionNotFoundError: with the path of what is wrong.
        """
        options: dict[str, Any] = {name: getattr(message, name) for name in _FLAGS}
        options |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
        options["order"] = _choice(_ORDERS, message.order, path, "order")
        options["ties"] = _choice(_TIES, message.ties, path, "ties")
        if message.index_dtype:
            options["index_dtype"] = _index_dtype(message.index_dtype, path)
        if message.kernel:
            options["kernel"] = message.kernel
        if not message.HasField("input"):
            raise FieldError("input is absent", field=f"{path}input")
        scores = self._tensor(message.input, f"{path}input")
        self._check_rows(scores, f"{path}input")
        for name in (*_SELECT_TENSORS, *_OUTPUTS):
            if message.HasField(name):
                options[name] = self._tensor(getattr(message, name), path + name, output=name in _OUTPUTS)
        return _checked(path, lambda: kernels.validate_select(scores, message.k, **options))

    def merge(self, message: selection_pb2.Merge, path: str) -> MergeRequest:
        """Decodes and checks one merge; as `selection`."""
        options: dict[str, Any] = {"largest": message.largest} if message.HasField("largest") else {}
        options["order"] = _choice(_ORDERS, message.order, path, "order")
        options["ties"] = _choice(_TIES, message.ties, path, "ties")
        for name in ("values", "indices"):
            if not message.HasField(name):
                raise FieldError(f"{name} is absent", field=path + name)
        values = self._tensor(message.values, f"{path}values")
        self._check_rows(values, f"{path}values")
        indices = self._tensor(message.indices, f"{path}indices")
        for name in _OUTPUTS:
            if message.HasField(name):
                options[name] = self._tensor(getattr(message, name), path + name, output=True)
        return _checked(path, lambda: kernels.validate_merge(values, indices, message.k, **options))

    def _check_rows(self, scores: torch.Tensor, field: str) -> None:
        if scores.shape[0] > self._limits.max_rows:
            raise FieldError(
                f"{scores.shape[0]} rows; at most {self._limits.max_rows} (max_rows) are allowed", field=field
            )

    def _tensor(self, message: tensor_pb2.Tensor, field: str, output: bool = False) -> torch.Tensor:
        storage = message.WhichOneof("storage")
        if storage == "region":
            region = self._regions.get(message.region.region_id)
            if region is None:
                raise RegionNotFoundError(message.region.region_id, field)
            return region.tensor(check_region_view(message, region.size, field, region.address))
        if storage is None:
            raise FieldError("a tensor names no storage: neither region nor inline_data", field=field)
        if output:
            raise FieldError("outputs lie in regions; leave them out to get the result in the reply", field=field)
        self.inline = True
        return self._backend.from_bytes(message.inline_data, check_inline(message, field))


def _choice(names: Mapping[Any, str], number: int, path: str, argument: str) -> str:
    name = names.get(number)
    if name is None:
        allowed = ", ".join(sorted(set(names.values())))
        raise FieldError(f"{argument} is {number}, which is none of {allowed}", field=path + argument)
    return name


def _index_dtype(number: int, path: str) -> torch.dtype:
    if number not in (tensor_pb2.D_TYPE_INT32, tensor_pb2.D_TYPE_INT64):
        text = f"index_dtype is {number}; it must be D_TYPE_INT32 or D_TYPE_INT64"
        raise FieldTypeError(text, field=f"{path}index_dtype")
    return DTYPES[number]


def _checked(path: str, check: Callable[[], _T]) -> _T:
    """Runs a check of `topkd.kernels`; its argument errors get the path of the message."""
    try:
        return check()
    except (TypeError, ValueError) as error:
        raise located(error, path) from error


def located(error: Exception, path: str) -> Exception:
    """Returns a `topkd.kernels` argument error as a FieldError under `path`; other errors as they are."""
    argument = getattr(error, "argument", None)
    if argument is None:
        return error
    kind = FieldTypeError if isinstance(error, TypeError) else FieldError
    return kind(str(error), field=path + argument)
