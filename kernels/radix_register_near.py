"""How the `radix_register` family counts 16-bit keys once; part of `radix_register_kernel`, where it is explained.

Bins of one key each stand in two ranges, the FORE bins from `base`, at or a little before the row's best key, and
the others up to `bound`, which the k-th best does not exceed:

    keys   best .. base, base + 1, ..   base + FORE .. bound - (BINS - 1 - FORE), ..   bound | not counted
    bins      0            1 ..                  FORE                 FORE + 1 ..    BINS - 1

Where `bound` is no more than BINS - 1 keys behind `base` there is no gap, and all bins but the first are one key.
"""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from . import _cute_ops as ops
from . import radix_register_ops as rops
from .radix_register_layout import Layout, Place, Shared
from .radix_register_shape import BINS

FORE = BINS - 256
PART = {ops.BF16: 3, ops.F16: 8}
"""So much of a row must not be selected: the k-th best of more is too far from the best, past zero or by octaves."""
REACH = {ops.BF16: 1024, ops.F16: 256}
"""Keys from the first bin to the best of an ordinary part of the row: what is far ahead of that is in the first bin."""


class Near(NamedTuple):
    """Which bins there are; see the module."""

    best: Uint32
    base: Uint32
    bound: Uint32
    gap: Uint32  # keys from base + FORE that share a bin, less 1


class Bests(Layout):
    """Finds where bins are fine, and counts keys in them."""

    @cute.jit
    def note_bests(self, shared: Shared, place: Place, keys, need: Int32):
        """Notes the best key of each warp, and the worst of the bests of its threads' groups of keys.

        A thread has 1, 2 or 4 groups, so that there are at least `need` groups where that can be.
        """
        bests = []
        for i in cutlass.range_constexpr(4):
            best = keys[0][i]
            for j in cutlass.range_constexpr(1, self.rounds):
                best = rops.better_keys(best, keys[j][i], self.dtype, self.recent)
            bests.append(cutlass.min(best & Uint32(0xFFFF), best >> Uint32(16)))
        best = cutlass.min(cutlass.min(bests[0], bests[1]), cutlass.min(bests[2], bests[3]))
        worst = best
        if need > Int32(self.threads):
            worst = cutlass.max(cutlass.min(bests[0], bests[1]), cutlass.min(bests[2], bests[3]))
        if need > Int32(2 * self.threads):
            worst = cutlass.max(cutlass.max(bests[0], bests[1]), cutlass.max(bests[2], bests[3]))
        best = cute.arch.warp_redux_sync(best, "min")
        worst = cute.arch.warp_redux_sync(worst, "max")
        if place.lane == Int32(0):
            shared.sBests[place.warp] = best
            shared.sBests[self.warps + place.warp] = worst

    @cute.jit
    def find_near(self, shared: Shared, place: Place, need: Int32) -> Near:
        """Which bins suit the row, from what was noted before the last barrier.

        The worst of the groups' bests is a bound if there are `need` groups, and all have a key. A key that is far
        from the rest is the best of one warp: bins begin no more than REACH before the best of any four that follow
        each other.
        """
        address = Uint32(shared.sBests.iterator.toint()) + Uint32((place.lane & Int32(self.warps // 4 - 1)) * 16)
        bests = rops.load_four(address)
        worsts = rops.load_four(address + Uint32(self.warps * 4))
        best = cutlass.min(cutlass.min(bests[0], bests[1]), cutlass.min(bests[2], bests[3]))
        ordinary = cutlass.max(cutlass.max(bests[0], bests[1]), cutlass.max(bests[2], bests[3]))
        bound = cutlass.max(cutlass.max(worsts[0], worsts[1]), cutlass.max(worsts[2], worsts[3]))
        best = cute.arch.warp_redux_sync(best, "min")
        ordinary = cute.arch.warp_redux_sync(ordinary, "min")
        bound = cute.arch.warp_redux_sync(bound, "max")
        last = Uint32(self.none - 1)
        bound = last if need > Int32(4 * self.threads) else cutlass.min(bound, last)
        ordinary = best if ordinary > last else ordinary
        reach = Uint32(REACH[self.dtype])
        base = cutlass.max(best, cutlass.max(ordinary, reach) - reach)
        gap = cutlass.max(bound, base + Uint32(BINS - 1)) - (base + Uint32(BINS - 1))
        return Near(best, base, bound, gap)

    @cute.jit
    def count_nearest(self, words, near: Near, bins: Uint32):
        """Counts all keys up to the bound in the bins."""
        fore = cutlass.min(near.base + Uint32(FORE), Uint32(self.none))
        back = near.base + near.gap
        limit = near.bound - near.gap
        bins = bins - (near.base << Uint32(2))
        if const_expr(self.recent):
            base, fore, back = (one * Uint32(0x10001) for one in (near.base, fore, back))
            gap = near.gap * Uint32(0x10001)
            for word in words:
                one = rops.min_keys(rops.max_keys(word, base), fore)
                one = rops.max_keys(one, rops.max_keys(word, back) - gap)
                rops.count_upto(one & Uint32(0xFFFF), limit, bins)
                rops.count_upto(one >> Uint32(16), limit, bins)
        else:
            for word in words:
                for key in (word & Uint32(0xFFFF), word >> Uint32(16)):
                    one = cutlass.min(cutlass.max(key, near.base), fore)
                    one = cutlass.max(one, cutlass.max(key, back) - near.gap)
                    rops.count_upto(one, limit, bins)

    @cute.jit
    def near_range(self, near: Near, bin_: Int32):
        """The first and the last key of a bin."""
        low = near.base + Uint32(bin_)
        high = low
        if bin_ > Int32(FORE):
            low = low + near.gap
        if bin_ >= Int32(FORE):
            high = high + near.gap
        if bin_ == Int32(0):
            low = near.best
        return low, high
