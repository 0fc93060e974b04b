"""The ordered output of the `cluster` family; part of `cluster_kernel`, where it is explained."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from ._cute_flags import TIES_HIGHEST
from ._cute_rows import Cells, has
from .cluster_emit import Emit
from .cluster_layout import Grid, Place, Range, Shared, Window


class Turn(NamedTuple):
    """Where a warp is in its part of the row, and what it takes of it. All but `found` is of this CTA."""

    found: Range
    above: Int32  # keys before that are better than the k-th best
    equal: Int32  # keys before that are equal to it
    first: Int32  # of the equal ones, those from this one
    count: Int32  # on are taken
    base: Int32  # place of the CTA's first element in the output


class Order(Emit):
    """Step 6 with indices that ascend: every warp has a part of the row, and counts it before it writes."""

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
        listed: Boolean,
    ):
        """Writes what is selected of this CTA's part of the row, in order.

        Args:
            arguments: `SelectArguments`.
            cells: the outputs.
            row: the row.
            shared: the chains hold all that may be selected, if `listed`.
            place: this thread.
            grid: the row; a warp's vectors are neighbours.
            found: the k-th best key.
            listed: whether the chains are read, or the row again.
        """
        turn = Turn(found, Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        head = self.walk_end(arguments, cells, row, place, grid, turn, True, False)
        mine = turn
        if listed:
            mine = self.walk_chain(arguments, cells, row, shared, place, turn, False)
        else:
            mine = self.walk_row(arguments, cells, row, place, grid, turn, False)
        tail = self.walk_end(arguments, cells, row, place, grid, turn, False, False)
        scratch = shared.sSample
        cute.arch.sync_threads()
        if place.lane == Int32(0):
            scratch[place.warp] = mine.above
            scratch[32 + place.warp] = mine.equal
        cute.arch.sync_threads()
        above = Int32(0)
        equal = Int32(0)
        if place.lane < Int32(self.warps):
            above = scratch[place.lane]
            equal = scratch[32 + place.lane]
        all_above = head.above + cute.arch.warp_redux_sync(above, "add")
        all_equal = head.equal + cute.arch.warp_redux_sync(equal, "add")
        total = all_equal + tail.equal
        wanted = arguments.k - found.above
        base = found.lower + cutlass.min(found.ties, wanted)
        first = Int32(0)
        count = cutlass.max(cutlass.min(wanted - found.ties, total), Int32(0))
        if has(arguments.flags, TIES_HIGHEST):
            base = found.lower + cutlass.max(wanted - total - found.later, Int32(0))
            count = cutlass.max(cutlass.min(wanted - found.later, total), Int32(0))
            first = total - count
        turn = Turn(found, Int32(0), Int32(0), first, count, base)
        if place.warp == Int32(0):
            self.walk_end(arguments, cells, row, place, grid, turn, True, True)
            last = turn._replace(above=all_above, equal=all_equal)
            self.walk_end(arguments, cells, row, place, grid, last, False, True)
        if place.lane >= place.warp:
            above = Int32(0)
            equal = Int32(0)
        turn = turn._replace(
            above=head.above + cute.arch.warp_redux_sync(above, "add"),
            equal=head.equal + cute.arch.warp_redux_sync(equal, "add"),
        )
        if listed:
            self.walk_chain(arguments, cells, row, shared, place, turn, True)
        else:
            self.walk_row(arguments, cells, row, place, grid, turn, True)

    @cute.jit
    def walk_end(
        self,
        arguments,
        cells: Cells,
        row: Window,
        place: Place,
        grid: Grid,
        turn: Turn,
        head: cutlass.Constexpr[bool],
        writing: cutlass.Constexpr[bool],
    ) -> Turn:
        """Counts, or writes, the scores before the CTA's first vector or after its last."""
        there, element, key = self.load_end(place, grid)
        if (place.lane < Int32(8)) != Boolean(head) or not there:
            key = Int32(-1)
        return self.walk_keys(arguments, cells, row, place, turn, key, element, writing)

    @cute.jit
    def walk_chain(
        self,
        arguments,
        cells: Cells,
        row: Window,
        shared: Shared,
        place: Place,
        turn: Turn,
        writing: cutlass.Constexpr[bool],
    ) -> Turn:
        """Counts, or writes, the keys of this warp's chain."""
        at = shared.sChain[place.warp]
        while at >= Int32(0):
            link = Uint32(shared.sList[at] & Uint64(0xFFFFFFFF))
            size = Int32(link >> Uint32(16))
            for start in cutlass.range(0, size, 32, unroll=1):
                key = Int32(-1)
                element = Int32(0)
                if start + place.lane < size:
                    entry = shared.sList[at + 1 + start + place.lane]
                    key = Int32(entry >> Uint64(32))
                    element = Int32(entry & Uint64(0xFFFFFFFF))
                turn = self.walk_keys(arguments, cells, row, place, turn, key, element, writing)
            at = Int32(link & Uint32(0xFFFF))
            if at == Int32(0):
                at = Int32(-1)
        return turn

    @cute.jit
    def walk_keys(
        self,
        arguments,
        cells: Cells,
        row: Window,
        place: Place,
        turn: Turn,
        key: Int32,
        element: Int32,
        writing: cutlass.Constexpr[bool],
    ) -> Turn:
        """Counts, or writes, a key a lane, in the order of the lanes."""
        is_tie = key == turn.found.low
        above = cute.arch.vote_ballot_sync(key > turn.found.low)
        equal = cute.arch.vote_ballot_sync(is_tie)
        if const_expr(writing):
            if key >= turn.found.low:
                before_above = turn.above + cute.arch.popc(above & place.below)
                before_equal = turn.equal + cute.arch.popc(equal & place.below)
                self.write_in_order(arguments, cells, row, turn, element, is_tie, before_above, before_equal)
        return turn._replace(above=turn.above + cute.arch.popc(above), equal=turn.equal + cute.arch.popc(equal))

    @cute.jit
    def write_in_order(
        self,
        arguments,
        cells: Cells,
        row: Window,
        turn: Turn,
        element: Int32,
        is_tie: Boolean,
        above: Int32,
        equal: Int32,
    ):
        """Writes an element that is not below the k-th best, if it is taken.

        Args:
            arguments: `SelectArguments`.
            cells: the outputs.
            row: the row.
            turn: what is taken.
            element: the element.
            is_tie: whether its key is equal to the k-th best.
            above: the CTA's keys before it that are better than the k-th best.
            equal: those that are equal to it.
        """
        tie = equal - turn.first
        if not is_tie or (tie >= Int32(0) and tie < turn.count):
            position = turn.base + above + cutlass.max(cutlass.min(tie, turn.count), Int32(0))
            if position < arguments.k:
                self.write_cell(arguments, cells, row, position, element)

    @cute.jit
    def walk_row(
        self,
        arguments,
        cells: Cells,
        row: Window,
        place: Place,
        grid: Grid,
        turn: Turn,
        writing: cutlass.Constexpr[bool],
    ) -> Turn:
        """Counts, or writes, the scores of this warp's vectors."""
        vector = grid.first
        words = self.load_vector(grid, vector, Boolean(True))
        while cute.arch.vote_any_sync(vector < grid.limit):
            keys = self.keys_of(words)
            element = self.element_of(grid, vector)
            valid = vector < grid.limit
            vector = vector + grid.step
            words = self.load_vector(grid, vector, Boolean(True))
            above = Uint32(0)
            equal = Uint32(0)
            for e in cutlass.range_constexpr(self.elements):
                key = Uint32(self.key(keys, e))
                above = ops.or_if_in_range(above, key, Uint32(turn.found.low + 1), Uint32(0xFFFF), 1 << e)
                equal = ops.or_if_equal(equal, key, Uint32(turn.found.low), 1 << e)
            if not valid:
                above = Uint32(0)
                equal = Uint32(0)
            if cute.arch.vote_any_sync((above | equal) != Uint32(0)):
                packed = Int32(cute.arch.popc(above)) | (Int32(cute.arch.popc(equal)) << 16)
                upto = packed
                for fold in cutlass.range_constexpr(5):
                    before = cute.arch.shuffle_sync_up(upto, 1 << fold)
                    if place.lane >= Int32(1 << fold):
                        upto = upto + before
                if const_expr(writing):
                    before_above = turn.above + ((upto - packed) & 0xFFFF)
                    before_equal = turn.equal + ((upto - packed) >> 16)
                    left = above | equal
                    while left != Uint32(0):
                        e = ops.find_first_set(left)
                        bit = left & (Uint32(0) - left)
                        left = left ^ bit
                        is_tie = (equal & bit) != Uint32(0)
                        self.write_in_order(
                            arguments, cells, row, turn, element + e, is_tie, before_above, before_equal
                        )
                        if is_tie:
                            before_equal = before_equal + 1
                        else:
                            before_above = before_above + 1
                all_ = cute.arch.shuffle_sync(upto, 31)
                turn = turn._replace(above=turn.above + (all_ & 0xFFFF), equal=turn.equal + (all_ >> 16))
        return turn
