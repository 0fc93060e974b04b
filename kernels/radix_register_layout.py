"""How the `radix_register` family lays out a row and shared memory; explained in `radix_register_kernel`."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from . import _cute_ops as ops
from . import radix_register_ops as rops
from ._cute_flags import DROP_NEG_INF, LARGEST, ORDER_VALUE, PIN_NEWEST, POOLED, TIES_HIGHEST
from ._cute_rows import Row, has
from .radix_register_shape import BINS, FEW, PASSES, Shape
from .radix_wide_layout import Layout as WideLayout

TURN = 72  # vectors; whole cache lines, but no whole warps
LOG_BINS = 11
STRAIGHT_SCORES = 4096  # longer rows lost more by the code than they gained


class Place(NamedTuple):
    """This thread, and where its vectors are: number ((first + j * turn) & mask) + j * step for j < rounds."""

    tid: Int32
    warp: Int32
    lane: Int32
    first: Int32
    step: Int32
    rounds: Int32
    turn: Int32
    mask: Int32

    def number(self, j):
        """Which vector this thread's j-th is, if it has as many."""
        return ((self.first + j * self.turn) & self.mask) + j * self.step


class Memory(NamedTuple):
    """A row's vectors by what is known without its length."""

    base: Int64  # address of the window's first score
    vectors_at: Int64  # address of vector 0, 16-byte aligned, at or before it
    start: Int32  # scores of the row before the window
    first_whole: Int32  # vectors first_whole .. end_whole - 1 lie in the row's memory
    end_whole: Int32
    vectors: Int32  # that the longest window here would have


class Shared(NamedTuple):
    """Shared memory."""

    sBins: cute.Tensor  # (2, BINS) Int32: two buffers, a count each
    sList: cute.Tensor  # (capacity * entry words) Uint32: selected elements, with their keys where asked for
    sBefore: cute.Tensor  # (threads) Int32: what each thread's bins have before them in their warp's part
    sParts: cute.Tensor  # (PASSES, 32) Int32: what each warp's part of the bins has before it
    sFew: cute.Tensor  # (FEW + 1) Uint32: how many keys were gathered, and they
    sTaken: cute.Tensor  # (32) Uint32: what each warp takes, and ties in the upper half; without order all in [0]
    sBests: cute.Tensor  # (2, warps) Uint32: the best key of each warp, and the worst of its groups' bests; 16 bits


