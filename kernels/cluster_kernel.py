"""Device code of the `cluster` family: a thread-block cluster of 1, 2, 4, 8 or 16 CTAs a row; the row is read once.

Idea. A cutoff found from a few thousand scores lets through k and some more keys: these alone are looked at closely.
They are counted exactly, by bins that begin at the cutoff, so that the bins say what the k-th best key is: no buffer
and no sample is a bound on correctness. A 16-bit score has a 16-bit key (`cluster_ops`), and the k-th best is seldom
more than 255 keys above the cutoff: mostly one count is enough. If the bin of the k-th best holds several keys, that
range is counted again, from the list of what was let through or, if that does not hold it, from the row. If the cutoff
was bad (fewer than k keys pass, or a flood), one coarse count of the row gives a cutoff that is not, and the row is
filtered again.

Steps, with the names of the methods:

1. `start`, `find_window`, `lay_out`: shared memory is cleared; the row's window becomes whole 16-byte vectors and up to
   7 scores on either side, its ends. Rows of no more than k scores are written at once (`write_short`).
2. `load_sample`, `load_first`: whole 32-byte sectors from everywhere in the row, 256 a set, asynchronously into shared
   memory; behind them, without waiting, each thread's first vectors.
3. `make_sample`, `find_cutoff`: 512 samples, each the best of 8, 16 or 32 scores of as many vectors (of fewer where k
   is not small against the row), folded by shuffles, each from another place of each vector, so that scores at regular
   places count in all samples. Every CTA does so by itself, from the same scores, so that nothing is sent. 32 pivots,
   each the best of a few samples so that they crowd around the wanted rank; every sample is compared with every pivot;
   the cutoff is the best pivot with enough samples at or above it. "Enough" is the k-th best's expected rank plus 4.5
   standard deviations and 3 more (few samples are not normal), of scores that are alike in clusters of up to 8.
4. `filter_row`, `look`, `drain`: vectors whose best score is above the cutoff (packed maxima and comparisons) go into a
   queue of their warp; it is unpacked 32 vectors at a time, a vector a lane, so that lanes are busy however few vectors
   pass. Keys above the cutoff are put into the CTA's list and counted in bins by one atomic each. Keys equal to it are
   only counted, in a register: a row of equal scores costs neither atomics nor list entries.
5. `send_bins`, `narrow`: each CTA sends its bins, summed from above, to every other; each finds the bin of the k-th
   best and, from the counts of the CTAs of lower rank, where its own output begins. While the bin holds several keys:
   `count_list` or `count_row`, and again.
6. `emit_list` or `emit_row`: every CTA writes its own selected elements; one reservation a warp. If the k-th best is
   the cutoff itself, those equal to it are looked for in the row until there are enough; many are shared out among the
   CTAs (`share_ties`). In the variants for requests
   whose order or ties matter, `emit_in_order` (`cluster_marks`): a CTA has neighbouring vectors, marks what is selected
   of them in a bit map, sums it up and writes.
7. `emit_by_value` (`cluster_value`), for order "value": what would be written in index order is sent to the first CTA
   of the cluster, which sorts it by key, stable, and writes it.

In the variants for groups of 8 an element is a vector, and its key that of its best score; a group that is not whole is
an end of the row. The pinned element is left out of all that and written last.

Threads. Segments of 32 vectors (256 scores) go round the CTAs of the cluster, then round their warps, so that
neighbouring large scores are spread over warps and CTAs (C CTAs, W warps):

    step 0   |warp 0: CTA 0|CTA 1|..|CTA C-1|warp 1: CTA 0|..|warp W-1: CTA C-1|    32 vectors each
    step 1   |      "          = segment (1 * W + warp) * C + rank
    ..

For ordered output each CTA has a chunk of neighbouring segments instead, which go round its warps; the chunks are in
the order of the CTAs' ranks, or, for ties to the highest index, in the opposite one.

Shared memory, 108 KiB for one CTA a row, 79 to 97 KiB in clusters: list 40 or 72 KiB, 8 bytes an entry, written by all
warps (before it the sampled vectors, later the copies of the bins for `count_row`, or what is sorted) | queues 6 or
10 KiB and their vectors 24 or 40 KiB, a part a warp (later bit maps, and the elements that are sent to be sorted) |
samples 2 KiB | bins of all CTAs 1 KiB a CTA, written by all CTAs of the cluster
| bins, sums, counters 4 KiB. The less there is, the more of it is L1 cache, through which all loads in flight go.

Barriers. Only one is of the whole cluster: all CTAs have started and initialised their mbarriers (arrived at first,
waited for after the cutoff is found). After it CTAs only send, by st.async, and count the bytes that came at an
mbarrier of their own: bins once a count, in two buffers (a CTA sends count n + 2 after it got all of count n + 1, which
a peer sends after it has read count n). No CTA reads another's memory, and each waits for all that is sent to it, so
none leaves while a peer may still write to it. A cluster barrier with release and acquire would cost a fence over all
of the GPU and this CTA's L1 cache. In the CTA: samples complete, pivots counted, list and bins complete, sums complete.

Cost. One launch, no scratch memory. Bytes: the row once, and 16 to 64 KiB of it once more as a sample (4.3 TB/s on an
H200: 0.06 us for 131,072 scores, 125 us for 256 x 1,048,576). Floor of a cluster of 8 x 512 threads that reads 256 KiB
and does three cluster barriers: 2.1 us.

Limits. sm_90 and up; bf16 and f16; single members, or groups of 8 without order; k <= 4,096; order "any", and of the
largest "index", ties, and, for k <= 2,048, "value"; rows of any length and alignment.

Source: vLLM, `vllm.models.deepseek_v41.nvidia.specialized_decode.attention.decode_topk_cute` (DecodeTopK), 2026:
clusters, sampling with an exact way back, queues of vectors. Different here: the row is streamed, not held, so that
there is one build for all widths; samples are maxima of scores from everywhere; keys equal to the cutoff are counted
and not kept; survivors stay where they are and every CTA writes its own; messages instead of cluster barriers.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_flags import ORDER_VALUE, PIN_NEWEST, TIES_HIGHEST
from ._cute_rows import SelectArguments, find_cells, has
from .cluster_bins import BINS
from .cluster_exact import Exact
from .cluster_filter import Filter
from .cluster_layout import Place, Range, Window
from .cluster_order import Order
from .cluster_sample import Sample

DIRECT = 1  # bit of `path`: no sampling
FEWEST = 64  # vectors of a row that is sampled; of less, all fit in the list


def everything() -> Range:
    """All keys, none counted yet."""
    zero = Int32(0)
    return Range(zero, Int32(0xFFFF), zero, zero, zero, zero, zero, Boolean(True), Boolean(False))


class ClusterSelect(Sample, Filter, Exact, Order):
    """The kernel for one cluster size, direction, dtype and group, ordered or not."""

    WIDE_ARGUMENTS = 15
    NARROW_ARGUMENTS = 11

    @cute.jit
    def __call__(self, *values):
        """Launches a cluster a row.

        The arguments are `SelectArguments`, then `rows`, `path` (bit DIRECT), whether the grid may start
        before the one before it in the stream has ended (programmatic dependent launch), and the stream.
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
        by_value = Boolean(False)
        worst = Int32(0)
        if const_expr(self.ordered):
            by_value = has(arguments.flags, ORDER_VALUE)
        pinned = Int32(0)
        if const_expr(self.grouped):
            pinned = Int32(has(arguments.flags, PIN_NEWEST) and row.count > Int32(0))
        if row.count <= k:
            self.meet()
            cute.arch.griddepcontrol_launch_dependents()
            if not by_value:
                self.write_short(arguments, find_cells(arguments, row_index, self.dtype, 2), row, place, pinned)
        else:
            part = row
            if const_expr(self.grouped):  # the pinned element is apart
                if pinned > Int32(0):
                    part = Window(row.base, row.count - 1, Int64(row.count - 1) * 8)
                    k = cutlass.max(k - 1, Int32(1))
            grid = self.lay_out(part, place, has(arguments.flags, TIES_HIGHEST))
            if const_expr(self.ordered):
                self.save_window(shared, place, row)
            low = Int32(0)
            shift = Int32(8)
            filtering = (path & Int32(DIRECT)) == Int32(0)
            sampling = filtering and grid.vectors >= Int32(FEWEST)
            members = Int32(0)
            if sampling:
                members = self.members(grid, k)
            self.load_sample(shared, place, grid, members)
            words = self.load_first(grid, filtering)
            if sampling:
                sample = self.make_sample(shared, place, members)
                low, shift = self.find_cutoff(shared, place, grid, k, members, sample)
            else:
                cute.arch.sync_threads()
            self.meet()
            cutoff = cops.cutoff_of(low, self.largest, self.dtype)
            limit = Int32(self.capacity + self.capacity // 4)
            found = everything()
            retried = not filtering
            passes = Int32(0)
            while not found.settled and passes < Int32(10):
                if filtering:
                    self.filter_row(shared, place, grid, words, cutoff, shift, limit)
                    cute.arch.griddepcontrol_launch_dependents()
                    cute.arch.sync_threads()
                    full = shared.sCount[0] > Int32(self.capacity)
                    found = everything()._replace(low=cutoff.low, from_row=full)
                else:
                    shift = cutlass.max(cops.bit_length(found.high - found.low) - 8, Int32(0))
                    if found.from_row:
                        self.count_row(shared, place, grid, found, shift)
                    else:
                        self.count_list(shared, place, found, shift)
                found = self.narrow(shared, place, found, shift, k, passes)
                passes = passes + 1
                misjudged = found.high < cutoff.low or shared.sTotal[BINS - 1] >= Int32(0xFFFF)
                again = Boolean(False)
                if filtering and misjudged and not retried:
                    found = everything()
                    filtering = Boolean(False)
                elif not filtering and not retried:
                    cutoff = cops.cutoff_of(found.low, self.largest, self.dtype)
                    shift = Int32(0)
                    limit = Int32(0x7FFFFFFF)
                    filtering = Boolean(True)
                    retried = Boolean(True)
                    again = Boolean(True)
                    self.clear(shared, place)
                else:
                    filtering = Boolean(False)
                    retried = Boolean(True)
                words = self.load_first(grid, again)
            cells = find_cells(arguments, row_index, self.dtype, 2)
            if const_expr(self.grouped):
                if pinned > Int32(0) and place.rank == Int32(0) and tid == Int32(0):
                    self.write_pinned(arguments, cells, row)
                arguments = arguments._replace(k=arguments.k - pinned)
            unlisted = found.from_row or found.low == cutoff.low  # keys equal to the cutoff are in no list
            if const_expr(self.ordered):
                worst = found.low
                row = self.load_window(shared)
                grid = self.lay_out(row, place, has(arguments.flags, TIES_HIGHEST))
                self.emit_in_order(arguments, row_index, row, shared, place, grid, found, found.from_row, unlisted)
            else:
                share = self.share_ties(arguments, found)
                if not found.from_row:
                    self.emit_list(arguments, cells, row, shared, place, found, share)
                if unlisted:
                    self.emit_row(arguments, cells, row, shared, place, grid, found, share, found.from_row)
        if const_expr(self.ordered):
            if by_value and place.rank == Int32(0):
                row = self.find_window(arguments, row_index)
                self.emit_by_value(arguments, row_index, row, shared, place, Uint32(worst))
