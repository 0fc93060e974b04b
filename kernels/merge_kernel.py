"""Device code of `merge_topk`: one CTA of 1,024 threads a row of candidates, whose indices may be any.

Idea. A candidate becomes a rank of 128 bits, all different, of which the k least are wanted:

    | key of the score 32 | index 64 (32 significant if int32) | place in the row 32 |

so that ties by index, and what has one score and one index, need no treatment of their own. A radix select over 8-bit
digits settles the k-th rank from the top: the key's digits in most rows, the index's where scores tie, the place's
where one index stands twice. It stops as soon as what is left fits the list in shared memory, which holds 4,096 ranks,
and goes on there. Nothing is sampled; no buffer can overflow, because ranks differ. With `ties="any"` the index's
digits are left out.

Steps, with the names of the methods:

1. Rows of more than the list holds: `count_row`, `find_digit` count a digit of the ranks that share the bits settled so
   far, and settle it, until what is better and what shares them fits the list together.
2. `collect`: those are put into the list, in any order.
3. `count_list`, `find_digit`, `compact`: the same in the list, until exactly k are left.
4. `sort`: by index or by value, where an order is asked for or there are not more candidates than k (`merge_sort`).
5. `write`: values and indices are read again by place, so that a value keeps its own bits; -1 after them.

Threads. Candidate i is in tile i // 4096, round (i // 1024) % 4, thread i % 1024: a warp reads 32 side by side, and a
thread has eight loads in flight. Any alignment, any stride.

Counters. As `radix_wide`'s: 256 bins x 32 lanes, a column a lane, so that crowded digits cost what others do. Ranks
ascend from the best, so bins are scanned as they are.

Shared memory, 97 KiB: list 64 KiB | counters 32 KiB (cleared by the warp that folds them) | totals of a digit 1 KiB.

Barriers. Two a digit, as in `radix_wide`; one after the list is collected, two around its compaction; in the sort one
for all runs of 64, and two each time that runs are merged, five times for 2,048.

Cost. One launch, no scratch memory. Rows of up to 4,096 candidates are read once, others once for each digit counted
and once to collect: twice or three times where scores are spread.

Limits. sm_80 and up, k up to 4,096.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from .merge_layout import BINS, CAPACITY, INDEX_DIGIT, LOW_DIGIT, ROUNDS, THREADS, WARPS, Cutoff, MergeRow, Shared
from .merge_list import List

ORDER_INDEX, ORDER_VALUE = 1, 2
TIES_LOWEST, TIES_HIGHEST = 1, 2


class Merge(List):
    """The kernel for one dtype of scores and one of indices."""

    WIDE_ARGUMENTS = 8
    NARROW_ARGUMENTS = 6

    @cute.jit
    def __call__(self, *values):
        """Launches one CTA a row; the arguments are the kernel's, then `rows` and the stream."""
        *arguments, rows, stream = values
        self.kernel(*arguments).launch(
            grid=[rows, 1, 1], block=[THREADS, 1, 1], stream=stream, hint_smem_base_uniform=False
        )

    @cute.kernel
    def kernel(
        self,
        values: Int64,
        values_stride: Int64,
        indices: Int64,
        indices_stride: Int64,
        out_indices: Int64,
        out_indices_stride: Int64,
        out_values: Int64,
        out_values_stride: Int64,
        candidates: Int32,
        k: Int32,
        largest: Int32,
        order: Int32,
        ties: Int32,
    ):
        """Merges one row; addresses, and strides in elements."""
        block, _, _ = cute.arch.block_idx()
        at = Int64(block)
        row = MergeRow(
            values=values + at * values_stride * self.size,
            indices=indices + at * indices_stride * self.index_size,
            out_indices=out_indices + at * out_indices_stride * self.index_size,
            out_values=out_values + at * out_values_stride * self.size,
            count=candidates,
            k=k,
            largest=largest != Int32(0),
            by_value=order == Int32(ORDER_VALUE),
            ordered=order != Int32(0),
            any_ties=ties == Int32(0),
            highest=ties == Int32(TIES_HIGHEST),
        )
        shared = self.allocate()
        taken = self.select(row, shared)
        self.write(row, shared, taken)

    @cute.jit
    def select(self, row: MergeRow, shared: Shared) -> Int32:
        """Leaves the best in the list, ordered if need be; returns how many."""
        first, second, first_known, second_known = Uint64(0), Uint64(0), Uint64(0), Uint64(0)
        digit, need, inside, above = Int32(0), row.k, row.count, Int32(0)
        while above + inside > Int32(CAPACITY) and inside > need:
            cut = Cutoff(first, second, first_known, second_known, digit, need, inside, above)
            self.count_row(row, shared, cut)
            first, second, first_known, second_known, digit, need, inside, above = self.find_digit(row, shared, cut)
        cut = Cutoff(first, second, first_known, second_known, digit, need, inside, above)
        entries = self.collect(row, shared, cut)
        inside = entries - above
        taken = entries
        if inside > need:
            while inside > need:
                cut = Cutoff(first, second, first_known, second_known, digit, need, inside, above)
                self.count_list(shared, entries, cut)
                first, second, first_known, second_known, digit, need, inside, above = self.find_digit(row, shared, cut)
            cut = Cutoff(first, second, first_known, second_known, digit, need, inside, above)
            self.compact(shared, entries, cut)
            taken = row.k
        if taken > Int32(0) and (row.ordered or entries <= row.k):
            self.sort(row, shared, taken)
        return taken

    @cute.jit
    def count_row(self, row: MergeRow, shared: Shared, cut: Cutoff):
        """Counts the next digit of the candidates that share the settled bits; a key's digits without making ranks."""
        tid, _, _ = cute.arch.thread_idx()
        base = Uint32(shared.sCount.iterator.toint())
        column = Uint32(tid & 31) << Uint32(2)
        if cut.digit < Int32(INDEX_DIGIT):
            settled, known = Uint32(cut.first >> Uint64(32)), Uint32(cut.first_known >> Uint64(32))
            shift = Uint32(24) - (Uint32(cut.digit) << Uint32(3))
            for tile in range(self.tiles(row)):
                keyed = self.load_tile(row, tile)
                for j in cutlass.range_constexpr(ROUNDS):
                    key, _index, _place, there = keyed[j]
                    counted = there and ((key ^ settled) & known) == Uint32(0)
                    digit = (key >> shift) & Uint32(0xFF)
                    ops.count_one_if(column | (digit << Uint32(7)), base, counted)
        else:
            for tile in range(self.tiles(row)):
                keyed = self.load_tile(row, tile)
                for j in cutlass.range_constexpr(ROUNDS):
                    key, index, place, there = keyed[j]
                    rank = self.rank(row, key, index, place)
                    counted = there and self.shares(rank, cut)
                    ops.count_one_if(column | (self.digit_of(rank, cut.digit) << Uint32(7)), base, counted)

    @cute.jit
    def tiles(self, row: MergeRow) -> Int32:
        """Tiles of a row."""
        return Int32((Uint32(row.count) + Uint32(ROUNDS * THREADS - 1)) // Uint32(ROUNDS * THREADS))

    @cute.jit
    def find_digit(self, row: MergeRow, shared: Shared, old: Cutoff):
        """Folds and clears the counters, finds the bin that holds the k-th best; returns the new cutoff's fields.

        At the first digit candidates may turn out to be no more than are wanted; then nothing is settled.
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
            shared.sTotal[warp * (BINS // WARPS) + lane] = mine
        cute.arch.sync_threads()
        counts = [shared.sTotal[lane * 8 + i] for i in range(8)]
        sum_of_8 = counts[0]
        for i in cutlass.range_constexpr(1, 8):
            sum_of_8 = sum_of_8 + counts[i]
        all_counted = cute.arch.warp_redux_sync(sum_of_8, "add")
        before = self.scan_lanes(sum_of_8) - sum_of_8
        place, better, inside = Int32(-1), Int32(0), Int32(0)
        for i in cutlass.range_constexpr(8):
            if before < old.need and before + counts[i] >= old.need:
                place, better, inside = lane * 8 + i, before, counts[i]
            before = before + counts[i]
        found = Uint32(cute.arch.vote_ballot_sync(place >= Int32(0)))
        source = ops.find_first_set(found | Uint32(0x80000000))
        place = cute.arch.shuffle_sync(place, source)
        better = cute.arch.shuffle_sync(better, source)
        inside = cute.arch.shuffle_sync(inside, source)
        first, second, first_known, second_known = old.first, old.second, old.first_known, old.second_known
        digit, need, above = old.digit, old.need, old.above
        if all_counted <= old.need:
            inside = all_counted
        else:
            shift = Uint64(Int32(56) - ((old.digit & 7) << 3))
            if old.digit < Int32(LOW_DIGIT):
                first = first | (Uint64(Uint32(place)) << shift)
                first_known = first_known | (Uint64(0xFF) << shift)
            else:
                second = second | (Uint64(Uint32(place)) << shift)
                second_known = second_known | (Uint64(0xFF) << shift)
            digit = self.following(row, old.digit)
            need, above = need - better, above + better
        return first, second, first_known, second_known, digit, need, inside, above

    @cute.jit
    def scan_lanes(self, value):
        """Inclusive sum over the lanes of a warp."""
        tid, _, _ = cute.arch.thread_idx()
        lane = tid & 31
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(value, 1 << i)
            value = value + other if lane >= Int32(1 << i) else value
        return value

    @cute.jit
    def write(self, row: MergeRow, shared: Shared, taken: Int32):
        """Writes the row's cells: the list's, then -1."""
        tid, _, _ = cute.arch.thread_idx()
        infinity = ops.INF_TOP[self.dtype] >> (32 - 8 * self.size)
        fill = Uint32(infinity)
        if row.largest:
            fill = Uint32(infinity | 1 << (8 * self.size - 1))
        for position in cutlass.range(tid, row.k, THREADS):
            index, value = Int64(-1), fill
            if position < taken:
                place = Int32(Uint32(shared.sSecond[position] & Uint64(0xFFFFFFFF)))
                index = self.load_index(row, place)
                value = ops.load_score(row.values + Int64(place) * self.size, self.dtype)
            if const_expr(self.wide):
                ops.store_int64(row.out_indices + Int64(position) * 8, index)
            else:
                ops.store_int32(row.out_indices + Int64(position) * 4, Int32(index))
            ops.store_score(row.out_values + Int64(position) * self.size, value, self.dtype)
