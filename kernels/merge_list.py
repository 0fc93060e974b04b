"""How a merge uses its list in shared memory; part of `merge_kernel`, where it is explained."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from . import _cute_ops as ops
from .merge_layout import CAPACITY, ROUNDS, THREADS, Cutoff, MergeRow, Rank, Shared
from .merge_sort import Sort


class List(Sort):
    """Collects, counts and compacts the list."""

    @cute.jit
    def append(self, shared: Shared, rank: Rank, wanted: Boolean, which: cutlass.Constexpr[int]):
        """Puts a rank into the list where `wanted`, in any order; `which` counts the entries. For whole warps."""
        tid, _, _ = cute.arch.thread_idx()
        ballot = Uint32(cute.arch.vote_ballot_sync(wanted))
        if ballot != Uint32(0):
            start = Int32(0)
            if (tid & 31) == Int32(0):
                start = cute.arch.atomic_add(shared.sEntries.iterator + which, Int32(cute.arch.popc(ballot)))
            start = cute.arch.shuffle_sync(start, 0)
            if wanted:
                place = start + Int32(cute.arch.popc(ballot & Uint32(ops.lanes_below())))
                shared.sFirst[place] = rank.first
                shared.sSecond[place] = rank.second

    @cute.jit
    def collect(self, row: MergeRow, shared: Shared, cut: Cutoff) -> Int32:
        """Puts what is not above the cutoff into the list; returns how much it is."""
        settled, known = Uint32(cut.first >> Uint64(32)), Uint32(cut.first_known >> Uint64(32))
        for tile in range(self.tiles(row)):
            keyed = self.load_tile(row, tile)
            for j in cutlass.range_constexpr(ROUNDS):
                key, index, place, there = keyed[j]
                likely = there and (key & known) <= settled
                if cute.arch.vote_any_sync(likely):
                    rank = self.rank(row, key, index, place)
                    self.append(shared, rank, likely and self.is_taken(rank, cut), 0)
        cute.arch.sync_threads()
        return shared.sEntries[0]

    @cute.jit
    def count_list(self, shared: Shared, entries: Int32, cut: Cutoff):
        """Counts the next digit of the entries that share the settled bits."""
        tid, _, _ = cute.arch.thread_idx()
        base = Uint32(shared.sCount.iterator.toint())
        column = Uint32(tid & 31) << Uint32(2)
        for i in cutlass.range(tid, entries, THREADS):
            rank = Rank(shared.sFirst[i], shared.sSecond[i])
            ops.count_one_if(column | (self.digit_of(rank, cut.digit) << Uint32(7)), base, self.shares(rank, cut))

    @cute.jit
    def compact(self, shared: Shared, entries: Int32, cut: Cutoff):
        """Keeps what is not above the cutoff."""
        tid, _, _ = cute.arch.thread_idx()
        kept = []
        for j in cutlass.range_constexpr(CAPACITY // THREADS):
            at = j * THREADS + tid
            rank, wanted = Rank(shared.sFirst[at], shared.sSecond[at]), Boolean(False)
            if at < entries:
                wanted = self.is_taken(rank, cut)
            kept.append((rank, wanted))
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(CAPACITY // THREADS):
            rank, wanted = kept[j]
            self.append(shared, rank, wanted, 1)
        cute.arch.sync_threads()
