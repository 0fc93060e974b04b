"""The sampled filter of the f32 kernel of the `cluster` family; explained in `cluster32_kernel`."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import cluster32_ops as kops
from .cluster32_layout import BINS, Grid, Layout, Place, Shared


class Filter(Layout):
    """Step 4: what may be among the k best goes into the list and the bins."""

    @cute.jit
    def load_batch(self, grid: Grid, at: Int32, stride: Int32, wanted: Boolean):
        """Loads this thread's vectors of a batch that lie whole in the row: every `stride`-th from `at` on."""
        vectors = [at + j * stride for j in range(self.vectors)]
        return [ops.load_words(grid.base + Int64(v) * 16, wanted and self.is_whole(grid, v), 0) for v in vectors]

    @cute.jit
    def load_first(self, place: Place, grid: Grid):
        """Loads this thread's vectors of the first batch."""
        return self.load_batch(grid, self.vector_of(place, grid, Int32(0), 0), self.stride(grid), Boolean(True))

    @cute.jit
    def stride(self, grid: Grid) -> Int32:
        """Vectors from one slot of a batch to the next."""
        return grid.batches * (grid.step * self.warps)

    @cute.jit
    def queue_parts(self, shared: Shared, place: Place, grid: Grid) -> Int32:
        """Begins the first warp's queue with those of this CTA's vectors that reach outside the row.

        They are the CTA's to which `vector_of` gives them: what is counted here may be looked for again for output.
        """
        queued = Int32(0)
        if place.warp == Int32(0):
            for part in (grid.first_part, grid.last_part):
                mine = part >= Int32(0) and (part >> 5) % self.cluster == place.rank
                if const_expr(self.ordered):
                    mine = part >= grid.first and part < grid.limit
                if part == grid.first_part and mine and queued > Int32(0):  # the row's only vector
                    mine = Boolean(False)
                if mine:
                    if place.lane == Int32(0):
                        shared.sQueue[queued] = part
                    queued = queued + 1
        return queued

    @cute.jit
    def filter_row(self, shared: Shared, place: Place, grid: Grid, words, low: Uint32, shift: Int32):
        """Reads the row: keys above a cutoff go into the list and the bins, keys equal to it are counted in bin 0.

        A CTA whose list is full stops, and says so by a last bin that is too large to be true.

        Args:
            shared: list and bins are empty.
            place: this thread.
            grid: the row.
            words: this thread's vectors of the first batch.
            low: the cutoff.
            shift: 2 ** shift keys are counted in a bin.
        """
        equals = Int32(0)
        queue = place.warp * self.depth
        batch = Int32(0)
        batches = grid.batches
        at = self.vector_of(place, grid, Int32(0), 0)
        stride = self.stride(grid)
        queued = self.queue_parts(shared, place, grid)
        while batch < batches:
            for j in cutlass.range_constexpr(self.vectors):
                vector = at + j * stride
                whole = self.is_whole(grid, vector)
                top = kops.best_key(words[j], self.largest)
                passes = whole and top > low
                ballot = cute.arch.vote_ballot_sync(passes)
                if passes:
                    slot = queued + cute.arch.popc(ballot & place.below)
                    shared.sQueue[queue + slot] = vector
                queued = queued + cute.arch.popc(ballot)
                if whole and top == low:
                    equals = equals + self.count_equal(words[j], low)
            batch = batch + 1
            at = at + grid.step * self.warps
            cute.arch.sync_warp()
            enough = Int32(32)
            if batch == batches:
                enough = Int32(1)
            while queued >= enough:
                queued, equals, found = self.drain(shared, place, grid, low, shift, queued, equals)
                if found > Int32(self.capacity):
                    queued = Int32(0)
                    batches = Int32(0)
            words = self.load_batch(grid, at, stride, batch < batches)
        equals = cute.arch.warp_redux_sync(equals, "add")
        if place.lane == Int32(0):
            cute.arch.atomic_add(shared.sBin.iterator, equals)
            if batches == Int32(0):
                cute.arch.atomic_add(shared.sBin.iterator + (BINS - 1), Int32(0x10000))

    def count_equal(self, words, key: Uint32) -> Int32:
        """How many keys of a vector are `key`."""
        count = Int32(0)
        for word in words:
            count = kops.count_equal(count, kops.key_of(word, self.largest), key)
        return count

    @cute.jit
    def drain(self, shared: Shared, place: Place, grid: Grid, low: Uint32, shift: Int32, queued: Int32, equals: Int32):
        """Looks at the last 32 or fewer vectors of the warp's queue, one a lane.

        Returns how many are left, the lane's count of keys equal to the cutoff, and how many keys the CTA has found.
        """
        position = Int32(0)
        found = Int32(0)
        take = cutlass.min(queued, Int32(32))
        left = queued - take
        wanted = place.lane < take
        slot = place.warp * self.depth + cutlass.min(left + place.lane, Int32(self.depth - 1))
        vector = shared.sQueue[slot]
        words = self.load_vector(grid, vector, wanted)
        cute.arch.sync_warp()
        keys, valid = self.keys_of(grid, vector, wanted, words)
        kept = Uint32(0)
        equal = Uint32(0)
        for e in cutlass.range_constexpr(4):
            kept = kops.or_if_above(kept, keys[e], low, 1 << e)
            equal = ops.or_if_equal(equal, keys[e], low, 1 << e)
        kept = kept & valid
        equals = equals + Int32(cute.arch.popc(equal & valid))
        ballots = [cute.arch.vote_ballot_sync((kept & Uint32(1 << e)) != Uint32(0)) for e in range(4)]
        total = Int32(0)
        for e in cutlass.range_constexpr(4):
            total = total + cute.arch.popc(ballots[e])
        if total > Int32(0):
            if place.lane == Int32(0):
                position = cute.arch.atomic_add(shared.sCount.iterator, total)
            position = cute.arch.shuffle_sync(position, 0)
            found = position + total
            for e in cutlass.range_constexpr(4):
                if (kept & Uint32(1 << e)) != Uint32(0):
                    entry = position + cute.arch.popc(ballots[e] & place.below)
                    if entry < Int32(self.capacity):
                        element = Uint32(vector * 4 - grid.skew + e)
                        shared.sList[entry] = (Uint64(keys[e]) << Uint64(32)) | Uint64(element)
                    cute.arch.atomic_add(shared.sBin.iterator + self.bin_of(keys[e] - low, shift), Int32(1))
                position = position + cute.arch.popc(ballots[e])
        return left, equals, found
