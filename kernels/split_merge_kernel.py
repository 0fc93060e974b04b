"""Device code of the `split_merge` family: a row cut into parts, each selected by a CTA of its own, then merged.

Idea. `radix_wide` gives a row one SM, however long the row is. Here a row becomes P parts of E elements; the k best of
each part stand in scratch memory side by side, and are themselves a row, P x k long, of which the k best are the
answer. Both steps are `radix_wide`, with another row each: nothing new selects.

Why no index is looked at. A part's best are written in index order, and parts stand in their order, so a candidate's
place among the candidates orders as its index does. Ties and both orders therefore go by place, and the indices are
only read where a cell is written. That needs candidates without gaps: E is at least k, so that all parts before the
row's end are full, the one at the end gives all it has, and those after it give nothing; how many there are follows
from the row's length. Elements that would be dropped (-inf) stay candidates, and are dropped by the merge. The pinned
newest element is no candidate: the merge sets it apart, as it does in any row.

Steps, with the names of the methods:

1. `SplitParts.kernel`, CTA r * P + p: `part_of` narrows row r to elements p * E .. (p + 1) * E - 1; `serve` writes
   its k best, in index order, with indices of the row and with their values, into slots (r * P + p) * k ...
2. `SplitMerge.merge`, CTA r: `candidates_of` makes a row of the candidates; `serve` selects, orders and writes through
   the page table or offset. `write` turns a candidate's place into its index.

    row r      |---- part 0 ----|---- part 1 ----|-- part 2 --|      E elements each
    scratch    | k best, by index | k best       | min(k, rest) |    values, and the same of indices
    output     | k best of these |

The two kernels are launched one after the other on the stream; the second begins when the first has ended.

Memory. Scratch: rows x P x k x (size of a score + 4) bytes, written once and read two or three times, from the L2
cache. Shared memory, registers and barriers of both kernels are `radix_wide`'s.

Cost. Two launches; a part takes what a row of E elements takes, the merge what one of P x k takes. So P in proportion
to sqrt(elements / k) balances them (`split_merge.cut`), and a row of n elements costs about 3 sqrt(n k) scores' time
instead of n.

Limits. As `radix_wide`; E >= k, so k up to half of the elements, and scratch memory.

Source: Strata, pull request 575, "qsa_select: two parts and a merge" (2026); there two parts, and merged by a sort.
"""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from . import _cute_ops as ops
from ._cute_flags import LARGEST, POOLED, TIES_HIGHEST
from ._cute_rows import Cells, Row, SelectArguments, find_cells, find_row, has, write_cell
from .radix_wide_kernel import RadixWide
from .radix_wide_layout import THREADS


class SplitRow(NamedTuple):
    """The candidates of a row, as `Row` is read; places in it stand for elements of the row that was cut."""

    base: Int64  # address of the first candidate's value
    length: Int64  # valid members of the row that was cut
    count: Int32  # candidates, and the pinned element
    pinned: Int32
    largest: Boolean
    highest: Boolean
    drop: Boolean
    by_value: Boolean
    indices: Int64  # address of the first candidate's index
    newest: Int32  # the last element of the row that was cut


