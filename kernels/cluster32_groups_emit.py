"""The output of groups of f32 scores in the `cluster` family; explained in `cluster32_kernel`."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from . import _cute_ops as ops
from . import _cute_rows as rows
from . import cluster32_ops as kops
from . import cluster_ops as cops
from ._cute_flags import DROP_NEG_INF, EXPAND, ORDER_VALUE, OUT_INT64, PIN_NEWEST
from ._cute_rows import Cells, has
from .cluster32_groups import Grid, Window
from .cluster32_layout import Place, Range
from .cluster32_ops import NEG_INF, NEG_INF_KEY
from .cluster_marks import Marks
from .cluster_value import WORST


class GroupsEmit:
    """Steps 6 and 7 for groups, in place of what `Emit` and `Order` do for single scores.

    The newest group, if it is pinned, is no element of the row, and its cell none of the `k` that are selected for. If
    elements of -inf are dropped and the k-th best is one, fewer are selected. What is left then is written last
    (`write_rest`).
    """

    @cute.jit
    def set_newest_apart(self, arguments, row: Window):
        """Takes a pinned newest group out of the row, and its cell out of k."""
        pinned = Int32(has(arguments.flags, PIN_NEWEST) and row.count > Int32(0))
        k = arguments.k - pinned
        count = row.count - pinned
        if k == Int32(0):
            count = Int32(0)
        length = row.length
        if pinned > Int32(0):
            length = count << row.log
        return arguments._replace(k=k), Window(row.base, count, length, row.log, pinned)

    @cute.jit
    def is_short(self, arguments, row: Window) -> Boolean:
        """Whether all elements of a row are written as they stand; dropped ones leave no gap in ascending indices."""
        short = row.count <= arguments.k
        if const_expr(self.ordered):
            if has(arguments.flags, DROP_NEG_INF) and not has(arguments.flags, ORDER_VALUE):
                short = row.count == Int32(0)
        return short

    @cute.jit
    def without_dropped(self, arguments, row: Window, found: Range):
        """The arguments with as many elements to select as are written of a row."""
        k = cutlass.min(arguments.k, row.count)
        if has(arguments.flags, DROP_NEG_INF) and found.low == Uint32(NEG_INF_KEY):
            if not has(arguments.flags, ORDER_VALUE):
                k = cutlass.min(found.above, k)
        return arguments._replace(k=k)

    @cute.jit
    def write_cell(self, arguments, cells: Cells, row: Window, position: Int32, element: Int32):
        """Writes one cell: an element, or -1."""
        transforms = arguments.page_table | arguments.row_offsets | arguments.out_values
        if transforms == Int64(0) and not has(arguments.flags, OUT_INT64 | EXPAND):
            ops.store_int32(cells.indices + Int64(position) * 4, element)
        else:
            value = cells.fill
            if cells.values != Int64(0):
                value = self.value_of(self.key_at(row, element, element >= Int32(0)))
            rows.write_cell(arguments, cells, row, position, element, value, (4, ops.F32))

    @cute.jit
    def write_newest(self, arguments, cells: Cells, row: Window, position: Int32):
        """Writes the last group of a row that has its newest in it."""
        infinity = Uint32(ops.INF_TOP[ops.F32])
        rows.write_cell(arguments, cells, row, position, row.count - 1, infinity, (4, ops.F32))

    @cute.jit
    def write_short(self, arguments, cells: Cells, row: Window, place: Place):
        """All elements of a row that has no more than k."""
        first = place.rank * self.threads + place.tid
        for element in cutlass.range(first, row.count, self.cluster * self.threads, unroll=1):
            written = element
            if has(arguments.flags, DROP_NEG_INF):
                if self.key_at(row, element, Boolean(True)) == Uint32(NEG_INF_KEY):
                    written = Int32(-1)
            self.write_cell(arguments, cells, row, element, written)

    @cute.jit
    def write_rest(self, arguments, row_index: Int32, row: Window, place: Place, pinned: Int32, written: Int32):
        """Writes the newest group, if it is pinned, behind what was written of a row, and -1s behind that.

        Args:
            arguments: `SelectArguments`, as given.
            row_index: the row's number.
            row: the row with its newest group.
            place: this thread.
            pinned: 1 if it is pinned, else 0.
            written: cells that were written.
        """
        first = written + place.rank * self.threads + place.tid
        if first < arguments.k:
            cells = self.cells_of(arguments, row_index)
            for position in cutlass.range(first, arguments.k, self.cluster * self.threads, unroll=1):
                if position == written and pinned > Int32(0):
                    self.write_newest(arguments, cells, row, position)
                else:
                    self.write_cell(arguments, cells, row, position, Int32(-1))

    @cute.jit
    def write_sorted(self, arguments, cells: Cells, row: Window, position: Int32, element: Int32, entry: Int32, worst):
        """Writes an element, or -1, into its cell, behind the newest group's; see `ByValue`."""
        if element >= Int32(0) and has(arguments.flags, DROP_NEG_INF):
            if worst + (Uint32(WORST) - cops.load_word(entry + 4)) == Uint32(NEG_INF_KEY):
                element = Int32(-1)
        self.write_cell(arguments, cells, row, position + row.pinned, element)

    @cute.jit
    def key_at(self, row: Window, element: Int32, wanted: Boolean) -> Uint32:
        """The key of a group of the row, if wanted; a lane reads all of it."""
        size = Int32(0)
        if wanted:
            size = cutlass.min(row.length - (element << row.log), Int32(1) << row.log)
        address = row.base + (Int64(element) << Int64(row.log)) * 4
        aligned = (row.base & Int64(15)) == Int64(0)
        best = Uint32(NEG_INF)
        for at in cutlass.range(0, size, 16, unroll=1):
            words = [(Uint32(NEG_INF),) * 4 for _ in range(4)]
            if aligned and (size & 3) == Int32(0):
                words = [ops.load_words(address + Int64(at + 4 * i) * 4, at + 4 * i < size, NEG_INF) for i in range(4)]
            else:
                words = [kops.load_scores(address + Int64(at + 4 * i) * 4, size - at - 4 * i) for i in range(4)]
            for some in words:
                best = kops.better(best, self.best_of(some), True)
        return kops.key_of(best, True)

    @cute.jit
    def value_of(self, key: Uint32) -> Uint32:
        """The value of a group: NaN as the quiet NaN."""
        bits = key ^ Uint32(0x80000000)
        if (key & Uint32(0x80000000)) == Uint32(0):
            bits = ~key
        if key == Uint32(0xFFFFFFFF):
            bits = Uint32(ops.QUIET_NAN_TOP[ops.F32])
        return bits

    @cute.jit
    def chunk_of(self, grid: Grid):
        """This CTA's first element, and how many it has."""
        begin = cutlass.min(grid.first >> grid.log, grid.count)
        end = cutlass.min((grid.limit + ((Int32(1) << grid.log) - 1)) >> grid.log, grid.count)
        return begin, end - begin

    @cute.jit
    def mark_row(self, place: Place, grid: Grid, marks: Marks, found: Range, size: Int32, all_: Boolean):
        """Marks elements from the row."""
        last = marks.first + cutlass.min(marks.words * 32, size - marks.first) - 1
        one = marks.origin + marks.sign * marks.first
        other = marks.origin + marks.sign * last
        first = (cutlass.min(one, other) << grid.log) + place.warp * 32
        end = cutlass.min((cutlass.max(one, other) + 1) << grid.log, grid.vectors)
        for at in cutlass.range(first, end, self.threads, unroll=1):
            vector = at + place.lane
            words = self.load_vector(grid, vector, vector < end)
            keys, valid = self.keys_of(grid, vector, vector < end, words)
            if valid != Uint32(0):
                self.mark(marks, found, keys[0], self.element_of(grid, vector), all_)
