"""The exact cutoff of the f32 kernel of the `cluster` family; explained in `cluster32_kernel`."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64, const_expr

from . import cluster32_ops as kops
from . import cluster_ops as cops
from .cluster32_layout import COPIES, LAST, TOP, Grid, Layout, Place, Range, Shared
from .cluster_bins import BINS, Bins


class Exact(Bins, Layout):
    """Step 5: the range of keys that holds the k-th best becomes one key, or all that is in it is selected."""

    @cute.jit
    def narrow(self, shared: Shared, place: Place, found: Range, shift: Int32, k: Int32, passes: Int32) -> Range:
        """Adds up the cluster's bins and finds the one that holds the k-th best; the range becomes that bin.

        Args:
            shared: the bins hold this CTA's keys of the range.
            place: this thread.
            found: the range that was counted.
            shift: 2 ** shift keys were counted in a bin.
            k: elements to select.
            passes: counts before this one.
        """
        bin_, reach = self.find_bin(shared, place, found.above, passes, shared.sBarrier.iterator + 1, k)

        low, high, ties = found.low, found.high, found.ties
        above = found.above + shared.sTotal[bin_ + 1]
        lower = found.lower + shared.sLower[bin_ + 1]
        own = Int32(0)
        inside = Int32(0)
        settled = Boolean(False)
        if bin_ < Int32(0):  # too few at or above the sampled cutoff: the k-th best is below it
            high = low - Uint32(1)
        else:
            ties = shared.sLower[bin_] - shared.sLower[bin_ + 1]
            if bin_ < Int32(BINS - 1):
                high = low + cutlass.min(Uint32(bin_) << Uint32(shift), high - low)
            if bin_ > Int32(0):
                low = low + (Uint32(bin_ - 1) << Uint32(shift)) + Uint32(1)
            settled = low == high
            inside = shared.sTotal[bin_] - shared.sTotal[bin_ + 1]
            own = cops.load_half(reach + (place.rank * BINS + bin_) * 2)
            if bin_ < Int32(BINS - 1):
                own = own - cops.load_half(reach + (place.rank * BINS + bin_ + 1) * 2)
            all_ = bin_ > Int32(0) and above + inside == k  # of the bin are selected: none is equal to the key below
            if const_expr(self.grouped):
                all_ = all_ and low > Uint32(self.floor)  # whether any is -inf must be known
            if all_:
                above = k
                lower = lower + ties
                own = Int32(0)
                low = low - Uint32(1)
                high = low
                settled = Boolean(True)
        return Range(low, high, above, lower, ties, own, inside, settled)

    @cute.jit
    def finish(self, shared: Shared, place: Place, found: Range, k: Int32) -> Range:
        """Every CTA gets the cluster's last few keys of the range, at most LAST, and finds the k-th best among them.

        They stand in the order of the CTAs' ranks: `found.ties` are of CTAs of lower rank.
        """
        last = Int32(shared.sLast.iterator.toint())
        barrier = shared.sBarrier.iterator + 3
        if const_expr(self.cluster > 1):
            if place.tid == Int32(0):
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, found.inside * 4)
        span = found.high - found.low
        for i in cutlass.range(place.tid, shared.sCount[0], self.threads, unroll=1):
            key = Uint32(shared.sList[i] >> Uint64(32))
            if key - found.low <= span:
                at = found.ties + cute.arch.atomic_add(shared.sCount.iterator + 3, Int32(1))
                if const_expr(self.cluster == 1):
                    shared.sLast[at] = key
                else:
                    for peer in cutlass.range_constexpr(self.cluster):
                        cops.send(last + at * 4, Int32(barrier.toint()), Int32(peer), [key])
        if const_expr(self.cluster == 1):
            cute.arch.sync_threads()
        else:
            cute.arch.mbarrier_wait(barrier, 0)
        if place.warp < Int32(LAST // 32):
            best = self.last_best(shared, place, found, k - found.above)
            if place.lane == Int32(0):
                shared.sPivot[place.warp] = best
        cute.arch.sync_threads()
        a, b, c, d = cops.load_four(Int32(shared.sPivot.iterator.toint()))
        low = cutlass.min(cutlass.min(a, b), cutlass.min(c, d))
        above = Int32(0)
        lower = Int32(0)
        ties = Int32(0)
        own = Int32(0)
        equals = Int32(0)
        for first in cutlass.range(0, found.inside, 32, unroll=1):
            at = first + place.lane
            key = Uint32(0)
            if at < found.inside:
                key = shared.sLast[at]
            better = cute.arch.vote_ballot_sync(at < found.inside and key > low)
            equal = cute.arch.vote_ballot_sync(at < found.inside and key == low)
            before = self.lowest_bits(found.ties - first)
            upto = self.lowest_bits(found.ties + found.own - first)
            above = above + cute.arch.popc(better)
            lower = lower + cute.arch.popc(better & before)
            ties = ties + cute.arch.popc(equal & before)
            own = own + cute.arch.popc(equal & upto)
            equals = equals + cute.arch.popc(equal)
        return Range(low, low, found.above + above, found.lower + lower, ties, own - ties, equals, Boolean(True))

    @cute.jit
    def lowest_bits(self, count: Int32) -> Int32:
        """The lowest of 32 bits; none of a count below 0, all of one above 32."""
        count = cutlass.max(count, Int32(0))
        bits = Int32(-1)
        if count < Int32(32):
            bits = (Int32(1) << count) - 1
        return bits

    @cute.jit
    def last_best(self, shared: Shared, place: Place, found: Range, wanted: Int32) -> Uint32:
        """The worst of this warp's share of the last keys that are among the best `wanted`; TOP if none is."""
        best = Uint32(TOP)
        if place.warp * 32 < found.inside:
            key = shared.sLast[place.tid]
            better = Int32(0)
            for first in cutlass.range(0, found.inside, 8, unroll=1):
                address = Int32(shared.sLast.iterator.toint()) + first * 4
                for other in (*cops.load_four(address), *cops.load_four(address + 16)):
                    better = kops.count_above(better, other, key)
            if place.tid < found.inside and better < wanted:
                best = key
            best = cute.arch.warp_redux_sync(best, "min")
        return best

    @cute.jit
    def bin_in(self, key: Uint32, found: Range, shift: Int32) -> Int32:
        """The bin of a key of the range."""
        which = Int32(0)
        if key != found.low:
            which = self.bin_of(key - found.low, shift)
        return which

    @cute.jit
    def count_list(self, shared: Shared, place: Place, found: Range, shift: Int32):
        """Counts the list's keys of a range into the bins."""
        cute.arch.sync_threads()
        if place.tid < Int32(BINS):
            shared.sBin[place.tid] = Int32(0)
        cute.arch.sync_threads()
        span = found.high - found.low
        for i in cutlass.range(place.tid, shared.sCount[0], self.threads, unroll=1):
            key = Uint32(shared.sList[i] >> Uint64(32))
            if key - found.low <= span:
                cute.arch.atomic_add(shared.sBin.iterator + self.bin_in(key, found, shift), Int32(1))
        cute.arch.sync_threads()

    @cute.jit
    def count_row(self, shared: Shared, place: Place, grid: Grid, found: Range, shift: Int32):
        """Counts the row's keys of a range into copies of the bins, where the list was, and adds these up."""
        copies = cute.make_tensor(
            cute.recast_ptr(shared.sList.iterator, dtype=Int32), cute.make_layout(COPIES * BINS)
        )  # (BINS, COPIES): lane l counts in copy l mod COPIES
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(COPIES * BINS // self.threads):
            copies[i * self.threads + place.tid] = Int32(0)
        cute.arch.sync_threads()
        column = copies.iterator + (place.lane & (COPIES - 1))
        span = found.high - found.low
        for batch in cutlass.range(grid.batches, unroll=1):
            vectors = [self.vector_of(place, grid, batch, i) for i in range(self.vectors)]
            words = [self.load_vector(grid, v, v < grid.limit) for v in vectors]
            for i in cutlass.range_constexpr(self.vectors):
                keys, valid = self.keys_of(grid, vectors[i], vectors[i] < grid.limit, words[i])
                for e in cutlass.range_constexpr(self.elements):
                    if (valid & Uint32(1 << e)) != Uint32(0) and keys[e] - found.low <= span:
                        which = self.bin_in(keys[e], found, shift)
                        cute.arch.atomic_add(column + which * COPIES, Int32(1))
        cute.arch.sync_threads()
        folders = self.threads // BINS  # threads a bin
        each = COPIES // folders
        first = place.tid * each
        count = Int32(0)
        for i in cutlass.range_constexpr(each):
            count = count + copies[first + ((i + place.lane) & (each - 1))]
        for step in cutlass.range_constexpr(folders.bit_length() - 1):
            count = count + cute.arch.shuffle_sync_bfly(count, 1 << step)
        if place.tid % folders == Int32(0):
            shared.sBin[place.tid // folders] = count
        cute.arch.sync_threads()
