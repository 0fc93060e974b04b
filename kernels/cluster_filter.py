"""The sampled filter of the `cluster` family; part of `cluster_kernel`, where it is explained."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from .cluster_bins import BINS
from .cluster_layout import Grid, Layout, Place, Shared


class Filter(Layout):
    """Step 4: what may be among the k best goes into the list and the bins."""

    @cute.jit
    def load_first(self, grid: Grid, wanted: Boolean):
        """Loads this thread's vectors of the first batches."""
        return [self.load_vector(grid, grid.first + j * grid.step, wanted) for j in range(self.vectors * self.deep)]

    @cute.jit
    def filter_row(
        self, shared: Shared, place: Place, grid: Grid, words, cutoff: cops.Cutoff, shift: Int32, limit: Int32
    ):
        """Reads the row: keys above a cutoff go into the list and the bins, keys equal to it are counted in bin 0.

        A CTA that finds `limit` keys stops and says so by a last bin that is too large to be true.

        Args:
            shared: list and bins are empty.
            place: this thread.
            grid: the row.
            words: from `load_first`.
            cutoff: the cutoff.
            shift: 2 ** shift keys are counted in a bin.
            limit: of keys above the cutoff.
        """
        queued = Int32(0)
        equals = Int32(0)
        if self.has_ends(place, grid):
            equals = self.filter_ends(shared, place, grid, cutoff, shift)
        vector = grid.first
        batch = Int32(0)
        batches = grid.batches
        while batch < batches:
            batch = batch + 1
            further = []
            for j in cutlass.range_constexpr(self.vectors):
                valid = vector < grid.limit
                queued, equals = self.look(shared, place, words[j], vector, valid, cutoff, queued, equals)
                ahead = vector + self.vectors * self.deep * grid.step
                further.append(self.load_vector(grid, ahead, Boolean(True)))
                vector = vector + grid.step
            words = words[self.vectors :] + further
            cute.arch.sync_warp()
            enough = Int32(32)
            if batch == batches:
                enough = Int32(1)
            while queued >= enough:
                take = cutlass.min(queued, Int32(32))
                queued = queued - take
                equals, found = self.drain(shared, place, grid, cutoff, shift, queued, take, equals)
                if found >= limit:
                    queued = Int32(0)
                    batches = Int32(0)
            cute.arch.sync_warp()
        equals = cute.arch.warp_redux_sync(self.counted(equals), "add")
        if place.lane == Int32(0):
            cute.arch.atomic_add(shared.sBin.iterator, equals)
            if batches == Int32(0) and grid.batches > Int32(0):
                cute.arch.atomic_add(shared.sBin.iterator + (BINS - 1), Int32(0x10000))

    @cute.jit
    def look(
        self,
        shared: Shared,
        place: Place,
        words,
        vector: Int32,
        valid: Boolean,
        cutoff: cops.Cutoff,
        queued: Int32,
        equals: Int32,
    ):
        """Queues a vector whose best score is above the cutoff; counts the equal scores of one whose best is equal."""
        largest, dtype = self.largest, self.dtype
        best = self.best_of(words) if self.grouped else self.better_of(words)
        near = valid and cops.either(best, cutoff.word, "geu" if largest else "leu", dtype)
        if cute.arch.vote_any_sync(near):
            above = near and cops.either(best, cutoff.word, "gtu" if largest else "lt", dtype)
            equal = near and not above
            if const_expr(largest):
                if cutoff.nan:
                    equal = above
                    above = Boolean(False)
            else:
                if cutoff.nan:
                    above = near and cops.either(best, cutoff.word, "le", dtype)
                    equal = near and not above
                else:
                    equal = equal and cops.either(best, cutoff.word, "eq", dtype)
            ballot = cute.arch.vote_ballot_sync(above)
            if above:
                slot = place.warp * self.depth + queued + cute.arch.popc(ballot & place.below)
                shared.sQueue[slot] = vector
                if const_expr(self.grouped):
                    shared.sData[slot] = Int32(best)
                else:
                    cops.store_four(Int32(shared.sData.iterator.toint()) + slot * 16, words)
            queued = queued + cute.arch.popc(ballot)
            if equal:
                if const_expr(self.grouped):
                    equals = equals + 1
                else:
                    equals = equals + self.count_best(words, cutoff)
        return queued, equals

    @cute.jit
    def count_best(self, words, cutoff: cops.Cutoff) -> Int32:
        """How many scores are equal to the cutoff, of a vector that has some and none that is better.

        A comparison of two halves of a word gives 0xFFFF times the one and -0x10000 times the other, and is added up
        as it is; `counted` says what a sum of such numbers counts.
        """
        equal = [cops.halves(word, cutoff.word, "eq", self.dtype) for word in words]
        if cutoff.nan:
            equal = [cops.halves(word, cutoff.word, "gtu", self.dtype) for word in words]
        return Int32((equal[0] + equal[1]) + (equal[2] + equal[3]))

    @cute.jit
    def counted(self, equals: Int32) -> Int32:
        """How many keys a thread has counted: two numbers of 16 bits, or, of groups, one.

        More than 65,535 in one half count too little. Then the row is counted, as where too few keys pass a cutoff.
        """
        if const_expr(self.grouped):
            return equals
        lower = (Int32(0) - equals) & 0xFFFF
        return lower + (((lower * 0xFFFF - equals) >> 16) & 0xFFFF)

    def load_queued(self, shared: Shared, slot: Int32):
        """The words of a vector in the queue; of a group its best score."""
        address = Int32(shared.sData.iterator.toint()) + slot * (4 * self.staged)
        return (cops.load_word(address),) if self.grouped else cops.load_four(address)

    @cute.jit
    def drain(
        self,
        shared: Shared,
        place: Place,
        grid: Grid,
        cutoff: cops.Cutoff,
        shift: Int32,
        front: Int32,
        take: Int32,
        equals: Int32,
    ):
        """Looks at 32 or fewer vectors of the warp's queue, one a lane, and puts their keys into the list.

        Args:
            shared: the queue, the list and the bins.
            place: this thread.
            grid: the row.
            cutoff: keys above it are taken.
            shift: 2 ** shift keys are counted in a bin.
            front: the first of them in the queue.
            take: how many.
            equals: this lane's count of keys equal to the cutoff.

        Returns:
            The new `equals`, and how many entries the list had before.
        """
        wanted = place.lane < take
        slot = place.warp * self.depth + front + cutlass.min(place.lane, take - 1)
        vector = shared.sQueue[slot]
        words = self.load_queued(shared, slot)
        above = Uint32(1)
        equal = Uint32(0)
        if const_expr(not self.grouped):
            above, equal = cops.split(words, cutoff, self.largest, self.dtype)
        if not wanted:
            above = Uint32(0)
            equal = Uint32(0)
        equals = equals + Int32(cute.arch.popc(equal)) * self.single
        count = Int32(cute.arch.popc(above))
        upto = count
        for fold in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(upto, 1 << fold)
            if place.lane >= Int32(1 << fold):
                upto = upto + before
        found = Int32(0)
        if place.lane == Int32(31):
            found = cute.arch.atomic_add(shared.sCount.iterator, upto)
        found = cute.arch.shuffle_sync(found, 31)
        entry = found + upto - count
        first = self.element_of(grid, vector)
        while above != Uint32(0):
            e = ops.find_first_set(above)
            above = above & (above - Uint32(1))
            word = words[0]
            for i in cutlass.range_constexpr(1, self.staged):
                if (e >> 1) == Int32(i):
                    word = words[i]
            keys = cops.word_keys(word, self.largest, self.dtype)
            key = Int32(keys >> Uint32((e & 1) << 4)) & 0xFFFF
            if entry < Int32(self.capacity):
                shared.sList[entry] = (Uint64(key) << Uint64(32)) | Uint64(Uint32(first + e))
            cute.arch.atomic_add(shared.sBin.iterator + self.bin_of(key, cutoff.low, shift), Int32(1))
            entry = entry + 1
        return equals, found

    @cute.jit
    def filter_ends(self, shared: Shared, place: Place, grid: Grid, cutoff: cops.Cutoff, shift: Int32) -> Int32:
        """The same for the row's ends, a score a lane; returns the lane's count of keys equal to the cutoff."""
        wanted, element, key = self.load_end(place, grid)
        above = wanted and key > cutoff.low
        ballot = cute.arch.vote_ballot_sync(above)
        entry = Int32(0)
        if place.lane == Int32(0):
            entry = cute.arch.atomic_add(shared.sCount.iterator, cute.arch.popc(ballot))
        entry = cute.arch.shuffle_sync(entry, 0) + cute.arch.popc(ballot & place.below)
        if above:
            if entry < Int32(self.capacity):
                shared.sList[entry] = (Uint64(key) << Uint64(32)) | Uint64(element)
            cute.arch.atomic_add(shared.sBin.iterator + self.bin_of(key, cutoff.low, shift), Int32(1))
        return Int32(wanted and key == cutoff.low) * self.single
