"""Indices that ascend, for both kernels of the `cluster` family: what is selected is marked, counted and written.

A CTA has neighbouring vectors of the row, its *chunk*, and a bit map of it in shared memory: two bits for an element,
better than the k-th best, equal to it. Its list, which is in no order, sets them; a scan over the words says where each
element goes. Ties to the highest index are those to the lowest of a row read from its end: ranks and bit maps then run
from the end to the beginning (`mirrored`). A chunk for which there is not room enough is done part by part.
"""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_flags import ORDER_VALUE, TIES_HIGHEST
from ._cute_rows import has
from ._cute_sort import SORTED

TIE_SHIFT = 13  # a count of keys better than the k-th best, below 4,096, and above it one of keys equal to it


class Marks(NamedTuple):
    """Two bits for each element of a part of this CTA's chunk of the row: better than the k-th best, equal to it.

    Elements are numbered from the chunk's beginning, or, mirrored, from its end.
    """

    better: Int32  # address in shared memory
    equal: Int32
    words: Int32  # of each
    origin: Int32  # element 0
    sign: Int32  # -1 if mirrored, else 1
    first: Int32  # number of the part's first element


class Marking:
    """Step 6 with order, for a kernel's class that has `chunk_of`, `mark_row`, `cells_of` and `put`."""

    @cute.jit
    def emit_in_order(self, arguments, row_index: Int32, row, shared, place, grid, found, direct, unlisted):
        """Puts what is selected of this CTA's chunk of the row into its places, part by part.

        Args:
            arguments: `SelectArguments`.
            row_index: the row's number.
            row: the row.
            shared: the list; the marks take what it and the queues leave.
            place: this thread.
            grid: the row; this CTA's vectors are neighbours.
            found: the k-th best key.
            direct: the list does not hold all keys from the k-th best on.
            unlisted: it does not hold those equal to it.
        """
        begin, size = self.chunk_of(grid)
        mirrored = has(arguments.flags, TIES_HIGHEST)
        quota = arguments.k - found.above - found.ties  # of the keys equal to the k-th best
        base = found.lower + cutlass.min(found.ties, arguments.k - found.above)
        count = shared.sCount[0]
        if direct:
            count = Int32(0)
        marks = self.place_marks(shared, count, begin, size, mirrored, has(arguments.flags, ORDER_VALUE))
        above = Int32(0)
        ties = Int32(0)
        left = size
        while left > Int32(0):
            for i in cutlass.range(place.tid, 2 * marks.words, self.threads, unroll=1):
                cops.store_word(marks.better + i * 4, Uint32(0))
            cute.arch.sync_threads()
            for i in cutlass.range(place.tid, count, self.threads, unroll=1):
                entry = shared.sList[i]
                key = self.as_key(entry >> Uint64(32))
                self.mark(marks, found, key, Int32(entry & Uint64(0xFFFFFFFF)), Boolean(True))
            if direct or (unlisted and quota > Int32(0)):
                self.mark_row(place, grid, marks, found, size, direct)
            cute.arch.sync_threads()
            above, ties = self.put_marked(arguments, row_index, row, shared, place, marks, base, quota, above, ties)
            left = left - marks.words * 32
            marks = marks._replace(first=marks.first + marks.words * 32)

    @cute.jit
    def place_marks(self, shared, count: Int32, begin: Int32, size: Int32, mirrored: Boolean, by_value: Boolean):
        """Finds room for marks: from the list's entries to the end of the queues, but for the places by value."""
        address = Int32(shared.sList.iterator.toint()) + ((count + 1) & ~1) * 8
        end = Int32(shared.sSample.iterator.toint())
        if by_value:
            end = end - SORTED * 4
        words = cutlass.min((end - address) >> 3, (cutlass.max(size, Int32(0)) + 31) >> 5)
        origin = begin
        sign = Int32(1)
        if mirrored:
            origin = begin + size - 1
            sign = Int32(-1)
        return Marks(address, address + words * 4, words, origin, sign, Int32(0))

    @cute.jit
    def mark(self, marks: Marks, found, key, element: Int32, all_: Boolean):
        """Marks an element that is in the part; one that is better than the k-th best only if `all_`."""
        at = (element - marks.origin) * marks.sign - marks.first
        if key >= found.low and Uint32(at) < Uint32(marks.words * 32):
            address = marks.better
            if key == found.low:
                address = marks.equal
            if all_ or key == found.low:
                cops.mark(address + (at >> 5) * 4, Uint32(1) << Uint32(at & 31))

    @cute.jit
    def put_marked(
        self,
        arguments,
        row_index: Int32,
        row,
        shared,
        place,
        marks: Marks,
        base: Int32,
        quota: Int32,
        above: Int32,
        ties: Int32,
    ):
        """Puts the marked elements into their places; all threads have the same number of words, one after another.

        Args:
            arguments: `SelectArguments`.
            row_index: the row's number.
            row: the row.
            shared: `sSample` is used for sums.
            place: this thread.
            marks: complete.
            base: place of the chunk's first element in the output.
            quota: how many marked as equal are taken.
            above: keys better than the k-th best in the parts before.
            ties: keys equal to it in the parts before.

        Returns:
            `above` and `ties` with this part's.
        """
        each = ((marks.words + (self.threads - 1)) // self.threads) | 1  # odd: a warp's words are in different banks
        first = place.tid * each
        end = cutlass.min(first + each, marks.words)
        packed = Int32(0)
        for i in cutlass.range(first, end, unroll=1):
            packed = packed + Int32(cute.arch.popc(cops.load_word(marks.better + i * 4)))
            packed = packed + (Int32(cute.arch.popc(cops.load_word(marks.equal + i * 4))) << TIE_SHIFT)
        upto = packed
        for fold in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(upto, 1 << fold)
            if place.lane >= Int32(1 << fold):
                upto = upto + before
        sums_at = Int32(shared.sSample.iterator.toint())
        if place.lane == Int32(31):
            cops.store_word(sums_at + place.warp * 4, Uint32(upto))
        cute.arch.sync_threads()
        sums = Int32(0)
        if place.lane < Int32(self.warps):
            sums = Int32(cops.load_word(sums_at + place.lane * 4))
        all_ = cute.arch.warp_redux_sync(sums, "add")
        if place.lane >= place.warp:
            sums = Int32(0)
        before = cute.arch.warp_redux_sync(sums, "add") + upto - packed
        mask = Int32((1 << TIE_SHIFT) - 1)
        place_above = above + (before & mask)
        place_equal = ties + Int32(Uint32(before) >> Uint32(TIE_SHIFT))
        if packed != Int32(0):
            cells = self.cells_of(arguments, row_index)  # late, for the sake of registers
            for i in cutlass.range(first, end, unroll=1):
                better = cops.load_word(marks.better + i * 4)
                equal = cops.load_word(marks.equal + i * 4)
                left = better | equal
                if place_equal >= quota:
                    left = better
                while left != Uint32(0):
                    bit = left & (Uint32(0) - left)
                    left = left ^ bit
                    position = base + place_above + cutlass.max(cutlass.min(place_equal, quota), Int32(0))
                    is_tie = (equal & bit) != Uint32(0)
                    if not is_tie or place_equal < quota:
                        number = marks.first + i * 32 + ops.find_first_set(bit)
                        if marks.sign < Int32(0):
                            position = arguments.k - 1 - position
                        if Uint32(position) < Uint32(arguments.k):
                            self.put(arguments, cells, row, shared, position, marks.origin + marks.sign * number)
                    if is_tie:
                        place_equal = place_equal + 1
                    else:
                        place_above = place_above + 1
        cute.arch.sync_threads()
        return above + (all_ & mask), ties + Int32(Uint32(all_) >> Uint32(TIE_SHIFT))
