"""Device code of the `cluster` family: a thread-block cluster of 1, 2, 4, 8 or 16 CTAs a row; the row is read once.

Idea. A cutoff found from a few thousand scores lets through k and some more keys: these alone are looked at closely.
They are counted exactly, by bins that begin at the cutoff, so that the bins say what the k-th best key is: no buffer
and no sample is a bound on correctness. A bf16 score has a 16-bit key (`cluster_ops`), and the k-th best is seldom more
than 255 keys above the cutoff: mostly one count is enough. If the bin of the k-th best holds several keys, that range
is counted again, from the list of what was let through or, if that does not hold it, from the row. If the cutoff was
bad (fewer than k keys pass, or a flood), one coarse count of the row gives a cutoff that is not, and the row is
filtered again.

Steps, with the names of the methods:

1. `start`, `find_window`, `lay_out`: shared memory is cleared; the row's window becomes 16-byte vectors from the
   aligned address at or before its start. Rows of no more than k scores are written at once (`write_short`).
2. `load_sample`, `load_batch`: 16 single scores for each of 512 samples (8 in clusters of 4 and more), from everywhere
   in the row, so that no order of the scores misleads; behind them, without waiting, each thread's first 4 vectors.
3. `find_cutoff`: the samples (the best of their scores, of 4 or of one, the smaller the row is against k) go to
   every CTA, which finds the cutoff by itself: 32 pivots, each the best of a few samples so that they crowd around the
   wanted rank; every sample is compared with every pivot; the cutoff is the best pivot with enough samples at or above
   it. "Enough" is the k-th best's expected rank plus 4.5 standard deviations plus 3 (few samples are not normal).
4. `filter_row`, `drain`: vectors whose best key is above the cutoff (packed maxima) go into a queue of their warp; it
   is unpacked 32 vectors at a time, a vector a lane, so that lanes are busy however few vectors pass. Keys above the
   cutoff are put into the CTA's list and counted in bins by one atomic each. Keys equal to it are only counted, in a
   register: a row of equal scores costs neither atomics nor list entries.
5. `send_bins`, `narrow`: each CTA sends its bins, summed from above, to every other; each finds the bin of the k-th
   best and, from the counts of the CTAs of lower rank, where its own output begins. While the bin holds several keys:
   `count_list` or `count_row`, and again.
6. `emit_list` or `emit_row`: every CTA writes its own selected elements; one reservation a warp. If the k-th best is
   the cutoff itself, those equal to it are looked for in the row until there are enough.

Threads. Segments of 32 vectors (256 scores) go round the CTAs of the cluster, then round their warps, then over the
slots of a batch, so that neighbouring large scores are spread over warps and CTAs (C CTAs, W warps, B batches):

    slot 0, batch 0   |warp 0: CTA 0|CTA 1|..|CTA C-1|warp 1: CTA 0|..|warp W-1: CTA C-1|    32 vectors each
            batch 1   |      "
            ..
    slot 1, batch 0   |      "          = segment ((1 * B + 0) * W + warp) * C + rank

Shared memory, 84 KiB for one CTA a row, 97 to 111 KiB in clusters: list 40 or 68 KiB, 8 bytes an entry, written by all
warps (later the copies of the bins for `count_row`) | queues 10 KiB and, in clusters, their vectors 40 KiB, a part a
warp | samples 2 KiB and bins of all CTAs 1 KiB a CTA, written by all CTAs of the cluster | bins, sums, counters 4 KiB.

Barriers. Only one is of the whole cluster: all CTAs have started and initialised their mbarriers (arrived at before,
waited for after the first loads are issued). After it CTAs only send, by st.async, and count the bytes that came at an
mbarrier of their own: samples once, bins once a count in two buffers (a CTA sends count n + 2 after it got all of count
n + 1, which a peer sends after it has read count n). No CTA reads another's memory, and each waits for all that is sent
to it, so none leaves while a peer may still write to it. A cluster barrier with release and acquire would cost a
fence over all of the GPU and this CTA's L1 cache. In the CTA: samples complete, pivots counted, list and bins complete,
sums complete.

Cost. One launch, no scratch memory. Bytes: the row once (4.3 TB/s on an H200: 0.06 us for 131,072 scores, 125 us for
256 x 1,048,576). Floor of a cluster of 8 x 512 threads that reads 256 KiB and does three cluster barriers: 2.1 us.

Limits. sm_90 and up; bf16, single members; k <= 4,096; order and ties "any"; rows of any length and alignment.

Source: vLLM, `vllm.models.deepseek_v41.nvidia.specialized_decode.attention.decode_topk_cute` (DecodeTopK), 2026:
clusters, sampling with an exact way back, queues of vectors. Different here: the row is streamed, not held, so that
there is one build for all widths; samples are maxima of scores from everywhere; keys equal to the cutoff are counted
and not kept; survivors stay where they are and every CTA writes its own; messages instead of cluster barriers.
"""

# mypy: ignore-errors

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_rows import SelectArguments, find_cells
from .cluster_emit import Emit
from .cluster_exact import Exact
from .cluster_filter import Filter
from .cluster_layout import BINS, Place, Range

DIRECT = 1  # bit of `path`: no sampling


def everything() -> Range:
    """All keys, none counted yet."""
    return Range(Int32(0), Int32(0xFFFF), Int32(0), Int32(0), Int32(0), Boolean(True), Boolean(False))


