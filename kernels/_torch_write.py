"""The last steps of a selection in torch operations: order, short rows, transforms, outputs.

An element is *live* if it is valid and not dropped. Indices stay int64, members and elements by window position,
until they are written; what is not live is -1 from then on, and the value beside a -1 is the padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._torch_keys import composite, split
from ._torch_rows import Rows

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
CELLS = 1 << 21
"""Cells (members, or outputs of a row) that one step holds at most: bounds scratch to about 64 bytes a cell."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Elements chosen from some rows.

    Attributes:
        index: (rows, n) int64 elements; those past a row's count are no elements.
        keys: (rows, n) their keys; None where nothing after the choice asks for them.
        whole: the elements are 0 .. n-1 of every row.
    """

    index: Tensor
    keys: Tensor | None
    whole: bool


def arrange(rows: Rows, chosen: Chosen) -> tuple[Chosen, Tensor | None]:
    """Put chosen elements in the order asked for; return them, and which are not live (None: all are)."""
    request = rows.request
    order = request.order
    if order == "any" and rows.counts is not None and not chosen.whole:
        if chosen.keys is None:
            chosen = _short_rows_ascend(rows, chosen, rows.counts)
        else:
            order = "index"  # short rows must ascend, and their keys with them
    if order == "value" and request.ties == "highest" and chosen.keys is not None:
        chosen = _by_value(chosen, chosen.keys)
    dead = _dead(rows, chosen)
    if order != "index" or (chosen.whole and not request.drop_neg_inf):
        return chosen, dead
    index = chosen.index if dead is None else chosen.index.masked_fill(dead, INT64_MAX)
    index, places = index.sort(dim=1)
    keys = None if chosen.keys is None else chosen.keys.gather(1, places)
    return Chosen(index, keys, chosen.whole), None if dead is None else index == INT64_MAX


def _short_rows_ascend(rows: Rows, chosen: Chosen, counts: Tensor) -> Chosen:
    """Replace the elements of rows that have no more than k by 0 .. n-1."""
    ascending = rows.span(0, chosen.index.shape[1])
    short = counts[:, None] <= rows.request.k
    return Chosen(torch.where(short, ascending, chosen.index), None, False)


def _by_value(chosen: Chosen, keys: Tensor) -> Chosen:
    """Sort by key, best first, and equal keys by ascending index."""
    keys, index = split(composite(keys, chosen.index, False).sort(dim=1, descending=True).values, False)
    return Chosen(index, keys, chosen.whole)


def _dead(rows: Rows, chosen: Chosen) -> Tensor | None:
    """Say which chosen elements are not live; None where all must be."""
    dead = None
    if rows.counts is not None:
        dead = chosen.index >= rows.counts[:, None]
    if rows.request.drop_neg_inf and chosen.keys is not None:
        dropped = chosen.keys == -rows.code.infinity
        dead = dropped if dead is None else dead | dropped
    return dead


def write(rows: Rows, chosen: Chosen, dead: Tensor | None, indices: Tensor, values: Tensor | None) -> None:
    """Write ordered elements to the outputs (rows, columns), and -1 with its value to the columns after them."""
    request = rows.request
    count, group = chosen.index.shape[1], request.group if request.expand else 1
    if count * group < request.columns:
        indices[:, count * group :].fill_(-1)
    step = max(1, CELLS // (rows.scores.shape[0] * group)) if request.expand else max(1, count)
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        members, gone = _members(rows, chosen.index[:, part], None if dead is None else dead[:, part])
        final, gone = _transform(rows, members, gone)
        indices[:, part.start * group : part.stop * group].copy_(final)
        if values is not None:
            _write_values(rows, chosen, gone, values[:, part])
    if values is not None and count < request.columns:
        values.view(rows.code.dtype)[:, count:].fill_(rows.code.padding(request.largest))


def _members(rows: Rows, index: Tensor, dead: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Turn elements into what is written: themselves, or their members with `expand`."""
    request = rows.request
    if not request.expand:
        return index, dead
    group = request.group
    if dead is not None:
        index = index.masked_fill(dead, 0)  # no product of a sentinel below
    members = (index[:, :, None] * group + rows.span(0, group)).flatten(1)
    past = members >= (request.length_bound if rows.lengths is None else rows.lengths[:, None])
    if dead is not None:
        past |= dead[:, :, None].expand(-1, -1, group).flatten(1)
    return members, past


def _transform(rows: Rows, members: Tensor, dead: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return indices as written, (rows, n) int64 with -1 for what is nothing, and which are nothing (None: none)."""
    request = rows.request
    if dead is not None:
        members = members.masked_fill(dead, 0)
    bad: Tensor | None = None
    if request.page_table is not None and rows.tables is not None:
        members, bad = paged(rows, members, request.page_table, rows.tables[:, None])
    elif rows.offsets is not None:
        offsets = rows.offsets[:, None]
        bad = members > INT64_MAX - offsets.clamp(min=0)
        members = members + offsets
        bad |= members < 0
    if request.index_dtype == torch.int32 and (bad is not None or request.members - 1 > INT32_MAX):
        large = members > INT32_MAX
        bad = large if bad is None else bad.logical_or_(large)
    if bad is not None:
        dead = bad if dead is None else bad.logical_or_(dead)
    return (members if dead is None else members.masked_fill(dead, -1)), dead


def paged(rows: Rows, members: Tensor, table: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Look indices (rows, n) >= 0 up in tables `which` (rows, 1); return slots, and which have no valid page."""
    size = rows.request.page_size
    entry = page_entries(rows, members)
    tables, entries = table.shape
    bad = (entry < 0) | (entry >= entries) | (which < 0) | (which >= tables)
    if tables == 0 or entries == 0:
        return members, bad
    page = table[which.clamp(0, tables - 1), entry.clamp(0, entries - 1)].to(torch.int64)
    bad |= page < 0
    return page * size + (members & (size - 1)), bad


def page_entries(rows: Rows, members: Tensor) -> Tensor:
    """Return the columns of the page table where indices (rows, n) are looked up; they may be outside it."""
    entry = members >> (rows.request.page_size.bit_length() - 1)
    return entry if rows.table_starts is None else entry + rows.table_starts[:, None]


def _write_values(rows: Rows, chosen: Chosen, dead: Tensor | None, values: Tensor) -> None:
    """Write the chosen elements' scores."""
    request, code = rows.request, rows.code
    keys = chosen.keys
    if request.group == 1 or request.pooled or keys is None:
        index = chosen.index if dead is None else chosen.index.masked_fill(dead, 0)
        bits = rows.read(index)
        if request.pin_newest:
            newest = request.element_bound - 1 if rows.counts is None else rows.counts[:, None] - 1
            bits.masked_fill_(index == newest, code.infinity)
    else:
        bits = code.decode(keys.to(code.dtype))
    if dead is not None:
        bits.masked_fill_(dead, code.padding(request.largest))
    values.detach().view(code.dtype).copy_(bits)
