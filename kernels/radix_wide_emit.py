"""How the `radix_wide` family takes elements in index order; part of `radix_wide_kernel`, where it is explained."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from ._cute_rows import Cells, Row
from .radix_wide_layout import ROUNDS, THREADS, WARPS, Cut, Grid, Layout, Shared


class Emit(Layout):
    """Takes a row's elements that are in a range, tile by tile."""

    @cute.jit
    def emit_row(
        self,
        arguments,
        cells: Cells,
        row: Row,
        shared: Shared,
        grid: Grid,
        cut: Cut,
        listed: Boolean,
        settled: Boolean,
        total: Int32,
    ) -> Int32:
        """Puts what is taken, in index order, into the list or the output; returns how much it was.

        Args:
            arguments: `SelectArguments`.
            cells: the row's outputs.
            row: the row.
            shared: shared memory.
            grid: the row's vectors.
            cut: what is taken.
            listed: into the list, else into the output.
            settled: nothing is decided later. If not, the row is read backwards.
            total: elements taken in all, exact where not `settled`.
        """
        tid, _, _ = cute.arch.thread_idx()
        lane = tid & 31
        warp = tid >> 5
        taken, tied = Int32(0), Int32(0)
        for i in range(grid.tiles):
            tile = i if settled else grid.tiles - 1 - i
            vectors = self.load_tile(grid, tile)
            bits, ties = self.test_tile(grid, tile, vectors, cut)
            some = cute.arch.vote_any_sync((bits | ties) != Uint32(0))
            packed = self.pack_counts(bits, ties)
            a0, a1, t0, t1 = packed
            if some:
                a0, a1, t0, t1 = self.scan_lanes(a0), self.scan_lanes(a1), self.scan_lanes(t0), self.scan_lanes(t1)
            at = (i & 1) * (WARPS * 4) + warp * 4
            if lane == Int32(31):
                shared.sScan[at] = a0
                shared.sScan[at + 1] = a1
                shared.sScan[at + 2] = t0
                shared.sScan[at + 3] = t1
            cute.arch.sync_threads()
            at = (i & 1) * (WARPS * 4) + lane * 4
            sums = [shared.sScan[at + f] for f in range(4)]
            totals = [cute.arch.warp_redux_sync(one, "add") for one in sums]
            sums = [one if lane < warp else Uint32(0) for one in sums]
            earlier = [cute.arch.warp_redux_sync(one, "add") for one in sums]
            firsts = [a0 - packed[0], a1 - packed[1], t0 - packed[2], t1 - packed[3]]
            firsts = [firsts[f] + earlier[f] for f in range(4)]
            tile_taken = self.unpack_sum(totals[0], totals[1])
            start = taken if settled else total - taken - tile_taken
            starts, ranks = [], []
            for j in cutlass.range_constexpr(ROUNDS):
                starts.append(start + self.unpack(firsts[j // 2], j % 2))
                ranks.append(tied - cut.first + self.unpack(firsts[2 + j // 2], j % 2))
                start = start + self.unpack(totals[j // 2], j % 2)
                tied = tied + self.unpack(totals[2 + j // 2], j % 2)
            self.emit_scores(
                arguments, cells, row, shared, grid, cut, listed, tile, vectors, (bits, ties), (starts, ranks)
            )
            taken = taken + tile_taken
        cute.arch.sync_threads()
        return taken + cutlass.min(cutlass.max(tied - cut.first, Int32(0)), cut.need)

    @cute.jit
    def test_tile(self, grid: Grid, tile: Int32, vectors, cut: Cut):
        """Which of this thread's scores of a tile are in the range, and which are ties: a bit each, round by round."""
        tid, _, _ = cute.arch.thread_idx()
        bits, ties, valid = Uint32(0), Uint32(0), Uint32(0)
        for j in cutlass.range_constexpr(ROUNDS):
            v = tile * (ROUNDS * THREADS) + j * THREADS + tid
            valid = valid | (self.valid_slots(grid, v) << Uint32(j * self.per_vector))
            scores = ops.top_aligned(vectors[j], self.dtype)
            for e in cutlass.range_constexpr(self.per_vector):
                bits = ops.or_if_in_range(bits, scores[e], cut.base, cut.span, 1 << (j * self.per_vector + e))
        if cut.tie != Uint32(ops.NEVER):
            for j in cutlass.range_constexpr(ROUNDS):
                scores = ops.top_aligned(vectors[j], self.dtype)
                for e in cutlass.range_constexpr(self.per_vector):
                    ties = ops.or_if_equal(ties, scores[e], cut.tie, 1 << (j * self.per_vector + e))
        return bits & valid, ties & valid

    @cute.jit
    def pack_counts(self, bits: Uint32, ties: Uint32):
        """Counts of the rounds, two to a word: taken of rounds 0 and 1, of 2 and 3; then the same of ties."""
        counts = []
        for mask in (bits, ties):
            for j in (0, 2):
                low = cute.arch.popc((mask >> Uint32(j * self.per_vector)) & Uint32(self.whole))
                high = cute.arch.popc((mask >> Uint32((j + 1) * self.per_vector)) & Uint32(self.whole))
                counts.append(low | (high << Uint32(16)))
        return counts

    @cute.jit
    def unpack(self, packed: Uint32, which: cutlass.Constexpr[int]) -> Int32:
        """One of the two counts of a word."""
        return Int32((packed >> Uint32(16 * which)) & Uint32(0xFFFF))

    @cute.jit
    def unpack_sum(self, low: Uint32, high: Uint32) -> Int32:
        """The sum of four packed counts."""
        return self.unpack(low, 0) + self.unpack(low, 1) + self.unpack(high, 0) + self.unpack(high, 1)

    @cute.jit
    def emit_scores(
        self,
        arguments,
        cells: Cells,
        row: Row,
        shared: Shared,
        grid: Grid,
        cut: Cut,
        listed: Boolean,
        tile: Int32,
        vectors,
        masks,
        firsts,
    ):
        """Puts this thread's taken scores of a tile where they belong.

        Args:
            arguments: `SelectArguments`.
            cells: the row's outputs.
            row: the row.
            shared: shared memory.
            grid: the row's vectors.
            cut: what is taken.
            listed: into the list, else into the output.
            tile: the tile.
            vectors: the words of its rounds.
            masks: the scores in the range, and the ties: one bit each.
            firsts: of each round, how many in the range stand before it; and the same of ties, less `cut.first`.
        """
        tid, _, _ = cute.arch.thread_idx()
        bits, ties = masks
        starts, ranks = firsts
        left = bits | ties
        while left != Uint32(0):
            bit = left & (Uint32(0) - left)
            left = left & (left - Uint32(1))
            at = ops.find_first_set(bit)
            round_of = at >> self.log_per_vector
            slot = at & (self.per_vector - 1)
            start, rank = self.pick(starts, round_of), self.pick(ranks, round_of)
            below = (bit - Uint32(1)) & (Uint32(0xFFFFFFFF) << Uint32(round_of * self.per_vector))
            rank = rank + Int32(cute.arch.popc(ties & below))
            place = start + Int32(cute.arch.popc(bits & below))
            place = place + cutlass.min(cutlass.max(rank, Int32(0)), cut.need)
            if (bits & bit) != Uint32(0) or (rank >= Int32(0) and rank < cut.need):
                words = [self.pick([vectors[j][i] for j in range(ROUNDS)], round_of) for i in range(4)]
                score = self.pick_score(words, slot)
                v = tile * (ROUNDS * THREADS) + round_of * THREADS + tid
                index = v * self.per_vector + slot - grid.skew
                if const_expr(self.grouped):
                    index = index >> grid.group_shift
                if listed:
                    shared.sList[place] = (Uint64(score) << Uint64(32)) | Uint64(Uint32(index))
                else:
                    value = self.value_of(cells, row, index, score)
                    self.write(arguments, cells, row, place, index, value)