class ClusterSelect(Filter, Exact, Emit):
    """The kernel for one cluster size; bf16, single members."""

    WIDE_ARGUMENTS = 14
    NARROW_ARGUMENTS = 11

    @cute.jit
    def __call__(
        self,
        input: Int64,
        row_stride: Int64,
        lengths: Int64,
        max_length: Int64,
        row_starts: Int64,
        out_indices: Int64,
        out_indices_stride: Int64,
        out_values: Int64,
        out_values_stride: Int64,
        row_offsets: Int64,
        page_table: Int64,
        table_stride: Int64,
        row_to_table: Int64,
        table_starts: Int64,
        width: Int32,
        k: Int32,
        next_n: Int32,
        group_shift: Int32,
        flags: Int32,
        tables: Int32,
        entries: Int32,
        page_shift: Int32,
        rows: Int32,
        path: Int32,
        dependent: Int32,
        stream: cuda.CUstream,
    ):
        """Launches a cluster a row.

        The arguments are `SelectArguments`, then `rows`, `path` (bit DIRECT), whether the grid may start before the
        one before it in the stream has ended (programmatic dependent launch), and the stream.
        """
        self.kernel(
            input,
            row_stride,
            lengths,
            max_length,
            row_starts,
            out_indices,
            out_indices_stride,
            out_values,
            out_values_stride,
            row_offsets,
            page_table,
            table_stride,
            row_to_table,
            table_starts,
            width,
            k,
            next_n,
            group_shift,
            flags,
            tables,
            entries,
            page_shift,
            path,
        ).launch(
            grid=[rows * self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if const_expr(self.cluster > 1) else None,
            stream=stream,
            use_pdl=dependent,
            min_blocks_per_mp=self.residents,
            preferred_smem_carveout=-1,  # the driver's default; unset, the compiler would ask a device
        )

    @cute.kernel
    def kernel(
        self,
        input: Int64,
        row_stride: Int64,
        lengths: Int64,
        max_length: Int64,
        row_starts: Int64,
        out_indices: Int64,
        out_indices_stride: Int64,
        out_values: Int64,
        out_values_stride: Int64,
        row_offsets: Int64,
        page_table: Int64,
        table_stride: Int64,
        row_to_table: Int64,
        table_starts: Int64,
        width: Int32,
        k: Int32,
        next_n: Int32,
        group_shift: Int32,
        flags: Int32,
        tables: Int32,
        entries: Int32,
        page_shift: Int32,
        path: Int32,
    ):
        arguments = SelectArguments(
            input,
            row_stride,
            lengths,
            max_length,
            row_starts,
            out_indices,
            out_indices_stride,
            out_values,
            out_values_stride,
            row_offsets,
            page_table,
            table_stride,
            row_to_table,
            table_starts,
            width,
            k,
            next_n,
            group_shift,
            flags,
            tables,
            entries,
            page_shift,
        )
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        place = Place(tid, cute.arch.make_warp_uniform(tid >> 5), tid & 31, ops.lanes_below(), block % self.cluster)
        row_index = block // self.cluster
        shared = self.start(place)
        cute.arch.griddepcontrol_wait()
        row = self.find_window(arguments, row_index)
        if row.count <= k:
            self.meet()
            cute.arch.griddepcontrol_launch_dependents()
            self.write_short(arguments, find_cells(arguments, row_index, ops.BF16, 2), row, place)
        else:
            grid = self.lay_out(row)
            low = Int32(0)
            shift = Int32(8)
            filtering = (path & Int32(DIRECT)) == Int32(0)
            batch = Int32(0)
            if not filtering:
                batch = grid.batches  # nothing is loaded
            scores = self.load_sample(place, grid, filtering)
            words = self.load_batch(place, grid, batch)
            self.meet()
            if filtering:
                low, shift = self.find_cutoff(shared, place, grid, k, self.best_of_sample(place, grid, k, scores))
            limit = Int32(self.capacity + self.capacity // 4)
            found = everything()
            retried = not filtering
            passes = Int32(0)
            while not found.settled and passes < Int32(10):
                if filtering:
                    self.filter_row(shared, place, grid, words, low, shift, limit)
                    cute.arch.griddepcontrol_launch_dependents()
                    cute.arch.sync_threads()
                    full = shared.sCount[0] > Int32(self.capacity)
                    found = Range(low, Int32(0xFFFF), Int32(0), Int32(0), Int32(0), full, Boolean(False))
                else:
                    shift = cutlass.max(cops.bit_length(found.high - found.low) - 8, Int32(0))
                    if found.from_row:
                        self.count_row(shared, place, grid, found, shift)
                    else:
                        self.count_list(shared, place, found, shift)
                found = self.narrow(shared, place, found, shift, k, passes)
                passes = passes + 1
                batch = grid.batches
                misjudged = found.high < low or shared.sTotal[BINS - 1] >= Int32(0xFFFF)
                if filtering and misjudged and not retried:
                    found = everything()
                    filtering = Boolean(False)
                elif not filtering and not retried:
                    low = found.low
                    shift = Int32(0)
                    limit = Int32(0x7FFFFFFF)
                    filtering = Boolean(True)
                    retried = Boolean(True)
                    batch = Int32(0)
                    self.clear(shared, place)
                else:
                    filtering = Boolean(False)
                    retried = Boolean(True)
                words = self.load_batch(place, grid, batch)
            cells = find_cells(arguments, row_index, ops.BF16, 2)
            if not found.from_row:
                self.emit_list(arguments, cells, row, shared, place, found)
            if found.from_row or found.low == low:  # keys equal to the cutoff are in no list
                self.emit_row(arguments, cells, row, shared, place, grid, found, found.from_row)
