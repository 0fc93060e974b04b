"""How a job is handed to a selection kernel: the integers of `SelectArguments`, the same for every family."""

import torch
from torch import Tensor

from . import _cute_flags as flags
from ._family import Job
from ._request import SelectRequest

_UNBOUNDED = 1 << 62


def _address(tensor: Tensor | None) -> int:
    """Return where a tensor's data begin, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def flags_word(request: SelectRequest) -> int:
    """Return a request's options as the bits that kernels take."""
    word = flags.LARGEST if request.largest else 0
    if request.pooled:
        word |= flags.POOLED
    if request.pin_newest:
        word |= flags.PIN_NEWEST
    if request.drop_neg_inf:
        word |= flags.DROP_NEG_INF
    if request.expand:
        word |= flags.EXPAND
    if request.ties == "highest":
        word |= flags.TIES_HIGHEST
    if request.order == "value":
        word |= flags.ORDER_VALUE
    if request.index_dtype == torch.int64:
        word |= flags.OUT_INT64
    if request.row_offsets is not None and request.row_offsets.dtype == torch.int64:
        word |= flags.OFFSETS_INT64
    return word


def launch_arguments(job: Job) -> tuple[int, ...]:
    """Return a job as a kernel takes it: the fields of `SelectArguments`, then the number of rows."""
    request, values, table = job.request, job.values, job.request.page_table
    rows, width = request.input.shape
    return (
        request.input.data_ptr(),
        request.input.stride(0),
        _address(request.lengths),
        _UNBOUNDED if request.max_length is None else request.max_length,
        _address(request.row_starts),
        job.indices.data_ptr(),
        job.indices.stride(0),
        0 if values is None else values.data_ptr(),
        0 if values is None else values.stride(0),
        _address(request.row_offsets),
        0 if table is None else table.data_ptr() or 1,  # a table without pages has no address, but is a table
        0 if table is None else table.stride(0),
        _address(request.row_to_table),
        _address(request.table_starts),
        width,
        request.k,
        request.next_n,
        request.group.bit_length() - 1,
        flags_word(request),
        0 if table is None else table.shape[0],
        0 if table is None else table.shape[1],
        request.page_size.bit_length() - 1,
        rows,
    )
