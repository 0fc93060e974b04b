"""How one CTA sorts a list of 32-bit keys in shared memory by one distribution over bins, for order "value".

The list stands in index order, so an entry, its key above its element, is a number, no two are equal, and ascending
numbers are the order that is wanted. Numbers are sorted by one distribution over eight bins a thread:

1. `find_spread`: the best and the worst key and their mean say how keys are spread over the bins. Bins are even in the
   logarithm of the distance from one end plus the mean distance: a tail, whose keys lie the denser the nearer they are
   to the k-th best, fills bins evenly, and one key that is far away costs no more than a few octaves. The distance is
   from the end that the mean is nearer to. The list is sorted already where all keys are equal.
2. `count_bins`: an atomic add counts each entry in its bin and says how many came before: its slot.
3. `sum_bins`: a scan over the bins gives the place of each one's first entry.
4. `put_by_bin`, `put_by_rank`: entries go to their slots in the bins' order. There each is compared with those of its
   own bin, mostly one to three; its rank among them is its place.

Six barriers. Where a bin has more than MOST entries, as of few different keys or of two groups far apart, the radix
sort of `_cute_sort` does instead. It does from the start for 16-bit keys, of which it needs one or two passes, and for
CTAs whose registers the distribution overfills.
"""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64
from cutlass.cutlass_dsl import dsl_user_op

from . import _cute_ops as ops
from ._cute_sort import SORTED, Sort

EACH = 8  # bins that a thread sums up: 16 bytes
MOST = 31
"""Entries of a bin that are compared with each other."""
SORT_WORDS = 4 * 32
ENTRY_BITS = 11  # a bin's half-word: what is before it in its warp's bins, below SORTED, and above that its entries
TOGETHER = 4  # entries of a thread that are ranked at a time


class Part(NamedTuple):
    """This thread, and its entries: number first + 32 r for r < rounds, below count."""

    tid: Int32
    lane: Int32
    warp: Int32
    first: Int32
    rounds: Int32
    count: Int32


class Spread(NamedTuple):
    """How keys are spread over bins; see `bin_of`."""

    flip: Uint32  # all bits, or none where distances are from the best key
    base: Uint32  # distance 0, flipped
    offset: Float32  # what is added to a distance
    scale: Uint32  # bins / 2^32, of what the bits of the sum are above those of the offset


@cute.jit
def rise_of(distance: Uint32, offset: Float32) -> Uint32:
    """How far the bits of distance + offset as an f32 are above those of the offset; never falls with the distance."""
    ptx = (
        "{ .reg .f32 t; .reg .b32 a, b; cvt.rn.f32.u32 t, $1; add.rn.f32 t, t, $2; mov.b32 a, t; mov.b32 b, $2; "
        "sub.u32 $0, a, b; }"
    )
    return ops._pure(ptx, "=r,r,f", distance, offset)


@cute.jit
def bin_of(key: Uint32, spread: Spread, bins: cutlass.Constexpr[int]) -> Int32:
    """The bin of a key; never falls with the key."""
    rise = rise_of((key ^ spread.flip) - spread.base, spread.offset)
    upto = ops._pure("mul.hi.u32 $0, $1, $2;", "=r,r,r", rise, spread.scale)
    return Int32(upto ^ (spread.flip & Uint32(bins - 1)))


@dsl_user_op
def count_in_half(address: Int32, one: Uint32, *, loc=None, ip=None) -> Uint32:
    """Adds to a word of shared memory, atomically; returns what it was."""
    ptx = "atom.shared.add.u32 {$w0}, [{$r0}], {$r1};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[address, one], loc=loc, ip=ip)


@dsl_user_op
def load_pair_if(address: Int32, wanted, *, loc=None, ip=None) -> list[Uint32]:
    """Two words of shared memory, 8-byte aligned, if wanted, else all bits set."""
    ptx = (
        "{ .reg .pred p; .reg .b32 a, b; setp.ne.s32 p, {$r1}, 0; mov.b32 a, 0xffffffff; mov.b32 b, a; "
        "@p ld.shared.v2.b32 {a, b}, [{$r0}]; mov.b32 {$w0}, a; mov.b32 {$w1}, b; }"
    )
    args = [address, Int32(wanted)]
    return list(cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 2, read_only_args=args, loc=loc, ip=ip))


