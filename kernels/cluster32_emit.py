"""The output of the f32 kernel of the `cluster` family; explained in `cluster32_kernel`."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64

from . import _cute_ops as ops
from ._cute_rows import Cells, store_index, transformed
from .cluster32_layout import AHEAD, TOP, Grid, Layout, Place, Range, Shared, Window


class Share(NamedTuple):
    """Which places of the output are this CTA's."""

    first: Int32  # of its keys better than the k-th best
    first_tie: Int32  # of its keys equal to it
    ties: Int32  # how many of these it writes


class Emit(Layout):
    """Step 6: every CTA writes its own selected elements."""

    @cute.jit
    def write_cell(self, arguments, cells: Cells, row: Window, position: Int32, element: Int32):
        """Writes one cell: an element, or -1."""
        index = Int64(-1)
        if element >= Int32(0):
            index = transformed(arguments, cells, Int64(element))
        store_index(arguments, cells, Int64(position), index)
        if cells.values != Int64(0):
            bits = cells.fill
            if index >= Int64(0):
                bits = ops.load_score(row.base + Int64(element) * 4, ops.F32)
            ops.store_score(cells.values + Int64(position) * 4, bits, ops.F32)

    @cute.jit
    def write_short(self, arguments, cells: Cells, row: Window, place: Place):
        """All elements of a row that has no more than k, then -1s."""
        first = place.rank * self.threads + place.tid
        for position in cutlass.range(first, arguments.k, self.cluster * self.threads, unroll=1):
            element = position
            if position >= row.count:
                element = Int32(-1)
            self.write_cell(arguments, cells, row, position, element)

    @cute.jit
    def share_ties(self, arguments, found: Range) -> Share:
        """Shares the missing keys equal to the k-th best out among the CTAs, as many as each has in proportion."""
        missing = arguments.k - found.above  # at most 4,096, and of a CTA at most 65,535 keys are known of
        total = Uint32(cutlass.max(found.inside, Int32(1)))
        first = Int32(Uint32(missing * found.ties) // total)
        end = Int32(Uint32(missing * (found.ties + found.own)) // total)
        return Share(found.lower, found.above + first, end - first)

    @cute.jit
    def write(
        self, arguments, cells: Cells, row: Window, share: Share, element: Int32, is_tie: Boolean, place_of: Int32
    ):
        """Writes one selected element; of the ties this CTA's share."""
        position = share.first + place_of
        if is_tie:
            position = share.first_tie + place_of
        if (not is_tie or place_of < share.ties) and position < arguments.k:
            self.write_cell(arguments, cells, row, position, element)

    @cute.jit
    def reserve(self, shared: Shared, place: Place, above: Int32, equal: Int32):
        """Takes places for a warp's keys above the k-th best and equal to it; returns the first of each."""
        place_above = Int32(0)
        place_equal = Int32(0)
        if place.lane == Int32(0):
            place_above = cute.arch.atomic_add(shared.sCount.iterator + 1, above)
            place_equal = cute.arch.atomic_add(shared.sCount.iterator + 2, equal)
        return cute.arch.shuffle_sync(place_above, 0), cute.arch.shuffle_sync(place_equal, 0)

    @cute.jit
    def emit_list(self, arguments, cells: Cells, row: Window, shared: Shared, place: Place, found: Range, share: Share):
        """Writes what is selected of this CTA's list."""
        count = shared.sCount[0]
        ties_wanted = share.ties > Int32(0)
        for first in cutlass.range(place.warp * 32, count, self.threads, unroll=1):
            index = first + place.lane
            key = Uint32(0)
            element = Int32(0)
            inside = index < count
            if inside:
                entry = shared.sList[index]
                key = Uint32(entry >> Uint64(32))
                element = Int32(entry & Uint64(0xFFFFFFFF))
            is_tie = inside and key == found.low and ties_wanted
            taken = inside and key > found.low
            above = cute.arch.vote_ballot_sync(taken)
            equal = cute.arch.vote_ballot_sync(is_tie)
            if (above | equal) != Int32(0):
                place_above, place_equal = self.reserve(shared, place, cute.arch.popc(above), cute.arch.popc(equal))
                if taken or is_tie:
                    place_of = place_above + cute.arch.popc(above & place.below)
                    if is_tie:
                        place_of = place_equal + cute.arch.popc(equal & place.below)
                    self.write(arguments, cells, row, share, element, is_tie, place_of)

    @cute.jit
    def step_vector(self, place: Place, grid: Grid, step: Int32) -> Int32:
        """This thread's vector of a step: slot by slot, batch by batch."""
        return self.vector_of(place, grid, step >> (self.vectors.bit_length() - 1), step & (self.vectors - 1))

    @cute.jit
    def load_step(self, place: Place, grid: Grid, step: Int32, steps: Int32):
        """Loads this thread's vector of a step, if there is one and it lies whole in the row."""
        vector = self.step_vector(place, grid, step)
        return self.load_vector(grid, vector, step < steps and vector < grid.limit)

    @cute.jit
    def emit_row(
        self,
        arguments,
        cells: Cells,
        row: Window,
        shared: Shared,
        place: Place,
        grid: Grid,
        found: Range,
        share: Share,
        all_: Boolean,
    ):
        """Writes what is selected of this CTA's part of the row; if not `all_` only keys equal to the k-th best."""
        span = Uint32(0)
        if all_:
            span = Uint32(TOP) - found.low
        wanted = share.ties
        step = Int32(0)
        steps = grid.batches * self.vectors
        if not all_ and wanted <= Int32(0):
            steps = Int32(0)
        ahead = [self.load_step(place, grid, Int32(i), steps) for i in range(AHEAD)]
        while step < steps:
            vector = self.step_vector(place, grid, step)
            keys, valid = self.keys_of(grid, vector, vector < grid.limit, ahead[0])
            ahead = [*ahead[1:], self.load_step(place, grid, step + AHEAD, steps)]
            step = step + 1
            taken = Uint32(0)
            equal = Uint32(0)
            for e in cutlass.range_constexpr(self.elements):
                taken = ops.or_if_in_range(taken, keys[e], found.low, span, 1 << e)
                equal = ops.or_if_equal(equal, keys[e], found.low, 1 << e)
            taken = taken & valid
            equal = equal & valid
            if cute.arch.vote_any_sync(taken != Uint32(0)):
                packed = Int32(cute.arch.popc(taken & ~equal)) | (Int32(cute.arch.popc(equal)) << 16)
                upto = packed
                for fold in cutlass.range_constexpr(5):
                    before = cute.arch.shuffle_sync_up(upto, 1 << fold)
                    if place.lane >= Int32(1 << fold):
                        upto = upto + before
                both = cute.arch.shuffle_sync(upto, 31)
                place_above, place_equal = self.reserve(shared, place, both & 0xFFFF, both >> 16)
                if not all_ and place_equal + (both >> 16) >= wanted:
                    steps = Int32(0)
                place_above = place_above + ((upto - packed) & 0xFFFF)
                place_equal = place_equal + ((upto - packed) >> 16)
                while taken != Uint32(0):
                    e = ops.find_first_set(taken)
                    bit = Uint32(1) << Uint32(e)
                    taken = taken & ~bit
                    is_tie = (equal & bit) != Uint32(0)
                    place_of = place_above
                    if is_tie:
                        place_of = place_equal
                        place_equal = place_equal + 1
                    else:
                        place_above = place_above + 1
                    self.write(arguments, cells, row, share, self.element_of(grid, vector) + e, is_tie, place_of)
