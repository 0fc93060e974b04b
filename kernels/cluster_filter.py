"""The sampled filter of the `cluster` family; part of `cluster_kernel`, where it is explained."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from .cluster_layout import BINS, FEW, PIVOTS, Grid, Layout, Place, Shared


class Filter(Layout):
    """Steps 2 to 4: what may be among the k best goes into the list and the bins."""

    @cute.jit
    def filter_row(self, shared: Shared, place: Place, grid: Grid, words, low: Int32, shift: Int32, limit: Int32):
        """Reads the row: keys above a cutoff go into the list and the bins, keys equal to it are counted in bin 0.

        A CTA that finds `limit` keys stops and says so by a last bin that is too large to be true.

        Args:
            shared: list and bins are empty.
            place: this thread.
            grid: the row.
            words: this thread's vectors of the first batch.
            low: the cutoff.
            shift: 2 ** shift keys are counted in a bin.
            limit: of keys above the cutoff.
        """
        queued = Int32(0)
        equals = Int32(0)
        queue = place.warp * self.depth
        data = Int32(shared.sData.iterator.toint()) + queue * 16
        batch = Int32(0)
        batches = grid.batches
        while batch < batches:
            for j in cutlass.range_constexpr(self.vectors):
                vector = self.vector_of(place, grid, batch, j)
                part = self.is_part(grid, vector)
                whole = vector < grid.vectors and not part
                top = cops.best_key(words[j], self.largest)
                passes = part or (whole and top > low)
                ballot = cute.arch.vote_ballot_sync(passes)
                if passes:
                    slot = queued + cute.arch.popc(ballot & place.below)
                    shared.sQueue[queue + slot] = vector
                    if const_expr(self.staged):
                        cops.store_four(data + slot * 16, words[j])
                queued = queued + cute.arch.popc(ballot)
                if whole and top == low:
                    equals = equals + self.count_equal(words[j], low)
            batch = batch + 1
            if const_expr(self.ahead):
                words = self.load_batch(place, grid, batch)
            cute.arch.sync_warp()
            enough = Int32(32)
            if batch == batches:
                enough = Int32(1)
            while queued >= enough:
                queued, equals, found = self.drain(shared, place, grid, low, shift, queued, equals)
                if found >= limit:
                    queued = Int32(0)
                    batches = Int32(0)
            if const_expr(not self.ahead):
                words = self.load_batch(place, grid, batch)
        equals = cute.arch.warp_redux_sync(equals, "add")
        if place.lane == Int32(0):
            cute.arch.atomic_add(shared.sBin.iterator, equals)
            if batches == Int32(0):
                cute.arch.atomic_add(shared.sBin.iterator + (BINS - 1), Int32(0x10000))

    def count_equal(self, words, key: Int32) -> Int32:
        """How many keys of a vector are `key`."""
        count = Int32(0)
        for word in words:
            keys = cops.word_keys(word, self.largest)
            count = cops.count_equal(count, Int32(keys & Uint32(0xFFFF)), key)
            count = cops.count_equal(count, Int32(keys >> Uint32(16)), key)
        return count

    @cute.jit
    def load_batch(self, place: Place, grid: Grid, batch: Int32):
        """Loads this thread's vectors of a batch that lie whole in the row."""
        vectors = [self.vector_of(place, grid, batch, j) for j in range(self.vectors)]
        wholes = [batch < grid.batches and v < grid.vectors and not self.is_part(grid, v) for v in vectors]
        return [ops.load_words(grid.base + Int64(v) * 16, w, 0) for v, w in zip(vectors, wholes, strict=True)]

    @cute.jit
    def drain(self, shared: Shared, place: Place, grid: Grid, low: Int32, shift: Int32, queued: Int32, equals: Int32):
        """Looks at the last 32 or fewer vectors of the warp's queue, one a lane.

        Returns how many are left, the lane's count of keys equal to the cutoff, and how many keys the CTA had found.
        """
        position = Int32(0)
        found = Int32(0)
        take = cutlass.min(queued, Int32(32))
        left = queued - take
        wanted = place.lane < take
        slot = place.warp * self.depth + cutlass.min(left + place.lane, Int32(self.depth - 1))
        vector = shared.sQueue[slot]
        if const_expr(self.staged):
            words = cops.load_four(Int32(shared.sData.iterator.toint()) + slot * 16)
        else:
            words = self.load_vector(grid, vector, wanted)
        cute.arch.sync_warp()
        keys, valid = self.keys_of(grid, vector, wanted, words)
        kept = Uint32(0)
        equal = Uint32(0)
        for e in cutlass.range_constexpr(8):
            kept = ops.or_if_in_range(kept, Uint32(self.key(keys, e)), Uint32(low + 1), Uint32(0xFFFF), 1 << e)
            equal = ops.or_if_equal(equal, Uint32(self.key(keys, e)), Uint32(low), 1 << e)
        kept = kept & valid
        equals = equals + Int32(cute.arch.popc(equal & valid))
        ballots = [cute.arch.vote_ballot_sync((kept & Uint32(1 << e)) != Uint32(0)) for e in range(8)]
        total = Int32(0)
        for e in cutlass.range_constexpr(8):
            total = total + cute.arch.popc(ballots[e])
        if total > Int32(0):
            if place.lane == Int32(0):
                position = cute.arch.atomic_add(shared.sCount.iterator, total)
            position = cute.arch.shuffle_sync(position, 0)
            found = position
            for e in cutlass.range_constexpr(8):
                if (kept & Uint32(1 << e)) != Uint32(0):
                    key = self.key(keys, e)
                    entry = position + cute.arch.popc(ballots[e] & place.below)
                    if entry < Int32(self.capacity):
                        element = Uint32(vector * 8 - grid.skew + e)
                        shared.sList[entry] = (Uint64(key) << Uint64(32)) | Uint64(element)
                    cute.arch.atomic_add(shared.sBin.iterator + self.bin_of(key, low, shift), Int32(1))
                position = position + cute.arch.popc(ballots[e])
        return left, equals, found

    @cute.jit
    def find_cutoff(self, shared: Shared, place: Place, grid: Grid, k: Int32, sample: Int32):
        """Every CTA finds the same cutoff from the cluster's samples, and how wide its bins should be."""
        self.send_sample(shared, place, sample)
        share = self.share(grid, k)
        expected = share * Float32(self.samples)
        slack = Float32(self.deviations) * cops.square_root(expected * (Float32(1.0) - share)) + Float32(3.0)
        wanted = Int32(expected + slack)
        per_pivot = Int32(Float32(0.8 * self.samples) * cute.arch.rcp_approx(expected + slack))
        per_pivot = cutlass.max(cutlass.min(per_pivot, Int32(self.samples // PIVOTS)), Int32(1))
        if const_expr(self.cluster == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.mbarrier_wait(shared.sBarrier.iterator, 0)
        pivot = Int32(0)
        for i in cutlass.range_constexpr(self.samples // PIVOTS):
            value = shared.sSample[(place.lane * 81 + i * 317) & (self.samples - 1)]
            if Int32(i) < per_pivot:
                pivot = cutlass.max(pivot, value)
        each = self.samples // self.warps
        address = Int32(shared.sSample.iterator.toint()) + place.warp * (each * 4)
        count = Int32(0)
        for i in cutlass.range_constexpr(each // 4):
            for value in cops.load_four(address + i * 16):
                count = cops.count_not_below(count, Int32(value), pivot)
        cute.arch.atomic_add(shared.sPivot.iterator + place.lane, count)
        cute.arch.sync_threads()
        count = shared.sPivot[place.lane]
        low = Int32(0)
        if count >= wanted:
            low = pivot
        low = cute.arch.warp_redux_sync(low, "max")
        high = Int32(0xFFFF)
        if Float32(count) <= expected - slack:
            high = pivot
        high = cute.arch.warp_redux_sync(high, "min")
        high = cutlass.min(high, cute.arch.warp_redux_sync(pivot, "max"))
        shift = cops.bit_length(cutlass.max(high - low, Int32(0))) - 8
        return low, cutlass.max(shift, Int32(0))

    @cute.jit
    def share(self, grid: Grid, k: Int32) -> Float32:
        """The share of the samples that should be at or above the k-th best."""
        return Float32(k * self.members(grid, k)) * cute.arch.rcp_approx(Float32(grid.count))

    @cute.jit
    def members(self, grid: Grid, k: Int32) -> Int32:
        """Of how many scores a sample is the best: the k-th best is then among the better 40% of the samples."""
        members = Int32(1)
        if Float32(k) * Float32(FEW / 0.4) <= Float32(grid.count):
            members = Int32(FEW)
        if Float32(k) * Float32(self.group / 0.4) <= Float32(grid.count):
            members = Int32(self.group)
        return members

    def sample_of(self, place: Place) -> Int32:
        """Which sample this lane takes, if it takes one."""
        return (place.rank * self.warps + place.warp) * self.per_warp + place.lane // (32 // self.per_warp)

    def turn(self, place: Place) -> Int32:
        """Which lane of every `32 // per_warp` takes a sample."""
        return (place.warp * 5 + place.rank * 3) & (32 // self.per_warp - 1)

    @cute.jit
    def load_sample(self, place: Place, grid: Grid, sampling: Boolean):
        """Loads the scores of this lane's sample, from everywhere.

        The row is cut into as many bands as a sample has scores, a band into a stratum for each sample; a sample takes
        a score of its stratum at random, the same in each band. It begins with FEW bands that are far apart, other
        ones than its neighbours.
        """
        bits = self.samples.bit_length() - 1
        mine = (place.lane & (32 // self.per_warp - 1)) == self.turn(place)
        wanted = sampling and mine
        band = Uint32(grid.count) >> Uint32(self.group.bit_length() - 1)
        sample = Uint32(self.sample_of(place))
        within = (sample * Uint32(0x9E3779B1)) >> Uint32(bits)
        first = cops.high_product((sample << Uint32(32 - bits)) | within, band)
        base = grid.base + Int64(grid.skew) * 2
        scores = []
        for i in cutlass.range_constexpr(self.group):
            j = (sample + Uint32(i % FEW * (self.group // FEW) + i // FEW)) & Uint32(self.group - 1)
            scores.append(cops.load_element(base + Int64(first + j * band) * 2, wanted))
        return scores

    @cute.jit
    def best_of_sample(self, place: Place, grid: Grid, k: Int32, scores) -> Int32:
        """The key of this lane's sample."""
        members = self.members(grid, k)
        words = [scores[i] | (scores[i + 1] << Uint32(16)) for i in range(0, self.group, 2)]
        best = words[0]
        if members >= Int32(FEW):
            best = cops.better(best, words[1], self.largest)
            if members > Int32(FEW):
                for i in cutlass.range_constexpr(2, self.group // 2):
                    best = cops.better(best, words[i], self.largest)
            best = cops.better(best, ops.swap_halves(best), self.largest)
        return Int32(cops.word_keys(best, self.largest) & Uint32(0xFFFF))

    @cute.jit
    def send_sample(self, shared: Shared, place: Place, sample: Int32):
        """Puts this warp's samples into the shared memory of every CTA."""
        stride = 32 // self.per_warp
        turn = self.turn(place)
        first = (place.rank * self.warps + place.warp) * self.per_warp
        if const_expr(self.cluster == 1):
            if (place.lane & (stride - 1)) == turn:
                shared.sSample[first + place.lane // stride] = sample
        else:
            size = min(self.per_warp, 4)
            chunk = place.lane // self.cluster
            parts = []
            for i in cutlass.range_constexpr(size):
                source = ((chunk * size + i) * stride + turn) & 31
                parts.append(cute.arch.shuffle_sync(sample, source))
            if place.lane < Int32(self.cluster * (self.per_warp // size)):
                address = Int32(shared.sSample.iterator.toint()) + (first + chunk * size) * 4
                barrier = Int32(shared.sBarrier.iterator.toint())
                cops.send(address, barrier, place.lane % self.cluster, parts)
