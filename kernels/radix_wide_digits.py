"""How the `radix_wide` family finds the cutoff, digit by digit; part of `radix_wide_kernel`, where it is explained."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from ._cute_rows import Row
from .radix_wide_layout import BINS, ROUNDS, THREADS, WARPS, Cut, Cutoff, Grid, Layout, Shared


class Digits(Layout):
    """Counts digits of the row or of the list, finds the bin of the k-th best, and makes a range of it."""

    @cute.jit
    def count_row(self, grid: Grid, shared: Shared, prefix: Uint32, known: Int32, first: cutlass.Constexpr[bool]):
        """Counts the next digit of the row's elements that share the known prefix (`first`: of all)."""
        tid, _, _ = cute.arch.thread_idx()
        lane = tid & 31
        base = Uint32(shared.sCount.iterator.toint())
        column = Uint32(lane) << Uint32(2)
        limit = Uint32(0xFFFFFFFF) >> Uint32(known)
        shift = Uint32(cutlass.max(Int32(24) - known, Int32(0)))
        differ, ones, any_ones = Uint32(0), Uint32(0xFFFFFFFF), Uint32(0)
        for tile in range(grid.tiles):
            vectors = self.load_tile(grid, tile)
            for j in cutlass.range_constexpr(ROUNDS):
                v = tile * (ROUNDS * THREADS) + j * THREADS + tid
                bits = self.valid_slots(grid, v)
                scores = ops.top_aligned(vectors[j], self.dtype)
                if const_expr(first and not self.grouped):
                    if bits == Uint32(self.whole):
                        for e in cutlass.range_constexpr(self.per_vector):
                            ops.count_one(column | ((scores[e] >> Uint32(17)) & Uint32(0x7F80)), base)
                        if const_expr(self.size == 4):
                            for e in cutlass.range_constexpr(1, self.per_vector):
                                differ = ops.or_of_difference(differ, scores[0], scores[e])
                            ones = ones & scores[0]
                            any_ones = any_ones | scores[0]
                        bits = Uint32(0)
                if const_expr(not first and not self.grouped):
                    if bits == Uint32(self.whole):
                        for e in cutlass.range_constexpr(self.per_vector):
                            rest = scores[e] ^ prefix
                            counted = rest <= limit
                            ops.count_one_if(column | ((rest >> shift) << Uint32(7)), base, counted)
                            if const_expr(self.size == 4):
                                ones = ones & scores[e] if counted else ones
                                any_ones = any_ones | scores[e] if counted else any_ones
                        bits = Uint32(0)
                while bits != Uint32(0):
                    at = ops.find_first_set(bits)
                    bits = bits & (bits - Uint32(1))
                    score = self.pick_score(vectors[j], at)
                    rest = score ^ prefix
                    if rest <= limit:
                        ops.count_one(column | ((rest >> shift) << Uint32(7)), base)
                        ones = ones & score
                        any_ones = any_ones | score
        if const_expr(self.size == 4):
            self.save_seen(shared, differ, ones, any_ones)

    @cute.jit
    def save_seen(self, shared: Shared, differ: Uint32, ones: Uint32, any_ones: Uint32):
        """Saves which bits differ among the elements that this warp counted."""
        tid, _, _ = cute.arch.thread_idx()
        warp = tid >> 5
        differ = cute.arch.warp_redux_sync(differ, "or")
        ones = cute.arch.warp_redux_sync(ones, "and")
        any_ones = cute.arch.warp_redux_sync(any_ones, "or")
        if (tid & 31) == Int32(0):
            shared.sSeen[warp * 4] = differ
            shared.sSeen[warp * 4 + 1] = ones
            shared.sSeen[warp * 4 + 2] = any_ones

    @cute.jit
    def count_list(self, shared: Shared, entries: Int32, prefix: Uint32, known: Int32):
        """Counts the next digit of the list's entries that share the known prefix."""
        tid, _, _ = cute.arch.thread_idx()
        base = Uint32(shared.sCount.iterator.toint())
        column = Uint32(tid & 31) << Uint32(2)
        limit = Uint32(0xFFFFFFFF)
        if known > Int32(0):
            limit = Uint32(0xFFFFFFFF) >> Uint32(known)
        shift = Uint32(cutlass.max(Int32(24) - known, Int32(0)))
        for i in cutlass.range(tid, entries, THREADS):
            rest = Uint32(shared.sList[i] >> Uint64(32)) ^ prefix
            ops.count_one_if(column | ((rest >> shift) << Uint32(7)), base, rest <= limit)

    @cute.jit
    def digit_mask(self, row: Row, digit: Int32, prefix: Uint32, known: Int32) -> Int32:
        """What turns a digit into its place, best first, by exclusive or; 0 for the best.

        The first digit holds the sign: 0x7f .. 0x00, 0x80 .. 0xff if `largest`, the other way round if not. Later ones
        descend where the scores are positive and the largest are wanted, or neither.
        """
        largest = Int32(row.largest)
        mask = Int32(0xFF) * (largest ^ Int32(prefix >> Uint32(31)))
        if known == Int32(0):
            flip = Int32(1) ^ (Int32(1) - (digit >> 7)) ^ largest
            mask = (Int32(0x80) * (Int32(1) - largest)) ^ (Int32(0x7F) * flip)
        return mask

    @cute.jit
    def find_digit(self, row: Row, shared: Shared, old: Cutoff, seen: cutlass.Constexpr[bool]):
        """Folds and clears the counters, finds the bin that holds the k-th best; returns the new cutoff's fields.

        Every warp scans all totals, so that a barrier less is needed. With `seen`, bits of f32 scores that all counted
        elements share are skipped.
        """
        tid, _, _ = cute.arch.thread_idx()
        lane = tid & 31
        warp = tid >> 5
        cute.arch.sync_threads()
        mine = Int32(0)
        for b in cutlass.range_constexpr(BINS // WARPS):
            at = (warp * (BINS // WARPS) + b) * 32 + lane
            total = cute.arch.warp_redux_sync(shared.sCount[at], "add")
            shared.sCount[at] = Int32(0)
            mine = total if lane == Int32(b) else mine
        if lane < Int32(BINS // WARPS):
            digit = warp * (BINS // WARPS) + lane
            shared.sTotal[digit ^ self.digit_mask(row, digit, old.prefix, old.known)] = mine
        common, ones = Int32(0), Uint32(0)
        if const_expr(seen and self.size == 4):
            differ = cute.arch.warp_redux_sync(shared.sSeen[lane * 4], "or")
            ones = cute.arch.warp_redux_sync(shared.sSeen[lane * 4 + 1], "and")
            any_ones = cute.arch.warp_redux_sync(shared.sSeen[lane * 4 + 2], "or")
            common = ops.leading_zeros(differ | (ones ^ any_ones))
        cute.arch.sync_threads()
        counts = [shared.sTotal[lane * 8 + i] for i in range(8)]
        sum_of_8 = counts[0]
        for i in cutlass.range_constexpr(1, 8):
            sum_of_8 = sum_of_8 + counts[i]
        before = self.scan_lanes(sum_of_8) - sum_of_8
        place, better, inside = Int32(-1), Int32(0), Int32(0)
        for i in cutlass.range_constexpr(8):
            if before < old.need and before + counts[i] >= old.need:
                place, better, inside = lane * 8 + i, before, counts[i]
            before = before + counts[i]
        source = ops.find_first_set(Uint32(cute.arch.vote_ballot_sync(place >= Int32(0))))
        place = cute.arch.shuffle_sync(place, source)
        better = cute.arch.shuffle_sync(better, source)
        inside = cute.arch.shuffle_sync(inside, source)
        high = place
        if old.known == Int32(0) and not row.largest:
            high = place ^ Int32(0x80)
        digit = place ^ self.digit_mask(row, high, old.prefix, old.known)
        shift = cutlass.max(Int32(24) - old.known, Int32(0))
        prefix = old.prefix | (Uint32(digit) << Uint32(shift))
        known = Int32(32) - shift
        if const_expr(seen and self.size == 4):
            if common > known:
                known = common
                prefix = ones
                if common < Int32(32):
                    prefix = ones & (Uint32(0xFFFFFFFF) << Uint32(Int32(32) - common))
        return prefix, known, old.need - better, inside, old.above + better

    @cute.jit
    def cut(self, row: Row, at: Cutoff, settled: Boolean) -> Cut:
        """The range of scores that are taken: what is better than the bin, and the bin itself or ties of it.

        Where the cutoff is exact and not all of the bin is needed, the bin's elements are ties; else it is part of the
        range. Dropped scores (-inf) are left out of a settled range.
        """
        low = at.prefix
        high = at.prefix
        if at.known < Int32(32):
            high = at.prefix | (Uint32(0xFFFFFFFF) >> Uint32(at.known))
        negative = (at.prefix >> Uint32(31)) != Uint32(0)
        ties = at.known >= Int32(self.bits) and at.inside > at.need
        base, span = Uint32(ops.NEVER), Uint32(0)  # nothing
        tie, need, first = Uint32(ops.NEVER), Int32(0), Int32(0)
        if ties:
            tie, need = at.prefix, at.need
            if row.highest:
                first = at.inside - at.need
            if row.drop and at.prefix == Uint32(ops.INF_TOP[self.dtype] | 0x80000000):
                need = Int32(0)
            if row.largest:
                if negative:
                    base, span = Uint32(0), low - Uint32(1)
                elif high < Uint32(0x7FFFFFFF):
                    base, span = high + Uint32(1), Uint32(0x7FFFFFFE) - high
            else:
                if not negative:
                    base, span = Uint32(0x80000000), low + Uint32(0x7FFFFFFF)
                elif high < Uint32(0xFFFFFFFF):
                    base, span = high + Uint32(1), Uint32(0xFFFFFFFE) - high
        else:
            if at.known == Int32(0):
                base, span = Uint32(0), Uint32(0xFFFFFFFF)
            elif row.largest:
                if negative:
                    base, span = Uint32(0), high
                else:
                    base, span = low, Uint32(0x7FFFFFFF) - low
            else:
                if negative:
                    base, span = low, Uint32(0xFFFFFFFF) - low
                else:
                    base, span = Uint32(0x80000000), high + Uint32(0x80000000)
            if settled and row.drop and base == Uint32(0):
                span = cutlass.min(span, Uint32((ops.INF_TOP[self.dtype] | 0x80000000) - 1))
        return Cut(base, span, tie, first, need)
