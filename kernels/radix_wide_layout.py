"""How the `radix_wide` family lays out a row and shared memory; part of `radix_wide_kernel`, where it is explained."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops
from ._cute_rows import Cells, Row, write_cell

THREADS = 1024
WARPS = 32
ROUNDS = 4  # vectors of a thread in a tile
BINS = 256
CAPACITY = 8192  # entries of the list


class Grid(NamedTuple):
    """A row's scores as 16-byte vectors. A slot is one score; those before `skew` and from `end` on are not its."""

    base: Int64  # address of the first score
    vectors_at: Int64  # address of vector 0, 16-byte aligned
    shift: Int32  # slots from `vectors_at` to `base`
    skew: Int32  # slots of vector 0 before the row: `shift`, or 0 where vectors are shifted into place (`grouped`)
    slots: Int32  # scores of the row
    end: Uint32  # skew + slots
    vectors: Int32
    first_whole: Int32  # vectors first_whole .. end_whole - 1 can be loaded whole
    end_whole: Int32
    tiles: Int32
    leading: Uint32  # which slots of this lane's vectors begin a group
    group_shift: Int32


class Shared(NamedTuple):
    """Shared memory."""

    sCount: cute.Tensor  # (BINS * 32) Int32, lane l of bin b at b * 32 + l
    sList: cute.Tensor  # (CAPACITY) Uint64, score << 32 | index
    sTotal: cute.Tensor  # (BINS) Int32, best bin first
    sScan: cute.Tensor  # (2 * WARPS * 4) Uint32, packed counts of each warp, double-buffered
    sSeen: cute.Tensor  # (WARPS * 4) Uint32: differing bits, all-ones bits, any-ones bits of each warp


class Cutoff(NamedTuple):
    """Where the k-th best lies: among `inside` elements with the top `known` bits of `prefix`; `above` are better."""

    prefix: Uint32
    known: Int32
    need: Int32  # of those inside
    inside: Int32
    above: Int32


class Cut(NamedTuple):
    """What is taken: scores with score - base <= span; of those equal to `tie`, ranks first .. first + need - 1."""

    base: Uint32
    span: Uint32
    tie: Uint32
    first: Int32
    need: Int32


