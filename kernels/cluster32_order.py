"""The ordered output of the f32 kernel of the `cluster` family; explained in `cluster32_kernel`."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from . import _cute_ops as ops
from . import cluster32_ops as kops
from ._cute_flags import TIES_HIGHEST
from ._cute_rows import Cells, has
from .cluster32_emit import Emit
from .cluster32_layout import Grid, Place, Range, Shared, Window

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


class Order(Emit):
    """Step 6 with indices that ascend: elements are marked in the order of the row, counted, and written."""

    @cute.jit
    def emit_in_order(
        self,
        arguments,
        cells: Cells,
        row: Window,
        shared: Shared,
        place: Place,
        grid: Grid,
        found: Range,
        direct: Boolean,
        unlisted: Boolean,
    ):
        """Writes what is selected of this CTA's chunk of the row, part by part, each what there are marks for.

        Args:
            arguments: `SelectArguments`.
            cells: the outputs.
            row: the row.
            shared: the list; the marks take what it leaves.
            place: this thread.
            grid: the row; this CTA's vectors are neighbours.
            found: the k-th best key.
            direct: nothing is in the list.
            unlisted: keys equal to the k-th best are not.
        """
        begin = cutlass.max(grid.first * 4 - grid.skew, Int32(0))
        size = cutlass.min(grid.limit * 4 - grid.skew, grid.count) - begin
        mirrored = has(arguments.flags, TIES_HIGHEST)
        quota = arguments.k - found.above - found.ties  # of the keys equal to the k-th best
        base = found.lower + cutlass.min(found.ties, arguments.k - found.above)
        count = shared.sCount[0]
        if direct:
            count = Int32(0)
        marks = self.place_marks(shared, count, begin, size, mirrored)
        above = Int32(0)
        ties = Int32(0)
        while marks.first < size:
            for i in cutlass.range(place.tid, 2 * marks.words, self.threads, unroll=1):
                kops.store_word(marks.better + i * 4, Uint32(0))
            cute.arch.sync_threads()
            for i in cutlass.range(place.tid, count, self.threads, unroll=1):
                entry = shared.sList[i]
                key = Uint32(entry >> Uint64(32))
                self.mark(marks, found, key, Int32(entry & Uint64(0xFFFFFFFF)), Boolean(True))
            if direct or (unlisted and quota > Int32(0)):
                self.mark_row(place, grid, marks, found, size, direct)
            cute.arch.sync_threads()
            above, ties = self.write_marked(arguments, cells, row, shared, place, marks, base, quota, above, ties)
            marks = marks._replace(first=marks.first + marks.words * 32)

    @cute.jit
    def place_marks(self, shared: Shared, count: Int32, begin: Int32, size: Int32, mirrored: Boolean) -> Marks:
        """Finds room for marks: behind the list's entries, or where the queues were."""
        address = Int32(shared.sList.iterator.toint()) + ((count + 1) & ~1) * 8
        room = (Int32(self.capacity) - ((count + 1) & ~1)) * 2
        if room < Int32(self.warps * self.depth):
            address = Int32(shared.sQueue.iterator.toint())
            room = Int32(self.warps * self.depth)
        words = cutlass.min(room >> 1, (cutlass.max(size, Int32(0)) + 31) >> 5)
        origin = begin
        sign = Int32(1)
        if mirrored:
            origin = begin + size - 1
            sign = Int32(-1)
        return Marks(address, address + words * 4, words, origin, sign, Int32(0))

    @cute.jit
    def mark(self, marks: Marks, found: Range, key: Uint32, element: Int32, all_: Boolean):
        """Marks an element that is in the part; one that is better than the k-th best only if `all_`."""
        at = (element - marks.origin) * marks.sign - marks.first
        if key >= found.low and Uint32(at) < Uint32(marks.words * 32):
            address = marks.better
            if key == found.low:
                address = marks.equal
            if all_ or key == found.low:
                kops.mark(address + (at >> 5) * 4, Uint32(1) << Uint32(at & 31))

    @cute.jit
    def mark_row(self, place: Place, grid: Grid, marks: Marks, found: Range, size: Int32, all_: Boolean):
        """Marks elements from the row."""
        last = cutlass.min(marks.first + marks.words * 32, size) - 1
        one = marks.origin + marks.sign * marks.first
        other = marks.origin + marks.sign * last
        first = (cutlass.min(one, other) + grid.skew) >> 2
        end = ((cutlass.max(one, other) + grid.skew) >> 2) + 1
        for vector in cutlass.range(first + place.tid, end, self.threads, unroll=2):
            words = self.load_vector(grid, vector, Boolean(True))
            keys, valid = self.keys_of(grid, vector, Boolean(True), words)
            for e in cutlass.range_constexpr(4):
                if (valid & Uint32(1 << e)) != Uint32(0):
                    self.mark(marks, found, keys[e], vector * 4 - grid.skew + e, all_)

    @cute.jit
    def write_marked(
        self,
        arguments,
        cells: Cells,
        row: Window,
        shared: Shared,
        place: Place,
        marks: Marks,
        base: Int32,
        quota: Int32,
        above: Int32,
        ties: Int32,
    ):
        """Writes the marked elements; all threads have the same number of words, one after another.

        Args:
            arguments: `SelectArguments`.
            cells: the outputs.
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
        each = (marks.words + (self.threads - 1)) // self.threads
        first = place.tid * each
        end = cutlass.min(first + each, marks.words)
        packed = Int32(0)
        for i in cutlass.range(first, end, unroll=1):
            packed = packed + Int32(cute.arch.popc(kops.load_word(marks.better + i * 4)))
            packed = packed + (Int32(cute.arch.popc(kops.load_word(marks.equal + i * 4))) << TIE_SHIFT)
        upto = packed
        for fold in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(upto, 1 << fold)
            if place.lane >= Int32(1 << fold):
                upto = upto + before
        if place.lane == Int32(31):
            shared.sSample[place.warp] = Uint32(upto)
        cute.arch.sync_threads()
        sums = Int32(0)
        if place.lane < Int32(self.warps):
            sums = Int32(shared.sSample[place.lane])
        all_ = cute.arch.warp_redux_sync(sums, "add")
        if place.lane >= place.warp:
            sums = Int32(0)
        before = cute.arch.warp_redux_sync(sums, "add") + upto - packed
        mask = Int32((1 << TIE_SHIFT) - 1)
        place_above = above + (before & mask)
        place_equal = ties + Int32(Uint32(before) >> Uint32(TIE_SHIFT))
        if packed != Int32(0):
            for i in cutlass.range(first, end, unroll=1):
                better = kops.load_word(marks.better + i * 4)
                equal = kops.load_word(marks.equal + i * 4)
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
                            self.write_cell(arguments, cells, row, position, marks.origin + marks.sign * number)
                    if is_tie:
                        place_equal = place_equal + 1
                    else:
                        place_above = place_above + 1
        cute.arch.sync_threads()
        return above + (all_ & mask), ties + Int32(Uint32(all_) >> Uint32(TIE_SHIFT))
