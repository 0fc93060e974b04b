"""The exact cutoff of the `cluster` family; part of `cluster_kernel`, where it is explained."""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from . import _cute_ops as ops
from . import cluster_ops as cops
from .cluster_bins import BINS, Bins
from .cluster_layout import COPIES, Grid, Layout, Place, Range, Shared


class Exact(Bins, Layout):
    """Step 5: the range of keys that holds the k-th best becomes one key."""

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
        bin_, reach = self.find_bin(shared, place, found.above, passes, shared.sBarrier.iterator, k)

        low, high, from_row, ties = found.low, found.high, found.from_row, found.ties
        above = found.above + shared.sTotal[bin_ + 1]
        lower = found.lower + shared.sLower[bin_ + 1]
        own = Int32(0)
        inside = Int32(0)
        if bin_ < Int32(0):  # too few at or above the sampled cutoff: the k-th best is below it
            high = low - 1
            low = Int32(0)
            from_row = Boolean(True)
        else:
            ties = shared.sLower[bin_] - shared.sLower[bin_ + 1]
            inside = shared.sTotal[bin_] - shared.sTotal[bin_ + 1]
            own = cops.load_half(reach + (place.rank * BINS + bin_) * 2)
            if bin_ < Int32(BINS - 1):
                high = cutlass.min(low + (bin_ << shift), high)
                own = own - cops.load_half(reach + (place.rank * BINS + bin_ + 1) * 2)
            if bin_ > Int32(0):
                low = low + ((bin_ - 1) << shift) + 1
        return Range(low, high, above, lower, ties, own, inside, from_row, bin_ >= Int32(0) and low >= high)

    @cute.jit
    def count_list(self, shared: Shared, place: Place, found: Range, shift: Int32):
        """Counts the list's keys of a range into the bins."""
        cute.arch.sync_threads()
        if place.tid < Int32(BINS):
            shared.sBin[place.tid] = Int32(0)
        cute.arch.sync_threads()
        for i in cutlass.range(place.tid, shared.sCount[0], self.threads, unroll=1):
            key = Int32(shared.sList[i] >> Uint64(32))
            if key >= found.low and key <= found.high:
                cute.arch.atomic_add(shared.sBin.iterator + self.bin_of(key, found.low, shift), Int32(1))
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
        span = Uint32(found.high - found.low)
        for batch in cutlass.range(grid.batches, unroll=1):
            vectors = [grid.first + (batch * self.vectors + i) * grid.step for i in range(self.vectors)]
            words = [self.load_vector(grid, vector, Boolean(True)) for vector in vectors]
            for i in cutlass.range_constexpr(self.vectors):
                keys = self.keys_of(words[i])
                counted = Uint32(0)
                for e in cutlass.range_constexpr(self.elements):
                    counted = ops.or_if_in_range(counted, Uint32(self.key(keys, e)), Uint32(found.low), span, 1 << e)
                if vectors[i] >= grid.limit:
                    counted = Uint32(0)
                for e in cutlass.range_constexpr(self.elements):
                    if (counted & Uint32(1 << e)) != Uint32(0):
                        which = self.bin_of(self.key(keys, e), found.low, shift)
                        cute.arch.atomic_add(column + which * COPIES, Int32(1))
        if self.has_ends(place, grid):
            wanted, _, key = self.load_end(place, grid)
            if wanted and Uint32(key - found.low) <= span:
                cute.arch.atomic_add(column + self.bin_of(key, found.low, shift) * COPIES, Int32(1))
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
