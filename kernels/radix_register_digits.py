"""How the `radix_register` family finds the k-th best key; part of `radix_register_kernel`, where it is explained."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from . import _cute_ops as ops
from . import radix_register_ops as rops
from ._cute_rows import Row
from .radix_register_layout import LOG_BINS, Place, Shared
from .radix_register_near import Bests
from .radix_register_shape import BINS, FEW, PASSES


class Range(NamedTuple):
    """The keys low .. high, one of which is the k-th best: it has `inside` elements, of which `need` are selected."""

    low: Uint32
    high: Uint32
    need: Int32
    inside: Int32


class Cut(NamedTuple):
    """What is taken: keys below `bound`; of those equal to `tie` (if `ties`) ranks first .. first + need - 1."""

    bound: Uint32
    ties: Boolean
    tie: Uint32
    first: Int32
    need: Int32


class Digits(Bests):
    """Counts keys in bins until the k-th best is known."""

    @cute.jit
    def narrow(self, shared: Shared, place: Place, grid, keys, room: Int32, candidates: Int32):
        """Finds the k-th best key (k = `room`, less than the candidates); see `Range`."""
        words = self.flat(keys)
        bins = Uint32(shared.sBins.iterator.toint())
        low, high = Uint32(0), Uint32(self.none - 1)
        need, inside, passes = room, candidates, Int32(0)
        if const_expr(self.near):
            if self.is_near(place, grid, need, candidates):
                near = self.find_near(shared, place)
                self.count_nearest(words, near, bins)
                bin_, before, within = self.find(shared, place, passes, need)
                low, high = self.near_range(near, bin_)
                within = cutlass.min(within, candidates - before)  # without what is no key in the last bin
                need, inside, passes = need - before, within, Int32(1)
        if const_expr(not self.near and self.rounds > 1):
            groups = cutlass.min(candidates, Int32(self.threads * self.per_vector))
            if place.step == Int32(32):  # warps follow each other
                groups = candidates // place.rounds
            if need * 2 <= groups:
                self.count_bests(place, grid, keys, bins)
                bin_, before, within = self.find(shared, place, passes, need)
                high = cutlass.min(high, ((Uint32(bin_) + Uint32(1)) << Uint32(self.first_shift)) - Uint32(1))
                base = cutlass.max(high | Uint32((1 << self.near_shift) - 1), Uint32(self.near_reach - 1))
                base = base - Uint32(self.near_reach - 1)
                self.count_near(words, high, base, bins + Uint32(BINS * 4))
                passes = Int32(1)
                bin_, before, within = self.find(shared, place, passes, need)
                low, high = self.bin_range(low, high, base, Int32(self.near_shift), bin_)
                need, inside, passes = need - before, within, Int32(2)
        while low < high and inside > need:
            if inside <= Int32(FEW):
                self.gather(shared, place, words, low, high - low)
                low, need, inside = self.find_few(shared, place, need, inside)
                high = low
            else:
                shift = cutlass.max(rops.bit_length(high - low) - LOG_BINS, Int32(0))
                at = bins + Uint32((passes & 1) * (BINS * 4))
                for i in cutlass.range_constexpr(len(words)):
                    self.count_word(words[i], low, high - low, Uint32(shift), at)
                bin_, before, within = self.find(shared, place, passes, need)
                low, high = self.bin_range(low, high, low, shift, bin_)
                need, inside, passes = need - before, within, passes + 1
        return Range(low, high, need, inside)

    @cute.jit
    def bin_range(self, low: Uint32, high: Uint32, base: Uint32, shift: Int32, bin_: Int32):
        """The keys of a bin, of those from `low` to `high`: bin 0 begins at `low`, bin b at base + b * 2**shift."""
        first = base + (Uint32(bin_) << Uint32(shift))
        high = cutlass.min(high, first + ((Uint32(1) << Uint32(shift)) - Uint32(1)))
        if bin_ > Int32(0):
            low = first
        return low, high

    def count_word(self, word, low, span, shift, bins):
        """Counts the keys of a word that are in a range."""
        if self.size == 4:
            rops.count_key(word, low, span, shift, bins)
        else:
            rops.count_key(word & Uint32(0xFFFF), low, span, shift, bins)
            rops.count_key(word >> Uint32(16), low, span, shift, bins)

    def count_near(self, words, high, base, bins):
        """Counts all keys up to `high`: bins of 2**near_shift keys from `base`, those below it in bin 0."""
        shift = self.near_shift
        bins = bins - ((base >> Uint32(shift)) << Uint32(2))
        for word in words:
            if self.size == 4:
                rops.count_near(word, word, high, base, bins, shift)
            else:
                limit = (high << Uint32(16)) | Uint32(0xFFFF)
                rops.count_near(word & Uint32(0xFFFF), word << Uint32(16), limit, base, bins, shift)
                rops.count_near(word >> Uint32(16), word, limit, base, bins, shift)

    @cute.jit
    def count_bests(self, place: Place, grid, keys, bins: Uint32):
        """Counts the best of each group of keys, one of each of this thread's vectors, by its first bits."""
        if place.first < grid.vectors:
            for i in cutlass.range_constexpr(4):
                best = keys[0][i]
                for j in cutlass.range_constexpr(1, self.rounds):
                    best = rops.better_keys(best, keys[j][i], self.dtype, self.recent)
                mask = Uint32((BINS - 1) * 4)
                ops.count_one((best >> Uint32(32 - LOG_BINS - 2)) & mask, bins)
                if const_expr(self.size == 2):
                    ops.count_one((best >> Uint32(16 - LOG_BINS - 2)) & mask, bins)

    @cute.jit
    def find(self, shared: Shared, place: Place, passes: Int32, need: Int32):
        """Finds the bin of the `need`-th counted key; clears the other buffer. Every warp finds it by itself.

        Each warp scans its part of the bins and adds the part's sum to what all later parts have before them.

        Returns:
            The bin (the last, if fewer were counted), how many keys are in better bins, and in it.
        """
        each = BINS // self.threads
        which = (passes & 1) * (BINS * 4)
        bins = Uint32(shared.sBins.iterator.toint()) + Uint32(which)
        other = Uint32(shared.sBins.iterator.toint()) + Uint32((BINS * 4) - which)
        parts = (passes & (PASSES - 1)) * 32
        cute.arch.sync_threads()
        counts = self.load_bins(bins + Uint32(place.tid * (each * 4)))
        total = counts[0]
        for i in cutlass.range_constexpr(1, each):
            total = total + counts[i]
        upto = self.scan_lanes(total)
        shared.sBefore[place.tid] = upto - total
        sum_ = cute.arch.shuffle_sync(upto, 31)
        if place.lane > place.warp:
            cute.arch.atomic_add(shared.sParts.iterator + (parts + place.lane), sum_)
        for i in cutlass.range_constexpr(max(each // 2, 1)):
            rops.store_zeros(other + Uint32(place.tid * 8 + i * (self.threads * 8)))
        cute.arch.sync_threads()
        before = shared.sParts[parts + place.lane]
        reached = Uint32(cute.arch.vote_ballot_sync(before < need and place.lane < Int32(self.warps)))
        part = Int32(cute.arch.popc(reached)) - 1
        before = cute.arch.shuffle_sync(before, part)
        run = before + shared.sBefore[part * 32 + place.lane]
        counts = self.load_bins(bins + Uint32((part * 32 + place.lane) * (each * 4)))
        reached = Uint32(cute.arch.vote_ballot_sync(run < need))
        source = Int32(cute.arch.popc(reached)) - 1
        bin_, better, inside = (part * 32 + place.lane) * each + (each - 1), run, Int32(0)
        for i in cutlass.range_constexpr(each):
            if run < need and run + counts[i] >= need:
                bin_, better, inside = (part * 32 + place.lane) * each + i, run, counts[i]
            run = run + counts[i]
        bin_ = cute.arch.shuffle_sync(bin_, source)
        better = cute.arch.shuffle_sync(better, source)
        inside = cute.arch.shuffle_sync(inside, source)
        return bin_, better, inside

    @cute.jit
    def gather(self, shared: Shared, place: Place, words, low: Uint32, span: Uint32):
        """Puts the few keys of a range into shared memory."""
        for first in cutlass.range_constexpr(0, len(words), 32 * self.size // 4):
            part = words[first : first + 32 * self.size // 4]
            tops = self.tops(part)
            bits = Uint32(0)
            for i in cutlass.range_constexpr(len(tops)):
                key = tops[i] >> Uint32(32 - self.bits)
                bits = ops.or_if_in_range(bits, key, low, span, 1 << i)
            while bits != Uint32(0):
                at = ops.find_first_set(bits)
                bits = bits & (bits - Uint32(1))
                key = self.pick_of(part, at >> (2 - self.size // 2))
                if const_expr(self.size == 2):
                    key = key >> Uint32(16) if (at & 1) != Int32(0) else key & Uint32(0xFFFF)
                to = cute.arch.atomic_add(shared.sFew.iterator, Uint32(1))
                shared.sFew[to + Uint32(1)] = key

    @cute.jit
    def find_few(self, shared: Shared, place: Place, need: Int32, inside: Int32):
        """The `need`-th of the gathered keys; how many of those equal to it are needed, and how many there are."""
        cute.arch.sync_threads()
        key = Uint32(self.none)
        if place.lane < inside:
            key = shared.sFew[place.lane + 1]
        better, equal = Int32(0), Int32(0)
        for i in cutlass.range(inside, unroll=1):
            other = cute.arch.shuffle_sync(key, i)
            if other < key:
                better = better + 1
            if other == key:
                equal = equal + 1
        mine = place.lane < inside and better < need and better + equal >= need
        source = ops.find_first_set(Uint32(cute.arch.vote_ballot_sync(mine)))
        key = cute.arch.shuffle_sync(key, source)
        better = cute.arch.shuffle_sync(better, source)
        equal = cute.arch.shuffle_sync(equal, source)
        return key, need - better, equal

    def load_bins(self, address):
        """This lane's bins."""
        each = BINS // self.threads
        if each == 2:
            return [Int32(count) for count in rops.load_two(address)]
        return [Int32(count) for i in range(each // 4) for count in rops.load_four(address + Uint32(16 * i))]

    @cute.jit
    def cut(self, row: Row, found: Range) -> Cut:
        """What is taken. Dropped scores, -inf, are not."""
        bound, need, first = found.high + Uint32(1), Int32(0), Int32(0)
        ties = found.inside > found.need
        lowest = Uint32(ops.NEG_INF_WORD[self.dtype] & self.none)  # the key of -inf, if the largest are selected
        if ties:
            bound, need = found.low, found.need
            if row.highest:
                first = found.inside - found.need
            if row.drop and found.low == lowest:
                need = Int32(0)
        if row.drop:
            bound = cutlass.min(bound, lowest)
        return Cut(bound, ties and need > Int32(0), found.low, first, need)
