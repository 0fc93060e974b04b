"""How the `cluster` family lays out a row and shared memory; part of `cluster_kernel`, where it is explained."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_rows import find_row

BINS = 256
COPIES = 16  # of the bins while the row is counted
PIVOTS = 32
FEW = 4  # scores of a sample where k is not small against the row


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
    sData: cute.Tensor  # (warps * depth * 4) Int32: their scores; only in clusters
    sSample: cute.Tensor  # (samples) Int32: keys
    sPivot: cute.Tensor  # (PIVOTS) Int32: samples at or above each pivot
    sBin: cute.Tensor  # (BINS) Int32: this CTA's keys by bin
    sReach: cute.Tensor  # (2 * cluster * BINS / 2) Int32: each CTA's keys in a bin or above, 16 bits, two buffers
    sTotal: cute.Tensor  # (BINS + 1) Int32: the same for the cluster
    sLower: cute.Tensor  # (BINS + 1) Int32: the same for the CTAs of lower rank
    sCount: cute.Tensor  # (3) Int32: entries of the list, keys written above the cutoff, equal to it
    sBarrier: cute.Tensor  # (3) Int64: samples; bins, two buffers


class Range(NamedTuple):
    """The keys among which the k-th best is: low .. high."""

    low: Int32
    high: Int32
    above: Int32  # keys of the cluster that are better than `high`
    lower: Int32  # of those, keys of the CTAs of lower rank
    ties: Int32  # keys equal to `low` of the CTAs of lower rank, once `settled`
    from_row: Boolean  # this CTA's list does not hold all of its keys of the range
    settled: Boolean  # low == high, and counted


class Layout:
    """Compile-time facts of a variant, and what depends on them alone."""

    def __init__(
        self,
        cluster: int,
        largest: bool = True,
        threads: int = 512,
        vectors: int = 4,
        samples: int = 512,
        deviations: float = 4.5,
        residents: int = 2,
        ahead: bool = False,
    ):
        self.cluster = cluster
        self.largest = largest
        self.threads = threads
        self.warps = threads // 32
        self.vectors = vectors
        self.at_once = min(vectors, 4)  # of them, where the row is counted
        self.samples = samples
        self.deviations = deviations
        self.residents = residents
        self.ahead = ahead
        self.capacity = 8704 if cluster == 1 else 5120
        self.group = 16 if cluster <= 2 else 8  # scores of a sample; few lists must not be flooded by chance
        self.depth = 32 * (vectors + 1)
        self.staged = cluster > 1
        self.per_warp = samples // (cluster * self.warps)
        if self.per_warp not in (1, 2, 4, 8, 16, 32) or samples % (4 * self.warps) or cluster > self.warps:
            raise ValueError(f"{samples} samples do not divide over {cluster} x {self.warps} warps")
        if threads not in (512, 1024):
            raise ValueError(f"{threads} threads: the bins are folded by 512 or 1024")

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that `start` lays out."""
        queue = self.warps * self.depth
        staged = queue * 16 if self.staged else 16
        words = queue + self.samples + PIVOTS + BINS + self.cluster * BINS + 2 * (BINS + 4) + 4
        return self.capacity * 8 + staged + words * 4 + 32

    @cute.jit
    def start(self, place: Place) -> Shared:
        """Lays out shared memory, clears what is counted in, and arrives at the barrier that `meet` waits for."""
        smem = cutlass.utils.SmemAllocator()

        def words(count, kind=Int32):
            return smem.allocate_tensor(kind, cute.make_layout(count), byte_alignment=16)

        shared = Shared(
            sList=words(self.capacity, Uint64),
            sQueue=words(self.warps * self.depth),
            sData=words(self.warps * self.depth * 4 if self.staged else 4),
            sSample=words(self.samples),
            sPivot=words(PIVOTS),
            sBin=words(BINS),
            sReach=words(self.cluster * BINS),
            sTotal=words(BINS + 4),
            sLower=words(BINS + 4),
            sCount=words(4),
            sBarrier=words(4, Int64),
        )
        tid = place.tid
        if tid < Int32(BINS):
            shared.sBin[tid] = Int32(0)
        if tid < Int32(PIVOTS):
            shared.sPivot[tid] = Int32(0)
        if tid < Int32(4):
            shared.sCount[tid] = Int32(0)
            shared.sTotal[BINS + tid] = Int32(0)
            shared.sLower[BINS + tid] = Int32(0)
        if const_expr(self.cluster > 1):
            if tid == Int32(0):
                for i in cutlass.range_constexpr(3):
                    cute.arch.mbarrier_init(shared.sBarrier.iterator + i, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(shared.sBarrier.iterator, self.samples * 4)
                for i in cutlass.range_constexpr(1, 3):
                    cute.arch.mbarrier_arrive_and_expect_tx(shared.sBarrier.iterator + i, self.cluster * BINS * 2)
            cute.arch.sync_warp()
            cute.arch.cluster_arrive_relaxed(aligned=True)
        return shared

    @cute.jit
    def clear(self, shared: Shared, place: Place):
        """Empties the list and the bins."""
        cute.arch.sync_threads()
        if place.tid < Int32(BINS):
            shared.sBin[place.tid] = Int32(0)
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
        row_base = arguments.input + Int64(row_index) * arguments.row_stride * 2
        window = Window(row_base, Int32(cutlass.min(Int64(arguments.width), arguments.max_length)))
        if arguments.lengths != Int64(0) or arguments.row_starts != Int64(0) or arguments.next_n != Int32(1):
            row = find_row(arguments, row_index, 2)
            window = Window(row.base, row.count)
        return window

    @cute.jit
    def lay_out(self, row: Window) -> Grid:
        """Cuts the row into vectors."""
        skew = Int32(row.base & Int64(15)) >> 1
        end = Uint32(skew) + Uint32(row.count)
        vectors = Int32((end + Uint32(7)) >> Uint32(3))
        first_part = Int32(-1)
        last_part = Int32(-1)
        if skew != Int32(0):
            first_part = Int32(0)
        if (end & Uint32(7)) != Uint32(0):
            last_part = vectors - 1
        batch = self.vectors * self.threads * self.cluster
        batches = (vectors + (batch - 1)) // batch
        return Grid(row.base - Int64(skew) * 2, skew, row.count, vectors, first_part, last_part, batches)

    @cute.jit
    def vector_of(self, place: Place, grid: Grid, batch: Int32, slot) -> Int32:
        """The vector that this thread has in a slot of a batch."""
        segment = ((slot * grid.batches + batch) * self.warps + place.warp) * self.cluster + place.rank
        return segment * 32 + place.lane

    @cute.jit
    def is_part(self, grid: Grid, vector: Int32) -> Boolean:
        """Whether a vector reaches outside the row."""
        return vector == grid.first_part or vector == grid.last_part

    @cute.jit
    def keys_of(self, grid: Grid, vector: Int32, wanted: Boolean, words):
        """The keys of a vector's words, and which of them are the row's, as bits.

        A vector that reaches outside the row is loaded here, score by score; its words do not matter.
        """
        a, b, c, d = words
        valid = Uint32(0)
        if wanted:
            valid = Uint32(0xFF)
            if self.is_part(grid, vector):
                valid = Uint32(0)
                for i in cutlass.range(8, unroll=1):
                    inside = Uint32(vector * 8 + (7 - i) - grid.skew) < Uint32(grid.count)
                    score = cops.load_element(grid.base + Int64(vector) * 16 + Int64(7 - i) * 2, inside)
                    d = (d << Uint32(16)) | (c >> Uint32(16))
                    c = (c << Uint32(16)) | (b >> Uint32(16))
                    b = (b << Uint32(16)) | (a >> Uint32(16))
                    a = (a << Uint32(16)) | score
                    valid = (valid << Uint32(1)) | Uint32(inside)
        keys = [cops.word_keys(word, self.largest) for word in (a, b, c, d)]
        return keys, valid

    @cute.jit
    def load_vector(self, grid: Grid, vector: Int32, wanted: Boolean):
        """The words of a vector, if it is wanted and does not reach outside the row."""
        return ops.load_words(grid.base + Int64(vector) * 16, wanted and not self.is_part(grid, vector), 0)

    def key(self, keys, e: int) -> Int32:
        """Key e of a vector."""
        word = keys[e // 2]
        return Int32(word >> Uint32(16)) if e % 2 else Int32(word & Uint32(0xFFFF))

    def bin_of(self, key: Int32, low: Int32, shift: Int32) -> Int32:
        """The bin of a key: 0 for `low` itself, then 2 ** shift keys a bin; the last takes all that is above."""
        return cutlass.min((key - low + ((Int32(1) << shift) - 1)) >> shift, Int32(BINS - 1))
