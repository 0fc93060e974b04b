"""How one CTA sorts a list in shared memory by key, for order "value"; shared by the kernel families.

A stable radix sort, 8 bits a pass from the lowest on, that ends with the highest bit in which keys differ: a list that
stood in index order has equal keys by index after it. Digits are those of a key's distance from the worst one, which
has fewer different bits than keys on both sides of a power of two. A pass:

1. Warp w has the entries of its part of the list, 32 consecutive ones a round. Round by round, the lanes of a warp find
   out by eight votes who has their digit; the first of them adds how many they are to the warp's counter of the digit,
   and each has its place among the warp's entries with that digit.
2. A thread for each digit makes the warps' counters sums over the warps before them; sums over the digits before it
   follow by a scan over lanes and one over 8 warps.
3. Every entry is written to its place.

Three barriers a pass. 16-bit scores mostly take one pass, f32 three: entries are among the best of a row, so that their
keys have few different bits. A bitonic network of 2,048 entries takes 66 steps, 36 of them with a barrier.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from . import _cute_ops as ops

SORTED = 2048
"""Most entries that `sort_by_key` sorts."""
DIGITS = 256
BASE_WORDS = DIGITS
SUM_WORDS = 8 + 32


def counter_bytes(threads: int) -> int:
    """Bytes of shared memory for the warps' counters, 16 bits each."""
    return threads // 32 * DIGITS * 2


class Sort:
    """For classes whose `threads` say how many a CTA has: 256, 512 or 1,024."""

    @cute.jit
    def sort_by_key(self, list_, count: Int32, worst: Uint32, scratch, least: cutlass.Constexpr[int]):
        """Sorts entries by their keys, the lowest first; equal keys keep their order. All threads of the CTA take part.

        Args:
            list_: address of the entries in shared memory, complete at a barrier, and words of each, 1 or 2. The last
                word is the key; bits below `least` are carried along.
            count: entries, at most SORTED.
            worst: no key is above it; its bits below `least` are set.
            scratch: addresses of `counter_bytes` bytes, 16-byte aligned, of BASE_WORDS words, and of SUM_WORDS words.
            least: the lowest bit that counts.
        """
        address, words = list_
        counters, bases, sums = scratch
        tid, _, _ = cute.arch.thread_idx()
        lane = tid & 31
        warp = tid >> 5
        rounds = (count + (self.threads - 1)) // self.threads
        first = warp * (rounds * 32) + lane
        mine = counters + warp * (DIGITS * 2)
        shift = Int32(least)
        end = Int32(32)
        while shift < end:
            ops.store_zeros_16(mine + lane * 16)
            cute.arch.sync_warp()
            held = []
            differing = Uint32(0)
            other = worst - ops.load_shared(address + (4 * words - 4), 1)[0]
            for r in cutlass.range_constexpr(SORTED // self.threads):
                entry = [Uint32(0) for _ in range(words)]
                digit, rank = Int32(DIGITS - 1), Int32(0)
                if Int32(r) < rounds:
                    at = first + r * 32
                    if at < count:
                        entry = ops.load_shared(address + at * (4 * words), words)
                        apart = worst - entry[words - 1]
                        differing = ops.or_of_difference(differing, apart, other)
                        digit = Int32(((apart >> Uint32(shift)) & Uint32(DIGITS - 1)) ^ Uint32(DIGITS - 1))
                    digit, rank = self.rank_in_warp(digit, mine)
                held.append((entry, digit, rank))
            differing = Uint32(cute.arch.warp_redux_sync(Int32(differing), "or"))
            if lane == Int32(0):
                ops.store_shared(sums + (8 + warp) * 4, [differing])
            cute.arch.sync_threads()
            if tid < Int32(DIGITS):
                self.sum_digits(tid, counters, bases, sums)
            cute.arch.sync_threads()
            before, differing = self.sum_warps(lane, sums)
            for r in cutlass.range_constexpr(SORTED // self.threads):
                entry, digit, rank = held[r]
                if Int32(r) < rounds:
                    place = rank + cute.arch.shuffle_sync(before, digit >> 5)
                    place = place + Int32(ops.load_shared(bases + digit * 4, 1)[0])
                    place = place + ops.load_shared_half(mine + digit * 2)
                    if first + r * 32 < count:
                        ops.store_shared(address + place * (4 * words), entry)
            cute.arch.sync_threads()
            shift = shift + 8
            end = Int32(32) - ops.leading_zeros(differing)

    @cute.jit
    def rank_in_warp(self, digit: Int32, counters: Int32):
        """Counts a digit a lane; returns it, and how many the warp has counted of it before, lower lanes included."""
        same = Int32(-1)
        for bit in cutlass.range_constexpr(DIGITS.bit_length() - 1):
            is_set = (digit & Int32(1 << bit)) != Int32(0)
            ballot = cute.arch.vote_ballot_sync(is_set)
            if not is_set:
                ballot = ~ballot
            same = same & ballot
        before = ops.load_shared_half(counters + digit * 2)
        below = cute.arch.popc(same & ops.lanes_below())
        cute.arch.sync_warp()
        if below == Int32(0):
            ops.store_shared_half(counters + digit * 2, before + cute.arch.popc(same))
        cute.arch.sync_warp()
        return digit, before + below

    @cute.jit
    def sum_digits(self, digit: Int32, counters: Int32, bases: Int32, sums: Int32):
        """Makes a digit's counters sums over lower warps; its base is that over its warp's lower digits."""
        at = counters + digit * 2
        counts = [ops.load_shared_half(at + warp * (DIGITS * 2)) for warp in range(self.threads // 32)]
        total = Int32(0)
        for warp in cutlass.range_constexpr(self.threads // 32):
            ops.store_shared_half(at + warp * (DIGITS * 2), total)
            total = total + counts[warp]
        upto = total
        for fold in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(upto, 1 << fold)
            if (digit & 31) >= Int32(1 << fold):
                upto = upto + before
        ops.store_shared(bases + digit * 4, [Uint32(upto - total)])
        if (digit & 31) == Int32(31):
            ops.store_shared(sums + (digit >> 5) * 4, [Uint32(upto)])

    @cute.jit
    def sum_warps(self, lane: Int32, sums: Int32):
        """Returns what stands before the digits of 8 warps, in lanes 0 to 7, and the bits in which keys differ."""
        total, differing = Int32(0), Uint32(0)
        if lane < Int32(8):
            total = Int32(ops.load_shared(sums + lane * 4, 1)[0])
        if lane < Int32(self.threads // 32):
            differing = ops.load_shared(sums + (8 + lane) * 4, 1)[0]
        upto = total
        for fold in cutlass.range_constexpr(3):
            before = cute.arch.shuffle_sync_up(upto, 1 << fold)
            if lane >= Int32(1 << fold):
                upto = upto + before
        return upto - total, Uint32(cute.arch.warp_redux_sync(Int32(differing), "or"))
