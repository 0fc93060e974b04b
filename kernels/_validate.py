"""Checks of whole requests: every argument by itself, then the combinations.

Everything that can be known without reading device memory is checked here, before anything is allocated or launched.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from . import _check
from ._errors import ArgumentTypeError, ArgumentValueError, describe, type_error, value_error
from ._overlap import check_batch_overlap
from ._request import MergeRequest, SelectRequest

_GROUPS = (1, 2, 4, 8, 16, 32, 64, 128)
_FLAGS = ("pooled", "pin_newest", "expand", "largest", "values")
_DEFAULTS = {field.name: field.default for field in fields(SelectRequest) if field.name not in ("input", "k")}
_OPTIONS = _DEFAULTS.keys()


def check_select(input: Tensor, k: int, *, placed: bool = True, **options: Any) -> SelectRequest:
    """Check all arguments of a selection but whether its kernel can serve it; see `validate_select`.

    Unless `placed`, the tensors are of a graph that is traced: they have no memory, and overlaps are not looked for.
    """
    if not options.keys() <= _OPTIONS:
        name = min(options.keys() - _OPTIONS)
        raise ArgumentTypeError(name, f"{name} is no option of select_topk; there are {', '.join(sorted(_OPTIONS))}")
    return check_whole(input, {**_DEFAULTS, "k": k, **options}, placed)


def check_whole(input: Tensor, options: dict[str, Any], placed: bool = True) -> SelectRequest:
    """Check a selection of which every option is given, `k` among them; changes the dictionary."""
    request = SelectRequest(input=input, **_checked_scalars(options))
    _check_combinations(request)
    _check_tensors(request)
    _check_table(request)
    _check_outputs(request)
    if placed:
        check_batch_overlap([request])
    return request


def _checked_scalars(options: dict[str, Any]) -> dict[str, Any]:
    """Check the options that are no tensors, and `k`; return all options, those normalised, in the same dictionary."""
    for name in _FLAGS:
        _check.check_bool(name, options[name])
    drop = options["drop_neg_inf"]
    if drop is not None:
        _check.check_bool("drop_neg_inf", drop)
    _check.check_choice("order", options["order"], _check.ORDERS)
    _check.check_choice("ties", options["ties"], _check.TIES)
    dtype = options["index_dtype"]
    if not isinstance(dtype, torch.dtype) or dtype not in _check.INDEX_DTYPES:
        raise type_error("index_dtype", dtype, "torch.int32 or torch.int64")
    group = options["group"] = _check.check_int("group", options["group"], 1, 128)
    if group not in _GROUPS:
        raise value_error("group", group, "one of 1, 2, 4, 8, 16, 32, 64, 128")
    page_size = options["page_size"] = _check.check_int("page_size", options["page_size"], 1, 1 << 30)
    if page_size & (page_size - 1):
        raise value_error("page_size", page_size, "a power of two")
    options["k"] = _check.check_int("k", options["k"], 1, _check.MAX_K)
    options["next_n"] = _check.check_int("next_n", options["next_n"], 1)
    if options["max_length"] is not None:
        options["max_length"] = _check.check_int("max_length", options["max_length"], 0, _check.MAX_WIDTH)
    if drop is None:
        options["drop_neg_inf"] = group > 1 and options["largest"]
    return options


def _conflict(request: SelectRequest, name: str, other: str, why: str) -> ArgumentValueError:
    """Build the error for argument `name`, which does not go with argument `other`."""
    value, hit = describe(getattr(request, name)), describe(getattr(request, other))
    return ArgumentValueError(name, f"{name} is {value}, which cannot be combined with {other}, which is {hit}: {why}")


def _check_combinations(request: SelectRequest) -> None:
    """Check which options go together."""
    if not request.largest:
        for name, hit in (
            ("group", request.group > 1),
            ("pin_newest", request.pin_newest),
            ("drop_neg_inf", request.drop_neg_inf),
            ("expand", request.expand),
        ):
            if hit:
                raise _conflict(request, "largest", name, "the smallest are single members; allowed is largest=True")
    if request.expand and request.values:
        raise _conflict(request, "expand", "values", "members have no selected score; allowed is one of the two")
    if request.pooled and request.group == 1:
        raise _conflict(request, "pooled", "group", "a pooled score needs its group's size; allowed are 2 .. 128")
    if request.pooled and request.row_starts is not None:
        raise _conflict(request, "pooled", "row_starts", "a pooled row has no start; allowed is row_starts=None")
    if request.out_values is not None and not request.values:
        raise _conflict(request, "out_values", "values", "nothing would be written; allowed is values=True")
    if request.page_table is not None and request.row_offsets is not None:
        raise _conflict(request, "page_table", "row_offsets", "there is one transform; allowed is one of the two")
    if request.page_table is None:
        for name, hit in (
            ("page_size", request.page_size != 1),
            ("row_to_table", request.row_to_table is not None),
            ("table_starts", request.table_starts is not None),
        ):
            if hit:
                raise value_error(name, getattr(request, name), "left out where there is no page_table")


def _check_tensors(request: SelectRequest) -> None:
    """Check the scores and the vectors that go with their rows."""
    _check.check_tensor("input", request.input, _check.SCORE_DTYPES)
    _check.check_matrix("input", request.input, "width")
    rows, device, int32 = request.rows, request.input.device, (torch.int32,)
    if rows % request.next_n:
        raise value_error("next_n", request.next_n, f"a divisor of the number of rows ({rows})")
    _check.check_vector("lengths", request.lengths, rows // request.next_n, int32, device)
    _check.check_vector("row_starts", request.row_starts, rows, int32, device)
    _check.check_vector("row_offsets", request.row_offsets, rows, _check.INDEX_DTYPES, device)
    offsets = request.row_offsets
    if offsets is not None and offsets.dtype == torch.int64 and request.index_dtype == torch.int32:
        allowed = "of dtype torch.int32 where index_dtype is torch.int32 (or ask for index_dtype=torch.int64)"
        raise value_error("row_offsets", offsets, allowed)


def _check_table(request: SelectRequest) -> None:
    """Check the page table and its companions."""
    table, rows, device, int32 = request.page_table, request.rows, request.input.device, (torch.int32,)
    if table is None:
        return
    _check.check_tensor("page_table", table, int32, device)
    _check.check_matrix("page_table", table, "entries")
    _check.check_vector("row_to_table", request.row_to_table, rows, int32, device)
    _check.check_vector("table_starts", request.table_starts, rows, int32, device)
    if request.row_to_table is None and table.shape[0] < rows:
        raise value_error("page_table", table, f"of at least {rows} tables (one a row), or row_to_table must be given")


def _check_outputs(request: SelectRequest) -> None:
    """Check the given outputs by themselves."""
    shape, device = request.output_shape, request.input.device
    _check.check_output("out_indices", request.out_indices, shape, (request.index_dtype,), device)
    _check.check_output("out_values", request.out_values, shape, (request.input.dtype,), device)


def check_merge(values: Tensor, indices: Tensor, k: int, *, placed: bool = True, **options: Any) -> MergeRequest:
    """Check all arguments of a merge; see `validate_merge`. `placed` is as for `check_select`."""
    unknown = options.keys() - {"largest", "order", "ties", "out_indices", "out_values"}
    if unknown:
        name = min(unknown)
        raise ArgumentTypeError(
            name, f"{name} is no option of merge_topk; there are largest, order, out_indices, out_values, ties"
        )
    k = _check.check_int("k", k, 1, _check.MAX_K)
    request = MergeRequest(values=values, indices=indices, k=k, **options)
    _check.check_bool("largest", request.largest)
    _check.check_choice("order", request.order, _check.ORDERS)
    _check.check_choice("ties", request.ties, _check.TIES)
    _check.check_tensor("values", values, _check.SCORE_DTYPES)
    _check.check_matrix("values", values, "candidates")
    _check.check_tensor("indices", indices, _check.INDEX_DTYPES, values.device)
    _check.check_matrix("indices", indices, "candidates")
    if indices.shape != values.shape:
        raise value_error("indices", indices, f"of the shape of values, {tuple(values.shape)}")
    _check.check_output("out_indices", request.out_indices, request.output_shape, (indices.dtype,), values.device)
    _check.check_output("out_values", request.out_values, request.output_shape, (values.dtype,), values.device)
    if placed:
        check_batch_overlap([request])
    return request
