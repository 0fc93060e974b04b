"""Rows of a selection as the torch family reads them: windows, and the keys of their elements.

Everything that the device says about a row (length, start, table) is clamped here, once. Members outside the window
are masked by position: their key is below every key of a member, whatever its score.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._request import SelectRequest
from ._torch_keys import CODES, KeyCode


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a request, or all of them. Vectors are int64 on the input's device, None where not needed.

    Attributes:
        request: the request that the rows belong to; its options hold for them, its tensors may hold more rows.
        scores: (rows, width) the rows' scores.
        starts: (rows,) first member of each window, clamped to the row.
        lengths: (rows,) valid members of each window, clamped; None where all rows have `request.length_bound`.
        counts: (rows,) valid elements of each window; None together with `lengths`.
        offsets: (rows,) what is added to the indices.
        tables: (rows,) each row's page table, not clamped.
        table_starts: (rows,) first page of each row, not clamped.
    """

    request: SelectRequest
    scores: Tensor
    starts: Tensor | None
    lengths: Tensor | None
    counts: Tensor | None
    offsets: Tensor | None
    tables: Tensor | None
    table_starts: Tensor | None

    @classmethod
    def of(cls, request: SelectRequest) -> "Rows":
        """Take all rows of a request. Enqueues a few vector operations, does not synchronise."""
        starts, lengths = windows(request)
        counts = lengths
        if lengths is not None and request.group > 1:
            counts = (lengths + (request.group - 1)) // request.group
        tables = request.row_to_table
        if tables is None and request.page_table is not None:
            tables = torch.arange(request.rows, device=request.input.device)
        vectors = (request.row_offsets, tables, request.table_starts)
        wide = (None if vector is None else vector.to(torch.int64) for vector in vectors)
        return cls(request, request.input.detach(), starts, lengths, counts, *wide)

    def part(self, first: int, stop: int) -> "Rows":
        """Return rows first .. stop-1, as views."""
        vectors = (self.starts, self.lengths, self.counts, self.offsets, self.tables, self.table_starts)
        cut = (None if vector is None else vector[first:stop] for vector in vectors)
        return Rows(self.request, self.scores[first:stop], *cut)

    @property
    def code(self) -> KeyCode:
        """Key code of the scores."""
        return CODES[self.scores.dtype]

    @property
    def bits(self) -> Tensor:
        """The scores' bits, (rows, width) int16 or int32, a view."""
        return self.scores.view(self.code.dtype)

    def span(self, first: int, stop: int) -> Tensor:
        """Return int64 first .. stop-1 on the rows' device."""
        return torch.arange(first, stop, device=self.scores.device)

    def read(self, positions: Tensor) -> Tensor:
        """Return the bits at window positions (rows, n) >= 0; past the row, those of its last column."""
        if self.starts is not None:
            positions = positions + self.starts[:, None]
        return self.bits.gather(1, positions.clamp(max=self.request.width - 1))

    def keys(self, first: int, stop: int) -> Tensor:
        """Return the keys of elements first .. stop-1 (of 0 .. element_bound): (rows, stop - first), a new tensor."""
        request = self.request
        group = 1 if request.pooled else request.group
        begin, end = first * group, stop * group if request.pooled else min(stop * group, request.length_bound)
        if self.starts is None:
            bits = self.bits[:, begin:end]
        else:
            bits = self.read(self.span(begin, end).expand(self.scores.shape[0], -1))
        keys = self.code.encode(bits, request.largest)
        limits = self.counts if request.pooled else self.lengths
        if limits is not None:
            keys.masked_fill_(self.span(begin, end) >= limits[:, None], self.code.masked)
        if group > 1:
            missing = (stop - first) * group - (end - begin)
            if missing:
                keys = torch.nn.functional.pad(keys, (0, missing), value=self.code.masked)
            keys = keys.reshape(-1, stop - first, group).amax(-1)
        if request.pin_newest:
            self._pin(keys, first, stop)
        return keys

    def _pin(self, keys: Tensor, first: int, stop: int) -> None:
        """Raise the last valid element of each row above all others, in place."""
        if self.counts is not None:
            keys.masked_fill_(self.span(first, stop) == self.counts[:, None] - 1, self.code.newest)
        elif first < self.request.element_bound <= stop:
            keys[:, self.request.element_bound - 1 - first].fill_(self.code.newest)


def windows(request: SelectRequest) -> tuple[Tensor | None, Tensor | None]:
    """Return starts and lengths of all rows, clamped, as int64 (None: all 0, all `request.length_bound`)."""
    starts = None
    room: int | Tensor = request.members
    if request.row_starts is not None:
        starts = request.row_starts.to(torch.int64).clamp(0, request.width)
        room = request.members - starts
    if request.lengths is None and request.next_n == 1 and starts is None:
        return None, None
    lengths = wanted(request)
    if isinstance(room, Tensor):
        lengths = torch.minimum(lengths, room)
    return starts, lengths.clamp(0, request.length_bound)


def wanted(request: SelectRequest) -> Tensor:
    """Return the lengths that rows ask for, (rows,) int64, not clamped; where there are no `lengths`, all members."""
    rows, n = request.rows, request.next_n
    if request.lengths is not None:
        lengths = request.lengths.to(torch.int64)
        if n > 1:
            lengths = lengths[:, None].expand(-1, n).reshape(rows)
    else:
        lengths = torch.full((rows,), request.members, device=request.input.device, dtype=torch.int64)
    if n > 1:
        lengths = lengths + (torch.arange(rows, device=lengths.device) % n - (n - 1))
    return lengths
