"""Device code of the `cluster` family for f32: a thread-block cluster of 1, 2, 4, 8 or 16 CTAs a row, read once.

Idea. As in `cluster_kernel`: a cutoff found from a sample lets through k and some more keys, which alone are looked at
closely, and counted, so that no sample and no buffer is a bound on correctness. A 32-bit key (`cluster32_ops`) needs
more care behind the filter: 256 bins seldom leave one key in the k-th best's, but mostly a few. These few, at most 128,
every CTA sends to every other, and each finds the k-th best among them by comparing all with all.

Steps, with the names of the methods:

1. `start`, `find_window`, `lay_out`: shared memory is cleared; the row's window becomes 16-byte vectors of 4 scores
   from the aligned address at or before its start. Rows of no more than k scores are written at once (`write_short`).
2. `load_sample`, `load_batch`: 2,048 vectors (512 where k is not small against the row) from everywhere in the row,
   four neighbours at a time, which is what memory reads in one go, each in a stratum of its own; behind them, without
   waiting, each thread's first 4 vectors. Rows of up to 4,096 scores are not sampled: all of them are listed.
3. `send_sample`, `find_cutoff`: 512 samples, each the best of 16 scores (of 4, of 1) of as many vectors, of another
   place in each, so that neighbours count in different samples. They go to every CTA, which finds the cutoff by itself:
   32 pivots, each the best of a few samples so that they crowd around the wanted rank; every sample is compared with
   every pivot; the cutoff is the best pivot with enough samples at or above it. "Enough" is the k-th best's expected
   rank, 3 more, and 4.5 standard deviations, or, where scores are like their neighbours, 3.25 deviations as the samples
   themselves show them (`slack`): the samples are 32 blocks of 16 that may hold neighbours, and their counts at a pivot
   differ the more. If no pivot has as many, the worst one that has 4.5 deviations more is taken.
4. `filter_row`, `drain`: vectors whose best key is above the cutoff go into a queue of their warp; it is unpacked 32
   vectors at a time, a vector a lane. Keys above the cutoff are put into the CTA's list and counted in bins. Keys equal
   to it are only counted: a row of equal scores costs neither atomics nor list entries. A full list ends the filter.
5. `send_bins`, `narrow`: each CTA sends its bins, summed from above, to every other; each finds the bin of the k-th
   best and, from the counts of the CTAs of lower rank, where its own output begins. If all of the bin are selected,
   that is all; if it holds few keys, `finish` sends these; else `count_list`, and again.
   If fewer than k keys passed, or a list was full, the row is sampled at other places and filtered again; if that
   fails too, `count_row` counts all of it until the k-th best is known.
6. `emit_list`, and `emit_row` for keys equal to the cutoff: every CTA writes its own selected elements. Or, in the
   variants for requests whose order or ties matter, `emit_in_order` (`cluster_marks`): a CTA has neighbouring vectors,
   marks what is selected of them in a bit map, sums it up and writes.
7. `emit_by_value` (`cluster_value`), for order "value": as in `cluster_kernel`.

Groups, in `ClusterSelect32Groups` (`cluster32_groups`, `cluster32_groups_emit`): an element is a group of 4 to 128
scores, a number that the launch says. Vectors begin at the row's first score, so that each is of one group, and a
warp's segment holds whole groups, which are as many lanes wide as they have vectors. As soon as scores have come, lanes
reduce them: the best of a vector, then butterflies over the group's lanes, of which the first has the key. From there
on there is one key a group: nothing is queued, and what passes the cutoff goes from registers into the list, while the
next vectors are on their way. A sample is a group, or the best of two of up to 8 scores: of single scores as many bytes
are read. A row that is not aligned to 16 bytes, and a last vector that is not whole, are read score by score, by the
threads whose they are, and -inf stands where there is no score. The newest group, if it is pinned, is set apart
(`set_newest_apart`). The dropped ones are the last, whatever the order: if the k-th best is -inf, only those above it
are selected, and -1s follow (`without_dropped`, `write_rest`); so a bin with -inf in it is looked into even if all of
it are selected (`narrow`).

Threads. Segments of 32 vectors (128 scores) go round the CTAs of the cluster, then round their warps, then over the
batches, so that neighbouring large scores are spread over warps and CTAs; for ordered output each CTA has a chunk.

Shared memory, 51 to 96 KiB: list 32 to 80 KiB, 8 bytes an entry, written by all warps (later the copies of the bins
for `count_row`, the bit maps, or what is sorted) | queues 10 KiB, a part a warp, none for groups without order (later
bit maps, and the elements that are sent to be sorted) | samples 2 KiB and bins of all CTAs 1 KiB a CTA, written by all
CTAs of the cluster | bins, sums, counters, last keys 4 KiB.

Barriers. As in `cluster_kernel`: one of the whole cluster, all CTAs have started; after it only messages, counted at
an mbarrier of the receiver: samples once an attempt, bins once a count in two buffers, the last keys once. Each CTA
waits for all that is sent to it, so none leaves while a peer may still write to it. Samples of a second attempt are
sent after the bins of the first came, and these are sent after the samples of the first were read.

Cost. One launch, no scratch memory. Bytes: the row once, and 32 KiB of it as a sample (4.3 TB/s on an H200: 0.12 us for
131,072 scores, 250 us for 256 x 1,048,576).

Limits. sm_90 and up; f32, single members or the largest of groups of 4 and more; k <= 4,096, for order "value" 2,048;
rows of any length and alignment.

Source: `cluster_kernel` and what it names.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_flags import ORDER_VALUE, TIES_HIGHEST
from ._cute_rows import SelectArguments, find_cells, has
from .cluster32_exact import Exact
from .cluster32_filter import Filter
from .cluster32_groups import Groups
from .cluster32_groups_emit import GroupsEmit
from .cluster32_layout import LAST, TOP, UNSAMPLED, Place, Range
from .cluster32_order import Order
from .cluster32_sample import Sample
from .cluster_bins import BINS

DIRECT = 1  # bit of `path`: no sampling
SAMPLED_TWICE = 2  # attempts by samples, before the whole row is counted


def keys_from(low: Uint32) -> Range:
    """All keys from `low` up, none counted yet."""
    return Range(low, Uint32(TOP), Int32(0), Int32(0), Int32(0), Int32(0), Int32(TOP >> 1), Boolean(False))


class ClusterSelect32(Sample, Filter, Exact, Order):
    """The kernel for one cluster size and direction, ordered or not; f32, single members."""

    WIDE_ARGUMENTS = 15
    NARROW_ARGUMENTS = 11

    @cute.jit
    def __call__(self, *values):
        """Launches a cluster a row.

        The arguments are `SelectArguments`, then `rows`, `path` (bit DIRECT), whether the grid may start before the
        one before it in the stream has ended (programmatic dependent launch), and the stream.
        """
        *fields, rows, path, dependent, stream = values
        self.kernel(SelectArguments(*fields), path).launch(
            grid=[rows * self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if const_expr(self.cluster > 1) else None,
            stream=stream,
            use_pdl=dependent,
            min_blocks_per_mp=self.residents,
            preferred_smem_carveout=-1,  # the driver's default; unset, the compiler would ask a device
        )

    @cute.kernel
    def kernel(self, arguments: SelectArguments, path: Int32):
        k = arguments.k
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        place = Place(tid, cute.arch.make_warp_uniform(tid >> 5), tid & 31, ops.lanes_below(), block % self.cluster)
        row_index = block // self.cluster
        shared = self.start(place)
        cute.arch.griddepcontrol_wait()
        row = self.find_window(arguments, row_index)
        given, window = arguments, row
        if const_expr(self.grouped):
            arguments, row = self.set_newest_apart(arguments, row)
            k = arguments.k
        by_value = Boolean(False)
        worst = Uint32(0)
        if const_expr(self.ordered):
            by_value = has(arguments.flags, ORDER_VALUE)
        written = row.count
        short = row.count <= k
        if const_expr(self.grouped):
            short = self.is_short(arguments, row)
            k = cutlass.min(k, row.count)
        if short:
            self.meet()
            cute.arch.griddepcontrol_launch_dependents()
            if not by_value:
                self.write_short(arguments, find_cells(arguments, row_index, ops.F32, 4), row, place)
        else:
            grid = self.lay_out(row, place, has(arguments.flags, TIES_HIGHEST))
            attempt = Int32(0)
            if (path & Int32(DIRECT)) != Int32(0):
                attempt = Int32(SAMPLED_TWICE)
            filtering = attempt == Int32(0)
            low = Uint32(self.floor)
            passes = Int32(0)
            found = keys_from(low)
            while not found.settled and passes < Int32(12):
                shift = cutlass.max(cops.bit_length(Int32(found.high - found.low)) - 8, Int32(0))
                if filtering:
                    sample = self.load_sample(place, grid, k, attempt)
                    words = self.load_first(place, grid)
                    if passes == Int32(0):
                        self.meet()
                    if grid.count > Int32(UNSAMPLED):
                        low, shift = self.find_cutoff(shared, place, grid, k, sample, attempt)
                    self.filter_row(shared, place, grid, words, low, shift)
                    cute.arch.griddepcontrol_launch_dependents()
                    cute.arch.sync_threads()
                    found = keys_from(low)
                elif attempt == Int32(SAMPLED_TWICE):
                    if passes == Int32(0):
                        self.meet()
                    self.count_row(shared, place, grid, found, shift)
                elif found.inside > Int32(LAST):
                    self.count_list(shared, place, found, shift)
                if filtering or attempt == Int32(SAMPLED_TWICE) or found.inside > Int32(LAST):
                    found = self.narrow(shared, place, found, shift, k, passes)
                else:
                    found = self.finish(shared, place, found, k)
                passes = passes + 1
                if filtering:
                    filtering = Boolean(False)
                    if found.high < low or shared.sTotal[BINS - 1] >= Int32(0xFFFF):  # too few keys, or a flood
                        found = keys_from(Uint32(0))
                        attempt = attempt + 1
                        filtering = attempt < Int32(SAMPLED_TWICE)
                        self.clear(shared, place)
            cells = find_cells(arguments, row_index, ops.F32, 4)
            direct = attempt == Int32(SAMPLED_TWICE)
            unlisted = direct or found.low == low  # keys equal to the cutoff are in no list
            worst = found.low
            if const_expr(self.grouped):
                arguments = self.without_dropped(arguments, row, found)
                written = arguments.k
            if const_expr(self.ordered):
                self.emit_in_order(arguments, row_index, row, shared, place, grid, found, direct, unlisted)
            else:
                share = self.share_ties(arguments, found)
                if not direct:
                    self.emit_list(arguments, cells, row, shared, place, found, share)
                if unlisted:
                    self.emit_row(arguments, cells, row, shared, place, grid, found, share, direct)
        if const_expr(self.ordered):
            if by_value and place.rank == Int32(0):
                self.emit_by_value(arguments, row_index, row, shared, place, worst)
        if const_expr(self.grouped):
            if not by_value:
                self.write_rest(given, row_index, window, place, row.pinned, written)
            elif row.pinned > Int32(0) and place.rank == Int32(0) and tid == Int32(0):
                self.write_newest(given, self.cells_of(given, row_index), window, Int32(0))


class ClusterSelect32Groups(Groups, GroupsEmit, ClusterSelect32):
    """The kernel for one cluster size, ordered or not; the largest of groups of f32 scores, of 4 to 128 each."""
