"""How the `cluster` family lays out a row and shared memory; part of `cluster_kernel`, where it is explained."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import cluster_ops as cops
from ._cute_rows import find_row
from .cluster_bins import BINS

COPIES = 16  # of the bins while the row is counted
PIVOTS = 32
LANES = 8  # samples are made by so many lanes together


class Window(NamedTuple):
    """The scores of a row."""

    base: Int64  # address of the first
    count: Int32  # elements
    length: Int64  # scores; as many as elements, but for groups


class Grid(NamedTuple):
    """A row's scores as aligned 16-byte vectors, but for those before the first and after the last: its ends."""

    row: Int64  # address of the first score
    count: Int32  # scores of the row
    head: Int32  # scores before the first vector
    tail: Int32  # scores after the last vector
    base: Int64  # address of the first vector
    vectors: Int32
    batches: Int32
    first: Int32  # this thread's first vector
    step: Int32  # vectors from one of a thread to its next
    limit: Int32  # this thread's vectors are below
    chunk: Int32  # this CTA's first vector, if its vectors are neighbours
    part: Int32  # which part of the row is this CTA's: the first has the head, the last the tail


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
    sData: cute.Tensor  # (warps * depth * staged) Int32: their scores, or best score
    sSample: cute.Tensor  # (samples) Int32: keys
    sPivot: cute.Tensor  # (PIVOTS) Int32: samples at or above each pivot
    sBin: cute.Tensor  # (BINS) Int32: this CTA's keys by bin
    sReach: cute.Tensor  # (2 * cluster * BINS / 2) Int32: each CTA's keys in a bin or above, 16 bits, two buffers
    sTotal: cute.Tensor  # (BINS + 1) Int32: the same for the cluster
    sLower: cute.Tensor  # (BINS + 1) Int32: the same for the CTAs of lower rank
    sCount: cute.Tensor  # (2) Int32: entries of the list; keys written, those equal to the k-th best << 16
    sWindow: cute.Tensor  # (2) Int64: the row's window, which is read again for ordered output
    sBarrier: cute.Tensor  # (3) Int64: bins, two buffers; elements in index order, sent for order "value"


class Range(NamedTuple):
    """The keys among which the k-th best is: low .. high."""

    low: Int32
    high: Int32
    above: Int32  # keys of the cluster that are better than `high`
    lower: Int32  # of those, keys of the CTAs of lower rank
    ties: Int32  # keys equal to `low` of the CTAs of lower rank, once `settled`
    own: Int32  # of this CTA
    inside: Int32  # of the cluster
    from_row: Boolean  # this CTA's list does not hold all of its keys of the range
    settled: Boolean  # low == high, and counted


