"""The ordered output of the f32 kernel of the `cluster` family; explained in `cluster32_kernel` and `cluster_marks`."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from . import _cute_ops as ops
from . import cluster32_ops as kops
from ._cute_rows import Cells, find_cells
from .cluster32_emit import Emit
from .cluster32_layout import Grid, Place, Range, Window
from .cluster_marks import Marking, Marks
from .cluster_value import ByValue


class Order(Marking, ByValue, Emit):
    """Steps 6 and 7 where order or ties matter."""

    value_barrier = 4
    by_bins = True

    def cells_of(self, arguments, row_index: Int32) -> Cells:
        """The row's outputs."""
        return find_cells(arguments, row_index, ops.F32, 4)

    def as_key(self, key: Uint64) -> Uint32:
        """The key of an entry of the list."""
        return Uint32(key)

    @cute.jit
    def key_at(self, row: Window, element: Int32, wanted: Boolean) -> Uint32:
        """The key of an element of the row, if wanted."""
        score = Uint32(0)
        if wanted:
            score = ops.load_score(row.base + Int64(element) * 4, ops.F32)
        return kops.key_of(score, self.largest)

    @cute.jit
    def chunk_of(self, grid: Grid):
        """This CTA's first element, and how many it has."""
        begin = cutlass.max(grid.first * 4 - grid.skew, Int32(0))
        return begin, cutlass.min(grid.limit * 4 - grid.skew, grid.count) - begin

    @cute.jit
    def mark_row(self, place: Place, grid: Grid, marks: Marks, found: Range, size: Int32, all_: Boolean):
        """Marks elements from the row."""
        last = marks.first + cutlass.min(marks.words * 32, size - marks.first) - 1
        one = marks.origin + marks.sign * marks.first
        other = marks.origin + marks.sign * last
        first = (cutlass.min(one, other) + grid.skew) >> 2
        end = ((cutlass.max(one, other) + grid.skew) >> 2) + 1
        for vector in cutlass.range(first + place.tid, end, self.threads, unroll=1):
            words = self.load_vector(grid, vector, Boolean(True))
            keys, valid = self.keys_of(grid, vector, Boolean(True), words)
            for e in cutlass.range_constexpr(4):
                if (valid & Uint32(1 << e)) != Uint32(0):
                    self.mark(marks, found, keys[e], vector * 4 - grid.skew + e, all_)
