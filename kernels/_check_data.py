"""Data checks, for debugging: lengths, starts and tables that a kernel would clamp or skip raise instead.

Everything here synchronises with the device.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ._errors import ArgumentValueError
from ._request import SelectRequest
from ._torch_rows import Rows, wanted
from ._torch_write import INT32_MAX, INT64_MAX, page_entries


def _refuse(bad: Tensor, name: str, found: Tensor, allowed: str, place: int) -> None:
    """Raise for the first row of which `bad` (rows,) or (rows, n) is true."""
    where = bad.nonzero()
    if len(where) == 0:
        return
    at = tuple(where[0].tolist())
    message = f"{name} holds {int(found.expand_as(bad)[at])} for row {at[0]}; allowed is {allowed} (TOPKD_CHECK_DATA)"
    raise ArgumentValueError(name, message, place)


def check_windows(request: SelectRequest, place: int) -> None:
    """Check starts and lengths.

    Args:
        request: a checked request.
        place: its place in the batch, for the error.

    Raises:
        ArgumentValueError: naming `row_starts` or `lengths`, with the first row at fault. With `next_n` > 1 it is the
            row's own length that must be in range.
    """
    room: int | Tensor = request.members
    if request.row_starts is not None:
        starts = request.row_starts.to(torch.int64)
        bad = (starts < 0) | (starts > request.width)
        _refuse(bad, "row_starts", starts, f"0 .. {request.width}", place)
        room = request.members - starts
    if request.lengths is not None and request.rows:
        lengths = wanted(request)
        bad = (lengths < 0) | (lengths > room) | (lengths > request.length_bound)
        bound = "" if request.max_length is None else f", at most max_length={request.max_length}"
        members = "the members from the row's start on" if request.row_starts is not None else f"{request.members}"
        _refuse(bad, "lengths", lengths, f"0 .. {members}{bound}", place)


def untransformed(request: SelectRequest) -> SelectRequest:
    """Return the request without page table, values and outputs: it selects the indices that are looked up."""
    return replace(
        request,
        page_table=None,
        page_size=1,
        row_to_table=None,
        table_starts=None,
        values=False,
        index_dtype=torch.int64,
        out_indices=None,
        out_values=None,
    )


def check_tables(request: SelectRequest, indices: Tensor, place: int) -> None:
    """Check every page-table entry that a selection looks up.

    Args:
        request: a checked request with a page table.
        indices: (rows, columns) int64, what `untransformed(request)` selects.
        place: the request's place in the batch, for the error.

    Raises:
        ArgumentValueError: naming `row_to_table` (a table that is not there) or `page_table` (an entry that is not
            there, a negative page, a result that the index dtype cannot hold).
    """
    rows, table = Rows.of(request), request.page_table
    if table is None or rows.tables is None:
        return
    live = indices >= 0
    if not bool(live.any()):
        return
    tables, entries = table.shape
    which = rows.tables[:, None]
    _refuse(live & ((which < 0) | (which >= tables)), "row_to_table", which, f"below {tables}", place)
    entry = page_entries(rows, indices.clamp(min=0))
    _refuse(live & ((entry < 0) | (entry >= entries)), "page_table", entry, f"an entry below {entries}", place)
    page = table[which.clamp(0, tables - 1), entry.clamp(0, entries - 1)].to(torch.int64)
    slot = page * request.page_size + indices % request.page_size
    highest = INT32_MAX if request.index_dtype == torch.int32 else INT64_MAX
    _refuse(live & (page < 0), "page_table", page, "a page >= 0", place)
    _refuse(live & (slot > highest), "page_table", slot, f"an index up to {highest}", place)
