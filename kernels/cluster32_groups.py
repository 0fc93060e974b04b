"""Groups of f32 scores in the `cluster` family: how they are laid out, read, sampled and filtered.

Explained in `cluster32_kernel`.
"""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from . import cluster32_ops as kops
from ._cute_rows import find_row
from .cluster32_layout import UNSAMPLED, Layout, Place, Shared
from .cluster32_ops import NEG_INF, NEG_INF_KEY
from .cluster32_sample import Sample
from .cluster_bins import BINS

PAIRED = 8  # scores of a group up to which a sample is the best of two
MOST = 0.2  # share of the samples of two that is at or above the k-th best, at most


class Window(NamedTuple):
    """The groups of a row, without the newest where that is pinned."""

    base: Int64  # address of the first score
    count: Int32  # groups
    length: Int32  # scores
    log: Int32  # of the scores in a group
    pinned: Int32  # 1 where the newest is apart, else 0


class Grid(NamedTuple):
    """A row's groups as vectors of 4 scores from its first score, which may have any address."""

    base: Int64  # address of vector 0
    length: Int32  # scores of the row
    count: Int32  # groups of the row
    log: Int32  # of the vectors in a group
    vectors: Int32
    part: Int32  # the last vector if it has fewer than 4 scores, else -1
    aligned: Boolean  # vectors are at multiples of 16 bytes
    batches: Int32
    first: Int32  # as in the grid of single scores
    step: Int32
    limit: Int32


