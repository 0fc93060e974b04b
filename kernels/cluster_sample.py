"""The sample and the cutoff of the `cluster` family; part of `cluster_kernel`, where it is explained."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from .cluster_layout import LANES, PIVOTS, Grid, Layout, Place, Shared

LONG = 32768  # vectors a CTA from which on samples may be of more than two sets
ROOM = 0.4  # share of the lists that may be filled, on average, by a margin wider than need be
MOST = 0.3  # share of the samples that is at or above the k-th best, at most: the larger samples are, the more it is


class Sample(Layout):
    """Steps 2 and 3: every CTA samples the whole row by itself and finds the same cutoff as the others."""

    @cute.jit
    def members(self, grid: Grid, k: Int32) -> Int32:
        """Of how many scores a sample is the best: a power of two, the more the longer the row is against k."""
        members = Int32(1)
        most = Int32(self.unit * 2)
        if grid.vectors >= Int32(self.cluster * LONG):
            most = Int32(self.unit * self.sets)
        for doubling in cutlass.range_constexpr((self.unit * self.sets).bit_length() - 1):
            larger = Int32(2 << doubling)
            if larger <= most and Float32(k) * Float32((2 << doubling) / MOST) <= Float32(grid.count):
                members = larger
        return members

    @cute.jit
    def load_sample(self, shared: Shared, place: Place, grid: Grid, members: Int32):
        """Loads this thread's vectors of the sample, one of each set that is needed.

        A set has a 32-byte sector of each of as many strata as there are pairs of threads, at random within the
        stratum. The lanes that make samples together have strata that are far apart, and differently so in each group
        of lanes and each set.

        Args:
            shared: holds the vectors until they are used, where the list will be.
            place: this thread.
            grid: the row.
            members: from `members`; 0: there is no sample.
        """
        pairs = self.samples // 2
        bits = pairs.bit_length() - 1
        groups = pairs // LANES
        group = place.warp * 2 + (place.lane >> 4)
        for one in cutlass.range_constexpr(self.sets):
            if members > Int32(self.unit * one):
                band = ((place.lane >> 1) + one) & (LANES - 1)
                stratum = Uint32(band * groups + ((group + band * 11 + one * 13) & (groups - 1)))
                within = ((stratum + Uint32(one * pairs)) * Uint32(0x9E3779B1)) >> Uint32(bits)
                sector = Int32(
                    cops.high_product((stratum << Uint32(32 - bits)) | within, Uint32(grid.vectors) >> Uint32(1))
                )
                vector = sector * 2 + ((place.lane + one) & 1)
                slot = Int32(shared.sList.iterator.toint()) + (one * self.threads + place.tid) * 16
                address = grid.base + Int64(vector) * 16
                if const_expr(self.grouped):  # nearly this vector, if that is not aligned
                    address = address & Int64(-16)
                    if address < grid.base:
                        address = address + 16
                cops.copy_vector(slot, address)

    @cute.jit
    def make_sample(self, shared: Shared, place: Place, members: Int32) -> Int32:
        """The key of this thread's sample: the best of scores of different vectors, no vector twice.

        Vectors of a thread are folded score by score. Then lanes fold in pairs: each keeps a half of its scores and
        takes the other half of the other's, until one is left. What is beyond `members` is dropped, not folded in.
        """
        largest, dtype = self.largest, self.dtype
        cops.await_copies()
        slot = Int32(shared.sList.iterator.toint()) + place.tid * 16
        words = list(cops.load_four(slot))
        for one in cutlass.range_constexpr(1, self.sets):
            if members > Int32(self.unit * one):
                further = cops.load_four(slot + one * self.threads * 16)
                words = [cops.better(a, b, largest, dtype) for a, b in zip(words, further, strict=True)]
        if const_expr(self.grouped):
            word = self.best_of(words)
        else:
            word = self.fold_lanes(place, members, words)
        return Int32(cops.word_keys(word, largest, dtype) & Uint32(0xFFFF))

    @cute.jit
    def fold_lanes(self, place: Place, members: Int32, words) -> Uint32:
        """The best of a score of each of a group of lanes' vectors, in the lower half of a word.

        All lanes keep the first half of what they have and give the second away, so that a sample has another place of
        each vector: scores that stand at one place of all vectors count in all samples. What is not folded in is
        dropped by halves that differ from lane to lane instead.
        """
        largest, dtype = self.largest, self.dtype
        for fold in cutlass.range_constexpr(2):
            size = 2 >> fold
            upper = (place.lane & (8 >> fold)) != Int32(0) and members <= Int32(1 << fold)
            folded = []
            for i in cutlass.range_constexpr(size):
                keep = words[i]
                give = words[i + size]
                if upper:
                    keep = words[i + size]
                    give = words[i]
                other = Uint32(cute.arch.shuffle_sync_bfly(give, 8 >> fold))
                if members > Int32(1 << fold):
                    keep = cops.better(keep, other, largest, dtype)
                folded.append(keep)
            words = folded
        word = words[0]
        if (place.lane & 2) != Int32(0) and members <= Int32(4):
            word = ops.swap_halves(word)
        other = ops.swap_halves(Uint32(cute.arch.shuffle_sync_bfly(word, 2)))
        if members > Int32(4):
            word = cops.better(word, other, largest, dtype)
        return word

    @cute.jit
    def find_cutoff(self, shared: Shared, place: Place, grid: Grid, k: Int32, members: Int32, sample: Int32):
        """Finds a cutoff that nearly always lets k keys pass, and how wide the bins above it should be.

        Args:
            shared: the pivots' counts are cleared, before a barrier of this method.
            place: this thread.
            grid: the row.
            k: elements to select.
            members: from `members`.
            sample: from `make_sample`.

        Returns:
            The cutoff's key, and by how many bits keys are shifted to become bins.
        """
        shared.sSample[place.tid] = sample
        share = Float32(k * members) * cute.arch.rcp_approx(Float32(grid.count))
        expected = share * Float32(self.samples)
        alike = Float32(grid.count) * Float32(1.0 / 128.0)
        alike = cutlass.min(alike, Float32(4096.0)) * cute.arch.rcp_approx(Float32(k))
        alike = cutlass.max(cutlass.min(alike, Float32(8.0)), Float32(1.25))
        spread = Float32(self.deviations) * cops.square_root(expected * (Float32(1.0) - share))
        slack = spread * cops.square_root(alike) + Float32(3.0) * alike
        # No more than fits well into the lists: one that is full costs as much as a cutoff that is too high.
        room = Float32(ROOM * self.cluster * self.capacity * self.samples) * Float32(members)
        room = room * cute.arch.rcp_approx(Float32(grid.count)) - expected
        slack = cutlass.min(slack, cutlass.max(room, spread + Float32(3.0)))
        wanted = Int32(expected + slack)
        per_pivot = Int32(Float32(0.8 * self.samples) * cute.arch.rcp_approx(expected + slack))
        per_pivot = cutlass.max(cutlass.min(per_pivot, Int32(self.samples // PIVOTS)), Int32(1))
        cute.arch.sync_threads()
        pivot = Int32(0)
        for i in cutlass.range(per_pivot, unroll=1):
            pivot = cutlass.max(pivot, shared.sSample[(place.lane * 81 + i * 317) & (self.samples - 1)])
        address = Int32(shared.sSample.iterator.toint()) + place.warp * (32 * 4)
        count = Int32(0)
        for i in cutlass.range_constexpr(8):
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
