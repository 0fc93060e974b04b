"""The ordered output of the `cluster` family's 16-bit kernel; explained in `cluster_kernel` and `cluster_marks`."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_rows import Cells, find_cells
from .cluster_emit import Emit
from .cluster_layout import Grid, Place, Range, Window
from .cluster_marks import Marking, Marks
from .cluster_value import ByValue


class Order(Marking, ByValue, Emit):
    """Steps 6 and 7 where order or ties matter."""

    value_barrier = 2

    def cells_of(self, arguments, row_index: Int32) -> Cells:
        """The row's outputs."""
        return find_cells(arguments, row_index, self.dtype, 2)

    def as_key(self, key: Uint64) -> Int32:
        """The key of an entry of the list."""
        return Int32(key)

    @cute.jit
    def key_at(self, row: Window, element: Int32, wanted: Boolean) -> Uint32:
        """The key of an element of the row, if wanted."""
        score = cops.load_element(row.base + Int64(element) * 2, wanted)
        return cops.word_keys(score, self.largest, self.dtype) & Uint32(0xFFFF)

    @cute.jit
    def chunk_of(self, grid: Grid):
        """This CTA's first element, and how many it has."""
        begin = grid.head + cutlass.min(grid.chunk, grid.vectors) * 8
        if grid.part == Int32(0):
            begin = Int32(0)
        end = grid.head + grid.limit * 8
        if grid.part == Int32(self.cluster - 1):
            end = grid.count
        return begin, end - begin

    @cute.jit
    def mark_row(self, place: Place, grid: Grid, marks: Marks, found: Range, size: Int32, all_: Boolean):
        """Marks elements from the row."""
        last = marks.first + cutlass.min(marks.words * 32, size - marks.first) - 1
        one = marks.origin + marks.sign * marks.first - grid.head
        other = marks.origin + marks.sign * last - grid.head
        first = cutlass.max(cutlass.min(one, other), grid.chunk * 8) >> 3
        end = cutlass.min((cutlass.max(one, other) >> 3) + 1, grid.limit)
        for vector in cutlass.range(first + place.tid, end, self.threads, unroll=1):
            keys = self.keys_of(self.load_vector(grid, vector, Boolean(True)))
            above, equal = Uint32(0), Uint32(0)
            for e in cutlass.range_constexpr(8):
                score = Uint32(self.key(keys, e))
                above = ops.or_if_in_range(above, score, Uint32(found.low + 1), Uint32(0xFFFF), 1 << e)
                equal = ops.or_if_equal(equal, score, Uint32(found.low), 1 << e)
            left = equal
            if all_:
                left = above | equal
            while left != Uint32(0):
                e = ops.find_first_set(left)
                left = left & (left - Uint32(1))
                better = Int32((above >> Uint32(e)) & Uint32(1))
                self.mark(marks, found, found.low + better, self.element_of(grid, vector) + e, all_)
        if self.has_ends(place, grid):
            there, element, key = self.load_end(place, grid)
            if there:
                self.mark(marks, found, key, element, all_)
