"""How jobs are handed to a selection kernel: the integers of `SelectArguments`, the same for every family."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import _cute_flags as flags
from ._family import Job
from ._request import SelectRequest

_FIELDS = (
    *("input", "row_stride", "lengths", "max_length", "row_starts", "out_indices", "out_indices_stride", "out_values"),
    *("out_values_stride", "row_offsets", "page_table", "table_stride", "row_to_table", "table_starts", "spare"),
    *("width", "k", "next_n", "group_shift", "flags", "tables", "entries", "page_shift", "rows"),
)
"""What `launch_arguments` returns, by name."""

INPUT, ROW_STRIDE, SPARE, FLAGS, ROWS = map(_FIELDS.index, ("input", "row_stride", "spare", "flags", "rows"))
_OF_A_JOB = tuple(_FIELDS.index(name) for name in flags.JOB_FIELDS)


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


def is_plain(job: Job) -> bool:
    """Say whether a job has no more than scores, k and int32 indices, and no option but `largest` has a bit."""
    request = job.request
    return (
        request.group == 1
        and request.lengths is None
        and request.row_starts is None
        and request.page_table is None
        and request.row_offsets is None
        and job.values is None
        and request.next_n == 1
        and request.order == "any"
        and request.ties != "highest"
        and not request.pin_newest
        and not request.drop_neg_inf
        and request.index_dtype is torch.int32
    )


def launch_arguments(job: Job) -> tuple[int, ...]:
    """Return a job as a kernel takes it: the fields of `SelectArguments`, then the number of rows."""
    return _plain_arguments(job) if is_plain(job) else _all_arguments(job)


def _plain_arguments(job: Job) -> tuple[int, ...]:
    """Return what `_all_arguments` gives for a plain job, in a third of the time."""
    request, indices = job.request, job.indices
    rows, width = request.input.shape
    limit = request.max_length
    bound = width if limit is None or limit > width else limit
    word = flags.LARGEST if request.largest else 0
    source, pitch = request.input.data_ptr(), request.input.stride(0)
    out, stride = indices.data_ptr(), indices.stride(0)
    options = (width, request.k, 1, 0, word, 0, 0, 0, rows)
    return source, pitch, 0, bound, 0, out, stride, 0, 0, 0, 0, 0, 0, 0, job.spare, *options


def _all_arguments(job: Job) -> tuple[int, ...]:
    """Return what `launch_arguments` gives, for any job."""
    request, values, table = job.request, job.values, job.request.page_table
    rows, width = request.input.shape
    return (
        request.input.data_ptr(),
        request.input.stride(0),
        _address(request.lengths),
        request.length_bound,
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
        job.spare,
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


def launches(jobs: Sequence[Job]) -> Iterator[tuple[tuple[int, ...], Tensor | None]]:
    """Yield what each launch of jobs that share a plan key takes.

    Jobs with the same number of rows become one launch over a table of them. The table is allocated and copied in the
    order of the current stream, from memory that torch keeps pinned; under capture, where nothing may be allocated,
    every job is a launch of its own.

    Yields:
        The arguments, and the table that they refer to, which has to live until the launch is enqueued.
    """
    if len(jobs) == 1 or torch.cuda.is_current_stream_capturing():
        for job in jobs:
            yield launch_arguments(job), None
        return
    groups: dict[int, list[tuple[int, ...]]] = {}
    for job in jobs:
        arguments = launch_arguments(job)
        groups.setdefault(arguments[ROWS], []).append(arguments)
    for members in groups.values():
        first, table = members[0], None
        if len(members) > 1:
            entries = torch.tensor([table_entry(each) for each in members], dtype=torch.int64)
            table = entries.pin_memory().to(jobs[0].request.input.device, non_blocking=True)
            first = of_table(first, len(members), table.data_ptr())
        yield first, table


def of_table(first: tuple[int, ...], jobs: int, address: int) -> tuple[int, ...]:
    """Return the arguments of a launch of `jobs` jobs: those of the first, with the table of all at `address`."""
    arguments = list(first)
    arguments[INPUT], arguments[ROW_STRIDE] = address, first[ROWS]
    arguments[FLAGS] |= flags.JOBS
    arguments[ROWS] *= jobs
    return tuple(arguments)


def table_entry(arguments: Sequence[int]) -> list[int]:
    """Return a job's entry of a table, from its launch arguments."""
    return [arguments[at] for at in _OF_A_JOB]