class Layout:
    """Facts of a variant; a row's vectors, loaded and reduced to elements."""

    threads = THREADS
    shared_bytes = 4 * BINS * 32 + 8 * CAPACITY + 4 * BINS + 4 * 2 * WARPS * 4 + 4 * WARPS * 4  # see `allocate`

    def __init__(self, dtype: str, grouped: bool):
        self.dtype = dtype
        self.grouped = grouped
        self.size = 4 if dtype == ops.F32 else 2
        self.per_vector = 16 // self.size
        self.log_per_vector = self.per_vector.bit_length() - 1
        self.bits = 8 * self.size
        self.whole = (1 << self.per_vector) - 1

    @cute.jit
    def allocate(self):
        """Lays out shared memory and clears the counters."""
        smem = cutlass.memory.SmemAllocator()
        shared = Shared(
            sCount=smem.allocate_tensor(Int32, cute.make_layout(BINS * 32), byte_alignment=128),
            sList=smem.allocate_tensor(Uint64, cute.make_layout(CAPACITY), byte_alignment=128),
            sTotal=smem.allocate_tensor(Int32, cute.make_layout(BINS), byte_alignment=128),
            sScan=smem.allocate_tensor(Uint32, cute.make_layout(2 * WARPS * 4), byte_alignment=128),
            sSeen=smem.allocate_tensor(Uint32, cute.make_layout(WARPS * 4), byte_alignment=128),
        )
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(BINS * 32 // THREADS):
            shared.sCount[tid + i * THREADS] = Int32(0)
        cute.arch.sync_threads()
        return shared

    @cute.jit
    def lay_out(self, arguments, row: Row) -> Grid:
        """Cuts the row into vectors; with `grouped`, they begin at the row's first score even if that is unaligned."""
        tid, _, _ = cute.arch.thread_idx()
        group_shift = Int32(0)
        slots = row.count - row.pinned
        leading = Uint32(self.whole)
        shift = Int32(row.base & Int64(15)) // self.size
        skew = shift
        if const_expr(self.grouped):
            group_shift = arguments.group_shift
            slots = Int32(row.length)
            if row.pinned != Int32(0):
                slots = (row.count - Int32(1)) << group_shift
            skew = Int32(0)
            group = Int32(1) << group_shift
            leading = Uint32(1)
            for step in cutlass.range_constexpr(1, self.per_vector):
                if group <= Int32(step) and (Int32(step) & (group - 1)) == Int32(0):
                    leading = leading | Uint32(1 << step)
            lanes = group // self.per_vector
            if lanes > Int32(1) and (tid & (lanes - 1)) != Int32(0):
                leading = Uint32(0)
        end = Uint32(skew) + Uint32(slots)
        vectors = Int32((end + Uint32(self.per_vector - 1)) // Uint32(self.per_vector))
        first_whole = Int32(0)
        end_whole = Int32((Uint32(shift) + Uint32(slots)) // Uint32(self.per_vector))
        if shift > Int32(0):
            first_whole = Int32(1)
            if const_expr(self.grouped):
                end_whole = end_whole - Int32(1)  # a shifted vector takes the next one's head
        return Grid(
            base=row.base,
            vectors_at=row.base - Int64(shift * self.size),
            shift=shift,
            skew=skew,
            slots=slots,
            end=end,
            vectors=vectors,
            first_whole=first_whole,
            end_whole=end_whole,
            tiles=(vectors + Int32(ROUNDS * THREADS - 1)) // (ROUNDS * THREADS),
            leading=leading,
            group_shift=group_shift,
        )

    @cute.jit
    def load_tile(self, grid: Grid, tile: Int32):
        """Loads this thread's vectors of a tile: ROUNDS lists of 4 canonical words, reduced to group maxima."""
        tid, _, _ = cute.arch.thread_idx()
        fill = ops.NEG_INF_WORD[self.dtype]
        loaded = []
        for j in cutlass.range_constexpr(ROUNDS):
            v = tile * (ROUNDS * THREADS) + j * THREADS + tid
            whole = v >= grid.first_whole and v < grid.end_whole
            loaded.append(ops.load_words(grid.vectors_at + Int64(v) * 16, whole, fill))
        if const_expr(self.grouped):
            if grid.shift != Int32(0):
                loaded = self.shift_tile(grid, tile, loaded)
        vectors = []
        for j in cutlass.range_constexpr(ROUNDS):
            v = tile * (ROUNDS * THREADS) + j * THREADS + tid
            words = self.load_partly(grid, v, loaded[j])
            if const_expr(self.grouped):
                words = self.reduce_groups(grid, words)
            vectors.append([ops.canonical(word, self.dtype) for word in words])
        return vectors

    @cute.jit
    def shift_tile(self, grid: Grid, tile: Int32, loaded):
        """Moves unaligned vectors into place: each is the end of one aligned vector and the head of the next."""
        tid, _, _ = cute.arch.thread_idx()
        shifted = []
        by_two = grid.shift * self.size >= Int32(8)
        by_one = ((grid.shift * self.size) & Int32(4)) != Int32(0)
        by_half = ((grid.shift * self.size) & Int32(2)) != Int32(0)
        for j in cutlass.range_constexpr(ROUNDS):
            v = tile * (ROUNDS * THREADS) + j * THREADS + tid
            whole = v >= grid.first_whole and v < grid.end_whole
            fill = ops.NEG_INF_WORD[self.dtype]
            following = ops.load_words(grid.vectors_at + Int64(v) * 16 + 16, whole, fill)
            words = list(loaded[j]) + list(following)
            words = [words[i + 2] if by_two else words[i] for i in range(6)]
            words = [words[i + 1] if by_one else words[i] for i in range(5)]
            if const_expr(self.size == 2):
                halves = [(words[i] >> Uint32(16)) | (words[i + 1] << Uint32(16)) for i in range(4)]
                words = [halves[i] if by_half else words[i] for i in range(4)]
            shifted.append(tuple(words[:4]))
        return shifted

    @cute.jit
    def load_partly(self, grid: Grid, v: Int32, words):
        """The vector's words; one that reaches outside the row is loaded score by score, from the last to the first."""
        a, b, c, d = words
        if v < grid.vectors and (v < grid.first_whole or v >= grid.end_whole):
            for i in cutlass.range(self.per_vector, unroll=1):
                slot = v * self.per_vector + (self.per_vector - 1 - i) - grid.skew
                score = Uint32(ops.NEG_INF_WORD[self.dtype] & ((1 << self.bits) - 1))
                if Uint32(slot) < Uint32(grid.slots):
                    score = ops.load_score(grid.base + Int64(slot) * self.size, self.dtype)
                if const_expr(self.size == 4):
                    a, b, c, d = score, a, b, c
                else:
                    d = (d << Uint32(16)) | (c >> Uint32(16))
                    c = (c << Uint32(16)) | (b >> Uint32(16))
                    b = (b << Uint32(16)) | (a >> Uint32(16))
                    a = (a << Uint32(16)) | score
        return a, b, c, d

    @cute.jit
    def reduce_groups(self, grid: Grid, words):
        """Puts the maximum of each group into the slot where it begins; other slots hold what is not looked at."""
        a, b, c, d = words
        group = Int32(1) << grid.group_shift
        per_word = const_expr(4 // self.size)
        if group > Int32(per_word):
            a = ops.max_nan(a, b, self.dtype)
            c = ops.max_nan(c, d, self.dtype)
        if group > Int32(2 * per_word):
            a = ops.max_nan(a, c, self.dtype)
        for step in cutlass.range_constexpr(5):
            if group > Int32(self.per_vector << step):
                a = ops.max_nan(a, cute.arch.shuffle_sync_down(a, 1 << step), self.dtype)
        if const_expr(self.size == 2):
            a = ops.max_nan(a, ops.swap_halves(a), self.dtype)
            b = ops.max_nan(b, ops.swap_halves(b), self.dtype)
            c = ops.max_nan(c, ops.swap_halves(c), self.dtype)
            d = ops.max_nan(d, ops.swap_halves(d), self.dtype)
        return a, b, c, d

    @cute.jit
    def valid_slots(self, grid: Grid, v: Int32) -> Uint32:
        """Which slots of a vector are elements of the row, as bits."""
        bits = Uint32(0)
        if v < grid.vectors:
            slots = cutlass.min(grid.end - Uint32(v) * Uint32(self.per_vector), Uint32(self.per_vector))
            bits = ((Uint32(1) << slots) - Uint32(1)) & grid.leading
            if v == Int32(0):
                bits = bits & (Uint32(0xFFFFFFFF) << Uint32(grid.skew))
        return bits

    @cute.jit
    def scan_lanes(self, value):
        """Inclusive sum over the lanes of a warp."""
        tid, _, _ = cute.arch.thread_idx()
        lane = tid & 31
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(value, 1 << i)
            value = value + other if lane >= Int32(1 << i) else value
        return value

    @cute.jit
    def pick(self, values, which: Int32):
        """One of four values by a number known only at run time, without an array in local memory."""
        even = values[2] if which >= Int32(2) else values[0]
        odd = values[3] if which >= Int32(2) else values[1]
        return odd if (which & 1) != Int32(0) else even

    @cute.jit
    def pick_score(self, words, slot: Int32) -> Uint32:
        """The score in a slot of a vector, top-aligned."""
        score = self.pick(words, slot >> (2 - self.size // 2))
        if const_expr(self.size == 2):
            score = score & Uint32(0xFFFF0000) if (slot & 1) != Int32(0) else score << Uint32(16)
        return score

    @cute.jit
    def value_of(self, cells: Cells, row: Row, element: Int32, score: Uint32) -> Uint32:
        """The bits that are written as an element's value: the input's own, or the group's maximum."""
        value = Uint32(0)
        if const_expr(self.grouped):
            value = ops.value_bits(score, self.dtype)
        elif cells.values != Int64(0):
            value = ops.load_score(row.base + Int64(element) * self.size, self.dtype)
        return value

    @cute.jit
    def write(self, arguments, cells: Cells, row: Row, position: Int32, element: Int32, value: Uint32):
        """Writes one cell: an element, or -1, and its value."""
        write_cell(arguments, cells, row, position, element, value, (self.size, self.dtype))
