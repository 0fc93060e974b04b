"""How the f32 kernel of the `cluster` family lays out a row and shared memory; explained in `cluster32_kernel`."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import cluster32_ops as kops
from ._cute_rows import find_row
from .cluster_bins import BINS

THREADS = 512
COPIES = 16  # of the bins while the row is counted
PIVOTS = 32
SAMPLES = 512
BLOCK = 16  # samples that may have neighbouring scores
DEVIATIONS = 4.5
ALIKE = 3.25
SPARSE = 1 << 31  # elements to select, times scores of the row
VECTORS = 4  # of a thread in a batch
FEW = 4  # scores of a sample where k is not small against the row
MANY = 16  # scores of a sample where it is
AHEAD = 4  # vectors of a thread on their way where a row is read for output
LAST = 128  # keys among which the k-th best is looked for one by one: at most four warps'
UNSAMPLED = 4096  # rows of no more scores are listed whole
TOP = 0xFFFFFFFF


class Window(NamedTuple):
    """The scores of a row."""

    base: Int64  # address of the first
    count: Int32


class Grid(NamedTuple):
    """A row's scores as 16-byte vectors from the aligned address at or before the first score."""

    base: Int64  # address of vector 0
    skew: Int32  # scores of vector 0 before the row
    count: Int32  # scores of the row
    vectors: Int32
    first_part: Int32  # vector 0 if it begins before the row, else -1
    last_part: Int32  # the last vector if it ends after the row, else -1
    batches: Int32
    first: Int32  # this CTA's first vector
    step: Int32  # vectors from the first of one of its segments to that of the next
    limit: Int32  # it has vectors below this one
    whole: Int32  # vectors that do not reach outside the row: from this one
    wholes: Uint32  # on so many, below `limit`


class Place(NamedTuple):
    """This thread."""

    tid: Int32
    warp: Int32
    lane: Int32
    below: Int32  # mask of the lanes before this one
    rank: Int32  # of the CTA in its cluster


class Shared(NamedTuple):
    """Shared memory of a CTA."""

    sList: cute.Tensor  # (capacity) Uint64: key << 32 | element
    sQueue: cute.Tensor  # (warps * depth) Int32: vectors to be looked at, a queue a warp
    sSample: cute.Tensor  # (SAMPLES) Uint32: keys
    sPivot: cute.Tensor  # (PIVOTS) Int32: samples at or above each pivot, and << 16 the squares of the blocks' counts
    sBin: cute.Tensor  # (BINS) Int32: this CTA's keys by bin
    sReach: cute.Tensor  # (2 * cluster * BINS / 2) Int32: each CTA's keys in a bin or above, 16 bits, two buffers
    sTotal: cute.Tensor  # (BINS + 1) Int32: the same for the cluster
    sLower: cute.Tensor  # (BINS + 1) Int32: the same for the CTAs of lower rank
    sLast: cute.Tensor  # (LAST) Uint32: the cluster's keys of the range in which the k-th best is, then zeros
    sCount: cute.Tensor  # (4) Int32: entries of the list, keys written above the k-th best, equal to it, keys sent last
    sBarrier: cute.Tensor  # (5) Int64: samples; bins, two buffers; last keys; elements, sent for order "value"


class Range(NamedTuple):
    """The keys among which the k-th best is: low .. high."""

    low: Uint32
    high: Uint32
    above: Int32  # keys of the cluster that are better than `high`
    lower: Int32  # of those, keys of the CTAs of lower rank
    ties: Int32  # keys in the range of the CTAs of lower rank
    own: Int32  # of this CTA
    inside: Int32  # of the cluster
    settled: Boolean  # keys above `low` are selected, and of those equal to it as many as are missing


