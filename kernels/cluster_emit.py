"""The output of the `cluster` family; part of `cluster_kernel`, where it is explained."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_flags import DROP_NEG_INF, EXPAND, OUT_INT64
from ._cute_rows import Cells, has, store_index, transformed, write_cell
from .cluster_layout import Grid, Layout, Place, Range, Shared, Window

AHEAD = 4  # vectors of a thread on their way where a row is read for output
MANY_TIES = 1024


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
        if self.is_plain(arguments):
            ops.store_int32(cells.indices + Int64(position) * 4, element)
        else:
            self.write_any_cell(arguments, cells, row, position, element)

    @cute.jit
    def is_plain(self, arguments) -> Boolean:
        """Whether cells are the elements themselves, as int32, without values."""
        transforms = arguments.page_table | arguments.row_offsets | arguments.out_values
        other = OUT_INT64 | EXPAND if self.grouped else OUT_INT64
        return transforms == Int64(0) and not has(arguments.flags, other)

    @cute.jit
    def write_any_cell(self, arguments, cells: Cells, row: Window, position: Int32, element: Int32):
        """Writes one cell in any form."""
        if const_expr(self.grouped):
            bits = cells.fill
            if cells.values != Int64(0) and element >= Int32(0):
                bits = self.value_of(self.key_of_group(row, element))
            write_cell(arguments, cells, row, position, element, bits, (2, self.dtype))
        else:
            index = Int64(-1)
            if element >= Int32(0):
                index = transformed(arguments, cells, Int64(element))
            store_index(arguments, cells, Int64(position), index)
            if cells.values != Int64(0):
                bits = cells.fill
                if index >= Int64(0):
                    bits = ops.load_score(row.base + Int64(element) * 2, self.dtype)
                ops.store_score(cells.values + Int64(position) * 2, bits, self.dtype)

    @cute.jit
    def key_of_group(self, row: Window, element: Int32) -> Int32:
        """The key of a group, from the row."""
        best = Int32(0)
        for i in cutlass.range_constexpr(8):
            there = Int64(element) * 8 + i < row.length
            score = cops.load_element(row.base + Int64(element) * 16 + 2 * i, there)
            key = Int32(cops.word_keys(score, self.largest, self.dtype) & Uint32(0xFFFF))
            if there:
                best = cutlass.max(best, key)
        return best

    @cute.jit
    def value_of(self, key: Int32) -> Uint32:
        """The value of a group: NaN as the quiet NaN."""
        bits = Uint32(key ^ 0x8000)
        if key < Int32(0x8000):
            bits = Uint32(key ^ 0xFFFF)
        if key == Int32(cops.NAN_KEY):
            bits = Uint32(ops.QUIET_NAN_TOP[self.dtype] >> 16)
        return bits

    @cute.jit
    def drops(self, arguments, key: Int32) -> Boolean:
        """Whether elements of a key are written as -1."""
        lowest = 0x7FFF - (ops.INF_TOP[self.dtype] >> 16)
        return has(arguments.flags, DROP_NEG_INF) and key == Int32(lowest)

    @cute.jit
    def write_pinned(self, arguments, cells: Cells, row: Window):
        """Writes the row's last element into its last cell."""
        infinity = Uint32(ops.INF_TOP[self.dtype] >> 16)
        write_cell(arguments, cells, row, arguments.k - 1, row.count - 1, infinity, (2, self.dtype))

    @cute.jit
    def write_short(self, arguments, cells: Cells, row: Window, place: Place, pinned: Int32):
        """All elements of a row that has no more than k, then -1s."""
        first = place.rank * self.threads + place.tid
        for position in cutlass.range(first, arguments.k, self.cluster * self.threads, unroll=1):
            element = position
            if position >= row.count:
                element = Int32(-1)
            if const_expr(self.grouped):
                if element >= Int32(0) and element < row.count - pinned and has(arguments.flags, DROP_NEG_INF):
                    if self.drops(arguments, self.key_of_group(row, element)):
                        element = Int32(-1)
                if pinned > Int32(0) and position == row.count - 1:
                    self.write_pinned(arguments._replace(k=row.count), cells, row)
                else:
                    self.write_cell(arguments, cells, row, position, element)
            else:
                self.write_cell(arguments, cells, row, position, element)

    @cute.jit
    def share_ties(self, arguments, found: Range) -> Share:
        """Shares the missing keys equal to the k-th best out among the CTAs.

        If there are many, each CTA writes as many as it has in proportion, so that none has to look for all of them.
        """
        missing = arguments.k - found.above  # at most 4,096, and of a CTA at most 65,535 keys are known of
        if const_expr(self.cluster == 1):
            return Share(Int32(0), found.above, missing)
        first = cutlass.min(found.ties, missing)
        end = cutlass.min(found.ties + found.own, missing)
        if found.inside >= Int32(MANY_TIES):
            first = Int32(Uint32(missing * found.ties) // Uint32(found.inside))
            end = Int32(Uint32(missing * (found.ties + found.own)) // Uint32(found.inside))
        return Share(found.lower, found.above + first, end - first)

    @cute.jit
    def write(
        self,
        arguments,
        cells: Cells,
        row: Window,
        found: Range,
        share: Share,
        element: Int32,
        is_tie: Boolean,
        place_of: Int32,
    ):
        """Writes one selected element; of the ties this CTA's share."""
        position = share.first + place_of
        if is_tie:
            position = share.first_tie + place_of
        if const_expr(self.grouped):
            if is_tie and self.drops(arguments, found.low):
                element = Int32(-1)
        if (not is_tie or place_of < share.ties) and position < arguments.k:
            self.write_cell(arguments, cells, row, position, element)

    @cute.jit
    def reserve(self, shared: Shared, place: Place, packed: Int32, lane: int) -> Int32:
        """Takes places for a warp's keys above the cutoff and equal to it, the latter in the upper half.

        Args:
            shared: counts what was taken; the equal ones are not let grow far beyond what is wanted.
            place: this thread.
            packed: how many of each, in lane `lane`; 0 tells how many were taken.
            lane: which lane has them.

        Returns:
            The first place of each.
        """
        first = Int32(0)
        if place.lane == Int32(lane):
            first = cute.arch.atomic_add(shared.sCount.iterator + 1, packed)
        return cute.arch.shuffle_sync(first, lane)

    @cute.jit
    def emit_list(self, arguments, cells: Cells, row: Window, shared: Shared, place: Place, found: Range, share: Share):
        """Writes what is selected of this CTA's list."""
        count = shared.sCount[0]
        for first in cutlass.range(place.warp * 32, count, self.threads, unroll=1):
            index = first + place.lane
            key = Int32(-1)
            element = Int32(0)
            if index < count:
                entry = shared.sList[index]
                key = Int32(entry >> Uint64(32))
                element = Int32(entry & Uint64(0xFFFFFFFF))
            self.emit_keys(arguments, cells, row, shared, place, found, share, key, element)

    @cute.jit
    def emit_keys(
        self,
        arguments,
        cells: Cells,
        row: Window,
        shared: Shared,
        place: Place,
        found: Range,
        share: Share,
        key: Int32,
        element: Int32,
    ):
        """Writes what is selected of a key a lane."""
        is_tie = key == found.low and share.ties > Int32(0)
        above = cute.arch.vote_ballot_sync(key > found.low)
        equal = cute.arch.vote_ballot_sync(is_tie)
        if (above | equal) != Int32(0):
            packed = cute.arch.popc(above) | (cute.arch.popc(equal) << 16)
            first = self.reserve(shared, place, packed, 0)
            if key > found.low or is_tie:
                place_of = (first & 0xFFFF) + cute.arch.popc(above & place.below)
                if is_tie:
                    place_of = (first >> 16) + cute.arch.popc(equal & place.below)
                self.write(arguments, cells, row, found, share, element, is_tie, place_of)

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
        """Writes what is selected of this CTA's part of the row; if not `all_` only keys equal to the k-th best.

        The row is read AHEAD vectors of a thread at a time, first only one if that should do, until all warps together
        have found enough.
        """
        steps = grid.batches * self.vectors
        if not all_ and share.ties <= Int32(0):
            steps = Int32(0)
        if steps > Int32(0) or grid.batches == Int32(0):
            if self.has_ends(place, grid):
                there, element, key = self.load_end(place, grid)
                if not there or (key != found.low and not all_):
                    key = Int32(-1)
                self.emit_keys(arguments, cells, row, shared, place, found, share, key, element)
        cutoff = cops.cutoff_of(found.low, self.largest, self.dtype)
        enough = share.ties <= Int32(0)
        count = Int32(AHEAD)
        if Uint32(share.ties * steps) <= Uint32(found.own) and not all_:
            count = Int32(1)
        step = Int32(0)
        while step < steps:
            at = grid.first + step * grid.step
            step = step + count
            words = [self.load_vector(grid, at + i * grid.step, Int32(i) < count) for i in range(AHEAD)]
            above = Uint32(0)
            equal = Uint32(0)
            for i in cutlass.range_constexpr(AHEAD):
                if Int32(i) < count:
                    better, same = self.compare(words[i], cutoff)
                    if at + i * grid.step < grid.limit:
                        above = above | (better << Uint32(i * self.elements))
                        equal = equal | (same << Uint32(i * self.elements))
            if not all_:
                above = Uint32(0)
            if enough:
                equal = Uint32(0)
            taken = above | equal
            if cute.arch.vote_any_sync(taken != Uint32(0)):
                packed = Int32(cute.arch.popc(above)) | (Int32(cute.arch.popc(equal)) << 16)
                upto = packed
                for fold in cutlass.range_constexpr(5):
                    before = cute.arch.shuffle_sync_up(upto, 1 << fold)
                    if place.lane >= Int32(1 << fold):
                        upto = upto + before
                first = self.reserve(shared, place, upto, 31)
                place_above = (first & 0xFFFF) + ((upto - packed) & 0xFFFF)
                place_equal = (first >> 16) + ((upto - packed) >> 16)
                if place_equal >= share.ties:
                    taken = above
                while taken != Uint32(0):
                    e = ops.find_first_set(taken)
                    bit = Uint32(1) << Uint32(e)
                    taken = taken & ~bit
                    is_tie = (equal & bit) != Uint32(0)
                    place_of = place_above
                    if is_tie:
                        place_of = place_equal
                        place_equal = place_equal + 1
                        if place_equal >= share.ties:
                            taken = taken & above
                    else:
                        place_above = place_above + 1
                    vector = at + (e >> (self.elements.bit_length() - 1)) * grid.step
                    element = self.element_of(grid, vector) + (e & (self.elements - 1))
                    self.write(arguments, cells, row, found, share, element, is_tie, place_of)
            enough = (self.reserve(shared, place, Int32(0), 0) >> 16) >= share.ties  # by all warps together
            if enough and not all_:
                steps = Int32(0)
            count = Int32(AHEAD)

    @cute.jit
    def compare(self, words, cutoff: cops.Cutoff):
        """Which elements of a vector are better than a cutoff, and which are equal to it: a bit each."""
        if const_expr(self.grouped):
            better, same = cops.split([self.best_of(words)], cutoff, self.largest, self.dtype)
            return better & Uint32(1), same & Uint32(1)
        return cops.split(words, cutoff, self.largest, self.dtype)
