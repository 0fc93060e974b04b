"""How the `radix_register` family sorts its list and writes it; part of `radix_register_kernel`, explained there."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import radix_register_ops as rops
from ._cute_bins import ByBins
from ._cute_flags import EXPAND, OUT_INT64, SPARE_CELLS
from ._cute_rows import Row, find_cells, has, is_given_up, write_cell
from ._cute_sort import SORTED
from .radix_register_emit import Emit
from .radix_register_layout import Place, Shared


class List(ByBins, Emit):
    """Sorts and writes the list."""

    @cute.jit
    def sort_list(self, shared: Shared, place: Place, entries: Int32, worst: Uint32):
        """Sorts the list, which is in the order of elements, by (key, element).

        Args:
            shared: the list; bins and what is before them are used.
            place: this thread.
            entries: of the list.
            worst: no key is above it.
        """
        if entries <= Int32(SORTED):
            spare = [Int32(one.iterator.toint()) for one in (shared.sBins, shared.sBefore, shared.sParts)]
            if const_expr(self.size == 2):
                worst = (worst << Uint32(16)) | Uint32(0xFFFF)
            list_ = Int32(shared.sList.iterator.toint()), self.entry_words
            self.sort_list_by_key(list_, entries, worst, spare, 32 - self.bits)
        else:
            self.sort_by_network(shared, place, entries)

    @cute.jit
    def sort_by_network(self, shared: Shared, place: Place, entries: Int32):
        """Sorts a long list: a bitonic network over the next power of two, two strides a step.

        A thread takes four entries a step. Those of a warp's threads are the warp's own 128 while a step spans no more.
        """
        list_ = self.entries_of(shared)
        padded = Int32(4)
        while padded < entries:
            padded = padded << 1
        for i in cutlass.range(entries + place.tid, padded, self.threads):
            list_[i] = self.last_entry()
        cute.arch.sync_threads()
        size = Int32(2)
        while size <= padded:
            stride = size >> 1
            while stride > Int32(0):
                half = cutlass.max(stride >> 1, Int32(1))
                for group in cutlass.range(place.tid, padded >> 2, self.threads, unroll=1):
                    self.sort_four(list_, group, size, stride, half)
                following = stride >> 2
                if following == Int32(0):
                    following = size
                if stride > Int32(64) or following > Int32(64):
                    cute.arch.sync_threads()
                else:
                    cute.arch.sync_warp()
                stride = stride >> 2
            size = size << 1
        cute.arch.sync_threads()

    @cute.jit
    def sort_four(self, list_, group: Int32, size: Int32, stride: Int32, half: Int32):
        """Compares four entries over `stride` and then over `half`; over 1 alone where the stride is 1."""
        low = ((group & (Int32(0) - half)) << 2) | (group & (half - 1))
        step = half
        apart = stride
        if stride == Int32(1):
            apart = Int32(2)
        a, b = self.unsigned(list_[low]), self.unsigned(list_[low + step])
        c, d = self.unsigned(list_[low + apart]), self.unsigned(list_[low + apart + step])
        ascending = (low & size) == Int32(0)
        if stride > Int32(1):
            a, c = self.in_order(a, c, ascending)
            b, d = self.in_order(b, d, ascending)
            a, b = self.in_order(a, b, ascending)
            c, d = self.in_order(c, d, ascending)
        else:
            a, b = self.in_order(a, b, ascending)
            c, d = self.in_order(c, d, ((low + 2) & size) == Int32(0))
        list_[low] = a
        list_[low + step] = b
        list_[low + apart] = c
        list_[low + apart + step] = d

    @cute.jit
    def in_order(self, a, b, ascending: Boolean):
        """Two entries, the lower one first if `ascending`, else the higher one."""
        swapped = (a > b) == ascending
        first = b if swapped else a
        second = a if swapped else b
        return first, second

    def unsigned(self, entry):
        """An entry as an unsigned number: a recast tensor's elements are signed."""
        return Uint32(entry) if self.size == 2 else Uint64(entry)

    def last_entry(self):
        """What sorts after every entry."""
        return Uint32(0xFFFFFFFF) if self.size == 2 else Uint64(0xFFFFFFFFFFFFFFFF)

    def entries_of(self, shared: Shared):
        """The list with its keys, one number an entry."""
        if self.size == 2:
            return shared.sList
        return cute.make_tensor(cute.recast_ptr(shared.sList.iterator, dtype=Uint64), cute.make_layout(self.capacity))

    @cute.jit
    def is_plain(self, arguments) -> Boolean:
        """Whether elements are written as they are: as int32, without values or transforms."""
        other = arguments.out_values | arguments.row_offsets | arguments.page_table
        return other == Int64(0) and not has(arguments.flags, OUT_INT64 | EXPAND)

    @cute.jit
    def plain_cells(self, arguments, row_index: Int32) -> Int64:
        """Where the row's cells are, if they are int32 without values and transforms."""
        indices = arguments.out_indices + Int64(row_index) * (arguments.out_indices_stride * 4)
        if is_given_up(arguments):
            indices = arguments.spare + SPARE_CELLS
        return indices

    @cute.jit
    def write_plain(
        self,
        arguments,
        row: Row,
        row_index: Int32,
        shared: Shared,
        tid: Int32,
        taken: Int32,
        whole: Boolean,
        keyed: Boolean,
    ):
        """Writes the row's cells where they are int32 without values and transforms; as `write_row`."""
        indices = self.plain_cells(arguments, row_index)
        pinned_at, lead = taken, Int32(0)
        if row.by_value:
            pinned_at, lead = Int32(0), row.pinned
        for position in cutlass.range(tid, arguments.k, self.threads, unroll=1):
            element = Int32(-1)
            source = position - lead
            if row.pinned != Int32(0) and position == pinned_at:
                element = row.count - Int32(1)
            elif source >= Int32(0) and source < taken:
                element = source
                if not whole:
                    element, _ = self.entry(shared, row, source, keyed)
            ops.store_int32(indices + Int64(position) * 4, element)

    @cute.jit
    def write_row(
        self,
        arguments,
        row: Row,
        row_index: Int32,
        shared: Shared,
        tid: Int32,
        taken: Int32,
        whole: Boolean,
        keyed: Boolean,
    ):
        """Writes the row's cells: the list's or, if `whole`, elements in order; the pinned one; -1 after them."""
        cells = find_cells(arguments, row_index, self.dtype, self.size)
        pinned_at, lead = taken, Int32(0)
        if row.by_value:
            pinned_at, lead = Int32(0), row.pinned
        for position in cutlass.range(tid, arguments.k, self.threads, unroll=1):
            element, value = Int32(-1), cells.fill
            source = position - lead
            if row.pinned != Int32(0) and position == pinned_at:
                element = row.count - Int32(1)
                value = Uint32(ops.INF_TOP[self.dtype] >> (32 - self.bits))
            elif source >= Int32(0) and source < taken:
                element = source
                score = Uint32(0)
                if not whole:
                    element, score = self.entry(shared, row, source, keyed)
                value = self.value_of(cells, row, element, score)
            write_cell(arguments, cells, row, position, element, value, (self.size, self.dtype))

    @cute.jit
    def entry(self, shared: Shared, row: Row, source: Int32, keyed: Boolean):
        """An entry's element and its top-aligned score; the score only with `grouped` and if there are keys."""
        score = Uint32(0)
        if const_expr(self.size == 2):
            word = shared.sList[source]
            element = Int32(word & Uint32(0xFFFF))
            if const_expr(self.grouped):
                score = rops.score_of_key(word >> Uint32(16), row.largest, self.dtype)
        else:
            element = Int32(0)
            if keyed:
                element = Int32(shared.sList[source * 2])
                if const_expr(self.grouped):
                    score = rops.score_of_key(shared.sList[source * 2 + 1], row.largest, self.dtype)
            else:
                element = Int32(shared.sList[source])
        return element, score