class Layout:
    """Compile-time facts of a variant, and what depends on them alone."""

    grouped = False
    elements = 4  # of a vector
    floor = 0  # the cutoff of a row that is not sampled: no key is below

    def __init__(self, cluster: int, largest: bool = True, dtype: str = ops.F32, group: int = 1, ordered: bool = False):
        self.cluster = cluster
        self.largest = largest
        self.ordered = ordered
        # For order a thread wants more than 64 registers. Only clusters of 8 are launched where two CTAs share an SM.
        self.residents = 1 if ordered and cluster in (2, 4, 16) else 2
        self.threads = THREADS
        self.warps = THREADS // 32
        self.vectors = VECTORS
        self.capacity = {1: 10176, 2: 5952, 16: 4096}.get(cluster, 5120)
        self.depth = 32 * (VECTORS + 1)
        self.samplers = SAMPLES // 32 // cluster  # warps of a CTA that take samples, one a lane
        if dtype != ops.F32 or (group > 1) != self.grouped:
            raise ValueError(f"{type(self).__name__} does not select groups of {group} scores of {dtype}")

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that `start` lays out."""
        queue = self.warps * self.depth
        words = queue + SAMPLES + PIVOTS + LAST + BINS + self.cluster * BINS + 2 * (BINS + 4) + 4
        return self.capacity * 8 + words * 4 + 48

    @cute.jit
    def start(self, place: Place) -> Shared:
        """Lays out shared memory, clears what is counted in, and arrives at the barrier that `meet` waits for."""
        smem = cutlass.utils.SmemAllocator()

        def words(count, kind=Int32):
            return smem.allocate_tensor(kind, cute.make_layout(count), byte_alignment=16)

        shared = Shared(
            sList=words(self.capacity, Uint64),
            sQueue=words(self.warps * self.depth),
            sSample=words(SAMPLES, Uint32),
            sPivot=words(PIVOTS),
            sBin=words(BINS),
            sReach=words(self.cluster * BINS),
            sTotal=words(BINS + 4),
            sLower=words(BINS + 4),
            sLast=words(LAST, Uint32),
            sCount=words(4),
            sBarrier=words(5, Int64),
        )
        tid = place.tid
        if tid < Int32(BINS):
            shared.sBin[tid] = Int32(0)
        if tid < Int32(PIVOTS):
            shared.sPivot[tid] = Int32(0)
        if tid < Int32(LAST):
            shared.sLast[tid] = Uint32(0)
        if tid < Int32(4):
            shared.sCount[tid] = Int32(0)
            shared.sTotal[BINS + tid] = Int32(0)
            shared.sLower[BINS + tid] = Int32(0)
        if const_expr(self.cluster > 1):
            if tid == Int32(0):
                for i in cutlass.range_constexpr(5):
                    cute.arch.mbarrier_init(shared.sBarrier.iterator + i, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(shared.sBarrier.iterator, SAMPLES * 4)
                for i in cutlass.range_constexpr(1, 3):
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.sBarrier.iterator + i, self.cluster * BINS * 2)
            cute.arch.sync_warp()
            cute.arch.cluster_arrive_relaxed(aligned=True)
        return shared

    @cute.jit
    def clear(self, shared: Shared, place: Place):
        """Empties the list, the bins and the counts at pivots."""
        cute.arch.sync_threads()
        if place.tid < Int32(BINS):
            shared.sBin[place.tid] = Int32(0)
        if place.tid < Int32(PIVOTS):
            shared.sPivot[place.tid] = Int32(0)
        if place.tid == Int32(0):
            shared.sCount[0] = Int32(0)
        cute.arch.sync_threads()

    @cute.jit
    def meet(self):
        """Waits until every CTA of the cluster has set up its shared memory."""
        if const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        cute.arch.sync_threads()

    @cute.jit
    def find_window(self, arguments, row_index: Int32) -> Window:
        """The row's window; without lengths and starts in few instructions, since all loads wait for it."""
        row_base = arguments.input + Int64(row_index) * arguments.row_stride * 4
        window = Window(row_base, Int32(cutlass.min(Int64(arguments.width), arguments.max_length)))
        if arguments.lengths != Int64(0) or arguments.row_starts != Int64(0) or arguments.next_n != Int32(1):
            row = find_row(arguments, row_index, 4)
            window = Window(row.base, row.count)
        return window

    @cute.jit
    def lay_out(self, row: Window, place: Place, mirrored: Boolean) -> Grid:
        """Cuts the row into vectors and says which are this CTA's.

        Args:
            row: the row.
            place: this thread. For ordered output a CTA's vectors are neighbours; else its segments of 32 are spread
                over the row.
            mirrored: of neighbours, the CTAs' ranks go from the row's end to its beginning.
        """
        skew = Int32(row.base & Int64(15)) >> 2
        slots = Uint32(skew) + Uint32(row.count)
        vectors = Int32((slots + Uint32(3)) >> Uint32(2))
        first_part = Int32(-1)
        last_part = Int32(-1)
        if skew != Int32(0):
            first_part = Int32(0)
        if (slots & Uint32(3)) != Uint32(0):
            last_part = vectors - 1
        each = (vectors + (self.cluster * 32 - 1)) // (self.cluster * 32) * 32
        first = place.rank * 32
        step = Int32(self.cluster * 32)
        limit = vectors
        if const_expr(self.ordered):
            chunk = place.rank
            if mirrored:
                chunk = self.cluster - 1 - place.rank
            first = chunk * each
            step = Int32(32)
            limit = cutlass.min(first + each, vectors)
        batch = self.vectors * self.threads
        batches = (each + (batch - 1)) // batch
        whole = first_part + 1
        end = limit
        if last_part >= Int32(0):
            end = cutlass.min(limit, last_part)
        return Grid(
            row.base - Int64(skew) * 4,
            skew,
            row.count,
            vectors,
            first_part,
            last_part,
            batches,
            first,
            step,
            limit,
            whole,
            Uint32(cutlass.max(end - whole, Int32(0))),
        )

    @cute.jit
    def vector_of(self, place: Place, grid: Grid, batch: Int32, slot) -> Int32:
        """The vector that this thread has in a slot of a batch; beyond `grid.limit` it has none."""
        segment = (slot * grid.batches + batch) * self.warps + place.warp
        return grid.first + segment * grid.step + place.lane

    @cute.jit
    def is_whole(self, grid: Grid, vector: Int32) -> Boolean:
        """Whether a vector of this CTA does not reach outside the row; of those beyond `grid.limit` none does."""
        return Uint32(vector - grid.whole) < grid.wholes

    @cute.jit
    def is_part(self, grid: Grid, vector: Int32) -> Boolean:
        """Whether a vector reaches outside the row."""
        return vector == grid.first_part or vector == grid.last_part

    def element_of(self, grid: Grid, vector: Int32) -> Int32:
        """The first element of a vector."""
        return vector * 4 - grid.skew

    @cute.jit
    def load_vector(self, grid: Grid, vector: Int32, wanted: Boolean):
        """The scores of a vector, if it is wanted and does not reach outside the row."""
        return ops.load_words(grid.base + Int64(vector) * 16, wanted and not self.is_part(grid, vector), 0)

    @cute.jit
    def keys_of(self, grid: Grid, vector: Int32, wanted: Boolean, words):
        """The keys of a vector's scores, and which of them are the row's, as bits.

        A vector that reaches outside the row is loaded here, score by score; its words do not matter.
        """
        a, b, c, d = words
        valid = Uint32(0)
        if wanted:
            valid = Uint32(0xF)
            if self.is_part(grid, vector):
                valid = Uint32(0)
                for i in cutlass.range(4, unroll=1):
                    inside = Uint32(vector * 4 + (3 - i) - grid.skew) < Uint32(grid.count)
                    b, c, d = a, b, c
                    a = Uint32(0)
                    if inside:
                        a = ops.load_score(grid.base + Int64(vector) * 16 + Int64(3 - i) * 4, ops.F32)
                    valid = (valid << Uint32(1)) | Uint32(inside)
        keys = [kops.key_of(word, self.largest) for word in (a, b, c, d)]
        return keys, valid

    @cute.jit
    def bin_of(self, above: Uint32, shift: Int32) -> Int32:
        """The bin of a key that is `above` > 0 keys above the range's lowest, which has bin 0 to itself.

        Then 2 ** shift keys share a bin; the last takes all that is above.
        """
        return Int32(cutlass.min(((above - Uint32(1)) >> Uint32(shift)) + Uint32(1), Uint32(BINS - 1)))
