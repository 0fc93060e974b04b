"""Device code around a selection, shared by the kernel families: a row's window before it, the written cells after it.

A kernel gets its arguments as plain integers (addresses as Int64, 0 where a tensor is absent), in the order of
`SelectArguments`; options are bits of `flags`. Everything here is uniform over the CTA except what is written.

A launch is of one job, or (flag JOBS) of several with as many rows each, whose addresses and strides are in a table in
device memory: rows from anywhere. `find_row` and `find_cells` are all that reads those.

Giving up. Work that waits in a stream cannot be taken back. What is launched ahead of its time can be made to have no
effect instead: it is given *spare* memory, and where the mark there is not 0 the rows' cells go behind the mark, all
rows to the same. Where they go is all that changes: each thread looks for itself, and the mark may be set between two
looks, so nothing else may depend on it; what runs behind the launch finds the mark set then. The mark is in the
device's memory: an H200 answers loads of one host word one after another, 1 us each (2026).
"""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import _cute_ops as ops
from ._cute_flags import (
    DROP_NEG_INF,
    EXPAND,
    JOB_FIELDS,
    JOBS,
    LARGEST,
    OFFSETS_INT64,
    ORDER_VALUE,
    OUT_INT64,
    PIN_NEWEST,
    POOLED,
    SPARE_CELLS,
    TIES_HIGHEST,
)


class SelectArguments(NamedTuple):
    """The arguments of a selection kernel, in order."""

    input: Int64  # address
    row_stride: Int64  # in scores
    lengths: Int64  # address of int32, or 0
    max_length: Int64  # members; no row has more
    row_starts: Int64  # address of int32, or 0
    out_indices: Int64  # address
    out_indices_stride: Int64  # in indices
    out_values: Int64  # address, or 0
    out_values_stride: Int64  # in scores
    row_offsets: Int64  # address of int32 or int64, or 0
    page_table: Int64  # address of int32, or 0
    table_stride: Int64  # in entries
    row_to_table: Int64  # address of int32, or 0
    table_starts: Int64  # address of int32, or 0
    spare: Int64  # address of a mark that somebody may set meanwhile, and of `SPARE_CELLS` bytes and 8 a column, or 0
    width: Int32
    k: Int32
    next_n: Int32
    group_shift: Int32
    flags: Int32
    tables: Int32
    entries: Int32
    page_shift: Int32


class Row(NamedTuple):
    """One row of a request: where its scores are, how many, what is wanted of them."""

    base: Int64  # address of the window's first score
    length: Int64  # valid members
    count: Int32  # valid elements
    pinned: Int32  # 1 where the last element is selected apart, else 0
    largest: Boolean
    highest: Boolean  # of the ties
    drop: Boolean  # elements that score -inf
    by_value: Boolean


class Cells(NamedTuple):
    """Where a row's cells go, and through which transform."""

    indices: Int64  # address of the first
    values: Int64  # address of the first, or 0
    table: Int64  # address of the row's first page, or 0
    entries: Int64  # pages from there to the table's end, 0 if the row has no table
    start: Int64  # pages before the row's first; negative ones are out of range
    offset: Int64
    fill: Uint32  # the value beside a -1, in the low end of a word


@cute.jit
def has(flags: Int32, flag: cutlass.Constexpr[int]) -> Boolean:
    """Whether an option is set."""
    return (flags & Int32(flag)) != Int32(0)


@cute.jit
def find_job(arguments, row: Int32):
    """Returns the address of the table's entry of a row's job, 0 where there is no table, and the row in that job."""
    entry = Int64(0)
    local = row
    if has(arguments.flags, JOBS):
        rows = Int32(arguments.row_stride)
        job = row // rows
        local = row - job * rows
        entry = arguments.input + Int64(job) * (8 * len(JOB_FIELDS))
    return entry, local


@cute.jit
def of_job(arguments, entry: Int64, name: cutlass.Constexpr[str]) -> Int64:
    """An address, stride or size of a row's job: from the table's entry, or without a table from the arguments."""
    value = Int64(getattr(arguments, name))
    if entry != Int64(0):
        value = ops.load_int64(entry + 8 * JOB_FIELDS.index(name))
    return value


