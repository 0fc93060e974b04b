"""How the `radix_wide` family uses its list in shared memory; part of `radix_wide_kernel`, where it is explained."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from . import _cute_ops as ops
from ._cute_rows import Cells, Row
from ._cute_sort import SORTED, Sort
from .radix_wide_layout import CAPACITY, THREADS, Cut, Layout, Shared


class List(Sort, Layout):
    """Compacts, sorts and writes the list."""

    @cute.jit
    def compact_list(self, shared: Shared, cut: Cut, entries: Int32) -> Int32:
        """Keeps what is taken of the list, in order; returns how much it is.

        Warp w holds `per` rows of 32 consecutive entries, so that one position per warp suffices.
        """
        tid, _, _ = cute.arch.thread_idx()
        lane = tid & 31
        warp = tid >> 5
        per = (entries + Int32(THREADS - 1)) // THREADS
        kept = []
        taken, tied = Int32(0), Int32(0)
        for r in cutlass.range_constexpr(CAPACITY // THREADS):
            at = (warp * per + r) * 32 + lane
            entry, is_taken, is_tie = Uint64(0), Boolean(False), Boolean(False)
            if Int32(r) < per and at < entries:
                entry = shared.sList[at]
                score = Uint32(entry >> Uint64(32))
                is_taken = score - cut.base <= cut.span
                is_tie = score == cut.tie
            ballots = cute.arch.vote_ballot_sync(is_taken), cute.arch.vote_ballot_sync(is_tie)
            taken = taken + cute.arch.popc(ballots[0])
            tied = tied + cute.arch.popc(ballots[1])
            kept.append((entry, ballots))
        if lane == Int32(0):
            shared.sScan[warp * 2] = Uint32(taken)
            shared.sScan[warp * 2 + 1] = Uint32(tied)
        cute.arch.sync_threads()
        taken = Int32(shared.sScan[lane * 2])
        tied = Int32(shared.sScan[lane * 2 + 1])
        all_taken = cute.arch.warp_redux_sync(taken, "add")
        all_tied = cute.arch.warp_redux_sync(tied, "add")
        position = cute.arch.warp_redux_sync(taken if lane < warp else Int32(0), "add")
        rank = cute.arch.warp_redux_sync(tied if lane < warp else Int32(0), "add") - cut.first
        below = ops.lanes_below()
        for r in cutlass.range_constexpr(CAPACITY // THREADS):
            entry, ballots = kept[r]
            my_rank = rank + cute.arch.popc(ballots[1] & below)
            place = position + cute.arch.popc(ballots[0] & below)
            place = place + cutlass.min(cutlass.max(my_rank, Int32(0)), cut.need)
            is_taken = ((ballots[0] >> lane) & Int32(1)) != Int32(0)
            is_tie = ((ballots[1] >> lane) & Int32(1)) != Int32(0)
            if is_taken or (is_tie and my_rank >= Int32(0) and my_rank < cut.need):
                shared.sList[place] = entry
            position = position + cute.arch.popc(ballots[0])
            rank = rank + cute.arch.popc(ballots[1])
        cute.arch.sync_threads()
        return all_taken + cutlass.min(cutlass.max(all_tied - cut.first, Int32(0)), cut.need)

    @cute.jit
    def sort_list(self, row: Row, shared: Shared, entries: Int32):
        """Sorts the list, which is in index order, by (score, index), best first; scores become order keys."""
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tid, entries, THREADS):
            entry = shared.sList[i]
            key = ops.order_key(Uint32(entry >> Uint64(32)), row.largest)
            shared.sList[i] = (Uint64(key) << Uint64(32)) | (entry & Uint64(0xFFFFFFFF))
        cute.arch.sync_threads()
        if entries <= Int32(SORTED):
            spare = [Int32(one.iterator.toint()) for one in (shared.sCount, shared.sTotal, shared.sScan)]
            list_ = Int32(shared.sList.iterator.toint()), 2
            self.sort_by_key(list_, entries, Uint32(0xFFFFFFFF), spare, 32 - self.bits)
        else:
            self.sort_by_network(shared, entries)

    @cute.jit
    def sort_by_network(self, shared: Shared, entries: Int32):
        """Sorts a long list of order keys: a bitonic network over the next power of two.

        Steps over at most 32 entries stay in a warp's own 64.
        """
        tid, _, _ = cute.arch.thread_idx()
        padded = Int32(2)
        while padded < entries:
            padded = padded << 1
        for i in cutlass.range(entries + tid, padded, THREADS):
            shared.sList[i] = Uint64(0xFFFFFFFFFFFFFFFF)
        cute.arch.sync_threads()
        size = Int32(2)
        while size <= padded:
            stride = size >> 1
            while stride > Int32(0):
                for pair in cutlass.range(tid, padded >> 1, THREADS):
                    low = pair + (pair & (Int32(0) - stride))
                    a, b = shared.sList[low], shared.sList[low + stride]
                    ascending = (low & size) == Int32(0)
                    if (a > b) == ascending:
                        shared.sList[low] = b
                        shared.sList[low + stride] = a
                following = stride >> 1
                if following == Int32(0):
                    following = size
                if stride > Int32(32) or following > Int32(32):
                    cute.arch.sync_threads()
                else:
                    cute.arch.sync_warp()
                stride = stride >> 1
            size = size << 1
        cute.arch.sync_threads()

    @cute.jit
    def write_row(
        self, arguments, cells: Cells, row: Row, shared: Shared, taken: Int32, whole: Boolean, listed: Boolean
    ):
        """Writes the row's cells: the list's or, if `whole`, elements in order; the pinned one; -1 after them.

        What is not `listed` was written before; only what follows it is missing.
        """
        tid, _, _ = cute.arch.thread_idx()
        first = Int32(0) if whole or listed else taken
        pinned_at, lead = taken, Int32(0)
        if row.by_value:
            pinned_at, lead = Int32(0), row.pinned
        for position in cutlass.range(first + tid, arguments.k, THREADS):
            element, value = Int32(-1), cells.fill
            source = position - lead
            if row.pinned != Int32(0) and position == pinned_at:
                element = row.count - Int32(1)
                value = Uint32(ops.INF_TOP[self.dtype] >> (32 - self.bits))
            elif source >= Int32(0) and source < taken:
                element = source
                score = Uint32(0)
                if not whole:
                    entry = shared.sList[source]
                    element = Int32(Uint32(entry & Uint64(0xFFFFFFFF)))
                    score = Uint32(entry >> Uint64(32))
                    if row.by_value:
                        score = ops.score_of_key(score, row.largest)
                value = self.value_of(cells, row, element, score)
            self.write(arguments, cells, row, position, element, value)