class Layout:
    """Compile-time facts of a variant, and what depends on them alone."""

    def __init__(
        self,
        cluster: int,
        largest: bool = True,
        dtype: str = ops.BF16,
        group: int = 1,
        ordered: bool = False,
        threads: int = 512,
        vectors: int = 0,
        deep: int = 1,
        residents: int = 0,
        capacity: int = 0,
        deviations: float = 4.5,
    ):
        self.cluster = cluster
        self.largest = largest
        self.dtype = dtype
        self.grouped = group > 1
        self.ordered = ordered
        self.elements = 8 // group  # of a vector
        self.single = 1 if group > 1 else 0xFFFF  # one key equal to the cutoff, as `counted` counts it
        self.threads = threads
        self.warps = threads // 32
        self.vectors = vectors or (4 if cluster == 2 else 2)  # of a thread in a batch
        self.deep = deep  # batches that are loaded before the first is looked at
        self.samples = threads
        self.sets = 4 if cluster == 1 else 2  # vectors that each thread samples
        self.unit = LANES // group  # of how many elements a sample is the best, for each vector of a thread
        self.deviations = deviations
        # For order a thread wants more than 64 registers. Only clusters of 8 are launched where two CTAs share an SM.
        self.residents = residents or (1 if ordered and cluster in (2, 4, 16) else 2)
        self.capacity = capacity or (9216 if cluster == 1 else 5120)
        self.depth = 32 * (self.vectors + 1)
        self.staged = 4 // group or 1  # words of a queued vector that are kept
        self.stride = threads * cluster  # vectors from a thread's one to its next
        if cluster > self.warps:
            raise ValueError(f"{cluster} CTAs and {self.warps} warps: each CTA's bins are sent by a warp")
        if group not in (1, 8):
            raise ValueError(f"group is {group}: an element is a score, or a vector of 8")
        if threads not in (512, 1024):
            raise ValueError(f"{threads} threads: the bins are folded by 512 or 1024")

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that `start` lays out."""
        queue = self.warps * self.depth
        words = queue + self.samples + PIVOTS + BINS + self.cluster * BINS + 2 * (BINS + 4) + 4
        return self.capacity * 8 + queue * 4 * self.staged + words * 4 + 64

    @cute.jit
    def start(self, place: Place) -> Shared:
        """Lays out shared memory, clears what is counted in, and arrives at the barrier that `meet` waits for."""
        smem = cutlass.utils.SmemAllocator()

        def words(count, kind=Int32):
            return smem.allocate_tensor(kind, cute.make_layout(count), byte_alignment=16)

        shared = Shared(
            sList=words(self.capacity, Uint64),
            sQueue=words(self.warps * self.depth),
            sData=words(self.warps * self.depth * self.staged),
            sSample=words(self.samples),
            sPivot=words(PIVOTS),
            sBin=words(BINS),
            sReach=words(self.cluster * BINS),
            sTotal=words(BINS + 4),
            sLower=words(BINS + 4),
            sCount=words(4),
            sWindow=words(2, Int64),
            sBarrier=words(3, Int64),
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
                for i in cutlass.range_constexpr(2):
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

    @cute.jit
    def find_window(self, arguments, row_index: Int32) -> Window:
        """The row's window; without lengths and starts in few instructions, since all loads wait for it."""
        row_base = arguments.input + Int64(row_index) * arguments.row_stride * 2
        length = cutlass.min(Int64(arguments.width), arguments.max_length)
        window = Window(row_base, self.elements_in(length), length)
        if arguments.lengths != Int64(0) or arguments.row_starts != Int64(0) or arguments.next_n != Int32(1):
            row = find_row(arguments, row_index, 2)
            window = Window(row.base, row.count, row.length)
        return window

    @cute.jit
    def save_window(self, shared: Shared, place: Place, row: Window):
        """Puts the window into shared memory, so that what is made of it takes no registers while the row is read."""
        if place.tid == Int32(0):
            shared.sWindow[0] = row.base
            shared.sWindow[1] = row.length

    @cute.jit
    def load_window(self, shared: Shared) -> Window:
        """The window that was saved, some barriers ago."""
        base = cops.load_long(Int32(shared.sWindow.iterator.toint()))
        length = cops.load_long(Int32(shared.sWindow.iterator.toint()) + 8)
        return Window(base, Int32(length), length)

    def elements_in(self, length: Int64) -> Int32:
        """How many elements a number of scores is."""
        return Int32((length + 7) >> 3) if self.grouped else Int32(length)

    @cute.jit
    def lay_out(self, row: Window, place: Place, mirrored: Boolean) -> Grid:
        """Cuts the row into vectors and says which are this thread's.

        Args:
            row: the row.
            place: this thread. For ordered output a CTA's vectors are neighbours; else its segments of 32 are spread
                over the row.
            mirrored: of neighbours, the CTAs' ranks go from the row's end to its beginning.
        """
        length = Int32(row.length)
        head = cutlass.min((Int32(0) - (Int32(row.base & Int64(15)) >> 1)) & 7, length)
        if const_expr(self.grouped):
            head = Int32(0)
        vectors = (length - head) >> 3
        segments = (Uint32(vectors) + Uint32(31)) >> Uint32(5)
        warps = self.cluster * self.warps
        each = Int32((segments + Uint32(warps - 1)) // Uint32(warps))  # segments a warp
        first = (place.warp * self.cluster + place.rank) * 32
        step = Int32(self.stride)
        limit = vectors
        part = place.rank
        chunk = Int32(0)
        if const_expr(self.ordered):
            if mirrored:
                part = self.cluster - 1 - part
            size = Int32((segments + Uint32(self.cluster - 1)) // Uint32(self.cluster)) * 32
            each = (size + (self.threads - 1)) // self.threads
            chunk = part * size
            first = chunk + place.warp * 32
            step = Int32(self.threads)
            limit = cutlass.min(chunk + size, vectors)
        batches = (each + (self.vectors - 1)) // self.vectors
        base = row.base + Int64(head) * 2
        return Grid(
            row.base,
            row.count,
            head,
            (length - head) & 7,
            base,
            vectors,
            batches,
            first + place.lane,
            step,
            limit,
            chunk,
            part,
        )

    @cute.jit
    def element_of(self, grid: Grid, vector: Int32) -> Int32:
        """The first element of a vector."""
        return vector if self.grouped else grid.head + vector * 8

    @cute.jit
    def load_vector(self, grid: Grid, vector: Int32, wanted: Boolean):
        """The words of a vector, if it is wanted and there is one."""
        address = grid.base + Int64(vector) * 16
        wanted = wanted and vector < grid.limit
        if const_expr(self.grouped):
            words = cops.load_past(address, wanted and (grid.base & Int64(15)) == Int64(0))
            if (grid.base & Int64(15)) != Int64(0):
                words = self.load_scores(address, wanted)
            return words
        return cops.load_past(address, wanted)

    @cute.jit
    def load_scores(self, address: Int64, wanted: Boolean):
        """The words of a vector at any address, a score at a time."""
        scores = [cops.load_element(address + 2 * i, wanted) for i in range(8)]
        return tuple(scores[2 * i] | (scores[2 * i + 1] << Uint32(16)) for i in range(4))

    @cute.jit
    def has_ends(self, place: Place, grid: Grid) -> Boolean:
        """Whether this warp has scores of the row's ends."""
        head = grid.part == Int32(0) and grid.head > Int32(0)
        tail = grid.part == Int32(self.cluster - 1) and grid.tail > Int32(0)
        return place.warp == Int32(0) and (head or tail)

    @cute.jit
    def load_end(self, place: Place, grid: Grid):
        """This lane's score of the row's ends: whether there is one, its element and its key.

        Lanes below 8 have the head, the next 8 the tail; of groups, there is the last, if it is not whole, in lane 8.
        """
        wanted = grid.part == Int32(0) and place.lane < grid.head
        element = place.lane
        if place.lane >= Int32(8):
            wanted = grid.part == Int32(self.cluster - 1) and place.lane < grid.tail + 8
            element = grid.head + grid.vectors * 8 + place.lane - 8
        score = cops.load_element(grid.row + Int64(element) * 2, wanted)
        key = Int32(cops.word_keys(score, self.largest, self.dtype) & Uint32(0xFFFF))
        if const_expr(self.grouped):
            if not wanted:
                key = Int32(-1)
            key = cute.arch.warp_redux_sync(key, "max")
            wanted = wanted and place.lane == Int32(8)
            element = grid.vectors
        return wanted, element, key

    def keys_of(self, words):
        """The keys of a vector's words; of a group, its key in both halves of one word."""
        if self.grouped:
            words = [self.best_of(words)]
        return [cops.word_keys(word, self.largest, self.dtype) for word in words]

    def best_of(self, words) -> Uint32:
        """The best score of a vector, in both halves of a word."""
        best = self.better_of(words)
        return cops.better(best, ops.swap_halves(best), self.largest, self.dtype)

    def better_of(self, words) -> Uint32:
        """The best of a vector's lower scores, and of its upper ones."""
        largest, dtype = self.largest, self.dtype
        pairs = [cops.better(words[i], words[i + 1], largest, dtype) for i in (0, 2)]
        return cops.better(pairs[0], pairs[1], largest, dtype)

    def key(self, keys, e: int) -> Int32:
        """Key e of a vector."""
        word = keys[e // 2]
        return Int32(word >> Uint32(16)) if e % 2 else Int32(word & Uint32(0xFFFF))

    def bin_of(self, key: Int32, low: Int32, shift: Int32) -> Int32:
        """The bin of a key: 0 for `low` itself, then 2 ** shift keys a bin; the last takes all that is above."""
        return cutlass.min((key - low + ((Int32(1) << shift) - 1)) >> shift, Int32(BINS - 1))