@cute.jit
def find_row(arguments, row: Int32, size: cutlass.Constexpr[int]) -> Row:
    """Clamps the row's window to its members and counts its elements (contract, rule 6).

    Args:
        arguments: `SelectArguments`.
        row: the row.
        size: bytes of a score.
    """
    flags = arguments.flags
    shift = Int64(arguments.group_shift)
    members = Int64(arguments.width)
    if has(flags, POOLED):
        members = members << shift
    entry, row = find_job(arguments, row)
    row_starts = of_job(arguments, entry, "row_starts")
    lengths = of_job(arguments, entry, "lengths")
    start = Int64(0)
    if row_starts != Int64(0):
        start = Int64(ops.load_int32(row_starts + Int64(row) * 4))
        start = cutlass.min(cutlass.max(start, Int64(0)), Int64(arguments.width))
    length = members
    if lengths != Int64(0):
        length = Int64(ops.load_int32(lengths + Int64(row // arguments.next_n) * 4))
    length = length - Int64(arguments.next_n) + Int64(row % arguments.next_n) + 1
    length = cutlass.min(length, cutlass.min(members - start, arguments.max_length))
    length = cutlass.max(length, Int64(0))
    count = Int32((length + (Int64(1) << shift) - 1) >> shift)
    pinned = Int32(0)
    if has(flags, PIN_NEWEST) and count > Int32(0):
        pinned = Int32(1)
    stride = of_job(arguments, entry, "row_stride")
    base = of_job(arguments, entry, "input") + (Int64(row) * stride + start) * size
    return Row(
        base=base,
        length=length,
        count=count,
        pinned=pinned,
        largest=has(flags, LARGEST),
        highest=has(flags, TIES_HIGHEST),
        drop=has(flags, DROP_NEG_INF),
        by_value=has(flags, ORDER_VALUE),
    )


@cute.jit
def is_given_up(arguments) -> Boolean:
    """Whether this thread's cells go to the spare memory."""
    mark = Int32(0)
    if arguments.spare != Int64(0):
        mark = ops.load_int32(arguments.spare)
    return mark != Int32(0)


@cute.jit
def find_cells(arguments, row: Int32, dtype: cutlass.Constexpr[str], size: cutlass.Constexpr[int]) -> Cells:
    """Finds where the row's cells go, its part of the page table and its offset."""
    flags = arguments.flags
    index_size = Int64(4)
    if has(flags, OUT_INT64):
        index_size = Int64(8)
    entry, row = find_job(arguments, row)
    values = of_job(arguments, entry, "out_values")
    if values != Int64(0):
        values = values + Int64(row) * of_job(arguments, entry, "out_values_stride") * size
    table = of_job(arguments, entry, "page_table")
    entries = Int64(0)
    start = Int64(0)
    if table != Int64(0):
        which = row
        row_to_table = of_job(arguments, entry, "row_to_table")
        if row_to_table != Int64(0):
            which = ops.load_int32(row_to_table + Int64(row) * 4)
        if which >= Int32(0) and Int64(which) < of_job(arguments, entry, "tables"):
            table = table + Int64(which) * of_job(arguments, entry, "table_stride") * 4
            entries = of_job(arguments, entry, "entries")
        table_starts = of_job(arguments, entry, "table_starts")
        if table_starts != Int64(0):
            start = Int64(ops.load_int32(table_starts + Int64(row) * 4))
    offset = Int64(0)
    row_offsets = of_job(arguments, entry, "row_offsets")
    if row_offsets != Int64(0):
        if has(flags, OFFSETS_INT64):
            offset = ops.load_int64(row_offsets + Int64(row) * 8)
        else:
            offset = Int64(ops.load_int32(row_offsets + Int64(row) * 4))
    infinity = ops.INF_TOP[dtype] >> (32 - 8 * size)
    fill = Uint32(infinity)
    if has(flags, LARGEST):
        fill = Uint32(infinity | 1 << (8 * size - 1))
    stride = of_job(arguments, entry, "out_indices_stride")
    indices = of_job(arguments, entry, "out_indices") + Int64(row) * stride * index_size
    if is_given_up(arguments):
        indices = arguments.spare + SPARE_CELLS
        if values != Int64(0):
            values = indices
    return Cells(indices, values, table, entries, start, offset, fill)


@cute.jit
def transformed(arguments, cells: Cells, index: Int64) -> Int64:
    """The index as it is written: through the page table or with the offset, -1 where that has no valid result."""
    result = index
    if cells.table != Int64(0):
        entry = cells.start + (index >> Int64(arguments.page_shift))
        result = Int64(-1)
        if entry >= Int64(0) and entry < cells.entries:
            page = ops.load_int32(cells.table + entry * 4)
            if page >= Int32(0):
                shift = Int64(arguments.page_shift)
                result = (Int64(page) << shift) + (index & ((Int64(1) << shift) - 1))
    elif arguments.row_offsets != Int64(0):
        result = index + cells.offset
    limit = Int64(0x7FFFFFFFFFFFFFFF)
    if not has(arguments.flags, OUT_INT64):
        limit = Int64(0x7FFFFFFF)
    if result < Int64(0) or result > limit:
        result = Int64(-1)
    return result


@cute.jit
def store_index(arguments, cells: Cells, column: Int64, index: Int64) -> None:
    """Writes one index."""
    if has(arguments.flags, OUT_INT64):
        ops.store_int64(cells.indices + column * 8, index)
    else:
        ops.store_int32(cells.indices + column * 4, Int32(index))


@cute.jit
def write_cell(
    arguments, cells: Cells, row: Row, position: Int32, element: Int32, bits: Uint32, size_and_dtype: cutlass.Constexpr
) -> None:
    """Writes one cell: the element's index, or its members with `expand`, and its value if asked for.

    Args:
        arguments: `SelectArguments`.
        cells: from `find_cells`.
        row: from `find_row`.
        position: the cell's place in the row's output.
        element: the element, or -1.
        bits: its value, in the low end of a word; used only where values are asked for.
        size_and_dtype: bytes of a score, and its dtype's name.
    """
    size, dtype = size_and_dtype
    if has(arguments.flags, EXPAND):
        shift = Int64(arguments.group_shift)
        first = Int64(element) << shift
        column = Int64(position) << shift
        for member in range(Int32(1) << arguments.group_shift):
            index = Int64(-1)
            if element >= Int32(0) and first + Int64(member) < row.length:
                index = transformed(arguments, cells, first + Int64(member))
            store_index(arguments, cells, column + Int64(member), index)
    else:
        index = Int64(-1)
        if element >= Int32(0):
            index = transformed(arguments, cells, Int64(element))
        store_index(arguments, cells, Int64(position), index)
        if cells.values != Int64(0):
            value = cells.fill
            if index >= Int64(0):
                value = bits
            ops.store_score(cells.values + Int64(position) * size, value, dtype)
