"""Order "value", for both kernels of the `cluster` family: the first CTA of a cluster sorts what all have selected.

Every CTA sends the elements that it would write for order "index" to their places in the first CTA's shared memory,
which then reads their scores from the row again (they are in the L2 cache), sorts and writes. The places are where the
queues were: all filtering is over when a CTA knows the k-th best, since it has got the others' last counts.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_bins import ByBins
from ._cute_flags import ORDER_VALUE
from ._cute_rows import has
from ._cute_sort import BASE_WORDS, SORTED, counter_bytes

WORST = 0xFFFFFFFF  # of the keys that are sorted, which ascend from the best


class ByValue(ByBins):
    """Step 7, for a kernel's class that has `key_at` and `write_cell`, and a barrier for it."""

    @cute.jit
    def put(self, arguments, cells, row, shared, position: Int32, element: Int32):
        """Writes an element into its cell of the output in index order, or sends it to its place there."""
        if has(arguments.flags, ORDER_VALUE):
            address = self.places_of(shared) + position * 4
            if const_expr(self.cluster == 1):
                cops.store_word(address, Uint32(element))
            else:
                barrier = Int32((shared.sBarrier.iterator + self.value_barrier).toint())
                cops.send(address, barrier, Int32(0), [Uint32(element)])
        else:
            self.write_cell(arguments, cells, row, position, element)

    def places_of(self, shared) -> Int32:
        """Where selected elements stand in index order."""
        return Int32(shared.sSample.iterator.toint()) - SORTED * 4

    @cute.jit
    def emit_by_value(self, arguments, row_index: Int32, row, shared, place, worst: Uint32):
        """Sorts and writes, in the first CTA.

        Args:
            arguments: `SelectArguments`.
            row_index: the row's number.
            row: the row; if it has no more than k elements, all are sorted.
            shared: nothing else is needed of the list.
            place: this thread.
            worst: the k-th best key; 0 if all are sorted.
        """
        whole = row.count <= arguments.k
        count = cutlass.min(row.count, arguments.k)
        if const_expr(self.cluster == 1):
            cute.arch.sync_threads()
        elif not whole:
            barrier = shared.sBarrier.iterator + self.value_barrier
            if place.tid == Int32(0):
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * 4)
            cops.await_first(barrier)
        entries = Int32(shared.sList.iterator.toint())
        self.fetch_keys(row, entries, self.places_of(shared), count, (place.tid, worst, whole))
        cute.arch.sync_threads()
        counters = entries + SORTED * 8
        bases = counters + counter_bytes(self.threads)
        scratch = (counters, bases, bases + BASE_WORDS * 4)
        self.sort_list_by_key((entries, 2), count, Uint32(WORST), scratch, 0)
        cells = self.cells_of(arguments, row_index)
        for position in cutlass.range(place.tid, arguments.k, self.threads, unroll=1):
            element = Int32(-1)
            if position < count:
                element = Int32(cops.load_word(entries + position * 8))
            self.write_sorted(arguments, cells, row, position, element, entries + position * 8, worst)

    def write_sorted(self, arguments, cells, row, position: Int32, element: Int32, entry: Int32, worst: Uint32):
        """Writes an element, or -1, into its cell; `entry` is the address of its entry, if there is one."""
        self.write_cell(arguments, cells, row, position, element)

    @cute.jit
    def fetch_keys(self, row, entries: Int32, places: Int32, count: Int32, facts):
        """Makes entries of the elements: the element, and how far its key is above the worst, from WORST down."""
        tid, worst, whole = facts
        fetched = []
        for r in cutlass.range_constexpr(SORTED // self.threads):
            at = tid + r * self.threads
            there = at < count
            element = at
            if there and not whole:
                element = Int32(cops.load_word(places + at * 4))
            fetched.append((at, there, element, self.key_at(row, element, there)))
        for r in cutlass.range_constexpr(SORTED // self.threads):
            at, there, element, key = fetched[r]
            if there:
                ops.store_shared(entries + at * 8, [Uint32(element), Uint32(WORST) - (key - worst)])
