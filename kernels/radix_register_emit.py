"""How the `radix_register` family takes elements; part of `radix_register_kernel`, explained there."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from . import _cute_ops as ops
from . import radix_register_ops as rops
from .radix_register_digits import Cut, Digits
from .radix_register_layout import Place, Shared

MANY_TIES = 1024


class Emit(Digits):
    """Puts what is taken into the list."""

    @cute.jit
    def take(self, shared: Shared, place: Place, grid, keys, cut: Cut, keyed: Boolean) -> Int32:
        """Puts what is taken into the list, in the order of warps, rounds, lanes; returns how much it is.

        A lane's counts of each round stand in a byte each: those of the lanes before it are at most 31 * 8.
        """
        bits, ties = self.test(keys, cut)
        per_mask = 32 // self.per_vector
        counts = [self.round_counts(bits, q, per_mask) for q in range((self.rounds + 3) // 4)]
        tied = [self.round_counts(ties, q, per_mask) for q in range((self.rounds + 3) // 4)]
        befores, tied_befores, totals, tied_totals = [], [], [], []
        for q in cutlass.range_constexpr(len(counts)):
            before, last, own = self.scan_bytes(place, counts[q])
            befores.append(before)
            totals.append((last, own))
            before, last, own = Uint32(0), Uint32(0), Uint32(0)
            if cut.ties:
                before, last, own = self.scan_bytes(place, tied[q])
            tied_befores.append(before)
            tied_totals.append((last, own))
        starts, ranks = [], []
        start, rank = Int32(0), Int32(0)
        for j in cutlass.range_constexpr(self.rounds):
            q, at = j // 4, Uint32(8 * (j % 4))
            starts.append(start + Int32((befores[q] >> at) & Uint32(0xFF)))
            ranks.append(rank + Int32((tied_befores[q] >> at) & Uint32(0xFF)))
            start = start + self.of_both(totals[q], at)
            rank = rank + self.of_both(tied_totals[q], at)
        base, total = self.reserve(shared, place, Uint32(start) | (Uint32(rank) << Uint32(16)))
        place_of, rank_of = Int32(base & Uint32(0xFFFF)), Int32(base >> Uint32(16)) - cut.first
        starts = [one + place_of for one in starts]
        ranks = [one + rank_of for one in ranks]
        for m in cutlass.range_constexpr(len(bits)):
            rounds = range(m * per_mask, min((m + 1) * per_mask, self.rounds))
            mine = [keys[j] for j in rounds], [starts[j] for j in rounds], [ranks[j] for j in rounds]
            self.put(shared, place, grid, cut, keyed, m * per_mask, (bits[m], ties[m]), mine)
        cute.arch.sync_threads()
        all_tied = Int32(total >> Uint32(16)) - cut.first
        return Int32(total & Uint32(0xFFFF)) + cutlass.min(cutlass.max(all_tied, Int32(0)), cut.need)

    @cute.jit
    def test(self, keys, cut: Cut):
        """Which keys are below the bound, and which are ties: a bit each, 32 to a word."""
        per_mask = 32 // self.per_vector
        shift = Uint32(32 - self.bits)
        bound, tie = cut.bound << shift, cut.tie << shift
        bits, ties = [], []
        for first in cutlass.range_constexpr(0, self.rounds, per_mask):
            tops = self.tops(self.flat(keys[first : first + per_mask]))
            below, equal = Uint32(0), Uint32(0)
            for i in cutlass.range_constexpr(len(tops)):
                below = rops.or_if_below(below, tops[i], bound, 1 << i)
            if cut.ties:
                for i in cutlass.range_constexpr(len(tops)):
                    equal = ops.or_if_equal(equal, tops[i], tie, 1 << i)
            bits.append(below)
            ties.append(equal)
        return bits, ties

    def round_counts(self, masks, q: int, per_mask: int):
        """Set bits of rounds 4q .. 4q + 3, a byte each."""
        packed = Uint32(0)
        for j in range(4 * q, min(4 * q + 4, self.rounds)):
            mask = (masks[j // per_mask] >> Uint32(j % per_mask * self.per_vector)) & Uint32(self.whole)
            packed = packed | (Uint32(cute.arch.popc(mask)) << Uint32(8 * (j % 4)))
        return packed

    @cute.jit
    def scan_bytes(self, place: Place, counts: Uint32):
        """The sums over the lanes before this one, byte by byte; and what lane 31 has before it, and by itself."""
        before = cute.arch.shuffle_sync_up(counts, 1)
        before = before if place.lane > Int32(0) else Uint32(0)
        before = self.scan_lanes(before)
        return before, cute.arch.shuffle_sync(before, 31), cute.arch.shuffle_sync(counts, 31)

    def of_both(self, words, at) -> Int32:
        """The sum of one byte of two words."""
        return Int32((words[0] >> at) & Uint32(0xFF)) + Int32((words[1] >> at) & Uint32(0xFF))

    @cute.jit
    def reserve(self, shared: Shared, place: Place, mine: Uint32):
        """What stands before this warp's taken elements (lower half) and ties, and the totals."""
        if place.lane == Int32(0):
            shared.sTaken[place.warp] = mine
        cute.arch.sync_threads()
        one = shared.sTaken[place.lane]  # 0 past the last warp
        total = cute.arch.warp_redux_sync(one, "add")
        one = one if place.lane < place.warp else Uint32(0)
        return cute.arch.warp_redux_sync(one, "add"), total

    @cute.jit
    def take_any(self, shared: Shared, place: Place, grid, keys, cut: Cut, counts, straight: Int64):
        """Takes elements in any order: `above` better ones, then `need` of `inside` ties.

        They are put into the list or, if `straight` is not 0, written there. Of many ties each thread takes its share,
        so that no thread has to take all of its own.
        """
        above, inside = counts
        bits, ties = self.test(keys, cut)
        taken, tied = Int32(0), Int32(0)
        for m in cutlass.range_constexpr(len(bits)):
            taken = taken + Int32(cute.arch.popc(bits[m]))
            tied = tied + Int32(cute.arch.popc(ties[m]))
        packed = Uint32(taken) | (Uint32(tied) << Uint32(16))
        upto = self.scan_lanes(packed)
        base = Uint32(0)
        if place.lane == Int32(31):
            base = cute.arch.atomic_add(shared.sTaken.iterator, upto)
        base = cute.arch.shuffle_sync(base, 31) + upto - packed
        position = Int32(base & Uint32(0xFFFF))
        rank, end = Int32(base >> Uint32(16)), cut.need
        if cut.ties and inside >= Int32(MANY_TIES):
            end = Int32(Uint32((rank + tied) * cut.need) // Uint32(inside))
            rank = Int32(Uint32(rank * cut.need) // Uint32(inside))
        per_mask = 32 // self.per_vector
        for m in cutlass.range_constexpr(len(bits)):
            left = bits[m]
            while left != Uint32(0):
                at = ops.find_first_set(left)
                left = left & (left - Uint32(1))
                element = self.element_at(place, grid, at, m * per_mask)
                self.put_any(shared, position, element, straight)
                position = position + 1
            left = ties[m]
            while left != Uint32(0) and rank < end:
                at = ops.find_first_set(left)
                left = left & (left - Uint32(1))
                element = self.element_at(place, grid, at, m * per_mask)
                self.put_any(shared, above + rank, element, straight)
                rank = rank + 1
        if straight == Int64(0):
            cute.arch.sync_threads()

    @cute.jit
    def put_any(self, shared: Shared, position: Int32, element: Int32, straight: Int64):
        """Puts an element into the list or, if `straight` is not 0, writes it there."""
        if const_expr(self.straight):
            if straight != Int64(0):
                ops.store_int32(straight + Int64(position) * 4, element)
            else:
                shared.sList[position] = Uint32(element)
        else:
            shared.sList[position] = Uint32(element)

    @cute.jit
    def element_at(self, place: Place, grid, at: Int32, first: cutlass.Constexpr[int]) -> Int32:
        """The element at a bit of a mask whose first round is `first`."""
        v = place.number((at >> self.log_per_vector) + first)
        element = v * self.per_vector + (at & (self.per_vector - 1)) - grid.skew
        if const_expr(self.grouped):
            element = element >> grid.group_shift
        return element

    @cute.jit
    def put(
        self, shared: Shared, place: Place, grid, cut: Cut, keyed: Boolean, first: cutlass.Constexpr[int], masks, mine
    ):
        """Puts this thread's taken elements of some rounds into the list.

        Args:
            shared: shared memory.
            place: this thread.
            grid: the row.
            cut: what is taken.
            keyed: the list holds keys too.
            first: the first of the rounds.
            masks: the scores that are taken, and the ties: one bit each.
            mine: of each round its keys, and how many are taken, and ties, before its own.
        """
        bits, ties = masks
        keys, starts, ranks = mine
        left = bits | ties
        while left != Uint32(0):
            bit = left & (Uint32(0) - left)
            left = left ^ bit
            at = ops.find_first_set(bit)
            round_of = at >> self.log_per_vector
            slot = at & (self.per_vector - 1)
            below = (bit - Uint32(1)) & (Uint32(0xFFFFFFFF) << Uint32(round_of * self.per_vector))
            position = self.pick_of(starts, round_of) + Int32(cute.arch.popc(bits & below))
            is_taken = Boolean(True)
            if cut.ties:
                rank = self.pick_of(ranks, round_of) + Int32(cute.arch.popc(ties & below))
                position = position + cutlass.min(cutlass.max(rank, Int32(0)), cut.need)
                is_taken = (bits & bit) != Uint32(0) or (rank >= Int32(0) and rank < cut.need)
            if is_taken:
                element = self.element_at(place, grid, at, first)
                if keyed:
                    words = [self.pick_of([one[i] for one in keys], round_of) for i in range(4)]
                    self.put_keyed(shared, position, element, self.pick_score(words, slot))
                else:
                    shared.sList[position] = Uint32(element)

    @cute.jit
    def put_keyed(self, shared: Shared, position: Int32, element: Int32, key: Uint32):
        """Puts an element and its top-aligned key into the list."""
        if const_expr(self.size == 2):
            shared.sList[position] = key | Uint32(element)
        else:
            shared.sList[position * 2] = Uint32(element)
            shared.sList[position * 2 + 1] = key
