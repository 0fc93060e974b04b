"""The sampled cutoff of the f32 kernel of the `cluster` family; explained in `cluster32_kernel`."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from . import _cute_ops as ops
from . import cluster32_ops as kops
from . import cluster_ops as cops
from .cluster32_layout import (
    ALIKE,
    BLOCK,
    DEVIATIONS,
    FEW,
    MANY,
    PIVOTS,
    SAMPLES,
    SPARSE,
    TOP,
    UNSAMPLED,
    Grid,
    Layout,
    Place,
    Shared,
)


class Sample(Layout):
    """Steps 2 and 3: a cutoff from samples of the row."""

    @cute.jit
    def members(self, grid: Grid, k: Int32) -> Int32:
        """Of how many scores a sample is the best: the k-th best is then among the better 40% of the samples."""
        members = Int32(1)
        if Float32(k) * Float32(FEW / 0.4) <= Float32(grid.count):
            members = Int32(FEW)
        if Float32(k) * Float32(MANY / 0.4) <= Float32(grid.count):
            members = Int32(MANY)
        return members

    @cute.jit
    def log_unit(self, grid: Grid, k: Int32) -> Int32:
        """The logarithm of how many neighbouring vectors are sampled together: what memory reads in one go.

        Where that would let too many pass if scores are like their neighbours, fewer are.
        """
        log = Int32(2)
        if Float32(k) * Float32(grid.count) >= Float32(SPARSE):
            log = Int32(1)
        if Float32(k) * Float32(grid.count) >= Float32(2 * SPARSE):
            log = Int32(0)
        return log

    @cute.jit
    def load_sample(self, place: Place, grid: Grid, k: Int32, attempt: Int32):
        """Loads the vectors of this lane's sample: one from each of four bands of the row, at random in its stratum.

        Only one, from anywhere in the row, is loaded where a sample is not the best of MANY scores.
        """
        many = self.members(grid, k) == Int32(MANY)
        loaded = [(Uint32(0), Uint32(0), Uint32(0), Uint32(0)) for _ in range(4)]
        if place.warp < Int32(self.samplers) and grid.count > Int32(UNSAMPLED):
            log = self.log_unit(grid, k)
            mask = (Int32(1) << log) - 1
            first = (Int32(0) - Int32(grid.base >> Int64(4))) & mask  # vectors before the first whole unit
            if first == Int32(0) and grid.first_part == Int32(0):
                first = mask + 1
            bands = Int32(2) if many else Int32(0)  # log
            band = Uint32(grid.vectors - 1 - first) >> Uint32(bands + log)  # units
            number = (place.rank * self.samplers + place.warp) * 32 + place.lane
            vectors = [
                (self.unit_of(number, log, j, band, attempt) << log) + ((number >> 2) & mask) + first for j in range(4)
            ]
            loaded = [ops.load_words(grid.base + Int64(v) * 16, many or j == 0, 0) for j, v in enumerate(vectors)]
        return loaded

    @cute.jit
    def unit_of(self, number: Int32, log: Int32, j: cutlass.Constexpr[int], band: Uint32, attempt: Int32) -> Int32:
        """Which unit of 2 ** log vectors is sampled in a band.

        Which stratum of the band it is in differs from band to band and within a quad, so that rows with a period do
        not line up with it.

        Args:
            number: of the lane in the cluster.
            log: of the vectors in a unit; lanes 4 apart have vectors of the same one.
            j: the band.
            band: its units.
            attempt: other units for another one.
        """
        mix = (number & 3) * 4 + j
        strata = Int32(SAMPLES // 4) >> log  # of a quarter of the band
        rest = ((number >> (log + 2)) * (2 * mix + 5) + mix * 11) & (strata - 1)
        stratum = (number & 3) * strata + rest
        within = kops.scrambled(Uint32(stratum * 4 + j) + Uint32(attempt) * Uint32(0x51ED27))
        bits = Uint32(SAMPLES.bit_length() - 1 - log)
        place_of = (Uint32(stratum) << (Uint32(32) - bits)) | (within >> bits)
        return Int32(cops.high_product(place_of, band) + band * Uint32(j))

    @cute.jit
    def find_cutoff(self, shared: Shared, place: Place, grid: Grid, k: Int32, loaded, attempt: Int32):
        """Every CTA finds the same cutoff from the cluster's samples, and how wide its bins should be."""
        members = self.members(grid, k)
        if place.warp < Int32(self.samplers):
            self.send_sample(shared, place, members, loaded)
        share = Float32(k * members) * cute.arch.rcp_approx(Float32(grid.count))
        if members > Int32(1):  # a sample may have several of the k best
            share = share - share * share * (Float32(0.5) - share * Float32(1 / 6))
        expected = share * Float32(SAMPLES)
        variance = expected * (Float32(1.0) - share)
        aim = expected + Float32(DEVIATIONS) * cops.square_root(variance) + Float32(3.0)
        per_pivot = Int32(Float32(0.8 * SAMPLES) * cute.arch.rcp_approx(aim))
        per_pivot = cutlass.max(cutlass.min(per_pivot, Int32(SAMPLES // PIVOTS)), Int32(1))
        if const_expr(self.cluster == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.mbarrier_wait(shared.sBarrier.iterator, attempt)
        pivot = Uint32(0)
        for i in cutlass.range_constexpr(SAMPLES // PIVOTS):
            value = shared.sSample[(place.lane * 81 + i * 317) & (SAMPLES - 1)]
            if Int32(i) < per_pivot:
                pivot = cutlass.max(pivot, value)
        address = Int32(shared.sSample.iterator.toint()) + place.warp * (SAMPLES // self.warps * 4)
        packed = Int32(0)
        for block in cutlass.range_constexpr(SAMPLES // self.warps // BLOCK):
            count = Int32(0)
            for i in cutlass.range_constexpr(BLOCK // 4):
                for value in cops.load_four(address + (block * BLOCK + i * 4) * 4):
                    count = kops.count_not_below(count, value, pivot)
            packed = packed + count + (count * count << 16)
        cute.arch.atomic_add(shared.sPivot.iterator + place.lane, packed)
        cute.arch.sync_threads()
        if const_expr(self.cluster > 1):
            if place.tid == Int32(0):
                cute.arch.mbarrier_arrive_and_expect_tx(shared.sBarrier.iterator, SAMPLES * 4)
        packed = shared.sPivot[place.lane]
        count = Float32(packed & 0xFFFF)
        slack = self.slack(count, Float32(packed >> 16), variance)
        low = Uint32(0)
        if count >= expected + slack:
            low = pivot
        low = cute.arch.warp_redux_sync(low, "max")
        if low == Uint32(0):  # sorted rows look all alike, but the samples' strata leave little to chance
            safest = Uint32(TOP)
            if count >= aim:
                safest = pivot
            low = cute.arch.warp_redux_sync(safest, "min") + Uint32(1)
            low = low - Uint32(low != Uint32(0))  # 0 if there is none
        high = Uint32(TOP)
        if count <= expected - slack:
            high = pivot
        high = cute.arch.warp_redux_sync(high, "min")
        high = cutlass.max(cutlass.min(high, cute.arch.warp_redux_sync(pivot, "max")), low)
        return low, cutlass.max(cops.bit_length(Int32(high - low)) - 8, Int32(0))

    @cute.jit
    def slack(self, count: Float32, squares: Float32, variance: Float32) -> Float32:
        """How many samples more than expected must be at or above a pivot: DEVIATIONS standard deviations, and 3.

        Neighbouring scores may be alike, and count in different samples of one block. How much more the counts of
        blocks differ than independent samples' would is seen at the pivot; of that, ALIKE deviations are asked for.

        Args:
            count: samples at or above the pivot.
            squares: sum over all blocks of their counts' squares.
            variance: of the number of samples at or above the k-th best, if they are independent.
        """
        blocks = SAMPLES // BLOCK
        seen = (squares - count * count * Float32(1 / blocks)) * Float32(blocks / (blocks - 1))
        independent = cutlass.max(count - count * count * Float32(1 / SAMPLES), Float32(1.0))
        factor = seen * cute.arch.rcp_approx(independent) * Float32(ALIKE**2)
        return cops.square_root(variance * cutlass.max(factor, Float32(DEVIATIONS**2))) + Float32(3.0)

    @cute.jit
    def send_sample(self, shared: Shared, place: Place, members: Int32, loaded):
        """Puts this warp's samples into the shared memory of every CTA.

        The four lanes of a quad have four samples. A sample is the best of a score of each of their vectors, so that
        neighbouring scores, which may be alike, count in different samples; of another place in each lane's, so that
        all samples see scores that stand at one place of all vectors.
        """
        best = list(loaded[0])
        if members > Int32(1):
            if members > Int32(FEW):
                for j in cutlass.range_constexpr(1, 4):
                    best = [kops.better(a, b, self.largest) for a, b in zip(best, loaded[j], strict=True)]
            best = self.turned(best, place.lane)
            for step in cutlass.range_constexpr(2):
                others = [cute.arch.shuffle_sync_bfly(one, 1 << step) for one in best]
                best = [kops.better(a, b, self.largest) for a, b in zip(best, others, strict=True)]
        else:
            best = [cute.arch.shuffle_sync(best[e], (place.lane & 28) | e) for e in range(4)]
        keys = [kops.key_of(one, self.largest) for one in best]
        first = (place.rank * self.samplers + place.warp) * 32 + (place.lane & 28)
        address = Int32(shared.sSample.iterator.toint()) + first * 4
        if const_expr(self.cluster == 1):
            if (place.lane & 3) == Int32(0):
                cops.store_four(address, keys)
        else:
            barrier = Int32(shared.sBarrier.iterator.toint())
            for turn in cutlass.range_constexpr((self.cluster + 3) // 4):
                peer = (place.lane & 3) + turn * 4
                if peer < Int32(self.cluster):
                    cops.send(address, barrier, peer, keys)

    @cute.jit
    def turned(self, words, lane: Int32):
        """Four words, from the one on that the lane's place in its quad says."""
        a, b, c, d = words
        if (lane & 2) != Int32(0):
            a, b, c, d = c, d, a, b
        if (lane & 1) != Int32(0):
            a, b, c, d = b, c, d, a
        return [a, b, c, d]