@dsl_user_op
def load_16(address: Int32, *, loc=None, ip=None) -> list[Uint32]:
    """Four words of shared memory, 16-byte aligned."""
    ptx = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 4, read_only_args=[address], loc=loc, ip=ip))


@dsl_user_op
def store_16(address: Int32, words, *, loc=None, ip=None) -> None:
    """Four words to shared memory, 16-byte aligned."""
    ptx = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(ptx, read_only_args=[address, *words], loc=loc, ip=ip)


@cute.jit
def load_entry_if(address: Int32, wanted) -> Uint64:
    """An entry, if wanted, else all bits set."""
    element, key = load_pair_if(address, wanted)
    return (Uint64(key) << Uint64(32)) | Uint64(element)


@cute.jit
def key_of(entry: Uint64) -> Uint32:
    """An entry's key."""
    return Uint32(entry >> Uint64(32))


@cute.jit
def store_entry(address: Int32, entry: Uint64):
    """Writes an entry."""
    ops.store_shared(address, [Uint32(entry & Uint64(0xFFFFFFFF)), key_of(entry)])


class ByBins(Sort):
    """For classes whose `threads` say how many a CTA has, and `by_bins` which sort is theirs."""

    by_bins = False

    def sort_list_by_key(self, list_, count: Int32, worst: Uint32, scratch, least: int):
        """Sorts as `sort_by_key` does, by bins if `by_bins`: then SORT_WORDS words are used in place of SUM_WORDS."""
        if self.by_bins:
            self.sort_by_bins(list_[0], count, scratch)
        else:
            self.sort_by_key(list_, count, worst, scratch, least)

    @cute.jit
    def sort_by_bins(self, address: Int32, count: Int32, scratch):
        """Sorts entries, the lowest first; their elements ascend where keys are equal. All threads take part.

        Args:
            address: of the entries in shared memory, an element and a key, complete at a barrier.
            count: entries, at most SORTED.
            scratch: addresses of `counter_bytes` bytes, 16-byte aligned, of BASE_WORDS words, and of SORT_WORDS words.
        """
        counters, _, sums = scratch
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid & 31, tid >> 5
        rounds = (count + (self.threads - 1)) // self.threads
        part = Part(tid, lane, warp, warp * (rounds * 32) + lane, rounds, count)
        if count > Int32(1):
            entries = self.load_entries(address, part)
            best, worst, total = self.survey(part, entries, counters, sums)
            if best != worst:
                spread = self.find_spread(count, best, worst, total)
                slots = self.count_bins(part, entries, spread, counters)
                cute.arch.sync_threads()
                self.sum_bins(part, counters, sums)
                cute.arch.sync_threads()
                before, largest = self.sum_warps_bins(lane, sums)
                if largest <= Int32(MOST):
                    self.put_by_bin(address, part, entries, slots, counters, before)
                    cute.arch.sync_threads()
                    self.put_by_rank(address, part, spread, counters, before)
                else:
                    self.sort_by_key((address, 2), count, worst, scratch, 0)

    @cute.jit
    def load_entries(self, address: Int32, part: Part):
        """This thread's entries; all bits set where there is none."""
        entries = []
        for r in cutlass.range_constexpr(SORTED // self.threads):
            at = part.first + r * 32
            entries.append(load_entry_if(address + at * 8, Int32(r) < part.rounds and at < part.count))
        return entries

    @cute.jit
    def survey(self, part: Part, entries, counters: Int32, sums: Int32):
        """Clears the bins; returns the best and the worst key, and the sum of all without the bits of the count."""
        ops.store_zeros_16(counters + part.tid * (EACH * 2))
        best, worst, total = Uint32(0xFFFFFFFF), Uint32(0), Uint32(0)
        shift = Uint32(32 - ops.leading_zeros(Uint32(part.count - 1)))
        for r in cutlass.range_constexpr(SORTED // self.threads):
            if Int32(r) < part.rounds and part.first + r * 32 < part.count:
                key = key_of(entries[r])
                best = cutlass.min(best, key)
                worst = cutlass.max(worst, key)
                total = total + (key >> shift)
        best, worst, total = self.reduced(best, worst, total)
        if part.lane == Int32(0):
            ops.store_shared(sums + part.warp * 4, [best])
            ops.store_shared(sums + part.warp * 4 + 128, [worst])
            ops.store_shared(sums + part.warp * 4 + 256, [total])
        cute.arch.sync_threads()
        best, worst, total = Uint32(0xFFFFFFFF), Uint32(0), Uint32(0)
        if part.lane < Int32(self.threads // 32):
            best = ops.load_shared(sums + part.lane * 4, 1)[0]
            worst = ops.load_shared(sums + part.lane * 4 + 128, 1)[0]
            total = ops.load_shared(sums + part.lane * 4 + 256, 1)[0]
        return self.reduced(best, worst, total)

    @cute.jit
    def reduced(self, best: Uint32, worst: Uint32, total: Uint32):
        """The least, the greatest and the sum over a warp."""
        best = cute.arch.warp_redux_sync(best, "min")
        worst = cute.arch.warp_redux_sync(worst, "max")
        return best, worst, cute.arch.warp_redux_sync(total, "add")

    @cute.jit
    def find_spread(self, count: Int32, best: Uint32, worst: Uint32, total: Uint32) -> Spread:
        """Spreads keys from `best` to `worst`, which differ, over the bins.

        The mean need not be exact: any offset of about the mean distance does. Of n distances the mean is at least 1/n
        of the greatest, so that sums of distance and offset stay within a dozen octaves.
        """
        bits = 32 - ops.leading_zeros(Uint32(count - 1))
        power = ops._pure("{ .reg .b32 t; shl.b32 t, $1, 23; add.u32 $0, t, 0x3f800000; }", "=r,r", bits)
        mean = Float32(total) * self.as_float(power) * cute.arch.rcp_approx(Float32(count))
        range_ = Float32(worst - best)
        offset = Float32(worst) - mean
        flip, base = Uint32(0xFFFFFFFF), ~worst
        if offset > range_ * Float32(0.5):
            offset = range_ - offset
            flip, base = Uint32(0), best
        offset = cutlass.min(cutlass.max(offset, range_ * Float32(1 / SORTED)), range_)
        rise = rise_of(worst - best, offset)
        scale = Uint32(Float32(EACH * self.threads * 2.0**32 * (1 - 2.0**-10)) * cute.arch.rcp_approx(Float32(rise)))
        return Spread(flip, base, offset, scale)

    def as_float(self, bits: Uint32) -> Float32:
        """The f32 that has some bits."""
        return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])

    @cute.jit
    def count_bins(self, part: Part, entries, spread: Spread, counters: Int32):
        """Counts this thread's entries; returns the bin of each and, from bit 16 on, how many it had before."""
        slots = []
        for r in cutlass.range_constexpr(SORTED // self.threads):
            slot = Int32(0)
            if Int32(r) < part.rounds and part.first + r * 32 < part.count:
                bin_ = bin_of(key_of(entries[r]), spread, EACH * self.threads)
                half = Uint32(bin_ & 1) << Uint32(4)
                was = count_in_half(counters + (bin_ >> 1) * 4, Uint32(1) << half)
                slot = bin_ | Int32((was >> half) << Uint32(16))
            slots.append(slot)
        return slots

    @cute.jit
    def sum_bins(self, part: Part, counters: Int32, sums: Int32):
        """Puts into each bin what is before it of its warp's, and how much it has; sums up each warp's."""
        at = counters + part.tid * (EACH * 2)
        counts = []
        for word in load_16(at):
            counts += [word & Uint32(0xFFFF), word >> Uint32(16)]
        total, largest, befores = Uint32(0), Uint32(0), []
        for one in counts:
            befores.append(total)
            total = total + one
            largest = cutlass.max(largest, one)
        upto = self.scan_lanes_of(part.lane, total, 32)
        largest = cute.arch.warp_redux_sync(largest, "max")
        if part.lane == Int32(31):
            ops.store_shared(sums + part.warp * 4 + 384, [upto | (largest << Uint32(16))])
        mask = Uint32((1 << ENTRY_BITS) - 1)
        halves = [
            ((upto - total + before) & mask) | (one << Uint32(ENTRY_BITS))
            for before, one in zip(befores, counts, strict=True)
        ]
        store_16(at, [halves[i] | (halves[i + 1] << Uint32(16)) for i in range(0, EACH, 2)])

    @cute.jit
    def sum_warps_bins(self, lane: Int32, sums: Int32):
        """Returns, in each warp's lane, what stands before its bins; and the most entries of a bin."""
        warps = self.threads // 32
        packed = Uint32(0)
        if lane < Int32(warps):
            packed = ops.load_shared(sums + lane * 4 + 384, 1)[0]
        largest = cute.arch.warp_redux_sync(packed >> Uint32(16), "max")
        total = packed & Uint32(0xFFFF)
        return Int32(self.scan_lanes_of(lane, total, warps) - total), Int32(largest)

    @cute.jit
    def scan_lanes_of(self, lane: Int32, value: Uint32, lanes: cutlass.Constexpr[int]):
        """Inclusive sums over the first lanes of a warp."""
        for fold in cutlass.range_constexpr((lanes - 1).bit_length()):
            before = cute.arch.shuffle_sync_up(value, 1 << fold)
            if lane >= Int32(1 << fold):
                value = value + before
        return value

    @cute.jit
    def place_of(self, bin_: Int32, counters: Int32, before: Int32):
        """The place of a bin's first entry, and how many it has; for whole warps."""
        word = ops.load_shared_half(counters + bin_ * 2)
        warp = bin_ // (EACH * 32)
        first = (word & Int32((1 << ENTRY_BITS) - 1)) + cute.arch.shuffle_sync(before, warp)
        return first, word >> ENTRY_BITS

    @cute.jit
    def put_by_bin(self, address: Int32, part: Part, entries, slots, counters: Int32, before: Int32):
        """Puts this thread's entries into the bins' order; all have been read."""
        for r in cutlass.range_constexpr(SORTED // self.threads):
            if Int32(r) < part.rounds:
                first, _ = self.place_of(slots[r] & 0xFFFF, counters, before)
                if part.first + r * 32 < part.count:
                    store_entry(address + (first + (slots[r] >> 16)) * 8, entries[r])

    @cute.jit
    def put_by_rank(self, address: Int32, part: Part, spread: Spread, counters: Int32, before: Int32):
        """Sorts what stands in the bins' order: each entry's place is its bin's first and its rank there."""
        entries = self.load_entries(address, part)
        places = []
        rounds = SORTED // self.threads
        for start in cutlass.range_constexpr(0, rounds, TOGETHER):
            some = entries[start : start + TOGETHER]
            firsts, sizes = [], []
            for r in cutlass.range_constexpr(len(some)):
                bin_ = Int32(0)
                there = Int32(start + r) < part.rounds and part.first + (start + r) * 32 < part.count
                if there:
                    bin_ = bin_of(key_of(some[r]), spread, EACH * self.threads)
                first, size = self.place_of(bin_, counters, before)
                firsts.append(first)
                sizes.append(size if there and size > Int32(1) else Int32(0))
            places += self.rank(address, some, firsts, sizes)
        cute.arch.sync_threads()
        for r in cutlass.range_constexpr(rounds):
            if Int32(r) < part.rounds and part.first + r * 32 < part.count:
                store_entry(address + places[r] * 8, entries[r])
        cute.arch.sync_threads()

    @cute.jit
    def rank(self, address: Int32, entries, firsts, sizes):
        """The places of some entries: their bins' first, and how many of the bin's are lower."""
        places = list(firsts)
        most = Int32(0)
        for size in sizes:
            most = cutlass.max(most, size)
        i = Int32(0)
        while i < most:
            others = []
            for r in cutlass.range_constexpr(len(entries)):
                others.append(load_entry_if(address + (firsts[r] + i) * 8, i < sizes[r]))
            for r in cutlass.range_constexpr(len(entries)):
                if others[r] < entries[r]:
                    places[r] = places[r] + 1
            i = i + 1
        return places
