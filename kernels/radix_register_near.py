"""How the `radix_register` family counts 16-bit keys once; part of `radix_register_kernel`, where it is explained.

A bin is one key of bf16 or eight of f16, a 128th of an octave. There are two ranges of them, from `base`, at or a
little before the row's best, and up to `bound`, which the k-th best does not exceed. Each is of 8 octaves, so that
where scores of both signs are wanted only tiny ones are between them:

    keys   best .. base, base + 1, ..   base + FORE .. bound - (BINS - 1 - FORE), ..   bound | what is behind
    bins        0           1 ..                  FORE                  FORE + 1 ..   BINS - 1    BINS

Where `bound` is no more than BINS - 1 bins behind `base` there is no gap, and all bins but the first are alike.
"""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from . import _cute_ops as ops
from . import radix_register_ops as rops
from .radix_register_layout import Layout, Place, Shared
from .radix_register_shape import BINS

FORE = BINS // 2
REACH = 512
"""Bins from `base` to the best of an ordinary part of the row, at most: what is far ahead of it is in the first bin."""
SHIFT = {ops.BF16: 0, ops.F16: 3}


class Near(NamedTuple):
    """Which bins there are; see the module."""

    best: Uint32  # a key
    base: Uint32  # key >> SHIFT
    gap: Uint32  # such steps from base + FORE that share a bin, less 1


class Bests(Layout):
    """Finds where bins are fine, and counts keys in them."""

    @cute.jit
    def share(self, place: Place, grid, need: Int32):
        """Two numbers in the ratio of `need` to the threads that have vectors; of those there may be more."""
        threads = grid.vectors
        if const_expr(self.rounds > 1):
            if place.step == Int32(32):  # warps follow each other
                need = need * place.rounds
            else:
                threads = cutlass.min(threads, Int32(self.threads))
        return need, threads

    @cute.jit
    def is_near(self, place: Place, grid, need: Int32, candidates: Int32) -> Boolean:
        """Whether the bins suit the row: no more than a third of it is selected, and there can be a bound."""
        wanted, threads = self.share(place, grid, need)
        return need * 3 <= candidates and wanted <= threads * 4

    @cute.jit
    def note_bests(self, shared: Shared, place: Place, grid, keys, need: Int32):
        """Notes the best key of each warp, and the worst of the bests of its groups of keys.

        A thread has as many groups, 1, 2 or 4, as make `need` in all, if `is_near`.
        """
        bests = []
        for i in cutlass.range_constexpr(4):
            best = keys[0][i]
            for j in cutlass.range_constexpr(1, self.rounds):
                best = rops.better_keys(best, keys[j][i], self.dtype, self.recent)
            bests.append(cutlass.min(best & Uint32(0xFFFF), best >> Uint32(16)))
        best = cutlass.min(cutlass.min(bests[0], bests[1]), cutlass.min(bests[2], bests[3]))
        worst = best
        wanted, threads = self.share(place, grid, need)
        if wanted > threads:
            worst = cutlass.max(cutlass.min(bests[0], bests[1]), cutlass.min(bests[2], bests[3]))
        if wanted > threads * 2:
            worst = cutlass.max(cutlass.max(bests[0], bests[1]), cutlass.max(bests[2], bests[3]))
        if place.first >= grid.vectors:
            worst = Uint32(0)
        best = cute.arch.warp_redux_sync(best, "min")
        worst = cute.arch.warp_redux_sync(worst, "max")
        if place.lane == Int32(0):
            shared.sBests[place.warp] = best
            shared.sBests[self.warps + place.warp] = worst

    @cute.jit
    def find_near(self, shared: Shared, place: Place) -> Near:
        """Which bins suit the row, from what was noted before the last barrier.

        The worst of the groups' bests is a bound if all have a key. A key that is far from the rest is the best of one
        warp: bins begin no more than REACH before the best of each of some four warps.
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
        bound = cutlass.min(bound, last)
        ordinary = best if ordinary > last else ordinary
        shift = Uint32(SHIFT[self.dtype])
        base = cutlass.max(ordinary >> shift, Uint32(REACH)) - Uint32(REACH)
        base = cutlass.max(base, best >> shift)
        gap = cutlass.max(bound >> shift, base + Uint32(BINS - 1)) - (base + Uint32(BINS - 1))
        return Near(best, base, gap)

    @cute.jit
    def count_nearest(self, words, near: Near, bins: Uint32):
        """Counts all keys in the bins, those behind them, and what is no key, in one bin more."""
        fore = cutlass.min(near.base + Uint32(FORE), Uint32(0xFFFF))
        behind = cutlass.min(near.base + Uint32(BINS), Uint32(0xFFFF))
        limits = near.base, fore, near.base + near.gap, near.gap, behind
        if const_expr(self.recent):
            limits = tuple(one * Uint32(0x10001) for one in limits)
        for word in words:
            for place in self.bins_of(word, limits):
                ops.count_one(place, bins)

    def bins_of(self, word, limits):
        """The byte offsets of the bins of a word's two keys; the limits are in both halves if the GPU is recent."""
        base, fore, back, gap, behind = limits
        shift = SHIFT[self.dtype]
        if shift:
            word = (word >> Uint32(shift)) & Uint32((0xFFFF >> shift) * 0x10001)
        if self.recent:
            place = rops.min_keys(rops.max_keys(word, base), fore)
            place = rops.max_keys(place, rops.max_keys(word, back) - gap)
            place = (rops.min_keys(place, behind) - base) << Uint32(2)
            return place & Uint32(0xFFFF), place >> Uint32(16)
        places = []
        for key in (word & Uint32(0xFFFF), word >> Uint32(16)):
            place = cutlass.min(cutlass.max(key, base), fore)
            place = cutlass.max(place, cutlass.max(key, back) - gap)
            places.append((cutlass.min(place, behind) - base) << Uint32(2))
        return places

    @cute.jit
    def near_range(self, near: Near, bin_: Int32):
        """The first and the last key of a bin."""
        shift = SHIFT[self.dtype]
        first = near.base + Uint32(bin_)
        last = first
        if bin_ > Int32(FORE):
            first = first + near.gap
        if bin_ >= Int32(FORE):
            last = last + near.gap
        first = first << Uint32(shift)
        if bin_ == Int32(0):
            first = near.best
        last = cutlass.min((last << Uint32(shift)) + Uint32((1 << shift) - 1), Uint32(self.none - 1))
        return first, last
