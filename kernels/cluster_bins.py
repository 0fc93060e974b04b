"""How many keys of a cluster lie in each bin: what the CTAs of the `cluster` family's kernels tell each other."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from . import cluster_ops as cops

BINS = 256


class Bins:
    """The exchange of counts by bin; for classes with a `cluster` of CTAs.

    `shared` has sBin, sReach, sTotal and sLower as the layouts describe them.
    """

    @cute.jit
    def find_bin(self, shared, place, above: Int32, passes: Int32, barriers, k: Int32):
        """Finds the bin of the k-th best key, and makes sTotal and sLower those of all CTAs and of those before this.

        Args:
            shared: sBin holds what this CTA counted.
            place: this thread.
            above: keys above all bins.
            passes: counts before this one.
            barriers: two, one a buffer, in turns.
            k: elements to select.

        Returns:
            The bin, -1 if the k-th best key is below all, and the shared address of the CTAs' counts.
        """
        buffer = passes & 1
        barrier = barriers + buffer
        reach = Int32(shared.sReach.iterator.toint()) + buffer * (self.cluster * BINS * 2)
        if place.warp < Int32(self.cluster):
            self.send_bins(shared, place, reach, barrier)
        total = Int32(0)
        lower = Int32(0)
        if const_expr(self.cluster == 1):
            cute.arch.sync_threads()
            if place.tid < Int32(BINS):
                total = cops.load_half(reach + place.tid * 2)
        else:
            cute.arch.mbarrier_wait(barrier, (passes >> 1) & 1)
            if place.tid < Int32(BINS):
                parts = [cops.load_half(reach + (peer * BINS + place.tid) * 2) for peer in range(self.cluster)]
                for peer in cutlass.range_constexpr(self.cluster):
                    total = total + parts[peer]
                    if Int32(peer) < place.rank:
                        lower = lower + parts[peer]
        if place.tid < Int32(BINS):
            shared.sTotal[place.tid] = total
            shared.sLower[place.tid] = lower
        reached = place.tid < Int32(BINS) and above + total >= k
        bin_ = cops.barrier_count(reached) - 1
        if const_expr(self.cluster > 1):
            if place.tid == Int32(0):
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.cluster * BINS * 2)
        return bin_, reach

    @cute.jit
    def send_bins(self, shared, place, reach: Int32, barrier):
        """Warp w sends CTA w how many keys this CTA has in each bin or above it, capped at 65,535."""
        address = Int32(shared.sBin.iterator.toint()) + place.lane * 32
        counts = [Int32(word) for word in (*cops.load_four(address), *cops.load_four(address + 16))]
        for i in cutlass.range_constexpr(6, -1, -1):
            counts[i] = counts[i] + counts[i + 1]
        after = counts[0]
        for step in cutlass.range_constexpr(5):
            further = cute.arch.shuffle_sync_down(after, 1 << step)
            if place.lane + (1 << step) < Int32(32):
                after = after + further
        after = after - counts[0]
        halves = [Uint32(cutlass.min(count + after, Int32(0xFFFF))) for count in counts]
        words = [halves[2 * i] | (halves[2 * i + 1] << Uint32(16)) for i in range(4)]
        address = reach + (place.rank * BINS + place.lane * 8) * 2
        if const_expr(self.cluster == 1):
            cops.store_four(address, words)
        else:
            cops.send(address, Int32(barrier.toint()), place.warp, words)