class Groups:
    """Steps 1 to 4 for groups, in place of what `Layout`, `Sample` and `Filter` do for single scores.

    A vector is of one group, and a group's vectors are neighbouring lanes', or fewer lanes' than a warp has. The first
    of these lanes has the group.
    """

    grouped = True
    elements = 1
    floor = NEG_INF_KEY  # dropped elements are not listed

    def __init__(self, *facts):
        Layout.__init__(self, *facts)
        if not self.ordered:
            self.depth = 1  # nothing is queued, and there is the more L1 cache

    @cute.jit
    def find_window(self, arguments, row_index: Int32) -> Window:
        """The row's window; without lengths and starts in few instructions, since all loads wait for it."""
        log = arguments.group_shift
        base = arguments.input + Int64(row_index) * arguments.row_stride * 4
        length = Int32(cutlass.min(Int64(arguments.width), arguments.max_length))
        if arguments.lengths != Int64(0) or arguments.row_starts != Int64(0) or arguments.next_n != Int32(1):
            row = find_row(arguments, row_index, 4)
            base = row.base
            length = Int32(row.length)
        count = Int32((Uint32(length) + (Uint32(1) << Uint32(log)) - Uint32(1)) >> Uint32(log))
        return Window(base, count, length, log, Int32(0))

    @cute.jit
    def lay_out(self, row: Window, place: Place, mirrored: Boolean) -> Grid:
        """Cuts the row into vectors and says which are this CTA's, as for single scores."""
        vectors = Int32((Uint32(row.length) + Uint32(3)) >> Uint32(2))
        part = Int32(-1)
        if (row.length & 3) != Int32(0):
            part = vectors - 1
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
        aligned = (row.base & Int64(15)) == Int64(0)
        return Grid(row.base, row.length, row.count, row.log - 2, vectors, part, aligned, batches, first, step, limit)

    def element_of(self, grid: Grid, vector: Int32) -> Int32:
        """The group of a vector."""
        return vector >> grid.log

    def leads(self, grid: Grid, vector: Int32) -> Boolean:
        """Whether a vector is its group's first."""
        return (vector & ((Int32(1) << grid.log) - 1)) == Int32(0)

    @cute.jit
    def load_vectors(self, grid: Grid, vectors, wanted):
        """Loads some of this thread's vectors: those that are wanted; other scores and those after the row are -inf.

        A thread that has the last vector, if that is not whole, or a row that is not aligned loads score by score.
        """
        addresses = [grid.base + Int64(vector) * 16 for vector in vectors]
        by_score = not grid.aligned
        for vector in vectors:
            by_score = by_score or vector == grid.part
        words = [(Uint32(NEG_INF),) * 4 for _ in vectors]
        if by_score:
            counts = [Int32(0) for _ in vectors]
            for i in cutlass.range_constexpr(len(vectors)):
                if wanted[i]:
                    counts[i] = grid.length - vectors[i] * 4
            words = [kops.load_scores(address, count) for address, count in zip(addresses, counts, strict=True)]
        else:
            words = [ops.load_words(address, want, NEG_INF) for address, want in zip(addresses, wanted, strict=True)]
        return words

    @cute.jit
    def load_vector(self, grid: Grid, vector: Int32, wanted: Boolean):
        """The scores of a vector, if it is wanted."""
        return self.load_vectors(grid, [vector], [wanted])[0]

    @cute.jit
    def load_batch(self, grid: Grid, at: Int32, stride: Int32, wanted: Boolean):
        """Loads this thread's vectors of a batch: every `stride`-th from `at` on."""
        vectors = [at + j * stride for j in range(self.vectors)]
        return self.load_vectors(grid, vectors, [wanted and vector < grid.limit for vector in vectors])

    def best_of(self, words) -> Uint32:
        """The best of a vector's scores."""
        return kops.better(kops.better(words[0], words[1], True), kops.better(words[2], words[3], True), True)

    @cute.jit
    def fold(self, grid: Grid, bests):
        """The best scores of the groups of some vectors, each lane's in a group; all lanes of the warp take part."""
        for i in cutlass.range(grid.log, unroll=1):
            others = [cute.arch.shuffle_sync_bfly(best, Int32(1) << i) for best in bests]
            bests = [kops.better(best, other, True) for best, other in zip(bests, others, strict=True)]
        return bests

    @cute.jit
    def keys_of(self, grid: Grid, vector: Int32, wanted: Boolean, words):
        """The key of a vector's group in its first lane, and whether this is that lane, as a bit.

        All lanes of the warp take part, with neighbouring vectors from a group's first on.
        """
        best = self.fold(grid, [self.best_of(words)])[0]
        return [kops.key_of(best, True)], Uint32(wanted and self.leads(grid, vector))

    # ------------------------------------------------------------------------------------------------------- sampling

    @cute.jit
    def members(self, grid: Grid, k: Int32) -> Int32:
        """Of how many groups a sample is the best."""
        members = Int32(1)
        if Int32(4) << grid.log <= Int32(PAIRED) and Float32(k) * Float32(2 / MOST) <= Float32(grid.count):
            members = Int32(2)
        return members

    @cute.jit
    def load_sample(self, place: Place, grid: Grid, k: Int32, attempt: Int32):
        """Loads the groups of this lane's sample: one, or one from each half of the row, at random in its stratum.

        Small groups are neighbours in the samples of lanes four apart: what memory reads in one go.

        Returns:
            The best of what was waited for, and four vectors that are on their way.
        """
        best = Uint32(NEG_INF)
        loaded = [(Uint32(NEG_INF),) * 4 for _ in range(4)]
        if place.warp < Int32(self.samplers) and grid.count > Int32(UNSAMPLED):
            members = self.members(grid, k)
            log = cutlass.max(Int32(2) - grid.log, Int32(0))
            band = Uint32(grid.length >> (grid.log + 2)) >> Uint32(log + members - 1)  # units of whole groups
            number = (place.rank * self.samplers + place.warp) * 32 + place.lane
            within = (number >> 2) & ((Int32(1) << log) - 1)
            units = [self.unit_of(number, log, j, band, attempt) for j in range(2)]
            firsts = [((unit << log) + within) << grid.log for unit in units]  # vectors
            size = Int32(1) << grid.log
            vectors = []
            wanted = []
            for i in cutlass.range_constexpr(4):
                vector = firsts[0] + i
                want = Int32(i) < size
                if Int32(i) >= size and Int32(i) < 2 * size:
                    vector = firsts[1] + (i - size)
                    want = members > Int32(1)
                vectors.append(vector)
                wanted.append(want)
            for at in cutlass.range(4, size, 4, unroll=1):
                words = self.load_vectors(grid, [vector + at for vector in vectors], wanted)
                for some in words:
                    best = kops.better(best, self.best_of(some), True)
            loaded = self.load_vectors(grid, vectors, wanted)
        return [best, *loaded]

    @cute.jit
    def send_sample(self, shared: Shared, place: Place, members: Int32, loaded):
        """Puts this warp's samples into the shared memory of every CTA: of each lane one, from a vector of its own."""
        best = loaded[0]
        for words in loaded[1:]:
            best = kops.better(best, self.best_of(words), True)
        Sample.send_sample(self, shared, place, Int32(1), [(best,) * 4] * 4)

    # ------------------------------------------------------------------------------------------------------ filtering

    @cute.jit
    def filter_row(self, shared: Shared, place: Place, grid: Grid, words, low: Uint32, shift: Int32):
        """Reads the row: groups above a cutoff go into the list and the bins, groups equal to it are counted in bin 0.

        As for single scores, but nothing is queued: a vector that passes has one key, which is there.
        """
        equals = Int32(0)
        batch = Int32(0)
        batches = grid.batches
        at = self.vector_of(place, grid, Int32(0), 0)
        stride = self.stride(grid)
        while batch < batches:
            bests = self.fold(grid, [self.best_of(one) for one in words])
            keys = [kops.key_of(best, True) for best in bests]
            vectors = [at + j * stride for j in range(self.vectors)]
            batch = batch + 1
            at = at + grid.step * self.warps
            words = self.load_batch(grid, at, stride, batch < batches)
            kept = Uint32(0)
            equal = Uint32(0)
            for j in cutlass.range_constexpr(self.vectors):
                if self.leads(grid, vectors[j]) and vectors[j] < grid.limit:
                    kept = kops.or_if_above(kept, keys[j], low, 1 << j)
                    equal = ops.or_if_equal(equal, keys[j], low, 1 << j)
            equals = equals + Int32(cute.arch.popc(equal))
            if self.list_keys(shared, place, grid, (keys, vectors, kept), low, shift) > Int32(self.capacity):
                batch = batches
                batches = Int32(-1)
        equals = cute.arch.warp_redux_sync(equals, "add")
        if place.lane == Int32(0):
            cute.arch.atomic_add(shared.sBin.iterator, equals)
            if batches == Int32(-1):
                cute.arch.atomic_add(shared.sBin.iterator + (BINS - 1), Int32(0x10000))

    @cute.jit
    def list_keys(self, shared: Shared, place: Place, grid: Grid, passing, low: Uint32, shift: Int32) -> Int32:
        """Puts keys of a warp into the list and the bins.

        Args:
            shared: the list and the bins.
            place: this thread.
            grid: the row.
            passing: the thread's keys, their vectors, and which of them pass, as bits.
            low: the cutoff.
            shift: 2 ** shift keys are counted in a bin.

        Returns:
            How many keys the CTA has found, if the warp has any.
        """
        keys, vectors, kept = passing
        found = Int32(0)
        ballots = [cute.arch.vote_ballot_sync((kept & Uint32(1 << j)) != Uint32(0)) for j in range(self.vectors)]
        total = Int32(0)
        for ballot in ballots:
            total = total + cute.arch.popc(ballot)
        if total > Int32(0):
            position = Int32(0)
            if place.lane == Int32(0):
                position = cute.arch.atomic_add(shared.sCount.iterator, total)
            position = cute.arch.shuffle_sync(position, 0)
            found = position + total
            for j in cutlass.range_constexpr(self.vectors):
                if (kept & Uint32(1 << j)) != Uint32(0):
                    entry = position + cute.arch.popc(ballots[j] & place.below)
                    if entry < Int32(self.capacity):
                        element = Uint32(self.element_of(grid, vectors[j]))
                        shared.sList[entry] = (Uint64(keys[j]) << Uint64(32)) | Uint64(element)
                    cute.arch.atomic_add(shared.sBin.iterator + self.bin_of(keys[j] - low, shift), Int32(1))
                position = position + cute.arch.popc(ballots[j])
        return found