class Layout(WideLayout):
    """Facts of a variant; a row's vectors in registers, as keys."""

    def __init__(self, dtype: str, grouped: bool, threads: int, vectors: int, recent: bool):
        super().__init__(dtype, grouped)
        self.threads = threads
        self.warps = threads // 32
        self.rounds = vectors  # vectors a thread
        self.by_bins = self.size == 4 and vectors <= 4  # beside more vectors than that its registers spill
        self.recent = recent  # sm_90 and up: packed comparisons, dependent launches
        shape = Shape(threads, vectors)
        self.capacity = shape.list_capacity(self.size)
        self.shared_bytes = shape.shared_bytes(self.size)
        self.entry_words = self.size // 2
        self.none = (1 << self.bits) - 1  # no element's key
        self.near = dtype == ops.BF16 or (dtype == ops.F16 and vectors == 1)  # keys are counted once
        self.straight = threads * vectors * self.per_vector <= STRAIGHT_SCORES  # elements may be written without a list
        self.first_shift = self.bits - LOG_BINS
        self.near_shift = max(self.first_shift - LOG_BINS + 1, 0)
        self.near_reach = BINS << self.near_shift
        self.residents = max(1, 1024 // threads)

    @cute.jit
    def start(self, tid: Int32) -> Shared:
        """Lays out shared memory and clears the bins; a barrier must follow before they are used."""
        smem = cutlass.memory.SmemAllocator()
        shared = Shared(
            sBins=smem.allocate_tensor(Int32, cute.make_layout(2 * BINS), byte_alignment=128),
            sList=smem.allocate_tensor(Uint32, cute.make_layout(self.capacity * self.entry_words), byte_alignment=128),
            sBefore=smem.allocate_tensor(Int32, cute.make_layout(self.threads), byte_alignment=128),
            sParts=smem.allocate_tensor(Int32, cute.make_layout(PASSES * 32), byte_alignment=128),
            sFew=smem.allocate_tensor(Uint32, cute.make_layout(FEW + 1), byte_alignment=128),
            sTaken=smem.allocate_tensor(Uint32, cute.make_layout(32), byte_alignment=128),
            sBests=smem.allocate_tensor(Uint32, cute.make_layout(2 * self.warps), byte_alignment=128),
        )
        address = Uint32(shared.sBins.iterator.toint()) + Uint32(tid * 8)
        for i in cutlass.range_constexpr(BINS // self.threads):
            rops.store_zeros(address + Uint32(i * self.threads * 8))
        if tid < Int32(PASSES * 32):
            shared.sParts[tid] = Int32(0)
        if tid < Int32(32):
            shared.sTaken[tid] = Uint32(0)
        if tid == Int32(0):
            shared.sFew[0] = Uint32(0)
        return shared

    @cute.jit
    def find_memory(self, arguments, row: Int32, bound: Int32) -> Memory:
        """Where the row's window begins and which of its vectors can be loaded whole; its length is not asked for."""
        base = arguments.input + Int64(row) * (arguments.row_stride * self.size)
        start = Int32(0)
        if arguments.row_starts != Int64(0):
            start = ops.load_int32(arguments.row_starts + Int64(row) * 4)
            start = cutlass.min(cutlass.max(start, Int32(0)), arguments.width)
            base = base + Int64(start) * self.size
        skew = (Int32(base) & 15) >> (self.size // 2)
        most = bound
        if has(arguments.flags, POOLED):
            shift = Uint32(arguments.group_shift)
            most = Int32((Uint32(bound) + ((Uint32(1) << shift) - Uint32(1))) >> shift)
        left = Uint32(arguments.width - start)
        whole = (Uint32(skew) + left) >> Uint32(self.log_per_vector)
        if const_expr(self.grouped):
            if skew > Int32(0) and whole > Uint32(0):
                whole = whole - Uint32(1)  # a shifted vector takes the next one's head
        most = Int32(cutlass.min(Uint32(most), left))
        vectors = Int32(Uint32(skew + most + (self.per_vector - 1)) >> Uint32(self.log_per_vector))
        return Memory(
            base=base,
            vectors_at=base - Int64(skew * self.size),
            start=start,
            first_whole=Int32(1) if skew > start else Int32(0),
            end_whole=Int32(cutlass.min(whole, Uint32(vectors))),
            vectors=vectors,
        )

    @cute.jit
    def find_window(self, arguments, row: Int32, bound: Int32, memory: Memory) -> Row:
        """Clamps the row's window to its members and counts its elements (contract, rule 6).

        As `_cute_rows.find_row`, for a row of a single job and no more than `bound` members.
        """
        flags = arguments.flags
        limit = bound
        if not has(flags, POOLED):
            limit = cutlass.min(bound, arguments.width - memory.start)
        length = limit
        if arguments.next_n > Int32(1):
            drafts = Int64(bound)
            if arguments.lengths != Int64(0):
                drafts = Int64(ops.load_int32(arguments.lengths + Int64(row // arguments.next_n) * 4))
            else:
                drafts = Int64(arguments.width) << Int64(arguments.group_shift)
                if not has(flags, POOLED):
                    drafts = Int64(arguments.width)
            drafts = drafts - Int64(arguments.next_n) + Int64(row % arguments.next_n) + 1
            length = Int32(cutlass.max(cutlass.min(drafts, Int64(limit)), Int64(0)))
        elif arguments.lengths != Int64(0):
            length = ops.load_int32(arguments.lengths + Int64(row) * 4)
            length = cutlass.max(cutlass.min(length, limit), Int32(0))
        count = (length + ((Int32(1) << arguments.group_shift) - 1)) >> arguments.group_shift
        pinned = Int32(0)
        if has(flags, PIN_NEWEST) and count > Int32(0):
            pinned = Int32(1)
        return Row(
            base=memory.base,
            length=Int64(length),
            count=count,
            pinned=pinned,
            largest=has(flags, LARGEST),
            highest=has(flags, TIES_HIGHEST),
            drop=has(flags, DROP_NEG_INF),
            by_value=has(flags, ORDER_VALUE),
        )

    @cute.jit
    def find_place(self, tid: Int32, memory: Memory, ordered: Boolean) -> Place:
        """Which vectors this thread takes. If `ordered`, warps follow each other in the row; else threads do.

        Either way a warp's loads are of 32 vectors side by side, but where threads begin again in the middle of a warp.
        Threads take turns: of rows with a period that divides what they read in a round, some threads, or some warps,
        would have all that is taken, and the bests of groups would be alike.
        """
        warp, lane = tid >> 5, tid & 31
        rounds = Int32(Uint32(memory.vectors + (self.threads - 1)) >> Uint32(self.threads.bit_length() - 1))
        first, step = tid, Int32(self.threads)
        turn, mask = Int32(TURN if self.rounds > 1 else 0), Int32(self.threads - 1)
        if ordered:
            first, step = warp * (rounds * 32) + lane, Int32(32)
            turn, mask = Int32(0), Int32(-1)
        return Place(tid, warp, lane, first, step, rounds, turn, mask)

    @cute.jit
    def load(self, memory: Memory, place: Place):
        """Loads this thread's vectors that lie whole in the row's memory: what is past the length is not used."""
        loaded = []
        for j in cutlass.range_constexpr(self.rounds):
            v = self.number(memory, place, j)
            whole = v >= memory.first_whole and v < memory.end_whole
            loaded.append(ops.load_words(memory.vectors_at + Int64(v) * 16, whole, 0))
        return loaded

    @cute.jit
    def number(self, memory: Memory, place: Place, j: cutlass.Constexpr[int]) -> Int32:
        """Which vector this thread's j-th is; one past the last if there is none."""
        v = place.number(j)
        if const_expr(j > 0):
            v = v if Int32(j) < place.rounds else memory.vectors
        return v

    @cute.jit
    def keys_of(self, grid, memory: Memory, place: Place, loaded, largest: Boolean):
        """The words of the keys of this thread's vectors: `rounds` lists of 4."""
        if const_expr(self.grouped):
            if grid.shift != Int32(0):
                loaded = self.shift_vectors(grid, memory, place, loaded)
        flip, bias = rops.key_flip(largest, self.dtype), rops.key_bias(largest, self.dtype)
        keys = []
        for j in cutlass.range_constexpr(self.rounds):
            v = self.number(memory, place, j)
            words = self.load_edge(grid, memory, v, loaded[j])
            if const_expr(self.grouped):
                words = self.reduce_groups(grid, self.cut_off(grid, v, words))
            words = [rops.word_keys(word, flip, bias, self.dtype) for word in words]
            keys.append(self.mask_keys(grid, v, words))
        return keys

    @cute.jit
    def shift_vectors(self, grid, memory: Memory, place: Place, loaded):
        """Moves unaligned vectors into place: each is the end of one aligned vector and the head of the next."""
        shifted = []
        by_two = grid.shift * self.size >= Int32(8)
        by_one = ((grid.shift * self.size) & Int32(4)) != Int32(0)
        by_half = ((grid.shift * self.size) & Int32(2)) != Int32(0)
        for j in cutlass.range_constexpr(self.rounds):
            v = self.number(memory, place, j)
            whole = v >= memory.first_whole and v < memory.end_whole
            following = ops.load_words(memory.vectors_at + Int64(v) * 16 + 16, whole, 0)
            words = list(loaded[j]) + list(following)
            words = [words[i + 2] if by_two else words[i] for i in range(6)]
            words = [words[i + 1] if by_one else words[i] for i in range(5)]
            if const_expr(self.size == 2):
                halves = [(words[i] >> Uint32(16)) | (words[i + 1] << Uint32(16)) for i in range(4)]
                words = [halves[i] if by_half else words[i] for i in range(4)]
            shifted.append(tuple(words[:4]))
        return shifted

    @cute.jit
    def load_edge(self, grid, memory: Memory, v: Int32, words):
        """The vector's words; one that reaches outside the row's memory is loaded score by score, all at once."""
        a, b, c, d = words
        if v < grid.vectors and (v < memory.first_whole or v >= memory.end_whole):
            scores = []
            for i in cutlass.range_constexpr(self.per_vector):
                slot = v * self.per_vector + i - grid.skew
                inside = Uint32(slot) < Uint32(grid.slots)
                scores.append(rops.load_score_if(grid.base + Int64(slot) * self.size, inside, self.dtype))
            if const_expr(self.size == 2):
                scores = [scores[i] | (scores[i + 1] << Uint32(16)) for i in range(0, 8, 2)]
            a, b, c, d = scores
        return a, b, c, d

    @cute.jit
    def cut_off(self, grid, v: Int32, words):
        """Makes scores past the row's end -inf, so that they do not count in the last group."""
        a, b, c, d = words
        slots = Int32(grid.end) - v * self.per_vector
        if slots < Int32(self.per_vector):
            bits = (Uint32(1) << Uint32(cutlass.max(slots, Int32(0)))) - Uint32(1)
            fill = Uint32(ops.NEG_INF_WORD[self.dtype])
            past = [self.spread(bits, i) for i in range(4)]
            a = (a & ~past[0]) | (fill & past[0])
            b = (b & ~past[1]) | (fill & past[1])
            c = (c & ~past[2]) | (fill & past[2])
            d = (d & ~past[3]) | (fill & past[3])
        return a, b, c, d

    @cute.jit
    def mask_keys(self, grid, v: Int32, words):
        """Makes what is no element of the row no element's key."""
        a, b, c, d = words
        bits = self.valid_slots(grid, v)
        if bits != Uint32(self.whole):
            a = a | self.spread(bits, 0)
            b = b | self.spread(bits, 1)
            c = c | self.spread(bits, 2)
            d = d | self.spread(bits, 3)
        return [a, b, c, d]

    @cute.jit
    def spread(self, bits: Uint32, word: cutlass.Constexpr[int]) -> Uint32:
        """Ones where a word's scores have no bit."""
        if const_expr(self.size == 4):
            result = ((bits >> Uint32(word)) & Uint32(1)) - Uint32(1)
        else:
            low = (bits >> Uint32(2 * word)) & Uint32(1)
            high = (bits >> Uint32(2 * word + 1)) & Uint32(1)
            result = ((low ^ Uint32(1)) * Uint32(0xFFFF)) | ((high ^ Uint32(1)) * Uint32(0xFFFF0000))
        return result

    def tops(self, words):
        """Top-aligned keys of some words, in the order of their slots."""
        return ops.top_aligned(words, self.dtype)

    def flat(self, keys):
        """All words of a thread's keys."""
        return [word for words in keys for word in words]

    @cute.jit
    def pick_of(self, values, which: Int32):
        """One of some values by a number known only at run time, without an array in local memory."""
        result = values[0]
        if const_expr(len(values) > 1):
            half = 1 << ((len(values) - 1).bit_length() - 1)
            upper = self.pick_of(values[half:], which)
            result = self.pick_of(values[:half], which)
            result = upper if (which & half) != Int32(0) else result
        return result