class SplitParts(RadixWide):
    """The first kernel: a CTA a part."""

    @cute.jit
    def part_of(self, arguments, row: Row, first: Int32, elements: Int32) -> Row:
        """Narrows a row to the `elements` from `first` on, the pinned one left out."""
        shift = Int64(arguments.group_shift)
        count = cutlass.min(cutlass.max(row.count - row.pinned - first, Int32(0)), elements)
        members = row.length
        if row.pinned != Int32(0):
            members = Int64(row.count - Int32(1)) << shift
        members = cutlass.max(members - (Int64(first) << shift), Int64(0))
        step = Int64(first)
        if not has(arguments.flags, POOLED):
            step = step << shift
        return Row(
            base=row.base + step * self.size,
            length=cutlass.min(members, Int64(elements) << shift),
            count=count,
            pinned=Int32(0),
            largest=row.largest,
            highest=row.highest,
            drop=Boolean(False),
            by_value=Boolean(False),
        )

    @cute.kernel
    def kernel(
        self, request: SelectArguments, scratch_values: Int64, scratch_indices: Int64, parts: Int32, elements: Int32
    ):
        block, _, _ = cute.arch.block_idx()
        zero, k = Int64(0), request.k
        # Of the offsets there are some: `Cells` has the part's.
        arguments = request._replace(out_values=scratch_values, row_offsets=Int64(1), page_table=zero)
        shared = self.allocate()
        first = (block % parts) * elements
        row = self.part_of(arguments, find_row(arguments, block // parts, self.size), first, elements)
        slot = Int64(block) * Int64(k)
        cells = Cells(
            indices=scratch_indices + slot * 4,
            values=scratch_values + slot * self.size,
            table=zero,
            entries=zero,
            start=zero,
            offset=Int64(first),
            fill=Uint32(0),
        )
        # What the other options ask for is the merge's.
        plain = request.flags & Int32(LARGEST | TIES_HIGHEST | POOLED)
        self.serve(arguments._replace(flags=plain), cells, row, shared)


class SplitMerge(RadixWide):
    """Launches both kernels; the second, a CTA a row, is a selection from rows of candidates without groups."""

    WIDE_ARGUMENTS = 17
    NARROW_ARGUMENTS = 11

    def __init__(self, dtype: str, grouped: bool):
        super().__init__(dtype, False)
        self.split = SplitParts(dtype, grouped)

    @cute.jit
    def candidates_of(self, arguments, row: Row, row_index: Int32, scratch, cut) -> SplitRow:
        """Makes a row of the candidates of row `row_index`.

        Args:
            arguments: `SelectArguments`.
            row: the row that was cut.
            row_index: its number.
            scratch: addresses of values and indices.
            cut: parts of a row, elements of a part.
        """
        values, indices = scratch
        parts, elements = cut
        count = row.count - row.pinned
        full = count // elements
        given = full * arguments.k + cutlass.min(count - full * elements, arguments.k)
        first = Int64(row_index) * Int64(parts) * Int64(arguments.k)
        return SplitRow(
            base=values + first * self.size,
            length=row.length,
            count=given + row.pinned,
            pinned=row.pinned,
            largest=row.largest,
            highest=row.highest,
            drop=row.drop,
            by_value=row.by_value,
            indices=indices + first * 4,
            newest=row.count - Int32(1),
        )

    @cute.jit
    def write(self, arguments, cells: Cells, row: SplitRow, position: Int32, element: Int32, value: Uint32):
        """Writes one cell: the element that a candidate stands for, the pinned one, or -1."""
        found = element
        if element >= Int32(0):
            found = row.newest
            if element < row.count - row.pinned:
                found = ops.load_int32(row.indices + Int64(element) * 4)
        write_cell(arguments, cells, row, position, found, value, (self.size, self.dtype))

    @cute.jit
    def __call__(self, *values):
        """Launches both kernels; the arguments are `SelectArguments`, the scratch memory, then rows and their parts.

        The scratch memory's two addresses stand behind the other Int64s.
        """
        *wide, scratch_values, scratch_indices = values[: self.WIDE_ARGUMENTS]
        *narrow, rows, parts, elements, stream = values[self.WIDE_ARGUMENTS :]
        arguments = SelectArguments(*wide, *narrow)
        self.split.kernel(arguments, scratch_values, scratch_indices, parts, elements).launch(
            grid=[rows * parts, 1, 1], block=[THREADS, 1, 1], stream=stream, hint_smem_base_uniform=False
        )
        self.merge(arguments, scratch_values, scratch_indices, parts, elements).launch(
            grid=[rows, 1, 1], block=[THREADS, 1, 1], stream=stream, hint_smem_base_uniform=False
        )

    @cute.kernel
    def merge(
        self, arguments: SelectArguments, scratch_values: Int64, scratch_indices: Int64, parts: Int32, elements: Int32
    ):
        row_index, _, _ = cute.arch.block_idx()
        shared = self.allocate()
        whole = find_row(arguments, row_index, self.size)
        cells = find_cells(arguments, row_index, self.dtype, self.size)
        row = self.candidates_of(arguments, whole, row_index, (scratch_values, scratch_indices), (parts, elements))
        self.serve(arguments, cells, row, shared)
