"""How a merge sorts its list; part of `merge_kernel`, where it is explained.

Runs of 64 ranks are sorted by a warp in registers, bitonic, without shared memory. Then runs are merged two by two: a
rank's place in the merged run is its place in its own plus how many of the other run stand before it, which a binary
search finds. Ranks differ, so places do.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64, const_expr

from .merge_layout import CAPACITY, THREADS, WARPS, Layout, MergeRow, Rank, Shared

RUN = 64  # ranks that a warp sorts: two a lane


class Sort(Layout):
    """Sorts the list by index, or by value and index; the place decides last."""

    @cute.jit
    def sort(self, row: MergeRow, shared: Shared, entries: Int32):
        """Sorts the first `entries` of the list; what follows them up to the next power of two is overwritten."""
        padded = Int32(RUN)
        while padded < entries:
            padded = padded << 1
        self.sort_runs(row, shared, entries, padded)
        run = Int32(RUN)
        while run < padded:
            self.merge_runs(shared, run, padded)
            run = run << 1

    @cute.jit
    def load_sortable(self, row: MergeRow, shared: Shared, at: Int32, entries: Int32) -> Rank:
        """An entry as it is sorted: without the score unless by value, indices ascending; past the end, the last."""
        first, second = Uint64(0xFFFFFFFFFFFFFFFF), Uint64(0xFFFFFFFFFFFFFFFF)
        if at < entries:
            first, second = shared.sFirst[at], shared.sSecond[at]
            if row.highest:  # so far they descend
                second = second ^ Uint64(0xFFFFFFFF00000000)
                if const_expr(self.wide):
                    first = first ^ Uint64(0xFFFFFFFF)
            if not row.by_value:
                first = first & Uint64(0xFFFFFFFF)
        return Rank(first, second)

    @cute.jit
    def sort_runs(self, row: MergeRow, shared: Shared, entries: Int32, padded: Int32):
        """Sorts each run of 64; lane l of a warp holds places l and l + 32."""
        tid, _, _ = cute.arch.thread_idx()
        lane = tid & 31
        start = (tid >> 5) * RUN
        while start < padded:
            low = self.load_sortable(row, shared, start + lane, entries)
            high = self.load_sortable(row, shared, start + 32 + lane, entries)
            for log_size in cutlass.range_constexpr(1, 7):
                size = const_expr(1 << log_size)
                if const_expr(size == RUN):
                    low, high = self.ordered(low, high)
                for log_stride in cutlass.range_constexpr(min(log_size - 1, 4), -1, -1):
                    stride = const_expr(1 << log_stride)
                    smaller = (lane & stride) == Int32(0)
                    if const_expr(size < 32):
                        smaller = smaller == ((lane & size) == Int32(0))
                    low = self.exchange(low, stride, smaller)
                    if const_expr(size == 32):
                        smaller = (lane & stride) != Int32(0)
                    high = self.exchange(high, stride, smaller)
            shared.sFirst[start + lane] = low.first
            shared.sSecond[start + lane] = low.second
            shared.sFirst[start + 32 + lane] = high.first
            shared.sSecond[start + 32 + lane] = high.second
            start = start + WARPS * RUN
        cute.arch.sync_threads()

    @cute.jit
    def precedes(self, a: Rank, b: Rank) -> Boolean:
        """Whether a rank is better than another."""
        return a.first < b.first or (a.first == b.first and a.second < b.second)

    @cute.jit
    def ordered(self, a: Rank, b: Rank):
        """Two ranks, the better one first."""
        swapped = self.precedes(b, a)
        first = Rank(b.first if swapped else a.first, b.second if swapped else a.second)
        second = Rank(a.first if swapped else b.first, a.second if swapped else b.second)
        return first, second

    @cute.jit
    def exchange(self, rank: Rank, stride: cutlass.Constexpr[int], smaller: Boolean) -> Rank:
        """The better or the other one of this lane's rank and that of the lane `stride` away."""
        other = Rank(self.of_lane(rank.first, stride), self.of_lane(rank.second, stride))
        take = self.precedes(other, rank) == smaller
        return Rank(other.first if take else rank.first, other.second if take else rank.second)

    @cute.jit
    def of_lane(self, value: Uint64, stride: cutlass.Constexpr[int]) -> Uint64:
        """The value that the lane `stride` away has."""
        low = cute.arch.shuffle_sync_bfly(Uint32(value & Uint64(0xFFFFFFFF)), stride)
        high = cute.arch.shuffle_sync_bfly(Uint32(value >> Uint64(32)), stride)
        return (Uint64(high) << Uint64(32)) | Uint64(low)

    @cute.jit
    def merge_runs(self, shared: Shared, run: Int32, padded: Int32):
        """Merges sorted runs of `run` entries two by two."""
        tid, _, _ = cute.arch.thread_idx()
        moved = []
        for j in cutlass.range_constexpr(CAPACITY // THREADS):
            at = j * THREADS + tid
            first, second, target = Uint64(0), Uint64(0), Int32(0)
            if at < padded:
                first, second = shared.sFirst[at], shared.sSecond[at]
                before = self.count_before(shared, Rank(first, second), (at ^ run) & (Int32(0) - run), run, at)
                target = (at & (Int32(0) - (run << 1))) + (at & (run - 1)) + before
            moved.append((first, second, target))
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(CAPACITY // THREADS):
            first, second, target = moved[j]
            if j * THREADS + tid < padded:
                shared.sFirst[target] = first
                shared.sSecond[target] = second
        cute.arch.sync_threads()

    @cute.jit
    def count_before(self, shared: Shared, rank: Rank, start: Int32, run: Int32, at: Int32) -> Int32:
        """How many of the run that begins at `start` stand before the rank at place `at`; of equals, the left run's."""
        found = Int32(0)
        step = run >> 1
        while step > Int32(0):
            if self.stands_before(shared, rank, start + found + step - 1, at):
                found = found + step
            step = step >> 1
        if self.stands_before(shared, rank, start + found, at):
            found = found + 1
        return found

    @cute.jit
    def stands_before(self, shared: Shared, rank: Rank, other: Int32, at: Int32) -> Boolean:
        """Whether the entry at place `other` belongs before a rank at place `at`. Only fillers are equal."""
        first, second = shared.sFirst[other], shared.sSecond[other]
        equal = first == rank.first and second == rank.second
        return first < rank.first or (first == rank.first and second < rank.second) or (equal and other < at)
